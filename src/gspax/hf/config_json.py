"""`config.json` of a checkpoint of one of the `hf.families` <-> `ModelConfig`.

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
import operator
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gspax.config import (
    AlphaRope,
    GatedDelta,
    Latent,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    Router,
    Yarn,
    layers_of,
    rotary_dim,
)
from gspax.config.model import architecture_problems
from gspax.data.files import SHOWN, Json, read_object, show
from gspax.errors import UserError
from gspax.hf.families import ALIASES, FAMILIES, MISSING, OF_MTP, REQUIRED, TOWERS, WRAPPERS, Family
from gspax.run.buckets import to_path

T = TypeVar("T")

TRANSLATED = (
    *("model_type", "architectures", "head_dim", "dtype", "torch_dtype"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
)
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
    "shared_expert_intermediate_size": (None, 0),
}
HARMLESS = (  # keys that do not affect what gspax computes
    *("transformers_version", "_name_or_path", "unsloth_fixed", "unsloth_version"),  # who wrote the file, and where
    *("bos_token_id", "eos_token_id"),  # for generation; gspax uses the tokenizer and generation_config.json
    *("sep_token_id", "eod_token_id"),
    "pad_token_id",  # gspax marks padding by segments, not by a token
    *OF_MTP,
    "moe_capacity",  # of training
    *("pretraining_tp", "tokenizer_class"),  # how it was trained, and with what
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),  # what transformers returns
    "router_aux_loss_coef",  # a loss that the experiment may name
    *("use_cache", "torchscript", "use_bfloat16", "_attn_implementation", "_attn_implementation_autoset"),  # its speed
    *("id2label", "label2id", "num_labels", "problem_type"),  # of a classifier
)
HARMLESS_ROPE = ("attn_factor",)  # of DeepSeek-R1-0528-Qwen3-8B; what transformers reads is `attention_factor`
ACTIVATIONS: dict[str, dict[str, Json]] = {
    "silu": {"hidden_act": "silu"},
    "gelu_tanh": {"hidden_activation": "gelu_pytorch_tanh"},
}
MROPE = ("mrope_section", "mrope_interleaved")  # of images; a text's tokens have one position, and this is RoPE
OF_WRAPPER = (  # keys around a text model
    *("text_config", "vision_config", "tie_word_embeddings", "language_model_only"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
)
DTYPES = ("float32", "bfloat16", "float16")  # of the tensors; gspax computes in the experiment's dtype
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
ORIGINAL = "original_max_position_embeddings"
FRACTION = "partial_rotary_factor"
ROPE_TYPES = {Yarn: "yarn", Llama3Rope: "llama3", AlphaRope: "dynamic", LinearRope: "linear"}
LONGROPE = ("longrope", "su")  # its names, the second in older files
BESIDE_ALPHA = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # which nothing reads
HINTS = typing.get_type_hints(ModelConfig, include_extras=True)
for part, kind in (("router", Router), ("latent", Latent), ("delta", GatedDelta)):
    HINTS |= {f"{part}.{name}": hint for name, hint in typing.get_type_hints(kind, include_extras=True).items()}
# What distinguishes families: a field that a family neither copies nor implies has its default in all of its models.
PARTS = (
    *("qk_norm", "qk_norm_projection", "qk_norm_after_rope", "qkv_bias", "attention_bias"),
    *("rope_fraction", "rope_interleaved", "norm_place", "norm_plus_one", "attention_gate"),
    *("activation", "scale_embedding", "query_pre_attn_scalar", "attention_sinks"),
)
PARTS_OF_EXPERTS = ("norm_topk_prob", "expert_bias", *(f"router.{field.name}" for field in dataclasses.fields(Router)))
DEFAULT = ModelConfig(
    vocab_size=1, hidden_size=2, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=2
)


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
    """The `model_type` whose checkpoints hold such a model: `config.model_type`, or the first that has these parts.

    UserError if there is none.
    """
    fitting = [name for name, family in FAMILIES.items() if _fits(config, family)]
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


def _fits(config: ModelConfig, family: Family) -> bool:
    """Whether the models of a family have the parts of this one; what experts have counts only if it has some."""
    experts, shared = config.num_experts > 0, config.shared_expert_intermediate_size > 0
    parts = [*PARTS, *(PARTS_OF_EXPERTS if experts else ()), *(["shared_expert_gate"] if shared else ())]
    defaults = {part: _get(DEFAULT, part) for part in parts if part not in family.copied} | family.implied
    sliding, layers = _sliding(config), config.num_hidden_layers
    return (
        all(_get(config, part) == defaults[part] for part in parts if part in defaults)
        and family.experts == experts
        and ("latent.rank" in family.copied) == (config.latent is not None)
        and family.delta == (config.delta is not None)
        and ("shared_expert_intermediate_size" in family.copied or family.shared_experts is not None) == shared
        and ("mlp_only_layers" in family.copied or not experts or _leading(config, family) is not None)
        and (family.window != "all" or len(sliding) in (0, layers))
        and not (family.window == "none" and sliding and not experts)
        and (not config.sliding_rope_theta or family.sliding_theta > 0)
        and (config.rope_scaling is None or ROPE_TYPES[type(config.rope_scaling)] in family.ropes)
    )


def _leading(config: ModelConfig, family: Family) -> int | None:
    """The number of layers before the first with experts; None if the family cannot say which layers have some."""
    dense = [number for number, layer in enumerate(layers_of(config)) if not layer.sparse]
    leading = dense == list(range(len(dense))) and (family.dense_layers is not None or not dense)
    return len(dense) if leading else None


def _get(config: ModelConfig, part: str) -> Any:
    """A field of a model, or of its router."""
    return operator.attrgetter(part)(config)


def _sliding(config: ModelConfig) -> tuple[int, ...]:
    return config.sliding_layers if config.sliding_window else ()


def to_json(config: ModelConfig) -> dict[str, Json]:
    """`config.json` of an exported checkpoint, in the Hub's names, which both transformers 4 and 5 read.

    `torch_dtype` is `config.dtype`, until the writer replaces it by the dtype of the tensors; `remat` and `checkpoint`
    are not part of a checkpoint.

    Raises:
      UserError: no published family describes the model (such as experts, and a window on only some layers).
    """
    name = family_of(config)
    family = FAMILIES[name]
    wrapper = WRAPPERS.get(config.model_type)
    model_type = config.model_type if config.model_type in ALIASES and wrapper is None else name
    content: dict[str, Json] = {"architectures": [family.architecture], "model_type": model_type}
    for part in family.copied:
        value, key = _get(config, part), family.keys_of(part)[0]
        value = rotary_dim(config) if key == "rotary_dim" else value
        content[key] = list(value) if isinstance(value, tuple) else value or None if part in family.null else value
    content |= _experts_json(config, family) | family.written
    usual = not family.has_head_dim and config.head_dim * config.num_attention_heads == config.hidden_size
    if "head_dim" not in family.copied and not usual:
        content["head_dim"] = config.head_dim
    content |= ACTIVATIONS[config.activation] | {"attention_dropout": 0.0, "torch_dtype": config.dtype}
    default: Json = {"rope_type": "default"} if family.rope else None
    content |= {"rope_theta": config.rope_theta, "rope_scaling": _scaling_json(config) or default}
    if family.sliding_theta:  # only the newer key can express any two
        full: dict[str, Json] = {"rope_type": "default", "rope_theta": config.rope_theta}
        own: dict[str, Json] = full | {"rope_theta": config.sliding_rope_theta or config.rope_theta}
        content["rope_parameters"] = {FULL: full | (_scaling_json(config) or {}), SLIDING: own}
    if family.delta:
        content["layer_types"] = [LINEAR if n in config.delta_layers else FULL for n in range(config.num_hidden_layers)]
    content |= _window_json(config, name)
    if wrapper is None:
        return content
    whole: dict[str, Json] = {"architectures": [wrapper[1]], "model_type": config.model_type, "text_config": content}
    return whole | {"tie_word_embeddings": config.tie_word_embeddings}


def _experts_json(config: ModelConfig, family: Family) -> dict[str, Json]:
    """The keys with the number of leading dense layers and of shared experts."""
    content: dict[str, Json] = {}
    if family.dense_layers is not None:
        content[family.dense_layers[0]] = _leading(config, family)
    if family.dense_or_sparse:
        content[family.dense_or_sparse] = ["sparse" if layer.sparse else "dense" for layer in layers_of(config)]
    if family.ungrouped is not None:
        content["topk_method"] = "group_limited_greedy" if config.router.groups > 1 else family.ungrouped
    if family.shared_experts is not None:
        width, each = config.shared_expert_intermediate_size, config.moe_intermediate_size
        if width % each:
            raise UserError(
                f"model.shared_expert_intermediate_size: wanted a multiple of model.moe_intermediate_size ({each}), "
                f"got {width}"
            )
        content[family.shared_experts[0]] = width // each
    return content


def _scaling_json(config: ModelConfig) -> dict[str, Json] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    if isinstance(scaling, Llama3Rope | LinearRope):
        return {"rope_type": ROPE_TYPES[type(scaling)]} | dataclasses.asdict(scaling)
    if isinstance(scaling, AlphaRope):
        return {"rope_type": "dynamic", "factor": 1.0, "alpha": scaling.alpha}
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    defaults = dataclasses.asdict(Yarn(factor=factor, original_max_position_embeddings=original))
    changed: dict[str, Json] = {name: x for name, x in dataclasses.asdict(scaling).items() if x != defaults[name]}
    content: dict[str, Json] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return content | changed


def _window_json(config: ModelConfig, name: str) -> dict[str, Json]:
    layers, sliding, family = config.num_hidden_layers, _sliding(config), FAMILIES[name]
    if family.window == "all":
        return {"sliding_window": config.sliding_window if sliding else None}
    if isinstance(family.window, int):
        return {"sliding_window": config.sliding_window or None, "layer_types": _layer_types(config)}
    if family.window == "none" and not family.experts:
        return {}
    if not sliding:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": layers}
    if family.window == "none":
        raise UserError(f"model.sliding_layers: wanted none in a model of the family {name}, got {sliding}")
    if family.experts and len(sliding) < layers:
        raise UserError(f"model.sliding_layers: wanted all {layers} layers or none with experts, got {sliding}")
    content: dict[str, Json] = {"use_sliding_window": True, "sliding_window": config.sliding_window}
    content["max_window_layers"] = min(sliding)
    if len(sliding) < layers - min(sliding):  # not simply the last layers: only the newer key can express that
        content["layer_types"] = _layer_types(config)
    return content


def _layer_types(config: ModelConfig) -> list[Json]:
    sliding = _sliding(config)
    return [SLIDING if layer in sliding else FULL for layer in range(config.num_hidden_layers)]


def _parse(raw: Mapping[str, Json]) -> ModelConfig:
    """The model of a parsed `config.json`. ValueError with a one-sentence message."""
    name = raw.get("model_type")
    if isinstance(name, str) and name not in FAMILIES | ALIASES:
        for part in (MISSING.get(name), *(TOWERS[key] for key in TOWERS if key in raw)):
            if part is not None:
                raise ValueError(f"model_type {name}: {part} is not implemented")
    name = expect("model_type", name, (*FAMILIES, *ALIASES))
    if name in WRAPPERS:
        return _parse_wrapper(raw, name)
    family = FAMILIES[ALIASES.get(name, name)]
    expect("architectures", raw.get("architectures"), (None, [family.architecture]))
    raw = {key: _of_all_layers(value) if key in family.by_layer else value for key, value in raw.items()}
    raw |= _implied_by_others(family, raw)
    known = {key for part in family.copied for key in family.keys_of(part)} | {*TRANSLATED, *HARMLESS}
    known |= {counted[0] for counted in (family.dense_layers, family.shared_experts) if counted is not None}
    known |= {*family.harmless, family.dense_or_sparse} | ({"full_attention_interval"} if family.delta else set())
    if family.quantized and _object(raw, "quantization_config").get("quant_method") == family.quantized:
        known |= {"quantization_config"}
    permitted = _permitted(family, raw)
    for key, value in raw.items():
        if key in known:
            continue
        if key not in permitted:
            raise ValueError(f"{key[:SHOWN]}: wanted no such key (gspax does not know it), got {show(value)}")
        expect(key, value, permitted[key])
    fields: dict[str, Any] = {part: _copied(family, raw, part) for part in family.copied} | family.implied
    if "head_dim" not in fields:
        head_dim = family.head_dim or fields["hidden_size"] // max(1, fields["num_attention_heads"])
        fields["head_dim"] = _read(HINTS["head_dim"], raw, "head_dim", head_dim)
    expect("dtype", _first(raw, ("dtype", "torch_dtype"), "float32"), DTYPES)
    fields |= _rope(raw, family, fields["max_position_embeddings"], fields["head_dim"])
    if family.delta:
        fields["delta_layers"], raw = _delta_layers(raw, fields["num_hidden_layers"]), {**raw, "layer_types": None}
    fields["sliding_window"], fields["sliding_layers"] = _window(raw, family, fields["num_hidden_layers"])
    if family.dense_layers is not None:
        fields["mlp_only_layers"] = tuple(range(_read(HINTS["intermediate_size"], raw, *family.dense_layers)))
    if family.shared_experts is not None:
        count = _read(HINTS["vocab_size"], raw, *family.shared_experts)
        fields["shared_expert_intermediate_size"] = count * fields["moe_intermediate_size"]
    router, latent, delta = (
        {part.removeprefix(prefix): fields.pop(part) for part in [*fields] if part.startswith(prefix)}
        for prefix in ("router.", "latent.", "delta.")
    )
    config = ModelConfig(
        **fields,
        router=Router(**router),
        latent=Latent(**latent) if latent else None,
        delta=GatedDelta(**delta) if delta else None,
    )
    for problem in architecture_problems(config):
        raise ValueError(problem.replace("model.", ""))
    return config if family_of(config) == name else dataclasses.replace(config, model_type=name)


def _implied_by_others(family: Family, raw: Mapping[str, Json]) -> dict[str, Json]:
    """The values of keys that other keys of the file replace."""
    values: dict[str, Json] = {}
    for part in family.null:
        values |= {key: 0 for key in family.keys_of(part) if key in raw and raw[key] is None}
    if family.ungrouped is not None and _first(raw, ("topk_method",), family.ungrouped) == family.ungrouped:
        values |= {key: 1 for part in ("router.groups", "router.top_groups") for key in family.keys_of(part)}
    if family.dense_layers is not None and (kinds := raw.get(family.dense_or_sparse)) is not None:
        layers, leading = raw.get("num_hidden_layers"), kinds.count("dense") if isinstance(kinds, list) else 0
        if not isinstance(layers, int) or kinds != ["dense"] * leading + ["sparse"] * (layers - leading):
            raise ValueError(
                f'{family.dense_or_sparse}: wanted "dense" for the first layers and "sparse" for the others, '
                f"got {show(kinds)}"
            )
        expect(family.dense_layers[0], _first(raw, (family.dense_layers[0],), leading), (leading,))
        values[family.dense_layers[0]] = leading
    return values


def _delta_layers(raw: Mapping[str, Json], layers: int) -> tuple[int, ...]:
    """The layers with a gated delta net: by default three of four."""
    interval = _read(HINTS["decoder_sparse_step"], raw, "full_attention_interval", 4)
    return _listed(raw, [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)], (FULL, LINEAR), LINEAR)


def _parse_wrapper(raw: Mapping[str, Json], name: str) -> ModelConfig:
    """The text model of a checkpoint with a vision tower, whose keys are not read."""
    text_type, architecture = WRAPPERS[name]
    expect("architectures", raw.get("architectures"), (None, [architecture]))
    for key in raw:
        if key not in (*OF_WRAPPER, *TRANSLATED, *HARMLESS):
            raise ValueError(f"{key[:SHOWN]}: wanted no such key (gspax does not know it), got {show(raw[key])}")
    text = _object(raw, "text_config")
    expect("text_config.model_type", text.get("model_type"), (text_type,))
    tied = expect("tie_word_embeddings", raw.get("tie_word_embeddings", False), (False, True))
    return dataclasses.replace(_parse(text | {"tie_word_embeddings": tied}), model_type=name)


def _of_all_layers(value: Json) -> Json:
    """The value of every layer, if there is a list with one for each and all are the same."""
    return value[0] if isinstance(value, list) and value and all(each == value[0] for each in value) else value


def _permitted(family: Family, raw: Mapping[str, Json]) -> dict[str, tuple[Json, ...]]:
    """The only values of the keys that no field holds."""
    permitted: dict[str, tuple[Json, ...]] = {key: (None, value) for key, value in family.implied.items()}
    permitted |= PERMITTED | {"use_qk_norm": (family.implied.get("qk_norm"),)} | family.permitted
    if "moe_intermediate_size" in family.by_layer:
        permitted["moe_intermediate_size"] = (None, raw.get("intermediate_size"))
    if family.dense_layers is not None and isinstance(layers := raw.get("num_hidden_layers"), int):
        permitted["moe_layer_end_index"] = (None, -1, layers - 1)
    return permitted


def _copied(family: Family, raw: Mapping[str, Json], part: str) -> Any:
    """The value of a field that has a key."""
    keys = family.keys_of(part)
    key = next((key for key in keys if raw.get(key) is not None), keys[0])
    return _read(HINTS[part], raw, key, family.copied[part]) if key != "rotary_dim" else None  # in `_rope`


def _rope(raw: Mapping[str, Json], family: Family, context: int, head_dim: int) -> dict[str, Any]:
    """The fields of `ModelConfig` about RoPE. As in transformers, the older object wins, also over the top level."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or family.rope
    own = None  # of the layers with a window
    if family.sliding_theta:  # `rope_parameters` then has one object for each kind of layers
        each = _object(raw, "rope_parameters")
        rope, own = _object(each, FULL) | _object(raw, "rope_scaling"), _object(each, SLIDING)
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling: wanted an object or null, got {show(rope)}")
    theta = _read(HINTS["rope_theta"], raw if rope.get("rope_theta") is None else rope, "rope_theta", family.theta)
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(rope, family, context)}
    if own is not None:
        expect("rope_type", _first(own, ("rope_type", "type"), "default"), ("default",))
        key = family.keys_of("sliding_rope_theta")[0]
        sliding = _read(
            HINTS["rope_theta"], own, "rope_theta", _read(HINTS["rope_theta"], raw, key, family.sliding_theta)
        )
        fields["sliding_rope_theta"] = 0.0 if (sliding, None) == (theta, fields["rope_scaling"]) else sliding
    if "rope_fraction" in family.copied:
        source = raw if rope.get(FRACTION) is None else rope
        default = family.copied["rope_fraction"]
        if "rotary_dim" in family.keys_of("rope_fraction") and raw.get("rotary_dim") is not None:
            default = _read(HINTS["head_dim"], raw, "rotary_dim", REQUIRED) / head_dim
        fields["rope_fraction"] = _read(HINTS["rope_fraction"], source, FRACTION, default)
    elif FRACTION in rope:
        expect(FRACTION, rope[FRACTION], (None, 1))
    return fields


