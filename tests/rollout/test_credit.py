"""Advantages of turns: from rewards to the gradient of GSPO-token, against loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import Compared, Completion, GradedTurns, Rollout, credit_turns, make_mesh, minibatches

from gspax import advantages, config, losses
from gspax.config import RowShape
from gspax.errors import UserError

G = 4
SPANS = [[[0, 2], [4, 5]], [[0, 3]], [[0, 1], [2, 4], [5, 8]], [[0, 4], [5, 6]]] * 2
REWARDS = [[0.5, 1.0], [0.0], [-0.2, 0.0, 1.0], [0.5, 0.0], [0.0, 0.0], [1.0], [0.0, 0.0, 0.0], [0.0, 1.0]]
PROMPT = np.array([3] * 4 + [2] * 4, np.int32)


def completions(added=(0.0,) * 8):
    """One for each of `REWARDS`, with something added to the reward of the last turn."""
    turns = [
        GradedTurns(spans, (*rewards[:-1], rewards[-1] + more), {})
        for spans, rewards, more in zip(SPANS, REWARDS, added, strict=True)
    ]
    return [Completion(length=1, finished=True, rewards=(sum(each.rewards),), turns=each) for each in turns]


def a_rollout():
    """Eight conversations of up to 8 tokens after prompts of 3 and 2; the mask has the turns."""
    length = np.array([spans[-1][1] for spans in SPANS], np.int32)
    mask = np.zeros((8, 11), bool)
    for row, spans in enumerate(SPANS):
        for start, end in spans:
            mask[row, PROMPT[row] + start : PROMPT[row] + end] = True
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, mask.shape) * (np.arange(11)[None] < (PROMPT + length)[:, None])
    return Rollout(
        tokens_BT=tokens.astype(np.int32),
        mask_BT=mask,
        logp_BT=np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32),
        prompt_length_B=PROMPT,
        length_B=length,
        finished_B=np.ones(8, bool),
        reply_B=length - mask.sum(axis=1, dtype=np.int32),
    )


def test_rewards_that_an_advantage_refuses_are_told():
    """A raw ValueError would end the run without the name of the setting."""
    with pytest.raises(
        UserError, match=r"advantage: gspax\.advantages\.maxrl refuses these rewards: reward_PG must not"
    ):
        credit_turns(advantages.maxrl, Compared(completions(), G), a_rollout(), discount=0.0)


def slowly(discount, finished=None):
    """R_k = Σ discount^(j-k) r_j, standardized among the group's conversations with a k-th turn, at its tokens."""
    placed = np.zeros((8, 11))
    for row in range(8):
        group = range(row // G * G, row // G * G + G)
        for k, (start, end) in enumerate(SPANS[row]):
            to_go = {
                other: sum(discount ** (j - k) * REWARDS[other][j] for j in range(k, len(REWARDS[other])))
                for other in group
                if len(REWARDS[other]) > k and (finished is None or finished[other])
            }
            if row not in to_go:
                continue
            values = np.array(list(to_go.values()))
            spread = values.std(ddof=1) if len(values) > 1 else 0.0
            advantage = (to_go[row] - values.mean()) / (spread + 1e-6)
            placed[row, PROMPT[row] + start : PROMPT[row] + end] = advantage
    return placed


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_advantage_of_a_turn_counts_the_rewards_after_it(discount):
    found, of_turns = credit_turns(advantages.standardize, Compared(completions(), G), a_rollout(), discount=discount)
    np.testing.assert_allclose(found, slowly(discount), atol=1e-5)
    assert [len(each) for each in of_turns] == [2, 1, 3, 2] * 2
    for row, (spans, values) in enumerate(zip(SPANS, of_turns, strict=True)):
        assert values == [found[row, PROMPT[row] + start] for start, _ in spans]


def test_added_rewards_join_the_last_turn_and_overlong_rollouts_are_left_out():
    added = np.arange(8, dtype=np.float32)
    found, _ = credit_turns(advantages.center, Compared(completions(), G, added), a_rollout())
    wanted, _ = credit_turns(advantages.center, Compared(completions(added.tolist()), G), a_rollout())
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    finished = np.array([True, False, True, True] * 2)
    some = Compared(completions(), G, finished_B=finished)
    found, _ = credit_turns(advantages.standardize, some, a_rollout())
    np.testing.assert_allclose(found, slowly(1.0, finished), atol=1e-5)
    assert not found[1].any()


def test_advantage_of_a_single_turn_is_that_of_the_completion():
    reward_PG = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    found = advantages.by_turn(advantages.standardize, reward_PG[..., None], jnp.ones((3, 4, 1), bool))
    np.testing.assert_array_equal(found[..., 0], advantages.standardize(reward_PG))


PACKED, PLAIN = RowShape(4, 24, 2, True), RowShape(8, 11, 8, False)


@pytest.mark.parametrize("shape", [PLAIN, PACKED], ids=["rows", "packed"])
def test_minibatches_have_the_advantage_of_each_token(shape):
    """Every token of a conversation, packed or not, and its advantage stay together; replies are not in the mask."""
    rollout, mesh = a_rollout(), make_mesh(config.Mesh(), jax.devices()[:1])
    advantage = np.random.default_rng(1).normal(size=(8, 11)).astype(np.float32)
    (batch,), layouts = minibatches.split_minibatches(rollout, 1, shape, mesh)
    (batch,) = minibatches.set_advantages([batch], layouts, advantage, mesh)
    placed = {
        name: np.asarray(getattr(batch, name)) for name in ("tokens_BT", "mask_BT", "sampler_logp_BT", "advantage")
    }
    assert placed["advantage"].shape == placed["tokens_BT"].shape
    segment, seen = np.asarray(batch.segment_BT), []
    for row in range(segment.shape[0]):
        for number in range(1, segment[row].max() + 1):
            here = segment[row] == number
            tokens = placed["tokens_BT"][row, here]
            (source,) = [i for i in range(8) if np.array_equal(rollout.tokens_BT[i, : len(tokens)], tokens)]
            seen.append(source)
            whole = slice(0, PROMPT[source] + rollout.length_B[source])
            np.testing.assert_array_equal(placed["mask_BT"][row, here], rollout.mask_BT[source, whole])
            np.testing.assert_array_equal(placed["sampler_logp_BT"][row, here], rollout.logp_BT[source, whole])
            np.testing.assert_array_equal(placed["advantage"][row, here], advantage[source, whole])
    assert sorted(seen) == list(range(8))


def gspo_token_gradient(logp, old, advantage, mask, low, high):
    """The gradient of -J of GSPO-token (arXiv 2507.18071, section 4.3) with respect to log π, in float64."""
    gradient = np.zeros_like(logp, np.float64)
    sequences = [row for row in range(len(mask)) if mask[row].any()]
    for row in sequences:
        own = np.nonzero(mask[row])[0]
        ratio = np.exp(np.mean([logp[row, t] - old[row, t] for t in own], dtype=np.float64))
        for t in own:
            held = (advantage[row, t] > 0 and ratio > 1 + high) or (advantage[row, t] < 0 and ratio < 1 - low)
            gradient[row, t] = 0.0 if held else -ratio * advantage[row, t] / len(own) / len(sequences)
    return gradient


@pytest.mark.parametrize("equal", [True, False])
def test_the_gradient_of_gspo_token_with_advantages_of_turns(equal):
    """With equal ones in a row it is that of GSPO; with those of turns it is the paper's formula, and another one."""
    rollout, rng = a_rollout(), np.random.default_rng(2)
    mask = rollout.mask_BT
    logp, old = (rng.normal(scale=1e-3, size=mask.shape).astype(np.float32) for _ in range(2))
    of_row = np.repeat(rng.normal(size=(8, 1)), 11, axis=1).astype(np.float32)
    advantage = of_row if equal else slowly(1.0).astype(np.float32)
    segment = jnp.asarray((np.arange(11)[None] < (PROMPT + rollout.length_B)[:, None]).astype(np.int32))
    limits = {"clip_low": 3e-4, "clip_high": 4e-4}

    def loss(logp, function, advantage, **options):
        value, _ = losses.reduce(function(logp, jnp.asarray(old), jnp.asarray(advantage), jnp.asarray(mask), **options))
        return value

    gradient = jax.grad(loss)(jnp.asarray(logp), losses.gspo_token, advantage, segment_ids=segment, **limits)
    wanted = gspo_token_gradient(logp, old, advantage, mask, 3e-4, 4e-4)
    assert 0 < (wanted != 0).sum() < mask.sum(), "some sequences are clipped"
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-8)
    sequence = jax.grad(loss)(jnp.asarray(logp), losses.gspo, of_row[:, 0], **limits)
    if equal:
        np.testing.assert_allclose(gradient, sequence, rtol=1e-5, atol=1e-8)
    else:
        assert np.abs(np.asarray(gradient) - np.asarray(sequence)).max() > 1e-2
