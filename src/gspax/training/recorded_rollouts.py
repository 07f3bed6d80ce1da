"""Records what the steps of a run train on, and reads it again: `schedule.record_rollouts`, `gspax replay-rollouts`.

A file of a step has the arrays of its `Rollout`, and as JSON its completions: their rewards, turns and texts. The
parameters that sampled them are not recorded, and neither are the problems.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspax.errors import UserError
from gspax.experiment.description import describe, difference
from gspax.learner.metrics import Clock
from gspax.model.passes import Passes
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rollout.completion import GradedBatch, from_dict, gather_texts
from gspax.rollout.problems import Skipped
from gspax.rollout.runtime import Runtime, count_rollouts
from gspax.run.arrays import read_arrays, write_arrays
from gspax.run.directory import RunDir, read_description
from gspax.training.in_flight import InFlight
from gspax.types import JsonObject, Rollout, TrainState

ABOUT = "about"  # the entry of a file that has JSON, as bytes
ON_HOST = ("prompt_length_B", "length_B", "finished_B", "reply_B", "passes_B")  # as `sampler.lengths_to_host`
# What the rows of a rollout depend on: a replay with another value would read them wrongly
SAME = ("tokenizer", "tokenizer.*", "model.vocab_size", "environment", "environment.*", "sampling.*")


@dataclass
class Recording(InFlight):
    """Samples and grades the rollouts of a run, and records them in its directory before they are trained on."""

    run: RunDir = field(kw_only=True)

    def take(self, runtime: Runtime, state: TrainState, clock: Clock) -> GradedBatch:
        """Record the rollout that was sampled."""
        return self._record(runtime, state, super().take(runtime, state, clock), clock)

    def take_again(self, runtime: Runtime, state: TrainState, wrong: Mapping[int, str], clock: Clock) -> GradedBatch:
        """Record the rollout that was sampled, in place of the one before."""
        return self._record(runtime, state, super().take_again(runtime, state, wrong, clock), clock)

    def _record(self, runtime: Runtime, state: TrainState, graded: GradedBatch, clock: Clock) -> GradedBatch:
        write_rollout(self.run, count_rollouts(runtime, state) + 1, graded)
        clock.lap("record")
        return graded


@dataclass(frozen=True)
class Recorded:
    """Reads the rollouts that a run has recorded (`rollouts.Rollouts`). Nothing is sampled, graded, or judged."""

    run: RunDir

    @property
    def can_evaluate(self) -> bool:
        """Return False."""
        return False

    def begin(self, skipped: Skipped, entries: JsonObject) -> None:
        """Begin at any checkpoint."""

    def take(self, runtime: Runtime, state: TrainState, clock: Clock) -> GradedBatch:
        """Read the rollout of a step."""
        group, step = runtime.experiment.sampling.group, count_rollouts(runtime, state) + 1
        return read_rollout(self.run, step, group, mesh=runtime.mesh)

    def take_again(self, runtime: Runtime, state: TrainState, wrong: Mapping[int, str], clock: Clock) -> None:
        """Return None: the run trained on it."""

    def after_updates(self, runtime: Runtime, graded: GradedBatch) -> None:
        """Keep nothing."""

    def entries(self) -> dict[str, str]:
        """Return {}."""
        return {}


def rollout_file(run: RunDir, step: int) -> Path:
    """Return the file of what a step trained on."""
    return run.rollouts / f"step_{step:06d}.npz"


def write_rollout(run: RunDir, step: int, graded: GradedBatch) -> None:
    """Record what a step trains on. Collective; OSError if it cannot be written."""
    arrays = multihost.to_host({name: x for name, x in vars(graded.rollout).items() if x is not None})
    about = {
        "policy": graded.version,
        "prompts": graded.taken,
        "skipped": graded.skipped,
        "metrics": graded.metrics,
        "completions": [asdict(each) for each in gather_texts(graded.completions)],
        "replaced": [asdict(replace(each, texts=None)) for each in graded.replaced],
    }

    def write() -> None:
        if jax.process_index() == 0:
            run.rollouts.mkdir(parents=True, exist_ok=True)
            coded = np.frombuffer(json.dumps(about).encode(), np.uint8)
            write_arrays(rollout_file(run, step), {**arrays, ABOUT: coded})

    multihost.all_or_raise(write)


def read_rollout(run: RunDir, step: int, group: int, *, mesh: jax.sharding.Mesh) -> GradedBatch:
    """Read what a step trained on, `group` rows for each problem, to the learner's mesh. Collective.

    Raises:
      UserError: it cannot be read.
    """
    path = rollout_file(run, step)

    def read() -> tuple[dict[str, Any], dict[str, Any]]:
        arrays = read_arrays(path)
        try:
            about = json.loads(arrays.pop(ABOUT).tobytes())
            about["version"], about["taken"] = about.pop("policy"), about.pop("prompts")
            about["completions"] = [from_dict(each) for each in about["completions"]]
            about["replaced"] = [from_dict(each) for each in about["replaced"]]
            if not {each.name for each in fields(Rollout)}.issuperset(arrays):
                raise KeyError("unknown arrays")
            return arrays, about
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: wanted the rollout of a step, got other content ({error})") from error

    arrays, about = multihost.all_or_raise(read)
    own = named_sharding(mesh, "batch")
    placed = {name: x if name in ON_HOST else multihost.to_devices(x, own) for name, x in arrays.items()}
    return GradedBatch(rollout=Rollout(**placed), problems=[None] * (len(about["completions"]) // group), **about)


def require_replayable(run: RunDir, passes: Passes, steps: range) -> None:
    """Check that an experiment can train on the recorded rollouts of these steps of a run; else UserError."""
    recorded = read_description(run)
    if recorded is None:
        raise UserError(f"{run.path} is not a gspax run (it has no experiment.json that can be read)")
    missing = [step for step in steps if not rollout_file(run, step).exists()]
    if missing:
        first = f"got none of {len(missing)} of them, the first {missing[0]}"
        raise UserError(f"{run.rollouts}: wanted the rollouts of steps {steps[0]} to {steps[-1]}, {first}")
    changed = difference(recorded, describe(passes.experiment))
    if other := [line for line in changed if any(fnmatchcase(line.partition(":")[0], key) for key in SAME)]:
        raise UserError(f"{run.path}: its rollouts are read as they were sampled; undo: {'; '.join(other)}")
    if passes.samples_experts and "expert_BLTA" not in read_arrays(rollout_file(run, steps[0])):
        raise UserError(f"routing_replay: wanted rollouts with the sampler's experts, {run.rollouts} has none")
    if passes.sampling_policy:
        raise UserError("center_scores: wanted the parameters that sampled, a rollout's record has none")
    for term in passes.terms:
        if term.reads_problems:
            raise UserError(f"{term.reads_problems}: wanted the problems, a rollout's record has none")
