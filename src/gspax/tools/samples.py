"""Implements `gspax samples`: shows completions of a run in the terminal, as a table or as records."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspax.commands.arguments import Parser, at_least, require_directory, subcommand_parser
from gspax.errors import UserError
from gspax.storage.paths import to_path

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from gspax.run.directory import RunDir

Row = dict[str, Any]  # of a file of samples, with its `step` and its `source`
Cells = dict[str, "str | Text"]  # what is shown of a row, by the name of its column
SHOWN = 20  # rows without --best or --worst
LONGEST = 600  # characters of a text
WIDE = 140  # columns of a terminal that has room for a table
LINE = 40  # characters; if a text is longer, an empty line separates the rows
TEXTS = ("prompt", "answer", "completion", "note")  # columns that are wrapped


def make_parser() -> Parser:
    parser = subcommand_parser(
        "samples",
        "Show completions of a run with reward, advantage, and length, by default of the newest rollout whose samples "
        "were written.",
        "gspax samples runs/sort --worst 5\n  gspax samples runs/sort --problem 4206=",
    )
    parser.add_argument("workdir", type=to_path, metavar="DIR", help="the run directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=at_least(0), metavar="N", help="completions of step N; 0: held-out ones before training"
    )
    which.add_argument("--problem", metavar="TEXT", help="the problem whose prompt is or contains TEXT, over all steps")
    parser.add_argument("--server", type=at_least(1), metavar="N", help="only completions with tokens of server N")
    parser.add_argument("--contains", metavar="TEXT", help="only completions that contain this text")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", type=at_least(1), metavar="N", help="the N with the highest rewards")
    order.add_argument("--worst", type=at_least(1), metavar="N", help="the N with the lowest rewards")
    parser.add_argument("--json", action="store_true", help="print JSON lines with every field instead of texts")
    return parser


def execute(options: argparse.Namespace) -> int:
    require_directory(options.workdir)
    from gspax.run.directory import RunDir
    from gspax.run.record import to_line
    from gspax.tools.terminal import make_console

    files = [*find_files(run := RunDir(options.workdir))]
    if not files:
        raise UserError(f"{run.path}: wanted the directory of a run with completions, {run.samples.name} has none")
    if options.problem is not None:
        rows = select_problem([*read(files)], options.problem)
    else:
        rows = select_step(files, options.step)
    if options.server is not None:
        rows = select_server(rows, options.server)
    if options.contains is not None:
        rows = [row for row in rows if options.contains in row["completion"]]
        if not rows:
            raise UserError(f"--contains: wanted a text of one of these completions, {options.contains!r} is in none")
    if count := options.best or options.worst:
        rows = sorted(rows, key=lambda row: row["reward"], reverse=bool(options.best))[:count]
    if options.json:
        print("".join(map(to_line, rows)), end="")
        return 0
    console, left = make_console(), 0
    if not count and options.problem is None:
        left, rows = max(0, len(rows) - SHOWN), rows[:SHOWN]
    shown = make_cells(rows)
    has_lines = any("\n" in str(cells[name]) for cells in shown for name in TEXTS)
    layout = make_records if has_lines or console.width < WIDE else make_table
    console.print(layout(shown), soft_wrap=False)
    if left:
        console.print(f"and {left} more of this step: --best N, --worst N, --json")
    if options.problem is not None and len(rows) > 1:
        console.print(f"step {rows[0]['step']} -> step {rows[-1]['step']}: ", end="")
        console.print(mark_changes(str(rows[0]["completion"]), str(rows[-1]["completion"])))
    return 0


def find_files(run: RunDir) -> Iterator[tuple[int, str, Path]]:
    """Yield (step, source, path) of each file of completions, in the order of the steps."""
    from gspax.run.directory import step_of

    found = [(0, "held-out", run.before)]
    for path in run.samples.glob("step_*.jsonl"):
        if (step := step_of(path.stem)) is not None:
            found.append((step, "train", path))
    for path in run.tasks.glob("step_*/*.jsonl"):
        if (step := step_of(path.parent.name)) is not None:
            found.append((step, path.stem, path))
    last = max(step for step, source, _ in found if source in ("train", "held-out"))
    found.append((last, "held-out", run.after))  # by the newest policy, which is evaluated when samples are written
    yield from sorted((item for item in found if item[2].exists()), key=lambda item: item[0])


def read(files: Sequence[tuple[int, str, Path]]) -> Iterator[Row]:
    """Yield the completions of the files, without foreign rows."""
    from gspax.run.record import read_completions

    for step, source, path in files:
        for row in read_completions(path):
            yield {**row, "step": step, "source": source}


def select_step(files: Sequence[tuple[int, str, Path]], step: int | None) -> list[Row]:
    """Return the training rollout of a step (default: the newest), for step 0 the held-out completions before it."""
    own = [item for item in files if item[1] == "train" or item[0] == 0]
    chosen = [item for item in own if item[0] == (own[-1][0] if step is None else step)]
    if rows := [*read(chosen)]:
        return rows
    if not own:
        raise UserError("wanted completions of a training step, there are only those of evaluations")
    steps = ", ".join(str(item[0]) for item in own)
    raise UserError(f"--step: wanted a step whose samples were written ({steps}), got {step}")


def select_problem(rows: Sequence[Row], text: str) -> list[Row]:
    """Return the rows of the problem with this prompt, or with the only prompt that contains it."""
    prompts = {row["prompt"]: None for row in rows}
    near = [text] if text in prompts else [prompt for prompt in prompts if text in prompt]
    if len(near) != 1:
        some = ", ".join(repr(prompt[:60]) for prompt in (near or [*prompts])[:5])
        raise UserError(
            f"--problem: wanted a text of one of the {len(prompts)} prompts, {text!r} is in {len(near)}: {some}"
        )
    return [row for row in rows if row["prompt"] == near[0]]


def select_server(rows: Sequence[Row], number: int) -> list[Row]:
    """Return the completions that a server sampled, or a part of."""
    if chosen := [row for row in rows if number in list_servers(row)]:
        return chosen
    servers = ", ".join(map(str, sorted({one for row in rows for one in list_servers(row)}))) or "none"
    raise UserError(f"--server: wanted a server that sampled one of these completions ({servers}), got {number}")


def list_servers(row: Row) -> list[int]:
    """Return the numbers of the servers that sampled a completion; none without servers."""
    servers = row.get("servers")
    return [one for one in servers if isinstance(one, int)] if isinstance(servers, list) else []


def make_cells(rows: Sequence[Row]) -> list[Cells]:
    """Format each row as cells; prompt and answer are empty where they repeat the row above."""
    from gspax.errors import printable
    from gspax.tools.terminal import dim_thinking

    shown: list[Cells] = []
    before = None
    for row in rows:
        is_new, before = row["prompt"] != before, row["prompt"]
        notes = [str(row.get(name) or "") for name in ("reason", "error")]
        notes = ["" if row.get("finished", True) else "truncated", *notes]
        cells: Cells = {
            "step": str(row["step"]),
            "source": row["source"],
            "reward": f"{row['reward']:.3g}",
            "advantage": f"{advantage:+.2f}" if isinstance(advantage := row.get("advantage"), int | float) else "",
            "length": str(row.get("length", "")),
            "server": ", ".join(map(str, list_servers(row))),
            "prompt": printable(shorten(row["prompt"])) if is_new else "",
            "answer": printable(shorten(str(row.get("answer", "")))) if is_new else "",
            "completion": dim_thinking(shorten(row["completion"])),
            "note": printable(", ".join(filter(None, notes))),
        }
        shown.append(cells)
    return shown


def make_table(shown: Sequence[Cells]) -> Table:
    """Make a table without empty columns."""
    from rich import box
    from rich.table import Table

    names = [name for name in shown[0] if any(cells[name] for cells in shown)] if shown else []
    has_long = any(len(cells[name]) > LINE for cells in shown for name in names)
    table = Table(box=box.SIMPLE_HEAD, leading=int(has_long))
    for name in names:
        table.add_column(name, no_wrap=name not in TEXTS, overflow="fold" if name in TEXTS else "ellipsis")
    for cells in shown:
        table.add_row(*[cells[name] for name in names])
    return table


def make_records(shown: Sequence[Cells]) -> Group:
    """Make a line of numbers for each row, with its texts below in the full width."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    parts: list[str | Padding] = []
    for cells in shown:
        length = f"{cells['length']} token{'s' if cells['length'] != '1' else ''}" if cells["length"] else ""
        numbers = [f"{name} {cells[name]}" if cells[name] else "" for name in ("reward", "advantage", "server")]
        head = [f"step {cells['step']}", str(cells["source"]), *numbers, length, str(cells["note"])]
        texts = Table.grid(padding=(0, 2, 0, 0))
        texts.add_column(no_wrap=True)
        texts.add_column(overflow="fold")
        for name in ("prompt", "answer", "completion"):
            if cells[name] or name == "completion":
                texts.add_row(name, cells[name])
        parts += [*([""] if parts else []), " · ".join(filter(None, head)), Padding(texts, (0, 0, 0, 2))]
    return Group(*parts)


def shorten(text: str) -> str:
    """Return the beginning and the end of a long text."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} […] {text[-LONGEST // 2 :]}"


def mark_changes(before: str, after: str) -> Text:
    """Mark the changes from `before` to `after`: removed words as [-words-] in red, new ones as {+words+} in green."""
    from rich.text import Text

    from gspax.errors import printable

    old, new = (re.findall(r"\s+|\w+|[^\w\s]", shorten(text)) for text in (before, after))
    marked = Text()
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        gone, come = printable("".join(old[i:j])), printable("".join(new[k:m]))
        if kind == "equal":
            marked.append(come)
            continue
        marked.append(f"[-{gone}-]" if gone else "", style="red").append(f"{{+{come}+}}" if come else "", style="green")
    return marked
