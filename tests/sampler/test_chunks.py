"""Sampling in chunks: the same rollout, and rewards that start while other completions are sampled."""

import os
import signal
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
from api import (
    Started,
    interrupt,
    lengths_to_host,
    make_inference_weights,
    make_mesh,
    reward_completions,
    sample,
    sampler,
    start_rewards,
)
from small_experiment import experiment

from gspax.config import Grading, Mesh, Placement, Sampling
from gspax.errors import UserError
from gspax.experiment import validate
from gspax.rewards.scores import reward_calls

CONFIG = replace(tiny.MOE, num_hidden_layers=1, num_experts=0)
SAMPLING = Sampling(prompts=4, group=2, max_prompt_tokens=4, max_tokens=12)
PROMPTS = [[1, 2], [3], [4, 5, 6], [7]]
STOPS = tuple(range(3))  # one token in eight or so


def generate(sampling, devices=1, ended=None):
    mesh = make_mesh(Mesh(), jax.devices()[:devices])
    params = make_inference_weights(tiny.params(CONFIG), CONFIG, mesh)
    key = jax.random.key(0)
    return sample(params, PROMPTS, range(4), key, tiny.options(CONFIG, sampling, STOPS, mesh), on_ended=ended)


@pytest.mark.parametrize(("chunk", "slots", "devices"), [(1, 0, 1), (5, 0, 1), (3, 3, 1), (4, 0, 4)])
def test_chunks_give_the_bits_of_the_whole_and_each_completion_once(chunk, slots, devices):
    handed, seen = [], set()

    def ended(found):
        assert not seen & set(found), "each row once"
        seen.update(found)
        handed.append(found)

    sampling = replace(SAMPLING, slots=slots)
    whole, chunked = generate(sampling, devices), generate(replace(sampling, chunk=chunk), devices, ended)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(chunked), jax.device_get(whole))
    assert seen == set(range(8)) and len(handed) > 1
    lengths = np.asarray(whole.length_B)
    assert len(set(lengths.tolist())) > 2
    if chunk == 1 and not slots:
        assert all(len({lengths[row] for row in found}) == 1 for found in handed), "as soon as it has ended"
        assert [lengths[next(iter(found))] for found in handed] == sorted(set(lengths.tolist()))
    for found in handed:
        for row, tokens in found.items():
            start = int(whole.prompt_length_B[row])
            np.testing.assert_array_equal(tokens, np.asarray(whole.tokens_BT)[row, start : start + lengths[row]])


def test_an_error_in_what_is_done_with_a_completion_ends_the_sampling():
    def ended(found):
        raise UserError("reward: no")

    with pytest.raises(UserError, match="reward: no"):
        generate(replace(SAMPLING, chunk=3), ended=ended)


def test_a_signal_ends_the_drawing_before_the_next_chunk(monkeypatch):
    """Also where no completion is handed over, as in an evaluation."""
    advance, advanced = sampler.advance_chunk, []

    def kill(*args, **kwargs):
        if not advanced:  # a second signal may end this process
            os.kill(os.getpid(), signal.SIGTERM)
        advanced.append(True)
        return advance(*args, **kwargs)

    monkeypatch.setattr(sampler, "advance_chunk", kill)
    with interrupt.listen(), pytest.raises(interrupt.Interrupted):
        generate(replace(SAMPLING, chunk=3))
    assert len(advanced) == 1


def test_without_a_chunk_nothing_is_handed_over():
    generate(SAMPLING, ended=lambda found: pytest.fail("not wanted"))


class Digits:
    stop_ids = STOPS

    def decode(self, ids):
        return " ".join(map(str, np.asarray(ids).tolist()))


def test_rewards_start_while_others_are_drawn_and_are_those_of_the_whole():
    problems = [experiment.data.train(index) for index in range(4)]
    calls_made, first = [], threading.Event()

    def reward(problem, completion):
        calls_made.append((problem, completion))
        first.set()
        return float(len(completion))

    started, batches = Started(), []
    with reward_calls(reward, Grading()) as calls:

        def ended(found):
            if batches:
                assert first.wait(10), "the rewards of the last chunk run before sampling ends"
            start_rewards(
                dict(enumerate(problems)), started, found, tokenizer=Digits(), calls=calls, group=2, openings={}
            )
            batches.append(found)

        rollout = lengths_to_host(generate(replace(SAMPLING, chunk=2), ended=ended))
        assert len(batches) > 1 and len(started) == 8
        del started[3]  # as if its process had been another one
        rows = reward_completions(problems, rollout, tokenizer=Digits(), calls=calls, started=started)
        assert len(calls_made) == 9, "no reward is asked for twice"
        assert rows == reward_completions(problems, rollout, tokenizer=Digits(), calls=calls)
    assert [each.reward for each in rows] == [float(len(each.texts.completion)) for each in rows]


def test_nothing_is_drawn_ahead_in_chunks():
    ahead = replace(
        experiment, sampling=replace(experiment.sampling, chunk=2), placement=Placement(devices=1, staleness=1)
    )
    assert (
        "sampling.chunk: wanted 0 beside placement.staleness without placement.partial, whose sampler does not wait "
        "for the host, got 2"
    ) in validate(ahead)
