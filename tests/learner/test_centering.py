"""Score centering by enumeration, against a slow reference, in every layout, and in runs with stale samples."""

import functools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from api import StepSettings, TrainedPolicy, abstract_state, minibatches, new_state, sharding, train_step, transformer
from small_experiment import experiment, objective_with
from test_packing import ALONE, MESHES, MODEL, SAMPLING, SCHEDULE, SHARED, N, assert_close, moved, rollout, start

from gspax import config, losses
from gspax.config import Schedule, row_shape
from gspax.experiment import validate
from gspax.learner.hidden import make_hidden
from gspax.model.terms.centering import CenteringTerm, CompareWithSampler, token_weight

LOSSES = {
    "grpo": partial(losses.grpo, clip_low=0.1, clip_high=0.15, dual_clip=1.2),
    "cispo": partial(losses.cispo, clip_low=0.1, clip_high=0.2),
    "sapo": losses.sapo,
    "dppo": partial(losses.dppo_tv, threshold=0.05, ratio_limit=1.2),
    "dis": partial(losses.dis, clip_low=0.2, clip_high=0.2),
    "ipo": partial(losses.ipo, threshold=0.05),
    "importance_sampling": losses.importance_sampling,
}
CLIPPED = LOSSES["grpo"]


def logits(dtype=jnp.float32):
    """Of a policy and of one near it that sampled, [C, V]."""
    rng = np.random.default_rng(1)
    policy = rng.normal(size=(5, 9))
    return jnp.asarray(policy, dtype), jnp.asarray(policy + 0.4 * rng.normal(size=policy.shape), dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_expected_centered_score_is_zero(name, masked):
    """In float64, for advantages of either sign: the sum over all tokens that may be sampled, weighted by q."""
    loss, V, kept = LOSSES[name], 9, None
    if masked:  # the last one of each set is no token
        kept = jnp.asarray([[7, 2, 4, V], [0, 1, 8, V], [3, 5, 6, V], [8, 2, 1, V], [4, 6, 0, V]], jnp.uint8)
    with jax.enable_x64(True):
        policy, sampler = logits(jnp.float64)
        ids = jnp.arange(V)[None].repeat(5, 0) if kept is None else kept[:, :3].astype(int)

        def logp_of(logits):
            return jax.nn.log_softmax(jnp.take_along_axis(logits, ids, -1))

        def center(policy, side):
            return CompareWithSampler(loss)(policy, sampler, None, kept)[side].score.sum()

        q = jnp.exp(logp_of(sampler))
        for side, sign in ((0, 1.0), (1, -1.0)):
            weight = token_weight(loss, logp_of(policy), logp_of(sampler), sign)
            jacobian = jax.jacobian(logp_of)(policy)
            sampled = jnp.einsum("cy,cycv->cv", q * weight, jacobian)
            centers = jax.grad(center)(policy, side)
            assert np.abs(sampled).max() > (1e-3 if name != "importance_sampling" else 0)
            np.testing.assert_allclose(sampled - centers, 0, atol=1e-12)


def test_untruncated_weights_need_no_centering():
    for loss, least, most in ((losses.importance_sampling, 0, 1e-6), (CLIPPED, 1e-2, 1)):
        (policy, sampler), compare = logits(), CompareWithSampler(loss)

        def center(policy, sampler=sampler, compare=compare):
            return compare(policy, sampler, None, None)[0]

        found = jax.grad(lambda policy, center=center: center(policy).score.sum())(policy)
        for value in (np.abs(found), center(policy).size):
            assert least <= np.max(value) <= most, loss


@pytest.mark.parametrize("name", LOSSES)
def test_the_weight_is_that_of_the_loss_for_advantages_of_any_size(name):
    policy, sampler = map(jax.nn.log_softmax, logits())
    advantage, mask = jnp.asarray([0.3, -0.2, 5.0, -7.0, 0.0]), jnp.ones(policy.shape, bool)
    aggregate = losses.by_constant
    found = jax.grad(lambda logp: LOSSES[name](logp, sampler, advantage, mask, aggregate=aggregate).value.sum())(policy)
    up, down = (token_weight(LOSSES[name], policy, sampler, sign) for sign in (1.0, -1.0))
    weight = np.where(advantage[:, None] > 0, up, down)
    np.testing.assert_allclose(found, -advantage[:, None] * weight, rtol=1e-5, atol=1e-7)


def test_a_weight_of_a_sequence_has_no_center_without_its_futures():
    """Two tokens of two values, a constant advantage: what is left of the drift in the first token's logits.

    The mean over the futures centers it; neither way that needs no futures does (docs/corrections.md).
    """
    q, p = np.array([0.6, 0.4]), np.array([0.45, 0.55])
    q2, p2 = np.array([[0.7, 0.3], [0.5, 0.5]]), np.array([[0.4, 0.6], [0.52, 0.48]])  # after each first token
    both = q[:, None] * q2
    ratio = np.sqrt((p / q)[:, None] * (p2 / q2))  # GSPO's, of two tokens
    score = np.eye(2) - p  # ∇ log p_v by the logits
    drift = np.einsum("ab,ab,ai->i", both, ratio, score)
    exact = np.einsum("v,v,vi->i", q, (q2 * ratio).sum(1), score)
    others_fixed = ratio[..., None] * np.sqrt((p / q)[None, None] / (p / q)[:, None, None])  # [a, b, v]
    with_others = drift - np.einsum("ab,abv,v,vi->i", both, others_fixed, q, score)
    joined = drift - np.einsum("ab,ab,v,vi->i", both, ratio, q, score)
    np.testing.assert_allclose(drift - exact, 0, atol=1e-15)
    np.testing.assert_allclose([x[0] for x in (drift, with_others, joined)], [0.061, -0.011, -0.083], atol=5e-4)


@functools.cache
def learn(schedule, mesh=ALONE, masks=False, lora=None):
    """The gradient and the metrics of a minibatch that an older policy sampled."""
    shape, data = row_shape(SAMPLING, schedule, sharding.batch_shards(mesh)), rollout(sets=masks)
    term = CenteringTerm(loss=CLIPPED)
    settings = StepSettings(
        config=MODEL,
        mesh=mesh,
        temperature=SAMPLING.temperature,
        microbatch_rows=shape.microbatch,
        packed=shape.packed,
        comparison=term.comparison,
    )
    sharing = SAMPLING.group if schedule.share_prompts else 0
    batches, layouts = minibatches.split_minibatches(data, 1, shape, mesh, sharing=sharing)
    state = new_state(start(lora), optax.sgd(1.0), jax.random.key(1))
    policy = TrainedPolicy(MODEL, mesh, optax.sgd(1.0), lora)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(policy))
    state = jax.device_put(jax.tree.map(jnp.copy, state), shardings)
    sampler = moved(state.params, OLDER)
    batches, _ = minibatches.score_minibatches(train_step.make_score(settings), sampler, batches, range(1))
    (batch,) = minibatches.set_advantages(batches, layouts, ADVANTAGE, mesh)
    read = make_hidden(MODEL, settings, scope="sampling_policy")
    hidden = read(sampler, batch.tokens_BT, batch.segment_BT, batch.mask_BT, batch.prefix_BT)
    batch = replace(batch, sampler_hidden_BTE=hidden)
    gradient = jax.jit(train_step.make_gradient(settings, objective_with(CLIPPED, center_scores=True)))
    grads, terms, _ = gradient(state, batch, False, (transformer.head_params(sampler),))
    return jax.device_get((grads, losses.reduce(terms)))


