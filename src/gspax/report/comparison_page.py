"""compare.html, compare.png and compare.csv of `gspax compare`."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gspax.experiment.description import show
from gspax.report.comparison import Arm, Entry, Run, common_tokens, compare, find_differences
from gspax.report.curves import PANELS, render_svg, style_axes, write_png
from gspax.report.html import render_page, render_table, render_text
from gspax.report.statistics import Estimate, estimate_mean
from gspax.run.folders import write_atomically

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")  # Okabe and Ito
BINS = 50  # of the horizontal axis, for metrics of every step
NOTE = (
    "Values at {tokens:,.0f} response tokens, which every run has reached: metrics of every step as the mean over the "
    "last tenth, others interpolated. Intervals: 95 %, over seeds, Student's t. Differences are from {first}."
)


def write(arms: Sequence[Arm], metrics: Sequence[str], folder: Path) -> Path:
    """Write the comparison into `folder`, which is created; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = common_tokens(arms)
    entries = {metric: compare(arms, metric, tokens) for metric in metrics}
    drawings = [partial(draw_metric, arms=arms, metric=metric, tokens=tokens) for metric in metrics]
    write_png(drawings, folder / "compare.png")
    write_atomically(folder / "compare.csv", _table(arms, entries, tokens))
    figures = "".join(
        f"<figure>{render_svg(draw, metric)}</figure>" for metric, draw in zip(metrics, drawings, strict=True)
    )
    note = "Pale: each seed. Dark: their mean, with its 95 % interval shaded."
    sections = [
        ("", f"<p class=note>{html.escape(NOTE.format(tokens=tokens, first=arms[0].name))}</p>"),
        ("Results", _results(arms, entries)),
        ("Curves", f"<p class=note>{note}</p><div class=curves>{figures}</div>"),
        ("Settings that differ", _settings(arms)),
        ("Runs", _runs(arms)),
    ]
    write_atomically(folder / "compare.html", render_page(" / ".join(arm.name for arm in arms), sections))
    return folder / "compare.html"


def summarise(arms: Sequence[Arm], metric: str) -> str:
    """One metric of all arms as lines of text."""
    tokens = common_tokens(arms)
    width = max(len(arm.name) for arm in arms)
    lines = [f"{metric} at {tokens:,.0f} response tokens:"]
    for arm, entry in zip(arms, compare(arms, metric, tokens), strict=True):
        difference = f"; difference {_describe_difference(entry)}" if entry.difference else ""
        lines.append(f"  {arm.name:{width}}  {_describe_mean(arm, metric, entry)}{difference}")
    return "\n".join(lines)


def _describe_mean(arm: Arm, metric: str, entry: Entry) -> str:
    if entry.mean is not None:
        return f"{_describe(entry.mean)}, {_count(entry)}"
    if any(metric in run.series for run in arm.runs):
        return f"no run has {metric} at these tokens"
    return f"no run has {metric}" + (", its loss does not report it" if metric.startswith("policy/") else "")


def _describe(found: Estimate, sign: str = "") -> str:
    bounds = "" if np.isnan(found.low) else f" [{found.low:{sign}.4g}, {found.high:{sign}.4g}]"
    return f"{found.mean:{sign}.4g}{bounds}"


def _describe_difference(entry: Entry) -> str:
    assert entry.difference is not None
    kind = f"{entry.pairs} pairs of seeds" if entry.pairs else "unpaired"
    return f"{_describe(entry.difference, '+')}, {kind}"


def _count(entry: Entry) -> str:
    return "1 seed" if len(entry.values) == 1 else f"{len(entry.values)} seeds"


def _results(arms: Sequence[Arm], entries: dict[str, list[Entry]]) -> str:
    head = ("metric", "arm", "mean", "difference", "each seed")
    rows = []
    for metric, found in entries.items():
        for arm, entry in zip(arms, found, strict=True):
            difference = _describe_difference(entry) if entry.difference else ""
            each = ", ".join(f"{seed}: {value:.4g}" for seed, value in sorted(entry.values.items(), key=str))
            rows.append((metric, arm.name, _describe_mean(arm, metric, entry), difference, each))
    return _text_table(head, rows)


