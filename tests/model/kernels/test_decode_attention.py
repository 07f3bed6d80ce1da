"""Decoding attention: the TPU kernel in Pallas' interpreter, and `segments`, against the reference in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import quantize, references, segments
from jax.sharding import Mesh, PartitionSpec

from gspax.model.kernels import decode_attention as module
from gspax.model.kernels.decode_attention import merge

decode_attention = partial(module.decode_attention, interpret=True)
START = np.array([0, 0, 0, 5, 9, 16, 3])
STOP = np.array([0, 1, 20, 20, 10, 20, 17])  # nothing, one, all, and windows that end anywhere


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "KERNEL_BLOCK", 8)  # of 20 positions: the last block is not full


def slots(B=7, N=6, K=2, T=20, H=8, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (B, N, H), (B, K, T, H), (B, K, T, H)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def by_reference(q, k, v, start_B, stop_B):
    """Context and log-sum-exp in float64."""
    position_T = np.arange(k.shape[2])
    live_BT = (position_T >= start_B[:, None]) & (position_T < stop_B[:, None])
    keys, values = (np.swapaxes(x, 1, 2) for x in (k, v))
    context, logsumexp, _ = references.attention(q[:, None], keys, values, live_BT[:, None])
    return context[:, 0], logsumexp[:, 0]


def run(q, k, v, start_B, stop_B, row_B=None):
    return decode_attention(q, k, v, jnp.asarray(start_B), jnp.asarray(stop_B), row_B)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
def test_each_slot_attends_to_its_live_positions(dtype, tolerance):
    q, k, v = slots(dtype=dtype)
    context, logsumexp = run(q, k, v, START, STOP)
    wanted_context, wanted_logsumexp = by_reference(q, k, v, START, STOP)
    assert context.dtype == logsumexp.dtype == jnp.float32
    np.testing.assert_allclose(context, wanted_context, atol=tolerance)
    np.testing.assert_allclose(logsumexp, wanted_logsumexp, rtol=1e-5, atol=tolerance)
    np.testing.assert_array_equal(context[0], 0)  # nothing is live


def attend_to_segments(q, k, v, start_B, stop_B):
    """`segments.attend` to two segments."""
    cache = []
    for part in (slice(0, 12), slice(12, 20)):
        k_part, v_part = (jax.tree.map(lambda x, part=part: x[:, :, part], x) for x in (k, v))
        cache.append(segments.Segment(jax.tree.map(lambda x: x.swapaxes(2, 3) if x.ndim == 4 else x, k_part), v_part))
    return segments.attend(q, tuple(cache), jnp.asarray(start_B), jnp.asarray(stop_B), kernel=False)


@pytest.mark.parametrize("attend", [run, attend_to_segments])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 3e-2)])
def test_a_cache_in_8_bits_is_the_cache_that_it_stands_for(attend, dtype, tolerance):
    q, *cache = slots(dtype=dtype)
    k, v = (quantize(x, axes=(-1,)) for x in cache)
    rounded = [np.asarray(x.values, np.float64) * np.asarray(x.scale, np.float64)[..., None] for x in (k, v)]
    context, logsumexp = attend(q, k, v, START, STOP)
    live_B = STOP > START
    wanted_context, wanted_logsumexp = by_reference(q, *rounded, START, STOP)
    np.testing.assert_allclose(context[live_B], wanted_context[live_B], atol=tolerance)
    np.testing.assert_allclose(logsumexp[live_B], wanted_logsumexp[live_B], rtol=1e-5, atol=tolerance)
    assert 1e-3 < np.abs(wanted_context - by_reference(q, *cache, START, STOP)[0]).max() < 3e-2, "the rounding"


@pytest.mark.parametrize("attend", [run, attend_to_segments])
@pytest.mark.parametrize("int8", [False, True])
def test_values_may_be_the_keys_too(attend, int8):
    """As with latent attention: one array is read once."""
    q, cache, _ = slots(N=4, K=1)
    values = quantize(cache, axes=(-1,)) if int8 else cache
    got, wanted = attend(q, None, values, START, STOP), attend(q, values, values, START, STOP)
    live_B = STOP > START
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one[live_B], other[live_B], rtol=1e-6, atol=1e-6)
    tolerance = 3e-2 if int8 else 2e-6
    np.testing.assert_allclose(got[0][live_B], by_reference(q, cache, cache, START, STOP)[0][live_B], atol=tolerance)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
def test_latents_are_written_and_read(kernel, int8, monkeypatch):
    """In the kernel's layout they are padded to whole lanes, which changes no score."""
    monkeypatch.setattr(segments, "decode_attention", decode_attention)
    q, cache, new = slots(N=4, K=1)
    segment = segments.make_segment(None, cache, "int8" if int8 else "auto", kernel=kernel)
    assert segment.k_XKHS is None and segment.v_XKSH.shape[-1] == (128 if kernel else 8)
    position = np.array([0, 19, 7, 7, 7, 19, 4])
    written = segments.write((segment,), None, new[:, :, 0], jnp.asarray(position), kernel=kernel)
    got = segments.attend(q, written, jnp.asarray(START), jnp.asarray(STOP), kernel=kernel)
    whole = np.array(cache)
    whole[np.arange(7), :, position] = new[:, :, 0]
    live_B = STOP > START
    wanted = by_reference(q, whole, whole, START, STOP)
    np.testing.assert_allclose(got[0][live_B], wanted[0][live_B], atol=3e-2 if int8 else 2e-6)
    np.testing.assert_allclose(got[1][live_B], wanted[1][live_B], atol=3e-2 if int8 else 2e-6)


