"""Log-probs over the tokens that a sampler chose from: a float64 loop, and the gradient of what was sampled."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from gspax import losses

B, T, V, K, TEMPERATURE = 3, 6, 9, 4, 0.7


def inputs(seed=0):
    """Logits, tokens, and for each token a set of 1 to K tokens with it, in any order, then V or more."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((B, T, V)) * 3).astype(np.float32)
    tokens, kept = rng.integers(0, V, (B, T), np.int32), np.full((B, T, K), V, np.int32)
    for b, t in itertools.product(range(B), range(T)):
        others = rng.permutation(np.delete(np.arange(V), tokens[b, t]))[: rng.integers(0, K)]
        chosen = rng.permutation([tokens[b, t], *others])
        kept[b, t, : len(chosen)] = chosen
    return logits, tokens, kept


def by_hand(logits, tokens, kept):
    """Log-probs and entropies, float64 [B, T]."""
    logp, entropy = np.zeros((2, B, T))
    for b, t in itertools.product(range(B), range(1, T)):
        z = {v: np.float64(logits[b, t - 1, v]) / TEMPERATURE for v in kept[b, t] if v < V}
        lse = np.log(sum(np.exp(value - max(z.values())) for value in z.values())) + max(z.values())
        logp[b, t] = z[tokens[b, t]] - lse
        entropy[b, t] = -sum(np.exp(value - lse) * (value - lse) for value in z.values())
    return logp, entropy


WEIGHT = np.random.default_rng(1).standard_normal((2, B, T)).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_values_equal_a_loop_over_each_set(dtype):
    logits, tokens, kept = inputs()
    logp, entropy = by_hand(logits, tokens, kept)
    options = {"temperature": TEMPERATURE, "kept_BTK": kept.astype(dtype)}
    np.testing.assert_allclose(losses.token_logp(logits, tokens, **options), logp, atol=2e-6)
    for chunk in (1, 3, T):
        got = losses.chunked_token_logp(lambda hidden: hidden, jnp.asarray(logits), tokens, **options, chunk=chunk)
        np.testing.assert_allclose(got[0], logp, atol=2e-6)
        np.testing.assert_allclose(got[1], entropy, atol=2e-6)
    assert np.ptp((kept < V).sum(-1)) == K - 1, "sets of all sizes"


def test_the_gradient_is_that_of_the_loop_and_zero_outside_of_the_set():
    logits, tokens, kept = inputs()

    def total(logits):
        both = losses.chunked_token_logp(
            lambda hidden: hidden, logits, tokens, temperature=TEMPERATURE, kept_BTK=kept, chunk=2
        )
        return sum((weight * x).sum() for weight, x in zip(WEIGHT, both, strict=True))

    got = np.asarray(jax.jit(jax.grad(total))(jnp.asarray(logits)))
    inside = (kept[:, 1:, :, None] == np.arange(V)).any(axis=2)
    assert (got[:, :-1][~inside] == 0).all() and not got[:, -1].any()
    for b, t, v in zip(*np.nonzero(inside), strict=True):
        moved = [logits.astype(np.float64) for _ in range(2)]
        moved[0][b, t, v] += 1e-5
        moved[1][b, t, v] -= 1e-5
        high, low = (sum((w * x).sum() for w, x in zip(WEIGHT, by_hand(z, tokens, kept), strict=True)) for z in moved)
        np.testing.assert_allclose(got[b, t, v], (high - low) / 2e-5, atol=2e-5)


@pytest.mark.parametrize("noise", [0, V, 255])
def test_the_set_of_a_token_outside_the_mask_may_hold_anything(noise):
    logits, tokens, kept = inputs()
    mask = np.arange(T)[None] == [[2], [3], [5]]

    def total(logits, kept):
        both = losses.chunked_token_logp(lambda hidden: hidden, logits, tokens, kept_BTK=kept, chunk=T)
        return sum(jnp.where(mask, x, 0).sum() for x in both)

    noisy = np.where(mask[..., None], kept, noise).astype(np.uint8)
    wanted, got = (jax.value_and_grad(total)(jnp.asarray(logits), each) for each in (kept, noisy))
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize(
    ("kept", "problem", "message"),
    [
        (np.zeros((B, T, K), np.float32), TypeError, "kept_BTK must be an array .* of token ids; got float32"),
        (np.zeros((B, T), np.int32), ValueError, r"kept_BTK must be an array \[B, T, K\]"),
        (np.zeros((B, T - 1, K), np.int32), ValueError, r"rows and tokens \[3, 6\] of tokens_BT, .* got \[3, 5, 4\]"),
        (np.zeros((B, T, 0), np.int32), ValueError, r"room for a token; got \[3, 6, 0\]"),
    ],
)
def test_wrong_sets_are_named(kept, problem, message):
    logits, tokens, _ = inputs()
    with pytest.raises(problem, match=message):
        losses.token_logp(logits, tokens, kept_BTK=kept)


