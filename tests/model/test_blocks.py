"""Attention of a block of each slot's new tokens, against the reference in float64, on TPU in Pallas' interpreter."""

import importlib.util
import re
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import LayerCache, Slots, chips, decoding, make_mesh, programs, references, segments
from small_experiment import experiment

from gspax.config import NO_WINDOW, Mesh, Sampling
from gspax.model.kernels import decode_attention

P, G, N, K, M, H, S, C = 2, 4, 4, 2, 3, 8, 10, 9
PROMPT_LENGTH = np.repeat([10, 3], G)
FIRST, COUNT = np.array([0, 3, 6, 7, 8, 2, 5, 1]), np.array([3, 0, 3, 2, 1, 1, 3, 2])  # up to the cache's end


@pytest.mark.parametrize(
    ("kernel", "queries", "reads"), [(True, G * N * M * H, P), (True, 2 * N * M * H, 2 * P), (False, 0, P)]
)
def test_a_block_attends_to_prompt_completion_and_itself(kernel, queries, reads, monkeypatch):
    """And it reads each prompt once, or once for as many slots as the kernel holds."""
    rows, attend = [], segments.attend

    def count(q, cache, *args, **settings):
        rows.append(len(q))
        return attend(q, cache, *args, **settings)

    monkeypatch.setattr(segments, "decode_attention", partial(decode_attention.decode_attention, interpret=True))
    monkeypatch.setattr(segments, "attend", count)
    monkeypatch.setattr(segments, "SEGMENT", 4)
    monkeypatch.setattr(decoding, "MOST_QUERIES", queries)
    rng, W = np.random.default_rng(0), P * G
    shapes = (W, N, M, H), (W, K, M, H), (W, K, M, H), (P, K, S, H), (P, K, S, H), (W, K, C, H), (W, K, C, H)
    q, k, v, *cached, sinks = (rng.normal(size=shape).astype(np.float32) for shape in (*shapes, (N,)))
    slots = Slots(jnp.asarray(PROMPT_LENGTH), None, jnp.asarray(FIRST), jnp.asarray(COUNT))
    (k_prompt, v_prompt), (k_own, v_own) = cached[:2], cached[2:]
    cache = LayerCache(*(make_segments(*each, kernel) for each in ((k_prompt, v_prompt), (k_own, v_own))))
    got, after = decoding._attend_to_block(
        *map(jnp.asarray, (q, k, v)), cache, slots, jnp.asarray(sinks), window=NO_WINDOW, kernel=kernel
    )
    assert sorted(rows) == sorted([reads, W]), "a call for the prompts, and one for the completions"
    new = np.arange(M) < COUNT[:, None]
    place = np.nonzero(new)[0], (FIRST[:, None] + np.arange(M))[new]
    for own, block in ((k_own, k), (v_own, v)):
        own[place[0], :, place[1]] = block.swapaxes(1, 2)[new]
    wanted = make_segments(k_own, v_own, kernel)
    for one, other in zip(after.completion, wanted, strict=True):
        np.testing.assert_array_equal(one.k_XKHS, other.k_XKHS)
        np.testing.assert_array_equal(one.v_XKSH, other.v_XKSH)
    prompt = np.arange(S) < PROMPT_LENGTH[:, None, None]
    own = np.arange(C) <= (FIRST[:, None] + np.arange(M))[:, :, None]
    visible = np.concatenate([np.broadcast_to(prompt, (W, M, S)), own], axis=2)
    keys, values = (
        np.concatenate([np.repeat(x, G, axis=0), y], axis=2).swapaxes(1, 2)
        for x, y in ((k_prompt, k_own), (v_prompt, v_own))
    )
    context, *_ = references.attention(q.swapaxes(1, 2), keys, values, visible, sinks_N=sinks)
    np.testing.assert_allclose(np.asarray(got).swapaxes(1, 2)[new], context[new], atol=2e-6)


def make_segments(k, v, kernel):
    sizes = segments.segment_sizes(k.shape[2], kernel=kernel)
    ends = np.cumsum(sizes)
    return tuple(
        segments.make_segment(*(jnp.asarray(x[:, :, end - size : end]) for x in (k, v)), "auto", kernel=kernel)
        for size, end in zip(sizes, ends, strict=True)
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (requirements-tpu.txt)")
def test_a_pass_with_drafts_on_tpu_copies_no_cache():
    """Compiled for v5p with sharded experts. The queries of 4 slots, with 4 positions each, are heads of one row."""
    model = replace(
        tiny.MOE, num_hidden_layers=1, num_experts=8, hidden_size=256, moe_intermediate_size=128, head_dim=128
    )
    sampling = Sampling(prompts=8, group=4, max_prompt_tokens=256, max_tokens=512, drafts=3)
    devices = chips.describe_devices(chips.parse_topology("v5p:2x2x1"))
    mesh = make_mesh(Mesh(expert=4), devices)
    small = replace(experiment, model=replace(model, dtype="bfloat16"), sampling=sampling)
    (rollout,) = (each for each in programs.make_programs(small, mesh, mesh) if each.name == programs.ROLLOUT)
    text = rollout.lower().compile().as_text()
    rows_and_heads = re.findall(r"%decode_attention\S* = \(f32\[(\d+),2,(\d+),128\]", text)
    assert sorted(rows_and_heads) == [("2", "32"), ("8", "8")], "on each of 4 devices"
    assert "bf16[8,2,512,128]" in text and not re.search(r"bf16\[8,2,512,128\]\S* copy\(", text)
