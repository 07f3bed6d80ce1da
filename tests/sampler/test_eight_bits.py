"""Sampling with 8 bits: log-probs are those of the rounded model, and the mismatch metrics show the difference."""

import functools
import math
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import tiny
from api import (
    InFlight,
    Quantized,
    adapters,
    decoding,
    init_state,
    low_rank,
    make_inference_weights,
    make_mesh,
    make_runtime,
    run_step,
    sampler,
    segments,
    transformer,
)
from eight_bits import rounded
from small_experiment import experiment

from gspax import losses
from gspax.config import Latent, Lora, Mesh, Sampling
from gspax.experiment import validate
from gspax.losses import correction
from gspax.model.kernels.weights import is_compound

SAMPLING = Sampling(group=4, max_prompt_tokens=16, max_tokens=10)
EIGHT = {"weights_dtype": "int8", "kv_cache_dtype": "int8"}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2]]


@partial(jax.jit, static_argnums=1)
def learner_logp(params, config, tokens, segment):
    hidden, _ = transformer.apply(params, config, tokens, segment, mesh=tiny.one_device())
    return losses.token_logp(transformer.logits(params, hidden), tokens)


@functools.cache
def generate(config, axes=(), lora=None, **settings):
    """A rollout on one device, or on a mesh with these (axis, size) pairs."""
    params = tiny.params(config) if lora is None else adapted(config, lora)
    sampling, mesh = replace(SAMPLING, **settings), tiny.one_device()
    if axes:
        devices = jax.devices()[: math.prod(size for _, size in axes)]
        mesh = make_mesh(Mesh(**{"fsdp": 1} | dict(axes)), devices, config)
    weights = make_inference_weights(params, config, mesh, sampling.weights_dtype)
    options = tiny.options(config, sampling, (11, 17), mesh)
    return jax.device_get(sampler.sample(weights, PROMPTS, range(4), jax.random.key(0), options))


def adapted(config, lora):
    """Parameters with adapters that change them."""
    factors = jax.tree.map(lambda leaf: leaf + 0.05, adapters.init(config, lora, jax.random.key(1)))
    return adapters.attach_adapters(tiny.params(config), factors, lora)


def mismatch(config, learner_params, **settings):
    """|log-prob of the sampler - log-prob of the learner| of each sampled token, with these settings of the sampler."""
    rollout = generate(config, **settings)
    total_B = rollout.prompt_length_B + rollout.length_B
    segment_BT = (np.arange(rollout.tokens_BT.shape[1])[None] < total_B[:, None]).astype(np.int32)
    logp_BT = learner_logp(learner_params, config, rollout.tokens_BT, segment_BT)
    return np.abs(rollout.logp_BT - logp_BT)[rollout.mask_BT]


def test_an_empty_cache_is_not_rounded():
    """XLA would find the largest of all its zeros when it compiles, which takes seconds for a cache of some size."""
    values = jax.ShapeDtypeStruct((2, tiny.MOE.num_key_value_heads, 5, tiny.MOE.head_dim), np.float32)
    prompt = jax.eval_shape(partial(segments.make_segment, dtype="int8", kernel=False), values, values)

    def make():
        prompts, mesh = [(prompt,)] * tiny.MOE.num_hidden_layers, tiny.one_device()
        cache = decoding.new_cache(prompts, tiny.MOE, 4, 8, kv_cache_dtype="int8", mesh=mesh)
        return [layer.completion for layer in cache]

    assert jax.tree.leaves(jax.eval_shape(make))[0].dtype == np.int8
    assert "reduce_max" not in str(jax.make_jaxpr(make)())


@pytest.mark.parametrize("name", [pytest.param("dense", marks=pytest.mark.slow), "experts"])
def test_log_probs_are_those_of_the_rounded_model(name):
    config = tiny.first_layers(tiny.TOGETHER[name], 2)  # tied embeddings in one, experts and windows in the other
    assert mismatch(config, rounded(tiny.params(config), config), weights_dtype="int8").max() < 1e-4
    error = mismatch(config, tiny.params(config), **EIGHT, slots=5)
    assert 1e-3 < error.mean() < 0.05 and error.max() < 0.3, "0.016 and 0.09 when this was written"


def test_latents_in_8_bits():
    """One scale for a token; the projections of keys and values are absorbed with the scales of their weights."""
    config = tiny.first_layers(tiny.CONFIGS["latent attention"], 2)
    assert mismatch(config, rounded(tiny.params(config), config), weights_dtype="int8").max() < 1e-4
    error = mismatch(config, tiny.params(config), kv_cache_dtype="int8", slots=5)
    assert 1e-3 < error.mean() < 0.02 and error.max() < 0.2, "0.007 and 0.05 when this was written"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_weights_are_rounded_after_adapters_are_merged(name):
    config, lora = tiny.TOGETHER[name], Lora(rank=2)
    merged = low_rank.dense(adapted(config, lora))
    assert mismatch(config, rounded(merged, config), lora=lora, weights_dtype="int8").max() < 1e-4
    assert mismatch(config, rounded(tiny.params(config), config), lora=lora, weights_dtype="int8").mean() > 1e-2


