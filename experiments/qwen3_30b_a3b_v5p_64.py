"""Qwen3-30B-A3B by GSPO on 64 chips of v5p (v5p:4x4x4, Google's v5p-128): responses of up to 7,168 tokens.

The settings of the GSPO paper (arXiv 2507.18071, section 5.1): 4 minibatches per rollout, clip ranges 3e-4 and
4e-4, no KL. The paper gives no learning rate, batch size or lengths, and its cold-start model is not public: this run
starts from the published model and multiplies numbers, a task that needs no download. Replace `data` and `reward` with
your own. Compiled for this topology (memory and times: README.md), never trained.

Run: gspax train experiments/qwen3_30b_a3b_v5p_64.py --workdir runs/qwen3_30b_a3b (on every host)
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, Optimizer, Sampling, Schedule
from gspax.data.chat import ChatTokenizer, hf_chat, split_thinking
from gspax.data.problem import GeneratedProblems, Message, Problem
from gspax.hf.source import SMALL, locate
from gspax.model import presets


@dataclass(frozen=True)
class Products(GeneratedProblems):
    """Two integers of 3 to `max_digits` digits each, to be multiplied."""

    max_digits: int = 7

    def generate(self, rng: np.random.Generator) -> Problem:
        a, b = (int(rng.integers(10 ** (digits - 1), 10**digits)) for digits in rng.integers(3, self.max_digits + 1, 2))
        text = f"What is {a} * {b}? Reason step by step, and put the final number within \\boxed{{}}."
        return Problem(prompt=text, answer=str(a * b))


def reward(problem: Problem, completion: str) -> float:
    """1 if the last box of the answer contains the product, ignoring commas and spaces; otherwise 0."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", split_thinking(completion)[1])
    return float(bool(boxes) and re.sub(r"[,\s]", "", boxes[-1]) == problem.answer)


@dataclass(frozen=True)
class Qwen3Chat:
    """The chat tokenizer of a published Qwen3 model, located when text is first encoded. Its sizes are given here, so
    that the experiment can be validated, planned and compiled without it."""

    checkpoint: str
    thinking: bool = False
    vocab_size: int = 151669
    stop_ids: tuple[int, ...] = (151645, 151643)

    def encode(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        return self._chat.encode_chat(messages, tools)

    def encode_reply(self, messages: Sequence[Message]) -> list[int]:
        return self._chat.encode_reply(messages)

    def encode_completion(self, text: str) -> list[int]:
        return self._chat.encode_completion(text)

    @property
    def turn_end(self) -> int:
        return self.stop_ids[0]

    def decode(self, ids: Iterable[int]) -> str:
        return self._chat.decode(ids)

    @cached_property
    def _chat(self) -> ChatTokenizer:
        return hf_chat(locate(self.checkpoint, SMALL), thinking=self.thinking)


CHECKPOINT = "Qwen/Qwen3-30B-A3B"

experiment = Experiment(
    name="qwen3_30b_a3b_v5p_64",
    model=replace(presets.qwen3_30b_a3b, checkpoint=CHECKPOINT),
    data=Products(),
    tokenizer=Qwen3Chat(CHECKPOINT),
    reward=reward,
    advantage=advantages.standardize,
    loss=partial(losses.gspo, clip_low=3e-4, clip_high=4e-4),
    sampling=Sampling(prompts=128, group=16, max_prompt_tokens=1024, max_tokens=7168),
    optimizer=Optimizer(learning_rate=1e-6),
    schedule=Schedule(steps=500, minibatches=4, microbatch_rows=128, eval_every=50, checkpoint_every=25),
    evaluation=Evaluation(problems=512),
)
