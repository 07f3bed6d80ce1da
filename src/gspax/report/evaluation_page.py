"""A page for filtering and reading the completions of a task: one file, without network.

Texts that a model wrote reach the page as JSON and as text nodes only, never as HTML. Formulas are drawn as MathML
(`gspax.report.mathml`), or shown as their source.
"""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gspax.report import mathml
from gspax.report.html import render_page
from gspax.run.folders import write_atomically

TEXTS = ("prompt", "answer", "completion")  # fields whose formulas are drawn
BUDGET = 20_000_000  # characters of completions on a page; the rest is in the .jsonl file
LONGEST = 20_000  # characters of one text; the middle of a longer one is cut out
Row = Mapping[str, object]
CONTROLS, SCRIPT = (Path(__file__).with_suffix(suffix) for suffix in (".html", ".js"))
FIELDS = ("problem", "sample", "prompt", "answer", "completion", "reward", "reason", "error", "vote", "length")


def write(path: Path, name: str, summary: Sequence[str], rows: Sequence[Row]) -> None:
    """Write the page of a task's rows (`benchmark.to_json`), under the lines of its summary."""
    shown, note = select(rows), ""
    if len(shown) < len(rows):
        all_of_them = f"all are in {path.name.removesuffix('.html')}.jsonl."
        note = f"The page has the first {len(shown):,} of {len(rows):,} completions; {all_of_them}"
    # "<" as an escape sequence: no text can end the script element
    data = json.dumps(convert(shown)).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    body = (
        f"<pre>{html.escape(chr(10).join(summary))}</pre><p>{html.escape(note)}</p><math hidden></math>"
        f"{CONTROLS.read_text(encoding='utf-8')}"
        '<p id=count></p><div id=list></div><button id=more>more</button><script type="application/json" id=data>'
        f"{data}</script><script>{SCRIPT.read_text(encoding='utf-8')}</script>"
    )
    write_atomically(path, render_page(name, [("", body)]))


def select(rows: Sequence[Row], budget: int = BUDGET) -> list[dict[str, object]]:
    """Select the fields that the page shows, for as many rows as fit into `budget` characters, at least one."""
    shown: list[dict[str, object]] = []
    for row in rows:
        budget -= sum(min(len(str(row[name])), LONGEST) for name in ("completion", "prompt"))
        if shown and budget < 0:
            break
        fields = {name: shorten(row[name]) for name in FIELDS if row.get(name) is not None}
        shown.append(fields | {"truncated": not row["finished"]})
    return shown


def shorten(value: object) -> object:
    """Cut the middle out of a text longer than `LONGEST`, and note that; return other values unchanged."""
    if not isinstance(value, str) or len(value) <= LONGEST:
        return value
    half = LONGEST // 2
    return f"{value[:half]}\n[… {len(value) - 2 * half:,} characters …]\n{value[-half:]}"


def convert(rows: Sequence[Row]) -> dict[str, object]:
    """Return the script's data: the rows, with a number for each formula, and (source, tree) of the formulas."""
    numbers: dict[str, int] = {}
    trees: dict[str, mathml.Tree] = {}

    def number_of(formula: mathml.Formula) -> int:
        trees[formula.source] = formula.tree
        return numbers.setdefault(formula.source, len(numbers))

    @functools.cache  # samples share their prompt and answer
    def split(text: str) -> str | list[str | int]:
        parts = mathml.split(text)
        return text if parts == [text] else [part if isinstance(part, str) else number_of(part) for part in parts]

    shown = [{**row, **{name: split(str(row[name])) for name in TEXTS if name in row}} for row in rows]
    return {"rows": shown, "tex": list(trees.items())}
