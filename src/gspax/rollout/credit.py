"""Advantages of single turns, at the tokens of each: what GSPO-token takes in place of one for a whole conversation.

Axes: P prompts, G samples, B = P·G conversations, K turns, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gspax import advantages
from gspax.rollout.grading import Row
from gspax.types import Rollout


def credit_turns(
    advantage: Callable[..., Any],
    rows: Sequence[Row],
    rollout: Rollout,
    added_B: np.ndarray | None = None,
    *,
    group: int,
    discount: float = 1.0,
    finished_B: Any = None,
) -> np.ndarray:
    """The advantage of each token, float32 [B, T]: that of its turn (`advantages.by_turn`), 0 outside the turns.

    `turn_advantages` is set in the rows.

    Args:
      advantage: of rewards and a mask, [P, G].
      rows: of `rewards.reward_completions`.
      rollout: its lengths are on the host.
      added_B: from `rewards.shape_rewards`; added to the reward of the last turn.
      group: G.
      discount: of a later turn's reward.
      finished_B: if given, the other conversations are left out.
    """
    count_B = np.array([len(row["turn_rewards"]) for row in rows])
    reward_BK = np.zeros((len(rows), count_B.max()), np.float32)
    for index, row in enumerate(rows):
        reward_BK[index, : count_B[index]] = row["turn_rewards"]
    if added_B is not None:
        reward_BK[np.arange(len(rows)), count_B - 1] += added_B
    mask_BK = np.arange(reward_BK.shape[1])[None] < count_B[:, None]
    if finished_B is not None:
        mask_BK &= np.asarray(finished_B)[:, None]
    reward_PGK, mask_PGK = (jnp.asarray(x.reshape(-1, group, x.shape[1])) for x in (reward_BK, mask_BK))
    found_BK = np.asarray(advantages.by_turn(advantage, reward_PGK, mask_PGK, discount=discount)).reshape(mask_BK.shape)
    advantage_BT = np.zeros(rollout.tokens_BT.shape, np.float32)
    for index, row in enumerate(rows):
        row["turn_advantages"] = found_BK[index, : count_B[index]].tolist()
        prompt = int(rollout.prompt_length_B[index])
        for (start, end), value in zip(row["turn_spans"], row["turn_advantages"], strict=True):
            advantage_BT[index, prompt + start : prompt + end] = value
    return advantage_BT
