"""Opens the terms of a run that read minibatches with more than the policy's passes (`Term.opens`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gspax.config import Term
from gspax.config.functions import import_class
from gspax.errors import UserError
from gspax.learner.minibatches import Layout
from gspax.model.passes import Passes
from gspax.rollout.dynamic_sampling import GradedBatch
from gspax.rollout.runtime import Runtime
from gspax.training.sampling_policy import SamplingPolicy
from gspax.types import Batch, JsonObject, Params, TrainState


class Opened(Protocol):
    """A term while its run lasts; its class is called with the term and the runtime."""

    @property
    def heads(self) -> tuple[Params, ...]:
        """The heads of other models whose logits updates compare (`Term.comparison`)."""

    @property
    def identity(self) -> dict[str, str]:
        """The entries of checkpoints that a resumed run must find again."""

    def describe_change(self, recorded: object) -> str:
        """Say in one sentence that an entry differs from the recorded one."""

    def fill(
        self,
        runtime: Runtime,
        state: TrainState,
        graded: GradedBatch,
        batches: list[Batch],
        layouts: Sequence[Layout],
    ) -> list[Batch]:
        """Fill the term's columns of the minibatches, before their updates. Collective."""

    def as_read(self, batch: Batch) -> Batch:
        """Return a minibatch that was read from a dump, with the dtypes of the term's columns."""

    def after_step(self, state: TrainState, done: int) -> TrainState:
        """Return the state after `done` steps, with what the term keeps in it."""


def open_terms(runtime: Runtime) -> tuple[Opened, ...]:
    """Open the terms of a run. UserError if one cannot be."""
    passes = Passes(runtime.experiment)
    own = tuple(_open(term, runtime) for term in passes.terms if term.opens)
    return (*own, SamplingPolicy(runtime)) if passes.sampling_policy else own


def open_same_terms(runtime: Runtime, recorded: JsonObject, done: int) -> tuple[tuple[Opened, ...], dict[str, str]]:
    """Open the terms of a run, and return with them the entries of checkpoints that identify what was opened.

    Args:
      recorded: the entries of the checkpoint that the run goes on from.
      done: its steps. UserError if they were taken with something else.
    """
    opened, entries = open_terms(runtime), dict[str, str]()
    for each in opened:
        for key, value in each.identity.items():
            if done and value != recorded.get(key):
                raise UserError(each.describe_change(recorded.get(key)))
        entries |= each.identity
    return opened, entries


def _open(term: Term, runtime: Runtime) -> Opened:
    opened: Opened = import_class(term.opens)(term, runtime)
    return opened


def heads_of(opened: Sequence[Opened]) -> tuple[Params, ...]:
    """Return the heads of other models that updates read."""
    return tuple(head for each in opened for head in each.heads)


def after_step(opened: Sequence[Opened], state: TrainState, done: int) -> TrainState:
    """Return the state after `done` steps, with what the terms keep in it."""
    for each in opened:
        state = each.after_step(state, done)
    return state
