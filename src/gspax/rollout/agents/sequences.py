"""The sequences of a rollout, which stand one after the other in its row (`Rollout.sequence_BT`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import Sampling
from gspax.types import Rollout

_BY_TOKEN = (
    *("tokens_BT", "mask_BT", "logp_BT", "sequence_BT", "version_BT", "source_BT"),
    *("kept_BTK", "cut_BT", "expert_BLTA"),
)


@dataclass
class RowTokens:
    """The tokens of a rollout's sequences, while it is sampled."""

    sampling: Sampling
    sequences: list[list[int]] = field(default_factory=list)
    _first: int = 0  # tokens of the first request
    _prompt: int = 0  # tokens of the request that began the last sequence
    _begin: int = 0  # where that begins in the row

    @property
    def place(self) -> int:
        """Return the place of the next token, from the end of the first request."""
        return self._begin + len(self.sequences[-1]) - self._first

    @property
    def room(self) -> int:
        """Count the tokens for which there is room in the last sequence, and in the row."""
        own, sampling = len(self.sequences[-1]), self.sampling
        row = sampling.max_prompt_tokens + sampling.max_tokens
        return min(sampling.max_tokens - (own - self._prompt), row - (self._begin + own))

    def read(self, tokens: list[int], *, first: bool) -> None:
        """Add what the policy reads; `first`: it begins a sequence."""
        if first:
            self._begin += len(self.sequences[-1]) if self.sequences else 0
            self.sequences.append([])
            self._first, self._prompt = self._first or len(tokens), len(tokens)
        self.sequences[-1] += tokens

    def find_excess(self, count: int, *, first: bool) -> str:
        """Say why so many tokens do not fit, with one that the policy writes; empty if they do."""
        sampling, own = self.sampling, len(self.sequences[-1]) if self.sequences else 0
        whole = sampling.max_prompt_tokens + sampling.max_tokens
        limits = [
            ("after the first request", "sampling.max_tokens", sampling.max_tokens - 1, own - self._prompt),
            ("in a rollout", "sampling.max_prompt_tokens + sampling.max_tokens", whole - 1, self._begin + own),
        ]
        if first:
            what = "in a request that begins a sequence" if self.sequences else "in the first request"
            limits[0] = (what, "sampling.max_prompt_tokens", sampling.max_prompt_tokens, 0)
        for what, where, most, before in limits:
            if before + count > most:
                return f"wanted at most {most} tokens {what} ({where}), got {before + count}"
        return ""


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
    reply_B = (length_B - joined["mask_BT"].sum(axis=1)).astype(np.int32)
    lengths = {"prompt_length_B": prompt_B, "length_B": length_B, "reply_B": reply_B}
    on_host: dict[str, Any] = {**joined, **lengths}
    return replace(rollout, **on_host)
