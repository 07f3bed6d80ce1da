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
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from gspax.config import (
    AlphaRope,
    GatedDelta,
    GlobalHeads,
    Latent,
    Layer,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    Multipliers,
    NoMixer,
    ProportionalRope,
    Router,
    ShortConvolution,
    StateSpace,
    Yarn,
    layers_of,
    rotary_dim,
)
from gspax.config.model import RopeScaling, architecture_problems
from gspax.data.files import SHOWN, Json, read_object, show
from gspax.errors import UserError
from gspax.hf.families import (
    ALIASES,
    FAMILIES,
    OF_MTP,
    WRAPPERS,
    Family,
)
from gspax.hf.json_values import convert, expect, first_of, part_of
from gspax.hf.keys import REQUIRED, Key
from gspax.hf.layer_lists import (
    FULL,
    LINEAR,
    SLIDING,
    global_heads,
    letters,
    linear_layers,
    lone_layers,
    mixer_layers,
    nope_layers,
    windows,
)
from gspax.hf.packed import FP8_BLOCK
from gspax.hf.refused import MISSING, TOWERS
from gspax.storage.paths import to_path

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
HARMLESS_ROPE = ("attn_factor",)  # in DeepSeek-R1-0528-Qwen3-8B; transformers reads `attention_factor`
ACTIVATIONS: dict[str, dict[str, Json]] = {
    "silu": {"hidden_act": "silu"},
    "gelu_tanh": {"hidden_activation": "gelu_pytorch_tanh"},
    "relu2": {"mlp_hidden_act": "relu2"},
}
MROPE = ("mrope_section", "mrope_interleaved")  # for images; the tokens of a text have one position, as in RoPE
OF_WRAPPER = (  # keys around a text model
    *("text_config", "vision_config", "tie_word_embeddings", "language_model_only", "initializer_range"),
)
DTYPES = ("float32", "bfloat16", "float16")  # of the tensors; gspax computes in the experiment's dtype
ORIGINAL = "original_max_position_embeddings"
FRACTION = "partial_rotary_factor"
ROPE_TYPES = {
    **{Yarn: "yarn", Llama3Rope: "llama3", AlphaRope: "dynamic", LinearRope: "linear", LongRope: "longrope"},
    ProportionalRope: "proportional",
}
BESIDE_ALPHA = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # unused with an alpha
HINTS = typing.get_type_hints(ModelConfig, include_extras=True)
OBJECTS: dict[str, type | None] = {
    **{"router": Router, "latent": Latent, "delta": GatedDelta, "multipliers": Multipliers},
    "global_heads": GlobalHeads,
}
MIXERS = StateSpace, ShortConvolution
OF_ALL_LAYERS = ("norm_plus_one", "scale_embedding", "multipliers", "layer_scale", "logit_cap")  # not in `layers_of`
for part, kind in (*OBJECTS.items(), *(("mixer", mixer) for mixer in MIXERS)):
    HINTS |= {f"{part}.{name}": hint for name, hint in typing.get_type_hints(kind, include_extras=True).items()}
HINTS |= {"dense_layers": HINTS["intermediate_size"], "shared_experts": HINTS["vocab_size"]}


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
    shared = "shared_experts" in family.copied or "shared_expert_intermediate_size" in family.copied
    experts = family.experts
    if (family.shared_alone or family.pattern) and not config.num_experts:
        experts = shared = False
    parts = (f"{part}.{name}" in family.copied for part, name in (("latent", "rank"), ("global_heads", "head_dim")))
    kinds = (experts, shared, family.delta, family.mixer, *parts)
    own = config.num_experts > 0, config.shared_expert_intermediate_size > 0, config.delta is not None
    own_parts = config.latent is not None, config.global_heads is not None
    if kinds != (*own, None if config.mixer is None else type(config.mixer), *own_parts):
        return False
    if family.experts and family.window in ("switch", "none"):
        config = replace(config, sliding_layers=())
    if "shared_experts" in family.copied:
        config = replace(config, shared_expert_intermediate_size=config.moe_intermediate_size)
    try:
        described = _model(_content(config, name), name)
    except ValueError:
        return False
    found, wanted = ((layers_of(x), *operator.attrgetter(*OF_ALL_LAYERS)(x)) for x in (described, config))
    return found == wanted


