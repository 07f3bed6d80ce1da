"""An update with a teacher is that of whole logits and plain autodiff, in any layout and on any mesh."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from api import Batch, Passes, StepSettings, abstract_params, minibatches, new_state, sharding, train_step, transformer
from small_experiment import experiment, objective_with
from test_packing import ALONE, MESHES, SAMPLING, SCHEDULE, SHARED, N, assert_close, moved, rollout

from gspax import config, losses
from gspax.config import Schedule, Teacher, row_shape
from gspax.learner import teacher
from gspax.learner.teacher import fill_teacher, fingerprint, load_teacher, make_teach
from gspax.losses import distill
from gspax.model.terms.teacher import TeacherTerm

MODEL = replace(tiny.MOE, num_hidden_layers=2, mlp_only_layers=(0,), num_experts=4, vocab_size=24)
TEACHER = replace(tiny.MOE, num_experts=0, hidden_size=24, num_hidden_layers=1, vocab_size=24, tie_word_embeddings=True)
FORMS = {
    "the sampled token": Teacher(model=TEACHER, coefficient=0.7),
    "the teacher's tokens": Teacher(model=TEACHER, kept=3),
    "the policy's tokens": Teacher(model=TEACHER, kept=3, kept_by="policy", coefficient=0.7),
    "every token kept": Teacher(model=TEACHER, kept=24),
    "the reverse KL": Teacher(model=TEACHER, divergence=distill.full_reverse_kl),
    "the forward KL": Teacher(model=TEACHER, divergence=distill.full_forward_kl, coefficient=0.7),
    "Jensen-Shannon": Teacher(model=TEACHER, divergence=functools.partial(distill.jensen_shannon, beta=0.3)),
    "an advantage": Teacher(model=TEACHER, as_advantage=True, coefficient=0.7),
}
SEPARATE = Schedule(minibatches=1)
ADVANTAGE = np.linspace(-1, 1, N).astype(np.float32)


def placed(params, config, mesh):
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(config, mesh))
    return jax.device_put(jax.tree.map(jnp.copy, params), shardings)


@functools.cache
def learn(form, schedule, mesh, microbatch_rows=0):
    """The gradient and the metrics of a minibatch that an older policy sampled."""
    teacher, shape = FORMS[form], row_shape(SAMPLING, schedule, sharding.batch_shards(mesh))
    settings = StepSettings(
        config=MODEL,
        mesh=mesh,
        temperature=SAMPLING.temperature,
        microbatch_rows=microbatch_rows or shape.microbatch,
        packed=shape.packed,
        comparison=TeacherTerm(settings=teacher).comparison,
    )
    sharing = SAMPLING.group if schedule.share_prompts else 0
    batches, layouts = minibatches.split_minibatches(rollout(), 1, shape, mesh, sharing=sharing)
    params, of_teacher = placed(tiny.params(MODEL), MODEL, mesh), placed(tiny.params(TEACHER), TEACHER, mesh)
    batches, _ = minibatches.score_minibatches(train_step.make_score(settings), moved(params, 1e-3), batches, range(1))
    batches = fill_teacher(make_teach(TEACHER, settings), of_teacher, batches)
    (batch,) = minibatches.set_advantages(batches, layouts, ADVANTAGE, mesh)
    objective = objective_with(losses.importance_sampling, teacher=teacher)
    gradient = jax.jit(train_step.make_gradient(settings, objective))
    state = new_state(params, optax.sgd(1.0), jax.random.key(1))
    grads, terms, _ = gradient(state, batch, False, (transformer.head_params(of_teacher),))
    return jax.device_get((grads, losses.reduce(terms)))


@functools.partial(jax.jit, static_argnums=1)
def all_logp(params, config, data):
    """log-probs of all tokens at the positions that predict a token; column 0 is of no use."""
    segment = (jnp.arange(data.tokens_BT.shape[1])[None] < (data.prompt_length_B + data.length_B)[:, None]).astype(int)
    hidden, _ = transformer.apply(params, config, data.tokens_BT, segment, mesh=ALONE)
    logp = jax.nn.log_softmax(transformer.logits(params, hidden) / SAMPLING.temperature)
    return jnp.roll(logp, 1, axis=1)


def token_divergence(teacher, logp, other, tokens, ratio):
    """The divergence of each token, written so that plain autodiff gives the gradient of the expectation."""
    p, q = jnp.exp(logp), jnp.exp(other)
    if teacher.divergence is distill.full_forward_kl:
        return (q * (other - logp)).sum(-1)
    if isinstance(teacher.divergence, functools.partial):
        beta = teacher.divergence.keywords["beta"]
        mixed = jnp.log(beta * q + (1 - beta) * p)
        return (beta * q * (other - mixed) + (1 - beta) * p * (logp - mixed)).sum(-1)
    rank = jnp.argsort(jnp.argsort(-(logp if teacher.kept_by == "policy" else other)))
    kept = rank < (24 if teacher.divergence else teacher.kept)
    exact = jnp.where(kept, p * (logp - other) - p + q, 0).sum(-1)
    of_token = lambda x: jnp.take_along_axis(x, tokens[..., None], -1)[..., 0]  # noqa: E731
    x, rest = jax.lax.stop_gradient(of_token(logp - other)), ~of_token(kept)
    sampled = ratio * (jnp.expm1(-x) + x + x * (of_token(logp) - jax.lax.stop_gradient(of_token(logp))))
    return exact + jnp.where(rest, sampled, 0)


@functools.cache
def whole(form):
    """The values from whole logits of separate rows: loss, gradient, and the mean divergence of the response tokens."""
    teacher, data = FORMS[form], rollout()
    tokens, mask = jnp.asarray(data.tokens_BT), jnp.asarray(data.mask_BT)
    of_token = lambda x: jnp.take_along_axis(x, tokens[..., None], -1)[..., 0]  # noqa: E731
    old = of_token(all_logp(moved(tiny.params(MODEL), 1e-3), MODEL, data))
    other = all_logp(tiny.params(TEACHER), TEACHER, data)

    def by_sequence(value):
        return (jnp.where(mask, value, 0).sum(-1) / mask.sum(-1)).mean()

    def loss(params):
        logp = all_logp(params, MODEL, data)
        ratio, advantage = jnp.exp(of_token(logp) - old), jnp.broadcast_to(ADVANTAGE[:, None], mask.shape)
        if teacher.as_advantage:
            advantage = advantage - teacher.coefficient * (old - of_token(other))
            return -by_sequence(ratio * advantage), 0.0
        value = token_divergence(teacher, logp, other, tokens, jax.lax.stop_gradient(ratio))
        mean = jnp.where(mask, value, 0).sum() / mask.sum()
        return -by_sequence(ratio * advantage) + teacher.coefficient * by_sequence(value), mean

    (value, mean), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(tiny.params(MODEL))
    return jax.device_get((grads, value, mean))


def compare(form, schedule=SEPARATE, mesh=ALONE, **options):
    grads, (value, metrics) = learn(form, schedule, mesh, **options)
    wanted, loss, mean = whole(form)
    assert_close(grads, wanted)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    if not FORMS[form].as_advantage:
        np.testing.assert_allclose(metrics["teacher_kl"], mean, rtol=1e-5)


def slow_but(*fast):
    return [form if form in fast else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]


@pytest.fixture
def small_chunks(monkeypatch):
    """Logits of 7 of the 144 positions at a time; of one model's, with a teacher 4."""
    learn.cache_clear()
    monkeypatch.setattr("gspax.learner.forward.logit_chunk", lambda config, mesh, tokens: 7)