EVEN = {  # sizes that divide over devices
    "dense": replace(tiny.TOGETHER["dense"], num_hidden_layers=2, sliding_layers=(1,), vocab_size=24),
    "experts": replace(tiny.TOGETHER["experts"], num_experts=4, vocab_size=24),
    "latents": replace(
        tiny.CONFIGS["latent attention"],
        **{"num_experts": 4, "vocab_size": 24, "num_hidden_layers": 2},
        latent=Latent(rank=8, query_rank=16, nope_dim=6, value_dim=8),
    ),
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "axes", "settings"),
    [
        ("dense", (), {"slots": 5, "chunk": 3}),
        ("dense", (("data", 2), ("context", 2)), {}),
        pytest.param("dense", (("data", 2), ("context", 2), ("tensor", 2)), {"slots": 8, "chunk": 3}, marks=SLOW),
        pytest.param("dense", (("fsdp", 4),), {"prefill_prompts": 1}, marks=SLOW),
        pytest.param("experts", (), {"slots": 5}, marks=SLOW),
        ("latents", (("expert", 2), ("context", 2), ("tensor", 2)), {"slots": 8, "prefill_prompts": 1}),
        pytest.param("latents", (("fsdp", 2), ("tensor", 4)), {}, marks=SLOW),
        pytest.param("experts", (("fsdp", 8),), {}, marks=SLOW),  # more devices than prompts
        pytest.param("experts", (("data", 2), ("expert", 4)), {}, marks=SLOW),
        pytest.param("experts", (("expert", 4), ("tensor", 2)), {"slots": 8, "chunk": 3}, marks=SLOW),
    ],
    ids=str,
)
def test_where_and_when_a_sample_is_drawn_changes_nothing(name, axes, settings):
    """Scales belong to a weight's output channel and to a token's head, which no layout and no slot divides."""
    config = EVEN[name]
    want, got = generate(config, **EIGHT), generate(config, axes, **EIGHT, **settings)
    np.testing.assert_array_equal(got.tokens_BT, want.tokens_BT)
    np.testing.assert_array_equal(got.length_B, want.length_B)
    np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=1e-3)  # a number may be rounded the other way
    assert np.abs(got.logp_BT - want.logp_BT).mean() < 1e-5


def test_matrices_are_in_8_bits_and_nothing_else():
    copies = {tied: replace(tiny.CONFIGS["biases"], tie_word_embeddings=tied) for tied in (True, False)}
    for tied, config in copies.items():
        copy = make_inference_weights(tiny.params(config), config, tiny.one_device(), weights_dtype="int8")
        leaves, _ = jax.tree_util.tree_flatten_with_path(copy, is_leaf=is_compound)
        names = {path[-1].key for path, leaf in leaves if isinstance(leaf, Quantized)}
        assert names == {"query", "key", "value", "out", "gate", "up", "down", "embedding" if tied else "head"}
        attention = copy["layers"][0]["attention"]
        assert attention["query"].scale.shape == (4, 8) and attention["out"].scale.shape == (16,)
        assert copy["layers"][0]["mlp"]["down"].scale.shape == (5, 16)
        assert (copy["embedding"] if tied else copy["head"]).scale.shape == (23,), "one for each token, the output"


def test_a_step_reports_the_mismatch_and_corrects_it():
    dense = replace(experiment.model, num_hidden_layers=1, num_experts=0, intermediate_size=32)
    eight = replace(experiment.sampling, **EIGHT)
    plain = replace(experiment, model=dense, warm_start=None, correction=partial(correction.truncate_tokens, cap=2.0))
    runtimes = [make_runtime(each) for each in (plain, replace(plain, sampling=eight))]
    state = partial(init_state, dense, runtimes[0].optimizer, jax.random.key(0), runtimes[0].mesh)
    # the same train step twice: only the sampler differs
    same = replace(runtimes[1], steps=runtimes[0].steps)
    without, found = (run_step(each, state(), InFlight())[1] for each in (runtimes[0], same))
    assert without["mismatch/abs_diff"] < 1e-5 < 1e-4 < found["mismatch/abs_diff"] < 0.1
    assert 0 < found["mismatch/k3"] < 0.01
    assert np.isfinite([found[name] for name in ("policy/loss", "optim/grad_norm")]).all()
    assert found["policy/correction_min"] < 0.999 < 1.001 < found["policy/correction_max"] < 2.0
    assert without["policy/correction_max"] == pytest.approx(1.0, abs=1e-5)


def test_other_names_of_dtypes_are_rejected():
    wrong = replace(experiment, sampling=replace(experiment.sampling, kv_cache_dtype="fp8"))
    assert validate(wrong) == ["sampling.kv_cache_dtype: wanted 'auto' or 'int8', got 'fp8'"]
