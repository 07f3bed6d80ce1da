"""`a.b=c` on the command line: any field of an experiment, parsed by its annotation.

A key is a field of a dataclass (a part of the experiment, a data source, a model) or a keyword of a function
(`loss.clip_low` makes a `functools.partial`). Values:

    int             8, 1_000, 1e3 (any number that is whole)
    float           1e-5, 3
    bool            true, false
    str             as it is
    tuple           (1,2) or 1,2; () is empty
    optional        null or none, besides the above
    anything else   a dotted name: loss=gspax.losses.grpo, model=gspax.model.presets.qwen3_0_6b; a dataclass stands
                    for an instance with its defaults: reference=gspax.config.Reference

Overrides apply from left to right, so one may set a field of what an earlier one assigned.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from gspax.config.functions import hints_of, is_function, is_record, keywords, name_of, unwrap
from gspax.config.protocols import is_function_protocol
from gspax.errors import UserError

T = TypeVar("T")

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def override(experiment: T, assignments: Iterable[str]) -> T:
    """The experiment with every `key=value` applied, left to right.

    Raises:
      UserError: one line for each assignment with an unknown key or a value that does not fit.
    """
    experiment, problems = apply(experiment, assignments)
    if problems:
        raise UserError("\n".join(sentence for _, sentence in problems))
    return experiment


def apply(experiment: T, assignments: Iterable[str]) -> tuple[T, list[tuple[str, str]]]:
    """The experiment with the assignments that can be applied, and (key, what is wrong) of the others."""
    problems = []
    for assignment in assignments:
        key, equals, text = (part.strip() for part in assignment.partition("="))
        try:
            if not equals or not key:
                raise UserError(f"{assignment!r}: an override is written key=value, as in optimizer.learning_rate=1e-5")
            experiment = _set(experiment, key.split("."), text, Any, _Place(key, experiment))
        except UserError as problem:
            problems.append((key, str(problem)))
    return experiment, problems


def keys(value: Any, prefix: str = "") -> Iterator[str]:
    """Every key that an override can set."""
    for name, (child, _) in _children(value).items():
        yield prefix + name
        yield from keys(child, f"{prefix}{name}.")


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an error happened, for its message."""

    key: str
    experiment: Any


def _set(node: Any, path: list[str], text: str, hint: Any, place: _Place) -> Any:
    """`node` with the field at `path` read from `text`; with no path left, `text` itself, read as `hint`."""
    if not path:
        try:
            return _parse(text, hint, node)
        except ValueError as wanted:
            raise UserError(f"{place.key}: wanted {wanted}, got {text!r}") from None
    name, *rest = path
    children = _children(node)
    if name not in children:
        raise UserError(_unknown(node, rest, children, place))
    value, hint = children[name]
    value = _set(value, rest, text, hint, place)
    if not is_record(node):
        given = {**getattr(node, "keywords", {}), name: value}
        return functools.partial(unwrap(node), *getattr(node, "args", ()), **given)
    try:
        return dataclasses.replace(node, **{name: value})
    except (TypeError, ValueError) as problem:  # the dataclass's own check
        raise UserError(f"{place.key}={text}: {problem}") from problem


def _children(node: Any) -> dict[str, tuple[Any, Any]]:
    """The fields of a dataclass or the keywords of a function, each with its value and its annotation."""
    if is_record(node):
        hints = hints_of(type(node))
        found = {field.name: getattr(node, field.name) for field in dataclasses.fields(node) if field.init}
    elif isinstance(node, functools.partial) or is_function(node):
        hints = hints_of(unwrap(node))
        found = keywords(node)
    else:
        return {}
    return {name: (value, hints.get(name, Any)) for name, value in found.items()}


def _unknown(node: Any, rest: list[str], children: dict[str, Any], place: _Place) -> str:
    """The error for an unknown key: it suggests the closest sibling, else the closest key anywhere, else lists all."""
    parts = place.key.split(".")
    depth = len(parts) - len(rest) - 1
    parent, name = ".".join(parts[:depth]), parts[depth]
    unknown = f"unknown key {place.key!r}"
    if parent and not children:
        return f"{unknown}: {parent} is {_kind(node)} and has no fields"
    every = list(keys(place.experiment))
    near = [".".join([*parts[:depth], close, *rest]) for close in difflib.get_close_matches(name, children)]
    near = [key for key in near if key in every]  # with the rest of the path it may be no key
    same = [key for key in every if key.rpartition(".")[2] == parts[-1]]
    elsewhere = [key for key in every if not place.key.startswith(key + ".")]
    near = near or same or difflib.get_close_matches(place.key, elsewhere, n=1)
    if near:
        return f"{unknown}; did you mean {near[0]!r}?"
    return f"{unknown}; {parent or 'an experiment'} has {', '.join(children)}"


