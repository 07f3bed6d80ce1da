"""Rules that several terms share. Each sentence says where, what was wanted, and what came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gspax.config.functions import Function, title_of
from gspax.losses.traits import level_of, weight_level

if TYPE_CHECKING:
    from gspax.model.passes import Passes


def stale_problems(field: str, passes: Passes, instead: str = "") -> Iterator[str]:
    """Check that a term over stale samples, weighted by the ratio to the policy that sampled, knows that ratio.

    A term without weights has another gradient there from the first update on. A divergence of whole distributions
    needs none: its contexts are data.

    Args:
      instead: another setting that helps.
    """
    if (stale := passes.staleness_setting) and passes.old_logp != "sampler":
        yield (
            f"{field}: wanted old_logp=sampler{instead} with {stale}, because its term is weighted by the ratio to the "
            f"policy that sampled, got old_logp={passes.experiment.old_logp}"
        )


def scored_problems(field: str, passes: Passes) -> Iterator[str]:
    """Check that a pass of the policy computes old log-probs, which the setting needs, or what comes with them."""
    if passes.old_logp == "pass":
        return
    loss, old_logp = passes.experiment.loss, passes.experiment.old_logp
    wanted = f"old_logp=learner, got {old_logp}"
    if old_logp == "learner":
        wanted = f"a loss with old log-probs of the learner, got {title_of(loss)}"
    yield f"{field}: wanted {wanted}, so the learner computes no log-probs before the updates"


def level_warnings(field: str, function: Function, passes: Passes, more: str = "") -> Iterator[str]:
    """Warn of weights of tokens in a loss whose gradient has one weight for each sequence."""
    loss = passes.experiment.loss
    if level_of(function) == "token" and weight_level(loss) == "sequence":
        yield (
            f"{field}: {title_of(function)} weights each token, but the gradient of {title_of(loss)} has one weight "
            f"per sequence, the mean of these; gspo_token applies them token by token{more}"
        )
