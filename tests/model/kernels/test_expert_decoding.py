"""Experts of a decoding step, sharded over devices, against all experts on one device, for each exchange."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import quantize, sort_keys
from test_expert_ffn import with_biases
from test_expert_parallel import ROUTINGS, ROWS, A, E, K, N, X, assert_close, emulated, expert_ffn, make_case
from test_expert_parallel import on_mesh as mapped

from gspax.model.kernels import expert_parallel as module

EXCHANGES = {"gathered": module.gathered, "to_experts": partial(module.to_experts, exchange=emulated)}


def on_mesh(exchange):
    return jax.jit(mapped(partial(exchange, axis="expert"), ROWS))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    monkeypatch.setattr(module, "DECODING_CAPACITY_FACTOR", 0.5)  # several rounds even for an even routing
    monkeypatch.setattr(module, "DECODING_EXTRA_ROWS", 2)
    assert module.buffer_rows((N, A), X, K, capacity_factor=0.5, extra_rows=2, tile=16) == 16


@pytest.fixture(autouse=True)
def empty_is_nan(monkeypatch):
    """Memory that nothing was received into has any values, so no result may depend on them."""
    monkeypatch.setattr(module.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))


@pytest.mark.parametrize("few", [1, K])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_agrees_with_all_experts_on_one_device(exchange, few, monkeypatch):
    monkeypatch.setattr(module, "FEW_EXPERTS", few)
    visit = on_mesh(EXCHANGES[exchange])
    for name in ROUTINGS:
        args, _ = make_case(name)
        got, want = visit(*args), expert_ffn(*args)
        assert got.dtype == want.dtype
        assert_close(got, want, 2e-6)


@pytest.mark.parametrize("few", [1, K])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_experts_with_biases_agree_too(exchange, few, monkeypatch):
    monkeypatch.setattr(module, "FEW_EXPERTS", few)
    (x, expert, gate, *weights), _ = make_case("any")
    args = x, expert, gate, *with_biases(weights)
    assert_close(on_mesh(EXCHANGES[exchange])(*args), expert_ffn(*args), 4e-6)


@pytest.mark.parametrize("few", [1, K])
def test_experts_in_8_bits(few, monkeypatch):
    monkeypatch.setattr(module, "FEW_EXPERTS", few)
    (x, expert, gate, *weights), _ = make_case("any")
    quantized = [quantize(w, (1,)) for w in weights]
    visit = on_mesh(module.gathered)
    assert_close(visit(x, expert, gate, *quantized), expert_ffn(x, expert, gate, *quantized), 2e-6)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_garbage_in_dropped_rows_does_not_spread(exchange):
    (x, expert, gate, *weights), _ = make_case("some dropped")
    dropped_N1 = (jnp.arange(len(x)) % 3 == 0)[:, None]
    expert = jnp.where(dropped_N1, E, expert)
    dirty = jnp.where(dropped_N1, 1e30, x), expert, jnp.where(dropped_N1, 1e30, gate), *weights
    visit = on_mesh(EXCHANGES[exchange])
    np.testing.assert_array_equal(visit(*dirty), visit(x, expert, gate, *weights))


def test_bfloat16():
    (x, *rest), _ = make_case("any")
    args = (x.astype(jnp.bfloat16), *rest)
    for exchange in EXCHANGES.values():
        got, want = on_mesh(exchange)(*args), expert_ffn(*args)
        assert got.dtype == want.dtype
        assert_close(got, want, 0.02)


def test_a_buffer_has_room_for_its_share_but_for_no_more_than_can_arrive():
    assert module.buffer_rows((32, 8), 64, 2, capacity_factor=1.25, extra_rows=64, tile=16) == 384
    assert module.buffer_rows((1, 2), 4, 2, capacity_factor=1.25, extra_rows=64, tile=16) == 8


def test_too_many_choices_for_a_sort_key():
    with pytest.raises(ValueError, match="do not fit an int32 sort key"):
        jax.eval_shape(partial(sort_keys, keys=2**20), jax.ShapeDtypeStruct((2**12,), jnp.int32))
