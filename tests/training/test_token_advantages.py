"""Runs whose advantage function gives each token one (OTB), compared with loops over the completions in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import (
    InFlight,
    assign_advantages,
    grade,
    init_state,
    make_runtime,
    next_rollout,
    prepare_minibatches,
    single_device_mesh,
    transformer,
)
from small_experiment import Countdown, experiment

from gspax import advantages, config, losses
from gspax.config import Sampling
from gspax.data import CharChat
from gspax.experiment import validate


def remainder(problem, completion):
    """A reward that differs between most completions."""
    return sum(map(ord, completion)) % 7 / 7


BASE = replace(
    experiment,
    model=replace(
        experiment.model,
        num_hidden_layers=1,
        num_experts=0,
        intermediate_size=32,
        num_key_value_heads=2,
        num_attention_heads=4,
        head_dim=8,
    ),
    loss=losses.grpo,
    advantage=advantages.otb,
    reward=remainder,
    warm_start=None,
    mesh=config.Mesh(fsdp=4, tensor=2),
    sampling=Sampling(prompts=8, group=4, max_prompt_tokens=4, max_tokens=6, temperature=0.8),
)
PACKED = replace(BASE.schedule, microbatch_tokens=160, share_prompts=True)
CASES = {
    "a row for each response": {},
    "packed rows and shared prompts": {"schedule": PACKED},
    "without overlong responses": {"schedule": PACKED, "filter_overlong": True},
    "conversations": {
        "environment": Countdown(),
        "tokenizer": CharChat(experiment.tokenizer.alphabet),
        "turns": config.Turns(limit=2),
        "sampling": replace(BASE.sampling, max_tokens=20),
    },
    "filters": {"sampling": replace(BASE.sampling, top_p=0.7, mask_replay=5)},
}


def score_norms(params, variant, rollout):
    """‖onehot - π‖² of each token, float64, from the logits of the whole rows on one device.

    With sampling masks π is 0 outside of the set that the token was chosen from.
    """
    tokens_BT, T = np.asarray(rollout.tokens_BT), rollout.tokens_BT.shape[1]
    total_B = np.asarray(rollout.prompt_length_B) + np.asarray(rollout.length_B)
    segment_BT = (np.arange(T) < total_B[:, None]).astype(np.int32)
    params = jax.tree.map(jnp.asarray, jax.device_get(params))
    apply = jax.jit(transformer.apply, static_argnames=("config", "mesh"))
    hidden, _ = apply(params, variant.model, tokens_BT, segment_BT, mesh=single_device_mesh())
    logits = np.asarray(hidden @ transformer.head(params), np.float64)[:, :-1] / variant.sampling.temperature
    prob = np.exp(logits - logits.max(-1, keepdims=True))
    if rollout.kept_BTK is not None:
        for place in np.ndindex(tokens_BT[:, 1:].shape):
            outside = np.setdiff1d(np.arange(prob.shape[-1]), np.asarray(rollout.kept_BTK)[:, 1:][place])
            prob[place][outside if rollout.mask_BT[:, 1:][place] else []] = 0
    prob /= prob.sum(-1, keepdims=True)
    chosen = np.eye(prob.shape[-1])[tokens_BT[:, 1:]]
    return np.pad(((chosen - prob) ** 2).sum(-1), ((0, 0), (1, 0)))


def loop(reward_B, mask_BT, norm_BT, there_B, group):
    """OTB, token by token."""
    wanted = np.zeros(mask_BT.shape)
    for first in range(0, len(reward_B), group):
        rows = [row for row in range(first, first + group) if there_B[row]]
        columns = {row: np.flatnonzero(mask_BT[row]) for row in rows}
        for t in range(max(map(len, columns.values()), default=0)):
            alive = [row for row in rows if len(columns[row]) > t]
            weights = [norm_BT[row, columns[row][: t + 1]].sum() for row in alive]
            baseline = np.dot(weights, reward_B[alive]) / sum(weights)
            for row in alive:
                wanted[row, columns[row][t]] = reward_B[row] - baseline
    return wanted


@pytest.mark.parametrize("name", CASES)
def test_the_advantages_of_tokens_in_minibatches_equal_the_loop(name):
    variant = replace(BASE, **CASES[name])
    assert validate(variant, 8) == []
    runtime = make_runtime(variant)
    state = init_state(variant.model, runtime.optimizer, jax.random.key(3), runtime.mesh)
    graded = grade(runtime, next_rollout(runtime, state, InFlight()))
    batches, scores, layouts = prepare_minibatches(runtime, state, (), graded)
    batches, samples, _ = assign_advantages(runtime, graded, batches, scores, layouts)

    mask_BT, rollout = np.asarray(graded.rollout.mask_BT), graded.rollout
    there_B = np.asarray(rollout.finished_B) if variant.filter_overlong else np.ones(len(mask_BT), bool)
    reward_B = np.array([completion.reward for completion in graded.completions])
    assert len(set(mask_BT.sum(1))) > 1 and reward_B.std() > 0, "a rollout that shows nothing"
    wanted_BT = loop(reward_B, mask_BT, score_norms(state.params, variant, rollout), there_B, variant.sampling.group)
    assert wanted_BT.any()
    for batch, layout in zip(batches, layouts, strict=True):
        row_BT, column_BT = np.broadcast_arrays(layout.response, layout.column)
        expected_BT = np.where(row_BT >= 0, wanted_BT[row_BT, np.maximum(column_BT, 0)], 0)
        np.testing.assert_allclose(batch.advantage, expected_BT, atol=2e-6)
    mean_B = wanted_BT.sum(1) / np.maximum(mask_BT.sum(1), 1)
    np.testing.assert_allclose(samples.advantage_B, mean_B, atol=2e-6)
