"""The KL to the policy that the run started from: in the loss, in the reward, or only measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gspax.config import Reference
from gspax.config.functions import Function, free_keywords, keywords, title_of
from gspax.config.term import Formula, RewardPenalty, Term
from gspax.losses import Aggregate, Terms, by_constant
from gspax.losses.formulas import aggregated, call_text, words_of
from gspax.losses.kl import k2, k3
from gspax.losses.traits import aggregate_of, layers, level_of
from gspax.model.terms.rules import stale_problems
from gspax.types import Array, Batch, known, packed

if TYPE_CHECKING:
    from gspax.model.passes import Passes


@dataclass(frozen=True, kw_only=True)
class ReferenceTerm(Term):
    """`Experiment.reference`. Another pass over the minibatches, with the first policy, fills `ref_logp_BT`."""

    settings: Reference

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"ref_logp_BT"})

    @property
    def waits(self) -> bool:
        return self.settings.reward is not None

    @property
    def functions(self) -> dict[str, Function]:
        return {} if self.settings.loss is None else {"reference.loss": self.settings.loss}

    @property
    def penalized(self) -> tuple[str, ...]:
        return tuple(self.functions)

    def problems(self, passes: Passes) -> Iterator[str]:
        settings, experiment = self.settings, passes.experiment
        if settings.loss is not None and settings.reward is not None:
            yield "reference: wanted the KL in the loss or in the reward, got both"
        if settings.loss is None and settings.reward is None and settings.coefficient != Reference().coefficient:
            yield (
                "reference.coefficient: wanted reference.loss or reference.reward (gspax.losses.kl), which it "
                f"multiplies, got {settings.coefficient:g} without them"
            )
        if settings.loss is None:
            return
        aggregate, taken = aggregate_of(experiment.loss), keywords(settings.loss)
        if aggregate is not None and "aggregate" not in taken and level_of(aggregate) == "token":
            yield (
                f"reference.loss: {title_of(settings.loss)} weighs sequences equally; wanted a loss aggregated "
                f"by_sequence or by_constant, got {title_of(aggregate)}"
            )
        if "old_logp" in taken:
            yield from stale_problems("reference.loss", passes)
        elif stale := passes.staleness_setting:
            yield (
                "reference.loss: wanted a KL that takes `old_logp` (gspax.losses.kl.token_kl) and old_logp=sampler "
                f"with {stale}, to weigh tokens by the ratio to the policy that sampled, got {title_of(settings.loss)}"
            )

    def warnings(self, passes: Passes) -> Iterator[str]:
        """Warn about a KL that is not added, or is added with another gradient: only k1 has the KL's in a reward."""
        settings, estimate = self.settings, self.settings.reward
        if estimate is not None and any(biased in layers(estimate) for biased in (k2, k3)):
            yield (
                f"reference.reward={title_of(estimate)}: subtracted from a reward, only k1 has the gradient of the KL "
                "in expectation; use gspax.losses.kl.k1, or gspax.losses.kl.token_kl as reference.loss"
            )
        if settings.loss is None and estimate is None:
            more = "reference.loss or reference.reward adds it to the objective"
            yield f"reference: the KL to it is measured only; {more}"

    def reward_penalties(self) -> Iterator[RewardPenalty]:
        estimate = self.settings.reward
        if estimate is not None:

            def of_tokens(batch: Batch) -> Array:
                return estimate(known(batch, "old_logp_BT"), known(batch, "ref_logp_BT"), batch.mask_BT)

            yield RewardPenalty("reference.reward", "kl", self.settings.coefficient, estimate, of_tokens)

    @property
    def formula(self) -> Formula:
        if (kl := self.settings.loss) is None:
            return Formula()
        text = aggregated(kl, call_text(kl, "logp", "ref_logp"), otherwise=by_constant)
        return Formula(penalty=f"{self.settings.coefficient!r} * {text}", words=words_of(kl))

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: Aggregate
    ) -> Iterator[tuple[float, Terms]]:
        """Yield the KL in the loss, with `aggregate` and `old_logp` if the function takes them."""
        if (kl := self.settings.loss) is not None:
            options = free_keywords(kl, {"aggregate": aggregate, "old_logp": batch.old_logp_BT, **packed(batch)})
            yield self.settings.coefficient, kl(outputs.logp_BT, known(batch, "ref_logp_BT"), batch.mask_BT, **options)
