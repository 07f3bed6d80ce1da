"""Measure the rewards on reference solutions: who gets 1 who should not, and how many are graded in a second.

    python experiments/benchmarks/bench_rewards.py DATA > experiments/benchmarks/rewards.md

DATA holds `gsm8k/{train,test}.jsonl` (openai/grade-school-math) and `math500/test.jsonl` (openai/prm800k), in their
published schemas. Every reference solution should get 1.0, and 0.0 once its final answer is perturbed. It also holds
`code_mini/problems.jsonl`, in LiveCodeBench's schema with a right and a wrong program for each problem.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gspax.rewards import code, math
from gspax.rewards.answers import compare, extract
from gspax.rewards.program_tests import from_livecodebench
from gspax.rewards.scores import Grade

Row = tuple[str, str, str]  # expected answer, reference solution, the solution with its final answer perturbed


def perturb(answer: str) -> str:
    """Another answer of the same form: the last number plus one; without a number, another word or one more."""
    numbers = list(re.finditer(r"\d+", answer))
    if numbers:
        last = numbers[-1]
        return f"{answer[: last.start()]}{int(last.group()) + 1}{answer[last.end() :]}"
    return r"\text{none}" if r"\text" in answer else f"{answer} + 1"


def gsm8k(folder: Path) -> list[Row]:
    rows = []
    for split in ("train", "test"):
        for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            solution = json.loads(line)["answer"]
            steps, _, answer = solution.rpartition("#### ")
            rows.append((answer, solution, f"{steps}#### {perturb(answer)}"))
    return rows


def math500(folder: Path) -> list[Row]:
    rows = []
    for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        other = row["solution"] + rf" \boxed{{{perturb(row['answer'])}}}"
        rows.append((row["answer"], row["solution"], other))
    return rows


def timed(answers: Sequence[str], completions: Sequence[str]) -> tuple[list[Grade], float]:
    began = time.perf_counter()
    grades = math.grade(answers, completions, batch_timeout=600)
    return grades, time.perf_counter() - began


def correctness(name: str, rows: Sequence[Row]) -> list[str]:
    """A line of the table, and every exception."""
    answers = [row[0] for row in rows]
    right = timed(answers, [row[1] for row in rows])[0]
    other = timed(answers, [row[2] for row in rows])[0]
    ones, zeros = sum(each.reward == 1 for each in right), sum(each.reward == 0 for each in other)
    wrong = [f"`{row[0]}` got {each.outcome}" for row, each in zip(rows, right, strict=True) if each.reward != 1]
    wrong += [f"`{perturb(row[0])}` counts as `{row[0]}`" for row, each in zip(rows, other, strict=True) if each.reward]
    return [f"| {name} | {len(rows)} | {ones} | {zeros} |", *(f"- {name}: {line}" for line in wrong)]


def speed(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    answers, completions = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    timed(["x + 1"] * 2, [r"\boxed{1 + x}", r"\boxed{x + 2 - 1}"])  # the workers are up
    grades, seconds = timed(answers, completions)
    late = sum(each.outcome in ("late", "crashed") for each in grades)
    decided = sum(compare(row[0], extract(row[1]) or "") is not None for row in pairs)
    return f"| {name} | {len(grades)} | {decided} | {len(grades) / seconds:,.0f} | {late} |"


def as_sum(answer: str, index: int) -> str:
    """Never the same sum twice: pairs that repeat are compared once."""
    return rf"\boxed{{{int(answer.replace(',', '')) - index} + {index}}}"


def programs(folder: Path, isolation: str) -> str:
    rows = [json.loads(line) for line in (folder / "problems.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [from_livecodebench(row).to_answer() for row in rows]

    def graded(name: str, repeats: int = 1) -> tuple[int, float]:
        # A comment keeps the copies apart: equal programs would run once.
        texts = [f"{row[name]}\n# {copy}" for copy in range(repeats) for row in rows]
        began = time.perf_counter()
        grades = code.grade(
            answers * repeats, texts, allow_code_execution=True, sandbox=code.Sandbox(isolation=isolation)
        )
        return sum(grade.reward == 1 for grade in grades), time.perf_counter() - began

    right, wrong = graded("reference_solution")[0], len(rows) - graded("wrong_solution")[0]
    repeats = -(-1000 // len(rows))
    before = os.getloadavg()[0]
    passed, seconds = graded("reference_solution", repeats)
    each = f"{right} of {len(rows)} | {wrong} of {len(rows)} | {passed} of {repeats * len(rows)}"
    return f"| {isolation} | {each} | {60 * passed / seconds:,.0f} | {before:.1f} to {os.getloadavg()[0]:.1f} |"


def main() -> None:
    data = Path(sys.argv[1])
    words, competition = gsm8k(data / "gsm8k"), math500(data / "math500")
    machine = f"{os.cpu_count()} {platform.machine()} cores shared with a load of {os.getloadavg()[0]:.0f}"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"# Rewards, measured\n\n`bench_rewards.py DATA` at commit {commit},")
    print(f"Python {platform.python_version()}, {machine}.\n")
    print("| reference solutions | rows | 1.0 as they are | 0.0 once perturbed |\n| --- | --- | --- | --- |")
    tables = [correctness("GSM8K, train and test", words), correctness("MATH-500", competition)]
    print("\n".join(table[0] for table in tables) + "\n")
    print("\n".join(line for table in tables for line in table[1:]) + "\n")
    print("| graded in one batch, 2 workers | completions | without math-verify | a second | late or crashed |")
    print("| --- | --- | --- | --- | --- |")
    print(speed("GSM8K's solutions", [(row[0], row[1]) for row in words]))
    print(speed("MATH-500's solutions", [(row[0], row[1]) for row in competition]))
    print(speed("MATH-500's solutions, perturbed", [(row[0], row[2]) for row in competition]))
    sums = [(row[0], as_sum(row[0], index)) for index, row in enumerate(words[:2000])]
    print(speed("GSM8K's answers as sums, `41 + 1`", sums))
    print("\n| programs of code_mini, 2 workers | right pass | wrong fail | of all | a minute | load of the machine |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(programs(data / "code_mini", isolation) for isolation in ("bubblewrap", "none")))


if __name__ == "__main__":
    main()
