"""Annotated types of fields: whether a value has one, and its description in words."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from gspax.config.protocols import is_function_protocol

Hint: TypeAlias = Any  # an annotation, such as `int | None`: typing has no name for its type


def bare(hint: Hint) -> Hint:
    """Return `X` of `X | None` and of `Annotated[X, ...]`."""
    if typing.get_origin(hint) is Annotated:
        return bare(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        return bare(members[0]) if len(members) == 1 else hint
    return hint


def fits(value: object, hint: Hint) -> bool:
    """Return whether a value has an annotated type."""
    origin: Hint = typing.get_origin(hint)
    members = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, member) for member in members)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, members[0]) for item in value)
    if origin is typing.Literal:
        return value in members
    if is_function_protocol(hint):
        return callable(value)
    if getattr(hint, "_is_protocol", False):
        return True  # an object: what it lacks is reported by name, where it is defined what it needs
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def describe_hint(hint: Hint) -> str:
    """Describe an annotated type in words, for a sentence that says what was wanted."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, members))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_hint(member) for member in members)
    if origin is tuple:
        if typing.get_origin(members[0]) is typing.Literal:
            return f"a tuple of {describe_hint(members[0])}"
        return f"a tuple of {'integers' if members[0] is int else f'{members[0].__name__}s'}"
    if is_function_protocol(hint) or origin is Callable:
        return "a function"
    plain = {int: "an integer", float: "a number", bool: "True or False", str: "a string", type(None): "None"}
    return plain.get(hint) or f"a {hint.__name__.lower() if origin else hint.__name__}"
