"""Log-probabilities and entropies: the shift, the reference, and chunked projection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from gspax import losses
from gspax.losses import logprobs

B, T, D, V = 3, 11, 5, 7


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((B, T, D)).astype(np.float32)
    matrix = rng.standard_normal((D, V)).astype(np.float32)
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    return jnp.asarray(hidden), jnp.asarray(matrix), jnp.asarray(tokens)


def primitives(jaxpr):
    """Names of all primitives in a jaxpr, nested ones included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


@pytest.mark.parametrize("temperature", (1.0, 0.7, 3))
def test_values_equal_the_reference(temperature):
    hidden, matrix, tokens = inputs()
    logits = hidden @ matrix
    wanted_logp, wanted_entropy = reference.token_logp(np.asarray(logits), np.asarray(tokens), temperature)
    logp, entropy = losses.chunked_token_logp(lambda h: h @ matrix, hidden, tokens, temperature=temperature, chunk=T)
    np.testing.assert_allclose(losses.token_logp(logits, tokens, temperature=temperature), wanted_logp, atol=2e-6)
    np.testing.assert_allclose(logp, wanted_logp, atol=2e-6)
    np.testing.assert_allclose(entropy, wanted_entropy, atol=2e-6)


def test_a_column_refers_to_its_own_token():
    """Logits at position t make token t + 1 certain."""
    tokens = jnp.array([[3, 1, 4, 1, 5]], jnp.int32)
    logits = 50 * jax.nn.one_hot(jnp.array([[1, 4, 1, 5, 0]]), 6)
    logp = losses.token_logp(logits, tokens)
    np.testing.assert_allclose(logp, np.zeros((1, 5)), atol=1e-6)
    assert losses.token_logp(logits, tokens.at[0, 2].set(0))[0, 2] == -50


def test_column_0_and_the_last_logits_are_unused():
    hidden, matrix, tokens = inputs()
    gradient = jax.jit(jax.grad(lambda logits: losses.token_logp(logits, tokens).sum()))(hidden @ matrix)
    assert not losses.token_logp(hidden @ matrix, tokens)[:, 0].any()
    assert np.asarray(gradient)[:, :-1].any(-1).all() and not gradient[:, -1].any()


WEIGHT = jnp.asarray(np.random.default_rng(1).standard_normal((2, B, T)).astype(np.float32))


@functools.cache
def whole():
    """Values and gradients from the logits of all positions at once, temperature 0.7."""
    hidden, matrix, tokens = inputs()

    def total(hidden, matrix):
        logits = hidden @ matrix
        logp = losses.token_logp(logits, tokens, temperature=0.7)
        p = jax.nn.log_softmax(logits[:, :-1] / 0.7)
        entropy = jnp.pad(-(jnp.exp(p) * p).sum(-1), ((0, 0), (1, 0)))
        return (logp * WEIGHT[0] + entropy * WEIGHT[1]).sum(), (logp, entropy)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(hidden, matrix)


@pytest.mark.parametrize(
    "chunk, compiled", [(1, True), (3, True), (4, False), (5, True), (9, True), (10, True), (11, True)]
)
def test_chunks_keep_values_and_gradients(chunk, compiled):
    """Chunks of 3, 4 and 9 leave a remainder of the T - 1 = 10 predictions."""
    hidden, matrix, tokens = inputs()

    def chunked(hidden, matrix):
        logp, entropy = losses.chunked_token_logp(lambda h: h @ matrix, hidden, tokens, temperature=0.7, chunk=chunk)
        return (logp * WEIGHT[0] + entropy * WEIGHT[1]).sum(), (logp, entropy)

    maybe_jit = jax.jit if compiled else lambda f: f
    (_, wanted), wanted_gradient = whole()
    (_, got), gradient = maybe_jit(jax.value_and_grad(chunked, argnums=(0, 1), has_aux=True))(hidden, matrix)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == (B, T) and a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=2e-6)
    for a, b in zip(gradient, wanted_gradient, strict=True):
        assert np.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_positions_can_be_scored_in_separate_parts(parts):
    """As on a mesh: no position depends on another before the shift, which keeps the length."""
    hidden, matrix, tokens = inputs()
    hidden, tokens = hidden[:, :10], tokens[:, :10]
    how = {"temperature": 0.7, "chunk": 4}

    def total(scored):
        logp, entropy = scored
        return (logp * WEIGHT[0, :, :10] + entropy * WEIGHT[1, :, :10]).sum(), scored

    def by_parts(hidden, matrix):
        def score(hidden, tokens):
            pairs = zip(jnp.split(hidden, parts, axis=1), jnp.split(tokens, parts, axis=1), strict=True)
            scores = [logprobs.logp_and_entropy(part @ matrix, tokens, how["temperature"]) for part, tokens in pairs]
            return tuple(jnp.concatenate(each, axis=1) for each in zip(*scores, strict=True))

        return total(logprobs.shift(score, hidden, tokens, keep_length=True))

    def whole(hidden, matrix):
        return total(losses.chunked_token_logp(lambda h: h @ matrix, hidden, tokens, **how))

    got, wanted = (jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(hidden, matrix) for f in (by_parts, whole))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert not got[0][0][:, -1].any() and not got[1][0][:, 0].any()


