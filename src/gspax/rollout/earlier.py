"""Stores the latest completions of the training problems, which `sampling.drafts` looks up when the problems recur."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from gspax.parallel import multihost
from gspax.types import JsonObject, Rollout

MOST = 2**24  # tokens
NAME = "earlier_texts"  # in a checkpoint


@dataclass
class EarlierTexts:
    """The latest completions of each prompt, in every process, for at most `MOST` tokens in all.

    Once the limit is reached, the texts of further problems are not stored: if not all problems fit, the first ones
    have drafts in every epoch.
    """

    texts: dict[bytes, list[np.ndarray]] = field(default_factory=dict)  # completions, int32, by the prompt's tokens
    tokens: int = 0  # of these texts

    def find(self, prompt: Sequence[int]) -> list[np.ndarray]:
        """Return the completions of the prompt's latest samples; [] if they were not stored."""
        return self.texts.get(_key(prompt), [])

    def keep(self, rollout: Rollout, group: int) -> None:
        """Replace the texts of a rollout's problems, if it was sampled with drafts. Collective.

        Args:
          rollout: with its lengths on the host.
          group: adjacent rows of one prompt.
        """
        if rollout.passes_B is None:
            return
        owned = multihost.owned_rows(rollout.tokens_BT)
        ends = np.asarray(rollout.prompt_length_B) + np.asarray(rollout.length_B)
        rows = multihost.gather_rows({row: tokens[: ends[row]] for row, tokens in owned.items()}, len(ends))
        prompts = [row[:length] for row, length in zip(rows, np.asarray(rollout.prompt_length_B), strict=True)]
        texts = [row[len(prompt) :].astype(np.int32) for row, prompt in zip(rows, prompts, strict=True)]
        for first in range(0, len(rows), group):
            self._put(_key(prompts[first]), texts[first : first + group])

    def _put(self, key: bytes, texts: list[np.ndarray]) -> None:
        self.tokens -= sum(map(len, self.texts.pop(key, [])))
        size = sum(map(len, texts))
        if self.tokens + size <= MOST:
            self.texts[key] = texts
            self.tokens += size

    def dump(self) -> dict[str, str]:
        """Return all texts for the `extra` of a checkpoint; {} without texts."""
        if not self.texts:
            return {}
        rows = list(chain.from_iterable([np.frombuffer(key, np.int32), *texts] for key, texts in self.texts.items()))
        packed = io.BytesIO()
        np.savez_compressed(
            packed,
            tokens=np.concatenate([np.zeros(0, np.int32), *rows]),
            lengths=np.array([*map(len, rows)], np.int64),
            counts=np.array([1 + len(texts) for texts in self.texts.values()], np.int64),
        )
        return {NAME: base64.b85encode(packed.getvalue()).decode()}

    def load(self, extra: JsonObject) -> None:
        """Add the texts that `dump` returned."""
        if NAME not in extra:
            return
        with np.load(io.BytesIO(base64.b85decode(extra[NAME])), allow_pickle=False) as packed:
            rows = np.split(packed["tokens"], np.cumsum(packed["lengths"]))
            first = 0
            for count in packed["counts"]:
                self._put(rows[first].tobytes(), rows[first + 1 : first + count])
                first += count


def _key(prompt: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(prompt, np.int32).tobytes()
