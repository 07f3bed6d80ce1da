"""An experiment as plain data: checkpoints store it, a resumed run compares it, the dry run prints it.

`describe` gives nested dicts, lists, strings, numbers, booleans and None only, unchanged by a round trip through JSON
and without addresses, so that the same experiment has the same description in every process.

    a dataclass                     {"type": "package.Class", field: ..., ...}; its method `described`, if it has one,
                                    gives other keys, such as the content of a file instead of its path
    a function                      "package.name"
    a function with keyword-only
    parameters, or a partial        {"function": "package.name", keyword: ..., ...}
    a function of one's own         {"function": "package.name", "source-hash": ..., keyword: ..., ...}
    an array                        {"type": ..., "shape": ..., "dtype": ..., "hash": ...}
    a path, a date, a fraction      {"type": ..., "value": its text}

Names are public ones (`gspax.losses.gspo`, not the module that defines it), so that code inside a package can move
without changing an experiment. Fields and keywords left at their defaults are included: they are part of what ran. A
field or keyword that a recorded description lacks has its default (`complete`): it was added after the run.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import functools
import hashlib
import inspect
import json
import linecache
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from enum import Enum
from fnmatch import fnmatchcase
from numbers import Number
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from gspax.config.functions import Function, is_function, is_record, keywords, lookup, name_of, part_names, unwrap
from gspax.errors import is_library

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SOURCE = "source-hash"  # no keyword of a function can have this name
_ABSENT = object()
_PLAIN = (bool, int, float, str, type(None))
_NAMED_BY_TEXT = (Number, PurePath, Enum, bytes, range, datetime.date, datetime.time, datetime.timedelta)

# What a resumed run may change. None of it enters an update: `schedule.steps` is a total, the others set how often and
# on how many problems the run evaluates and saves, so the parameters after step n stay the same. The limit on prompts
# only adds padding; without it in here, one prompt that is too long would end a run for good. The guard decides which
# updates are skipped: a run that diverged may go on with a stricter one. Diagnostics only measure.
RESUMABLE = (
    "schedule.steps",
    "schedule.eval_every",
    "schedule.checkpoint_every",
    "schedule.keep_checkpoints",
    "schedule.max_skipped",
    "schedule.record_rollouts",
    "schedule.timeline",
    "guard.*",
    "diagnostics",
    "diagnostics.*",
    "evaluation.*",
    "sampling.max_prompt_tokens",
    "sampling.max_failed",
    "grading.max_failed",
    "grading.timeout",
    "grading.concurrency",
    "engine.server",
    "engine.addresses",
    "engine.folder",
    "engine.requests",
    "engine.timeout",
)


def resumable(description: Mapping[str, object]) -> tuple[str, ...]:
    """Return the keys of this experiment that a resumed run may change.

    With staleness, not how often it saves: nothing is sampled ahead past a checkpoint.
    """
    is_ahead = any(flatten(description).get(key, 0) != 0 for key in ("placement.staleness", "engine.staleness"))
    return tuple(key for key in RESUMABLE if not (is_ahead and key == "schedule.checkpoint_every"))


def describe(value: object) -> Any:
    """Return `value` as JSON-serializable data; an `Experiment` gives a dict. The module docstring lists the forms."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if is_record(value):
        return {"type": name_of(type(value))} | {name: describe(x) for name, x in _fields(value).items()}
    if isinstance(value, functools.partial) or is_function(value):
        return _function(value)
    if isinstance(value, type):
        return name_of(value)
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((describe(item) for item in value), key=str)
    described = {"type": name_of(type(value))}
    if isinstance(value, _NAMED_BY_TEXT):
        return described | {"value": str(value)}
    if hasattr(value, "__array__") and not (array := np.asarray(value)).dtype.hasobject:
        content = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        return described | {"shape": list(array.shape), "dtype": str(array.dtype), "hash": content}
    return described


def described_parts(value: object) -> Iterator[object]:
    """Return the values directly inside a value that its description describes too."""
    if is_record(value):
        yield from _fields(value).values()
    elif isinstance(value, functools.partial) or is_function(value):
        inner = unwrap(value)
        yield from [*keywords(value).values(), *(value.args if isinstance(value, functools.partial) else ())]
        yield from [inner.__self__] if inspect.ismethod(inner) else []
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value


def complete(description: object) -> Any:
    """Add what a description lacks, at its default, where the module of the class or the function is loaded.

    This is a field of a class, or a keyword of a function, that was added after the description was written.
    """
    if isinstance(description, list):
        return [complete(item) for item in description]
    if isinstance(description, str):  # it may name a function, which had no keywords
        found = lookup(description) if description.replace(".", "").isidentifier() else None
        return complete({"function": description}) if is_function(found) and any(_defaults(found)) else description
    if not isinstance(description, Mapping):
        return description
    names = ("type", "function")
    kind = lookup(str(description.get("type", description.get("function"))))
    return {key: value if key in names else complete(value) for key, value in description.items()} | {
        name: describe(default) for name, default in _defaults(kind) if name not in description
    }


def without_defaults(description: object) -> Any:
    """Return a description without the fields and keywords that have their defaults.

    The name of a class of `gspax.config` is left out too: the field has no other class.
    """
    if isinstance(description, list):
        return [without_defaults(item) for item in description]
    if not isinstance(description, Mapping):
        return description
    kind = str(description.get("type", description.get("function")))
    defaults = {name: complete(describe(value)) for name, value in _defaults(lookup(kind))}
    left = {
        key: without_defaults(value)
        for key, value in description.items()
        if key not in defaults or complete(value) != defaults[key]
    }
    is_plain = "type" in left and kind.startswith("gspax.config.")
    return {key: value for key, value in left.items() if not (is_plain and key == "type")}