def _get(config: ModelConfig, part: str) -> Any:
    """Return a field of a model or its router, or one of the numbers in `Family.copied` that imply other fields."""
    if part == "dense_layers":
        return next((n for n, layer in enumerate(layers_of(config)) if layer.sparse), config.num_hidden_layers)
    if part == "shared_experts":
        width, each = config.shared_expert_intermediate_size, config.moe_intermediate_size
        if not each or width % each:
            raise UserError(
                f"model.shared_expert_intermediate_size: wanted a multiple of model.moe_intermediate_size ({each}), "
                f"got {width}"
            )
        return width // each
    return operator.attrgetter(part)(config)


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
    family = FAMILIES[name]
    content: dict[str, Json] = {"architectures": [family.architecture], "model_type": name}
    for part, key in family.copied.items():
        value = rotary_dim(config) if key.name == "rotary_dim" else _get(config, part)
        if family.shared_alone and not config.num_experts and part.endswith("intermediate_size"):
            value = config.intermediate_size
        content[key.name] = list(value) if isinstance(value, tuple) else value or None if key.null else value
    if family.dense_or_sparse:
        content[family.dense_or_sparse] = ["sparse" if layer.sparse else "dense" for layer in layers_of(config)]
    if family.expert_switch:
        content[family.expert_switch] = config.num_experts > 0
    if family.ungrouped is not None:
        content["topk_method"] = "group_limited_greedy" if config.router.groups > 1 else family.ungrouped
    content |= family.written
    usual = not family.has_head_dim and config.head_dim * config.num_attention_heads == config.hidden_size
    if "head_dim" not in family.copied and not usual:
        content["head_dim"] = config.head_dim
    content |= ACTIVATIONS[config.activation] | {"attention_dropout": 0.0, "torch_dtype": config.dtype}
    default: Json = {"rope_type": "default"} if family.rope else None
    content |= {"rope_theta": config.rope_theta, "rope_scaling": _scaling_json(config) or default}
    if isinstance(scaling := config.rope_scaling, LongRope):
        content |= {ORIGINAL: scaling.original_max_position_embeddings}
        content |= {"max_position_embeddings": scaling.max_position_embeddings}
    if family.sliding_theta:  # only the newer key can express any two
        full: dict[str, Json] = {"rope_type": "default", "rope_theta": config.rope_theta}
        own: dict[str, Json] = full | {"rope_theta": config.sliding_rope_theta or config.rope_theta}
        content["rope_parameters"] = {FULL: full | (_scaling_json(config) or {}), SLIDING: own}
        if "proportional" in family.ropes:  # no version of transformers reads the older keys of such a model
            del content["rope_theta"], content["rope_scaling"]
    return content | _window_json(config, name) | _mixers_json(config, family)


def _mixers_json(config: ModelConfig, family: Family) -> dict[str, Json]:
    """Return the keys that say which layers have a state, and which have no RoPE."""
    content: dict[str, Json] = {}
    layers = range(config.num_hidden_layers)
    if family.delta:
        content["layer_types"] = [LINEAR if n in config.delta_layers else FULL for n in layers]
    if family.pattern:
        content["hybrid_override_pattern"] = "".join(map(_letter, layers_of(config)))
    elif family.mixer is not None:
        content["layer_types"] = [family.mixer_names[n not in config.mixer_layers] for n in layers]
        if isinstance(mixer := config.mixer, StateSpace):
            content["mamba_expand"] = mixer.heads * mixer.head_dim // config.hidden_size
    if family.nope == "list":
        content["no_rope_layers"] = [int(n not in config.nope_layers) for n in layers]
    if family.nope == "type":
        content["position_embedding_type"] = "nope" if config.nope_layers else "rope"
    return content


def _letter(layer: Layer) -> str:
    """Return the letter of a layer of Nemotron-H; one with two parts, which none has, counts as its mixer."""
    if isinstance(layer.mixer, NoMixer):
        return "E" if layer.sparse else "-"
    return "M" if isinstance(layer.mixer, StateSpace) else "*"


