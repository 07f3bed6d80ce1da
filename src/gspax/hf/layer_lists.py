"""What a `config.json` says of each layer: whether it has a window, another mixer than attention, or no RoPE.

A family has one `LayerList`, which reads `layer_types`. This module imports no accelerator code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gspax.config import Layer, Mixer, ModelConfig, NoMixer, ShortConvolution, StateSpace, layers_of
from gspax.config.ranges import NonNegativeInt, PositiveInt
from gspax.data.files import Json, show
from gspax.errors import UserError
from gspax.hf.json_values import convert, expect, first_of, list_layers
from gspax.hf.keys import FULL, HINTS, LINEAR, REQUIRED, SLIDING, Part, Raw

LETTERS = {  # of a Nemotron-H's kinds of layers: the names of transformers 5, and older ones
    **{LINEAR: "M", FULL: "*", "moe": "E", "mlp": "-"},
    **{"mamba": "M", "attention": "*"},
}


class LayerList(Part):
    """The layers, all of which have attention without a window. With experts, an export says that there is none."""

    mixer: ClassVar[type[Mixer] | None] = None  # the kind of the layers of `ModelConfig.mixer_layers`
    keys: tuple[str, ...] = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        list_layers(raw, [FULL] * fields["num_hidden_layers"], (FULL,), SLIDING)
        _read_switch(raw, (False,), 0)
        return {}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        if not (config.num_experts or self.optional_experts):
            return {}
        if sliding := _sliding_layers(config):
            raise UserError(
                f"model.sliding_layers: wanted none in a model of the family {config.model_type}, got {sliding}"
            )
        return _switch(0, config.num_hidden_layers)

    def expressible(self, config: ModelConfig) -> ModelConfig:
        with_experts = config.num_experts or self.optional_experts
        return dataclasses.replace(config, sliding_layers=()) if with_experts else config


@dataclass(frozen=True)
class SwitchedWindow(LayerList):
    """A window on the layers that `layer_types` or `max_window_layers` says, if `use_sliding_window` is on.

    transformers applies the window to every layer of a Qwen3-MoE and ignores `max_window_layers` and `layer_types`
    there; a file in which one of these disagrees is rejected.
    """

    whole: bool = False  # on all layers or none

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        on, first = _read_switch(raw, (False, True), 0 if self.whole else 28)
        window, layers = _window(raw) if on else 0, fields["num_hidden_layers"]
        kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
        sliding = list_layers(raw, kinds, (FULL, SLIDING) if window else (FULL,), SLIDING)
        if self.whole and 0 < len(sliding) < layers:
            key = "max_window_layers" if raw.get("layer_types") is None else "layer_types"
            raise ValueError(f"{key}: wanted the window on all {layers} layers of a Qwen3-MoE, got {show(raw[key])}")
        return {"sliding_window": window if sliding else 0, "sliding_layers": sliding}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        sliding, layers = _sliding_layers(config), config.num_hidden_layers
        if self.whole and 0 < len(sliding) < layers:
            raise UserError(f"model.sliding_layers: wanted all {layers} layers or none with experts, got {sliding}")
        first = min(sliding, default=layers)
        content = _switch(config.sliding_window if sliding else 0, first)
        return (
            content if len(sliding) == layers - first else content | {"layer_types": _kinds(config, SLIDING, sliding)}
        )


@dataclass(frozen=True)
class Window(LayerList):
    """A window on all layers, or on those that `layer_types` says, by default all but every n-th; null means none."""

    size: int = 0  # default of the key
    every: int = 0  # 0: on all layers, whatever `layer_types` says

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        window, layers = _window(raw, self.size), range(fields["num_hidden_layers"])
        sliding = tuple(layers) if window else ()
        if self.every:
            kinds = [SLIDING if (layer + 1) % self.every else FULL for layer in layers]
            sliding = list_layers(raw, kinds, (FULL, SLIDING) if window else (FULL,), SLIDING)
        return {"sliding_window": window if sliding else 0, "sliding_layers": sliding}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        sliding, window = _sliding_layers(config), config.sliding_window or None
        if self.every:
            return {"sliding_window": window, "layer_types": _kinds(config, SLIDING, sliding)}
        return {"sliding_window": window if sliding else None}

    def expressible(self, config: ModelConfig) -> ModelConfig:
        return config


class DeltaLayers(LayerList):
    """Gated delta nets in the layers that `layer_types` says, by default in three of four."""

    keys = (*LayerList.keys, "full_attention_interval")

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        _read_switch(raw, (False,), 0)
        interval = convert(PositiveInt, raw, "full_attention_interval", 4)
        usual = [LINEAR if (layer + 1) % interval else FULL for layer in range(fields["num_hidden_layers"])]
        return {"delta_layers": list_layers(raw, usual, (FULL, LINEAR), LINEAR)}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        return super().write(config) | {"layer_types": _kinds(config, LINEAR, config.delta_layers)}


class StateSpaceLayers(LayerList):
    """State space layers of a Granite 4: those that a list says, or else all layers."""

    mixer = StateSpace
    optional_experts = True
    names: ClassVar = ("mamba", "attention")
    keys = (*LayerList.keys, "layers_block_type", "mamba_expand")

    def replaced(self, raw: Raw) -> dict[str, Json]:
        if raw.get("mamba_d_head", "auto") not in (None, "auto"):
            return {}
        heads = convert(HINTS["mixer.heads"], raw, "mamba_n_heads", 128)
        expand = convert(HINTS["mixer.heads"], raw, "mamba_expand", 2)
        return {"mamba_d_head": expand * convert(HINTS["hidden_size"], raw, "hidden_size", REQUIRED) // heads}

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        _read_switch(raw, (False,), 0)
        listed = first_of(raw, ("layer_types", "layers_block_type"), None)
        return {"mixer_layers": _mixer_layers(listed, self.names, [self.names[0]] * fields["num_hidden_layers"])}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        assert isinstance(config.mixer, StateSpace)
        expand: Json = config.mixer.heads * config.mixer.head_dim // config.hidden_size
        kinds = _kinds(config, self.names[0], config.mixer_layers, self.names[1])
        return super().write(config) | {"layer_types": kinds, "mamba_expand": expand}


class ConvolutionLayers(LayerList):
    """Short convolutions of an LFM2, as wide as the model: by default in layers that are not in `full_attn_idxs`."""

    mixer = ShortConvolution
    names: ClassVar = ("conv", FULL)
    keys = (*LayerList.keys, "full_attn_idxs", "conv_dim", "block_dim")

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        _read_switch(raw, (False,), 0)
        layers = range(fields["num_hidden_layers"])
        width = fields["hidden_size"]
        for key in ("conv_dim", "block_dim"):
            expect(key, raw.get(key), (None, width))
        attention = first_of(raw, ("full_attn_idxs",), [*layers])
        if not isinstance(attention, list) or not all(isinstance(number, int) for number in attention):
            raise ValueError(f"full_attn_idxs: wanted a list of layers, got {show(attention)}")
        own = _mixer_layers(raw.get("layer_types"), self.names, [self.names[layer in attention] for layer in layers])
        return {"mixer_layers": own, "mixer.width": width}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        assert isinstance(config.mixer, ShortConvolution)
        kinds, width = _kinds(config, self.names[0], config.mixer_layers), config.mixer.width
        # as published: vLLM reads `block_dim`, too
        return super().write(config) | {"layer_types": kinds, "conv_dim": width, "block_dim": config.hidden_size}


class LetteredLayers(LayerList):
    """Layers of a Nemotron-H, without RoPE: one letter says whether a layer is a mixer, an MLP, or experts."""

    mixer = StateSpace
    optional_experts = True
    keys = (*LayerList.keys, "hybrid_override_pattern", "layers_block_type")
    of_experts: ClassVar = ("n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size")

    def replaced(self, raw: Raw) -> dict[str, Json]:
        letters = _letters(raw)
        expect("num_hidden_layers", raw.get("num_hidden_layers"), (None, len(letters)))
        values: dict[str, Json] = {"num_hidden_layers": len(letters)}
        return values if "E" in letters else values | dict.fromkeys((*self.of_experts, "num_experts_per_tok"), 0)

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        _read_switch(raw, (False,), 0)
        letters = _letters(raw)

        def at(kinds: str) -> tuple[int, ...]:
            return tuple(layer for layer, letter in enumerate(letters) if letter in kinds)

        return {
            **{"mixer_layers": at("M"), "no_mlp_layers": at("M*"), "nope_layers": tuple(range(len(letters)))},
            **{"no_mixer_layers": at("E-"), "mlp_only_layers": at("-") if "E" in letters else ()},
        }

    def write(self, config: ModelConfig) -> dict[str, Json]:
        return super().write(config) | {"hybrid_override_pattern": "".join(map(_letter, layers_of(config)))}


def _read_switch(raw: Raw, permitted: tuple[bool, ...], first: int) -> tuple[bool, int]:
    """Return whether windows are on, and the first layer with one."""
    on = expect("use_sliding_window", first_of(raw, ("use_sliding_window",), False), permitted)
    return on, convert(int, raw, "max_window_layers", first)


def _switch(window: int, first: int) -> dict[str, Json]:
    """Return the keys of a window with a switch, which is off if the window is 0."""
    return {"use_sliding_window": window > 0, "sliding_window": window or None, "max_window_layers": first}


def _window(raw: Raw, default: int = 0) -> int:
    """Return the window. ValueError if it has size 0, which transformers does not read as no window."""
    window = convert(NonNegativeInt, {"sliding_window": default, **raw}, "sliding_window", 0)
    if raw.get("sliding_window") == 0:
        raise ValueError("sliding_window: wanted null or at least 1, got 0")
    return window


def _sliding_layers(config: ModelConfig) -> tuple[int, ...]:
    return config.sliding_layers if config.sliding_window else ()


def _kinds(config: ModelConfig, kind: str, layers: tuple[int, ...], other: str = FULL) -> list[Json]:
    """Return `layer_types`, in which these layers are of this kind."""
    return [kind if layer in layers else other for layer in range(config.num_hidden_layers)]


def _mixer_layers(listed: Json, names: tuple[str, str], usual: list[str]) -> tuple[int, ...]:
    """Return the layers with the first of these names, which transformers 5 calls linear attention."""
    newer: dict[Json, Json] = {LINEAR: names[0], FULL: names[1]}
    if isinstance(listed, list):
        listed = [newer.get(each, each) if isinstance(each, str) else each for each in listed]
    return list_layers({"layer_types": listed}, usual, names[::-1], names[0])


def _letters(raw: Raw) -> str:
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


def _letter(layer: Layer) -> str:
    """Return the letter of a layer of Nemotron-H; one with two parts, which none has, counts as its mixer."""
    if isinstance(layer.mixer, NoMixer):
        return "E" if layer.sparse else "-"
    return "M" if isinstance(layer.mixer, StateSpace) else "*"


class ListedRope(Part):
    """RoPE in the layers with a 1 in `no_rope_layers`, by default in three of four (SmolLM3)."""

    keys = ("no_rope_layers", "no_rope_layer_interval")

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        interval, layers = convert(PositiveInt, raw, "no_rope_layer_interval", 4), fields["num_hidden_layers"]
        listed = first_of(raw, ("no_rope_layers",), [int((layer + 1) % interval != 0) for layer in range(layers)])
        if not isinstance(listed, list) or len(listed) != layers:
            raise ValueError(f"no_rope_layers: wanted a list of {layers} numbers, got {show(listed)}")
        rotated = [expect("no_rope_layers", each, (0, 1)) for each in listed]
        return {"nope_layers": tuple(layer for layer in range(layers) if not rotated[layer])}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        return {"no_rope_layers": [int(layer not in config.nope_layers) for layer in range(config.num_hidden_layers)]}


class OptionalRope(Part):
    """RoPE in all layers or in none, by `position_embedding_type` (Granite 4)."""

    keys = ("position_embedding_type",)

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        kind = expect("position_embedding_type", raw.get("position_embedding_type"), (None, "nope", "rope"))
        return {"nope_layers": () if kind == "rope" else tuple(range(fields["num_hidden_layers"]))}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        return {"position_embedding_type": "nope" if config.nope_layers else "rope"}


class RopeInWindows(Part):
    """RoPE only in the layers with a window, unless `sliding_window` is null (EXAONE 4)."""

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        layers, sliding = range(fields["num_hidden_layers"]), fields["sliding_layers"]
        every = raw.get("sliding_window", 0) is None
        return {"nope_layers": () if every else tuple(layer for layer in layers if layer not in sliding)}
