"""Statistics of several samples per problem: pure functions of numpy arrays.

Every interval is a 95 % confidence interval. Samples of one problem are not independent, so it is clustered by problem:
it takes one value per problem and treats problems as sampled at random (Miller 2024, arXiv 2411.00640).

Axes: P problems, N samples of each, A different answers of a problem.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

_SUBSETS = 1000  # subsets of k samples that maj@k averages over
_SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its confidence interval; the bounds are NaN for a single problem."""

    mean: float
    low: float
    high: float


class Interval(TypedDict):
    """An estimate as JSON, which has no NaN."""

    mean: float
    low: float | None
    high: float | None


def to_json(estimate: Estimate) -> Interval:
    """Convert an estimate to a JSON object; NaN becomes None."""
    low, high = (None if math.isnan(bound) else bound for bound in (estimate.low, estimate.high))
    return {"mean": estimate.mean, "low": low, "high": high}


def show(interval: Interval, spec: str = ".3f") -> str:
    """Format the mean of an estimate, and its interval if it has one.

    >>> show({"mean": 0.5, "low": 0.25, "high": 0.75}, ".2f")
    '0.50 [0.25, 0.75]'
    """
    bounds = "" if interval["low"] is None else f" [{interval['low']:{spec}}, {interval['high']:{spec}}]"
    return f"{interval['mean']:{spec}}{bounds}"


def estimate(value_P: np.ndarray) -> Estimate:
    """Estimate the mean of one value per problem, with its confidence interval.

    Values in [0, 1] get a Wilson interval at the effective sample size mean · (1 - mean) / SE², which stays in [0, 1]
    and has a width even if all values are equal (there the effective size is P). Others get mean ± t · SE. SE is the
    standard error over problems, t the quantile of Student's distribution with P - 1 degrees of freedom.

    >>> share = estimate(np.array([1.0, 1.0, 0.5, 0.0, 1.0, 0.5]))
    >>> round(share.mean, 3), round(share.low, 3), round(share.high, 3)
    (0.667, 0.265, 0.917)
    >>> round(estimate(np.ones(30)).low, 3)
    0.878
    """
    value_P = np.asarray(value_P, np.float64)
    if value_P.ndim != 1 or not len(value_P):
        raise ValueError(f"value_P: wanted one value for each of at least one problem, got shape {value_P.shape}")
    mean, P = float(value_P.mean()), len(value_P)
    if P == 1 or value_P.min() < 0 or value_P.max() > 1:
        return estimate_mean(value_P)
    error, t = float(value_P.std(ddof=1)) / np.sqrt(P), _student_quantile(P - 1)
    size = mean * (1 - mean) / error**2 if error > 0 else P
    center = (mean + t**2 / (2 * size)) / (1 + t**2 / size)
    half = t / (1 + t**2 / size) * np.sqrt(mean * (1 - mean) / size + t**2 / (4 * size**2))
    return Estimate(mean, max(0.0, float(center - half)), min(1.0, float(center + half)))


def estimate_mean(value_N: np.ndarray) -> Estimate:
    """Estimate the mean of independent values, such as one per seed, as mean ± t · SE.

    >>> estimate_mean(np.array([0.5, 0.75, 1.0])).mean
    0.75
    """
    value_N = np.asarray(value_N, np.float64)
    mean, N = float(value_N.mean()), len(value_N)
    if N == 1:
        return Estimate(mean, math.nan, math.nan)
    half = _student_quantile(N - 1) * float(value_N.std(ddof=1) / np.sqrt(N))
    return Estimate(mean, mean - half, mean + half)


def estimate_gap(before_N: np.ndarray, after_M: np.ndarray) -> Estimate:
    """Estimate the difference of the means of two independent samples, `after - before`, with Welch's interval.

    The bounds are NaN if either has a single value.

    >>> gap = estimate_gap(np.array([1.0, 2.0, 3.0]), np.array([4.0, 6.0]))
    >>> gap.mean, round(gap.low, 2), round(gap.high, 2)
    (3.0, -2.98, 8.98)
    """
    both = [np.asarray(value, np.float64) for value in (before_N, after_M)]
    mean = float(both[1].mean() - both[0].mean())
    if min(map(len, both)) < 2:
        return Estimate(mean, math.nan, math.nan)
    errors = [float(value.var(ddof=1)) / len(value) for value in both]
    if sum(errors) == 0:
        return Estimate(mean, mean, mean)
    freedom = sum(errors) ** 2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, both, strict=True))
    half = _student_quantile(freedom) * float(np.sqrt(sum(errors)))
    return Estimate(mean, mean - half, mean + half)


