r"""Converts the formulas of a text to MathML, which browsers draw without a script, with latex2mathml.

    split(r"so $x$.")  ->  ["so ", Formula(r"$x$", ("mi", {}, "x")), "."]

Formulas stand between `$…$`, `$$…$$`, `\(…\)` or `\[…\]`, or are a bare `\boxed{…}`. A dollar sign is a price, not a
delimiter, if it stands before a space, or if as the closing one it follows a space or precedes a digit.

The texts come from a model: only tags and attributes of MathML that browsers draw are kept, and a formula with a part
that latex2mathml would drop or show as a command stays source text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias
from xml.etree.ElementTree import Element

from latex2mathml.converter import Converter

# (tag, attributes, child or text, …)
Tree: TypeAlias = "tuple[str, dict[str, str], *tuple[Tree | str, ...]]"

_LONGEST = 1000  # characters of a formula
_DEEPEST = 40  # levels of nesting
_FORMULA = re.compile(
    rf"""\$\$(?P<dollars>.{{1,{_LONGEST}}}?)\$\$ | \\\[(?P<display>.{{1,{_LONGEST}}}?)\\\]
    | \\\((?P<inline>.{{1,{_LONGEST}}}?)\\\)
    | (?<![\\$])\$(?![\s$])(?P<dollar>[^$\n]{{0,{_LONGEST}}}?[^\s\\$])\$(?![\d$])
    | (?P<box>\\boxed\s?(?=\{{))""",
    re.DOTALL | re.VERBOSE,
)
# a comment, a control character, a macro, an environment that is no formula
_REFUSED = re.compile(r"(?<!\\)%|[\x00-\x08\x0b-\x1f]|\\(?:re)?newcommand|\\def\b|\\begin\{(?:asy|tikzpicture)\}")
_TAGS = {"mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "mfrac", "msqrt", "mroot", "mstyle", "mphantom"}
_TAGS |= {"msub", "msup", "msubsup", "munder", "mover", "munderover", "mmultiscripts", "mprescripts", "none"}
_TAGS |= {"mtable", "mtr", "mtd"}
_ATTRIBUTES = {"mathvariant", "stretchy", "fence", "form", "accent", "minsize", "maxsize", "linethickness"}
_ATTRIBUTES |= {"displaystyle", "scriptlevel", "columnalign", "rowspacing", "columnspacing"}
_VALUE = re.compile(r"-?[a-z0-9. -]{1,20}")
_SPACE = re.compile(r"-?[0-3](\.\d+)?em")  # small, so that no text is pushed off the page
_THIN = {"negativethinmathspace": "-0.167em"}
_CHILDREN = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}


@dataclass(frozen=True)
class Formula:
    """A formula: its source with delimiters, and its MathML."""

    source: str
    tree: Tree


def split(text: str) -> list[str | Formula]:
    """Split a text into plain text and formulas, in order; joined, their sources are the text."""
    parts: list[str | Formula] = []
    done = 0
    for start, end, inner in _find(text):
        tree = convert(inner)
        if tree is not None:
            parts += [text[done:start]] if start > done else []
            parts.append(Formula(text[start:end], tree))
            done = end
    return [*parts, text[done:]] if done < len(text) or not parts else parts


def convert(source: str) -> Tree | None:
    """Convert a formula without delimiters to a tree; None if it cannot be converted."""
    if not source.strip() or _REFUSED.search(source):
        return None
    try:
        (row,) = Converter().convert_to_element(source.replace("{aligned}", "{align*}"))
        return _take(row)
    except Exception:  # latex2mathml raises exceptions of many types, and a model can write anything
        return None


def render(tree: Tree) -> str:
    """Render a tree as the content of a `<math>` element."""
    tag, attributes, *children = tree
    inner = "".join(html.escape(child) if isinstance(child, str) else render(child) for child in children)
    opening = " ".join([tag, *(f'{name}="{value}"' for name, value in attributes.items())])
    return f"<{opening}>{inner}</{tag}>"


def _take(element: Element, level: int = 0) -> Tree:
    """Convert an element of latex2mathml to a tree of permitted tags and attributes. ValueError for anything else."""
    tag, attributes, text = element.tag, element.attrib, html.unescape(element.text or "")
    if level > _DEEPEST:
        raise ValueError("too deep")
    if tag == "menclose" and attributes["notation"] == "box":  # browsers do not draw it
        if not any(inner.text for inner in element.iter()):
            raise ValueError("an empty box, as in an instruction")
        return ("mrow", {"class": "boxed"}, *(_take(child, level + 1) for child in element))
    if tag not in _TAGS or re.match(r"\\.", text) or len(element) != _CHILDREN.get(tag, len(element)):
        raise ValueError(f"{tag} {text}")
    if element.text in ("}", "&"):  # stray ones; latex2mathml writes those that TeX draws as entities
        raise ValueError(text)
    if tag == "mspace":
        width = _THIN.get(attributes["width"], attributes["width"])
        if not _SPACE.fullmatch(width):
            raise ValueError(width)
        return ("mspace", {"width": width})
    if tag == "mrow" and len(element) == 1 and not attributes:
        return _take(element[0], level)
    kept = {name: value for name, value in attributes.items() if name in _ATTRIBUTES and _VALUE.fullmatch(value)}
    children: list[Tree | str] = [text] if text else []
    children += [_take(child, level + 1) for child in element]
    return (tag, kept, *children)


def _find(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the start, the end and the inner text of each formula."""
    position = 0
    while (match := _FORMULA.search(text, position)) is not None:
        start, position = match.span()
        if match["box"] is None:
            assert match.lastgroup is not None
            yield start, position, match[match.lastgroup]
        elif (end := _closing(text, position)) is not None:
            yield start, end, text[start:end]
            position = end


def _closing(text: str, opening: int) -> int | None:
    """Return the position after the brace that closes the brace at `opening`, or None."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[opening : opening + _LONGEST], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return opening + brace.end()
    return None