def _scaling_json(config: ModelConfig) -> dict[str, Json] | None:
    """Return `rope_scaling`, without fields that have their defaults, or None."""
    scaling = config.rope_scaling
    if scaling is None:
        return None
    content: dict[str, Json] = {"rope_type": ROPE_TYPES[type(scaling)]}
    content |= {"factor": 1.0} if isinstance(scaling, AlphaRope) else {}
    values = [(field, getattr(scaling, field.name)) for field in fields(scaling)]
    changed: dict[str, Any] = {field.name: value for field, value in values if value != field.default}
    if isinstance(scaling, LongRope):
        del changed["max_position_embeddings"]  # a key beside the object
        changed |= {"short_factor": [*scaling.short_factor], "long_factor": [*scaling.long_factor]}
    return content | changed


def _window_json(config: ModelConfig, name: str) -> dict[str, Json]:
    """Return the keys that describe sliding windows."""
    layers, family = config.num_hidden_layers, FAMILIES[name]
    sliding = config.sliding_layers if config.sliding_window else ()
    kinds: list[Json] = [SLIDING if layer in sliding else FULL for layer in range(layers)]
    if family.window == "all":
        return {"sliding_window": config.sliding_window if sliding else None}
    if isinstance(family.window, int):
        return {"sliding_window": config.sliding_window or None, "layer_types": kinds}
    if family.window == "none" and not family.experts:
        return {}
    if family.window == "none" and sliding:
        raise UserError(f"model.sliding_layers: wanted none in a model of the family {name}, got {sliding}")
    if family.experts and 0 < len(sliding) < layers:
        raise UserError(f"model.sliding_layers: wanted all {layers} layers or none with experts, got {sliding}")
    first, window = min(sliding, default=layers), config.sliding_window if sliding else None
    content: dict[str, Json] = {"use_sliding_window": bool(sliding), "sliding_window": window}
    content["max_window_layers"] = first
    return content if len(sliding) == layers - first else content | {"layer_types": kinds}  # not simply the last layers


def _parse(raw: Mapping[str, Json]) -> ModelConfig:
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


def _model(raw: Mapping[str, Json], name: str) -> ModelConfig:
    """Convert a parsed `config.json` of a family to a model, even if that model cannot be built."""
    family = FAMILIES[name]
    expect("architectures", raw.get("architectures"), (None, [family.architecture]))
    raw = {key: _of_all_layers(value) if key in family.by_layer else value for key, value in raw.items()}
    raw |= _implied_by_others(family, raw)
    _require_known(family, raw)
    fields: dict[str, Any] = {part: _copied(raw, part, key) for part, key in family.copied.items()} | family.implied
    if "head_dim" not in fields:
        head_dim = family.head_dim or fields["hidden_size"] // max(1, fields["num_attention_heads"])
        fields["head_dim"] = convert(HINTS["head_dim"], raw, "head_dim", head_dim)
    expect("dtype", first_of(raw, ("dtype", "torch_dtype"), "float32"), DTYPES)
    fields |= _rope(raw, family, fields["max_position_embeddings"], fields["head_dim"])
    if family.delta:
        fields["delta_layers"], raw = linear_layers(raw, fields["num_hidden_layers"]), {**raw, "layer_types": None}
    if family.pattern:
        fields |= lone_layers(letters(raw))
        raw = {**raw, "layer_types": None}
    elif family.mixer is not None:
        fields["mixer_layers"] = mixer_layers(raw, family, fields["num_hidden_layers"])
        raw = {**raw, "layer_types": None}
    fields["nope_layers"] = nope_layers(raw, family, fields["num_hidden_layers"])
    fields["sliding_window"], fields["sliding_layers"] = windows(raw, family, fields["num_hidden_layers"])
    if "shared_experts" in fields:
        fields["mlp_only_layers"] = tuple(range(fields.pop("dense_layers")))
        fields["shared_expert_intermediate_size"] = fields.pop("shared_experts") * fields["moe_intermediate_size"]
    if family.shared_alone and not fields["num_experts"]:
        fields["intermediate_size"] = fields.pop("shared_expert_intermediate_size")
        fields |= {"num_experts_per_tok": 0, "moe_intermediate_size": 0}
    for part, kind in (OBJECTS | {"mixer": family.mixer}).items():
        own = {name.removeprefix(f"{part}."): fields.pop(name) for name in [*fields] if name.startswith(f"{part}.")}
        fields |= {part: kind(**own)} if own and kind else {}
    return ModelConfig(**fields)


