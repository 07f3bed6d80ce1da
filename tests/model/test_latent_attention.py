"""Latent attention: shared prompts, its cache, and what is refused. `test_transformer.py` has the float64 loops."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import AXES, decoding, find_mismatches, make_inference_weights, sampler_sizes, transformer

from gspax.config import Latent, Sampling, layers_of
from gspax.config.model import architecture_problems

MODEL = tiny.CONFIGS["latent attention"]
PLAIN = replace(MODEL, latent=replace(MODEL.latent, query_rank=0), rope_scaling=None, rope_interleaved=False)
apply = jax.jit(transformer.apply, static_argnames=("config", "mesh"))


@pytest.mark.parametrize(
    "model", [MODEL, pytest.param(PLAIN, marks=pytest.mark.slow)], ids=["queries of a rank", "plain"]
)
def test_segments_that_continue_a_prompt_equal_rows_of_their_own(model):
    params, tokens_BT = tiny.params(model), np.random.default_rng(0).integers(0, 23, (1, 16), dtype=np.int32)
    segment_BT = np.repeat([[1, 2, 3]], [5, 6, 5], axis=1).astype(np.int32)
    prefix_BT = np.where(segment_BT > 1, 1, 0).astype(np.int32)
    hidden_BTD, _ = apply(params, model, tokens_BT, segment_BT, mesh=tiny.one_device(), prefix_BT=prefix_BT)
    for number in (2, 3):
        own = np.flatnonzero(np.isin(segment_BT[0], (1, number)))
        alone_BTD, _ = apply(params, model, tokens_BT[:, own], np.ones((1, len(own)), np.int32), mesh=tiny.one_device())
        np.testing.assert_allclose(hidden_BTD[:, own], alone_BTD, atol=1e-5)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_the_cache_is_one_vector_of_each_token_and_the_plan_says_so(dtype):
    sampling = Sampling(prompts=2, group=3, max_prompt_tokens=7, max_tokens=5, kv_cache_dtype=dtype)
    mesh, lengths = tiny.one_device(), jnp.array([7, 2])
    tokens_PS = np.zeros((2, 7), np.int32)

    def fill(params):
        weights = make_inference_weights(params, MODEL, mesh)
        _, prompts, _ = decoding.prefill(weights, MODEL, tokens_PS, lengths, kv_cache_dtype=dtype, mesh=mesh)
        return prompts, decoding.new_cache(prompts, MODEL, 6, 5, kv_cache_dtype=dtype, mesh=mesh)

    prompts, cache = jax.eval_shape(fill, tiny.params(MODEL))
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(prompts)} == {(2, 1)}, "one head"
    sizes = sampler_sizes(MODEL, sampling, dict.fromkeys(AXES, 1) | {"tensor": 4})  # the latent is on each device
    per_token = 3 * (4 * (6 + 4) if dtype == "auto" else 6 + 4 + 4)
    assert sizes.position == per_token
    held = [jax.tree.leaves(prompts), jax.tree.leaves([layer.completion for layer in cache])]
    prompt_bytes, bytes_ = (sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for leaves in held)
    assert prompt_bytes == sizes.prompt_cache == 2 * 7 * per_token and bytes_ == 6 * 5 * per_token


def test_the_published_cache_of_a_token():
    """DeepSeek-V3: 576 numbers in each of 61 layers, where keys and values of 128 heads would be 40,960."""
    model = replace(MODEL, num_attention_heads=128, num_key_value_heads=128, head_dim=64, num_hidden_layers=61)
    model = replace(model, latent=Latent(rank=512, query_rank=1536, nope_dim=128, value_dim=128), dtype="bfloat16")
    sizes = sampler_sizes(model, Sampling(), dict.fromkeys(AXES, 1))
    assert sizes.position == 61 * 576 * 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"qk_norm": True}, "model.qk_norm: wanted False with latent attention, got True"),
        ({"num_key_value_heads": 2}, "model.num_key_value_heads: wanted 4 with latent attention, got 2"),
        ({"norm_place": "after"}, "model.norm_place: wanted before with latent attention, got after"),
        ({"sliding_window": 4}, "model.sliding_window: wanted 0 with latent attention, got 4"),
    ],
)
def test_what_latent_attention_does_not_have(changes, sentence):
    assert list(architecture_problems(replace(MODEL, **changes))) == [sentence]


def test_a_mesh_divides_ranks_and_heads():
    found = list(find_mismatches(dict.fromkeys(AXES, 1) | {"fsdp": 4, "tensor": 8}, MODEL))
    wanted = ("latent.rank", "latent.query_rank", "num_attention_heads")
    assert {name for name in wanted if any(re.match(f"model.{re.escape(name)}:", line) for line in found)} == {*wanted}


def test_flops_are_those_of_the_unabsorbed_form():
    """Scores of 10 numbers and values of 8, for 4 heads and half of 100 keys: 2 FLOPs each."""
    assert layers_of(MODEL)[0].mixer.flops(100) == 2 * 4 * (10 + 8) * 50
