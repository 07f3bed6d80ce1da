"""Of 16 servers one is wrong in few tokens of late turns, or a little in all of them: it is found, and no other one."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_experiment
from api import init_state, make_runtime, prepare_minibatches

from gspax.learner import sources
from gspax.learner.minibatches import gather_logp, score_minibatches
from gspax.learner.sources import differences_by_source, find_outliers, turn_metrics
from gspax.rollout.set_aside import ServersSetAside
from gspax.training.judging import judge, measure
from gspax.types import Rollout

SERVERS, RESPONSES, TURNS, LENGTH = 16, 16, 6, 43  # of each server; tokens of a turn, the last of which is a reply


def healthy():
    """A rollout, and the learner's log-probs, which differ by heavy-tailed rounding errors of 0.011 nats on average."""
    rng, shape = np.random.default_rng(0), (SERVERS * RESPONSES, TURNS * LENGTH)
    mask_NT = np.broadcast_to(np.arange(shape[1]) % LENGTH < LENGTH - 1, shape)
    logp_NT = np.where(mask_NT, -rng.exponential(size=shape), 0).astype(np.float32)
    source_NT = np.broadcast_to(np.arange(1, SERVERS + 1).repeat(RESPONSES)[:, None], shape)
    length_N = np.full(shape[0], shape[1], np.int32)
    rollout = Rollout(
        tokens_BT=np.zeros(shape, np.int32),
        mask_BT=mask_NT,
        logp_BT=logp_NT,
        prompt_length_B=np.zeros_like(length_N),
        length_B=length_N,
        finished_B=length_N > 0,
        source_BT=np.where(mask_NT, source_NT, 0),
    )
    return rollout, logp_NT + 0.0036 * np.exp(1.5 * rng.normal(size=shape)) * rng.choice([-1, 1], shape)


def late_tokens(rng, old_logp_NT):
    """One token in a hundred after the third turn is another one than the server's log-prob is of."""
    late = old_logp_NT[:, 3 * LENGTH :]
    late[rng.random(late.shape) < 0.01] -= 8


def stale_weights(rng, old_logp_NT):
    old_logp_NT += rng.normal(scale=0.3, size=old_logp_NT.shape)


@pytest.mark.parametrize(
    ("break_one", "reason"),
    [
        (late_tokens, "tokens differ from the learner's by more than 2 nats"),
        (stale_weights, "its log-probs differ from the learner's by 0.24 nats on average over 4,032 tokens"),
        (lambda *_: None, ""),
    ],
)
def test_a_wrong_server_of_16_is_found_in_a_rollout(break_one, reason):
    rollout, old_logp_NT = healthy()
    break_one(np.random.default_rng(1), old_logp_NT[7 * RESPONSES : 8 * RESPONSES])
    found = find_outliers(differences_by_source(old_logp_NT, rollout))
    assert [*found] == [7] * bool(reason) and all(reason in why for why in found.values()), found
    turns = [turn_metrics(old_logp_NT, rollout)[f"mismatch/abs_diff_turn_{turn}"] for turn in range(1, TURNS + 1)]
    if break_one is late_tokens:
        assert min(turns[3:]) > 1.2 * max(turns[:3])


def test_one_token_or_one_response_far_from_the_others_accuses_no_server():
    """A token counts at most 2 nats, and a server with one response, which may be an unusual one, has a wide limit."""
    rollout, old_logp_NT = healthy()
    old_logp_NT[7 * RESPONSES, 0] += 600
    single = 3 * RESPONSES  # server 4's; its others are server 3's
    rollout.source_BT[single + 1 : single + RESPONSES] -= rollout.mask_BT[0]
    diff_T = old_logp_NT[single] - rollout.logp_BT[single]
    old_logp_NT[single] += 11 * diff_T
    assert not find_outliers(differences_by_source(old_logp_NT, rollout))


RESPONSES_OF_4 = 64  # of 4 tokens each after 4 of a prompt, in microbatches of 4 responses
MIXED, APART = np.arange(RESPONSES_OF_4) % 4 + 1, np.arange(RESPONSES_OF_4) // 16 + 1  # the server of each


def sampled(source_N):
    """A rollout of random tokens."""
    shape = RESPONSES_OF_4, 8
    mask_BT = jnp.broadcast_to(jnp.arange(8) >= 4, shape)
    return Rollout(
        tokens_BT=jax.random.randint(jax.random.key(1), shape, 1, 12),
        mask_BT=mask_BT,
        logp_BT=jnp.zeros(shape),
        prompt_length_B=np.full(shape[0], 4),
        length_B=np.full(shape[0], 4),
        finished_B=jnp.ones(shape[0], bool),
        source_BT=jnp.where(mask_BT, source_N[:, None], 0).astype(jnp.uint16),
    )


