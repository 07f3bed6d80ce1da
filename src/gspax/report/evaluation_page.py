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
from gspax.report.html import render_page
from gspax.run.folders import write_atomically

TEXTS = ("prompt", "answer", "completion")  # in which formulas are drawn
BUDGET = 20_000_000  # characters of completions on a page; the rest is in the .jsonl file
LONGEST = 20_000  # characters of one text; a longer one loses its middle
Row = Mapping[str, object]
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
        f"<pre>{html.escape(chr(10).join(summary))}</pre><p>{html.escape(note)}</p><math hidden></math>{CONTROLS}"
        '<p id=count></p><div id=list></div><button id=more>more</button><script type="application/json" id=data>'
        f"{data}</script><script>{SCRIPT}</script>"
    )
    write_atomically(path, render_page(name, [("", body)]))


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
    """The script's data: rows, in whose texts a number stands for a formula, and (source, tree) of the formulas."""
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
const formula = ([source, tree]) => draw(["math", {title: source}, tree]);
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
let fitting = [], next = 0;
function extend() {
  list.append(...fitting.slice(next, next + PAGE).map(show));
  next += PAGE;
  more.hidden = next >= fitting.length;
}
function refresh() {
  fitting = rows.filter(fits);
  next = 0;
  list.replaceChildren();
  document.getElementById("count").textContent = `${fitting.length} of ${rows.length} completions`;
  extend();
}
form.addEventListener("input", refresh);
form.addEventListener("submit", event => event.preventDefault());
more.addEventListener("click", extend);
refresh();
"""
