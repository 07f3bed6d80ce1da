"""The contract of engines, by the sampler on the run's own devices (`sampler.placement`)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax
import numpy as np

from gspax.config import ModelConfig
from gspax.rollout.engines.contract import Request, Served, Weights
from gspax.rollout.episodes import sample_conversations
from gspax.rollout.grading import Started
from gspax.sampler.placement import Sampler
from gspax.sampler.sampler import sample, score_rows
from gspax.types import Params, Rollout


@dataclass(frozen=True)
class InProcess:
    """The sampler of this process. Only `score` waits for the devices."""

    sampler: Sampler
    model: ModelConfig

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The sampler's mesh."""
        return self.sampler.mesh

    def push(self, params: Params, version: int) -> Weights:
        """Make inference weights on the sampler's mesh."""
        return Weights(self.sampler.push(params), version, {})

    def sample(self, weights: Weights, request: Request) -> Future[tuple[Rollout, Started]]:
        """Sample with any weights that were pushed, older ones too. The result is there, its arrays may be to come."""
        ready, ids, key, options = request.ready, request.prompt_ids, request.key, request.options
        sampled = Future[tuple[Rollout, Started]]()
        if request.interaction is not None:
            sampled.set_result(sample_conversations(request.interaction, weights.params, ready, ids, key, options))
        else:
            prompts = [one and one.prompt for one in ready]
            earlier = [one.earlier if one else () for one in ready]
            rollout = sample(weights.params, prompts, ids, key, options, earlier=earlier, ended=request.ended)
            sampled.set_result((rollout, Started()))
        return sampled

    def score(self, weights: Weights, given: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """One pass over the rows, without a cache."""
        return score_rows(weights.params, given, self.model, self.mesh)

    def fetch(self, rollout: Rollout) -> Rollout:
        """Move the arrays that are on the sampler's mesh."""
        return self.sampler.fetch(rollout)

    def pause(self) -> None:
        """Nothing is sampled between two calls."""

    def resume(self) -> None:
        """Nothing is sampled between two calls."""

    def state(self) -> list[Served]:
        """Its limits."""
        limits = {"max_tokens": self.model.max_position_embeddings, "vocab_size": self.model.vocab_size}
        return [Served("", None, limits=limits)]
