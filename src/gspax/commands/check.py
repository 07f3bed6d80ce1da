"""`gspax check`: verify every checkpoint below a directory against its manifest."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from gspax.commands.arguments import Parser, require_directory, subcommand_parser
from gspax.errors import UserError, display
from gspax.storage.paths import to_path


def make_parser() -> Parser:
    parser = subcommand_parser(
        "check",
        "Verify size and SHA-256 of every file of the checkpoints of a run, or of what `gspax convert` wrote. "
        "The exit code is 1 if one is damaged or cannot be verified.",
        "gspax check runs/sort",
    )
    parser.add_argument("directory", type=to_path, metavar="DIR", help="a run, or a converted checkpoint")
    return parser


def execute(options: argparse.Namespace) -> int:
    require_directory(options.directory)
    return run(options.directory)


def run(directory: Path) -> int:
    """Print a line for each checkpoint. Return 1 if one is not known to be intact, or if a saved one is not there."""
    from gspax.run.directory import RunDir
    from gspax.run.manifest import finished_steps, lost_step

    run, code, checkpoints = RunDir(directory), 0, 0
    for name, damage in _check_all(directory):
        display("\n".join(f"{name}: {line}" for line in damage or ["intact"]))
        code |= bool(damage)
        checkpoints += "/" in name
    if not checkpoints and not run.newest.exists():
        raise UserError(f"{directory}: wanted a run or a converted checkpoint, it has no checkpoint")
    if run.newest.exists() and not finished_steps(run.checkpoints):
        display(f"{run.checkpoints.name}: no checkpoint, but {run.newest.name} records that one was saved")
        code = 1
    elif (lost := lost_step(run.checkpoints, run.newest)) is not None:
        display(f"{run.checkpoints.name}/{lost}: lost, but {run.newest.name} records that it was saved")
        code = 1
    return code


def _check_all(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each checkpoint, and its damage; the files of a converted one come first."""
    from gspax.run.directory import RunDir
    from gspax.run.manifest import MANIFEST, find_damage, finished_steps, has_manifest, list_steps

    run = RunDir(directory)
    if (directory / "config.json").is_file():  # what `gspax convert` wrote
        damage = find_damage(directory) if has_manifest(directory) else [f"no {MANIFEST}, not verified"]
        yield "config.json and tokenizer", damage
    for folder in (run.checkpoints, run.start, run.warm_start.checkpoints, *run.dumps.glob("*/state")):
        finished = finished_steps(folder)
        for step in list_steps(folder):
            damage = [f"no {MANIFEST}, not verified and not used"]
            if step in finished:
                damage = [f"damaged: {line}" for line in find_damage(folder / str(step))]
            yield f"{folder.relative_to(directory)}/{step}", damage
