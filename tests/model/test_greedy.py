"""Greedy decoding against the numpy reference, token by token."""

import jax
import numpy as np
import pytest
import reference_model
import tiny
from api import make_inference_weights, sample

from gspax.config import Sampling

CONFIGS = tiny.TOGETHER | {"a shared expert": tiny.CONFIGS["a shared expert"]}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "a shared expert")]


@pytest.mark.parametrize("name", ["experts", *SLOW])
def test_greedy_tokens_equal_the_reference(name):
    """64 tokens with biases, YaRN and windows shorter than the prompt. The reference recomputes the full sequence."""
    config = CONFIGS[name]
    params = tiny.params(config, seed=4)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7]]
    sampling = Sampling(group=1, max_prompt_tokens=9, max_tokens=64, temperature=0.0)
    weights = make_inference_weights(params, config, tiny.one_device())
    rollout = sample(weights, prompts, [0, 1], jax.random.key(0), tiny.options(config, sampling))
    for row, prompt in enumerate(prompts):
        tokens = np.asarray(rollout.tokens_BT)[row, : len(prompt) + 64]
        np.testing.assert_array_equal(tokens[: len(prompt)], prompt)
        logits, _ = reference_model.forward(params, config, tokens)
        np.testing.assert_array_equal(tokens[len(prompt) :], logits[len(prompt) - 1 : -1].argmax(axis=-1))
        assert len(set(tokens[len(prompt) :].tolist())) > 3  # the tokens vary