def _defaults(kind: object) -> Iterator[tuple[str, object]]:
    """Yield the keywords of a function, or the fields of a dataclass, that have a default.

    None if a method describes the records of the class.
    """
    if is_function(kind):
        yield from ((name, value) for name, value in keywords(kind).items() if value is not inspect.Parameter.empty)
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind) and not hasattr(kind, "described"):
        for field in dataclasses.fields(kind):
            if field.init and field.default is not dataclasses.MISSING:
                yield field.name, field.default
            elif field.init and field.default_factory is not dataclasses.MISSING:
                yield field.name, field.default_factory()


def _fields(record: DataclassInstance) -> Mapping[str, object]:
    """Return the fields of a dataclass, or what its method `described` gives instead of them."""
    if hasattr(record, "described"):
        return record.described()
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.init}


def _function(value: Function) -> str | dict[str, object]:
    inner = unwrap(value)
    described: dict[str, object] = {"function": name_of(inner)}
    if (source := source_hash(inner)) is not None:
        described[SOURCE] = source
    if isinstance(value, functools.partial) and value.args:
        described["arguments"] = [describe(argument) for argument in value.args]
    if inspect.ismethod(inner):
        described["self"] = describe(inner.__self__)
    given = {name: item for name, item in keywords(value).items() if item is not inspect.Parameter.empty}
    described |= {name: describe(item) for name, item in given.items()}
    if len(described) == 1 and not isinstance(value, functools.partial):
        return name_of(inner)
    return described


def flatten(description: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Map the dotted keys of a description, as overrides have them, to its values.

    The name of a class or a function stands under its own key: `{"loss": {"function": f, "clip_low": 0.1}}` gives
    `loss` and `loss.clip_low`. The parts of a tuple have their names or numbers: `evaluation.tasks.gsm8k.samples`.
    """
    flat: dict[str, object] = {}
    for key, value in description.items():
        path = prefix if prefix and key in ("type", "function") else f"{prefix}.{key}" if prefix else key
        if isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
            value = dict(zip(part_names([part.get("name") for part in value]), value, strict=True))
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, path)
        else:
            flat[path] = value
    return flat


def reward_names(flat: Mapping[str, object]) -> list[str]:
    """Return the reward function of a flat description, or its functions if it has several by name."""
    named = [value for key, value in flat.items() if key.startswith("reward.") and key.count(".") == 1]
    return [str(value) for value in ([flat["reward"]] if "reward" in flat else named)]


def difference(old: Mapping[str, object], new: Mapping[str, object], *, ignore: Iterable[str] = ()) -> list[str]:
    """List the keys whose values differ between two descriptions: `optimizer.learning_rate: 1e-4 -> 3e-4`.

    A setting that one of them lacks has its default. A key without a default that only one of them has differs.

    Args:
      old: a description.
      new: another one.
      ignore: patterns of keys to leave out; with RESUMABLE, the keys that are left forbid a resume.
    """
    before, after = flatten(complete(old)), flatten(complete(new))
    changed = [key for key in before | after if before.get(key, _ABSENT) != after.get(key, _ABSENT)]
    kept = [key for key in changed if not any(fnmatchcase(key, pattern) for pattern in ignore)]
    return [f"{key}: {_show(before, key)} -> {_show(after, key)}" for key in kept]


def show(value: object) -> str:
    """Write a value of a description, short and exact: 1e-4 rather than 0.0001."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, float) and value != 0 and not 1e-3 <= abs(value) < 1e6:
        return format(Decimal(repr(value)).normalize(), "e").replace("e+", "e")
    return value if isinstance(value, str) else json.dumps(value)


def _show(flat: Mapping[str, object], key: str) -> str:
    return show(flat[key]) if key in flat else "(absent)"


def source_hash(function: Function) -> str | None:
    """Hash a source to 16 hex digits; None without a source, and for functions of gspax and of installed packages.

    The hash covers the function, the user's functions that it uses, directly or through others, in this file or in an
    imported one, and the numbers, strings, and tuples that they read from a file or from an enclosing function.
    Comments, formatting and the place in the file do not count, nor do lists and dictionaries, which may be caches.
    Methods of classes are not covered, nor are functions that are called through an object or passed around in a
    container. A hash of the whole file would do without all this, but would also forbid a resume after a change of
    the settings in it.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not _is_own(function):
        return None
    seen: dict[types.CodeType, str] = {}
    parts = sorted(_parts(function, seen))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if seen[function.__code__] else None


def source_files(function: Function) -> set[str]:
    """Return the user's files that hold the functions of a source hash; none where there is no hash."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    seen: dict[types.CodeType, str] = {}
    if _is_own(function):
        list(_parts(function, seen))
    return {code.co_filename for code in seen}


def _is_own(function: object) -> TypeGuard[types.FunctionType]:
    """Whether a function is a user's: written in Python, and in no installed package."""
    return isinstance(function, types.FunctionType) and not is_library(function.__code__.co_filename)


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
        elif _is_constant(value):
            yield f"{name} = {sorted(map(repr, value)) if isinstance(value, frozenset) else value!r}"


def _is_constant(value: object) -> bool:
    """Whether a value is plain and cannot change during the run, as a dictionary might that caches something."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, _PLAIN)


def _lookup(function: types.FunctionType) -> dict[str, object]:
    """The values of the names in a function, from its file and from the user's modules that it names."""
    names = list(_names(function.__code__))
    values = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for prefix, module in list(values.items()):
        file = getattr(module, "__file__", None) if isinstance(module, types.ModuleType) else None
        if file is not None and not is_library(file):
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
