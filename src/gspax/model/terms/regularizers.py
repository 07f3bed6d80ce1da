"""Penalties on the policy's own distribution: its entropy, its covariance with advantages, its distance to the sampler.

Each is a field of `Regularizers`, and a term of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gspax.config import AdaptiveEntropy, CovarianceKL
from gspax.config.protocols import Selection
from gspax.config.term import Formula, Term
from gspax.losses import Aggregate, Terms
from gspax.losses.formulas import call_text, formula_of, number_text
from gspax.losses.regularizers import entropy_bonus, log_ratio_size, log_ratio_square
from gspax.losses.selection import top_cov
from gspax.model.terms.rules import scored_problems
from gspax.types import Batch, known, segment_ids

if TYPE_CHECKING:
    from gspax.model.passes import Passes


@dataclass(frozen=True, kw_only=True)
class EntropyTerm(Term):
    """`Regularizers.entropy`, with a coefficient that updates adapt if there is `adaptive_entropy`."""

    coefficient: float
    adaptive: AdaptiveEntropy | None

    @property
    def penalized(self) -> tuple[str, ...]:
        return (f"regularizers.{'entropy' if self.coefficient else 'adaptive_entropy'}",)

    def problems(self, passes: Passes) -> Iterator[str]:
        if self.adaptive is not None and not 0 <= self.coefficient <= self.adaptive.highest:
            yield (
                "regularizers.entropy: wanted a first coefficient from 0 to regularizers.adaptive_entropy.highest "
                f"({self.adaptive.highest:g}), got {self.coefficient:g}"
            )

    @property
    def formula(self) -> Formula:
        bonus = f"mean({call_text(entropy_bonus)})"
        if self.adaptive is None:
            return Formula(penalty=f"{number_text(self.coefficient)} * {bonus}")
        change = f"{self.coefficient!r} at first; up or down by {self.adaptive.step!r} after every update, within 0 and"
        words = f"{change} {self.adaptive.highest!r}, to keep the mean entropy near {self.adaptive.target!r}"
        return Formula(penalty=f"entropy_coefficient * {bonus}", words={"entropy_coefficient": words})

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: Aggregate
    ) -> Iterator[tuple[float, Terms]]:
        ids = segment_ids(batch)
        bonus = entropy_bonus(outputs.entropy_BT, batch.mask_BT, aggregate=aggregate, segment_ids=ids)
        if self.adaptive is None:
            yield self.coefficient, bonus
        else:
            yield 1.0, bonus._replace(value=constants.adapted.entropy * bonus.value)


@dataclass(frozen=True, kw_only=True)
class CovarianceTerm(Term):
    """`Regularizers.kl_cov`. The tokens that it penalizes are chosen before the updates, in `penalized_BT`."""

    settings: CovarianceKL

    @property
    def waits(self) -> bool:
        return True

    @property
    def selections(self) -> dict[str, Selection]:
        return {"penalized_BT": partial(top_cov, share=self.settings.share)}

    @property
    def penalized(self) -> tuple[str, ...]:
        return ("regularizers.kl_cov",)

    def problems(self, passes: Passes) -> Iterator[str]:
        yield from scored_problems("regularizers.kl_cov", passes)

    @property
    def formula(self) -> Formula:
        weight = call_text(self.selections["penalized_BT"])
        size = formula_of(log_ratio_size, free={"weight": weight})
        return Formula(penalty=f"{self.settings.coefficient!r} * mean({size})")

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: Aggregate
    ) -> Iterator[tuple[float, Terms]]:
        ids = segment_ids(batch)
        rows = outputs.logp_BT, known(batch, "old_logp_BT"), known(batch, "penalized_BT"), batch.mask_BT
        yield self.settings.coefficient, log_ratio_size(*rows, aggregate=aggregate, segment_ids=ids)


@dataclass(frozen=True, kw_only=True)
class SamplerDistanceTerm(Term):
    """`Regularizers.log_ratio_square`."""

    coefficient: float

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"sampler_logp_BT"})

    @property
    def penalized(self) -> tuple[str, ...]:
        return ("regularizers.log_ratio_square",)

    @property
    def formula(self) -> Formula:
        return Formula(penalty=f"{self.coefficient!r} * mean({call_text(log_ratio_square)})")

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: Aggregate
    ) -> Iterator[tuple[float, Terms]]:
        ids = segment_ids(batch)
        rows = outputs.logp_BT, known(batch, "sampler_logp_BT"), batch.mask_BT
        yield self.coefficient, log_ratio_square(*rows, aggregate=aggregate, segment_ids=ids)
