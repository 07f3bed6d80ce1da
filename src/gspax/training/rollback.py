"""A rollback returns a run to its newest checkpoint, and goes on with other problems, after updates went wrong.

The run restarts inside its process from the state of that checkpoint, with the problems since then marked as consumed.
`rollbacks.jsonl` records each rollback, so a run that is stopped afterwards resumes with the same problems. The skipped
update's minibatch is dumped, with the state before it, for `gspax replay`.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import Guard
from gspax.errors import DivergedError, UserError, warn
from gspax.learner.restore import drop_frozen
from gspax.parallel import multihost
from gspax.run.checkpoints import Checkpoints, shorten
from gspax.run.directory import RunDir, read_json
from gspax.run.folders import write_atomically
from gspax.run.record import read_rows
from gspax.types import Batch, TrainState

MINIBATCH, ABOUT, STATE = "minibatch.npz", "about.json", "state"  # the entries of a dump


def dump(
    run: RunDir, step: int, state: TrainState, batch: Batch | None, description: Any, mesh: jax.sharding.Mesh
) -> str:
    """Write a minibatch and the state for `gspax replay`, in place of earlier dumps of the run. Collective.

    Args:
      batch: the minibatch; None if there is none to dump.
      description: the experiment's (`experiment.description`).

    Returns:
      A sentence that names the folder, or why nothing could be written: the divergence is reported in any case.
    """
    if batch is None:
        return ""
    folder = run.dumps / f"step_{step:06d}"
    arrays = multihost.to_host({name: x for name, x in vars(batch).items() if x is not None})
    try:
        with Checkpoints(folder / STATE, keep=1, mesh=mesh) as checkpoints:
            checkpoints.save(step, drop_frozen(state), {})
        multihost.all_or_raise(lambda: _write(folder, arrays, {"step": step, "experiment": description}))
    except (OSError, UserError) as error:
        return f" Its minibatch could not be dumped: {error}."
    return f" The minibatch of the last one is in {folder}, for `gspax replay`."


def _write(folder: Path, arrays: dict[str, Any], about: dict[str, Any]) -> None:
    if jax.process_index() != 0:
        return
    np.savez(folder / MINIBATCH, **arrays)
    write_atomically(folder / ABOUT, json.dumps(about, indent=2) + "\n")
    for old in folder.parent.glob("step_*"):
        if old != folder:
            shutil.rmtree(old)


def read_minibatch(folder: Path) -> Batch:
    """The minibatch of a dump, on the host. UserError if it cannot be read."""
    path = folder / MINIBATCH
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:  # numpy stops reading at the shape's end, where no checksum has been compared yet
            raise UserError(f"the checksum of {damaged} differs")
        with np.load(path, allow_pickle=False) as arrays:
            return Batch(**{array.name: arrays[array.name] for array in fields(Batch) if array.name in arrays})
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds for damaged bytes
        raise UserError(f"{path} cannot be read: {shorten(error)}") from error


def read_about(folder: Path) -> dict[str, Any]:
    """The step of a dump and the description of its experiment. UserError if it is no dump."""
    if not (folder / ABOUT).is_file():
        raise UserError(f"{folder}: wanted a dump of a run (a folder in its dumps/), there is none")
    about = read_json(folder / ABOUT)
    wanted = {"step": int, "experiment": dict}
    if not isinstance(about, dict) or any(not isinstance(about.get(name), kind) for name, kind in wanted.items()):
        raise UserError(f"{folder / ABOUT}: wanted a JSON object with a step and an experiment")
    return about


def go_back(run: RunDir, checkpoints: Checkpoints, problem: DivergedError, guard: Guard) -> None:
    """Record that the run goes back to its newest checkpoint, or without one to its start, and warn of it.

    Raises:
      DivergedError: the run went back there `guard.rollbacks` times already.
    """
    to = checkpoints.latest() or 0
    entries = multihost.gather(_read(run))[0]
    returns = sum(entry["to"] == to for entry in entries)
    if returns >= guard.rollbacks:
        again = f" The run went back to checkpoint {to} {returns} times." if returns else ""
        raise DivergedError(f"{problem}{again}", step=problem.step, position=problem.position) from None
    if jax.process_index() != 0:
        return
    entry = {"step": problem.step, "to": to, "position": problem.position, "reason": str(problem)}
    write_atomically(run.rollbacks, "".join(json.dumps(line) + "\n" for line in [*entries, entry]))
    warn(
        f"{problem} Going back to {f'checkpoint {to}' if to else 'the start'} and on with "
        f"problem {problem.position} ({returns + 1} of {guard.rollbacks} times)"
    )


def skip_problems(run: RunDir, state: TrainState, step: int) -> TrainState:
    """Mark the problems as consumed that the run went back from since `step`, where the state was restored."""
    found = [each["position"] for each in multihost.gather(_read(run))[0] if each["to"] >= step]
    if not found:
        return state
    position = max(found)
    return replace(state, position=jnp.maximum(state.position, position))


def _read(run: RunDir) -> list[dict[str, Any]]:
    if jax.process_index() != 0 or not run.rollbacks.exists():
        return []
    return [
        row for row in read_rows(run.rollbacks) if all(isinstance(row.get(name), int) for name in ("to", "position"))
    ]
