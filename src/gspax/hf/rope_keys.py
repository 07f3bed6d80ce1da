"""Reads and writes the keys of RoPE, `rope_scaling` of a `ModelConfig` among them.

This module imports no accelerator code.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gspax.config import (
    AlphaRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    ProportionalRope,
    Yarn,
    rotary_dim,
)
from gspax.config.model import RopeScaling
from gspax.data.files import SHOWN, Json, show
from gspax.hf.json_values import convert, expect, first_of, part_of
from gspax.hf.keys import FULL, HINTS, REQUIRED, SLIDING, Key, Part, Raw

ORIGINAL, FRACTION = "original_max_position_embeddings", "partial_rotary_factor"
HARMLESS = ("attn_factor",)  # in DeepSeek-R1-0528-Qwen3-8B; transformers reads `attention_factor`
MROPE = ("mrope_section", "mrope_interleaved")  # for images; the tokens of a text have one position, as in RoPE
BESIDE_ALPHA = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # unused with an alpha
TYPES = {
    **{Yarn: "yarn", Llama3Rope: "llama3", AlphaRope: "dynamic", LinearRope: "linear", LongRope: "longrope"},
    ProportionalRope: "proportional",
}


@dataclass(frozen=True)
class RopeKeys(Part):
    """One RoPE of all layers. As in transformers, the older object wins, also over the top level."""

    theta: float = 1e4  # default base
    types: tuple[str, ...] = ("yarn", "llama3", "linear")  # supported rope_types besides "default"
    default: dict[str, Json] = field(default_factory=dict)  # of `rope_scaling`; its keys are always written
    fraction: Key | None = None  # the key of `rope_fraction`: that share itself, or `rotary_dim`
    mrope: bool = False  # whether files may say where images are

    @property
    def keys(self) -> tuple[str, ...]:
        of_fraction = () if self.fraction is None else (self.fraction.name, self.fraction.other or self.fraction.name)
        beside = (ORIGINAL,) if "longrope" in self.types else ()
        return "rope_theta", "rope_scaling", "rope_parameters", *of_fraction, *beside

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        older, newer = raw.get("rope_scaling"), raw.get("rope_parameters")
        if older and newer and isinstance(older, dict) and isinstance(newer, dict):
            _require_agreement(raw, older, newer)
        return self._read(older or newer or self.default, raw, fields)

    def write(self, config: ModelConfig) -> dict[str, Json]:
        default: Json = {"rope_type": "default"} if self.default else None
        content: dict[str, Json] = {
            "rope_theta": config.rope_theta,
            "rope_scaling": self._scaling_json(config) or default,
        }
        if self.fraction is not None:
            whole = self.fraction.name == "rotary_dim"
            content[self.fraction.name] = rotary_dim(config) if whole else config.rope_fraction
        if isinstance(scaling := config.rope_scaling, LongRope):
            content |= {ORIGINAL: scaling.original_max_position_embeddings}
            content |= {"max_position_embeddings": scaling.max_position_embeddings}
        return content

    def _scaling_json(self, config: ModelConfig) -> dict[str, Json] | None:
        """Return `rope_scaling`, without fields that have their defaults and no place in `default`, or None."""
        scaling = config.rope_scaling
        if scaling is None:
            return None
        content: dict[str, Json] = {"rope_type": TYPES[type(scaling)]}
        content |= {"factor": 1.0} if isinstance(scaling, AlphaRope) else {}
        values = [(each, getattr(scaling, each.name)) for each in fields(scaling)]
        written = {each.name: value for each, value in values if value != each.default or each.name in self.default}
        if isinstance(scaling, LongRope):
            del written["max_position_embeddings"]  # a key beside the object
            written |= {"short_factor": [*scaling.short_factor], "long_factor": [*scaling.long_factor]}
        return content | written

    def _read(self, rope: Json, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of this object."""
        if not isinstance(rope, dict):
            raise ValueError(f"rope_scaling: wanted an object or null, got {show(rope)}")
        source = raw if rope.get("rope_theta") is None else rope
        theta = convert(HINTS["rope_theta"], source, "rope_theta", self.theta)
        scaling = self._scaling(rope, raw, fields["max_position_embeddings"])
        values: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
        if isinstance(scaling, LongRope):  # a run has to ask for longer sequences
            values["max_position_embeddings"] = scaling.original_max_position_embeddings
        if self.fraction is not None:
            share = self.fraction.default
            if self.fraction.name == FRACTION:
                share = convert(HINTS["rope_fraction"], raw, FRACTION, share)
            elif raw.get("rotary_dim") is not None:
                share = convert(HINTS["head_dim"], raw, "rotary_dim", REQUIRED) / fields["head_dim"]
            source = raw if rope.get(FRACTION) is None else rope
            values["rope_fraction"] = convert(HINTS["rope_fraction"], source, FRACTION, share)
        elif FRACTION in rope and not isinstance(scaling, ProportionalRope):
            expect(FRACTION, rope[FRACTION], (None, 1))
        return values

    def _scaling(self, rope: Raw, raw: Raw, context: int) -> RopeScaling | None:
        """Return `rope_scaling` of `ModelConfig`."""
        kind = first_of(rope, ("rope_type", "type"), "default")
        kind = expect("rope_type", "longrope" if kind == "su" else kind, ("default", *self.types))
        scaling = next((each for each, name in TYPES.items() if name == kind), None)
        hints = {} if scaling is None else typing.get_type_hints(scaling, include_extras=True)
        known = ("rope_theta", "rope_type", "type", FRACTION, *hints, *HARMLESS, *(MROPE if self.mrope else ()))
        for key, value in rope.items():
            if key not in known + (BESIDE_ALPHA if kind == "dynamic" else ()):
                raise ValueError(
                    f"rope_scaling.{key[:SHOWN]}: wanted no such key with rope_type {kind}, got {show(value)}"
                )
        if scaling is None:
            return None
        values: dict[str, Json] = {ORIGINAL: context} | {key: x for key, x in rope.items() if x is not None}
        if kind == "longrope":  # its lengths are beside the object, which may repeat them
            original = convert(hints[ORIGINAL], raw, ORIGINAL, REQUIRED)
            for key, beside in ((ORIGINAL, original), ("max_position_embeddings", context)):
                values[key] = expect(key, rope.get(key) or beside, (beside,))
        if kind == "yarn":
            values = {"factor": context / convert(hints[ORIGINAL], values, ORIGINAL, REQUIRED)} | values
        return scaling(**{name: convert(hints[name], values, name, getattr(scaling, name, REQUIRED)) for name in hints})


