"""Packed rows: every response once, little padding, and the update of the same responses with a row each."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import tiny
from api import (
    Adapted,
    Inputs,
    Rollout,
    RunDir,
    StepSettings,
    TrainedPolicy,
    abstract_state,
    adapters,
    forward,
    loop,
    metrics,
    minibatches,
    new_state,
    record,
    segment_ids,
    sharding,
    train_step,
)
from small_experiment import experiment, objective_with

from gspax import config, losses
from gspax.config import Calibration, Reference, Regularizers, RowShape, Sampling, Schedule, row_shape
from gspax.learner.packing import (
    Piece,
    first_fit_decreasing,
    pack,
    separate,
    share_prompts,
    unit_length,
)
from gspax.learner.prefixes import Tokens, separate_sequences, share_prefixes, split_sequences
from gspax.losses import correction, kl
from gspax.model.terms.reference import ReferenceTerm

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
    sample, column, segment, prefix, used = pack(separate(lengths), shape)
    assert not prefix.any()
    assert sample.shape == column.shape == segment.shape == (24, 15)
    for index, length in enumerate(lengths):
        rows, columns = np.nonzero(sample == index)
        assert len(set(rows)) == 1 and (np.diff(columns) == 1).all()
        np.testing.assert_array_equal(column[rows, columns], np.arange(length))
        assert len(set(segment[rows, columns])) == 1
    assert ((segment > 0) == (sample >= 0)).all() and (sample >= 0).sum() == lengths.sum()
    for row in segment:
        assert set(row) - {0} == set(range(1, row.max() + 1))
    parts = segment.reshape(4, 6, 15).swapaxes(0, 1)  # as `run_microbatches` splits them
    np.testing.assert_array_equal((parts > 0).any(axis=(1, 2)), np.arange(6) < used)
    assert used < 6


def test_prompts_are_shared_by_hand():
    length, prompt, group = np.array([9, 5, 7, 3, 3, 6]), np.array([4, 4, 4, 1, 1, 5]), np.array([0, 0, 0, 1, 1, 2])
    assert share_prompts(length, prompt, group, 14) == [
        [Piece(0, 0, 3), Piece(0, 3, 6, parent=0), Piece(2, 3, 4, parent=0)],  # 3 + 6 + 4, and 2 more do not fit
        [Piece(1, 0, 5)],
        *([Piece(3, 0, 3)], [Piece(4, 0, 3)]),  # a prompt of one token is not worth it
        [Piece(5, 0, 6)],
    ]


def sequences(*given):
    """Sequences of samples, from texts: capital letters are sampled."""
    return [
        [
            Tokens(
                number,
                sum(map(len, texts[:place])),
                np.array([ord(letter.lower()) for letter in text]),
                np.array([letter.isupper() for letter in text]),
            )
            for place, text in enumerate(texts)
        ]
        for number, texts in enumerate(given)
    ]


def test_samples_are_split_into_their_sequences():
    tokens, length = np.arange(18).reshape(2, 9), np.array([9, 5])
    number = np.array([[1, 1, 1, 1, 1, 2, 2, 3, 3], [1] * 5 + [0] * 4])
    mask = tokens % 2 == 1
    samples = split_sequences(tokens, mask, number, length)
    assert [[one.tokens.tolist() for one in sample] for sample in samples] == [
        [[0, 1, 2, 3, 4], [5, 6], [7, 8]],
        [[9, 10, 11, 12, 13]],
    ]
    assert [one.prompt for one in samples[0]] == [1, 0, 0]
    assert separate_sequences(samples) == [[Piece(0, 0, 5), Piece(0, 5, 2), Piece(0, 7, 2)], [Piece(1, 0, 5)]]


def test_prefixes_are_shared_by_hand():
    """What the policy sampled stands once; a branch begins with the last shared token, which another one sampled."""
    (unit,) = share_prefixes(sequences(["pqABrsCD", "pqabrtEF", "pqxyG"]), np.array([0]), 30)
    assert unit == [
        Piece(0, 0, 1),  # p
        Piece(0, 1, 3, parent=0),  # q A B
        Piece(0, 4, 4, parent=1),  # r s C D
        Piece(0, 12, 4, parent=1),  # r t E F, of the second sequence, from its column 8 on
        Piece(0, 17, 4, parent=0),  # q x y G
    ]
    (unit,) = share_prefixes(sequences(["abC", "ABc"], ["abD"]), np.zeros(2, int), 30)
    assert unit == [  # the second sequence has sampled what the first has: both count
        *(Piece(0, 0, 1), Piece(0, 1, 2, parent=0), Piece(1, 1, 2, parent=0)),
        Piece(0, 3, 3),
    ]
    (unit,) = share_prefixes(sequences(["pqABrsCD", "pqabrtEF", "pqxyG"]), np.array([0]), 30, deep=False)
    assert unit == [Piece(0, 0, 1), *(Piece(0, first, length, parent=0) for first, length in ((1, 7), (9, 7), (17, 4)))]
    units = share_prefixes(sequences(["abC"], ["abD"], ["abEFGHIJ"]), np.zeros(3, int), 8)
    assert sorted(map(unit_length, units)) == [5, 8], "as many as fit"


def test_every_branch_of_a_tree_is_its_sequence():
    """Random sequences of few letters: the path from the root is the sequence, and each sampled token stands once."""
    rng = np.random.default_rng(0)
    for round in range(200):
        texts = [["p" + "".join(rng.choice(list("abAB"), rng.integers(1, 7))) for _ in range(3)] for _ in range(2)]
        samples = sequences(*texts)
        (unit,) = share_prefixes(samples, np.zeros(2, int), 60, deep=round % 2 == 0)
        assert round % 2 == 0 or all(unit[piece.parent].parent < 0 for piece in unit if piece.parent >= 0)
        rows = ["".join(row) for row in texts]

        def text(number, unit=unit, rows=rows):
            piece = unit[number]
            above = "" if piece.parent < 0 else text(piece.parent)
            return above + rows[piece.sample][piece.first : piece.first + piece.length]

        paths = [text(number).lower() for number in range(len(unit))]
        wanted = [one.lower() for row in texts for one in row]
        leaves = set(range(len(unit))) - {piece.parent for piece in unit}
        assert sorted(paths[leaf] for leaf in leaves) == sorted(wanted)
        taken = [(piece.sample, piece.first + offset) for piece in unit for offset in range(piece.length)]
        assert len(set(taken)) == len(taken), "no column of a sample twice"
        sampled = [(n, column) for n, row in enumerate(rows) for column, letter in enumerate(row) if letter.isupper()]
        assert set(sampled) <= set(taken)
        for number, piece in enumerate(unit):  # the token before a sampled one is beside it
            if rows[piece.sample][piece.first].isupper():
                before = unit[number - 1]
                assert piece.parent == number - 1 and (before.sample, before.first + before.length) == piece[:2]


def test_a_shared_prompt_stands_once_before_its_responses():
    rng = np.random.default_rng(0)
    prompt, group = np.repeat(rng.integers(1, 9, 6), 4), np.repeat(np.arange(6), 4)
    length, shape = prompt + rng.integers(1, 8, 24), RowShape(24, 24, 4, True)
    packed = pack(share_prompts(length, prompt, group, 24), shape)
    seen = np.zeros((24, 24), int)
    for row, place in zip(*np.nonzero(packed.segment_BT), strict=True):
        index, column = packed.sample_BT[row, place], packed.column_BT[row, place]
        own = packed.segment_BT[row] == packed.segment_BT[row, place]
        before = (packed.prefix_BT[row, place] > 0) & (packed.segment_BT[row] == packed.prefix_BT[row, place])
        visible = (own & (np.arange(24) <= place)) | before
        np.testing.assert_array_equal(np.sort(packed.column_BT[row, visible]), np.arange(column + 1), "all before it")
        assert set(group[packed.sample_BT[row, visible]]) == {group[index]}
        assert column < prompt[index] or (packed.sample_BT[row, own] == index).all()
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
        jax.tree.map(lambda leaf: leaf.sharding, abstract_state(TrainedPolicy(MODEL, mesh, SGD, lora))),
    )
    old, reference = moved(start(None), 1e-3), start(None)
    if not on_policy:
        score = train_step.make_score(settings, keep_experts=replay)
        batches, scored = minibatches.score_minibatches(score, old, batches, range(len(batches)))
        batches = minibatches.score_first(score, reference, batches)
        (of_old,) = scored.values()
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
    longer = {
        name: value for name, value in got[2].items() if name not in want[2]
    }  # places of longer rows, which are empty
    assert not any(longer.values())
    got = (*got[:2], {name: value for name, value in got[2].items() if name not in longer}, *got[3:])
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


@functools.cache
def of_several_sequences():
    """Samples of up to three sequences: the second begins as the first did, the third with the prompt only."""
    data, rng = rollout(), np.random.default_rng(5)
    tokens, mask, sequence = (np.zeros((N, S + C), dtype) for dtype in (np.int32, bool, np.int32))
    for n, prompt in enumerate(data.prompt_length_B):
        begin = [(token, False) for token in data.tokens_BT[n, :prompt]]
        new = [(token, True) for token in rng.integers(0, MODEL.vocab_size, 5, dtype=np.int32)]
        first = begin + new[: 1 + (prompt < 3)]
        second = [(token, False) for token, _ in first] + new[2:4]
        sequences = (first, second, begin + new[4:])[: 1 + n % 3]
        row = [(*each, number) for number, one in enumerate(sequences, start=1) for each in one][: S + C]
        tokens[n, : len(row)], mask[n, : len(row)], sequence[n, : len(row)] = zip(*row, strict=True)
    assert sequence.max() == 3
    length = (sequence > 0).sum(1).astype(np.int32) - data.prompt_length_B
    logp = np.where(mask, data.logp_BT - 1, 0).astype(np.float32)
    return replace(
        data, tokens_BT=tokens, mask_BT=mask, logp_BT=logp, length_B=length, sequence_BT=sequence, kept_BTK=None
    )


def filter_truncated(data):
    """The mask without the completions that were cut, which `learn` leaves out."""
    return data.mask_BT & data.finished_B[:, None]


@pytest.mark.parametrize("schedule", [SCHEDULE, SHARED], ids=["packed", "shared"])
def test_the_sequences_of_a_sample_may_stand_anywhere_in_its_row(schedule):
    """Loss, gradient and all metrics of packed rows are those of rows with one sample each."""
    *_, batch = compare(schedule=schedule, data=of_several_sequences())
    assert batch.sample_BT.max() > 1 and (batch.segment_BT.max(1) > batch.sample_BT.max(1)).any()
    assert schedule is SCHEDULE or batch.prefix_BT.max() > 1, "a segment that continues one which is no prompt"


def test_a_sample_of_several_sequences_has_one_ratio():
    """GSPO's gradient is that of the definition, with each sequence computed in a row of its own."""
    data, bound, advantage = of_several_sequences(), 5e-4, np.linspace(-1, 1, N)
    loss = functools.partial(losses.gspo, clip_low=bound, clip_high=bound)
    (got, found, *_), _, _ = learn(Schedule(minibatches=1), ALONE, {"loss": loss}, replay=False, data=data)
    owner, rows = zip(
        *((n, data.sequence_BT[n] == number) for n in range(N) for number in range(1, data.sequence_BT[n].max() + 1)),
        strict=True,
    )
    tokens, mask, segment = (np.zeros((len(rows), S + C), np.int32) for _ in range(3))
    kept = filter_truncated(data)
    for row, (n, of_sequence) in enumerate(zip(owner, rows, strict=True)):
        here = slice(of_sequence.sum())
        tokens[row, here], mask[row, here], segment[row, here] = data.tokens_BT[n, of_sequence], kept[n, of_sequence], 1
    settings = StepSettings(config=MODEL, mesh=ALONE, temperature=SAMPLING.temperature)
    score = functools.partial(forward, settings=settings, rows=Inputs(tokens, segment, mask.astype(bool)))
    old = np.asarray(score(moved(start(None), 1e-3)).logp_BT)

    def objective(params):
        log_ratio = jax.ops.segment_sum(((score(params).logp_BT - old) * mask).sum(1), jnp.array(owner), N)
        count = kept.sum(1)
        ratio = jnp.exp(log_ratio / np.maximum(count, 1))
        value = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - bound, 1 + bound) * advantage)
        return -(value * (count > 0)).sum() / (count > 0).sum(), ratio

    (value, ratio), gradient = jax.value_and_grad(objective, has_aux=True)(start(None))
    assert 0 < found["clip_fraction_sequences"] < 1 and np.abs(ratio - 1).max() > bound
    np.testing.assert_allclose(found["loss"], value, rtol=1e-5)
    assert_close(jax.tree.map(lambda a, b: a - b, start(None), got), gradient)


