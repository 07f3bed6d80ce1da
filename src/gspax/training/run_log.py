"""What a run records and shows of its steps and evaluations: metrics, samples, failures, and the progress bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gspax.evaluation.benchmark import count_heldout
from gspax.evaluation.checkpoint import evaluate
from gspax.learner.updates import first_warnings
from gspax.parallel import multihost, timeline
from gspax.rollout.completion import to_json
from gspax.rollout.grading import FailedRewardsError
from gspax.run import progress
from gspax.run.checkpoints import take_traffic
from gspax.run.directory import first_start
from gspax.run.record import Recorder
from gspax.training.open_training import Training
from gspax.training.step import StepResult
from gspax.types import TrainState


@dataclass(frozen=True)
class RunLog:
    """The files and the progress bar of a run, from its step `start` on."""

    training: Training
    recorder: Recorder
    bar: progress.Bar
    start: int
    started: float  # seconds since the epoch, of the run's first start

    def write_step(self, done: int, result: StepResult, alarms: Mapping[str, float]) -> None:
        """Write the metrics and the failed completions of step `done`, and show it."""
        traffic = {**self.recorder.measure_traffic(), **take_traffic(self.training.checkpoints)}
        elapsed = {"time/elapsed": time.time() - self.started}
        self.recorder.write_metrics(done, {**result.metrics, **alarms, **traffic, **elapsed})
        self.recorder.write_timeline(timeline.take())
        if (failed := result.samples.failed()).completions:
            self.recorder.write_failures(done, failed.to_json())
        self.bar.update(done, result.metrics)
        if done == self.start + 1:
            self.bar.print(f"first step done; {self.training.compiled}")
        if done == 1:
            for sentence in first_warnings(self.training.runtime.passes, result.metrics):
                multihost.warn_from_primary(sentence)

    def write_evaluation(self, done: int, state: TrainState) -> None:
        """Evaluate on the held-out problems and the tasks, and write metrics and completions. Collective."""
        run, experiment = self.training.run, self.training.runtime.experiment
        problems = count_heldout(experiment.evaluation, experiment.data)
        self.bar.print(f"step {done}: evaluating {problems} held-out problems")
        progress.phase("evaluating")
        with self.keep_failures(done):
            metrics, shown, failed = evaluate(self.training.runtime, state, run.tasks_at(done))
        self.recorder.write_metrics(done, metrics)
        self.recorder.write_samples_to(run.after if done else run.before, map(to_json, shown))
        if failed:
            self.recorder.write_failures(done, map(to_json, failed))

    @contextlib.contextmanager
    def keep_failures(self, step: int) -> Iterator[None]:
        """Record the completions with failed rewards before a FailedRewardsError ends the run."""
        try:
            yield
        except FailedRewardsError as problem:
            self.recorder.write_failures(step, map(to_json, problem.completions))
            raise


@contextlib.contextmanager
def open_log(training: Training, done: int) -> Iterator[RunLog]:
    """Open the files and the progress bar of a run after `done` steps."""
    experiment, compiled = training.runtime.experiment, training.compiled
    steps = experiment.schedule.steps
    with (
        Recorder(training.run, done, training.trackers) as recorder,
        progress.track(steps, done, experiment.name, took=longest_phases(recorder), compiled=compiled) as bar,
    ):
        try:
            yield RunLog(training, recorder, bar, done, first_start(training.run))
        finally:
            progress.end_phase()
            recorder.write_timeline(timeline.take())


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
