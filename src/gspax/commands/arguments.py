"""Parts of the subcommands' parsers, and the experiment and the folders that options name.

Functions import what needs jax, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gspax.errors import UserError, display, tell, warn
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path

if TYPE_CHECKING:
    from gspax.config import Experiment


class Parser(argparse.ArgumentParser):
    """A parser that reports a usage error as one sentence, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def subcommand_parser(name: str, description: str, example: str, kind: type[Parser] = Parser) -> Parser:
    """Return the parser of one subcommand, with an example at the end of its help."""
    return kind(
        prog=f"gspax {name}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_experiment(parser: Parser) -> None:
    """Add `FILE` and its overrides."""
    parser.add_argument("file", metavar="FILE", help="a Python file that defines `experiment = Experiment(...)`")
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=c", help="set a field of the experiment; the last one wins (null for None)"
    )


def add_source(parser: Parser) -> None:
    """Add `SOURCE`, the policy of a command that talks with it."""
    parser.add_argument(
        "source", metavar="SOURCE", help="a run, DIR or DIR@STEP; a checkpoint's folder; a name on the Hub"
    )


def add_dry_run(parser: Parser) -> None:
    """Add `--workdir`, and `--dry-run` with its `--devices`, `--device-memory`, and `--all-settings`."""
    parser.add_argument("--workdir", type=to_path, metavar="DIR", help="the run directory (not needed for a dry run)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print settings and costs, and stop")
    parser.add_argument("--devices", type=at_least(1), metavar="N", help="devices that a dry run assumes (default: 1)")
    parser.add_argument(
        "--device-memory",
        type=at_least(1),
        metavar="GIB",
        help="with --dry-run: check that the arrays fit a device",
    )
    parser.add_argument(
        "--all-settings", action="store_true", help="with --dry-run: print the settings with their defaults too"
    )


def add_target(parser: Parser, dtype: str) -> None:
    """Add `--to` and `--dtype` of a command that writes a checkpoint; `dtype` is the default."""
    parser.add_argument(
        "--to",
        dest="target",
        type=to_path,
        metavar="DIR",
        required=True,
        help="a new folder, complete or absent",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=dtype, help=f"dtype of the parameters (default: {dtype})"
    )


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type: integers of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"wanted an integer of at least {least}, got {text!r}")
        return int(text)

    return parse


def require_address(text: str) -> None:
    """Check that the coordinator is `HOST:PORT` with a port from 1 to 65535; else UserError."""
    host, _, port = text.rpartition(":")
    if not host.strip() or not port.isdecimal() or not 1 <= int(port[:6]) <= 65535:
        raise UserError(f"--coordinator: wanted HOST:PORT with a port from 1 to 65535, got {text[:200]!r}")


def size(text: str) -> int:
    """Parse `5GB`, `500MB` or `1000000` as a number of bytes."""
    match = re.fullmatch(r"(\d+)(|KB|MB|GB)", text)
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"wanted a size such as 5GB or 500MB, got {text!r}")
    return int(match[1]) * {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]]


OF_DRY_RUN = {  # options of a dry run alone, and what a run does instead
    "devices": "a run uses all devices that it finds",
    "device_memory": "a run uses the memory that it finds",
    "all_settings": "a run writes all settings to experiment.json",
}