ADVANTAGE, SEPARATE, OLDER = np.linspace(-1, 1, N).astype(np.float32), Schedule(minibatches=1), 0.02
LORA = config.Lora(rank=2, alpha=2.0)


@functools.cache
def whole(masks=False, lora=None):
    """Loss and gradient from logits [B, T, V] and the equation of the page."""
    from api import combine, partition

    data = rollout(sets=masks)
    tokens, mask = jnp.asarray(data.tokens_BT), jnp.asarray(data.mask_BT)
    segment = (jnp.arange(tokens.shape[1])[None] < (data.prompt_length_B + data.length_B)[:, None]).astype(int)
    trained, frozen = partition(start(lora))
    A = ADVANTAGE[:, None, None]

    def all_logp(params):
        hidden, _ = transformer.apply(params, MODEL, tokens, segment, mesh=ALONE)
        z = jnp.roll(transformer.logits(params, hidden) / SAMPLING.temperature, 1, axis=1)
        if masks:
            z = jnp.where(jax.nn.one_hot(data.kept_BTK, MODEL.vocab_size).sum(2) > 0, z, -1e9)
        return jax.nn.log_softmax(z)

    logq = all_logp(moved(combine(trained, frozen), OLDER))

    def loss(trained):
        logp = all_logp(combine(trained, frozen))
        ratio = jnp.exp(jax.lax.stop_gradient(logp) - logq)
        outside = jnp.where(A > 0, ratio > 1.15, (ratio < 0.9) | (ratio > 1.2))
        weight = jnp.where(outside, 0, ratio)
        of_token = lambda x: jnp.take_along_axis(x, tokens[..., None], -1)[..., 0]  # noqa: E731
        value = of_token(weight * logp) - (jnp.exp(logq) * weight * jnp.where(jnp.exp(logq) > 0, logp, 0)).sum(-1)
        return -(jnp.where(mask, A[..., 0] * value, 0).sum(-1) / mask.sum(-1)).mean()

    return jax.device_get(jax.jit(jax.grad(loss))(trained))


