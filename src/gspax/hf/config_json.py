"""Reads and writes `config.json` of the checkpoints of `hf.families` as a `ModelConfig`.

Both the Hub's names and those of transformers 5 (`num_local_experts`, `dtype`, `rope_parameters`, `layer_types`) are
read. Every key is in one of four tables: copied, translated, of a permitted value, or harmless; any other key is an
error, so that nothing in a checkpoint is silently ignored. An absent key has transformers' default (`Qwen3Config`,
`Qwen3MoeConfig`, ...), except for sizes, which are required.

This module imports no accelerator code: a dry run needs only the configuration.
"""

from __future__ import annotations

import operator
import typing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gspax.config import ModelConfig, layers_of
from gspax.config.model import architecture_problems
from gspax.data.files import SHOWN, Json, read_object, show
from gspax.errors import UserError
from gspax.hf.families import ALIASES, FAMILIES, OF_MTP, WRAPPERS, Family
from gspax.hf.json_values import convert, expect, first_of, part_of
from gspax.hf.keys import HINTS, OBJECTS, REQUIRED, Key, Raw
from gspax.hf.layer_lists import LayerList
from gspax.hf.packed import FP8_BLOCK
from gspax.hf.refused import MISSING, TOWERS
from gspax.hf.rope_keys import RopeKeys
from gspax.storage.paths import to_path

TRANSLATED = ("model_type", "architectures", "head_dim", "dtype", "torch_dtype")
PERMITTED: dict[str, tuple[Json, ...]] = {  # the only values that gspax implements
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "router_jitter_noise": (None, 0),
    **{"chunk_size_feed_forward": (0,), "is_encoder_decoder": (False,), "tie_encoder_decoder": (None, False)},
    **{"add_cross_attention": (False,), "cross_attention_hidden_size": (None,), "pruned_heads": (None, {})},
    "per_layer_config": (None,),
    "auto_map": (None,),  # code in the checkpoint's folder
    "qkv_bias": (False,),
    "shared_expert_intermediate_size": (None, 0),
}
HARMLESS = (  # keys that do not affect what gspax computes; `is_harmless` recognizes more by their form
    *("transformers_version", "unsloth_fixed", "unsloth_version", "name_or_path", "model_name"),  # who wrote the file
    *OF_MTP,
    *("moe_capacity", "pretraining_tp", "gradient_checkpointing"),  # how it was trained
    *("router_aux_loss_coef", "router_z_loss_coef", "tf_legacy_loss"),  # losses that the experiment may name
    *("tokenizer_class", "prefix", "finetuning_task", "task_specific_params"),  # tokenizer and task of the training
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),  # what transformers returns
    *("use_cache", "torchscript", "use_bfloat16", "attn_implementation"),  # speed in transformers
    *("id2label", "label2id", "num_labels", "problem_type"),  # of a classifier
    "is_decoder",  # of models that may be an encoder
    "ignore_keys_at_rope_validation",  # what transformers 5.0 checks when it reads a file
    # generation settings, which older versions of transformers wrote into this file
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "num_return_sequences"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "output_scores"),
    *("return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens", "use_return_dict"),
)
# Token ids: gspax takes those of the tokenizer and generation_config.json, and marks padding by segments
OF_TOKENS = ("_token_id", "_token_ids", "_token_index")
ACTIVATIONS: dict[str, dict[str, Json]] = {
    "silu": {"hidden_act": "silu"},
    "gelu_tanh": {"hidden_activation": "gelu_pytorch_tanh"},
    "relu2": {"mlp_hidden_act": "relu2"},
}
OF_WRAPPER = (  # keys around a text model
    *("text_config", "vision_config", "tie_word_embeddings", "language_model_only", "initializer_range"),
)
BESIDE_TEXT = (*OF_WRAPPER, *TRANSLATED, *RopeKeys().keys, *LayerList.keys)
DTYPES = ("float32", "bfloat16", "float16")  # of the tensors; gspax computes in the experiment's dtype
OF_ALL_LAYERS = ("norm_plus_one", "scale_embedding", "multipliers", "layer_scale", "logit_cap")  # not in `layers_of`


def is_harmless(key: str) -> bool:
    """Return whether a key of any family's file cannot change what the model computes.

    Such a key is a name, a path, a note, a token id, a setting of training or generation, or a private attribute of
    transformers, which begins with an underscore.
    """
    return key in HARMLESS or key.startswith("_") or key.endswith(OF_TOKENS)


