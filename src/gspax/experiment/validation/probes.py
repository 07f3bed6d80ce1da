"""A loss and an advantage of the user, computed once with a few numbers: what tracing their shapes cannot show.

gspax's own are tested, and are not called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config.functions import is_gspax, title_of
from gspax.experiment.validation.contracts import Context, example

LOGP = np.array([[-1.0, -2.0, -0.5], [-3.0, -1.5, -0.7]], np.float32)
MASK = np.array([[False, True, True], [False, True, False]])


def probe_advantage(context: Context) -> Iterator[str]:
    """Yield a sentence if the advantage of a valid experiment is not finite for rewards that differ in each group."""
    if is_gspax(advantage := context.of.advantage):
        return
    call = context.advantage_call
    rewards, *masks = map(example, call.arguments)
    given = [0.25 + 0.5 * rewards, *map(np.ones_like, masks)]
    if not np.all(np.isfinite(call.function(*map(jnp.asarray, given), **call.options))):  # a run gives jax's arrays
        yield f"advantage: {title_of(advantage)}: wanted finite numbers for rewards of 0.25 and 0.75, got others"


def probe_loss(context: Context, warn: Callable[[str], None]) -> Iterator[str]:
    """Yield a sentence if the loss, or its gradient, is not finite for log-probs as they usually are.

    Args:
      context: of a valid experiment.
      warn: gets a sentence if no token has a gradient, or if the loss is not finite for unusual log-probs.
    """
    if is_gspax(loss := context.of.loss):
        return
    call = context.loss_call
    advantage = np.broadcast_to(np.array([[1], [-1]], np.float32), (2, 3))
    advantage = advantage if len(call.arguments[2].shape) == 2 else advantage[:, 0]

    @jax.jit
    def evaluate(logp: jax.Array, old_logp: jax.Array) -> tuple[jax.Array, jax.Array]:
        def total(logp: jax.Array) -> jax.Array:
            return call.function(logp, old_logp, advantage, MASK, **call.options).value.sum()

        return jax.value_and_grad(total)(logp)

    def is_finite(logp: np.ndarray) -> bool:
        value, gradient = evaluate(logp, LOGP)
        return bool(np.isfinite(value)) and bool(np.isfinite(gradient)[MASK].all())

    name = f"loss: {title_of(loss)}"
    if not is_finite(LOGP):
        yield f"{name}: wanted a finite value and gradient where the policy has not changed, got others"
        return
    if not np.any(np.asarray(evaluate(LOGP, LOGP)[1])[MASK]):
        warn(f"{name}: its gradient is 0 for every token where the policy has not changed: nothing would be learned")
    if not is_finite(np.where(MASK, LOGP, np.float32(np.nan))):
        warn(
            f"{name}: not finite where log-probs outside the mask are NaN; choose with jnp.where(mask, …, 0) before "
            "anything is computed from them"
        )
    if not is_finite(np.where(MASK & (LOGP == -2.0), np.float32(-np.inf), LOGP)):
        warn(
            f"{name}: not finite where a token's log-prob is -inf, as under a filter that has cut it; such an update "
            "would be skipped"
        )