def compare(schedule=SEPARATE, mesh=ALONE, **options):
    grads, (_, metrics) = learn(schedule, mesh, **options)
    assert_close(grads, whole(**options))
    assert 0.01 < metrics["centering"] < 0.5
    return grads


@pytest.fixture
def small_chunks(monkeypatch):
    """Logits of a few of the 144 positions at a time."""
    learn.cache_clear()
    monkeypatch.setattr("gspax.learner.forward.logit_chunk", lambda config, mesh, tokens: 7)


def test_the_gradient_is_that_of_whole_logits():
    compare()


@pytest.mark.parametrize("masks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_packed_rows_in_chunks(small_chunks, masks):
    compare(SCHEDULE, masks=masks)


@pytest.mark.slow
def test_shared_prompts(small_chunks):
    compare(SHARED)


@pytest.mark.slow
def test_adapters(small_chunks):
    compare(SCHEDULE, lora=LORA)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(mesh, small_chunks):
    size = {"fsdp": 2, "expert and tensor": 4, "context": 2}[mesh]
    compare(SCHEDULE, sharding.make_mesh(MESHES[mesh], jax.devices()[:size]))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        (
            {"loss": losses.gspo},
            "center_scores: wanted a loss with a weight for each token, got gspax.losses.gspo, whose weight is that of "
            "a whole sequence: its mean needs the futures of tokens that were not sampled",
        ),
        (
            {"loss": losses.dro},
            "center_scores: wanted a loss with a ratio for each token (losses.Traits), got gspax.losses.dro",
        ),
        (
            {"correction": losses.correction.truncate_tokens},
            "center_scores: wanted the weights of the loss alone, which are known for all tokens, got correction",
        ),
        (
            {"sampling": replace(experiment.sampling, top_p=0.9)},
            "sampling.mask_replay: wanted the tokens that sampling.top_p leaves with center_scores, which takes a mean "
            "over them, got 0",
        ),
        (
            {"placement": config.Placement(devices=1, staleness=2)},
            "center_scores: wanted old_logp=sampler with placement.staleness=2, because its term is weighted by the "
            "ratio to the policy that sampled, got old_logp=learner",
        ),
    ],
)
def test_what_cannot_be_centered_is_refused(changes, sentence):
    variant = {"loss": losses.grpo, "center_scores": True} | changes
    found = validate(replace(experiment, **variant), 2)
    assert found == ([] if sentence is None else [sentence])
