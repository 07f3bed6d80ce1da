r"""Benchmarks in their published schemas, read from files or from the Hub. None is part of gspax.

    evaluation=Evaluation(tasks=(tasks.gsm8k("gsm8k/test.jsonl", samples=4),))
    gspax eval FILE --workdir DIR --tasks gsm8k=gsm8k/test.jsonl

Each function returns a `Task` for a path: a file (.jsonl or .parquet), a folder that contains the split's files, a
folder for the `datasets` library, or a name on the Hub. Further keywords are fields of the task (`samples`,
`temperature`, …); the settings that model cards recommend are constants:
`tasks.aime24(path, samples=32, **tasks.QWEN3_THINKING)`.

With a thinking model only the text after `</think>` is scored, so a truncated completion gets 0.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from gspax.config import Task
from gspax.config.protocols import Reward, Vote
from gspax.data.chat import split_thinking
from gspax.data.problem import Problem, digest
from gspax.data.sources.schema import Schema
from gspax.data.sources.tables import BadRows, JsonLines, Parquet, Table, hugging_face
from gspax.errors import UserError, brief
from gspax.rewards import answers, code, math, program_tests
from gspax.rewards.calls import compares_answers, concurrent, needs
from gspax.rewards.scores import Score
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path

StrPath = str | os.PathLike[str]
Row = Mapping[str, Any]
Read = Callable[[Row], tuple[Problem, str]]  # converts a row to a problem, and its prompt without a template


class Settings(TypedDict, total=False):
    """The fields of a task that a benchmark lets its caller set."""

    name: str
    reward: Reward
    vote: Vote | None
    problems: int
    samples: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_prompt_tokens: int
    max_tokens: int


# Recommended by Qwen3's model cards, which also recommend completions of 32,768 tokens.
QWEN3_THINKING: Settings = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 32_768}
QWEN3_INSTRUCT: Settings = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_tokens": 16_384}

BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Benchmark:
    """All problems of a table, in its order. Opening it reads every row once; a row that does not fit is an error.

    With `len` and `[]`, it can also be passed to `data.sequence`.

    Attributes:
      table: the rows.
      read: converts a row to a problem, and the text by which `data.jsonl(exclude=…)` finds it among training
        prompts. It raises ValueError for a row that does not fit.
      keep: whether a row belongs to the benchmark; None for all.
      check: returns why a problem cannot be graded, or None; a rule as in `checks` of a data source.
    """

    table: Table
    read: Read
    keep: Callable[[Row], bool] | None = None
    check: Callable[[Problem], str | None] | None = None

    def __len__(self) -> int:
        return self.heldout_count

    def __getitem__(self, index: int) -> Problem:
        return self.heldout(index)

    def heldout(self, index: int) -> Problem:
        """Return problem number `index`, from 0."""
        return self.read(self.table[self._opened[0][index]])[0]

    @property
    def heldout_count(self) -> int:
        """The number of problems."""
        return len(self._opened[0])

    @property
    def heldout_prompts(self) -> set[int]:
        """Digests of the prompts, before any template."""
        return set(self._opened[1])

    @property
    def heldout_content(self) -> str:
        """A hash of the rows."""
        return self.table.content or f"prompts:{digest(repr(self._opened[1])):032x}"

    def described(self) -> dict[str, object]:
        """Return the identity of the problems for `experiment.describe`: the content of files, not their paths."""
        return {"table": self.heldout_content, "read": self.read, "keep": self.keep}

    @functools.cached_property
    def _opened(self) -> tuple[list[int], list[int]]:
        """The numbers of the benchmark's rows, and the digests of their prompts."""
        numbers, prompts, bad = [], [], BadRows()
        for i, row in enumerate(self.table.rows()):
            try:
                if isinstance(row, ValueError):
                    raise row
                if self.keep is not None and not self.keep(row):
                    continue
                problem, prompt = self.read(row)
                if self.check is not None and (reason := self.check(problem)):
                    raise ValueError(f"answer: {reason}")
                prompts.append(digest(prompt))
                numbers.append(i)
            except (ValueError, KeyError, TypeError, UserError) as error:
                bad.add(self.table.where(i), brief(error))
        if bad.count:
            raise UserError(f"benchmark: {bad.count} rows cannot be used ({bad})")
        if not numbers:
            raise UserError("benchmark: wanted at least one problem, got none")
        return numbers, prompts


def gsm8k(path: StrPath = "openai/gsm8k", *, template: str = BOXED, **settings: Unpack[Settings]) -> Task:
    """Load GSM8K (arXiv 2110.14168), 1,319 test problems: `question`, and a solution ending in `#### 18`."""
    schema = Schema(prompt="question", answer="answer", template=template)
    return _math_task("gsm8k", open_table(path, config="main"), schema.read, settings)


def math500(path: StrPath = "HuggingFaceH4/MATH-500", *, template: str = BOXED, **settings: Unpack[Settings]) -> Task:
    """Load MATH-500 (arXiv 2305.20050): `problem`, `answer`, `subject`, `level` and `unique_id`."""
    schema = Schema(prompt="problem", answer="answer", template=template, metadata=("subject", "level", "unique_id"))
    return _math_task("math500", open_table(path), schema.read, settings)


