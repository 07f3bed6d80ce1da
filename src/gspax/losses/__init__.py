"""GSPO, GSPO-token and GRPO as pure functions of arrays. Importing this needs jax alone.

`gspo`, `gspo_token` and `grpo` give `Terms`, one value per row, and `reduce` makes the loss and the metrics of them;
`gspo_loss`, `gspo_token_loss` and `grpo_loss` do both. `token_logp` makes log-probabilities of logits. What is not
listed here may change.
"""

from gspax.losses.logprobs import chunked_token_logp, token_logp
from gspax.losses.policy import grpo, grpo_loss, gspo, gspo_loss, gspo_token, gspo_token_loss
from gspax.losses.terms import Share, Spread, Terms, reduce

__all__ = [
    "Share",
    "Spread",
    "Terms",
    "chunked_token_logp",
    "grpo",
    "grpo_loss",
    "gspo",
    "gspo_loss",
    "gspo_token",
    "gspo_token_loss",
    "reduce",
    "token_logp",
]
