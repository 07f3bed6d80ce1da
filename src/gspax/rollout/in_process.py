"""The contract of samplers, by the sampler on the run's own devices (`sampler.placement`).

Axes: R places of groups, S positions of a prompt, B rows, P prompts of devices (`sampler.split_groups`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from gspax.parallel import multihost, timeline
from gspax.parallel.sharding import named_sharding
from gspax.rollout.agents.interaction import AgentInteraction
from gspax.rollout.agents.rollouts import sample_agents
from gspax.rollout.contract import HeldSamples, Request, Weights
from gspax.rollout.episodes import EncodedProblem, list_prompts, sample_conversations
from gspax.rollout.grading import Started
from gspax.rollout.set_aside import ServersSetAside
from gspax.sampler import continuous_batching
from gspax.sampler.placement import Sampler
from gspax.sampler.sampler import (
    Progress,
    advance_chunk,
    assemble,
    describe_progress,
    place_prompts,
    resume,
    sample,
    split_groups,
)
from gspax.sampler.state import Prompts, Replies, SampleOptions, State
from gspax.types import Array, Params, Rollout


@dataclass(frozen=True)
class InProcess:
    """The sampler of this process. Nothing waits for the devices."""

    sampler: Sampler

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Return the sampler's mesh."""
        return self.sampler.mesh

    @property
    def set_aside(self) -> ServersSetAside:
        """Return none: there are no servers."""
        return ServersSetAside()

    def push(self, params: Params, version: int) -> Weights:
        """Make inference weights on the sampler's mesh."""
        with timeline.span("pushes", f"version {version}"):
            return Weights(self.sampler.push(params), version, {})

    def sample(self, weights: Weights, request: Request) -> Future[tuple[Rollout, Started]]:
        """Sample with any weights that were pushed, older ones too. The result is there, its arrays may be to come."""
        encoded, ids, key, options = request.encoded, request.prompt_ids, request.key, request.options
        sampled, began = Future[tuple[Rollout, Started]](), time.monotonic()
        if isinstance(request.interaction, AgentInteraction):
            return sample_agents(self, weights, request, request.interaction)
        if request.interaction is not None:
            sampled.set_result(sample_conversations(request.interaction, weights.params, encoded, ids, key, options))
        else:
            prompts, earlier = list_prompts(encoded, len(ids))
            rollout = sample(weights.params, prompts, ids, key, options, earlier=earlier, on_ended=request.on_ended)
            sampled.set_result((rollout, Started()))
        timeline.watch(timeline.SAMPLER, "rollout", began, sampled.result()[0])
        return sampled

    def hold(self, key: Array, options: SampleOptions) -> HeldSamples:
        """Make slots of the sampler."""
        return SamplesOnDevices(key, replace(options, sampling=split_groups(options.sampling, options.mesh)))

    def fetch(self, rollout: Rollout) -> Rollout:
        """Move the arrays that are on the sampler's mesh."""
        return self.sampler.fetch(rollout)


@dataclass
class SamplesOnDevices:
    """The samples of partial rollouts in the sampler's slots; nothing waits for the devices."""

    key: Array  # on the host
    options: SampleOptions
    tokens_RS: Array | None = None  # int32    prompts; None, as the two below: nothing has been sampled
    state: State | None = None
    current: Progress | None = None

    def admit(
        self, encoded: Mapping[int, EncodedProblem], ids: Sequence[int], fresh_R: np.ndarray, weights: Weights
    ) -> None:
        """Prefill new prompts, and sample the first token of each of their samples."""
        prompts, earlier = list_prompts(encoded, len(fresh_R))
        any_prompt = [0]  # in places that are not fresh, which nothing reads
        prompts = [prompt if fresh else any_prompt for prompt, fresh in zip(prompts, fresh_R, strict=True)]
        limits = [encoded[place].turn_limit if place in encoded else 1 for place in range(len(fresh_R))]
        has_limits = any(new.turn_limit for new in encoded.values())
        placed = place_prompts(
            prompts, ids, self.options, earlier, widest=True, turn_limits=limits if has_limits else []
        )
        fresh_P = np.repeat(fresh_R, len(placed.length_P) // len(fresh_R))
        self.tokens_RS, self.state, self.current = _admit(
            weights.params,
            (self.tokens_RS, self.state),
            placed,
            self.key,
            fresh_P=multihost.to_devices(fresh_P, named_sharding(self.options.mesh, "batch")),
            version=np.int32(weights.version),
            options=self.options,
        )

    def advance(self, weights: Weights) -> None:
        """Advance all slots by a chunk."""
        self._run(advance_chunk, weights)

    def progress(self) -> Progress:
        """Return arrays to come."""
        assert self.current is not None
        return self.current

    def reply(self, replies: Replies, weights: Weights) -> None:
        """Add the replies to the cache."""
        self._run(resume, weights, replies)

    def _run(self, program: Callable[..., tuple[State, Progress]], weights: Weights, *given: Replies) -> None:
        key, version, began = self.key, np.int32(weights.version), time.monotonic()
        self.state, self.current = program(weights.params, self.state, *given, key, version, options=self.options)
        timeline.watch(timeline.SAMPLER, "chunk", began, self.current)

    def take(self, row_B: np.ndarray) -> Rollout:
        """Gather the rows on the sampler's devices."""
        assert self.tokens_RS is not None and self.state is not None
        on_devices = multihost.to_devices(row_B, named_sharding(self.options.mesh))
        return _take(self.tokens_RS, self.state, on_devices, options=self.options)


@partial(jax.jit, static_argnames="options", donate_argnames="held")
def _admit(
    params: Params,
    held: tuple[Array | None, State | None],
    prompts: Prompts,
    key: Array,
    *,
    fresh_P: Array,
    version: Array,
    options: SampleOptions,
) -> tuple[Array, State, Progress]:
    tokens_RS, state = held
    state = continuous_batching.admit(params, state, prompts, key, options, fresh_P=fresh_P, version=version)
    tokens_RS = prompts.tokens_PS if tokens_RS is None else jnp.where(fresh_P[:, None], prompts.tokens_PS, tokens_RS)
    return tokens_RS, state, describe_progress(state, options)


@partial(jax.jit, static_argnames="options")
def _take(tokens_RS: Array, state: State, row_B: Array, *, options: SampleOptions) -> Rollout:
    rollout = jax.tree.map(lambda leaf: leaf[row_B], assemble(tokens_RS, state, options=options))
    return jax.lax.with_sharding_constraint(rollout, named_sharding(options.mesh, "batch"))