def aime24(path: StrPath = "HuggingFaceH4/aime_2024", *, template: str = BOXED, **settings: Unpack[Settings]) -> Task:
    """Load AIME 2024, 30 problems: `problem`, and `answer` or a `solution` with a box, in any published spelling."""
    table = open_table(path, split="train") if not Path(path).exists() else open_table(path)
    return _math_task("aime24", table, partial(read_aime, template=template), settings)


def livecodebench(
    path: StrPath,
    *,
    since: str = "",
    until: str = "",
    allow_code_execution: bool = True,
    isolation: str = "bubblewrap",
    **settings: Unpack[Settings],
) -> Task:
    """Load LiveCodeBench (arXiv 2403.07974): the rows of its `test*.jsonl` with public and private tests.

    Naming this task runs the programs that the model writes, in the sandbox of `gspax.rewards.code`.

    Args:
      path: a file, or the folder that contains the files.
      since: the first contest date to include, such as "2024-08-01".
      until: the first later contest date to exclude.
      allow_code_execution: as for `rewards.code.reward`.
      isolation: as for `rewards.code.reward`.
      **settings: fields of the task.
    """
    keep = partial(is_between, since=since, until=until) if since or until else None
    reward = partial(reward_program, allow_code_execution=allow_code_execution, isolation=isolation)
    data = Benchmark(open_table(path), read_livecodebench, keep, program_tests.check)
    return replace(Task(name="livecodebench", data=data, reward=reward), **settings)


def open_table(path: StrPath, *, split: str = "test", config: str | None = None) -> Table:
    """Open the table of a path, one of those in the module's docstring. It is read when its first row is needed."""
    name, suffixes = os.fspath(path), Path(path).suffixes
    if Path(path).is_dir() if open_storage(name).has_folders else not suffixes:
        for suffix, kind in ((".jsonl", JsonLines), (".parquet", Parquet)):
            if files := sorted(map(str, to_path(name).glob(f"{split}*{suffix}"))):
                return kind(tuple(files))
        return hugging_face(name, split)
    if {".jsonl", ".json"} & {*suffixes}:  # a compressed one is refused when it is opened
        return JsonLines((name,))
    if suffixes[-1:] == [".parquet"]:
        return Parquet((name,))
    return hugging_face(name, split, config)


def read_aime(row: Row, *, template: str = BOXED) -> tuple[Problem, str]:
    """Convert a row with `problem` or `Problem`, and `answer`, `Answer`, `solution` or `Solution`, to a problem."""
    return Schema(
        prompt=_first_column(row, "problem", "Problem", "question"),
        answer=_first_column(row, "answer", "Answer", "solution", "Solution"),
        template=template,
    ).read(row)


def read_livecodebench(row: Row) -> tuple[Problem, str]:
    """Convert a row to a problem, with its tests as the answer."""
    starter = row.get("starter_code") or ""
    how = (
        f"Complete this code, and keep its names:\n\n```python\n{starter}\n```\n\n"
        if starter.strip()
        else "Read the input from standard input and print the answer to standard output. "
    )
    prompt = (
        f"Solve this problem with a Python program.\n\n{row['question_content']}\n\n"
        f"{how}Put the whole program into one ```python block at the end."
    )
    metadata = {name: row[name] for name in ("question_id", "difficulty", "contest_date") if name in row}
    tests = program_tests.from_livecodebench(row).to_answer()
    return Problem(prompt=prompt, answer=tests, metadata=metadata), str(row["question_content"])


def is_between(row: Row, *, since: str = "", until: str = "") -> bool:
    """Return whether a row's contest took place from `since` to before `until`; ISO dates compare as texts."""
    date = str(row["contest_date"])
    return date >= since and (not until or date < until)


@compares_answers
@needs(math.find_missing_parser)
@concurrent(8)
def reward_math(problem: Problem, completion: str) -> Score:
    """Compute `rewards.math.reward` of the text after the thinking."""
    return math.reward(problem, split_thinking(completion)[1])


reward_math.check_answer = math.check  # type: ignore[attr-defined]


@compares_answers
@needs(code.find_missing_sandbox)
@concurrent(8)
def reward_program(
    problem: Problem, completion: str, *, allow_code_execution: bool = False, isolation: str = "bubblewrap"
) -> Score:
    """Compute `rewards.code.reward` of the text after the thinking."""
    answer = split_thinking(completion)[1]
    return code.reward(problem, answer, allow_code_execution=allow_code_execution, isolation=isolation)


def vote_answer(completion: str) -> str | None:
    """Extract the final answer after the thinking, normalized so that equal numbers are equal texts."""
    answer = answers.extract(split_thinking(completion)[1])
    return None if answer is None else answers.canonical(answer)


def _math_task(name: str, table: Table, read: Read, settings: Settings) -> Task:
    task = Task(name=name, data=Benchmark(table, read, check=math.check), reward=reward_math, vote=vote_answer)
    return replace(task, **settings)


def _first_column(row: Row, *names: str) -> str:
    column = next((name for name in names if name in row), None)
    if column is None:
        raise ValueError(f"wanted a column {' or '.join(names)}, got {', '.join(row)}")
    return column
