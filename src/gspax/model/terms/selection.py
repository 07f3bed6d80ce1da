"""A selection of a minibatch's tokens, made once before its updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspax.config.functions import title_of
from gspax.config.protocols import Selection
from gspax.config.term import Formula, Term
from gspax.losses.formulas import call_text, words_of
from gspax.losses.selection import top_cov
from gspax.losses.traits import layers
from gspax.model.terms.rules import level_warnings, scored_problems
from gspax.types import Array, Batch, known

if TYPE_CHECKING:
    from gspax.model.passes import Passes


@dataclass(frozen=True, kw_only=True)
class SelectionTerm(Term):
    """`Experiment.selection`. Its weights fill `selected_BT`, from the old policy's pass over the minibatch."""

    function: Selection

    @property
    def waits(self) -> bool:
        return True

    @property
    def selections(self) -> dict[str, Selection]:
        return {"selected_BT": self.function}

    @property
    def weighs(self) -> str:
        return "selection"

    def problems(self, passes: Passes) -> Iterator[str]:
        yield from scored_problems("selection", passes)
        if top_cov in layers(self.function):
            yield (
                f"selection: wanted a selection of tokens to train on, got {title_of(top_cov)}, which selects the few "
                "that regularizers.kl_cov penalizes"
            )

    def warnings(self, passes: Passes) -> Iterator[str]:
        yield from level_warnings("selection", self.function, passes)

    @property
    def formula(self) -> Formula:
        return Formula(weight=call_text(self.function, "minibatch"), words=words_of(self.function))

    def weight(self, logp_BT: Array, batch: Batch) -> Array:
        return known(batch, "selected_BT")
