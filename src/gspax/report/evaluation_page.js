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
    && (!f.text || (row.prompt + "\n" + row.completion).toLowerCase().includes(f.text.toLowerCase()));
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
