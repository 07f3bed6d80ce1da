"""Guards a run: counts skipped updates, follows alarms, dumps faulty updates, and rolls the run back.

An alarm warns, for example that the policy's entropy collapses or that responses are truncated. With `guard.collapse`,
an alarm that lasts for `guard.collapse.steps` steps is a collapse, and the run warns or stops
(`guard.collapse.action`). Each checkpoint stores the `Watch`, so a resumed run finds a collapse at the same step.

A rollback returns a run to its newest checkpoint after too many updates were skipped in a row, and goes on with other
problems: the run restarts inside its process from the state of that checkpoint, with the problems since then marked as
consumed. `rollbacks.jsonl` records each rollback, so a run that is stopped afterwards resumes with the same problems.
The skipped update's minibatch is dumped for `gspax replay`, with the state after its step. A skipped update changes no
parameter, so that is the state before it, unless later updates of the same step were applied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import Collapse, Experiment, Guard
from gspax.config.experiment import updates_per_step
from gspax.errors import DivergedError, UserError, warn
from gspax.experiment.description import describe
from gspax.learner.state import drop_frozen
from gspax.parallel import multihost
from gspax.rollout.completion import Samples
from gspax.run.arrays import read_arrays, write_arrays
from gspax.run.checkpoints import Checkpoints, shorten
from gspax.run.checkpoints import save as save_checkpoint
from gspax.run.directory import RunDir, read_json
from gspax.run.folders import remove_folder, write_atomically
from gspax.run.record import Recorder, read_rows
from gspax.training.step import StepResult
from gspax.types import Batch, JsonObject, Params, TrainState, known, named_leaves

MINIBATCH, ABOUT, STATE = "minibatch.npz", "about.json", "state"  # the entries of a dump
NOT_FINITE = "their loss or gradient is not finite, or beyond the guard's limits."


@dataclass(frozen=True)
class Watch:
    """A run's alarms, mean rewards, and skipped updates up to some step."""

    lasting: Mapping[str, int] = field(default_factory=dict)  # steps in a row with an alarm, by its name
    rewards: Sequence[float] = field(default_factory=list)  # mean rewards of the last `collapse.window` steps
    best: float | None = None  # the largest mean reward of a whole window
    skipped: int = 0  # updates skipped in a row until now

    def mean(self, window: int) -> float | None:
        """Return the mean reward of the window; None before the window is full."""
        return sum(self.rewards) / window if len(self.rewards) == window else None


@dataclass
class RunGuard:
    """The guard of one run, with the state that changes after each step.

    Attributes:
      mesh: the learner's mesh, for a dump of the state.
      watch: the alarms, and the updates skipped in a row, up to now. Each checkpoint stores it.
      is_sound: the last step left a state to go back to.
    """

    experiment: Experiment
    run: RunDir
    mesh: jax.sharding.Mesh
    watch: Watch = field(default_factory=Watch)
    is_sound: bool = True

    def after_step(self, step: int, result: StepResult) -> tuple[dict[str, float], DivergedError | None]:
        """Count the skipped updates of a step, follow its alarms, and warn of both.

        Returns:
          The metrics of the alarms, and an error if the run has diverged, to be raised after the step is recorded.
        """
        settings, schedule = self.experiment.guard, self.experiment.schedule
        watch = follow(settings, self.watch, result.metrics)
        in_a_row = count_skipped(watch.skipped, [bool(update["skipped"]) for update in result.updates])
        self.watch = replace(watch, skipped=in_a_row[-1] if in_a_row else watch.skipped)
        self.is_sound = is_sound(result.updates)
        metrics = alarm_metrics(settings, self.watch)
        limits = schedule.max_skipped, schedule.steps * updates_per_step(schedule)
        if (count := max(in_a_row, default=0)) >= min(limits):
            why = explain_skipped(step, result.samples) + dump(self, step, result)
            return metrics, too_many_skipped(count, limits, step, result.state, why)
        collapse = settings.collapse
        if collapse is None or not (sentence := find_collapse(collapse, self.watch)):
            return metrics, None
        if collapse.action == "stop":
            return metrics, DivergedError(sentence, step=step, position=read_position(result.state), final=True)
        multihost.warn_from_primary(sentence)
        return metrics, None


def follow(guard: Guard, before: Watch, metrics: Mapping[str, float]) -> Watch:
    """Return the watch after a step, and warn of the alarms that begin with it."""
    watch = before if guard.collapse is None else _add_reward(guard.collapse, before, metrics)
    alarms = find_alarms(guard, metrics, watch)
    for name, sentence in alarms.items():
        if name not in before.lasting:
            multihost.warn_from_primary(sentence)
    return replace(watch, lasting={name: before.lasting.get(name, 0) + 1 for name in alarms})