def _settings(arms: Sequence[Arm]) -> str:
    rows = [(name, *map(show, values)) for name, values in find_differences(arms).items()]
    return _text_table(("setting", *(arm.name for arm in arms)), rows) if rows else ""


def _runs(arms: Sequence[Arm]) -> str:
    rows = [
        (arm.name, run.name, str(run.seed), str(len(run.tokens) - 1), f"{run.tokens[-1]:,.0f}")
        for arm in arms
        for run in arm.runs
    ]
    return _text_table(("arm", "run", "seed", "steps", "response tokens"), rows)


def _text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return render_table(head, [[render_text(cell) for cell in row] for row in rows])


def _table(arms: Sequence[Arm], entries: dict[str, list[Entry]], tokens: float) -> str:
    """A line for each metric, arm and seed."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("metric", "arm", "seed", "tokens", "value"))
    for metric, found in entries.items():
        for arm, entry in zip(arms, found, strict=True):
            writer.writerows((metric, arm.name, seed, int(tokens), value) for seed, value in entry.values.items())
    return file.getvalue()


def draw_metric(axes: Any, arms: Sequence[Arm], metric: str, tokens: float) -> None:
    """Draw the metric of every run, and the mean of each arm, up to so many tokens on matplotlib axes."""
    edge_N = np.linspace(0, tokens, BINS + 1)
    for i, arm in enumerate(arms):
        colour = COLOURS[i % len(COLOURS)]
        value_RN = np.array([resample(run, metric, edge_N) for run in arm.runs])
        several = len(arm.runs) > 1
        for value_N in value_RN if several else ():
            axes.plot(edge_N, value_N, color=colour, alpha=0.25, linewidth=0.8)
        mean_N, low_N, high_N = _over_seeds(value_RN)
        axes.plot(edge_N, mean_N, color=colour, linewidth=1.8, label=arm.name)
        axes.fill_between(edge_N, low_N, high_N, color=colour, alpha=0.12, linewidth=0)
    title, unit, log = _name(metric)
    low, high = axes.get_ylim()
    if log and low > 0 and high > 10 * low:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}" if value < 1000 else f"{value / 1000:.4g}k")
    style_axes(axes, title, "response tokens", unit, legend=min(3, len(arms)))


def resample(run: Run, metric: str, edge_N: np.ndarray) -> np.ndarray:
    """The metric at each edge, NaN where it is unknown: the mean over the bin before it, or interpolated.

    Only a metric of every step has several values in a bin; the first edge has no bin before it.
    """
    at_M, value_M = run.curve(metric)
    if not len(at_M):
        return np.full(len(edge_N), np.nan)
    known_N = (edge_N >= at_M[0]) & (edge_N <= at_M[-1])
    found_N = np.where(known_N, np.interp(edge_N, at_M, value_M), np.nan)
    bin_M = np.searchsorted(edge_N, at_M)
    for n in range(1, len(edge_N)):
        inside_M = bin_M == n
        if inside_M.sum() > 1:
            found_N[n] = value_M[inside_M].mean()
    return found_N


def _over_seeds(value_RN: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and interval over runs [R, N], where every run has a value."""
    found = [estimate_mean(value_R) if not np.isnan(value_R).any() else None for value_R in value_RN.T]
    bounds = [(each.mean, each.low, each.high) if each else (np.nan,) * 3 for each in found]
    mean_N, low_N, high_N = np.array(bounds).T
    return mean_N, low_N, high_N


def _name(metric: str) -> tuple[str, str, bool]:
    """The title, the unit and the scale of a metric, as in the report."""
    for panel in PANELS:
        for name, label, _ in panel.lines:
            if name == metric:
                return (panel.title if len(panel.lines) == 1 else f"{panel.title}: {label}"), panel.unit, panel.log
    return metric, "", False
