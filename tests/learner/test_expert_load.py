"""Expert load and the share of changed choices, by hand."""

import jax.numpy as jnp
import numpy as np
from api import changed_by_layer, changed_share, expert_load, router_confidence

# one layer, one row, four tokens, two experts each, of three; the last token is padding (id 3)
IDS = jnp.array([[[[0, 1], [1, 0], [1, 2], [3, 3]]]])


def test_load_is_relative_to_the_layers_mean():
    np.testing.assert_allclose(expert_load(IDS, 3), [[2 / 2, 3 / 2, 1 / 2]])
    two_layers = jnp.concatenate([IDS, jnp.where(IDS < 3, 0, 3)])
    np.testing.assert_allclose(expert_load(two_layers, 3), [[2 / 2, 3 / 2, 1 / 2], [3, 0, 0]])


def test_changed_share_ignores_order_and_padding():
    after = jnp.array([[[[1, 0], [1, 2], [0, 2], [3, 3]]]])  # same, one of two, one of two
    np.testing.assert_allclose(changed_share(IDS, after, 3), 2 / 6)
    assert changed_share(IDS, IDS, 3) == 0


def test_padding_has_no_load_and_no_changes():
    nowhere = jnp.full((1, 1, 2, 2), 3)
    assert changed_share(nowhere, nowhere, 3) == 0
    assert not expert_load(nowhere, 3).any()


def test_changes_by_layer_have_the_share_of_all_as_their_mean():
    after = jnp.array([[[[1, 0], [1, 2], [0, 2], [3, 3]]]])
    before, after = jnp.concatenate([IDS, IDS]), jnp.concatenate([after, IDS])
    np.testing.assert_allclose(changed_by_layer(before, after, 3), [2 / 6, 0])
    np.testing.assert_allclose(changed_share(before, after, 3), 1 / 6)


def test_a_router_that_chooses_all_experts_has_no_margin():
    logits = jnp.array([[[[2.0, 1.0, -1.0], [0.0, 0.0, 0.0]]]])
    valid = jnp.array([[True, False]])
    np.testing.assert_allclose(router_confidence(logits, valid, 1)["margin"], [1.0], rtol=1e-5)
    np.testing.assert_allclose(router_confidence(logits, valid, 2)["margin"], [2.0], rtol=1e-5)
    assert router_confidence(logits, valid, 3)["margin"] == 0
    nothing = router_confidence(logits, jnp.zeros((1, 2), bool), 1)
    assert all(not value.any() for value in nothing.values())
