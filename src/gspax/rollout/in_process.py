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
from gspax.rollout.aside import Aside
from gspax.rollout.contract import HeldSamples, Request, Weights
from gspax.rollout.episodes import Ready, sample_conversations
from gspax.rollout.grading import Started
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
    def aside(self) -> Aside:
        """Return none: there are no servers."""
        return Aside()

    def push(self, params: Params, version: int) -> Weights:
        """Make inference weights on the sampler's mesh."""
        with timeline.span("pushes", f"version {version}"):
            return Weights(self.sampler.push(params), version, {})

    def sample(self, weights: Weights, request: Request) -> Future[tuple[Rollout, Started]]:
        """Sample with any weights that were pushed, older ones too. The result is there, its arrays may be to come."""
        ready, ids, key, options = request.ready, request.prompt_ids, request.key, request.options
        sampled, began = Future[tuple[Rollout, Started]](), time.monotonic()
        if isinstance(request.interaction, AgentInteraction):
            return sample_agents(self, weights, request, request.interaction)
        if request.interaction is not None:
            sampled.set_result(sample_conversations(request.interaction, weights.params, ready, ids, key, options))
        else:
            prompts = [ready[place].prompt if place in ready else None for place in range(len(ids))]
            earlier = [ready[place].earlier if place in ready else () for place in range(len(ids))]
            rollout = sample(weights.params, prompts, ids, key, options, earlier=earlier, on_ended=request.on_ended)
            sampled.set_result((rollout, Started()))
        timeline.watch(timeline.SAMPLER, "rollout", began, sampled.result()[0])
        return sampled

    def hold(self, key: Array, options: SampleOptions) -> HeldSamples:
        """Make slots of the sampler."""
        return OnDevices(key, replace(options, sampling=split_groups(options.sampling, options.mesh)))

    def fetch(self, rollout: Rollout) -> Rollout:
        """Move the arrays that are on the sampler's mesh."""
        return self.sampler.fetch(rollout)


@dataclass
class OnDevices:
    """The samples of partial rollouts in the sampler's slots; nothing waits for the devices."""

    key: Array  # on the host
    options: SampleOptions
    tokens_RS: Array | None = None  # int32    prompts; None, as the two below: nothing has been sampled
    state: State | None = None
    current: Progress | None = None

    def admit(self, ready: Mapping[int, Ready], ids: Sequence[int], fresh_R: np.ndarray, weights: Weights) -> None:
        """Prefill new prompts, and sample the first token of each of their samples."""
        places = range(len(fresh_R))
        others = [None if fresh else [0] for fresh in fresh_R]  # any prompt in places that are not fresh
        prompts = [ready[place].prompt if place in ready else others[place] for place in places]
        earlier = [ready[place].earlier if place in ready else () for place in places]
        limited = any(new.most for new in ready.values())
        most = [ready[place].most if place in ready else 1 for place in places] if limited else []
        placed = place_prompts(prompts, ids, self.options, earlier, widest=True, most=most)
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
