"""Logits of random tiny models as transformers 5.23 computed them (../shared/data/golden_qwen3_tiny)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspax.model import transformer
from gspax.model.config import ModelConfig

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "golden_qwen3_tiny"


def read(folder):
    """Config and parameters of a published-layout checkpoint; the library's own reader is yet to come."""
    safetensors = pytest.importorskip("safetensors.numpy")
    raw = json.loads((folder / "config.json").read_text())
    names = {"num_experts": "num_local_experts"}
    fields = {
        name: raw[names.get(name, name)] for name in ModelConfig.__dataclass_fields__ if names.get(name, name) in raw
    }
    fields |= {"rope_theta": raw["rope_parameters"]["rope_theta"], "dtype": "float32"}
    config = ModelConfig(**{**fields, "mlp_only_layers": ()})
    tensors = safetensors.load_file(folder / "model.safetensors")
    D, N, K, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def stack(name, shape):
        found = [tensors[f"model.layers.{layer}.{name}.weight"] for layer in range(config.num_hidden_layers)]
        return np.stack([tensor.T.reshape(shape) for tensor in found])

    attention = {
        "query": stack("self_attn.q_proj", (D, N, H)),
        "key": stack("self_attn.k_proj", (D, K, H)),
        "value": stack("self_attn.v_proj", (D, K, H)),
        "out": stack("self_attn.o_proj", (N, H, D)),
        "query_norm": {"scale": stack("self_attn.q_norm", H)},
        "key_norm": {"scale": stack("self_attn.k_norm", H)},
    }
    if config.num_experts:
        E, F = config.num_experts, config.moe_intermediate_size
        shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
        mlp = {
            name: np.stack([stack(f"mlp.experts.{e}.{name}_proj", shape) for e in range(E)], axis=1)
            for name, shape in shapes.items()
        }
        mlp["router"] = stack("mlp.gate", (D, E))
    else:
        F = config.intermediate_size
        mlp = {
            name: stack(f"mlp.{name}_proj", shape)
            for name, shape in [("gate", (D, F)), ("up", (D, F)), ("down", (F, D))]
        }
    layers = {
        "attention_norm": {"scale": stack("input_layernorm", D)},
        "attention": attention,
        "mlp_norm": {"scale": stack("post_attention_layernorm", D)},
        "mlp": mlp,
    }
    params = {
        "embedding": tensors["model.embed_tokens.weight"],
        "runs": {0: layers},
        "norm": {"scale": tensors["model.norm.weight"]},
    }
    if not config.tie_word_embeddings:
        params["head"] = tensors["lm_head.weight"].T
    return config, jax.tree.map(jnp.asarray, params)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_dense"])
def test_logits_equal_transformers(name):
    if not GOLDEN.is_dir():
        pytest.skip("../shared/data/golden_qwen3_tiny is not here")
    config, params = read(GOLDEN / name)
    golden = np.load(GOLDEN / name / "golden.npz")
    mask = golden["attention_mask"].astype(np.int32)
    tokens = golden["input_ids"].astype(np.int32)
    hidden, _ = jax.jit(transformer.apply, static_argnums=1)(params, config, tokens, mask)
    gap = np.abs(np.asarray(transformer.logits(params, hidden)) - golden["logits"])
    assert gap[mask == 1].max() < 1e-4
