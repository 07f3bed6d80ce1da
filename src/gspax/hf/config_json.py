"""`config.json` of a Qwen3, Qwen3-MoE, Qwen2-MoE or Mixtral checkpoint <-> `ModelConfig`.

Both the Hub's names and those of transformers 5 (`num_local_experts`, `dtype`, `rope_parameters`, `layer_types`) are
read. Every key is in one of four tables: copied, translated, of a permitted value, or harmless; any other key is an
error, so that nothing in a checkpoint is silently ignored. An absent key has transformers' default (`Qwen3Config`,
`Qwen3MoeConfig`, ...), except for sizes, which are required.

This module imports no accelerator code: a dry run needs only the configuration.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gspax.config import ModelConfig, Yarn
from gspax.config.model import architecture_problems
from gspax.data.files import SHOWN, Json, read_object, show
from gspax.errors import UserError
from gspax.run.buckets import to_path

T = TypeVar("T")

REQUIRED = object()  # no default for an absent key
COPIED: dict[str, object] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": REQUIRED,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
}
COPIED_OF_EXPERTS: dict[str, object] = {
    "num_experts_per_tok": REQUIRED,
    "moe_intermediate_size": REQUIRED,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}


@dataclass(frozen=True)
class Family:
    """How the checkpoints of one `model_type` describe a model."""

    architecture: str
    copied: dict[str, object]  # fields of ModelConfig that have a key, with the default of an absent one
    implied: dict[str, Json]  # fields of ModelConfig that all models of the family share


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", COPIED | {"attention_bias": False}, {"qk_norm": True, "qkv_bias": False}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        COPIED | COPIED_OF_EXPERTS | {"attention_bias": False},
        {"qk_norm": True, "qkv_bias": False},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        COPIED | COPIED_OF_EXPERTS | {"shared_expert_intermediate_size": REQUIRED, "qkv_bias": True},
        {"qk_norm": False, "attention_bias": False},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        COPIED | {"num_experts_per_tok": REQUIRED, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        {"qk_norm": False, "qkv_bias": False, "attention_bias": False, "norm_topk_prob": True},
    ),
}
TRANSLATED = (
    *("model_type", "architectures", "head_dim", "dtype", "torch_dtype"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
)
TRANSLATED_OF_EXPERTS = ("num_experts", "num_local_experts")
PERMITTED: dict[str, tuple[Json, ...]] = {  # the only values that gspax implements
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "router_jitter_noise": (None, 0),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "per_layer_config": (None,),
    "auto_map": (None,),  # code that comes with the checkpoint
    "qkv_bias": (False,),
    "use_qk_norm": (True,),
    "shared_expert_intermediate_size": (None, 0),
}
HARMLESS = (  # keys that do not affect what gspax computes
    *("transformers_version", "_name_or_path", "unsloth_fixed", "unsloth_version"),  # who wrote the file, and where
    *("bos_token_id", "eos_token_id"),  # for generation; gspax uses the tokenizer and generation_config.json
    "pad_token_id",  # gspax marks padding by segments, not by a token
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),  # what transformers returns
    "router_aux_loss_coef",  # a loss that the experiment may name
    *("use_cache", "torchscript", "use_bfloat16", "_attn_implementation", "_attn_implementation_autoset"),  # its speed
    *("id2label", "label2id", "num_labels", "problem_type"),  # of a classifier
)
HARMLESS_ROPE = ("attn_factor",)  # of DeepSeek-R1-0528-Qwen3-8B; what transformers reads is `attention_factor`
DTYPES = ("float32", "bfloat16", "float16")  # of the tensors; gspax computes in the experiment's dtype
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
HINTS, YARN_HINTS = (typing.get_type_hints(record, include_extras=True) for record in (ModelConfig, Yarn))


def read_config(directory: str | Path) -> ModelConfig:
    """The model of `directory/config.json`, with the defaults of `dtype`, `remat` and `checkpoint`.

    The dtype in the file is the tensors' and says nothing about the computation.

    Raises:
      UserError: no such file, or it needs something that gspax does not implement; the message names the key.
    """
    path = to_path(directory) / "config.json"
    if not path.exists():
        raise UserError(f"{directory}: wanted a checkpoint folder with config.json, there is none")
    raw = read_object(path)
    try:
        return _parse(raw)
    except ValueError as problem:
        raise UserError(f"{path}: {problem}") from None


def family_of(config: ModelConfig) -> str:
    """The `model_type` whose checkpoints hold such a model. UserError if there is none."""
    experts, shared = config.num_experts > 0, config.shared_expert_intermediate_size > 0
    for name, family in FAMILIES.items():
        same = all(getattr(config, field) == value for field, value in family.implied.items())
        if same and experts == (name != "qwen3") and shared == (name == "qwen2_moe"):
            return name
    raise UserError(
        "model: wanted a model of one of the families " + ", ".join(FAMILIES) + ", got "
        f"qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, attention_bias={config.attention_bias}, "
        f"shared_expert_intermediate_size={config.shared_expert_intermediate_size}, num_experts={config.num_experts}"
    )


def to_json(config: ModelConfig) -> dict[str, Json]:
    """`config.json` of an exported checkpoint, in the Hub's names, which both transformers 4 and 5 read.

    `torch_dtype` is `config.dtype`, until the writer replaces it by the dtype of the tensors; `remat` and `checkpoint`
    are not part of a checkpoint.

    Raises:
      UserError: no published family describes the model (such as experts, and a window on only some layers).
    """
    family = family_of(config)
    content: dict[str, Json] = {"architectures": [FAMILIES[family].architecture], "model_type": family}
    content |= {name: getattr(config, name) for name in FAMILIES[family].copied}
    if family == "mixtral":
        content |= {"num_local_experts": config.num_experts, "intermediate_size": config.moe_intermediate_size}
    elif config.num_experts:
        content |= {"num_experts": config.num_experts, "mlp_only_layers": list(config.mlp_only_layers)}
    if family != "qwen2_moe":
        content["head_dim"] = config.head_dim
    content |= {"hidden_act": "silu", "attention_dropout": 0.0, "torch_dtype": config.dtype}
    content |= {"rope_theta": config.rope_theta, "rope_scaling": None}
    if yarn := config.rope_scaling:
        factor, original = yarn.factor, yarn.original_max_position_embeddings
        defaults = dataclasses.asdict(Yarn(factor=factor, original_max_position_embeddings=original))
        changed = {name: value for name, value in dataclasses.asdict(yarn).items() if value != defaults[name]}
        scaling: dict[str, Json] = {"factor": factor, "original_max_position_embeddings": original}
        content["rope_scaling"] = {"rope_type": "yarn"} | scaling | changed
    return content | _window_json(config, family)


def _window_json(config: ModelConfig, family: str) -> dict[str, Json]:
    layers, sliding = config.num_hidden_layers, config.sliding_layers if config.sliding_window else ()
    if family == "mixtral" and len(sliding) in (0, layers):
        return {"sliding_window": config.sliding_window if sliding else None}
    if not sliding:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": layers}
    if family == "qwen2_moe":
        raise UserError(f"model.sliding_layers: wanted none with a shared expert, got {sliding}")
    if family != "qwen3" and len(sliding) < layers:
        raise UserError(f"model.sliding_layers: wanted all {layers} layers or none with experts, got {sliding}")
    content: dict[str, Json] = {"use_sliding_window": True, "sliding_window": config.sliding_window}
    content["max_window_layers"] = min(sliding)
    if len(sliding) < layers - min(sliding):  # not simply the last layers: only the newer key can express that
        content["layer_types"] = [SLIDING if layer in sliding else FULL for layer in range(layers)]
    return content


def _parse(raw: Mapping[str, Json]) -> ModelConfig:
    """The model of a parsed `config.json`. ValueError with a one-sentence message."""
    name = expect("model_type", raw.get("model_type"), FAMILIES)
    family, experts = FAMILIES[name], name != "qwen3"
    expect("architectures", raw.get("architectures"), (None, [family.architecture]))
    known = {*family.copied, *TRANSLATED, *(TRANSLATED_OF_EXPERTS if experts else ()), *HARMLESS}
    permitted = {key: (None, value) for key, value in family.implied.items()} | PERMITTED
    for key, value in raw.items():
        if key in known:
            continue
        if key not in permitted:
            raise ValueError(f"{key[:SHOWN]}: wanted no such key (gspax does not know it), got {show(value)}")
        expect(key, value, permitted[key])
    fields: dict[str, Any] = {key: _read(HINTS[key], raw, key, default) for key, default in family.copied.items()}
    if experts:
        key = "num_experts" if raw.get("num_local_experts") is None else "num_local_experts"
        fields["num_experts"] = _read(HINTS["num_experts"], raw, key, REQUIRED)
    head_dim = fields["hidden_size"] // max(1, fields["num_attention_heads"]) if experts else 128
    fields["head_dim"] = _read(HINTS["head_dim"], raw, "head_dim", head_dim)
    expect("dtype", _first(raw, ("dtype", "torch_dtype"), "float32"), DTYPES)
    fields |= family.implied
    if name == "mixtral":
        fields |= {"moe_intermediate_size": fields["intermediate_size"], "intermediate_size": 0}
    theta, yarn = _rope(raw, fields["max_position_embeddings"])
    window, sliding = _window(raw, name, fields["num_hidden_layers"])
    config = ModelConfig(**fields, rope_theta=theta, rope_scaling=yarn, sliding_window=window, sliding_layers=sliding)
    for problem in architecture_problems(config):
        raise ValueError(problem.replace("model.", ""))
    return config


def _rope(raw: Mapping[str, Json], context: int) -> tuple[float, Yarn | None]:
    """`rope_theta` and `rope_scaling`. As in transformers, the older object wins, also over the top level."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling: wanted an object or null, got {show(rope)}")
    theta = _read(HINTS["rope_theta"], raw if rope.get("rope_theta") is None else rope, "rope_theta", 10000.0)
    kind = expect("rope_type", _first(rope, ("rope_type", "type"), "default"), ("default", "yarn"))
    known = YARN_HINTS if kind == "yarn" else {}
    for key, value in rope.items():
        if key not in ("rope_theta", "rope_type", "type", *known, *HARMLESS_ROPE):
            raise ValueError(f"rope_scaling.{key[:SHOWN]}: wanted no such key with rope_type {kind}, got {show(value)}")
    if kind == "default":
        return theta, None
    original = _read(known[ORIGINAL], rope, ORIGINAL, context)
    values = {"factor": context / original, ORIGINAL: original} | {k: v for k, v in rope.items() if v is not None}
    return theta, Yarn(**{name: _read(known[name], values, name, REQUIRED) for name in known if name in values})


