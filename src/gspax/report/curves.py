"""The metrics of a run as curves: which panels there are, and their drawing with matplotlib."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspax.run.folders import write_atomically

Series = dict[str, tuple[list[int], list[float]]]  # metric -> steps, values
Draw = Callable[[Any], None]  # draws on matplotlib axes

BLUE, ORANGE, GREEN, GREY, PINK = "#2b6cb0", "#dd6b20", "#2f855a", "#718096", "#b83280"
WIDTH, HEIGHT = 4.6, 3.0  # of a panel, inches
MARGINS = (0.17, 0.17, 0.8, 0.67)  # left, bottom, width and height of its axes, as fractions of the panel
COLORS = 64  # of the image
MANY_POINTS = 40  # a line of at least so many points is drawn pale, with its running mean over it


@dataclass(frozen=True)
class Panel:
    """One set of axes: metrics that share a unit."""

    title: str
    unit: str
    lines: tuple[tuple[str, str, str], ...]  # metric, label, colour
    log: bool = False


PANELS = (
    Panel("Reward", "mean over completions", (("reward/mean", "training", BLUE),)),
    Panel(
        "Held-out reward",
        "mean over completions",
        (("eval/reward", "sampled", BLUE), ("eval/greedy_reward", "greedy", GREEN)),
    ),
    Panel("Reward deviation", "standard deviation", (("reward/std", "all completions", BLUE),)),
    Panel("Groups without signal", "fraction of prompts", (("reward/zero_std_groups", "all rewards equal", BLUE),)),
    Panel(
        "Clipped",
        "fraction",
        (
            ("policy/clip_fraction_tokens", "of tokens", BLUE),
            ("policy/clip_fraction_sequences", "of sequences", ORANGE),
        ),
    ),
    Panel(
        "Clipped by side",
        "fraction",
        (
            ("policy/clip_fraction_high", "above 1 + clip_high", ORANGE),
            ("policy/clip_fraction_low", "below 1 - clip_low", GREEN),
        ),
    ),
    Panel(
        "Importance ratio",
        "new / old",
        (
            ("policy/ratio_max", "max", ORANGE),
            ("policy/ratio_mean", "mean", BLUE),
            ("policy/ratio_min", "min", GREEN),
        ),
    ),
    Panel("Entropy", "nats per token", (("policy/entropy", "policy", BLUE),)),
    Panel("KL to the sampling policy", "nats per token", (("policy/kl", "policy", BLUE),)),
    Panel("Loss", "policy loss", (("policy/loss", "loss", BLUE),)),
    Panel(
        "Response length",
        "tokens",
        (
            ("response/length_max", "max", ORANGE),
            ("response/length_mean", "mean", BLUE),
            ("response/length_min", "min", GREEN),
        ),
    ),
    Panel(
        "Truncated at the maximum length",
        "fraction of responses",
        (("response/truncated", "training", BLUE), ("eval/truncated", "held-out", GREEN)),
    ),
    Panel("Gradient norm", "before clipping", (("optim/grad_norm", "gradient", BLUE),)),
    Panel("Learning rate", "", (("optim/learning_rate", "learning rate", BLUE),)),
    Panel(
        "Expert load",
        "tokens / layer mean",
        (("routing/load_max", "most loaded expert", ORANGE), ("routing/load_min", "least loaded expert", GREEN)),
    ),
    Panel("Changed experts", "fraction of choices", (("routing/changed", "changed by a step's updates", BLUE),)),
    Panel(
        "Sampler-learner mismatch",
        "|Δ log-prob|, nats",
        (("mismatch/abs_diff_largest_max", "max", ORANGE), ("mismatch/abs_diff", "mean", BLUE)),
        log=True,
    ),
    Panel(
        "Time per step",
        "seconds",
        (
            ("time/step", "total", GREY),
            ("time/train", "training", BLUE),
            ("time/rollout", "rollout", ORANGE),
            ("time/old_logp", "old log-probs", GREEN),
            ("time/reward", "reward", PINK),
        ),
        log=True,
    ),
    Panel(
        "CPU time per step",
        "CPU-seconds of host 0",
        (
            ("cpu/step", "total", GREY),
            ("cpu/train", "training", BLUE),
            ("cpu/rollout", "rollout", ORANGE),
            ("cpu/old_logp", "old log-probs", GREEN),
            ("cpu/reward", "reward", PINK),
        ),
        log=True,
    ),
    Panel("Throughput", "response tokens per second", (("perf/tokens_per_second", "tokens", BLUE),)),
)


def collect_series(rows: Iterable[Mapping[str, float]]) -> Series:
    """The steps and values of each metric by its name."""
    series: Series = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                steps, values = series.setdefault(name, ([], []))
                steps.append(int(row["step"]))
                values.append(value)
    return series


def select_panels(series: Series, known: tuple[Panel, ...]) -> list[Panel]:
    """The known panels that have data, then one for each metric that is in none of them and not always 0."""
    shown = {metric for panel in known for metric, _, _ in panel.lines}
    named = sorted(set(series) - shown - set(zero_metrics(series, known)))
    others = [Panel(metric, "", ((metric, metric, BLUE),)) for metric in named]
    return [panel for panel in (*known, *others) if any(metric in series for metric, _, _ in panel.lines)]


def zero_metrics(series: Series, known: tuple[Panel, ...]) -> list[str]:
    """The metrics that are in none of the known panels and are 0 at every step."""
    shown = {metric for panel in known for metric, _, _ in panel.lines}
    return sorted(metric for metric, (_, values) in series.items() if metric not in shown and not any(values))


def draw_panel(axes: Any, panel: Panel, series: Series) -> None:
    """Draw a panel on matplotlib axes."""
    lines = [line for line in panel.lines if line[0] in series]
    for metric, label, colour in lines:
        steps, values = series[metric]
        finite = [value if math.isfinite(value) else math.nan for value in values]
        if len(steps) >= MANY_POINTS:
            axes.plot(steps, finite, color=colour, alpha=0.25, linewidth=1)
            axes.plot(steps, _running_mean(finite), color=colour, linewidth=1.8, label=label)
        else:
            axes.plot(steps, finite, color=colour, linewidth=1.8, marker="o", markersize=3, label=label)
    positive = [value for metric, _, _ in lines for value in series[metric][1] if value > 0]
    if panel.log and positive:
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.8g}")
    style_axes(axes, panel.title, "step", panel.unit, legend=len(lines) if len(panel.lines) > 1 else 0)


def style_axes(axes: Any, title: str, x: str, y: str, *, legend: int) -> None:
    """Title, labels, grid and frame of a panel; above the axes a legend of so many columns, none for 0."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=18 if legend else 6)
    axes.set_xlabel(x, color=GREY)
    axes.set_ylabel(y, color=GREY)
    axes.tick_params(colors=GREY, labelsize=8.5)
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cbd5e0")
    if legend:
        position = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "ncols": legend}
        axes.legend(**position, frameon=False, fontsize=8, labelcolor=GREY, handlelength=1, columnspacing=1)


