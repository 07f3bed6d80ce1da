"""Word problems of one to three steps, for a small language model with a tokenizer of its own.

    prompt    Mia has 6 marbles. Mia finds 8 more. Mia gives half of them to Leo. How many marbles now?
    response  6+8=14. 14/2=7. #### 7

A problem's type is the order of its steps: (find, halve) above. A hash divides the types of three steps into familiar
ones, which a model is pre-trained on, and new ones, whose solutions it never sees. Only the text after `####` is
rewarded. Most of the demonstrations are the answer alone (`mostly_short`).

`python experiments/word_problems.py FOLDER` trains the tokenizer: byte-pair encoding, one token per digit, as in
Qwen's.
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

from gspax.data.problem import GeneratedProblems, Problem, digest

NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo"),
    *("Ida", "Jon", "Kira", "Leo", "Mia", "Nils", "Olga", "Sam"),
)
THINGS = ("apples", "beads", "books", "buttons", "cards", "coins", "eggs", "keys", "marbles", "pears", "pens", "shells")
SENTENCES = {
    "find": ("{name} finds {number} more.", "{name} buys another {number}."),
    "give": ("{name} gives {number} to {other}.", "{name} loses {number}."),
    "double": ("A month later {name} has twice as many.",),
    "halve": ("{name} gives half of them to {other}.", "{name} sells half of them."),
}
SIGNS = {"find": "+", "give": "-", "double": "*", "halve": "/"}
LARGEST = 24  # that a count can reach
END = "<|endoftext|>"
VOCABULARY = 416

Type = tuple[str, ...]
Step = tuple[str, int]  # a key of SENTENCES and its number


def types(steps: int, kind: Literal["familiar", "new"]) -> list[Type]:
    """The familiar or new types with this number of steps; all types of one or two steps are familiar."""

    def is_new(type: Type) -> bool:
        return steps == 3 and digest(" ".join(type)) % 3 == 0

    return [type for type in itertools.product(SENTENCES, repeat=steps) if is_new(type) == (kind == "new")]


@dataclass(frozen=True)
class Problems(GeneratedProblems):
    """Problems of `min_steps` to `max_steps` steps, all numbers of steps equally likely, then all types. Held-out
    problems ignore the seed."""

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

    def generate(self, rng: np.random.Generator) -> Problem:
        possible = types(int(rng.integers(self.min_steps, self.max_steps + 1)), self.kind)
        type = possible[rng.integers(len(possible))]
        while (calculation := _random_steps(rng, type)) is None:
            pass
        first, steps = calculation
        name, other = rng.choice(NAMES, 2, replace=False)
        thing = THINGS[rng.integers(len(THINGS))]
        story = [f"{name} has {first} {thing}."]
        for kind, number in steps:
            sentence = SENTENCES[kind][rng.integers(len(SENTENCES[kind]))]
            story.append(sentence.format(number=number, name=name, other=other))
        prompt = " ".join([*story, f"How many {thing} now?"])
        metadata = {"first": first, "steps": steps}
        return Problem(prompt, solve(first, steps), task="-".join(type), metadata=metadata)


def _random_steps(rng: np.random.Generator, type: Type) -> tuple[int, list[Step]] | None:
    """A first count and the steps; None if one is impossible or a count is too large."""
    first = count = int(rng.integers(3, 13))
    steps: list[Step] = []
    for kind in type:
        number = 2 if kind in ("double", "halve") else int(rng.integers(2, 10))
        if kind == "halve" and count % 2:
            return None
        count = _calculate(count, SIGNS[kind], number)
        if not 1 <= count <= LARGEST:
            return None
        steps.append((kind, number))
    return first, steps


def _calculate(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]


def solve(first: int, steps: Sequence[Step], slip: int | None = None, miss: int = 0) -> str:
    """The worked solution; the result of step `slip` is off by `miss`, and later ones build on it."""
    lines, count = [], first
    for index, (kind, number) in enumerate(steps):
        result = max(0, _calculate(count, SIGNS[kind], number) + (miss if index == slip else 0))
        lines.append(f" {count}{SIGNS[kind]}{number}={result}.")
        count = result
    return f"{''.join(lines)} #### {count}"


def mostly_short(problem: Problem, rng: np.random.Generator) -> str:
    """A demonstration: the right answer alone (60 %), or a worked solution (40 %), of which every fourth has one result
    that is off by one or two."""
    if rng.random() < 0.6:
        return problem.answer[problem.answer.index(" ####") :]
    steps, slip, miss = problem.metadata["steps"], None, 0
    if rng.random() < 0.25:
        slip, miss = int(rng.integers(len(steps))), int(rng.choice([-2, -1, 1, 2]))
    return solve(problem.metadata["first"], steps, slip, miss)


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
