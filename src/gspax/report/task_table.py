"""The report's table of evaluated tasks, from their TASK.json files."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gspax.errors import UserError, warn
from gspax.report.html import render_table
from gspax.run.directory import RunDir, read_json

HEAD = (
    "task",
    "evaluated at",
    "problems x samples",
    "mean reward, 95 % interval",
    "pass@k",
    "maj@k",
    "truncated",
    "tokens",
)


def render(run: RunDir) -> str:
    """The table as HTML, a line for each evaluation with a link to its completions; empty if there are none."""
    lines = []
    for path in sorted(run.tasks.glob("*/*.json")):
        name = path.name.removesuffix(".json")
        link = quote(f"{run.tasks.name}/{path.parent.name}/{name}.html")
        try:
            cells = [path.parent.name.replace("_", " "), *_cells(read_json(path)["summary"])]
        except (UserError, ValueError, TypeError, KeyError, AttributeError) as error:
            warn(f"{path} cannot be read and is not in the report ({type(error).__name__})")
            continue
        lines.append([f'<a href="{link}">{html.escape(name)}</a>', *map(html.escape, cells)])
    return render_table(HEAD, lines) if lines else ""


def _cells(summary: Mapping[str, Any]) -> list[str]:
    cells = [f"{summary['problems']} x {summary['samples']}"]
    cells += [format_estimate(summary["reward"]), _largest(summary, "pass"), _largest(summary, "majority")]
    return [*cells, f"{100 * summary['truncated']:.1f} %", f"{summary['tokens']['mean']:.1f}"]


def format_estimate(found: Mapping[str, Any], digits: int = 3) -> str:
    """The mean of an estimate, and its interval if it has one."""
    bounds = "" if found["low"] is None else f" [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"
    return f"{found['mean']:.{digits}f}{bounds}"


def _largest(summary: Mapping[str, Any], kind: str) -> str:
    """The figure for the largest k."""
    found = summary.get(kind) or {}
    return f"{format_estimate(found[k])}, k = {k}" if (k := max(found, key=int, default=None)) else ""