def test_what_is_not_live_does_not_matter():
    q, k, v = slots()
    index = np.arange(20)
    live = (index >= START[:, None]) & (index < STOP[:, None])
    garbage = [np.where(live[:, None, :, None], x, 1e4) for x in (k, v)]
    jax.tree.map(np.testing.assert_array_equal, run(q, k, v, START, STOP), run(q, *garbage, START, STOP))


def test_rows_may_share_a_row_of_the_cache():
    q, k, v = slots()
    row = np.array([3, 0, 0, 2, 6, 3, 3])
    context, logsumexp = run(q, k, v, START, STOP, row)
    wanted = by_reference(q, k[row], v[row], START, STOP)
    np.testing.assert_allclose(context, wanted[0], atol=2e-6)
    np.testing.assert_allclose(logsumexp, wanted[1], rtol=1e-5, atol=2e-6)


def test_parts_merge_into_the_whole():
    """Two samples share a prompt: the queries of the group attend to it as the heads of one row."""
    q, k, v = slots(B=2, H=4)
    _, prompt_k, prompt_v = slots(B=1, H=4, T=12, seed=1)
    zero, stop = np.zeros(2, int), np.array([0, 6])
    grouped = q.reshape(1, 2, 2, 3, 4).swapaxes(1, 2).reshape(1, 12, 4)  # [P, G, K, R, H] -> [P, K G R, H]
    context, logsumexp = decode_attention(grouped, prompt_k, prompt_v, jnp.zeros(1, int), jnp.array([7]))
    prompt = [x.reshape(1, 2, 2, 3, -1).swapaxes(1, 2).reshape(2, 6, -1) for x in (context, logsumexp)]
    own = decode_attention(q, k, v, jnp.asarray(zero), jnp.asarray(stop))
    whole_k, whole_v = (
        np.stack([np.concatenate([shared[0, :, :7], each], 1) for each in x])
        for shared, x in ((prompt_k, k), (prompt_v, v))
    )
    merged = merge((prompt[0], prompt[1][..., 0]), own)
    np.testing.assert_allclose(merged[0], by_reference(q, whole_k, whole_v, zero, stop + 7)[0], atol=2e-6)


def test_on_a_mesh_each_device_has_its_slots_and_heads():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("rows", "heads"))
    q, k, v = slots(B=4)
    q_spec, kv_spec, row_spec = PartitionSpec("rows", "heads"), PartitionSpec("rows", "heads"), PartitionSpec("rows")
    mapped = jax.shard_map(
        decode_attention,
        mesh=mesh,
        in_specs=(q_spec, kv_spec, kv_spec, row_spec, row_spec),
        out_specs=q_spec,
        check_vma=False,  # Pallas' interpreter mixes arrays that vary and that do not
    )
    got = jax.jit(mapped)(q, k, v, jnp.asarray(START[1:5]), jnp.asarray(STOP[1:5]))
    np.testing.assert_allclose(got[0], by_reference(q, k, v, START[1:5], STOP[1:5])[0], atol=2e-6)


def test_writing_a_position():
    _, cache, _ = slots(B=3)
    new, position = jnp.ones((3, 2, 8)), np.array([0, 19, 7])
    written = np.asarray(module.write_positions(cache, new, jnp.asarray(position)))
    wanted = np.array(cache)
    wanted[np.arange(3), :, position] = 1
    np.testing.assert_array_equal(written, wanted)


def test_fetched_positions_are_whole_blocks():
    assert [module.fetched_positions(20, stop) for stop in (0, 1, 8, 9, 20)] == [8, 8, 8, 16, 24]
    assert module.fetched_positions(4, 3) == 4


def test_the_cache_stays_in_the_memory_of_the_device():
    jaxpr = str(jax.make_jaxpr(module.decode_attention)(*slots(), jnp.asarray(START), jnp.asarray(STOP)))
    assert jaxpr.count("with_memory_space_constraint[") == 2


def test_heads_that_do_not_divide():
    q, k, v = slots(N=5)
    with pytest.raises(ValueError, match="in multiples of the 2 key heads, got 5"):
        decode_attention(q, k, v, jnp.asarray(START), jnp.asarray(STOP))


@pytest.mark.parametrize(
    ("topology", "quantized", "latent"),
    [
        *(("v5p:2x2x1", False, False), ("v5e:2x2", True, False), ("v6e:2x2", False, False), ("v5p:2x2x1", True, False)),
        *(("v5p:2x2x1", False, True), ("v6e:2x2", True, True)),
    ],
)
def test_the_kernel_compiles_for_tpu_and_reads_the_cache_in_place(topology, quantized, latent, monkeypatch):
    pytest.importorskip("libtpu")
    from api import chips

    monkeypatch.undo()  # blocks of the usual size
    (device, *_) = chips.describe_devices(chips.parse_topology(topology))
    sharding = jax.sharding.NamedSharding(Mesh(np.array([device]), "x"), PartitionSpec())

    def new(x):
        return quantize(x, axes=(-1,)) if quantized else x

    K, H = (1, 640) if latent else (4, 128)
    q, cache, row = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (((4, 32, H), jnp.bfloat16), ((4, K, 1536, H), jnp.bfloat16), ((4,), jnp.int32))
    )
    cache = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(new, cache)
    )

    def write_and_attend(q, k, v, position_B):
        k = jax.tree.map(partial(module.write_positions, position=position_B), k, new(q[:, :: 32 // K]))
        keys, values = (None, k) if latent else (k, v)
        return module.decode_attention(q, keys, values, jnp.zeros_like(position_B), position_B + 1), k

    compiled = jax.jit(write_and_attend, donate_argnums=1).lower(q, cache, cache, row).compile()
    assert "tpu_custom_call" in compiled.as_text()
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert compiled.memory_analysis().temp_size_in_bytes < held / 2  # no copy
