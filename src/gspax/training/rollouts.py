"""The contract of what gives the steps of a run their rollouts, graded and ready for training.

`in_flight.InFlight` samples and grades them, `recorded_rollouts.Recording` writes these to files as well, and
`recorded_rollouts.Recorded` reads the files. Who calls `loop.train_from_newest` chooses; the loop and the step do not
know which they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gspax.learner.metrics import Clock
from gspax.rollout.completion import GradedBatch
from gspax.rollout.problems import Skipped
from gspax.rollout.runtime import Runtime
from gspax.types import JsonObject, TrainState


class Rollouts(Protocol):
    """Gives each step of a run its rollout. Every method is collective: all processes call it in the same order."""

    @property
    def can_evaluate(self) -> bool:
        """Return whether the run can sample, as its evaluations do."""

    def begin(self, skipped: Skipped, entries: JsonObject) -> None:
        """Begin at a checkpoint, or at the start of the run, with nothing in flight.

        Args:
          skipped: the problems that the run has skipped so far; those that come are added to them.
          entries: of the checkpoint, those of `entries` among them.
        """

    def take(self, runtime: Runtime, state: TrainState, clock: Clock) -> GradedBatch:
        """Take the rollout that the next step trains on. FailureError or FailedRewardsError if there is none."""

    def take_again(
        self, runtime: Runtime, state: TrainState, wrong: Mapping[int, str], clock: Clock
    ) -> GradedBatch | None:
        """Take another rollout in place of one that is not to be trained on; None: it is trained on nevertheless.

        Args:
          wrong: why, by the number of the source that sampled it (`judging.judge`).
        """

    def after_updates(self, runtime: Runtime, graded: GradedBatch) -> None:
        """Keep what later rollouts need of one that the policy was trained on."""

    def entries(self) -> dict[str, str]:
        """Return the entries of a checkpoint that `begin` reads."""
