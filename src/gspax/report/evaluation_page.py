"""A page to filter and read the completions of a task: one file, without network.

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
from gspax.run.folders import write_atomically

TEXTS = ("prompt", "answer", "completion")  # in which formulas are drawn
BUDGET = 20_000_000  # characters of completions on a page; the rest is in the .jsonl file
LONGEST = 20_000  # characters of one text; a longer one loses its middle
Row = Mapping[str, object]
FIELDS = ("problem", "sample", "prompt", "answer", "completion", "reward", "reason", "error", "vote", "length")


def write(path: Path, name: str, summary: Sequence[str], rows: Sequence[Row]) -> None:
    """Write the page of a task's rows (`benchmark.to_json`), under the lines of its summary."""
    shown = select(rows)
    note = (
        f"The page has the first {len(shown):,} of {len(rows):,} completions; "
        f"all are in {path.name.removesuffix('.html')}.jsonl."
    )
    # "<" as an escape sequence: no text can end the script element
    data = json.dumps(convert(shown)).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    text, title = html.escape("\n".join(summary)), html.escape(name)
    write_atomically(
        path,
        f'<!doctype html><html lang=en><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main><h1>{title}</h1><pre>{text}</pre><p>{html.escape(note) if len(shown) < len(rows) else ''}</p>"
        f"<math hidden></math>{CONTROLS}"
        f'<p id=count></p><div id=list></div><button id=more>more</button></main><script type="application/json" '
        f"id=data>{data}</script><script>{SCRIPT}</script></body></html>\n",
    )


def select(rows: Sequence[Row], budget: int = BUDGET) -> list[dict[str, object]]:
    """The fields that the page shows, of as many rows as fit into `budget` characters, at least one."""
    shown: list[dict[str, object]] = []
    for row in rows:
        budget -= sum(min(len(str(row[name])), LONGEST) for name in ("completion", "prompt"))
        if shown and budget < 0:
            break
        fields = {name: shorten(row[name]) for name in FIELDS if row.get(name) is not None}
        shown.append(fields | {"truncated": not row["finished"]})
    return shown


def shorten(value: object) -> object:
    """A text of at most `LONGEST` characters and a note; other values as they are."""
    if not isinstance(value, str) or len(value) <= LONGEST:
        return value
    half = LONGEST // 2
    return f"{value[:half]}\n[… {len(value) - 2 * half:,} characters …]\n{value[-half:]}"


def convert(rows: Sequence[Row]) -> dict[str, object]:
    """What the page's script reads: rows, in whose texts a number stands for a formula, and (source, tree) of those."""
    numbers: dict[str, int] = {}
    formulas: list[tuple[str, mathml.Tree]] = []

    def number_of(formula: mathml.Formula) -> int:
        if formula.source not in numbers:
            numbers[formula.source] = len(formulas)
            formulas.append((formula.source, formula.tree))
        return numbers[formula.source]

    @functools.cache  # samples share their prompt and answer
    def split(text: str) -> str | list[str | int]:
        parts = mathml.split(text)
        return text if parts == [text] else [part if isinstance(part, str) else number_of(part) for part in parts]

    shown = [{**row, **{name: split(str(row[name])) for name in TEXTS if name in row}} for row in rows]
    return {"rows": shown, "tex": formulas}


