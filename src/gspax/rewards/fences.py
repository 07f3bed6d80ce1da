"""Finds programs in completions: fenced blocks in every form in which models write them.

A fence is three or more backticks or tildes. `blocks` finds the blocks in one pass over any text.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass

_LONGEST_LINE = 1000  # characters after an opening fence on its line
_FENCE = re.compile(r"`{3,}|~{3,}")
_IN_CODE = re.compile(r"\\.|#|\"\"\"|'''|[\"'\n]|`{3,}|~{3,}", re.DOTALL)
_BEFORE = re.compile(r"(?:[ \t>]|[-*+][ \t]|\d{1,3}[.)][ \t])*")  # indentation, list items, and quotation marks
_WORD = re.compile(r"[\w+#.-]+[ \t]*")  # directly after a fence this is a language
_LANGUAGE = re.compile(r"[ \t{.]*([A-Za-z][\w+#-]*)?")
_PYTHON = re.compile(r"i?py(?:thon)?[\d.]*", re.IGNORECASE)
_DOCUMENTS = ("markdown", "md")  # languages of blocks that hold blocks
_CONSOLE = re.compile(r"\s*(?:>>>|\$ |In \[\d)")
_STATEMENT = re.compile(  # matches the start of a program
    r"\s*(?:(?:async[ ]+)?def[ ]+\w+[ ]*\(|class[ ]+\w+[ ]*[(:]|import[ ]+\w|from[ ]+[\w.]+[ ]+import\b|@\w|#!|print\("
    r"|\w+[ ]*=[^=]|(?:for|while|if|with)\b[^\n]{1,200}:[ \t]*(?:#[^\n]*)?\n)"
)
_QUOTE = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
      language: the first word after the opening fence, in lower case; empty if there is none.
      code: the lines inside, without the indentation that they share.
      closed: whether a fence ends the block, rather than the end of the text.
    """

    language: str
    code: str
    closed: bool = True

    @property
    def is_python(self) -> bool:
        """Whether the fence says Python, and the block is not a console session."""
        return _PYTHON.fullmatch(self.language) is not None and not _CONSOLE.match(self.code)


def blocks(text: str) -> list[Block]:
    """Find the fenced blocks of a text, in order.

    An opening fence begins its line, apart from indentation, list items and quotation marks, or ends its line with at
    most a language after it. The closing fence is the next one of the same kind that is not in a string or comment
    of the code. A program before the first fence is a block too, as if the text or the prompt had opened it; before a
    lone fence with prose after it, so are lines that are not a valid program.
    """
    found: list[Block] = []
    position, first, strings = 0, True, True
    while match := _FENCE.search(text, position):
        line = text.rfind("\n", position, match.start()) + 1 or position
        farthest = match.end() + _LONGEST_LINE
        end = text.find("\n", match.end(), farthest)
        end = end if end >= 0 else min(farthest, len(text))
        info, before = text[match.end() : end], text[line : match.start()]
        if (second := _FENCE.search(info)) and second.group()[0] == match.group()[0]:  # closed on the same line
            found += _inline(info[: second.start()])
            position = match.end() + second.end()
            continue
        begun, first = first and _is_begun(text, match), False
        if begun:
            found.append(Block("", text[: match.start()]))
        if (begun and not _WORD.fullmatch(info)) or not _opens(before, info):
            position = match.end()
            continue
        code, position, strings, closed = _read(text, min(end + 1, len(text)), match.group(), strings)
        block = _block(info, before, code, closed)
        found += (block.language in _DOCUMENTS and blocks(block.code)) or [block]
    return found


def is_program(text: str) -> bool:
    """Return whether a text is Python that does something: names and values alone, such as `3, 4`, do not."""
    text = re.sub(r"\\(?=[^\n\r'\"\\])", r"\\\\", text)  # escapes of strings could raise warnings
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return any(not isinstance(line, ast.Expr) or isinstance(line.value, ast.Call | ast.Await) for line in body)


def _is_begun(text: str, fence: re.Match[str]) -> bool:
    """Return whether a program, even an invalid one, precedes the first fence, which closes it."""
    before, after = text[: fence.start()], text[fence.end() :]
    if is_program(before):
        return True
    alone = after[:1] in ("", "\n") and not _FENCE.search(after) and not is_program(textwrap.dedent(after))
    return alone and bool(_STATEMENT.match(before))


def _opens(before: str, info: str) -> bool:
    """Return whether a fence between these parts of its line may open a block."""
    if len(info) >= _LONGEST_LINE:
        return False
    return bool(_BEFORE.fullmatch(before)) or not info.strip() or bool(_WORD.fullmatch(info))


def _read(text: str, start: int, fence: str, strings: bool) -> tuple[str, int, bool, bool]:
    """Read the code from `start` to its closing fence; return (code, position after it, track strings, closed).

    A string that never ends would hide every fence: then the first fence in it closes, and strings are ignored from
    there on.
    """
    inside, hidden = "", -1
    for token in _IN_CODE.finditer(text, start):
        mark = token.group()
        if mark[0] in "`~":
            if mark[0] != fence[0] or len(mark) < len(fence):
                continue
            if not strings or not inside:
                return _end(text, start, token.start(), strings)
            if len(inside) == 3 and hidden < 0:
                hidden = token.start()
        elif mark == "\n":
            inside = inside if len(inside) == 3 else ""
        elif not inside and mark[0] in "#\"'":
            inside = mark
        elif mark == inside and mark != "#":
            inside, hidden = "", -1
    if hidden >= 0:
        return _end(text, start, hidden, False)
    return text[start:].rstrip("`~"), len(text), strings, False


def _end(text: str, start: int, stop: int, strings: bool) -> tuple[str, int, bool, bool]:
    """Return the code before a closing fence. A fence with a language also opens the next block."""
    after = len(text) if (match := _FENCE.match(text, stop)) is None else match.end()
    rest = text[after : after + _LONGEST_LINE].partition("\n")[0]
    return text[start:stop], stop if _WORD.fullmatch(rest) else after, strings, True


def _block(info: str, before: str, code: str, closed: bool) -> Block:
    language = _language(info)
    code = textwrap.dedent(_QUOTE.sub("", code) if ">" in before else code)
    first = info.strip()[len(language) :]
    if _PYTHON.fullmatch(language) and is_program(first.strip()):  # code on the line of the fence
        code = f"{first.strip()}\n{code}"
    return Block(language, code, closed)


def _inline(text: str) -> list[Block]:
    """Return the block between two fences on a line, if it is a program."""
    language = _language(text) if _PYTHON.fullmatch(_language(text)) else ""
    code = text.strip()[len(language) :].strip()
    return [Block(language, f"{code}\n")] if is_program(code) else []


def _language(info: str) -> str:
    match = _LANGUAGE.match(info)
    return ((match and match[1]) or "").lower()
