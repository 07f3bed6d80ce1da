r"""Finds final answers in completions, and decides which are equal without computer algebra.

`extract` finds an answer in one of five forms. `compare` decides what strings and rational numbers can decide; the rest
needs a parser of mathematics (`gspax.rewards.math`). `extract` takes time linear in the text, whatever a policy writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from gspax.errors import UserError
from gspax.rewards.exact import evaluate
from gspax.rewards.typography import grouped, plain, same_time

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K's notes, as in 40+2=<<40+2=42>>42
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"  # of 10
_MIXED_NUMBER = rf"{_DIGITS} \d{{1,15}}/\d{{1,15}}(?!\d)"
_SPACED = r"[1-9]\d{0,2}(?:[ \u00a0\u202f]\d{3}){1,6}(?![\d/])"
# Words that change a number. If they were treated as units, they would be dropped.
_SCALES = {"dozen": 12, "hundred": 100} | {
    name: 10 ** (3 * i) for i, name in enumerate(("thousand", "million", "billion", "trillion"), 1)
}
_TEXT = r"\\(?:text|textrm|mbox|mathrm)"
_SCALE = rf"(?i:{'|'.join(_SCALES)})"
_LAST_NUMBER = re.compile(
    rf"(?<![a-zA-Z\d_.])[-+]?\\?[$€£]?(?:{_MIXED_NUMBER}|(?:(?:{_SPACED}|{_DIGITS})(?:\.\d+)?|\.\d+){_EXPONENT}(?:/\d+)?)"
    rf"(?:\s*\\?%| {_SCALE}s?(?![a-z])|\s*(?:\\[,;:!]\s*)?{_TEXT}\s*\{{[\s~]*{_SCALE}s?(?![a-z])[a-z\s]*\}})?"
)
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\\[,;!]|\{,\})(?=\d{3}(?!\d))")
_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.\d*)?|\.\d+){_EXPONENT}")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)(?:\\(?:overline|bar|dot) ?\{?(\d+)\}?|\((\d+)\))")
_FRACTION = re.compile(rf"([-+]?)({_DIGITS})?\\?frac(?:\{{([-+]?\d+)\}}\{{(\d+)\}}|(\d)(\d))|([-+]?\d+)/(\d+)")
_BASED = re.compile(r"([0-9A-Z]+)_(?:\{(\d{1,2})\}|(\d{1,2}))")
# Units without a backslash: words, or symbols that may have a power or a second unit below. The letter x is none.
_SYMBOL = (
    r"(?:(?:milli|centi|kilo)?met(?:er|re)s?|[cmk]?m|inch(?:es)?|in|feet|foot|ft|yards?|yd|miles?|mi|units?"
    r"|seconds?|secs?|s|minutes?|mins?|hours?|hrs?|hr?|days?|k?g|lbs?|m?l)"
)
_POWER = r"(?: ?(?:\^ ?\{?[23]\}?|[²³]))"
_PER = rf"(?: ?/ ?(?:{_SYMBOL}{_POWER}?|[a-z]{{3,}}))"
# Units in LaTeX: `\text{ cm}^2`, `\frac{\text{m}}{\text{s}}`; in Chinese and Japanese, if they change no number.
_LATEX_UNIT = rf"{_TEXT} ?\{{ ?(?:[a-z][a-z./ ]*[a-z.]|(?-i:[mgshLCF])) ?\}}"
_OTHER_UNIT = r"(?!\S{0,3}[十百千万萬亿億半多余以])[\u3040-\u30ff\u4e00-\u9fff]{1,4}"
_UNIT = re.compile(
    rf"(?<=[\d.}}])(?: ?°(?: ?[CF])?|{_PER}| {_SYMBOL}(?:{_POWER}{_PER}?|{_PER})"
    rf"|(?:\s+[a-z]{{2,}})+{_PER}?| (?-i:[mgshL])|\s?{_LATEX_UNIT}{_POWER}?|\s?\\frac ?\{{{_LATEX_UNIT}{_POWER}?\}}"
    rf" ?\{{{_LATEX_UNIT}{_POWER}?\}}|\s?{_OTHER_UNIT})\.?$",
    re.IGNORECASE,
)
_POWER_OF_UNIT = re.compile(
    rf"(?:\\(?:mbox|text|textrm|mathrm) ?\{{[^{{}}]*[a-z.] *\}}|\d {_SYMBOL}) ?(?:\^ ?\{{?(\d)\}}?|([²³]))$",
    re.IGNORECASE,
)
_NEGATIVE = re.compile(r"(?:negative|minus) (?=[$€£]?\d)", re.IGNORECASE)
_BELOW_ZERO = re.compile(
    r"(\d[\d.,/]{0,20})(?: ?°(?: ?[CF])?| degrees(?: celsius| fahrenheit| [CF])?)? below zero", re.IGNORECASE
)
_DEGREES = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))")
_PERCENT = re.compile(r"(?<=\d) ?per ?cent(?![a-z])", re.IGNORECASE)
_WORDS = re.compile(r"[a-z]{2,}(?: [a-z]{2,})*", re.IGNORECASE)
_PROSE = re.compile(r"[a-z' ]+", re.IGNORECASE)
_NO_PRODUCT = re.compile(r"[a-z]{3}|\bno\b", re.IGNORECASE)  # xy is one
# A letter of multiple choice, alone or before its text: `B`, `(B)`, `B) 12`, `\textbf{(B)}\ 12`, `B. Paris`.
_LETTER = re.compile(r"(?:(?i:option|choice) )?\(?([A-Z])\)?")
_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf|bf)\s?\{\s*)?(?:\(?([A-Z])(?:\)|[.:](?=[\s}]))\}?|([A-Z])\}(?:[.:)]|$))"
    r"(?!\s*(?:,|(?:\\text\s?\{\s*)?(?:or|and)\b))(?!.*(?:\([A-Z]\)|\b[A-Z](?:\)|[.:]\s)))"
)
_RESIDUE = re.compile(
    r"(?:[a-zA-Z] ?(?:\\equiv|≡|=) ?)?(-?\d{1,300}) ?(?:\(|\\[pb]?|)mod(?:ulo)? ?\{?([1-9]\d{0,300})[)}]?"
)
_MODULO = re.compile(r"\\[pb]?mod(?![a-zA-Z])|\\equiv(?![a-zA-Z])|≡|\(mod\b")
# Numbers with units or words between them: `5 feet 6 inches`, `5 apples, 6 pears`, `5 or 6`.
_SEVERAL = re.compile(
    rf"(?:[a-zA-Z']{{1,20}} ){{0,6}}-?\\?[$€£]?\d[\d.,/]*\s*(?:{_TEXT}\s*\{{\s*)?(?![xX]\s*\d)[a-zA-Z][a-zA-Z\s.,]*"
    r"(?:\}[\s,]*(?:\\(?:text)?\{)?)?\\?[$€£]?\d"
)
# Words that say that a text is no number.
_PARTS = ("half", "third", "quarter", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth")
_POWERS = ("squared", "cubed", "factorial")
_NOT_UNITS = {
    *("percent", "or", "and", "not", "to", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp"),
    *("negative", "minus", "plus", "times", "over", "mod", "modulo", "halves"),
    *(*_SCALES, *_POWERS, *_PARTS, *(f"{word}s" for word in (*_SCALES, *_PARTS))),
}
# Marks that a parser drops although they change the meaning: an answer with one never equals one without.
_CHANGES = re.compile(
    rf"\\neq?(?![a-zA-Z])|\\not(?![a-zA-Z])|≠|!=|\b(?:not|never|cannot)\b|\b(?:{'|'.join(_SCALES)})s?\b"
    rf"|\d ?(?:{_TEXT} ?\{{ ?)?(?:{'|'.join((*_POWERS, *_PARTS))}|halve|mod(?:ulo)?)s?\b"
)
_SCALED = re.compile(
    rf"(.*?\d)\s*(?:{_TEXT}\s*\{{\s*)?({'|'.join(_SCALES)})s?((?:\s+[a-z]+)*)\s*\}}?",
    re.IGNORECASE,
)
# Markdown or LaTeX that a policy writes around an answer, and words before or after it in the sentence.
_EMPHASIS = re.compile(r"(?<![\w*)}\]\\])(\*{1,3}|__|`{1,3})(?=[^\s*`])([^*`\n]*[^\s*`])\1(?![\w*({\[])")
_QUOTED = re.compile(r"""(?:"([^"\n]+)"|“([^“”\n]+)”|«([^«»\n]+)»|'([^'\n]+)'|‘([^‘’\n]+)’)[.!]?""")
_CLOSING = re.compile(r"(?:\*{2,3}|`+)(?=[.!]?$)|(?<=[.!])\*$")  # the end of an emphasis that begins before the answer
_STYLE = re.compile(
    r"\\(?:textbf|textit|text|mathbf|mathrm|boldsymbol|bm|bf|emph|underline)\s?\{\s*([-+$\\\d.,/% ]+)\}"
)
_CONSTANT = re.compile(r"\\(?:mathrm|text|textrm|operatorname|mathit)\s?\{([ei])\}")
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:the |my )?(?:final |correct )?answer(?:\s*[:=]|\s+is\b:?)", re.IGNORECASE
)
_MARK = re.compile(r"\banswer\b[*_`]{0,3}(?:\s?(?:[:：=])|\s(?:is|are)\b:?)[*_`]{0,3}", re.IGNORECASE)
_REASON = re.compile(r"[\s,;]+\(?(?:since|because|as|i\.e\.|which|where|so that)\b|,\s+not\b", re.IGNORECASE)
_SENTENCE_END = re.compile(  # before a capital letter, or after a number and before a number with words
    r"(?<=[\w)}\]$%*`])[.!](?=\s+[A-Z*])|(?<=[\d)}\]$%*`])[.!](?=\s+[$€£]?\d\S*+(?:\s++\S++){3})"
)
_WORD = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}")
_ECHO = re.compile(r"[$*`\"' ]*answer\b", re.IGNORECASE)  # repeats the prompt
_EQUATION = re.compile(r"\W*[a-zA-Z]\w{0,3}\W*=")
_RELATION = re.compile(
    r"\s*(?:\\(?:geq?|leq?|geqslant|leqslant|gt|lt)(?![a-zA-Z])|[≥≤<>]"
    r"|(?:at (?:least|most)|(?:more|less|fewer|greater) than)\b)",
    re.IGNORECASE,
)
_RELATION_AFTER = re.compile(
    r"(?:\s(?:(?:or|and) (?:more|less|fewer|greater|larger|smaller|higher|lower|above|below|over|under|older|younger)"
    r"|at (?:least|most)|minimum|maximum|plus)(?: [a-z]+)?|\d\s?\+)\W*$",
    re.IGNORECASE,
)
_RANGE = re.compile(r"\d\s?(?:[–—]|--)\s?\\?[$€£]?\d")
_DOTS = re.compile(r"\\[lc]?dots(?:[a-z](?![a-zA-Z]))?|…|\.\.\.")
_CURRENCY = re.compile(r"(?:\b(?:US|CA|AU|NZ|HK|SG|[CAS]))?\\?\$|[€£¥₹]|\\(?:pounds|euro)(?![a-zA-Z])|\bRs\.?(?=\s?\d)")
_HEADING = re.compile(r"\d+[.)]\s+[A-Za-z]")
_PLACEHOLDER = re.compile(
    r"\W*(?:none|null|nan|n/?a|nil|to ?do|tbd|unknown|missing|x{3,})\W*|[?._…\s-]+", re.IGNORECASE
)
_MOST_WORDS = 8  # words of prose in an answer
_MOST_WORDS_AFTER_IS = 3
_LONGEST_LINE = 4000  # characters of an answer's line
_MOST_MARKS = 16  # marks tried, from the end
_SPACES = re.compile(r"(?:\s|\\[,;:! ]|\\(?:quad|left|right)(?![a-zA-Z])|~)+")
_GAP = r"(?:\s|\\[,;: ]|~)++"
_ALONE = r"(?<![\^_\d.a-zA-Z])(?<![a-zA-Z] )"  # precedes digits that do not belong to a word, index or exponent
_GROUPS = re.compile(rf"{_ALONE}(?<![,/])[1-9]\d{{0,2}}(?:{_GAP}\d{{3}}){{1,6}}+(?![\d/])")
_MIXED = re.compile(
    rf"{_ALONE}(?<!/)(\d{{1,3}}(?:,\d{{3}}){{1,6}}+|\d{{1,15}}+){_GAP}(\d{{1,15}})/(\d{{1,15}})(?![\d/])"
)
_APART = re.compile(rf"{_ALONE}\d++\.? +\.?\d")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def extract(completion: str, *, form: str | None = None) -> str | None:
    r"""Extract the final answer of a completion, or None if there is none.

    Args:
      completion: any text.
      form: "boxed" (the last complete `\boxed{}`), "hash" (the rest of the line after the last `####`), "tag" (the last
        `<answer>…</answer>`), "answer" (what follows the last `Answer:` or "answer is", up to the end of the line, of
        the sentence, or a reason), "number" (the last number), or None for the first of these forms that occurs, in
        this order. A `####` that starts a Markdown heading is no mark: a mark precedes a number or ends the text.
    """
    if form is not None and form not in FORMS:
        raise UserError(f"form: wanted one of {', '.join(FORMS)} or None, got {form!r}")
    completion = _CALCULATOR.sub("", completion)
    for find in FORMS.values() if form is None else (FORMS[form],):
        if (answer := find(completion)) and (answer := _tidy(answer)):
            return answer
    return None


