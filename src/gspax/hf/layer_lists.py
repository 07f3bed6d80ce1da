"""Reads which layers of a `config.json` are of which kind: with a window, a state, or no RoPE, and with which heads.

This module imports no accelerator code.
"""

from __future__ import annotations

from collections.abc import Mapping

from gspax.config.ranges import NonNegativeInt, PositiveInt
from gspax.data.files import Json, show
from gspax.hf.families import Family
from gspax.hf.json_values import convert, expect, first_of, list_layers, part_of
from gspax.hf.keys import REQUIRED

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LETTERS = {  # of a Nemotron-H's kinds of layers: the names of transformers 5, and older ones
    **{LINEAR: "M", FULL: "*", "moe": "E", "mlp": "-"},
    **{"mamba": "M", "attention": "*"},
}


def global_heads(raw: Mapping[str, Json]) -> dict[str, Json]:
    """Return the Hub's keys of the heads of layers without a window, of which the last layer is always one.

    transformers 5 lists them by layer, in `per_layer_config`.
    """
    layers = convert(int, raw, "num_hidden_layers", REQUIRED)
    usual = [SLIDING if (layer + 1) % 6 else FULL for layer in range(layers)]
    named = raw.get("layer_types") or usual
    kinds = [*named[:-1], FULL] if isinstance(named, list) else []  # else `list_layers` refuses it
    values: dict[str, Json] = {"layer_types": kinds} if len(kinds) == layers else {}
    if raw.get("per_layer_config") is not None:
        listed = part_of(raw, "per_layer_config")
        first, *others = listed.values() or [{}]
        full = [number for number, kind in enumerate(kinds) if kind == FULL]
        numbers = [int(key) if key.isdecimal() else -1 for key in listed]
        if sorted(numbers) != full or any(each != first for each in others) or not isinstance(first, dict):
            raise ValueError(
                f"per_layer_config: wanted one head_dim and num_key_value_heads for all layers without a window, "
                f"got {show(raw['per_layer_config'])}"
            )
        names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        for name, value in first.items():
            values[names[expect("per_layer_config", name, tuple(names))]] = value
    heads = values.get("num_global_key_value_heads", raw.get("num_global_key_value_heads"))
    if heads is None or not raw.get("attention_k_eq_v"):
        values["num_global_key_value_heads"] = raw.get("num_key_value_heads")
    return values


def linear_layers(raw: Mapping[str, Json], layers: int) -> tuple[int, ...]:
    """Return the layers with linear attention: by default three of four."""
    interval = convert(PositiveInt, raw, "full_attention_interval", 4)
    return list_layers(
        raw, [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)], (FULL, LINEAR), LINEAR
    )


def mixer_layers(raw: Mapping[str, Json], family: Family, layers: int) -> tuple[int, ...]:
    """Return the layers with the family's own mixer, which have two names in files of a Granite 4.

    Without a list all layers of a Granite 4 have it, and the layers of an LFM2 that are not in `full_attn_idxs`.
    """
    own, other = family.mixer_names
    names: dict[Json, Json] = {LINEAR: own, FULL: other}
    listed = first_of(raw, ("layer_types", "layers_block_type"), None)
    if isinstance(listed, list):
        listed = [names.get(each, each) if isinstance(each, str) else each for each in listed]
    attention = first_of(raw, ("full_attn_idxs",), [*range(layers)]) if "full_attn_idxs" in family.harmless else []
    if not isinstance(attention, list) or not all(isinstance(number, int) for number in attention):
        raise ValueError(f"full_attn_idxs: wanted a list of layers, got {show(attention)}")
    usual = [other if layer in attention else own for layer in range(layers)]
    return list_layers({"layer_types": listed}, usual, (other, own), own)


