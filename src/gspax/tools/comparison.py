"""Compares variants of one run or several seeds side by side at equal tokens, as a page and a table.

The horizontal axis is the number of response tokens that a run was trained on, so that variants whose responses differ
in length are compared at equal cost. Values are compared at the largest number of tokens that every run has reached.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gspax.errors import UserError
from gspax.experiment.description import complete, flatten, show
from gspax.report import statistics
from gspax.report.curves import PANELS, Series, read_series, render_figures, style_axes
from gspax.report.html import render_note, render_page, render_table, render_text
from gspax.report.statistics import Estimate, estimate_difference, estimate_gap, estimate_mean, to_json
from gspax.run.directory import RunDir, read_description
from gspax.run.folders import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 0.1  # share of the tokens that a metric of every step is averaged over
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999")  # Okabe and Ito
FEWEST = 3  # seeds of an interval; Student's t of two is often wider than the scale of the metric
BINS = 50  # of the horizontal axis, for metrics of every step
NOTE = (
    "Values at {tokens:,.0f} response tokens, which every run has reached: metrics of every step as the mean over the "
    "last tenth, others interpolated. Intervals: 95 %, over three or more seeds, Student's t. Differences are from "
    "{first}."
)


@dataclass(frozen=True)
class Run:
    """The metrics of a run against the response tokens that it was trained on."""

    name: str
    seed: object
    settings: dict[str, object]  # of the experiment, flat
    series: Series  # metric -> steps, values
    tokens: np.ndarray  # [steps + 1]: trained on until the end of step n

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and finite values of a metric; empty if it was never recorded."""
        steps, values = self.series.get(metric, ([], []))
        at_N, value_N = self.tokens[np.array(steps, int)], np.array(values, float)
        finite_N = np.isfinite(value_N)
        return at_N[finite_N], value_N[finite_N]

    def value_at(self, metric: str, tokens: float) -> float:
        """Return the metric after this many tokens, NaN if it is unknown there.

        A metric of every step is noisy: its mean over the last tenth of the tokens, or its value at the step that
        contains them. Others are interpolated.
        """
        at_N, value_N = self.curve(metric)
        steps, begins = len(self.tokens) - 1, len(at_N) and at_N[0] == 0
        if len(at_N) >= steps + begins and (recent_N := (at_N <= tokens) & (at_N > tokens * (1 - WINDOW))).any():
            return float(value_N[recent_N].mean())
        if len(at_N) >= steps and len(at_N) and not begins and tokens <= at_N[-1]:
            return float(value_N[np.searchsorted(at_N, tokens)])
        is_known = len(at_N) and at_N[0] <= tokens <= at_N[-1]
        return float(np.interp(tokens, at_N, value_N)) if is_known else math.nan


@dataclass(frozen=True)
class Variant:
    """Runs of the same experiment that differ in their seed."""

    name: str
    runs: tuple[Run, ...]

    def values_at(self, metric: str, tokens: float) -> dict[object, float]:
        """Return the metric by seed, without runs that lack it there."""
        values = {run.seed: run.value_at(metric, tokens) for run in self.runs}
        return {seed: value for seed, value in values.items() if not math.isnan(value)}


@dataclass(frozen=True)
class Entry:
    """The values of a metric for one variant, and their difference from the first variant."""

    values: dict[object, float]  # by seed
    mean: Estimate | None  # None without any value
    difference: Estimate | None  # None for the first variant, and where either has no value
    pairs: int  # seeds that the difference is paired over; 0: unpaired


Result = tuple[str, Variant, Entry]  # the metric comes first


def read_variant(name: str, folder: Path) -> Variant:
    """Read the run in `folder`, or the runs in the folders directly below it, which are seeds of one experiment.

    Raises:
      UserError: there is no run, or two runs of the variant have the same seed.
    """
    folders = [folder] if RunDir(folder).metrics.is_file() else sorted(folder.iterdir())
    runs = tuple(_read_run(path) for path in folders if RunDir(path).metrics.is_file())
    if not runs:
        raise UserError(f"{folder}: wanted a run or a folder of runs, but no metrics.jsonl is in it or one level below")
    by_seed: dict[object, str] = {}
    for run in runs:
        if run.seed in by_seed:
            both = f"{by_seed[run.seed]} and {run.name}"
            raise UserError(f"{folder}: wanted a seed for each run, but {both} both have {run.seed}")
        by_seed[run.seed] = run.name
    return Variant(name, runs)


def _read_run(folder: Path) -> Run:
    run = RunDir(folder)
    series = read_series(run.metrics)
    if "perf/tokens_per_second" not in series:
        raise UserError(f"{run.metrics}: wanted the metrics of a training run, but no step is in it")
    settings = flatten(complete(read_description(run) or {}))
    seed = settings.get("seed")
    return Run(folder.name, seed if isinstance(seed, int) else folder.name, settings, series, _count_tokens(series))