def reference(answer: str) -> str:
    r"""Return the answer in a reference solution that ends in `\boxed{}` or `####`; a bare answer unchanged."""
    marked = answer.rpartition("####")[2].strip().partition("\n")[0] if "####" in answer else ""
    return (_boxed(answer) or marked or answer).strip()


def find_problem(answer: str) -> str:
    r"""Explain why an answer of the data contains no final answer; empty if it contains one."""
    final = reference(answer)
    if _BOX.search(answer) and not _boxed(answer):
        return f"wanted a final answer in the box, got {answer[-80:]!r}"
    if "####" in answer and not _boxed(answer) and not answer.rpartition("####")[2].strip():
        return "wanted a final answer after ####, got none"
    if not final:
        return "wanted a final answer, got none"
    if _PLACEHOLDER.fullmatch(final):
        return f"wanted a final answer, got {final[-80:]!r}, which stands for a missing one"
    if len(_WORD.findall(final)) > _MOST_WORDS or ("\n" in final and "\\begin" not in final):
        return rf"wanted a final answer, bare or after #### or in \boxed{{}}, got {final[-80:]!r}"
    return ""


def compare(expected: str, answer: str) -> bool | None:
    """Return whether two answers are equal if strings and rational numbers decide it, else None.

    Differences below one part in 10⁵ between a decimal and another number are not decided: one may be rounded. Digits
    with a space between them are a mixed number (`3 1/2`) or groups of three (`1 234`). Others, such as `1 2`, equal
    only themselves; math-verify would add the numbers.
    """
    expected, answer = _bare(expected), _bare(answer)
    if not expected or not answer:
        return False
    if expected == answer or (expected.lower() == answer.lower() and _WORDS.fullmatch(expected)):
        return True
    for decide in (same_time, _compare_choices, _compare_words, _compare_residues, _compare_several):
        if (same := decide(expected, answer)) is not None:
            return same
    if _DOTS.search(expected + answer):  # a parser drops them together with the omitted part
        first, second = (_DOTS.sub("…", text).replace(" ", "") for text in (expected, answer))
        return first == second
    wanted, got = _number(expected), _number(_without_unit(answer))
    if wanted is not None and wanted == _dozens(answer) and _dozens(expected) is None:  # "How many dozens of eggs ...?"
        return True
    if bool(_CHANGES.search(expected)) != bool(_CHANGES.search(answer)) and (wanted is None or got is None):
        return False
    if (_is_bound(expected) and got is not None) or (_is_bound(answer) and wanted is not None):
        return False
    units = map(_POWER_OF_UNIT.search, (expected, answer))
    powers = ["²³".find(match[2]) + 2 if match[2] else int(match[1]) for match in units if match]
    if len(set(powers)) == 2:  # square inches are not cubic inches; a parser drops units with their powers
        return False
    if "_" in expected + answer and (equal := _compare_bases(expected, answer)) is not None:
        return equal
    if _APART.search(expected) or _APART.search(answer):
        return False
    if wanted is None or got is None or wanted == got:
        return None if wanted is None or got is None else True
    rounded = "." in expected + answer and abs(wanted - got) <= Fraction(1, 10**5) * max(Fraction(1), abs(wanted))
    return None if rounded else False


