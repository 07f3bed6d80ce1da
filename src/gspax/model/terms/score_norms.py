"""The norms of the scores of tokens, for an advantage that takes them (`advantages.otb`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspax import losses
from gspax.config.term import Compare, Term
from gspax.model.terms.rules import scored_problems
from gspax.types import Array

if TYPE_CHECKING:
    from gspax.model.passes import Passes


@dataclass(frozen=True, kw_only=True)
class ScoreNormTerm(Term):
    """An `Experiment.advantage` with a free keyword `score_norm_PGN`, which returns advantages of tokens."""

    @property
    def waits(self) -> bool:
        return True

    @property
    def of_tokens(self) -> str:
        return "advantage"

    @property
    def measure(self) -> Compare:
        return score_norm

    def problems(self, passes: Passes) -> Iterator[str]:
        yield from scored_problems("advantage", passes)


def score_norm(logits_CV: Array, _: Array, token_C: Array, kept_CS: Array | None) -> Array:
    """Compute `losses.score_norm` of a chunk."""
    return losses.score_norm(logits_CV, token_C, kept_CS)
