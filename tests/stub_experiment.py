"""An experiment file that uses only gspax's dataclasses; tests copy it and change lines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gspax.config import Experiment, Mesh, Sampling, Schedule, WarmStart
from gspax.data import Problem
from gspax.losses import Terms
from gspax.model.presets import tiny_moe


@dataclass(frozen=True)
class Problems:
    seed: int = 0
    max_digits: int = 6
    share: float = 0.5
    label: str | None = None

    def __post_init__(self):
        if self.max_digits > 9:
            raise ValueError(f"wanted max_digits of at most 9, got {self.max_digits}")

    def train(self, index):
        return Problem(prompt=str(index), answer=str(index))

    def heldout(self, index):
        return Problem(prompt=str(index), answer=str(index))


@dataclass(frozen=True)
class Digits:
    vocab_size: int = 11
    stop_ids: tuple[int, ...] = (10,)

    def encode(self, text):
        return [int(digit) for digit in text]

    encode_completion = encode

    def decode(self, ids):
        return "".join(map(str, ids))


def reward(problem, completion):
    return float(completion == problem.answer)


def demonstration(problem, rng):
    return problem.answer


def advantage(rewards, *, eps: float = 1e-6):
    return rewards - rewards.mean(axis=1, keepdims=True)


def gspo(logp, old_logp, advantage, mask, *, clip_low: float = 3e-4, clip_high: float = 4e-4):
    value = advantage * (logp * mask).sum(axis=-1)
    return Terms(value=value, weight=mask.any(axis=-1).astype(value.dtype), metrics={})


experiment = Experiment(
    name="stub",
    model=tiny_moe,
    data=Problems(),
    tokenizer=Digits(),
    reward=reward,
    advantage=advantage,
    loss=partial(gspo, clip_low=2e-4),
    sampling=Sampling(prompts=16, group=4, max_prompt_tokens=8, max_tokens=8),
    schedule=Schedule(steps=10, minibatches=4),
    warm_start=WarmStart(demonstration=demonstration, rows=32),
    mesh=Mesh(fsdp=-1),
)