def _require_known(family: Family, raw: Mapping[str, Json]) -> None:
    """Raise a ValueError unless every key is known, and has a permitted value if no field represents it."""
    known = {name for key in family.copied.values() for name in (key.name, key.other)} - {""}
    known |= {*TRANSLATED, *filter(is_harmless, raw), *family.harmless, *family.doubles}
    if _is_read(part_of(raw, "quantization_config"), family):
        known |= {"quantization_config"}
    permitted = _permitted(family, raw)
    for key, value in raw.items():
        if key not in known | permitted.keys():
            raise ValueError(f"{key[:SHOWN]}: wanted no such key (gspax does not know it), got {show(value)}")
        if key not in known:
            expect(key, value, permitted[key])


def _is_read(packing: Mapping[str, Json], family: Family) -> bool:
    """Return whether `hf.packed` decodes tensors of this `quantization_config`."""
    method = packing.get("quant_method")
    if method == "fp8":
        return packing.get("fmt", "e4m3") == "e4m3" and packing.get("weight_block_size") == [FP8_BLOCK, FP8_BLOCK]
    return bool(family.quant_method) and method == family.quant_method


def _implied_by_others(family: Family, raw: Mapping[str, Json]) -> dict[str, Json]:
    """Return the values of keys that other keys of the file replace."""
    values: dict[str, Json] = {name: value for name, value in family.assumed.items() if name not in raw}
    if family.expert_switch:
        on = expect(family.expert_switch, raw.get(family.expert_switch), (None, False, True))
        if on and not raw.get("num_experts"):
            raise ValueError(
                f"num_experts: wanted at least 1 with {family.expert_switch}, got {raw.get('num_experts')}"
            )
        values |= {} if on else {"num_experts": 0}
    if "global_heads.head_dim" in family.copied:
        values |= global_heads(raw)
    if family.ungrouped is not None and first_of(raw, ("topk_method",), family.ungrouped) == family.ungrouped:
        values |= {"n_group": 1, "topk_group": 1}
    _require_equal_doubles(family, raw)
    if "block_ff_dim" in family.harmless:
        values |= {"intermediate_size": _adjusted_width(raw), "conv_dim": raw.get("hidden_size")}
    if family.pattern:
        values |= _implied_by_pattern(family, raw)
    elif family.mixer is StateSpace and raw.get("mamba_d_head", "auto") in (None, "auto"):
        heads = convert(HINTS["mixer.heads"], raw, "mamba_n_heads", 128)
        expand = convert(HINTS["mixer.heads"], raw, "mamba_expand", 2)
        values["mamba_d_head"] = expand * convert(HINTS["hidden_size"], raw, "hidden_size", REQUIRED) // heads
    if (kinds := raw.get(family.dense_or_sparse)) is not None:
        layers, leading = raw.get("num_hidden_layers"), kinds.count("dense") if isinstance(kinds, list) else 0
        if not isinstance(layers, int) or kinds != ["dense"] * leading + ["sparse"] * (layers - leading):
            raise ValueError(
                f'{family.dense_or_sparse}: wanted "dense" for the first layers and "sparse" for the others, '
                f"got {show(kinds)}"
            )
        key = family.copied["dense_layers"].name
        expect(key, first_of(raw, (key,), leading), (leading,))
        values[key] = leading
    return values


def _require_equal_doubles(family: Family, raw: Mapping[str, Json]) -> None:
    """Raise a ValueError if a file has a value under two names, and they differ."""
    usual = {key.name: key.default for key in family.copied.values()} | {"head_dim": family.head_dim or REQUIRED}
    for double, key in family.doubles.items():
        value = raw.get(key, usual.get(key, REQUIRED))
        if value is not REQUIRED:
            expect(double, raw.get(double), (None, typing.cast(Json, value)))


