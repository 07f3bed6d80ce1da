"""What the check of servers adds to the learner's work (`gspax.learner.sources`), as a table.

Run it with `python experiments/studies/sources/cost.py`; it takes ten seconds on a core.

It counts the microbatches that a step computes for the check alone, on simulated rollouts: the groups go to 16 servers
in turn, and the lengths of responses are log-normal with a mean of a third of the longest. An update counts as three
forward passes, and a step has one epoch. Rows hold one response each, so a row costs the same whatever its length is.
"""

from __future__ import annotations

import numpy as np

from gspax.learner.sources import choose_rows, count_lacking
from gspax.types import Rollout

SERVERS, STEPS = 16, 3
ROLLOUTS = ((64, 8, 1024, 16), (128, 8, 4096, 16), (256, 16, 4096, 64), (512, 16, 8192, 64))


def rollout(rng: np.random.Generator, prompts: int, group: int, longest: int) -> Rollout:
    """Make the columns of a rollout that the check reads."""
    N = prompts * group
    length_N = np.clip(rng.lognormal(np.log(longest / 3) - 0.32, 0.8, N), 1, longest).astype(np.int32)
    mask_NT = np.arange(longest) < length_N[:, None]
    server_N = np.arange(prompts).repeat(group) % SERVERS + 1
    return Rollout(
        tokens_BT=mask_NT,
        mask_BT=mask_NT,
        logp_BT=mask_NT,
        prompt_length_B=np.zeros(N, np.int32),
        length_B=length_N,
        finished_B=mask_NT[:, 0],
        source_BT=np.where(mask_NT, server_N[:, None], 0).astype(np.uint16),
    )


def share(sampled: Rollout, minibatches: int, passes: bool, microbatch: int) -> float:
    """Return what the check adds to the learner's forward passes, updates included, as a share."""
    mask_NT, source_NT = np.asarray(sampled.mask_BT), np.asarray(sampled.source_BT)
    N = len(mask_NT)
    unknown = N // minibatches if passes else N  # the first responses, whose log-probs no pass computes
    logp_NT = np.zeros(mask_NT.shape, np.float32)
    logp_NT[:unknown] = np.nan
    rows, _ = choose_rows(source_NT[:unknown], count_lacking(logp_NT, sampled), microbatch)
    return len(rows) / (3 * N + N - unknown)


def main() -> None:
    rng = np.random.default_rng(0)
    print("| prompts x responses, longest, rows of a microbatch | 4 minibatches | 2 | 1, or no pass |")
    print("| --- | --- | --- | --- |")
    for prompts, group, longest, microbatch in ROLLOUTS:
        rollouts = [rollout(rng, prompts, group, longest) for _ in range(STEPS)]
        ways = (4, True), (2, True), (1, False)
        shares = [max(share(one, *way, microbatch) for one in rollouts) for way in ways]
        name = f"{prompts} x {group}, {longest:,} tokens, {microbatch} rows"
        print(f"| {name} | {' | '.join(f'{x:.2%}' for x in shares)} |", flush=True)


if __name__ == "__main__":
    main()
