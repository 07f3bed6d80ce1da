"""Attention over full rows: against the reference, each implementation against XLA, and a mesh against one device."""

import functools
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import references
from jax.sharding import Mesh
from tiny import equations

from gspax.model.kernels import attention
from gspax.model.kernels.attention import (
    Rows,
    Shard,
    attend_by_blocks,
    attend_in_chunks,
    cudnn_kernel,
    masked_attention,
    row_attention,
    splash_attention,
    xla_kernel,
)
from gspax.model.kernels.trees import make_tree, positions


def by_rows(attention, q, k, v, segment_BT, layer, *, sharding=None, sinks_N=None, prefix_BT=None, **how):
    """`attention` of rows on one device, or on the mesh of `sharding` with its axes."""
    tree = None if prefix_BT is None else make_tree(segment_BT, prefix_BT)
    return attention(q, k, v, layer, Rows(segment_BT, *(sharding or (tiny.one_device(),)), tree=tree, **how), sinks_N)


def in_chunks(kernel):
    return partial(by_rows, partial(masked_attention, attend=partial(attend_in_chunks, kernel)))


XLA = in_chunks(xla_kernel)
CUDNN = in_chunks(partial(cudnn_kernel, implementation="xla"))  # tests masks and shapes only
SPLASH = partial(by_rows, partial(splash_attention, interpret=True))
BLOCKS = partial(by_rows, partial(masked_attention, attend=attend_by_blocks))
WINDOWS = (7, 2**30, 7)  # of three layers


def mesh(**axes):
    devices = jax.devices()[: np.prod(list(axes.values()))]
    return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))


def rows(B=2, T=21, N=4, K=2, H=8, U=None, dtype=jnp.float32):
    """Queries, keys and values, the weight of the differentiated sum, and rows of two segments and padding.

    Values are U wide, or as wide as keys.
    """
    keys, U = iter(jax.random.split(jax.random.key(T), 4)), U or H
    shapes = ((N, H), (K, H), (K, U), (N, U))
    q, k, v, weight = (jax.random.normal(next(keys), (B, T, *shape), dtype) for shape in shapes)
    start_B2 = np.array([[T // 3 + b, T - 3 * b - 2] for b in range(B)])[:, :, None]
    segment_BT = np.array([1, 2, 0])[(np.arange(T)[None, None] >= start_B2).sum(1)]
    return (q, k, v), weight, jnp.asarray(segment_BT, jnp.int32)


def by_reference(q, k, v, segment_BT, window, sinks_N=None):
    return references.attention(q, k, v, references.visible(segment_BT, window), sinks_N=sinks_N)[0]


def value_and_gradients(attend, arrays, weight, segment_BT, layer=0, **how):
    def total(q, k, v, weight):
        context = attend(q, k, v, segment_BT, jnp.int32(layer), **how)
        return (context * weight).sum(), context

    grads, context = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays, weight)
    return context, *grads


@functools.cache
def by_xla(windows, layer=0, **shape):
    """Attention in one piece, with which the other implementations are compared."""
    return value_and_gradients(XLA, *rows(**shape), layer, windows=windows)


def same(got, wanted, dtype=jnp.float32):
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 0.05, "atol": 0.05}
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), **near)


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "all"])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_attention_equals_the_reference(K, layer):
    (q, k, v), _, segment_BT = rows(K=K)
    got = XLA(q, k, v, segment_BT, layer, windows=WINDOWS)
    np.testing.assert_allclose(got, by_reference(q, k, v, np.asarray(segment_BT), WINDOWS[layer]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("attend", "shape"),
    [
        pytest.param(XLA, {"H": 8, "U": 5}, id="XLA, narrower"),
        pytest.param(BLOCKS, {"H": 8, "U": 5, "T": 40}, id="blocks, narrower"),
        pytest.param(BLOCKS, {"H": 8, "U": 12, "T": 40}, id="blocks, wider"),
        pytest.param(SPLASH, {"H": 24, "U": 16, "T": 130}, id="splash, narrower"),
        pytest.param(SPLASH, {"H": 16, "U": 24, "T": 130}, id="splash, wider", marks=pytest.mark.slow),
    ],
)
def test_values_may_be_of_another_width_than_keys(attend, shape, monkeypatch):
    """Against the reference, and the gradients against those of one piece in XLA."""
    monkeypatch.setattr(attention, "BLOCK", 8)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 2 * 4 * shape.get("T", 21) * 5)
    arrays, weight, segment_BT = rows(**shape)
    got = on_tokens(attend, arrays, weight, segment_BT)
    wanted = by_reference(*arrays, np.asarray(segment_BT), 2**30)
    np.testing.assert_allclose(got[0], np.where(segment_BT[:, :, None, None] > 0, wanted, 0), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 2**30)
    same(got, on_tokens(XLA, arrays, weight, segment_BT))


