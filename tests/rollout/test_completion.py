"""The JSON lines of completions: their keys, and what joins them from advantages."""

import json
from dataclasses import FrozenInstanceError, asdict, replace

import numpy as np
import pytest
from api import Completion, GradedTurns, Samples, Texts, to_line

from gspax.rollout.completion import from_dict, to_json

PLAIN = Completion(length=3, finished=True, rewards=(0.5,), texts=Texts("1+1=", "2", "3"))
LINE = {"prompt": "1+1=", "answer": "2", "completion": "3", "reward": 0.5, "length": 3, "finished": True}
TURNS = GradedTurns(((0, 2), (4, 5)), (0.25, 1.0), {"reply_tokens": 2.0})
FULL = replace(
    PLAIN, rewards=(1.0, 0.25), parts={"right": 1.0}, reason="equal", error="late", turns=TURNS, sources=(2, 1)
)


def test_json_line_has_only_the_fields_with_a_value():
    assert to_json(PLAIN) == LINE
    assert json.loads(to_line(to_json(FULL))) == LINE | {
        "reward": 1.25,
        "rewards": [1.0, 0.25],
        "parts": {"right": 1.0},
        "reason": "equal",
        "error": "late",
        "turn_spans": [[0, 2], [4, 5]],
        "turn_rewards": [0.25, 1.0],
        "environment": {"reply_tokens": 2.0},
        "servers": [2, 1],
    }


@pytest.mark.parametrize("completion", [PLAIN, FULL, replace(FULL, texts=None)], ids=["plain", "full", "no texts"])
def test_a_recorded_completion_is_read_back(completion):
    assert from_dict(json.loads(json.dumps(asdict(completion)))) == completion


def test_samples_and_failures_of_a_step_have_their_advantages():
    samples = Samples([PLAIN, FULL], np.array([-1, 1], np.float32))
    assert [line["advantage"] for line in samples.to_json()] == [-1.0, 1.0]
    assert not any("turn_advantages" in line for line in samples.to_json())
    with_turns = samples._replace(turn_advantages=[[-1.0], [0.5, 1.0]])
    assert [line["turn_advantages"] for line in with_turns.to_json()] == [[-1.0], [0.5, 1.0]]
    (line,) = with_turns.failed().to_json()
    assert line == to_json(FULL) | {"advantage": 1.0, "turn_advantages": [0.5, 1.0]}
    assert Samples([PLAIN], np.zeros(1, np.float32)).failed().completions == []


def test_a_completion_is_never_written_to():
    with pytest.raises(FrozenInstanceError):
        PLAIN.rewards = (1.0,)
    with pytest.raises(AssertionError, match="gather_texts"):
        to_json(replace(PLAIN, texts=None))
