"""The base class of terms that a run opens (`Term.opens`): they fill columns, and may keep parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from gspax.learner.minibatches import Layout
from gspax.rollout.completion import GradedBatch
from gspax.rollout.runtime import Runtime
from gspax.types import Batch, Params, TrainState


class GradedStep(NamedTuple):
    """A step before its updates: the state that they update, and the rollout that they train on."""

    runtime: Runtime
    state: TrainState
    graded: GradedBatch
    layouts: Sequence[Layout]  # of its minibatches


NO_ENTRIES: Mapping[str, str] = MappingProxyType({})


class OpenTerm:
    """A term while its run lasts; its class is called with the term and the runtime. By default it does nothing.

    A subclass has the methods that it needs.
    """

    @property
    def heads(self) -> tuple[Params, ...]:
        """The heads of other models whose logits updates compare (`Term.comparison`)."""
        return ()

    @property
    def identity(self) -> Mapping[str, str]:
        """The entries of checkpoints that a resumed run must find again."""
        return NO_ENTRIES

    def describe_change(self, recorded: object) -> str:
        """Say in one sentence that an entry of `identity` differs from the recorded one."""
        return f"terms: wanted {type(self).__name__} as in the run so far ({recorded}), got {dict(self.identity)}"

    def fill(self, step: GradedStep, batches: list[Batch]) -> list[Batch]:
        """Fill the term's columns of the minibatches, before their updates. Collective."""
        return batches

    def as_read(self, batch: Batch) -> Batch:
        """Return a minibatch that was read from a dump, with the dtypes of the term's columns."""
        return batch

    def after_step(self, state: TrainState, done: int) -> TrainState:
        """Return the state after `done` steps, with what the term keeps in it."""
        return state
