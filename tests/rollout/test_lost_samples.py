"""The samples that training loses, beside those that it keeps: biases of enumerated policies are exact."""

from fractions import Fraction
from itertools import product

import pytest
from api import Completion

from gspax.rollout.dynamic_sampling import find_constant_groups
from gspax.rollout.lost_samples import FATES, fate_of, lost_metrics

LIMIT, LONGEST = 3, 6


def sample(reward=1.0, length=2, finished=True, error=""):
    return Completion(length=length, finished=finished, rewards=(reward,), error=error)


def stopping_policy():
    """Each sample of a policy that stops with probability 1/2 at every token, as often as it is probable.

    The reward grows with the length; a sample that is cut has not ended, and has no reward.
    """
    copies = {length: 2 ** (LONGEST - length) for length in range(1, LONGEST + 1)}
    return [
        sample(reward=length / 4 if length <= LIMIT else 0.0, length=min(length, LIMIT), finished=length <= LIMIT)
        for length, count in copies.items()
        for _ in range(count)
    ]


def mean(values):
    return sum(map(Fraction, values)) / len(values)


def test_the_bias_of_a_length_limit_is_exact():
    samples = stopping_policy()
    ended = [each for each in samples if each.finished]
    wanted = {
        "reward": mean([each.reward for each in ended]),
        "length": mean([each.length for each in ended]),
    }
    everything = {"reward": mean([each.reward for each in samples]), "length": mean([each.length for each in samples])}
    left_out = lost_metrics(samples, without_overlong=True)
    for name in ("reward", "length"):
        assert left_out[f"samples/{name}_bias"] == pytest.approx(float(wanted[name] - everything[name]), abs=1e-12)
    assert left_out["samples/reward_bias"] > 0 > left_out["samples/length_bias"], "it learns from short answers"
    assert left_out["samples/cut"] == pytest.approx(7 / 63) and left_out["samples/cut_length"] == LIMIT
    cut = lost_metrics(samples)
    assert cut["samples/reward_bias"] == cut["samples/length_bias"] == 0, "cut samples are in the loss"


def test_the_bias_of_refills_is_exact():
    """Groups of two samples that succeed with probability 1/4: those of equal rewards are replaced."""
    outcomes = [1.0, 0.0, 0.0, 0.0]
    groups = [[sample(first), sample(second)] for first, second in product(outcomes, repeat=2)]
    constant_P = find_constant_groups([each for group in groups for each in group], group=2)
    kept, replaced = (
        [each for group, is_constant in zip(groups, constant_P, strict=True) if is_constant == side for each in group]
        for side in (False, True)
    )
    found = lost_metrics(kept, replaced)
    assert found["samples/reward_bias"] == pytest.approx(1 / 2 - 1 / 4, abs=1e-12)
    assert found["samples/replaced"] == pytest.approx(10 / 16)
    assert found["samples/replaced_reward"] == pytest.approx((1 / 16) / (10 / 16))
    assert "samples/failed_reward" not in found and found["samples/failed"] == 0


def test_failed_rewards_have_no_reward_of_their_own():
    samples = [sample(1.0), sample(0.5, length=4), sample(0.0, error="ValueError: x"), sample(0.0, error="late: no")]
    found = lost_metrics(samples, age_B=[0.0, 1.0, 2.0, 3.0])
    assert (found["samples/failed"], found["samples/late"]) == (0.25, 0.25)
    assert "samples/failed_reward" not in found and found["samples/failed_age"] == 2 and found["samples/late_age"] == 3
    assert found["samples/reward_bias"] == pytest.approx(1.5 / 4 - 0.75), "they train with grading.failed"
    assert found["samples/age_bias"] == 0


def test_nothing_is_said_where_nothing_is_lost():
    assert lost_metrics([sample(), sample(0.0)], age_B=[0.0, 0.0]) == {}
    cases = (sample(), sample(finished=False), sample(error="x"), sample(error="late: x"))
    assert [*map(fate_of, cases), fate_of(sample(), replaced=True)] == list(FATES)
