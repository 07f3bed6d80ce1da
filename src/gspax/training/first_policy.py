"""Reads minibatches with the policy that the run started from, for terms that need `ref_logp_BT`."""

from __future__ import annotations

from gspax.learner.minibatches import score_first
from gspax.model.low_rank import combine, partition
from gspax.training.open_term import GradedStep, OpenTerm
from gspax.types import Batch, Params


class FirstPolicy(OpenTerm):
    """The policy before the first update; with adapters it shares the frozen parameters of the state."""

    def __init__(self, trained: Params) -> None:
        """Keep its trained parameters (`learner.state.load_first`)."""
        self.trained = trained

    def fill(self, step: GradedStep, batches: list[Batch]) -> list[Batch]:
        """Fill the minibatches with the first policy's log-probs. Collective."""
        first = combine(self.trained, partition(step.state.params)[1])
        return score_first(step.runtime.steps.score, first, batches)
