"""`config.json`: old and new key names, every key handled, and none silently ignored."""

import json
from dataclasses import fields, replace
from pathlib import Path

import families as families_of_tests
import pytest
import tiny
from api import config_json, parameter_count, presets, read_config, to_json

from gspax.config import LongRope, ModelConfig, Yarn, layers_of
from gspax.config.model import architecture_problems
from gspax.errors import UserError
from gspax.hf import families
from gspax.hf.layer_lists import LetteredLayers, SwitchedWindow, Window
from gspax.hf.parts import SharedExperts

NEWEST = "5.23"  # the transformers whose families and keys these tables have
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "qwen3_configs"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CONFIGS = {
    **tiny.CONFIGS,
    "the last layers slide": replace(tiny.MOE, num_experts=0, sliding_window=3, sliding_layers=(1, 2)),
    "the 0.6B": replace(presets.qwen3_0_6b, dtype="float32", remat="none"),
    "the 30B": replace(presets.qwen3_30b_a3b, dtype="float32", remat="none"),
}


def write(folder, raw):
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def of_its_family(config):
    """The config without expert fields if it is dense: its checkpoint has none."""
    plain = {name: ModelConfig.__dataclass_fields__[name].default for name in FIELDS_OF_EXPERTS}
    return config if config.num_experts else replace(config, **plain)


FIELDS_OF_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", *families.STEPS)
SIZES = families.FAMILIES["qwen2"].copied  # that every family has
DENSE = to_json(of_its_family(tiny.CONFIGS["dense"]))
MOE = to_json(tiny.MOE)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_written_config_is_read_back(name, tmp_path):
    config = of_its_family(CONFIGS[name])
    assert read_config(write(tmp_path, to_json(config))) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_exchanged_with_transformers(name, tmp_path):
    """The newer names: `num_local_experts`, `dtype`, `rope_parameters`, `layer_types`."""
    transformers = pytest.importorskip("transformers")
    config = of_its_family(CONFIGS[name])
    theirs = transformers.AutoConfig.from_pretrained(write(tmp_path, to_json(config)))
    theirs.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "rope_parameters" in saved and "rope_theta" not in saved
    assert read_config(tmp_path / "again") == config


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_key_of_transformers_is_known(name, tmp_path):
    """Fails first when a later version of transformers adds a key."""
    transformers = pytest.importorskip("transformers", minversion=NEWEST)
    family = families.FAMILIES[name]
    theirs = transformers.AutoConfig.for_model(name)
    tables = [config_json.TRANSLATED, config_json.PERMITTED, config_json.HARMLESS, family.implied, family.permitted]
    keys = family.known.union(*tables)
    for key in {*theirs.to_dict(), *(field.name for field in fields(theirs))}:
        assert key in keys or config_json.is_harmless(key), key


NOTES = {  # what transformers and others write beside a model
    **{"_model_name_or_path": "models/one", "_name_or_path": "", "_attn_implementation": "sdpa"},
    **{"unk_token_id": 0, "pad_token_id": 1, "mask_token_id": None, "decoder_start_token_id": 1},
    **{"cls_token_id": 3, "boi_token_index": 4, "transformers_version": "5.24.0", "temperature": 0.6, "top_p": 0.95},
    **{"max_length": 20, "do_sample": False, "suppress_tokens": None, "finetuning_task": None, "prefix": None},
    **{"is_decoder": False, "pruned_heads": {}, "cross_attention_hidden_size": None, "tie_encoder_decoder": False},
    **{"gradient_checkpointing": False, "tf_legacy_loss": False, "torchscript": False, "id2label": {"0": "LABEL_0"}},
    **{"ignore_keys_at_rope_validation": None},
    **{"chunk_size_feed_forward": 0, "is_encoder_decoder": False, "add_cross_attention": False},
}
UNBUILT = {  # families whose default sizes in transformers are no model
    "glm4_moe": {"head_dim": 128},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
}


def written_by_default(name):
    """The `config.json` that transformers writes for a model_type, if that is a model that gspax reads."""
    transformers = pytest.importorskip("transformers", minversion=NEWEST)
    raw = transformers.AutoConfig.for_model(name).to_dict()
    if name not in families.WRAPPERS:
        return raw | UNBUILT.get(name, {})
    text, _ = families.WRAPPERS[name]
    return raw | {"text_config": raw["text_config"] | UNBUILT.get(text, {})}


@pytest.mark.parametrize("name", [*families.FAMILIES, *families.WRAPPERS])
def test_what_cannot_change_the_model_passes_and_what_can_does_not(name, tmp_path):
    """On each family's configuration as transformers writes it; the same model with and without the notes."""
    raw = written_by_default(name)
    model = read_config(write(tmp_path, raw))
    assert read_config(write(tmp_path, raw | {key: raw.get(key, value) for key, value in NOTES.items()})) == model
    for key, value in {"pruned_heads": {"0": [1]}, "is_encoder_decoder": True, "logit_scale": 2.0}.items():
        with pytest.raises(UserError, match=f"{key}: wanted "):
            read_config(write(tmp_path, raw | {key: value}))


