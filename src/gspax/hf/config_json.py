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
from pathlib import Path
from typing import Any

from gspax.config import ModelConfig, Yarn
from gspax.config.ranges import Range
from gspax.data.files import SHOWN, read_json, show
from gspax.errors import UserError
from gspax.model.architecture import architecture_problems

ARCHITECTURES = {  # by model_type
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}

REQUIRED = object()  # no default for an absent key
COPIED: dict[str, Any] = {  # fields of ModelConfig of the same name, with the default of an absent key
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": REQUIRED,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
}
COPIED_OF_EXPERTS: dict[str, Any] = {  # the same, for qwen3_moe only
    "num_experts_per_tok": REQUIRED,
    "moe_intermediate_size": REQUIRED,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
COPIED_OF: dict[str, dict[str, Any]] = {  # by model_type, what is copied beside COPIED or with another default
    "qwen3": {},
    "qwen3_moe": COPIED_OF_EXPERTS,
    "qwen2_moe": COPIED_OF_EXPERTS | {"shared_expert_intermediate_size": REQUIRED, "qkv_bias": True},
    "mixtral": {"num_experts_per_tok": REQUIRED, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
}
IMPLIED: dict[str, dict[str, Any]] = {  # by model_type, fields of ModelConfig that no key holds
    "qwen2_moe": {"qk_norm": False, "attention_bias": False},
    "mixtral": {"qk_norm": False, "attention_bias": False, "norm_topk_prob": True},
}
TRANSLATED = (
    *("model_type", "architectures", "head_dim", "dtype", "torch_dtype"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
)
TRANSLATED_OF_EXPERTS = ("num_experts", "num_local_experts")
PERMITTED: dict[str, tuple[Any, ...]] = {  # the only values that gspax implements
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
HARMLESS = {  # keys that do not affect what gspax computes, and why
    "transformers_version": "the writer of the file",
    "_name_or_path": "where the file was",
    "bos_token_id": "generation; gspax uses the tokenizer and generation_config.json",
    "eos_token_id": "generation; gspax uses the tokenizer and generation_config.json",
    "pad_token_id": "gspax marks padding by segments, not by a token",
    "use_cache": "speed of transformers' generation",
    "output_attentions": "what transformers returns",
    "output_hidden_states": "what transformers returns",
    "output_router_logits": "what transformers returns; the loss with it is the experiment's choice",
    "router_aux_loss_coef": "a loss that the experiment may name",
    "return_dict": "what transformers returns",
    "torchscript": "an implementation detail of torch",
    "use_bfloat16": "an implementation detail of TensorFlow",
    "_attn_implementation": "an implementation detail of torch",
    "_attn_implementation_autoset": "an implementation detail of torch",
    "id2label": "a classifier's",
    "label2id": "a classifier's",
    "num_labels": "a classifier's",
    "problem_type": "a classifier's",
    "unsloth_fixed": "who has repaired the file",
    "unsloth_version": "who has written the file",
}
HARMLESS_ROPE = ("attn_factor",)  # of DeepSeek-R1-0528-Qwen3-8B; what transformers reads is `attention_factor`
DTYPES = ("float32", "bfloat16", "float16")  # of the tensors; gspax computes in the experiment's dtype
FULL, SLIDING = "full_attention", "sliding_attention"
RANGES = {  # of the numbers, by field
    name: [each for each in typing.get_args(hint)[1:] if isinstance(each, Range)]
    for name, hint in typing.get_type_hints(ModelConfig, include_extras=True).items()
}
HINTS, YARN_HINTS = typing.get_type_hints(ModelConfig), typing.get_type_hints(Yarn)


def read_config(directory: str | Path) -> ModelConfig:
    """The model of `directory/config.json`, with the defaults of `dtype`, `remat` and `checkpoint`.

    The dtype of the file is that of its tensors and says nothing about the computation.

    Raises:
      UserError: no such file, or it needs something that gspax does not implement; the message names the key.
    """
    path = Path(directory) / "config.json"
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{directory}: wanted a checkpoint folder with config.json, there is none") from None
    except (OSError, ValueError) as problem:
        raise UserError(f"{path}: wanted a JSON file, got one that cannot be read: {problem}") from problem
    try:
        return _parse(raw)
    except ValueError as problem:
        raise UserError(f"{path}: {problem}") from None


def family_of(config: ModelConfig) -> str:
    """The `model_type` whose checkpoints hold such a model. UserError if there is none."""
    for family in ARCHITECTURES:
        implied = {"qk_norm": True, "shared_expert_intermediate_size": 0, "qkv_bias": False} | IMPLIED.get(family, {})
        free = COPIED_OF[family]
        experts = config.num_experts > 0
        if experts != (family != "qwen3") or (family == "qwen2_moe") != (config.shared_expert_intermediate_size > 0):
            continue
        if all(getattr(config, name) == value for name, value in implied.items() if name not in free):
            return family
    raise UserError(
        "model: wanted a model of one of the families " + ", ".join(ARCHITECTURES) + ", got "
        f"qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, attention_bias={config.attention_bias}, "
        f"shared_expert_intermediate_size={config.shared_expert_intermediate_size}, num_experts={config.num_experts}"
    )


def to_json(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of an exported checkpoint, in the Hub's names, which both transformers 4 and 5 read.

    `torch_dtype` is `config.dtype`, until the writer replaces it by that of the tensors; `remat` and `checkpoint` are
    not part of a checkpoint.

    Raises:
      UserError: no published family describes the model (such as experts, and a window on only some layers).
    """
    family = family_of(config)
    found: dict[str, Any] = {"architectures": [ARCHITECTURES[family]], "model_type": family}
    found |= {name: getattr(config, name) for name in _copied(family)}
    if family == "mixtral":
        found |= {"num_local_experts": config.num_experts, "intermediate_size": config.moe_intermediate_size}
    elif config.num_experts:
        found |= {"num_experts": config.num_experts, "mlp_only_layers": list(config.mlp_only_layers)}
    if family != "qwen2_moe":
        found |= {"head_dim": config.head_dim}
    found |= {"hidden_act": "silu", "attention_dropout": 0.0, "torch_dtype": config.dtype}
    found |= {"rope_theta": config.rope_theta, "rope_scaling": None}
    if yarn := config.rope_scaling:
        always: dict[str, Any] = {
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
        }
        set_ = {
            name: value for name, value in dataclasses.asdict(yarn).items() if value != getattr(Yarn(**always), name)
        }
        found["rope_scaling"] = {"rope_type": "yarn", **always, **set_}
    return found | _window_json(config, family)


def _copied(family: str) -> dict[str, Any]:
    """Key -> default of what is copied."""
    copied = COPIED | COPIED_OF[family]
    return {name: default for name, default in copied.items() if name not in IMPLIED.get(family, {})}


def _window_json(config: ModelConfig, family: str) -> dict[str, Any]:
    layers, sliding = config.num_hidden_layers, config.sliding_layers if config.sliding_window else ()
    if family == "mixtral" and len(sliding) in (0, layers):
        return {"sliding_window": config.sliding_window if sliding else None}
    if not sliding:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": layers}
    if family == "qwen2_moe":
        raise UserError(f"model.sliding_layers: wanted none with a shared expert, got {sliding}")
    if family != "qwen3" and len(sliding) < layers:
        raise UserError(f"model.sliding_layers: wanted all {layers} layers or none with experts, got {sliding}")
    found: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": min(sliding),
    }
    if len(sliding) < layers - min(sliding):  # not simply the last layers: only the newer key can express that
        kinds = [SLIDING if layer in sliding else FULL for layer in range(layers)]
        found |= {"layer_types": kinds}
    return found


def _parse(raw: Any) -> ModelConfig:
    """The model of a parsed `config.json`. ValueError with a one-sentence message."""
    if not isinstance(raw, dict):
        raise ValueError(f"wanted a JSON object, got {show(raw)}")
    family = _expect("model_type", raw.get("model_type"), ARCHITECTURES)
    _expect("architectures", raw.get("architectures"), (None, [ARCHITECTURES[family]]))
    experts = family != "qwen3"
    copied, implied = _copied(family), IMPLIED.get(family, {})
    known = [*copied, *TRANSLATED, *(TRANSLATED_OF_EXPERTS if experts else ()), *HARMLESS]
    for key, value in raw.items():
        if key in implied:
            _expect(key, value, (None, implied[key]))
        elif key in PERMITTED and key not in copied:
            _expect(key, value, PERMITTED[key])
        elif key not in known:
            raise ValueError(f"{key[:SHOWN]}: wanted no such key (gspax does not know it), got {show(value)}")
    fields = {name: _typed(HINTS[name], name, _get(raw, name, default)) for name, default in copied.items()}
    if experts:
        name = "num_experts" if raw.get("num_local_experts") is None else "num_local_experts"
        fields["num_experts"] = _typed(int, name, _get(raw, name, REQUIRED))
    head_dim = fields["hidden_size"] // max(1, fields["num_attention_heads"]) if experts else 128
    fields["head_dim"] = _typed(int, "head_dim", _get(raw, "head_dim", head_dim))
    _expect("dtype", _get(raw, "dtype", _get(raw, "torch_dtype", "float32")), DTYPES)
    fields |= implied
    if family == "mixtral":
        fields |= {"moe_intermediate_size": fields["intermediate_size"], "intermediate_size": 0}
    _check_sizes(fields)
    fields |= _rope(raw, fields["max_position_embeddings"])
    config = ModelConfig(**fields, **_window(raw, family, fields["num_hidden_layers"]))
    for problem in architecture_problems(config):
        raise ValueError(problem.replace("model.", ""))
    return config


def _check_sizes(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        for each in RANGES[name]:
            if type(value) in (int, float) and not each.accepts(value):
                raise ValueError(f"{name}: wanted {each.words}, got {show(value)}")
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    if heads % groups:
        raise ValueError(f"num_attention_heads: wanted a multiple of num_key_value_heads ({groups}), got {heads}")
    if fields["head_dim"] % 2:
        raise ValueError(f"head_dim: wanted an even number (RoPE rotates pairs), got {fields['head_dim']}")


def _rope(raw: Mapping[str, Any], context: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`. As in transformers, the older object wins, also over the top level."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling: wanted an object or null, got {show(rope)}")
    theta = _typed(float, "rope_theta", _get(rope, "rope_theta", _get(raw, "rope_theta", 10000.0)))
    kind = _expect("rope_type", _get(rope, "rope_type", _get(rope, "type", "default")), ("default", "yarn"))
    known = YARN_HINTS if kind == "yarn" else {}
    for key, value in rope.items():
        if key not in ("rope_theta", "rope_type", "type", *known, *HARMLESS_ROPE):
            raise ValueError(f"rope_scaling.{key[:SHOWN]}: wanted no such key with rope_type {kind}, got {show(value)}")
    if kind == "default":
        return {"rope_theta": theta}
    fields = {name: _typed(hint, name, rope[name]) for name, hint in known.items() if rope.get(name) is not None}
    original = fields.setdefault("original_max_position_embeddings", context)
    if original < 1:
        raise ValueError(f"original_max_position_embeddings: wanted at least 1, got {original}")
    if fields.setdefault("factor", context / original) < 1:
        raise ValueError(f"rope_scaling.factor: wanted at least 1, got {fields['factor']}")
    for name in ("beta_fast", "beta_slow"):
        if fields.get(name, 1) <= 0:
            raise ValueError(f"rope_scaling.{name}: wanted above 0, got {fields[name]}")
    return {"rope_theta": theta, "rope_scaling": Yarn(**fields)}


def _window(raw: Mapping[str, Any], family: str, layers: int) -> dict[str, Any]:
    """`sliding_window` and `sliding_layers`.

    transformers applies the window to every layer of a Qwen3-MoE and ignores `max_window_layers` and `layer_types`
    there; a file in which one of them disagrees is rejected.
    """
    if family == "mixtral":  # a window that is there is on every layer
        window = _typed(int, "sliding_window", _get(raw, "sliding_window", 0))
        return {"sliding_window": window, "sliding_layers": tuple(range(layers)) if window else ()}
    if family == "qwen2_moe":
        _expect("use_sliding_window", _get(raw, "use_sliding_window", False), (False,))
    on = _expect("use_sliding_window", _get(raw, "use_sliding_window", False), (False, True))
    window = _typed(int, "sliding_window", _get(raw, "sliding_window", 0)) if on else 0
    first = _typed(int, "max_window_layers", _get(raw, "max_window_layers", 28 if family == "qwen3" else 0))
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types: wanted a list of {layers} names, got {show(kinds)}")
    for kind in kinds:
        _expect("layer_types", kind, (FULL, SLIDING) if window else (FULL,))
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if window < 0:
        raise ValueError(f"sliding_window: wanted at least 1 or null, got {window}")
    if window and family == "qwen3_moe" and len(sliding) < layers:
        key = "max_window_layers" if raw.get("layer_types") is None else "layer_types"
        raise ValueError(f"{key}: wanted the window on all {layers} layers of a Qwen3-MoE, got {show(raw[key])}")
    return {"sliding_window": window if sliding else 0, "sliding_layers": sliding}


def _get(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key; null counts as absent."""
    value = default if raw.get(key) is None else raw[key]
    if value is REQUIRED:
        raise ValueError(f"{key}: wanted a value, there is none")
    return value


def _expect(key: str, value: Any, permitted: Collection[Any]) -> Any:
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in permitted):
        raise ValueError(f"{key}: wanted {' or '.join(map(json.dumps, permitted))}, got {show(value)}")
    return value


def _typed(hint: Any, name: str, value: Any) -> Any:
    """`value` as an annotated type: integers may be floats, lists become tuples. ValueError otherwise."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)  # float | None
    if type(value) is int and float in kinds and abs(value) < 2**63:
        return float(value)
    if hint == tuple[int, ...] and isinstance(value, list | tuple) and all(type(each) is int for each in value):
        return tuple(value)
    if type(value) not in kinds:
        words = {int: "an integer", float: "a number", bool: "true or false"}.get(kinds[0], "a list of integers")
        raise ValueError(f"{name}: wanted {words}, got {show(value)}")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name}: wanted a finite number, got {show(value)}")
    return value