def _count_tokens(series: Series) -> np.ndarray:
    """Count the response tokens trained on until the end of each step; steps whose metrics are lost add none."""
    seconds = dict(zip(*series.get("time/step", ([], [])), strict=True))
    token_N = np.zeros(max(max(recorded) for recorded, _ in series.values()) + 1)
    for step, rate in zip(*series["perf/tokens_per_second"], strict=True):
        if math.isfinite(count := rate * seconds.get(step, 0.0)):
            token_N[step] = count
    return np.cumsum(np.rint(token_N))


def common_tokens(variants: Sequence[Variant]) -> float:
    """Return the largest number of tokens that every run has reached."""
    return float(min(run.tokens[-1] for variant in variants for run in variant.runs))


def compare(variants: Sequence[Variant], metric: str, tokens: float) -> list[Entry]:
    """Compare the metric of each variant after this many tokens with the first variant's (`contrast`).

    Fewer than three seeds have no interval, and the interval of a share stays in [0, 1].
    """
    values, has_shares = [variant.values_at(metric, tokens) for variant in variants], are_shares(variants, metric)
    entries = []
    for entry in contrast(values):
        mean = entry.mean and _bound(entry.mean, len(entry.values), has_shares)
        seeds = entry.pairs or min(len(values[0]), len(entry.values))
        difference = entry.difference and _bound(entry.difference, seeds, False)
        entries.append(replace(entry, mean=mean, difference=difference))
    return entries


def are_shares(variants: Sequence[Variant], metric: str) -> bool:
    """Return whether the metric is a fraction, or a reward with all values in [0, 1]."""
    values = [run.curve(metric)[1] for variant in variants for run in variant.runs]
    is_within = all(((value_N >= 0) & (value_N <= 1)).all() for value_N in values)
    return is_within and _name(metric)[1].startswith(("fraction", "mean over completions"))


def _bound(estimate: Estimate, seeds: int, is_share: bool) -> Estimate:
    """Remove the interval of an estimate from too few seeds, and clip the interval of a share."""
    if seeds < FEWEST:
        return replace(estimate, low=math.nan, high=math.nan)
    if not is_share:
        return estimate
    low, high = np.clip((estimate.low, estimate.high), 0, 1)
    return replace(estimate, low=float(low), high=float(high))


def contrast(variants: Sequence[dict[object, float]]) -> list[Entry]:
    """Return the values of each variant by seed, with their mean and the difference from the first variant.

    The difference is paired over the seeds that both variants have, or unpaired if these are fewer than two.
    """
    baseline, entries = variants[0], []
    for i, values in enumerate(variants):
        mean = estimate_mean(np.array(list(values.values()))) if values else None
        difference, both = None, [seed for seed in baseline if seed in values]
        pairs = len(both) if i and len(both) >= 2 else 0
        if pairs:
            before, after = (np.array([variant[seed] for seed in both]) for variant in (baseline, values))
            difference = estimate_difference(before, after)
        elif i and values and baseline:
            difference = estimate_gap(np.array([*baseline.values()]), np.array([*values.values()]))
        entries.append(Entry(values, mean, difference, pairs))
    return entries


def find_differences(runs: Sequence[Run]) -> dict[str, list[object]]:
    """Return the settings in which runs differ, besides names and seeds, each with one value per run, or None."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    settings = {name: [run.settings.get(name) for run in runs] for name in names}
    labels = {name for name in names if name == "name" or name.split(".")[-1] == "seed"}
    return {
        name: values
        for name, values in settings.items()
        if name not in labels and any(value != values[0] for value in values)
    }


def write(variants: Sequence[Variant], metrics: Sequence[str], folder: Path) -> Path:
    """Write compare.html and compare.csv into `folder`, which is created; return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = common_tokens(variants)
    results = [
        (metric, variant, entry)
        for metric in metrics
        for variant, entry in zip(variants, compare(variants, metric, tokens), strict=True)
    ]
    write_atomically(folder / "compare.csv", _csv(results, tokens))
    drawings = {metric: partial(draw_metric, variants=variants, metric=metric, tokens=tokens) for metric in metrics}
    curves = render_note(
        "Pale: each seed. Dark: their mean, with the 95 % interval of three or more seeds shaded."
    ) + render_figures(drawings)
    sections = [
        ("", render_note(NOTE.format(tokens=tokens, first=variants[0].name))),
        ("Results", _results(results)),
        ("Curves", curves),
        ("Settings that differ", _settings(variants)),
        ("Runs", _runs(variants)),
    ]
    page = render_page(" / ".join(variant.name for variant in variants), sections)
    write_atomically(folder / "compare.html", page)
    return folder / "compare.html"


def summarize(variants: Sequence[Variant], metric: str) -> str:
    """Summarize one metric of all variants as lines of text."""
    tokens = common_tokens(variants)
    width = max(len(variant.name) for variant in variants)
    lines = [f"{metric} at {tokens:,.0f} response tokens:"]
    for variant, entry in zip(variants, compare(variants, metric, tokens), strict=True):
        difference = _describe_difference(entry)
        mean = _describe_mean(variant, metric, entry)
        lines.append(f"  {variant.name:{width}}  {mean}" + (f"; difference {difference}" if difference else ""))
    return "\n".join(lines)


