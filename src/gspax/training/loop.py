"""Runs an experiment: restores or starts, then steps, records, evaluates and checkpoints until the last step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import jax

from gspax.config import Experiment, trained_dtype
from gspax.errors import DivergedError
from gspax.evaluation.benchmark import count_heldout
from gspax.evaluation.checkpoint import evaluate
from gspax.experiment import plan
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
from gspax.learner.updates import first_adapted, noise_warnings
from gspax.model.passes import Passes
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.report import run_page
from gspax.rollout.completion import to_json
from gspax.rollout.grading import FailedRewardsError
from gspax.rollout.problems import Skipped
from gspax.rollout.runtime import Runtime, count_rollouts, make_runtime
from gspax.run import interrupt, progress
from gspax.run.checkpoints import Checkpoints, read_extra, take_traffic
from gspax.run.compilation import Compilations, count_compilations
from gspax.run.directory import RunDir, enter_run
from gspax.run.folders import as_warning
from gspax.run.manifest import finished_steps
from gspax.run.record import Recorder
from gspax.run.trackers import Trackers
from gspax.training.in_flight import InFlight
from gspax.training.opening import open_same_terms
from gspax.training.run_guard import RunGuard, Watch, go_back, save_state, skip_problems
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
    origin = find_origin(experiment, file)
    runtime, keep, description = make_runtime(experiment), experiment.schedule.keep_checkpoints, describe(experiment)
    check_calls(experiment, multihost.warn_from_primary)
    with Trackers(report_to) as trackers:
        with (
            enter_run(workdir, description, origin) as run,
            runtime.rewards,
            runtime.interaction.steps if runtime.interaction else contextlib.nullcontext(),
            count_compilations() as compiled,
            interrupt.listen(lambda: describe_unsaved(run.checkpoints)),
            Checkpoints(run.checkpoints, keep=keep, mesh=runtime.mesh, note=run.newest) as checkpoints,
        ):
            progress.show_table(plan.overview(plan.plan(experiment, jax.device_count())))
            if jax.process_index() == 0:
                trackers.start(run, description)
            while True:
                try:
                    train_from_newest(runtime, run, checkpoints, compiled, trackers)
                    break
                except DivergedError as problem:
                    if problem.final:
                        raise
                    go_back(run, checkpoints, problem, experiment.guard)
        if jax.process_index() == 0:
            progress.say("writing the report")
            with as_warning(run.report):
                trackers.finish(run_page.write(run.path))


def train_from_newest(
    runtime: Runtime, run: RunDir, checkpoints: Checkpoints, compiled: Compilations, trackers: Trackers
) -> None:
    """Restore the newest checkpoint, or start, and run the steps that are left.

    Raises:
      DivergedError: updates went wrong; their results are not saved.
      Interrupted: the state was saved. A step that had begun is left out: it begins again.
    """
    experiment, schedule = runtime.experiment, runtime.experiment.schedule
    in_flight = InFlight(Skipped(experiment.sampling.max_failed))
    in_flight.skipped.load(run.skipped)
    state = restore_or_start(runtime, run, checkpoints, in_flight.skipped)
    started = done = count_rollouts(runtime, state)
    state = skip_problems(run, state, done)
    extra = read_extra(checkpoints, done) if done else {}
    guard = RunGuard(experiment, run, runtime.mesh, Watch(**extra.get("watch", {})))
    in_flight.earlier.load(extra)
    opened, identity = open_same_terms(runtime, extra, done)

    def save(is_last: bool) -> None:
        watch, earlier = asdict(guard.watch), in_flight.earlier.dump()
        extra = {"experiment": describe(experiment), "watch": watch, **identity, **earlier}
        save_state(checkpoints, recorder, done, state, extra, is_last=is_last)

    with (
        Recorder(run, done, trackers) as recorder,
        progress.track(schedule.steps, done, experiment.name, took=longest_phases(recorder), compiled=compiled) as bar,
        interrupt.call_on_interrupt(lambda: save(is_last=True) if done > started and guard.is_sound else None),
    ):
        due = done == 0 or progress.is_due(done, schedule.eval_every, schedule.steps)
        if due and not recorder.has(done, "eval/reward"):  # or a signal ended the run while it was evaluated
            record_evaluation(runtime, state, recorder, run, done, bar)
        others = experiment.model, experiment.lora, runtime.mesh
        first = load_first(run, state, *others) if Passes(experiment).first_policy else None
        while done < schedule.steps:
            with keep_failures(recorder, done + 1):
                result = run_step(runtime, state, first, in_flight, opened)
            state, done = result.state, done + 1
            alarm_metrics, problem = guard.after_step(done, result)
            traffic = {**recorder.measure_traffic(), **take_traffic(checkpoints)}
            recorder.write_metrics(done, {**result.metrics, **alarm_metrics, **traffic})
            if (failed := result.samples.failed()).completions:
                recorder.write_failures(done, failed.to_json())
            bar.update(done, result.metrics)
            if done == started + 1:
                bar.print(f"first step done; {compiled}")
            if done == 1 and experiment.calibration is None:
                for sentence in noise_warnings(experiment.loss, result.metrics.get("policy/noise_floor", 0.0)):
                    multihost.warn_from_primary(sentence)
            if problem is not None:
                raise problem
            if progress.is_due(done, schedule.eval_every, schedule.steps):
                recorder.write_samples(done, result.samples.to_json())
                record_evaluation(runtime, state, recorder, run, done, bar)
            is_last = done == schedule.steps
            if progress.is_due(done, schedule.checkpoint_every, schedule.steps) and (guard.is_sound or is_last):
                progress.phase("saving a checkpoint")
                save(is_last)
            interrupt.stop_point()  # after the save, so that a signal during it costs no further step


def longest_phases(recorder: Recorder) -> dict[str, float]:
    """Return the longest recorded seconds of each phase of `run_step`, from before this process."""
    laps = {
        "sampling": "rollout",
        "grading": "reward",
        "sampling again": "refill",
        "computing log-probs": "old_logp",
        "updating": "train",
    }
    return {phase: recorder.largest(f"time/{lap}") for phase, lap in laps.items()}


def describe_unsaved(checkpoints: Path) -> str:
    """Return a phrase that names the work lost if the run ends at once."""
    finished = finished_steps(checkpoints)
    return f"what was done after checkpoint {finished[-1]} is lost" if finished else "no checkpoint was saved"


def restore_or_start(runtime: Runtime, run: RunDir, checkpoints: Checkpoints, skipped: Skipped) -> TrainState:
    """Restore the newest checkpoint, or start a new state, after the warm start if the experiment has one."""
    experiment, mesh, optimizer = runtime.experiment, runtime.mesh, runtime.optimizer
    model, lora, last = experiment.model, experiment.lora, experiment.schedule.steps
    if (newest := checkpoints.latest()) is not None:
        progress.say(f"{'already at' if newest >= last else 'continuing from'} step {newest} of {last}")
        return restore_state(run, checkpoints, model, optimizer, mesh, lora=lora, terms=Passes(experiment).terms)
    progress.say(f"starting from {model.checkpoint or 'random parameters'}")
    if experiment.warm_start is None:
        state = first_state(run, model, lora, optimizer, jax.random.key(experiment.seed), mesh)
    else:
        state = with_new_moments(warm_start(experiment, run, mesh, skipped), model, lora, optimizer, mesh)
    if Passes(experiment).first_policy:
        save_first(run, state, lora, mesh)
    kept = abstract_kept(abstract_policy(model, lora, mesh), trained_dtype(model, lora), Passes(experiment).terms)
    if kept is not None:
        state = start_kept(state, kept)
    adapted = first_adapted(experiment.calibration, experiment.regularizers)
    return replace(state, adapted=multihost.to_devices(adapted, named_sharding(mesh)))


def record_evaluation(
    runtime: Runtime, state: TrainState, recorder: Recorder, run: RunDir, done: int, bar: progress.Bar
) -> None:
    """Evaluate on the held-out problems and the tasks, and write metrics and completions."""
    problems = count_heldout(runtime.experiment.evaluation, runtime.experiment.data)
    bar.print(f"step {done}: evaluating {problems} held-out problems")
    progress.phase("evaluating")
    with keep_failures(recorder, done):
        metrics, shown, failed = evaluate(runtime, state, run.tasks_at(done))
    recorder.write_metrics(done, metrics)
    recorder.write_samples_to(run.after if done else run.before, map(to_json, shown))
    if failed:
        recorder.write_failures(done, map(to_json, failed))


@contextlib.contextmanager
def keep_failures(recorder: Recorder, step: int) -> Iterator[None]:
    """Record the completions with failed rewards before a FailedRewardsError ends the run."""
    try:
        yield
    except FailedRewardsError as problem:
        recorder.write_failures(step, map(to_json, problem.completions))
        raise
