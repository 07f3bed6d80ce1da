"""What a term of the objective declares: the base class of all that is added to a policy loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

    from gspax.config.functions import Function
    from gspax.config.model import ModelConfig
    from gspax.losses import Aggregate, Terms
    from gspax.model.passes import Passes
    from gspax.types import Batch

    Array = jax.Array


class Held(NamedTuple):
    """Parameters that a term keeps in the learner's memory throughout a run."""

    name: str  # in memory plans
    dtype: str
    model: ModelConfig | None = None  # None: as many as the policy trains


class RewardPenalty(NamedTuple):
    """An estimate that is summed over each response, multiplied, and subtracted from its reward."""

    field: str  # of the function, for messages
    name: str  # the metric is `reward/NAME`
    coefficient: float
    function: Function
    estimate: Callable[[Batch], Array]  # float32 [B, T], 0 outside the mask


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of the objective besides the policy loss: what it reads, forbids, keeps in memory, and adds.

    A term is a frozen dataclass of its settings. With these defaults it does nothing.
    """

    @property
    def needs(self) -> frozenset[str]:
        """The columns of `types.Batch` that the term reads, besides those that every minibatch has."""
        return frozenset()

    @property
    def waits(self) -> bool:
        """True if the term reads the old policy's pass over a minibatch before its first update."""
        return False

    @property
    def functions(self) -> Mapping[str, Function]:
        """The term's functions of the log-probs of rows, by their field; in packed rows they take `segment_ids`."""
        return {}

    @property
    def penalized(self) -> tuple[str, ...]:
        """The fields that add a penalty, which is aggregated as the loss."""
        return ()

    def problems(self, passes: Passes) -> Iterator[str]:
        """Yield a sentence, "field: wanted X, got Y", for each setting that does not fit the experiment."""
        yield from ()

    def warnings(self, passes: Passes) -> Iterator[str]:
        """Yield a sentence for each setting that runs but is probably not intended."""
        yield from ()

    def held(self, trained_dtype: str) -> Iterator[Held]:
        """Yield the parameters that the term keeps in memory, beside a policy whose trained arrays have this dtype."""
        yield from ()

    def reward_penalties(self) -> Iterator[RewardPenalty]:
        """Yield what is subtracted from the rewards."""
        yield from ()

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: Aggregate | None
    ) -> Iterator[tuple[float, Terms]]:
        """Yield (coefficient, penalty) of each penalty that an update adds to the loss of some rows.

        Args:
          outputs: `learner.objective.Outputs` of the policy for these rows.
          constants: `learner.objective.UpdateConstants`.
          aggregate: the loss's; None for a loss without one, which has no penalties if the term names them.
        """
        yield from ()
