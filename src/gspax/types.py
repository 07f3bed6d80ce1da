"""The structs that pass between modules: data only.

Axes: B = P·G rows (prompts x samples, the rows of one prompt adjacent), L sparse layers, T tokens (prompt, completion,
right padding), A active experts. `x_BT[b, t]` is always about `tokens_BT[b, t]`; column 0 is never masked in, because
nothing predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

Array = jax.Array
Params = Any  # a nested dict of arrays
PyTree = Any  # of arrays or of what stands for them, as jax.tree has it
JsonObject = dict[str, Any]  # a JSON object that was read: whoever uses a value checks it


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What the sampler returns."""

    tokens_BT: Array  # int32    prompt, completion, padding
    mask_BT: Array  # bool     sampled by the policy (the stop token included)
    logp_BT: Array  # float32  log-prob of the token when it was sampled; 0 where not masked in
    prompt_length_B: Array  # int32    tokens in the prompt
    length_B: Array  # int32    tokens after the prompt: the completion, an environment's replies included
    finished_B: Array  # bool     ended with a stop token (False: truncated at the maximum length)
    # uint8 or wider  on request, the experts that the sampler chose; `num_experts` on padding and on the last token
    expert_BLTA: Array | None = None
    reply_B: Array | None = None  # int32    with an environment, those of them that are its replies
    version_BT: Array | None = None  # int32    on request, the version of the weights that drew the token; 0 elsewhere


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """A minibatch: what one optimiser update reads."""

    tokens_BT: Array  # int32
    segment_BT: Array  # int32    1, 2, ... the sequence a token belongs to; 0 = padding
    mask_BT: Array  # bool     tokens that the loss is over
    old_logp_BT: Array  # float32  log-prob under the learner before the rollout batch's first update
    advantage: Array  # float32  [B], or [B, T] for packed rows and for advantages of tokens
    # int32    with shared prompts, the segment that a token's own continues (the prompt's); 0: none
    prefix_BT: Array | None = None
    sampler_logp_BT: Array | None = None  # float32  log-prob under the sampler, for corrections
    ref_logp_BT: Array | None = None  # float32  log-prob under the reference policy
    expert_BLTA: Array | None = None  # uint8 or wider  of the old policy or the sampler; `num_experts` on padding
    router_logp_BLTA: Array | None = None  # float32  the old policy's router log-probs of `expert_BLTA`


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a checkpoint stores and a resumed run needs."""

    step: Array  # int32    optimiser updates done, skipped ones included
    position: Array  # int32    training problems consumed
    key: Array  # PRNG key of the run; never advanced, only folded
    params: Params
    opt_state: Any
    clip_range: Array  # float32 [2]  clip_low, clip_high if they are calibrated; otherwise zeros that nothing reads
