r"""Rewrites answers as a parser of mathematics reads them: `½`, `10⁶`, `≈ 18`, `18 ✅`, `1.234,56`.

Every rule takes time linear in the text, and leaves a text alone that it does not know. Numbers in words are not read.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_TAGS = re.compile(r"</?(?:b|strong|i|em|u|mark|span)>")
_SYMBOLS = "\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff\ufe0f\u200d"  # emoji, marks such as ✅, and their joiners
_AT_ENDS = re.compile(rf"\A[\s{_SYMBOLS}]+|(?<![\s{_SYMBOLS}])[\s{_SYMBOLS}]+\Z")
_WHOLE = re.compile(r"\\(?:text|textbf|textrm|mbox|mathrm)\s?\{\s*([-+$]{0,2}\d[^{}\\]*)\}\.?")
_MINUS = re.compile(r"\A[–—] ?(?=[$€£]?\.?\d)")
_BEFORE = re.compile(
    r"\A(?:(?:approximately|approx\.?|about|around|roughly)\s+|(?:\\approx|≈)\s*|#)(?=\\?[$€£]?\d)", re.IGNORECASE
)
_FRACTION = re.compile("(\\d?)\\s?([¼-¾⅐-⅞])")
_POWER = re.compile("(?<=[\\da-zA-Z)}])([⁻⁺]?[⁰¹²³⁴-⁹]+)")
_TIMES = re.compile(r"(?<=\d) ?[xX] ?(?=10 ?(?:\^|\*\*))")
_COUNT = (
    r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|and|a)"
)
_COUNTS = rf"{_COUNT}(?:[ -]{_COUNT}){{0,12}}"
_SAID_TWICE = re.compile(rf"(?:{_COUNTS} \(([-+$\d.,]+)\)|([-+$\d.,]+) \({_COUNTS}\))\.?", re.IGNORECASE)
_HALF_DAY = re.compile(r"\A(\d{1,2}(?::\d\d)?) ?([ap])\.? ?m\.?\Z", re.IGNORECASE)
_CLOCK = re.compile(r"(?<=\d) o['’]clock", re.IGNORECASE)
_TIME = re.compile(r"(\d{1,2}:\d\d)(?: ([ap]m))?")
_GROUPED = re.compile(
    r"([-+]?)(?:(\d{1,3}(?:\.\d{3})+),(\d+)|(\d{1,3}(?:\.\d{3}){2,})|(\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?:_\d{3})+)"
    r"(?:\.(\d+))?)"
)


def plain(answer: str) -> str:
    r"""Rewrite an answer: fractions and powers of one character, a mark or emoji around it, `about` before a number.

    >>> plain("≈ 3½ ✅"), plain("1.2x10⁻³"), plain(r"\text{18 apples}"), plain("twelve (12)"), plain("3 P.M.")
    ('3 1/2', '1.2 \\times 10^{-3}', '18 apples', '12', '3 pm')
    """
    answer = _AT_ENDS.sub("", _TAGS.sub("", answer))
    if whole := _WHOLE.fullmatch(answer) or _SAID_TWICE.fullmatch(answer):
        answer = next(filter(None, whole.groups())).strip()
    answer = _MINUS.sub("-", _BEFORE.sub("", answer))
    answer = _POWER.sub(lambda power: f"^{{{_digits(power[1])}}}", _FRACTION.sub(_write_fraction, answer))
    answer = _HALF_DAY.sub(lambda time: f"{time[1]} {time[2].lower()}m", _CLOCK.sub("", answer))
    return _TIMES.sub(r" \\times ", answer)


def _write_fraction(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found[2]).partition("\N{FRACTION SLASH}")
    return f"{found[1]} {above}/{below}" if found[1] else f"{above}/{below}"


def _digits(power: str) -> str:
    return unicodedata.normalize("NFKC", power).replace("−", "-")


def grouped(text: str) -> Fraction | None:
    """Parse a number in the groups of other countries that can be no other number; None for other texts.

    >>> grouped("1.234.567"), grouped("1.234,5"), grouped("12,34,567"), grouped("1_234"), grouped("1.234")
    (Fraction(1234567, 1), Fraction(2469, 2), Fraction(1234567, 1), Fraction(1234, 1), None)
    """
    match = _GROUPED.fullmatch(text)
    if match is None:
        return None
    sign, with_decimals, decimals, whole, other, other_decimals = match.groups()
    digits = re.sub(r"[.,_]", "", with_decimals or whole or other)
    return Fraction(f"{sign}{digits}.{decimals or other_decimals or 0}")


def same_time(expected: str, answer: str) -> bool | None:
    """Compare two times of a clock; None if a text is none. An answer may say `am` or `pm` where none is expected."""
    wanted, got = _TIME.fullmatch(expected), _TIME.fullmatch(answer)
    if wanted is None or got is None:
        return None
    return wanted[1] == got[1] and wanted[2] in (None, got[2])
