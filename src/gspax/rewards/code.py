"""Rewards programs: 1 if a completion's program passes all tests of the problem, else 0.

    reward=partial(rewards.code.reward, allow_code_execution=True)

Each test runs in a fresh interpreter in a sandbox (bubblewrap). Expected outputs stay in this process, so a program has
nothing to look up and nothing to forge: it can only give an output, which is compared here. docs/rewards.md lists what
the sandbox prevents and what it does not.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspax.data.problem import Problem
from gspax.errors import UserError
from gspax.rewards.calls import Failure, compares_answers, concurrent, needs, require_answer
from gspax.rewards.fences import Block, blocks, is_program
from gspax.rewards.program_tests import Tests, arguments, from_answer
from gspax.rewards.scores import FAILED, Grade, Score, Tally
from gspax.rewards.workers.pool import Pool, shared
from gspax.rewards.workers.worker import Ran

NOT_ALLOWED = "wanted allow_code_execution=True for rewards that run programs a model has written"
_LONGEST = 100_000  # characters of a program
_SPARE = 30.0  # seconds beyond a test's own limit after which its worker is assumed to hang

_tally = Tally()
counts = _tally.counts  # the number of completions that this process has graded, by outcome


@dataclass(frozen=True)
class Limits:
    """The resources that a program may use in one test."""

    timeout: float = 6.0  # seconds, start of the interpreter included; processor time is bounded alike
    memory: int = 512  # MiB of address space of each process
    output: int = 4  # MiB of each file it writes, standard output included
    processes: int = 16  # processes and threads at a time

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise UserError(f"limits.{name}: wanted more than 0, got {value}")


@dataclass(frozen=True)
class Sandbox:
    """The isolation and the limits of programs.

    Attributes:
      limits: the limits of each test.
      isolation: "bubblewrap", or "none" for programs that you trust: they run as processes of the trainer's user.
      python: the interpreter for the programs; None for this one if it is below /usr, else /usr/bin/python3.
      workers: programs that this process runs at a time.
    """

    limits: Limits = Limits()
    isolation: str = "bubblewrap"
    python: str | None = None
    workers: int = 2

    def pool(self) -> Pool:
        """Return the worker pool of this process. UserError if programs cannot be isolated in this way here."""
        if reason := _missing(self.isolation):
            raise UserError(reason)
        return shared("code", self.isolation, self.python or _default_python(), workers=self.workers)


def _missing(isolation: str) -> str:
    """Explain why programs cannot be isolated in this way here; empty if they can."""
    if isolation not in ("bubblewrap", "none"):
        return f"isolation: wanted bubblewrap or none, got {isolation!r}"
    if isolation == "bubblewrap" and sys.platform != "linux":
        return f"isolation: wanted Linux for bubblewrap, got {sys.platform}"
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        return "isolation: wanted the program bwrap (apt-get install bubblewrap), it is not installed"
    return ""


def find_missing_sandbox(settings: Mapping[str, Any]) -> str:
    """Explain why a reward or a tool with these keywords cannot run programs here; empty if it can."""
    if (allowed := settings.get("allow_code_execution", True)) is not True:
        return NOT_ALLOWED if allowed is False else f"{NOT_ALLOWED}, got {allowed!r}"
    sandbox = settings.get("sandbox") or Sandbox(isolation=settings["isolation"])
    return _missing(sandbox.isolation)


@compares_answers
@needs(find_missing_sandbox)
@concurrent(8)
def reward(
    problem: Problem,
    completion: str,
    *,
    allow_code_execution: bool = False,
    limits: Limits = Limits(),
    isolation: str = "bubblewrap",
    python: str | None = None,
    workers: int = 2,
    failed: float = 0.0,
) -> Score:
    """Compute 1.0 if the completion's program passes all tests of `problem.answer`, else 0.0.

    Args:
      problem: the problem; its answer is the text of `program_tests.Tests`.
      completion: text that contains the program, as `extract_program` finds it.
      allow_code_execution: must be True: this runs what a model has written.
      limits, isolation, python, workers: as in `Sandbox`.
      failed: the reward of a completion whose problem has no valid tests, or whose worker was lost, which no program
        should be able to cause.
    """
    grades = grade(
        [require_answer(problem)],
        [completion],
        allow_code_execution=allow_code_execution,
        sandbox=Sandbox(limits, isolation, python, workers),
        batch_timeout=math.inf,  # grading.timeout applies, and leaves out waiting for other programs
        failed=failed,
    )
    return grades[0].score


def grade(
    answers: Sequence[str],
    completions: Sequence[str],
    *,
    allow_code_execution: bool = False,
    sandbox: Sandbox = Sandbox(),
    batch_timeout: float = 600.0,
    failed: float = 0.0,
) -> list[Grade]:
    """Grade a batch of completions, each against the tests of the same index.

    Outcomes are "passed", "wrong", "error", "timeout", "no program", "late", "crashed", and "raised" if an answer has
    no valid tests. `allow_code_execution` and `failed` are as in `reward`; programs that have not started within
    `batch_timeout` seconds are late.
    """
    if allow_code_execution is not True:
        raise UserError(f"reward: {NOT_ALLOWED}")
    if len(answers) != len(completions):
        raise UserError(f"answers: wanted one for each of {len(completions)} completions, got {len(answers)}")
    pool, deadline = sandbox.pool(), time.monotonic() + batch_timeout

    def grade_one(pair: tuple[str, str]) -> Grade:
        answer, completion = pair
        try:
            tests = from_answer(answer)
        except ValueError as error:
            return Grade(failed, "raised", str(error))
        if (code := extract_program(completion, tests.function)) is None:
            return Grade(0.0, "no program")
        outcome, detail = _run_tests(pool, tests, code, sandbox.limits, deadline)
        return Grade(1.0 if outcome == "passed" else failed if outcome in FAILED else 0.0, outcome, detail)

    grades = pool.map(grade_one, list(zip(answers, completions, strict=True)))
    _tally.add(grades)
    return grades


def run_program(code: str, stdin: str = "", *, allow_code_execution: bool = False, sandbox: Sandbox = Sandbox()) -> Ran:
    """Run a program with this standard input. UserError unless `allow_code_execution` is True."""
    if allow_code_execution is not True:
        raise UserError("run_program: wanted allow_code_execution=True for a program that a model has written")
    return _run(sandbox.pool(), code, sandbox.limits, stdin)


def extract_program(completion: str, function: str | None = None) -> str | None:
    """Extract the program in a completion: all of it if nothing is fenced or tagged; None if there is none.

    Without a fence, it is what the last `<answer>` or `<code>` holds, if that is a program. Among fenced blocks, it is
    the last one of the first kind that occurs:

    - blocks that define the function, if a test calls one
    - blocks of Python, and blocks without a language that are programs
    - programs in blocks of another language
    - other blocks

    Args:
      completion: any text; takes time linear in its length.
      function: the name of the function that the tests call.
    """
    if "```" not in completion and "~~~" not in completion:
        program = _tagged(completion)
        return program if _fits(program) else None
    if _fits(completion) and is_program(completion):
        return completion
    found = [block for block in blocks(completion) if _fits(block.code)]
    found = [block for block in found if block.closed] or found
    defines = re.compile(rf"^[ \t]*(?:async +)?def +{re.escape(function)}\b", re.MULTILINE) if function else None
    kinds: list[Callable[[Block], object]] = [
        lambda block: defines and defines.search(block.code),
        lambda block: block.is_python or (not block.language and is_program(block.code)),
        lambda block: is_program(block.code),
        lambda block: True,
    ]
    return next((block.code for kind in kinds for block in reversed(found) if kind(block)), None)


def _tagged(text: str) -> str:
    """Return what the last `<answer>` or `<code>` of a text holds if that is a program, else the whole text."""
    end = max(text.rfind("</answer>"), text.rfind("</code>"))
    tag = "<answer>" if text.startswith("</answer>", end) else "<code>"
    start = text.rfind(tag, 0, max(end, 0))
    inside = text[start + len(tag) : end]
    return inside if start >= 0 and _fits(inside) and is_program(inside) else text


def _fits(code: str) -> bool:
    return bool(code.strip()) and len(code) <= _LONGEST


def _run_tests(pool: Pool, tests: Tests, code: str, limits: Limits, deadline: float) -> tuple[str, str]:
    """Run the tests in order; return the outcome of the first that the program fails, and its detail."""
    for number, (text, expected) in enumerate(tests.cases, 1):
        if time.monotonic() >= deadline:
            return "late", ""
        ran = _run(pool, code, limits, text if tests.function is None else arguments(text), tests.function)
        if ran.status in FAILED:
            return ran.status, ""
        if ran.status == "timeout":
            return "timeout", f"test {number}"
        if ran.code != 0:
            return "error", f"test {number}: {ran.last_error()}"
        if not tests.accept(expected, ran.output):
            return "wrong", f"test {number}"
    return "passed", ""


def _run(pool: Pool, code: str, limits: Limits, inputs: str | list[object], function: str | None = None) -> Ran:
    """Run a program with this standard input, or one of its functions with these arguments."""
    result = pool.ask((code, function, inputs, vars(limits)), timeout=limits.timeout + _SPARE)
    return Ran(result.reason, -1, "", "") if isinstance(result, Failure) else Ran(*result)


def _default_python() -> str:
    """Return an interpreter that every user can run: the user nobody cannot reach one in a home directory."""
    this = os.path.realpath(sys.executable)
    return this if this.startswith("/usr/") else "/usr/bin/python3"
