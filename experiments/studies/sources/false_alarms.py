"""How often a healthy server is set aside, and how often a faulty one is found (`gspax.learner.sources`).

Run it with `python experiments/studies/sources/false_alarms.py`; it takes seven minutes on a core.

The difference of a healthy token is heavy-tailed, as rounding in bfloat16 with experts is: log-normal with a standard
deviation of 1.5 in its logarithm, and in 1 of 200 tokens a router that chose otherwise, 30 times as much. The scale
does not matter to the rule. Tokens of one response may be alike: then each response has a scale of its own. A faulty
server sends in 1 % of the draws after the third of six turns another token than the log-prob is of, whose log-prob is 8
nats away; all other differences have a mean of 0.011 nats.
"""

from __future__ import annotations

import numpy as np

from gspax.learner.sources import EXTREME, Differences, find_outliers

USUAL = 0.011  # nats: log-probs of two programs in bfloat16
WRONG, SHARE = 8.0, 0.01  # nats of a wrong token, and how many there are after the third turn
TOGETHER, APART = 256, 0.7  # tokens of a response, and the standard deviation of the logarithm of its scale
HEALTHY = (  # servers, tokens of each, steps, standard deviation of responses
    (3, 64, 40_000, 0.0),
    (16, 64, 40_000, 0.0),
    (16, 1024, 31_000, 0.0),
    (3, 4096, 40_000, 0.0),
    (16, 4096, 40_000, 0.0),
    (3, 4096, 40_000, APART),
    (16, 4096, 40_000, APART),
)
FAULTY = (1024, 2048, 4096, 8192)  # tokens of a server in a rollout


def healthy(rng: np.random.Generator, servers: int, tokens: int, apart: float = 0.0) -> np.ndarray:
    """Sample the differences of the tokens of healthy servers, in nats.

    Args:
      apart: the standard deviation of the logarithm of a response's scale.
    """
    diff_SK = np.exp(1.5 * rng.standard_normal((servers, tokens), np.float32))
    diff_SK *= np.where(rng.random((servers, tokens), np.float32) < 1 / 200, 30, 1)
    if apart:
        scale_SR = np.exp(apart * rng.standard_normal((servers, tokens // TOGETHER), np.float32))
        diff_SK *= scale_SR.repeat(TOGETHER, axis=1)
    return diff_SK * (USUAL / (np.exp(1.5**2 / 2) * (1 + 29 / 200)))


def outliers(diff_SK: np.ndarray) -> list[int]:
    """Return the servers that are found by the differences of their tokens."""
    count_S = np.full(*diff_SK.shape)
    return [*find_outliers(Differences(count_S, diff_SK.mean(1), (diff_SK > EXTREME).sum(1)))]


def false_alarms(rng: np.random.Generator, servers: int, tokens: int, steps: int, apart: float) -> int:
    """Count the steps in which a healthy server is set aside."""
    return sum(bool(outliers(healthy(rng, servers, tokens, apart))) for _ in range(steps))


def found(rng: np.random.Generator, tokens: int, trials: int = 200) -> float:
    """Return the share of rollouts of 16 servers in which the faulty one, and no other, is found."""
    right = 0
    for _ in range(trials):
        diff_SK = healthy(rng, 16, tokens)
        diff_SK[7, : rng.binomial(tokens // 2, SHARE)] = WRONG
        right += outliers(diff_SK) == [7]
    return right / trials


if __name__ == "__main__":
    print("| healthy servers | tokens of each | tokens of a response | steps with a false alarm |")
    print("| --- | --- | --- | --- |")
    for servers, tokens, steps, apart in HEALTHY:
        alarms, kind = (
            false_alarms(np.random.default_rng(0), servers, tokens, steps, apart),
            "alike" if apart else "any",
        )
        print(f"| {servers} | {tokens:,} | {kind} | {alarms} of {steps:,} |", flush=True)
    print("\n| tokens of each of 16 servers, one faulty | rollouts in which it is found |\n| --- | --- |")
    for tokens in FAULTY:
        print(f"| {tokens:,} | {found(np.random.default_rng(1), tokens):.1%} |", flush=True)
