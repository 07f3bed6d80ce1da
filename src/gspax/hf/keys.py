"""The keys of `config.json`: those that hold one field of `ModelConfig`, and parts that are several keys together.

`hf.families` composes both for each family. This module imports no accelerator code.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from gspax.config import (
    GatedDelta,
    GlobalHeads,
    Latent,
    ModelConfig,
    Multipliers,
    Router,
    ShortConvolution,
    StateSpace,
)
from gspax.data.files import Json

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # in `layer_types`
LOCAL = "num_local_experts"  # the name of transformers 5
REQUIRED = object()  # no default for an absent key


class Key(NamedTuple):
    """The key of `config.json` that holds a field."""

    name: str  # as gspax writes it
    default: object = REQUIRED  # the value if a file lacks the key
    other: str = ""  # another name that some files use
    null: bool = False  # whether the file has null for 0


Fields = dict[str, Key]  # the keys of fields of ModelConfig
Raw = Mapping[str, Json]  # a parsed file

OBJECTS: dict[str, type] = {  # the fields of ModelConfig with fields of their own, such as `router.scale`
    **{"router": Router, "latent": Latent, "delta": GatedDelta, "multipliers": Multipliers},
    "global_heads": GlobalHeads,
}
HINTS = typing.get_type_hints(ModelConfig, include_extras=True)  # the type of each field
for _name, _kind in (*OBJECTS.items(), ("mixer", StateSpace), ("mixer", ShortConvolution)):
    HINTS |= {f"{_name}.{name}": hint for name, hint in typing.get_type_hints(_kind, include_extras=True).items()}


class Part:
    """What several keys say together, or one key that is not simply a field. A family lists its parts.

    A part reads these keys of a file into fields of `ModelConfig`, and writes them from a `ModelConfig`.
    """

    optional_experts: ClassVar[bool] = False  # whether models of a family with experts may have none

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that this part reads and no field copies."""
        return ()

    def replaced(self, raw: Raw) -> dict[str, Json]:
        """Return the values of keys that this part's keys replace, before any key is read as a field.

        ValueError with a one-sentence message, as in `read`, if a key has a wrong value.
        """
        return {}

    def read(self, raw: Raw, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of `ModelConfig`, given those that were read before."""
        return {}

    def write(self, config: ModelConfig) -> dict[str, Json]:
        """Return this part's keys. UserError if they cannot express the model, whose `model_type` is the family's."""
        return {}

    def expressible(self, config: ModelConfig) -> ModelConfig:
        """Return the model without the fields that make `write` raise an error of its own."""
        return config


def same(**defaults: object) -> Fields:
    """Return fields whose keys have the same names, with the given defaults."""
    return {name: Key(name, default) for name, default in defaults.items()}


def sizes(*, eps: float = 1e-6, context: int = 32768, dense: bool = True, tied: bool = False) -> Fields:
    """Return the fields of every family; `intermediate_size` only if there are dense layers."""
    needed = ("vocab_size", "hidden_size", *(["intermediate_size"] if dense else []), "num_hidden_layers")
    return {name: Key(name) for name in (*needed, "num_attention_heads", "num_key_value_heads")} | same(
        rms_norm_eps=eps, tie_word_embeddings=tied, initializer_range=0.02, max_position_embeddings=context
    )


def experts(
    name: str = "num_experts",
    other: str = LOCAL,
    *,
    active: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
) -> Fields:
    """Return the fields of the experts: their number, the number of active ones, and their width."""
    count = Key(name, other=other)
    return {"num_experts_per_tok": Key(active), "moe_intermediate_size": Key(width), "num_experts": count}


def routed(groups: int = 1, top_groups: int = 1, scale: float = 1.0, *, other: str = LOCAL) -> Fields:
    """Return the fields of experts as in DeepSeek-V2 and later, which are chosen from groups."""
    return experts("n_routed_experts", other) | {
        "router.groups": Key("n_group", groups),
        "router.top_groups": Key("topk_group", top_groups),
        "router.scale": Key("routed_scaling_factor", scale),
    }