GEMMA4 = {"model_type": "gemma4_text", "num_hidden_layers": 6, "hidden_size_per_layer_input": 0, "head_dim": 64}
GEMMA4 |= {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 4, "num_attention_heads": 4}
LISTED = {"5": {"head_dim": 128, "num_key_value_heads": 1}}


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"num_key_value_heads": 2}, (512, 2, False)),
        ({"num_key_value_heads": 2, "num_global_key_value_heads": 1}, (512, 2, False)),  # only where keys are values
        ({"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}, (512, 1, True)),
        ({"num_key_value_heads": 2, "per_layer_config": LISTED, "attention_k_eq_v": True}, (128, 1, True)),
    ],
)
def test_the_heads_of_layers_without_a_window_have_one_of_two_keys(changes, heads, tmp_path):
    config = read_config(write(tmp_path, GEMMA4 | changes))
    own = config.global_heads
    assert (own.head_dim, own.key_heads, own.keys_as_values) == heads
    assert read_config(write(tmp_path, to_json(config))) == config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"per_layer_config": {"4": {"head_dim": 128}}}, "per_layer_config: wanted one head_dim"),
        ({"per_layer_config": {"5": {"head_dim": 128, "hidden_size": 4}}}, "per_layer_config: wanted"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input: wanted 0, got"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: wanted null or 0, got 2"),
        ({"enable_moe_block": True}, "num_experts: wanted at least 1"),
    ],
)
def test_parts_of_gemma_4_that_are_missing_or_contradict_are_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        read_config(write(tmp_path, GEMMA4 | {"num_key_value_heads": 2} | changes))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_window_of_no_position_is_refused_wherever_there_are_windows(name, tmp_path):
    raw = written_by_default(name) | {"sliding_window": 0}
    layers = families.FAMILIES[name].layers
    switched = isinstance(layers, SwitchedWindow)
    if not isinstance(layers, SwitchedWindow | Window):
        assert read_config(write(tmp_path, raw)).sliding_layers == ()
        return
    with pytest.raises(UserError, match="sliding_window: wanted null or at least 1, got 0"):
        read_config(write(tmp_path, raw | ({"use_sliding_window": True} if switched else {})))
    if switched:
        assert read_config(write(tmp_path, raw | {"use_sliding_window": False})).sliding_layers == ()


