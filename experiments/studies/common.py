"""Studies: variants of one experiment, several seeds each, and the table and figure made from them.

A study is a file `NAME/study.py` that defines `study = Study(...)`. Its runs go to `runs/studies/NAME`; its results,
`results.csv`, are the only input of the figure and of the table in its README.md.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gspax.errors import UserError
from gspax.experiment import check, load, override
from gspax.report.curves import Draw, style_axes
from gspax.report.statistics import Estimate, estimate_mean
from gspax.run.folders import write_atomically
from gspax.tools.comparison import COLORS, WINDOW, Entry, Run, common_tokens, contrast, draw_metric, read_variant
from gspax.tools.comparison import Variant as VariantRuns

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
BEGIN, END = "<!-- results: written from results.csv -->", "<!-- end of results -->"
CSV_DIGITS = 5  # significant
COSTS = ("run/cpu_seconds", "run/peak_mb")  # of a run's process, at its last step


@dataclass(frozen=True)
class Start:
    """A task, a model, and the warm start that the variants which are compared continue."""

    name: str
    base: str  # experiment file, relative to experiments/
    overrides: tuple[str, ...] = ()
    warm_start: str = ""  # the start with the same warm start, which is trained once for both; empty: its own
    checkpoint: str = ""  # what the variants train instead of a warm start, relative to the repository


@dataclass(frozen=True)
class Variant:
    """A variant: a start, and overrides for what comes after it."""

    name: str
    start: Start
    overrides: tuple[str, ...] = ()
    against: str = ""  # the variant that it is compared with; empty: the first one of its start


@dataclass(frozen=True)
class Measure:
    """One column of the table: a metric, averaged over the last steps of a run."""

    title: str
    metric: str
    over: float = WINDOW  # share of the run, by tokens, that it is averaged over; 1: all of it; 0: the run's last value
    percent: bool = False

    def values(self, variant: VariantRuns, tokens: float) -> dict[Any, float]:
        """The value of each seed that has one, at so many tokens."""
        if self.over == WINDOW:
            return variant.values_at(self.metric, tokens)
        found = {}
        for run in variant.runs:
            at_N, value_N = run.curve(self.metric)
            inside_N = (at_N <= tokens) & (at_N > tokens * (1 - self.over))
            value_N = value_N[inside_N] if self.over else value_N[-1:]
            if len(value_N):
                found[run.seed] = float(value_N.mean())
        return found


@dataclass(frozen=True)
class Study:
    """A question, the rule that decides it, and the runs. The first measure is the primary one.

    The question and the rule are in the docstring of the study's file.
    """

    variants: tuple[Variant, ...]  # the first one of each start is the baseline of the others
    measures: tuple[Measure, ...]
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rows: tuple[tuple[str, ...], ...] = ()  # of the figure: names of variants; empty: a row for each start
    # the panels of a row, from its variants and the tokens; None: every seed of the primary measure, and all curves
    panels: Callable[[Sequence[VariantRuns], float], list[Draw]] | None = None
    columns: tuple[Measure, ...] = ()  # of results.csv besides the measures, for panels: the table does not have them
    # Markdown below the table, from the variants by name and the tokens at which all are compared
    more: Callable[[Mapping[str, VariantRuns], float], str] | None = None
    probe: Callable[[Path], dict[str, float]] | None = None  # further metrics of a finished run, from its folder
    devices: int = 1  # of a run, which share a core; two for a sampler on a device of its own


@dataclass(frozen=True)
class Job:
    """One run: a variant with a seed."""

    variant: Variant
    seed: int
    folder: Path
    start: Path  # of the checkpoint that the variant's warm start left


def studies() -> list[str]:
    """The names of all studies."""
    return sorted(path.parent.name for path in FOLDER.glob("*/study.py"))


def load_study(name: str) -> Study:
    """The study of that name. UserError if there is none."""
    if name not in studies():
        raise UserError(f"NAME: wanted one of {', '.join(studies())}, got {name!r}")
    return runpy.run_path(str(FOLDER / name / "study.py"))["study"]


def check_study(study: Study) -> None:
    """UserError unless the experiments of all variants and of their warm starts are valid."""
    names = [variant.name for variant in study.variants]
    if len(set(names)) < len(names):
        raise UserError(f"variants: wanted different names, got {', '.join(names)}")
    for variant in study.variants:
        for overrides in (start_overrides(variant, 0), variant_overrides(variant, 0)):
            check(override(load(base_file(variant.start)), overrides), None)


def base_file(start: Start) -> Path:
    return ROOT / "experiments" / start.base


def start_overrides(variant: Variant, seed: int) -> list[str]:
    """The overrides of a warm start, which uses other problems than the run after it."""
    return [*variant.start.overrides, f"seed={seed}", f"data.seed={1000 + seed}"]


def variant_overrides(variant: Variant, seed: int) -> list[str]:
    return [*variant.start.overrides, *variant.overrides, f"seed={seed}", f"data.seed={seed}", "warm_start=none"]


def jobs_of(study: Study, folder: Path) -> list[Job]:
    """All runs, seed by seed, so that an interrupted study has whole seeds."""
    return [
        Job(
            variant,
            seed,
            folder / slug(variant.name) / str(seed),
            start_folder(variant.start, seed, folder),
        )
        for seed in study.seeds
        for variant in study.variants
    ]


def start_folder(start: Start, seed: int, folder: Path) -> Path:
    """The checkpoint that the variants of a seed continue."""
    if start.checkpoint:
        return ROOT / start.checkpoint
    return folder / "starts" / f"{slug(start.warm_start or start.name)}_{seed}"


def slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in name)


def run_study(study: Study, folder: Path, jobs: int) -> None:
    """Every run of the study, `jobs` at a time; finished ones are skipped, interrupted ones are resumed."""
    pending = [job for job in jobs_of(study, folder) if not is_finished(job)]
    first = {job.start: job for job in reversed(jobs_of(study, folder))}  # always the same, which resuming needs
    starts = {job.start: first[job.start] for job in pending}
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(partial(run_start, devices=study.devices), starts.values()):
            pass
        for number, job in enumerate(pool.map(partial(run_job, devices=study.devices), pending), 1):
            print(f"{number}/{len(pending)} {job.variant.name}, seed {job.seed}", flush=True)


def is_finished(job: Job) -> bool:
    """Whether a run ended with these overrides; with others `gspax train` will refuse its folder."""
    record = job.folder / "finished.json"
    return record.is_file() and json.loads(record.read_text())["overrides"] == variant_overrides(job.variant, job.seed)


def run_start(job: Job, devices: int) -> None:
    """The supervised warm start of a seed, as a checkpoint in `job.start`."""
    if (job.start / "config.json").is_file():
        return
    if job.variant.start.checkpoint:
        raise UserError(f"{job.start}: wanted the folder of a checkpoint, got none")
    trained = job.start.with_name(job.start.name + "_sft")
    file, overrides = str(base_file(job.variant.start)), start_overrides(job.variant, job.seed)
    gspax("sft", file, "--workdir", str(trained), *overrides, log=trained, devices=devices)
    gspax("export", "--from", str(trained), "--to", str(job.start), "--dtype", "float32", log=trained)


def run_job(job: Job, devices: int) -> Job:
    """A run that continues its warm start; what it cost is in `finished.json`."""
    file, overrides = str(base_file(job.variant.start)), variant_overrides(job.variant, job.seed)
    start = f"model.checkpoint={job.start}"
    usage = gspax("train", file, "--workdir", str(job.folder), start, *overrides, log=job.folder, devices=devices)
    costs = {
        "run/cpu_seconds": usage.ru_utime + usage.ru_stime,
        "run/peak_mb": usage.ru_maxrss / 1024,
    }  # Linux counts KiB
    write_atomically(job.folder / "finished.json", json.dumps({"overrides": overrides, **costs}))
    return job


def gspax(*command: str, log: Path, devices: int = 1) -> resource.struct_rusage:
    """Run a subcommand on one thread for each of so many devices; what it used. Its output is in `log`.log.

    Raises:
      UserError: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    path = log.with_name(log.name + ".log")
    with path.open("a") as output:
        # NPROC is XLA's threads: runs side by side would share the cores anyway
        environment = {**os.environ, "NPROC": "1", "JAX_NUM_CPU_DEVICES": str(devices)}
        child = subprocess.Popen(
            [sys.executable, "-m", "gspax", *command], stdout=output, stderr=output, env=environment
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise UserError(f"gspax {command[0]} ended with {child.returncode}: see {path}")
    return usage


def collect(study: Study, folder: Path) -> list[VariantRuns]:
    """The finished runs, by variant; variants without any are left out."""
    variants = []
    for variant in study.variants:
        done = [job for job in jobs_of(study, folder) if job.variant == variant and is_finished(job)]
        runs = tuple(run for job in done for run in read_variant(variant.name, job.folder).runs)
        for job, run in zip(done, runs, strict=True):
            record, last = json.loads((job.folder / "finished.json").read_text()), len(run.tokens) - 1
            values = {name: record[name] for name in COSTS} | (study.probe(job.folder) if study.probe else {})
            run.series.update({name: ([last], [value]) for name, value in values.items()})
        if runs:
            variants.append(VariantRuns(variant.name, runs))
    return variants


def write_csv(study: Study, variants: Sequence[VariantRuns], path: Path) -> None:
    """A line for each variant, seed and step, with the metrics of the measures and columns."""
    metrics = list(dict.fromkeys(measure.metric for measure in (*study.measures, *study.columns)))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("variant", "seed", "step", "tokens", *metrics))
    for variant in variants:
        for run in variant.runs:
            columns = [dict(zip(*run.series.get(metric, ([], [])), strict=True)) for metric in metrics]
            for step, tokens in enumerate(run.tokens):
                cells = [f"{column[step]:.{CSV_DIGITS}g}" if step in column else "" for column in columns]
                writer.writerow((variant.name, run.seed, step, int(tokens), *cells))
    write_atomically(path, file.getvalue())


