"""Writes report.html: the improvement, curves and settings of a run.

The page is a single file that needs no network: the curves are inline SVG. Text that a model generated is escaped,
control characters included.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from gspax.errors import UserError, warn
from gspax.experiment.description import flatten
from gspax.report.curves import (
    MANY_POINTS,
    PANELS,
    Panel,
    Series,
    draw_panel,
    read_series,
    render_figures,
    select_panels,
)
from gspax.report.html import (
    render_lines,
    render_note,
    render_page,
    render_prose,
    render_settings,
    render_table,
    render_text,
)
from gspax.report.statistics import show
from gspax.run.directory import RunDir, read_attempts, read_description, read_json, read_objective, step_of
from gspax.run.folders import set_aside, write_atomically
from gspax.run.record import read_completions
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path

REWARDS = PANELS[:2]  # shown first, above the long sections
SHOWN_ROWS = 4  # completions that are not folded
LONGEST = 300  # characters of a text printed after a run
PARTS = {  # metrics of a step, and the part of it that each is the time of
    "time/rollout": "sampling, or waiting for samples",
    "time/reward": "waiting for rewards after sampling",
    "time/refill": "sampling again in place of groups with equal rewards",
    "time/record": "recording rollouts",
    "time/old_logp": "log-probs before the updates",
    "time/train": "advantages and updates",
}
SHORT = 80  # characters; a reference of this length or more is folded
SHOWN_ERRORS = 20  # errors of rewards in the table
TASK_COLUMNS = (
    *("task", "evaluated at", "problems x samples"),
    *("mean reward, 95 % interval", "pass@k", "maj@k", "truncated", "tokens"),
)


class Sample(NamedTuple):
    """A completion in a file of samples."""

    prompt: str
    answer: str
    completion: str
    reward: float
    error: str


def write(workdir: Path) -> Path:
    """Write `report.html` of a run, finished or not, and return its path.

    Raises:
      UserError: the run has no metrics yet, or its files cannot be read.
    """
    run = RunDir(to_path(workdir))
    series = read_series(run.metrics)
    if not series:
        raise UserError(f"{run.path}: wanted the directory of a run with metrics, {run.metrics.name} has none")
    experiment = read_description(run) or {}
    rewards = {metric for panel in REWARDS for metric in panel.lines.values()}
    sections = [
        ("", _headline(series)),
        ("Reward", _curves({name: series[name] for name in series if name in rewards}, REWARDS)),
        ("Tasks", _tasks(run)),
        ("Held-out prompts, before and after", _completions(run)),
        ("Failed rewards", _failures(run)),
        ("Time", _times(series)),
        ("Curves", _curves({name: series[name] for name in series if name not in rewards}, PANELS)),
        ("Warm start", _curves(read_series(run.warm_start.metrics), ())),
        ("Objective", _objective(run)),
        ("Experiment", render_settings(flatten(experiment))),
        *(
            (f"Environment, attempt {n}", render_settings(flatten(attempt)))
            for n, attempt in enumerate(read_attempts(run) or [], start=1)
        ),
    ]
    if open_storage(run.path).has_folders and run.report.is_dir():
        set_aside(run.report, "is a folder")
    write_atomically(run.report, render_page(str(experiment.get("name", run.path.name)), sections))
    return run.report


def _objective(run: RunDir) -> str:
    """Render the equation of the objective, with a note that says where its names are explained."""
    text = read_objective(run)
    return f"{render_note('`gspax explain` says what the names are.')}{render_lines(text)}" if text else ""


def summarize(workdir: Path) -> str:
    """Return a summary to print after a run: held-out rewards, a completion before and after, and the files' paths."""
    run = RunDir(workdir)
    series = read_series(run.metrics)
    lines = [
        f"{label}: {values[0]:.3f} at step {steps[0]}, {values[-1]:.3f} at step {steps[-1]}"
        for metric, label in (("eval/reward", "held-out reward, sampled"), ("eval/greedy_reward", "greedy"))
        if metric in series
        for steps, values in [series[metric]]
    ]
    report = [run.report] if run.report.exists() else []  # missing if the disk was full
    files = [f"  {path}" for path in (*report, run.metrics, run.samples, run.checkpoints)]
    return "\n".join([*lines, *_first_completion(run), "Files:", *files])


