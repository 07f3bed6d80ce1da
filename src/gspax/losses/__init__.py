"""GSPO, GRPO and their relatives as pure functions of arrays. Importing this needs jax alone.

Each policy loss gives `Terms`, one value per row, and `reduce` makes the loss and the metrics of them;
`gspo_loss`, `gspo_token_loss` and `grpo_loss` do both. `by_sequence`, `by_token` and `by_constant` are what a loss
takes as `aggregate`. `token_logp` makes log-probabilities of logits. What is not listed here may change.

Beside the policy losses stand five modules, each imported by name (`from gspax.losses import kl`): `kl` (a reference
policy), `correction` (a sampler that is not the learner), `regularizers` (entropy, routers), `calibration` (a clip
range that is measured) and `ratio_spread` (how ratios spread by response length).
"""

from gspax.losses._terms import (
    Aggregate,
    Metrics,
    Quantile,
    Share,
    Spread,
    Terms,
    by_constant,
    by_sequence,
    by_token,
    reduce,
)
from gspax.losses.logprobs import chunked_token_logp, token_logp
from gspax.losses.policy import grpo, grpo_loss, gspo, gspo_loss, gspo_token, gspo_token_loss
from gspax.losses.sequence_policy import gmpo, luspo, vespo
from gspax.losses.token_policy import cispo, dapo, dppo_kl, dppo_tv, dr_grpo, importance_sampling, sapo
from gspax.losses.traits import Traits, has_traits, traits_of

__all__ = [
    "Aggregate",
    "Metrics",
    "Quantile",
    "Share",
    "Spread",
    "Terms",
    "Traits",
    "by_constant",
    "by_sequence",
    "by_token",
    "chunked_token_logp",
    "cispo",
    "dapo",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "gmpo",
    "grpo",
    "grpo_loss",
    "gspo",
    "gspo_loss",
    "gspo_token",
    "gspo_token_loss",
    "has_traits",
    "importance_sampling",
    "luspo",
    "reduce",
    "sapo",
    "token_logp",
    "traits_of",
    "vespo",
]
