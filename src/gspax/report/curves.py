"""Plots the metrics of a run: selects the panels, and draws them with matplotlib."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gspax.run.record import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = dict[str, tuple[list[int], list[float]]]  # metric -> steps, values
Draw = Callable[["Axes"], None]

BLUE, ORANGE, GREEN, GREY, PINK = COLORS = ("#2b6cb0", "#dd6b20", "#2f855a", "#718096", "#b83280")
WIDTH, HEIGHT = 4.6, 3.0  # size of a panel, inches
MARGINS = (0.17, 0.17, 0.8, 0.67)  # left, bottom, width and height of a panel's axes, as fractions of the panel
MANY_POINTS = 40  # a line with at least this many points is drawn pale, with its running mean over it


@dataclass(frozen=True)
class Panel:
    """One plot: metrics that share a unit."""

    title: str
    unit: str
    lines: Mapping[str, str]  # label -> metric, in the order of `COLORS`
    log: bool = False


def _mean_and_range(metric: str) -> dict[str, str]:
    return {label: f"{metric}_{label}" for label in ("mean", "max", "min")}


def _phases(group: str) -> dict[str, str]:
    labels = {
        "train": "training",
        "rollout": "rollout",
        "old_logp": "old log-probs",
        "step": "total",
        "reward": "reward",
    }
    return {label: f"{group}/{name}" for name, label in labels.items()}


PANELS = (
    Panel("Reward", "mean over completions", {"training": "reward/mean"}),
    Panel(
        "Held-out reward",
        "mean over completions",
        {
            "sampled": "eval/reward",
            "greedy": "eval/greedy_reward",
            "95 % from": "eval/reward_low",
            "to": "eval/reward_high",
        },
    ),
    Panel("Reward deviation", "standard deviation", {"all completions": "reward/std"}),
    Panel("Groups without signal", "fraction of prompts", {"all rewards equal": "reward/zero_std_groups"}),
    Panel(
        "Clipped",
        "fraction",
        {"of tokens": "policy/clip_fraction_tokens", "of sequences": "policy/clip_fraction_sequences"},
    ),
    Panel(
        "Clipped by side",
        "fraction",
        {"below 1 - clip_low": "policy/clip_fraction_low", "above 1 + clip_high": "policy/clip_fraction_high"},
    ),
    Panel("Importance ratio", "new / old", _mean_and_range("policy/ratio")),
    Panel("Entropy", "nats per token", {"policy": "policy/entropy"}),
    Panel("KL to the sampling policy", "nats per token", {"policy": "policy/kl"}),
    Panel("Loss", "policy loss", {"loss": "policy/loss"}),
    Panel("Response length", "tokens", _mean_and_range("response/length")),
    Panel(
        "Truncated at the maximum length",
        "fraction of responses",
        {"training": "response/truncated", "held-out": "eval/truncated"},
    ),
    Panel(
        "Samples lost",
        "fraction of all",
        {name: f"samples/{name}" for name in ("cut", "failed", "late", "replaced")},
    ),
    Panel(
        "Bias of what is trained on",
        "in the loss - all sampled",
        {"reward": "samples/reward_bias", "length": "samples/length_bias"},
    ),
    Panel("Gradient norm", "before clipping", {"gradient": "optim/grad_norm"}),
    Panel("Learning rate", "", {"learning rate": "optim/learning_rate"}),
    Panel(
        "Expert load",
        "tokens / layer mean",
        {"least loaded expert": "routing/load_min", "most loaded expert": "routing/load_max"},
    ),
    Panel("Changed experts", "fraction of choices", {"changed by a step's updates": "routing/changed"}),
    Panel(
        "Sampler-learner mismatch",
        "|Δ log-prob|, nats",
        {"mean": "mismatch/abs_diff", "max": "mismatch/abs_diff_largest_max"},
        log=True,
    ),
    Panel(
        "Mismatch by place in the response",
        "mean |Δ log-prob|, nats",
        {f"from token {first}": f"mismatch/abs_diff_from_{first}" for first in (1, 17, 65, 257, 1025, 4097)},
        log=True,
    ),
    Panel(
        "Mismatch by turn",
        "mean |Δ log-prob|, nats",
        {f"turn {turn}": f"mismatch/abs_diff_turn_{turn}" for turn in range(1, 9)},
        log=True,
    ),
    Panel(
        "Mismatch by server",
        "mean |Δ log-prob|, nats",
        {f"server {number}": f"mismatch/abs_diff_server_{number}" for number in range(1, 17)},
        log=True,
    ),
    Panel("Time per step", "seconds", _phases("time"), log=True),
    Panel("CPU time per step", "CPU-seconds of host 0", _phases("cpu"), log=True),
    Panel("Throughput", "response tokens per second", {"tokens": "perf/tokens_per_second"}),
)


def read_series(path: Path) -> Series:
    """Read the steps and values of each metric in a `metrics.jsonl`; empty if there is no such file."""
    series: Series = {}
    for row in read_metrics(path) if path.exists() else ():
        for name, value in row.items():
            if name != "step":
                steps, values = series.setdefault(name, ([], []))
                steps.append(int(row["step"]))
                values.append(value)
    return series


def select_panels(series: Series, known: Sequence[Panel]) -> tuple[list[Panel], list[str]]:
    """Select the panels that have data, and list the other metrics that are 0 at every step.

    The known panels come first, then one panel for each metric that is in none of them.
    """
    others = sorted(set(series) - {metric for panel in known for metric in panel.lines.values()})
    zero = [metric for metric in others if not any(series[metric][1])]
    panels = [*known, *(Panel(metric, "", {metric: metric}) for metric in others if metric not in zero)]
    return [panel for panel in panels if not series.keys().isdisjoint(panel.lines.values())], zero


def draw_panel(axes: Axes, panel: Panel, series: Series) -> None:
    """Draw a panel on matplotlib axes."""
    lines = [
        (label, color, *series[metric])
        for color, (label, metric) in zip(COLORS, panel.lines.items(), strict=False)
        if metric in series
    ]
    for label, color, steps, values in lines:
        value_N = np.where(np.isfinite(values), values, math.nan)
        if len(steps) >= MANY_POINTS:
            axes.plot(steps, value_N, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, _running_mean(value_N), color=color, linewidth=1.8, label=label)
        else:
            axes.plot(steps, value_N, color=color, linewidth=1.8, marker="o", markersize=3, label=label)
    if panel.log and any(value > 0 for *_, values in lines for value in values):
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.8g}")
    style_axes(axes, panel.title, "step", panel.unit, legend=len(lines) if len(panel.lines) > 1 else 0)


def style_axes(axes: Axes, title: str, x: str, y: str, *, legend: int) -> None:
    """Set title, labels, grid and frame of a panel, and a legend with `legend` columns above the axes, none for 0."""
    # without y, matplotlib measures every tick label to place the title, which takes a quarter of the time
    axes.set_title(title, loc="left", y=1, fontsize=11, fontweight="bold", pad=18 if legend else 6)
    axes.set_xlabel(x, color=GREY)
    axes.set_ylabel(y, color=GREY)
    axes.tick_params(colors=GREY, labelsize=8.5)
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cbd5e0")
    if legend:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            borderaxespad=0,
            ncols=legend,
            frameon=False,
            fontsize=8,
            labelcolor=GREY,
            handlelength=1,
            columnspacing=1,
        )


def _running_mean(value_N: np.ndarray) -> np.ndarray:
    """Compute the centered mean over a twentieth of the points, fewer at the ends; NaN is ignored."""
    half = max(1, len(value_N) // 40)
    padded = np.pad(value_N, half, constant_values=math.nan)
    window_NM = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    with np.errstate(invalid="ignore"):  # NaN where all values are
        return np.nansum(window_NM, axis=1) / np.isfinite(window_NM).sum(axis=1)


def render_figures(drawings: Mapping[str, Draw]) -> str:
    """Render drawings, by title, as the figures of a page."""
    figures = (f"<figure>{_render_svg(draw, title)}</figure>" for title, draw in drawings.items())
    return f"<div class=curves>{''.join(figures)}</div>"


def _render_svg(draw: Draw, title: str) -> str:
    """Render a drawing as an SVG element for HTML: no prolog, metadata or namespaces, and text as text."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT))
    FigureCanvasSVG(figure)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "text.parse_math": False}):
        draw(figure.add_axes(MARGINS))
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|width|height)="[^"]*"', "", svg[: svg.index(">")]) + svg[svg.index(">") :]
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
