"""Functions and classes as values: names, parameters, and annotations of the values of an experiment's fields."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

from gspax.config.hints import Hint, describe_hint, fits

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PART_NAME = re.compile(r"[\w-]*[^\W\d][\w-]*")  # no dot, which separates keys, and not only digits

T = TypeVar("T")
Function: TypeAlias = Callable[..., object]


def is_record(value: object) -> TypeGuard[DataclassInstance]:
    """Return whether `value` is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_function(value: object) -> TypeGuard[Function]:
    """Return whether `value` can be called and has a name (a class does not count)."""
    return callable(value) and not isinstance(value, type) and hasattr(value, "__qualname__")


def has_parts(value: object) -> TypeGuard[tuple[object, ...] | list[object]]:
    """Return whether `value` is a tuple or a list of records or functions, which have fields themselves."""
    parts: Sequence[object] = value if isinstance(value, tuple | list) and not hasattr(value, "_fields") else ()
    return len(parts) > 0 and all(is_record(p) or isinstance(p, functools.partial | types.FunctionType) for p in parts)


def part_names(names: Sequence[object]) -> list[str]:
    """Return the keys of the parts of a tuple: their names if these exist and differ, otherwise their numbers.

    Args:
      names: the field `name` of each part; None where there is none.
    """
    own = [name for name in names if isinstance(name, str) and _PART_NAME.fullmatch(name)]
    return own if len(set(own)) == len(names) else [str(i) for i in range(len(names))]


def named_parts(parts: Sequence[T], prefix: str = "") -> dict[str, T]:
    """Return the members of a tuple by their keys in an override: `evaluation.tasks.gsm8k`, `data.checks.0`."""
    names = part_names([getattr(part, "name", None) for part in parts])
    return {f"{prefix}{name}": part for name, part in zip(names, parts, strict=True)}


def unwrap(function: Function) -> Function:
    """Return the function inside a `functools.partial`."""
    return function.func if isinstance(function, functools.partial) else function


