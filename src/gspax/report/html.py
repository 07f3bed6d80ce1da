"""Builds self-contained HTML pages: no network; untrusted text is escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from gspax.experiment.description import show
from gspax.report import mathml

SHOWN_CHARACTERS = 1000  # characters shown of a text

STYLE = Path(__file__).with_name("page.css")


def render_page(name: str, sections: list[tuple[str, str]]) -> str:
    """Render a page; sections without a body are left out."""
    bodies = "".join((f"<h2>{heading}</h2>" if heading else "") + body for heading, body in sections if body)
    title = html.escape(name)
    return (
        '<!doctype html><html lang=en><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body><main><h1>{title}</h1>{bodies}</main></body></html>\n"
    )


def render_note(text: str) -> str:
    """Render a paragraph in small print."""
    return f"<p class=note>{html.escape(text)}</p>"


def render_text(value: object) -> str:
    """Render untrusted text: escaped, truncated, with escape sequences for unprintable characters except newlines."""
    return _render(str(value), lambda text: [text])


def render_lines(text: str) -> str:
    """Render a text in full, line by line: escaped, with escape sequences for unprintable characters."""
    return f"<pre>{_escape(text)}</pre>"


def render_prose(text: str) -> str:
    """Render untrusted text with its formulas drawn; a tooltip shows a formula's source."""
    return _render(text, mathml.split)


def _render(text: str, split: Callable[[str], Iterable[str | mathml.Formula]]) -> str:
    omitted = f"… ({len(text) - SHOWN_CHARACTERS} more characters)" if len(text) > SHOWN_CHARACTERS else ""
    parts = (
        _escape(part)
        if isinstance(part, str)
        else f'<math title="{_escape(part.source)}">{mathml.render(part.tree)}</math>'
        for part in split(text[:SHOWN_CHARACTERS])
    )
    return f"<code>{''.join(parts)}</code>{omitted}"


def _escape(text: str) -> str:
    shown = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return html.escape("".join(shown))


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table: the titles are text, the cells are HTML."""
    lines = ["".join(f"<th>{html.escape(title)}</th>" for title in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<div class=wide><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table></div>"


def render_settings(rows: Mapping[str, object]) -> str:
    """Render a folded table of names and values; empty if there are none."""
    if not rows:
        return ""
    cells = [(render_text(name), render_text(show(value))) for name, value in rows.items()]
    return f"<details><summary>{len(rows)} settings</summary>{render_table(('setting', 'value'), cells)}</details>"
