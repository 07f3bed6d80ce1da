"""Partial rollouts: whole groups out of the sampler's pool, renewed parameters, nothing across a checkpoint."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from api import (
    InFlight,
    Rollout,
    Skipped,
    grade,
    init_state,
    make_runtime,
    next_rollout,
    staleness_metrics,
    start_rollout,
)
from few_devices import few_devices
from small_experiment import Countdown, Spoiled, experiment

from gspax import config
from gspax.config import GatedDelta, Grading, PartialRollouts, Placement, Sampling, Turns
from gspax.data import CharChat, Problem
from gspax.experiment import validate
from gspax.rewards.scores import reward_calls
from gspax.rollout.group_pool import FREE, choose_groups, new_pool

pytestmark = pytest.mark.usefixtures("unevaluated")

P, G, CARRIED, STEPS = 8, 4, 4, 6


class Numbered:
    """Problems whose prompt is their index."""

    def train(self, index):
        return Problem(prompt=f"{index:03d}=", answer="0")

    heldout = train


PARTIAL = replace(
    experiment,
    model=replace(experiment.model, num_hidden_layers=1, num_experts=0, intermediate_size=32),
    data=Numbered(),
    warm_start=None,
    optimizer=config.Optimizer(learning_rate=0.03),
    sampling=Sampling(prompts=P, group=G, max_prompt_tokens=4, max_tokens=20, chunk=2),
    schedule=replace(experiment.schedule, steps=STEPS, eval_every=0, checkpoint_every=4),
    evaluation=config.Evaluation(problems=8),
    placement=Placement(devices=4, staleness=2, partial=PartialRollouts(carried=CARRIED, ahead=2)),
)
ON_TWO = replace(PARTIAL, placement=replace(PARTIAL.placement, devices=1))  # a device samples, the other learns


TALKING = replace(
    ON_TWO,
    environment=Countdown(),
    tokenizer=CharChat(PARTIAL.tokenizer.alphabet),
    turns=Turns(limit=2),
    sampling=replace(PARTIAL.sampling, max_tokens=40, slots=16),
)
DELTA = replace(  # a gated delta net and a layer of attention; slots wait, are free, and continue carried samples
    TALKING,
    model=replace(
        PARTIAL.model,
        num_hidden_layers=2,
        delta=GatedDelta(key_heads=2, value_heads=4, key_dim=4, value_dim=6),
        delta_layers=(0,),
    ),
)
DRAFTED = replace(ON_TWO, sampling=replace(PARTIAL.sampling, drafts=3, stop=("11", "1=", "24", "0", "935")))
FORMS = {"completions": PARTIAL, "conversations": TALKING, "delta": DELTA, "drafts": DRAFTED}
SPOILED = Spoiled(Numbered(), raising=(7, 34), too_long=(32, 43))  # 32 ends a checkpoint's batch, 34 begins the next
CLOCKS = ("time/", "cpu/", "perf/")


def step_on(runtime, state, batch, *, renew):
    """The state after the updates of a rollout batch; each has parameters of its own if they are renewed."""
    params = jax.tree.map(lambda leaf: leaf * 1.3 if renew else leaf, state.params)
    step = state.step + runtime.experiment.schedule.minibatches
    return replace(state, params=params, step=step, position=state.position + batch.taken)


def draw_batches(runtime, *, renew, skipped=None):
    """The batches of a run, the problems that were in flight when each ended, and the state of each."""
    state = init_state(runtime.experiment.model, runtime.optimizer, jax.random.key(0), runtime.mesh)
    flight = InFlight(skipped or Skipped())
    batches, held, states = [], [], []
    for _ in range(STEPS):
        batch = next_rollout(runtime, state, flight)
        batches.append(batch)
        held.append({index for index in flight.pool.problem_R.tolist() if index != FREE})
        states.append(state)
        state = step_on(runtime, state, batch, renew=renew)
    return batches, held, states


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS)
def runtime(request):
    return runtime_of(request.param)


def runtime_of(run):
    with few_devices(2 * run.placement.devices):
        return make_runtime(run)


def problems_of(batch):
    return [int(problem.prompt[:-1]) for problem in batch.problems]


def completions(rollout):
    """Tokens, log-probs and versions of each row."""
    host = jax.device_get(rollout)
    versions = np.zeros_like(host.tokens_BT) if host.version_BT is None else host.version_BT
    fields = host.tokens_BT, host.logp_BT, versions
    return [tuple(field[row, kept] for field in fields) for row, kept in enumerate(host.mask_BT)]


def drawn_at_once(runtime, state, count):
    """The completions of the first problems, each group by the parameters of a state alone."""
    weights, rows = runtime.sampler.push(state.params, 0), []
    for first in range(0, count, P):
        rows += completions(start_rollout(whole(runtime), weights, state, first, InFlight()).samples.result()[0])
    return {index: rows[index * G : (index + 1) * G] for index in range(count)}


def whole(runtime):
    """The sampler without chunks and drafts, which samples a whole rollout at once."""
    run = runtime.experiment
    sampling, placement = replace(run.sampling, chunk=0, drafts=0), Placement(devices=run.placement.devices)
    return replace(runtime, experiment=replace(run, sampling=sampling, placement=placement))


def check_problems(batches, in_flight, skipped=()):
    """Every problem is in one batch, oldest first, and none is in flight at a checkpoint or at the end."""
    seen, wanted = [problems_of(batch) for batch in batches], [*range(P * STEPS + len(skipped))]
    wanted = [index for index in wanted if index not in skipped]
    assert sorted(itertools.chain(*seen)) == wanted and all(each == sorted(each) for each in seen)
    assert [len(each) for each in in_flight] == [P + CARRIED, P + CARRIED, P, 0, P, 0], "with those admitted ahead"
    assert list(itertools.chain(*seen)) != wanted, "some groups were carried over"
    for done, batch in enumerate(batches):
        assert batch.metrics["rollout/carried"] == (0 if done in (3, 5) else CARRIED)


def test_batches_have_the_samples_of_whole_ones_and_nothing_crosses_a_checkpoint(runtime):
    """With unchanged parameters: pool, places and chunks decide when a completion is sampled, never its tokens."""
    batches, in_flight, states = draw_batches(runtime, renew=False)
    check_problems(batches, in_flight)
    check_completions(batches, drawn_at_once(runtime, states[0], P * STEPS))
    check_stops(runtime.experiment, batches)


def check_stops(experiment, batches):
    """With stop strings, samples end where the first one does, and many do."""
    stop, found = experiment.sampling.stop, []
    for tokens, _, _ in itertools.chain(*(completions(batch.rollout) for batch in batches)) if stop else ():
        text = experiment.tokenizer.decode(tokens.tolist())
        ends = [count for count in range(1, len(text) + 1) if text[:count].endswith(stop)]
        assert ends in ([], [len(text)]), text
        found.append(len(ends))
    assert not stop or len(found) / 4 < sum(found) < len(found)


def check_completions(batches, wanted):
    """Each group has the completions that `drawn_at_once` gives for its problem."""
    for batch in batches:
        rows = completions(batch.rollout)
        for group, index in enumerate(problems_of(batch)):
            for got, want in zip(rows[group * G : (group + 1) * G], wanted[index], strict=True):
                np.testing.assert_array_equal(got[0], want[0])
                np.testing.assert_allclose(got[1], want[1], atol=3e-5)


def test_problems_that_cannot_be_used_are_skipped_and_change_no_other_sample(runtime, capsys):
    spoiled, skipped = replace(runtime, experiment=replace(runtime.experiment, data=SPOILED)), Skipped(0.01)
    batches, in_flight, states = draw_batches(spoiled, renew=False, skipped=skipped)
    bad = {*SPOILED.raising, *SPOILED.too_long}
    check_problems(batches, in_flight, bad)
    check_completions(batches, drawn_at_once(runtime, states[0], P * (STEPS + 1)))
    assert skipped.reasons.keys() == bad
    assert sum(batch.taken for batch in batches) == P * STEPS + len(bad)
    resumed = next_rollout(spoiled, states[4], InFlight(Skipped(0.01)))
    assert problems_of(resumed) == problems_of(batches[4]), "after the checkpoint"


def test_parameters_are_renewed_between_chunks_and_tokens_have_the_version_that_drew_them(runtime):
    batches, in_flight, states = draw_batches(runtime, renew=True)
    check_problems(batches, in_flight)
    by_version = [drawn_at_once(runtime, state, P * STEPS) for state in states]
    changed = 0
    for done, batch in enumerate(batches):
        rows, ages = completions(batch.rollout), []
        for group, index in enumerate(problems_of(batch)):
            for number, (tokens, logp, versions) in enumerate(rows[group * G : (group + 1) * G]):
                ages += (done - versions).tolist()
                assert (np.diff(versions) >= 0).all() and done - 2 <= versions[0] and versions[-1] <= done
                start = (versions == versions[0]).sum()
                want, want_logp, _ = by_version[versions[0]][index][number]
                np.testing.assert_array_equal(tokens[:start], want[:start])
                np.testing.assert_allclose(logp[:start], want_logp[:start], atol=3e-5)
                changed += start < len(tokens) and tokens.tolist() != want.tolist()
        found = staleness_metrics(batch.rollout, done, batch.version)
        assert found == {"rollout/staleness": pytest.approx(np.mean(ages)), "rollout/staleness_max": max(ages)}
    assert changed, "newer parameters sample other tokens"
    assert max(ages) > 0


def test_rewards_start_as_samples_end_and_each_is_given_once(runtime):
    calls = []

    def reward(problem, completion):
        calls.append((problem.prompt, completion))
        return float(len(completion))

    with reward_calls(reward, Grading()) as rewards:
        interaction = runtime.interaction and replace(runtime.interaction, rewards=rewards)
        mine = replace(runtime, rewards=rewards, interaction=interaction)
        state, flight = (
            init_state(runtime.experiment.model, runtime.optimizer, jax.random.key(0), runtime.mesh),
            InFlight(),
        )
        for done in range(2):
            batch = next_rollout(mine, state, flight)
            assert len(batch.started) == P * G, "every sample of the batch has ended in some chunk"
            graded = grade(mine, batch).completions
            state = step_on(mine, state, batch, renew=False)
            for number, each in enumerate(graded):
                assert each.texts.prompt == batch.problems[number // G].prompt
                assert each.length == len(completions(batch.rollout)[number][0])
                assert each.reward in map(len, each.texts.completion.split("\n")), "of a completion, or of a message"
            assert len(calls) == (done + 1) * P * G + len(flight.pool.rows.started)


def test_a_rollout_out_of_the_pool_has_the_experts_of_a_whole_one():
    """With replies, among conversations that were carried over."""
    runtime = runtime_of(replace(TALKING, model=experiment.model, routing_replay="sampler"))
    batches, _, states = draw_batches(runtime, renew=False)
    weights, compared = runtime.sampler.push(states[0].params, 0), 0
    for batch in batches[:2]:
        wanted = {}
        for first in sorted({index - index % P for index in problems_of(batch)}):
            rollout = jax.device_get(
                start_rollout(whole(runtime), weights, states[0], first, InFlight()).samples.result()[0]
            )
            wanted |= {first + row // G: [] for row in range(P * G)}
            for row in range(P * G):
                wanted[first + row // G].append(
                    rollout.expert_BLTA[row, :, : rollout.prompt_length_B[row] + rollout.length_B[row]]
                )
        got = jax.device_get(batch.rollout)
        for group, index in enumerate(problems_of(batch)):
            for number, expert_LTA in enumerate(wanted[index]):
                total = expert_LTA.shape[1]
                np.testing.assert_array_equal(got.expert_BLTA[group * G + number, :, :total], expert_LTA)
                compared += (expert_LTA < 4).sum()
    assert compared > 1000 and got.reply_B.any()


def pool_of(problems, policies):
    pool = new_pool(len(problems), 2, 0, held=None)
    return replace(pool, problem_R=np.array(problems), version_R=np.array(policies))


@pytest.mark.parametrize(
    ("ended", "oldest", "wanted"),
    [
        ([0, 1, 0, 1, 0], 0, [3, 1]),  # in the order of the problems
        ([1, 1, 0, 1, 1], 0, [3, 0]),  # the oldest ones; the free place never counts
        ([0, 1, 0, 0, 1], 0, None),  # too few
        ([1, 1, 0, 0, 0], 1, None),  # problem 3 must not wait
        ([1, 1, 0, 1, 0], 1, [3, 0]),
    ],
)
def test_a_batch_has_the_oldest_groups_that_ended_and_waits_for_those_at_the_bound(ended, oldest, wanted):
    pool = pool_of([5, 7, 9, 3, FREE], [2, 2, 2, 1, 0])
    ended_R = np.array(ended, bool) & (pool.problem_R != FREE)
    chosen = choose_groups(pool, ended_R, 2, oldest)
    assert (None if chosen is None else chosen.tolist()) == wanted


def test_staleness_of_a_rollout_without_versions_is_that_of_its_parameters():
    nothing = {name: None for name in ("tokens_BT", "mask_BT", "logp_BT", "prompt_length_B", "length_B", "finished_B")}
    found = staleness_metrics(Rollout(**nothing), 5, 3)
    assert found == {"rollout/staleness": 2.0, "rollout/staleness_max": 2.0}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"carried": 9}, ["placement.partial.carried: wanted at most the 8 groups of a rollout batch, got 9"]),
        ({"carried": 0, "ahead": 0}, ["placement.partial: wanted carried or ahead above 0, got 0 and 0"]),
        (
            {"staleness": 1},
            ["placement.staleness: wanted at least 2, one rollout batch for each of placement.partial's carried and "
             "ahead, got 1"],
        ),
        ({"staleness": 1, "ahead": 0}, []),
        (
            {"chunk": 0},
            ["sampling.chunk: wanted at least 1 with placement.partial, which renews parameters every chunk, got 0"],
        ),
        (
            {"max_refills": 1},
            ["sampling.max_refills: wanted 0 beside placement.staleness, whose problems are fixed ahead, got 1"],
        ),
        (
            {"group": 2, "carried": 3},
            ["placement.partial.carried: wanted rows in multiples of the 4 devices of placement.mesh for rows, got "
             "11 prompts x 2 samples = 22"],
        ),
        (
            {"cache_gib": 1e-6},
            ["sampling.cache_gib: wanted at least 3.81e-06 for the cache of a device's prompts and of one "
             "slot, got 1e-06"],
        ),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_rejected(changes, wanted):
    placement, sampling = PARTIAL.placement, PARTIAL.sampling
    for name, value in changes.items():
        if hasattr(placement.partial, name):
            placement = replace(placement, partial=replace(placement.partial, **{name: value}))
        elif hasattr(placement, name):
            placement = replace(placement, **{name: value})
        else:
            sampling = replace(sampling, **{name: value})
    assert validate(replace(PARTIAL, placement=placement, sampling=sampling), 8) == wanted