def load_experiment(
    options: argparse.Namespace, recorded: Mapping[str, Any] | None = None, *, for_sft: bool = False
) -> Experiment:
    """Load FILE, apply the overrides and validate the result; warnings go to stderr.

    Modules next to FILE can be imported from now on: by its functions while they run, and by name in an override. A dry
    run also checks the device count, calls rewards, demonstration and environment once, and prints settings, sizes and
    costs; a run does these checks when its processes have joined.

    Args:
      options: the options of the command line.
      recorded: the description of a run of this file, whose settings apply before the overrides.
      for_sft: whether the experiment needs a warm start.

    Raises:
      UserError: the file, an override, a field or a combination of options is invalid; one line for each error.
    """
    from gspax import experiment as experiments
    from gspax.experiment import plan
    from gspax.experiment.overrides import apply, as_recorded, without_effect
    from gspax.experiment.validation.first_calls import check_calls

    dry_run = getattr(options, "dry_run", False)
    for name, instead in OF_DRY_RUN.items():
        if getattr(options, name, None) and not dry_run:
            raise UserError(f"--{name.replace('_', '-')} is for --dry-run; {instead}")
    if not dry_run and "workdir" in options and options.workdir is None:
        raise UserError("wanted --workdir DIR, the directory that the run writes to (or --dry-run)")
    if getattr(options, "workdir", None) is not None:
        require_possible(options.workdir)
    devices = (options.devices or 1) if dry_run else 0
    experiment = load_file(options.file)
    if recorded is not None:
        in_file, experiment = experiments.describe(experiment), as_recorded(experiment, recorded)
        changes = experiments.difference(in_file, experiments.describe(experiment))
        if changes := [line for line in changes if not line.endswith(" -> (absent)")]:
            tell(f"settings of the run: {'; '.join(changes)}")
    experiment, problems = apply(experiment, options.overrides)
    wrong = [sentence for _, sentence in problems]
    wrong += experiments.validate(experiment, devices, broken=[key for key, _ in problems])
    if for_sft and not wrong and experiment.warm_start is None:
        wrong.append("warm_start: wanted a WarmStart for `gspax sft`, got None")
    if wrong:
        raise UserError("\n".join(wrong))
    notes = [*without_effect(options.overrides), *experiments.warnings(experiment)]
    try:
        if dry_run:
            check_calls(experiment, notes.append)
            keys = [override_key(assignment) for assignment in options.overrides]
            planned = plan.plan(experiment, devices or 1, overridden=keys)
            if getattr(options, "workdir", None) is not None:
                notes += _check_workdir(options.workdir, experiments.describe(experiment), planned.checkpoint)
            display(plan.render(planned, all_settings=options.all_settings))
            if options.device_memory and (wrong := plan.memory_problems(planned, options.device_memory)):
                raise UserError("\n".join(wrong))
    finally:
        for sentence in notes:  # after what a dry run prints, whose first lines scroll away
            warn(sentence)
    return experiment


def _check_workdir(workdir: Path, description: Mapping[str, object], checkpoint: int) -> Iterator[str]:
    """Yield a warning if two checkpoints do not fit on the disk. UserError if the directory has another experiment."""
    from gspax.run.directory import RunDir, require_same

    require_same(RunDir(workdir), description)
    if not open_storage(workdir).has_folders:
        return
    nearest = next(parent for parent in (workdir.absolute(), *workdir.absolute().parents) if parent.exists())
    free = shutil.disk_usage(nearest).free
    if free < 2 * checkpoint:
        yield (
            f"--workdir: {free / 2**30:.2f} GiB are free in {nearest}, two checkpoints take "
            f"{2 * checkpoint / 2**30:.2f} GiB"
        )


def load_file(file: str) -> Experiment:
    """Load the experiment that a Python file defines; it may import the modules next to it. UserError without one."""
    from gspax import experiment as experiments

    folder = os.path.dirname(os.path.realpath(file))  # `resolve` raises where links lead in a circle
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that no file there hides an installed module
    return experiments.load(file)


def override_key(assignment: str) -> str:
    """Return the `a.b` of `a.b=c`."""
    return assignment.partition("=")[0].strip()


def require_directory(path: Path) -> None:
    """Check that `path` is a directory; else UserError."""
    if not path.is_dir():
        raise UserError(f"{path}: wanted the directory of a run, there is none")


def require_file(path: Path) -> None:
    """Check that a file can be written at `path`; else UserError."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UserError(f"{path}: wanted a file to write, but {what}")


def require_possible(path: Path) -> None:
    """Check that a directory can be at `path` and files can be created there; else UserError."""
    storage = open_storage(path)
    storage.require_usable(path)
    if not storage.has_folders:
        return
    try:  # a name that is too long raises
        nearest = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    except (OSError, ValueError) as problem:
        raise UserError(f"{str(path)[:200]}: wanted a directory: {problem}") from problem
    if nearest != path.absolute() and os.path.lexists(path):
        raise UserError(f"{path}: wanted a directory, got a link to one that does not exist")
    if not nearest.is_dir():
        raise UserError(f"{path}: wanted a directory, but {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{path}: wanted a directory to write to, {nearest} is not writable")
    try:
        os.rmdir(tempfile.mkdtemp(".tmp", ".gspax_", nearest))
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):  # another time the same command may succeed
            raise
        raise UserError(f"{path}: wanted a directory to write to, nothing can be created in {nearest}") from problem
