"""Converts GGUF files of llama.cpp to the Hugging Face checkpoints that they were made from.

The package `gguf` dequantizes the tensors; the precision that quantization lost is not restored. As in `config.json`,
a key that may change what the model computes and is not read is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gspax.data.files import show
from gspax.errors import UserError, describe_error, how_to_install
from gspax.hf import gguf_tokenizer, tensors

Config = dict[str, Any]  # the content of config.json
Change = Callable[[np.ndarray, Config], np.ndarray]  # converts a tensor from GGUF's convention to the checkpoint's

PROJECTIONS = ("gate", "up", "down")
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
DENSE = {f"ffn_{part}": f"mlp.{part}_proj" for part in PROJECTIONS}
EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in PROJECTIONS}
MIXTRAL = {"ffn_gate_inp": "block_sparse_moe.gate"} | {
    f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{name}"
    for part, name in zip(PROJECTIONS, ("w1", "w3", "w2"), strict=True)
}
SIZES = {  # the key of config.json of each key after "ARCHITECTURE."
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def pair_halves(heads: str) -> Change:
    """Return a function that inverts llama.cpp's order of query and key rows, in which RoPE rotates neighbors."""

    def reorder(tensor: np.ndarray, config: Config) -> np.ndarray:
        count = config[heads]
        pairs = tensor.reshape(count, len(tensor) // count // 2, 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)

    return reorder


def minus_one(tensor: np.ndarray, config: Config) -> np.ndarray:
    """Subtract 1 from the scale of a norm, as Gemma's checkpoints store it."""
    return tensor - np.float32(1)


def gemma3_scale(config: Config) -> Config:
    """Return the scale of Gemma 3's queries: the head size, except in the 27B model (62 layers)."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": head_dim if config["num_hidden_layers"] == 62 else config["head_dim"]}


@dataclass(frozen=True)
class Architecture:
    """The layout of the files of one `general.architecture`: names, sizes, and conversions of tensors."""

    model_type: str
    layer: Mapping[str, str]  # GGUF name -> name in the checkpoint, of a layer's tensors; {} is the expert's number
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)
    implied: Callable[[Config], Config] = lambda config: {}  # fields that the files do not contain
    changes: Mapping[str, Change] = field(default_factory=dict)


ROTATED = {"attn_q": pair_halves("num_attention_heads"), "attn_k": pair_halves("num_key_value_heads")}
ARCHITECTURES = {
    "llama": Architecture("llama", ATTENTION | DENSE, changes=ROTATED),
    "qwen2": Architecture("qwen2", ATTENTION | DENSE),
    "qwen3": Architecture("qwen3", ATTENTION | QK_NORM | DENSE),
    "qwen3moe": Architecture(
        "qwen3_moe",
        ATTENTION | QK_NORM | EXPERTS,
        SIZES | EXPERT_SIZES,
        lambda config: {"norm_topk_prob": True},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        ATTENTION | QK_NORM | NORMS_AROUND | DENSE,
        SIZES | {"attention.sliding_window": "sliding_window"},
        gemma3_scale,
        dict.fromkeys(("attn_norm", *QK_NORM, *NORMS_AROUND, "output_norm"), minus_one),
    ),
}
MIXTURE_OF_LLAMAS = Architecture(
    "mixtral",
    ATTENTION | MIXTRAL,
    SIZES | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    changes=ROTATED,
)
REPEATED = {  # keys that repeat other keys
    "vocab_size": "vocab_size",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
}
FACTORS = "rope_freqs.weight"  # the divisors of Llama 3's RoPE frequencies
SHARD_SIZE = 5_000_000_000  # bytes of tensors in a file


def is_gguf(source: str) -> bool:
    """Return whether a checkpoint's name is that of a GGUF file."""
    return source.endswith(".gguf")


def unpack(file: Path, folder: Path, dtype: str) -> None:
    """Write the checkpoint that a GGUF file was made from: config.json, the tokenizer's files, and safetensors.

    Args:
      file: a whole model; join the parts of a split one first.
      folder: an existing, empty folder.
      dtype: the dtype of the tensors: `float32`, which represents every dequantized number exactly, or `bfloat16`.

    Raises:
      UserError: the file is damaged or not a GGUF file; its architecture, a key, its tokenizer, or the type of a tensor
        is not implemented; or the package `gguf` is not installed.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as problem:
        raise UserError(
            f"{file}: wanted the package gguf, which reads such files: {how_to_install('gguf')}"
        ) from problem
    try:
        reader = GGUFReader(file)
        metadata = {key: value.contents() for key, value in reader.fields.items()}
        stored = {each.name: each for each in reader.tensors}
        shapes = {name: tuple(int(size) for size in reversed(each.shape)) for name, each in stored.items()}
    except Exception as problem:  # of many kinds, from the bytes of a damaged file
        raise UserError(f"{file}: wanted a whole GGUF file, it cannot be read: {describe_error(problem)}") from problem

    def read(name: str) -> np.ndarray:
        try:
            return np.asarray(dequantize(stored[name].data, stored[name].tensor_type), np.float32)
        except NotImplementedError:
            raise ValueError(
                f"{name}: wanted a type that gguf can dequantize, got {stored[name].tensor_type.name}"
            ) from None

    try:
        architecture, config = read_config(metadata, shapes)
        if FACTORS in shapes:
            del shapes[FACTORS]
            config["rope_scaling"] = llama3_scaling(read(FACTORS), config)
        plan = {name: list_published(name, shape, architecture) for name, shape in shapes.items()}
        gguf_tokenizer.write(metadata, folder)
        (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=2) + "\n")
        kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        targets = {name: shape for published in plan.values() for name, shape in published.items()}
        places = tensors.lay_out(folder, targets, kind, SHARD_SIZE)
        for name, published in plan.items():
            numbers = read(name)
            if (change := architecture.changes.get(split_name(name)[1])) is not None:
                numbers = change(numbers, config)
            for target, part in zip(published, numbers.astype(kind).reshape(len(published), -1), strict=True):
                tensors.write(places[target], part)
    except ValueError as problem:
        raise UserError(f"{file}: {problem}") from problem


def read_config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Architecture, Config]:
    """Return the architecture of a file, and the content of config.json. ValueError with one sentence."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"general.architecture: wanted one of {', '.join(ARCHITECTURES)}, got {show(name)}")
    if metadata.get("split.count", 0) > 1:
        raise ValueError("split.count: wanted a whole model; join its files with llama-gguf-split --merge")
    architecture = ARCHITECTURES[name]
    if name == "llama" and metadata.get("llama.expert_count"):
        architecture = MIXTURE_OF_LLAMAS
    own = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    config: Config = {target: _shortest(own.pop(key)) for key, target in architecture.sizes.items() if key in own}
    for key in ("block_count", "embedding_length", "attention.head_count"):
        if not isinstance(config.get(SIZES[key]), int) or config[SIZES[key]] < 1:
            raise ValueError(f"{name}.{key}: wanted an integer above 0, got {show(metadata.get(f'{name}.{key}'))}")
    heads = config["num_attention_heads"]
    config = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads} | config
    if "token_embd.weight" not in shapes:
        raise ValueError("token_embd.weight: wanted this tensor, there is none")
    config |= {"model_type": architecture.model_type, "vocab_size": shapes["token_embd.weight"][0]}
    config |= {"tie_word_embeddings": "output.weight" not in shapes, **architecture.implied(config)}
    if (tokens := len(metadata.get("tokenizer.ggml.tokens", ()))) > config["vocab_size"]:
        raise ValueError(f"tokenizer.ggml.tokens: wanted at most {config['vocab_size']}, got {tokens}")
    for key, target in REPEATED.items():
        if (value := own.pop(key, config[target])) != config[target]:
            raise ValueError(f"{name}.{key}: wanted {config[target]} ({target}), got {show(value)}")
    config |= _take_scaling(own)
    for key, value in own.items():
        raise ValueError(f"{name}.{key}: wanted no such key (gspax does not know it), got {show(value)}")
    return architecture, config


