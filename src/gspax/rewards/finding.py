r"""Finds final answers in completions: in a box, after `####` or "answer is", in a tag, or the last number.

`extract` takes time linear in the text, whatever a policy writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gspax.errors import UserError
from gspax.rewards.notation import tidy
from gspax.rewards.values import Formula, Quantity, read

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K's notes, as in 40+2=<<40+2=42>>42
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_EXPONENT = r"(?:[eE][-+]?\d{1,3}(?!\w))?"  # of 10
_MIXED_NUMBER = rf"{_DIGITS} \d{{1,15}}/\d{{1,15}}(?!\d)"
_SPACED = r"[1-9]\d{0,2}(?:[ \u00a0\u202f]\d{3}){1,6}(?![\d/])"
_SCALE = r"(?i:dozen|hundred|thousand|million|billion|trillion)"
_TEXT = r"\\(?:text|textrm|mbox|mathrm)"
_LAST_NUMBER = re.compile(
    rf"(?<![a-zA-Z\d_.])[-+]?\\?[$€£]?(?:{_MIXED_NUMBER}|(?:(?:{_SPACED}|{_DIGITS})(?:\.\d+)?|\.\d+){_EXPONENT}(?:/\d+)?)"
    rf"(?:\s*\\?%| {_SCALE}s?(?![a-z])|\s*(?:\\[,;:!]\s*)?{_TEXT}\s*\{{[\s~]*{_SCALE}s?(?![a-z])[a-z\s]*\}})?"
)
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\\[,;!]|\{,\})(?=\d{3}(?!\d))")
_MARK = re.compile(r"\banswer\b[*_`]{0,3}(?:\s?(?:[:：=])|\s(?:is|are)\b:?)[*_`]{0,3}", re.IGNORECASE)
_REASON = re.compile(r"[\s,;]+\(?(?:since|because|as|i\.e\.|which|where|so that)\b|,\s+not\b", re.IGNORECASE)
_SENTENCE_END = re.compile(  # before a capital letter, or after a number and before a number with words
    r"(?<=[\w)}\]$%*`])[.!](?=\s+[A-Z*])|(?<=[\d)}\]$%*`])[.!](?=\s+[$€£]?\d\S*+(?:\s++\S++){3})"
)
_WORD = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{2,}")
_ECHO = re.compile(r"[$*`\"' ]*answer\b", re.IGNORECASE)  # repeats the prompt
_EQUATION = re.compile(r"\W*[a-zA-Z]\w{0,3}\W*=")
_HEADING = re.compile(r"\d+[.)]\s+[A-Za-z]")
_PLACEHOLDER = re.compile(
    r"\W*(?:none|null|nan|n/?a|nil|to ?do|tbd|unknown|missing|x{3,})\W*|[?._…\s-]+", re.IGNORECASE
)
_MOST_WORDS = 8  # words of prose in an answer
_MOST_WORDS_AFTER_IS = 3
_LONGEST_LINE = 4000  # characters of an answer's line
_MOST_MARKS = 16  # marks tried, from the end


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
        if (answer := find(completion)) and (answer := tidy(answer)):
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
    parts = text.split("####")[1:]
    for part in reversed(parts[1 - _MOST_MARKS :]):
        line, _, below = part.strip(" \t#").partition("\n")
        line = tidy(line).strip(" *_`:")
        if not line:
            line, _, below = below.strip().partition("\n")
        is_number = _is_number(line) and not _HEADING.match(line)
        if line and (is_number or (part is parts[-1] and not below.strip())):
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
            line = right if re.search(r"[\d\\]", right) or not _is_number(left) else left
        is_echo = _ECHO.match(line) or not line.strip("$*`\"' .")
        if len(_WORD.findall(line)) <= most and not is_echo:
            return line
    return None


def _last_number(text: str) -> str | None:
    numbers = _LAST_NUMBER.findall(_BETWEEN_DIGITS.sub("", text))
    return numbers[-1] if numbers else None


def _is_number(text: str) -> bool:
    """Return whether a text is a number, or begins as another value does, such as a time or `5 or more`."""
    answer = read(text)
    begins_with_digit = answer.text.lstrip("-$€£\\")[:1].isdecimal()
    return isinstance(answer.value, Quantity) or (begins_with_digit and not isinstance(answer.value, Formula))


FORMS: dict[str, Callable[[str], str | None]]
FORMS = {"boxed": _boxed, "hash": _hash, "tag": _tag, "answer": _after_answer, "number": _last_number}
