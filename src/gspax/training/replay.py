"""Trains on the recorded rollouts of a run, from the run's state before them (`gspax replay-rollouts`).

It is a run of its own directory, with the loop and the step of `gspax train`. Only the source of its rollouts differs:
they come from files, and nothing is sampled or graded, for evaluations neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gspax.errors import UserError
from gspax.experiment.description import describe
from gspax.experiment.origin import Origin
from gspax.learner.state import (
    abstract_params,
    drop_frozen,
    load_first,
    load_start,
    restore_state,
    save_start,
)
from gspax.rollout.runtime import Runtime
from gspax.run.checkpoints import Checkpoints, read_extra, save
from gspax.run.directory import NOWHERE, RunDir
from gspax.run.manifest import finished_steps
from gspax.training.loop import train_from_newest
from gspax.training.open_training import Training, open_training
from gspax.training.recorded_rollouts import Recorded, require_replayable


def replay(
    runtime: Runtime,
    source: RunDir,
    steps: range,
    workdir: Path,
    report_to: Sequence[str] = ("tensorboard",),
    *,
    origin: Origin = NOWHERE,
) -> None:
    """Train in `workdir` on the recorded rollouts of a run; continue if `workdir` holds a checkpoint of it.

    Args:
      source: the run, which had `schedule.record_rollouts`.
      steps: the steps whose rollouts to train on, from 1.
      origin: of the experiment; the new run stores a copy of its files.

    Raises:
      UserError: the rollouts or the state before them are not recorded, or do not fit the experiment.
      DivergedError: updates went wrong.
    """
    require_replayable(source, runtime.passes, steps)
    schedule = replace(runtime.experiment.schedule, steps=steps[-1], record_rollouts=False)
    runtime = replace(runtime, experiment=replace(runtime.experiment, schedule=schedule))
    with open_training(runtime, origin, workdir, report_to) as training:
        if steps[0] > 1 and training.checkpoints.latest() is None:
            start_from(source, steps[0] - 1, training)
        train_from_newest(training, Recorded(source))


def start_from(source: RunDir, step: int, training: Training) -> None:
    """Save the state of another run after a step as a run's first checkpoint. UserError if there is none."""
    runtime, run, experiment = training.runtime, training.run, training.runtime.experiment
    policy, mesh = runtime.policy, runtime.mesh
    if step not in (saved := finished_steps(source.checkpoints)):
        has = f"after steps {', '.join(map(str, saved))}" if saved else "nowhere"
        raise UserError(f"{source.path}: wanted a checkpoint before the first replayed step, after {step}, got {has}")
    with Checkpoints(source.checkpoints, mesh=mesh) as checkpoints:
        state = restore_state(source, checkpoints, policy, step)
        extra = read_extra(checkpoints, step)
    if policy.lora is not None:
        save_start(run, load_start(source, abstract_params(policy.model, mesh), mesh), mesh)
    if runtime.passes.first_policy:
        save_start(run, load_first(source, state, policy), mesh, policy.first_step)
    save(training.checkpoints, step, drop_frozen(state), {**extra, "experiment": describe(experiment)}, is_last=True)