def list_published(name: str, shape: tuple[int, ...], architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the checkpoint's tensors in a GGUF tensor: one, or one for each expert."""
    block, role, kind = split_name(name)
    target = (architecture.layer if block else WHOLE).get(role)
    if target is None or kind not in ("weight", "bias"):
        raise ValueError(f"{name}: wanted no such tensor in a model of {architecture.model_type}")
    target = f"model.layers.{block}.{target}.{kind}" if block else f"{target}.{kind}"
    return {target.format(expert): shape[1:] for expert in range(shape[0])} if "{}" in target else {target: shape}


def split_name(name: str) -> tuple[str, str, str]:
    """Split a tensor's name into layer, role, and kind: `blk.3.attn_q.weight` is ("3", "attn_q", "weight")."""
    rest, _, kind = name.rpartition(".")
    if rest.startswith("blk."):
        block, _, role = rest.removeprefix("blk.").partition(".")
        return block, role, kind
    return "", rest, kind


def llama3_scaling(factors: np.ndarray, config: Config) -> Config:
    """Return `rope_scaling` of Llama 3.1 and later, whose files contain only the factors that follow from it.

    Raises:
      ValueError: the factors do not follow from Llama 3's numbers.
    """
    scaling: Config = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    exponents = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    turns = 8192 / (2 * math.pi * config["rope_theta"] ** exponents)  # in the original context
    share = np.clip((turns - 1) / (4 - 1), 0, 1)  # of the unscaled frequency
    if not np.allclose(factors, 1 / ((1 - share) / scaling["factor"] + share), rtol=1e-4):
        raise ValueError(f"{FACTORS}: wanted the factors of Llama 3.1 or later, got {show(factors.tolist())}")
    return scaling


def _take_scaling(own: dict[str, Any]) -> Config:
    """Remove the keys of RoPE scaling from `own`, and return `rope_scaling`, empty if there is none."""
    kind = own.pop("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type: wanted none, linear, or yarn, got {show(kind)}")
    scaling = {"rope_type": kind, "factor": _shortest(own.pop("rope.scaling.factor", None))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = own.pop("rope.scaling.original_context_length", None)
    return {"rope_scaling": scaling}


def _shortest(value: Any) -> Any:
    """Return the shortest decimal number that rounds to this float32: 1e-06 for 9.99999997e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
