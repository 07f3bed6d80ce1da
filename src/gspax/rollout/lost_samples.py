"""What training does not see as it was sampled: the samples that limits, failures, and refills take away.

Each sample of a rollout has one fate, the first that holds:

- replaced: its group had equal rewards and gave way, or was sampled in vain (`rollout.dynamic_sampling`)
- late: its reward did not answer in time; failed: its reward raised, or was no number. Both train with `grading.failed`
- cut: it reached the length limit. With `filter_overlong` the loss leaves it out; otherwise it trains as it was cut
- kept: everything else

Where the fate depends on what a sample is, as a long one is cut more often, the others are not like all. The biases say
by how much: the mean over the samples in the loss minus the mean over all that were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gspax.rewards.calls import LATE
from gspax.rollout.completion import Completion

FATES = ("kept", "cut", "failed", "late", "replaced")


def fate_of(completion: Completion, *, replaced: bool = False) -> str:
    """Return the fate of a sample, one of `FATES`."""
    if replaced:
        return "replaced"
    if completion.error:
        return "late" if completion.error.startswith(LATE) else "failed"
    return "kept" if completion.finished else "cut"


def lost_metrics(
    completions: Sequence[Completion],
    replaced: Sequence[Completion] = (),
    *,
    age_B: Sequence[float] = (),
    without_overlong: bool = False,
) -> dict[str, float]:
    """Compare the samples of each fate: their share, and the means of reward, length, and age.

    The mean rewards are those that graded the samples; late and failed ones have none. Nothing if all are kept.

    Args:
      completions: of the rollout that is trained on.
      replaced: that were sampled for it besides.
      age_B: rollouts trained on since each of `completions` was sampled; empty if all are new.
      without_overlong: whether cut samples are left out of the loss.
    """
    samples = [*completions, *replaced]
    fate_N = np.array([fate_of(one, replaced=n >= len(completions)) for n, one in enumerate(samples)])
    if (fate_N == "kept").all():
        return {}
    columns = {
        "reward": np.array([one.reward for one in samples], np.float64),
        "length": np.array([one.length for one in samples], np.float64),
    }
    if len(age_B):
        columns["age"] = np.concatenate([age_B, np.zeros(len(replaced))])
    graded_N = ~np.isin(fate_N, ("failed", "late"))
    in_loss_N = ~np.isin(fate_N, ("replaced", "cut") if without_overlong else ("replaced",))
    metrics: dict[str, float] = {}
    for fate in FATES:
        metrics[f"samples/{fate}"] = float((fate_N == fate).mean())
        for name, value_N in columns.items():
            chosen_N = (fate_N == fate) & (graded_N if name == "reward" else True)
            if chosen_N.any():
                metrics[f"samples/{fate}_{name}"] = float(value_N[chosen_N].mean())
    for name, value_N in columns.items():
        all_N = graded_N if name == "reward" else np.ones_like(graded_N)
        if in_loss_N.any() and all_N.any():
            metrics[f"samples/{name}_bias"] = float(value_N[in_loss_N].mean() - value_N[all_N].mean())
    return metrics
