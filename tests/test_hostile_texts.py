"""Texts that a model, a tool, a judge or a server may write: whatever they are, reading them takes linear time.

Python's regular expressions hold the interpreter's lock, so a quadratic one stops the whole trainer. At 10,000
characters a linear reader takes milliseconds and a quadratic one a second.
The formulas of a report have such a test in tests/report/test_mathml.py.
"""

import contextlib
import time
from functools import partial

import addition
import calculations
import pytest
from api import http_client, tasks

from gspax.data import Problem, split_thinking
from gspax.errors import UserError
from gspax.rewards import answers, code, format, length, program_tests
from gspax.rewards.environments import ToolError, parse_brackets, parse_hermes
from gspax.rewards.environments.family_calls import PARSERS
from gspax.rewards.environments.tools import calculate

PROBLEM = Problem("12+34", "46")
PARTS = ["1", "1,", "1,111", ",111", " 111", "1 ", "1.", "12/", "1/2 ", "1 1/", "a", "a ", "1a", "1e", ".", " ", "\n"]
PARTS += ["{", "}", "{}", "[", "[1", "(", "\\", "$", "$1", "-", "~", "1_", r"\frac{1}", r"\text{a ", r"1\,", r"\ne"]
PARTS += [r"\boxed{", r"\boxed ", "####", "<answer>", "</answer>", "<think>", "</think>", "<tool_call>{"]
PARTS += ["</tool_call>", "```\n", "1+", "9**", "12+a3=45,", '{"a":']
PARTS += ["½", "⁶", "✅ ", "one ", "1–", "1.234.", "<b>"]
ENDS = ["", "x", "}", "/0"]


CALLS = ["[TOOL_CALLS]", "[TOOL_CALLS][", '[TOOL_CALLS]a{"', "<tool_call>a<arg_key>", "<arg_key>a</arg_key><arg_value>"]
CALLS += ['<invoke name="a">', '<parameter name="a">', "<｜tool▁call▁begin｜>", '<|tool_call_begin|>a<|tool_sep|>{"']
CALLS += [
    "<|tool_call>call:a{",
    '<|tool_call>call:a{b:<|"|>',
    '<|tool_call>call:a{b:"\\"',
    '\\"',
    '<|"|>',
    "<|tool_call>",
]
CALLS += ["to=functions.a", 'to=functions.a<|message|>{"', '{"name":', "<|python_tag|>{", '{"name": "a", "b": 1};']


def hostile_texts(size, parts=PARTS):
    for part in parts:
        body = part * (size // len(part))
        yield from (body + end for end in ENDS)
        yield from (start + body for start in ("1", r"\boxed{", r"\mbox{"))


READERS = {
    **{f"extract {form}": partial(answers.extract, form=form) for form in (None, *answers.FORMS)},
    "reference": answers.reference,
    "canonical": answers.canonical,
    "compare with a number": lambda text: answers.compare("7/2", text),
    "compare with a base": lambda text: answers.compare("52_8", text),
    "expected answer": lambda text: answers.compare(text, "7/2"),
    "vote": tasks.vote_answer,
    "tags": partial(format.match_tags, PROBLEM),
    "words": lambda text: length.within(PROBLEM, text, at_most=10, unit="words"),
    "lines": lambda text: length.within(PROBLEM, text, at_most=10, unit="lines"),
    "program": code.extract_program,
    "output": lambda text: program_tests.same_text("3", text),
    "output of many words": lambda text: program_tests.same_text("1 " * (len(text) // 2), text),
    "output with a large number": lambda text: program_tests.same_text("1" * len(text), text),
    "value": lambda text: program_tests.same_value("3", text),
    "expected output": lambda text: program_tests.same_text(text, "3"),
    "arguments": program_tests.arguments,
    "tests": program_tests.from_answer,
    "thinking": split_thinking,
    "tool calls": parse_hermes,
    "tool calls in brackets": parse_brackets,
    "calculator": calculate,
    "judge's refusal": lambda text: http_client._start(text.encode(errors="replace")),
    "addition": partial(addition.reward, PROBLEM),
    "calculation": partial(calculations.reward, PROBLEM),
}


def read_seconds(read, text):
    """CPU-seconds of this thread."""
    began = time.thread_time()
    with contextlib.suppress(UserError, ToolError, ValueError, RecursionError):  # a verdict, too
        read(text)
    return time.thread_time() - began


LIMIT = 0.15  # seconds


def check_linear(read, texts):
    for text in texts:
        took = read_seconds(read, text)
        if took >= LIMIT:  # as a collection of garbage in between makes it
            took = min(took, read_seconds(read, text), read_seconds(read, text))
        assert took < LIMIT, f"{took:.2f} s for {len(text)} characters like {text[:20]!r}…{text[-20:]!r}"


@pytest.mark.parametrize("name", READERS)
def test_a_hostile_text_is_read_in_linear_time(name):
    check_linear(READERS[name], hostile_texts(10_000))


@pytest.mark.parametrize("parse", PARSERS)
def test_a_hostile_call_is_read_in_linear_time(parse):
    check_linear(parse, hostile_texts(10_000, CALLS))