def with_sinks(attend, arrays, weight, segment_BT, **how):
    """The context of tokens that are not padding, and the gradients of queries, keys, values, and sinks."""
    weight = jnp.where(segment_BT[:, :, None, None] > 0, weight, 0)

    def total(q, k, v, sinks_N):
        context = attend(q, k, v, segment_BT, jnp.int32(0), sinks_N=sinks_N, **how)
        return (context * weight).sum(), jnp.where(segment_BT[:, :, None, None] > 0, context, 0)

    sinks_N = jnp.asarray([-1.0, 0.5, 2.0, 4.0])
    grads, context = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))(*arrays, sinks_N)
    return sinks_N, context, grads


@pytest.mark.parametrize(
    ("attend", "T", "sharding"),
    [
        pytest.param(XLA, 21, None, id="XLA, in chunks"),
        pytest.param(XLA, 24, (mesh(a=2, c=2, t=2), "a", "c", "t"), id="a mesh"),
        pytest.param(BLOCKS, 40, None, id="blocks"),
        pytest.param(SPLASH, 130, None, id="splash"),
    ],
)
def test_a_sink_is_a_score_without_a_value(attend, T, sharding, monkeypatch):
    """Against the reference, and the gradients against those of one piece in XLA."""
    monkeypatch.setattr(attention, "BLOCK", 8)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 2 * 4 * T * 5)
    case = rows(T=T)
    sinks_N, context, grads = with_sinks(attend, *case, windows=WINDOWS, sharding=sharding)
    arrays, _, segment_BT = case
    wanted = by_reference(*arrays, np.asarray(segment_BT), WINDOWS[0], np.asarray(sinks_N))
    np.testing.assert_allclose(context, np.where(segment_BT[:, :, None, None] > 0, wanted, 0), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 2**30)
    same(grads, with_sinks(XLA, *case, windows=WINDOWS)[2])
    assert np.abs(grads[3]).min() > 1e-3


def test_sinks_have_the_gradient_of_finite_differences():
    case = rows(T=21)
    sinks_N, _, grads = with_sinks(XLA, *case, windows=WINDOWS)
    (q, k, v), weight, segment_BT = case
    weight = np.where(segment_BT[:, :, None, None] > 0, weight, 0)

    def total(sinks_N):
        return (by_reference(q, k, v, np.asarray(segment_BT), WINDOWS[0], sinks_N) * weight).sum()

    for head, step in enumerate(1e-5 * np.eye(4)):
        around = np.asarray(sinks_N, np.float64)
        assert grads[3][head] == pytest.approx((total(around + step) - total(around - step)) / 2e-5, rel=1e-3)


def test_without_windows_attention_covers_the_segment():
    arrays, _, segment_BT = rows()
    np.testing.assert_array_equal(
        XLA(*arrays, segment_BT, jnp.int32(2)), XLA(*arrays, segment_BT, jnp.int32(1), windows=WINDOWS)
    )


