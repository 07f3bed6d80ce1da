r"""Rewrites answers in the notation that parsers of mathematics read: `½`, `10⁶`, `≈ 18`, `**18** ✅`, `3 1/2`.

The rules of a table are applied one after the other. Each takes time linear in the text, and leaves alone what it
does not know. Numbers in words are not read.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import partial

_Replace = Callable[[re.Match[str]], str]
_LONGEST = 4000  # characters in which emphasis is looked for
_SYMBOLS = "\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff\ufe0f\u200d"  # emoji, marks such as ✅, and their joiners
_MONEY = r"\\?[$€£]?"
_COUNT = (
    r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|and|a)"
)
_COUNTS = rf"(?:{_COUNT}(?:[ -]{_COUNT}){{0,12}})"
_GAP = r"(?:\s|\\[,;: ]|~)++"
_ALONE = r"(?<![\^_\d.a-zA-Z])(?<![a-zA-Z] )"  # precedes digits that do not belong to a word, index or exponent
_SAME_CHARACTERS = {full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F)} | str.maketrans(
    {
        **{"−": "-", "﹣": "-", "⁄": "/", "∕": "/", "º": "°"},
        **{"∞": r"\infty ", "∅": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "⋅": r"\cdot "},
        **{"·": r"\cdot ", "△": r"\triangle "},
    }
)
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:the |my )?(?:final |correct )?answer(?:\s*[:=]|\s+is\b:?)", re.IGNORECASE
)


def _compiled(*rules: tuple[str, str | _Replace]) -> list[tuple[re.Pattern[str], _Replace]]:
    """Compile rules, of a pattern and the new text: a template, or a function of the match."""
    return [(re.compile(pattern), partial(_expand, new) if isinstance(new, str) else new) for pattern, new in rules]


def _expand(template: str, found: re.Match[str]) -> str:
    return found.expand(template)


def _ascii(text: str) -> str:
    """Write the digits of fractions, powers and indices as ordinary digits."""
    return unicodedata.normalize("NFKC", text).replace("\N{FRACTION SLASH}", "/").replace("−", "-")


def _write_mixed(number: re.Match[str]) -> str:
    whole, above, below = number.groups()
    return rf"{whole}\frac{{{above}}}{{{below}}}" if int(above) < int(below) else number[0]


_AROUND = _compiled(  # what a policy writes around an answer
    (r"(?<![\w*)}\]\\])(\*{1,3}|__|`{1,3})(?=[^\s*`])([^*`\n]*[^\s*`])\1(?![\w*({\[])", r"\2"),  # **18**
    (r"\\(?:textbf|textit|text|mathbf|mathrm|boldsymbol|bm|bf|emph|underline)\s?\{([-+$\\\d.,/%\s]+)\}", r"\1"),
)
_CLOSING = re.compile(r"(?:\*{2,3}|`+)(?=[.!]?$)|(?<=[.!])\*$")  # the end of an emphasis that begins before the answer
_QUOTED = re.compile(r"""(?:"([^"\n]+)"|“([^“”\n]+)”|«([^«»\n]+)»|'([^'\n]+)'|‘([^‘’\n]+)’)[.!]?""")

