"""The conversations of agents in places of the sampler (`contract.HeldSamples`): each goes on when its agent asks.

A conversation whose agent is busy keeps its place, and its cache, while the others are sampled. A request that begins a
further sequence takes the place of the one before, which is kept on the host. Nothing that is sampled depends on when a
request arrives: a token's randomness is that of its sample, the sequence and the position.

Axes: R places, each with one conversation; C positions after the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config.protocols import Problem
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding
from gspax.rollout.agents.conversation import Turn
from gspax.rollout.agents.sequences import join_sequences, with_sequences
from gspax.rollout.contract import RolloutSampler, Weights
from gspax.rollout.episodes import EncodedProblem
from gspax.sampler.sampler import SMALLEST_REPLY, pad_rows, round_to_power
from gspax.sampler.state import Replies, SampleOptions
from gspax.types import Array, Rollout


class Written(NamedTuple):
    """A turn that has ended, and what the policy wrote."""

    turn: Turn
    tokens: list[int]
    logps: list[float]  # if the turn wants them


_NOTHING = Problem("")  # the sampler needs the tokens alone
_SEQUENCE = 2654435761  # what a place's further sequences add to its id, modulo 2^32: far from all other ids


class Places:
    """The places of a rollout's conversations.

    Args:
      sampler: that holds them.
      weights: that they are sampled with.
      key: equal (key, id) give equal samples.
      options: of one sample for each place; its turns end at limits of their own too.
      ids: the sample's id of each place.
    """

    def __init__(
        self, sampler: RolloutSampler, weights: Weights, key: Array, options: SampleOptions, ids: Sequence[int]
    ) -> None:
        count, sampling = len(ids), options.sampling
        self.ids, self._weights, self._mesh = [number % 2**32 for number in ids], weights, sampler.mesh
        slots = sampling.slots if sampling.slots < count else 0
        one_each = replace(sampling, prompts=count, group=1, slots=slots, chunk=sampling.chunk or sampling.max_tokens)
        options = replace(options, sampling=one_each, greedy=0, admits=True, turns=True)
        self._held = sampler.hold(key, options)
        self._asked: dict[int, Turn] = {}  # that wait to be sampled
        self._turns: dict[int, Turn] = {}  # that are sampled, by place
        self._starts: dict[int, int] = {}  # where these begin
        self._options = options
        self._earlier = dict[int, list[Rollout]]()  # by place: the sequences before, on the host
        self.admitted_R, self._waits_R = np.zeros(count, bool), np.zeros(count, bool)
        self._left_R, self._length_R = np.zeros(count, bool), np.zeros(count, np.int32)

    def ask(self, place: int, turn: Turn) -> None:
        """Sample a turn of a place's conversation with the next tokens."""
        self._asked[place] = turn

    def leave(self, place: int) -> None:
        """End a place's conversation: nobody reads what is still sampled."""
        self._left_R[place] = True
        for turns in (self._asked, self._turns):
            turns.pop(place, None)

    def advance(self) -> tuple[bool, list[Written]]:
        """Sample the next tokens; return whether there are any, and the turns that have ended. Collective."""
        begun = {place: turn for place, turn in self._asked.items() if turn.first}
        again = [place for place in begun if self.admitted_R[place]]
        self._reply({place: turn for place, turn in self._asked.items() if not turn.first}, again)
        self._keep(again)
        self._admit(begun)
        self._asked = {}
        if not self._turns:
            return False, []
        self._held.advance(self._weights)
        progress, before_R = self._held.progress(), self._length_R
        arrays = progress.length_B, progress.ended_B, progress.waiting_B
        self._length_R, ended_R, self._waits_R = (np.array(x) for x in multihost.to_host(arrays))
        done, written = [place for place in self._turns if ended_R[place] or self._waits_R[place]], list[Written]()
        if done:
            wanted = any(self._turns[place].logprobs for place in done)
            tokens_RC, logp_RC = multihost.to_host((progress.tokens_BC, progress.logp_BC if wanted else None))
            for place in done:
                turn, new = self._turns.pop(place), slice(self._starts[place], int(self._length_R[place]))
                logps = logp_RC[place][new].tolist() if turn.logprobs else []
                written.append(Written(turn, tokens_RC[place][new].tolist(), logps))
        return bool(done) or bool((self._length_R != before_R).any()), written

    def rollout(self) -> Rollout:
        """Take the rollout of all places; those where nobody has asked have no sampled tokens. Collective."""
        silent_R = ~self.admitted_R
        if silent_R.any():  # their rows are empty, but there
            self._hold(dict.fromkeys(np.flatnonzero(silent_R).tolist(), EncodedProblem(_NOTHING, [0], turn_limit=1)))
        taken, sampling = self._held.take(np.arange(len(self.ids))), self._options.sampling
        width = sampling.max_prompt_tokens + sampling.max_tokens
        rollout = with_sequences(taken, width, self._options.model.num_experts)
        if self._earlier:
            joined = join_sequences(multihost.to_host(rollout), self._earlier)
            rollout = multihost.to_devices(joined, named_sharding(self._mesh, "batch"))
        if not silent_R.any():
            return rollout
        heard = multihost.to_devices(self.admitted_R, named_sharding(self._mesh, "batch"))
        reply_B = cast(Array, rollout.reply_B)
        return replace(
            rollout,
            mask_BT=rollout.mask_BT & heard[:, None],
            reply_B=jnp.where(silent_R, rollout.length_B, reply_B),
        )

    def _keep(self, places: Sequence[int]) -> None:
        """Keep the sequences that have ended, because others take their places."""
        if not places:
            return
        taken = self._held.take(np.resize(np.array(places), len(self.ids)))  # so many rows, as at the end
        taken = multihost.to_host(taken)
        for number, place in enumerate(places):
            self._earlier.setdefault(place, []).append(jax.tree.map(lambda leaf, row=number: leaf[row], taken))
            self.ids[place] = (self.ids[place] + _SEQUENCE) % 2**32

    def _admit(self, turns: dict[int, Turn]) -> None:
        if not turns:
            return
        self._hold(
            {place: EncodedProblem(_NOTHING, turn.tokens, turn_limit=turn.most) for place, turn in turns.items()}
        )
        self.admitted_R[list(turns)] = True
        self._turns |= turns
        self._starts |= dict.fromkeys(turns, 0)

    def _hold(self, encoded: dict[int, EncodedProblem]) -> None:
        fresh_R = np.zeros(len(self.ids), bool)
        fresh_R[list(encoded)] = True
        self._held.admit(encoded, self.ids, fresh_R, self._weights)

    def _reply(self, turns: dict[int, Turn], ended: Sequence[int]) -> None:
        """Give the waiting conversations their next turns; end these, and those that were left; the others wait on."""
        ends_R = self._waits_R & (self._left_R | np.isin(np.arange(len(self.ids)), ended))
        if not turns and not ends_R.any():
            return
        rows = [turns[place].tokens if place in turns else [] for place in range(len(self.ids))]
        size = round_to_power(max(map(len, rows)) + 1, SMALLEST_REPLY) - 1
        tokens_RX, count_R = pad_rows(rows, size)
        limit_R = np.array([turns[place].most if place in turns else 0 for place in range(len(rows))], np.int32)
        count_R[(count_R == 0) & ~ends_R] = -1
        by_row = named_sharding(self._mesh, "batch")
        self._held.reply(multihost.to_devices(Replies(tokens_RX, count_R, limit_R), by_row), self._weights)
        self._turns |= turns
        self._starts |= {place: int(self._length_R[place]) + len(turn.tokens) for place, turn in turns.items()}
        self._waits_R[list(turns)] = False
        self._waits_R[ends_R] = False
