"""Opens the terms of a run that read minibatches with more than the policy's passes (`Term.opens`)."""

from __future__ import annotations

from collections.abc import Sequence

from gspax.config import Term
from gspax.config.functions import import_class
from gspax.errors import UserError
from gspax.rollout.runtime import Runtime
from gspax.training.open_term import OpenTerm
from gspax.training.sampling_policy import SamplingPolicy
from gspax.types import JsonObject, Params, TrainState


def open_terms(runtime: Runtime) -> tuple[OpenTerm, ...]:
    """Open the terms of a run. UserError if one cannot be."""
    own = tuple(_open(term, runtime) for term in runtime.passes.terms if term.opens)
    return (*own, SamplingPolicy(runtime)) if runtime.passes.sampling_policy else own


def open_same_terms(runtime: Runtime, recorded: JsonObject, done: int) -> tuple[tuple[OpenTerm, ...], dict[str, str]]:
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


def _open(term: Term, runtime: Runtime) -> OpenTerm:
    opened: OpenTerm = import_class(term.opens)(term, runtime)
    return opened


def heads_of(opened: Sequence[OpenTerm]) -> tuple[Params, ...]:
    """Return the heads of other models that updates read."""
    return tuple(head for each in opened for head in each.heads)


def after_step(opened: Sequence[OpenTerm], state: TrainState, done: int) -> TrainState:
    """Return the state after `done` steps, with what the terms keep in it."""
    for each in opened:
        state = each.after_step(state, done)
    return state
