"""Checkpoints are exchanged with transformers in both directions, without unexpected keys.

The same without torch: test_convert_export.py and test_names.py; logits: test_parity_torch.py.
"""

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from api import (
    abstract_params,
    convert,
    export,
    make_mesh,
    parameter_count,
    parameters,
    read_config,
    read_params,
    to_json,
    transformer,
)
from published import load, published, random_params, same_bytes

from gspax.config import Mesh

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip("transformers")

apply = jax.jit(transformer.apply, static_argnames=("config", "mesh"))

SLOW = pytest.mark.slow
MIXED = "every second layer sparse"
CONFIGS = {name: tiny.CONFIGS[name] for name in ("moe", "dense", "tied", MIXED, "biases")}


def random_model(config, dtype):
    torch.manual_seed(0)
    theirs = transformers.AutoConfig.for_model(**to_json(config))
    model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def loaded(folder, dtype="auto"):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    return model.eval()


def to_bytes(state):
    """name -> bytes of a torch state."""
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


def read(folder):
    config = read_config(folder)
    return config, read_params(folder, config, abstract_params(config, make_mesh(Mesh())))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("moe", "float32"),
        ("tied", "bfloat16"),
        *(pytest.param(name, dtype, marks=pytest.mark.slow) for name in CONFIGS for dtype in ("float32", "bfloat16")),
    ],
)
def test_a_round_trip_from_transformers_preserves_every_byte(name, dtype, tmp_path):
    model = random_model(CONFIGS[name], getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs")
    convert.run(str(tmp_path / "theirs"), tmp_path / "orbax", dtype)
    export.run(tmp_path / "orbax", tmp_path / "ours", dtype=dtype, shard_size=8000)
    assert same_bytes(load(tmp_path / "ours"), load(tmp_path / "theirs"))
    again = loaded(tmp_path / "ours")
    assert again.dtype == getattr(torch, dtype)
    assert to_bytes(again.state_dict()) == to_bytes(model.state_dict())


@pytest.mark.parametrize("name", ["tied", pytest.param("moe", marks=pytest.mark.slow)])
def test_an_exported_model_gives_the_same_logits(name, tmp_path):
    config = CONFIGS[name]
    params = jax.tree.map(lambda leaf: 0.3 * leaf, random_params(config))
    flat = parameters.named_leaves(params)
    parameters.write_checkpoint(tmp_path, config, flat.__getitem__, dtype="float32")
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, 11), dtype=np.int32)
    with torch.no_grad():
        theirs = loaded(tmp_path)(torch.tensor(tokens_BT)).logits.numpy()
    hidden, _ = apply(params, config, tokens_BT, np.ones_like(tokens_BT), mesh=tiny.one_device())
    assert np.abs(np.asarray(transformer.logits(params, hidden)) - theirs).max() < 1e-4
    assert np.abs(theirs).max() > 1


SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 24}
OTHERS = {  # families that are not Qwen3: model_type and keys of config.json
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "head_dim": 8, **SIZES, **EXPERTS},
    "mixtral with a window": {"model_type": "mixtral", "num_local_experts": 5, "sliding_window": 4, **SIZES, **EXPERTS},
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", "num_experts": 5, "moe_intermediate_size": 12, **SIZES, **EXPERTS},
        **{"shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    },
    "qwen2_moe without biases": {
        **{"model_type": "qwen2_moe", "num_experts": 5, "moe_intermediate_size": 12, **SIZES, **EXPERTS},
        **{"shared_expert_intermediate_size": 20, "qkv_bias": False, "norm_topk_prob": True},
    },
}


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2_moe", *(pytest.param(each, marks=SLOW) for each in list(OTHERS)[1::2])]
)
def test_other_families_have_the_logits_and_bytes_of_transformers(name, tmp_path):
    raw = OTHERS[name]
    torch.manual_seed(0)
    theirs = transformers.AutoConfig.for_model(**raw)
    model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "theirs")
    config, params = read(tmp_path / "theirs")
    assert to_json(config)["model_type"] == raw["model_type"]
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (8, 11), dtype=np.int32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens_BT)).logits.numpy()
    hidden, _ = apply(params, config, tokens_BT, np.ones_like(tokens_BT), mesh=make_mesh(Mesh()))
    assert np.abs(np.asarray(transformer.logits(params, hidden)) - expected).max() < 1e-5
    assert np.abs(expected).max() > 0.5

    flat = parameters.named_leaves(params)
    (tmp_path / "ours").mkdir()
    parameters.write_checkpoint(tmp_path / "ours", config, flat.__getitem__, dtype="float32")
    assert same_bytes(load(tmp_path / "ours"), load(tmp_path / "theirs"))
    assert to_bytes(loaded(tmp_path / "ours").state_dict()) == to_bytes(model.state_dict())
    assert read_config(tmp_path / "ours") == config
    assert parameter_count(config) == sum(leaf.size for leaf in flat.values())

    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(each.endswith("mlp.experts.gate_up_proj") for each in load(tmp_path / "fused"))
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "fused")[1], params)


def test_fused_experts_saved_by_transformers_are_read(tmp_path):
    model = random_model(CONFIGS[MIXED], torch.float32)
    model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load(tmp_path / "fused"))
    jax.tree.map(np.testing.assert_array_equal, read(tmp_path / "fused")[1], read(tmp_path / "plain")[1])


def test_sharded_checkpoints_of_transformers_are_read(tmp_path):
    model = random_model(CONFIGS["moe"], torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config, params = read(tmp_path)
    assert same_bytes(published(config, jax.device_get(params), ml_dtypes.bfloat16), load(tmp_path))


def test_a_float16_checkpoint_of_transformers_is_read(tmp_path):
    model = random_model(CONFIGS["tied"], torch.float16)
    model.save_pretrained(tmp_path)
    config, params = read(tmp_path)
    assert config.dtype == "float32"
    assert same_bytes(published(config, jax.device_get(params), np.float16), load(tmp_path))
