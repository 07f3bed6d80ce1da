"""The set that each token is chosen from: what filters keep, cut to a size, through slots, turns, and chunks."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from api import (
    Inputs,
    Prompts,
    forward,
    make_inference_weights,
    pad_replies,
    sampler,
    sharding,
    token_sampling,
    transformer,
)

from gspax.config import Mesh, Sampling, sampling_mask_size, token_id_dtype

MODEL = tiny.first_layers(tiny.MOE, 1)
FILTERS = [(0, 0.75, 0.0), (3, 1.0, 0.0), (0, 1.0, 0.1), (6, 0.9, 0.05), (0, 1e-6, 0.0)]


def random_logits(rows, size, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, size)) * 2, jnp.float32)


def random_keys(rows):
    return jax.random.split(jax.random.key(0), rows)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_sets_log_probs_and_tokens_by_hand(filters):
    logits, keys = random_logits(7, 12), random_keys(7)
    sampling = Sampling(temperature=0.7, mask_replay=12, **dict(zip(("top_k", "top_p", "min_p"), filters, strict=True)))
    size = sampling_mask_size(sampling, 12)
    assert size == (filters[0] or 12)
    token, logp, kept, cut = token_sampling.sample_from_sets(logits, keys, sampling, size)
    plain, _ = token_sampling.sample_tokens(logits, keys, sampling)
    np.testing.assert_array_equal(token, plain)
    assert kept.shape == (7, size) and not cut.any()
    for row in range(7):
        z = np.asarray(logits[row], np.float64) / 0.7
        wanted = reference.kept_tokens(z, *filters)
        assert set(kept[row].tolist()) - {12} == wanted
        ordered = [v for v in kept[row].tolist() if v < 12]
        assert ordered == sorted(wanted, key=lambda v: -z[v]), "the most probable first"
        assert kept[row].tolist()[len(wanted) :] == [12] * (size - len(wanted))
        np.testing.assert_allclose(logp[row], z[token[row]] - np.log(np.exp(z[ordered]).sum()), atol=2e-6)


def test_a_set_beyond_the_size_is_cut_and_sampled_from():
    """The cut set is the whole support of its tokens, and log-probs are over it."""
    rows, logits = 20_000, random_logits(1, 12)
    sampling = Sampling(temperature=0.7, top_p=0.99, mask_replay=3)
    keys = random_keys(rows)
    token, logp, kept, cut = token_sampling.sample_from_sets(jnp.tile(logits, (rows, 1)), keys, sampling, 3)
    z = np.asarray(logits[0], np.float64) / 0.7
    best = np.argsort(-z)[:3]
    assert cut.all() and (np.asarray(kept) == best).all()
    prob = np.exp(z[best]) / np.exp(z[best]).sum()
    sampled = np.bincount(token, minlength=12)
    assert sampled.sum() == sampled[best].sum()
    assert (np.abs(sampled[best] - rows * prob) <= 5 * np.sqrt(rows * prob)).all()
    np.testing.assert_allclose(np.exp(logp[:50]), [prob[list(best).index(v)] for v in token[:50]], rtol=1e-5)


def test_of_equal_logits_those_with_smaller_ids_are_kept():
    """Top-k alone keeps ties, so that a set could be larger than top_k."""
    logits, sampling = jnp.array([[1.0, 2.0, 1.0, 1.0, 0.0, 1.0]]), Sampling(top_k=3, mask_replay=6)
    for seed in range(8):
        token, logp, kept, cut = token_sampling.sample_from_sets(logits, random_keys(8)[seed : seed + 1], sampling, 3)
        assert kept.tolist() == [[1, 0, 2]] and cut.all() and int(token[0]) in (0, 1, 2)
        np.testing.assert_allclose(logp[0], logits[0, token[0]] - np.log(np.exp(2) + 2 * np.exp(1)), rtol=1e-6)


@pytest.mark.parametrize(("size", "dtype"), [(255, "uint8"), (256, "uint16"), (65_535, "uint16"), (65_536, "int32")])
def test_ids_have_the_smallest_dtype_that_holds_the_size_of_the_vocabulary(size, dtype):
    assert token_id_dtype(replace(tiny.MOE, vocab_size=size)) == dtype
    assert np.iinfo(dtype).max >= size


PROMPTS, STOP = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2]], (11, 17)
SAMPLING = Sampling(group=2, max_prompt_tokens=8, max_tokens=9, temperature=0.8, top_p=0.9, min_p=0.02, mask_replay=6)


@functools.cache
def generate(model=MODEL, mesh=None, mask_size=6, **settings):
    options = tiny.options(model, replace(SAMPLING, **settings), STOP, mesh, mask_size=mask_size)
    weights = make_inference_weights(tiny.params(model), model, options.mesh)
    return jax.device_get(sampler.sample(weights, PROMPTS, range(4), jax.random.key(0), options))


def assert_sets_are_the_filters(rollout, model=MODEL, sampling=SAMPLING, size=6):
    """The learner's logits give the same sets, and its log-probs over them are the sampler's."""
    params, mask = tiny.params(model), np.asarray(rollout.mask_BT)
    total = rollout.prompt_length_B + rollout.length_B
    segment = jnp.asarray(np.arange(mask.shape[1])[None] < np.asarray(total)[:, None], jnp.int32)
    tokens, kept = jnp.asarray(rollout.tokens_BT), jnp.asarray(rollout.kept_BTK)
    learner = tiny.settings(model, temperature=sampling.temperature)
    rows = Inputs(tokens, segment, mask_BT=jnp.asarray(mask), kept_BTK=kept)
    logp = forward(params, learner, rows).logp_BT
    np.testing.assert_allclose(rollout.logp_BT[mask], np.asarray(logp)[mask], atol=2e-6)
    hidden, _ = transformer.apply(params, model, tokens, segment, mesh=tiny.one_device())
    logits = np.asarray(transformer.logits(params, hidden), np.float64) / sampling.temperature
    cut = 0
    for row, column in np.argwhere(mask):
        z = logits[row, column - 1]
        wanted = reference.kept_tokens(z, sampling.top_k, sampling.top_p, sampling.min_p)
        cut += len(wanted) > size
        assert rollout.cut_BT[row, column] == (len(wanted) > size)
        found = [v for v in rollout.kept_BTK[row, column].tolist() if v < model.vocab_size]
        assert found == sorted(wanted, key=lambda v: -z[v])[:size] and rollout.tokens_BT[row, column] in found
    assert 0 < cut < mask.sum(), "sets of both kinds"


def test_a_rollout_has_the_set_of_each_token():
    rollout = generate()
    assert rollout.kept_BTK.dtype == np.uint8
    assert_sets_are_the_filters(rollout)


def test_a_rollout_without_sets_has_the_same_tokens_where_none_is_cut():
    wide, without = generate(mask_size=23), generate(mask_size=0)
    assert without.kept_BTK is None and without.cut_BT is None and not wide.cut_BT.any()
    np.testing.assert_array_equal(wide.tokens_BT, without.tokens_BT)
    assert (wide.logp_BT >= without.logp_BT).all() and (wide.logp_BT > without.logp_BT).any()


@pytest.mark.parametrize(
    "settings", [{"slots": 3}, pytest.param({"chunk": 2}, marks=pytest.mark.slow)], ids=["slots", "chunks"]
)
def test_sets_do_not_depend_on_slots_and_chunks(settings):
    wanted, got = generate(), generate(**settings)
    np.testing.assert_array_equal(got.tokens_BT, wanted.tokens_BT)
    np.testing.assert_array_equal(got.kept_BTK[wanted.mask_BT], wanted.kept_BTK[wanted.mask_BT])
    np.testing.assert_array_equal(got.cut_BT, wanted.cut_BT)
    np.testing.assert_allclose(got.logp_BT, wanted.logp_BT, atol=1e-5)


@pytest.mark.parametrize(
    "axes", [Mesh(fsdp=2, tensor=2), pytest.param(Mesh(data=2, context=2, tensor=2), marks=pytest.mark.slow)], ids=str
)
def test_sets_do_not_depend_on_the_mesh(axes):
    """With the vocabulary sharded over two devices."""
    model, mesh = replace(MODEL, vocab_size=24), sharding.make_mesh(axes, jax.devices()[: 8 if axes.data > 1 else 4])
    wanted, got = generate(model), generate(model, mesh)
    np.testing.assert_array_equal(got.tokens_BT, wanted.tokens_BT)
    np.testing.assert_array_equal(got.kept_BTK[wanted.mask_BT], wanted.kept_BTK[wanted.mask_BT])
    np.testing.assert_allclose(got.logp_BT, wanted.logp_BT, atol=1e-5)


def test_turns_after_replies_have_their_sets():
    model, rng, key = MODEL, np.random.default_rng(0), jax.random.key(1)
    sampling, stops = replace(SAMPLING, prompts=3, max_tokens=30), (0, 1, 2, 3)
    options = tiny.options(model, sampling, stops, turns=True, mask_size=6)
    weights = make_inference_weights(tiny.params(model), model, tiny.one_device())
    tokens = rng.integers(4, 23, (3, 8)).astype(np.int32)
    prompts = Prompts(tokens, np.array([3, 8, 5], np.int32), np.array([14, 16, 18], np.uint32))
    state, _ = sampler.start(weights, prompts, key, options=options)
    for _ in range(2):
        state, _ = sampler.advance_chunk(weights, state, key, 0, options=options)
        replies = [rng.integers(4, 23, rng.integers(1, 7)).tolist() for _ in range(6)]
        state, _ = sampler.resume(weights, state, pad_replies(replies), key, 0, options=options)
    state, _ = sampler.advance_chunk(weights, state, key, 0, options=options)
    rollout = jax.device_get(sampler.assemble(tokens, state, options=options))
    assert (rollout.reply_B > 0).all()
    assert_sets_are_the_filters(rollout, sampling=sampling)
