"""Optimizers and learning-rate schedules that an experiment can name: `Optimizer(transform=optimizers.muon)`.

Any function of a learning-rate schedule that gives an `optax.GradientTransformation` works as `transform`, among them
optax's own (`optax.adafactor`, `optax.lion`, ...). A schedule is a function of (peak, warm-up updates).

Weight decay applies to matrices alone by default (`matrices`). optax is imported when an optimizer is made, so that an
experiment can be loaded, and its cost estimated, without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gspax.config.ranges import Below1, NonNegative, Positive, PositiveInt

if TYPE_CHECKING:
    import optax

    from gspax.types import Array, PyTree


def matrices(params: PyTree) -> PyTree:
    """Return a tree of booleans: True for matrices, stacked ones too; False for norm scales, biases and the embedding.

    The embedding is a table, not a product: decay would shrink the rows of tokens that the data lacks. An untied
    head is a matrix.
    """
    return _map_names(_is_matrix, params)


def everything(params: PyTree) -> PyTree:
    """Return a tree of True: weight decay on every parameter, as in runs before `matrices` became the default."""
    return _map_names(lambda name, leaf: True, params)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: Below1 = 0.9,
    b2: Below1 = 0.95,
    eps: Positive = 1e-8,
    weight_decay: NonNegative = 0.0,
    decayed: Callable[..., object] = matrices,
) -> optax.GradientTransformation:
    """Make AdamW (arXiv 1711.05101). The decay is multiplied by the learning rate.

    Args:
      learning_rate: a number or an `optax.Schedule`.
      decayed: parameters -> a tree of booleans, True for parameters that decay.
    """
    import optax

    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta: Below1 = 0.95,
    b1: Below1 = 0.9,
    b2: Below1 = 0.95,
    eps: Positive = 1e-8,
    weight_decay: NonNegative = 0.0,
    rms: Positive = 0.2,
) -> optax.GradientTransformation:
    """Make Muon (https://kellerjordan.github.io/posts/muon) for the layers' matrices, AdamW for everything else.

    Stacked matrices (layers, experts) are orthogonalized one by one. Their updates are scaled to the root mean square
    of AdamW's updates (arXiv 2502.16982), so that one learning rate serves both.

    Args:
      learning_rate: a number or an `optax.Schedule`, for both.
      beta: the decay rate of Muon's momentum.
      b1, b2: the decay rates of AdamW, for embedding, head, norms and biases.
      weight_decay: the decay of the matrices of the layers.
      rms: root mean square of an update of a matrix at learning rate 1.
    """
    import optax

    return optax.contrib.muon(
        learning_rate,
        beta=beta,
        eps=eps,
        weight_decay=weight_decay,
        adam_b1=b1,
        adam_b2=b2,
        muon_weight_dimension_numbers=_dimensions,
        consistent_rms=rms,
    )


def constant(peak: float, warmup_updates: int) -> optax.Schedule:
    """Make a schedule: linear from 0 over `warmup_updates`, then `peak`."""
    import optax

    return _after_warmup(optax.constant_schedule(peak), peak, warmup_updates)


def linear(peak: float, warmup_updates: int, *, updates: PositiveInt, final: NonNegative = 0.0) -> optax.Schedule:
    """Make a schedule: linear from 0 to `peak` over `warmup_updates`, then linear to `final` times the peak.

    Args:
      peak: the largest learning rate.
      warmup_updates: updates of the warm-up; 0 for none.
      updates: the update at which the rate reaches its final value, warm-up included.
      final: the final rate as a share of the peak.

    Raises:
      ValueError: the warm-up takes all updates.
    """
    import optax

    decay = optax.linear_schedule(peak, final * peak, _decay_updates(warmup_updates, updates))
    return _after_warmup(decay, peak, warmup_updates)


def cosine(peak: float, warmup_updates: int, *, updates: PositiveInt, final: NonNegative = 0.0) -> optax.Schedule:
    """Make a schedule: linear from 0 to `peak`, then half a cosine to `final` times the peak (arXiv 1608.03983).

    Arguments and errors: see `linear`.
    """
    import optax

    decay = optax.cosine_decay_schedule(peak, _decay_updates(warmup_updates, updates), alpha=final)
    return _after_warmup(decay, peak, warmup_updates)


def _decay_updates(warmup_updates: int, updates: int) -> int:
    if updates <= warmup_updates:
        raise ValueError(f"wanted more updates than the warm-up's {warmup_updates}, got updates={updates}")
    return updates - warmup_updates


def _after_warmup(schedule: optax.Schedule, peak: float, warmup_updates: int) -> optax.Schedule:
    """Put a linear warm-up from 0 to the peak before a schedule."""
    import optax

    if warmup_updates == 0:
        return schedule
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_updates), schedule], [warmup_updates])


NO_MATRICES = "embedding", "scale", "bias", "norm", "sinks", "rate", "taps"  # the last words of their names
INPUT_AXES = {"attention/out": 2, "mixer/out": 3}  # axes that a matrix reduces; 1 for all others
OUTPUT_AXES = {  # axes that it makes; 1 for all others
    **{"attention/query": 2, "attention/key": 2, "attention/value": 2, "attention/gate": 2},
    # a gated delta net: its value heads are in groups
    **{"mixer/query": 2, "mixer/key": 2, "mixer/value": 3, "mixer/gate": 3, "mixer/decay": 2, "mixer/beta": 2},
}


def _map_names(function: Callable[[tuple[str, ...], Array], object], params: PyTree) -> PyTree:
    """Return a tree of `function(names on the path, leaf)`."""
    import jax

    def visit(path: tuple[object, ...], leaf: Array) -> object:
        return function(tuple(jax.tree_util.keystr(path, simple=True, separator="/").split("/")), leaf)

    return jax.tree_util.tree_map_with_path(visit, params)


def _is_matrix(names: tuple[str, ...], leaf: Array) -> bool:
    return leaf.ndim >= 2 and names[-1].rpartition("_")[2] not in NO_MATRICES


def _dimensions(params: PyTree) -> PyTree:
    """Return Muon's view of each parameter: the trailing axes that a matrix reduces and makes; None leaves it to AdamW.

    A low-rank pair `a` [..., in, rank], `b` [..., rank, out] has the axes of its matrix on one side.
    """
    import optax

    def view(names: tuple[str, ...], leaf: Array) -> optax.contrib.MuonDimensionNumbers | None:
        if not _is_matrix(names, leaf) or names[-1] == "head":
            return None
        factor = names[-1] if names[-1] in ("a", "b") else ""
        matrix = "/".join((names[:-1] if factor else names)[-2:])
        reduced = 1 if factor == "b" else INPUT_AXES.get(matrix, 1)
        made = 1 if factor == "a" else OUTPUT_AXES.get(matrix, 1)
        first = leaf.ndim - reduced - made
        return optax.contrib.MuonDimensionNumbers(
            tuple(range(first, first + reduced)), tuple(range(first + reduced, leaf.ndim))
        )

    return _map_names(view, params)
