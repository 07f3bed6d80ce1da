r"""TeX as MathML, which browsers draw without a script: the part of it that answers to mathematical problems use.

    split(r"so $\frac{1}{2}$.")  ->  ["so ", Formula(r"$\frac{1}{2}$", ("mfrac", ("mn", "1"), ("mn", "2"))), "."]

Formulas stand between `$…$`, `$$…$$`, `\(…\)` or `\[…\]`, or are a bare `\boxed{…}`. Fractions, powers, roots, Greek
letters, functions, fences, matrices, texts and the symbols of `_SYMBOLS` are converted. Whatever else occurs in a
formula leaves all of it as its source. A dollar sign is a price, not a delimiter, where it stands before a space or
after one that closes, or a digit follows.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

# (tag, text) or (tag, child, …); the tag "boxed" is a row with a border
Tree: TypeAlias = tuple[Any, ...]

_LONGEST = 1000  # characters of a formula
_DEEPEST = 40  # levels of nesting
_FORMULA = re.compile(
    rf"""\$\$(?P<dollars>.{{1,{_LONGEST}}}?)\$\$ | \\\[(?P<display>.{{1,{_LONGEST}}}?)\\\]
    | \\\((?P<inline>.{{1,{_LONGEST}}}?)\\\)
    | (?<![\\$])\$(?![\s$])(?P<dollar>[^$\n]{{0,{_LONGEST}}}?[^\s\\$])\$(?![\d$])
    | (?P<box>\\boxed\s?(?=\{{))""",
    re.DOTALL | re.VERBOSE,
)
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:[.,]\d+)*|'+|\s+|.", re.DOTALL)

_GREEK = """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon
phi chi psi omega"""
_CAPITALS = {"Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Xi": "Ξ", "Pi": "Π", "Sigma": "Σ"}
_CAPITALS |= {"Phi": "Φ", "Psi": "Ψ", "Omega": "Ω"}
_LETTERS = dict(zip(_GREEK.split(), "αβγδϵζηθικλμνξπρστυϕχψω", strict=True)) | _CAPITALS
_LETTERS |= {"varepsilon": "ε", "varphi": "φ", "vartheta": "ϑ", "ell": "ℓ", "infty": "∞", "emptyset": "∅", "Re": "ℜ"}
_LETTERS |= {"angle": "∠", "triangle": "△", "prime": "′", "partial": "∂", "nabla": "∇", "hbar": "ℏ"}
_SYMBOLS = {"cdot": "⋅", "times": "×", "div": "÷", "pm": "±", "mp": "∓", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥"}
_SYMBOLS |= {"ne": "≠", "neq": "≠", "lt": "<", "gt": ">", "approx": "≈", "equiv": "≡", "sim": "∼", "cong": "≅"}
_SYMBOLS |= {"in": "∈", "notin": "∉", "cup": "∪", "cap": "∩", "subset": "⊂", "subseteq": "⊆", "setminus": "∖"}
_SYMBOLS |= {"to": "→", "rightarrow": "→", "Rightarrow": "⇒", "implies": "⟹", "iff": "⟺", "mapsto": "↦", "mid": "∣"}
_SYMBOLS |= {"ldots": "…", "dots": "…", "cdots": "⋯", "circ": "∘", "perp": "⊥", "parallel": "∥", "star": "⋆"}
_SYMBOLS |= {"lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "langle": "⟨", "rangle": "⟩", "ast": "∗"}
_SYMBOLS |= {"forall": "∀", "exists": "∃", "land": "∧", "lor": "∨", "neg": "¬", "therefore": "∴", "colon": ":"}
_SYMBOLS |= {"%": "%", "$": "$", "{": "{", "}": "}", "&": "&", "#": "#", "_": "_", "|": "‖", "backslash": "\\"}
_LARGE = {"sum": "∑", "prod": "∏", "int": "∫", "bigcup": "⋃", "bigcap": "⋂", "lim": "lim", "max": "max", "min": "min"}
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "ln", "exp"}
_FUNCTIONS |= {"gcd", "lcm", "det", "deg", "dim", "mod", "arg"}
_TEXTS = {"text", "textbf", "textit", "textrm", "mathrm", "mathbf", "mathit", "operatorname", "mbox", "mathsf"}
_SPACES = {",": ".17em", ";": ".28em", ":": ".22em", " ": ".3em", "quad": "1em", "qquad": "2em"}
_NOTHING = {"!", "displaystyle", "textstyle", "limits", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "bigg", "Bigg"}
_ACCENTS = {"overline": "‾", "bar": "‾", "hat": "^", "widehat": "^", "vec": "→", "overrightarrow": "→", "tilde": "~"}
_FENCES = {"matrix": "  ", "pmatrix": "()", "bmatrix": "[]", "vmatrix": "||", "cases": "{ ", "aligned": "  "}
_FENCES |= {"align*": "  ", "array": "  ", "smallmatrix": "  "}

_LEAVES: dict[str, Tree] = {name: ("mi", letter) for name, letter in _LETTERS.items()}
_LEAVES |= {name: ("mo", symbol) for name, symbol in (_SYMBOLS | _LARGE).items()}
_LEAVES |= {name: ("mi", name) for name in _FUNCTIONS} | {name: ("mspace", width) for name, width in _SPACES.items()}


@dataclass(frozen=True)
class Formula:
    """A formula: its source with delimiters, and what it is converted to."""

    source: str
    tree: Tree


def split(text: str) -> list[str | Formula]:
    """A text and the formulas in it, in order; together their sources are the text."""
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
    """A formula without delimiters as a tree; None if it has something that is not converted."""
    parser = _Parser(_TOKEN.findall(source))
    try:
        tree = _row(list(parser.read()))
    except _UnknownError:
        return None
    return tree if tree != ("mrow",) else None


def render(tree: Tree) -> str:
    """A tree as the inside of a `<math>` element."""
    tag, *children = tree
    if tag == "mspace":
        return f'<mspace width="{children[0]}"></mspace>'
    inner = "".join(html.escape(each) if isinstance(each, str) else render(each) for each in children)
    return f"<mrow class=boxed>{inner}</mrow>" if tag == "boxed" else f"<{tag}>{inner}</{tag}>"


def _find(text: str) -> Iterator[tuple[int, int, str]]:
    """Where formulas start and end, and what is between their delimiters."""
    position = 0
    while (found := _FORMULA.search(text, position)) is not None:
        start, position = found.span()
        if found["box"] is None:
            assert found.lastgroup is not None
            yield start, position, found[found.lastgroup]
        elif (end := _closing(text, position)) is not None:
            yield start, end, text[start:end]
            position = end


def _closing(text: str, opening: int) -> int | None:
    """The position after the brace that closes the one at `opening`."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[opening : opening + _LONGEST], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return opening + brace.end()
    return None


class _UnknownError(Exception):
    """A formula has something that is not converted."""


class _Parser:
    def __init__(self, tokens: list[str]):
        self._tokens, self._next, self._depth = tokens, 0, 0

    def read(self, *ends: str) -> Iterator[Tree]:
        """Items up to one of the tokens `ends`, which is taken, or without any to the end of the formula."""
        while (token := self._peek()) not in ends:
            if token is None and not ends:
                return
            if (item := self._with_scripts()) is not None:
                yield item
        self._next += 1

    def _peek(self) -> str | None:
        while self._next < len(self._tokens) and self._tokens[self._next].isspace():
            self._next += 1
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self, wanted: str | None = None) -> str:
        token = self._peek()
        if token is None or (wanted is not None and token != wanted):
            raise _UnknownError
        self._next += 1
        return token

    def _with_scripts(self) -> Tree | None:
        """An item and its subscript and superscript; None for what draws nothing."""
        base = ("mrow",) if self._peek() in ("^", "_") else self._item()
        scripts: dict[str, Tree] = {}
        while base is not None and (self._peek() or " ")[0] in "^_'":
            mark = self._take()
            name = "_" if mark == "_" else "^"
            if name in scripts:
                raise _UnknownError
            scripts[name] = ("mo", "′" * len(mark)) if mark[0] == "'" else self._argument()
        if not scripts:
            return base
        large = base in [("mo", symbol) for symbol in _LARGE.values()]
        tag = {"_": "munder" if large else "msub", "^": "mover" if large else "msup"}.get("".join(scripts))
        tag = tag or ("munderover" if large else "msubsup")
        return (tag, base, *(scripts[name] for name in "_^" if name in scripts))

    def _argument(self) -> Tree:
        """A group in braces, or one item. `\\frac12` and `x^12` take one digit."""
        token = self._peek()
        if token is not None and token[0].isdigit() and len(token) > 1:
            self._tokens[self._next] = token[1:]
            return ("mn", token[0])
        if (item := self._item()) is None:
            raise _UnknownError
        return item

    def _item(self) -> Tree | None:
        if self._depth == _DEEPEST:
            raise _UnknownError
        self._depth += 1
        item = self._read_item(self._take())
        self._depth -= 1
        return item

    def _read_item(self, token: str) -> Tree | None:
        if token == "{":
            return _row(list(self.read("}")))
        if token.startswith("\\"):
            return self._command(token[1:])
        if token[0].isdigit():
            return ("mn", token)
        if token.isalpha():
            return ("mi", token)
        if token in "}^_&#~%$" or not token.isprintable():
            raise _UnknownError
        return ("mo", "−" if token == "-" else token)

    def _command(self, name: str) -> Tree | None:
        if name in _LEAVES:
            return _LEAVES[name]
        if name in _TEXTS:
            return ("mtext", self._raw())
        if name in _ACCENTS:
            return ("mover", self._argument(), ("mo", _ACCENTS[name]))
        if name in _NOTHING:
            return None
        return self._structure(name)

    def _structure(self, name: str) -> Tree:
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return ("mfrac", self._argument(), self._argument())
        if name == "pmod":
            return _fenced("()", ("mi", "mod"), self._argument())
        if name in ("binom", "dbinom", "tbinom"):
            return _fenced("()", ("mtable", *(("mtr", ("mtd", self._argument())) for _ in range(2))))
        if name == "sqrt":
            if self._peek() != "[":
                return ("msqrt", self._argument())
            self._next += 1
            index = _row(list(self.read("]")))
            return ("mroot", self._argument(), index)
        if name in ("boxed", "fbox"):
            return ("boxed", self._argument())
        if name == "left":
            opening = self._fence()
            inside = list(self.read("\\right"))
            return ("mrow", *opening, *inside, *self._fence())
        if name == "begin":
            return self._environment(self._raw())
        raise _UnknownError

    def _fence(self) -> tuple[Tree, ...]:
        token = self._take()
        if token == ".":
            return ()
        symbol = _SYMBOLS.get(token[1:]) if token.startswith("\\") else token
        if symbol is None or symbol not in "()[]{}|‖⌊⌋⌈⌉⟨⟩/<>":
            raise _UnknownError
        return (("mo", symbol),)

    def _environment(self, name: str) -> Tree:
        if name not in _FENCES:
            raise _UnknownError
        if name == "array":
            self._raw()  # the alignment of the columns
        rows: list[list[Tree]] = [[]]
        while True:
            cell: list[Tree] = []
            while (token := self._peek()) not in ("&", "\\\\", "\\end"):
                if token is None:
                    raise _UnknownError
                if (item := self._with_scripts()) is not None:
                    cell.append(item)
            rows[-1].append(("mtd", *cell))
            self._next += 1
            if token == "\\\\":
                rows.append([])
            elif token == "\\end":
                break
        if self._raw() != name:
            raise _UnknownError
        rows = [row for row in rows if row != [("mtd",)]]
        return _fenced(_FENCES[name], ("mtable", *(("mtr", *row) for row in rows)))

    def _raw(self) -> str:
        """The text of a group in braces, spaces included."""
        self._take("{")
        start = self._next
        while self._next < len(self._tokens) and self._tokens[self._next][0] not in "{}$\\":
            self._next += 1
        text = "".join(self._tokens[start : self._next])
        self._take("}")
        return text


def _fenced(fences: str, *items: Tree) -> Tree:
    """A row between two fences; a space is none."""
    left, right = ([("mo", fence)] if fence != " " else [] for fence in fences)
    return ("mrow", *left, *items, *right)


def _row(items: list[Tree]) -> Tree:
    return items[0] if len(items) == 1 else ("mrow", *items)
