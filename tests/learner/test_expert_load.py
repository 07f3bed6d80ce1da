"""Expert load and the share of changed choices, by hand."""

import jax.numpy as jnp
import numpy as np

from gspax.learner.expert_load import changed_share, expert_load

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
