"""What a term of the objective declares: the base class of all that is added to a policy loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

    from gspax.config.functions import Function
    from gspax.config.model import ModelConfig
    from gspax.config.protocols import Selection
    from gspax.losses import Aggregate, Metrics, Terms
    from gspax.model.passes import Passes
    from gspax.types import Batch, TrainState

    Array = jax.Array

# (the policy's logits [C, V], another model's, the sampled tokens [C], their sampling masks) -> arrays [C, ...]
Compare = Callable[["Array", "Array", "Array", "Array | None"], Any]


class Comparison(NamedTuple):
    """What an update computes of the policy's logits and another model's.

    Without `hidden` and `kept` there is no other model: `function` gets the policy's logits twice.
    """

    function: Compare
    hidden: Callable[[Batch], tuple[Array, Array | None]] | None = None  # the other's last; of several, each token's
    kept: Callable[[TrainState], Any] | None = None  # its parameters, if the training state holds them
    models: tuple[ModelConfig, ...] = ()  # the other models; none: the policy's own, with other parameters


class Held(NamedTuple):
    """Parameters that a term keeps in the learner's memory throughout a run."""

    name: str  # in memory plans
    dtype: str
    model: ModelConfig | None = None  # of a checkpoint with the policy's tokens; None: as many as the policy trains
    field: str = ""  # of that model
    in_state: bool = False  # part of the training state, so checkpoints hold them too


class Formula(NamedTuple):
    """What a term adds to the printed equation of an objective, in expressions of `losses.formulas`."""

    penalty: str = ""  # added to the loss, with its sign and coefficient: "0.1 * mean((logp - ref_logp)**2)"
    weight: str = ""  # a factor of the loss of a token
    advantage: str = ""  # the advantage in place of `advantage`: "advantage - 0.5 * (old_logp - teacher_logp)"
    words: Mapping[str, str] = {}  # what its own names are


class Pair(NamedTuple):
    """A setting that cannot be on beside another one, or with `needed` not without it (`experiment.validation.pairs`).

    Both are fields, "teacher.prompt", or names of `experiment.validation.pairs`.
    """

    key: str
    other: str
    why: str = ""  # after the other's name in the sentence
    needed: bool = False


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
    def selections(self) -> Mapping[str, Selection]:
        """Functions of whole minibatches before their updates, by the column of weights [B, T] that each fills."""
        return {}

    @property
    def weighs(self) -> str:
        """The field by which `weight` is on; empty if the term has no weight."""
        return ""

    @property
    def of_tokens(self) -> str:
        """The field by which advantages are those of tokens, [B, T]; empty if they stay as they are."""
        return ""

    @property
    def signal(self) -> str:
        """What trains on groups of equal rewards too, for a sentence; empty if the term does not."""
        return ""

    @property
    def comparison(self) -> Comparison | None:
        """What an update computes of a chunk's logits, and of another model's if there is one; None: nothing."""
        return None

    @property
    def measure(self) -> Compare | None:
        """What the old policy's pass computes of its own logits, which take the other model's place; else None."""
        return None

    @property
    def reads_problems(self) -> str:
        """Return the setting by which it reads a rollout's problems; empty if it does not."""
        return ""

    @property
    def opens(self) -> str:
        """The class that fills the term's columns, "package.module.Class" (`training.open_terms`); empty: none."""
        return ""

    @property
    def penalized(self) -> tuple[str, ...]:
        """The fields that add a penalty, which is aggregated as the loss."""
        return ()

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The settings that need or exclude another one."""
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

    @property
    def formula(self) -> Formula | None:
        """What `penalties`, `weight`, and `mix` add to the printed equation; None: the term's class is named there."""
        return None

    def mix(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Add to the advantages of some rows; also return metrics."""
        return batch, {}

    def weight(self, logp_BT: Array, batch: Batch) -> Array | None:
        """Compute a constant factor of the loss of some rows, float32 [B] or [B, T], if `weighs` names its field."""
        return None

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: Aggregate
    ) -> Iterator[tuple[float, Terms]]:
        """Yield (coefficient, penalty) of each penalty that an update adds to the loss of some rows.

        Args:
          outputs: `learner.objective.Outputs` of the policy for these rows.
          constants: `learner.objective.UpdateConstants`.
          aggregate: the loss's.
        """
        yield from ()