def read_config(directory: str | Path) -> ModelConfig:
    """Read the model of `directory/config.json`, with the defaults of `dtype`, `remat` and `checkpoint`.

    The dtype in the file is that of the tensors, not of the computation.

    Raises:
      UserError: there is no such file, or it needs something that gspax does not implement; the message names the key.
    """
    path = to_path(directory) / "config.json"
    if not path.exists():
        raise UserError(f"{directory}: wanted a checkpoint folder with config.json, there is none")
    raw = read_object(path)
    try:
        return _parse(raw)
    except ValueError as problem:
        raise UserError(f"{path}: {problem}") from None


@lru_cache
def family_of(config: ModelConfig) -> str:
    """Return the `model_type` of the checkpoints of such a model: `config.model_type`, or the first family that fits.

    UserError if no family fits.
    """
    fitting = [name for name in FAMILIES if _fits(config, name)]
    if fitting and not config.model_type:
        return fitting[0]
    if (name := ALIASES.get(config.model_type, config.model_type)) in fitting:
        return name
    if name in FAMILIES:
        raise UserError(
            "model.model_type: wanted a family with the parts of the model, "
            f"{' or '.join(fitting) or 'which no family has'}, got {config.model_type}"
        )
    raise UserError(
        "model: wanted a model of one of the families " + ", ".join(FAMILIES) + ", got "
        f"qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, attention_bias={config.attention_bias}, "
        f"shared_expert_intermediate_size={config.shared_expert_intermediate_size}, num_experts={config.num_experts}"
    )


def text_only(config: ModelConfig) -> ModelConfig:
    """Return the model as a checkpoint of its own, if it is the text model of one with a vision tower."""
    text = WRAPPERS[config.model_type][0] if config.model_type in WRAPPERS else config.model_type
    return replace(config, model_type=text)


def _fits(config: ModelConfig, name: str) -> bool:
    """Return whether a family's `config.json` can describe the model, except for what `to_json` rejects by name."""
    family = FAMILIES[name]
    optional = any(part.optional_experts for part in family.all_parts) and not config.num_experts
    experts, shared = (has and not optional for has in (family.experts, family.shared_experts))
    parts = {part.partition(".")[0] for part in family.copied}
    kinds = (experts, shared, "delta" in parts, "latent" in parts, "global_heads" in parts, family.layers.mixer)
    own = config.num_experts > 0, config.shared_expert_intermediate_size > 0, config.delta is not None
    own_parts = config.latent is not None, config.global_heads is not None
    if kinds != (*own, *own_parts, None if config.mixer is None else type(config.mixer)):
        return False
    for part in family.all_parts:
        config = part.expressible(config)
    try:
        described = _model(_content(config, name), name)
    except ValueError:
        return False
    found, wanted = ((layers_of(x), *operator.attrgetter(*OF_ALL_LAYERS)(x)) for x in (described, config))
    return found == wanted


def to_json(config: ModelConfig) -> dict[str, Json]:
    """Return `config.json` of an exported checkpoint, with the Hub's names, which transformers 4 and 5 read.

    `torch_dtype` is `config.dtype`, until the writer replaces it by the dtype of the tensors; `remat` and `checkpoint`
    are not part of a checkpoint.

    Raises:
      UserError: no published family describes the model (such as experts, and a window on only some layers).
    """
    name = family_of(config)
    content = _content(config, name)
    if config.model_type in WRAPPERS:
        _, architecture = WRAPPERS[config.model_type]
        whole: dict[str, Json] = {"architectures": [architecture], "model_type": config.model_type}
        return whole | {"text_config": content, "tie_word_embeddings": config.tie_word_embeddings}
    return content | ({"model_type": config.model_type} if config.model_type in ALIASES else {})


def _content(config: ModelConfig, name: str) -> dict[str, Json]:
    """Return `config.json` of a model of this family, without a wrapper."""
    family, config = FAMILIES[name], replace(config, model_type=name)
    content: dict[str, Json] = {"architectures": [family.architecture], "model_type": name}
    for field, key in family.copied.items():
        value = operator.attrgetter(field)(config)
        content[key.name] = list(value) if isinstance(value, tuple) else value or None if key.null else value
    usual = not family.has_head_dim and config.head_dim * config.num_attention_heads == config.hidden_size
    if "head_dim" not in family.copied and not usual:
        content["head_dim"] = config.head_dim
    content |= ACTIVATIONS[config.activation] | {"attention_dropout": 0.0, "torch_dtype": config.dtype}
    for part in family.all_parts:
        content |= part.write(config)
    return content | family.written


