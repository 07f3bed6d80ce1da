"""Aggregates, terms and their reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspax import losses
from gspax.losses import by_constant, by_sequence, by_token

VALUE = jnp.array([[1.0, 2.0, 6.0], [5.0, 7.0, 9.0], [4.0, 4.0, 4.0]])
MASK = jnp.array([[True, True, False], [False, False, True], [False, False, False]])


def test_by_sequence_gives_every_non_empty_row_the_same_weight():
    value, weight = by_sequence(VALUE, MASK)
    np.testing.assert_array_equal(value, [1.5, 9, 0])
    np.testing.assert_array_equal(weight, [1, 1, 0])
    gradient = jax.grad(lambda x: by_sequence(x, MASK)[0].sum())(VALUE)
    np.testing.assert_array_equal(gradient, [[0.5, 0.5, 0], [0, 0, 1], [0, 0, 0]])


def test_by_token_gives_every_token_the_same_weight():
    value, weight = by_token(VALUE, MASK)
    np.testing.assert_array_equal(value, [3, 9, 0])
    np.testing.assert_array_equal(weight, [2, 1, 0])
    gradient = jax.grad(lambda x: by_token(x, MASK)[0].sum())(VALUE)
    np.testing.assert_array_equal(gradient, MASK)


def test_by_constant_sums_over_tokens_and_weighs_sequences():
    value, weight = by_constant(VALUE, MASK)
    np.testing.assert_array_equal(value, [3, 9, 0])
    np.testing.assert_array_equal(weight, [1, 1, 0])
    np.testing.assert_array_equal(by_constant(VALUE, MASK, length=4)[0], [0.75, 2.25, 0])


@pytest.mark.parametrize("aggregate", (by_sequence, by_token, by_constant))
@pytest.mark.parametrize("segments", (None, jnp.ones((3, 3), jnp.int32)), ids=("rows", "packed"))
def test_values_outside_the_mask_never_matter(aggregate, segments):
    garbage = jnp.where(MASK, VALUE, jnp.nan)
    for value in (VALUE, garbage):
        numerator = jax.value_and_grad(lambda x: aggregate(x, MASK, segments)[0].sum())
        jax.tree.map(np.testing.assert_array_equal, numerator(value), numerator(VALUE))


PACKED = jnp.array([[1.0, 2.0, 6.0, 8.0, 5.0], [7.0, 9.0, 1.0, 1.0, 1.0]])
SEGMENTS = jnp.array([[2, 1, 2, 0, 3], [1, 1, 1, 2, 0]], jnp.int32)
PACKED_MASK = jnp.array([[True, True, True, True, False], [True, True, False, False, True]])


@pytest.mark.parametrize(
    "aggregate, value, weight",
    (
        (by_sequence, [3.5 + 2, 8], [2, 1]),
        (by_token, [9, 16], [3, 2]),
        (by_constant, [9, 16], [2, 1]),
    ),
)
def test_sequences_of_a_packed_row_are_summed(aggregate, value, weight):
    """Segment 0 is padding whatever the mask. A segment without a response token is not a sequence."""
    got_value, got_weight = aggregate(PACKED, PACKED_MASK, SEGMENTS)
    np.testing.assert_array_equal(got_value, value)
    np.testing.assert_array_equal(got_weight, weight)


def test_reduce_by_hand():
    terms = losses.Terms(
        value=jnp.array([3.0, -1.0, 0.0]),
        weight=jnp.array([3.0, 0.5, 0.5]),
        metrics={
            "share": losses.Share(jnp.array([1.0, 2.0, 0.0]), jnp.array([4.0, 6.0, 0.0])),
            "spread": losses.Spread(jnp.array([5.0, 7.0, jnp.nan]), jnp.array([True, True, False])),
            "even": losses.Evenness(jnp.array([1e20, 3e20, jnp.nan]), jnp.array([True, True, False])),
        },
    )
    loss, metrics = losses.reduce(terms)
    assert loss == 0.5
    wanted = {"share": 0.3, "spread_mean": 6, "spread_min": 5, "spread_max": 7}
    wanted |= {"even_ess_min": 4**2 / (2 * 10), "even_share_max": 3 / 4}
    assert metrics.keys() == wanted.keys()
    for key, value in wanted.items():
        assert metrics[key] == pytest.approx(value)


def test_reduce_of_an_empty_batch_is_0_with_gradient_0():
    def loss(value):
        nothing = jnp.zeros(2)
        metrics = {"share": losses.Share(nothing, nothing), "spread": losses.Spread(nothing / 0, nothing > 0)}
        return losses.reduce(losses.Terms(value, nothing, metrics))

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.zeros(2))
    assert value == 0 and all(metric == 0 for metric in metrics.values())
    np.testing.assert_array_equal(gradient, 0)


def test_reduce_divides_by_weights_below_1():
    """Not by max(weight, 1)."""
    assert losses.reduce(losses.Terms(jnp.array([1.0]), jnp.array([0.25]), {}))[0] == 4


def test_terms_are_a_pytree_of_rows():
    terms = losses.gspo(VALUE, VALUE, jnp.ones(3), MASK)
    leaves = jax.tree.leaves(terms)
    assert len(leaves) == 2 + 7 * 2
    assert all(leaf.shape in ((3,), (3, 1)) for leaf in leaves)
