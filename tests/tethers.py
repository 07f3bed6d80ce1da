"""A term in one file: a tether to the policy that the run started from."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gspax.config import Formula, Term
from gspax.losses import Terms
from gspax.losses.terms import mean_over
from gspax.types import known, segment_ids


@dataclass(frozen=True, kw_only=True)
class Tether(Term):
    """The squared log-ratio of the policy to the first one, beyond a slack."""

    coefficient: float = 0.1
    slack: float = 0.0  # nats

    needs = frozenset({"ref_logp_BT"})
    penalized = ("terms",)

    def problems(self, passes):
        if self.slack < 0:
            yield f"terms: wanted a slack of at least 0, got {self.slack:g}"

    @property
    def formula(self):
        return Formula(penalty=f"{self.coefficient!r} * mean(max(abs(logp - ref_logp) - {self.slack!r}, 0)**2)")

    def penalties(self, outputs, batch, constants, aggregate):
        mask_BT = batch.mask_BT
        ratio_BT = jnp.where(mask_BT, outputs.logp_BT - known(batch, "ref_logp_BT"), 0)
        value_BT = jnp.maximum(jnp.abs(ratio_BT) - self.slack, 0) ** 2
        value, weight = aggregate(value_BT, mask_BT, segment_ids(batch))
        yield self.coefficient, Terms(value, weight, {"tether": mean_over(jax.lax.stop_gradient(value_BT), mask_BT)})
