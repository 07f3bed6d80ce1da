"""Masked reductions equal numpy's on the selected entries, give 0 for none, and ignore everything else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspax.losses import masked

REDUCTIONS = [(masked.sum, np.sum), (masked.mean, np.mean), (masked.min, np.min), (masked.max, np.max)]
over_reductions = pytest.mark.parametrize("ours, numpys", REDUCTIONS, ids=("sum", "mean", "min", "max"))

VALUE = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32) - 3  # a maximum of 0 would be wrong
MASK = np.random.default_rng(1).random((4, 6)) < 0.5
MASK[2] = False


@over_reductions
@pytest.mark.parametrize("axis", (None, 0, 1, -1))
def test_reductions_equal_numpy_on_the_selected_entries(ours, numpys, axis):
    got = ours(jnp.asarray(VALUE), jnp.asarray(MASK), axis=axis)
    if axis is None:
        wanted = numpys(VALUE[MASK])
    else:
        value, mask = np.moveaxis(VALUE, axis, 0), np.moveaxis(MASK, axis, 0)
        wanted = [numpys(value[:, i][mask[:, i]]) if mask[:, i].any() else 0 for i in range(value.shape[1])]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert got.dtype == jnp.float32


@over_reductions
@pytest.mark.parametrize("garbage", (np.nan, np.inf, -np.inf))
def test_values_outside_the_mask_affect_neither_value_nor_gradient(ours, numpys, garbage):
    value = jnp.asarray(np.where(MASK, VALUE, np.float32(garbage)))
    both = jax.value_and_grad(lambda x: ours(x, jnp.asarray(MASK), axis=-1).sum())
    for got, wanted in zip(both(value), both(jnp.asarray(VALUE)), strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert np.isfinite(got).all()
    assert not np.asarray(both(value)[1])[~MASK].any()


@over_reductions
def test_an_empty_selection_gives_0(ours, numpys):
    value = jnp.full((2, 3), jnp.nan)
    np.testing.assert_array_equal(ours(value, jnp.zeros((2, 3), bool), axis=-1), [0, 0])
    assert ours(value[:0], jnp.zeros((0, 3), bool)) == 0


@over_reductions
def test_a_selected_nan_propagates(ours, numpys):
    assert np.isnan(ours(jnp.array([1.0, jnp.nan]), jnp.array([True, True])))
