"""The Pallas kernels for TPU in JAX's interpreter of TPUs, which has their memories, copies, and cores; it finds races.

Pallas' plain interpreter (`interpret=True`), in which the other tests run the kernels, computes block after block in
one memory: there an access that nothing orders gives the right result.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_attention
import test_decode_attention as decoding
from api import quantize
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from gspax.model.kernels import attention, decode_attention

CORES = 2  # as the chips have whose kernels are split over two cores


@pytest.fixture
def interpret():
    yield pltpu.InterpretParams(detect_races=True, num_cores_or_threads=CORES)
    pltpu.reset_tpu_interpret_mode_state()


def raced():
    """Whether the last kernels had a race; the state is cleared."""
    found = interpreter.races.races_found
    pltpu.reset_tpu_interpret_mode_state()
    return found


def decode(interpret, dtype=jnp.float32, *, int8=False):
    """The context of slots that attend to 20 positions in blocks of 8, and what it should be."""
    q, *cache = decoding.slots(dtype=dtype)
    k, v = (quantize(x, axes=(-1,)) if int8 else x for x in cache)
    bounds = jnp.asarray(decoding.START), jnp.asarray(decoding.STOP)
    return jax.block_until_ready(decode_attention.decode_attention(q, k, v, *bounds, interpret=interpret))[0]


@pytest.mark.parametrize("int8", [False, True])
def test_decode_attention_has_no_race(interpret, int8, monkeypatch):
    monkeypatch.setattr(decode_attention, "KERNEL_BLOCK", 8)
    got = decode(interpret, int8=int8)
    assert not raced()
    np.testing.assert_allclose(got, decode(True, int8=int8), atol=2e-6)


def test_rows_that_share_a_result_are_a_race(interpret, monkeypatch):
    """The rows are split over the cores; here all of them write the block of the first."""
    pl, tpu = decode_attention.unstable.pallas()

    def block_spec(shape, index):
        return pl.BlockSpec(shape, (lambda b, *_: (0, 0, 0, 0)) if index.__name__ == "own_row" else index)

    shared = SimpleNamespace(**vars(pl) | {"BlockSpec": block_spec})
    monkeypatch.setattr(decode_attention.unstable, "pallas", lambda: (shared, tpu))
    decode(interpret)
    assert raced()


def test_splash_attention_has_no_race(interpret):
    """Row by row: the interpreter does not take the axis that `jax.vmap` adds to the kernel's grid."""
    arrays, weight, segment_BT = test_attention.rows(B=1, T=200, N=4, K=2, H=64)
    segment_S = jnp.pad(segment_BT[0], (0, 56))

    def value_and_gradients(how):
        tables = attention.splash_masks(200, 1, 4, 50, interpret=how)

        def total(*arrays):
            heads_first = (jnp.pad(x[0], ((0, 56), (0, 0), (0, 0))).swapaxes(0, 1) for x in arrays)
            context_NTH = tables(*heads_first, segment_ids=attention.splash.SegmentIds(segment_S, segment_S))
            return (context_NTH.swapaxes(0, 1)[:200] * weight[0]).sum(), context_NTH

        return jax.block_until_ready(jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arrays))

    got = value_and_gradients(interpret)
    assert not raced()
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got, value_and_gradients(True))
