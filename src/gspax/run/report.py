"""report.html and curves.png: the improvement, curves and settings of a run.

The page is a single file that needs no network: the curves are inline SVG. Text that a model generated is escaped,
control characters included.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspax.errors import UserError
from gspax.experiment.description import flatten, show
from gspax.run import task_table
from gspax.run.directory import RunDir, read_attempts, read_json
from gspax.run.folders import write_atomically
from gspax.run.record import read_metrics, read_rows

Series = dict[str, tuple[list[int], list[float]]]  # metric -> steps, values

BLUE, ORANGE, GREEN, GREY, PINK = "#2b6cb0", "#dd6b20", "#2f855a", "#718096", "#b83280"
WIDTH, HEIGHT = 4.6, 3.0  # of a panel, inches
MARGINS = (0.17, 0.17, 0.8, 0.67)  # left, bottom, width and height of its axes, as fractions of the panel
MANY_POINTS = 40  # a line of at least so many points is drawn pale, with its running mean over it
SHOWN_CHARACTERS = 1000  # of a completion
RENAMED = {  # metrics of runs recorded by older versions
    "eval/accuracy": "eval/reward",
    "eval/greedy_accuracy": "eval/greedy_reward",
}


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


def write(workdir: Path) -> Path:
    """Write `report.html` and `curves.png` of a run, finished or not; the path of the page.

    Raises:
      UserError: the run has no metrics yet, or its files cannot be read.
    """
    run = RunDir(Path(workdir))
    if not run.metrics.exists():
        raise UserError(f"there is nothing to report: {run.metrics} does not exist")
    series = _series(read_metrics(run.metrics))
    if not series:
        raise UserError(f"there is nothing to report: {run.metrics} has no metrics yet")
    panels = _panels(series, PANELS)
    _write_png(panels, series, run.curves)
    experiment = read_json(run.experiment) if run.experiment.exists() else {}
    attempts = read_attempts(run) or []
    name = str(experiment.get("name", run.path.name))
    warm = _series(read_metrics(run.warm_start.metrics)) if run.warm_start.metrics.exists() else {}
    sections = [
        ("", _headline(series)),
        ("Held-out prompts, before and after", _completions(run)),
        ("Tasks", task_table.render(run)),
        ("Curves", _curves(panels, series)),
        ("Warm start", _curves(_panels(warm, ()), warm)),
        ("Experiment", _table(flatten(experiment))),
        *((f"Environment, attempt {n}", _table(flatten(attempt))) for n, attempt in enumerate(attempts, start=1)),
    ]
    write_atomically(run.report, _page(name, sections))
    return run.report


def summarise(workdir: Path) -> str:
    """The held-out rewards and the paths of the files, to print at the end of a run."""
    run = RunDir(workdir)
    series = _series(read_metrics(run.metrics))
    lines = [
        f"{label}: {values[0]:.3f} at step {steps[0]}, {values[-1]:.3f} at step {steps[-1]}"
        for metric, label in (("eval/reward", "held-out reward, sampled"), ("eval/greedy_reward", "greedy"))
        if metric in series
        for steps, values in [series[metric]]
    ]
    files = [f"  {path}" for path in (run.report, run.curves, run.metrics, run.samples, run.checkpoints)]
    return "\n".join([*lines, "Files:", *files])


def _series(rows: Iterable[Mapping[str, float]]) -> Series:
    """The steps and values of each metric, by its current name."""
    series: Series = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                steps, values = series.setdefault(RENAMED.get(name, name), ([], []))
                steps.append(int(row["step"]))
                values.append(value)
    return series


def _panels(series: Series, known: tuple[Panel, ...]) -> list[Panel]:
    """The known panels that have data, then one for each metric that is in none of them."""
    shown = {metric for panel in known for metric, _, _ in panel.lines}
    others = [Panel(metric, "", ((metric, metric, BLUE),)) for metric in sorted(set(series) - shown)]
    return [panel for panel in (*known, *others) if any(metric in series for metric, _, _ in panel.lines)]


def _draw(axes: Any, panel: Panel, series: Series) -> None:
    """Draw one panel with matplotlib."""
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
    legend = len(panel.lines) > 1
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", pad=18 if legend else 6)
    axes.set_xlabel("step", color=GREY)
    axes.set_ylabel(panel.unit, color=GREY)
    axes.tick_params(colors=GREY, labelsize=8.5)
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cbd5e0")
    if legend:
        position = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0, "ncols": len(lines)}
        axes.legend(**position, frameon=False, fontsize=8, labelcolor=GREY, handlelength=1, columnspacing=1)


def _running_mean(values: list[float]) -> list[float]:
    """Centred mean over a twentieth of the points, fewer at the ends; NaN is ignored."""
    half = max(1, len(values) // 40)
    means = []
    for i in range(len(values)):
        window = [value for value in values[max(0, i - half) : i + half + 1] if not math.isnan(value)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def _write_png(panels: list[Panel], series: Series, path: Path) -> None:
    """All panels in one image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows))
    FigureCanvasAgg(figure)
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        left, bottom, width, height = MARGINS
        box = ((column + left) / columns, (rows - 1 - row + bottom) / rows, width / columns, height / rows)
        _draw(figure.add_axes(box), panel, series)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_atomically(path, image.getvalue())


