"""A call of every public function of the losses and the advantages, for the laws of meshes and of impossible tokens.

A call takes the arrays of `ARRAYS` by name. The first axis with the letter B, of rows, or P, of prompts, is what a mesh
shards, and the letter T is that of the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspax import advantages, losses
from gspax.losses import (
    calibration,
    correction,
    distill,
    kl,
    masked,
    proximal,
    ratio_spread,
    regularizers,
    router_shift,
    selection,
    sequences,
    shaping,
)

MODULES = (
    *(advantages, calibration, correction, distill, kl, masked, proximal, ratio_spread),
    *(regularizers, router_shift, selection, sequences, shaping),
)
B = T = 8
V, D, K, L, E, A, G, R, N = 6, 4, 3, 2, 4, 2, 4, 2, 3

AXES = {  # the letters of each array's axes
    **dict.fromkeys(("logp", "old_logp", "ref_logp", "entropy", "advantage_BT", "factor_BT", "age", "tokens"), "BT"),
    **dict.fromkeys(("mask", "segment_ids", "flag"), "BT"),
    **dict.fromkeys(("advantage", "factor", "length", "reward_B", "group_B", "truncated"), "B"),
    **dict.fromkeys(("logits", "other_logits"), "BTV"),
    **dict.fromkeys(("hidden", "other_hidden"), "BTD"),
    **dict.fromkeys(("kept", "kept_logp", "other_kept_logp"), "BTK"),
    **dict.fromkeys(("router_logits", "router_prob"), "LBTE"),
    **dict.fromkeys(("router_logp", "old_router_logp"), "BLTA"),
    **dict.fromkeys(("reward", "length_PG", "mask_PG"), "PG"),
    **{"reward_PGR": "PGR", "norm": "PGN", "reward_PGK": "PGN", "mask_PGK": "PGN", "load": "LE", "project": "DV"},
}


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"B": B, "T": T, "V": V, "D": D, "K": K, "L": L, "E": E, "A": A, "P": B, "G": G, "R": R, "N": N}
    shapes = {name: tuple(sizes[axis] for axis in axes) for name, axes in AXES.items()}
    x: dict[str, np.ndarray] = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name in ("logp", "old_logp", "ref_logp", "kept_logp", "other_kept_logp", "router_logp", "old_router_logp"):
        x[name] = -0.1 - np.abs(x[name])
    x["old_logp"] = np.minimum(x["logp"] + 0.3 * x["old_logp"] + 0.2, -0.01)
    for name in ("entropy", "factor", "factor_BT", "router_prob", "load", "reward", "norm", "reward_PGR"):
        x[name] = np.abs(x[name])
    x["mask"] = rng.random((B, T)) < 0.7
    x["mask"][:, 0], x["mask"][:, 1], x["mask"][5] = False, True, False  # one row is empty
    x["flag"] = rng.random((B, T)) < 0.5
    x["segment_ids"] = np.where(rng.random((B, T)) < 0.9, 1 + np.arange(T)[None] // 3, 0).astype(np.int32)
    x["tokens"] = rng.integers(0, V, (B, T)).astype(np.int32)
    x["age"] = rng.integers(0, 3, (B, T)).astype(np.int32)
    x["kept"] = np.argsort(rng.random((B, T, V)), axis=-1)[..., :K].astype(np.int32)
    x["length"] = rng.integers(1, 9, B).astype(np.int32)
    x["length_PG"] = rng.integers(1, N + 1, (B, G)).astype(np.int32)
    x["group_B"] = np.array([3, 1, 3, 1, 2, 2, 7, 3], np.int32)
    x["truncated"] = rng.random(B) < 0.3
    x["mask_PG"] = rng.random((B, G)) < 0.8
    x["mask_PGK"] = np.arange(N)[None, None] < x["length_PG"][..., None]
    return x


ARRAYS = _arrays()
Call = Callable[[Any], Any]  # a namespace of arrays -> a tree of arrays


def _packed(name: str, function: Callable[..., Any], *names: str, **keywords: Any) -> dict[str, Call]:
    """Of rows and of packed rows; an advantage is then one of tokens."""

    def call(x: Any, segments: Any) -> Any:
        packed = {} if segments is None else {"segment_ids": segments}
        of = [n if segments is None or n != "advantage" else "advantage_BT" for n in names]
        return function(*(getattr(x, n) for n in of), **keywords, **packed)

    return {name: lambda x: call(x, None), f"{name}, packed": lambda x: call(x, x.segment_ids)}


def _kept(x: Any) -> distill.Kept:
    return distill.Kept(x.kept_logp, x.other_kept_logp, x.flag)


def _minibatch(x: Any) -> selection.Minibatch:
    return selection.Minibatch(x.logp, x.old_logp, x.entropy, x.advantage_BT, x.mask, jax.random.key(0))


def _project(x: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda hidden: hidden @ x.project


def _segments(x: Any) -> tuple[Any, Any]:
    return x.mask & (x.segment_ids > 0), x.segment_ids


POLICY = {name: f for name, f in vars(losses).items() if isinstance(getattr(f, "traits", None), losses.Traits)}
PAIR, RATIO = ("logp", "ref_logp", "mask"), ("old_logp", "ref_logp", "mask")

CALLS: dict[str, Call] = {
    **{
        name: functools.partial(lambda f, x: f(x.logp, x.old_logp, x.advantage, x.mask, correction=x.factor), loss)
        for name, loss in POLICY.items()
    },
    **{
        f"{loss.__name__}, packed": functools.partial(
            lambda f, x: f(
                x.logp, x.old_logp, x.advantage_BT, x.mask, correction=x.factor_BT, segment_ids=x.segment_ids
            ),
            loss,
        )
        for loss in (losses.gspo, losses.gspo_token, losses.grpo, losses.gmpo, losses.vespo)
    },
    **_packed("gspo_loss", losses.gspo_loss, "logp", "old_logp", "advantage", "mask"),
    **{
        name: call
        for f in (losses.by_sequence, losses.by_token, losses.by_constant)
        for name, call in _packed(f.__name__, f, "logp", "mask").items()
    },
    "reduce": lambda x: losses.reduce(losses.grpo(x.logp, x.old_logp, x.advantage, x.mask)),
    "reduce, packed": lambda x: losses.reduce(
        losses.grpo(x.logp, x.old_logp, x.advantage_BT, x.mask, segment_ids=x.segment_ids)
    ),
    "token_logp": lambda x: losses.token_logp(x.logits, x.tokens, temperature=0.7),
    "token_logp, kept": lambda x: losses.token_logp(x.logits, x.tokens, kept_BTK=x.kept),
    "chunked_token_logp": lambda x: losses.chunked_token_logp(_project(x), x.hidden, x.tokens, chunk=3),
    "chunked_token_logp, whole": lambda x: losses.chunked_token_logp(_project(x), x.hidden, x.tokens, chunk=T),
    "chunked_token_logp, kept": lambda x: losses.chunked_token_logp(
        _project(x), x.hidden, x.tokens, kept_BTK=x.kept, chunk=3
    ),
    "score_norm": lambda x: losses.score_norm(x.logits, x.tokens),
    "score_norm, kept": lambda x: losses.score_norm(x.logits, x.tokens, x.kept),
    # kl
    **{
        f"kl.{f.__name__}": functools.partial(lambda f, x: f(x.logp, x.ref_logp, x.mask), f)
        for f in (kl.k1, kl.k2, kl.k3)
    },
    **_packed("kl.token_kl", kl.token_kl, *PAIR),
    "kl.token_kl, old": lambda x: kl.token_kl(x.logp, x.ref_logp, x.mask, old_logp=x.old_logp),
    **_packed("kl.sequence_kl", kl.sequence_kl, *PAIR),
    **_packed("kl.grpo_kl", kl.grpo_kl, *PAIR),
    "kl.add_penalty": lambda x: losses.reduce(
        kl.add_penalty(
            losses.gspo(x.logp, x.old_logp, x.advantage, x.mask),
            kl.token_kl(x.logp, x.ref_logp, x.mask),
            coefficient=0.1,
        )
    ),
    # correction
    **_packed("correction.truncate_tokens", correction.truncate_tokens, *RATIO),
    **_packed("correction.truncate_sequences", correction.truncate_sequences, *RATIO),
    **_packed("correction.truncate_geometric", correction.truncate_geometric, *RATIO),
    **_packed("correction.mask_tokens", correction.mask_tokens, *RATIO),
    **_packed("correction.mask_sequences", correction.mask_sequences, *RATIO, low=0.5, high=2.0),
    **_packed("correction.reject_geometric", correction.reject_geometric, *RATIO, low=0.5, high=2.0),
    **_packed("correction.reject_tokens", correction.reject_tokens, *RATIO, high=0.1),
    **_packed("correction.reject_sequences", correction.reject_sequences, *RATIO, high=0.1),
    **_packed(
        "correction.reject_sequences, largest", correction.reject_sequences, *RATIO, high=0.1, over=sequences.largest
    ),
    **_packed(
        "correction.product",
        correction.product,
        *RATIO,
        factors=(correction.truncate_tokens, functools.partial(correction.reject_geometric, low=0.5, high=2.0)),
    ),
    "correction.multiplied": lambda x: correction.multiplied([x.factor, x.factor_BT]),
    **_packed(
        "correction.reject_off_policy", correction.reject_off_policy, "logp", "ref_logp", "advantage", "mask", delta=0.1
    ),
    "correction.weight_metrics": lambda x: correction.weight_metrics(x.factor, x.mask),
    "correction.weight_metrics, packed": lambda x: correction.weight_metrics(x.factor_BT, x.mask, x.segment_ids),
    **_packed("correction.mismatch_metrics", correction.mismatch_metrics, *RATIO),
    **_packed("correction.mismatch_by_position", correction.mismatch_by_position, *RATIO),
    "correction.effective_sample_sizes": lambda x: correction.effective_sample_sizes(
        losses.reduce(losses.Terms(x.advantage, x.factor, correction.mismatch_metrics(x.old_logp, x.ref_logp, x.mask)))[
            1
        ]
    ),
    # selection and the rest
    **{
        f"selection.{f.__name__}": functools.partial(lambda f, x: f(_minibatch(x)), f)
        for f in (selection.second_moment,)
    },
    **{
        f"selection.{f.__name__}": functools.partial(lambda f, x: f(_minibatch(x), share=0.3), f)
        for f in (selection.top_entropy, selection.clip_cov, selection.top_cov)
    },
    "proximal.interpolated_logp": lambda x: proximal.interpolated_logp(x.logp, x.old_logp, x.age, 0.5),
    **_packed("regularizers.entropy_bonus", regularizers.entropy_bonus, "entropy", "mask"),
    "regularizers.next_coefficient": lambda x: regularizers.next_coefficient(0.1, masked.mean(x.entropy, x.mask)),
    **_packed("regularizers.log_ratio_square", regularizers.log_ratio_square, *PAIR),
    **_packed("regularizers.log_ratio_size", regularizers.log_ratio_size, "logp", "old_logp", "factor_BT", "mask"),
    **_packed("regularizers.load_balance", regularizers.load_balance, "router_prob", "load", "mask"),
    **_packed("regularizers.router_z", regularizers.router_z, "router_logits", "mask"),
    "router_shift.log_factor": lambda x: router_shift.log_factor(x.router_logp, x.old_router_logp, x.mask),
    "shaping.response_length": lambda x: shaping.response_length(x.mask),
    "shaping.soft_overlong_punishment": lambda x: shaping.soft_overlong_punishment(x.length, max_length=8, buffer=4),
    "shaping.filter_overlong": lambda x: shaping.filter_overlong(x.mask, x.truncated),
    "calibration.range_metrics": lambda x: losses.reduce(
        losses.Terms(
            x.advantage,
            x.factor,
            calibration.range_metrics(
                x.logp, x.old_logp, x.advantage, x.mask, clipped=losses.Share(x.factor, x.factor), share=0.15
            ),
        )
    ),
    **{
        "calibration.range_metrics, packed": lambda x: losses.reduce(
            losses.Terms(
                x.advantage,
                x.factor,
                calibration.range_metrics(
                    x.logp,
                    x.old_logp,
                    x.advantage_BT,
                    x.mask,
                    clipped=losses.Share(x.factor, x.factor),
                    share=0.15,
                    segment_ids=x.segment_ids,
                ),
            )
        )
    },
    **_packed("ratio_spread.ratio_spread", ratio_spread.ratio_spread, "logp", "old_logp", "mask"),
    **_packed("ratio_spread.ratio_metrics", ratio_spread.ratio_metrics, "logp", "old_logp", "mask"),
    # distill
    "distill.reverse_kl": lambda x: distill.reverse_kl(x.logp, x.ref_logp, x.mask, _kept(x), old_logp=x.old_logp),
    "distill.reverse_kl, packed": lambda x: distill.reverse_kl(
        x.logp, x.ref_logp, x.mask, _kept(x), segment_ids=x.segment_ids
    ),
    "distill.select_logp": lambda x: distill.select_logp(x.logits, x.kept),
    **{
        f"distill.{f.__name__}": functools.partial(
            lambda f, x: f(jax.nn.log_softmax(x.logits), jax.nn.log_softmax(x.other_logits)), f
        )
        for f in (distill.full_reverse_kl, distill.full_forward_kl)
    },
    "distill.jensen_shannon": lambda x: distill.jensen_shannon(
        jax.nn.log_softmax(x.logits), jax.nn.log_softmax(x.other_logits), beta=0.3
    ),
    "distill.chunked_divergence": lambda x: distill.chunked_divergence(
        distill.full_reverse_kl, _project(x), x.hidden, _project(x), x.other_hidden, chunk=3
    ),
    **_packed("distill.mean_divergence", distill.mean_divergence, "entropy", "mask"),
    "distill.mixed_advantage": lambda x: distill.mixed_advantage(x.advantage, x.logp, x.ref_logp, x.mask),
    # sums
    **{
        f"masked.{f.__name__}": functools.partial(lambda f, x: (f(x.logp, x.mask), f(x.logp, x.mask, axis=-1)), f)
        for f in (masked.sum, masked.mean, masked.min, masked.max)
    },
    "sequences.response": lambda x: sequences.response(x.mask, x.segment_ids),
    **{
        f"sequences.{f.__name__}": functools.partial(
            lambda f, x: (f(x.logp, x.mask, None), f(x.logp, *_segments(x))), f
        )
        for f in (sequences.total, sequences.mean, sequences.largest)
    },
    "sequences.count": lambda x: (sequences.count(x.mask, None), sequences.count(*_segments(x))),
    "sequences.at_tokens": lambda x: sequences.at_tokens(sequences.total(x.logp, *_segments(x)), x.segment_ids),
    "sequences.to_go": lambda x: (
        sequences.to_go(x.logp, None),
        sequences.to_go(jnp.where(x.mask, x.logp, 0), x.segment_ids),
    ),
    "sequences.by_row_or_token": lambda x: (
        sequences.by_row_or_token(sequences.mean(x.logp, x.mask, None), x.mask, None),
        sequences.by_row_or_token(sequences.mean(x.logp, *_segments(x)), *_segments(x)),
    ),
    # advantages
    **{
        f"advantages.{f.__name__}": functools.partial(lambda f, x: (f(x.reward), f(x.reward, x.mask_PG)), f)
        for f in (
            advantages.standardize,
            advantages.center,
            advantages.leave_one_out,
            advantages.reinforce_plus_plus,
            advantages.reinforce_plus_plus_baseline,
            advantages.maxrl,
            advantages.best_of_group,
            advantages.constant_groups,
        )
    },
    "advantages.gdpo": lambda x: advantages.gdpo(x.reward_PGR, x.mask_PG),
    "advantages.opo": lambda x: advantages.opo(x.reward, x.mask_PG, length_PG=x.length_PG),
    "advantages.otb": lambda x: advantages.otb(x.reward, x.mask_PG, length_PG=x.length_PG, score_norm_PGN=x.norm),
    "advantages.by_group": lambda x: advantages.by_group(advantages.standardize, x.reward_B, x.group_B),
    "advantages.by_group, size": lambda x: advantages.by_group(advantages.center, x.reward_B, x.group_B, size=4),
    "advantages.by_turn": lambda x: advantages.by_turn(advantages.center, x.reward_PGK, x.mask_PGK),
}
