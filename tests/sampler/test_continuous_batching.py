"""Slots, their order and their number decide when a sample is sampled, never what."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import adapters, decoding, make_inference_weights, sampler, segments, transformer

from gspax.config import Lora, Sampling
from gspax.sampler.inference_weights import convert

SAMPLING = Sampling(group=3, max_prompt_tokens=16, max_tokens=10)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2]]
STOP = (11, 17)
CONFIGS = {
    "experts and windows": tiny.first_layers(tiny.TOGETHER["experts"], 2),
    "dense": tiny.first_layers(tiny.TOGETHER["dense"], 2),
    "bfloat16": replace(tiny.first_layers(tiny.MOE, 2), dtype="bfloat16"),
}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT", 4)  # of 10 positions: three


@functools.cache
def generate(config, slots=0, lora=None, **settings):
    params = tiny.params(config) if lora is None else adapted(config, lora)
    weights, sampling = (
        make_inference_weights(params, config, tiny.one_device()),
        replace(SAMPLING, slots=slots, **settings),
    )
    options = tiny.options(config, sampling, STOP, keep_experts=True)
    return jax.device_get(sampler.sample(weights, PROMPTS, range(4), jax.random.key(0), options))


def adapted(config, lora):
    """Parameters with adapters that change them."""
    leaves, tree = jax.tree.flatten(adapters.init(config, lora, jax.random.key(0)))
    leaves = [jax.random.normal(jax.random.key(n), leaf.shape) * 0.3 for n, leaf in enumerate(leaves)]
    return adapters.attach_adapters(tiny.params(config), jax.tree.unflatten(tree, leaves), lora)


def test_greedy_and_sampled_completions_are_drawn_side_by_side():
    config = CONFIGS["experts and windows"]
    weights, key = make_inference_weights(tiny.params(config), config, tiny.one_device()), jax.random.key(0)
    options = tiny.options(config, replace(SAMPLING, group=4, slots=5), STOP, greedy=1)
    rollout = jax.device_get(sampler.sample(weights, PROMPTS, range(4), key, options))
    is_greedy_B = np.arange(16) % 4 == 3
    got, want = (jax.tree.map(lambda x, rows=rows: x[rows], rollout) for rows in (~is_greedy_B, is_greedy_B))
    assert_same(got, generate(config))
    segment_BT = (np.arange(26)[None] < (want.prompt_length_B + want.length_B)[:, None]).astype(np.int32)
    hidden_BTD, _ = transformer.apply(
        tiny.params(config), config, jnp.asarray(want.tokens_BT), jnp.asarray(segment_BT), mesh=tiny.one_device()
    )
    logp_BTV = jax.nn.log_softmax(transformer.logits(tiny.params(config), hidden_BTD))
    best_BT = np.pad(logp_BTV.max(axis=-1)[:, :-1], ((0, 0), (1, 0)))
    np.testing.assert_allclose(want.logp_BT[want.mask_BT], best_BT[want.mask_BT], atol=1e-5)


def assert_same(got, want, tolerance=1e-5):
    for name in ("tokens_BT", "mask_BT", "prompt_length_B", "length_B", "finished_B"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=tolerance)


@pytest.mark.parametrize(
    "name", [name if name.startswith("experts") else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_samples_do_not_depend_on_the_slots(name):
    want = generate(CONFIGS[name])
    assert len(np.unique(want.length_B)) > 1 and 0 < want.finished_B.sum() < 12, "samples of several lengths"
    assert_same(generate(CONFIGS[name], slots=5), want, 5e-3 if name == "bfloat16" else 1e-5)


@pytest.mark.parametrize("chunk", [3, pytest.param(1, marks=pytest.mark.slow)])  # of 4 prompts: 2 and 2
def test_samples_do_not_depend_on_the_chunks_of_the_prefill(chunk):
    config = CONFIGS["experts and windows"]
    want, got = generate(config), generate(config, prefill_prompts=chunk)
    assert_same(got, want)
    np.testing.assert_array_equal(got.expert_BLTA, want.expert_BLTA)


def test_the_memory_of_a_prefill_in_chunks_does_not_grow_with_the_prompts():
    config = replace(CONFIGS["dense"], num_hidden_layers=1, sliding_layers=(), sliding_window=0)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def prefill(params, prompts, chunk):
        tokens_PS = jnp.ones((prompts, 64), jnp.int32)
        return decoding.prefill(params, config, tokens_PS, jnp.full(prompts, 64), chunk=chunk, mesh=tiny.one_device())

    def peak(prompts, chunk):
        params = convert(tiny.params(config), config)
        return prefill.lower(params, prompts, chunk).compile().memory_analysis().temp_size_in_bytes

    assert peak(64, 4) < 1.2 * peak(16, 4) < 0.5 * peak(64, 0)


@pytest.mark.slow
def test_samples_of_adapted_parameters_do_not_depend_on_the_slots():
    config = CONFIGS["experts and windows"]
    want = generate(config, lora=Lora(rank=2))
    assert not np.array_equal(want.tokens_BT, generate(config).tokens_BT)
    assert_same(generate(config, slots=5, lora=Lora(rank=2)), want)


@pytest.mark.slow
def test_one_slot_draws_one_sample_after_another():
    assert_same(generate(CONFIGS["dense"], slots=1), generate(CONFIGS["dense"]))


@pytest.mark.parametrize("slots", [5, pytest.param(0, marks=pytest.mark.slow)])
def test_the_recorded_experts_are_those_of_the_learner(slots):
    config = tiny.TOGETHER["experts"]
    rollout = generate(config, slots=slots)
    total_B = rollout.prompt_length_B + rollout.length_B
    index_1T = np.arange(rollout.tokens_BT.shape[1])[None]
    segment_BT = (index_1T < total_B[:, None]).astype(np.int32)
    _, routing = jax.jit(transformer.apply, static_argnames=("config", "mesh"))(
        tiny.params(config), config, jnp.asarray(rollout.tokens_BT), jnp.asarray(segment_BT), mesh=tiny.one_device()
    )
    decoded_BT = index_1T < total_B[:, None] - 1  # the last token is sampled, not decoded
    wanted = np.where(decoded_BT[:, None, :, None], np.swapaxes(routing.expert, 0, 1), config.num_experts)
    assert rollout.expert_BLTA.dtype == np.uint8
    np.testing.assert_array_equal(rollout.expert_BLTA, wanted)


@pytest.mark.parametrize("dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow)])
def test_weights_may_be_renewed_between_two_chunks(dtype):
    """Up to then the tokens are those of the first weights; each token has the version that drew it."""
    config = replace(tiny.MOE, num_hidden_layers=1)
    first, second = (
        make_inference_weights(tiny.params(config, seed), config, tiny.one_device(), dtype) for seed in (0, 1)
    )

    def run(later):
        sampling, key = replace(SAMPLING, slots=5, chunk=3, kv_cache_dtype=dtype), jax.random.key(0)
        options = replace(tiny.options(config, sampling, STOP), keep_versions=True)
        options = sampler.split_rows(options, len(PROMPTS))
        prompts = sampler.place_prompts(PROMPTS, range(4), options)
        state, progress = sampler.start(first, prompts, key, options=options)
        state, progress = sampler.advance_chunk(first, state, key, 0, options=options)
        while progress.left:
            state, progress = sampler.advance_chunk(later, state, key, 7, options=options)
        return jax.device_get(sampler.assemble(prompts.tokens_PS, state, options=options))

    want, got = run(first), run(second)
    assert set(np.unique(got.version_BT)) == {0, 7}
    drawn_first_BT = got.mask_BT & (np.cumsum(got.mask_BT, axis=1) == 1)
    assert (got.version_BT[drawn_first_BT] == 0).all()
    early_BT = want.mask_BT & (want.version_BT == 0)
    np.testing.assert_array_equal(got.tokens_BT[early_BT], want.tokens_BT[early_BT])
    assert not np.array_equal(got.tokens_BT, want.tokens_BT)