@pytest.mark.parametrize(
    ("attend", "scores", "dtype"),
    [
        pytest.param(XLA, 2 * 4 * 21 * 4, jnp.float32, id="chunks of 4"),
        pytest.param(XLA, 2 * 4 * 21 * 7, jnp.bfloat16, id="chunks of 7, bfloat16"),
        pytest.param(XLA, 1, jnp.float32, id="one at a time", marks=pytest.mark.slow),
        pytest.param(CUDNN, 2**25, jnp.bfloat16, id="cudnn, bfloat16"),
        pytest.param(CUDNN, 2 * 4 * 21 * 4, jnp.float32, id="cudnn in chunks"),
    ],
)
def test_chunked_attention_equals_xla_in_one_piece(attend, scores, dtype, monkeypatch):
    case, wanted = rows(dtype=dtype), by_xla(WINDOWS, dtype=dtype)
    monkeypatch.setattr(attention, "SCORE_BUDGET", scores)
    same(value_and_gradients(attend, *case, windows=WINDOWS), wanted, dtype)


def test_cudnn_gets_even_lengths(monkeypatch):
    """cuDNN rejects odd lengths with a mask."""
    lengths = []
    attend = jax.nn.dot_product_attention

    def watch(q, k, v, *, mask, implementation):
        lengths.append((q.shape[1] % 2, k.shape[1] % 2, v.shape[1] % 2, implementation))
        return attend(q, k, v, mask=mask)

    monkeypatch.setattr(jax.nn, "dot_product_attention", watch)
    arrays, _, segment_BT = rows(T=21)
    assert in_chunks(cudnn_kernel)(*arrays, segment_BT, 0).shape == arrays[0].shape
    assert lengths == [(0, 0, 0, "cudnn")]


@pytest.mark.parametrize(
    ("shape", "windows", "layer"),
    [
        pytest.param({"T": 200, "N": 4, "K": 2, "H": 64}, WINDOWS, 1, id="two blocks, no window"),
        pytest.param({"T": 200, "H": 64}, WINDOWS, 2, id="two blocks, a window", marks=pytest.mark.slow),
        pytest.param({"T": 3, "K": 4}, (), 0, id="tiny", marks=pytest.mark.slow),
        pytest.param({"T": 300, "K": 1, "H": 128}, WINDOWS, 1, id="three blocks, no window", marks=pytest.mark.slow),
        pytest.param({"B": 1, "T": 700, "N": 2, "K": 1}, (300,), 0, id="a window of blocks", marks=pytest.mark.slow),
    ],
)
def test_splash_equals_xla(shape, windows, layer):
    got = value_and_gradients(SPLASH, *rows(**shape), layer, windows=windows)
    same(got, by_xla(windows, layer, **shape))


PARENTS = {0: 0, 1: 0, 2: 1, 3: 2, 4: 1, 5: 4, 6: 5, 7: 0}


