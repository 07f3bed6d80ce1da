"""Opens and closes what a run holds: its directory, rewards, checkpoints, trackers, and the listener for signals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from gspax.experiment import plan
from gspax.experiment.description import describe
from gspax.experiment.origin import Origin
from gspax.parallel import timeline
from gspax.report import run_page
from gspax.rollout.runtime import Runtime
from gspax.run import interrupt, progress
from gspax.run.checkpoints import Checkpoints
from gspax.run.compilation import Compilations, count_compilations
from gspax.run.directory import RunDir, enter_run
from gspax.run.folders import as_warning
from gspax.run.manifest import finished_steps
from gspax.run.trackers import Trackers


class Training(NamedTuple):
    """A run that this process trains."""

    runtime: Runtime
    run: RunDir
    checkpoints: Checkpoints
    trackers: Trackers
    compiled: Compilations


@contextlib.contextmanager
def open_training(runtime: Runtime, origin: Origin, workdir: Path, report_to: Sequence[str]) -> Iterator[Training]:
    """Open a run in `workdir`; close all of it and write the report when the block ends without an error."""
    experiment, keep = runtime.experiment, runtime.experiment.schedule.keep_checkpoints
    description = describe(experiment)
    with Trackers(report_to) as trackers:
        with (
            enter_run(workdir, description, origin) as run,
            runtime.rewards,
            runtime.interaction.steps if runtime.interaction else contextlib.nullcontext(),
            timeline.collecting() if experiment.schedule.timeline else contextlib.nullcontext(),
            count_compilations() as compiled,
            interrupt.listen(lambda: describe_unsaved(run.checkpoints)),
            Checkpoints(run.checkpoints, keep=keep, mesh=runtime.mesh, note=run.newest) as checkpoints,
        ):
            progress.show_table(plan.overview(plan.plan(experiment, jax.device_count())))
            if jax.process_index() == 0:
                trackers.start(run, description)
            yield Training(runtime, run, checkpoints, trackers, compiled)
        if jax.process_index() == 0:
            progress.say("writing the report")
            with as_warning(run.report):
                trackers.finish(run_page.write(run.path))


def describe_unsaved(checkpoints: Path) -> str:
    """Return a phrase that names the work lost if the run ends at once."""
    finished = finished_steps(checkpoints)
    return f"what was done after checkpoint {finished[-1]} is lost" if finished else "no checkpoint was saved"