def trees():
    """Nine rollouts in groups of three, of 1, 2, or 5 sequences each: log-probs of the sampler and of the policy."""
    rng, width = np.random.default_rng(11), 96
    tokens, mask, sequence = (np.zeros((9, width), dtype) for dtype in (np.int32, bool, np.int32))
    prompt, length = np.zeros(9, np.int32), np.zeros(9, np.int32)
    for n in range(9):
        begin = [(token, False) for token in (1 + n // 3, 2, 3 + n // 3, 4)]  # equal in a group
        written = [(token, True) for token in rng.integers(5, 20, rng.integers(2, 9))]
        own, row = [begin + written], list[tuple[int, bool, int]]()
        while len(own) < (1, 2, 5)[n % 3]:
            before = [(token, False) for token, _ in own[rng.integers(len(own))]]
            more = rng.integers(5, 20, rng.integers(2, 9))
            own.append([*before[: rng.integers(1, len(before) + 1)][:12], (21, False), *((t, True) for t in more)])
        for number, one in enumerate(own, start=1):
            row += [(*each, number) for each in one]
        tokens[n, : len(row)], mask[n, : len(row)], sequence[n, : len(row)] = zip(*row, strict=True)
        prompt[n], length[n] = len(begin), len(row) - len(begin)
    old = np.where(mask, rng.normal(-2, 0.5, mask.shape), 0).astype(np.float32)
    logp = (old + mask * (rng.normal(0, 0.1, mask.shape) + rng.normal(0, 0.05, (9, 1)))).astype(np.float32)
    lengths = {"prompt_length_B": prompt, "length_B": length, "finished_B": np.ones(9, bool)}
    return Rollout(tokens_BT=tokens, mask_BT=mask, logp_BT=old, sequence_BT=sequence, **lengths), logp


def loop_over_sequences(rollout, logp, advantage, bound):
    """The definition in float64: each rollout's objective, and its gradient with respect to every log-prob."""
    objective, gradient, ratios = np.zeros(9), np.zeros(logp.shape), np.ones(9)
    for n in range(9):
        branches = [
            [t for t in range(logp.shape[1]) if rollout.sequence_BT[n, t] == number and rollout.mask_BT[n, t]]
            for number in range(1, rollout.sequence_BT[n].max() + 1)
        ]
        log_ratio, chosen = 0.0, 0
        for branch in branches:
            for t in branch:
                log_ratio, chosen = log_ratio + float(logp[n, t]) - float(rollout.logp_BT[n, t]), chosen + 1
        ratio = ratios[n] = math.exp(log_ratio / chosen)
        held = min(max(ratio, 1 - bound), 1 + bound)
        for branch in branches:
            for t in branch:
                free, clipped = ratio * float(advantage[n, t]), held * float(advantage[n, t])
                objective[n] += min(free, clipped) / chosen
                gradient[n, t] = free / chosen if free <= clipped else 0.0
    return objective, gradient, ratios


@pytest.mark.parametrize("loss", [losses.gspo, losses.gspo_token])
@pytest.mark.parametrize("layout", ["rows", "packed", "shared"])
def test_gspo_of_trees_is_an_explicit_loop_over_rollouts_and_their_sequences(layout, loss):
    """The ratio is the geometric mean over all tokens that the policy chose in a rollout, clipped once."""
    (rollout, logp), bound = trees(), 0.03
    advantage = np.random.default_rng(3).normal(0, 1, logp.shape if loss is losses.gspo_token else (9, 1))
    advantage = np.broadcast_to(advantage, logp.shape).astype(np.float32)
    wanted, slope, ratios = loop_over_sequences(rollout, logp, advantage, bound)
    shape = RowShape(9, 96, 1, False) if layout == "rows" else RowShape(6, 160, 2, True)
    split, layouts = minibatches.split_minibatches(rollout, 1, shape, ALONE, sharing=3 * (layout == "shared"))
    of_rollouts = layout == "rows" and loss is losses.gspo
    given = minibatches.set_advantages(split, layouts, advantage[:, 0] if of_rollouts else advantage, ALONE)
    (batch,), (where,) = minibatches.take_sampler_logp(given), layouts
    number, column = np.broadcast_arrays(where.response, np.maximum(where.column, 0))
    assert layout != "shared" or batch.prefix_BT.max() > 1

    loss = functools.partial(loss, clip_low=bound, clip_high=bound)

    def compute(placed):
        own = loss(placed, batch.old_logp_BT, batch.advantage, batch.mask_BT, segment_ids=segment_ids(batch))
        return own.value.sum() / own.weight.sum()

    value, found = jax.value_and_grad(compute)(jnp.where(number >= 0, logp[number, column], 0.0))
    assert np.abs(np.abs(ratios - 1) - bound).min() > 1e-4 and (slope[rollout.mask_BT] == 0).any()
    np.testing.assert_allclose(value, -wanted.mean(), rtol=2e-6)
    chosen, rows = np.asarray(batch.mask_BT), np.zeros(logp.shape)
    rows[number[chosen], column[chosen]] = np.asarray(found)[chosen]
    np.testing.assert_allclose(rows, -slope / 9, rtol=1e-5, atol=1e-9)
    assert chosen.sum() == rollout.mask_BT.sum() and not np.asarray(found)[~chosen].any()


def test_the_loop_over_sequences_is_gspo_where_there_is_one():
    """The rollouts of one sequence, by the loop that is written from the paper."""
    (rollout, logp), bound = trees(), 0.03
    advantage = np.broadcast_to(np.linspace(-1, 1, 9)[:, None], logp.shape)
    objective, slope, _ = loop_over_sequences(rollout, logp, advantage, bound)
    given = (logp[::3], rollout.logp_BT[::3], advantage[::3, 0], rollout.mask_BT[::3])
    paper = reference.policy(reference.gspo, "by_sequence", *given, clip_low=bound, clip_high=bound)
    np.testing.assert_allclose(-paper.value, objective[::3], rtol=1e-12)
    np.testing.assert_allclose(-paper.gradient, slope[::3], rtol=1e-12)