def _parse(raw: Raw) -> ModelConfig:
    """Convert a parsed `config.json` to a model. ValueError with a one-sentence message."""
    name = raw.get("model_type")
    if isinstance(name, str) and name not in FAMILIES | ALIASES:
        for part in (MISSING.get(name), *(TOWERS[key] for key in TOWERS if key in raw)):
            if part is not None:
                raise ValueError(f"model_type {name}: {part} is not implemented")
    name = expect("model_type", name, (*FAMILIES, *ALIASES))
    if name in WRAPPERS:
        return _parse_wrapper(raw, name)
    config = _model(raw, ALIASES.get(name, name))
    for problem in architecture_problems(config):
        raise ValueError(problem.replace("model.", ""))
    return config if family_of(config) == name else replace(config, model_type=name)


def _model(raw: Raw, name: str) -> ModelConfig:
    """Convert a parsed `config.json` of a family to a model, even if that model cannot be built."""
    family = FAMILIES[name]
    expect("architectures", raw.get("architectures"), (None, [family.architecture]))
    raw = {**raw, **{key: value for key, value in family.assumed.items() if key not in raw}}
    for part in family.all_parts:
        raw |= part.replaced(raw)
    _require_equal_doubles(family, raw)
    _require_known(family, raw)
    fields: dict[str, Any] = {name: _copied(raw, name, key) for name, key in family.copied.items()} | family.implied
    if "head_dim" not in fields:
        head_dim = family.head_dim or fields["hidden_size"] // max(1, fields["num_attention_heads"])
        fields["head_dim"] = convert(HINTS["head_dim"], raw, "head_dim", head_dim)
    expect("dtype", first_of(raw, ("dtype", "torch_dtype"), "float32"), DTYPES)
    for part in family.all_parts:
        fields |= part.read(raw, fields)
    for name, kind in (OBJECTS | {"mixer": family.layers.mixer}).items():
        own = {key.removeprefix(f"{name}."): fields.pop(key) for key in [*fields] if key.startswith(f"{name}.")}
        fields |= {name: kind(**own)} if own and kind else {}
    return ModelConfig(**fields)


def _require_known(family: Family, raw: Raw) -> None:
    """Raise a ValueError unless every key is known, and has a permitted value if no field represents it."""
    known = family.known.union(TRANSLATED, filter(is_harmless, raw))
    if _is_read(part_of(raw, "quantization_config"), family):
        known |= {"quantization_config"}
    permitted: dict[str, tuple[Json, ...]] = {key: (None, value) for key, value in family.implied.items()}
    permitted |= PERMITTED | {"use_qk_norm": (family.implied.get("qk_norm"),)} | family.permitted
    for key, value in raw.items():
        if key not in known | permitted.keys():
            raise ValueError(f"{key[:SHOWN]}: wanted no such key (gspax does not know it), got {show(value)}")
        if key not in known:
            expect(key, value, permitted[key])


def _is_read(packing: Raw, family: Family) -> bool:
    """Return whether `hf.packed` decodes tensors of this `quantization_config`."""
    method = packing.get("quant_method")
    if method == "fp8":
        return packing.get("fmt", "e4m3") == "e4m3" and packing.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK]
    return bool(family.quant_method) and method == family.quant_method


def _require_equal_doubles(family: Family, raw: Raw) -> None:
    """Raise a ValueError if a file has a value under two names, and they differ."""
    usual = {key.name: key.default for key in family.copied.values()} | {"head_dim": family.head_dim or REQUIRED}
    for double, key in family.doubles.items():
        value = raw.get(key, usual.get(key, REQUIRED))
        if value is not REQUIRED:
            expect(double, raw.get(double), (None, typing.cast(Json, value)))


def _parse_wrapper(raw: Raw, name: str) -> ModelConfig:
    """Convert the text model of a checkpoint with a vision tower; the tower's keys are not read."""
    text_type, architecture = WRAPPERS[name]
    expect("architectures", raw.get("architectures"), (None, [architecture]))
    for key in raw:
        if key in PERMITTED or (key == "audio_config" and raw[key] is None):
            expect(key, raw[key], PERMITTED.get(key, (None,)))
        elif key not in BESIDE_TEXT and not is_harmless(key):
            raise ValueError(f"{key[:SHOWN]}: wanted no such key (gspax does not know it), got {show(raw[key])}")
    text = part_of(raw, "text_config")
    expect("text_config.model_type", text.get("model_type"), (text_type,))
    usual = FAMILIES[text_type].copied["tie_word_embeddings"].default is True
    tied = expect("tie_word_embeddings", raw.get("tie_word_embeddings", usual), (False, True))
    return replace(_parse(text | {"tie_word_embeddings": tied}), model_type=name)


def _copied(raw: Raw, field: str, key: Key) -> Any:
    """Return the value of a field that is copied from a key."""
    name = key.other if raw.get(key.name) is None and raw.get(key.other) is not None else key.name
    return convert(HINTS[field], raw, name, 0 if key.null and name in raw else key.default)