def _add_reward(settings: Collapse, watch: Watch, metrics: Mapping[str, float]) -> Watch:
    if "reward/mean" not in metrics:
        return watch
    watch = replace(watch, rewards=[*watch.rewards, metrics["reward/mean"]][-settings.window :])
    mean = watch.mean(settings.window)
    return watch if mean is None or (watch.best is not None and mean <= watch.best) else replace(watch, best=mean)


def find_alarms(guard: Guard, metrics: Mapping[str, float], watch: Watch) -> dict[str, str]:
    """Return a sentence for each alarm raised by a step's metrics and the watch's rewards, by the alarm's name."""
    alarms, settings = {}, guard.collapse
    if (entropy := metrics.get("policy/entropy", math.inf)) < guard.min_entropy:
        alarms["entropy"] = (
            f"policy/entropy is {entropy:.2g}, below guard.min_entropy ({guard.min_entropy:g}): the samples of a group "
            "hardly differ, so little is left to learn from"
        )
    if (truncated := metrics.get("response/truncated", 0.0)) > guard.max_truncated:
        alarms["length"] = (
            f"response/truncated is {truncated:.2g}, above guard.max_truncated ({guard.max_truncated:g}): most "
            "responses reach sampling.max_tokens without a stop token"
        )
    if settings is None:
        return alarms
    mean, best = watch.mean(settings.window), watch.best
    if mean is not None and best is not None and best > 0 and not mean >= settings.reward * best:
        alarms["reward"] = (
            f"the mean of reward/mean over {settings.window} steps is {mean:.3g}, below guard.collapse.reward "
            f"({settings.reward:g}) of its best, {best:.3g}"
        )
    if settings.grad_norm and not (norm := metrics.get("optim/grad_norm", 0.0)) <= settings.grad_norm:
        alarms["gradient"] = f"optim/grad_norm is {norm:.3g}, above guard.collapse.grad_norm ({settings.grad_norm:g})"
    return alarms


def alarm_metrics(guard: Guard, watch: Watch) -> dict[str, float]:
    """Return `alarm/entropy`, `alarm/length`, ...: 1 while the alarm lasts, else 0; `alarm/collapse` likewise."""
    collapse = guard.collapse
    names = ("entropy", "length") if collapse is None else ("entropy", "length", "reward", "gradient")
    metrics = {f"alarm/{name}": float(name in watch.lasting) for name in names}
    if collapse is not None:
        lasting = [watch.lasting.get(name, 0) >= collapse.steps for name in collapse.alarms]
        metrics["alarm/collapse"] = float(any(lasting))
    return metrics


def find_collapse(settings: Collapse, watch: Watch) -> str:
    """Return a sentence if the run collapses with this step, when an alarm has lasted long enough; otherwise ""."""
    for name in settings.alarms:
        if watch.lasting.get(name, 0) == settings.steps:
            count = settings.steps
            return f"guard.collapse: wanted fewer than {count} steps in a row with alarm/{name}, got {count}."
    return ""


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
    """Return whether the state after a step is safe to go back to: an update was applied, and the last one was finite.

    A finite update may break the parameters; then those after it are not finite.

    Args:
      updates: the metrics of the step's updates.
    """
    if not updates:
        return True
    last = updates[-1]["loss"] + updates[-1]["grad_norm"]
    return not all(update["skipped"] for update in updates) and math.isfinite(last)


def explain_skipped(step: int, samples: Samples) -> str:
    """Explain why the updates of a step were skipped: advantages that are not finite, or their loss or gradient."""
    if bad := np.count_nonzero(~np.isfinite(samples.advantage_B)):
        among = f"{bad} of the {len(samples.advantage_B)} completions of step {step}"
        return f"advantage: wanted finite numbers, got others for {among}."
    return NOT_FINITE


def too_many_skipped(count: int, limits: tuple[int, int], step: int, state: TrainState, why: str) -> DivergedError:
    """Return the error for too many skipped updates in a row, or for a run in which every update was skipped.

    Args:
      limits: `schedule.max_skipped`, and the number of updates of the run.
    """
    problem = (
        f"schedule.max_skipped: wanted fewer than {limits[0]} skipped updates in a row, got {count} by step {step}"
    )
    if count < limits[0]:
        problem = (
            f"wanted an update that is applied, got {count} skipped ones and no other by step {step}, the last one"
        )
    return DivergedError(f"{problem}: {why}", step=step, position=read_position(state))


def save_state(
    checkpoints: Checkpoints, recorder: Recorder, step: int, state: TrainState, extra: JsonObject, *, is_last: bool
) -> None:
    """Save the state after `step` steps, once its log is on disk. DivergedError if a parameter is not finite."""
    stored = drop_frozen(state)
    check_finite(stored, step)
    save_checkpoint(checkpoints, step, stored, extra, recorder.flush(), is_last=is_last)