def _is_bound(answer: str) -> bool:
    """Return whether an answer is a bound, such as `at least 5` or `5 or more`, or a range, such as `4–5`."""
    return bool(_RELATION.match(answer) or _RELATION_AFTER.search(answer) or _RANGE.search(answer))


def write_numbers(answer: str) -> str:
    r"""Write the numbers in an answer as parsers read them: without spaces inside, and signs and percents as symbols.

    >>> write_numbers("3 1/2"), write_numbers(r"(1\,234, 5 678)"), write_numbers("minus 1 percent")
    ('3\\frac{1}{2}', '(1234, 5678)', '-1%')
    """

    def write_mixed(number: re.Match[str]) -> str:
        whole, above, below = number.groups()
        return rf"{whole}\frac{{{above}}}{{{below}}}" if int(above) < int(below) else number[0]

    answer = _CONSTANT.sub(r"\1", re.sub(r"\\!\s*", "", plain(answer)))
    answer = _GROUPS.sub(lambda digits: re.sub(_GAP, "", digits[0]), answer)
    return _PERCENT.sub("%", _NEGATIVE.sub("-", _MIXED.sub(write_mixed, answer)))


def canonical(answer: str) -> str:
    r"""Return a text that equal numbers share, for counting answers: `0.5`, `\frac{1}{2}` and `1/2` give `1/2`.

    Other answers are compared as texts, so equal formulas may differ.

    >>> canonical("1,600.0"), canonical(r"$\frac{1}{2}$"), canonical("x + 1.")
    ('1600', '1/2', 'x + 1')
    """
    bare = _bare(answer)
    number = _number(_without_unit(bare))
    if letter := _letter(bare):
        return letter
    bare = bare.lower() if _WORDS.fullmatch(bare) else bare
    return bare if number is None or max(number.numerator, number.denominator).bit_length() > 4000 else str(number)


