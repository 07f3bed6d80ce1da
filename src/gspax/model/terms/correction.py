"""Weights for a sampler that is not the learner: a correction by the old policy, and a rejection by the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspax.config.functions import Function
from gspax.config.term import Formula, Term
from gspax.losses.formulas import call_text, words_of
from gspax.model.terms.rules import level_warnings, scored_problems
from gspax.types import Array, Batch, known, packed

if TYPE_CHECKING:
    from gspax.model.passes import Passes


@dataclass(frozen=True, kw_only=True)
class SamplerWeightTerm(Term):
    """A weight that compares a policy with the sampler; subclasses say which field of the experiment it is."""

    function: Callable[..., Array]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"sampler_logp_BT"})

    @property
    def functions(self) -> dict[str, Function]:
        return {self.weighs: self.function}


class CorrectionTerm(SamplerWeightTerm):
    """`Experiment.correction`: a weight for the sampler, by the policy before the updates."""

    weighs = "correction"

    def problems(self, passes: Passes) -> Iterator[str]:
        if passes.old_logp == "sampler":  # its own ratio is 1
            yield from scored_problems("correction", passes)

    def warnings(self, passes: Passes) -> Iterator[str]:
        more = ", and a correction such as truncate_geometric weights whole sequences"
        yield from level_warnings("correction", self.function, passes, more)

    @property
    def formula(self) -> Formula:
        return Formula(weight=call_text(self.function, "old_logp", "sampler_logp"), words=words_of(self.function))

    def weight(self, logp_BT: Array, batch: Batch) -> Array:
        logps = known(batch, "old_logp_BT"), known(batch, "sampler_logp_BT")
        return self.function(*logps, batch.mask_BT, **packed(batch))


class RejectionTerm(SamplerWeightTerm):
    """`Experiment.rejection`: sequences that count no longer, by the policy that is trained."""

    weighs = "rejection"

    @property
    def formula(self) -> Formula:
        names = "logp", "sampler_logp", "advantage"
        return Formula(weight=call_text(self.function, *names), words=words_of(self.function))

    def weight(self, logp_BT: Array, batch: Batch) -> Array:
        rows = logp_BT, known(batch, "sampler_logp_BT"), known(batch, "advantage"), batch.mask_BT
        return self.function(*rows, **packed(batch))
