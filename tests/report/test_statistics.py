"""Estimators against exact enumeration, the bootstrap and simulation."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from gspax.report import statistics


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    correct_PN = np.random.default_rng(0).random((6, 5)) < np.linspace(0, 1, 6)[:, None]
    exact_P = [np.mean([any(subset) for subset in itertools.combinations(row, k)]) for row in correct_PN]
    np.testing.assert_allclose(statistics.pass_at_k(correct_PN, k), exact_P, atol=1e-12)


def test_pass_at_k_is_unbiased_and_exact_for_many_samples():
    correct_PN = np.zeros((1, 200), bool)
    correct_PN[0, 0] = True
    assert statistics.pass_at_k(correct_PN, 100)[0] == pytest.approx(0.5)
    rng, share = np.random.default_rng(1), 0.3
    found = statistics.pass_at_k(rng.random((20_000, 8)) < share, 4).mean()
    assert found == pytest.approx(1 - (1 - share) ** 4, abs=0.01)
    biased = (1 - (1 - (rng.random((20_000, 8)) < share).mean(axis=1)) ** 4).mean()
    assert abs(biased - (1 - (1 - share) ** 4)) > 0.03, "what replacing the share by its estimate would give"


def majority(answers, rewards):
    """The rule for one set of samples, in words."""
    counts = Counter(answer for answer in answers if answer is not None)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return np.mean([rewards[answer] for answer in winners]) if winners else 0.0


@pytest.mark.parametrize("k", [1, 3, 6])
def test_majority_at_k_is_the_mean_over_all_subsets(k):
    problems = [["a", "a", "b", "b", "c", None], ["a", "b", "b", "b", None, None], [None] * 6]
    rewards = {"a": 1.0, "b": 0.25, "c": 0.0, None: 0.0}
    exact_P = [np.mean([majority(each, rewards) for each in itertools.combinations(row, k)]) for row in problems]
    reward_PN = np.array([[rewards[answer] for answer in row] for row in problems])
    found_P = statistics.majority_at_k(problems, reward_PN, k)
    np.testing.assert_allclose(found_P, exact_P, atol=1e-12 if k == 6 else 0.04)
    np.testing.assert_array_equal(found_P, statistics.majority_at_k(problems, reward_PN, k))


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_of_the_samples_is_refused(k):
    with pytest.raises(ValueError, match=r"k: wanted 1 to N samples"):
        statistics.pass_at_k(np.ones((2, 4)), k)
    with pytest.raises(ValueError, match=r"k: wanted 1 to N samples"):
        statistics.majority_at_k([["a"] * 4] * 2, np.ones((2, 4)), k)


def simulate(rng, problems, samples):
    """Shares of correct samples of problems of different difficulty; their expectation is 0.7."""
    return rng.binomial(samples, rng.beta(0.7, 0.3, problems)) / samples


def test_the_standard_error_is_clustered_as_a_bootstrap_over_problems_finds_it():
    value_P = simulate(np.random.default_rng(2), 200, 8)
    means = np.random.default_rng(3).choice(value_P, (4000, 200)).mean(axis=1)
    found = statistics.estimate(value_P)
    low, high = np.quantile(means, (0.025, 0.975))
    assert found.low == pytest.approx(low, abs=0.006) and found.high == pytest.approx(high, abs=0.006)
    share = value_P.mean()
    assert found.high - found.low > 2 * 2 * 1.96 * math.sqrt(share * (1 - share) / 1600), "samples as if independent"


@pytest.mark.parametrize(("problems", "samples"), [(30, 32), (200, 4)])
def test_the_interval_holds_the_expectation_19_times_of_20(problems, samples):
    rng = np.random.default_rng(4)
    found = [statistics.estimate(simulate(rng, problems, samples)) for _ in range(2000)]
    assert 0.935 <= np.mean([each.low <= 0.7 <= each.high for each in found]) <= 0.965


def test_rewards_outside_of_0_and_1_get_an_interval_around_the_mean():
    value_P = np.array([-1.0, 0.0, 4.0, 1.0])
    found = statistics.estimate(value_P)
    assert (found.low + found.high) / 2 == pytest.approx(found.mean) == 1.0
    assert found.high - found.mean == pytest.approx(3.182446 * value_P.std(ddof=1) / 2, rel=1e-6), "t with 3 degrees"


def test_one_problem_has_no_interval():
    found = statistics.estimate(np.array([0.5]))
    assert found.mean == 0.5 and math.isnan(found.low) and math.isnan(found.high)


def test_differences_are_paired():
    rng = np.random.default_rng(5)
    before_P = simulate(rng, 100, 8)
    after_P = np.clip(before_P + rng.normal(0.1, 0.02, 100), None, 2)
    found = statistics.estimate_difference(before_P, after_P)
    assert 0.09 < found.low < found.mean < found.high < 0.11
    with pytest.raises(ValueError, match="after_P: wanted the problems of before_P"):
        statistics.estimate_difference(before_P, after_P[1:])
