"""An experiment as plain data: what a checkpoint stores, what a resumed run compares, what the dry run prints.

`describe` gives nested dicts, lists, strings, numbers, booleans and None only, equal after a trip through JSON, and
free of addresses, so that the same experiment has the same description in every process.

    a dataclass                     {"type": "module.Class", field: ..., ...}
    a function                      "module.name"
    a function with keyword-only
    parameters, or a partial        {"function": "module.name", keyword: ..., ...}

Keywords left at their defaults are in there too: a clip range is part of what ran, whoever wrote it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

# What a resumed run may change. None of it enters an update: `schedule.steps` is a target, the others say how often
# and on how much the run measures and saves itself, so the parameters after step n are the same either way.
RESUMABLE = (
    "schedule.steps",
    "schedule.eval_every",
    "schedule.checkpoint_every",
    "schedule.keep_checkpoints",
    "evaluation.*",
)


def describe(value: Any) -> Any:
    """`value` as JSON-able data; an `Experiment` gives a dict. See the module for the form."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if is_record(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return {"type": name_of(type(value))} | {name: describe(getattr(value, name)) for name in names}
    if isinstance(value, functools.partial) or is_function(value):
        return _function(value)
    if isinstance(value, type):
        return name_of(value)
    if isinstance(value, Mapping):
        return {str(key): describe(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [describe(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((describe(each) for each in value), key=str)
    return {"type": name_of(type(value))}


def _function(value: Any) -> Any:
    inner = unwrap(value)
    described: dict[str, Any] = {"function": name_of(inner)}
    if isinstance(value, functools.partial) and value.args:
        described["arguments"] = [describe(each) for each in value.args]
    if inspect.ismethod(inner):
        described["self"] = describe(inner.__self__)
    described |= {name: describe(each) for name, each in keywords(value).items() if each is not inspect.Parameter.empty}
    if len(described) == 1 and not isinstance(value, functools.partial):
        return described["function"]
    return described


def is_record(value: Any) -> bool:
    """Whether `value` is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_function(value: Any) -> bool:
    """Whether `value` can be called and has a name of its own (a class does not count)."""
    return callable(value) and not isinstance(value, type) and hasattr(value, "__qualname__")


def unwrap(function: Any) -> Any:
    """The function inside a `functools.partial`."""
    return function.func if isinstance(function, functools.partial) else function


def keywords(function: Any) -> dict[str, Any]:
    """The keyword-only parameters of a function or a partial with what they are set to, and a partial's keywords.

    A parameter that has no value yet maps to `inspect.Parameter.empty`.
    """
    found = {
        name: parameter.default
        for name, parameter in parameters(unwrap(function)).items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return found | (function.keywords if isinstance(function, functools.partial) else {})


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; none if it does not tell (some built-in functions)."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def name_of(value: Any) -> str:
    """`module.qualified_name` of a function or a class."""
    return f"{getattr(value, '__module__', None) or 'builtins'}.{value.__qualname__}"


def flatten(description: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, in the keys of an override. The name of a class or a function stands under its own key:
    `{"loss": {"function": f, "clip_low": 0.1}}` gives `loss` and `loss.clip_low`."""
    flat: dict[str, Any] = {}
    for key, value in description.items():
        path = prefix if prefix and key in ("type", "function") else f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, path)
        else:
            flat[path] = value
    return flat


def difference(old: Mapping[str, Any], new: Mapping[str, Any], *, ignore: Iterable[str] = ()) -> list[str]:
    """What changed between two descriptions, one line per key: `optimizer.learning_rate: 1e-4 -> 3e-4`.

    Keys that match a pattern of `ignore` are left out: with `ignore=RESUMABLE`, what is left forbids a resume.
    """
    before, after = flatten(old), flatten(new)
    lines = []
    for key in before | after:
        if any(fnmatchcase(key, pattern) for pattern in ignore):
            continue
        if key not in before or key not in after or before[key] != after[key]:
            lines.append(f"{key}: {_show(before, key)} -> {_show(after, key)}")
    return lines


def show(value: Any) -> str:
    """A value of a description, short and exact: 1e-4 rather than 0.0001."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, float) and value != 0 and not 1e-3 <= abs(value) < 1e6:
        return format(Decimal(repr(value)).normalize(), "e").replace("e+", "e")
    return value if isinstance(value, str) else json.dumps(value)


def _show(flat: Mapping[str, Any], key: str) -> str:
    return show(flat[key]) if key in flat else "(absent)"
