"""Drawing with 8 bits: log-probs are those of the rounded model, and the mismatch metrics show the difference."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from small_experiment import experiment

from gspax import losses
from gspax.config import Sampling
from gspax.experiment import validate
from gspax.kernels.quantization import Quantized, is_quantized
from gspax.learner.state import init_state
from gspax.loop.drawing import InFlight
from gspax.loop.learner import make_learner
from gspax.loop.step import run_step
from gspax.losses import correction
from gspax.model import transformer
from gspax.rollout import sampler
from gspax.rollout.serving import _summed_axes, make_serving_copy

SAMPLING = Sampling(group=3, max_prompt_tokens=16, max_tokens=10)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [2, 2]]


def rounded(params, config):
    """The learner's parameters that the sampler's weights in 8 bits stand for."""

    def round_(leaf, axes):
        if not (summed := _summed_axes(axes, config)):
            return leaf
        scale = jnp.abs(leaf).max(axis=summed, keepdims=True) / 127
        return jnp.round(leaf / scale) * scale

    return jax.tree.map(round_, params, transformer.logical_axes(config))


@partial(jax.jit, static_argnums=1)
def learner_logp(params, config, tokens, segment):
    hidden, _ = transformer.apply(params, config, tokens, segment)
    return losses.token_logp(transformer.logits(params, hidden), tokens)


def mismatch(config, learner_params, **settings):
    """|log-prob of the sampler - log-prob of the learner| of each drawn token, with these settings of the sampler."""
    sampling = replace(SAMPLING, **settings)
    serving = make_serving_copy(tiny.params(config), config, weights_dtype=sampling.weights_dtype)
    rollout = jax.device_get(
        sampler.sample(serving, config, PROMPTS, range(4), jax.random.key(0), sampling=sampling, stop_ids=(11, 17))
    )
    total_B = rollout.prompt_length_B + rollout.length_B
    segment_BT = (np.arange(rollout.tokens_BT.shape[1])[None] < total_B[:, None]).astype(np.int32)
    logp_BT = learner_logp(learner_params, config, rollout.tokens_BT, segment_BT)
    return np.abs(rollout.logp_BT - logp_BT)[rollout.mask_BT]


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_log_probs_are_those_of_the_rounded_model(name):
    config = tiny.TOGETHER[name]  # tied embeddings in one, experts and windows in the other
    both = {"weights_dtype": "int8", "kv_cache_dtype": "int8", "slots": 5}
    assert mismatch(config, rounded(tiny.params(config), config), weights_dtype="int8").max() < 1e-4
    error = mismatch(config, tiny.params(config), **both)
    assert 1e-3 < error.mean() < 0.05 and error.max() < 0.3, "0.016 and 0.09 when this was written"


def test_matrices_are_in_8_bits_and_nothing_else():
    copies = {tied: replace(tiny.CONFIGS["biases"], tie_word_embeddings=tied) for tied in (True, False)}
    for tied, config in copies.items():
        copy = make_serving_copy(tiny.params(config), config, weights_dtype="int8")
        leaves, _ = jax.tree_util.tree_flatten_with_path(copy, is_leaf=is_quantized)
        names = {path[-1].key for path, leaf in leaves if isinstance(leaf, Quantized)}
        assert names == {"query", "key", "value", "out", "gate", "up", "down", "embedding" if tied else "head"}
        attention = copy["layers"][0]["attention"]
        assert attention["query"].scale.shape == (4, 8) and attention["out"].scale.shape == (16,)
        assert copy["layers"][0]["mlp"]["down"].scale.shape == (5, 16)
        assert (copy["embedding"] if tied else copy["head"]).scale.shape == (23,), "one for each token, the output"


def test_a_step_reports_the_mismatch_and_corrects_it():
    dense = replace(experiment.model, num_hidden_layers=1, num_experts=0, intermediate_size=32)
    eight = replace(experiment.sampling, weights_dtype="int8", kv_cache_dtype="int8")
    plain = replace(experiment, model=dense, warm_start=None, correction=partial(correction.truncate_tokens, cap=2.0))
    learners = [make_learner(each) for each in (plain, replace(plain, sampling=eight))]
    state = partial(init_state, dense, learners[0].optimizer, jax.random.key(0), learners[0].mesh)
    # the same train step twice: only the sampler differs
    same = replace(learners[1], steps=learners[0].steps)
    without, found = (run_step(each, state(), None, InFlight())[1] for each in (learners[0], same))
    assert without["mismatch/abs_diff"] < 1e-5 < 1e-4 < found["mismatch/abs_diff"] < 0.1
    assert 0 < found["mismatch/k3"] < 0.01
    assert np.isfinite([found[name] for name in ("policy/loss", "optim/grad_norm")]).all()
    assert found["policy/correction_min"] < 0.999 < 1.001 < found["policy/correction_max"] < 2.0
    assert without["policy/correction_max"] == pytest.approx(1.0, abs=1e-5)


def test_other_names_of_dtypes_are_rejected():
    wrong = replace(experiment, sampling=replace(experiment.sampling, kv_cache_dtype="fp8"))
    assert validate(wrong) == ["sampling.kv_cache_dtype: wanted 'auto' or 'int8', got 'fp8'"]