def read_csv(path: Path) -> list[VariantRuns]:
    """The variants of `write_csv`. UserError if there is no file: the study has not been run."""
    if not path.is_file():
        raise UserError(f"{path}: wanted the results of the study, which has not been run")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    variants: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in rows:
        variants.setdefault(row["variant"], {}).setdefault(row["seed"], []).append(row)
    return [
        VariantRuns(name, tuple(_run(seed, lines) for seed, lines in runs.items())) for name, runs in variants.items()
    ]


def _run(seed: str, rows: list[dict[str, str]]) -> Run:
    metrics = [name for name in rows[0] if name not in ("variant", "seed", "step", "tokens")]
    series = {}
    for name in metrics:
        known = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        if known:
            series[name] = ([step for step, _ in known], [value for _, value in known])
    return Run(seed, int(seed), {}, series, np.array([float(row["tokens"]) for row in rows]))


def by_start(study: Study, variants: Sequence[VariantRuns]) -> list[list[VariantRuns]]:
    """Variants in groups that share a warm start: those that are compared with each other."""
    start = {variant.name: variant.start.name for variant in study.variants}
    groups = [
        [variant for variant in variants if start.get(variant.name) == each] for each in dict.fromkeys(start.values())
    ]
    return [group for group in groups if group]


def write_results(study: Study, folder: Path) -> None:
    """figure.png and the table in README.md, from results.csv alone."""
    groups = by_start(study, read_csv(folder / "results.csv"))
    tokens = [common_tokens(group) for group in groups]
    write_figure(study, groups, tokens, folder / "figure.png")
    page = folder / "README.md"
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{page}: wanted the lines {BEGIN!r} and {END!r}, between which the table is written")
    tables = [tabulate(study, *each) for each in zip(groups, tokens, strict=True)]
    if study.more is not None:
        tables.append(study.more({variant.name: variant for group in groups for variant in group}, min(tokens)))
    written = "\n\n".join([*tables, "![Results](figure.png)"])
    write_atomically(page, f"{before}{BEGIN}\n{written}\n{END}{after}")


