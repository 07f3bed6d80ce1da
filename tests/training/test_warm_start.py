"""Demonstrations of the warm start: rows, masks and their order."""

import os
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import Interrupted, Skipped, loop, make_mesh, warm_start
from small_experiment import experiment

from gspax import config
from gspax.errors import DivergedError, UserError

LENGTH = 9
STOP = experiment.tokenizer.stop_ids[0]


def digits(problem, rng):
    """The answer and a random digit from the row's generator."""
    return problem.answer + str(rng.integers(10))


def demonstrated(first=0, rows=4, demonstration=digits, **changes):
    stage = config.WarmStart(demonstration=demonstration, rows=rows)
    mesh = make_mesh(config.Mesh(), jax.devices()[:1])
    texts = {"data": experiment.data, "tokenizer": experiment.tokenizer, "length": LENGTH, "seed": 0}
    texts["vocab_size"] = experiment.model.vocab_size
    source = warm_start.Demonstrations(stage=stage, **texts | changes)
    return warm_start.make_demonstrations(source, first, mesh=mesh, skipped=Skipped())[0]


def test_rows_are_prompt_demonstration_and_stop_with_the_prompt_masked():
    batch = jax.device_get(demonstrated(first=3))
    for row in range(4):
        problem = experiment.data.train(3 + row)
        prompt, answer = (experiment.tokenizer.encode(text) for text in (problem.prompt, problem.answer))
        start, end = len(prompt), len(prompt) + len(answer) + 2
        tokens = batch.tokens_BT[row]
        assert tokens[: end - 2].tolist() == [*prompt, *answer] and tokens[end - 2] < 10 and tokens[end - 1] == STOP
        assert np.flatnonzero(batch.mask_BT[row]).tolist() == list(range(start, end))
        assert batch.segment_BT[row].tolist() == [1] * end + [0] * (LENGTH - end)
        assert not tokens[end:].any()


def test_a_row_depends_only_on_seed_and_index():
    whole, part = demonstrated(first=0, rows=16), demonstrated(first=8, rows=8)
    np.testing.assert_array_equal(whole.tokens_BT[8:], part.tokens_BT)
    other = demonstrated(first=0, rows=16, seed=1)
    assert not np.array_equal(whole.tokens_BT, other.tokens_BT)
    alike = demonstrated(rows=16, data=Always(experiment.data.train(0)))
    assert len({tuple(row) for row in alike.tokens_BT.tolist()}) > 3, "each row has its own generator"


class Always:
    def __init__(self, problem):
        self.problem = problem

    def train(self, index):
        return self.problem


def test_a_demonstration_that_is_too_long_is_rejected():
    with pytest.raises(UserError, match=r"problem 2: warm_start: wanted at most 9 tokens .* got 1[23];"):
        demonstrated(first=2, demonstration=lambda problem, rng: "1" * 9)


def test_each_update_takes_the_next_problems(monkeypatch, tmp_path):
    firsts, make_demonstrations = [], warm_start.make_demonstrations

    def spy(source, first, **kwargs):
        firsts.append(first)
        return make_demonstrations(source, first, **kwargs)

    def update(state, batch):
        return replace(state, step=state.step + 1), {"loss": jnp.float32(1), "skipped": jnp.float32(0)}

    monkeypatch.setattr(warm_start, "make_demonstrations", spy)
    split = []
    monkeypatch.setattr(
        warm_start, "make_train_step", lambda settings, *rest: split.append(settings.microbatch_rows) or update
    )
    warm_start.run(replace(experiment, schedule=replace(experiment.schedule, microbatch_rows=8)), tmp_path / "run")
    assert firsts == [0, 16, 32] and split == [8]


def test_a_warm_start_without_finite_updates_fails_at_once(monkeypatch, tmp_path):
    """A signal between two of them changes nothing."""
    calls = []

    def update(state, batch):
        calls.append(batch)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return replace(state, step=state.step + 1), {"loss": jnp.float32(jnp.nan), "skipped": jnp.float32(1)}

    monkeypatch.setattr(warm_start, "make_train_step", lambda *args, **kwargs: update)
    broken = replace(experiment, schedule=replace(experiment.schedule, max_skipped=2))
    with pytest.raises(Interrupted):
        loop.train(broken, tmp_path / "run")
    with pytest.raises(
        DivergedError, match=r"^warm start: schedule\.max_skipped: wanted fewer than 2 .* got 2 by step 2"
    ) as failed:
        loop.train(broken, tmp_path / "run")
    assert len(calls) == 2, "the run does not go back: the same updates would fail again"
    assert failed.value.exit_code == 3


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(UserError, match=r"tokenizer: wanted ids from 0 to 9 \(model\.vocab_size\), got 1\d for '\d+="):
        demonstrated(vocab_size=10)
