"""Attention over whole rows: against loops, every way against plain XLA, and split over a mesh against one device."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny import equations

from gspax.kernels import attention, attention_splash
from gspax.kernels.attention import Split, by_chunks, by_splash, cudnn, einsum

XLA = partial(by_chunks, kernel=einsum)
CUDNN = partial(by_chunks, kernel=partial(cudnn, implementation="xla"))  # its masks and shapes, without its kernel
SPLASH = partial(by_splash, interpret=True)
WINDOWS = (7, 2**30, 7)  # of three layers


def rows(B=2, T=21, N=4, K=2, H=8, dtype=jnp.float32):
    """Queries, keys, values, a weight for the sum that is differentiated, and rows of two segments and padding."""
    keys = iter(jax.random.split(jax.random.key(T), 4))
    q, k, v, weight = (jax.random.normal(next(keys), (B, T, heads, H), dtype) for heads in (N, K, K, N))
    start_B2 = np.array([[T // 3 + b, T - 3 * b - 2] for b in range(B)])[:, :, None]
    segment_BT = np.array([1, 2, 0])[(np.arange(T)[None, None] >= start_B2).sum(1)]
    return (q, k, v), weight, jnp.asarray(segment_BT, jnp.int32)


def loops(q, k, v, segment_BT, window):
    B, T, N, H = q.shape
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(B, T, N):
        seen = [s for s in range(t + 1) if segment_BT[b, s] == segment_BT[b, t] and t - s < window]
        head = n * k.shape[2] // N
        score = np.array([q[b, t, n] @ k[b, s, head] for s in seen]) / np.sqrt(H)
        share = np.exp(score - score.max())
        out[b, t, n] = share / share.sum() @ v[b, seen, head]
    return out


def value_and_gradients(way, arrays, weight, segment_BT, layer=0, **how):
    def total(q, k, v):
        context = way(q, k, v, segment_BT, jnp.int32(layer), **how)
        return (context * weight).sum(), context

    grads, context = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return context, *grads


def same(got, wanted, dtype=jnp.float32):
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 0.05, "atol": 0.05}
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), **near)


def mesh(**axes):
    devices = jax.devices()[: np.prod(list(axes.values()))]
    return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "all"])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_loops(K, layer):
    (q, k, v), _, segment_BT = rows(K=K)
    got = XLA(q, k, v, segment_BT, layer, windows=WINDOWS)
    np.testing.assert_allclose(got, loops(q, k, v, np.asarray(segment_BT), WINDOWS[layer]), rtol=1e-5, atol=1e-6)


def test_without_windows_every_layer_sees_its_whole_segment():
    arrays, _, segment_BT = rows()
    np.testing.assert_array_equal(
        XLA(*arrays, segment_BT, jnp.int32(2)), XLA(*arrays, segment_BT, jnp.int32(1), windows=WINDOWS)
    )


@pytest.mark.parametrize(
    ("way", "scores", "dtype"),
    [
        pytest.param(XLA, 2 * 4 * 21 * 4, jnp.float32, id="stretches of 4"),
        pytest.param(XLA, 2 * 4 * 21 * 7, jnp.bfloat16, id="stretches of 7, bfloat16"),
        pytest.param(XLA, 1, jnp.float32, id="one at a time", marks=pytest.mark.slow),
        pytest.param(CUDNN, 2**25, jnp.bfloat16, id="cudnn, bfloat16"),
        pytest.param(CUDNN, 2 * 4 * 21 * 4, jnp.float32, id="cudnn in stretches"),
    ],
)
def test_every_way_is_plain_xla(way, scores, dtype, monkeypatch):
    case = rows(dtype=dtype)
    wanted = value_and_gradients(XLA, *case, windows=WINDOWS)
    monkeypatch.setattr(attention, "SCORE_BUDGET", scores)
    same(value_and_gradients(way, *case, windows=WINDOWS), wanted, dtype)


def test_cudnn_gets_even_lengths_only(monkeypatch):
    """It refuses others beside a mask."""
    taken = []
    attend = jax.nn.dot_product_attention

    def watch(q, k, v, *, mask, implementation):
        taken.append((q.shape[1] % 2, k.shape[1] % 2, v.shape[1] % 2, implementation))
        return attend(q, k, v, mask=mask)

    monkeypatch.setattr(jax.nn, "dot_product_attention", watch)
    arrays, _, segment_BT = rows(T=21)
    assert by_chunks(*arrays, segment_BT, 0, kernel=cudnn).shape == arrays[0].shape
    assert taken == [(0, 0, 0, "cudnn")]


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
def test_splash_is_plain_xla(shape, windows, layer):
    case = rows(**shape)
    wanted = value_and_gradients(XLA, *case, layer, windows=windows)
    same(value_and_gradients(SPLASH, *case, layer, windows=windows), wanted)


MESHES = {
    "rows": Split(mesh(a=2), "a", None, None),
    "time": Split(mesh(c=8), None, "c", None),
    "rows, time and heads": Split(mesh(a=2, c=2, t=2), "a", "c", "t"),
    "time and heads": Split(mesh(c=4, t=2), (), "c", "t"),
    "an axis that splits nothing": Split(mesh(a=2, x=2, c=2), ("a",), ("c",), None),
}


@pytest.mark.parametrize(
    ("split", "scores"),
    [
        pytest.param(MESHES["time"], 2**25, id="time"),
        pytest.param(MESHES["rows, time and heads"], 2**25, id="all"),
        pytest.param(MESHES["time and heads"], 200, id="in stretches"),
        pytest.param(MESHES["rows"], 2**25, id="rows", marks=pytest.mark.slow),
        pytest.param(MESHES["an axis that splits nothing"], 2**25, id="one axis idle", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_changes_nothing(split, scores, monkeypatch):
    case = rows(T=24)
    wanted = value_and_gradients(XLA, *case, windows=WINDOWS)
    monkeypatch.setattr(attention, "SCORE_BUDGET", scores)
    same(value_and_gradients(XLA, *case, windows=WINDOWS, split=split), wanted)


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(MESHES["time and heads"], id="time and heads"),
        pytest.param(MESHES["time"], id="time", marks=pytest.mark.slow),
        pytest.param(MESHES["rows, time and heads"], id="all", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_changes_nothing_for_splash(split):
    """The stretch of a device is no whole number of blocks, and the window reaches from one into the next."""
    case = rows(B=2, T=264)
    wanted = value_and_gradients(XLA, *case, windows=(20, 2**30))
    same(value_and_gradients(SPLASH, *case, windows=(20, 2**30), split=split), wanted)


@pytest.mark.parametrize("way", [XLA, CUDNN, pytest.param(SPLASH, marks=pytest.mark.slow)])
def test_padding_is_finite_and_seen_by_none(way):
    (q, k, v), weight, segment_BT = rows()
    valid_BT11 = (segment_BT > 0)[:, :, None, None]
    wanted = value_and_gradients(way, (q, k, v), weight, segment_BT)
    assert all(np.isfinite(x).all() for x in wanted)
    spoilt = tuple(jnp.where(valid_BT11, x, 1e9) for x in (q, k, v))
    got = value_and_gradients(way, spoilt, jnp.where(valid_BT11, weight, 0.0), segment_BT)
    unspoilt = value_and_gradients(way, (q, k, v), jnp.where(valid_BT11, weight, 0.0), segment_BT)
    for one, other in zip(got, unspoilt, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(jnp.where(valid_BT11, one, 0.0), jnp.where(valid_BT11, other, 0.0))


def test_long_rows_never_hold_all_scores(monkeypatch):
    """Nothing that the gradient's program makes is as large as the scores of a row, or of more than the budget."""
    case = rows(B=1, T=256, N=2, K=1, H=4)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 2**12)

    def gradients(*arrays):
        return value_and_gradients(XLA, arrays, *case[1:])

    sizes = [out.aval.size for eqn in equations(jax.make_jaxpr(gradients)(*case[0]).jaxpr) for out in eqn.outvars]
    assert 2**11 < max(sizes) <= 2**12, "one head's scores are 2^16"