@pytest.mark.parametrize("chunk, looped", ((1, True), (4, True), (9, True), (10, False), (11, False), (12, False)))
def test_a_loop_exists_only_if_the_sequence_exceeds_the_chunk(chunk, looped):
    """T tokens make T - 1 predictions."""
    hidden, matrix, tokens = inputs()

    def total(matrix):
        return losses.chunked_token_logp(lambda h: h @ matrix, hidden, tokens, chunk=chunk)[0].sum()

    names = set(primitives(jax.make_jaxpr(jax.grad(total))(matrix).jaxpr))
    assert ("scan" in names) == looped
    assert any(name.startswith(("remat", "checkpoint")) for name in names) == looped


def test_the_logits_of_all_positions_never_exist():
    """No array of forward or backward has the size [B, T, V]; some have [B, chunk, V]."""
    rows, steps, vocab = 2, 64, 512
    hidden = jnp.ones((rows, steps, D))
    tokens = jnp.zeros((rows, steps), jnp.int32)

    def total(matrix, chunk):
        logp, entropy = losses.chunked_token_logp(lambda h: h @ matrix, hidden, tokens, chunk=chunk)
        return logp.sum() + entropy.sum()

    def temporary(chunk):
        gradient = jax.jit(jax.grad(functools.partial(total, chunk=chunk)))
        return gradient.lower(jnp.ones((D, vocab))).compile().memory_analysis().temp_size_in_bytes

    everything = 4 * rows * steps * vocab
    assert temporary(8) < everything
    assert temporary(steps) > everything


def test_a_reported_entropy_costs_no_gradient():
    hidden, matrix, tokens = inputs()

    def operations(report, bonus=0.0):
        def total(matrix):
            logp, entropy = losses.chunked_token_logp(lambda h: h @ matrix, hidden, tokens, chunk=4)
            return (logp + bonus * entropy if bonus else logp).sum(), report(entropy)

        compiled = jax.jit(jax.value_and_grad(total, has_aux=True)).lower(matrix).compile()
        return compiled.cost_analysis()["flops"]

    assert operations(lambda x: x) == operations(jax.lax.stop_gradient) < operations(lambda x: x, bonus=0.1)


def test_entropy_is_log_v_for_uniform_logits_and_0_for_a_certain_token():
    hidden = jnp.stack([jnp.zeros((4, V)), 1e4 * jax.nn.one_hot(jnp.full(4, 2), V)])
    tokens = jnp.full((2, 4), 2, jnp.int32)
    logp, entropy = losses.chunked_token_logp(lambda h: h, hidden, tokens, chunk=2)
    np.testing.assert_allclose(entropy, [[0] + [np.log(V)] * 3, [0] * 4], rtol=1e-6)
    np.testing.assert_allclose(logp, [[0] + [-np.log(V)] * 3, [0] * 4], rtol=1e-6)


def test_logits_of_minus_infinity_give_no_nan():
    tokens = jnp.ones((1, 4), jnp.int32)
    logits = jnp.zeros((1, 4, 3)).at[..., 2].set(-jnp.inf)
    logp, entropy = losses.chunked_token_logp(lambda h: h, logits, tokens, chunk=2)
    np.testing.assert_allclose(logp[:, 1:], -np.log(2), rtol=1e-6)
    np.testing.assert_allclose(entropy[:, 1:], np.log(2), rtol=1e-6)
    gradient = jax.jit(
        jax.grad(lambda x: sum(y.sum() for y in losses.chunked_token_logp(lambda h: h, x, tokens, chunk=2)))
    )
    assert np.isfinite(gradient(logits)).all()


