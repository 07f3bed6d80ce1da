"""The model card of an exported run: README.md of its folder, as the Hugging Face Hub shows it.

It contains what the run directory records: the base model, the data, the loss and the other settings, the held-out
results with 95 % intervals, and the commit and versions. Absolute paths are cut to their last part; secrets are left
out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence

import gspax
from gspax.experiment.description import flatten, reward_names, show
from gspax.hf.source import HUB_NAME
from gspax.report import statistics
from gspax.report.run_page import TASK_COLUMNS, read_task
from gspax.run.directory import RunDir, read_attempts, read_objective
from gspax.run.record import read_metrics, read_rows
from gspax.run.redaction import is_secret, redact
from gspax.storage.objects import SCHEME
from gspax.types import JsonObject

PARTS = (  # sections of the experiment in the table of settings
    *("data", "reward", "environment", "advantage", "loss", "regularizers", "reference", "teacher", "correction"),
    *("sampling", "schedule", "optimizer", "lora", "warm_start", "seed"),
)
RULES = {"checks", "filters", "exclude"}  # fields of a data source whose files are not listed as problems
SHOWN = 8  # data files listed in the sentence


def render(run: RunDir, description: JsonObject, step: int, *, of_warm_start: bool, adapter: bool) -> str:
    """Render the card of the parameters after a step of a run.

    Args:
      run: the run directory.
      description: the run's experiment (`experiment.json`).
      step: the step of the checkpoint; a step of the warm start if `of_warm_start`.
      of_warm_start: whether the parameters are those of the warm start, before any reinforcement learning.
      adapter: whether the folder contains only adapters.
    """
    flat, name = flatten(description), str(description["name"])
    base, loss = _public(str(description["model"].get("checkpoint", ""))), str(flat["loss"]).rpartition(".")[2]
    front = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    front |= {"base_model": base.partition("@")[0]} if HUB_NAME.fullmatch(base) else {}
    is_alone = adapter and not base
    how = "the supervised warm start" if of_warm_start else f"reinforcement learning with the loss `{loss}`"
    lines = [
        *("---", *(f"{key}: {json.dumps(value)}" for key, value in front.items())),
        *("tags:", "- gspax", "- reinforcement-learning", f"- {loss}", "---", "", f"# {name}", ""),
        f"{'Adapters' if adapter else 'Parameters'} after step {step} of {how}, trained with gspax from "
        f"{f'`{base}`' if base else 'random parameters'}.",
        *(["They have no base: `gspax export` without `--adapter` writes the whole model."] if is_alone else []),
        "",
        f"The problems are those of {_data(run) or _names([str(flat['data'])])}, the reward is "
        f"{_names(reward_names(flat))}.",
    ]
    if results := [] if of_warm_start else [*_held_out(run, step), *_tasks(run, step)]:
        lines += ["", "## Results", "", *results]
    if objective := "" if of_warm_start else read_objective(run):
        note = "`gspax explain` says what the names are."
        lines += ["", "## Objective", "", note, "", *(f"    {line}" for line in objective.splitlines())]
    settings = {key: value for key, value in flat.items() if key.partition(".")[0] in PARTS and value is not None}
    rows = [(key, _public(show(value))) for key, value in settings.items() if not is_secret(key)]
    table = _table(("field", "value"), [(f"`{key}`", f"`{value}`") for key, value in rows])
    lines += ["", "## Settings", "", f"<details><summary>{len(rows)} fields</summary>", "", *table, "", "</details>"]
    return "\n".join([*lines, "", "## Versions", "", *_versions(run), ""])


def _data(run: RunDir) -> str:
    """List the names of the problems' files or data sets in a sentence; empty if the run read none."""
    recorded = next((data for attempt in reversed(read_attempts(run) or []) if (data := _recorded(attempt))), {})
    paths = [
        str(path)
        for key, values in recorded.items()
        if key.partition(".")[0] == "data" and RULES.isdisjoint(key.split(".")) and isinstance(values, list)
        for path in values
    ]
    names = [*dict.fromkeys(_public(path) for path in paths)]
    return _names(names[:SHOWN]) + (f", and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _names(names: Sequence[str]) -> str:
    """Format the names of functions or files for a sentence."""
    return ", ".join(f"`{name}`" for name in names)


def _recorded(attempt: object) -> JsonObject:
    """Return the data paths in an entry of environment.json."""
    data = attempt.get("data") if isinstance(attempt, dict) else None
    return data if isinstance(data, dict) else {}


def _held_out(run: RunDir, step: int) -> Iterator[str]:
    """Yield a table of held-out rewards at step 0 and at `step`, from the evaluations with the most problems."""
    recorded = [(row, 0) for row in read_metrics(run.metrics)] if run.metrics.exists() else []
    if run.evaluations.exists():
        recorded += [(row, _problems(row)) for row in read_rows(run.evaluations)]
    rows = []
    for wanted in dict.fromkeys((0, step)):
        names = ("eval/reward", "eval/greedy_reward", "eval/truncated")
        evaluations = [
            item
            for item in recorded
            if item[0].get("step") == wanted and all(isinstance(item[0].get(name), int | float) for name in names)
        ]
        if evaluations:
            row = max(evaluations, key=lambda item: item[1])[0]
            bounds = {side: row.get(f"eval/reward_{side}") for side in ("low", "high")}
            sampled = statistics.show({"mean": row["eval/reward"], **bounds})  # type: ignore[typeddict-item]
            rows.append(
                (str(wanted), sampled, f"{row['eval/greedy_reward']:.3f}", f"{100 * row['eval/truncated']:.1f} %")
            )
    if rows:
        yield from _table(("step", "held-out reward, 95 % interval", "greedy", "truncated"), rows)


def _problems(row: JsonObject) -> int:
    """Return the number of problems of an evaluation; 0 if its row does not say."""
    settings = row.get("evaluation")
    count = settings.get("problems") if isinstance(settings, dict) else 0
    return count if isinstance(count, int) else 0


def _tasks(run: RunDir, step: int) -> Iterator[str]:
    """Yield a table with the results of the tasks that were evaluated at a step."""
    rows = [
        (path.stem, *cells)
        for path in sorted(run.tasks_at(step).glob("*.json"))
        if (cells := read_task(path, "the card")) is not None
    ]
    if rows:
        yield from ("", *_table((TASK_COLUMNS[0], *TASK_COLUMNS[2:]), rows))


def _versions(run: RunDir) -> Iterator[str]:
    """Yield a sentence and a table with the versions, devices, and commit of the run."""
    attempt: Mapping[str, object] = (read_attempts(run) or [{}])[-1]
    packages = attempt.get("packages")
    yield f"gspax {gspax.__version__} wrote this card. The run used:"
    yield ""
    named = {**(packages if isinstance(packages, dict) else {}), "devices": attempt.get("devices")}
    named |= {"commit of gspax": attempt.get("commit"), "started": attempt.get("started")}
    yield from _table(("what", "version"), [(key, str(value)) for key, value in named.items() if value])


def _public(text: str) -> str:
    """Return the text of a value on one line, without secrets or the folders of an absolute path."""
    text = os.path.basename(text.rstrip("/")) if os.path.isabs(text) or text.startswith(SCHEME) else text
    return " ".join(redact(text).split()).replace("|", "\\|").replace("`", "'")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(row)} |"