def letters(raw: Mapping[str, Json]) -> str:
    """Return the letters of a Nemotron-H's layers, which files have as a text or as a list of names."""
    pattern, listed = raw.get("hybrid_override_pattern"), first_of(raw, ("layers_block_type", "layer_types"), None)
    if listed is not None:
        if not isinstance(listed, list):
            raise ValueError(f"layers_block_type: wanted a list of names, got {show(listed)}")
        named = "".join(LETTERS[expect("layers_block_type", each, tuple(LETTERS))] for each in listed)
        pattern = expect("hybrid_override_pattern", pattern, (None, named)) or named
    if not isinstance(pattern, str) or not pattern or set(pattern) - {*LETTERS.values()}:
        raise ValueError(f"hybrid_override_pattern: wanted the letters M, *, E, and -, got {show(pattern)}")
    return pattern


def lone_layers(pattern: str) -> dict[str, tuple[int, ...]]:
    """Return the fields of `ModelConfig` that say of which part each of these layers is."""

    def at(kinds: str) -> tuple[int, ...]:
        return tuple(number for number, letter in enumerate(pattern) if letter in kinds)

    return {
        **{"mixer_layers": at("M"), "no_mlp_layers": at("M*")},
        **{"no_mixer_layers": at("E-"), "mlp_only_layers": at("-") if "E" in pattern else ()},
    }


def nope_layers(raw: Mapping[str, Json], family: Family, layers: int) -> tuple[int, ...]:
    """Return the layers without RoPE."""
    if family.nope == "type":
        kind = expect("position_embedding_type", raw.get("position_embedding_type"), (None, "nope", "rope"))
        return () if kind == "rope" else tuple(range(layers))
    if family.nope in ("all", "none"):
        return tuple(range(layers)) if family.nope == "all" else ()
    if family.nope == "full":
        _, sliding = windows(raw, family, layers)
        every = raw.get("sliding_window", family.sliding_window) is None
        return () if every else tuple(layer for layer in range(layers) if layer not in sliding)
    interval = convert(PositiveInt, raw, "no_rope_layer_interval", 4)
    listed = first_of(raw, ("no_rope_layers",), [int((layer + 1) % interval != 0) for layer in range(layers)])
    if not isinstance(listed, list) or len(listed) != layers:
        raise ValueError(f"no_rope_layers: wanted a list of {layers} numbers, got {show(listed)}")
    return tuple(layer for layer, rotated in enumerate(listed) if not expect("no_rope_layers", rotated, (0, 1)))


def windows(raw: Mapping[str, Json], family: Family, layers: int) -> tuple[int, tuple[int, ...]]:
    """Return `sliding_window` and `sliding_layers`.

    transformers applies the window to every layer of a Qwen3-MoE and ignores `max_window_layers` and `layer_types`
    there; a file in which one of these disagrees is rejected.
    """
    if family.window in ("switch", "none"):
        permitted = (False,) if family.window == "none" else (False, True)
        on = expect("use_sliding_window", first_of(raw, ("use_sliding_window",), False), permitted)
        window = convert(NonNegativeInt, raw, "sliding_window", 0) if on else 0
        first = convert(int, raw, "max_window_layers", 0 if family.experts else 28)
        kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
        _require_window(raw, on=on)
    else:  # null means no window, whatever the default for an absent key
        _require_window(raw, on=True)
        absent = {"sliding_window": family.sliding_window}
        window = convert(NonNegativeInt, absent | dict(raw), "sliding_window", 0)
        if not isinstance(every := family.window, int):
            return window, tuple(range(layers)) if window else ()
        kinds = [FULL if layer % every == every - 1 else SLIDING for layer in range(layers)]
    sliding = list_layers(raw, kinds, (FULL, SLIDING) if window else (FULL,), SLIDING)
    if sliding and family.window == "switch" and family.experts and len(sliding) < layers:
        key = "max_window_layers" if raw.get("layer_types") is None else "layer_types"
        raise ValueError(f"{key}: wanted the window on all {layers} layers of a Qwen3-MoE, got {show(raw[key])}")
    return (window, sliding) if sliding else (0, ())


def _require_window(raw: Mapping[str, Json], *, on: bool) -> None:
    """Raise a ValueError if the window is on with size 0, which transformers does not read as no window."""
    if on and raw.get("sliding_window") == 0:
        raise ValueError("sliding_window: wanted null or at least 1, got 0")
