"""Penalties on routers: the balance of the experts' loads, and the size of the routers' logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from gspax.config import Router, has_experts
from gspax.config.term import Formula, Term
from gspax.losses import Aggregate, Terms
from gspax.losses.formulas import call_text
from gspax.losses.regularizers import load_balance, router_z
from gspax.model.router_scores import softmax_logits
from gspax.model.terms.rules import scored_problems
from gspax.types import Batch, segment_ids

if TYPE_CHECKING:
    from gspax.model.passes import Passes


@dataclass(frozen=True, kw_only=True)
class LoadBalanceTerm(Term):
    """`Regularizers.load_balance`. Where scores are sigmoids, it takes their shares of the sum (2412.19437, eq. 19)."""

    coefficient: float
    router: Router

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"expert_BLTA"})

    @property
    def penalized(self) -> tuple[str, ...]:
        return ("regularizers.load_balance",)

    def problems(self, passes: Passes) -> Iterator[str]:
        yield from expert_problems("regularizers.load_balance", passes)
        if not passes.samples_experts:
            yield from scored_problems("regularizers.load_balance", passes)

    @property
    def formula(self) -> Formula:
        return Formula(penalty=f"{self.coefficient!r} * mean({call_text(load_balance)})")

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: Aggregate
    ) -> Iterator[tuple[float, Terms]]:
        assert constants.load_LE is not None, "the batch has no experts"
        prob_LBTE = jax.nn.softmax(softmax_logits(outputs.routing.logits, self.router))
        yield (
            self.coefficient,
            load_balance(
                prob_LBTE, constants.load_LE, batch.mask_BT, aggregate=aggregate, segment_ids=segment_ids(batch)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class RouterLogitsTerm(Term):
    """`Regularizers.router_z`."""

    coefficient: float

    @property
    def penalized(self) -> tuple[str, ...]:
        return ("regularizers.router_z",)

    def problems(self, passes: Passes) -> Iterator[str]:
        yield from expert_problems("regularizers.router_z", passes)
        if passes.experiment.model.router.scoring == "sigmoid":
            yield (
                "regularizers.router_z: wanted 0 with a router of sigmoids, which has no partition function to keep "
                f"small, got {self.coefficient:g}"
            )

    @property
    def formula(self) -> Formula:
        return Formula(penalty=f"{self.coefficient!r} * mean({call_text(router_z)})")

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: Aggregate
    ) -> Iterator[tuple[float, Terms]]:
        ids = segment_ids(batch)
        yield self.coefficient, router_z(outputs.routing.logits, batch.mask_BT, aggregate=aggregate, segment_ids=ids)


def expert_problems(field: str, passes: Passes) -> Iterator[str]:
    """Check that the model has experts."""
    model = passes.experiment.model
    if not has_experts(model):
        yield f"{field}: wanted a model with experts, got none in {model.num_hidden_layers} layers"