@dataclass(frozen=True)
class TwoRopes(RopeKeys):
    """A RoPE without scaling of the layers with a window, and one of the others: two objects in `rope_parameters`."""

    sliding_theta: float = 1e4  # default base of the layers with a window
    sliding_key: str = ""  # an older key of that base

    @property
    def keys(self) -> tuple[str, ...]:
        return *super().keys, *([self.sliding_key] if self.sliding_key else [])

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        each = part_of(raw, "rope_parameters")
        full, older, own = part_of(each, FULL) or self.default, part_of(raw, "rope_scaling"), part_of(each, SLIDING)
        for name in older:
            expect(f"rope_scaling.{name[:SHOWN]}", older[name], (full.get(name, older[name]),))
        values = self._read(full | older, raw, fields)
        expect("rope_type", first_of(own, ("rope_type", "type"), "default"), ("default",))
        base = convert(HINTS["rope_theta"], raw, self.sliding_key, self.sliding_theta)
        theta = convert(HINTS["rope_theta"], own, "rope_theta", base)
        one = (theta, None) == (values["rope_theta"], values["rope_scaling"])
        return values | {"sliding_rope_theta": 0.0 if one else theta}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        full: dict[str, Json] = {"rope_type": "default", "rope_theta": config.rope_theta}
        own: dict[str, Json] = full | {"rope_theta": config.sliding_rope_theta or config.rope_theta}
        content: dict[str, Json] = {"rope_parameters": {FULL: full | (self._scaling_json(config) or {}), SLIDING: own}}
        # Only the newer key can express any two; transformers never read the older ones with a proportional RoPE.
        return content if "proportional" in self.types else super().write(config) | content


def _require_agreement(raw: Raw, older: Raw, newer: Raw) -> None:
    """Raise a ValueError if `rope_parameters` and `rope_scaling` disagree in a file of which only one is read."""
    outer = {key: raw[key] for key in ("rope_theta", FRACTION) if raw.get(key) is not None}
    one, other = (outer | {key: value for key, value in rope.items() if value is not None} for rope in (older, newer))
    for rope in (one, other):
        rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    if key := next((key for key in other | one if other.get(key) != one.get(key)), None):
        raise ValueError(
            f"rope_parameters: wanted the {key[:SHOWN]} of rope_scaling ({show(one.get(key))}), or one of the two "
            f"objects alone, got {show(other.get(key))}"
        )