def tabulate(study: Study, group: Sequence[VariantRuns], tokens: float) -> str:
    """A Markdown table of one group: means with 95 % intervals over seeds, the primary measure's paired difference."""
    found = [contrast([measure.values(variant, tokens) for variant in group]) for measure in study.measures]
    first, variants = study.measures[0], {variant.name: variant for variant in group}
    head = ["variant", *(measure.title for measure in study.measures)]
    against = {variant.name: variant.against or group[0].name for variant in study.variants}
    baselines = {against[variant.name] for variant in group}
    head[2:2] = ["difference" + (f" from {group[0].name}" if len(baselines) == 1 else ""), "each seed"]
    lines = [head, ["---"] * len(head)]
    for i, variant in enumerate(group):
        entries = [column[i] for column in found]
        cells = [_estimate(measure, entry.mean) for measure, entry in zip(study.measures, entries, strict=True)]
        baseline = variants.get(against[variant.name], variant)
        difference = "" if baseline is variant else _difference(first, baseline, variant, tokens)
        if difference and len(baselines) > 1:
            difference += f" from {baseline.name}"
        lines.append([variant.name, cells[0], difference, _seeds(first, entries[0]), *cells[1:]])
    return f"At {tokens:,.0f} response tokens; 95 % intervals over seeds.\n\n{join_rows(lines)}"