def _adjusted_width(raw: Mapping[str, Json]) -> int:
    """Return the width of an LFM2's MLPs: two thirds of what its file says, rounded up, unless that is switched off."""
    key = "intermediate_size" if raw.get("block_ff_dim") is None else "block_ff_dim"
    width = convert(HINTS["intermediate_size"], raw, key, REQUIRED)
    if not expect("block_auto_adjust_ff_dim", raw.get("block_auto_adjust_ff_dim", True), (True, False)):
        return int(width)
    multiple = convert(HINTS["intermediate_size"], raw, "block_multiple_of", 256)
    multiplier = convert(float, raw, "block_ffn_dim_multiplier", 1.0)
    return int(multiple * -(-int(multiplier * int(2 * width / 3)) // multiple))


def _implied_by_pattern(family: Family, raw: Mapping[str, Json]) -> dict[str, Json]:
    """Return the number of layers, and no experts if no layer of a Nemotron-H has them."""
    pattern = letters(raw)
    expect("num_hidden_layers", raw.get("num_hidden_layers"), (None, len(pattern)))
    parts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    none: dict[str, Json] = {} if "E" in pattern else {family.copied[part].name: 0 for part in parts}
    return {"num_hidden_layers": len(pattern)} | none


def _parse_wrapper(raw: Mapping[str, Json], name: str) -> ModelConfig:
    """Convert the text model of a checkpoint with a vision tower; the tower's keys are not read."""
    text_type, architecture = WRAPPERS[name]
    expect("architectures", raw.get("architectures"), (None, [architecture]))
    for key in raw:
        if key in PERMITTED or (key == "audio_config" and raw[key] is None):
            expect(key, raw[key], PERMITTED.get(key, (None,)))
        elif key not in (*OF_WRAPPER, *TRANSLATED) and not is_harmless(key):
            raise ValueError(f"{key[:SHOWN]}: wanted no such key (gspax does not know it), got {show(raw[key])}")
    text = part_of(raw, "text_config")
    expect("text_config.model_type", text.get("model_type"), (text_type,))
    usual = FAMILIES[text_type].copied["tie_word_embeddings"].default is True
    tied = expect("tie_word_embeddings", raw.get("tie_word_embeddings", usual), (False, True))
    return replace(_parse(text | {"tie_word_embeddings": tied}), model_type=name)


def _of_all_layers(value: Json) -> Json:
    """Return the common value of a list with one entry for each layer; any other value unchanged."""
    return value[0] if isinstance(value, list) and value and all(each == value[0] for each in value) else value


def _permitted(family: Family, raw: Mapping[str, Json]) -> dict[str, tuple[Json, ...]]:
    """Return the permitted values of the keys that no field represents."""
    permitted: dict[str, tuple[Json, ...]] = {key: (None, value) for key, value in family.implied.items()}
    permitted |= PERMITTED | {"use_qk_norm": (family.implied.get("qk_norm"),)} | family.permitted
    if "moe_intermediate_size" in family.by_layer:
        permitted["moe_intermediate_size"] = (None, raw.get("intermediate_size"))
    if "dense_layers" in family.copied and isinstance(layers := raw.get("num_hidden_layers"), int):
        permitted["moe_layer_end_index"] = (None, -1, layers - 1)
    return permitted


def _copied(raw: Mapping[str, Json], part: str, key: Key) -> Any:
    """Return the value of a field that is copied from a key."""
    if key.name == "rotary_dim":  # read in `_rope`
        return None
    name = key.other if raw.get(key.name) is None and raw.get(key.other) is not None else key.name
    return convert(HINTS[part], raw, name, 0 if key.null and name in raw else key.default)


def _rope(raw: Mapping[str, Json], family: Family, context: int, head_dim: int) -> dict[str, Any]:
    """Return the RoPE fields of `ModelConfig`. As in transformers, the older object wins, also over the top level."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or family.rope
    own = None  # RoPE parameters of the layers with a window
    _require_agreement(raw, family)
    if family.sliding_theta:  # `rope_parameters` then has one object for each kind of layers
        each = part_of(raw, "rope_parameters")
        full, older, own = part_of(each, FULL) or family.rope, part_of(raw, "rope_scaling"), part_of(each, SLIDING)
        rope = full | older
        for name in older:
            expect(f"rope_scaling.{name[:SHOWN]}", older[name], (full.get(name, older[name]),))
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling: wanted an object or null, got {show(rope)}")
    theta = convert(HINTS["rope_theta"], raw if rope.get("rope_theta") is None else rope, "rope_theta", family.theta)
    scaling = _scaling(rope, raw, family, context)
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if isinstance(scaling, LongRope):  # a run has to ask for longer sequences
        fields["max_position_embeddings"] = scaling.original_max_position_embeddings
    if own is not None:
        expect("rope_type", first_of(own, ("rope_type", "type"), "default"), ("default",))
        base = convert(HINTS["rope_theta"], raw, "rope_local_base_freq", family.sliding_theta)
        sliding = convert(HINTS["rope_theta"], own, "rope_theta", base)
        fields["sliding_rope_theta"] = 0.0 if (sliding, None) == (theta, fields["rope_scaling"]) else sliding
    if (key := family.copied.get("rope_fraction")) is not None:
        default = key.default
        if key.name == "rotary_dim" and raw.get("rotary_dim") is not None:
            default = convert(HINTS["head_dim"], raw, "rotary_dim", REQUIRED) / head_dim
        source = raw if rope.get(FRACTION) is None else rope
        fields["rope_fraction"] = convert(HINTS["rope_fraction"], source, FRACTION, default)
    elif FRACTION in rope and not isinstance(scaling, ProportionalRope):
        expect(FRACTION, rope[FRACTION], (None, 1))
    return fields


def _require_agreement(raw: Mapping[str, Json], family: Family) -> None:
    """Raise a ValueError if `rope_parameters` and `rope_scaling` disagree in a file of which only one is read."""
    older, newer = raw.get("rope_scaling"), raw.get("rope_parameters")
    if family.sliding_theta or not (older and newer and isinstance(older, dict) and isinstance(newer, dict)):
        return
    outer = {key: raw[key] for key in ("rope_theta", FRACTION) if raw.get(key) is not None}
    one, other = (outer | {key: value for key, value in rope.items() if value is not None} for rope in (older, newer))
    for rope in (one, other):
        rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    if key := next((key for key in other | one if other.get(key) != one.get(key)), None):
        raise ValueError(
            f"rope_parameters: wanted the {key[:SHOWN]} of rope_scaling ({show(one.get(key))}), or one of the two "
            f"objects alone, got {show(other.get(key))}"
        )


def _scaling(rope: Mapping[str, Json], raw: Mapping[str, Json], family: Family, context: int) -> RopeScaling | None:
    """Return `rope_scaling` of `ModelConfig`."""
    kind = first_of(rope, ("rope_type", "type"), "default")
    kind = expect("rope_type", "longrope" if kind == "su" else kind, ("default", *family.ropes))
    scaling = next((each for each, name in ROPE_TYPES.items() if name == kind), None)
    hints = {} if scaling is None else typing.get_type_hints(scaling, include_extras=True)
    known = ("rope_theta", "rope_type", "type", FRACTION, *hints, *HARMLESS_ROPE, *(MROPE if family.delta else ()))
    for key, value in rope.items():
        if key not in known + (BESIDE_ALPHA if kind == "dynamic" else ()):
            raise ValueError(f"rope_scaling.{key[:SHOWN]}: wanted no such key with rope_type {kind}, got {show(value)}")
    if scaling is None:
        return None
    values: dict[str, Json] = {ORIGINAL: context} | {key: value for key, value in rope.items() if value is not None}
    if kind == "longrope":  # its lengths are beside the object, which may repeat them
        original = convert(hints[ORIGINAL], raw, ORIGINAL, REQUIRED)
        for key, beside in ((ORIGINAL, original), ("max_position_embeddings", context)):
            values[key] = expect(key, rope.get(key) or beside, (beside,))
    if kind == "yarn":
        values = {"factor": context / convert(hints[ORIGINAL], values, ORIGINAL, REQUIRED)} | values
    return scaling(**{name: convert(hints[name], values, name, getattr(scaling, name, REQUIRED)) for name in hints})