def estimate_difference(before_P: np.ndarray, after_P: np.ndarray) -> Estimate:
    """Estimate the mean of `after_P - before_P`, both of the same problems, as mean ± t · SE of paired differences.

    >>> estimate_difference(np.array([0.0, 0.5, 0.25]), np.array([0.5, 0.5, 1.0])).mean
    0.4166666666666667
    """
    if np.shape(before_P) != np.shape(after_P):
        raise ValueError(f"after_P: wanted the problems of before_P, {np.shape(before_P)}, got {np.shape(after_P)}")
    return estimate_mean(np.subtract(after_P, before_P, dtype=np.float64))


def pass_at_k(correct_PN: np.ndarray, k: int) -> np.ndarray:
    """Estimate the probability that at least one of k samples is correct, without bias, from N samples, float64 [P].

    With c of N samples correct it is 1 - C(N - c, k) / C(N, k) (Chen et al. 2021, arXiv 2107.03374, equation 1).

    >>> pass_at_k(np.array([[True, False, False, False], [True, True, False, False]]), 2).tolist()
    [0.5, 0.8333333333333334]
    """
    correct_PN = np.asarray(correct_PN, bool)
    N = _samples(correct_PN, k)
    wrong_P = N - correct_PN.sum(axis=1)
    step_K = np.arange(k)
    return 1.0 - np.prod(np.maximum(wrong_P[:, None] - step_K[None], 0) / (N - step_K)[None], axis=1)


def majority_at_k(answer_PN: Sequence[Sequence[Hashable]], reward_PN: np.ndarray, k: int) -> np.ndarray:
    """Compute the expected reward of the most frequent answer of k samples without replacement, float64 [P].

    Samples without an answer (None) do not vote, and without any vote the reward is 0. Answers that tie count in equal
    parts. An answer's reward is its mean over the samples that gave it. Exact for k = N; otherwise the mean over 1,000
    subsets, the same in every call.

    >>> reward = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    >>> majority_at_k([["5", "5", "6", None], ["5", "6", "6", "7"]], reward, 4).tolist()
    [1.0, 0.0]
    """
    reward_PN = np.asarray(reward_PN, np.float64)
    N = _samples(reward_PN, k)
    rng = np.random.default_rng(_SEED)
    subset_DK = np.arange(N)[None] if k == N else rng.random((_SUBSETS, N)).argsort(axis=1)[:, :k]
    return np.array([_majority(*problem, subset_DK) for problem in zip(answer_PN, reward_PN, strict=True)])


def _majority(answers: Sequence[Hashable], reward_N: np.ndarray, subset_DK: np.ndarray) -> float:
    distinct = list(dict.fromkeys(answer for answer in answers if answer is not None))
    if not distinct:
        return 0.0
    gave_NA = np.array([[answer == other for other in distinct] for answer in answers])
    reward_A = reward_N @ gave_NA / gave_NA.sum(axis=0)
    votes_DA = gave_NA[subset_DK].sum(axis=1)
    wins_DA = (votes_DA == votes_DA.max(axis=1, keepdims=True)) & (votes_DA > 0)
    return float((wins_DA @ reward_A / np.maximum(wins_DA.sum(axis=1), 1)).mean())


def sizes(samples: int) -> tuple[int, ...]:
    """Return the k for which pass@k and maj@k are reported: the powers of two up to N, and N.

    >>> sizes(12)
    (1, 2, 4, 8, 12)
    """
    return (*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples)


def _samples(array_PN: np.ndarray, k: int) -> int:
    if array_PN.ndim != 2 or not 1 <= k <= array_PN.shape[1]:
        raise ValueError(f"k: wanted 1 to N samples of an array [P, N], got {k} for shape {array_PN.shape}")
    return int(array_PN.shape[1])


def _student_quantile(freedom: float) -> float:
    """Return half the width of a 95 % interval in standard errors."""
    from scipy.special import stdtrit  # a dependency of jax

    return float(stdtrit(freedom, 0.975))
