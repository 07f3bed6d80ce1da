"""Evaluation: held-out problems only, each once, independent of chunks and devices."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
import tiny
from api import InProcess, PhaseBar, Rollout, in_process, make_mesh, make_sampler, progress, sampler
from small_experiment import experiment

from gspax import config
from gspax.evaluation import benchmark
from gspax.evaluation.benchmark import EvaluatedPolicy, split_problems
from gspax.report import statistics
from gspax.rewards.scores import reward_calls

PROBLEMS, SAMPLES = 10, 2


@dataclass(frozen=True)
class HeldoutOnly:
    data: object = experiment.data
    problems: int = PROBLEMS

    def heldout(self, index):
        """A finite list: an index beyond the evaluation's problems raises."""
        return [self.data.heldout(each) for each in range(self.problems)][index]


def small(**sampling):
    return replace(
        experiment,
        data=HeldoutOnly(),
        evaluation=config.Evaluation(problems=PROBLEMS, samples=SAMPLES),
        sampling=replace(experiment.sampling, **sampling),
    )


def run(experiment, devices=1, seed=0):
    mesh = make_mesh(config.Mesh(), jax.devices()[:devices])
    sampler = InProcess(make_sampler(experiment.model, mesh, mesh))
    policy = EvaluatedPolicy(sampler, sampler.push(tiny.params(experiment.model), 0), experiment)
    with reward_calls(experiment.reward, experiment.grading) as rewards:
        bar = PhaseBar(experiment.evaluation.problems, "held-out problems")
        return benchmark.evaluate_heldout(policy, jax.random.key(seed), experiment.data, rewards, bar)


@dataclass(frozen=True)
class Counted(HeldoutOnly):
    """It says how many there are, and begins again after the last one, as a file does."""

    @property
    def heldout_count(self):
        return self.problems

    def heldout(self, index):
        return super().heldout(index % self.problems)


def test_no_problem_is_evaluated_twice():
    """Repetitions would make the interval too narrow."""
    wanted, _, _ = run(small())
    assert progress._phases.part == f" held-out problems, {PROBLEMS} of {PROBLEMS} done"
    more = replace(small(), data=Counted(), evaluation=config.Evaluation(problems=3 * PROBLEMS, samples=SAMPLES))
    assert run(more)[0] == wanted