# The rules in the order in which they are applied; those of characters only if one of them is not ASCII.
_OUTSIDE = _compiled(
    (r"</?(?:b|strong|i|em|u|mark|span)>|\\(?:text)?color\s?\{\w+\}", ""),
    (rf"\A[\s{_SYMBOLS}]+|(?<![\s{_SYMBOLS}])[\s{_SYMBOLS}]+\Z", ""),  # 18 ✅
    (r"\A(?:\$([^$]*[^$\s])\$|\\\((.*?)\\\))(?=\s*[a-zA-Z][a-zA-Z\s]*\.?\Z)", r"\1\2"),  # `$72$ dollars`
    (  # \text{18 apples}
        r"(?i)\A\\(?:text|textbf|textrm|mbox|mathrm)\s?\{(\s*(?:[-+$]{0,2}\d|[a-z(][^{}\\])[^{}\\]*)\}\.?\Z",
        lambda found: found[1].strip(),
    ),
)
_CHARACTERS = _compiled(
    (r"(?<=\d)\s?([¼-¾⅐-⅞])", lambda found: f" {_ascii(found[1])}"),  # 3½
    (r"[¼-¾⅐-⅞]", lambda found: _ascii(found[0])),
    (r"(?<=[\da-zA-Z)}])[⁻⁺]?[⁰¹²³⁴-⁹]+", lambda found: f"^{{{_ascii(found[0])}}}"),  # 10⁶
    (r"\A[–—−] ?(?=[$€£]?\.?\d)", "-"),
    (r"[−﹣⁄∕º∞∅∪∩∈⋅·△！-～]", lambda found: found[0].translate(_SAME_CHARACTERS)),
    (r"√\s?(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\))", r"\\sqrt{\1\2}"),
    (r"∛\s?(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\))", r"\\sqrt[3]{\1\2}"),
)
_WORDS = _compiled(
    (rf"(?i)\A(?:{_COUNTS} \(([-+$\d.,]+)\)|([-+$\d.,]+) \({_COUNTS}\))\.?\Z", r"\1\2"),  # twelve (12)
    (  # `Total:`, `The answer is`, also as \text{}
        r"(?i)\A(?:\\text\s?\{\s*)?[a-z][a-z' ]{1,60}?(?::|\b(?:is|are|was|has|have|equals)\b:?)\s*(?:\}\s*)?"
        rf"(?=-?{_MONEY}\d)",
        "",
    ),
    (rf"(?i)\A(?:(?:approximately|approx\.?|about|around|roughly)\s+|(?:\\approx|≈)\s*|#)(?={_MONEY}\d)", ""),
    (r"~", " "),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (r"\\(?:nice|s|c)frac(?![a-zA-Z])", r"\\frac"),
    (r"\\colon(?![a-zA-Z])", ":"),
    (r"(?<=[\w)}])\s?\*\*\s?(?:(\d+|[a-zA-Z])(?!\w))", r"^{\1}"),  # x**2
    (r"(?<=[\w)}])\s?\*\*\s?(?=[({])", "^"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi"),
    (  # 3 P.M.
        r"(?i)\A(\d{1,2}(?::\d\d)?)\s?(?:\\(?:text|mathrm)\s?\{\s*)?([ap])\.? ?m\.?\s*\}?\Z",
        lambda time: f"{time[1]} {time[2].lower()}m",
    ),
    (r"(?<=\d) o['’]clock", ""),
    (r"(?<=\d) ?[xX] ?(?=10 ?(?:\^|\*\*))", r" \\times "),  # 1.2x10^3
    (r"\\!\s*", ""),
    (r"\\(?:mathrm|text|textrm|operatorname|mathit)\s?\{([ei])\}", r"\1"),
    (  # 1 234 567
        rf"{_ALONE}(?<![,/])[1-9]\d{{0,2}}(?:{_GAP}\d{{3}}){{1,6}}+(?![\d/])",
        lambda groups: re.sub(_GAP, "", groups[0]),
    ),
    (  # 3 1/2
        rf"{_ALONE}(?<!/)(\d{{1,3}}(?:,\d{{3}}){{1,6}}+|\d{{1,15}}+){_GAP}(\d{{1,15}})/(\d{{1,15}})(?![\d/])",
        _write_mixed,
    ),
    (r"(?i)(?:negative|minus) (?=[$€£]?\d)", "-"),
    (r"(?i)(?<=[\d}]) ?per ?cent(?![a-z])", "%"),
)
_RULES = [*_OUTSIDE, *_CHARACTERS, *_WORDS]
_ASCII_RULES = [*_OUTSIDE, *_WORDS]
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_LOOKS = _compiled(
    (r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))", "°"),
    (r"(?:\s|\\[,;:! ]|\\(?:quad|left|right)(?![a-zA-Z])|~)+", " "),
)
_BELOW_ZERO = re.compile(r"(\d.{0,40}) below zero", re.IGNORECASE)


def tidy(answer: str) -> str:
    """Remove Markdown and LaTeX styles around an answer, quotes, and a leading "the answer is"."""
    answer = answer.strip()
    start, rest = answer[:_LONGEST], answer[_LONGEST:]
    for pattern, new in _AROUND:
        start = pattern.sub(new, start)
    answer = _CLOSING.sub("", (start + rest).strip("`").removeprefix("**"))
    if quoted := _QUOTED.fullmatch(answer):
        answer = quoted[quoted.lastindex or 0].strip()
    rest = answer[lead.end() :] if (lead := _LEAD.match(answer)) else ""
    return rest.strip() or answer.strip()


def write_numbers(answer: str) -> str:
    r"""Write an answer as parsers read it: numbers without spaces inside, and signs and percents as symbols.

    >>> write_numbers("3 1/2"), write_numbers(r"(1\,234, 5 678)"), write_numbers("minus 1 percent")
    ('3\\frac{1}{2}', '(1234, 5678)', '-1%')
    >>> write_numbers("Total: 7"), write_numbers("2√3"), write_numbers("x**2 + 1"), write_numbers(r"\text{Yes}")
    ('7', '2\\sqrt{3}', 'x^{2} + 1', 'Yes')
    >>> write_numbers("≈ 3½ ✅"), write_numbers("1.2x10⁻³"), write_numbers("twelve (12)"), write_numbers("3 P.M.")
    ('3\\frac{1}{2}', '1.2 \\times 10^{-3}', '12', '3 pm')
    """
    for pattern, new in _ASCII_RULES if answer.isascii() else _RULES:
        answer = pattern.sub(new, answer)
    return answer


def bare(answer: str) -> str:
    """Remove math delimiters, a final period, and commands that only affect the looks of an answer."""
    answer = write_numbers(tidy(answer)).strip().rstrip(".,;?").strip()
    for left, right in _DELIMITERS:
        inner = answer[len(left) : len(answer) - len(right)]
        if answer.startswith(left) and answer.endswith(right) and len(answer) > len(left + right) and left not in inner:
            answer = inner
    answer = answer.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace("{,}", ",")
    for pattern, new in _LOOKS:
        answer = pattern.sub(new, answer)
    answer = answer.strip()
    return f"-{match[1]}" if (match := _BELOW_ZERO.fullmatch(answer)) else answer
