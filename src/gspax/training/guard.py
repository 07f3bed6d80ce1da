"""The guard of a run counts skipped updates, follows the alarms, and keeps non-finite parameters out of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import jax
import jax.numpy as jnp

from gspax.config import Experiment
from gspax.errors import DivergedError
from gspax.experiment.description import describe
from gspax.parallel import multihost
from gspax.run.directory import RunDir
from gspax.training import alarms, rollback
from gspax.training.step import StepResult
from gspax.types import Params, TrainState


@dataclass
class RunGuard:
    """The part of a run that changes besides its state.

    Attributes:
      mesh: the learner's, for a dump of the state.
      watch: the alarms, and the updates skipped in a row, up to now. Each checkpoint stores it.
      is_sound: the last step left a state to go back to.
    """

    experiment: Experiment
    run: RunDir
    mesh: jax.sharding.Mesh
    watch: alarms.Watch = field(default_factory=alarms.Watch)
    is_sound: bool = True

    def after_step(self, step: int, result: StepResult) -> tuple[dict[str, float], DivergedError | None]:
        """Count the skipped updates of a step, follow its alarms, and warn of both.

        Returns:
          The metrics of the alarms, and an error if the run has diverged. It is to be raised once the step is recorded.
        """
        settings, limit = self.experiment.guard, self.experiment.schedule.max_skipped
        watch = alarms.follow(settings, self.watch, result.metrics)
        in_a_row = count_skipped(watch.skipped, [bool(update["skipped"]) for update in result.updates])
        self.watch = replace(watch, skipped=in_a_row[-1] if in_a_row else watch.skipped)
        self.is_sound = is_sound(result.updates)
        return alarms.alarm_metrics(settings, self.watch), (
            self._find_too_many_skipped(max(in_a_row, default=0), limit, step, result)
            or alarms.answer_collapse(settings.collapse, self.watch, step, read_position(result.state))
        )

    def _find_too_many_skipped(self, count: int, limit: int, step: int, result: StepResult) -> DivergedError | None:
        """An error, after a dump of the last skipped minibatch, if `limit` updates in a row were skipped."""
        if count < limit:
            return None
        dumped = rollback.dump(self.run, step, result.state, result.skipped_batch, describe(self.experiment), self.mesh)
        return too_many_skipped(count, limit, step, result.state, dumped)


def count_skipped(before: int, skipped: Sequence[bool]) -> list[int]:
    """Count the updates skipped in a row, after each update of a step, and warn if any was skipped.

    Args:
      before: the count before the step.
      skipped: whether each update of the step was skipped.
    """
    if any(skipped):
        why = "the loss or gradient is not finite, or beyond the guard's limits"
        multihost.warn_from_primary(f"{sum(skipped)} updates skipped: {why}")
    in_a_row = accumulate(skipped, lambda count, is_skipped: count + 1 if is_skipped else 0, initial=before)
    return [*in_a_row][1:]


def is_sound(updates: Sequence[Mapping[str, float]]) -> bool:
    """Whether a step leaves a state to go back to: one of its updates was applied, and the last one was finite.

    A finite update may break the parameters; then those after it are not finite.

    Args:
      updates: the metrics of the step's updates.
    """
    if not updates:
        return True
    last = updates[-1]["loss"] + updates[-1]["grad_norm"]
    return not all(update["skipped"] for update in updates) and math.isfinite(last)


def too_many_skipped(count: int, limit: int, step: int, state: TrainState, dumped: str = "") -> DivergedError:
    """An error that says that `limit` updates in a row were skipped; `dumped` says where their minibatch is."""
    return DivergedError(
        f"schedule.max_skipped: wanted fewer than {limit} skipped updates in a row, got {count} by step {step}: "
        f"their loss or gradient is not finite, or beyond the guard's limits.{dumped}",
        step=step,
        position=read_position(state),
    )


def check_finite(state: TrainState, step: int) -> None:
    """Raise DivergedError if a parameter is not finite, so that a checkpoint never holds such parameters."""
    finite = multihost.to_host(_are_finite(state.params))
    bad = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, is_finite in jax.tree_util.tree_leaves_with_path(finite)
        if not is_finite
    ]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise DivergedError(
            f"checkpoint {step}: wanted finite parameters, got some that are not in {', '.join(bad[:3])}{more}; it is "
            "not saved.",
            step=step,
            position=read_position(state),
        )


def read_position(state: TrainState) -> int:
    """The number of training problems that a state has consumed."""
    return int(multihost.to_host(state.position))


@jax.jit
def _are_finite(params: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), params)
