"""The scores of the experts from a router's logits; a dry run imports this without the model."""

from __future__ import annotations

import jax

from gspax.config import Router
from gspax.types import Array


def log_scores(logits: Array, router: Router) -> Array:
    """Compute the log of each expert's score: a softmax over all experts `[..., E]`, or a sigmoid of each logit."""
    return jax.nn.log_sigmoid(logits) if router.scoring == "sigmoid" else jax.nn.log_softmax(logits, axis=-1)


def softmax_logits(logits: Array, router: Router) -> Array:
    """Return logits whose softmax over the experts `[..., E]` is the router's scores over their sum."""
    return jax.nn.log_sigmoid(logits) if router.scoring == "sigmoid" else logits
