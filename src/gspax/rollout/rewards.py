"""From a rollout to text, rewards and advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gspax.config import Experiment
from gspax.data.problem import Problem
from gspax.distributed import multihost
from gspax.errors import UserError
from gspax.experiment.description import unwrap
from gspax.types import Array, Batch, Rollout

TEXTS = ("completion", "prompt", "answer")  # of a row; the rest are numbers


def encode_prompts(experiment: Experiment, problems: Sequence[Problem | None]) -> list[Sequence[int] | None]:
    """The tokens of the prompts that are here."""
    encode = experiment.tokenizer.encode
    return multihost.all_or_raise(lambda: [None if problem is None else encode(problem.prompt) for problem in problems])


def reward_completions(
    experiment: Experiment, problems: Sequence[Problem | None], rollout: Rollout
) -> list[dict[str, Any]]:
    """Prompt, answer, completion, reward, length and finished of every row of a rollout.

    Each process decodes and rewards its own rows, of which it needs the problems (`multihost.local_rows`). Of the
    others it gets the numbers; `gather_texts` fetches their texts. The rollout's lengths must be on the host
    (`sampler.lengths_to_host`).
    """
    own = multihost.all_or_raise(lambda: _own_completions(experiment, problems, rollout))
    numbers = multihost.gather_rows([row and {name: x for name, x in row.items() if name not in TEXTS} for row in own])
    return [mine or theirs for mine, theirs in zip(own, numbers, strict=True)]


def gather_texts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `completions`, all with their texts. Collective."""
    return multihost.gather_rows([row if TEXTS[0] in row else None for row in rows])


def _own_completions(
    experiment: Experiment, problems: Sequence[Problem | None], rollout: Rollout
) -> list[dict[str, Any] | None]:
    group = len(rollout.length_B) // len(problems)
    rows: list[dict[str, Any] | None] = [None] * len(rollout.length_B)
    for index, tokens in multihost.owned_rows(rollout.tokens_BT).items():
        problem = problems[index // group]
        assert problem is not None
        start = rollout.prompt_length_B[index]
        text = experiment.tokenizer.decode(tokens[start : start + rollout.length_B[index]])
        rewards = checked_rewards(experiment, problem, text)
        rows[index] = {
            "prompt": problem.prompt,
            "answer": problem.answer,
            "completion": text,
            "reward": sum(rewards),
            **({"rewards": list(rewards)} if len(rewards) > 1 else {}),
            "length": int(rollout.length_B[index]),
            "finished": bool(rollout.finished_B[index]),
        }
    return rows


def checked_rewards(experiment: Experiment, problem: Problem, text: str) -> tuple[float, ...]:
    """The experiment's reward, or rewards, as finite floats; UserError with the completion where there is none."""
    name = _name(experiment.reward)
    try:
        value = experiment.reward(problem, text)
        values = tuple(map(float, value)) if isinstance(value, tuple) else (float(value),)
    except Exception as error:
        raise UserError(
            f"reward: {name} raised {type(error).__name__}: {error} for the prompt {problem.prompt!r} "
            f"and the completion {text!r}"
        ) from error
    if not values or not np.isfinite(values).all():
        raise UserError(f"reward: wanted finite numbers from {name}, got {value} for the completion {text!r}")
    return values


def compute_advantages(
    experiment: Experiment, rows: Sequence[dict[str, Any]], rollout: Rollout, batches: Sequence[Batch]
) -> tuple[np.ndarray, dict[str, float]]:
    """Advantages float32 [B] of the rewards in `rows`, and the metrics of what was added to those rewards.

    Added are `length_reward` of the response lengths, and minus the reference's coefficient times the sum over a
    response of its `reward` function. Several rewards stay apart, and what is added is one more of them.
    """
    several = [row.get("rewards", [row["reward"]]) for row in rows]
    if len({len(each) for each in several}) > 1:
        raise UserError(f"reward: wanted as many numbers for every completion, got {sorted({*map(len, several)})}")
    reward_BR = np.array(several, np.float32)
    added_B, metrics = _added(experiment, rollout, batches)
    one = reward_BR.shape[1] == 1
    if metrics:
        added_B1 = added_B[:, None]
        reward_BR = reward_BR + added_B1 if one else np.concatenate([reward_BR, added_B1], axis=1)
        metrics["reward/with_added"] = float(reward_BR.sum(axis=1).mean())
    reward_PGR = jnp.asarray(reward_BR.reshape(-1, experiment.sampling.group, reward_BR.shape[1]))
    masks = (jnp.asarray(rollout.finished_B).reshape(reward_PGR.shape[:2]),) if experiment.filter_overlong else ()
    try:
        advantage_PG = np.asarray(experiment.advantage(reward_PGR[..., 0] if one else reward_PGR, *masks), np.float32)
    except (TypeError, ValueError) as error:
        raise UserError(f"advantage: {_name(experiment.advantage)} refuses these rewards: {error}") from error
    return advantage_PG.reshape(-1), metrics


def _added(experiment: Experiment, rollout: Rollout, batches: Sequence[Batch]) -> tuple[np.ndarray, dict[str, float]]:
    """What is added to each response's reward, float32 [B], and the mean of each part; no metrics if nothing is."""
    added_B: np.ndarray = np.zeros(len(rollout.length_B), np.float32)
    metrics: dict[str, float] = {}
    if experiment.length_reward is not None:
        length_B = np.asarray(experiment.length_reward(jnp.asarray(rollout.length_B)), np.float32)
        added_B, metrics["reward/length"] = added_B + length_B, float(length_B.mean())
    reference = experiment.reference
    if reference is not None and reference.reward is not None:
        estimate: Callable[..., Array] = reference.reward
        kl_B = np.concatenate(
            [
                multihost.to_host(estimate(batch.old_logp_BT, batch.ref_logp_BT, batch.mask_BT).sum(axis=-1))
                for batch in batches
            ]
        )
        added_B, metrics["reward/kl"] = added_B - reference.coefficient * kl_B, float(kl_B.mean())
    return added_B, metrics


def _name(function: Any) -> str:
    return getattr(unwrap(function), "__qualname__", repr(function))