def _boxed(text: str) -> str | None:
    """Return the content of the last box whose braces close; the innermost if boxes are nested; None if none closes.

    Escaped braces count as characters.
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
    """Return the rest of the line after the last `####` that is no heading, or the next line if it is empty."""
    *before, last = text.split("####")[-_MOST_MARKS:] if "####" in text else [""]
    parts = [*before[1:], last] if len(before) else []
    for part in reversed(parts):
        line, _, below = part.strip(" \t#").partition("\n")
        line = _LEAD.sub("", _tidy(line)).strip(" *_`:") if line.strip() else ""
        if not line:
            line, _, below = below.strip().partition("\n")
        number = _without_unit(_bare(_tidy(line)))
        is_number = _number(number) is not None and not _HEADING.match(line)
        if line and (is_number or (part is last and not below.strip())):
            return line
    return None


def _tag(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    inner = text[start + len("<answer>") : end]
    return (_boxed(inner) or inner) if start >= 0 else None


def _after_answer(text: str) -> str | None:
    """Return the answer after the last `Answer:` or "answer is" that precedes one."""
    for mark in reversed([*_MARK.finditer(text)][-_MOST_MARKS:]):
        rest = text[mark.end() : mark.end() + _LONGEST_LINE]
        answer = rest.lstrip(" \t*`").lstrip("\n")
        line = answer.partition("\n")[0]
        before = mark.group() + rest[: len(rest) - len(answer)]
        if emphasis := before[len(before.rstrip("*`")) :]:  # the emphasis ends in the line
            line = line.replace(emphasis, "", 1)
        for end in (_SENTENCE_END, _REASON):
            if match := end.search(line):
                line = line[: match.start()]
        most = _MOST_WORDS if mark.group().rstrip("*_`")[-1] in ":：=" else _MOST_WORDS_AFTER_IS
        if "=" in line and not _EQUATION.match(line):  # a calculation: keep its result
            left, _, right = line.rpartition("=")
            line = right if re.search(r"[\d\\]", right) or _number(_bare(left)) is None else left
        is_echo = _ECHO.match(line) or not line.strip("$*`\"' .")
        if len(_WORD.findall(line)) <= most and not is_echo:
            return line
    return None


def _last_number(text: str) -> str | None:
    numbers = _LAST_NUMBER.findall(_BETWEEN_DIGITS.sub("", text))
    return numbers[-1] if numbers else None


FORMS: dict[str, Callable[[str], str | None]]
FORMS = {"boxed": _boxed, "hash": _hash, "tag": _tag, "answer": _after_answer, "number": _last_number}


def _tidy(answer: str) -> str:
    """Remove Markdown and LaTeX styles around an answer, and a leading "the answer is"."""
    answer = _STYLE.sub(r"\1", _EMPHASIS.sub(r"\2", answer[:_LONGEST_LINE].strip())) + answer.strip()[_LONGEST_LINE:]
    answer = _CLOSING.sub("", answer.strip("`").removeprefix("**"))
    if quoted := _QUOTED.fullmatch(answer):
        answer = quoted[quoted.lastindex or 0].strip()
    rest = answer[lead.end() :] if (lead := _LEAD.match(answer)) else ""
    return rest.strip() or answer.strip()


def _bare(answer: str) -> str:
    """Remove math delimiters, a final period, and commands that only affect the looks of an answer."""
    answer = write_numbers(_tidy(answer)).strip().rstrip(".,;?").strip()
    for left, right in _DELIMITERS:
        inner = answer[len(left) : len(answer) - len(right)]
        if answer.startswith(left) and answer.endswith(right) and len(answer) > len(left + right) and left not in inner:
            answer = inner
    answer = answer.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace("−", "-").replace("{,}", ",")
    answer = _SPACES.sub(" ", _DEGREES.sub("°", answer)).strip()
    return f"-{match[1]}" if (match := _BELOW_ZERO.fullmatch(answer)) else answer


def _number(text: str) -> Fraction | None:
    """Parse a number with separators, currency or a word such as million, or a closed form; None for other texts."""
    text = _CURRENCY.sub("", text).strip()
    if len(text) > 400 or ", " in text or _APART.search(text):
        return None
    if (scaled := _SCALED.fullmatch(text)) and not {*scaled[3].lower().split()} & _NOT_UNITS:
        value = _number(scaled[1])
        return None if value is None else value * _SCALES[scaled[2].lower()]
    if match := _REPEATING.fullmatch(text):
        return _repeat(*match.groups(default=""))
    value = evaluate(text)
    if value is not None:
        return value
    text = text.replace(" ", "")
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if (value := grouped(text)) is not None:
        return value
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, whole, *parts = match.groups()
    above, below = [int(part) for part in parts if part is not None]
    if not below or (whole and above < 0):
        return None
    value = Fraction(above, below) + int((whole or "0").replace(",", ""))
    return -value if sign == "-" else value


def _repeat(sign: str, whole: str, once: str, bar: str, bracket: str) -> Fraction:
    """Return the value of a decimal whose last digits repeat without end."""
    again = bar or bracket
    value = int(whole or "0") + Fraction(int(once + again) - int(once or "0"), 10 ** len(once) * (10 ** len(again) - 1))
    return -value if sign == "-" else value


def _dozens(answer: str) -> Fraction | None:
    """Return how many dozens an answer counts, None if it counts none."""
    scaled = _SCALED.fullmatch(answer)
    return _number(scaled[1]) if scaled and scaled[2].lower() == "dozen" else None


def _compare_words(expected: str, answer: str) -> bool | None:
    """Compare two texts of words, whose order around `and` and `or` is free; a parser would multiply their letters."""
    if not (_PROSE.fullmatch(expected) and _PROSE.fullmatch(answer) and _NO_PRODUCT.search(f"{expected} {answer}")):
        return None
    first, second = (sorted(re.split(" (?:and|or) ", text.lower())) for text in (expected, answer))
    return first == second


def _compare_choices(expected: str, answer: str) -> bool | None:
    """Compare a letter of multiple choice with a letter, either of which its text may follow."""
    wanted, got = _letter(expected), _letter(answer)
    alone = _LETTER.fullmatch(expected) or _LETTER.fullmatch(answer)
    return wanted == got if wanted and got and (alone or wanted != got) else None


def _letter(text: str) -> str:
    match = _LETTER.fullmatch(text) or _CHOICE.match(text)
    return next(filter(None, match.groups()), "") if match else ""


def _compare_residues(expected: str, answer: str) -> bool | None:
    r"""Compare `4 \pmod 7` and `x \equiv 11 \pmod{7}`; None without a modulus, which is all that a parser reads."""
    if not (_MODULO.search(expected) or _MODULO.search(answer)):
        return None
    pair = [_RESIDUE.fullmatch(text) for text in (expected, answer)]
    if all(pair):
        first, second = ((int(match[1]) % int(match[2]), int(match[2])) for match in pair if match)
        return first == second
    return re.sub(r"[{}\s]", "", expected) == re.sub(r"[{}\s]", "", answer)


def _compare_several(expected: str, answer: str) -> bool | None:
    """Return False if numbers with words between them differ: a parser would read only one of them."""
    pair = expected, answer
    values = [_number(_without_unit(text)) for text in pair]
    several = [value is None and bool(_SEVERAL.match(text)) for value, text in zip(values, pair, strict=True)]
    if all(several):
        first, second = (sorted(re.findall(r"\d+(?:\.\d+)?", text)) for text in pair)
        return None if first == second else False
    return False if any(several) and values != [None, None] else None


def _compare_bases(expected: str, answer: str) -> bool | None:
    r"""Compare integers in a stated base, such as `52_8`. An answer may omit the expected base."""
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
    words = {*re.findall(r"[a-z]+", match.group().lower())} if match else set()
    return answer if match is None or words & _NOT_UNITS else answer[: match.start()]
