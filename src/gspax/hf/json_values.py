"""Reads the values of a parsed `config.json`: each is of a type, in a range, or one of those that are permitted.

A ValueError names the key, what was wanted, and what there is.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from gspax.data.files import Json, show
from gspax.hf.keys import REQUIRED

T = TypeVar("T")


def part_of(raw: Mapping[str, Json], key: str) -> dict[str, Json]:
    """Return the object of a key; null and absent count as empty."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}: wanted an object or null, got {show(value)}")
    return value


def list_layers(raw: Mapping[str, Json], kinds: list[str], permitted: tuple[str, ...], wanted: str) -> tuple[int, ...]:
    """Return the layers of the wanted kind according to `layer_types` or, if it is absent, to `kinds`."""
    listed = first_of(raw, ("layer_types",), list[Json](kinds))
    if not isinstance(listed, list) or len(listed) != len(kinds):
        raise ValueError(f"layer_types: wanted a list of {len(kinds)} names, got {show(listed)}")
    return tuple(layer for layer, kind in enumerate(listed) if expect("layer_types", kind, permitted) == wanted)


def first_of(raw: Mapping[str, Json], keys: Collection[str], default: Json) -> Json:
    """Return the value of the first of these keys that has one; null counts as absent."""
    return next((raw[key] for key in keys if raw.get(key) is not None), default)


def expect(key: str, value: Json, permitted: Collection[T]) -> T:
    """Return the value of a key if it is one of the permitted ones. ValueError otherwise."""
    for choice in permitted:
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return choice
    raise ValueError(f"{key}: wanted {' or '.join(map(json.dumps, permitted))}, got {show(value)}")


def convert(hint: type[T], raw: Mapping[str, Json], key: str, default: object) -> T:
    """Convert the value of a key to an annotated type; null counts as absent, and lists become tuples.

    An integer is accepted as a float. ValueError if the type is wrong, or the value is outside the annotation's ranges.
    """
    value: Any = default if raw.get(key) is None else raw[key]
    if value is REQUIRED:
        raise ValueError(f"{key}: wanted a value, there is none")
    kind, *ranges = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)  # float | None
    if type(value) is int and float in kinds and abs(value) < 2**63:
        value = float(value)
    elif kind == tuple[int, ...] and isinstance(value, list | tuple) and all(type(item) is int for item in value):
        value = tuple(value)
    elif kind == tuple[float, ...] and isinstance(value, list | tuple):
        if not all(type(item) in (int, float) and 0 < item < math.inf for item in value):
            raise ValueError(f"{key}: wanted numbers above 0, got {show([*value])}")
        value = tuple(map(float, value))
    elif type(value) not in kinds:
        words = {int: "an integer", float: "a number", bool: "true or false"}.get(kinds[0], "a list of integers")
        raise ValueError(f"{key}: wanted {words}, got {show(value)}")
    elif type(value) is float and not math.isfinite(value):
        raise ValueError(f"{key}: wanted a finite number, got {show(value)}")
    for range_ in ranges:
        if not range_.accepts(value):
            raise ValueError(f"{key}: wanted {range_.words}, got {show(value)}")
    return value
