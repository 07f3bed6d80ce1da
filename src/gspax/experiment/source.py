"""A hash of the source of a user's function, so that a resumed run notices a changed reward.

It covers the function's own lines, those of the user's other functions that it uses, directly or through others, in
this file or in one that is imported, and the numbers and strings that they read from a file or from an enclosing
function. Comments, blank lines and the place in the file do not count. Methods of classes are not covered, nor is what
is called through an object or passed around in a container.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import linecache
import sysconfig
import textwrap
import tokenize
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_GSPAX = str(Path(__file__).parents[1])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {_GSPAX})
_PLAIN = (bool, int, float, str, type(None))


def source_hash(function: Any) -> str | None:
    """16 hex digits; None for functions of gspax and of installed packages, and where there is no source."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not _is_own(function):
        return None
    seen: dict[types.CodeType, str] = {}
    parts = sorted(_parts(function, seen))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if seen[function.__code__] else None


def _is_own(function: Any) -> bool:
    """Whether a function is a user's: written in Python, and in no installed package."""
    return isinstance(function, types.FunctionType) and _is_users(function.__code__.co_filename)


def _is_users(file: str | None) -> bool:
    """Whether a file is in no installed package."""
    if file is None or "site-packages" in file:
        return False
    return not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


def _parts(function: types.FunctionType, seen: dict[types.CodeType, str]) -> Iterator[str]:
    """The source of a function, of the user's functions that it uses, and the plain values that they read."""
    code = function.__code__
    if code in seen:
        return
    seen[code] = _source(code, code.co_filename)
    yield seen[code]
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    free = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    for name, value in (_lookup(function) | free).items():
        if _is_own(value):
            yield from _parts(value, seen)
        elif isinstance(value, _PLAIN):
            yield f"{name} = {value!r}"


def _lookup(function: types.FunctionType) -> dict[str, Any]:
    """What the names in a function stand for, in its file and in the user's modules that it names."""
    names = list(_names(function.__code__))
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for prefix, module in list(found.items()):
        if isinstance(module, types.ModuleType) and _is_users(getattr(module, "__file__", None)):
            found |= {f"{prefix}.{name}": vars(module)[name] for name in names if name in vars(module)}
    return found


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function and those defined inside it look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


@functools.lru_cache(maxsize=256)  # a file that is edited during the run must not change what ran
def _source(code: types.CodeType, file: str) -> str:
    """The text of a function or lambda without comments and blank lines; empty if it cannot be found."""
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file))
    try:
        found = [node for node in ast.walk(ast.parse(text)) if _is_definition(node, code)]
    except SyntaxError:
        return ""
    segments = [ast.get_source_segment(text, node, padded=True) or "" for node in found]
    return _without_comments(textwrap.dedent(segments[0])) if segments else ""


def _is_definition(node: ast.AST, code: types.CodeType) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        return node.name == code.co_name and first == code.co_firstlineno
    if isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
        body = node.body  # several lambdas may start on one line
        span = (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset)
        return span in list(code.co_positions())
    return False


def _without_comments(text: str) -> str:
    lines = text.splitlines()
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    except (tokenize.TokenError, IndentationError):  # a lambda over several lines is no statement of its own
        pass
    return "\n".join(line.rstrip() for line in lines if line.strip())