def _running_mean(values: list[float]) -> list[float]:
    """Centred mean over a twentieth of the points, fewer at the ends; NaN is ignored."""
    half = max(1, len(values) // 40)
    means = []
    for i in range(len(values)):
        window = [value for value in values[max(0, i - half) : i + half + 1] if not math.isnan(value)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def write_png(drawings: Sequence[Draw], path: Path) -> None:
    """All drawings in one image, three to a row, in few colors: a third of the bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    columns = min(3, len(drawings))
    rows = -(-len(drawings) // columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows))
    FigureCanvasAgg(figure)
    for i, draw in enumerate(drawings):
        row, column = divmod(i, columns)
        left, bottom, width, height = MARGINS
        box = ((column + left) / columns, (rows - 1 - row + bottom) / rows, width / columns, height / rows)
        draw(figure.add_axes(box))
    drawn, image = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    with Image.open(drawn) as full:
        few = full.convert("RGB").quantize(COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(image, "png", optimize=True)
    write_atomically(path, image.getvalue())


def render_svg(draw: Draw, title: str) -> str:
    """A drawing as an SVG element for HTML: without prolog, metadata and namespaces, text as text."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT))
    FigureCanvasSVG(figure)
    draw(figure.add_axes(MARGINS))
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|width|height)="[^"]*"', "", svg[: svg.index(">")]) + svg[svg.index(">") :]
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)