# The gradient of what was sampled, over all sequences of a small vocabulary

SIZE, LENGTH = 6, 2  # tokens of the vocabulary, and of a response
FILTERS = {"top-k": (3, 1.0, 0.0), "top-p": (0, 0.8, 0.0), "min-p": (0, 1.0, 0.2), "all": (4, 0.9, 0.1)}
CONTEXTS = [context for n in range(LENGTH) for context in itertools.product(range(SIZE), repeat=n)]
SEQUENCES = np.array(list(itertools.product(range(SIZE), repeat=LENGTH)))
REWARD = np.random.default_rng(3).random(len(SEQUENCES))
TABLE = np.random.default_rng(4).standard_normal((len(CONTEXTS), SIZE)) * 1.5  # the policy: logits of each context


def sampled_law(table, filters):
    """The probability of each sequence, float64, and the set that each of its tokens is chosen from."""
    kept = [sorted(reference.kept_tokens(row / TEMPERATURE, *filters)) for row in table]
    prob, sets = np.ones(len(SEQUENCES)), np.full((len(SEQUENCES), LENGTH, SIZE), SIZE, np.int32)
    for n, sequence in enumerate(SEQUENCES):
        for t, token in enumerate(sequence):
            number = CONTEXTS.index(tuple(sequence[:t]))
            weight = {v: np.exp(table[number, v] / TEMPERATURE) for v in kept[number]}
            prob[n] *= weight.get(token, 0.0) / sum(weight.values())
            sets[n, t, : len(weight)] = kept[number]
    return prob, sets


def exact_gradient(filters):
    """∇ of the expected reward of what is sampled, by finite differences; the sets may change with the policy."""
    gradient = np.zeros_like(TABLE)
    for place in np.ndindex(TABLE.shape):
        values = []
        for step in (1e-6, -1e-6):
            moved = TABLE.copy()
            moved[place] += step
            values.append(sampled_law(moved, filters)[0] @ REWARD)
        gradient[place] = (values[0] - values[1]) / 2e-6
    return gradient


def estimated_gradient(prob, sets, loss):
    """Minus the gradient of an on-policy loss over all sequences, each as often as it is sampled."""
    number = [[CONTEXTS.index(tuple(sequence[:t])) for t in range(LENGTH)] for sequence in SEQUENCES]
    tokens = jnp.asarray(np.pad(SEQUENCES, ((0, 0), (1, 0))), jnp.int32)
    kept = None if sets is None else jnp.asarray(np.pad(sets, ((0, 0), (1, 0), (0, 0))))
    advantage = jnp.asarray(len(SEQUENCES) * prob * REWARD, jnp.float32)
    mask = jnp.asarray(np.arange(LENGTH + 1)[None] > 0).repeat(len(SEQUENCES), axis=0)

    def objective(table):
        logits = jnp.pad(table[jnp.asarray(number)], ((0, 0), (0, 1), (0, 0)))
        logp = losses.token_logp(logits, tokens, temperature=TEMPERATURE, kept_BTK=kept)
        logp = jnp.where(jnp.isfinite(logp), logp, 0)
        terms = loss(logp, jax.lax.stop_gradient(logp), advantage, mask, aggregate=losses.by_constant)
        return -losses.reduce(terms)[0]

    return np.asarray(jax.grad(objective)(jnp.asarray(TABLE, jnp.float32)))


@pytest.mark.parametrize("name", FILTERS)
def test_the_gradient_is_that_of_the_reward_of_what_is_sampled_only_with_the_sets(name):
    """And without them it is not, and moves mass to tokens that are never sampled."""
    prob, sets = sampled_law(TABLE, FILTERS[name])
    assert len(set((sets < SIZE).sum(axis=(1, 2)))) > 1 or name == "top-k", "sets of several sizes"
    np.testing.assert_allclose(prob.sum(), 1)
    exact = exact_gradient(FILTERS[name])
    with_sets, without = (estimated_gradient(prob, each, losses.grpo) for each in (sets, None))
    np.testing.assert_allclose(with_sets, exact, atol=2e-6)
    assert np.abs(without - exact).max() > 0.02
    outside = exact == 0
    assert outside.any() and (with_sets[outside] == 0).all() and np.abs(without[outside]).max() > 0.01
