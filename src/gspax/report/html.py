"""Self-contained HTML pages: no network; untrusted text is escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence

from gspax.experiment.description import show
from gspax.report import mathml

SHOWN_CHARACTERS = 1000  # of a text

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a202c; background: #f7fafc; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.headline { font-size: 1.15rem; margin: .6rem 0 1rem; color: inherit; }
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
.boxed { border: 1px solid; padding: .15em .3em; }
pre { font: .85rem/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }
form { display: flex; flex-wrap: wrap; gap: .6rem 1rem; position: sticky; top: 0; background: #f7fafc; }
label, p { color: #4a5568; font-size: .9rem; }
article { background: #fff; border: 1px solid #e2e8f0; border-radius: 8px; padding: .6rem .9rem; margin: .6rem 0; }
article b { border-radius: 9px; padding: 0 .5em; }
article summary { font-size: .9rem; margin: 0; }
math { font-size: 1.1rem; }
"""


def render_page(name: str, sections: list[tuple[str, str]]) -> str:
    """The page, with the sections that have a body under their headings."""
    bodies = "".join((f"<h2>{heading}</h2>" if heading else "") + body for heading, body in sections if body)
    title = html.escape(name)
    return (
        '<!doctype html><html lang=en><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>"
        f"<body><main><h1>{title}</h1>{bodies}</main></body></html>\n"
    )


def render_note(text: str) -> str:
    """A paragraph in small print."""
    return f"<p class=note>{html.escape(text)}</p>"


def render_text(value: object) -> str:
    """Untrusted text as HTML: escaped, truncated, with escape sequences for unprintable characters except line ends."""
    return _render(str(value), lambda text: [text])


def render_prose(text: str) -> str:
    """Untrusted text as HTML, with the formulas drawn; a tooltip shows a formula's source."""
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
    """A table of cells that are HTML already, under titles that are text."""
    lines = ["".join(f"<th>{html.escape(title)}</th>" for title in head)]
    lines += ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    return f"<div class=wide><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table></div>"


def render_settings(rows: Mapping[str, object]) -> str:
    """A folded table of names and values; empty if there are none."""
    if not rows:
        return ""
    cells = [(render_text(name), render_text(show(value))) for name, value in rows.items()]
    return f"<details><summary>{len(rows)} settings</summary>{render_table(('setting', 'value'), cells)}</details>"