@pytest.mark.parametrize("form", slow_but("the sampled token", "the teacher's tokens", "an advantage"))
def test_the_gradient_is_that_of_whole_logits(form):
    compare(form)


@pytest.mark.parametrize("form", slow_but("Jensen-Shannon"))
def test_chunks_microbatches_and_packing_change_nothing(form, small_chunks):
    compare(form, SCHEDULE)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["the policy's tokens", "the forward KL", "an advantage"])
def test_rows_may_share_prompts_or_be_split(form, small_chunks):
    compare(form, SHARED)
    compare(form, microbatch_rows=3)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["the sampled token", "the policy's tokens", "the reverse KL"])
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(form, mesh, small_chunks):
    size = {"fsdp": 2, "expert and tensor": 4, "context": 2}[mesh]
    compare(form, SCHEDULE, sharding.make_mesh(MESHES[mesh], jax.devices()[:size]))


def test_a_fingerprint_tells_parameters_apart_on_any_mesh():
    params = tiny.params(TEACHER)
    one = fingerprint(params)
    assert one == fingerprint(placed(params, TEACHER, sharding.make_mesh(MESHES["fsdp"], jax.devices()[:2])))
    nudged = {**params, "embedding": params["embedding"].at[3, 5].multiply(1 + 2**-23)}
    swapped = {**params, "embedding": params["embedding"][:, jnp.array([1, 0, *range(2, 24)])]}
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert len({one, *map(fingerprint, (nudged, swapped, rounded))}) == 4