def _describe_mean(variant: Variant, metric: str, entry: Entry) -> str:
    if entry.mean is not None:
        mean, count = statistics.show(to_json(entry.mean), ".4g"), len(entry.values)
        return f"{mean}, seeds {_list(entry)}" if 1 < count < FEWEST else f"{mean}, {count} seed{'s' * (count > 1)}"
    if any(metric in run.series for run in variant.runs):
        return f"no run has {metric} at these tokens"
    return f"no run has {metric}" + (", its loss does not report it" if metric.startswith("policy/") else "")


def _list(entry: Entry) -> str:
    return ", ".join(f"{seed}: {value:.4g}" for seed, value in sorted(entry.values.items(), key=str))


def _describe_difference(entry: Entry) -> str:
    if entry.difference is None:
        return ""
    difference = statistics.show(to_json(entry.difference), "+.4g")
    return f"{difference}, {f'{entry.pairs} pairs of seeds' if entry.pairs else 'unpaired'}"


def _results(results: Sequence[Result]) -> str:
    rows = []
    for metric, variant, entry in results:
        mean = _describe_mean(variant, metric, entry)
        rows.append((metric, variant.name, mean, _describe_difference(entry), _list(entry)))
    return _text_table(("metric", "variant", "mean", "difference", "each seed"), rows)


def _settings(variants: Sequence[Variant]) -> str:
    differences = find_differences([variant.runs[0] for variant in variants])
    rows = [(name, *map(show, values)) for name, values in differences.items()]
    return _text_table(("setting", *(variant.name for variant in variants)), rows) if rows else ""


def _runs(variants: Sequence[Variant]) -> str:
    rows = [
        (variant.name, run.name, str(run.seed), str(len(run.tokens) - 1), f"{run.tokens[-1]:,.0f}")
        for variant in variants
        for run in variant.runs
    ]
    return _text_table(("variant", "run", "seed", "steps", "response tokens"), rows)


def _text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return render_table(head, [[render_text(cell) for cell in row] for row in rows])


def _csv(results: Sequence[Result], tokens: float) -> str:
    """Format a table with a line for each metric, variant and seed."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("metric", "variant", "seed", "tokens", "value"))
    for metric, variant, entry in results:
        writer.writerows((metric, variant.name, seed, int(tokens), value) for seed, value in entry.values.items())
    return file.getvalue()


def draw_metric(axes: Axes, variants: Sequence[Variant], metric: str, tokens: float) -> None:
    """Draw the metric of every run, and the mean of each variant, up to this many tokens on matplotlib axes."""
    edge_N, has_shares = np.linspace(0, tokens, BINS + 1), are_shares(variants, metric)
    for i, variant in enumerate(variants):
        color = COLORS[i % len(COLORS)]
        value_RN = np.array([resample(run, metric, edge_N) for run in variant.runs])
        for value_N in value_RN if len(variant.runs) > 1 else ():
            axes.plot(edge_N, value_N, color=color, alpha=0.25, linewidth=0.8)
        means = [
            _bound(estimate_mean(value_R), len(value_R), has_shares) for value_R in value_RN.T
        ]  # NaN where a run has no value
        axes.plot(edge_N, [mean.mean for mean in means], color=color, linewidth=1.8, label=variant.name)
        bounds = [mean.low for mean in means], [mean.high for mean in means]
        axes.fill_between(edge_N, *bounds, color=color, alpha=0.12, linewidth=0)
    title, unit, log = _name(metric)
    low, high = axes.get_ylim()
    if log and low > 0 and high > 10 * low:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}" if value < 1000 else f"{value / 1000:.4g}k")
    style_axes(axes, title, "response tokens", unit, legend=min(3, len(variants)))


def resample(run: Run, metric: str, edge_N: np.ndarray) -> np.ndarray:
    """Return the metric at each edge, NaN where it is unknown: the mean over the bin before it, or interpolated.

    Only a metric of every step has several values in a bin; the first edge has no bin before it.
    """
    at_M, value_M = run.curve(metric)
    if not len(at_M):
        return np.full(len(edge_N), np.nan)
    known_N = (edge_N >= at_M[0]) & (edge_N <= at_M[-1])
    value_N = np.where(known_N, np.interp(edge_N, at_M, value_M), np.nan)
    bin_M = np.searchsorted(edge_N, at_M)
    for n in range(1, len(edge_N)):
        inside_M = bin_M == n
        if inside_M.sum() > 1:
            value_N[n] = value_M[inside_M].mean()
    return value_N


def _name(metric: str) -> tuple[str, str, bool]:
    """Return the title, the unit and the scale of a metric, as in the report."""
    for panel in PANELS:
        for label, name in panel.lines.items():
            if name == metric:
                return (panel.title if len(panel.lines) == 1 else f"{panel.title}: {label}"), panel.unit, panel.log
    return metric, "", False
