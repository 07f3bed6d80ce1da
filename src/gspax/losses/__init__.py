"""GSPO, GRPO and their relatives as pure functions of arrays. Importing this needs jax alone.

A policy loss returns `Terms`, one value per row, and `reduce` turns them into the scalar loss and its metrics;
`gspo_loss` does both for GSPO. A loss takes `by_sequence`, `by_token`, or `by_constant` as its `aggregate`.
`token_logp` computes log-probabilities from logits. Names that are not listed here may change.

Nine more modules are imported by name (`from gspax.losses import kl`): `kl` (a KL to a reference policy), `distill` (a
teacher), `correction` (a sampler that differs from the learner), `selection` (tokens chosen from a whole minibatch),
`proximal` (old log-probs without a pass), `sequences` (sums over a sequence's tokens), `regularizers` (entropy,
routers), `calibration` (a measured clip range), and `ratio_spread` (statistics of ratios by response length).
"""

from gspax.losses.grpo_family import cispo, dapo, dppo_kl, dppo_tv, dr_grpo, grpo, importance_sampling, sapo
from gspax.losses.gspo_family import gmpo, gspo, gspo_loss, gspo_token, luspo, vespo
from gspax.losses.logprobs import chunked_token_logp, score_norm, token_logp
from gspax.losses.sampler_family import dis, dro, ipo
from gspax.losses.terms import (
    Aggregate,
    Evenness,
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
from gspax.losses.traits import Traits, has_traits, traits_of

__all__ = [
    "Aggregate",
    "Evenness",
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
    "dis",
    "dppo_kl",
    "dppo_tv",
    "dr_grpo",
    "dro",
    "gmpo",
    "grpo",
    "gspo",
    "gspo_loss",
    "gspo_token",
    "has_traits",
    "importance_sampling",
    "ipo",
    "luspo",
    "reduce",
    "sapo",
    "score_norm",
    "token_logp",
    "traits_of",
    "vespo",
]
