"""The contract of what samples the rollouts of a run, in four calls: push, sample, hold, and fetch.

`in_process.InProcess` is the sampler on the run's devices, `servers.sampler.ServerSampler` one or more servers. A run
chooses with one field, `Experiment.engine`; nothing above this package knows which it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import numpy as np

from gspax.rollout.agents.interaction import AgentInteraction
from gspax.rollout.episodes import EncodedProblem, Interaction
from gspax.rollout.grading import Started
from gspax.rollout.set_aside import ServersSetAside
from gspax.sampler.sampler import OnEnded, Progress
from gspax.sampler.state import Replies, SampleOptions
from gspax.types import Array, Params, Rollout


class Weights(NamedTuple):
    """A version of the policy that a sampler has accepted, and alone reads the `params` of."""

    params: Params  # inference weights; of a server, None
    version: int  # the number of rollouts that they were trained on
    metrics: dict[str, float]  # of the push: seconds, bytes, and the probe


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for `sampling.group` completions of each problem, or for conversations about it.

    Attributes:
      encoded: the problems by place, of which there are P; a process needs those of its own rows.
      prompt_ids: the P problems' indices; sample g of a problem has the id `prompt_id * (group - greedy) + g`.
      key: equal (key, id) give equal samples.
      options: of which `mesh` is the sampler's and `sampling.prompts` is not read.
      interaction: with an environment, which answers the turns, or with agents, which ask for them.
      on_ended: without one, called with completions that have ended while others are sampled; each row once.
    """

    encoded: Mapping[int, EncodedProblem]
    prompt_ids: Sequence[int]
    key: Array
    options: SampleOptions
    interaction: Interaction | AgentInteraction | None = None
    on_ended: OnEnded | None = None


class HeldSamples(Protocol):
    """Holds the samples of `rollout.group_pool`: newer weights continue what older ones began. Collective."""

    def admit(
        self, encoded: Mapping[int, EncodedProblem], ids: Sequence[int], fresh_R: np.ndarray, weights: Weights
    ) -> None:
        """Put new groups into the places `fresh_R`, bool; elsewhere any ids count, and no problem is `encoded`."""

    def advance(self, weights: Weights) -> None:
        """Sample `sampling.chunk` more tokens of each unfinished sample. Does not wait."""

    def progress(self) -> Progress:
        """Report how far all samples are, once what was begun is done."""

    def reply(self, replies: Replies, weights: Weights) -> None:
        """Append replies to the conversations that wait; those without one have ended."""

    def take(self, row_B: np.ndarray) -> Rollout:
        """Return the rollout of these rows, of which one may stand several times, and free their places."""


class RolloutSampler(Protocol):
    """Samples the rollouts of a run. Every method is collective: all processes call it in the same order."""

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Return the mesh that rows are divided over: a process has the problems of its own rows."""

    @property
    def set_aside(self) -> ServersSetAside:
        """Return the servers that are asked for nothing more."""

    def push(self, params: Params, version: int) -> Weights:
        """Give the sampler the learner's parameters; later samples are of these weights.

        Raises:
          FailureError: a server does not take them, or computes other log-probs with them than the learner.
        """

    def sample(self, weights: Weights, request: Request) -> Future[tuple[Rollout, Started]]:
        """Sample with the weights of the newest push: tokens in, tokens out, nothing is tokenized again.

        A later push waits for it.

        Returns:
          The tokens, when they are there, with the log-probs of the distribution that they were sampled from, and on
          request the chosen experts and the version of each token; and this process's rewards of conversations, by row.

        Raises:
          FailureError: no server answers in time, or its answer is not what was asked for.
        """

    def hold(self, key: Array, options: SampleOptions) -> HeldSamples:
        """Make an empty pool of samples for partial rollouts; `sampling.prompts` are its places."""

    def fetch(self, rollout: Rollout) -> Rollout:
        """Move a rollout to the learner's mesh; arrays on the host stay there."""