def keywords(function: Function) -> dict[str, Any]:
    """Return the keyword-only parameters of a function or a partial with their values, and a partial's keywords.

    A parameter that has no value yet maps to `inspect.Parameter.empty`.
    """
    free = {
        name: parameter.default
        for name, parameter in parameters(unwrap(function)).items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return free | (function.keywords if isinstance(function, functools.partial) else {})


def free_keywords(function: Function, available: Mapping[str, T | None]) -> dict[str, T]:
    """Select the available keywords, except None, that a function takes and that are not bound to it."""
    free = keywords(function).keys() - getattr(function, "keywords", {}).keys()
    return {name: value for name, value in available.items() if name in free and value is not None}


def parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; none if it has no signature, as some built-in functions."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def hints_of(source: Function, *, ranges: bool = False) -> dict[str, Hint]:
    """Return the annotations of a dataclass or a function, except any that cannot be evaluated.

    Args:
      ranges: keep the `ranges.Range` of an annotation, as `Annotated[...]`.
    """
    hints: dict[str, Hint] = {}
    for owner in reversed(source.__mro__) if isinstance(source, type) else [inspect.unwrap(source)]:
        is_hashable = isinstance(owner, type | types.FunctionType)  # a callable object need not be
        hints |= (_own_hints if is_hashable else _own_hints.__wrapped__)(owner, ranges)
    return hints


@functools.lru_cache(maxsize=1024)  # validation asks for the same ones hundreds of times
def _own_hints(owner: Function, ranges: bool) -> dict[str, Hint]:
    """Return the annotations of a function, or of a class without its bases."""
    hints: dict[str, Hint] = {}
    module = sys.modules.get(getattr(owner, "__module__", None) or "builtins", builtins)
    for name, annotation in inspect.get_annotations(owner).items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(Exception):  # it may name what only a type checker imports
            hints |= typing.get_type_hints(holder, vars(module), include_extras=ranges)
    return hints


def name_of(value: Function) -> str:
    """Return the name of a function or a class in the shortest package that exposes it: `gspax.losses.gspo`."""
    module, name = getattr(value, "__module__", None) or "builtins", value.__qualname__
    parts = module.split(".")
    packages = (".".join(parts[:end]) for end in range(1, len(parts)))
    return f"{next((each for each in packages if lookup(f'{each}.{name}') is value), module)}.{name}"


GIVEN_KEYWORDS = {"length_PG", "score_norm_PGN"}  # that a run gives to an advantage that has them free


def takes_lengths(advantage: Function) -> bool:
    """Return whether an advantage takes the responses' lengths: its keyword `length_PG` is not bound."""
    return _is_free(advantage, "length_PG")


def takes_score_norms(advantage: Function) -> bool:
    """Return whether an advantage takes the scores' norms (`score_norm_PGN`), and so returns advantages of tokens."""
    return _is_free(advantage, "score_norm_PGN")


def advantage_axes(advantage: Function) -> tuple[dict[str, str], str]:
    """Return the axes of each keyword that a run gives to an advantage, and of the advantages that it returns."""
    given = {name: name.rpartition("_")[2] for name in sorted(GIVEN_KEYWORDS) if _is_free(advantage, name)}
    return given, "PGN" if takes_score_norms(advantage) else "PG"


def _is_free(function: Function, keyword: str) -> bool:
    return keywords(function).get(keyword, 0) in (None, inspect.Parameter.empty)


def title_of(function: Function) -> str:
    """Return the name of a function, a partial or a callable object for a message."""
    inner = unwrap(function)
    return name_of(inner) if hasattr(inner, "__qualname__") else type(inner).__name__


def is_gspax(function: Function) -> bool:
    """Return whether a function or a class is defined in gspax."""
    return str(getattr(unwrap(function), "__module__", "")).partition(".")[0] == "gspax"


def interface_problems(key: str, value: object, methods: Sequence[str]) -> Iterator[str]:
    """Yield a sentence that says why a field's value is not an object with these methods, if it is not."""
    missing = [name for name in methods if not callable(getattr(value, name, None))]
    if isinstance(value, type):
        yield f"{key}: wanted an instance, got the class {value.__name__} (write {value.__name__}(...))"
    elif missing:
        yield f"{key}: wanted an object with {' and '.join(methods)}, {type(value).__name__} has no {missing[0]}"


def lookup(name: str) -> object:
    """Return the object with a dotted name in the modules that are loaded; None if there is none."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if module := sys.modules.get(".".join(parts[:end])):
            value: object = module
            for part in parts[end:]:
                value = getattr(value, part, None)
            return value
    return None


def import_class(name: str) -> Any:
    """Import a class by its dotted name, such as "package.module.Class"."""
    module, _, name = name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def parse(kind: type[T], described: object) -> T:
    """Build a dataclass from its `experiment.description.describe`. A field that is missing has its default.

    Raises:
      TypeError: a field has another type, or is missing and has no default.
    """
    if not isinstance(described, Mapping):
        raise TypeError(f"wanted an object, got {described!r}")
    fields = {}
    for name, hint in hints_of(kind).items():
        if name not in described:
            continue
        value = described[name]
        if isinstance(value, Mapping) and typing.get_origin(hint) is not Mapping:
            members: tuple[type[Any], ...] = typing.get_args(hint) or (hint,)
            kinds = {name_of(each): each for each in members if dataclasses.is_dataclass(each)}
            recorded = str(value.get("type"))
            if (found := kinds.get(recorded) or _find_subclass(recorded, members)) is None:
                raise TypeError(f"{name}: wanted {describe_hint(hint)}, got {recorded}")
            value = parse(found, value)
        value = _as_tuple(value)
        if not fits(value, hint):
            raise TypeError(f"{name}: wanted {describe_hint(hint)}, got {value!r}")
        fields[name] = value
    return kind(**fields)


def _find_subclass(recorded: str, bases: Sequence[type[Any]]) -> type[Any] | None:
    """Import a class of the user's that a description names, if it is a dataclass and has one of these bases."""
    if "." not in recorded:
        return None
    try:
        found = import_class(recorded)
    except AttributeError:
        return None
    except ImportError as problem:
        raise TypeError(
            f"wanted the class {recorded} in a file of its own, whose folder is in PYTHONPATH: {problem}"
        ) from problem
    fits_one = isinstance(found, type) and dataclasses.is_dataclass(found) and issubclass(found, tuple(bases))
    return found if fits_one else None


def _as_tuple(value: object) -> object:
    """Return a list as a tuple, with the lists in it."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
