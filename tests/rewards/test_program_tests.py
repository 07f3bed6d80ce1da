"""Test cases for programs: published schemas, and the comparison of outputs."""

import base64
import json
import pickle
import zlib

import pytest

from gspax.data import Problem
from gspax.errors import UserError
from gspax.rewards import program_tests
from gspax.rewards.program_tests import (
    Tests,
    arguments,
    check,
    from_answer,
    from_codeforces,
    from_livecodebench,
    same_text,
    same_value,
)

PUBLIC = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
PRIVATE = [{"input": "3\n", "output": "4\n", "testtype": "stdin"}]


def livecodebench(private, metadata="{}"):
    return {"public_test_cases": json.dumps(PUBLIC), "private_test_cases": private, "metadata": metadata}


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


@pytest.mark.parametrize("private", [json.dumps(PRIVATE), packed(json.dumps(PRIVATE))])
def test_rows_of_livecodebench_are_read(private):
    assert from_livecodebench(livecodebench(private)) == Tests((("1\n", "2\n"), ("3\n", "4\n")))
    row = livecodebench(private, json.dumps({"func_name": "twice"}))
    assert from_livecodebench(row).function == "twice"


def test_a_pickled_class_is_not_loaded():
    with pytest.raises(UserError, match=r"wanted a pickled text, got one that loads gspax\.errors\.UserError"):
        from_livecodebench(livecodebench(packed(UserError("x"))))


def test_a_bomb_is_not_decompressed(monkeypatch):
    """A million of these characters are a thousand bytes in zlib."""
    tests = json.dumps([{**PRIVATE[0], "input": "1" * 10**6}])
    assert len(from_livecodebench(livecodebench(packed(tests))).cases[1][0]) == 10**6
    monkeypatch.setattr(program_tests, "LONGEST", 10**6)
    with pytest.raises(UserError, match="private_test_cases: wanted at most 1000000 bytes when decompressed, got more"):
        from_livecodebench(livecodebench(packed(tests + " ")))


def test_rows_of_codeforces_are_read():
    row = {"id": "1A", "official_tests": [{"input": "1\n", "output": "2\n"}], "input_mode": "stdio"}
    assert from_codeforces(row) == Tests((("1\n", "2\n"),))
    for wrong in ({"generated_checker": "def check(): ..."}, {"input_mode": "file"}, {"official_tests": None}):
        with pytest.raises(UserError, match="row 1A: wanted official tests on standard input, without a checker"):
            from_codeforces(row | wrong)


def test_test_cases_round_trip_through_the_answer():
    tests = Tests((("[1]\n2", "3"),), function="f")
    assert from_answer(tests.to_answer()) == tests


@pytest.mark.parametrize(
    "answer", ["", "42", '{"cases": [["1", "2"]]}', '{"function": "f", "cases": [["1", "two"]]}', '{"function": null}']
)
def test_an_answer_without_valid_test_cases_is_rejected(answer):
    with pytest.raises(ValueError, match=r"answer: wanted the text of gspax\.rewards\.program_tests\.Tests, got"):
        from_answer(answer)
    assert check(Problem("?", answer)).startswith("answer: wanted the text of")


def test_at_least_one_test_case_is_required():
    with pytest.raises(ValueError, match="answer: wanted at least one test, got none"):
        from_answer(Tests(()).to_answer())
    assert check(Problem("?", Tests((("1", "2"),)).to_answer())) is None


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_line(separator):
    """JSON may hold the other line separators of Unicode as they are, and so may a program's output."""
    if separator > "\x20":  # JSON escapes control characters
        tests = Tests(((f'["a{separator}b"]\n2', f'"a{separator}b"'),), function="f")
        assert from_answer(tests.to_answer()) == tests
        assert arguments(tests.cases[0][0]) == [[f"a{separator}b"], 2]
    assert not same_text("a\nb", f"a{separator}b") and same_text(f"a{separator}b", f" a{separator}b\r\n")


@pytest.mark.parametrize(
    ("expected", "output", "equal"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2\n3\n", "  1 2 \r\n3\n\n", True),
        ("1 2", "1  2", True),
        ("0.5", "0.50", True),
        ("1", "1.0", True),
        ("1e3", "1000", True),
        ("1", "1.0000001", False),
        ("1 2", "1\n2", False),
        ("1", "1\n1", False),
        ("YES", "Yes", False),
        ("1", "", False),
        ("nan", "NaN", False),
        ("1000", "1_000", False),
        ("1", "1e9999999999999999999", False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(expected, output, equal):
    assert same_text(expected, output) is equal


@pytest.mark.parametrize(
    ("expected", "output", "equal"),
    [
        ("[1, 2]", "[1,2]", True),
        ('{"a": 1}', '{"a": 1.0}', True),
        ("[1, 2]", "[2, 1]", False),
        ("3", "3 3", False),
        ("1", "true", False),
        ("false", "0", False),
        ("true", "true", True),
        ("[0, [1]]", "[0, [true]]", False),
        ('{"a": [false]}', '{"a": [0.0]}', False),
        ('{"a": [true, 1]}', '{"a": [true, 1.0]}', True),
        ("[[1], [2, {}]]", "[[1], [2, []]]", False),
        ("3", "", False),
        ("3", "NaN", False),
        ("3", "[" * 100_000, False),
        ("3", "3" * 100_000, False),
    ],
)
def test_values_are_compared_as_json(expected, output, equal):
    assert same_value(expected, output) is equal


@pytest.mark.parametrize(
    ("function", "expected", "output", "equal"),
    [
        (None, "0.333333333333", "0.333333", True),
        (None, "12345678.5", "12345680", True),  # as a share of the number
        (None, "0.5 YES", "0.5000009 YES", True),
        (None, "0.5", "0.500002", False),
        (None, "1000000", "1000001", False),  # an integer is exact
        (None, "1.0", "1e999", False),
        (None, "1.0", "nan", False),
        (None, "1e999", "2.0", False),
        ("f", "1.0", "1" + "0" * 400, False),
        ("f", "[0.1, [2]]", "[0.1000001, [2]]", True),
        ("f", "[0.1, [2]]", "[0.1, [2.0000001]]", False),
        ("f", "1.0", "true", False),
        ("f", "1.0", "NaN", False),
        ("f", "1.0", "1", True),
    ],
)
def test_a_tolerance_is_for_numbers_with_a_decimal_point(function, expected, output, equal):
    tests = Tests((("1", expected),), function, 1e-6)
    assert from_answer(tests.to_answer()) == tests and tests.accept(expected, output) is equal
    assert not Tests(tests.cases, function).accept(expected, output) or output == "1"


@pytest.mark.parametrize("tolerance", [-1e-6, 1, float("nan"), "much"])
def test_a_wrong_tolerance_is_no_text_of_tests(tolerance):
    with pytest.raises(ValueError, match="wanted the text of"):
        from_answer(Tests((("1", "2"),), None, tolerance).to_answer())