ROPE = {"rope_type": "default", "rope_theta": 1e6}
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_parameters": ROPE, "rope_scaling": SCALED}, "rope_type"),
        ({"rope_parameters": SCALED | {"rope_theta": 1e6}, "rope_scaling": SCALED}, "rope_theta"),
        ({"rope_parameters": SCALED, "rope_scaling": SCALED | {"beta_fast": 8.0}}, "beta_fast"),
        ({"rope_parameters": SCALED | {"rope_theta": 1e6}, "rope_scaling": SCALED, "rope_theta": 1e6}, ""),
        ({"rope_parameters": SCALED, "rope_scaling": SCALED | {"attention_factor": None}}, ""),
    ],
)
def test_two_objects_for_rope_agree(rope, key, tmp_path):
    """One of them would be dropped, and with it the base that only it has."""
    raw = {name: value for name, value in DENSE.items() if not name.startswith("rope_")} | rope
    if key:
        with pytest.raises(UserError, match=f"rope_parameters: wanted the {key} of rope_scaling"):
            read_config(write(tmp_path, raw))
    else:
        assert read_config(write(tmp_path, raw)).rope_theta == rope.get("rope_theta", 1e4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_no_key_is_in_two_tables(name):
    family = families.FAMILIES[name]
    tables = [config_json.TRANSLATED, config_json.PERMITTED, config_json.HARMLESS, family.permitted]
    tables += [[key for each in family.copied.values() for key in (each.name, each.other)]]
    tables += [part.keys for part in family.all_parts]
    keys = {key for table in tables for key in table} - {""}
    assert {key: sum(key in table for table in tables) for key in keys} == dict.fromkeys(keys, 1)


EXPERTS = ("num_local_experts", "n_routed_experts", "moe_num_experts", "shared_expert_intermediate_size")
ACTIVE = ("moe_k", "moe_topk", "n_shared_experts")
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@pytest.mark.parametrize("name", families.FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers", minversion=NEWEST)
    family, sizes = families.FAMILIES[name], MOE | dict.fromkeys(EXPERTS, 5) | dict.fromkeys(ACTIVE, 2)
    sizes |= dict.fromkeys(LATENT, 8) | ({"num_key_value_heads": 4} if "latent.rank" in family.copied else {})
    needed = {each.name for each in family.copied.values() if each.default is families.REQUIRED}
    counted = [each for each in family.parts if isinstance(each, SharedExperts)]
    needed |= {each.key for each in counted if each.default is families.REQUIRED}
    if isinstance(family.layers, LetteredLayers):
        sizes |= {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4}
        needed |= {"hybrid_override_pattern"}
    elif "mixer.heads" in family.copied:  # whose default number fits the default width alone
        sizes |= {"mamba_n_heads": 4, "mamba_d_head": sizes["hidden_size"] // 2}
        needed |= {"mamba_n_heads"}
    if "hidden_size_per_layer_input" in family.permitted:  # whose default gspax refuses
        sizes, needed = sizes | {"hidden_size_per_layer_input": 0}, needed | {"hidden_size_per_layer_input"}
    least = {key: sizes[key] for key in sizes if key in needed} | {"model_type": name}
    transformers.AutoConfig.for_model(**least).save_pretrained(tmp_path / "full")
    assert read_config(write(tmp_path, least)) == read_config(tmp_path / "full")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen3-0.6B", presets.qwen3_0_6b),
        ("Qwen3-30B-A3B", presets.qwen3_30b_a3b),
        ("Qwen3-235B-A22B", presets.qwen3_235b_a22b),
    ],
)
def test_published_files_equal_the_presets(name, preset):
    if not PUBLISHED.is_dir():
        pytest.skip("../shared/data/qwen3_configs is not here")
    assert replace(read_config(PUBLISHED / name), dtype="bfloat16", remat="full") == preset


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        (DENSE | {"rope_theta": 5000000}, {"rope_theta": 5e6}),
        (
            DENSE | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}},
            {"rope_theta": 1e7},
        ),
        (
            DENSE | {"rope_scaling": YARN | {"beta_fast": 16, "truncate": False, "attention_factor": 1.5}},
            {
                "rope_scaling": Yarn(
                    factor=4.0,
                    original_max_position_embeddings=32768,
                    beta_fast=16.0,
                    truncate=False,
                    attention_factor=1.5,
                )
            },
        ),
        (
            DENSE | {"rope_scaling": YARN | {"attn_factor": 0.8782}},  # DeepSeek-R1-0528-Qwen3-8B
            {"rope_scaling": Yarn(factor=4.0, original_max_position_embeddings=32768)},
        ),
        (
            DENSE | {"rope_scaling": {"type": "yarn", "factor": 2}},
            {"rope_scaling": Yarn(factor=2.0, original_max_position_embeddings=40960)},
        ),
        (
            DENSE | {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 10240}},
            {"rope_scaling": Yarn(factor=4.0, original_max_position_embeddings=10240)},
        ),
        (DENSE | {"use_sliding_window": False, "sliding_window": 4096}, {"sliding_window": 0, "sliding_layers": ()}),
        (
            DENSE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            {"sliding_window": 8, "sliding_layers": (1, 2)},
        ),
        (
            DENSE
            | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": None, "num_hidden_layers": 30},
            {"sliding_window": 8, "sliding_layers": (28, 29), "num_hidden_layers": 30},
        ),
        (
            DENSE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            {"sliding_window": 0, "sliding_layers": ()},
        ),
        (
            MOE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": None},
            {"sliding_window": 8, "sliding_layers": (0, 1, 2)},
        ),
        (DENSE | {"torch_dtype": "bfloat16"}, {}),  # the dtype of the tensors, not of the computation
        (DENSE | {"torch_dtype": "float32", "dtype": "float16"}, {}),
        (DENSE | {"qkv_bias": False, "use_qk_norm": True, "unsloth_fixed": True}, {}),
        (MOE | {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False}, {}),
        ({**MOE, "num_experts": None, "num_local_experts": 7}, {"num_experts": 7}),
        ({**MOE, "head_dim": None}, {"head_dim": 4}),
        ({**DENSE, "head_dim": None}, {"head_dim": 128}),
        (DENSE | {"bos_token_id": 3, "router_aux_loss_coef": 0.1}, {}),
    ],
)
def test_each_key_sets_its_field(raw, changes, tmp_path):
    base = tiny.MOE if raw["model_type"] == "qwen3_moe" else of_its_family(tiny.CONFIGS["dense"])
    assert read_config(write(tmp_path, raw)) == replace(base, **changes)


