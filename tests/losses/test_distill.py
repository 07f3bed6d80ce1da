"""Distillation: against loops in float64, the exact KL by enumeration of all sequences, and autodiff of full sums."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pair_cases import CASES, exact_k3, held, pair
from test_kl import (
    CONTEXTS,
    MASK,
    ROW,
    exact_token_kl,
    log_softmax,
    numeric_gradient,
    probabilities,
    sequences,
    sums,
    tables,
    token_logps,
)

from gspax import losses
from gspax.losses import distill, kl, logprobs

V = 3
SETS = {
    "none": [()] * len(CONTEXTS),
    "the first": [(0,)] * len(CONTEXTS),
    "two": [(0, 2)] * len(CONTEXTS),
    "all": [(0, 1, 2)] * len(CONTEXTS),
    "others in each context": [((0,), (1,), (2,))[i % 3] for i in range(len(CONTEXTS))],
}
over_sets = pytest.mark.parametrize("name", SETS)


def kept_of(logits, teacher, sets):
    """`Kept` of all sequences, one column before the first token, as functions of the logits of every context."""
    student, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
    empty = jnp.zeros(len(sets[0]))
    rows = []
    for tokens in sequences():
        contexts = [ROW[tokens[:i]] for i in range(len(tokens))]
        columns = [(student[c, np.array(sets[c], int)], q[c, np.array(sets[c], int)]) for c in contexts]
        columns = [(empty, empty), *columns, *[(empty, empty)] * (3 - len(columns))]
        inside = [False, *(token in sets[c] for token, c in zip(tokens, contexts, strict=True))]
        inside += [False] * (4 - len(inside))
        rows.append((*(jnp.stack(side) for side in zip(*columns, strict=True)), np.array(inside)))
    return distill.Kept(*(jnp.stack(arrays) for arrays in zip(*rows, strict=True)))


def expected(terms_of, table, teacher, draws):
    """E[value] and E[∇ value] of a function of the student's logits, over sequences of a policy."""
    weight = jnp.asarray(probabilities(draws), jnp.float32)
    mean = lambda logits: jnp.sum(weight * terms_of(logits))  # noqa: E731
    return jax.value_and_grad(mean)(jnp.asarray(table, jnp.float32))


@over_sets
@pytest.mark.parametrize("off_policy", (False, True))
def test_the_expected_gradient_is_that_of_the_kl_for_every_set_of_kept_tokens(name, off_policy):
    table, teacher, old = tables()
    draws = old if off_policy else table
    old_logp = token_logps(jnp.asarray(old, jnp.float32)) if off_policy else None
    teacher32 = jnp.asarray(teacher, jnp.float32)

    def value_of(logits):
        kept = kept_of(logits, teacher32, SETS[name])
        arguments = token_logps(logits), token_logps(teacher32), MASK, kept
        return distill.reverse_kl(*arguments, old_logp=old_logp, aggregate=sums).value

    value, gradient = expected(value_of, table, teacher, draws)
    assert value == pytest.approx(exact_token_kl(table, teacher, draws), rel=1e-5)
    wanted = numeric_gradient(lambda t: exact_token_kl(t, teacher, draws), table)
    np.testing.assert_allclose(gradient, wanted, atol=2e-6)
    assert np.abs(wanted).max() > 0.1


@pytest.mark.parametrize("name", ("the first", "two", "others in each context"))
@pytest.mark.parametrize("rest", (False, True))
def test_the_truncated_sum_has_another_gradient(name, rest):
    """Σ over the kept tokens of p log(p/q), as it stands or with the sampled rest, is not the KL's gradient."""
    table, teacher, _ = tables()
    teacher32 = jnp.asarray(teacher, jnp.float32)

    def value_of(logits):
        kept = kept_of(logits, teacher32, SETS[name])
        logp = token_logps(logits)
        x = jax.lax.stop_gradient(logp - token_logps(teacher32))
        truncated = jnp.sum(jnp.exp(kept.logp_BTK) * (kept.logp_BTK - kept.teacher_logp_BTK), -1)
        value = truncated + rest * jnp.where(kept.has_sampled_BT, 0, x * logp)
        return jnp.sum(jnp.where(MASK, value, 0), -1)

    gradient = expected(value_of, table, teacher, table)[1]
    wanted = numeric_gradient(lambda t: exact_token_kl(t, teacher, table), table)
    assert np.abs(gradient - wanted).max() > 0.05


