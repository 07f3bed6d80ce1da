"""Tests of programs, inputs with expected outputs, as the text of a `Problem.answer`; reads two published schemas."""

from __future__ import annotations

import base64
import functools
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import chain, repeat
from typing import Any, NoReturn

from gspax.data.problem import Problem
from gspax.errors import UserError

LONGEST = 2**28  # bytes of a problem's private tests
_DECIMAL = re.compile(r"[-+]?(?:\d++\.?+\d*+|\.\d++)(?:[eE][-+]?\d{1,3})?")  # possessive: linear time


@dataclass(frozen=True)
class Tests:
    """The inputs and expected outputs of a program or function.

    Attributes:
      cases: (input, expected output). For a program both are texts: what it reads and what it prints. For a function
        the input is a line of JSON for each argument, and the output is the JSON of its return value.
      function: the name of a function, or of a method of a class `Solution`; None for a program.
      tolerance: how far a number may be from an expected one that has a decimal point or an exponent, absolutely or as
        a share of it. 0, LiveCodeBench's rule: not at all. Judges of contests often accept 1e-6.
    """

    __test__ = False  # not for pytest

    cases: tuple[tuple[str, str], ...]
    function: str | None = None
    tolerance: float = 0.0

    def to_answer(self) -> str:
        """Serialize the tests as the text of a `Problem.answer`."""
        more = {"tolerance": self.tolerance} if self.tolerance else {}
        return json.dumps({"function": self.function, "cases": self.cases, **more})

    def accept(self, expected: str, output: str) -> bool:
        """Return whether an output equals the expected one."""
        same = same_text if self.function is None else same_value
        return same(expected, output, tolerance=self.tolerance)


@functools.lru_cache(maxsize=1024)
def from_answer(answer: str) -> Tests:
    """Invert `Tests.to_answer`. ValueError for any other text, or if there is no test."""
    try:
        data = json.loads(answer)
        cases = tuple((str(text), str(expected)) for text, expected in data["cases"])
        function, tolerance = data["function"], float(data.get("tolerance", 0))
        if not 0 <= tolerance < 1:
            raise ValueError
        if function is not None:
            for text, expected in cases:
                json.loads(expected), arguments(text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        wanted = "the text of gspax.rewards.program_tests.Tests"
        raise ValueError(f"answer: wanted {wanted}, got {answer[:80]!r}") from error
    if not cases:
        raise ValueError("answer: wanted at least one test, got none")
    return Tests(cases, function, tolerance)


def check(problem: Problem) -> str | None:
    """Explain why a problem's answer has no valid tests, or None; one of the `checks` of a data source."""
    try:
        from_answer(problem.answer)
    except ValueError as error:
        return str(error)
    return None


def from_livecodebench(row: Mapping[str, Any]) -> Tests:
    """Read the public and private tests of a row of LiveCodeBench."""
    cases = [*json.loads(row["public_test_cases"]), *_private(row["private_test_cases"])]
    function = json.loads(row.get("metadata") or "{}").get("func_name")
    return Tests(tuple((case["input"], case["output"]) for case in cases), function)


def from_codeforces(row: Mapping[str, Any]) -> Tests:
    """Read the official tests of a row of the published CodeForces data set, for problems with one right output each.

    UserError for a problem that has a checker program, that reads from files, or whose tests are missing.
    """
    if row.get("generated_checker") or row.get("input_mode", "stdio") != "stdio" or not row.get("official_tests"):
        raise UserError(f"row {row.get('id')}: wanted official tests on standard input, without a checker")
    return Tests(tuple((case["input"], case["output"]) for case in row["official_tests"]))


def arguments(text: str) -> list[object]:
    """Parse the arguments in the input of a function's test."""
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def same_value(expected: str, output: str, *, tolerance: float = 0.0) -> bool:
    """Return whether two JSON texts have equal values: 1 equals 1.0, but not true. False if the output is not JSON."""
    try:
        return _same_json(json.loads(expected), json.loads(output), tolerance)
    except (ValueError, RecursionError, OverflowError):
        return False


def _same_json(wanted: object, got: object, tolerance: float) -> bool:
    if isinstance(wanted, dict) and isinstance(got, dict):
        return wanted.keys() == got.keys() and all(
            _same_json(value, got[name], tolerance) for name, value in wanted.items()
        )
    if isinstance(wanted, list) and isinstance(got, list):
        return len(wanted) == len(got) and all(map(_same_json, wanted, got, repeat(tolerance)))
    if isinstance(wanted, bool) or isinstance(got, bool):
        return wanted is got
    is_near = isinstance(wanted, float) and isinstance(got, int | float) and _is_near(wanted, got, tolerance)
    return bool(wanted == got) or is_near


def same_text(expected: str, output: str, *, tolerance: float = 0.0) -> bool:
    """Return whether two outputs have the same words in each line; numbers compare by value, whitespace is ignored."""
    wanted, got = ([line.split() for line in text.strip().split("\n")] for text in (expected, output))
    same_lengths = list(map(len, wanted)) == list(map(len, got))
    return same_lengths and all(map(_same_word, chain(*wanted), chain(*got), repeat(tolerance)))


def _same_word(wanted: str, got: str, tolerance: float) -> bool:
    if wanted == got:
        return True
    if not _DECIMAL.fullmatch(wanted) or not _DECIMAL.fullmatch(got):
        return False
    try:
        if Decimal(wanted) == Decimal(got):
            return True
    except InvalidOperation:
        return False
    return not wanted.lstrip("+-").isdecimal() and _is_near(float(wanted), float(got), tolerance)


def _is_near(wanted: float, got: float, tolerance: float) -> bool:
    return math.isfinite(wanted) and math.isfinite(got) and abs(wanted - got) <= tolerance * max(1.0, abs(wanted))


def _private(text: str) -> list[dict[str, str]]:
    """Decode JSON, or JSON in a pickle in zlib in base64, as in the larger data sets. No class is ever loaded."""
    try:
        return json.loads(text)
    except ValueError:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text), LONGEST)
        if stream.unconsumed_tail:
            raise UserError(f"private_test_cases: wanted at most {LONGEST} bytes when decompressed, got more") from None
        return json.loads(_TextOnly(io.BytesIO(data)).load())


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise UserError(f"private_test_cases: wanted a pickled text, got one that loads {module}.{name}")