def prepare(source_N, schedule, old_logp="learner"):
    """A runtime, a state after a run's first step, a rollout, its minibatches, and the scores of all of these."""
    small = small_experiment.experiment
    variant = replace(
        small,
        model=replace(small.model, num_hidden_layers=1),
        sampling=replace(small.sampling, prompts=16),
        schedule=replace(small.schedule, **schedule),
        old_logp=old_logp,
    )
    runtime, rollout = make_runtime(variant), sampled(source_N)
    state = init_state(variant.model, runtime.optimizer, jax.random.key(0), runtime.mesh)
    state = replace(state, step=state.step + 1)  # a run's first step computes all minibatches
    prepared = prepare_minibatches(runtime, state, (), SimpleNamespace(rollout=rollout, version=0))
    everything = score_minibatches(runtime.steps.score, state.params, prepared.batches, range(len(prepared.batches)))
    return runtime, state, rollout, prepared, everything[1]


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    ("schedule", "old_logp", "source_N", "further"),
    [
        pytest.param({"minibatches": 4, "microbatch_rows": 4}, "learner", MIXED, 0, id="enough in the pass"),
        pytest.param({"minibatches": 4, "microbatch_rows": 4}, "learner", APART, 1, id="first minibatch alone"),
        pytest.param({"minibatches": 2, "microbatch_rows": 4}, "sampler", MIXED, 4, id="no pass"),
        pytest.param({"minibatches": 1, "microbatch_tokens": 32}, "learner", APART, 4, id="packed"),
    ],
)
def test_only_microbatches_that_the_check_needs_are_computed(schedule, old_logp, source_N, further, monkeypatch):
    """It needs 13 tokens of each server. One server is wrong, and is found wherever its responses are."""
    monkeypatch.setattr(sources, "ENOUGH", 13)
    runtime, state, rollout, prepared, everything = prepare(source_N, schedule, old_logp)
    score, calls, logp_NT = runtime.steps.score, [], gather_logp(everything, prepared.layouts, rollout.tokens_BT.shape)
    logp_NT[source_N == 2] += 0.1

    def counting(params, tokens_BT, *rest, **columns):
        calls.append(len(tokens_BT))
        return score(params, tokens_BT, *rest, **columns)

    runtime = replace(runtime, steps=runtime.steps._replace(score=counting))
    rollout = replace(rollout, logp_BT=jnp.asarray(logp_NT))
    _, wrong = judge(runtime, state.params, rollout, *prepared)
    assert [*wrong] == [2] and "by 0.1 nats" in wrong[2] and float(wrong[2].split()[-1]) < 1e-5, wrong
    scored = [(batch, everything[index]) for index, batch in enumerate(prepared.batches)]
    metrics = measure(runtime, rollout, everything, scored, prepared.layouts)
    assert [metrics[f"mismatch/abs_diff_server_{number}"] > 0.09 for number in (1, 2, 3, 4)] == [
        False,
        True,
        False,
        False,
    ]
    assert len(calls) == further, calls


@pytest.mark.usefixtures("one_device")
def test_a_server_that_is_wrong_in_the_first_minibatch_alone_is_set_aside_after_the_update(monkeypatch, capsys):
    monkeypatch.setattr(sources, "ENOUGH", 13)
    runtime, state, rollout, prepared, everything = prepare(MIXED, {"minibatches": 4, "microbatch_rows": 4})
    logp_NT = gather_logp(everything, prepared.layouts, rollout.tokens_BT.shape)
    logp_NT[:16][MIXED[:16] == 2] += 0.1
    rollout = replace(rollout, logp_BT=jnp.asarray(logp_NT))
    runtime = replace(runtime, sampler=SimpleNamespace(set_aside=ServersSetAside(["a", "b", "c", "d"])))
    assert judge(runtime, state.params, rollout, *prepared)[1] == {}
    scored = [(batch, everything[index]) for index, batch in enumerate(prepared.batches)]
    measure(runtime, rollout, everything, scored, prepared.layouts)
    assert not runtime.sampler.set_aside.reasons, "what was judged before is not judged again"
    measure(runtime, rollout, prepared.scores, scored, prepared.layouts)
    assert [*runtime.sampler.set_aside.reasons] == [2]
    (line,) = capsys.readouterr().err.splitlines()
    assert "engine: b is set aside" in line and line.endswith("an update was trained on what it sampled")