@pytest.mark.parametrize("divergence", ("reverse", "forward"))
def test_the_whole_vocabulary_gives_the_exact_divergence_of_each_context(divergence):
    table, teacher, _ = tables()
    function = {"reverse": distill.full_reverse_kl, "forward": distill.full_forward_kl}[divergence]
    got = function(jax.nn.log_softmax(jnp.asarray(table)), jax.nn.log_softmax(jnp.asarray(teacher)))
    logp, logq = log_softmax(table), log_softmax(teacher)
    wanted = np.exp(logp) * (logp - logq) if divergence == "reverse" else np.exp(logq) * (logq - logp)
    np.testing.assert_allclose(got, wanted.sum(-1), rtol=2e-5)


@pytest.mark.parametrize("beta", (0.1, 0.5, 0.9))
def test_jensen_shannon_equals_its_definition_and_has_the_two_kls_as_its_ends(beta):
    table, teacher, _ = tables()
    p, q = np.exp(log_softmax(table)), np.exp(log_softmax(teacher))
    m = beta * q + (1 - beta) * p
    wanted = np.sum(beta * q * np.log(q / m) + (1 - beta) * p * np.log(p / m), -1)
    arguments = jnp.log(jnp.asarray(p, jnp.float32)), jnp.log(jnp.asarray(q, jnp.float32))
    np.testing.assert_allclose(distill.jensen_shannon(*arguments, beta=beta), wanted, rtol=2e-4, atol=1e-6)
    ends = {1e-3: distill.full_forward_kl(*arguments) * 1e-3, 1 - 1e-3: distill.full_reverse_kl(*arguments) * 1e-3}
    for end, divergence in ends.items():
        np.testing.assert_allclose(distill.jensen_shannon(*arguments, beta=end), divergence, rtol=0.05, atol=2e-6)


def test_a_token_of_probability_0_adds_nothing_to_value_or_gradient():
    some = jnp.array([0.0, -jnp.inf, 1.0])
    for function in (distill.full_reverse_kl, distill.full_forward_kl, partial(distill.jensen_shannon, beta=0.3)):
        both = lambda x, f=function: f(jax.nn.log_softmax(x), jax.nn.log_softmax(some))  # noqa: E731
        value, gradient = jax.value_and_grad(both)(some)
        assert abs(value) < 1e-6 and np.isfinite(gradient).all() and np.abs(gradient).max() < 1e-6


def random_kept(x, size, seed=0):
    """`Kept` of a case of pair_cases, of which about half have the sampled token among the kept ones."""
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(2.0, (*x.mask.shape, size)).astype(np.float32)
    teacher = logp + rng.standard_normal(logp.shape).astype(np.float32)
    return distill.Kept(logp, teacher, (rng.random(x.mask.shape) < 0.5) if size else np.zeros(x.mask.shape, bool))