def _object(raw: Mapping[str, Json], key: str) -> dict[str, Json]:
    """The object of a key; null and absent count as empty."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}: wanted an object or null, got {show(value)}")
    return value


def _scaling(
    rope: Mapping[str, Json], family: Family, context: int
) -> Yarn | Llama3Rope | AlphaRope | LinearRope | None:
    """`rope_scaling` of `ModelConfig`."""
    kind = _first(rope, ("rope_type", "type"), "default")
    if kind in LONGROPE:
        raise ValueError("rope_scaling: longrope, whose frequencies depend on a row's length, is not implemented")
    kind = expect("rope_type", kind, ("default", *family.ropes))
    scaling = next((each for each, name in ROPE_TYPES.items() if name == kind), None)
    hints = {} if scaling is None else typing.get_type_hints(scaling, include_extras=True)
    known = ("rope_theta", "rope_type", "type", FRACTION, *hints, *HARMLESS_ROPE, *(MROPE if family.delta else ()))
    for key, value in rope.items():
        if key not in known + (BESIDE_ALPHA if kind == "dynamic" else ()):
            raise ValueError(f"rope_scaling.{key[:SHOWN]}: wanted no such key with rope_type {kind}, got {show(value)}")
    if scaling is None:
        return None
    values: dict[str, Json] = {ORIGINAL: context} | {key: value for key, value in rope.items() if value is not None}
    if kind == "yarn":
        values = {"factor": context / _read(hints[ORIGINAL], values, ORIGINAL, REQUIRED)} | values
    needed = [name for name in hints if name in values or kind != "yarn"]
    return scaling(**{name: _read(hints[name], values, name, REQUIRED) for name in needed})


def _window(raw: Mapping[str, Json], family: Family, layers: int) -> tuple[int, tuple[int, ...]]:
    """`sliding_window` and `sliding_layers`.

    transformers applies the window to every layer of a Qwen3-MoE and ignores `max_window_layers` and `layer_types`
    there; a file in which one of them disagrees is rejected.
    """
    if family.window == "all" or isinstance(family.window, int):
        absent = {"sliding_window": family.sliding_window}  # null is none, whatever an absent key stands for
        window = _read(HINTS["sliding_window"], absent | dict(raw), "sliding_window", 0)
        if isinstance(every := family.window, int):
            kinds = [FULL if layer % every == every - 1 else SLIDING for layer in range(layers)]
            return _listed_window(raw, window, kinds)
        return window, tuple(range(layers)) if window else ()
    permitted = (False,) if family.window == "none" else (False, True)
    on = expect("use_sliding_window", _first(raw, ("use_sliding_window",), False), permitted)
    window = _read(HINTS["sliding_window"], raw, "sliding_window", 0) if on else 0
    first = _read(int, raw, "max_window_layers", 0 if family.experts else 28)
    kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    window, sliding = _listed_window(raw, window, kinds)
    if window and family.experts and len(sliding) < layers:
        key = "max_window_layers" if raw.get("layer_types") is None else "layer_types"
        raise ValueError(f"{key}: wanted the window on all {layers} layers of a Qwen3-MoE, got {show(raw[key])}")
    return window, sliding


def _listed_window(raw: Mapping[str, Json], window: int, kinds: list[str]) -> tuple[int, tuple[int, ...]]:
    """The window, and the layers with it: those that `layer_types` lists, or else those of these kinds."""
    sliding = _listed(raw, kinds, (FULL, SLIDING) if window else (FULL,), SLIDING)
    return (window, sliding) if sliding else (0, ())


def _listed(raw: Mapping[str, Json], kinds: list[str], permitted: tuple[str, ...], wanted: str) -> tuple[int, ...]:
    """The layers of the wanted kind by `layer_types`, or else by these kinds."""
    listed = _first(raw, ("layer_types",), list[Json](kinds))
    if not isinstance(listed, list) or len(listed) != len(kinds):
        raise ValueError(f"layer_types: wanted a list of {len(kinds)} names, got {show(listed)}")
    return tuple(layer for layer, kind in enumerate(listed) if expect("layer_types", kind, permitted) == wanted)


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
