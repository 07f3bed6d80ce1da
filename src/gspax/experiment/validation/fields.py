"""Checks types, ranges and signatures of an experiment's fields by their annotations.

Each message is one sentence: where, what was wanted, what came.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeVar

from gspax.config.functions import (
    GIVEN_KEYWORDS,
    Function,
    hints_of,
    is_gspax,
    is_record,
    keywords,
    named_parts,
    parameters,
    title_of,
    unwrap,
)
from gspax.config.hints import Hint, bare, describe_hint, fits
from gspax.config.protocols import argument_names, is_function_protocol
from gspax.config.ranges import Range
from gspax.config.term import Term
from gspax.errors import did_you_mean
from gspax.experiment.description import show

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


class WrongFieldError(BaseException):
    """Raised when a check reads a field with an error. No `except Exception` around a user's function catches it."""


def without(record: T, keys: Iterable[str]) -> T:
    """Copy a record of `gspax.config` so that reading one of these fields raises WrongFieldError.

    Args:
      keys: keys of overrides; a field of another object, such as a function's keyword, stands for the whole object.
    """
    by_name: dict[str, list[str]] = {}
    for key in keys:
        name, _, rest = key.partition(".")
        by_name.setdefault(name, []).append(rest)
    changed, unreadable = copy.copy(record), {}
    for name, rests in by_name.items():
        part = _part_without(getattr(record, name, None), rests)
        if part is not None:
            object.__setattr__(changed, name, part)  # the records are frozen
        else:
            unreadable[name] = property(_raise)
    object.__setattr__(changed, "__class__", type(type(record).__name__, (type(record),), unreadable))
    return changed


def _part_without(part: object, keys: list[str]) -> object:
    """Copy a part, a record or a tuple of records, without these fields; None if only the whole is known."""
    if all(keys) and is_record(part) and (isinstance(part, Term) or type(part).__module__.startswith("gspax.config.")):
        return without(part, keys)
    if not all(keys) or not isinstance(part, tuple):
        return None
    by_name: dict[str, list[str]] = {}
    for key in keys:
        name, _, rest = key.partition(".")
        by_name.setdefault(name, []).append(rest)
    items = named_parts(part)
    changed = [_part_without(item, by_name[name]) if name in by_name else item for name, item in items.items()]
    is_known = by_name.keys() <= items.keys() and all(item is not None for item in changed)
    return tuple(changed) if is_known else None


def _raise(record: object) -> NoReturn:
    raise WrongFieldError


class Field(NamedTuple):
    """A field of an experiment or of one of its parts."""

    key: str  # as in an override
    value: Any
    hint: Hint  # includes the ranges
    owner: DataclassInstance  # the record that it is a field of


def type_problems(record: DataclassInstance, prefix: str = "") -> Iterator[str]:
    """Yield a sentence for each field whose value does not have the annotated type."""
    for name, hint in hints_of(type(record)).items():
        value = getattr(record, name)
        if not fits(value, hint):
            yield f"{prefix}{name}: wanted {describe_hint(hint)}, got {value!r}"
        else:
            for key, part in _parts(f"{prefix}{name}", value, hint):
                yield from type_problems(part, f"{key}.")


def range_problems(record: DataclassInstance) -> Iterator[str]:
    """Yield a sentence for each field or keyword of a function that is out of its annotated range."""
    for key, value, hint, owner in fields(record):
        if is_function_protocol(bare(hint)) and callable(value):
            yield from _keyword_problems(key, value)
        yield from _out_of_range(key, value, hint)
        is_own = type(owner).__module__.startswith("gspax.config.")
        texts = [item for item in value if isinstance(item, str)] if is_own and isinstance(value, tuple) else []
        if len(set(texts)) < len(texts):
            yield f"{key}: wanted each of them once, got {', '.join(texts)}"