def check_finite(state: TrainState, step: int) -> None:
    """Raise DivergedError if a parameter is not finite, so that a checkpoint never holds such parameters."""
    finite = multihost.to_host(_are_finite(state.params))
    bad = [name for name, is_finite in named_leaves(finite).items() if not is_finite]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise DivergedError(
            f"checkpoint {step}: wanted finite parameters, got some that are not in {', '.join(bad[:3])}{more}; it is "
            "not saved.",
            step=step,
            position=read_position(state),
        )


@jax.jit
def _are_finite(params: Params) -> Params:
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), params)


def read_position(state: TrainState) -> int:
    """Return the number of training problems that a state has consumed."""
    return int(multihost.to_host(state.position))


class About(TypedDict):
    """The description of a dump."""

    step: int
    experiment: dict[str, object]  # `experiment.description`


def dump(guard: RunGuard, step: int, result: StepResult) -> str:
    """Write the last skipped minibatch, and the state after its step, for `gspax replay`. Collective.

    Earlier dumps are deleted.

    Returns:
      A sentence that names the folder, or says why nothing could be written: the divergence is reported in any case. ""
      without a minibatch.
    """
    run, batch = guard.run, result.skipped_batch
    if batch is None:
        return ""
    folder = run.dumps / f"step_{step:06d}"
    arrays = multihost.to_host({name: x for name, x in vars(batch).items() if x is not None})
    # numpy's files have no bfloat16
    arrays = {name: x.astype(np.float32) if name.endswith("_BTE") else x for name, x in arrays.items()}

    def write() -> None:
        if jax.process_index() != 0:
            return
        write_arrays(folder / MINIBATCH, arrays)
        about = About(step=step, experiment=describe(guard.experiment))
        write_atomically(folder / ABOUT, json.dumps(about, indent=2) + "\n")
        for old in folder.parent.glob("step_*"):
            if old != folder:
                remove_folder(old)

    try:
        with Checkpoints(folder / STATE, keep=1, mesh=guard.mesh) as checkpoints:
            checkpoints.save(step, drop_frozen(result.state), {})
        multihost.all_or_raise(write)
    except (OSError, UserError) as error:
        return f" Its minibatch could not be dumped: {error}."
    return f" The minibatch of the last one is in {folder}, for `gspax replay`."


def read_minibatch(folder: Path) -> Batch:
    """Read the minibatch of a dump to the host. UserError if it cannot be read."""
    path = folder / MINIBATCH
    try:
        batch = Batch(**read_arrays(path))
        known(batch, "old_logp_BT"), known(batch, "advantage")
        return batch
    except (TypeError, ValueError) as error:  # arrays of another name, or too few
        raise UserError(f"{path} cannot be read: {shorten(error)}") from error


def read_about(folder: Path) -> About:
    """Read the description of a dump. UserError if the folder is not a dump."""
    if not (folder / ABOUT).is_file():
        raise UserError(f"{folder}: wanted a dump of a run (a folder in its dumps/), there is none")
    about = read_json(folder / ABOUT)
    wanted = {"step": int, "experiment": dict}
    if not isinstance(about, dict) or any(not isinstance(about.get(name), kind) for name, kind in wanted.items()):
        raise UserError(f"{folder / ABOUT}: wanted a JSON object with a step and an experiment")
    return About(step=about["step"], experiment=about["experiment"])


def go_back(run: RunDir, checkpoints: Checkpoints, problem: DivergedError, guard: Guard) -> None:
    """Record that the run returns to its newest checkpoint, or to its start if it has none, and warn of it.

    Raises:
      DivergedError: the run went back there `guard.rollbacks` times already.
    """
    to, rows = checkpoints.latest() or 0, multihost.gather(_read_rollbacks(run))[0]
    returns = sum(row["to"] == to for row in rows)
    if returns >= guard.rollbacks:
        again = f" The run went back to checkpoint {to} {returns} times." if returns else ""
        raise DivergedError(f"{problem}{again}", step=problem.step, position=problem.position) from None
    if jax.process_index() != 0:
        return
    row = {"step": problem.step, "to": to, "position": problem.position, "reason": str(problem)}
    write_atomically(run.rollbacks, "".join(json.dumps(line) + "\n" for line in [*rows, row]))
    warn(
        f"{problem} Going back to {f'checkpoint {to}' if to else 'the start'} and on with "
        f"problem {problem.position} ({returns + 1} of {guard.rollbacks} times)"
    )


def skip_problems(run: RunDir, state: TrainState, step: int) -> TrainState:
    """Mark the problems as consumed that led to rollbacks since `step`, the step of the restored state."""
    positions = [row["position"] for row in multihost.gather(_read_rollbacks(run))[0] if row["to"] >= step]
    return replace(state, position=jnp.maximum(state.position, max(positions))) if positions else state


def _read_rollbacks(run: RunDir) -> list[dict[str, int]]:
    if jax.process_index() != 0 or not run.rollbacks.exists():
        return []
    return [
        row for row in read_rows(run.rollbacks) if all(isinstance(row.get(name), int) for name in ("to", "position"))
    ]
