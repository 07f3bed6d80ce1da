"""Determinism, log-probs and filters of the sampler."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from api import make_inference_weights, sampler, sharding, token_sampling, transformer

from gspax import losses
from gspax.config import Mesh, Sampling
from gspax.errors import UserError
from gspax.sampler.inference_weights import convert

CONFIG = tiny.first_layers(tiny.MOE, 2)
SAMPLING = Sampling(group=3, max_prompt_tokens=16, max_tokens=10)
NARROW = replace(SAMPLING, temperature=0.6, top_k=2)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2]]
STOP = (11, 17)


@pytest.fixture(scope="module")
def params():
    return tiny.params(CONFIG)


def generate(params, prompts=PROMPTS, ids=None, seed=0, sampling=SAMPLING, stop_ids=STOP, mesh=None):
    ids = range(len(prompts)) if ids is None else ids
    key = jax.random.key(seed)
    options = tiny.options(CONFIG, sampling, stop_ids, mesh)
    weights = make_inference_weights(params, CONFIG, options.mesh)
    return jax.device_get(sampler.sample(weights, prompts, ids, key, options))


def completion(rollout, row):
    start = rollout.prompt_length_B[row]
    return rollout.tokens_BT[row, start : start + rollout.length_B[row]].tolist()


@jax.jit
def learner_logp(params, tokens, segment, temperature):
    hidden, _ = transformer.apply(params, CONFIG, tokens, segment, mesh=tiny.one_device())
    return losses.token_logp(transformer.logits(params, hidden) / temperature, tokens)


@pytest.mark.parametrize("sampling", [SAMPLING, NARROW])
def test_log_probs_equal_the_learners(params, sampling):
    rollout = generate(params, sampling=sampling)
    total = rollout.prompt_length_B + rollout.length_B
    segment = (np.arange(rollout.tokens_BT.shape[1])[None] < total[:, None]).astype(np.int32)
    logp = learner_logp(params, rollout.tokens_BT, segment, sampling.temperature)
    assert np.abs(rollout.logp_BT[rollout.mask_BT]).min() > 0
    np.testing.assert_allclose(rollout.logp_BT[rollout.mask_BT], np.asarray(logp)[rollout.mask_BT], atol=1e-5)


def test_rows_are_prompt_then_completion_then_padding(params):
    rollout = generate(params)
    for row in range(12):
        prompt, length = PROMPTS[row // 3], rollout.length_B[row]
        tokens, mask = rollout.tokens_BT[row], rollout.mask_BT[row]
        end = len(prompt) + length
        assert tokens[: len(prompt)].tolist() == prompt and rollout.prompt_length_B[row] == len(prompt)
        assert np.flatnonzero(mask).tolist() == list(range(len(prompt), end))
        assert not tokens[end:].any() and not rollout.logp_BT[row][~mask].any()
        sampled = completion(rollout, row)
        stopped = [token in STOP for token in sampled]
        assert not any(stopped[:-1])
        assert rollout.finished_B[row] == stopped[-1]
        assert stopped[-1] or length == SAMPLING.max_tokens
    assert 0 < rollout.finished_B.sum() < 12, "the seed should give finished and truncated rows"


def test_a_sampled_token_0_is_in_the_mask(params):
    rollout = generate(params, seed=3, stop_ids=())
    assert rollout.mask_BT.sum() == 12 * SAMPLING.max_tokens
    assert (rollout.tokens_BT[rollout.mask_BT] == 0).any(), "the seed should sample token 0"


def test_a_sample_depends_only_on_key_prompt_id_and_position(params):
    whole = generate(params)
    part = generate(params, prompts=[PROMPTS[2], PROMPTS[0], [20, 21], [20, 21]], ids=[2, 0, 3, 3])
    for row in range(3):
        assert completion(part, row) == completion(whole, 6 + row)
        assert completion(part, 3 + row) == completion(whole, row)
    other_ids = generate(params, ids=[4, 5, 6, 7])
    other_key = generate(params, seed=1)
    assert all(completion(other, 0) != completion(whole, 0) for other in (other_ids, other_key))
    assert len({tuple(completion(whole, row)) for row in range(3)}) == 3, "samples of one prompt differ"


def test_sampling_continues_from_any_prefix_of_a_sample(params):
    whole = generate(params, stop_ids=())
    for sample in range(3):
        sampled = [completion(whole, 3 * prompt + sample) for prompt in range(4)]
        longer = [PROMPTS[prompt] + sampled[prompt][: prompt + 1] for prompt in range(4)]
        again = generate(params, prompts=longer, stop_ids=())
        for prompt in range(4):
            assert completion(again, 3 * prompt + sample)[: 9 - prompt] == sampled[prompt][prompt + 1 :]


def test_a_higher_token_limit_extends_the_same_samples(params):
    short = generate(params, stop_ids=())
    longer = generate(params, stop_ids=(), sampling=replace(SAMPLING, max_tokens=14))
    for row in range(12):
        assert completion(longer, row)[: SAMPLING.max_tokens] == completion(short, row)


def test_another_prompt_length_does_not_recompile(params):
    generate(params)
    compiled = sampler._generate._cache_size()
    generate(params, prompts=[[1] * 16, [3], [2] * 9, [5] * 2])
    assert sampler._generate._cache_size() == compiled


def test_prompts_longer_than_the_first_bucket(params):
    sampling = replace(SAMPLING, max_prompt_tokens=40)
    limit = tiny.options(CONFIG, replace(SAMPLING, prompts=1, max_prompt_tokens=40))
    assert sampler.place_prompts([[1] * 17], [0], limit).tokens_PS.shape == (1, 32)
    assert sampler.place_prompts([[1] * 33], [0], limit).tokens_PS.shape == (1, 40)
    assert completion(generate(params, sampling=sampling), 0) == completion(generate(params), 0)


@pytest.mark.slow  # test_mesh.py has others
def test_eight_devices_sample_the_same_tokens(params):
    mesh = sharding.make_mesh(Mesh(data=2, fsdp=4))
    prompts = [[1, 2, 3]] * 8
    alone, spread = generate(params, prompts=prompts), generate(params, prompts=prompts, mesh=mesh)
    np.testing.assert_array_equal(alone.tokens_BT, spread.tokens_BT)
    np.testing.assert_allclose(alone.logp_BT, spread.logp_BT, atol=1e-5)


def test_on_a_mesh_experts_run_under_shard_map_in_prefill_and_decode(params):
    mesh = sharding.make_mesh(Mesh())

    def run(params):
        key, weights = jax.random.key(0), convert(params, CONFIG)
        return sampler.sample(weights, [[1]] * 8, range(8), key, tiny.options(CONFIG, SAMPLING, STOP, mesh))

    assert tiny.primitives(run, params).count("shard_map") == 4 * CONFIG.num_hidden_layers + 2, (
        "attention and experts of each layer, in prefill and decode; what the slots hold, before and after a token"
    )


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "problem 41: wanted a prompt of 1 to 16"),
        ([[1] * 17], "problem 40: wanted a .* of 1 to 16 .* got 17"),
    ],
)
def test_prompts_of_invalid_length_are_rejected_with_their_problem_index(params, prompts, message):
    with pytest.raises(UserError, match=message):
        generate(params, prompts=prompts, ids=range(40, 40 + len(prompts)))


def test_rows_that_do_not_divide_over_the_devices_are_rejected(params):
    with pytest.raises(UserError, match="multiples of 8 devices, got 4 prompts x 3 samples = 12"):
        generate(params, mesh=sharding.make_mesh(Mesh()))


@pytest.mark.parametrize("size", [1, 2, 6, 31, 96, 257])  # blocks of 1, 1, 2, 1, 8 and 1 tokens
@pytest.mark.parametrize("top_k", [0, 5])
def test_tokens_follow_the_distribution_at_the_temperature(size, top_k):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=size) * 1.5, jnp.float32)
    rows = 20_000
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(0), jnp.arange(rows))
    sampling = Sampling(temperature=0.7, top_k=top_k)
    token, logp = token_sampling.sample_tokens(jnp.tile(logits[None], (rows, 1)), keys, sampling)
    prob = np.asarray(jax.nn.softmax(logits / 0.7), np.float64)
    np.testing.assert_allclose(logp, np.log(prob)[np.asarray(token)], atol=1e-5)
    kept = np.argsort(-prob)[: top_k or size]
    expected = np.zeros(size)
    expected[kept] = prob[kept] / prob[kept].sum()
    sampled = np.bincount(token, minlength=size)
    assert sampled[expected == 0].sum() == 0
    assert (np.abs(sampled - rows * expected) <= 5 * np.sqrt(rows * expected) + 1).all()


def test_a_vocabulary_sharded_over_devices_is_drawn_from_without_gathering_it():
    mesh, rows, size = sharding.make_mesh(Mesh(tensor=4)), 8, 4 * 1187  # Qwen3's vocabulary is 2^7 x 1187, too
    logits = jax.random.normal(jax.random.key(0), (rows, size))
    keys = jax.random.split(jax.random.key(1), rows)
    placed = jax.device_put(logits, sharding.named_sharding(mesh, "batch", "vocab"))
    compiled = jax.jit(lambda *arrays: token_sampling.sample_tokens(*arrays, Sampling())).lower(placed, keys).compile()
    received = re.findall(r"= \(?f32\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute)\(", compiled.as_text())
    assert max((math.prod(map(int, shape.split(","))) for shape in received), default=0) < rows * size // 8
    token, logp = compiled(placed, keys)
    expected, expected_logp = token_sampling.sample_tokens(logits, keys, Sampling())
    np.testing.assert_array_equal(token, expected)
    np.testing.assert_allclose(logp, expected_logp, atol=1e-5)


def test_temperature_zero_is_greedy():
    logits = jnp.array([[0.0, 2.0, 1.0], [3.0, -1.0, 2.5]])
    keys = jax.random.split(jax.random.key(0), 2)
    token, logp = token_sampling.sample_tokens(logits, keys, Sampling(temperature=0.0))
    assert token.tolist() == [1, 0]
    np.testing.assert_allclose(logp, jax.nn.log_softmax(logits).max(axis=-1), atol=1e-6)


@pytest.mark.parametrize("top_k", [0, 1, 4, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.75, 0.2, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 0.9])
def test_filters_keep_the_tokens_computed_by_hand(top_k, top_p, min_p):
    logits = np.random.default_rng(1).normal(size=(5, 12)).astype(np.float32) * 2
    filtered = np.asarray(
        token_sampling.filter_logits(jnp.asarray(logits), Sampling(top_k=top_k, top_p=top_p, min_p=min_p))
    )
    for row in range(5):
        assert set(np.flatnonzero(np.isfinite(filtered[row]))) == reference.kept_tokens(
            logits[row], top_k, top_p, min_p
        )
        finite = np.isfinite(filtered[row])
        np.testing.assert_array_equal(filtered[row][finite], logits[row][finite])


def test_filtered_tokens_are_never_sampled(params):
    alike = [PROMPTS[0]] * 4
    free, narrow = generate(params, prompts=alike), generate(params, prompts=alike, sampling=NARROW)
    assert len({completion(free, row)[0] for row in range(12)}) > 2
    assert len({completion(narrow, row)[0] for row in range(12)}) == 2