def loop(x, kept, old=None):
    """(value_B, gradient by logp, gradient by kept logp) in float64, of a mean over the tokens of each sequence."""
    value, by_logp, by_kept = np.zeros(len(x.mask)), np.zeros(x.mask.shape), np.zeros(kept.logp_BTK.shape)
    for b, tokens, ratios in x.sequences():
        for t, r in zip(tokens, ratios, strict=True):
            for k in range(kept.logp_BTK.shape[2]):
                p = math.exp(kept.logp_BTK[b, t, k])
                x_k = held(float(kept.logp_BTK[b, t, k] - kept.teacher_logp_BTK[b, t, k]))
                value[b] += p * exact_k3(x_k) / len(tokens)
                by_kept[b, t, k] = p * x_k / len(tokens)
            if not kept.has_sampled_BT[b, t]:
                weight = 1.0 if old is None else math.exp(held(float(x.logp[b, t] - old[b, t])))
                value[b] += weight * exact_k3(held(r)) / len(tokens)
                by_logp[b, t] = weight * held(r) / len(tokens)
    return value, by_logp, by_kept


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", (0, 1, 4))
def test_value_and_gradients_equal_the_loop(case, size):
    x = CASES[case]
    kept = random_kept(x, size)
    old = (x.logp + np.float32(0.1)).astype(np.float32)

    def value_of(logp, kept_logp):
        arguments = jnp.asarray(x.other), x.mask, kept._replace(logp_BTK=kept_logp)
        return distill.reverse_kl(logp, *arguments, old_logp=jnp.asarray(old)).value

    arrays = jnp.asarray(x.logp), jnp.asarray(kept.logp_BTK)
    gradients = jax.grad(lambda *each: value_of(*each).sum(), argnums=(0, 1))(*arrays)
    for got, wanted in zip((value_of(*arrays), *gradients), loop(x, kept, old), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", ("some_empty-0.3", "holes-0.3"))
def test_with_no_kept_token_it_is_the_token_kl(case):
    x = CASES[case]
    kept = random_kept(x, 0)
    arguments = jnp.asarray(x.other), x.mask

    def both(function, *more):
        return jax.value_and_grad(lambda logp: function(logp, *arguments, *more).value.sum())(jnp.asarray(x.logp))

    for got, wanted in zip(both(distill.reverse_kl, kept), both(kl.token_kl), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("garbage", (np.nan, np.inf, -np.inf, 3e38))
def test_padding_never_matters(garbage):
    x = CASES["some_empty-0.3"]
    kept = random_kept(x, 3)
    mask_BT1 = x.mask[..., None]
    filled = distill.Kept(
        *(np.where(mask_BT1, side, np.float32(garbage)) for side in kept[:2]), np.where(x.mask, kept[2], True)
    )

    def everything(x, kept):
        def loss(logp, kept_logp):
            terms = distill.reverse_kl(logp, jnp.asarray(x.other), x.mask, kept._replace(logp_BTK=kept_logp))
            return losses.reduce(terms)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(jnp.asarray(x.logp), jnp.asarray(kept.logp_BTK))

    filled, plain = (jax.tree.leaves(each) for each in (everything(x.fill(garbage), filled), everything(x, kept)))
    for got, wanted in zip(filled, plain, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_metrics_are_the_value_the_kept_mass_and_the_share_of_sampled_tokens():
    x = CASES["holes-0.3"]
    kept = random_kept(x, 2)
    metrics = losses.reduce(distill.reverse_kl(jnp.asarray(x.logp), jnp.asarray(x.other), x.mask, kept))[1]
    assert float(metrics["kept_mass"]) == pytest.approx(np.exp(kept.logp_BTK).sum(-1)[x.mask].mean(), rel=1e-5)
    assert float(metrics["kept_sampled"]) == pytest.approx(kept.has_sampled_BT[x.mask].mean(), rel=1e-5)
    tokens = distill.reverse_kl(jnp.asarray(x.logp), jnp.asarray(x.other), x.mask, kept, aggregate=losses.by_token)
    assert float(metrics["teacher_kl"]) == pytest.approx(float(losses.reduce(tokens)[0]), rel=1e-5)


B, T, D, E = 2, 7, 4, 6


def heads(vocabulary=V):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (B, T, D), (D, V), (B, T, E), (E, vocabulary)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("chunk", (1, 3, 6, 50))
@pytest.mark.parametrize(
    "divergence", (distill.full_reverse_kl, distill.full_forward_kl, partial(distill.jensen_shannon, beta=0.5))
)
def test_chunks_of_two_heads_of_other_widths_equal_the_divergence_of_whole_logits(divergence, chunk):
    hidden, head, teacher_hidden, teacher_head = heads()

    def in_chunks(hidden, head):
        project, teacher = (lambda x: x @ head), (lambda x: x @ teacher_head)
        arguments = project, hidden, teacher, teacher_hidden
        return distill.chunked_divergence(divergence, *arguments, temperature=0.7, chunk=chunk)

    def whole(hidden, head):
        student, teacher = (jax.nn.log_softmax(x / 0.7) for x in (hidden @ head, teacher_hidden @ teacher_head))
        return jnp.pad(divergence(student, teacher)[:, :-1], ((0, 0), (1, 0)))

    np.testing.assert_allclose(in_chunks(hidden, head), whole(hidden, head), rtol=1e-5, atol=1e-6)
    assert in_chunks(hidden, head).min() >= -1e-6 and (in_chunks(hidden, head)[:, 0] == 0).all()
    got, wanted = (jax.grad(lambda *x, f=f: f(*x).sum(), argnums=(0, 1))(hidden, head) for f in (in_chunks, whole))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_all_kept_tokens_give_the_gradient_of_the_whole_vocabulary():
    hidden, head, teacher_hidden, teacher_head = heads()
    tokens, mask = jnp.zeros((B, T), jnp.int32), jnp.ones((B, T), bool).at[:, 0].set(False)
    every = jnp.broadcast_to(jnp.arange(V, dtype=jnp.int32), (B, T, V))
    project, teacher = (lambda x: x @ head), (lambda x: x @ teacher_head)

    def kept_form(hidden):
        logits, teacher_logits = jnp.roll(project(hidden), 1, 1), jnp.roll(teacher(teacher_hidden), 1, 1)
        sides = (distill.select_logp(each, every) for each in (logits, teacher_logits))
        logp = logprobs.token_logp(project(hidden), tokens)
        return distill.reverse_kl(logp, logp, mask, distill.Kept(*sides, jnp.ones((B, T), bool))).value.sum()

    def whole(hidden):
        arguments = project, hidden, teacher, teacher_hidden
        value = distill.chunked_divergence(distill.full_reverse_kl, *arguments, chunk=2)
        return distill.mean_divergence(value, mask).value.sum()

    for got, wanted in zip(*(jax.value_and_grad(f)(hidden) for f in (kept_form, whole)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_select_logp_equals_the_log_softmax_at_the_kept_tokens():
    logits = jax.random.normal(jax.random.key(1), (2, 3, 5))
    ids = jnp.array([[[0, 4], [1, 2], [3, 0]], [[2, 1], [4, 3], [0, 1]]], jnp.int32)
    wanted = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits / 1.3)), np.asarray(ids), -1)
    np.testing.assert_allclose(distill.select_logp(logits, ids, temperature=1.3), wanted, rtol=1e-5)


def test_the_mixed_advantage_is_the_tasks_minus_the_scaled_log_ratio():
    x = CASES["holes-0.3"]
    task = np.linspace(-1, 1, len(x.mask)).astype(np.float32)
    got = distill.mixed_advantage(task, x.logp, x.other, x.mask, coefficient=0.5)
    np.testing.assert_allclose(got, np.where(x.mask, task[:, None] - 0.5 * (x.logp - x.other), 0), rtol=1e-5, atol=1e-6)
    by_token = np.broadcast_to(task[:, None], x.mask.shape)
    np.testing.assert_array_equal(distill.mixed_advantage(by_token, x.logp, x.other, x.mask, coefficient=0.5), got)


x = pair(CASES["holes-0.3"].mask, 0.3)
GOOD = random_kept(x, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: distill.reverse_kl(x.logp, x.other, x.mask, GOOD._replace(has_sampled_BT=x.logp)),
            TypeError,
            "kept.has_sampled_BT must be a bool array",
        ),
        (
            lambda: distill.reverse_kl(x.logp, x.other, x.mask, GOOD._replace(teacher_logp_BTK=GOOD.logp_BTK[..., :1])),
            ValueError,
            "kept.teacher_logp_BTK must have shape .* as kept.logp_BTK has",
        ),
        (
            lambda: distill.reverse_kl(x.logp, x.other, x.mask, distill.Kept(*(a[:1] for a in GOOD[:2]), GOOD[2])),
            ValueError,
            "kept.logp_BTK must have the rows and tokens .* of mask; got",
        ),
        (
            lambda: distill.select_logp(jnp.zeros((1, 1, 2)), jnp.zeros((1, 1, 3), jnp.int32)),
            ValueError,
            "kept_BCK must name at most 2 tokens; got 3",
        ),
        (
            lambda: distill.select_logp(jnp.zeros((1, 2, 2)), jnp.zeros((1, 1, 1), jnp.int32)),
            ValueError,
            r"kept_BCK must have the rows and positions \[1, 2\] of logits_BCV; got \[1, 1, 1\]",
        ),
        (
            lambda: distill.jensen_shannon(jnp.zeros(3), jnp.zeros(3), beta=1.0),
            ValueError,
            "beta must be above 0 and below 1",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_teacher_of_another_vocabulary_or_other_rows_is_refused():
    hidden, head, teacher_hidden, teacher_head = heads(vocabulary=4)
    call = partial(distill.chunked_divergence, distill.full_reverse_kl, lambda x: x @ head, hidden, chunk=3)
    with pytest.raises(ValueError, match="teacher_project must give the student's 3 tokens of the vocabulary; got 4"):
        call(lambda x: x @ teacher_head, teacher_hidden)
    with pytest.raises(ValueError, match=r"teacher_hidden_BTE must have the rows and tokens \[2, 7\] of hidden_BTD"):
        call(lambda x: x @ teacher_head, teacher_hidden[:, 1:])


def test_the_teacher_gets_no_gradient():
    hidden, head, teacher_hidden, teacher_head = heads()

    def loss(hidden, teacher_hidden, teacher_head):
        arguments = (lambda x: x @ head), hidden, (lambda x: x @ teacher_head), teacher_hidden
        return distill.chunked_divergence(distill.full_forward_kl, *arguments, chunk=3).sum()

    student, *teacher = jax.grad(loss, argnums=(0, 1, 2))(hidden, teacher_hidden, teacher_head)
    assert np.abs(student).max() > 0.01 and not any(np.any(gradient) for gradient in teacher)
