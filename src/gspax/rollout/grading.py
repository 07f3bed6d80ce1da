"""From a rollout to text, rewards and advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.advantages import constant_groups
from gspax.config.functions import title_of, unwrap
from gspax.config.protocols import Advantage, LengthReward, Tokenizer
from gspax.data.problem import Problem
from gspax.errors import UserError, warn_once
from gspax.parallel import multihost
from gspax.rewards.calls import Calls
from gspax.rewards.scores import Result
from gspax.run import interrupt
from gspax.types import Rollout

TEXTS = ("completion", "prompt", "answer")  # the fields of a row that are not numbers

# one completion: prompt, answer, completion, reward, length, finished; error, parts and reason of a Result; of a
# conversation also turn_spans, turn_rewards and environment (`rollout.episodes`)
Row = dict[str, Any]

FEW = 5  # failures that end no run, whatever share of a small batch they are
SURE = 100  # completions after which an evaluation whose rewards have all failed ends early


class FailedRewardsError(UserError):
    """The reward function failed for too many completions; `rows` has them."""

    def __init__(self, message: str, rows: Sequence[Row]) -> None:
        super().__init__(message)
        self.rows = rows


class StartedReward(NamedTuple):
    """A completion whose reward is to come."""

    text: str
    future: Future[Result]
    conversation: Row | None = None  # what the row of a conversation has besides


Started = dict[int, StartedReward]  # by row


def start_rewards(
    problems: Sequence[Problem | None],
    started: Started,
    ended: Mapping[int, np.ndarray],
    *,
    tokenizer: Tokenizer,
    calls: Calls[Result],
    group: int,
) -> None:
    """Start the rewards of completions that have ended, while others are drawn, and note them in `started`."""
    given = [(row, problems[row // group], tokenizer.decode(tokens)) for row, tokens in ended.items()]
    given = [each for each in given if each[1] is not None]
    futures = calls.submit([problem for _, problem, _ in given], [text for _, _, text in given])
    started.update({row: StartedReward(text, each) for (row, _, text), each in zip(given, futures, strict=True)})


def reward_completions(
    problems: Sequence[Problem | None],
    rollout: Rollout,
    *,
    tokenizer: Tokenizer,
    calls: Calls[Result],
    started: Started | None = None,
) -> list[Row]:
    """One row per completion: prompt, answer, completion, reward, length and finished.

    Each process decodes and rewards its own rows and needs only their problems (`multihost.local_rows`). It receives
    the numbers of the other rows; `gather_texts` fetches their texts. The rollout's lengths must be on the host
    (`sampler.lengths_to_host`). A row for which the reward function failed has the reason as `error`, and
    `grading.failed` for each of its rewards, or the value of a `Score` with an error. Rewards that were `started` are
    waited for.
    """
    own, futures = multihost.all_or_raise(lambda: _own_completions(problems, rollout, tokenizer, calls, started or {}))
    interrupt.wait(futures.values())
    multihost.all_or_raise(lambda: _add_rewards(own, futures))
    numbers = multihost.gather_rows([row and {name: x for name, x in row.items() if name not in TEXTS} for row in own])
    rows = [mine or theirs for mine, theirs in zip(own, numbers, strict=True)]
    _match_rewards(rows, calls.grading.failed)
    for row in rows:
        if "turn_rewards" in row:
            _add_turn_rewards(row)
        row["reward"] = sum(row["rewards"])
        if len(row["rewards"]) == 1:
            del row["rewards"]
    return rows


def _match_rewards(rows: Sequence[Row], failed: float) -> None:
    """Give every row the rewards that most rows have: as many, by the same names. Those with others have failed.

    What most rows have follows from the rows alone, so that it is the same in every process and after every restart.
    """
    having = [_names(row) for row in rows if "error" not in row] or [_names(row) for row in rows if row["rewards"]]
    wanted = Counter(having).most_common(1)[0][0] if having else ("",)
    for row in rows:
        found = _names(row)
        if found != wanted:
            own = row["rewards"][0] if "error" in row and len(found) == 1 else failed
            row.setdefault("error", f"wanted {_words(wanted)}; got {_words(found)}")
            row["rewards"] = [own] * len(wanted)
            row.pop("parts", None)
        row.pop("names", None)


def _names(row: Row) -> tuple[str, ...]:
    """The names of a row's rewards, empty if they have none; the name of a single one does not matter."""
    count = len(row["rewards"])
    return row["names"] if "names" in row and count > 1 else ("",) * count


