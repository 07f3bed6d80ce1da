"""Word problems of one to three steps, for a small language model with a tokenizer of its own.

    prompt    Mia has 14 marbles. Mia finds 9 more. Mia gives 5 of them to Leo. How many marbles does Mia have now?
    response  14+9=23. 23-5=18. #### 18

A problem's type is the order of its steps: (find, give) above. A hash divides the types of three steps into familiar
ones, which a model is pre-trained on, and new ones, of which it reads no solution. Only the text after `####` is
rewarded, so one slip costs the whole reward.

`python -m gspax.data.word_problems FOLDER` trains the tokenizer: byte-pair encoding, one token per digit, as Qwen's.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from gspax.data.problem import Problem, digest, heldout_problem, train_problem

NAMES = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gia",
    "Hugo",
    "Ida",
    "Jon",
    "Kira",
    "Leo",
    "Mia",
    "Nils",
    "Olga",
    "Sam",
)
THINGS = ("apples", "beads", "books", "buttons", "cards", "coins", "eggs", "keys", "marbles", "pears", "pens", "shells")
SENTENCES = {
    "find": ("{name} finds {0} more.", "{name} buys another {0}."),
    "give": ("{name} gives {0} of them to {other}.", "{name} loses {0} of them."),
    "packs": ("{name} buys {0} bags of {1}.", "{name} buys {0} boxes of {1}."),
    "times": ("A month later {name} has {0} times as many.",),
    "share": ("{name} puts them into {0} equal piles and keeps one.",),
}
LARGEST = 60  # that a count can reach
END = "<|endoftext|>"
VOCABULARY = 512

Type = tuple[str, ...]
Step = tuple[str, tuple[int, ...]]  # a key of SENTENCES and its numbers


def types(steps: int, kind: Literal["familiar", "new"]) -> list[Type]:
    """The types of so many steps; those of one and two steps are all familiar."""
    return [each for each in itertools.product(SENTENCES, repeat=steps) if _is_new(each) == (kind == "new")]


def _is_new(type: Type) -> bool:
    return len(type) == 3 and digest(" ".join(type)) % 3 == 0


@dataclass(frozen=True)
class Problems:
    """Problems of `min_steps` to `max_steps` steps, all numbers of steps equally likely, then all types. Held-out
    problems ignore the seed."""

    seed: int = 0
    kind: Literal["familiar", "new"] = "familiar"
    min_steps: int = 1
    max_steps: int = 3

    def __post_init__(self) -> None:
        least = 1 if self.kind == "familiar" else 3
        if not least <= self.min_steps <= self.max_steps <= 3:
            raise ValueError(
                f"wanted {least} <= min_steps <= max_steps <= 3 for {self.kind} types; "
                f"got min_steps={self.min_steps}, max_steps={self.max_steps}"
            )

    def train(self, index: int) -> Problem:
        return train_problem(self, index)

    def heldout(self, index: int) -> Problem:
        return heldout_problem(self, index)

    def draw(self, rng: np.random.Generator) -> Problem:
        possible = types(int(rng.integers(self.min_steps, self.max_steps + 1)), self.kind)
        type = possible[rng.integers(len(possible))]
        while (drawn := _draw_steps(rng, type)) is None:
            pass
        first, steps = drawn
        name, other = rng.choice(NAMES, 2, replace=False)
        thing = THINGS[rng.integers(len(THINGS))]
        story = [f"{name} has {first} {thing}."]
        for kind, numbers in steps:
            sentence = SENTENCES[kind][rng.integers(len(SENTENCES[kind]))]
            story.append(sentence.format(*numbers, name=name, other=other))
        prompt = " ".join([*story, f"How many {thing} does {name} have now?"])
        metadata = {"first": first, "steps": steps}
        return Problem(prompt, solve(first, steps), task="-".join(type), metadata=metadata)


def _draw_steps(rng: np.random.Generator, type: Type) -> tuple[int, list[Step]] | None:
    """A first count and the steps; None if one is impossible or a count is too large."""
    first = count = int(rng.integers(3, 21))
    steps: list[Step] = []
    for kind in type:
        numbers = _draw_numbers(rng, kind, count)
        count = 0 if numbers is None else _Work().take(kind, numbers, count)
        if numbers is None or not 1 <= count <= LARGEST:
            return None
        steps.append((kind, numbers))
    return first, steps


def _draw_numbers(rng: np.random.Generator, kind: str, count: int) -> tuple[int, ...] | None:
    if kind == "share":
        divisors = [d for d in range(2, 10) if count % d == 0 and count > d]
        return (int(rng.choice(divisors)),) if divisors else None
    most = {"find": 9, "give": min(9, count - 1), "packs": 5, "times": 3}[kind]
    return tuple(int(rng.integers(2, most + 1)) for _ in range(2 if kind == "packs" else 1)) if most >= 2 else None


class _Work:
    """The calculations of a solution; the result of number `slip` is off by `miss`."""

    def __init__(self, slip: int | None = None, miss: int = 0):
        self.lines: list[str] = []
        self._slip, self._miss = slip, miss

    def take(self, kind: str, numbers: Sequence[int], count: int) -> int:
        """The count after a step."""
        if kind == "packs":
            return self._write(count, "+", self._write(numbers[0], "*", numbers[1]))
        return self._write(count, {"find": "+", "give": "-", "times": "*", "share": "/"}[kind], numbers[0])

    def _write(self, left: int, sign: str, right: int) -> int:
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]
        result = max(0, result + self._miss if len(self.lines) == self._slip else result)
        self.lines.append(f" {left}{sign}{right}={result}.")
        return result


def solve(first: int, steps: Sequence[Step], slip: int | None = None, miss: int = 0) -> str:
    """The worked solution; the result of calculation number `slip` is off by `miss`, and later ones build on it."""
    work, count = _Work(slip, miss), first
    for kind, numbers in steps:
        count = work.take(kind, numbers, count)
    return f"{''.join(work.lines)} #### {count}"


def half_wrong(problem: Problem, rng: np.random.Generator) -> str:
    """A worked solution: all calculations right half of the time, otherwise one is off by one or two."""
    slip, miss = None, 0
    if rng.random() < 0.5:
        slip, miss = int(rng.integers(problem.answer.count("="))), int(rng.choice([-2, -1, 1, 2]))
    return solve(problem.metadata["first"], problem.metadata["steps"], slip, miss)


def texts(count: int, seed: int = 0) -> Iterator[str]:
    """Familiar problems with their solutions, to train a tokenizer on."""
    problems = Problems(seed)
    for index in range(count):
        problem = problems.train(index)
        yield problem.prompt + problem.answer


def train_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`. Needs `tokenizers`, which comes with transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(2000), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    train_tokenizer(Path(sys.argv[1]))
