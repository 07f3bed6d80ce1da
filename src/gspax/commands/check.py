"""`gspax check`: verify every checkpoint below a directory against its manifest."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspax.commands.arguments import Parser, require_directory, subcommand_parser
from gspax.errors import UserError


def make_parser() -> Parser:
    parser = subcommand_parser(
        "check",
        "Verify size and SHA-256 of every file of the checkpoints of a run, or of what `gspax convert` wrote. "
        "The exit code is 1 if one is damaged or cannot be verified.",
        "gspax check runs/sort",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run, or a converted checkpoint")
    return parser


def execute(options: argparse.Namespace) -> int:
    """Print a line for each checkpoint; 1 if one is not known to be whole, or there is none but one was saved."""
    require_directory(options.directory)
    return run(options.directory)


def run(directory: Path) -> int:
    from gspax.run.directory import RunDir
    from gspax.run.manifest import MANIFEST, find_damage, finished_steps, list_steps

    places = RunDir(directory), RunDir(directory).warm_start
    folders = (places[0].checkpoints, places[0].start, places[1].checkpoints, *places[0].dumps.glob("*/state"))
    code = found = 0
    if (directory / "config.json").is_file():  # what `gspax convert` wrote
        code = _check_files(directory)
    for folder in folders:
        finished = finished_steps(folder)
        for step in list_steps(folder):
            name, path = f"{folder.relative_to(directory)}/{step}", folder / str(step)
            if step not in finished:
                print(f"{name}: no {MANIFEST}, not verified and not used")
                code = 1
            elif damage := find_damage(path):
                print("\n".join(f"{name}: damaged: {each}" for each in damage))
                code = 1
            else:
                print(f"{name}: whole")
            found += 1
    if not found and not places[0].newest.exists():
        raise UserError(f"{directory}: wanted a run or a converted checkpoint, it has no checkpoint")
    if places[0].newest.exists() and not finished_steps(places[0].checkpoints):
        print(f"{places[0].checkpoints.name}: no checkpoint, but {places[0].newest.name} records that one was saved")
        code = 1
    return code


def _check_files(directory: Path) -> int:
    """Print a line about config.json and the tokenizer of a converted checkpoint; 1 if not known to be whole."""
    from gspax.run.manifest import MANIFEST, find_damage, has_manifest

    name = "config.json and tokenizer"
    damage = find_damage(directory) if has_manifest(directory) else [f"no {MANIFEST}, not verified"]
    print("\n".join(f"{name}: {each}" for each in damage) or f"{name}: whole")
    return 1 if damage else 0