def _words(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return "one number"
    return f"rewards {', '.join(names)}" if any(names) else f"{len(names)} numbers without names"


def _add_turn_rewards(row: Row) -> None:
    """The rewards of turns join those of the whole conversation, and these join the last turn's."""
    last, given = sum(row["rewards"]), 0.0 if "error" in row else sum(row["turn_rewards"])
    if len(row["rewards"]) == 1:
        row["rewards"] = [last + given]
    else:
        row["rewards"] = [*row["rewards"], given]
    before = [0.0 if "error" in row else each for each in row["turn_rewards"]]
    row["turn_rewards"] = [*before[:-1], before[-1] + last]


def gather_texts(rows: Sequence[Row]) -> list[Row]:
    """The rows of `reward_completions`, every one with its texts. Collective."""
    return multihost.gather_rows([row if TEXTS[0] in row else None for row in rows])


def _own_completions(
    problems: Sequence[Problem | None], rollout: Rollout, tokenizer: Tokenizer, calls: Calls[Result], started: Started
) -> tuple[list[Row | None], dict[int, Future[Result]]]:
    """The rows of this process, and their rewards to come."""
    group = len(rollout.length_B) // len(problems)
    rows: list[Row | None] = [None] * len(rollout.length_B)
    given: list[tuple[Problem, int]] = []
    texts: dict[int, str] = {row: each.text for row, each in started.items()}
    for index, tokens in multihost.owned_rows(rollout.tokens_BT).items():
        problem = problems[index // group]
        assert problem is not None
        if index not in started:
            start = rollout.prompt_length_B[index]
            texts[index] = tokenizer.decode(tokens[start : start + rollout.length_B[index]])
            given.append((problem, index))
        row: Row = {
            "prompt": problem.prompt,
            "answer": problem.answer,
            "completion": texts[index],
            "reward": 0.0,
            "length": int(rollout.length_B[index]),
            "finished": bool(rollout.finished_B[index]),
        }
        rows[index] = row | (started[index].conversation or {} if index in started else {})
    submitted = calls.submit([problem for problem, _ in given], [texts[index] for _, index in given])
    futures = {row: each.future for row, each in started.items()}
    futures |= {index: future for (_, index), future in zip(given, submitted, strict=True)}
    return rows, futures


def _add_rewards(rows: Sequence[Row | None], futures: Mapping[int, Future[Result]]) -> None:
    for index, row in enumerate(rows):
        if row is None:
            continue
        result = futures[index].result()
        row["rewards"] = list(result.rewards)
        if result.names:
            row["names"] = result.names
        if result.parts:
            row["parts"] = dict(result.parts)
        if result.reason:
            row["reason"] = result.reason
        if result.error:
            row["error"] = result.error


def reward_metrics(rows: Sequence[Row], group: int) -> dict[str, float]:
    """Metrics of the rewards: of their sums, and of each named one (`rewards/NAME`) over the rows that have it."""
    reward_PG = np.array([row["reward"] for row in rows], np.float32).reshape(-1, group)
    parts = [row["parts"] for row in rows if "parts" in row]
    names = dict.fromkeys(name for each in parts for name in each)
    return {
        "reward/mean": float(reward_PG.mean(dtype=np.float64)),  # rewards may be near float32's largest number
        "reward/std": float(reward_PG.std(dtype=np.float64)),
        "reward/zero_std_groups": float(constant_groups(jnp.asarray(reward_PG)).mean()),
        "reward/failed": sum("error" in row for row in rows) / len(rows),
        **_conversation_metrics(rows),
        **{f"rewards/{name}": float(np.mean([each[name] for each in parts if name in each])) for name in names},
    }


def _conversation_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Means over the conversations: turns, reply tokens, and what the environment has counted."""
    held = [row for row in rows if "turn_rewards" in row]
    if not held:
        return {}
    names = dict.fromkeys(name for row in held for name in row["environment"])
    return {
        "rollout/turns": float(np.mean([len(row["turn_rewards"]) for row in held])),
        "rollout/turns_max": float(max(len(row["turn_rewards"]) for row in held)),
        **{f"rollout/{name}": float(np.mean([row["environment"].get(name, 0.0) for row in held])) for name in names},
    }


def check_batch(rows: Sequence[Row], calls: Calls[Result]) -> None:
    """FailedRewardsError if the reward function failed for too many rows of a rollout batch. Collective."""
    if sentence := _describe_failures(rows, calls):
        raise FailedRewardsError(sentence, find_failed(rows))


def check_evaluation(rows: Sequence[Row], calls: Calls[Result], name: str, *, ended: bool) -> None:
    """Judge the rows that an evaluation has so far; a warning if the reward function failed for too many. Collective.

    An evaluation with such failures is the same after every restart, so it does not end a run.

    Raises:
      FailedRewardsError: it failed for all rows, of the whole evaluation or of the first `SURE`.
    """
    if not (ended or len(rows) >= SURE) or not (sentence := _describe_failures(rows, calls)):
        return
    if all("error" in row for row in rows):
        raise FailedRewardsError(f"{name}: {sentence}", find_failed(rows))
    if ended:
        multihost.warn_from_primary(f"{name}: {sentence}")


def find_failed(rows: Sequence[Row]) -> list[Row]:
    """The rows for which the reward function failed, with their texts. Collective."""
    failed = [row for row in rows if "error" in row]
    return gather_texts(failed) if failed else []


def _describe_failures(rows: Sequence[Row], calls: Calls[Result]) -> str:
    """One sentence if the reward function failed for more than `grading.max_failed`, else nothing. Collective.

    Up to `FEW` failures are not too many, unless all have failed or none may; nor is a single one.
    """
    failed, share = [row for row in rows if "error" in row], calls.grading.max_failed
    few = min(FEW, max(len(rows) - 1, 1)) if share else 0
    if len(failed) <= max(share * len(rows), few):
        return ""
    (row,) = gather_texts(failed[:1])
    many = f"{len(failed)} of {len(rows)} completions (grading.max_failed allows {100 * share:g} %)"
    return (
        f"reward: {title_of(calls.function)} failed for {many}: {row['error']} for "
        f"the prompt {row['prompt']!r} and the completion {row['completion']!r}"
    )


def count_drawn(rollout: Rollout) -> np.ndarray:
    """The tokens of each completion that the policy drew, int32 [B]; the rollout's lengths are on the host."""
    return np.asarray(rollout.length_B if rollout.reply_B is None else rollout.length_B - rollout.reply_B)


def shape_rewards(
    rollout: Rollout,
    kl_B: np.ndarray | None = None,
    *,
    length_reward: LengthReward | None = None,
    coefficient: float = 0.0,
) -> tuple[np.ndarray | None, dict[str, float]]:
    """What is added to the reward of each completion, float32 [B], and the mean of each term.

    The terms are `length_reward` of the completion lengths, and `-coefficient` times `kl_B`. None and no metrics if
    there is neither.

    Args:
      kl_B: the sum over each completion of an estimate of the KL to the reference, float32.
    """
    added_B: np.ndarray | None = None
    metrics: dict[str, float] = {}
    if length_reward is not None:
        added_B = np.asarray(length_reward(jnp.asarray(count_drawn(rollout))), np.float32)
        metrics["reward/length"] = float(added_B.mean())
    if kl_B is not None:
        before_B = np.float32(0) if added_B is None else added_B
        added_B, metrics["reward/kl"] = before_B - coefficient * kl_B, float(kl_B.mean())
    return added_B, metrics


def compute_advantages(
    advantage: Advantage,
    rows: Sequence[Row],
    added_B: np.ndarray | None = None,
    *,
    group: int,
    finished_B: Any = None,
) -> tuple[np.ndarray, dict[str, float]]:
    """Advantages float32 [B] of the rewards in `rows`, and `reward/with_added` if something is added to them.

    Args:
      advantage: of rewards float32 [P, G], or [P, G, R] if there are R > 1 of them.
      added_B: from `shape_rewards`: added to a single reward, or one more of several.
      group: G, adjacent rows of one prompt.
      finished_B: if given, `advantage` is also given this mask as [P, G].
    """
    several = [row.get("rewards", [row["reward"]]) for row in rows]
    if len({len(each) for each in several}) > 1:
        raise UserError(f"reward: wanted as many numbers for every completion, got {sorted({*map(len, several)})}")
    if len(several[0]) > 1 and jax.process_index() == 0:
        _tell_order([list(row["parts"]) for row in rows if "parts" in row])
    reward_BR, metrics = np.array(several, np.float32), {}
    single = reward_BR.shape[1] == 1
    if added_B is not None:
        added_B1 = added_B[:, None]
        reward_BR = reward_BR + added_B1 if single else np.concatenate([reward_BR, added_B1], axis=1)
        metrics["reward/with_added"] = float(reward_BR.sum(axis=1).mean())
    reward_PGR = jnp.asarray(reward_BR.reshape(-1, group, reward_BR.shape[1]))
    masks = () if finished_B is None else (jnp.asarray(finished_B).reshape(reward_PGR.shape[:2]),)
    try:
        advantage_PG = np.asarray(advantage(reward_PGR[..., 0] if single else reward_PGR, *masks), np.float32)
    except (TypeError, ValueError) as error:
        raise UserError(f"advantage: {_name(advantage)} refuses these rewards: {error}") from error
    return advantage_PG.reshape(-1), metrics


def _tell_order(orders: Sequence[list[str]]) -> None:
    """Warn of rewards by name that were given in another order than the advantage gets them in."""
    if unsorted := next((names for names in orders if names != sorted(names)), None):
        sorted_names = ", ".join(sorted(unsorted))
        warn_once(f"reward: the advantage gets the rewards in the alphabetical order of their names: {sorted_names}")


def _name(function: Any) -> str:
    return getattr(unwrap(function), "__qualname__", repr(function))
