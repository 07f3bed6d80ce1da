"""How often a healthy server is set aside, and how often a faulty one is found (`gspax.learner.sources`).

Run it with `python experiments/studies/sources/false_alarms.py`; it takes half an hour on a core.

The difference of a healthy token is heavy-tailed, as rounding in bfloat16 with experts is: log-normal with a standard
deviation of 1.5 in its logarithm, and in 1 of 200 tokens a router that chose otherwise, 30 times as much. The scale
does not matter to the rule, but for its floor and its limit of a token. Tokens of one response may be alike: then each
response has a scale of its own. All differences have a mean of 0.011 nats. A faulty server either sends in 1 % of the
draws after the third of six turns another token than the log-prob is of, whose log-prob is 8 nats away, or all of its
differences are larger by a factor.
"""

from __future__ import annotations

import numpy as np

from gspax.learner.sources import find_outliers, summarize

USUAL = 0.011  # nats: log-probs of two programs in bfloat16
WRONG, SHARE = 8.0, 0.01  # nats of a wrong token, and how many there are after the third turn
APART = 0.7  # standard deviation of the logarithm of a response's scale
STEPS = 40_000
HEALTHY = (  # servers, responses of each, tokens of a response
    (3, 1, 64),
    (16, 1, 64),
    (16, 4, 16),
    (16, 4, 256),
    (3, 16, 256),
    (16, 16, 256),
    (3, 1, 4096),
    (16, 1, 4096),
)
RESPONSES, TOKENS = 16, (64, 128, 256, 512)  # of a server with a fault
FACTORS = (3.0, 4.0, 5.0, 6.0, 8.0)


def healthy(rng: np.random.Generator, servers: int, responses: int, tokens: int, apart: float) -> np.ndarray:
    """Sample the differences of the tokens of healthy servers, in nats.

    Args:
      apart: the standard deviation of the logarithm of a response's scale.

    Returns:
      float32 [servers, responses, tokens].
    """
    shape = servers, responses, tokens
    diff_SRT = np.exp(1.5 * rng.standard_normal(shape, np.float32))
    diff_SRT *= np.where(rng.random(shape, np.float32) < 1 / 200, 30, 1)
    diff_SRT *= np.exp(apart * rng.standard_normal((servers, responses, 1), np.float32))
    return diff_SRT * (USUAL / (np.exp(1.5**2 / 2) * (1 + 29 / 200)))


def outliers(diff_SRT: np.ndarray) -> list[int]:
    """Return the servers that are found by the differences of their tokens."""
    servers, responses, tokens = diff_SRT.shape
    source_NT = np.broadcast_to(np.arange(1, servers + 1).repeat(responses)[:, None], (servers * responses, tokens))
    return [*find_outliers(summarize(diff_SRT.reshape(source_NT.shape), source_NT))]


def false_alarms(servers: int, responses: int, tokens: int, apart: float) -> int:
    """Count the steps in which a healthy server is set aside."""
    rng = np.random.default_rng(0)
    return sum(bool(outliers(healthy(rng, servers, responses, tokens, apart))) for _ in range(STEPS))


def found(tokens: int, apart: float, factor: float | None = None, trials: int = 200) -> float:
    """Return the share of rollouts of 16 servers in which the faulty one, and no other, is found.

    Args:
      tokens: of each of the 16 responses of a server.
      factor: of the differences of the faulty server; without one, some of its tokens are wrong.
    """
    rng, right = np.random.default_rng(1), 0
    for _ in range(trials):
        diff_SRT = healthy(rng, 16, RESPONSES, tokens, apart)
        if factor is None:
            late_RT = diff_SRT[7, :, tokens // 2 :]
            late_RT[rng.random(late_RT.shape) < SHARE] = WRONG
        else:
            diff_SRT[7] *= factor
        right += outliers(diff_SRT) == [7]
    return right / trials


def main() -> None:
    print("| healthy servers | responses of each | tokens of a response | false alarms, independent tokens | alike |")
    print("| --- | --- | --- | --- | --- |")
    for servers, responses, tokens in HEALTHY:
        alarms = [f"{false_alarms(servers, responses, tokens, apart)} of {STEPS:,}" for apart in (0.0, APART)]
        print(f"| {servers} | {responses} | {tokens:,} | {alarms[0]} | {alarms[1]} |", flush=True)
    columns = ["wrong tokens", *(f"{factor:g} times" for factor in FACTORS)]
    print(f"\n| tokens of the faulty one of 16 servers | {' | '.join(columns)} |\n| --- {'| --- ' * len(columns)}|")
    for tokens in TOKENS:
        shares = [f"{found(tokens, APART, factor):.1%}" for factor in (None, *FACTORS)]
        print(f"| {RESPONSES * tokens:,} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
