"""report.html and curves.png: the improvement, curves and settings of a run.

The page is a single file that needs no network: the curves are inline SVG. Text that a model generated is escaped,
control characters included.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gspax.errors import UserError
from gspax.experiment.description import flatten
from gspax.report import task_table
from gspax.report.curves import (
    MANY_POINTS,
    PANELS,
    Panel,
    Series,
    collect_series,
    draw_panel,
    render_svg,
    select_panels,
    write_png,
    zero_metrics,
)
from gspax.report.html import render_page, render_prose, render_settings, render_table, render_text
from gspax.run.directory import RunDir, read_attempts, read_description
from gspax.run.folders import write_atomically
from gspax.run.record import read_metrics, read_rows

SHOWN_ERRORS = 20  # of failed rewards


def write(workdir: Path) -> Path:
    """Write `report.html` and `curves.png` of a run, finished or not; the path of the page.

    Raises:
      UserError: the run has no metrics yet, or its files cannot be read.
    """
    run = RunDir(Path(workdir))
    if not run.metrics.exists():
        raise UserError(f"there is nothing to report: {run.metrics} does not exist")
    series = collect_series(read_metrics(run.metrics))
    if not series:
        raise UserError(f"there is nothing to report: {run.metrics} has no metrics yet")
    panels = select_panels(series, PANELS)
    write_png([partial(draw_panel, panel=panel, series=series) for panel in panels], run.curves)
    experiment = read_description(run) or {}
    attempts = read_attempts(run) or []
    name = str(experiment.get("name", run.path.name))
    warm = collect_series(read_metrics(run.warm_start.metrics)) if run.warm_start.metrics.exists() else {}
    sections = [
        ("", _headline(series)),
        ("Held-out prompts, before and after", _completions(run)),
        ("Tasks", task_table.render(run)),
        ("Failed rewards", _failures(run)),
        ("Curves", _curves(panels, series) + _zero(zero_metrics(series, PANELS))),
        ("Warm start", _curves(select_panels(warm, ()), warm)),
        ("Experiment", render_settings(flatten(experiment))),
        *((f"Environment, attempt {n}", render_settings(flatten(each))) for n, each in enumerate(attempts, start=1)),
    ]
    write_atomically(run.report, render_page(name, sections))
    return run.report


def summarise(workdir: Path) -> str:
    """The held-out rewards and the paths of the files, to print at the end of a run."""
    run = RunDir(workdir)
    series = collect_series(read_metrics(run.metrics))
    lines = [
        f"{label}: {values[0]:.3f} at step {steps[0]}, {values[-1]:.3f} at step {steps[-1]}"
        for metric, label in (("eval/reward", "held-out reward, sampled"), ("eval/greedy_reward", "greedy"))
        if metric in series
        for steps, values in [series[metric]]
    ]
    files = [f"  {path}" for path in (run.report, run.curves, run.metrics, run.samples, run.checkpoints)]
    return "\n".join([*lines, "Files:", *files])


def _curves(panels: list[Panel], series: Series) -> str:
    if not panels:
        return ""
    figures = "".join(
        f"<figure>{render_svg(partial(draw_panel, panel=panel, series=series), panel.title)}</figure>"
        for panel in panels
    )
    has_means = any(len(steps) >= MANY_POINTS for steps, _ in series.values())
    note = "<p class=note>Pale: every step. Dark: running mean over a twentieth of the run.</p>" if has_means else ""
    return f"{note}<div class=curves>{figures}</div>"


def _zero(metrics: list[str]) -> str:
    return f"<p class=note>0 at every step: {html.escape(', '.join(metrics))}.</p>" if metrics else ""


def _headline(series: Series) -> str:
    """The improvement, in a sentence and a row of numbers."""
    tiles = []
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
    cells = "".join(f"<div class=tile><b>{html.escape(value)}</b><span>{label}</span></div>" for value, label in tiles)
    if "eval/reward" not in series:
        return f"<div class=tiles>{cells}</div>"
    steps, values = series["eval/reward"]
    sentence = (
        f"Held-out reward, sampled: <b>{values[0]:.3f}</b> at step {steps[0]}, "
        f"<b>{values[-1]:.3f}</b> at step {steps[-1]}."
    )
    return f"<p class=headline>{sentence}</p><div class=tiles>{cells}</div>"


def _completions(run: RunDir) -> str:
    """Completions of the same prompts before the first update and by the newest policy."""
    if not (run.before.exists() and run.after.exists()):
        return ""
    after = {row["prompt"]: row for row in _read_completions(run.after)}
    rows = []
    for old in _read_completions(run.before):
        new = after.get(old["prompt"])
        if new is not None:
            rows.append((render_prose(old["prompt"]), render_prose(old.get("answer", "")), _answer(old), _answer(new)))
    return render_table(("prompt", "answer", "before", "after"), rows)


def _failures(run: RunDir) -> str:
    """The completions whose reward failed: how many for each error, and the newest of them."""
    newest: dict[str, tuple[int, dict[str, Any]]] = {}
    count, files = Counter[str](), sorted(run.samples.glob("failed_*.jsonl"))
    for path in files:
        step = int(path.stem.removeprefix("failed_"))
        for row in _read_completions(path):
            error = str(row.get("error"))
            count[error] += 1
            newest[error] = (step, row)
    rows = []
    for error, number in count.most_common(SHOWN_ERRORS):
        step, row = newest[error]
        cells = (
            f"{number:,}",
            render_text(error),
            str(step),
            render_text(row["prompt"]),
            render_text(row["completion"]),
        )
        rows.append(cells)
    if not rows:
        return ""
    more = f" The {SHOWN_ERRORS} most frequent of {len(count):,} errors:" if len(count) > SHOWN_ERRORS else ""
    note = f"{count.total():,} completions of {len(files):,} steps have no reward of their own.{more}"
    table = render_table(("count", "error", "last at step", "prompt", "completion"), rows)
    return f"<p class=note>{note}</p>{table}"


def _read_completions(path: Path) -> list[dict[str, Any]]:
    """The completions of a file, without foreign rows."""
    rows = [row for row in read_rows(path) if isinstance(row.get("reward"), int | float | str)]
    return [row for row in rows if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)]


def _answer(row: Mapping[str, Any]) -> str:
    """A completion and its reward."""
    reward = float(row["reward"])
    kind = "right" if reward >= 1 else "wrong" if reward <= 0 else "partly"
    return f"{render_prose(row['completion'])} <span class='reward {kind}'>{reward:g}</span>"
