"""The optimiser of an experiment, from optax."""

from __future__ import annotations

import optax

from gspax import config


def learning_rate(settings: config.Optimizer) -> optax.Schedule:
    """Linear from 0 over `warmup_updates`, then constant. A function of the updates done."""
    if settings.warmup_updates == 0:
        return optax.constant_schedule(settings.learning_rate)
    return optax.linear_schedule(0.0, settings.learning_rate, settings.warmup_updates)


def make_optimizer(settings: config.Optimizer) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip; weight decay, where set, is on every parameter."""
    adamw = optax.adamw(
        learning_rate(settings),
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    if settings.max_grad_norm == 0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), adamw)
