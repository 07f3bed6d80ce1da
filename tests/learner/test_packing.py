"""Packed rows: every response once, little padding, and the update of the same responses with a row each."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from small_experiment import experiment, objective_with

from gspax import config, losses
from gspax.config import Calibration, Reference, Regularizers, RowShape, Sampling, Schedule, row_shape
from gspax.learner import adapters, metrics, minibatches, train_step
from gspax.learner.forward import StepSettings
from gspax.learner.minibatches import Piece, first_fit_decreasing, pack, separate, share_prompts
from gspax.learner.state import abstract_state, new_state
from gspax.losses import correction, kl
from gspax.model.terms.reference import ReferenceTerm
from gspax.parallel import sharding
from gspax.run import record
from gspax.run.directory import RunDir
from gspax.training import loop
from gspax.types import Adapted, Rollout

MODEL = replace(tiny.MOE, num_hidden_layers=2, mlp_only_layers=(0,), num_experts=4, vocab_size=24)
SGD = optax.sgd(1.0)  # the parameters' change is the gradient
S, C, N = 4, 8, 12
SAMPLING = Sampling(prompts=4, group=3, max_prompt_tokens=S, max_tokens=C, temperature=0.8)
SCHEDULE = Schedule(minibatches=1, microbatch_tokens=30)


def test_first_fit_decreasing_by_hand():
    row, first = first_fit_decreasing(np.array([3, 7, 5, 2, 4]), 10)  # 7 | 5 4 | then 3 with 7, 2 with none but a third
    np.testing.assert_array_equal(row, [0, 0, 1, 2, 1])
    np.testing.assert_array_equal(first, [7, 0, 0, 0, 5])
    with pytest.raises(ValueError, match="at most 6 tokens, got 7"):
        first_fit_decreasing(np.array([3, 7]), 6)


def test_every_token_has_one_place_and_used_microbatches_come_first():
    lengths, shape = np.random.default_rng(0).integers(2, 12, 23), RowShape(24, 15, 4, True)
    sequence, column, segment, prefix, used = pack(separate(lengths), shape)
    assert not prefix.any()
    assert sequence.shape == column.shape == segment.shape == (24, 15)
    for index, length in enumerate(lengths):
        rows, columns = np.nonzero(sequence == index)
        assert len(set(rows)) == 1 and (np.diff(columns) == 1).all()
        np.testing.assert_array_equal(column[rows, columns], np.arange(length))
        assert len(set(segment[rows, columns])) == 1
    assert ((segment > 0) == (sequence >= 0)).all() and (sequence >= 0).sum() == lengths.sum()
    for row in segment:
        assert set(row) - {0} == set(range(1, row.max() + 1))
    parts = segment.reshape(4, 6, 15).swapaxes(0, 1)  # as `run_microbatches` splits them
    np.testing.assert_array_equal((parts > 0).any(axis=(1, 2)), np.arange(6) < used)
    assert used < 6


def test_prompts_are_shared_by_hand():
    length, prompt, group = np.array([9, 5, 7, 3, 3, 6]), np.array([4, 4, 4, 1, 1, 5]), np.array([0, 0, 0, 1, 1, 2])
    assert share_prompts(length, prompt, group, 14) == [
        [Piece(0, 0, 3), Piece(0, 3, 6), Piece(2, 3, 4)],  # 3 + 6 + 4, and 2 more do not fit
        [Piece(1, 0, 5)],
        *([Piece(3, 0, 3)], [Piece(4, 0, 3)]),  # a prompt of one token is not worth it
        [Piece(5, 0, 6)],
    ]


def test_a_shared_prompt_stands_once_before_its_responses():
    rng = np.random.default_rng(0)
    prompt, group = np.repeat(rng.integers(1, 9, 6), 4), np.repeat(np.arange(6), 4)
    length, shape = prompt + rng.integers(1, 8, 24), RowShape(24, 24, 4, True)
    packed = pack(share_prompts(length, prompt, group, 24), shape)
    seen = np.zeros((24, 24), int)
    for row, place in zip(*np.nonzero(packed.segment_BT), strict=True):
        index, column = packed.sequence_BT[row, place], packed.column_BT[row, place]
        own = packed.segment_BT[row] == packed.segment_BT[row, place]
        before = (packed.prefix_BT[row, place] > 0) & (packed.segment_BT[row] == packed.prefix_BT[row, place])
        visible = (own & (np.arange(24) <= place)) | before
        np.testing.assert_array_equal(np.sort(packed.column_BT[row, visible]), np.arange(column + 1), "all before it")
        assert set(group[packed.sequence_BT[row, visible]]) == {group[index]}
        assert column < prompt[index] or (packed.sequence_BT[row, own] == index).all()
        seen[index, column] += 1
    answers = np.arange(24)[None] >= prompt[:, None]
    np.testing.assert_array_equal(seen[answers], (answers & (np.arange(24)[None] < length[:, None]))[answers])
    assert seen.sum() < 0.8 * length.sum()


def test_a_tenth_of_the_work_is_padding_at_most_on_geometric_lengths():
    lengths = 16 + np.minimum(np.random.default_rng(0).geometric(1 / 32, 256), 256)
    sampling = Sampling(prompts=32, group=8, max_prompt_tokens=16, max_tokens=256)
    shape = row_shape(sampling, Schedule(minibatches=1, microbatch_tokens=1088), 1)
    assert shape == RowShape(256, 272, 4, True)
    assert lengths.sum() / (pack(separate(lengths), shape).used * shape.microbatch * shape.length) > 0.9


@pytest.mark.parametrize(
    ("schedule", "shards", "shape"),
    [
        (Schedule(minibatches=1), 1, RowShape(12, 12, 12, False)),
        (Schedule(minibatches=2), 8, RowShape(8, 12, 8, False)),
        (Schedule(minibatches=1, microbatch_rows=4), 4, RowShape(12, 12, 4, False)),
        (Schedule(minibatches=1, microbatch_tokens=23), 1, RowShape(12, 23, 1, True)),
        (Schedule(minibatches=2, microbatch_tokens=100), 4, RowShape(8, 12, 8, True)),
        (Schedule(minibatches=2, microbatch_tokens=100, share_prompts=True), 4, RowShape(8, 25, 4, True)),
    ],
)
def test_shapes_of_a_minibatch(schedule, shards, shape):
    assert row_shape(SAMPLING, schedule, shards) == shape


@functools.cache
def rollout(seed=0, sets=False):
    """Ragged responses, some truncated, in groups with one prompt; what stands behind them is noise.

    With `sets`, each token was chosen from itself and two other tokens, or itself and one.
    """
    rng = np.random.default_rng(seed)
    prompt, length = np.repeat([4, 1, 3, 2], 3).astype(np.int32), rng.integers(1, C + 1, N).astype(np.int32)
    column = np.arange(S + C)[None]
    tokens = rng.integers(0, MODEL.vocab_size, (N, S + C), dtype=np.int32)
    tokens = np.where(column < prompt[:, None], np.repeat(tokens[::3], 3, axis=0), tokens)
    mask = (column >= prompt[:, None]) & (column < (prompt + length)[:, None])
    sometimes = np.where(rng.random((N, S + C)) < 0.5, (tokens + 9) % 24, 24) if sets else None
    return Rollout(
        tokens_BT=tokens,
        mask_BT=mask,
        logp_BT=np.where(mask, rng.normal(-3, 0.3, (N, S + C)), 0).astype(np.float32),
        prompt_length_B=prompt,
        length_B=length,
        finished_B=length < C,
        kept_BTK=np.stack([(tokens + 7) % 24, tokens, sometimes], -1).astype(np.uint8) if sets else None,
    )


EVERYTHING = {
    "loss": functools.partial(losses.gspo_token, clip_low=0.05, clip_high=0.05),
    "correction": correction.truncate_geometric,
    "rejection": functools.partial(correction.reject_off_policy, delta=0.1),
    "reference": Reference(loss=kl.token_kl, coefficient=0.3),
    "regularizers": Regularizers(entropy=0.1, load_balance=0.1, router_z=0.1),
    "calibration": Calibration(),
}


def moved(params, scale):
    return jax.tree.map(lambda leaf: leaf + scale * jnp.sin(jnp.arange(leaf.size)).reshape(leaf.shape), params)


def learn(schedule, mesh, objective=EVERYTHING, lora=None, replay=True, on_policy=False, data=None):
    """A minibatch scored by a policy and updated by one near it: parameters, metrics, sums of log-probs."""
    data, shape = data or rollout(), row_shape(SAMPLING, schedule, sharding.batch_shards(mesh))
    settings = StepSettings(
        config=MODEL,
        mesh=mesh,
        temperature=SAMPLING.temperature,
        microbatch_rows=shape.microbatch,
        packed=shape.packed,
        routing_replay=replay,
    )
    update = train_step.make_update(settings, objective_with(**objective), SGD)
    sharing = SAMPLING.group if schedule.share_prompts else 0
    batches, layouts = minibatches.split_minibatches(data, 1, shape, mesh, without_overlong=True, sharing=sharing)
    state = new_state(start(lora), SGD, jax.random.key(1))
    state = jax.device_put(
        jax.tree.map(jnp.copy, replace(state, adapted=Adapted(jnp.float32(0.05), jnp.float32(0.05), jnp.float32(0)))),
        jax.tree.map(lambda leaf: leaf.sharding, abstract_state(MODEL, SGD, mesh, lora)),
    )
    old, reference = moved(start(None), 1e-3), start(None)
    if not on_policy:
        score = train_step.make_score(settings, keep_experts=replay)
        batches, (of_old,) = minibatches.score_minibatches(score, old, reference, batches, range(len(batches)))
    (batch,) = minibatches.set_advantages(batches, layouts, np.linspace(-1, 1, N), mesh)
    batch, computes_its_own = train_step.fill_old_logp(batch)
    assert computes_its_own == on_policy
    state, found, scores = update(state, batch, on_policy)
    of_old = scores if on_policy else of_old
    found.pop("ring_fallbacks", None)  # where experts are sharded
    after = metrics.score_metrics([(batch, of_old)])
    known = replace(batch, old_logp_BT=of_old.logp_BT, ref_logp_BT=of_old.logp_BT)
    reference = ReferenceTerm(settings=Reference(reward=lambda old, _, mask: jnp.where(mask, old, 0)))
    ((_, sums),) = minibatches.sum_penalties([reference], [known], layouts)
    results = jax.device_get((state.params, found, after, scores.count_LE))
    return results, sums, (layouts, update, state, batch)


@functools.cache
def start(lora):
    params = tiny.params(MODEL)
    if lora is None:
        return params
    factors = jax.tree.map(lambda leaf: leaf + 0.02, adapters.init(MODEL, lora, jax.random.key(3)))
    return adapters.attach_adapters(params, factors, lora)


ALONE = sharding.make_mesh(config.Mesh(), jax.devices()[:1])


def assert_close(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(np.abs(b).max(initial=0), 0.1), err_msg=name)


@functools.cache
def separate_rows():
    """The update with everything on, and a row for each response."""
    return learn(Schedule(minibatches=1), ALONE)


def compare(packed_mesh=ALONE, schedule=SCHEDULE, **options):
    got, got_sums, rest = learn(schedule, packed_mesh, **options)
    found = learn(Schedule(minibatches=1), ALONE, **options) if options else separate_rows()
    want, want_sums, (layouts, *_) = found
    assert minibatches.packing_efficiency(rest[0]) > minibatches.packing_efficiency(layouts)
    if schedule.share_prompts:
        assert rest[0][0].tokens < layouts[0].tokens
        got, want = got[:-1], want[:-1]  # experts' counts are of the tokens that are computed
    assert_close(got, want)
    np.testing.assert_allclose(got_sums, want_sums, rtol=1e-5)
    return rest


def test_an_update_of_packed_rows_is_that_of_the_same_responses_with_a_row_each():
    """Loss, gradient and all metrics, in microbatches; another packing of other lengths compiles nothing."""
    _, update, state, batch = compare()
    assert batch.tokens_BT.shape == (12, 15) and batch.segment_BT.max() > 1
    other, layouts = minibatches.split_minibatches(rollout(1), 1, row_shape(SAMPLING, SCHEDULE, 1), ALONE)
    other = replace(
        minibatches.set_advantages(other, layouts, np.ones(N), ALONE)[0],
        old_logp_BT=batch.old_logp_BT,
        ref_logp_BT=batch.ref_logp_BT,
        expert_BLTA=batch.expert_BLTA,
    )
    assert not np.array_equal(other.segment_BT, batch.segment_BT)
    update(state, other, False)
    assert update._cache_size() == 1


SHARED = Schedule(minibatches=1, microbatch_tokens=30, share_prompts=True)


def test_responses_may_share_their_prompt():
    """Loss, gradient through the prompt, and all metrics; the experts to replay are those of the shared rows."""
    *_, batch = compare(schedule=SHARED)
    assert batch.prefix_BT.max() > 0


@pytest.mark.parametrize("schedule", [SCHEDULE, pytest.param(SHARED, marks=pytest.mark.slow)], ids=["packed", "shared"])
def test_sampling_masks_stay_with_their_tokens(schedule):
    objective = {"loss": losses.grpo, "regularizers": Regularizers(entropy=0.1)}
    compare(schedule=schedule, objective=objective, replay=False, data=rollout(sets=True))


ON_POLICY = {"objective": {"loss": losses.gspo}, "replay": False, "on_policy": True}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [SCHEDULE, SHARED], ids=["packed", "shared prompts"])
def test_packed_rows_may_compute_their_own_old_log_probs(schedule):
    compare(schedule=schedule, **ON_POLICY)


FAMILY = [
    *(losses.gspo, losses.grpo, losses.gmpo, losses.luspo, losses.vespo, losses.cispo, losses.dapo, losses.dppo_kl),
    *(losses.dppo_tv, losses.dr_grpo, losses.importance_sampling, losses.sapo),
]


@pytest.mark.slow
@pytest.mark.parametrize("loss", FAMILY, ids=lambda loss: loss.__name__)
def test_every_loss(loss):
    compare(objective={"loss": loss}, replay=False)


@pytest.mark.slow
def test_adapters():
    compare(objective={"loss": losses.grpo}, lora=config.Lora(rank=2, alpha=2.0))


MESHES = {
    "fsdp": config.Mesh(fsdp=2),
    "expert and tensor": config.Mesh(fsdp=1, expert=2, tensor=2),
    "context": config.Mesh(fsdp=1, context=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [SCHEDULE, SHARED], ids=["packed", "shared prompts"])
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(mesh, schedule):
    size = {"fsdp": 2, "expert and tensor": 4, "context": 2}[mesh]
    on_mesh = sharding.make_mesh(MESHES[mesh], jax.devices()[:size])
    compare(on_mesh, schedule, objective={"loss": losses.gspo_token})


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["off", "sampler"])
def test_a_run_with_shared_prompts_is_one_with_separate_rows(tmp_path, replay):
    """Drawn samples, losses and gradients, over three steps; the experts' load is of fewer tokens."""
    runs = {}
    for name, packed in {"separate": {}, "shared": {"microbatch_tokens": 256, "share_prompts": True}}.items():
        schedule = replace(experiment.schedule, steps=3, eval_every=0, **packed)
        run = replace(experiment, routing_replay=replay, warm_start=None, schedule=schedule)
        loop.train(run, tmp_path / name)
        rows = record.read_metrics(RunDir(tmp_path / name).metrics)
        runs[name] = [row for row in rows if "policy/loss" in row]
    for want, got in zip(runs["separate"], runs["shared"], strict=True):
        assert got["learner/tokens"] < want["learner/tokens"]
        for metric in ("reward/mean", "response/length_mean", "policy/loss", "policy/entropy", "optim/grad_norm"):
            np.testing.assert_allclose(got[metric], want[metric], rtol=1e-4, atol=5e-6, err_msg=metric)
