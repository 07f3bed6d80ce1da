"""Slots, their order and their number decide when a sample is drawn, never what."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny

from gspax.config import Sampling
from gspax.kernels import segments
from gspax.rollout import sampler
from gspax.rollout.serving import make_serving_copy

SAMPLING = Sampling(group=3, max_prompt_tokens=16, max_tokens=10)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2]]
STOP = (11, 17)
CONFIGS = {
    "experts and windows": tiny.TOGETHER["experts"],
    "dense": tiny.TOGETHER["dense"],
    "bfloat16": replace(tiny.MOE, dtype="bfloat16"),
}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT", 4)  # of 10 positions: three


def draw(config, *, slots=0, params=None, stop_ids=STOP, **sampling):
    serving = make_serving_copy(tiny.params(config) if params is None else params, config)
    sampling = replace(SAMPLING, slots=slots, **sampling)
    ids, key = range(len(PROMPTS)), jax.random.key(0)
    return jax.device_get(sampler.sample(serving, config, PROMPTS, ids, key, sampling=sampling, stop_ids=stop_ids))


def assert_same(got, want, tolerance=1e-5):
    for name in ("tokens_BT", "mask_BT", "prompt_length_B", "length_B", "finished_B"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=tolerance)


@pytest.mark.parametrize(
    "name", [name if name.startswith("experts") else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_samples_do_not_depend_on_the_slots(name):
    want = draw(CONFIGS[name])
    assert len(np.unique(want.length_B)) > 1 and 0 < want.finished_B.sum() < 12, "samples of several lengths"
    for slots in (1, 5):
        assert_same(draw(CONFIGS[name], slots=slots), want, 5e-3 if name == "bfloat16" else 1e-5)
