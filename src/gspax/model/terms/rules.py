"""Rules that several terms share. Each sentence says where, what was wanted, and what came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gspax.config import Placement

if TYPE_CHECKING:
    from gspax.model.passes import Passes


def staleness_of(passes: Passes) -> str:
    """Return the setting by which samples are older than the policy, `placement.staleness=1`; empty without one."""
    sampler = passes.experiment.engine or passes.experiment.placement
    if sampler is None or not sampler.staleness:
        return ""
    return f"{'placement' if isinstance(sampler, Placement) else 'engine'}.staleness={sampler.staleness}"


def stale_problems(field: str, passes: Passes, instead: str = "") -> Iterator[str]:
    """Check that a term over stale samples, weighted by the ratio to the policy that sampled, knows that ratio.

    A term without weights has another gradient there from the first update on. A divergence of whole distributions
    needs none: its contexts are data.

    Args:
      instead: another setting that helps.
    """
    if (stale := staleness_of(passes)) and passes.old_logp != "sampler":
        yield (
            f"{field}: wanted old_logp=sampler{instead} with {stale}, because its term is weighted by the ratio to the "
            f"policy that sampled, got old_logp={passes.experiment.old_logp}"
        )