def _window(raw: Mapping[str, Json], family: str, layers: int) -> tuple[int, tuple[int, ...]]:
    """`sliding_window` and `sliding_layers`.

    transformers applies the window to every layer of a Qwen3-MoE and ignores `max_window_layers` and `layer_types`
    there; a file in which one of them disagrees is rejected.
    """
    permitted = (False,) if family == "qwen2_moe" else (False, True)
    on = family == "mixtral" or expect("use_sliding_window", _first(raw, ("use_sliding_window",), False), permitted)
    window = _read(HINTS["sliding_window"], raw, "sliding_window", 0) if on else 0
    if family == "mixtral":  # a window that is there is on every layer
        return window, tuple(range(layers)) if window else ()
    first = _read(int, raw, "max_window_layers", 28 if family == "qwen3" else 0)
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types: wanted a list of {layers} names, got {show(kinds)}")
    for kind in kinds:
        expect("layer_types", kind, (FULL, SLIDING) if window else (FULL,))
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if window and family == "qwen3_moe" and len(sliding) < layers:
        key = "max_window_layers" if raw.get("layer_types") is None else "layer_types"
        raise ValueError(f"{key}: wanted the window on all {layers} layers of a Qwen3-MoE, got {show(raw[key])}")
    return (window, sliding) if sliding else (0, ())


def _first(raw: Mapping[str, Json], keys: Collection[str], default: Json) -> Json:
    """The value of the first of these keys that has one; null counts as absent."""
    return next((raw[key] for key in keys if raw.get(key) is not None), default)


def expect(key: str, value: Json, permitted: Collection[T]) -> T:
    """The value of a key, one of the permitted ones. ValueError otherwise."""
    for choice in permitted:
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return choice
    raise ValueError(f"{key}: wanted {' or '.join(map(json.dumps, permitted))}, got {show(value)}")


def _read(hint: type[T], raw: Mapping[str, Json], key: str, default: object) -> T:
    """The value of a key as an annotated type: null counts as absent, integers may be floats, lists become tuples.

    ValueError if it has another type, or is outside the annotation's ranges.
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
    elif type(value) not in kinds:
        words = {int: "an integer", float: "a number", bool: "true or false"}.get(kinds[0], "a list of integers")
        raise ValueError(f"{key}: wanted {words}, got {show(value)}")
    elif type(value) is float and not math.isfinite(value):
        raise ValueError(f"{key}: wanted a finite number, got {show(value)}")
    for range_ in ranges:
        if not range_.accepts(value):
            raise ValueError(f"{key}: wanted {range_.words}, got {show(value)}")
    return value