def join_rows(lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Pair = tuple[VariantRuns, VariantRuns]  # a variant and its control


def compare_differences(measure: Measure, tokens: float, first: Pair, second: Pair) -> str:
    """How much more the first variant differs from its control than the second one from its own, paired by seed."""

    def by_seed(pair: Pair) -> dict[Any, float]:
        variant, control = (measure.values(each, tokens) for each in pair)
        return {seed: variant[seed] - control[seed] for seed in variant if seed in control}

    found = [by_seed(pair) for pair in (second, first)]
    return _estimate(measure, contrast(found)[1].difference)


def _difference(measure: Measure, first: VariantRuns, second: VariantRuns, tokens: float) -> str:
    """The second variant's difference from the first one."""
    entry = contrast([measure.values(variant, tokens) for variant in (first, second)])[1]
    if entry.difference is None:
        return ""
    return _estimate(measure, entry.difference, "+") + ("" if entry.pairs else ", unpaired")


def _seeds(measure: Measure, entry: Entry) -> str:
    return ", ".join(_number(measure, value) for value in entry.values.values())


def _estimate(measure: Measure, found: Estimate | None, sign: str = "") -> str:
    if found is None:
        return "–"
    mean = _number(measure, found.mean, sign) + (" %" if measure.percent else "")
    if math.isnan(found.low):
        return mean
    return f"{mean} [{_number(measure, found.low, sign)}, {_number(measure, found.high, sign)}]"


def _number(measure: Measure, value: float, sign: str = "") -> str:
    value = 100 * value if measure.percent else value
    return f"{value:{sign}.3g}" if abs(value) < 100 else f"{value:{sign},.0f}"


def write_figure(study: Study, groups: list[list[VariantRuns]], tokens: list[float], path: Path) -> None:
    """A row of panels under one legend for each start, or for each of `study.rows`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    variants = {
        variant.name: (variant, limit) for group, limit in zip(groups, tokens, strict=True) for variant in group
    }
    named = study.rows or [[variant.name for variant in group] for group in groups]
    rows = [row for names in named if (row := [variants[name] for name in names if name in variants])]
    panels = study.panels or partial(draw_all, study.measures)
    draws = [panels([variant for variant, _ in row], min(limit for _, limit in row)) for row in rows]
    columns = max(map(len, draws))
    columns = columns if columns <= 4 else 3
    lines = [-(-len(each) // columns) for each in draws]  # of panels in each row
    figure = Figure(figsize=(4 * columns, sum(3 * count + 0.6 for count in lines)), layout="constrained")
    parts = figure.subfigures(len(draws), 1, squeeze=False, height_ratios=[count + 0.2 for count in lines])[:, 0]
    for part, row, each, count in zip(parts, rows, draws, lines, strict=True):
        for number, draw in enumerate(each):
            axes = part.add_subplot(count, columns, number + 1)
            draw(axes)
            if axes.get_legend():
                axes.get_legend().remove()
        handles = [Patch(color=color(i), label=variant.name) for i, (variant, _) in enumerate(row)]
        part.legend(handles=handles, loc="outside upper left", ncols=min(4, len(row)), frameon=False, fontsize=9)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_atomically(path, image.getvalue())


def draw_all(measures: Sequence[Measure], variants: Sequence[VariantRuns], tokens: float) -> list[Draw]:
    """Every seed of the first measure, and the curve of each metric."""
    titles = {measure.metric: measure for measure in reversed(measures)}  # the first measure of a metric names it
    curves = [
        measure for measure in measures if titles[measure.metric] == measure and _has_curve(variants, measure.metric)
    ]
    first = partial(draw_seeds, variants=variants, tokens=tokens, measure=measures[0])
    return [first, *(partial(draw_curve, variants=variants, tokens=tokens, measure=measure) for measure in curves)]


def _has_curve(variants: Sequence[VariantRuns], metric: str) -> bool:
    return any(len(run.curve(metric)[0]) > 1 for variant in variants for run in variant.runs)


def draw_curve(axes: Any, variants: Sequence[VariantRuns], tokens: float, measure: Measure) -> None:
    """The metric of every run over the response tokens, and the mean of each variant with its interval."""
    draw_metric(axes, variants, measure.metric, tokens)
    axes.set_title(measure.title, loc="left", fontsize=11, fontweight="bold")


def draw_seeds(axes: Any, variants: Sequence[VariantRuns], tokens: float, measure: Measure) -> None:
    """A measure of each variant: a dot and a line for each seed, the mean and its interval."""
    found = [measure.values(variant, tokens) for variant in variants]
    for seed in sorted({seed for values in found for seed in values}):
        at = [i for i, values in enumerate(found) if seed in values]
        axes.plot(at, [found[i][seed] for i in at], color="#cbd5e0", linewidth=0.7, zorder=1)
    for i, values in enumerate(found):
        axes.plot([i] * len(values), list(values.values()), "o", color=color(i), alpha=0.4, markersize=4)
        if values:
            mean = estimate_mean(np.array([*values.values()]))
            bounds = [[mean.mean - mean.low], [mean.high - mean.mean]]
            axes.errorbar([i + 0.2], [mean.mean], bounds, fmt="P", color=color(i), markersize=7, capsize=3)
    axes.set_xticks([])
    axes.margins(x=0.1)
    style_axes(axes, f"{measure.title}, by seed", "", "mean, 95 % interval", legend=0)


def draw_points(
    axes: Any, variants: Sequence[VariantRuns], tokens: float, x: Measure, y: Measure, *, log: bool = False
) -> None:
    """One measure against another: a dot for each seed, a cross for the mean of a variant."""
    for i, variant in enumerate(variants):
        x_N, y_N = _pairs(x.values(variant, tokens), y.values(variant, tokens), log)
        axes.plot(x_N, y_N, "o", color=color(i), alpha=0.4, markersize=4, markeredgewidth=0)
        if len(x_N):
            axes.plot([np.mean(x_N)], [np.mean(y_N)], "P", color=color(i), markersize=9)
    if log:
        axes.set_xscale("log")
    style_axes(axes, f"against {x.title}", x.title, y.title, legend=0)


def color(i: int) -> str:
    """The color of the i-th variant of a row."""
    return COLORS[i % len(COLORS)]


def _pairs(x: dict[Any, float], y: dict[Any, float], log: bool) -> tuple[np.ndarray, np.ndarray]:
    seeds = [seed for seed in x if seed in y and (x[seed] > 0 or not log)]
    return np.array([x[seed] for seed in seeds]), np.array([y[seed] for seed in seeds])


def describe_runs(study: Study) -> Iterator[str]:
    """The command of each run of the first seed."""
    for variant in study.variants:
        yield f"gspax train experiments/{variant.start.base} {' '.join(variant_overrides(variant, study.seeds[0]))}"
