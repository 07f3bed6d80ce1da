"""Numbers in 8 bits: the error of rounding, and products that equal those of the numbers they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import Quantized, quantize

from gspax.model.kernels.weights import cast, contract, look_up

KEY = jax.random.key(0)


def dequantized(x, axes):
    return np.asarray(x.values, np.float64) * np.expand_dims(np.asarray(x.scale, np.float64), axes)


@pytest.mark.parametrize("axes", [(0,), (1,), (-1,), (0, 2)])
def test_numbers_are_off_by_at_most_half_a_step(axes):
    x = np.array(jax.random.normal(KEY, (5, 7, 3))) * 10
    x[1] = 0  # a scale of nothing
    got = quantize(jnp.asarray(x), axes)
    step = np.abs(x).max(axis=axes, keepdims=True) / 127
    assert got.values.dtype == jnp.int8 and got.scale.dtype == jnp.float32 and got.shape == x.shape
    assert got.scale.shape == np.squeeze(step, axes).shape
    assert (np.abs(dequantized(got, axes) - x) <= step / 2 * (1 + 1e-5)).all()
    assert np.abs(got.values).max() == 127, "the largest number of a scale is exact"


@pytest.mark.parametrize(
    ("subscripts", "shape", "summed"),
    [("btd,dnh->btnh", (6, 2, 4), (0,)), ("btnh,nhd->btd", (2, 3, 5), (0, 1)), ("btd,vd->btv", (7, 6), (1,))],
)
def test_products_equal_those_of_the_rounded_weight(subscripts, shape, summed):
    x = jax.random.normal(KEY, (2, 3, *(shape[axis] for axis in summed)))
    weight = quantize(jax.random.normal(jax.random.key(1), shape), summed)
    want = np.einsum(subscripts, np.asarray(x, np.float64), dequantized(weight, summed))
    np.testing.assert_allclose(contract(subscripts, x, weight), want, rtol=1e-5, atol=1e-5)
    half = contract(subscripts, x.astype(jnp.bfloat16), weight)
    assert half.dtype == jnp.bfloat16
    assert contract(subscripts, x.astype(jnp.bfloat16), weight, jnp.float32).dtype == jnp.float32


def test_rows_of_a_table():
    table = quantize(jax.random.normal(KEY, (9, 4)), (1,))
    index = jnp.array([[3, 3], [8, 0]])
    got = look_up(table, index, jnp.float32)
    np.testing.assert_allclose(got, dequantized(table, (1,))[np.asarray(index)], rtol=1e-6)


def test_a_cast_leaves_8_bits_alone():
    tree = {"float": jnp.ones(2), "eight": Quantized(jnp.ones(2, jnp.int8), jnp.ones(()))}
    got = cast(tree, jnp.bfloat16)
    assert got["float"].dtype == jnp.bfloat16
    assert got["eight"].values.dtype == jnp.int8 and got["eight"].scale.dtype == jnp.float32
