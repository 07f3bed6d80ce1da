"""`gspax train`: run an experiment, or continue it."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from gspax.commands import processes
from gspax.commands.arguments import (
    Parser,
    add_dry_run,
    add_experiment,
    load_experiment,
    override_key,
    subcommand_parser,
)
from gspax.errors import DivergedError, display


def make_parser() -> Parser:
    parser = subcommand_parser(
        "train",
        "Run an experiment: warm start, sampling, updates, evaluation. If DIR holds a checkpoint of it, continue.",
        "gspax train experiments/sort_gspo.py --workdir runs/sort schedule.steps=200 optimizer.learning_rate=1e-4",
    )
    add_experiment(parser)
    add_dry_run(parser)
    parser.add_argument(
        "--report-to",
        type=_tracker_names,
        default=("tensorboard",),
        metavar="A,B",
        help="trackers: tensorboard, wandb, trackio, mlflow, several with commas, or none (default: tensorboard)",
    )
    processes.add_options(parser)
    return parser


def _tracker_names(text: str) -> tuple[str, ...]:
    """Return the trackers of `--report-to`, each once; () for `none`."""
    names = dict.fromkeys(name.strip() for name in text.split(","))
    return () if [*names] in (["none"], [""]) else tuple(names)


def execute(options: argparse.Namespace) -> int:
    """Train; process 0 then prints a summary and further commands, after a divergence `gspax replay`."""
    from gspax.run import trackers

    trackers.check(options.report_to)
    experiment = load_experiment(options)
    if options.dry_run:
        return 0
    is_primary = processes.join("train", options, experiment)
    from gspax.data.problem import count_distinct
    from gspax.report.run_page import summarize
    from gspax.training.loop import train

    try:
        train(experiment, options.workdir, report_to=options.report_to, file=options.file)
    except DivergedError as problem:
        dump = options.workdir / "dumps" / f"step_{problem.step:06d}"
        if is_primary and dump.exists():
            replay = ["replay", options.file, str(dump), *options.overrides]
            display(f"Next:\n  {shlex.join([*program(), *replay])}")
        raise
    if is_primary:
        display(summarize(options.workdir))
        problems = count_distinct(experiment.data, max(2048, 2 * experiment.evaluation.problems))
        display(next_commands(options, 2 * experiment.schedule.steps, problems, own_kind(experiment.model.mixer)))
    return 0


def program() -> list[str]:
    """Return the words that start this program in the user's shell, whose PATH need not have it."""
    called = Path(sys.argv[0])
    if called.parts[-2:] == ("gspax", "__main__.py"):
        return [sys.executable, "-m", "gspax"]
    on_path = shutil.which("gspax")
    is_on_path = on_path is not None and called.exists() and Path(on_path).samefile(called)
    return ["gspax" if is_on_path or called.name != "gspax" else sys.argv[0]]


def own_kind(mixer: object) -> str:
    """Return the folder that a layer kind of the user's own is imported from; empty for gspax's and without one."""
    module = type(mixer).__module__
    if mixer is None or module.split(".")[0] == "gspax":
        return ""
    file = Path(str(sys.modules[module].__file__)).resolve()
    return str(file.parents[module.count(".") + (file.stem == "__init__")])


def next_commands(options: argparse.Namespace, steps: int, problems: int, kinds: str = "") -> str:
    """Return the commands to run next: more steps, a larger evaluation, and commands that show and export the run.

    With `kinds`, the folder of a layer kind of the user's own, a chat imports it, and no format has the model.
    """

    def command(name: str, key: str, value: int) -> str:
        kept = [assignment for assignment in options.overrides if override_key(assignment) != key]
        return shlex.join([*program(), name, options.file, "--workdir", str(options.workdir), *kept, f"{key}={value}"])

    folder = str(options.workdir)
    path = f"PYTHONPATH={shlex.quote(kinds)} " if kinds else ""
    lines = [
        command("train", "schedule.steps", steps),
        command("eval", "evaluation.problems", problems),
        shlex.join([*program(), "samples", folder, "--best", "5"]),
        path + shlex.join([*program(), "chat", folder]),
    ]
    if not kinds:
        lines.append(shlex.join([*program(), "export", "--from", folder, "--to", f"exported/{options.workdir.name}"]))
    return "\n  ".join(["Next:", *lines])