def _kind(node: Any) -> str:
    return "None" if node is None else name_of(node) if is_function(node) else f"of type {type(node).__name__}"


def _parse(text: str, hint: Any, current: Any) -> Any:
    """`text` as a value of the type `hint`. Raises ValueError saying what was wanted."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _parse_union(text, members, current)
    if hint in (Any, object) and isinstance(current, bool | int | float | str | tuple | list):
        hint = type(current)
    if origin is typing.Literal:
        for choice in members:
            if text == str(choice):
                return choice
        raise ValueError("one of " + ", ".join(map(str, members)))
    if hint in (tuple, list) or origin in (tuple, list, collections.abc.Sequence):
        return _parse_tuple(text, origin or hint, members, current)
    if hint in _SCALARS:
        return _SCALARS[hint](text)
    return _named(text, hint)


def _parse_union(text: str, members: tuple[Any, ...], current: Any) -> Any:
    if type(None) in members and text.lower() in ("null", "none"):
        return None
    wanted = []
    for member in members:
        if member is not type(None):
            try:
                return _parse(text, member, current)
            except ValueError as problem:
                wanted.append(str(problem))
    if type(None) in members:
        wanted.append("null")
    raise ValueError(" or ".join(wanted))


def _parse_tuple(text: str, kind: Any, members: tuple[Any, ...], current: Any) -> Any:
    if not text:
        raise ValueError("values with commas between them, or () for none")
    inner = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
    texts = [part.strip() for part in inner.split(",")]
    if texts[-1] == "":
        texts.pop()  # () is the empty tuple, and a trailing comma is allowed
    fixed = kind is tuple and len(members) != 0 and members[-1] is not ...
    if fixed and len(texts) != len(members):
        raise ValueError(f"{len(members)} values with commas between them")
    default = type(current[0]) if current else str
    hints = members if fixed else [members[0] if members else default] * len(texts)
    values = [_parse(part, hint, None) for part, hint in zip(texts, hints, strict=True)]
    return values if kind is list else tuple(values)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = _float(text, "an integer")
    if not math.isfinite(number) or number != int(number):
        raise ValueError("an integer")
    return int(number)


def _float(text: str, wanted: str = "a number") -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(wanted) from None


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


_SCALARS: dict[Any, Any] = {int: _integer, float: _float, bool: _boolean, str: str}


def _named(text: str, hint: Any) -> Any:
    """The object with this dotted name, if it fits the annotation. Raises ValueError saying what was wanted."""
    # Any is a class since Python 3.11
    is_class = isinstance(hint, type) and hint not in (object, Any) and not getattr(hint, "_is_protocol", False)
    is_callable = collections.abc.Callable in (hint, typing.get_origin(hint)) or is_function_protocol(hint)
    wanted = f"the dotted name of a {hint.__name__}" if is_class else "a dotted name"
    wanted = "the dotted name of a function" if is_callable else wanted
    if not _DOTTED.fullmatch(text):
        raise ValueError(wanted + (", as in gspax.losses.gspo" if is_callable else ""))
    value: Any = lookup(text)
    if is_class and value is hint and dataclasses.is_dataclass(hint):
        with contextlib.suppress(TypeError):  # it has fields without defaults: the class itself is refused below
            value = value()
    fits = isinstance(value, hint) if is_class else callable(value) if is_callable else True
    if not fits or inspect.ismodule(value):
        raise ValueError(f"{wanted} (it names {'a module' if inspect.ismodule(value) else _kind(value)})")
    return value


def lookup(text: str) -> Any:
    """The object with this dotted name; modules are imported as needed. ValueError names the part that is missing."""
    parts = text.split(".")
    value: Any = _import(parts[0], text)
    if value is None:
        raise ValueError(f"a name that can be imported (there is no module {parts[0]!r})")
    for count, name in enumerate(parts[1:], start=1):
        owner = ".".join(parts[:count])
        inside = inspect.ismodule(value) and not hasattr(value, name)
        found = _import(f"{owner}.{name}", text) if inside else getattr(value, name, None)
        if found is None:
            near = difflib.get_close_matches(name, dir(value), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"a name that exists ({owner} has no {name!r}{hint})")
        value = found
    return value


def _import(module: str, text: str) -> types.ModuleType | None:
    """The module, or None if no module has this name."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name == module:
            return None
        if missing.name is not None and module.startswith(missing.name + "."):
            return None  # the parent is a module, not a package
        raise UserError(f"{text}: importing {module} needs the module {missing.name!r}") from missing
    except Exception as problem:
        raise UserError(f"{text}: importing {module} failed: {type(problem).__name__}: {problem}") from problem
