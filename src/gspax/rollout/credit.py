"""Advantages of single turns, at the tokens of each turn: GSPO-token takes them in place of one per completion.

Axes: P prompts, G samples, B = P·G multi-turn rollouts, K turns, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from gspax import advantages
from gspax.rollout.completion import Completion
from gspax.types import Array, Rollout


def credit_turns(
    advantage: Callable[..., Array],
    completions: Sequence[Completion],
    rollout: Rollout,
    added_B: np.ndarray | None = None,
    *,
    group: int,
    discount: float = 1.0,
    finished_B: np.ndarray | Array | None = None,
) -> tuple[np.ndarray, list[list[float]]]:
    """The advantage of each token, float32 [B, T], and of each turn, a list for each completion.

    A token has the advantage of its turn (`advantages.by_turn`), and 0 outside the turns.

    Args:
      advantage: a function of rewards and a mask, [P, G].
      completions: B of them, from `grading.reward_completions`, with turns.
      rollout: its lengths are on the host.
      added_B: from `grading.shape_rewards`; added to the reward of the last turn.
      group: G.
      discount: for the rewards of later turns.
      finished_B: if given, the other completions have no advantage.
    """
    turns = [each.turns for each in completions if each.turns is not None]
    count_B = np.array([len(each.rewards) for each in turns])
    reward_BK = np.zeros((len(completions), count_B.max()), np.float32)
    for row, each in enumerate(turns):
        reward_BK[row, : count_B[row]] = each.rewards
    if added_B is not None:
        reward_BK[np.arange(len(turns)), count_B - 1] += added_B
    mask_BK = np.arange(reward_BK.shape[1])[None] < count_B[:, None]
    if finished_B is not None:
        mask_BK &= np.asarray(finished_B)[:, None]
    reward_PGK, mask_PGK = (jnp.asarray(x.reshape(-1, group, x.shape[1])) for x in (reward_BK, mask_BK))
    advantage_PGK = advantages.by_turn(advantage, reward_PGK, mask_PGK, discount=discount)
    advantage_BK = np.asarray(advantage_PGK).reshape(mask_BK.shape)
    advantage_BT = np.zeros(rollout.tokens_BT.shape, np.float32)
    for row, each in enumerate(turns):
        prompt = int(rollout.prompt_length_B[row])
        for (start, end), value in zip(each.spans, advantage_BK[row], strict=False):
            advantage_BT[row, prompt + start : prompt + end] = value
    return advantage_BT, [values[:count].tolist() for values, count in zip(advantage_BK, count_B, strict=True)]
