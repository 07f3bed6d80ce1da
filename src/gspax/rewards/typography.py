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
_WHOLE = re.compile(
    r"\\(?:text|textbf|textrm|mbox|mathrm)\s?\{\s*([-+$]{0,2}\d[^{}\\]*|[a-z(][^{}\\]+)\}\.?", re.IGNORECASE
)
_LABEL = re.compile(  # `Total:`, `The answer is`, also as \text{}
    r"\A(?:\\text\s?\{\s*)?[a-z][a-z' ]{1,60}?(?::|\b(?:is|are|was|has|have|equals)\b:?)\s*\}?\s*(?=-?\\?[$€£]?\d)",
    re.IGNORECASE,
)
_MINUS = re.compile(r"\A[–—] ?(?=[$€£]?\.?\d)")
_BEFORE = re.compile(
    r"\A(?:(?:approximately|approx\.?|about|around|roughly)\s+|(?:\\approx|≈)\s*|#)(?=\\?[$€£]?\d)", re.IGNORECASE
)
_IN_MATH = re.compile(r"\A(?:\$([^$]*[^$\s])\$|\\\((.*?)\\\))(?=\s*[a-zA-Z][a-zA-Z\s]*\.?\Z)")  # `$72$ dollars`
_COLOR = re.compile(r"\\(?:text)?color\s?\{\w+\}")
# Names and characters of the same thing, of which parsers read one.
_NAMES = re.compile(r"\\(?:(varnothing)|(nicefrac|sfrac|cfrac)|(colon))(?![a-zA-Z])")
_SAME = {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F)} | str.maketrans(
    {
        **{"−": "-", "﹣": "-", "⁄": "/", "∕": "/", "º": "°", "~": " "},
        **{"∞": r"\infty ", "∅": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "⋅": r"\cdot "},
        **{"·": r"\cdot ", "△": r"\triangle "},
    }
)
_ROOT = re.compile(r"([√∛])\s?(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\))")
_STARS = re.compile(r"(?<=[\w)}])\s?\*\*\s?(?:(\d+|[a-zA-Z])(?!\w)|(?=[({]))")
_PI = re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])")
_FRACTION = re.compile("(\\d?)\\s?([¼-¾⅐-⅞])")
_POWER = re.compile("(?<=[\\da-zA-Z)}])([⁻⁺]?[⁰¹²³⁴-⁹]+)")
_TIMES = re.compile(r"(?<=\d) ?[xX] ?(?=10 ?(?:\^|\*\*))")
_COUNT = (
    r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|and|a)"
)
_COUNTS = rf"{_COUNT}(?:[ -]{_COUNT}){{0,12}}"
_SAID_TWICE = re.compile(rf"(?:{_COUNTS} \(([-+$\d.,]+)\)|([-+$\d.,]+) \({_COUNTS}\))\.?", re.IGNORECASE)
_HALF_DAY = re.compile(r"\A(\d{1,2}(?::\d\d)?)\s?(?:\\(?:text|mathrm)\s?\{\s*)?([ap])\.? ?m\.?\s*\}?\Z", re.IGNORECASE)
_CLOCK = re.compile(r"(?<=\d) o['’]clock", re.IGNORECASE)
_TIME = re.compile(r"(\d{1,2}:\d\d)(?: ([ap]m))?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}")
_GROUPED = re.compile(
    r"([-+]?)(?:(\d{1,3}(?:\.\d{3})+),(\d+)|(\d{1,3}(?:\.\d{3}){2,})|(\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?:[_'’]\d{3})+)"
    r"(?:\.(\d+))?)"
)


def plain(answer: str) -> str:
    r"""Rewrite an answer: fractions and powers of one character, a mark or emoji around it, `about` before a number.

    >>> plain("Total: 7"), plain("2√3"), plain("x**2 + 1"), plain(r"\text{Yes}")
    ('7', '2\\sqrt{3}', 'x^{2} + 1', 'Yes')
    >>> plain("≈ 3½ ✅"), plain("1.2x10⁻³"), plain(r"\text{18 apples}"), plain("twelve (12)"), plain("3 P.M.")
    ('3 1/2', '1.2 \\times 10^{-3}', '18 apples', '12', '3 pm')
    """
    answer = _IN_MATH.sub(r"\1\2", _AT_ENDS.sub("", _COLOR.sub("", _TAGS.sub("", answer))))
    if whole := _WHOLE.fullmatch(answer) or _SAID_TWICE.fullmatch(answer):
        answer = next(filter(None, whole.groups())).strip()
    answer = _MINUS.sub("-", _BEFORE.sub("", _LABEL.sub("", answer)))
    answer = _POWER.sub(lambda power: f"^{{{_digits(power[1])}}}", _FRACTION.sub(_write_fraction, answer))
    answer = _NAMES.sub(_write_name, _ROOT.sub(_write_root, answer.translate(_SAME)))
    answer = _PI.sub(r"\\pi", _STARS.sub(lambda power: f"^{{{power[1]}}}" if power[1] else "^", answer))
    answer = _HALF_DAY.sub(lambda time: f"{time[1]} {time[2].lower()}m", _CLOCK.sub("", answer))
    return _TIMES.sub(r" \\times ", answer)


def _write_fraction(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found[2]).partition("\N{FRACTION SLASH}")
    return f"{found[1]} {above}/{below}" if found[1] else f"{above}/{below}"


def _write_root(found: re.Match[str]) -> str:
    degree = "[3]" if found[1] == "∛" else ""
    return rf"\sqrt{degree}{{{found[2] or found[3]}}}"


def _write_name(found: re.Match[str]) -> str:
    return r"\emptyset" if found[1] else r"\frac" if found[2] else ":"


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
    digits = re.sub(r"[.,_'’]", "", with_decimals or whole or other)
    return Fraction(f"{sign}{digits}.{decimals or other_decimals or 0}")


def same_time(expected: str, answer: str) -> bool | None:
    """Compare two times of a clock; None if a text is none. An answer may say `am` or `pm` where none is expected.

    A date equals only itself: it is no difference or quotient of numbers.
    """
    if _DATE.fullmatch(expected) or _DATE.fullmatch(answer):
        return expected == answer
    wanted, got = _TIME.fullmatch(expected), _TIME.fullmatch(answer)
    if wanted is None or got is None:
        return None
    return wanted[1] == got[1] and wanted[2] in (None, got[2])
