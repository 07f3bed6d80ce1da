"""`config.json` of a Qwen3 or Qwen3-MoE checkpoint <-> `ModelConfig`.

Read are the Hub's names and those that transformers 5 writes (`num_local_experts`, `dtype`, `rope_parameters`,
`layer_types`). Every key is in one of four tables: copied, translated, of one permitted value, or harmless; any other
key is an error, so that nothing a checkpoint asks for is passed over in silence. A key that is absent has the value
that transformers gives it (`Qwen3Config`, `Qwen3MoeConfig`), except for sizes, which must be there.

This module imports no accelerator code: the dry run needs a configuration only.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gspax.config import ModelConfig, Yarn
from gspax.errors import UserError

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}  # by model_type

REQUIRED = object()  # there is no value to take when the key is absent
COPIED: dict[str, Any] = {  # fields of ModelConfig of the same name, with the value of an absent key
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
TRANSLATED = (
    *("model_type", "architectures", "head_dim", "dtype", "torch_dtype"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
)
TRANSLATED_OF_EXPERTS = ("num_experts", "num_local_experts")
PERMITTED: dict[str, tuple[Any, ...]] = {  # what gspax does, and so the only thing that a checkpoint may ask for
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "router_jitter_noise": (None, 0),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "per_layer_config": (None,),
    "auto_map": (None,),  # code of the checkpoint's own
}
HARMLESS = {  # what none of the numbers that gspax computes depends on, and why
    "transformers_version": "says who wrote the file",
    "_name_or_path": "says where it was",
    "bos_token_id": "generation; gspax asks the tokenizer and generation_config.json",
    "eos_token_id": "generation; gspax asks the tokenizer and generation_config.json",
    "pad_token_id": "gspax marks padding by segments, not by a token",
    "use_cache": "speed of transformers' generation",
    "output_attentions": "what transformers returns",
    "output_hidden_states": "what transformers returns",
    "output_router_logits": "what transformers returns; the loss with it is an experiment's choice",
    "router_aux_loss_coef": "a loss that an experiment names or not",
    "return_dict": "what transformers returns",
    "torchscript": "how torch runs it",
    "use_bfloat16": "how TensorFlow ran it",
    "_attn_implementation": "how torch runs it",
    "_attn_implementation_autoset": "how torch runs it",
    "id2label": "a classifier's",
    "label2id": "a classifier's",
    "num_labels": "a classifier's",
    "problem_type": "a classifier's",
}
DTYPES = ("float32", "bfloat16")
FULL, SLIDING = "full_attention", "sliding_attention"
HINTS, YARN_HINTS = typing.get_type_hints(ModelConfig), typing.get_type_hints(Yarn)


def read_config(directory: str | Path) -> ModelConfig:
    """The model that `directory/config.json` describes, computed in its dtype; `remat` and `checkpoint` are left alone.

    Raises:
      UserError: no such file, or it asks for something that gspax does not do; the sentence names the key.
    """
    path = Path(directory) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory}: wanted a checkpoint folder with config.json, there is none") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise UserError(f"{path}: wanted a JSON file, got one that cannot be read: {problem}") from problem
    try:
        return _parse(raw)
    except ValueError as problem:
        raise UserError(f"{path}: {problem}") from None


def to_json(config: ModelConfig) -> dict[str, Any]:
    """What `config.json` of an exported checkpoint says, in the Hub's names, which transformers 4 and 5 both read.

    `torch_dtype` is `config.dtype`; `remat` and `checkpoint` are no part of a checkpoint.

    Raises:
      UserError: a model that no Qwen3 configuration describes (experts, and a window on some of the layers only).
    """
    experts = config.num_experts > 0
    family = "qwen3_moe" if experts else "qwen3"
    found: dict[str, Any] = {"architectures": [ARCHITECTURES[family]], "model_type": family}
    found |= {name: getattr(config, name) for name in COPIED | (COPIED_OF_EXPERTS if experts else {})}
    if experts:
        found |= {"num_experts": config.num_experts, "mlp_only_layers": list(config.mlp_only_layers)}
    found |= {"head_dim": config.head_dim, "hidden_act": "silu", "attention_dropout": 0.0, "torch_dtype": config.dtype}
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


def _window_json(config: ModelConfig, family: str) -> dict[str, Any]:
    layers, sliding = config.num_hidden_layers, config.sliding_layers if config.sliding_window else ()
    if not sliding:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": layers}
    if family == "qwen3_moe" and len(sliding) < layers:
        raise UserError(f"model.sliding_layers: wanted all {layers} layers or none with experts, got {sliding}")
    found: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": min(sliding),
    }
    if len(sliding) < layers - min(sliding):  # not simply the last layers: only the newer key can say so
        kinds = [SLIDING if layer in sliding else FULL for layer in range(layers)]
        found |= {"layer_types": kinds}
    return found


def _parse(raw: Any) -> ModelConfig:
    """Raises ValueError with a sentence."""
    if not isinstance(raw, dict):
        raise ValueError(f"wanted a JSON object, got {json.dumps(raw)}")
    family = _expect("model_type", raw.get("model_type"), ARCHITECTURES)
    _expect("architectures", raw.get("architectures"), (None, [ARCHITECTURES[family]]))
    experts = family == "qwen3_moe"
    copied = COPIED | (COPIED_OF_EXPERTS if experts else {})
    known = [*copied, *TRANSLATED, *(TRANSLATED_OF_EXPERTS if experts else ()), *HARMLESS]
    for key, value in raw.items():
        if key in PERMITTED:
            _expect(key, value, PERMITTED[key])
        elif key not in known:
            raise ValueError(
                f"{key}: wanted no such key (gspax does not know what it asks for), got {json.dumps(value)}"
            )
    fields = {name: _typed(HINTS[name], name, _get(raw, name, default)) for name, default in copied.items()}
    if experts:
        name = "num_experts" if raw.get("num_local_experts") is None else "num_local_experts"
        fields["num_experts"] = _typed(int, name, _get(raw, name, REQUIRED))
    head_dim = fields["hidden_size"] // max(1, fields["num_attention_heads"]) if experts else 128
    fields["head_dim"] = _typed(int, "head_dim", _get(raw, "head_dim", head_dim))
    fields["dtype"] = _expect("dtype", _get(raw, "dtype", _get(raw, "torch_dtype", "float32")), DTYPES)
    _check_sizes(fields)
    fields |= _rope(raw, fields["max_position_embeddings"])
    return ModelConfig(**fields, **_window(raw, family, fields["num_hidden_layers"]))


def _check_sizes(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        least = 0 if name == "intermediate_size" else 1  # 0: no layer is dense
        if type(value) is int and value < least:
            raise ValueError(f"{name}: wanted at least {least}, got {value}")
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    if heads % groups:
        raise ValueError(f"num_attention_heads: wanted a multiple of num_key_value_heads ({groups}), got {heads}")
    if fields["head_dim"] % 2:
        raise ValueError(f"head_dim: wanted an even number (RoPE turns pairs), got {fields['head_dim']}")


def _rope(raw: Mapping[str, Any], context: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`. As in transformers, the older of two objects wins, and what it says itself."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling: wanted an object or null, got {json.dumps(rope)}")
    theta = _typed(float, "rope_theta", _get(rope, "rope_theta", _get(raw, "rope_theta", 10000.0)))
    kind = _expect("rope_type", _get(rope, "rope_type", _get(rope, "type", "default")), ("default", "yarn"))
    known = YARN_HINTS if kind == "yarn" else {}
    for key, value in rope.items():
        if key not in ("rope_theta", "rope_type", "type", *known):
            raise ValueError(f"rope_scaling.{key}: wanted no such key with rope_type {kind}, got {json.dumps(value)}")
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

    transformers slides every layer of a Qwen3-MoE and looks at neither `max_window_layers` nor `layer_types` there; a
    file in which one of them says otherwise is refused.
    """
    on = _expect("use_sliding_window", _get(raw, "use_sliding_window", False), (False, True))
    window = _typed(int, "sliding_window", _get(raw, "sliding_window", 0)) if on else 0
    first = _typed(int, "max_window_layers", _get(raw, "max_window_layers", 28 if family == "qwen3" else 0))
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types: wanted a list of {layers} names, got {json.dumps(kinds)}")
    for kind in kinds:
        _expect("layer_types", kind, (FULL, SLIDING) if window else (FULL,))
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == SLIDING)
    if window < 0:
        raise ValueError(f"sliding_window: wanted at least 1 or null, got {window}")
    if window and family == "qwen3_moe" and len(sliding) < layers:
        key = "max_window_layers" if raw.get("layer_types") is None else "layer_types"
        raise ValueError(f"{key}: wanted the window on all {layers} layers of a Qwen3-MoE, got {json.dumps(raw[key])}")
    return {"sliding_window": window if sliding else 0, "sliding_layers": sliding}


def _get(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key; null is as good as none."""
    value = default if raw.get(key) is None else raw[key]
    if value is REQUIRED:
        raise ValueError(f"{key}: wanted a value, there is none")
    return value


def _expect(key: str, value: Any, permitted: Collection[Any]) -> Any:
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in permitted):
        raise ValueError(f"{key}: wanted {' or '.join(map(json.dumps, permitted))}, got {json.dumps(value)}")
    return value


def _typed(hint: Any, name: str, value: Any) -> Any:
    """`value` as an annotation says: whole numbers are floats too, lists are tuples."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)  # float | None
    if type(value) is int and float in kinds:
        return float(value)
    if hint == tuple[int, ...] and isinstance(value, list | tuple) and all(type(each) is int for each in value):
        return tuple(value)
    if type(value) not in kinds:
        words = {int: "an integer", float: "a number", bool: "true or false"}.get(kinds[0], "a list of integers")
        raise ValueError(f"{name}: wanted {words}, got {json.dumps(value)}")
    return value