def test_tokens_are_selected_by_the_advantages_that_the_loss_has():
    logp_BT, teacher_BT = jnp.log(jnp.array([[[1.0, 0.5, 0.2, 0.6]], [[1.0, 0.9, 0.2, 0.1]]]))
    mask_BT = jnp.array([[False, True, True, True]])
    batch = Batch(
        tokens_BT=jnp.zeros((1, 4), jnp.int32),
        segment_BT=jnp.ones((1, 4), jnp.int32),
        mask_BT=mask_BT,
        old_logp_BT=logp_BT,
        sampler_logp_BT=logp_BT,
        teacher_logp_BT=teacher_BT,
        advantage=jnp.array([0.5]),
    )
    rest = jnp.zeros((1, 4)), jax.random.key(0)

    def selected(teacher):
        found = {}

        def spy(minibatch):
            found["advantage"] = np.asarray(minibatch.advantage_BT)
            return minibatch.mask_BT

        with jax.disable_jit():
            minibatches.make_select(Passes(replace(experiment, selection=spy, teacher=teacher)), ALONE)(batch, *rest)
        return found["advantage"]

    mixed = distill.mixed_advantage(batch.advantage, logp_BT, teacher_BT, mask_BT, coefficient=0.3)
    assert_close(selected(Teacher(as_advantage=True, coefficient=0.3)), np.asarray(mixed))
    for none_of_its in (None, Teacher(coefficient=0.3)):
        assert_close(selected(none_of_its), np.full((1, 4), 0.5, np.float32))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("axes", [{}, {"tensor": 2}])
def test_a_teacher_keeps_the_tokens_of_the_policy_alone(axes, tied, monkeypatch):
    """Published models of one family are padded to different sizes: the rows beyond the policy's are of no token."""
    mesh = sharding.make_mesh(config.Mesh(fsdp=1, **axes), jax.devices()[: axes.get("tensor", 1)])
    padded = replace(TEACHER, vocab_size=MODEL.vocab_size + 8, tie_word_embeddings=tied)
    (held,) = config.held_teachers(config.Teacher(model=padded), MODEL)
    whole, hidden = tiny.params(padded), jnp.ones((1, 24))
    monkeypatch.setattr(teacher, "locate", lambda name: name)
    monkeypatch.setattr(teacher, "has_other_ids", lambda tokenizer, folder: False)
    monkeypatch.setattr(teacher, "load_model", lambda model, wanted: placed(whole, padded, mesh))
    params = load_teacher(padded, held, mesh, None)
    wanted = abstract_params(held, mesh)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.sharding), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.sharding), wanted
    )
    ours, all_ids = (transformer.logits(jax.device_get(one), hidden) for one in (params, whole))
    np.testing.assert_array_equal(ours, all_ids[:, : MODEL.vocab_size])
