r"""Final answers in completions: where they stand, and which of them are equal without computer algebra.

`extract` finds an answer in one of four forms. `compare` decides what strings and rational numbers decide; the rest
needs a parser of mathematics (`gspax.rewards.math`). `extract` takes time linear in the text, whatever a policy writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from gspax.errors import UserError

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"  # of 10
_MIXED_NUMBER = rf"{_DIGITS} \d{{1,15}}/\d{{1,15}}(?!\d)"
_LAST_NUMBER = re.compile(
    rf"(?<![\w.])[-+]?\\?\$?(?:{_MIXED_NUMBER}|(?:{_DIGITS}(?:\.\d+)?|\.\d+){_EXPONENT}(?:/\d+)?)(?:\s*\\?%)?"
)
_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.\d*)?|\.\d+){_EXPONENT}")
_FRACTION = re.compile(rf"([-+]?)({_DIGITS})?\\?frac(?:\{{([-+]?\d+)\}}\{{(\d+)\}}|(\d)(\d))|([-+]?\d+)/(\d+)")
_BASED = re.compile(r"([0-9A-Z]+)_(?:\{(\d{1,2})\}|(\d{1,2}))")
_UNIT = re.compile(r"(?<=[\d.}])(?:\s+[a-z]{2,})+\.?$", re.IGNORECASE)
_POWER_OF_UNIT = re.compile(r"\\(?:mbox|text|textrm|mathrm) ?\{[^{}]*[a-z.] *\} ?\^ ?\{?(\d)\}?$", re.IGNORECASE)
# Words that change a number, or that say it is not one. As units they would be dropped.
_SCALES = ("dozen", "hundred", "thousand", "million", "billion", "trillion")
_PARTS = ("half", "third", "quarter", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth")
_POWERS = ("squared", "cubed", "factorial")
_NOT_UNITS = {
    *("percent", "or", "and", "not", "to", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp"),
    *("negative", "minus", "plus", "times", "over", "mod", "modulo", "halves"),
    *(*_SCALES, *_POWERS, *_PARTS, *(f"{part}s" for part in _PARTS)),
}
# Marks that a parser drops although they change the meaning: an answer with one equals no answer without it.
_CHANGES = re.compile(
    rf"\\neq?(?![a-zA-Z])|\\not(?![a-zA-Z])|≠|!=|\b(?:{'|'.join(_SCALES)})s?\b"
    rf"|\d (?:{'|'.join((*_POWERS, *_PARTS))}|halve|mod(?:ulo)?)s?\b"
)
_SPACES = re.compile(r"(?:\s|\\[,;:! ]|\\(?:quad|left|right)(?![a-zA-Z])|~)+")
_GAP = r"(?:\s|\\[,;: ]|~)++"
_ALONE = r"(?<![\^_\d.a-zA-Z])(?<![a-zA-Z] )"  # digits that are not those of a word, an index or an exponent
_GROUPS = re.compile(rf"{_ALONE}(?<![,/])[1-9]\d{{0,2}}(?:{_GAP}\d{{3}}){{1,6}}+(?![\d/])")
_MIXED = re.compile(
    rf"{_ALONE}(?<!/)(\d{{1,3}}(?:,\d{{3}}){{1,6}}+|\d{{1,15}}+){_GAP}(\d{{1,15}})/(\d{{1,15}})(?![\d/])"
)
_APART = re.compile(rf"{_ALONE}\d++\.? +\.?\d")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def extract(completion: str, *, form: str | None = None) -> str | None:
    r"""The final answer of a completion, or None if there is none.

    Args:
      completion: any text.
      form: "boxed" (the last complete `\boxed{}`), "hash" (the rest of the line after the last `####`), "tag" (the last
        `<answer>…</answer>`), "number" (the last number), or None for the first of these that is there, in this order.
    """
    if form is not None and form not in FORMS:
        raise UserError(f"form: wanted one of {', '.join(FORMS)} or None, got {form!r}")
    for find in FORMS.values() if form is None else (FORMS[form],):
        if (answer := find(completion)) and answer.strip():
            return answer.strip()
    return None


def reference(answer: str) -> str:
    r"""The answer inside a reference solution that ends in `\boxed{}` or `####`; a bare answer as it is."""
    return (_boxed(answer) or _hash(answer) or answer).strip()


def compare(expected: str, answer: str) -> bool | None:
    """Whether two answers are equal, where strings and rational numbers decide it; None where they do not.

    Differences below one part in 10⁵ between a decimal and another number are not decided: one may be rounded. Digits
    with a space between them are a mixed number (`3 1/2`) or groups of three (`1 234`). Others, such as `1 2`, equal
    only themselves; math-verify would add them.
    """
    expected, answer = _bare(expected), _bare(answer)
    if not expected or not answer:
        return False
    if expected == answer:
        return True
    if bool(_CHANGES.search(expected)) != bool(_CHANGES.search(answer)):
        return False
    powers = [match[1] for match in map(_POWER_OF_UNIT.search, (expected, answer)) if match]
    if len(set(powers)) == 2:  # square inches are no cubic inches; a parser drops units with their powers
        return False
    if "_" in expected + answer and (equal := _compare_bases(expected, answer)) is not None:
        return equal
    if _APART.search(expected) or _APART.search(answer):
        return False
    wanted, got = _number(expected), _number(_without_unit(answer))
    if wanted is None or got is None or wanted == got:
        return None if wanted is None or got is None else True
    rounded = "." in expected + answer and abs(wanted - got) <= Fraction(1, 10**5) * max(Fraction(1), abs(wanted))
    return None if rounded else False


def join_digits(answer: str) -> str:
    r"""An answer whose mixed numbers and groups of three digits are written without spaces, as parsers read them.

    >>> join_digits("3 1/2"), join_digits(r"(1\,234, 5 678)"), join_digits("1 2")
    ('3\\frac{1}{2}', '(1234, 5678)', '1 2')
    """

    def write_mixed(number: re.Match[str]) -> str:
        whole, above, below = number.groups()
        return rf"{whole}\frac{{{above}}}{{{below}}}" if int(above) < int(below) else number[0]

    answer = _GROUPS.sub(lambda digits: re.sub(_GAP, "", digits[0]), re.sub(r"\\!\s*", "", answer))
    return _MIXED.sub(write_mixed, answer)


def canonical(answer: str) -> str:
    r"""A text that equal numbers share, for counting answers: `0.5`, `\frac{1}{2}` and `1/2` give `1/2`.

    Other answers are compared as texts, so equal formulas may differ.

    >>> canonical("1,600.0"), canonical(r"$\frac{1}{2}$"), canonical("x + 1.")
    ('1600', '1/2', 'x + 1')
    """
    bare = _bare(answer)
    number = _number(_without_unit(bare))
    return bare if number is None else str(number)


def _boxed(text: str) -> str | None:
    """The content of the last box whose braces close; the innermost if boxes are nested.

    Escaped braces are characters.
    """
    boxes = {match.end() - 1 for match in _BOX.finditer(text)}
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            start = opened.pop()
            if start in boxes and (last is None or start > last[0]):
                last = start, match.start()
    return text[last[0] + 1 : last[1]] if last else None


def _hash(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if mark else None


def _tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    inner = text[start + len("<answer>") : end]
    return (_boxed(inner) or inner) if start >= 0 else None


def _last_number(text: str) -> str | None:
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


FORMS: dict[str, Callable[[str], str | None]]
FORMS = {"boxed": _boxed, "hash": _hash, "tag": _tag, "number": _last_number}


def _bare(answer: str) -> str:
    """An answer without math delimiters, a final full stop, and commands that change only its looks."""
    answer = join_digits(answer).strip().rstrip(".").strip()
    for left, right in _DELIMITERS:
        inner = answer[len(left) : len(answer) - len(right)]
        if answer.startswith(left) and answer.endswith(right) and len(answer) > len(left + right) and left not in inner:
            answer = inner
    answer = answer.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace("−", "-").replace("{,}", ",")
    return _SPACES.sub(" ", answer).strip()


def _number(text: str) -> Fraction | None:
    """An integer, decimal, fraction or mixed number, with thousands separators or a dollar sign; None for others."""
    text = text.replace(r"\$", "").replace("$", "")
    if len(text) > 200 or ", " in text or _APART.search(text):
        return None
    text = text.replace(" ", "")
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, whole, *parts = match.groups()
    above, below = [int(part) for part in parts if part is not None]
    if not below or (whole and above < 0):
        return None
    value = Fraction(above, below) + int((whole or "0").replace(",", ""))
    return -value if sign == "-" else value


def _compare_bases(expected: str, answer: str) -> bool | None:
    r"""Integers in a stated base, as `52_8`. An answer may leave out the base that is expected."""
    wanted, got = _based(expected), _based(answer)
    if wanted is not None:
        return answer == wanted[0] if got is None and answer.isalnum() else None if got is None else got == wanted
    if got is None or (number := _number(expected)) is None:
        return None
    digits, base = got
    try:
        return int(digits, base) == number
    except ValueError:  # no such digit, or no such base
        return False


def _based(text: str) -> tuple[str, int] | None:
    match = _BASED.fullmatch(text.replace(" ", ""))
    return (match[1], int(match[2] or match[3])) if match else None


def _without_unit(answer: str) -> str:
    match = _UNIT.search(answer)
    words = {word.lower() for word in match.group().strip(" .").split()} if match else set()
    return answer if match is None or words & _NOT_UNITS else answer[: match.start()]
