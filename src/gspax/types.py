"""The structs that pass between modules hold data only.

Axes: B = P·G rows (prompts x samples, the rows of one prompt adjacent), L sparse layers, T tokens (prompt, completion,
right padding), A active experts, K tokens of a sampling mask. `x_BT[b, t]` is always about `tokens_BT[b, t]`; column 0
is never masked in, because nothing predicts it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Array = jax.Array
PyTree = Any  # arrays, or objects in their stead, in nested tuples, dicts and registered structs
Params = PyTree  # arrays in nested dicts
JsonObject = dict[str, Any]  # a JSON object that was read: whoever uses a value checks it


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their path, such as `runs/0/attention/query`, in the order of the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@enum.unique
class Stream(enum.IntEnum):
    """The streams of random numbers of a run: the number that is folded into its key first."""

    PARAMETERS = 0  # random ones, at the start
    SAMPLING = 1
    EVALUATION = 2
    BENCHMARKS = 3
    SELECTION = 4
    ADAPTERS = 5  # new ones, at the start


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The tokens that the sampler generated, with their log-probs."""

    tokens_BT: Array  # int32    prompt, completion, padding
    mask_BT: Array  # bool     sampled by the policy (the stop token included)
    logp_BT: Array  # float32  log-prob of the token when it was sampled; 0 where not masked in
    prompt_length_B: Array  # int32    tokens in the prompt
    length_B: Array  # int32    tokens after the prompt: the completion, an environment's replies included
    finished_B: Array  # bool     ended with a stop token (False: truncated at the maximum length)
    # uint8 or wider  on request, the experts that the sampler chose; `num_experts` on padding and on the last token
    expert_BLTA: Array | None = None
    reply_B: Array | None = None  # int32    with an environment, the tokens of its replies
    version_BT: Array | None = None  # int32    on request, version of the weights that sampled the token; 0 elsewhere
    source_BT: Array | None = None  # uint16    of servers, the number of the one that sampled it, from 1; 0 elsewhere
    passes_B: Array | None = None  # int32    with drafts, the passes of the model that sampled the tokens
    # int32    where samples are several sequences, as an agent's are, the number of the token's own: 1, 2, ... in this
    # order; 0 on padding. The first token of a sequence is never masked in. None: each sample is one sequence.
    sequence_BT: Array | None = None
    # On request, the sampling mask: the ids of the tokens that the filters left the sampler to choose from, the most
    # probable first, then the vocabulary's size. Log-probs are then over these tokens. Undefined where not masked in.
    kept_BTK: Array | None = None  # uint8 or wider
    cut_BT: Array | None = None  # bool    the filters left more than K tokens, and the sampler dropped the last ones


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """A minibatch: the input of one optimizer update. A field is None until it is known (`known`)."""

    tokens_BT: Array  # int32
    segment_BT: Array  # int32    1, 2, ... the sequence a token belongs to; 0 = padding
    mask_BT: Array  # bool     tokens that the loss is over
    old_logp_BT: Array | None = None  # float32  log-prob under the learner before the rollout's first update
    advantage: Array | None = None  # float32  [B], or [B, T] for packed rows and for advantages of tokens
    # int32    with shared prompts, the segment that a token's own continues (the prompt's); 0: none
    prefix_BT: Array | None = None
    # int32    where samples are several segments: 1, 2, ... the token's own; 0 = padding. None: each is one segment
    sample_BT: Array | None = None
    sampler_logp_BT: Array | None = None  # float32  log-prob under the sampler, for corrections
    ref_logp_BT: Array | None = None  # float32  log-prob under the reference policy
    version_BT: Array | None = None  # int32    as in `Rollout`, where the update interpolates old log-probs
    penalized_BT: Array | None = None  # float32  weights of `Regularizers.kl_cov`
    selected_BT: Array | None = None  # float32  weights of `Experiment.selection`
    sampler_hidden_BTE: Array | None = None  # last hidden states of the policy that sampled, in the compute dtype
    teacher_logp_BT: Array | None = None  # float32  log-prob under the teacher
    teacher_hidden_BTE: Array | None = None  # the teacher's last hidden states, in its compute dtype
    teacher_BT: Array | None = None  # float32  with several teachers whose logits are compared, the token's number
    expert_BLTA: Array | None = None  # uint8 or wider  of the old policy or the sampler; `num_experts` on padding
    router_logp_BLTA: Array | None = None  # float32  the old policy's router log-probs of `expert_BLTA`
    kept_BTK: Array | None = None  # uint8 or wider  as in `Rollout`; all log-probs are over these tokens


MEANING = {
    "old_logp_BT": "log-probs of the old policy (its pass or the first update computes them)",
    "advantage": "advantages",
    "sampler_logp_BT": "log-probs of the sampler",
    "sampler_hidden_BTE": "the last hidden states of the policy that sampled",
    "ref_logp_BT": "log-probs of the reference policy",
    "teacher_logp_BT": "log-probs of the teacher",
    "teacher_hidden_BTE": "the teacher's last hidden states",
    "expert_BLTA": "the experts of the old policy or of the sampler",
    "penalized_BT": "weights of regularizers.kl_cov",
    "router_logp_BLTA": "the old policy's router log-probs",
    "kept_BTK": "the tokens that the sampler chose from",
}


def known(batch: Batch, name: str) -> Array:
    """Return an optional array of a batch. ValueError if it is not known yet."""
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"batch.{name}: wanted {MEANING[name]}, got None")
    return value


def segment_ids(batch: Batch) -> Array | None:
    """Return the samples of a batch with advantages [B, T], of packed rows or of tokens; else None: a row is a sample.

    With one sample in each row they change nothing but the shape of what a loss takes and returns. A sample of several
    sequences has one ratio, over the tokens of all of them.
    """
    if known(batch, "advantage").ndim != 2:
        return None
    return batch.segment_BT if batch.sample_BT is None else batch.sample_BT


def packed(batch: Batch) -> dict[str, Array]:
    """Return `segment_ids` as a keyword argument, or nothing, for the experiment's functions that need not take it."""
    ids = segment_ids(batch)
    return {} if ids is None else {"segment_ids": ids}


class Adapted(NamedTuple):
    """The settings that a run's updates adapt, float32 scalars; 0, which nothing reads, for all other settings."""

    clip_low: Array
    clip_high: Array
    entropy: Array  # the coefficient of the entropy bonus


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a checkpoint stores and a resumed run needs."""

    step: Array  # int32    optimizer updates done, skipped ones included
    position: Array  # int32    training problems consumed
    key: Array  # PRNG key of the run; never advanced, only folded
    params: Params
    opt_state: PyTree
    adapted: Adapted
    teacher: Params = None  # the trained parameters of a teacher that is an earlier policy
