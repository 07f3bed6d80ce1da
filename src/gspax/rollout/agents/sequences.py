"""Joins the sequences of a rollout to one row, as `Rollout.sequence_BT` describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from gspax.types import Rollout

_BY_TOKEN = ("tokens_BT", "mask_BT", "logp_BT", "sequence_BT", "version_BT", "kept_BTK", "cut_BT", "expert_BLTA")


def with_sequences(rollout: Rollout, width: int, num_experts: int) -> Rollout:
    """Mark each row as one sequence, and pad rows to a width."""
    total_B1 = (rollout.prompt_length_B + rollout.length_B)[:, None]
    there_BT = jnp.arange(rollout.tokens_BT.shape[1])[None] < total_B1
    rollout = replace(rollout, sequence_BT=there_BT.astype(jnp.int32))
    arrays = {name: value for name in _BY_TOKEN if (value := getattr(rollout, name)) is not None}

    def pad(name: str, value: jax.Array) -> jax.Array:
        axis, fill = (2, num_experts) if name == "expert_BLTA" else (1, 0)
        padding = [(0, 0)] * value.ndim
        padding[axis] = (0, width - value.shape[axis])
        return jnp.pad(value, padding, constant_values=fill)

    return replace(rollout, **{name: pad(name, value) for name, value in arrays.items()})


def join_sequences(rollout: Rollout, earlier: Mapping[int, Sequence[Rollout]]) -> Rollout:
    """Put the earlier sequences of rows before their last one.

    Args:
      rollout: the last sequences, from `with_sequences`, on the host, with room for all.
      earlier: by row, the sequences before in their order, on the host, without the axis of rows.
    """
    names = [name for name in _BY_TOKEN if getattr(rollout, name) is not None]
    joined = {name: np.array(getattr(rollout, name)) for name in names}
    prompt_B, length_B = np.array(rollout.prompt_length_B), np.array(rollout.length_B)
    for row, before in earlier.items():
        last = jax.tree.map(lambda leaf, row=row: np.array(leaf[row]), rollout)
        begin = 0
        for number, one in enumerate([*before, last], start=1):
            count = int(one.prompt_length_B + one.length_B)
            here = slice(begin, begin + count)
            for name, value in joined.items():
                if name == "sequence_BT":
                    value[row, here] = number
                elif name == "expert_BLTA":
                    value[row, :, here] = np.asarray(one.expert_BLTA)[:, :count]
                else:
                    value[row, here] = np.asarray(getattr(one, name))[:count]
            begin += count
        prompt_B[row] = before[0].prompt_length_B
        length_B[row] = begin - prompt_B[row]
    reply_B = length_B - joined["mask_BT"].sum(axis=1)
    return replace(rollout, **joined, prompt_length_B=prompt_B, length_B=length_B, reply_B=reply_B.astype(np.int32))
