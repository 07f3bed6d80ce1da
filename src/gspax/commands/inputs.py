"""What a subcommand reads before it computes anything: the experiment of its options, a run directory.

Functions import what needs jax, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspax.errors import UserError, warn

if TYPE_CHECKING:
    from gspax.config import Experiment


def load_experiment(options: argparse.Namespace, recorded: Mapping[str, Any] | None = None) -> Experiment:
    """Load FILE, apply the overrides and validate the result; warnings go to stderr.

    Modules beside FILE can be imported from now on: by its functions while they run, and by name in an override. A dry
    run also checks the device count, calls rewards, demonstration and environment once, and prints settings, sizes and
    costs; a run does these checks when its processes have joined.

    Args:
      recorded: the description of a run of this file, whose settings apply before the overrides.

    Raises:
      UserError: the file, an override, a field or a combination of options is invalid; one line for each error.
    """
    from gspax import experiment as experiments
    from gspax.experiment import plan
    from gspax.experiment.overrides import apply, as_recorded
    from gspax.experiment.validation.first_calls import check_calls

    dry_run = getattr(options, "dry_run", False)
    if getattr(options, "devices", None) is not None and not dry_run:
        raise UserError("--devices is for --dry-run; a run uses all devices that it finds")
    if not dry_run and "workdir" in options and options.workdir is None:
        raise UserError("wanted --workdir DIR, the directory that the run writes to (or --dry-run)")
    if getattr(options, "workdir", None) is not None:
        require_possible(options.workdir)
    devices = (options.devices or 1) if dry_run else None
    folder = str(Path(options.file).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that no file there hides an installed module
    experiment = experiments.load(options.file)
    if recorded is not None:
        given, experiment = experiment, as_recorded(experiment, recorded)
        changes = experiments.difference(experiments.describe(given), experiments.describe(experiment))
        if changes := [line for line in changes if not line.endswith(" -> (absent)")]:
            print(f"gspax: settings of the run: {'; '.join(changes)}", file=sys.stderr)
    experiment, problems = apply(experiment, options.overrides)
    wrong = [sentence for _, sentence in problems]
    wrong += experiments.validate(experiment, devices, broken=[key for key, _ in problems])
    if wrong:
        raise UserError("\n".join(wrong))
    for sentence in experiments.warnings(experiment):
        warn(sentence)
    if dry_run:
        check_calls(experiment, warn)
        keys = [override_key(assignment) for assignment in options.overrides]
        print(plan.render(plan.plan(experiment, devices or 1, overridden=keys)))
    return experiment


def override_key(assignment: str) -> str:
    """The `a.b` of `a.b=c`."""
    return assignment.partition("=")[0].strip()


def require_directory(path: Path) -> None:
    """UserError unless `path` is a directory."""
    if not path.is_dir():
        raise UserError(f"{path}: wanted the directory of a run, there is none")


def require_possible(path: Path) -> None:
    """UserError if no directory can be at `path`, or nothing can be created there."""
    try:
        nearest = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        path.exists()  # raises for a name that is too long
    except (OSError, ValueError) as problem:
        raise UserError(f"{str(path)[:200]}: wanted a directory: {problem}") from problem
    if not nearest.is_dir():
        raise UserError(f"{path}: wanted a directory, but {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{path}: wanted a directory to write to, {nearest} is not writable")