def _svg(panel: Panel, series: Series) -> str:
    """One panel as an SVG element for HTML: without prolog, metadata and namespaces, text as text."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT))
    FigureCanvasSVG(figure)
    _draw(figure.add_axes(MARGINS), panel, series)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title}):
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|width|height)="[^"]*"', "", svg[: svg.index(">")]) + svg[svg.index(">") :]
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(panel.title)}"', 1)


def _curves(panels: list[Panel], series: Series) -> str:
    if not panels:
        return ""
    figures = "".join(f"<figure>{_svg(panel, series)}</figure>" for panel in panels)
    has_means = any(len(steps) >= MANY_POINTS for steps, _ in series.values())
    note = "<p class=note>Pale: every step. Dark: running mean over a twentieth of the run.</p>" if has_means else ""
    return f"{note}<div class=curves>{figures}</div>"


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
    after = {row["prompt"]: row for row in read_rows(run.after)}
    rows = []
    for old in read_rows(run.before):
        new = after.get(old["prompt"])
        if new is not None:
            cells = (_text(old["prompt"]), _text(old.get("answer", "")), _answer(old), _answer(new))
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "<tr><th>prompt</th><th>answer</th><th>before</th><th>after</th></tr>"
    return f"<div class=wide><table>{head}{''.join(rows)}</table></div>"


def _answer(row: Mapping[str, Any]) -> str:
    """A completion and its reward."""
    reward = float(row["reward"])
    kind = "right" if reward >= 1 else "wrong" if reward <= 0 else "partly"
    return f"{_text(row['completion'])} <span class='reward {kind}'>{reward:g}</span>"


def _text(value: Any) -> str:
    """Untrusted text as HTML: escaped, truncated, unprintable characters as escape sequences."""
    text = str(value)
    omitted = f"… ({len(text) - SHOWN_CHARACTERS} more characters)" if len(text) > SHOWN_CHARACTERS else ""
    printable = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:SHOWN_CHARACTERS]
    )
    return f"<code>{html.escape(printable)}</code>{omitted}"


def _table(rows: Mapping[str, Any]) -> str:
    if not rows:
        return ""
    body = "".join(f"<tr><td>{_text(name)}</td><td>{_text(show(value))}</td></tr>" for name, value in rows.items())
    return f"<details><summary>{len(rows)} settings</summary><div class=wide><table>{body}</table></div></details>"


STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a202c; background: #f7fafc; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.headline { font-size: 1.15rem; margin: .6rem 0 1rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; }
.tile, figure, .wide { background: #fff; border: 1px solid #e2e8f0; border-radius: 8px; }
.tile { padding: .7rem 1rem; flex: 1 1 9rem; }
.tile b { display: block; font-size: 1.25rem; color: #2b6cb0; white-space: nowrap; }
.tile span, .note { color: #718096; font-size: .85rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: .8rem; }
figure { margin: 0; padding: .4rem; }
figure svg { display: block; width: 100%; height: auto; font-family: system-ui, sans-serif; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; color: #718096; font-weight: 600; }
th, td { padding: .4rem .8rem; border-top: 1px solid #edf2f7; vertical-align: top; }
tr:first-child > * { border-top: 0; }
code { font: .85rem ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; unicode-bidi: isolate; }
.reward { border-radius: 9px; padding: 0 .5em; font-size: .8rem; white-space: nowrap; }
.right { background: #c6f6d5; color: #22543d; } .wrong { background: #fed7d7; color: #742a2a; }
.partly { background: #feebc8; color: #7b341e; }
summary { cursor: pointer; color: #2b6cb0; margin-bottom: .5rem; }
"""


def _page(name: str, sections: list[tuple[str, str]]) -> str:
    """The page, with the sections that have a body under their headings."""
    bodies = "".join((f"<h2>{heading}</h2>" if heading else "") + body for heading, body in sections if body)
    title = html.escape(name)
    return (
        '<!doctype html><html lang=en><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>"
        f"<body><main><h1>{title}</h1>{bodies}</main></body></html>\n"
    )
