"""Reads minibatches with the parameters that sampled them, for terms that need `sampler_hidden_BTE`.

A checkpoint stores nothing of it: no rollout is carried over one, so a resumed run samples with its own parameters.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from gspax.learner.hidden import make_hidden
from gspax.model.low_rank import combine, partition
from gspax.model.transformer import head_params
from gspax.rollout.runtime import Runtime, count_rollouts
from gspax.run import interrupt
from gspax.training.open_term import GradedStep, OpenTerm
from gspax.types import Batch, Params, TrainState


class SamplingPolicy(OpenTerm):
    """The policies that sampled the rollouts of a run, from the oldest one that a rollout may be of (`open_terms`)."""

    def __init__(self, runtime: Runtime) -> None:
        """Keep nothing yet: a run starts with no rollout in flight."""
        experiment, shared = runtime.experiment, runtime.steps.settings
        self.read = make_hidden(experiment.model, shared, scope="sampling_policy")
        self.staleness = experiment.staleness
        self.trained: dict[int, Params] = {}  # parameters by the number of rollouts that they were trained on
        self.head: tuple[Params, ...] = ()  # of the policy that sampled the newest rollout
        self.dtype = experiment.model.dtype

    @property
    def heads(self) -> tuple[Params, ...]:
        """The head of the policy that sampled."""
        return self.head

    def fill(self, step: GradedStep, batches: list[Batch]) -> list[Batch]:
        """Fill the minibatches with the hidden states of the policy that sampled, and copy its head. Collective."""
        params = self._params(step.state, count_rollouts(step.runtime, step.state), step.graded.version)
        # Updates donate the state's own arrays.
        self.head = (jax.tree.map(jnp.copy, head_params(params)),)
        filled = []
        for batch in batches:
            hidden_BTE = self.read(params, batch.tokens_BT, batch.segment_BT, batch.mask_BT, batch.prefix_BT)
            filled.append(replace(batch, sampler_hidden_BTE=jax.block_until_ready(hidden_BTE)))
            interrupt.stop_point()
        return filled

    def _params(self, state: TrainState, done: int, version: int) -> Params:
        """Return the parameters after `version` rollouts, and keep those after `done`, the state's."""
        trained, frozen = partition(state.params)
        if self.staleness:
            oldest = done - self.staleness
            self.trained = {number: kept for number, kept in self.trained.items() if oldest <= number < done}
            self.trained[done] = jax.tree.map(jnp.copy, trained)
        return state.params if version == done else combine(self.trained[version], frozen)

    def as_read(self, batch: Batch) -> Batch:
        """Return a minibatch that was read from a dump, with hidden states in the compute dtype."""
        if batch.sampler_hidden_BTE is None:
            return batch
        return replace(batch, sampler_hidden_BTE=batch.sampler_hidden_BTE.astype(self.dtype))
