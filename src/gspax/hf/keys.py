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


LATENT: Fields = {
    "head_dim": Key("qk_rope_head_dim"),
    "latent.rank": Key("kv_lora_rank"),
    "latent.query_rank": Key("q_lora_rank", null=True),
    "latent.nope_dim": Key("qk_nope_head_dim"),
    "latent.value_dim": Key("v_head_dim"),
}
# Gated delta nets of Qwen3-Next and Qwen3.5.
DELTA: Fields = {
    "delta.key_heads": Key("linear_num_key_heads", 16),
    "delta.value_heads": Key("linear_num_value_heads", 32),
    "delta.key_dim": Key("linear_key_head_dim", 128),
    "delta.value_dim": Key("linear_value_head_dim", 128),
    "delta.taps": Key("linear_conv_kernel_dim", 4),
    "attention_bias": Key("attention_bias", False),
}
# State spaces of Granite 4.
STATE_SPACE: Fields = {
    "mixer.heads": Key("mamba_n_heads", 128),
    "mixer.groups": Key("mamba_n_groups", 1),
    "mixer.state_dim": Key("mamba_d_state", 256),
    "mixer.head_dim": Key("mamba_d_head"),
    "mixer.taps": Key("mamba_d_conv", 4),
    "mixer.conv_bias": Key("mamba_conv_bias", True),
}
# State spaces of Nemotron-H.
NEMOTRON_MIXER: Fields = {
    "mixer.heads": Key("mamba_num_heads", 128),
    "mixer.groups": Key("n_groups", 8, other="mamba_n_groups"),
    "mixer.state_dim": Key("ssm_state_size", 128),
    "mixer.head_dim": Key("mamba_head_dim", 64),
    "mixer.taps": Key("conv_kernel", 4, other="mamba_d_conv"),
    "mixer.conv_bias": Key("use_conv_bias", True, other="mamba_conv_bias"),
}
LFM2: Fields = {
    "rms_norm_eps": Key("norm_eps", 1e-5),
    "tie_word_embeddings": Key("tie_word_embeddings", True, "tie_embedding"),
    "mixer.taps": Key("conv_L_cache", 3),
    "mixer.bias": Key("conv_bias", False),
}
MULTIPLIERS: Fields = {
    "multipliers.embedding": Key("embedding_multiplier", 1.0),
    "multipliers.attention": Key("attention_multiplier", 1.0),
    "multipliers.residual": Key("residual_multiplier", 1.0),
    "multipliers.logits": Key("logits_scaling", 1.0),
}
