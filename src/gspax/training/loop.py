"""Runs an experiment: restores or starts, then steps, records, evaluates and checkpoints until the last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax

from gspax.config import Experiment
from gspax.errors import DivergedError
from gspax.experiment.description import describe
from gspax.experiment.origin import find_origin
from gspax.experiment.validation.first_calls import check_calls
from gspax.learner.state import (
    abstract_kept,
    abstract_policy,
    first_state,
    load_first,
    restore_state,
    save_first,
    start_kept,
    with_new_moments,
)
from gspax.learner.updates import first_adapted
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rollout.problems import Skipped
from gspax.rollout.runtime import Runtime, count_rollouts, make_runtime
from gspax.run import interrupt, progress
from gspax.run.checkpoints import Checkpoints, read_extra
from gspax.run.directory import RunDir
from gspax.training.first_policy import FirstPolicy
from gspax.training.in_flight import InFlight
from gspax.training.open_terms import open_same_terms
from gspax.training.open_training import Training, open_training
from gspax.training.recorded_rollouts import Recording
from gspax.training.rollouts import Rollouts
from gspax.training.run_guard import RunGuard, Watch, go_back, save_state, skip_problems
from gspax.training.run_log import open_log
from gspax.training.step import run_step
from gspax.training.warm_start import warm_start
from gspax.types import TrainState


def train(
    experiment: Experiment, workdir: Path, report_to: Sequence[str] = ("tensorboard",), file: str | None = None
) -> None:
    """Run or resume the experiment in `workdir`, and write its report.

    Args:
      report_to: the trackers that get the metrics (`run.trackers.NAMES`).
      file: the experiment file; the run stores a copy.

    Raises:
      UserError: the directory belongs to another experiment, or the experiment's functions misbehave.
      DivergedError: updates still go wrong after `guard.rollbacks` returns to a checkpoint, or the policy collapsed.
      Interrupted: a signal (`run.interrupt`); a checkpoint was saved first.
    """
    origin, runtime = find_origin(experiment, file), make_runtime(experiment)
    check_calls(experiment, multihost.warn_from_primary)
    with open_training(runtime, origin, workdir, report_to) as training:
        rollouts = Recording(run=training.run) if experiment.schedule.record_rollouts else InFlight()
        while True:
            try:
                train_from_newest(training, rollouts)
                break
            except DivergedError as problem:
                if problem.final:
                    raise
                go_back(training.run, training.checkpoints, problem, experiment.guard)


def train_from_newest(training: Training, rollouts: Rollouts) -> None:
    """Restore the newest checkpoint, or start, and train on the rollouts of the steps that are left.

    Raises:
      DivergedError: updates went wrong; their results are not saved.
      Interrupted: the state was saved. A step that had begun is left out: it begins again.
    """
    runtime, run, checkpoints = training.runtime, training.run, training.checkpoints
    experiment, schedule = runtime.experiment, runtime.experiment.schedule
    skipped = Skipped(experiment.sampling.max_failed)
    skipped.load(run.skipped)
    state = restore_or_start(runtime, run, checkpoints, skipped)
    started = done = count_rollouts(runtime, state)
    state = skip_problems(run, state, done)
    extra = read_extra(checkpoints, done) if done else {}
    guard = RunGuard(experiment, run, runtime.mesh, Watch(**extra.get("watch", {})))
    rollouts.begin(skipped, extra)
    terms, identity = open_same_terms(runtime, extra, done)

    def save(is_last: bool) -> None:
        watch, entries = asdict(guard.watch), rollouts.entries()
        extra = {"experiment": describe(experiment), "watch": watch, **identity, **entries}
        save_state(checkpoints, log.recorder, done, state, extra, is_last=is_last)

    def is_due(every: int) -> bool:
        return progress.is_due(done, every, schedule.steps)

    def evaluate() -> None:
        if rollouts.can_evaluate and not log.recorder.has(done, "eval/reward"):  # which a resumed run may have
            log.write_evaluation(done, state)

    with (
        open_log(training, done) as log,
        interrupt.call_on_interrupt(lambda: save(is_last=True) if done > started and guard.is_sound else None),
    ):
        if done == 0 or is_due(schedule.eval_every):
            evaluate()
        if runtime.passes.first_policy:
            terms = (FirstPolicy(load_first(run, state, runtime.policy)), *terms)
        while done < schedule.steps:
            with log.keep_failures(done + 1):
                result = run_step(runtime, state, rollouts, terms)
            state, done = result.state, done + 1
            alarms, problem = guard.after_step(done, result)
            log.write_step(done, result, alarms)
            if problem is not None:
                raise problem
            if is_due(schedule.eval_every):
                log.recorder.write_samples(done, result.samples.to_json())
                interrupt.stop_point()  # else a signal during the updates would wait for completions of the evaluation
                evaluate()
            is_last = done == schedule.steps
            if is_due(schedule.checkpoint_every) and (guard.is_sound or is_last):
                progress.phase("saving a checkpoint")
                save(is_last)
            interrupt.stop_point()  # after the save, so that a signal during it costs no further step


def restore_or_start(runtime: Runtime, run: RunDir, checkpoints: Checkpoints, skipped: Skipped) -> TrainState:
    """Restore the newest checkpoint, or start a new state, after the warm start if the experiment has one."""
    experiment, policy, last = runtime.experiment, runtime.policy, runtime.experiment.schedule.steps
    if (newest := checkpoints.latest()) is not None:
        progress.say(f"{'already at' if newest >= last else 'continuing from'} step {newest} of {last}")
        return restore_state(run, checkpoints, policy, newest)
    progress.say(f"starting from {policy.model.checkpoint or 'random parameters'}")
    if experiment.warm_start is None:
        state = first_state(run, policy, jax.random.key(experiment.seed))
    else:
        state = with_new_moments(warm_start(experiment, run, runtime.mesh, skipped), policy)
    if runtime.passes.first_policy:
        save_first(run, state, policy)
    if (kept := abstract_kept(policy, abstract_policy(policy))) is not None:
        state = start_kept(state, kept)
    adapted = first_adapted(experiment.calibration, experiment.regularizers)
    return replace(state, adapted=multihost.to_devices(adapted, named_sharding(runtime.mesh)))
