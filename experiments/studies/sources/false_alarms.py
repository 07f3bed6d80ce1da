"""How often a healthy server is set aside, and how often a faulty one is found (`gspax.learner.sources`).

Run it with `python experiments/studies/sources/false_alarms.py`; it takes two minutes on a core.

The difference of a healthy token is heavy-tailed, as rounding in bfloat16 with experts is: log-normal with a standard
deviation of 1.5 in its logarithm, and in 1 of 200 tokens a router that chose otherwise, 30 times as much. The scale
does not matter to the rule. A faulty server sends in 1 % of the draws after the third of six turns another token than
the log-prob is of, whose log-prob is 8 nats away; all other differences have a mean of 0.011 nats.
"""

from __future__ import annotations

import numpy as np

from gspax.learner.sources import EXTREME, Differences, find_outliers

USUAL = 0.011  # nats: log-probs of two programs in bfloat16
WRONG, SHARE = 8.0, 0.01  # nats of a wrong token, and how many there are after the third turn
HEALTHY = ((3, 64, 40_000), (16, 64, 40_000), (16, 1024, 31_000))  # servers, tokens, steps
FAULTY = (1024, 2048, 4096, 8192)  # tokens of a server in a rollout


def healthy(rng: np.random.Generator, servers: int, tokens: int) -> np.ndarray:
    """Sample the differences of the tokens of healthy servers, in nats."""
    diff_SK = np.exp(1.5 * rng.standard_normal((servers, tokens), np.float32))
    diff_SK *= np.where(rng.random((servers, tokens), np.float32) < 1 / 200, 30, 1)
    return diff_SK * (USUAL / (np.exp(1.5**2 / 2) * (1 + 29 / 200)))


def outliers(diff_SK: np.ndarray) -> list[int]:
    """Return the servers that are found by the differences of their tokens."""
    count_S = np.full(*diff_SK.shape)
    return [*find_outliers(Differences(count_S, diff_SK.mean(1), (diff_SK > EXTREME).sum(1)))]


def false_alarms(rng: np.random.Generator, servers: int, tokens: int, steps: int) -> int:
    """Count the steps in which a healthy server is set aside."""
    return sum(bool(outliers(healthy(rng, servers, tokens))) for _ in range(steps))


def found(rng: np.random.Generator, tokens: int, trials: int = 200) -> float:
    """Return the share of rollouts of 16 servers in which the faulty one, and no other, is found."""
    right = 0
    for _ in range(trials):
        diff_SK = healthy(rng, 16, tokens)
        diff_SK[7, : rng.binomial(tokens // 2, SHARE)] = WRONG
        right += outliers(diff_SK) == [7]
    return right / trials


if __name__ == "__main__":
    for servers, tokens, steps in HEALTHY:
        alarms = false_alarms(np.random.default_rng(0), servers, tokens, steps)
        print(f"{servers} healthy servers, {tokens} tokens each: {alarms} false alarms in {steps:,} steps", flush=True)
    for tokens in FAULTY:
        share = found(np.random.default_rng(1), tokens)
        print(f"1 faulty server of 16, {tokens} tokens each: found in {share:.1%} of rollouts", flush=True)
