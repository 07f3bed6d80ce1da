"""Each backend against a float64 loop over tokens, and the properties on which a layer relies."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import BLOCK, BLOCKED, GELU_TANH, RAGGED, SQUARED_RELU, Experts, quantize, references, sort_by_expert
from api import expert_ffn as module
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def by_matrix(ffn):
    """The function with the three matrices as arguments of their own."""
    return lambda x, expert, gate, *weights: ffn(x, expert, gate, Experts(*weights))


expert_ffn = by_matrix(module.expert_ffn)
blocked, ragged = (by_matrix(partial(module.expert_ffn, backend=backend)) for backend in (BLOCKED, RAGGED))
BACKENDS = [blocked, ragged]  # on the CPU, expert_ffn is blocked
D, F = 6, 10

ROUTINGS = {  # name: (rows, experts, active, how ids are chosen)
    "even": (64, 4, 2, "any"),
    "one_row": (1, 4, 2, "any"),
    "one_expert": (5, 1, 1, "any"),
    "every_expert": (9, 3, 3, "distinct"),
    "padding": (70, 4, 2, "some dropped"),
    "all_padding": (7, 4, 2, "dropped"),
    "all_to_first": (BLOCK + 3, 5, 2, 0),
    "all_to_last": (BLOCK, 5, 1, 4),
    "many_blocks": (3 * BLOCK, 2, 2, "any"),
    "few_rows_of_many": (20, 16, 2, "some dropped"),
    "large_blocks": (1000, 3, 2, "any"),
}


DEFAULT = {
    blocked: ("one_row", "every_expert", "padding", "all_padding", "all_to_first", "large_blocks"),
    ragged: ("even", "padding"),
}


def make_case(name, dtype=np.float32):
    """x, expert, gate and the three weights."""
    N, E, A, how = ROUTINGS[name]
    rng = np.random.default_rng(len(name))
    expert_NA = {
        "any": lambda: rng.integers(0, E, (N, A)),
        "distinct": lambda: np.argsort(rng.random((N, E)), axis=1)[:, :A],
        "some dropped": lambda: np.where(rng.random((N, A)) < 0.4, E, rng.integers(0, E, (N, A))),
        "dropped": lambda: np.full((N, A), E),
    }.get(how, lambda: np.full((N, A), how))()
    floats = [rng.normal(size=s) for s in ((N, D), (N, A), (E, D, F), (E, D, F), (E, F, D))]
    x, gate, *weights = (jnp.asarray(v, dtype) for v in floats)
    return x, jnp.asarray(expert_NA, jnp.int32), gate, *weights


def reference(x, expert, gate, *weights_and_dy):
    """y and the gradients of Σ y·dy, one token and one choice at a time."""
    *weights, dy = weights_and_dy
    return references.experts(x, expert, gate, weights, dy)


def in_8_bits(weights):
    """The weights with a scale for each expert and output channel, and the float weights that they stand for."""
    quantized = [quantize(w, (1,)) for w in weights]
    return quantized, [q.values * q.scale[:, None] for q in quantized]


def mixed(x, expert, gate, *weights):
    """As on TPU: floats are multiplied with integers."""
    backend = module.Backend(partial(module._ragged_forward, mixed=True), module._ragged_backward)
    return module.expert_ffn(x, expert, gate, Experts(*weights), backend=backend)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (blocked, "padding"),
        (blocked, "few_rows_of_many"),
        (ragged, "padding"),
        (mixed, "padding"),
    ],
)
def test_experts_in_8_bits(run, name):
    x, expert, gate, *weights = make_case(name)
    quantized, rounded = in_8_bits(weights)
    got, want = jax.jit(run)(x, expert, gate, *quantized), jax.jit(run)(x, expert, gate, *rounded)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.abs(got - jax.jit(run)(x, expert, gate, *weights)).max() > 1e-3, "the rounding"


@pytest.mark.parametrize("backend", [BLOCKED, RAGGED], ids=["blocked", "ragged"])
@pytest.mark.parametrize("gated", [True, False], ids=["gelu", "squared_relu"])
def test_another_activation_replaces_silu(backend, gated):
    """Against every expert's product with every row, weighed by zeros where the row does not choose it."""
    x, expert, gate, *weights = make_case("padding")

    def ours(x, gate, w_gate, w_up, w_down):
        experts = Experts(w_gate if gated else None, w_up, w_down, activation=GELU_TANH if gated else SQUARED_RELU)
        return module.expert_ffn(x, expert, gate, experts, backend=backend)

    def dense(x, gate, *weights):
        w_gate, w_up, w_down = weights
        gate_NE = (jax.nn.one_hot(expert, len(w_gate)) * gate[..., None]).sum(1)
        a, u = jnp.einsum("nd,edf->nef", x, w_gate), jnp.einsum("nd,edf->nef", x, w_up)
        h = jax.nn.gelu(a, approximate=True) * u if gated else jnp.maximum(u, 0) ** 2
        return jnp.einsum("ne,nef,efd->nd", gate_NE, h, w_down)

    (got, ours_back), (want, dense_back) = (jax.vjp(run, x, gate, *weights) for run in (ours, dense))
    for a, b in zip((got, *ours_back(want)), (want, *dense_back(want)), strict=True):
        assert_close(a, b, 1e-5)