def branches(T):
    """A tree of four levels, a sequence by itself, and padding; segments and what they continue."""
    lengths = [T // 4, T // 8, T // 6, T // 12, T // 12, T // 12, T // 8]
    segment_T = np.repeat([*range(1, 8), 0], [*lengths, T - sum(lengths)])
    prefix_T = np.array([PARENTS[number] for number in segment_T.tolist()], np.int32)
    return jnp.asarray(np.tile(segment_T, (2, 1)), jnp.int32), jnp.asarray(np.tile(prefix_T, (2, 1)))


def test_segments_may_continue_another_one():
    arrays, _, _ = rows(T=24)
    segment_BT, prefix_BT = branches(24)
    got = XLA(*arrays, segment_BT, 0, prefix_BT=prefix_BT)
    place_BT = positions(segment_BT, make_tree(segment_BT, prefix_BT))
    for number in range(1, 8):
        above = [number]
        while PARENTS[above[-1]]:
            above.append(PARENTS[above[-1]])
        path = np.flatnonzero(np.isin(segment_BT[0], above))
        np.testing.assert_array_equal(place_BT[0, path], np.arange(len(path)))
        alone = [x[:, path] for x in arrays]
        wanted = by_reference(*alone, np.ones((2, len(path))), 2**30)
        own = np.asarray(segment_BT[0, path]) == number
        np.testing.assert_allclose(got[:, path][:, own], wanted[:, own], atol=1e-5)
    assert np.isfinite(got).all(), "padding included"


@pytest.mark.parametrize(
    ("attend", "T", "dtype", "sharding"),
    [
        (SPLASH, 200, jnp.float32, None),
        pytest.param(SPLASH, 200, jnp.bfloat16, None, marks=pytest.mark.slow),
        pytest.param(SPLASH, 300, jnp.float32, "time and heads", marks=pytest.mark.slow),
        pytest.param(XLA, 24, jnp.float32, "rows, time and heads", marks=pytest.mark.slow),
    ],
)
def test_continued_segments_equal_those_of_xla(attend, T, dtype, sharding):
    arrays, weight, _ = rows(T=T, H=64, dtype=dtype)
    segment_BT, prefix_BT = branches(T)
    wanted = on_tokens(XLA, arrays, weight, segment_BT, prefix_BT=prefix_BT)
    how = {"prefix_BT": prefix_BT, "sharding": sharding and MESHES[sharding]}
    same(on_tokens(attend, arrays, weight, segment_BT, **how), wanted, dtype)


def on_tokens(attend, arrays, weight, segment_BT, **how):
    """`value_and_gradients` of what is not padding."""
    weight = jnp.where(segment_BT[:, :, None, None] > 0, weight, 0)
    context, *grads = value_and_gradients(attend, arrays, weight, segment_BT, **how)
    return jnp.where(segment_BT[:, :, None, None] > 0, context, 0), *grads


@pytest.mark.parametrize(
    ("T", "dtype", "shared", "how"),
    [
        pytest.param(21, jnp.float32, False, {"windows": WINDOWS}, id="a window, the last block is short"),
        pytest.param(48, jnp.float32, True, {}, id="shared prompts"),
        pytest.param(48, jnp.float32, True, {"sharding": "rows, time and heads"}, id="shared prompts, a mesh"),
        pytest.param(40, jnp.float32, False, {"sharding": "time"}, id="time", marks=pytest.mark.slow),
        pytest.param(48, jnp.bfloat16, True, {}, id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_blocks_equal_xla(T, dtype, shared, how, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 8)
    arrays, weight, segment_BT = rows(T=T, dtype=dtype)
    how = how | {"sharding": MESHES[how["sharding"]]} if "sharding" in how else how
    if shared:
        segment_BT, prefix_BT = branches(T)
        how = how | {"prefix_BT": prefix_BT}
    wanted = on_tokens(XLA, arrays, weight, segment_BT, **{**how, "sharding": None})
    same(on_tokens(BLOCKS, arrays, weight, segment_BT, **how), wanted, dtype)


def test_masked_blocks_are_not_read(monkeypatch):
    """A token attends to no other response, no future token, and no padding, forward and backward."""
    monkeypatch.setattr(attention, "BLOCK", 8)
    arrays, weight, _ = rows(B=1, T=48)
    segment_BT = jnp.repeat(jnp.array([[1, 2, 3, 3, 4, 0]]), 8, axis=1)
    prefix_BT = jnp.where((segment_BT == 2) | (segment_BT == 3), 1, 0)
    block_BT = jnp.arange(48)[None] // 8
    read_BT = (block_BT == 0) | (block_BT == 2)  # by the queries of block 2, the only ones with a weight
    arrays = [jnp.where(read_BT[:, :, None, None], x, jnp.nan) for x in arrays]

    def total(q, k, v):
        context = BLOCKS(q, k, v, segment_BT, 0, prefix_BT=prefix_BT)
        return (context * weight).sum(where=(block_BT == 2)[:, :, None, None])

    value, dq = jax.jit(jax.value_and_grad(total))(*arrays)
    assert np.isfinite(value) and np.isfinite(dq[:, 16:24]).all()
    assert (BLOCKS(*arrays, segment_BT, 0)[:, 40:] == 0).all(), "padding"


def test_a_window_and_a_continued_segment_are_rejected():
    arrays, _, segment_BT = rows()
    with pytest.raises(ValueError, match="prefix_BT: wanted None in a model with sliding windows"):
        by_rows(row_attention, *arrays, segment_BT, 0, windows=WINDOWS, prefix_BT=segment_BT)


MESHES = {
    "rows": (mesh(a=2), "a", None, None),
    "time": (mesh(c=8), None, "c", None),
    "rows, time and heads": (mesh(a=2, c=2, t=2), "a", "c", "t"),
    "time and heads": (mesh(c=4, t=2), (), "c", "t"),
    "an idle axis": (mesh(a=2, x=2, c=2), ("a",), ("c",), None),
}


@pytest.mark.parametrize(
    ("sharding", "scores"),
    [
        pytest.param(MESHES["time"], 2**25, id="time", marks=pytest.mark.slow),
        pytest.param(MESHES["rows, time and heads"], 2**25, id="all"),
        pytest.param(MESHES["time and heads"], 200, id="in chunks"),
        pytest.param(MESHES["rows"], 2**25, id="rows", marks=pytest.mark.slow),
        pytest.param(MESHES["an idle axis"], 2**25, id="one axis idle", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_equals_one_device(sharding, scores, monkeypatch):
    case, wanted = rows(T=24), by_xla(WINDOWS, T=24)
    monkeypatch.setattr(attention, "SCORE_BUDGET", scores)
    same(value_and_gradients(XLA, *case, windows=WINDOWS, sharding=sharding), wanted)


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(MESHES["time and heads"], id="time and heads"),
        pytest.param(MESHES["time"], id="time", marks=pytest.mark.slow),
        pytest.param(MESHES["rows, time and heads"], id="all", marks=pytest.mark.slow),
    ],
)
def test_splash_on_a_mesh_equals_one_device(sharding):
    """The chunk of a device is not a multiple of a block, and the window crosses chunks."""
    case = rows(B=2, T=264)
    wanted = value_and_gradients(XLA, *case, windows=(20, 2**30))
    same(value_and_gradients(SPLASH, *case, windows=(20, 2**30), sharding=sharding), wanted)


@pytest.mark.parametrize("attend", [XLA, CUDNN, BLOCKS, pytest.param(SPLASH, marks=pytest.mark.slow)])
def test_padding_is_finite_and_never_attended_to(attend):
    (q, k, v), weight, segment_BT = rows()
    valid_BT11 = (segment_BT > 0)[:, :, None, None]
    garbage = tuple(jnp.where(valid_BT11, x, 1e9) for x in (q, k, v))
    # one program for the batch, the batch without a weight on padding, and garbage in the padding
    stacked = tuple(jnp.stack([x, x, y]) for x, y in zip((q, k, v), garbage, strict=True))
    weights = jnp.stack([weight, *[jnp.where(valid_BT11, weight, 0.0)] * 2])

    def evaluate(arrays, weight):
        return value_and_gradients(attend, arrays, weight, segment_BT)

    results = jax.lax.map(lambda given: evaluate(*given), (stacked, weights))
    whole, clean, got = (jax.tree.map(lambda x, i=i: x[i], results) for i in range(3))
    assert all(np.isfinite(x).all() for x in whole)
    for one, other in zip(got, clean, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(jnp.where(valid_BT11, one, 0.0), jnp.where(valid_BT11, other, 0.0))


def test_scores_of_long_rows_stay_within_the_budget(monkeypatch):
    """No intermediate of the gradient is larger than the score budget."""
    case = rows(B=1, T=256, N=2, K=1, H=4)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 2**12)

    def gradients(*arrays):
        return value_and_gradients(XLA, arrays, *case[1:])

    sizes = [out.aval.size for eqn in equations(jax.make_jaxpr(gradients)(*case[0]).jaxpr) for out in eqn.outvars]
    assert 2**11 < max(sizes) <= 2**12, "one head's scores are 2^16"


@pytest.mark.parametrize(
    ("platform", "dtype", "T", "H", "wanted"),
    [
        ("tpu", jnp.float32, 21, 8, "splash"),
        ("gpu", jnp.bfloat16, 21, 64, cudnn_kernel),
        ("gpu", jnp.float32, 128, 64, xla_kernel),
        ("gpu", jnp.bfloat16, 21, 192, xla_kernel),
        ("gpu", jnp.bfloat16, 21, 12, xla_kernel),
        ("cpu", jnp.bfloat16, 127, 64, xla_kernel),
        ("cpu", jnp.bfloat16, 128, 64, "blocks"),
    ],
)
def test_the_platform_of_the_mesh_selects_the_implementation(platform, dtype, T, H, wanted, monkeypatch):
    monkeypatch.setattr(attention, "splash_attention", lambda *args: "splash")
    monkeypatch.setattr(attention, "attend_by_blocks", "blocks")
    monkeypatch.setattr(attention, "attend_in_chunks", lambda kernel: kernel)
    monkeypatch.setattr(attention, "masked_attention", lambda *args, attend: getattr(attend, "args", [attend])[0])
    (q, k, v), _, segment_BT = rows(T=T, H=H, dtype=dtype)
    device = SimpleNamespace(platform=platform)
    assert (
        by_rows(row_attention, q, k, v, segment_BT, 0, sharding=[SimpleNamespace(devices=np.array([device]))]) == wanted
    )


@pytest.mark.parametrize(
    ("T", "shards", "window"), [(512, 2, 2**30), (301, 3, 200), (200, 1, 7), (512, 1, 2), (512, 1, 255)]
)
def test_block_shortcuts_agree_with_the_mask(T, shards, window):
    """A block wrongly reported as empty would be skipped."""
    S = -(-T * shards // 128) * 128
    pieces = [np.arange(T)]
    if shards > 1:  # of each device, the first half and the second half of the one as far from the other end
        halves = [(np.arange(i * T, i * T + -(-T // 2)), np.arange(i * T + T // 2, i * T + T)) for i in range(shards)]
        pieces = [halves[i if half == 0 else -1 - i][half] for i in range(shards) for half in range(2)]
    filled = -(-len(pieces[0]) // 128) * 128
    position_T = np.concatenate([np.pad(piece, (0, filled - len(piece)), mode="edge") for piece in pieces])
    mask = attention.window_mask(T, shards, window)
    back_TS = position_T[:, None] - np.arange(S)[None]
    wanted = (back_TS >= 0) & (back_TS < window)
    assert mask.shape == wanted.shape
    for i, j in np.ndindex(len(position_T) // 128, S // 128):
        block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
        np.testing.assert_array_equal(mask[block], wanted[block])


@pytest.mark.parametrize(("T", "shards", "wanted"), [(1024, 2, 5), (1024, 3, 7), (512, 4, 5), (1001, 2, 5)])
def test_each_device_has_the_same_number_of_blocks(T, shards, wanted):
    """In the kernel's tables, forward and backward."""
    tables = attention.splash_masks(T, shards, 1, T * shards)
    for table in (tables.fwd_mask_info, tables.dq_mask_info, tables.dkv_mask_info):
        devices = np.split(np.asarray(table.block_mask), shards, axis=1)
        assert [np.count_nonzero(blocks) for blocks in devices] == [wanted] * shards


def test_splash_scales_queries_in_float32():
    """1/√H is not representable in bfloat16: rounding it first would change the temperature of the softmax."""
    (q, k, v), _, segment_BT = rows(T=5, H=128, dtype=jnp.bfloat16)

    def queries(q_NTH, k_KSH, v_KSH, segment_ids, sinks):
        return q_NTH

    got = attention.attend_by_splash(queries, Shard(q, k, v, segment_BT, segment_BT, None))
    np.testing.assert_array_equal(got, (q.astype(jnp.float32) * 128**-0.5).astype(jnp.bfloat16))
