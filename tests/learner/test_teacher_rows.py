"""A teacher's results for rows of its own arrive at the response's place in the policy's minibatch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from api import StepSettings, minibatches, new_state, train_step, transformer
from small_experiment import objective_with
from test_packing import ALONE, SAMPLING, SCHEDULE, SHARED, C, N, assert_close, rollout
from test_teacher import MODEL, SEPARATE, TEACHER, all_logp, token_divergence

from gspax import losses
from gspax.config import Teacher, row_shape, teacher_row_shape
from gspax.learner.teacher import make_passes
from gspax.learner.teacher_rows import as_sampled, fill_from_rows, number_tokens, with_prompts
from gspax.model.terms.teacher import TeacherTerm

OTHER = replace(TEACHER, hidden_size=16, tie_word_embeddings=False)
NUMBER_N = np.array([0, 1, 1] * 4, np.int32)
LONGEST = 6
PROMPTS = [list(np.random.default_rng(row).integers(0, 24, 1 + row % LONGEST)) for row in range(N)]


def with_other_prompts(data):
    """The rollout with `PROMPTS`, on the host."""
    tokens, mask = (np.zeros((N, LONGEST + C), dtype) for dtype in (np.int32, bool))
    for row, prompt in enumerate(PROMPTS):
        start, length = data.prompt_length_B[row], data.length_B[row]
        place = slice(len(prompt), len(prompt) + length)
        tokens[row, : len(prompt)], tokens[row, place] = prompt, data.tokens_BT[row, start : start + length]
        mask[row, place] = data.mask_BT[row, start : start + length]
    lengths = np.array(list(map(len, PROMPTS)), np.int32)
    return replace(data, tokens_BT=tokens, mask_BT=mask, prompt_length_B=lengths)


def of_tokens(logp, data):
    """The log-probs of the response tokens, one array for each response."""
    chosen = np.take_along_axis(np.asarray(logp), data.tokens_BT[..., None], -1)[..., 0]
    return [values[mask] for values, mask in zip(chosen, data.mask_BT, strict=True)]


def read(teacher, params, schedule, prompts):
    """The policy's minibatch of all responses with what the teachers computed, its layout, and the settings."""
    shape, rows = row_shape(SAMPLING, schedule, 1), {"sampling": SAMPLING, "schedule": schedule}
    settings = StepSettings(
        config=MODEL,
        mesh=ALONE,
        temperature=SAMPLING.temperature,
        microbatch_rows=shape.microbatch,
        packed=shape.packed,
        comparison=TeacherTerm(settings=teacher).comparison,
    )
    sharing = SAMPLING.group if schedule.share_prompts else 0
    batches, layouts = minibatches.split_minibatches(rollout(), 1, shape, ALONE, sharing=sharing)
    own_rows = with_prompts(rollout(), PROMPTS, LONGEST, ALONE) if prompts else as_sampled(rollout())
    own = teacher_row_shape(teacher, **rows, shards=1)
    passes = make_passes(teacher, MODEL, settings, own)
    for number, (one, parameters) in enumerate(zip(passes, params, strict=True)):
        places = list(zip(batches, layouts, strict=True))
        batches = fill_from_rows(one, parameters, own_rows, number == NUMBER_N, places, shape=own, width=24, mesh=ALONE)
    return *number_tokens(batches, layouts, NUMBER_N), layouts, settings


@pytest.mark.parametrize(
    "schedule",
    [SCHEDULE, pytest.param(SEPARATE, marks=pytest.mark.slow), pytest.param(SHARED, marks=pytest.mark.slow)],
    ids=["packed", "separate", "shared prompts"],
)
def test_each_teacher_reads_its_own_responses_after_its_own_prompts(schedule):
    teacher = Teacher(models={"wide": TEACHER, "narrow": OTHER}, prompt=lambda *_: "", max_prompt_tokens=LONGEST)
    batch, (layout,), _ = read(teacher, (tiny.params(TEACHER), tiny.params(OTHER)), schedule, prompts=True)
    data, got = with_other_prompts(rollout()), np.asarray(batch.teacher_logp_BT)
    wanted = [of_tokens(all_logp(tiny.params(config), config, data), data) for config in (TEACHER, OTHER)]
    response_BT = np.broadcast_to(layout.response, got.shape)
    for row in range(N):
        here = (response_BT == row) & np.asarray(batch.mask_BT)
        np.testing.assert_allclose(got[here], wanted[NUMBER_N[row]][row], rtol=2e-5, atol=2e-5)
    assert (got[~np.asarray(batch.mask_BT)] == 0).all()


@pytest.mark.parametrize(
    "schedule", [SCHEDULE, pytest.param(SHARED, marks=pytest.mark.slow)], ids=["packed", "shared prompts"]
)
def test_the_logits_of_several_teachers_of_other_widths_are_compared(schedule, monkeypatch):
    monkeypatch.setattr("gspax.learner.forward.logit_chunk", lambda config, mesh, tokens: 7)
    teacher = Teacher(models={"wide": TEACHER, "narrow": OTHER}, kept=3)
    params = tiny.params(TEACHER), tiny.params(OTHER)
    batch, layouts, settings = read(teacher, params, schedule, prompts=False)
    (batch,) = minibatches.set_advantages([batch], layouts, np.zeros(N, np.float32), ALONE)
    gradient = jax.jit(train_step.make_gradient(settings, objective_with(losses.grpo, teacher=teacher)))
    state = new_state(tiny.params(MODEL), optax.sgd(1.0), jax.random.key(1))
    batch, _ = train_step.fill_old_logp(batch)
    grads, terms, _ = gradient(state, batch, True, tuple(map(transformer.head_params, params)))

    data = rollout()
    tokens, mask = jnp.asarray(data.tokens_BT), jnp.asarray(data.mask_BT)
    both = [all_logp(own, config, data) for own, config in zip(params, (TEACHER, OTHER), strict=True)]
    other = jnp.where(NUMBER_N[:, None, None] == 0, *both)

    def loss(params):
        value = token_divergence(teacher, all_logp(params, MODEL, data), other, tokens, jnp.ones(mask.shape))
        return (jnp.where(mask, value, 0).sum(-1) / mask.sum(-1)).mean()

    value, wanted = jax.jit(jax.value_and_grad(loss))(tiny.params(MODEL))
    np.testing.assert_allclose(losses.reduce(terms)[0], value, rtol=1e-5)
    assert_close(jax.device_get(grads), jax.device_get(wanted))
