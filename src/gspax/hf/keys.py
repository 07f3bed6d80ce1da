"""The keys of `config.json` that hold fields of `ModelConfig`, as `hf.families` composes them for each family.

This module imports no accelerator code.
"""

from __future__ import annotations

from typing import NamedTuple

LOCAL = "num_local_experts"  # the name of transformers 5
REQUIRED = object()  # no default for an absent key


class Key(NamedTuple):
    """The key of `config.json` that holds a field."""

    name: str  # as gspax writes it
    default: object = REQUIRED  # the value if a file lacks the key
    other: str = ""  # another name that some files use
    null: bool = False  # whether the file has null for 0


Fields = dict[str, Key]  # the keys of fields of ModelConfig


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


def routed(
    groups: int = 1, top_groups: int = 1, scale: float = 1.0, *, dense: int, shared: object, other: str = LOCAL
) -> Fields:
    """Return the fields of experts as in DeepSeek-V2 and later: groups, leading dense layers, and shared experts."""
    return experts("n_routed_experts", other) | {
        "router.groups": Key("n_group", groups),
        "router.top_groups": Key("topk_group", top_groups),
        "router.scale": Key("routed_scaling_factor", scale),
        "dense_layers": Key("first_k_dense_replace", dense),
        "shared_experts": Key("n_shared_experts", shared),
    }
