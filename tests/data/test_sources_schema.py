"""Mapping rows to problems: columns, chats, templates, and errors for rows that do not fit."""

import numpy as np
import pytest

from gspax.data import Problem, Schema
from gspax.data.problem import encode_prompt

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]


def read(row, **settings):
    return Schema(**settings).read(row)[0]


def test_columns_are_mapped_by_name():
    row = {"question": "1+1?", "solution": "2", "kind": "sums", "level": 3, "unused": None}
    problem = read(row, prompt="question", answer="solution", task_column="kind", metadata=("level",))
    assert problem == Problem("1+1?", "2", task="sums", metadata={"level": 3})


def test_a_nested_column_is_named_with_a_dot():
    row = {"prompt": "1+1?", "reward_model": {"ground_truth": "2"}, "a.b": "x"}
    assert read(row, answer="reward_model.ground_truth").answer == "2"
    assert read(row, answer="a.b").answer == "x"


SINGLE = [(np.float32(0.1), "0.1"), (0.10000000149011612, "0.1"), (-0.3333333432674408, "-0.33333334")]  # as in Arrow
DOUBLE = [(0.1 + 0.2, "0.30000000000000004"), (2.0**-20, "9.5367431640625e-07"), (1e300, "1e+300"), (2**60, str(2**60))]


@pytest.mark.parametrize(
    ("value", "answer"),
    [("2", "2"), (2, "2"), (0.5, "0.5"), (np.int64(3), "3"), (b"4", "4"), *SINGLE, *DOUBLE],
)
def test_answers_become_text(value, answer):
    assert read({"prompt": "?", "answer": value}).answer == answer


def test_the_answer_is_optional():
    assert read({"prompt": "Write a poem."}, answer=None).answer == ""


def test_the_last_message_of_a_chat_is_the_prompt():
    problem = read({"prompt": CHAT, "answer": "4"})
    assert problem.prompt == "2+2?" and list(problem.context) == CHAT[:-1]


def test_a_template_with_worked_examples():
    settings = {"template": "Q: {prompt} \\boxed{}", "system": "Be brief.", "examples": (("1+1?", "2"),)}
    problem, key = Schema(**settings).read({"prompt": "2+{x}?", "answer": "4"})
    assert problem.prompt == "Q: 2+{x}? \\boxed{}"
    assert [tuple(message.values()) for message in problem.context] == [
        ("system", "Be brief."),
        ("user", "Q: 1+1? \\boxed{}"),
        ("assistant", "2"),
    ]
    assert key == "2+{x}?"


def test_a_problem_is_returned_unchanged():
    problem = Problem("1+1?", "2")
    assert Schema(prompt="other").read(problem) == (problem, "1+1?")


def test_the_split_depends_on_earlier_turns_but_not_on_system_messages():
    def key(messages):
        return Schema(answer=None).read({"prompt": messages})[1]

    assert key(CHAT) == key(CHAT[1:]) != key(CHAT[3:]) == "2+2?"
    assert Schema().read(Problem("2+2?", "4", context=tuple(CHAT[:-1])))[1] == key(CHAT)


def test_arrays_and_bytes_become_plain_values():
    row = {"prompt": b"caf\xc3\xa9", "answer": "x", "more": {"a": np.arange(2), "b": [b"y"]}}
    problem = read(row, metadata=("more",))
    assert problem.prompt == "café" and problem.metadata == {"more": {"a": [0, 1], "b": ["y"]}}


@pytest.mark.parametrize(
    ("row", "settings", "sentence"),
    [
        (["a"], {}, r"wanted an object with columns, got \['a'\]"),
        (None, {}, "wanted an object with columns, got None"),
        ({"question": "?"}, {}, "prompt: there is no such column; the row has question"),
        ({}, {}, "prompt: there is no such column; the row has none"),
        ({"prompt": " ", "answer": "2"}, {}, "prompt: wanted a text that is not empty, got ' '"),
        ({"prompt": 3, "answer": "2"}, {}, "prompt: wanted a text that is not empty, got 3"),
        ({"prompt": "?", "answer": None}, {}, "answer: wanted a text that is not empty, got None"),
        ({"prompt": "?", "answer": True}, {}, "answer: wanted a text that is not empty, got True"),
        ({"prompt": "?", "answer": {"x": 1}}, {"answer": "answer.y"}, "answer.y: there is no such column"),
        ({"prompt": [], "answer": "2"}, {}, "prompt: wanted messages that end with one of the user, got an empty list"),
        ({"prompt": CHAT[:3], "answer": "2"}, {}, "prompt: wanted messages that end .* got one of 'assistant'"),
        ({"prompt": [*CHAT[1:3], CHAT[0]], "answer": "2"}, {}, r"prompt\[2\]: wanted a role of user, assistant and"),
        ({"prompt": ["hi"], "answer": "2"}, {}, r"prompt\[0\]: wanted a role of system, user, assistant and .* 'hi'"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, {}, r"prompt\[0\]: wanted a role .* got {'role': 'user'}"),
        (
            {"prompt": [{"role": "assistant", "content": "", "tool_calls": [{}]}, *CHAT[1:]], "answer": "2"},
            {},
            r"prompt\[0\]: wanted a message without tool_calls",
        ),
        ({"prompt": CHAT, "answer": "2"}, {"system": "x"}, "prompt: wanted the user's message alone.* got 3 messages"),
        ({"prompt": b"\xff", "answer": "2"}, {}, "prompt: wanted a text in UTF-8, got the byte 0xff at 0"),
        (
            {"prompt": "?", "m": [b"a\xff"], "answer": "2"},
            {"metadata": ("m",)},
            "m: wanted a text in UTF-8, .* at 1",
        ),
        ({"prompt": "?", "answer": float("nan")}, {}, "answer: wanted a text that is not empty, got nan"),
        ({"prompt": "a\ud800", "answer": "2"}, {}, r"prompt: wanted valid Unicode, got 'a\\ud800'"),
        ({"prompt": [{"role": "user", "content": "\ud800"}], "answer": "2"}, {}, r"prompt\[0\]: wanted valid Unicode"),
        (Problem(3, "2"), {}, "prompt: wanted a text that is not empty, got 3"),
        ({"prompt": "?" * 500, "answer": []}, {}, r"answer: wanted a text that is not empty, got \[\]"),
    ],
)
def test_an_invalid_row_is_one_error(row, settings, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}") as caught:
        read(row, **settings)
    assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"template": "no place"}, "template: wanted a text with {prompt} in it, got 'no place'"),
        ({"metadata": "level"}, "metadata: wanted a tuple of columns, got the text 'level'"),
    ],
)
def test_invalid_settings_are_rejected_at_construction(settings, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        Schema(**settings)


def test_earlier_messages_are_passed_to_the_tokenizer():
    class Chat:
        def encode(self, text, context=()):
            return [text, *context]

    assert encode_prompt(Chat(), Problem("2+2?", "4", context=tuple(CHAT[:-1]))) == ["2+2?", *CHAT[:-1]]
    assert encode_prompt(Chat(), Problem("2+2?", "4")) == ["2+2?"]
