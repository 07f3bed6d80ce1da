"""`gspax eval`: held-out rewards of a checkpoint, and benchmark tasks."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from gspax.commands import processes
from gspax.commands.arguments import (
    Parser,
    at_least,
    load_experiment,
    require_directory,
    require_possible,
    subcommand_parser,
)
from gspax.errors import UserError
from gspax.storage.paths import to_path

if TYPE_CHECKING:
    from gspax.config import Experiment, Published, Task
    from gspax.evaluation.tasks import Settings

# options that are fields of a task
SETTINGS = ("problems", "samples", "temperature", "top_k", "top_p", "min_p", "max_tokens")


def make_parser() -> Parser:
    parser = subcommand_parser(
        "eval",
        "Measure a checkpoint: without --tasks on the experiment's held-out problems, sampled at temperature 1 and "
        "decoded greedily, and on its own tasks; with --tasks on those alone: mean reward, pass@k, maj@k, 95 % "
        "intervals, and files with every completion.",
        "gspax eval experiments/sort_gspo.py --workdir runs/sort --step 125 evaluation.problems=1024\n"
        "  gspax eval gsm8k.py --workdir runs/gsm8k --tasks gsm8k=gsm8k/test.jsonl,math500 --samples 8\n"
        "  gspax eval --from Qwen/Qwen3-0.6B --workdir runs/qwen3 --tasks gsm8k --max-tokens 1024 sampling.prompts=32",
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="the experiment's Python file; left out with --from")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="set a field of the experiment")
    parser.add_argument("--workdir", type=to_path, metavar="DIR", required=True, help="the run directory")
    parser.add_argument("--step", type=at_least(0), metavar="N", help="the checkpoint (default: the newest)")
    parser.add_argument("--from", dest="source", metavar="HF", help="a published checkpoint: a folder, or on the Hub")
    group = parser.add_argument_group(
        "tasks", "Without --tasks the other options are settings of the experiment's tasks."
    )
    group.add_argument(
        "--tasks",
        metavar="NAME[=PATH],…",
        help="functions of gspax.evaluation.tasks as NAME or NAME=PATH, tasks of the experiment, or import paths",
    )
    group.add_argument("--samples", type=at_least(1), metavar="N", help="the number of completions of each problem")
    group.add_argument("--problems", type=at_least(1), metavar="N", help="only the first N problems")
    group.add_argument("--temperature", type=float, metavar="T", help="0 for greedy decoding")
    group.add_argument("--top-k", type=at_least(0), metavar="K", help="0 for no filter")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--max-tokens", type=at_least(1), metavar="N", help="limit of a completion")
    processes.add_options(parser)
    return parser


def execute(options: argparse.Namespace) -> int:
    if options.file is not None and "=" in options.file:
        options.overrides.insert(0, options.file)
        options.file = None
    if (options.file is None) == (options.source is None):
        raise UserError("wanted the FILE of an experiment, or --from HF without one")
    values = {name: getattr(options, name) for name in SETTINGS}
    settings = cast("Settings", {name: value for name, value in values.items() if value is not None})
    if options.source is not None:
        return _evaluate_published(options, settings)
    from gspax.experiment import check
    from gspax.run.directory import RunDir, read_description

    require_directory(options.workdir)
    experiment, tasks = load_experiment(options, read_description(RunDir(options.workdir))), None
    if options.tasks is not None or settings:
        tasks = find_tasks(options.tasks, experiment.evaluation.tasks, settings)
        experiment = dataclasses.replace(experiment, evaluation=dataclasses.replace(experiment.evaluation, tasks=tasks))
        check(experiment)
    _require_needs(experiment)
    processes.join("eval", options, experiment)
    from gspax.evaluation.checkpoint import evaluate_run

    evaluate_run(experiment, options.workdir, options.step, tasks)
    return 0


def _evaluate_published(options: argparse.Namespace, settings: Settings) -> int:
    from gspax.evaluation.checkpoint import evaluate_published, find_published, generation_settings
    from gspax.experiment import override
    from gspax.experiment.validation import check_published

    if options.tasks is None:
        raise UserError("wanted --tasks with --from (see `gspax eval --help`)")
    if options.step is not None:
        raise UserError("--step is for the checkpoints of a run, not for --from")
    tasks = find_tasks(options.tasks, (), generation_settings(options.source) | settings)
    published = override(find_published(options.source, tasks), options.overrides)
    check_published(published)
    _require_needs(published)
    require_possible(options.workdir)
    options.workdir.mkdir(parents=True, exist_ok=True)
    processes.join("eval", options, published)
    evaluate_published(published, options.workdir)
    return 0


def _require_needs(experiment: Experiment | Published) -> None:
    """Check that all that the rewards need is there, before a checkpoint is read; else UserError."""
    from gspax.experiment.validation.first_calls import missing_needs, rewards_of

    if missing := list(missing_needs(getattr(experiment, "environment", None), rewards_of(experiment))):
        raise UserError("\n".join(missing))


def find_tasks(names: str | None, known: Sequence[Task], settings: Settings) -> tuple[Task, ...]:
    """Find the tasks of `--tasks` (`find_task`); without that option, all of the experiment with these settings."""
    if names is None and not known:
        raise UserError("wanted --tasks, whose settings these are: the experiment has no tasks of its own")
    found = [task.name for task in known] if names is None else names.split(",")
    return tuple(find_task(name, {task.name: task for task in known}, settings) for name in found)


def find_task(text: str, known: dict[str, Task], settings: Settings) -> Task:
    """Find the task that `NAME` or `NAME=PATH` stands for, and replace fields of it.

    Args:
      text: a task of the experiment, else a function of `gspax.evaluation.tasks`, or the dotted name of a `Task` or of
        a function that gives one.
      known: the experiment's tasks by name.
      settings: fields to replace.
    """
    from gspax.config import Task
    from gspax.evaluation import tasks
    from gspax.experiment.overrides import lookup

    name, _, path = (part.strip() for part in text.partition("="))
    if name in known and not path:
        return dataclasses.replace(known[name], **settings)
    try:
        task = lookup(name if "." in name else f"{tasks.__name__}.{name}")
    except ValueError as wanted:
        mine = f" or of the experiment's tasks ({', '.join(known)})" if known else ""
        raise UserError(f"--tasks: wanted {wanted}{mine}, got {name!r}") from None
    if callable(task) and not isinstance(task, type):
        try:
            task = task(path) if path else task()
        except TypeError as problem:
            raise UserError(f"--tasks: wanted {name}=PATH, got {text!r} ({problem})") from None
    if not isinstance(task, Task):
        raise UserError(f"--tasks: wanted the name of a task, got {name!r}, which names a {type(task).__name__}")
    return dataclasses.replace(task, **settings)
