"""Calls an experiment's functions to check that they return what `gspax.config.protocols` says.

Functions on arrays are traced with shapes (`jax.eval_shape`), so nothing is computed and no device is needed. An
advantage or a length reward may use numpy; it is then called once with numbers. `first_calls` tests rewards,
demonstrations and the `step` of an environment, which are not functions of arrays. Each message is one sentence.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from gspax import losses
from gspax.config import Experiment, Optimizer, protocols
from gspax.config.functions import (
    Function,
    Hint,
    advantage_axes,
    free_keywords,
    is_gspax,
    keywords,
    name_of,
    title_of,
)
from gspax.errors import UserError, place_of
from gspax.experiment.validation.fields import Field, WrongFieldError, bare, fields
from gspax.losses.selection import Minibatch
from gspax.losses.traits import aggregate_of, traits_of
from gspax.model.passes import Passes
from gspax.types import Batch

B, T = 2, 3
_HOST_ERRORS = (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)


class _Call(NamedTuple):
    """A call of a function, as a run calls it, with a check of its result."""

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    wanted: str
    fits: Callable[[object], bool]
    options: Mapping[str, object] = {}
    differentiated: bool = False  # whether to differentiate with respect to the first argument
    on_host: bool = False  # whether arrays are concrete, so that numpy can be used


class _BreachError(Exception):
    """Raised if a contract is broken; the message is the end of a sentence."""


def contract_problems(experiment: Experiment) -> Iterator[str]:
    """Yield a sentence for each function that raises, or returns something else than its protocol says.

    Functions with an error, and those whose call depends on a field with an error (`fields.without`), are not called.
    """
    by_key = {field.key: field for field in fields(experiment) if field.value is not None}
    context, wrong, weights = Context(experiment), False, list[str]()
    with contextlib.suppress(WrongFieldError):  # then the loss is not called
        weights = [term.weighs for term in Passes(experiment).terms]
    for key in sorted(by_key, key="loss".__eq__):  # the loss comes last: it takes the weights of the correction
        field = by_key[key]
        make = _CALLS.get(bare(field.hint))
        if make is None or (key == "loss" and wrong):
            continue
        try:
            if call := make(context, field):
                _check(field.value, call)
        except WrongFieldError:
            continue
        except _BreachError as breach:
            wrong |= key in weights
            yield f"{key}: {breach}"


def takes_rewards(advantage: protocols.Advantage, shape: tuple[int, ...], *, masked: bool) -> bool:
    """Return whether an advantage function accepts rewards of this shape, [P, G] or [P, G, R], and a mask [P, G]."""
    try:
        _check(advantage, _advantage_call(advantage, shape, masked=masked))
    except _BreachError:
        return False
    return True


def _check(function: Function, call: _Call) -> None:
    """Raise _BreachError unless the function accepts the call and returns the wanted result."""

    def call_and_check(*arguments: ArrayLike) -> Any:
        result = call.function(*arguments, **call.options)
        if not call.fits(result):
            raise _BreachError(f"wanted {title_of(function)} to return {call.wanted}, got {_brief(result)}")
        return result

    def run(*arguments: ArrayLike) -> None:
        if call.differentiated:
            jax.grad(lambda first: call_and_check(first, *arguments[1:]).value.sum())(arguments[0])
        else:
            call_and_check(*arguments)

    try:
        try:
            jax.eval_shape(run, *call.arguments)
        except _HOST_ERRORS:
            if not call.on_host:
                raise
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                # inside a trace, a jax function of these numbers does not start a device
                jax.eval_shape(lambda: run(*map(example, call.arguments)))
    except _BreachError:
        raise
    except Exception as error:
        if call.on_host and isinstance(error, _HOST_ERRORS):
            return  # the function uses both numpy and jax, so only a run can tell
        raise _BreachError(_raised(function, error)) from error


def example(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """Make an array of numbers that differ within a row."""
    return (np.arange(shape.size).reshape(shape.shape) % 2).astype(shape.dtype)


def _raised(function: Function, error: Exception) -> str:
    """Say in one sentence where in the user's code an error was raised."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    if isinstance(error, UserError | TypeError | ValueError) and is_gspax(function):
        return text
    return f"{title_of(function)} raised {type(error).__name__}: {text}{place_of(error)}"