def _first_completion(run: RunDir) -> list[str]:
    """Return lines with the first held-out prompt, and its completions before training and by the newest policy."""
    if not (pairs := _pair_completions(run)):
        return []
    old, new = pairs[0]
    lines = {"held-out prompt": old.prompt, "before": old.completion, "after": new.completion}
    return [f"{name}: {textwrap.shorten(text, LONGEST)}" for name, text in lines.items()]


def _pair_completions(run: RunDir) -> list[tuple[Sample, Sample]]:
    """Pair the completions of each held-out prompt before the first update and by the newest policy."""
    if not (run.before.exists() and run.after.exists()):
        return []
    after = {sample.prompt: sample for sample in _read_samples(run.after)}
    return [(old, after[old.prompt]) for old in _read_samples(run.before) if old.prompt in after]


def _curves(series: Series, known: Sequence[Panel]) -> str:
    if not series:
        return ""
    panels, zero = select_panels(series, known)
    has_means = any(len(steps) >= MANY_POINTS for steps, _ in series.values())
    means = render_note("Pale: every step. Dark: running mean over a twentieth of the run.") if has_means else ""
    figures = render_figures({panel.title: partial(draw_panel, panel=panel, series=series) for panel in panels})
    return means + figures + (render_note(f"0 at every step: {', '.join(zero)}.") if zero else "")


def _headline(series: Series) -> str:
    """Render the improvement as a sentence and a row of numbers."""
    tiles, sentence = [], ""
    if "eval/greedy_reward" in series:
        values = series["eval/greedy_reward"][1]
        tiles.append((f"{values[0]:.3f} → {values[-1]:.3f}", "held-out reward, greedy"))
    if "reward/mean" in series:
        values = series["reward/mean"][1]
        n = min(10, len(values))
        change = f"{sum(values[:n]) / n:.3f} → {sum(values[-n:]) / n:.3f}"
        tiles.append((change, f"training reward, first {n} → last {n} steps"))
    tiles.append((str(max(steps[-1] for steps, _ in series.values())), "steps"))
    if "time/step" in series:
        seconds = sum(value for value in series["time/step"][1] if math.isfinite(value))
        tiles.append((f"{seconds / 60:.1f} min", "in training steps, without evaluation"))
    if "eval/reward" in series:
        steps, values = series["eval/reward"]
        sentence = (
            f"<p class=headline>Held-out reward, sampled: <b>{values[0]:.3f}</b> at step {steps[0]}, "
            f"<b>{values[-1]:.3f}</b> at step {steps[-1]}.</p>"
        )
    cells = "".join(f"<div class=tile><b>{html.escape(value)}</b><span>{label}</span></div>" for value, label in tiles)
    return f"{sentence}<div class=tiles>{cells}</div>"


def _times(series: Series) -> str:
    """Render where the time since the first start went: the parts of the steps that the run kept, and the rest."""
    if "time/elapsed" not in series or "time/step" not in series:
        return ""
    seconds = {name: sum(filter(math.isfinite, series[name][1])) for name in series if name.startswith("time/")}
    total, steps = series["time/elapsed"][1][-1], seconds["time/step"]
    parts = {text: seconds[name] for name, text in PARTS.items() if name in seconds}
    parts["other work of steps"] = steps - sum(parts.values())
    parts["starts, compiling before steps, evaluations, checkpoints, interruptions, steps done again"] = total - steps
    rows = [(text, f"{value:,.1f} s", f"{100 * value / total:.1f} %") for text, value in parts.items() if value > 0]
    note = (
        f"Goodput: {100 * steps / total:.1f} % of the time from the first start to the last step went into steps that "
        "the run kept."
    )
    return render_note(note) + render_table(("part", "time", "share"), rows)