@pytest.fixture
def calls(monkeypatch):
    """Arguments of the sampler's calls. The text of each sample is the last digit of its problem's index."""
    calls = []

    def fake(params, prompts, ids, key, options, earlier, on_ended):
        sampling, greedy = options.sampling, options.greedy
        calls.append({"prompts": prompts, "ids": list(ids), "key": key, "sampling": sampling, "greedy": greedy})
        ids = np.repeat(np.asarray(ids), sampling.group)
        lengths = np.repeat([len(prompt) for prompt in prompts], sampling.group)
        tokens = np.zeros((len(ids), 8), np.int32)
        for row, length in enumerate(lengths):
            tokens[row, :length] = prompts[row // sampling.group]
            tokens[row, length] = ids[row] % 10
        return Rollout(
            tokens_BT=tokens,
            mask_BT=tokens > 0,
            logp_BT=np.zeros(tokens.shape, np.float32),
            prompt_length_B=lengths,
            length_B=np.ones(len(ids), np.int32),
            finished_B=ids % 4 > 0,
        )

    monkeypatch.setattr(in_process, "sample", fake)
    return calls


def test_samples_do_not_depend_on_chunks_and_devices_and_problems_are_held_out():
    # one device: chunks of 4, 4 and 2 problems padded to 4; eight devices: one chunk of 10 padded to 16
    compiled = sampler._generate._cache_size()
    metrics, rows, _ = run(small(prompts=4, group=3))
    assert sampler._generate._cache_size() == compiled + 1, "one program for sampled and greedy completions"
    spread, spread_rows, _ = run(small(prompts=8, group=4), devices=8)
    assert metrics == spread and rows == spread_rows
    assert [each.texts.prompt for each in rows] == [experiment.data.heldout(index).prompt for index in range(PROBLEMS)]
    names = ("reward", "reward_low", "reward_high", "greedy_reward", "truncated", "reward_failed", "skipped")
    assert set(metrics) == {f"eval/{name}" for name in names}
    other, other_rows, _ = run(small(prompts=4, group=3), seed=1)
    assert [each.texts.completion for each in other_rows] != [each.texts.completion for each in rows]
    assert other["eval/greedy_reward"] == metrics["eval/greedy_reward"]


def test_completions_are_sampled_at_temperature_1_beside_a_greedy_one(calls):
    filtered = small(prompts=64, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)
    run(filtered)
    plain = {"temperature": 1.0, "max_tokens": 4, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert [(call["greedy"], call["sampling"]) for call in calls] == [
        (1, replace(filtered.sampling, prompts=PROBLEMS, group=SAMPLES + 1, **plain))
    ]


def test_chunks_are_multiples_of_the_devices_and_the_last_one_has_fewer_problems():
    assert split_problems(6, 4, 1) == ([range(4), range(4, 6)], 4)
    assert split_problems(3, 4, 8) == ([range(3)], 8)
    assert split_problems(2, 0, 1) == ([range(1), range(1, 2)], 1)


def test_evaluation_max_tokens_overrides_sampling(calls):
    run(replace(small(), evaluation=config.Evaluation(problems=1, max_tokens=2)))
    assert {call["sampling"].max_tokens for call in calls} == {2}


def test_evaluations_share_a_key_that_no_rollout_uses(calls):
    run(small())
    run(small())
    keys = {tuple(jax.random.key_data(call["key"]).tolist()) for call in calls}
    assert len(keys) == 1
    assert keys.isdisjoint(
        tuple(jax.random.key_data(key).tolist())
        for key in (jax.random.key(0), *(jax.random.fold_in(jax.random.key(0), number) for number in (0, 1)))
    )


def test_metrics_are_means_over_the_requested_problems_without_those_that_fill_the_last_chunk(calls):
    def last_digit(problem, completion):
        return float(completion)

    metrics, rows, _ = run(replace(small(prompts=3, group=3), reward=last_digit))
    assert [call["ids"] for call in calls] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 9, 9]]
    assert metrics["eval/reward"] == metrics["eval/greedy_reward"] == np.mean(range(10))
    assert metrics["eval/truncated"] == 0.3, "0, 4 and 8 of ten"
    interval = statistics.estimate(np.arange(10.0))  # a value for each problem, whatever the number of its samples
    assert (metrics["eval/reward_low"], metrics["eval/reward_high"]) == (interval.low, interval.high)
    assert [each.texts.completion for each in rows] == [str(i) for i in range(10)], "the first sample of each problem"


@dataclass(frozen=True)
class FirstIsMissing(HeldoutOnly):
    def heldout(self, index):
        if index in (0, 3):
            raise FileNotFoundError(f"problem {index}")
        return super().heldout(index)


def test_places_of_unusable_problems_and_of_a_short_chunk_get_the_first_usable_one(calls, capsys):
    metrics, rows, _ = run(replace(small(prompts=3, group=3), data=FirstIsMissing()))
    assert [call["ids"] for call in calls] == [[1, 1, 2], [4, 4, 5], [6, 7, 8], [9, 9, 9]]
    assert [each.texts.completion for each in rows] == [str(index) for index in (1, 2, 4, 5, 6, 7, 8, 9)]
    assert metrics["eval/skipped"] == 2
    (warning,) = capsys.readouterr().err.splitlines()  # of two chunks
    assert "evaluation: problem 0: data: FirstIsMissing.heldout(0) raised FileNotFoundError" in warning
    assert "; problem 3: " in warning and warning.endswith(": 2 of 10 problems left out of the evaluation")


def test_evaluate_returns_at_most_sixteen_rows(calls):
    many = replace(small(), data=HeldoutOnly(problems=40), evaluation=config.Evaluation(problems=40, samples=3))
    _, rows, _ = run(many)
    assert [each.texts.prompt for each in rows] == [experiment.data.heldout(index).prompt for index in range(16)]
