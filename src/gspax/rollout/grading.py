"""Grades a rollout: builds completions with rewards, and computes advantages.

Axes: P prompts, G samples, B = P·G completions, R rewards of each, K turns of a multi-turn rollout, T tokens.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.advantages import by_turn, constant_groups
from gspax.config import RewardPenalty
from gspax.config.functions import takes_lengths, title_of
from gspax.config.protocols import Advantage, LengthReward, Tokenizer
from gspax.data.chat_template import opening_of
from gspax.data.problem import Problem
from gspax.errors import UserError, warn_once
from gspax.parallel import multihost
from gspax.rewards.calls import Calls
from gspax.rewards.scores import Result
from gspax.rollout.completion import Completion, GradedTurns, Texts, gather_texts
from gspax.run import interrupt
from gspax.types import Array, Rollout

FEW = 5  # failures that never stop a run, however small the rollout is
SURE = 100  # completions after which an evaluation whose rewards have all failed stops


class FailedRewardsError(UserError):
    """Raised if the reward function failed for too many completions, which `completions` holds with their texts."""

    def __init__(self, message: str, completions: Sequence[Completion]) -> None:
        super().__init__(message)
        self.completions = completions


class StartedReward(NamedTuple):
    """The text of a completion, and the future of its reward."""

    text: str
    future: Future[Result]
    turns: GradedTurns | None = None  # with an environment, with the environment's rewards
    finished: bool | None = None  # with an environment


Started = dict[int, StartedReward]  # by row
NOTHING_STARTED: Mapping[int, StartedReward] = MappingProxyType({})


def start_rewards(
    problems: Mapping[int, Problem],
    started: Started,
    finished: Mapping[int, np.ndarray],
    *,
    tokenizer: Tokenizer,
    calls: Calls[Result],
    group: int,
    openings: Mapping[int, str],
) -> None:
    """Start the rewards of finished rows, while others are being sampled, and add them to `started`.

    Args:
      problems: those that this process has, by number, each with `group` rows; rows of others are left out.
      finished: the tokens of each row's completion.
      openings: by problem, what its prompt has of the completion's thinking already (`chat_template.opening_of`).
    """
    own = {row: tokens for row, tokens in finished.items() if row // group in problems}
    texts = {row: openings.get(row // group, "") + tokenizer.decode(tokens) for row, tokens in own.items()}
    futures = calls.submit([problems[row // group] for row in texts], list(texts.values()))
    for (row, text), future in zip(texts.items(), futures, strict=True):
        started[row] = StartedReward(text, future)


def reward_completions(
    problems: Sequence[Problem | None],
    rollout: Rollout,
    *,
    tokenizer: Tokenizer,
    calls: Calls[Result],
    started: Mapping[int, StartedReward] = NOTHING_STARTED,
) -> list[Completion]:
    """Build the completions of a rollout with their rewards. Collective.

    Each process decodes and rewards its own rows (`multihost.local_rows`) and those that it has in `started`, and needs
    only their problems. It receives the numbers of the other rows; `gather_texts` fetches their texts. A completion for
    which the reward function failed has the reason as `error`, and `grading.failed` for each of its rewards, or the
    value of a `Score` with an error.

    Args:
      rollout: its lengths are on the host (`sampler.lengths_to_host`).
      started: rewards that were started before, by row; no row is in two processes.
    """
    group, length_B = len(rollout.length_B) // len(problems), count_sampled(rollout)
    own = dict(started)
    known = {row for rows in multihost.gather(sorted(own)) for row in rows}

    def start_others() -> None:
        """Start the rewards of this process's rows that no process has started before."""
        finished, openings = {}, dict[int, str]()
        for row, tokens in sorted(multihost.owned_rows(rollout.tokens_BT).items()):
            if row not in known:
                start = rollout.prompt_length_B[row]
                finished[row] = tokens[start : start + rollout.length_B[row]]
                if row // group not in openings:
                    openings[row // group] = opening_of(tokenizer, tokens[:start].tolist())
        mine = {number: problem for number, problem in enumerate(problems) if problem is not None}
        start_rewards(mine, own, finished, tokenizer=tokenizer, calls=calls, group=group, openings=openings)

    multihost.all_or_raise(start_others)
    interrupt.wait([reward.future for reward in own.values()])
    graded = _gather_results(own, len(length_B))
    completions = []
    for row, result in enumerate(_match_rewards([result for result, _ in graded], calls.grading.failed)):
        rewards, turns = result.rewards, graded[row][1]
        if turns is not None:
            rewards, turns = _join_turn_rewards(result, turns)
        problem = problems[row // group] if row in own else None
        completions.append(
            Completion(
                length=int(length_B[row]),
                finished=bool(rollout.finished_B[row]),
                rewards=rewards,
                parts=result.parts,
                reason=result.reason,
                error=result.error,
                blamed=result.blamed,
                turns=turns,
                sources=() if rollout.source_BT is None else find_sources(np.asarray(rollout.source_BT[row])),
                texts=None if problem is None else Texts(problem.prompt, problem.answer, own[row].text),
            )
        )
    return completions


def find_sources(source_T: np.ndarray) -> tuple[int, ...]:
    """Return the numbers of the servers that sampled a row, in the order of their first tokens.

    >>> find_sources(np.array([0, 2, 2, 0, 1, 2, 0]))
    (2, 1)
    """
    return tuple(dict.fromkeys(source_T[source_T > 0].tolist()))


def _gather_results(own: Started, rows: int) -> list[tuple[Result, GradedTurns | None]]:
    """Gather the result and the turns of each row; `own` has this process's rows. Collective."""
    mine = multihost.all_or_raise(
        lambda: {row: (tuple(one.future.result()), one.turns and tuple(one.turns)) for row, one in own.items()}
    )
    everywhere = multihost.gather_rows(mine, rows)
    return [(Result._make(result), GradedTurns._make(turns) if turns else None) for result, turns in everywhere]


def _match_rewards(results: Sequence[Result], failed: float) -> list[Result]:
    """Mark results as failed whose reward names or counts differ from the majority's.

    The choice follows from the results alone, so that it is the same in every process and after every restart.
    """
    counted = [result for result in results if not result.error] or [result for result in results if result.rewards]
    wanted = Counter(map(_names, counted)).most_common(1)[0][0] if counted else ("",)

    def match(result: Result) -> Result:
        names = _names(result)
        if names == wanted:
            return result
        value = result.rewards[0] if result.error and len(names) == 1 else failed
        error = result.error or f"wanted {_describe_names(wanted)}; got {_describe_names(names)}"
        return Result((value,) * len(wanted), error, reason=result.reason, blamed=result.blamed)

    return [match(result) for result in results]


def _names(result: Result) -> tuple[str, ...]:
    """Return the names of the rewards, empty strings without names; the name of a single reward is dropped."""
    count = len(result.rewards)
    return result.names if result.names and count > 1 else ("",) * count


def _describe_names(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return "one number"
    return f"rewards {', '.join(names)}" if any(names) else f"{len(names)} numbers without names"


def _join_turn_rewards(result: Result, turns: GradedTurns) -> tuple[tuple[float, ...], GradedTurns]:
    """Add the turns' rewards to the completion's, and the completion's to the last turn's.

    The sum over the turns is added to a single reward, or is one more of several. It is 0 if the reward failed.
    """
    whole, turn_rewards = sum(result.rewards), (0.0,) * len(turns.rewards) if result.error else turns.rewards
    total = sum(turn_rewards)
    rewards = (whole + total,) if len(result.rewards) == 1 else (*result.rewards, total)
    return rewards, turns._replace(rewards=(*turn_rewards[:-1], turn_rewards[-1] + whole))


def reward_metrics(completions: Sequence[Completion], group: int) -> dict[str, float]:
    """Compute the metrics of a rollout's rewards.

    They are metrics of the sums of rewards, means of named rewards (`rewards/NAME`) over the completions with them, and
    means over multi-turn rollouts: turns, reply tokens, and the environment's metrics.
    """
    reward_PG = np.array([completion.reward for completion in completions], np.float32).reshape(-1, group)
    metrics = {
        "reward/mean": float(reward_PG.mean(dtype=np.float64)),  # rewards may be near float32's largest number
        "reward/std": float(reward_PG.std(dtype=np.float64)),
        "reward/zero_std_groups": float(constant_groups(jnp.asarray(reward_PG)).mean()),
        "reward/failed": sum(bool(completion.error) for completion in completions) / len(completions),
    }
    if turns := [completion.turns for completion in completions if completion.turns is not None]:
        counts, sums = [len(graded.rewards) for graded in turns], [graded.environment for graded in turns]
        metrics |= {"rollout/turns": float(np.mean(counts)), "rollout/turns_max": float(max(counts))}
        for name in dict.fromkeys(name for values in sums for name in values):
            metrics[f"rollout/{name}"] = float(np.mean([values.get(name, 0.0) for values in sums]))
    parts = [completion.parts for completion in completions]
    for name in dict.fromkeys(name for values in parts for name in values):
        metrics[f"rewards/{name}"] = float(np.mean([values[name] for values in parts if name in values]))
    return metrics


def check_batch(completions: Sequence[Completion], calls: Calls[Result]) -> None:
    """Raise FailedRewardsError if the reward function failed for too many completions of a rollout. Collective."""
    if failure := _find_failure(completions, calls):
        raise failure


def check_evaluation(completions: Sequence[Completion], calls: Calls[Result], name: str, *, is_last: bool) -> None:
    """Check the completions that an evaluation has so far; warn if too many rewards failed. Collective.

    An evaluation with failures is the same after every restart, so it does not end a run.

    Raises:
      FailedRewardsError: all rewards failed, those of the whole evaluation (`is_last`) or of the first `SURE`.
    """
    if not is_last and len(completions) < SURE:
        return
    failure = _find_failure(completions, calls, f"{name}: ")
    if failure and len(failure.completions) == len(completions):
        raise failure
    if failure and is_last:
        multihost.warn_from_primary(str(failure))


def find_failed(completions: Sequence[Completion]) -> list[Completion]:
    """Return the completions for which the reward function failed, with their texts. Collective."""
    failed = [completion for completion in completions if completion.error]
    return gather_texts(failed) if failed else []


def _find_failure(
    completions: Sequence[Completion], calls: Calls[Result], prefix: str = ""
) -> FailedRewardsError | None:
    """Return an error if the reward function failed for more than `grading.max_failed` of the completions. Collective.

    Up to `FEW` failures are not too many, unless all have failed or none may; nor is a single one.
    """
    share, failed = calls.grading.max_failed, [completion for completion in completions if completion.error]
    few = min(FEW, max(len(completions) - 1, 1)) if share else 0
    if len(failed) <= max(share * len(completions), few):
        return None
    failed = gather_texts(failed)
    first = failed[0]
    assert first.texts is not None
    many = f"{len(failed)} of {len(completions)} completions (grading.max_failed allows {100 * share:g} %)"
    blamed = first.blamed or f"reward: {title_of(calls.function)}"
    sentence = (
        f"{prefix}{blamed} failed for {many}: {first.error} for "
        f"the prompt {first.texts.prompt!r} and the completion {first.texts.completion!r}"
    )
    return FailedRewardsError(sentence, failed)


def count_sampled(rollout: Rollout) -> np.ndarray:
    """Count the tokens of each completion that the policy sampled, int32 [B]; the rollout's lengths are on the host."""
    return np.asarray(rollout.length_B if rollout.reply_B is None else rollout.length_B - rollout.reply_B)


def shape_rewards(
    rollout: Rollout, penalties: Sequence[tuple[RewardPenalty, np.ndarray]], *, length_reward: LengthReward | None
) -> tuple[np.ndarray | None, dict[str, float]]:
    """Compute what is added to the reward of each completion, float32 [B], and the mean of each part.

    The parts are `length_reward` of the completion lengths, and the penalties, subtracted. None and no metrics if there
    are none.

    Args:
      penalties: each with the sum of its estimate over each completion, float32 [B].
    """
    added_B: np.ndarray | None = None
    metrics: dict[str, float] = {}
    if length_reward is not None:
        added_B = np.asarray(length_reward(jnp.asarray(count_sampled(rollout))), np.float32)
        metrics["reward/length"] = float(added_B.mean())
    for penalty, sum_B in penalties:
        before_B = np.float32(0) if added_B is None else added_B
        added_B, metrics[f"reward/{penalty.name}"] = before_B - penalty.coefficient * sum_B, float(sum_B.mean())
    return added_B, metrics


class Compared(NamedTuple):
    """The completions that advantages compare within their groups.

    Attributes:
      completions: B of them, all with R rewards.
      group: G, the adjacent completions of one prompt.
      added_B: from `shape_rewards`: added to a single reward, or one more of several, and to the last turn's.
      finished_B: if given, the other completions have no advantage.
    """

    completions: Sequence[Completion]
    group: int
    added_B: np.ndarray | None = None
    finished_B: np.ndarray | Array | None = None


def compute_advantages(advantage: Advantage, compared: Compared) -> tuple[np.ndarray, dict[str, float]]:
    """Compute advantages float32 [B], or [B, ...], and the metric `reward/with_added` if something is added to rewards.

    Args:
      advantage: a function of rewards float32 [P, G], or [P, G, R] if there are R > 1 of them, and of a mask [P, G] if
        there is `finished_B`; with a free keyword `length_PG` it gets the tokens that the policy sampled, int32 [P, G].
      compared: the completions.
    """
    completions, group, added_B, finished_B = compared
    reward_BR, metrics = np.array([completion.rewards for completion in completions], np.float32), {}
    single = reward_BR.shape[1] == 1
    if not single and jax.process_index() == 0:
        _warn_of_order([list(completion.parts) for completion in completions])
    if added_B is not None:
        added_B1 = added_B[:, None]
        reward_BR = reward_BR + added_B1 if single else np.concatenate([reward_BR, added_B1], axis=1)
        metrics["reward/with_added"] = float(reward_BR.sum(axis=1).mean())
    reward_PGR = jnp.asarray(reward_BR.reshape(-1, group, reward_BR.shape[1]))
    groups = reward_PGR.shape[:2]
    masks = () if finished_B is None else (jnp.asarray(finished_B).reshape(groups),)
    lengths = {}
    if takes_lengths(advantage):
        lengths["length_PG"] = jnp.array([completion.length for completion in completions]).reshape(groups)
    with _refusal(advantage):
        advantages = np.asarray(advantage(reward_PGR[..., 0] if single else reward_PGR, *masks, **lengths), np.float32)
    return advantages.reshape(len(completions), *advantages.shape[2:]), metrics


@contextlib.contextmanager
def _refusal(advantage: Callable[..., Array]) -> Iterator[None]:
    """Raise UserError instead of the TypeError or ValueError with which an advantage refuses rewards."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UserError(f"advantage: {title_of(advantage)} refuses these rewards: {error}") from error


def compute_token_advantages(
    advantage: Callable[..., Array], compared: Compared, rollout: Rollout, score_norm_BT: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Compute advantages of tokens with an `advantage` that takes `score_norm_PGN`. Collective.

    Returns:
      The advantage of each token, float32 [B, T], 0 where the policy did not sample it; its mean over each completion,
      [B]; the metrics.
    """
    mask_BT = multihost.to_host(rollout.mask_BT)
    order_BT = np.argsort(~mask_BT, axis=1, kind="stable")  # the columns of a row's sampled tokens, and of the others
    norm_BT = np.take_along_axis(score_norm_BT, order_BT, axis=1)
    of_tokens = partial(advantage, score_norm_PGN=jnp.asarray(norm_BT.reshape(-1, compared.group, norm_BT.shape[1])))
    value_BT, metrics = compute_advantages(of_tokens, compared)
    advantage_BT = np.zeros_like(value_BT)
    np.put_along_axis(advantage_BT, order_BT, value_BT, axis=1)
    return advantage_BT, advantage_BT.sum(axis=1) / np.maximum(mask_BT.sum(axis=1), 1), metrics


def credit_turns(
    advantage: Callable[..., Array], compared: Compared, rollout: Rollout, *, discount: float = 1.0
) -> tuple[np.ndarray, list[list[float]]]:
    """Compute the advantage of each token, float32 [B, T], and of each turn, a list per completion, for GSPO-token.

    A token has the advantage of its turn (`advantages.by_turn`), and 0 outside the turns.

    Args:
      advantage: a function of rewards and a mask, [P, G].
      compared: the completions, from `reward_completions`, with turns.
      rollout: its lengths are on the host.
      discount: for the rewards of later turns.
    """
    completions, group, added_B, finished_B = compared
    turns = [completion.turns for completion in completions if completion.turns is not None]
    count_B = np.array([len(graded.rewards) for graded in turns])
    reward_BK = np.zeros((len(completions), count_B.max()), np.float32)
    for row, graded in enumerate(turns):
        reward_BK[row, : count_B[row]] = graded.rewards
    if added_B is not None:
        reward_BK[np.arange(len(turns)), count_B - 1] += added_B
    mask_BK = np.arange(reward_BK.shape[1])[None] < count_B[:, None]
    if finished_B is not None:
        mask_BK &= np.asarray(finished_B)[:, None]
    reward_PGK, mask_PGK = (jnp.asarray(x.reshape(-1, group, x.shape[1])) for x in (reward_BK, mask_BK))
    with _refusal(advantage):
        advantage_PGK = by_turn(advantage, reward_PGK, mask_PGK, discount=discount)
    advantage_BK = np.asarray(advantage_PGK).reshape(mask_BK.shape)
    advantage_BT = np.zeros(rollout.tokens_BT.shape, np.float32)
    for row, graded in enumerate(turns):
        prompt = int(rollout.prompt_length_B[row])
        for (start, end), value in zip(graded.spans, advantage_BK[row], strict=False):
            advantage_BT[row, prompt + start : prompt + end] = value
    return advantage_BT, [values[:count].tolist() for values, count in zip(advantage_BK, count_B, strict=True)]


def _warn_of_order(orders: Sequence[list[str]]) -> None:
    """Warn if named rewards were returned in another order than the alphabetical one that the advantage gets."""
    if unsorted := next((names for names in orders if names != sorted(names)), None):
        sorted_names = ", ".join(sorted(unsorted))
        warn_once(f"reward: the advantage gets the rewards in the alphabetical order of their names: {sorted_names}")