@pytest.mark.parametrize(
    ("platform", "dtype", "H", "wanted"),
    [
        ("tpu", jnp.float32, 8, "splash"),
        ("gpu", jnp.bfloat16, 64, cudnn),
        ("gpu", jnp.float32, 64, einsum),
        ("gpu", jnp.bfloat16, 192, einsum),
        ("gpu", jnp.bfloat16, 12, einsum),
        ("cpu", jnp.bfloat16, 64, einsum),
    ],
)
def test_the_devices_of_the_mesh_choose(platform, dtype, H, wanted, monkeypatch):
    monkeypatch.setattr(attention, "by_splash", lambda *args, **kwargs: "splash")
    monkeypatch.setattr(attention, "by_chunks", lambda *args, kernel, **kwargs: kernel)
    (q, k, v), _, segment_BT = rows(H=H, dtype=dtype)
    split = Split(SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)])), None, None, None)
    assert attention.row_attention(q, k, v, segment_BT, 0, split=split) == wanted
    assert attention.row_attention(q, k, v, segment_BT, 0) == einsum, "without a mesh: where JAX runs by default"


@pytest.mark.parametrize(
    ("T", "shards", "window"), [(512, 2, 2**30), (300, 3, 200), (200, 1, 7), (512, 1, 2), (512, 1, 255)]
)
def test_blocks_are_known_without_looking_at_them(T, shards, window):
    """The quick answers about blocks are those of the mask, so that no block is skipped that has something to see."""
    filled, S = -(-T // 128) * 128, -(-T * shards // 128) * 128
    mask = attention_splash.window_mask(T, shards, window)
    position_T = np.repeat(np.arange(shards), filled) * T + np.minimum(np.tile(np.arange(filled), shards), T - 1)
    back_TS = position_T[:, None] - np.arange(S)[None]
    wanted = (back_TS >= 0) & (back_TS < window)
    for i, j in np.ndindex(filled * shards // 128, S // 128):
        block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
        np.testing.assert_array_equal(mask[block], wanted[block])
