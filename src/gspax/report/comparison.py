"""Runs side by side: arms of one run or of several seeds, their metrics at equal tokens, and the differences.

The horizontal axis is the number of response tokens that a run has learnt from, so that arms whose responses differ in
length are compared at equal cost. All values are taken at the largest number of tokens that every run has reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspax.errors import UserError
from gspax.experiment.description import flatten
from gspax.report.curves import Series, collect_series
from gspax.report.statistics import Estimate, estimate_difference, estimate_gap, estimate_mean
from gspax.run.directory import RunDir, read_json
from gspax.run.record import read_metrics

WINDOW = 0.1  # share of the tokens that a metric of every step is averaged over


@dataclass(frozen=True)
class Run:
    """The metrics of a run against the response tokens learnt from."""

    name: str
    seed: Any
    settings: dict[str, Any]  # of the experiment, flat
    series: Series  # metric -> steps, values
    tokens: np.ndarray  # [steps + 1]: learnt from until the end of step n

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and values of a metric, without those that are not finite; empty if it was never recorded."""
        steps, values = self.series.get(metric, ([], []))
        at_N, value_N = self.tokens[np.array(steps, int)], np.array(values, float)
        finite_N = np.isfinite(value_N)
        return at_N[finite_N], value_N[finite_N]

    def value_at(self, metric: str, tokens: float) -> float:
        """The metric once so many tokens were learnt from, NaN if it is unknown there.

        A metric of every step is noisy: its mean over the last tenth of the tokens. Others are interpolated.
        """
        at_N, value_N = self.curve(metric)
        if len(at_N) == 0 or at_N[0] > tokens:
            return math.nan
        if len(at_N) >= len(self.tokens) - 1:
            recent_N = (at_N <= tokens) & (at_N > tokens * (1 - WINDOW))
            return float(value_N[recent_N].mean()) if recent_N.any() else math.nan
        return float(np.interp(tokens, at_N, value_N)) if at_N[-1] >= tokens else math.nan


@dataclass(frozen=True)
class Arm:
    """Runs of the same experiment that differ in their seed."""

    name: str
    runs: tuple[Run, ...]

    def values_at(self, metric: str, tokens: float) -> dict[Any, float]:
        """The metric of each seed whose run has it there."""
        found = {run.seed: run.value_at(metric, tokens) for run in self.runs}
        return {seed: value for seed, value in found.items() if not math.isnan(value)}


@dataclass(frozen=True)
class Entry:
    """A metric of an arm, and its difference from the first arm."""

    values: dict[Any, float]  # by seed
    mean: Estimate | None  # None without any value
    difference: Estimate | None  # None for the first arm, and where either has no value
    pairs: int  # seeds that the difference is paired over; 0: unpaired


def read_arm(name: str, folder: Path) -> Arm:
    """The run in `folder`, or those in the folders directly below it, which are seeds of one experiment.

    Raises:
      UserError: there is no run, or two runs of the arm have the same seed.
    """
    folders = [folder] if RunDir(folder).metrics.is_file() else sorted(folder.iterdir())
    found = [each for each in folders if RunDir(each).metrics.is_file()]
    if not found:
        raise UserError(f"{folder}: wanted a run or a folder of runs, but no metrics.jsonl is in it or one level below")
    arm = Arm(name, tuple(_read_run(each) for each in found))
    by_seed: dict[Any, Run] = {}
    for run in arm.runs:
        if run.seed in by_seed:
            both = f"{by_seed[run.seed].name} and {run.name}"
            raise UserError(f"{folder}: wanted a seed for each run, but {both} both have {run.seed}")
        by_seed[run.seed] = run
    return arm


def _read_run(folder: Path) -> Run:
    run = RunDir(folder)
    series = collect_series(read_metrics(run.metrics))
    if "perf/tokens_per_second" not in series:
        raise UserError(f"{run.metrics}: wanted the metrics of a training run, but no step is in it")
    settings = flatten(read_json(run.experiment)) if run.experiment.exists() else {}
    return Run(folder.name, settings.get("seed", folder.name), settings, series, _count_tokens(series))


def _count_tokens(series: Series) -> np.ndarray:
    """The response tokens learnt from until the end of each step; steps whose metrics are lost add none."""
    steps, rates = series["perf/tokens_per_second"]
    _, seconds = series["time/step"]
    token_N = np.zeros(max(max(each) for each, _ in series.values()) + 1)
    token_N[np.array(steps, int)] = np.array(rates) * np.array(seconds)
    return np.cumsum(np.rint(token_N))


def common_tokens(arms: Sequence[Arm]) -> float:
    """The largest number of tokens that every run has reached."""
    return float(min(run.tokens[-1] for arm in arms for run in arm.runs))


def compare(arms: Sequence[Arm], metric: str, tokens: float) -> list[Entry]:
    """The metric of each arm at so many tokens, and its difference from the first arm (`contrast`)."""
    return contrast([arm.values_at(metric, tokens) for arm in arms])


def contrast(arms: Sequence[dict[Any, float]]) -> list[Entry]:
    """The values of each arm by seed, with their mean and the difference from the first arm.

    The difference is that of the seeds which both arms have (at least two), else that of the means without pairs.
    """
    baseline, entries = arms[0], []
    for i, values in enumerate(arms):
        mean = estimate_mean(np.array(list(values.values()))) if values else None
        difference, pairs = None, 0
        if i and values and baseline:
            both = [seed for seed in baseline if seed in values]
            if len(both) >= 2:
                pairs = len(both)
                before, after = (np.array([each[seed] for seed in both]) for each in (baseline, values))
                difference = estimate_difference(before, after)
            else:
                difference = estimate_gap(*(np.array(list(each.values())) for each in (baseline, values)))
        entries.append(Entry(values, mean, difference, pairs))
    return entries


def find_differences(arms: Sequence[Arm]) -> dict[str, list[Any]]:
    """The settings in which arms differ: name -> its value in each arm's first run, None where it has none."""
    firsts = [arm.runs[0].settings for arm in arms]
    names = dict.fromkeys(name for settings in firsts for name in settings if not _is_label(name))
    found = {name: [settings.get(name) for settings in firsts] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _is_label(name: str) -> bool:
    """Whether a setting tells runs of one experiment apart: its name, the seeds of the run and of its data."""
    return name == "name" or name.split(".")[-1] == "seed"


def find_mixed(arm: Arm) -> list[str]:
    """The settings besides their seeds in which the runs of one arm differ."""
    return sorted({name for run in arm.runs for name in find_differences([Arm("", (arm.runs[0],)), Arm("", (run,))])})
