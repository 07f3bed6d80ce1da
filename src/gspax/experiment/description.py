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
without changing an experiment. Keywords left at their defaults are included: they are part of what ran.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from enum import Enum
from fnmatch import fnmatchcase
from numbers import Number
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from gspax.config.functions import Function, is_function, is_record, keywords, name_of, unwrap
from gspax.experiment.source import source_hash

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SOURCE = "source-hash"  # no keyword of a function can have this name
_ABSENT = object()
_NAMED_BY_TEXT = (Number, PurePath, Enum, bytes, range, datetime.date, datetime.time, datetime.timedelta)

# What a resumed run may change. None of it enters an update: `schedule.steps` is a total, the others set how often and
# on how many problems the run evaluates and saves, so the parameters after step n stay the same. The limit on prompts
# only adds padding; without it in here, one prompt that is too long would end a run for good. The guard decides which
# updates are skipped: a run that diverged may go on with a stricter one. Instruments only measure.
RESUMABLE = (
    "schedule.steps",
    "schedule.eval_every",
    "schedule.checkpoint_every",
    "schedule.keep_checkpoints",
    "schedule.max_skipped",
    "guard.*",
    "instruments",
    "instruments.*",
    "evaluation.*",
    "sampling.max_prompt_tokens",
    "sampling.max_failed",
    "grading.max_failed",
    "grading.timeout",
    "grading.concurrency",
)


def resumable(description: Mapping[str, object]) -> tuple[str, ...]:
    """The keys of this experiment that a resumed run may change.

    With staleness, not how often it saves: nothing is sampled ahead past a checkpoint.
    """
    is_ahead = flatten(description).get("placement.staleness", 0) != 0
    return tuple(key for key in RESUMABLE if not (is_ahead and key == "schedule.checkpoint_every"))


def describe(value: object) -> Any:
    """`value` as JSON-serialisable data; an `Experiment` gives a dict. The module docstring lists the forms."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if is_record(value):
        return {"type": name_of(type(value))} | {name: describe(each) for name, each in _fields(value).items()}
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
    described = {"type": name_of(type(value))}
    if isinstance(value, _NAMED_BY_TEXT):
        return described | {"value": str(value)}
    if hasattr(value, "__array__") and not (array := np.asarray(value)).dtype.hasobject:
        content = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        return described | {"shape": list(array.shape), "dtype": str(array.dtype), "hash": content}
    return described


def _fields(record: DataclassInstance) -> Mapping[str, object]:
    """What a dataclass consists of: its fields, or what its method `described` gives instead of them."""
    if hasattr(record, "described"):
        return record.described()
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.init}


def _function(value: Function) -> str | dict[str, object]:
    inner = unwrap(value)
    described: dict[str, object] = {"function": name_of(inner)}
    if (source := source_hash(inner)) is not None:
        described[SOURCE] = source
    if isinstance(value, functools.partial) and value.args:
        described["arguments"] = [describe(each) for each in value.args]
    if inspect.ismethod(inner):
        described["self"] = describe(inner.__self__)
    described |= {name: describe(each) for name, each in keywords(value).items() if each is not inspect.Parameter.empty}
    if len(described) == 1 and not isinstance(value, functools.partial):
        return name_of(inner)
    return described


def flatten(description: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Dotted key -> value, in the keys of an override. The name of a class or a function stands under its own key:
    `{"loss": {"function": f, "clip_low": 0.1}}` gives `loss` and `loss.clip_low`."""
    flat: dict[str, object] = {}
    for key, value in description.items():
        path = prefix if prefix and key in ("type", "function") else f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, path)
        else:
            flat[path] = value
    return flat


def difference(old: Mapping[str, object], new: Mapping[str, object], *, ignore: Iterable[str] = ()) -> list[str]:
    """The keys whose values differ between two descriptions, one line each: `optimizer.learning_rate: 1e-4 -> 3e-4`.

    A key that only one of them has differs too.

    Args:
      old: a description.
      new: another one.
      ignore: patterns of keys to leave out; with RESUMABLE, the keys that are left forbid a resume.
    """
    before, after = flatten(old), flatten(new)
    changed = [key for key in before | after if before.get(key, _ABSENT) != after.get(key, _ABSENT)]
    kept = [key for key in changed if not any(fnmatchcase(key, pattern) for pattern in ignore)]
    return [f"{key}: {_show(before, key)} -> {_show(after, key)}" for key in kept]


def show(value: object) -> str:
    """A value of a description, short and exact: 1e-4 rather than 0.0001."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, float) and value != 0 and not 1e-3 <= abs(value) < 1e6:
        return format(Decimal(repr(value)).normalize(), "e").replace("e+", "e")
    return value if isinstance(value, str) else json.dumps(value)


def _show(flat: Mapping[str, object], key: str) -> str:
    return show(flat[key]) if key in flat else "(absent)"