PHI3 = to_json(replace(of_its_family(tiny.CONFIGS["dense"]), qk_norm=False, rope_fraction=0.5, model_type="phi3"))
PHI3 |= {"original_max_position_embeddings": 4096}
LONGROPE = {"type": "longrope", "short_factor": [1, 1.5], "long_factor": [2, 4.0]}
OLMO3 = {name: DENSE[name] for name in DENSE if name in SIZES} | {"model_type": "olmo3"}
GEMMA3 = OLMO3 | {"model_type": "gemma3_text"}
GPT_OSS = OLMO3 | {"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2}
NEMOTRON = {  # of Nemotron-H-8B-Base-8K, as Megatron-Bridge's tests have it, without keys of other families
    **{"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504},
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    **{"num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128},
    **{"mamba_head_dim": 64, "mamba_num_heads": 128, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4},
    **{"expand": 2, "chunk_size": 128, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5, "mlp_hidden_act": "relu2"},
    **{"rescale_prenorm_residual": True, "max_position_embeddings": 8192, "tie_word_embeddings": False},
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
}
LFM2 = families_of_tests.PUBLISHED["lfm2"][1] | {"model_type": "lfm2"}
KNOWN = " or ".join(json.dumps(name) for name in (*families.FAMILIES, *families.ALIASES))
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


def test_longrope_is_of_the_original_length_unless_a_run_says_otherwise(tmp_path):
    config = read_config(write(tmp_path, PHI3 | {"rope_scaling": LONGROPE}))
    scaling = LongRope(
        short_factor=(1, 1.5), long_factor=(2, 4), original_max_position_embeddings=4096, max_position_embeddings=40960
    )
    assert (config.rope_scaling, config.max_position_embeddings) == (scaling, 4096)
    written = to_json(replace(config, max_position_embeddings=8192))
    assert (written["max_position_embeddings"], written["original_max_position_embeddings"]) == (40960, 4096)
    assert read_config(write(tmp_path, written)) == config
    other = read_config(write(tmp_path, PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64}))
    assert (other.rope_scaling.original_max_position_embeddings, other.max_position_embeddings) == (64, 64)
    assert read_config(write(tmp_path, to_json(other))) == other
    (problem,) = architecture_problems(replace(config, max_position_embeddings=40961))
    assert problem == "model.max_position_embeddings: wanted at most 40960, got 40961"


def test_each_layer_of_a_nemotron_h_has_one_part(tmp_path):
    config = read_config(write(tmp_path, NEMOTRON))
    assert (parameter_count(config), config.num_experts) == (8_100_852_736, 0)
    assert config.mixer_layers[:5] == (0, 2, 4, 6, 9) and config.no_mixer_layers[:4] == (1, 3, 5, 8)
    assert [layer.mixer.name for layer in layers_of(config)].count("attention") == 4
    written = to_json(config)
    assert written["hybrid_override_pattern"] == NEMOTRON["hybrid_override_pattern"]
    assert read_config(write(tmp_path, written)) == config
    letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    listed = {"layers_block_type": [letters[each] for each in NEMOTRON["hybrid_override_pattern"]]}
    without = {name: NEMOTRON[name] for name in NEMOTRON if name != "hybrid_override_pattern"}
    assert read_config(write(tmp_path, without | listed)) == config


def test_the_width_and_the_layers_of_an_lfm2_have_older_and_newer_keys(tmp_path):
    older = read_config(write(tmp_path, LFM2))
    assert (older.intermediate_size, older.mixer.width, older.tie_word_embeddings) == (8192, 2048, True)
    assert set(range(16)) - set(older.mixer_layers) == {2, 5, 8, 10, 12, 14}
    kinds = ["conv" if layer in older.mixer_layers else "full_attention" for layer in range(16)]
    newer = {name: LFM2[name] for name in LFM2 if not name.startswith(("block", "conv_dim", "full_attn", "rope"))}
    newer |= {"layer_types": kinds, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert read_config(write(tmp_path, newer | {"intermediate_size": 12288})) == older
    whole = {"intermediate_size": 8192, "block_auto_adjust_ff_dim": False, "tie_embedding": True}
    assert read_config(write(tmp_path, newer | whole)) == older == read_config(write(tmp_path, to_json(older)))
    assert not read_config(write(tmp_path, newer | whole | {"tie_embedding": False})).tie_word_embeddings
    smaller = read_config(write(tmp_path, LFM2 | {"block_ff_dim": 6656}))
    assert smaller.intermediate_size == 4608  # as in LFM2-350M


def test_gpt_oss_has_yarn_unless_its_file_says_otherwise(tmp_path):
    config = read_config(write(tmp_path, GPT_OSS | {"rope_scaling": None}))
    assert (config.rope_scaling.factor, config.rope_scaling.truncate) == (32, False)
    plain = replace(config, rope_scaling=None)
    assert read_config(write(tmp_path, to_json(plain))) == plain


def test_what_vllm_reads_without_a_default_is_written(tmp_path):
    """vllm/model_executor/models/gpt_oss.py and lfm2.py of vLLM 0.30.0."""
    gpt_oss = to_json(read_config(write(tmp_path, GPT_OSS | {"rope_scaling": None})))
    bounds = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    assert gpt_oss["rope_scaling"] == {"rope_type": "yarn", "truncate": False} | bounds
    lfm2 = to_json(read_config(write(tmp_path, LFM2)))
    assert (lfm2["block_dim"], lfm2["conv_dim"]) == (2048, 2048)


def test_layers_with_a_window_have_a_rope_of_their_own(tmp_path):
    raw = OLMO3 | {"rope_scaling": YARN, "num_hidden_layers": 5}
    config = read_config(write(tmp_path, raw))
    assert (config.sliding_window, config.sliding_layers) == (4096, (0, 1, 2, 4))
    assert (config.sliding_rope_theta, config.rope_theta) == (5e5, 5e5)
    ropes = [layer.mixer.rope for layer in layers_of(config)]
    assert [rope.scaling is None for rope in ropes] == [True, True, True, False, True]
    other = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = read_config(write(tmp_path, raw | {"rope_parameters": other}))
    assert [layer.mixer.rope.theta for layer in layers_of(config)] == [1e4, 1e4, 1e4, 1e6, 1e4]
    assert read_config(write(tmp_path, to_json(config))) == config
    plain = read_config(write(tmp_path, OLMO3 | {"layer_types": ["full_attention"] * 3}))
    assert (plain.sliding_window, plain.sliding_rope_theta, plain.model_type) == (0, 0, "olmo3")
    assert len({layer.mixer.rope for layer in layers_of(replace(config, sliding_window=0))}) == 1


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (DENSE | {"hidden_act": "gelu"}, 'hidden_act: wanted "silu", got "gelu"'),
        (DENSE | {"attention_dropout": 0.1}, "attention_dropout: wanted 0, got 0.1"),
        (DENSE | {"quantization_config": {"bits": 4}}, 'quantization_config: wanted null, got {"bits": 4}'),
        (MOE | {"router_jitter_noise": 0.01}, "router_jitter_noise: wanted null or 0, got 0.01"),
        (DENSE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: wanted null or 1, got 0.5"),
        (DENSE | {"is_encoder_decoder": True}, "is_encoder_decoder: wanted false, got true"),
        (DENSE | {"qk_clip": 3}, "qk_clip: wanted no such key (gspax does not know it), got 3"),
        (DENSE | {"num_experts": 8}, "num_experts: wanted no such key (gspax does not know it), got 8"),
        (DENSE | {"model_type": "qwen9"}, f'model_type: wanted {KNOWN}, got "qwen9"'),
        (DENSE | {"model_type": None}, f"model_type: wanted {KNOWN}, got null"),
        (DENSE | {"model_type": "glm_moe_dsa"}, "model_type glm_moe_dsa: sparse attention is not implemented"),
        (DENSE | {"model_type": "kimi_linear"}, "model_type kimi_linear: Kimi delta attention is not implemented"),
        (
            DENSE | {"architectures": ["Qwen3ForSequenceClassification"]},
            'architectures: wanted null or ["Qwen3ForCausalLM"], got ["Qwen3ForSequenceClassification"]',
        ),
        (DENSE | {"hidden_size": None}, "hidden_size: wanted a value, there is none"),
        ({**MOE, "num_experts": None}, "num_experts: wanted a value, there is none"),
        (DENSE | {"hidden_size": 16.5}, "hidden_size: wanted an integer, got 16.5"),
        (DENSE | {"hidden_size": True}, "hidden_size: wanted an integer, got true"),
        (DENSE | {"rms_norm_eps": "1e-6"}, 'rms_norm_eps: wanted a number, got "1e-6"'),
        (DENSE | {"attention_bias": 1}, "attention_bias: wanted true or false, got 1"),
        (MOE | {"mlp_only_layers": [0, "1"]}, 'mlp_only_layers: wanted a list of integers, got [0, "1"]'),
        (DENSE | {"vocab_size": 0}, "vocab_size: wanted at least 1, got 0"),
        (
            DENSE | {"num_key_value_heads": 3},
            "num_attention_heads: wanted a multiple of num_key_value_heads (3), got 4",
        ),
        (DENSE | {"head_dim": 7}, "head_dim: wanted an even number (RoPE rotates pairs), got 7"),
        (DENSE | {"torch_dtype": "int8"}, 'dtype: wanted "float32" or "bfloat16" or "float16", got "int8"'),
        (DENSE | {"qkv_bias": True}, "qkv_bias: wanted false, got true"),
        (DENSE | {"use_qk_norm": False}, "use_qk_norm: wanted true, got false"),
        (
            MOE | {"shared_expert_intermediate_size": 32},
            "shared_expert_intermediate_size: wanted null or 0, got 32",
        ),
        (MOE | {"num_experts_per_tok": 6}, "num_experts_per_tok: wanted 1 to num_experts (5), got 6"),
        (MOE | {"mlp_only_layers": [3]}, "mlp_only_layers: wanted layers below 3, got 3"),
        (
            MOE | {"mlp_only_layers": [1], "intermediate_size": 0},
            "intermediate_size: wanted at least 1 for the dense layers, got 0",
        ),
        (
            DENSE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            'rope_type: wanted "default" or "yarn" or "llama3" or "linear", got "dynamic"',
        ),
        (
            DENSE | {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}},
            'rope_type: wanted "default" or "yarn" or "llama3" or "linear", got "longrope"',
        ),
        (PHI3 | {"rope_scaling": YARN}, 'rope_type: wanted "default" or "longrope", got "yarn"'),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [1]}},
            "rope_scaling.long_factor: wanted 2 numbers, one for each pair, got 1",
        ),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [1, 0]}},
            "long_factor: wanted numbers above 0, got [1, 0]",
        ),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_factor": None}}, "short_factor: wanted a value, there is none"),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 8}},
            "original_max_position_embeddings: wanted 4096, got 8",
        ),
        (
            {**PHI3, "original_max_position_embeddings": None, "rope_scaling": LONGROPE},
            "original_max_position_embeddings: wanted a value, there is none",
        ),
        (
            PHI3 | {"rope_scaling": LONGROPE | {"max_position_embeddings": 8}},
            "max_position_embeddings: wanted 40960, got 8",
        ),
        (
            PHI3 | {"auto_map": {"AutoConfig": "own.Phi3Config"}},
            f"auto_map: wanted null or {json.dumps(families.PHI3_CODE)} or {json.dumps(families.PHI4_CODE)}, got "
            '{"AutoConfig": "own.Phi3Config"}',
        ),
        (OLMO3 | {"rope_parameters": {"sliding_attention": YARN}}, 'rope_type: wanted "default", got "yarn"'),
        (OLMO3 | {"rope_parameters": {"full_attention": 1}}, "full_attention: wanted an object or null, got 1"),
        (GPT_OSS | {"swiglu_limit": 6.0}, "swiglu_limit: wanted null or 7, got 6.0"),
        (GPT_OSS | {"hidden_act": "gelu"}, 'hidden_act: wanted "silu", got "gelu"'),
        (
            NEMOTRON | {"hybrid_override_pattern": "MAM-"},
            'hybrid_override_pattern: wanted the letters M, *, E, and -, got "MAM-"',
        ),
        (NEMOTRON | {"num_hidden_layers": 51}, "num_hidden_layers: wanted null or 52, got 51"),
        (
            NEMOTRON | {"layers_block_type": ["mlp"]},
            f'hybrid_override_pattern: wanted null or "-", got "{NEMOTRON["hybrid_override_pattern"]}"',
        ),
        (NEMOTRON | {"rms_norm_eps": 1e-6}, "rms_norm_eps: wanted null or 1e-05, got 1e-06"),
        (NEMOTRON | {"attention_head_dim": 64}, "attention_head_dim: wanted null or 128, got 64"),
        (NEMOTRON | {"moe_latent_size": 1024}, "moe_latent_size: wanted null, got 1024"),
        (
            NEMOTRON | {"time_step_limit": [0.01, 1.0]},
            'time_step_limit: wanted null or [0.0, Infinity] or [0.0, {"__float__": "Infinity"}], got [0.01, 1.0]',
        ),
        (LFM2 | {"block_dim": 1024}, "block_dim: wanted null or 2048, got 1024"),
        (LFM2 | {"theta": 1e4}, "theta: wanted null or 1000000.0, got 10000.0"),
        (LFM2 | {"block_use_swiglu": False}, "block_use_swiglu: wanted null or true, got false"),
        (LFM2 | {"full_attn_idxs": 2}, "full_attn_idxs: wanted a list of layers, got 2"),
        (
            LFM2 | {"layer_types": ["conv", "full_attention"]},
            'layer_types: wanted a list of 16 names, got ["conv", "full_attention"]',
        ),
        (LFM2 | {"layer_types": ["mamba"] * 16}, 'layer_types: wanted "full_attention" or "conv", got "mamba"'),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: wanted null, got 50.0"),
        (GEMMA3 | {"sliding_window_pattern": 5}, "sliding_window_pattern: wanted null or 6, got 5"),
        (
            DENSE | {"model_type": "granitemoeshared"},
            "model_type granitemoeshared: its family is not implemented",
        ),
        (
            GEMMA3 | {"model_type": "gemma3", "vision_config": {}},
            "model_type gemma3: a vision tower is not implemented",
        ),
        (DENSE | {"model_type": "qwen9", "audio_config": {}}, "model_type qwen9: an audio tower is not implemented"),
        (OLMO3 | {"sliding_window": None}, 'layer_types: wanted "full_attention", got "sliding_attention"'),
        (
            DENSE | {"rope_scaling": {"factor": 2.0}},
            "rope_scaling.factor: wanted no such key with rope_type default, got 2.0",
        ),
        (
            DENSE | {"rope_scaling": YARN | {"ntk": 1}},
            "rope_scaling.ntk: wanted no such key with rope_type yarn, got 1",
        ),
        (DENSE | {"rope_scaling": YARN | {"factor": 0.5}}, "factor: wanted at least 1, got 0.5"),
        (DENSE | {"rope_scaling": YARN | {"factor": "4"}}, 'factor: wanted a number, got "4"'),
        (
            DENSE | {"rope_scaling": LLAMA3 | {"high_freq_factor": 1}},
            "rope_scaling.high_freq_factor: wanted more than low_freq_factor (1), got 1",
        ),
        (
            DENSE | {"rope_scaling": LLAMA3 | {"low_freq_factor": None}},
            "low_freq_factor: wanted a value, there is none",
        ),
        (DENSE | {"rope_scaling": YARN | {"beta_slow": 0}}, "beta_slow: wanted above 0, got 0.0"),
        (DENSE | {"rope_theta": 0}, "rope_theta: wanted above 0, got 0.0"),
        (DENSE | {"rope_theta": float("nan")}, "rope_theta: wanted a finite number, got NaN"),
        (DENSE | {"rms_norm_eps": float("inf")}, "rms_norm_eps: wanted a finite number, got Infinity"),
        (DENSE | {"rope_scaling": YARN | {"factor": float("nan")}}, "factor: wanted a finite number, got NaN"),
        (DENSE | {"rope_scaling": "yarn"}, 'rope_scaling: wanted an object or null, got "yarn"'),
        (
            DENSE | {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings: wanted at least 1, got 0",
        ),
        (DENSE | {"layer_types": ["full_attention"]}, 'layer_types: wanted a list of 3 names, got ["full_attention"]'),
        (
            DENSE | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
            'layer_types: wanted "full_attention", got "sliding_attention"',
        ),
        (
            DENSE | {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2 + ["conv"]},
            'layer_types: wanted "full_attention" or "sliding_attention", got "conv"',
        ),
        (
            DENSE | {"use_sliding_window": True, "sliding_window": -1},
            "sliding_window: wanted at least 0, got -1",
        ),
        (DENSE | {"use_sliding_window": "no"}, 'use_sliding_window: wanted false or true, got "no"'),
        (
            MOE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "max_window_layers: wanted the window on all 3 layers of a Qwen3-MoE, got 2",
        ),
        ([1], "wanted a JSON object, got [1]"),
    ],
)
def test_unsupported_features_are_rejected_by_name(raw, sentence, tmp_path):
    with pytest.raises(UserError) as error:
        read_config(write(tmp_path, raw))
    assert str(error.value) == f"{tmp_path / 'config.json'}: {sentence}"


