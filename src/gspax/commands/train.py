"""`gspax train`: run an experiment, or continue it."""

from __future__ import annotations

import argparse
import shlex

from gspax.commands import processes
from gspax.commands.arguments import Parser, add_dry_run, add_experiment, at_least, subcommand_parser
from gspax.commands.inputs import load_experiment, override_key, print_plan

GRACE = 30  # seconds after SIGTERM until a machine is gone: a spot machine, SLURM's and Kubernetes' default


def make_parser() -> Parser:
    parser = subcommand_parser(
        "train",
        "Run an experiment: warm start, sampling, updates, evaluation. If DIR holds a checkpoint of it, continue.",
        "gspax train experiments/sort_gspo.py --workdir runs/sort schedule.steps=200 optimizer.learning_rate=1e-4",
    )
    add_experiment(parser)
    add_dry_run(parser)
    processes.add_options(parser)
    parser.add_argument(
        "--grace",
        type=at_least(0),
        default=GRACE,
        metavar="SECONDS",
        help=f"to end after a signal: updates that, with a save, take longer are left out (default: {GRACE})",
    )
    return parser


def execute(options: argparse.Namespace) -> int:
    """Train; process 0 then prints a summary and what to run next."""
    experiment = load_experiment(options)
    if options.dry_run:
        print_plan(options, experiment)
        return 0
    is_primary = processes.join("train", options, experiment)
    from gspax.loop.training import train
    from gspax.run.report import summarise

    train(experiment, options.workdir, grace=options.grace)
    if is_primary:
        print(summarise(options.workdir))
        print(next_commands(options, experiment.schedule.steps, experiment.evaluation.problems))
    return 0


def next_commands(options: argparse.Namespace, steps: int, problems: int) -> str:
    """What to run next: more steps, and an evaluation on more problems."""

    def command(name: str, key: str, value: int) -> str:
        kept = [each for each in options.overrides if override_key(each) != key]
        return shlex.join(["gspax", name, options.file, "--workdir", str(options.workdir), *kept, f"{key}={value}"])

    return (
        "Next:\n"
        f"  {command('train', 'schedule.steps', 2 * steps)}\n"
        f"  {command('eval', 'evaluation.problems', max(2048, 2 * problems))}"
    )
