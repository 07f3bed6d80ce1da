"""The state of continuous batching: options, samples, slots, and the queue of samples without a slot.

A slot is active (its sample gets a token in each pass), waiting (its sample's turn has ended, and an environment is to
reply) or free. A waiting slot keeps its sample and its cache.

With a slot for every sample there is no queue: slot b has sample b, and all slots are at one position. With fewer,
where groups are admitted, with turns, and with drafts, each slot has a position of its own.

Axes: as in `continuous_batching`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gspax.config import ModelConfig, Sampling
from gspax.model.decoding import Cache
from gspax.parallel.sharding import batch_shards, sample_axis, spec
from gspax.sampler.stops import Matcher
from gspax.types import Array, PyTree

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How prompts are sampled; the sampler's programs are compiled for it."""

    model: ModelConfig
    sampling: Sampling  # `prompts` and `group` are those of a batch (`sampler.split_groups`)
    stop_ids: tuple[int, ...]  # a stop token ends its sample, or its turn, and belongs to it
    mesh: jax.sharding.Mesh
    matcher: Matcher | None = None  # a token that completes a stop string is as a stop token; None: there are none
    greedy: int = 0  # how many of each prompt's samples, the last ones, are greedy, with log-probs at temperature 1
    keep_experts: bool = False  # record the chosen experts
    keep_versions: bool = False  # record the version of the weights that each token was sampled with
    mask_size: int = 0  # K: the most tokens that are recorded of those that each token was chosen from; 0: none
    admits: bool = False  # groups are put in the places of others (`admit`)
    turns: bool = False  # a sample is a conversation, which waits for a reply after a stop token


class Prompts(NamedTuple):
    """Right-padded prompts."""

    tokens_PS: Array  # int32
    length_P: Array  # int32
    id_P: Array  # uint32, of each prompt's first sample; its others have the ids after it
    earlier_PGC: Array | None = None  # int32, with drafts: what followed the prompt in an earlier epoch, then -1
    turn_limit_P: Array | None = None  # int32, the most tokens of a first turn; None: turns have no limits of their own


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """Samples, slots, and the queue (`has_queue`). Indices of samples and prompts count on their own device."""

    # Samples
    prompt_B: Array  # int32
    prompt_length_B: Array  # int32
    id_B: Array  # uint32
    greedy_B: Array | None  # bool     decoded greedily; None: no sample is
    tokens_BC: Array  # int32
    logp_BC: Array  # float32
    sampled_BC: Array | None  # bool     sampled by the policy, not a reply's; None: all tokens are
    length_B: Array  # int32    tokens after the prompt
    finished_B: Array  # bool     complete: ended with a stop token
    stop_state_B: Array | None  # int32    with stop strings, the matcher's state after the sample's last token
    limit_B: Array | None  # int32    the length at which the sample's turn ends without a stop; None: turns have none
    expert_BCLA: Array | None  # uint8 or wider, of the tokens that were decoded; `num_experts` elsewhere
    version_BC: Array | None  # int32
    kept_BCK: Array | None  # uint8 or wider    as in `Rollout`
    cut_BC: Array | None  # bool
    text_BH: Array | None  # int32    with drafts, the texts that they come from (`drafts.join_texts`)
    passes_B: Array | None  # int32    with drafts, as in `Rollout`
    # The queue
    order_B: Array  # int32    queued samples, which have no slot; only the first `queued_Q` count
    queued_Q: Array  # int32
    taken_Q: Array  # int32    of those, the samples that have got a slot since
    # Slots
    sample_W: Array  # int32    the slot's sample; not read where all slots are at one position
    token_W: Array  # int32    the sample's last token, which is not in the cache yet
    length_W: Array  # int32    the sample's tokens after the prompt
    active_W: Array  # bool     the sample gets tokens
    waiting_W: Array  # bool     the sample's turn has ended: it waits for a reply
    accept_rate_W: Array | None  # float32    with `Sampling.draft_cost`, the share of the sample's drafts accepted


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class State:
    """The state of decoding between two tokens."""

    rows: Rows
    step: Array  # int32    decoding passes so far
    cache: Cache
    prompt_expert_PSLA: Array | None  # as `Rows.expert_BCLA`


class Replies(NamedTuple):
    """The replies to the turns that have ended, for each sample."""

    tokens_BX: Array | np.ndarray  # int32
    count_B: Array | np.ndarray  # int32; 0 finishes a waiting sample, -1 lets it wait; the others are left as they are
    turn_limit_B: Array | np.ndarray | None = None  # int32, the most tokens of the next turn, where turns have limits


def has_queue(rows: Rows, options: SampleOptions) -> bool:
    """Return whether slots take samples from a queue. Otherwise slot b has sample b."""
    return len(rows.active_W) < len(rows.length_B) or options.admits or options.turns


def of_samples(rows: Rows, slots_W: Array) -> Array:
    """Mark the samples of these slots, bool [B]."""
    B = len(rows.length_B)
    return jnp.zeros(B, bool).at[jnp.where(slots_W, rows.sample_W, B)].set(True, mode="drop")


def row_axis(mesh: jax.sharding.Mesh, B: int, W: int) -> str:
    """Return the logical axis of samples and slots."""
    return "sample" if sample_axis(mesh, B) == sample_axis(mesh, W) == "sample" else "batch"


def row_shards(mesh: jax.sharding.Mesh, B: int, W: int) -> int:
    """Count the Q devices that have rows of their own."""
    return batch_shards(mesh) * (mesh.shape["context"] if row_axis(mesh, B, W) == "sample" else 1)


def on_devices(function: Callable[..., T], options: SampleOptions, *args: PyTree) -> T:
    """Run `function(*args)` on each device's own rows. The first argument is `Rows`.

    Arguments but scalars, and all results, have a leading axis of rows.
    """
    mesh, rows = options.mesh, args[0]
    if mesh.size == 1:
        return function(*args)
    by_row = spec(row_axis(mesh, len(rows.length_B), len(rows.active_W)))
    specs = jax.tree.map(lambda leaf: by_row if jnp.ndim(leaf) else PartitionSpec(), args)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=by_row, check_vma=False)(*args)