MIXTRAL = {
    **{"model_type": "mixtral", "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (MIXTRAL | {"attention_bias": True}, "attention_bias: wanted null or false, got true"),
        (MIXTRAL | {"norm_topk_prob": False}, "norm_topk_prob: wanted null or true, got false"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok: wanted 1 to num_experts (4), got 5"),
        (MIXTRAL | {"qkv_bias": True}, "qkv_bias: wanted false, got true"),
        (
            MIXTRAL | {"model_type": "qwen2_moe", "moe_intermediate_size": 8},
            "shared_expert_intermediate_size: wanted a value, there is none",
        ),
        (
            MIXTRAL
            | {"model_type": "qwen2_moe", "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
            | {"use_sliding_window": True},
            "use_sliding_window: wanted false, got true",
        ),
    ],
)
def test_what_other_families_do_not_have_is_rejected_by_name(raw, sentence, tmp_path):
    with pytest.raises(UserError) as error:
        read_config(write(tmp_path, raw))
    assert str(error.value) == f"{tmp_path / 'config.json'}: {sentence}"


def test_a_model_of_no_family_cannot_be_exported():
    with pytest.raises(UserError, match=r"families qwen3, .*mixtral, .*got qk_norm=True, qkv_bias=True"):
        to_json(replace(tiny.CONFIGS["dense"], qkv_bias=True))
    with pytest.raises(UserError, match=r"model\.model_type: wanted a family with .*, qwen3, got llama"):
        to_json(replace(tiny.CONFIGS["dense"], model_type="llama"))


def test_the_family_is_recorded_where_its_parts_do_not_say_it(tmp_path):
    """A Mistral without a window has the parts of a Llama; its export is a Mistral again."""
    sizes = {key: value for key, value in DENSE.items() if key in SIZES or key == "head_dim"}
    llama = read_config(write(tmp_path, sizes | {"model_type": "llama"}))
    assert llama.model_type == "" and to_json(llama)["model_type"] == "llama"
    mistral = read_config(write(tmp_path, sizes | {"model_type": "mistral", "sliding_window": None}))
    assert mistral == replace(llama, model_type="mistral")
    assert to_json(mistral)["model_type"] == "mistral"
    sliding = read_config(write(tmp_path, sizes | {"model_type": "mistral"}))
    assert sliding == replace(llama, sliding_window=4096, sliding_layers=(0, 1, 2))


def test_a_missing_or_invalid_file_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"wanted a checkpoint folder with config\.json, there is none"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(UserError, match=r"config\.json: cannot be read: Expecting value"):
        read_config(tmp_path)


def test_experts_with_a_window_on_some_layers_cannot_be_exported():
    config = replace(tiny.MOE, sliding_window=4, sliding_layers=(1,))
    with pytest.raises(UserError, match=r"model\.sliding_layers: wanted all 3 layers or none with experts, got \(1,\)"):
        to_json(config)


def test_the_key_names_of_the_hub_are_written():
    raw = to_json(replace(presets.qwen3_30b_a3b, rope_scaling=Yarn(factor=4.0, original_max_position_embeddings=32768)))
    assert raw["num_experts"] == 128 and raw["torch_dtype"] == "bfloat16" and raw["rope_theta"] == 1e6
    assert raw["rope_scaling"] == YARN
    assert raw["architectures"] == ["Qwen3MoeForCausalLM"]
    assert not {"num_local_experts", "dtype", "rope_parameters", "layer_types", "remat", "checkpoint"} & {*raw}


LATENT_ATTENTION = to_json(tiny.CONFIGS["latent attention"])


def test_kimi_has_the_parts_of_deepseek_under_its_own_name(tmp_path):
    config = read_config(write(tmp_path, LATENT_ATTENTION | {"model_type": "kimi_k2"}))
    assert config == replace(tiny.CONFIGS["latent attention"], model_type="kimi_k2")
    assert config_json.family_of(config) == "deepseek_v3"
    assert to_json(config) == LATENT_ATTENTION | {"model_type": "kimi_k2"}


def test_a_greedy_router_ignores_groups(tmp_path):
    """As `DeepseekV2TopkRouter` in transformers."""
    raw = families_of_tests.SMALL["deepseek_v2"] | {"model_type": "deepseek_v2"}
    grouped = read_config(write(tmp_path, raw))
    assert (grouped.router.groups, grouped.router.top_groups, grouped.router.group_best) == (3, 2, 1)
    assert to_json(grouped)["topk_method"] == "group_limited_greedy"
    for method in ({"topk_method": "greedy"}, {"topk_method": None}):
        greedy = read_config(write(tmp_path, raw | method))
        assert greedy == replace(grouped, router=replace(grouped.router, groups=1, top_groups=1))
        assert (to_json(greedy)["topk_method"], to_json(greedy)["n_group"]) == ("greedy", 1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
            'quantization_config: wanted null, got {"quant_method": "fp8", "fmt": "e4m3"}',
        ),
        ({"q_lora_rank": "none"}, 'q_lora_rank: wanted an integer, got "none"'),
        ({"attention_bias": True}, "attention_bias: wanted null or false, got true"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: wanted 4 with latent attention, got 2"),
        (
            {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            'mlp_layer_types: wanted "dense" for the first layers and "sparse" for the others, got '
            '["sparse", "dense", "sparse"]',
        ),
        (
            {"mlp_layer_types": ["dense", "dense", "sparse"], "first_k_dense_replace": 1},
            "first_k_dense_replace: wanted 2, got 1",
        ),
    ],
)
def test_latent_attention_that_is_not_implemented_is_rejected(changes, sentence, tmp_path):
    raw = families_of_tests.SMALL["glm4_moe_lite"] | {"model_type": "glm4_moe_lite"}
    with pytest.raises(UserError) as error:
        read_config(write(tmp_path, raw | changes))
    assert str(error.value) == f"{tmp_path / 'config.json'}: {sentence}"


def test_layers_may_be_listed_as_dense_or_sparse(tmp_path):
    raw = families_of_tests.SMALL["glm4_moe_lite"] | {"model_type": "glm4_moe_lite", "first_k_dense_replace": None}
    kinds = ["dense", "dense", "sparse"]
    config = read_config(write(tmp_path, raw | {"mlp_layer_types": kinds}))
    assert config.mlp_only_layers == (0, 1)
    assert (to_json(config)["mlp_layer_types"], to_json(config)["first_k_dense_replace"]) == (kinds, 2)