CONTROLS = """<form id=filters>
<label>reward <select name=reward><option value="">any</option><option value=one>1 or more</option>
<option value=zero>0 or less</option><option value=partly>between</option></select></label>
<label>length <select name=end><option value="">any</option><option value=finished>finished</option>
<option value=truncated>truncated</option></select></label>
<label>problems <select name=problems><option value="">any</option><option value=all>all samples right</option>
<option value=some>some right</option><option value=none>none right</option></select></label>
<label>problem <input name=problem type=number min=0></label>
<label>reason <select name=reason><option value="">any</option></select></label>
<label>text <input name=text type=search></label>
<label><input name=source type=checkbox> TeX as source</label></form>"""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a202c; background: #f7fafc; margin: 0; }
main { max-width: 1000px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; }
pre { font: .85rem/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }
form { display: flex; flex-wrap: wrap; gap: .6rem 1rem; position: sticky; top: 0; background: #f7fafc; }
label, p { color: #4a5568; font-size: .9rem; }
article { background: #fff; border: 1px solid #e2e8f0; border-radius: 8px; padding: .6rem .9rem; margin: .6rem 0; }
.right { background: #c6f6d5; } .wrong { background: #fed7d7; } .partly { background: #feebc8; }
b { border-radius: 9px; padding: 0 .5em; }
summary { cursor: pointer; color: #2b6cb0; font-size: .9rem; }
math { font-size: 1.1rem; }
.boxed { border: 1px solid; padding: .15em .3em; }
"""

SCRIPT = """
"use strict";
const { rows, tex } = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filters"), list = document.getElementById("list");
const more = document.getElementById("more"), FOLD = 800, PAGE = 30;
const kind = row => row.reward >= 1 ? "right" : row.reward <= 0 ? "wrong" : "partly";
const category = row => row.error ? "failed" : (row.reason || "").split(":")[0];
for (const row of rows) {
  row.parts = {};
  for (const name of ["prompt", "answer", "completion"]) {
    row.parts[name] = [row[name] === undefined ? "" : row[name]].flat();
    row[name] = row.parts[name].map(part => typeof part === "number" ? tex[part][0] : part).join("");
  }
}
const right = new Map(), count = new Map();
for (const row of rows) {
  right.set(row.problem, (right.get(row.problem) || 0) + (row.reward >= 1));
  count.set(row.problem, (count.get(row.problem) || 0) + 1);
}
for (const name of [...new Set(rows.map(category))].filter(Boolean).sort()) {
  const option = document.createElement("option");
  option.textContent = option.value = name;
  form.elements.reason.append(option);
}
const share = { all: (r, n) => r === n, some: (r, n) => r > 0 && r < n, none: r => r === 0 };
function fits(row) {
  const f = Object.fromEntries(new FormData(form));
  return (!f.reward || { one: "right", zero: "wrong", partly: "partly" }[f.reward] === kind(row))
    && (!f.end || (f.end === "truncated") === row.truncated)
    && (!f.problems || share[f.problems](right.get(row.problem), count.get(row.problem)))
    && (f.problem === "" || Number(f.problem) === row.problem)
    && (!f.reason || f.reason === category(row))
    && (!f.text || (row.prompt + "\\n" + row.completion).toLowerCase().includes(f.text.toLowerCase()));
}
function element(tag, text, name) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}
function draw([tag, attributes, ...children]) {
  const made = document.createElementNS(document.querySelector("math").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map(child => typeof child === "string" ? child : draw(child)));
  return made;
}
function formula([source, tree]) {
  return draw(["math", {title: source}, tree]);
}
function prose(row, name) {
  if (form.elements.source.checked) return element("pre", row[name]);
  const box = element("pre", "");
  box.append(...row.parts[name].map(part => typeof part === "number" ? formula(tex[part]) : part));
  return box;
}
function folded(title, content, open) {
  const box = document.createElement("details");
  box.open = open;
  box.append(element("summary", title), content);
  return box;
}
function show(row) {
  const box = document.createElement("article"), head = element("div", "");
  head.append(element("b", row.reward, kind(row)));
  head.append(` problem ${row.problem}, sample ${row.sample}, ${row.length} tokens`);
  if (row.truncated) head.append(", truncated");
  if (row.reason || row.error) head.append(`; ${row.error || row.reason}`);
  box.append(head, folded("prompt", prose(row, "prompt"), false));
  if (row.completion.length > FOLD) {
    box.append(element("pre", row.completion.slice(0, FOLD / 4) + " …"));
    box.append(folded(`completion (${row.completion.length} characters)`, prose(row, "completion"), false));
    box.append(element("pre", "… " + row.completion.slice(-FOLD / 2)));
  } else box.append(prose(row, "completion"));
  if (row.vote !== undefined) box.append(element("p", `final answer: ${row.vote}`));
  box.append(folded("reference", prose(row, "answer"), row.answer.length < 80));
  return box;
}
let found = [], next = 0;
function extend() {
  list.append(...found.slice(next, next + PAGE).map(show));
  next += PAGE;
  more.hidden = next >= found.length;
}
function refresh() {
  found = rows.filter(fits);
  next = 0;
  list.replaceChildren();
  document.getElementById("count").textContent = `${found.length} of ${rows.length} completions`;
  extend();
}
form.addEventListener("input", refresh);
form.addEventListener("submit", event => event.preventDefault());
more.addEventListener("click", extend);
refresh();
"""
