"""Dynamic sampling: which groups are replaced by which, and what is counted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import Completion, GradedTurns, Rollout, make_mesh, named_sharding
from small_experiment import experiment

from gspax.config import Mesh, Placement
from gspax.data import Problem
from gspax.experiment import validate
from gspax.rollout.completion import GradedBatch
from gspax.rollout.dynamic_sampling import find_constant_groups, plan_refill, refill, replace_groups

G = experiment.sampling.group
MESH = make_mesh(Mesh(), jax.devices()[:8])


def completion(*rewards, **fields):
    return Completion(**{"length": 1, "finished": True, "rewards": tuple(map(float, rewards))} | fields)


def completions(*groups, **fields):
    return [completion(reward, **fields) for group in groups for reward in group]


def test_a_group_without_a_signal_has_equal_rewards():
    samples = completions((0, 0, 0), (1, 0, 1), (0.1 + 0.2, 0.3, 0.3), (1, 1, 1))
    assert find_constant_groups(samples, group=3).tolist() == [True, False, True, True], "equal as float32"
    several = [completion(*pair) for pair in ([1, 0], [0, 1], [1, 0], [1, 0])]
    assert find_constant_groups(several, group=2).tolist() == [False, True]


def test_turns_with_different_rewards_and_equal_sums_are_a_signal():
    turns = [GradedTurns((), rewards, {}) for rewards in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0))]
    samples = [completion(1, turns=each) for each in turns]
    assert find_constant_groups(samples, group=2).tolist() == [True, True]
    assert find_constant_groups(samples, group=2, by_turn=True).tolist() == [False, True]


def test_truncated_completions_do_not_count_where_they_are_filtered():
    samples = completions((0, 0, 1), (0, 1, 1))
    samples[2:4] = [replace(each, finished=False) for each in samples[2:4]]
    assert find_constant_groups(samples, group=3).tolist() == [False, False]
    assert find_constant_groups(samples, group=3, without_overlong=True).tolist() == [True, True]
    truncated = completions((0, 1, 1), finished=False)
    assert find_constant_groups(truncated, group=3, without_overlong=True).tolist() == [True]


@pytest.mark.parametrize(
    ("constant", "fresh_constant", "source"),
    [
        ([1, 0, 1, 1], [1, 0, 1, 0], [1, -1, 3, -1]),
        ([1, 0, 0, 1], [0, 0, 0, 0], [0, -1, -1, 1]),
        ([1, 1, 1, 1], [1, 1, 1, 1], [-1, -1, -1, -1]),
        ([0, 0, 0, 0], [0, 0, 0, 0], [-1, -1, -1, -1]),
    ],
)
def test_fresh_groups_with_a_signal_replace_the_first_ones_without(constant, fresh_constant, source):
    assert plan_refill(np.array(constant, bool), np.array(fresh_constant, bool)).tolist() == source


def rollout(first, width, rows=8):
    """Values that tell batch, row and column."""
    value_BT = (first + 100 * np.arange(rows)[:, None] + np.arange(width)).astype(np.int32)
    experts = np.repeat(value_BT[:, None, :, None], 2, axis=1)
    values = (value_BT, value_BT % 3 == 0, (value_BT / 7).astype(np.float32), experts)
    tokens_BT, mask_BT, logp_BT, expert_BLTA = jax.device_put(values, named_sharding(MESH, "batch"))
    lengths = first + np.arange(rows, dtype=np.int32)
    return Rollout(
        tokens_BT=tokens_BT,
        mask_BT=mask_BT,
        logp_BT=logp_BT,
        prompt_length_B=lengths,
        length_B=lengths + 1,
        finished_B=lengths % 2 == 0,
        expert_BLTA=expert_BLTA,
    )


@pytest.mark.parametrize("widths", [(5, 5), (5, 3), (3, 5)])
def test_replaced_groups_are_those_of_the_fresh_rollout_in_every_field(widths):
    old, new = rollout(1, widths[0]), rollout(1001, widths[1])
    found = replace_groups(old, new, np.array([-1, 3, 0, -1]), MESH)
    for name in ("tokens_BT", "mask_BT", "logp_BT", "prompt_length_B", "length_B", "finished_B", "expert_BLTA"):
        a, b, got = (np.asarray(getattr(each, name)) for each in (old, new, found))
        if a.ndim == 4:
            widen = [[(0, 0), (0, 0), (0, 5 - each.shape[2]), (0, 0)] for each in (a, b)]
            a, b = (np.pad(each, pad, mode="edge") for each, pad in zip((a, b), widen, strict=True))
        if a.ndim == 2:
            a, b = (np.pad(each, ((0, 0), (0, 5 - each.shape[1]))) for each in (a, b))
        np.testing.assert_array_equal(got, np.stack([a[0], a[1], b[6], b[7], b[0], b[1], a[6], a[7]]))
        assert got.dtype == a.dtype
    assert found.tokens_BT.sharding == old.tokens_BT.sharding


def batch_of(number, *groups):
    rows = completions(*groups, length=number)
    count = jnp.full((len(rows), 1), number)
    lengths = np.full(len(rows), number)
    sampled = Rollout(
        tokens_BT=count, mask_BT=count, logp_BT=count, prompt_length_B=lengths, length_B=lengths, finished_B=lengths
    )
    return GradedBatch(0, len(groups), sampled, rows, [Problem(str(number), "")] * len(groups))


FLAT, GOOD = (0, 0, 0, 0), (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("bound", "batches", "from_batches", "taken"),
    [
        (3, [(GOOD, GOOD)], [0, 0], 2),
        (3, [(FLAT, GOOD), (FLAT, GOOD)], [1, 0], 4),
        (3, [(FLAT, FLAT), (FLAT, GOOD), (FLAT, FLAT), (GOOD, GOOD)], [1, 3], 8),
        (2, [(FLAT, FLAT), (FLAT, GOOD), (FLAT, FLAT)], [1, 0], 6),
    ],
)
def test_refills_end_when_every_group_has_a_signal_or_at_the_bound(bound, batches, from_batches, taken):
    sampling = replace(experiment.sampling, prompts=2, max_refills=bound)
    starts = []

    def sample(start):
        starts.append(start)
        return batch_of(len(starts), *batches[len(starts)])

    found = refill(batch_of(0, *batches[0]), sample, sampling, make_mesh(Mesh(), jax.devices()[:1]))
    assert starts == [2 * (n + 1) for n in range(len(batches) - 1)]
    assert [each.length for each in found.completions] == np.repeat(from_batches, G).tolist()
    assert [int(problem.prompt) for problem in found.problems] == from_batches
    assert (
        found.rollout.tokens_BT[:, 0].tolist() == found.rollout.length_B.tolist() == np.repeat(from_batches, G).tolist()
    )
    assert found.taken == taken
    everything = [reward for batch in batches for group in batch for reward in group]
    sampled = sorted(each.length for each in [*found.completions, *found.replaced])
    assert sampled == np.repeat(range(len(batches)), 2 * G).tolist(), "each sample is kept or among the replaced"
    assert found.metrics == {
        "sampling/prompts": taken,
        "sampling/groups_replaced": sum(each > 0 for each in from_batches),
        "reward/mean_sampled": np.mean(everything),
    }


def test_nothing_is_drawn_ahead_of_refills():
    variant = replace(experiment, sampling=replace(experiment.sampling, max_refills=2))
    ahead = replace(variant, placement=Placement(devices=1, staleness=1))
    assert (
        "sampling.max_refills: wanted 0 beside placement.staleness, whose problems are fixed ahead, got 2"
        in validate(ahead)
    )
    assert validate(variant) == []