def test_score_norm_is_the_squared_gradient_of_the_log_prob():
    hidden, matrix, tokens = inputs()
    logits = 3 * hidden @ matrix
    few = jnp.stack([tokens, (tokens + 1) % logits.shape[-1], jnp.full_like(tokens, logits.shape[-1])], axis=-1)
    for kept in (None, few):
        gradient = jax.grad(lambda logits: logprobs.logp_and_entropy(logits, tokens, 1.0, kept)[0].sum())(logits)  # noqa: B023
        norm = losses.score_norm(logits, tokens, kept)
        np.testing.assert_allclose(norm, (np.asarray(gradient) ** 2).sum(-1), rtol=1e-5)
    certain = losses.score_norm(jnp.array([[100.0, 0.0], [6.0, 0.0]]), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(
        certain, [0, 2 * (1 / (1 + np.exp(6.0))) ** 2], rtol=1e-4, err_msg="without cancellation"
    )


def test_large_logits_do_not_overflow():
    hidden, matrix, tokens = inputs()
    logp, entropy = losses.chunked_token_logp(lambda h: 1e5 + h @ matrix, hidden, tokens, chunk=4)
    assert np.isfinite(logp).all() and np.isfinite(entropy).all()


def test_padding_of_the_last_chunk_gives_no_nan_if_the_projection_of_zeros_does():
    hidden, matrix, tokens = inputs()

    def total(hidden, matrix):
        def project(h):
            return (h / jnp.sqrt((h**2).sum(-1, keepdims=True))) @ matrix

        return losses.chunked_token_logp(project, hidden, tokens, chunk=4)[0].sum()

    value, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(hidden, matrix)
    assert np.isfinite(value) and all(np.isfinite(gradient).all() for gradient in gradients)


def test_hidden_states_may_be_bfloat16():
    hidden, matrix, tokens = inputs()
    hidden = hidden.astype(jnp.bfloat16)

    def project(h):
        return jnp.einsum("bcd,dv->bcv", h, matrix.astype(jnp.bfloat16), preferred_element_type=jnp.float32)

    def total(hidden):
        return losses.chunked_token_logp(project, hidden, tokens, chunk=4)[0].sum()

    logp, _ = losses.chunked_token_logp(project, hidden, tokens, chunk=4)
    np.testing.assert_allclose(logp, losses.token_logp(project(hidden), tokens), atol=2e-6)
    assert jax.jit(jax.grad(total))(hidden).dtype == jnp.bfloat16


def test_a_sequence_of_one_token_has_log_prob_0():
    hidden, matrix, tokens = inputs()
    np.testing.assert_array_equal(losses.token_logp(hidden[:, :1] @ matrix, tokens[:, :1]), np.zeros((B, 1)))
    for x in losses.chunked_token_logp(lambda h: h @ matrix, hidden[:, :1], tokens[:, :1], chunk=1):
        np.testing.assert_array_equal(x, np.zeros((B, 1)))


def test_invalid_arguments_are_rejected():
    hidden, matrix, tokens = inputs()
    logits = hidden @ matrix
    with pytest.raises(TypeError, match=r"logits_BTV must be a float32 .*got bfloat16"):
        losses.token_logp(logits.astype(jnp.bfloat16), tokens)
    with pytest.raises(TypeError, match=r"logits_BTV must be a float32 .*got float64"):
        losses.token_logp(np.asarray(logits, np.float64), tokens)
    with pytest.raises(ValueError, match=r"logits_BTV must be .*\[B, T, V\]; got float32 \[11, 7\]"):
        losses.token_logp(logits[0], tokens)
    with pytest.raises(TypeError, match=r"tokens_BT must be an int32 .*got float32"):
        losses.token_logp(logits, tokens.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"tokens_BT must have shape \[3, 11\].*got \[3, 10\]"):
        losses.token_logp(logits, tokens[:, 1:])
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature must be finite and above 0"):
            losses.token_logp(logits, tokens, temperature=wrong)
    with pytest.raises(TypeError, match="temperature must be a Python number"):
        losses.token_logp(logits, tokens, temperature=jnp.ones(3))

    def chunked(project=lambda h: h @ matrix, hidden=hidden, **kwargs):
        return losses.chunked_token_logp(project, hidden, tokens, **{"chunk": 4, **kwargs})

    with pytest.raises(TypeError, match=r"result of project must be a float32 .*got bfloat16 \[3, 4, 7\]"):
        chunked(lambda h: (h @ matrix).astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"result of project must have shape \[3, 4\].*got \[3, 3\]"):
        chunked(lambda h: (h @ matrix)[:, 1:])
    with pytest.raises(ValueError, match=r"hidden_BTD must be an array \[B, T, D\]; got float32 \[3, 11\]"):
        chunked(hidden=hidden[..., 0])
    with pytest.raises(ValueError, match=r"tokens_BT must have shape \[3, 5\].*got \[3, 11\]"):
        chunked(hidden=hidden[:, :5])
    with pytest.raises(ValueError, match="chunk must be at least 1; got 0"):
        chunked(chunk=0)
    with pytest.raises(TypeError, match="chunk must be a Python int; got float"):
        chunked(chunk=2.0)
