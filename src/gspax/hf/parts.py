"""The parts of a `config.json` that are neither RoPE (`hf.rope_keys`) nor a list of layers (`hf.layer_lists`).

This module imports no accelerator code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspax.config import ModelConfig, layers_of
from gspax.config.ranges import OptionalSize, Size
from gspax.data.files import Json, show
from gspax.errors import UserError
from gspax.hf.json_values import convert, expect, first_of, part_of
from gspax.hf.keys import FULL, HINTS, REQUIRED, SLIDING, Part, Raw


@dataclass(frozen=True)
class LeadingDense(Part):
    """The number of leading layers without experts; all later layers have them."""

    default: int
    key: str = "first_k_dense_replace"

    @property
    def keys(self) -> tuple[str, ...]:
        return self.key, "moe_layer_end_index"

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        expect("moe_layer_end_index", raw.get("moe_layer_end_index"), (None, -1, fields["num_hidden_layers"] - 1))
        return {"mlp_only_layers": tuple(range(convert(OptionalSize, raw, self.key, self.default)))}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        sparse = (number for number, layer in enumerate(layers_of(config)) if layer.sparse)
        return {self.key: next(sparse, config.num_hidden_layers)}


@dataclass(frozen=True)
class SharedExperts(Part):
    """The number of shared experts, which are as wide as the others."""

    default: object
    key: str = "n_shared_experts"

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        count = convert(Size, raw, self.key, self.default)
        return {"shared_expert_intermediate_size": count * fields["moe_intermediate_size"]}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        width, each = config.shared_expert_intermediate_size, config.moe_intermediate_size
        if not each or width % each:
            raise UserError(
                f"model.shared_expert_intermediate_size: wanted a multiple of model.moe_intermediate_size ({each}), "
                f"got {width}"
            )
        return {self.key: width // each}

    def expressible(self, config: ModelConfig) -> ModelConfig:
        return dataclasses.replace(config, shared_expert_intermediate_size=config.moe_intermediate_size)


class DenseOrSparse(Part):
    """A list of the layers as "dense" or "sparse", which may replace the number of leading layers without experts."""

    keys = ("mlp_layer_types",)

    def replaced(self, raw: Raw) -> dict[str, Json]:
        if (kinds := raw.get("mlp_layer_types")) is None:
            return {}
        layers, leading = raw.get("num_hidden_layers"), kinds.count("dense") if isinstance(kinds, list) else 0
        if not isinstance(layers, int) or kinds != ["dense"] * leading + ["sparse"] * (layers - leading):
            raise ValueError(
                f'mlp_layer_types: wanted "dense" for the first layers and "sparse" for the others, got {show(kinds)}'
            )
        expect("first_k_dense_replace", first_of(raw, ("first_k_dense_replace",), leading), (leading,))
        return {"first_k_dense_replace": leading}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        return {"mlp_layer_types": ["sparse" if layer.sparse else "dense" for layer in layers_of(config)]}


@dataclass(frozen=True)
class SharedAlone(Part):
    """A model may have no experts; what is else the shared expert is then its MLP."""

    widths: tuple[str, ...]  # the keys of widths of experts, which then all have the width of the MLP
    optional_experts = True

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        none = {"num_experts_per_tok": 0, "moe_intermediate_size": 0, "shared_expert_intermediate_size": 0}
        width = fields["shared_expert_intermediate_size"]
        return {} if fields["num_experts"] else none | {"intermediate_size": width}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        return {} if config.num_experts else dict.fromkeys(self.widths, config.intermediate_size)


class ExpertSwitch(Part):
    """A key that is true if a model has experts, whose other keys do not count otherwise."""

    keys = ("enable_moe_block",)

    def replaced(self, raw: Raw) -> dict[str, Json]:
        on = expect("enable_moe_block", raw.get("enable_moe_block"), (None, False, True))
        if on and not raw.get("num_experts"):
            raise ValueError(f"num_experts: wanted at least 1 with enable_moe_block, got {raw.get('num_experts')}")
        return {} if on else {"num_experts": 0}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        return {"enable_moe_block": config.num_experts > 0}


class GroupsByMethod(Part):
    """A router that ignores groups of experts if its method is "greedy"."""

    keys = ("topk_method",)

    def replaced(self, raw: Raw) -> dict[str, Json]:
        method = expect("topk_method", raw.get("topk_method"), (None, "greedy", "group_limited_greedy"))
        return {} if method == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        return {"topk_method": "group_limited_greedy" if config.router.groups > 1 else "greedy"}


class GlobalHeadLists(Part):
    """The heads of the layers without a window, of which the last layer is always one (Gemma 4).

    transformers 5 lists them by layer, in `per_layer_config`.
    """

    keys = ("per_layer_config",)

    def replaced(self, raw: Raw) -> dict[str, Json]:
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


class AdjustedWidth(Part):
    """The width of an LFM2's MLPs: two thirds of what its file says, rounded up, unless that is switched off."""

    keys = ("block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")

    def replaced(self, raw: Raw) -> dict[str, Json]:
        key = "intermediate_size" if raw.get("block_ff_dim") is None else "block_ff_dim"
        width = convert(HINTS["intermediate_size"], raw, key, REQUIRED)
        if expect("block_auto_adjust_ff_dim", raw.get("block_auto_adjust_ff_dim", True), (True, False)):
            multiple = convert(HINTS["intermediate_size"], raw, "block_multiple_of", 256)
            multiplier = convert(float, raw, "block_ffn_dim_multiplier", 1.0)
            width = multiple * -(-int(multiplier * int(2 * width / 3)) // multiple)
        return {"intermediate_size": int(width)}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        return {"block_auto_adjust_ff_dim": False}


@dataclass(frozen=True)
class ListsOfOneValue(Part):
    """Keys that may hold a list with the same value for each layer."""

    names: tuple[str, ...]

    def replaced(self, raw: Raw) -> dict[str, Json]:
        lists = {key: value for key in self.names if isinstance(value := raw.get(key), list)}
        return {key: each[0] for key, each in lists.items() if each and all(value == each[0] for value in each)}