def _brief(value: object) -> str:
    """Format the type and shape of a result for a message."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {[*value.shape]}"
    if isinstance(value, losses.Terms):
        return f"Terms(value={_brief(value.value)}, weight={_brief(value.weight)}, metrics={_brief(value.metrics)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_brief(item)}" for key, item in value.items()) + "}"
    return name_of(value) if isinstance(value, type) else "None" if value is None else type(value).__name__


# How a run calls each function


def _array(*shape: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _has_shape(*shapes: tuple[int, ...]) -> Callable[[object], bool]:
    """Return a check that a result is an array of numbers of one of these shapes."""

    def fits(result: object) -> bool:
        kind = getattr(result, "dtype", np.dtype(object))
        is_number = any(jnp.issubdtype(kind, wanted) for wanted in (jnp.number, np.bool_))
        return is_number and getattr(result, "shape", None) in shapes

    return fits


def _is_terms(result: object) -> bool:
    metric_types = losses.Share | losses.Spread | losses.Quantile
    return (
        isinstance(result, losses.Terms)
        and isinstance(result.metrics, dict)
        and [getattr(array, "shape", None) for array in (result.value, result.weight)] == [(B,), (B,)]
        and jnp.issubdtype(result.value.dtype, jnp.floating)
        and all(isinstance(metric, metric_types) for metric in result.metrics.values())
    )


LOGP, MASK = _array(B, T), _array(B, T, dtype=bool)
TERMS = f"losses.Terms with value and weight [B], here [{B}], and metrics of Share, Spread or Quantile"


@dataclass(frozen=True)
class Context:
    """The settings that a call depends on. Each is read when a call needs it."""

    of: Experiment

    @property
    def loss_call(self) -> _Call:
        """The call of the loss."""
        return _loss(self, self._field("loss"))

    @property
    def advantage_call(self) -> _Call:
        """The call of the advantage."""
        return _advantage(self, self._field("advantage"))

    def _field(self, key: str) -> Field:
        return next(field for field in fields(self.of) if field.key == key)

    @property
    def packed(self) -> bool:
        """Whether advantages are [B, T], and functions are given `segment_ids`."""
        mixed = any(term.of_tokens for term in Passes(self.of).terms)
        of_tokens = self.of.turns.credit == "turn"
        return bool(self.of.schedule.microbatch_tokens) or of_tokens or mixed

    @property
    def segments(self) -> dict[str, np.ndarray]:
        """The keywords that packed rows add to a call."""
        return {"segment_ids": np.ones((B, T), np.int32)} if self.packed else {}

    @property
    def advantage(self) -> jax.ShapeDtypeStruct:
        return _array(B, T) if self.packed else _array(B)


def _loss(context: Context, field: Field) -> _Call:
    options: dict[str, object] = dict(context.segments)
    of, advantage = context.of, context.advantage
    ids: Any = _array(B, T, dtype=jnp.int32)
    given: dict[str, Any] = {"mask_BT": MASK, "advantage": advantage}
    rows: dict[str, Any] = dict.fromkeys(("old_logp_BT", "sampler_logp_BT", "ref_logp_BT", "selected_BT"), LOGP)
    batch: Any = Batch(**dict.fromkeys(("tokens_BT", "segment_BT"), ids), **given, **rows)
    if weighing := [term for term in Passes(of).terms if term.weighs]:
        shapes = [jax.eval_shape(term.weight, LOGP, batch).shape for term in weighing]
        options["correction"] = np.ones(max(shapes, key=len), np.float32)
    if traits_of(field.value).updates:
        options["updates"] = np.int32(0)
    if of.calibration is not None:
        options |= {"clip_low": np.float32(1e-3), "clip_high": np.float32(1e-3)}
    return _Call(field.value, (LOGP, LOGP, advantage, MASK), TERMS, _is_terms, options, differentiated=True)


def _weights(context: Context, field: Field, *middle: jax.ShapeDtypeStruct) -> _Call:
    """Make the call of a correction, or of a rejection, which also takes the advantage."""
    wanted, fits = f"weights [B, T] or [B], here [{B}, {T}] or [{B}]", _has_shape((B, T), (B,))
    if context.packed:
        wanted, fits = f"weights [B, T], here [{B}, {T}]", _has_shape((B, T))
    return _Call(field.value, (LOGP, LOGP, *middle, MASK), wanted, fits, context.segments)


def _selection(context: Context, field: Field) -> _Call:
    def select(value: jax.Array, mask: jax.Array) -> object:
        return field.value(Minibatch(value, value, value, value, mask, jax.random.key(0)))

    return _Call(select, (LOGP, MASK), f"weights [B, T], here [{B}, {T}]", _has_shape((B, T)))


def _kl_loss(context: Context, field: Field) -> _Call:
    aggregate, old_logp = aggregate_of(context.of.loss), np.zeros((B, T), np.float32)
    options = free_keywords(field.value, {"aggregate": aggregate, "old_logp": old_logp, **context.segments})
    return _Call(field.value, (LOGP, LOGP, MASK), TERMS, _is_terms, options, differentiated=True)


def _divergence(context: Context, field: Field) -> _Call:
    logp, wanted = _array(B, T, 2), f"a divergence for each token [B, T], here [{B}, {T}]"
    return _Call(field.value, (logp, logp), wanted, _has_shape((B, T)))


def _kl_estimate(context: Context, field: Field) -> _Call:
    wanted = f"an estimate for each token [B, T], here [{B}, {T}]"
    return _Call(field.value, (LOGP, LOGP, MASK), wanted, _has_shape((B, T)))


def _advantage(context: Context, field: Field) -> _Call:
    sampling, masked = context.of.sampling, context.of.filter_overlong or context.of.turns.credit == "turn"
    shape: tuple[int, ...] = (sampling.prompts, sampling.group)
    if takes_rewards(field.value, (*shape, 2), masked=masked):
        shape = (*shape, 2)  # the number of rewards is only known after the first reward
    return _advantage_call(field.value, shape, masked=masked)


def _advantage_call(advantage: protocols.Advantage, shape: tuple[int, ...], *, masked: bool) -> _Call:
    groups = shape[:2]
    arguments = (_array(*shape), _array(*groups, dtype=bool))[: 1 + masked]
    sizes = {"P": groups[0], "G": groups[1], "N": T}
    given, returned = advantage_axes(advantage)
    options: dict[str, object] = {
        name: np.ones([sizes[axis] for axis in axes], np.float32 if "N" in axes else np.int32)
        for name, axes in given.items()
    }
    wanted = "advantages of tokens [P, G, N]" if "N" in returned else "advantages [P, G]"
    result = tuple(sizes[axis] for axis in returned)
    return _Call(advantage, arguments, f"{wanted}, here {[*result]}", _has_shape(result), options, on_host=True)


def _length_reward(context: Context, field: Field) -> _Call:
    rows = context.of.sampling.prompts * context.of.sampling.group
    lengths = _array(rows, dtype=jnp.int32)
    return _Call(field.value, (lengths,), f"rewards [B], here [{rows}]", _has_shape((rows,)), on_host=True)


def _learning_rate(context: Context, field: Field) -> _Call | None:
    if is_gspax(field.value) and not keywords(field.value):
        return None  # `optimizers.constant`; optax takes longer to import than all checks

    def rate(updates: jax.Array) -> jax.Array:
        assert isinstance(field.owner, Optimizer)
        schedule = field.value(field.owner.learning_rate, field.owner.warmup_updates)
        if not callable(schedule):
            raise _BreachError(
                f"wanted {title_of(field.value)} to return a function of the updates, got {_brief(schedule)}"
            )
        return jnp.asarray(schedule(updates))

    return _Call(rate, (_array(dtype=jnp.int32),), "a function of the updates to a number", _has_shape(()))


def _transform(context: Context, field: Field) -> _Call | None:
    if is_gspax(field.value):
        return None
    import optax

    wanted, kind = "an optax.GradientTransformation", optax.GradientTransformation
    return _Call(lambda: field.value(lambda updates: 1e-3), (), wanted, lambda result: isinstance(result, kind))


_CALLS: dict[Hint, Callable[[Context, Field], _Call | None]] = {
    protocols.Loss: _loss,
    protocols.Correction: _weights,
    protocols.Rejection: lambda context, field: _weights(context, field, context.advantage),
    protocols.Selection: _selection,
    protocols.KLLoss: _kl_loss,
    protocols.KLEstimate: _kl_estimate,
    protocols.Divergence: _divergence,
    protocols.Advantage: _advantage,
    protocols.LengthReward: _length_reward,
    protocols.LearningRate: _learning_rate,
    protocols.Transform: _transform,
}
