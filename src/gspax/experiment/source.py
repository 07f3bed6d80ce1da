"""A hash of the source of a user's function, so that a resumed run notices a changed reward.

The hash covers the function, the user's functions that it uses, directly or through others, in this file or in an
imported one, and the numbers and strings that they read from a file or from an enclosing function. Comments, formatting
and the place in the file do not count. Methods of classes are not covered, nor are functions that are called through an
object or passed around in a container. A hash of the whole file would do without all this, but would also forbid a
resume after a change of the settings in it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from gspax.config.functions import Function

_GSPAX = str(Path(__file__).parents[1])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {_GSPAX})
_PLAIN = (bool, int, float, str, type(None))


def source_hash(function: Function) -> str | None:
    """16 hex digits; None for functions of gspax and of installed packages, and where there is no source."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not _is_own(function):
        return None
    seen: dict[types.CodeType, str] = {}
    parts = sorted(_parts(function, seen))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if seen[function.__code__] else None


def _is_own(function: object) -> TypeGuard[types.FunctionType]:
    """Whether a function is a user's: written in Python, and in no installed package."""
    return isinstance(function, types.FunctionType) and _is_users(function.__code__.co_filename)


def _is_users(file: str | None) -> bool:
    """Whether a file is in no installed package."""
    if file is None or "site-packages" in file:
        return False
    return not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


def _parts(function: types.FunctionType, seen: dict[types.CodeType, str]) -> Iterator[str]:
    """The source of a function and of the user's functions that it uses, and the plain values that they read."""
    code = function.__code__
    if code in seen:
        return
    seen[code] = _source(code)
    yield seen[code]
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    free = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    for name, value in (_lookup(function) | free).items():
        if _is_own(value):
            yield from _parts(value, seen)
        elif isinstance(value, _PLAIN):
            yield f"{name} = {value!r}"


def _lookup(function: types.FunctionType) -> dict[str, object]:
    """The values of the names in a function, from its file and from the user's modules that it names."""
    names = list(_names(function.__code__))
    values = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for prefix, module in list(values.items()):
        if isinstance(module, types.ModuleType) and _is_users(getattr(module, "__file__", None)):
            values |= {f"{prefix}.{name}": vars(module)[name] for name in names if name in vars(module)}
    return values


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function and those defined inside it look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


@functools.lru_cache(maxsize=256)  # a file that is edited during the run must not change what ran
def _source(code: types.CodeType) -> str:
    """The source of a function or lambda, without comments and formatting; empty if it cannot be found."""
    linecache.checkcache(code.co_filename)
    try:
        module = ast.parse("".join(linecache.getlines(code.co_filename)))
    except SyntaxError:
        return ""
    return next((ast.unparse(node) for node in ast.walk(module) if _is_definition(node, code)), "")


def _is_definition(node: ast.AST, code: types.CodeType) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return node.name == code.co_name and first == code.co_firstlineno
    if isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
        body = node.body  # several lambdas may start on one line
        span = (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset)
        return span in list(code.co_positions())
    return False