def _keyword_problems(key: str, function: Function) -> Iterator[str]:
    """Yield a sentence for each keyword of a function, and of functions in its keywords, with a wrong value.

    The types of gspax's own functions are checked too; annotations of others need not be complete.
    """
    inner = unwrap(function)
    hints, is_own = hints_of(inner, ranges=True), is_gspax(inner)
    for name, value in keywords(function).items():
        hint = hints.get(name)
        if typing.get_origin(hint) is Annotated:
            yield from _out_of_range(f"{key}.{name}", value, hint)
        elif (
            is_own and hint not in (None, typing.Any) and value is not inspect.Parameter.empty and not fits(value, hint)
        ):
            yield f"{key}.{name}: wanted {describe_hint(hint)}, got {value!r:.200}"
        inside = {f".{each}": member for each, member in value.items()} if isinstance(value, Mapping) else {"": value}
        for each, member in inside.items():
            if isinstance(member, functools.partial):
                yield from _keyword_problems(f"{key}.{name}{each}", member)


def function_problems(record: DataclassInstance) -> Iterator[str]:
    """Yield a sentence for each function whose signature does not accept the run's call."""
    for key, value, hint, _ in fields(record):
        if is_function_protocol(bare(hint)) and callable(value):
            names = argument_names(bare(hint))
            if problem := _misfit(value, names):
                yield f"{key}: wanted a function of ({', '.join(names)}), {problem}"


def fields(record: DataclassInstance, prefix: str = "") -> Iterator[Field]:
    """Yield every field of a record and of its parts, including a data source or an environment that is a dataclass."""
    for name, hint in hints_of(type(record), ranges=True).items():
        try:
            value = getattr(record, name, None)  # an annotation of a user's own class may have no value
        except WrongFieldError:
            continue
        yield Field(f"{prefix}{name}", value, hint, record)
        for key, part in _parts(f"{prefix}{name}", value, hint, protocols=True):
            yield from fields(part, f"{key}.")


def _parts(key: str, value: object, hint: Hint, *, protocols: bool = False) -> Iterator[tuple[str, DataclassInstance]]:
    """Yield the dataclasses of an experiment in one of its fields: the value, or the elements of a tuple.

    Args:
      protocols: include the user's objects, whose annotations need not be complete.
    """
    wanted, own = bare(hint), protocols and getattr(bare(hint), "_is_protocol", False)
    kinds = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)  # Yarn | Llama3Rope
    classes = [kind for kind in kinds if isinstance(kind, type) and kind is not typing.Any]  # which is a class, too
    classes = [kind for kind in classes if not getattr(kind, "_is_protocol", False)]
    if is_record(value) and (any(isinstance(value, kind) for kind in classes) or own):
        yield key, value
    elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, typing.get_args(wanted)[:1])):
        yield from ((f"{key}.{name}", item) for name, item in named_parts(value).items() if is_record(item))


def _out_of_range(key: str, value: object, hint: Hint) -> Iterator[str]:
    if typing.get_origin(hint) is not Annotated or value is inspect.Parameter.empty:
        return
    kind, *ranges = typing.get_args(hint)
    if not fits(value, kind):
        yield f"{key}: wanted {describe_hint(kind)}, got {value!r}"
        return
    for range_ in ranges:
        if isinstance(range_, Range) and not range_.accepts(value):
            yield f"{key}: wanted {range_.words}, got {show(value) if isinstance(value, int | float) else repr(value)}"


def takes_segments(function: Function) -> bool:
    """Return whether a function takes `segment_ids`, which distinguish the responses of a packed row."""
    return "segment_ids" in parameters(unwrap(function))


def positional_count(function: Function) -> int:
    """Return the number of positional parameters."""
    kinds = [parameter.kind for parameter in parameters(unwrap(function)).values()]
    return sum(kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) for kind in kinds)


def _misfit(function: Function, names: tuple[str, ...]) -> str:
    """Explain why the function cannot take these positional arguments; empty if it can."""
    inner = unwrap(function)
    title = title_of(inner)
    known = parameters(inner)
    anything = not known or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    bound = function.keywords if isinstance(function, functools.partial) else {}
    for keyword in bound if not anything else ():
        if keyword not in known:
            hint = did_you_mean(keyword, known)
            return f"{title} has no parameter {keyword!r}{hint and f' ({hint})'}"
    try:
        inspect.signature(function).bind(
            *names, **dict.fromkeys(keywords(function).keys() & GIVEN_KEYWORDS - bound.keys())
        )
    except TypeError as problem:
        reason = str(problem).replace("keyword-only argument", "argument")  # as Python 3.11 words it
        return f"{title} does not accept these arguments: {reason}"
    except ValueError:  # a built-in function without a signature
        pass
    return ""