def _completions(run: RunDir) -> str:
    """Render a table of paired completions, most of them folded."""
    rows = [(_show_problem(old), _show_reward(old), _show_reward(new)) for old, new in _pair_completions(run)]
    if not rows:
        return ""
    head = ("prompt", "before", "after")
    folded = rows[SHOWN_ROWS:]
    more = f"<details><summary>{len(folded)} more</summary>{render_table(head, folded)}</details>" if folded else ""
    return f"<div class=samples>{render_table(head, rows[:SHOWN_ROWS])}{more}</div>"


def _show_problem(sample: Sample) -> str:
    """Render a prompt, and below it the reference answer."""
    is_open = " open" if len(sample.answer) < SHORT else ""
    reference = f"<details{is_open}><summary>reference</summary>{render_prose(sample.answer)}</details>"
    return render_prose(sample.prompt) + (reference if sample.answer else "")


def _tasks(run: RunDir) -> str:
    """Render a row for each evaluation of a task (`TASK.json`), with a link to its completions."""
    lines = []
    for path in sorted(run.tasks.glob("*/*.json")):
        name = path.name.removesuffix(".json")
        link = quote(f"{run.tasks.name}/{path.parent.name}/{name}.html")
        if (cells := read_task(path, "the report")) is None:
            continue
        cells = [path.parent.name.replace("_", " "), *cells]
        lines.append([f'<a href="{link}">{html.escape(name)}</a>', *map(html.escape, cells)])
    return render_table(TASK_COLUMNS, lines) if lines else ""


def read_task(path: Path, page: str) -> list[str] | None:
    """Return the table columns of a task's file; None, with a warning, if it cannot be read."""
    try:
        return describe_task(read_json(path)["summary"])
    except (UserError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        warn(f"{path} cannot be read and is not in {page} ({type(error).__name__})")
        return None


def describe_task(summary: Mapping[str, Any]) -> list[str]:
    """Return the columns of a summary (`evaluation.benchmark.Summary`), with pass@k and maj@k for the largest k."""
    largest = []
    for of_k in (summary.get("pass") or {}, summary.get("majority") or {}):
        k = max(of_k, key=int, default="")
        largest.append(f"{show(of_k[k])}, k = {k}" if k else "")
    left_out = f", {skipped} left out" if (skipped := summary.get("skipped")) else ""
    size = f"{summary['problems']} x {summary['samples']}{left_out}"
    return [
        size,
        show(summary["reward"]),
        *largest,
        f"{100 * summary['truncated']:.1f} %",
        f"{summary['tokens']['mean']:.1f}",
    ]


def _failures(run: RunDir) -> str:
    """Render the completions whose reward failed: the count of each error, and the newest example."""
    newest: dict[str, tuple[int, Sample]] = {}
    count, files = Counter[str](), sorted(run.samples.glob("failed_*.jsonl"))
    for path in files:
        if (step := step_of(path.stem)) is None:
            continue
        for sample in _read_samples(path):
            count[sample.error] += 1
            newest[sample.error] = step, sample
    if not count:
        return ""
    rows = []
    for error, number in count.most_common(SHOWN_ERRORS):
        step, sample = newest[error]
        texts = render_text(sample.prompt), render_text(sample.completion)
        rows.append((f"{number:,}", render_text(error), str(step), *texts))
    more = f" The {SHOWN_ERRORS} most frequent of {len(count):,} errors:" if len(count) > SHOWN_ERRORS else ""
    note = f"{count.total():,} completions of {len(files):,} steps have no reward of their own.{more}"
    return render_note(note) + render_table(("count", "error", "last at step", "prompt", "completion"), rows)


def _read_samples(path: Path) -> list[Sample]:
    """Read the completions of a file; rows of other kinds are skipped."""
    return [
        Sample(row["prompt"], str(row.get("answer", "")), row["completion"], row["reward"], str(row.get("error")))
        for row in read_completions(path)
    ]


def _show_reward(sample: Sample) -> str:
    """Render a completion and its reward."""
    kind = "right" if sample.reward >= 1 else "wrong" if sample.reward <= 0 else "partly"
    return f"{render_prose(sample.completion)} <span class='reward {kind}'>{sample.reward:g}</span>"
