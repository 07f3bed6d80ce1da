"""The terms of gspax's own settings, one file each; `terms_of` lists those of an experiment."""

from __future__ import annotations

from collections.abc import Callable

from gspax.config import Experiment
from gspax.config.term import Term
from gspax.model.terms.reference import ReferenceTerm

# Each makes the term of an experiment's setting, or None. Penalties are added in this order.
MAKERS: tuple[Callable[[Experiment], Term | None], ...] = (ReferenceTerm.of,)


def terms_of(experiment: Experiment) -> tuple[Term, ...]:
    """List the terms of an experiment: those of its settings, then its own (`Experiment.terms`)."""
    made = (make(experiment) for make in MAKERS)
    return (*(term for term in made if term is not None), *experiment.terms)
