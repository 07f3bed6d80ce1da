r"""Reads a final answer as a value: a quantity, a letter of multiple choice, words, several numbers, or a bound.

An answer is split into tokens: numbers, words, commands of LaTeX, and characters. Its *shape* has a character for each,
`n` for a number and `w` for a word, so that `5 feet 6 inches` has the shape `nwnw`. A kind of value is a pattern of
shapes with the vocabulary below. An answer of no other kind is a formula.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from gspax.rewards.exact import evaluate
from gspax.rewards.notation import bare

_LONGEST = 2000  # characters of an answer that has a value
_SCALES = {"dozen": 12, "hundred": 100} | {
    name: 10 ** (3 * i) for i, name in enumerate(("thousand", "million", "billion", "trillion"), 1)
}
_PARTS = ("half", "third", "quarter", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth")
_POWERS = ("squared", "cubed", "factorial")
_NO_UNITS = {  # words after a number that change it
    *("percent", "or", "and", "not", "never", "cannot", "to", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp"),
    *("negative", "minus", "plus", "times", "over", "mod", "modulo", "halves"),
    *(*_SCALES, *_POWERS, *_PARTS, *(f"{word}s" for word in (*_SCALES, *_PARTS))),
}
_CHINESE_SCALES = {*"十百千万萬亿億半多余以"}
_LETTERS = {*"mgshLCF"}  # units of one letter; other letters are variables
# The units of one or two letters that may have a power or follow a slash; other two letters are a product.
_SYMBOLS = {*"mshglL", "cm", "mm", "km", "in", "ft", "yd", "mi", "hr", "kg", "ml", "mL", "lb"}
# Marks and words that a parser drops although they change the meaning; the second only after a number.
_CHANGES = {r"\ne", r"\neq", r"\not", "≠", "!=", "not", "never", "cannot", *_SCALES, *(f"{word}s" for word in _SCALES)}
_CHANGES_A_NUMBER = {*_POWERS, *_PARTS, "halve", "mod", "modulo"}
_BOUND_BEFORE = {"at least", "at most", "more than", "less than", "fewer than", "greater than"}
_COMPARED = ("more", "less", "fewer", "greater", "larger", "smaller", "higher", "lower", "older", "younger")
_BOUND_AFTER = {"at least", "at most"} | {
    f"{link} {word}" for link in ("or", "and") for word in (*_COMPARED, "above", "below", "over", "under")
}

_UPRIGHT = re.compile(r"\\(?:text|textrm|textbf|mbox|mathrm|mathbf|bf)\s?\{([^{}\\]*)\}")
_CURRENCY = re.compile(r"(?:\b(?:US|CA|AU|NZ|HK|SG|[CAS]))?\\?\$|[€£¥₹]|\\(?:pounds|euro)(?![a-zA-Z])|\bRs\.?(?=\s?\d)")
_TOUCHING = re.compile(r"(?<=[\d}])(?![eE][-+]?\d)(?=[a-zA-Z])")  # 2ab is a product, `2 ab` has a unit
_CHINESE = r"[\u3040-\u30ff\u4e00-\u9fff]"
_TOKEN = re.compile(
    r"\\[a-zA-Z]+|\\.|\.?\d+(?:[.,_'’]\d+)*(?:[eE][-+]?\d{1,3}(?![a-zA-Z_])|\.(?!\.))?|[a-zA-Z][a-zA-Z']*"
    rf"|{_CHINESE}+|\.\.\.|!=|--|[.:]\s|\S"
)
_SHAPES = {
    **dict.fromkeys((r"\pmod", r"\bmod", r"\mod", "mod", "modulo"), "m"),
    **dict.fromkeys((r"\ge", r"\geq", r"\geqslant", r"\gt", r"\le", r"\leq", r"\leqslant", r"\lt", *"≥≤>"), "<"),
    **dict.fromkeys((r"\ldots", r"\cdots", r"\dots", r"\dotsb", r"\dotsc", r"\dotsm", r"\dotsi", "..."), "…"),
    **dict.fromkeys(("--", "—"), "–"),
    **dict.fromkeys("xX", "x"),  # a word, a variable, or the sign of `5 x 3`
    r"\equiv": "≡",
}
_UNIT_BEGINS = re.compile(rf"(?<=[n}})!])(?:[wx°]|/[wx]|\\{{w|{_CHINESE})")
_RESIDUE = re.compile(r"(?:[wx][≡=])?-?n\(?m\{?n[)}]?")
_SEVERAL = re.compile(r"[wx]{0,6}-?n(?:/n)?\*?(?!xn)[wx][wx,.]*n")
_APART = re.compile(r"(?<![wx^_\\])nn")
_UNIT = re.compile(
    rf"(?:° ?[CF]?|([a-z]+(?: [a-z]+)*)?(?: \^ ([23]))?(?: ?/ ([a-z]+)(?: \^ [23])?)?|{_CHINESE}{{1,4}})", re.IGNORECASE
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}")
_BASED = re.compile(r"([0-9A-Z]+) ?_ ?\{?(\d{1,2})\}?")


@dataclass(frozen=True)
class Quantity:
    """A number, multiplied by the scale after it, and what else its text says."""

    number: Fraction
    is_decimal: bool  # may be rounded
    dozens: bool
    has_unit: bool  # other than a scale such as million


@dataclass(frozen=True)
class Choice:
    """A letter of multiple choice, alone or before its text: `B`, `(B)`, `B) 12`, `B. Paris`."""

    letter: str
    alone: bool


@dataclass(frozen=True)
class Words:
    """Words, in alphabetical order around `and` and `or`; short ones, `xy`, may be a product of variables."""

    parts: tuple[str, ...]
    may_be_product: bool


@dataclass(frozen=True)
class Time:
    """A time of a clock, `3:30`, and `am`, `pm` or nothing."""

    clock: str
    half: str


@dataclass(frozen=True)
class Based:
    """An integer in a stated base, `52_8`; its number is None if there is no such digit or base."""

    digits: str
    base: int
    number: int | None


@dataclass(frozen=True)
class Several:
    """Numbers with words between them, in order: `5 feet 6 inches`, `5 or 6`."""

    numbers: tuple[str, ...]


@dataclass(frozen=True)
class Bound:
    """A bound such as `at least 5` and `5 or more`, or a range such as `4–5`."""


@dataclass(frozen=True)
class Verbatim:
    """A text that equals only itself: a date, a residue `4 mod 7`, a sequence with dots, digits apart."""

    text: str


@dataclass(frozen=True)
class Formula:
    """Anything else, which needs a parser of mathematics."""


Value = Quantity | Choice | Words | Time | Based | Several | Bound | Verbatim | Formula


@dataclass(frozen=True)
class Answer:
    """An answer without looks (in lower case if it consists of words) and what is known of it."""

    text: str
    value: Value = Formula()
    power: int = 0  # of its unit: 2 for `5 cm^2`; 0 if none is written
    is_changed: bool = False  # has something that a parser drops although it changes the meaning


def read(answer: str) -> Answer:
    """Read an answer.

    >>> read("$1,600 per day.").value
    Quantity(number=Fraction(1600, 1), is_decimal=False, dozens=False, has_unit=True)
    >>> read("B) 12").value, read("5 feet 6 inches").value, read("2x + 1").value
    (Choice(letter='B', alone=False), Several(numbers=('5', '6')), Formula())
    """
    text = bare(answer)
    tokens = _scan(text) if len(text) <= _LONGEST else []
    if not tokens:
        return Answer(text)
    shape = "".join(map(_shape, tokens))
    begin = unit.start() if (unit := _UNIT_BEGINS.search(shape)) else len(tokens)
    scale, power = _read_unit(tokens[begin:]) or (0, 0)
    value = _read_choice(tokens) or _read_by_shape(text, tokens, shape)
    value = value or _read_quantity(tokens[:begin], scale, has_unit=scale == 1 and begin < len(tokens))
    if isinstance(value, Words) and all(len(word.strip("'")) > 1 for word in tokens):
        text = text.lower()
    return Answer(text, value or Formula(), power, _is_changed(tokens, shape))


def _scan(text: str) -> list[str]:
    return _TOKEN.findall(_TOUCHING.sub("*", _CURRENCY.sub(" ", _UPRIGHT.sub(r" \1 ", text))))


def _shape(token: str) -> str:
    """Return the character that stands for a token in a shape: that of the table, `n`, `w`, or its first."""
    first = token.lstrip(".")[:1]
    is_word = first.isascii() and first.isalpha()
    return _SHAPES.get(token) or ("n" if first.isdecimal() else "w" if is_word else token[0])


def _read_quantity(tokens: list[str], scale: int, *, has_unit: bool) -> Quantity | None:
    number = evaluate(" ".join(tokens)) if scale else None
    is_decimal = any("." in token for token in tokens)
    return None if number is None else Quantity(number * scale, is_decimal, dozens=scale == 12, has_unit=has_unit)


def _read_unit(tokens: list[str]) -> tuple[int, int] | None:
    """Return the scale and the power of a unit: (12, 0) of `dozen eggs`, (1, 2) of `cm^2`; None of another text."""
    text = " ".join(token.strip() for token in tokens).replace("} {", "/")  # of \frac{m}{s}
    match = _UNIT.fullmatch(" ".join(part for part in text.split() if part not in ("{", "}", ".", r"\frac")))
    if match is None or _CHINESE_SCALES & {*match[0]}:
        return None
    names, power, divisor = (match[1] or "").split(), int(match[2] or 0), match[3]
    scale = _SCALES.get(names[0].lower().removesuffix("s"), 1) if names else 1
    names = names[1:] if scale > 1 else names
    exact = (names[-1:] if power else []) + ([divisor] if divisor else [])
    is_known = all(len(word) > 1 or (word in _LETTERS and len(names) == 1) for word in names)
    is_known &= all(len(word) > 2 or word in _SYMBOLS for word in exact)
    return (scale, power) if is_known and not _NO_UNITS & {word.lower() for word in names + exact} else None


def _is_changed(tokens: list[str], shape: str) -> bool:
    after_number = {token.removesuffix("s") for before, token in zip(shape, tokens[1:], strict=False) if before == "n"}
    return bool(_CHANGES & {*tokens} or _CHANGES_A_NUMBER & after_number)


def _read_choice(tokens: list[str]) -> Choice | None:
    match tokens[1:] if tokens[0].lower() in ("option", "choice") else tokens:
        case [letter] | ["(", letter, ")"] | [letter, ")"] if _is_letter(letter):
            return Choice(letter, alone=True)
        case ["(", letter, ")", *text] | [letter, ")" | ". " | ": ", *text] if _is_letter(letter):
            others = any(_is_letter(each) and after in (")", ". ", ": ") for each, after in pairwise(text))
            return None if others or text[:1] in ([","], ["or"], ["and"]) else Choice(letter, alone=False)
    return None


def _is_letter(token: str) -> bool:
    return len(token) == 1 and "A" <= token <= "Z"


def _read_by_shape(text: str, tokens: list[str], shape: str) -> Value | None:
    """Read any kind but a choice and a quantity."""
    numbers = [token for token, kind in zip(tokens, shape, strict=True) if kind == "n"]
    if {*shape} <= {"w", "x"} and "\\" not in text:
        parts = tuple(sorted(re.split(" (?:and|or) ", text.lower())))
        return Words(parts, may_be_product=not re.search(r"(?i)[a-z]{3}|\bno\b", text))
    if shape[:3] == "n:n" and tokens[3:] in ([], ["am"], ["pm"]) and len(tokens[0]) < 3 and len(tokens[2]) == 2:
        return Time(":".join(numbers), "".join(tokens[3:]))
    if "≡" in shape or "m" in shape:
        if _RESIDUE.fullmatch(shape) and all(number.isdecimal() for number in numbers) and int(numbers[1]):
            return Verbatim(f"{int(numbers[0]) * (-1 if '-' in shape else 1) % int(numbers[1])} mod {int(numbers[1])}")
        return Verbatim("".join(token for token in tokens if token not in "{}"))
    if _SEVERAL.match(shape):
        return Several(tuple(sorted(str(evaluate(number)) for number in numbers)))
    if "…" in shape:
        return Verbatim("".join("…" if kind == "…" else token for token, kind in zip(tokens, shape, strict=True)))
    if _is_bound(tokens, shape):
        return Bound()
    if based := _BASED.fullmatch(text):
        digits, base = based[1], int(based[2])
        is_number = 2 <= base <= 36 and all(int(digit, 36) < base for digit in digits)
        return Based(digits, base, int(digits, base) if is_number else None)
    return Verbatim(text) if _APART.search(shape) or _DATE.fullmatch(text) else None


def _is_bound(tokens: list[str], shape: str) -> bool:
    """Return whether an answer is a bound, `at least 5` or `5 or more apples`, or a range, `4–5`."""
    shape = shape.rstrip(")]}!?")
    words = [token.lower() for token in tokens[: len(shape)]]
    if shape[:1] == "<" or " ".join(words[:2]) in _BOUND_BEFORE or "n–n" in shape or shape.endswith("n+"):
        return True
    after = not _BOUND_AFTER.isdisjoint((" ".join(words[-2:]), " ".join(words[-3:-1])))
    return shape[-1:] in ("w", "x") and (after or not {"minimum", "maximum", "plus"}.isdisjoint(words[-2:]))
