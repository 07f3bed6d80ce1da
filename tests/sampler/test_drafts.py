"""Drafts decide how many tokens a pass gives, never which."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import make_inference_weights, make_mesh, sampler, segments
from small_experiment import experiment

from gspax.config import Mesh, Sampling
from gspax.experiment import validate
from gspax.sampler import drafts

SAMPLING = Sampling(group=3, max_prompt_tokens=16, max_tokens=12)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2]]
STOPS = (11, 17)
MODELS = {name: tiny.first_layers(tiny.CONFIGS[name], 2) for name in ("dense", "latent attention")}
MODELS |= {"experts": tiny.first_layers(tiny.TOGETHER["experts"], 2)}
MODELS |= {"delta": replace(tiny.DELTA, num_hidden_layers=2, delta_layers=(0,))}


@functools.cache
def generate(name, texts="none", stops=STOPS, greedy=0, keep_experts=True, mask_size=0, segment=5, **settings):
    """A rollout; `texts` are those that drafts come from, of the same samples without drafts.

    The cache of 12 positions has three segments of five: a program has a branch for each number of them.
    """
    config = MODELS[name]
    params = make_inference_weights(
        tiny.params(config), config, tiny.one_device(), settings.get("weights_dtype", "auto")
    )
    sampling = replace(SAMPLING, **settings)
    options = tiny.options(config, sampling, stops, greedy=greedy, keep_experts=keep_experts, mask_size=mask_size)
    earlier = ()
    if texts != "none":
        same = {"stops": stops, "greedy": greedy, "mask_size": mask_size, "segment": segment}
        plain = generate(name, **same, **settings | {"drafts": 0, "draft_cost": 0.0})
        earlier = [[*map(TEXTS[texts], group)] for group in grouped(completions(plain), sampling.group)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT", segment)
        rollout = sampler.sample(params, PROMPTS, range(4), jax.random.key(0), options, earlier=earlier)
        return jax.device_get(rollout)


def completions(rollout):
    ends = rollout.prompt_length_B + rollout.length_B
    rows = zip(rollout.tokens_BT, rollout.prompt_length_B, ends, strict=True)
    return [tokens[start:end] for tokens, start, end in rows]


def grouped(rows, size):
    return [rows[first : first + size] for first in range(0, len(rows), size)]


TEXTS = {
    "same": lambda text: text,
    "with errors": lambda text: np.where(np.arange(len(text)) % 4 == 3, 19, text),
    "longer": lambda text: np.concatenate([text, text, text]),
    "wrong": lambda text: (text + 1) % 20,
}


def assert_same(got, want, tolerance=1e-5):
    for name in ("tokens_BT", "mask_BT", "length_B", "finished_B", "expert_BLTA", "kept_BTK", "cut_BT"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=tolerance)


CASES = {
    "experts, slots": ("experts", {"slots": 5}, 1e-5),
    "greedy rows": ("dense", {"group": 4, "greedy": 1}, 1e-5),
    "latent attention": ("latent attention", {}, 1e-5),
    "gated delta nets": ("delta", {"slots": 5}, 5e-5),
    "chunks, filters": (
        "dense",
        {"chunk": 1, "slots": 3, "top_k": 4, "temperature": 0.8, "mask_size": 3},
        1e-5,
    ),
    "a cache in 8 bits": ("dense", {"kv_cache_dtype": "int8", "weights_dtype": "int8"}, 0.05),
    "drafts while they pay": ("dense", {"slots": 5, "draft_cost": 1.2, "max_tokens": 24}, 1e-5),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("texts", ["none", "same", "with errors", "longer"])
def test_samples_are_those_without_drafts(case, texts):
    name, settings, tolerance = CASES[case]
    want = generate(name, **settings | {"draft_cost": 0.0})
    got = generate(name, texts, drafts=3, **settings)
    assert len(np.unique(want.length_B)) > 1 and 0 < want.finished_B.sum() < 12, "samples of several lengths"
    assert_same(got, want, tolerance)
    assert (got.passes_B <= want.length_B).all() and want.passes_B is None
    if (
        texts == "same" and "draft_cost" not in settings
    ):  # the first token is the prefill's; then four in each pass, of equal drafts
        short_B = np.ceil((want.length_B - 1) / 4) + 1
        assert (got.passes_B >= short_B).all() and got.passes_B.sum() < 1.15 * short_B.sum()


def test_passes_have_drafts_while_these_give_more_tokens_than_they_cost():
    """The most is k + 1 tokens, the least 1; between them it depends on how many drafts were right."""

    length = 48

    def passes(texts, cost):
        settings = {"drafts": 3, "slots": 3, "max_tokens": length, "draft_cost": cost}
        return generate("dense", texts, stops=(), segment=64, **settings).passes_B

    assert (passes("same", 4.0) == length).all(), "no pass has drafts"
    right, wrong = passes("same", 1.5), passes("wrong", 1.5)
    assert right.sum() < 0.8 * length * len(right), "they start once drafts are seen to be right"
    always = passes("same", 0.0)
    assert (right > always).all() and wrong.sum() > 0.95 * length * len(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"data": 2, "context": 2, "tensor": 2}, {"fsdp": 8}], ids=["all axes", "groups split"]
)
def test_samples_on_a_mesh_are_those_of_one_device_without_drafts(axes):
    config, key = replace(tiny.TOGETHER["experts"], vocab_size=24), jax.random.key(0)
    sampling = replace(SAMPLING, group=4, slots=0 if "data" in axes else 8)

    def sample(mesh, drafted, texts=()):
        options = tiny.options(config, replace(sampling, drafts=drafted), STOPS, mesh, keep_experts=True)
        params = make_inference_weights(tiny.params(config), config, mesh)
        return jax.device_get(sampler.sample(params, PROMPTS, range(4), key, options, earlier=texts))

    want = sample(tiny.one_device(), 0)
    texts = [[*map(TEXTS["with errors"], group)] for group in grouped(completions(want), 4)]
    got = sample(make_mesh(Mesh(**{"fsdp": 1} | axes), jax.devices()[:8]), 3, texts)
    assert_same(got, want)
    assert got.passes_B.sum() < want.length_B.sum()


@pytest.mark.parametrize(("group", "texts"), [(1, 1), (4, 3), (2, 2)])
def test_drafts_are_the_tokens_after_the_longest_match(group, texts, monkeypatch):
    """Against a loop over positions; texts of few different tokens have many matches."""
    monkeypatch.setattr(drafts, "TEXTS", texts)
    rng = np.random.default_rng(0)
    W, C, S, K = 40, 12, 6, 3
    for vocabulary in (2, 5):
        earlier = [rng.integers(0, vocabulary, rng.integers(0, C + 1)).tolist() for _ in range(W)]
        prompts = [rng.integers(0, vocabulary, rng.integers(1, S + 1)).tolist() for _ in range(W // group)]
        own = [rng.integers(0, vocabulary, rng.integers(1, C)).tolist() for _ in range(W)]
        (earlier_WC, _), (own_WC, length_W) = (sampler.pad_rows(rows, C) for rows in (earlier, own))
        earlier_WC[np.arange(C) >= np.array([*map(len, earlier)])[:, None]] = drafts.NONE
        prompt_PS, prompt_length_P = sampler.pad_rows(prompts, S)
        earlier_PGC = earlier_WC.reshape(-1, group, C)
        text_WH = drafts.join_texts(*map(jnp.asarray, (prompt_PS, prompt_length_P, earlier_PGC)))
        draft_WK, count_W = drafts.look_up(text_WH, texts, jnp.asarray(own_WC), jnp.asarray(length_W), K)
        got = [draft[:count].tolist() for draft, count in zip(draft_WK, count_W, strict=True)]
        for row in range(W):
            first = row // group * group
            of_group = [earlier[first + (row + number) % group] for number in range(texts)]
            assert got[row] == look_up(of_group, prompts[row // group], own[row], C, K)
        assert {*map(len, got)} == {0, 1, 2, 3} or vocabulary == 5


def look_up(earlier, prompt, own, C, K):
    """Of equal matches the nearest in an earlier text, its own first; else the latest in prompt and own tokens."""
    best, found = (0, -np.inf, 0), []
    for number, text in enumerate((*earlier, prompt, own)):
        for index in range(len(text) - 1):
            matched = 0
            while matched < min(4, index + 1, len(own)) and text[index - matched] == own[len(own) - 1 - matched]:
                matched += 1
            nearness = -abs(index - (len(own) - 1)) if number < len(earlier) else number * 100 - 2000 + index
            if (matched, nearness, -number) > best:
                best, found = (matched, nearness, -number), text[index + 1 : index + 1 + K]
    return found[: max(C - 1 - len(own), 0)] if best[0] else []


@pytest.mark.parametrize("noise", ["fresh", "problem"])
def test_samples_of_a_problem_come_again_with_its_noise_alone(noise):
    """Other indices, another order, other problems beside them, other slots, and drafts."""
    config = tiny.CONFIGS["dense"]
    params = make_inference_weights(tiny.params(config), config, tiny.one_device())

    def sample(prompts, first, texts=(), **settings):
        options = tiny.options(config, replace(SAMPLING, noise=noise, **settings), STOPS)
        ids = range(first, first + len(prompts))
        return jax.device_get(sampler.sample(params, prompts, ids, jax.random.key(0), options, earlier=texts))

    epoch, later = [sample(PROMPTS, 0), sample([PROMPTS[2], [9], PROMPTS[0]], 4, slots=4)]
    once, again = (grouped(completions(rollout), SAMPLING.group) for rollout in (epoch, later))
    same = [
        np.array_equal(new, old) for place in (0, 2) for new, old in zip(again[place], once[2 - place], strict=True)
    ]
    assert all(same) == (noise == "problem") and sum(same) in (0, len(same))
    assert len({tuple(row) for group in once for row in group}) == 12, "each sample has noise of its own"
    drafted = sample(PROMPTS, 8, once, drafts=3)
    if noise == "problem":
        assert_same(drafted, replace(epoch, passes_B=None))
        assert drafted.passes_B.sum() < 0.5 * epoch.length_B.sum()


def test_a_wrong_setting_is_one_sentence():
    many = replace(experiment, sampling=replace(experiment.sampling, drafts=32))
    assert "sampling.drafts: wanted at most 31, got 32" in validate(many)
    priced = replace(experiment, sampling=replace(experiment.sampling, draft_cost=1.5))
    assert "sampling.draft_cost: wanted 0 without sampling.drafts, got 1.5" in validate(priced)
    same = replace(experiment, sampling=replace(experiment.sampling, noise="same"))
    assert "sampling.noise: wanted 'fresh' or 'problem', got 'same'" in validate(same)