def test_many_rows_multiply_converted_weights(monkeypatch):
    """The scales of the rows, [S, F] and [S, D], would be gathered."""
    x, expert, gate, *weights = make_case("padding")
    quantized, rounded = in_8_bits(weights)

    def gathers() -> int:
        return str(jax.make_jaxpr(partial(mixed))(x, expert, gate, *quantized)).count("= gather[")

    few = gathers()
    monkeypatch.setattr(module, "MANY_ROWS", 1)
    assert gathers() == few - 3
    got, want = (jax.jit(partial(mixed))(x, expert, gate, *w) for w in (quantized, rounded))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@partial(jax.jit, static_argnums=0)
def value_and_gradients(ffn, x, expert, gate, *weights):
    dy = jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)
    y, pullback = jax.vjp(lambda x, gate, *w: ffn(x, expert, gate, *w), x, gate, *weights)
    return dy, y, pullback(dy)


def assert_close(got, want, tolerance):
    """Relative to the largest wanted number: float error does not shrink with the entry."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize(
    ("ffn", "name"),
    [
        pytest.param(ffn, name, marks=[] if name in DEFAULT[ffn] else pytest.mark.slow)
        for ffn in BACKENDS
        for name in ROUTINGS
    ],
)
def test_values_and_gradients_equal_a_loop_over_tokens(ffn, name):
    args = make_case(name)
    dy, y, grads = value_and_gradients(ffn, *args)
    want_y, want_grads = reference(*args, dy)
    assert_close(y, want_y, 2e-6)
    for got, want in zip(grads, want_grads, strict=True):
        assert_close(got, want, 2e-6)


def clamped(x, expert, gate, w_gate, w_up, w_down, gate_bias, up_bias):
    """Every expert for every row, of which a row has its own; a gated product as in gpt-oss."""
    a = jnp.minimum(jnp.einsum("nd,edf->nef", x, w_gate) + gate_bias[None], 7)
    u = jnp.clip(jnp.einsum("nd,edf->nef", x, w_up) + up_bias[None], -7, 7)
    share = (jax.nn.one_hot(expert, len(w_gate)) * gate[..., None]).sum(axis=1)
    return jnp.einsum("ne,nef,efd->nd", share, (u + 1) * a / (1 + jnp.exp(-1.702 * a)), w_down)


def with_biases(weights):
    """The matrices, larger so that some products are clamped, and biases of gates and ups."""
    wide = [3 * w for w in weights[:2]]
    biases = [jax.random.normal(jax.random.key(n), w.shape[::2]) for n, w in enumerate(wide)]
    return [*wide, *weights[2:], *biases]


@pytest.mark.parametrize("name", ["padding", "large_blocks"])
@pytest.mark.parametrize("ffn", BACKENDS)
def test_experts_with_biases_equal_all_experts_of_all_rows(ffn, name):
    x, expert, gate, *weights = make_case(name)
    args = x, expert, gate, *with_biases(weights)
    _, y, grads = value_and_gradients(ffn, *args)
    _, want_y, want_grads = value_and_gradients(clamped, *args)
    assert len(grads) == 7 and all(np.abs(grad).max() > 0.1 for grad in grads)
    assert_close(y, want_y, 2e-6)
    for got, want in zip(grads, want_grads, strict=True):
        assert_close(got, want, 4e-6)


@pytest.mark.parametrize("ffn", BACKENDS)
def test_bfloat16_equals_the_loop_within_rounding(ffn):
    args = make_case("padding", jnp.bfloat16)
    dy, y, grads = value_and_gradients(ffn, *args)
    want_y, want_grads = reference(*args, dy)
    for got, want in zip((y, *grads), (want_y, *want_grads), strict=True):
        assert got.dtype == jnp.bfloat16
        assert_close(got, want, 0.02)


@pytest.mark.parametrize("ffn", BACKENDS)
def test_float32_weights_under_bfloat16_rows_get_float32_gradients(ffn):
    x, expert, gate, *weights = make_case("even")
    args = x.astype(jnp.bfloat16), expert, gate, *weights
    dy, y, grads = value_and_gradients(ffn, *args)
    want_y, want_grads = reference(*args, dy)
    assert [v.dtype for v in (y, *grads)] == [jnp.bfloat16] * 2 + [jnp.float32] * 4
    for got, want in zip((y, *grads), (want_y, *want_grads), strict=True):
        assert_close(got, want, 0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("ffn", BACKENDS)
def test_garbage_in_dropped_rows_changes_nothing(ffn, bad):
    x, expert, gate, *weights = make_case("padding")
    E = len(weights[0])
    dropped_N = jnp.arange(len(x)) % 3 == 0
    expert = jnp.where(dropped_N[:, None], E, expert)
    dirty = jnp.where(dropped_N[:, None], bad, x)
    clean = value_and_gradients(ffn, x, expert, gate, *weights)
    got = value_and_gradients(ffn, dirty, expert, jnp.where(dropped_N[:, None], bad, gate), *weights)
    jax.tree.map(np.testing.assert_array_equal, got, clean)
    assert not np.any(got[1][dropped_N]) and not np.any(got[2][0][dropped_N])


@pytest.mark.parametrize("ffn", BACKENDS)
def test_a_row_does_not_depend_on_the_others(ffn):
    x, expert, gate, *weights = make_case("many_blocks")
    ffn = jax.jit(ffn)
    together = ffn(x, expert, gate, *weights)
    reversed_ = ffn(x[::-1], expert[::-1], gate[::-1], *weights)[::-1]
    half = ffn(x[::2], expert[::2], gate[::2], *weights)
    assert_close(reversed_, together, 1e-6)
    assert_close(half, together[::2], 1e-6)


@pytest.mark.parametrize("ffn", [blocked, pytest.param(ragged, marks=pytest.mark.slow)])
def test_a_scan_over_rematerialized_layers_equals_a_loop_with_the_other_backend(ffn):
    (other,) = {blocked, ragged} - {ffn}
    x, expert, gate, *weights = make_case("even")
    stacked = [0.3 * jnp.stack([w, 0.5 * w, -w]) for w in weights]

    def layer(ffn, x, weights):
        return x + jnp.tanh(ffn(x, expert, gate, *weights)), None

    def scanned(x, stacked):
        return jax.lax.scan(jax.checkpoint(partial(layer, ffn)), x, stacked)[0].sum()

    def looped(x, stacked):
        for i in range(3):
            x, _ = layer(other, x, [w[i] for w in stacked])
        return x.sum()

    got = jax.jit(jax.value_and_grad(scanned, argnums=(0, 1)))(x, stacked)
    want = jax.jit(jax.value_and_grad(looped, argnums=(0, 1)))(x, stacked)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), got, want)


@pytest.mark.parametrize(
    ("ffn", "check_vma"),
    [
        (expert_ffn, True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(expert_ffn, False), (ragged, True), (ragged, False)]
        ),
    ],
)
def test_eight_devices_equal_one(ffn, check_vma):
    """Rows are sharded over `data`, expert width over `tensor`; gradients of the weights are summed over `data`."""
    x, expert, gate, *weights = make_case("even")
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def local(*args):
        return jax.lax.psum(ffn(*args), "tensor")

    specs = (P("data"),) * 3 + (P(None, None, "tensor"),) * 2 + (P(None, "tensor"),)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
    got = value_and_gradients(sharded, x, expert, gate, *weights)
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6), got, value_and_gradients(ffn, x, expert, gate, *weights))


def test_ragged_ignores_rows_after_the_last_group(monkeypatch):
    """They are zero on CPU. A TPU kernel may leave anything there and multiply it by zero in a weight gradient."""
    args = make_case("padding")
    want = value_and_gradients(ragged, *args)

    def untidy(x_SK, w_EKO, count_E):
        owner_S = jnp.searchsorted(jnp.cumsum(count_E), jnp.arange(len(x_SK)), side="right")
        y_SO = jnp.einsum("se,sk,eko->so", jax.nn.one_hot(owner_S, len(w_EKO)), x_SK, w_EKO)
        return jnp.where(owner_S[:, None] < len(w_EKO), y_SO, jnp.nan)

    monkeypatch.setattr(jax.lax, "ragged_dot", untidy)
    got = value_and_gradients(lambda *args: ragged(*args), *args)
    jax.tree.map(lambda a, b: assert_close(a, b, 2e-6), got, want)


def test_the_platform_selects_the_backend_of_forward_and_backward():
    def ragged_dots(f, platform):
        return f.trace(*make_case("even")).lower(lowering_platforms=(platform,)).as_text().count("ragged_dot")

    forward, both = jax.jit(expert_ffn), jax.jit(partial(value_and_gradients, expert_ffn))
    assert ragged_dots(forward, "cpu") == ragged_dots(both, "cpu") == 0
    assert 0 < ragged_dots(forward, "tpu") < ragged_dots(both, "tpu")


def test_sorting_groups_the_choices_by_expert():
    expert_NA = jnp.array([[2, 0], [3, 2], [0, 3]], jnp.int32)  # 3: dropped
    permutation = sort_by_expert(expert_NA, 3)
    assert permutation.count_E.tolist() == [2, 0, 2]
    assert permutation.order_S[:6].tolist() == [1, 4, 0, 3, 6, 6]
    assert permutation.place_NA.tolist() == [[2, 0], [6 + BLOCK, 3], [1, 6 + BLOCK]]


def test_wrong_shapes_and_dtypes_are_rejected():
    x, expert, gate, *weights = make_case("even")
    with pytest.raises(TypeError, match="int32"):
        expert_ffn(x, expert.astype(jnp.float32), gate, *weights)
    with pytest.raises(ValueError, match="shapes"):
        expert_ffn(x, expert, gate, *weights[:2], weights[0])
    with pytest.raises(ValueError, match="sort key"):
        jax.eval_shape(partial(sort_by_expert, num_experts=2**10), jax.ShapeDtypeStruct((2**21, 1), jnp.int32))
