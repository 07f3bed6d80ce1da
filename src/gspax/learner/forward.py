"""Runs the policy's forward pass: the model, then log-probs and entropies of tokens, on one device or on a mesh.

The head is multiplied with the tokens of the mask only: on each device their hidden states are moved to the front, and
as many chunks are computed as they fill. Nothing of size [tokens, V] exists beyond a chunk; the backward pass computes
a chunk's logits again. Chunks are multiplied in the compute dtype, and the head's gradient is added up in float32.

On a mesh every device computes its own rows and positions, with the head gathered over the model dimension (and sharded
over the vocabulary). The head is gathered once for all chunks; the chunks' contributions to its gradient are
accumulated on each device and reduced over the devices once. Left to the partitioner, both happen for every chunk.

Axes: as in docs/architecture.md; N tokens of a device, K chunks of C tokens, S tokens of a sampling mask (elsewhere K),
X devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspax.config import ModelConfig
from gspax.config.term import Compare, Comparison
from gspax.learner.objective import Outputs
from gspax.losses.logprobs import logp_and_entropy, shift
from gspax.model import transformer
from gspax.model.sizes import logit_chunk
from gspax.model.transformer import cap_logits
from gspax.parallel.sharding import axis_sizes, batch_shards, mesh_axes, own_axes, spec, token_spec
from gspax.types import Array, Params, PyTree

Scored = tuple[Array, Array, PyTree]  # log-probs, entropies, and what a teacher is compared for, float32; else None
Rows = TypeVar("Rows")  # a tree of arrays [B, T, ...]


class Target(NamedTuple):
    """The scored tokens and their sampling masks, with any leading axes."""

    token: Array  # int32; -1 for tokens that are not scored
    kept: Array | None  # [..., S] as in `Batch`; None: the whole vocabulary


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings that the learner's compiled functions share."""

    config: ModelConfig
    mesh: jax.sharding.Mesh  # the arrays are sharded over it
    temperature: float = 1.0  # the sampler's; log-probs are of the logits divided by it
    microbatch_rows: int = 0  # rows of one forward and backward pass, a divisor of the batch's rows; 0: all at once
    # Rows are packed (`packing.pack`): advantages are [B, T], and microbatches without a token are not run. Their
    # number may change without a new compilation.
    packed: bool = False
    worst_case: bool = False  # run every microbatch and every position, so that each loop has a known length
    # Each token goes to the experts in `batch.expert_BLTA`, with the current router's gates (Routing Replay, arXiv
    # 2507.18071).
    routing_replay: bool = False
    updates_per_rollout: int = 1  # for old log-probs that are interpolated
    comparison: Comparison | None = None  # of the policy's logits with another model's
    bias_update_speed: float = 0.0  # `Optimizer.bias_update_speed`


class Inputs(NamedTuple):
    """The rows of a forward pass, as in `Batch`."""

    tokens_BT: Array
    segment_BT: Array
    mask_BT: Array | None = None  # the tokens to compute log-probs and entropies of; None: all
    expert_BLTA: Array | None = None  # the experts that the tokens go to; None: the routers choose
    prefix_BT: Array | None = None
    kept_BTK: Array | None = None  # log-probs and entropies are of the distribution over these tokens; None: over all


class OtherRows(NamedTuple):
    """The heads and hidden states of other models in a pass, for `StepSettings.comparison`."""

    heads: tuple[Params, ...] = ()  # the parameters that `transformer.head` reads, of each model
    hidden_BTE: Array | None = None  # None: there is no other model, and `compare` gets the policy's logits twice
    number_BT: Array | None = None  # float32, of the token's model; None: there is one


NO_OTHERS = OtherRows()


class Scoring(NamedTuple):
    """The settings of the head."""

    temperature: float
    compare: Compare | None
    chunk: int  # tokens at a time on each device
    scores_all: bool  # every token is scored
    cap: float = 0.0  # `ModelConfig.logit_cap`
    other_caps: tuple[float, ...] = ()  # those of the other models


class Heads(NamedTuple):
    """The output projections in the form that `_product` takes."""

    policy_DV: Array  # in the compute dtype, a constant
    summed_DV: Array  # float32; its gradient is the head's
    others: tuple[Array, ...] = ()  # [E, V], constants; E may be less than that of the hidden states


class Hidden(NamedTuple):
    """The last hidden states, [..., D] and [..., E], and the indices of the other models, [..., 1]."""

    policy: Array
    other: Array | None
    number: Array | None


def forward(params: Params, settings: StepSettings, rows: Inputs, others: OtherRows = NO_OTHERS) -> Outputs:
    """Compute log-probs, entropies, and routing of the rows under the policy; the first two are 0 outside the mask.

    Logits exist for one chunk of tokens at a time (`sizes.logit_chunk`) and are recomputed in the backward pass. With
    `settings.worst_case` all log-probs are computed.
    """
    config, mesh = settings.config, settings.mesh
    T, sizes = rows.tokens_BT.shape[1], axis_sizes(mesh)
    mask_BT = None if settings.worst_case else rows.mask_BT
    arrays = rows.tokens_BT, rows.segment_BT, mask_BT, rows.prefix_BT, rows.kept_BTK
    tokens_BT, segment_BT, mask_BT, prefix_BT, kept_BTK = pad_rows(arrays, mesh)
    forced_LBTA = None
    if rows.expert_BLTA is not None:
        fill = (0, tokens_BT.shape[1] - T)
        forced_LBTA = jnp.pad(rows.expert_BLTA.astype(jnp.int32).swapaxes(0, 1), ((0, 0), (0, 0), fill, (0, 0)))
    hidden_BTD, routing = transformer.apply(
        params, config, tokens_BT, segment_BT, prefix_BT=prefix_BT, forced_LBTA=forced_LBTA, mesh=mesh
    )
    chunk = logit_chunk(config, sizes, tokens_BT.size // (batch_shards(sizes) * sizes["context"]))
    others = others._replace(number_BT=pad_rows(others.number_BT, mesh))
    chunk = math.ceil(chunk / (1 + len(others.heads)))  # the logits of as many models
    target_BT = Target(tokens_BT if mask_BT is None else jnp.where(mask_BT, tokens_BT, -1), kept_BTK)
    compare = None if settings.comparison is None else settings.comparison.function
    caps = (config.logit_cap,) * len(others.heads)
    if settings.comparison is not None and settings.comparison.models:
        caps = tuple(model.logit_cap for model in settings.comparison.models)
    scoring = Scoring(settings.temperature, compare, chunk, mask_BT is None, config.logit_cap, caps)
    scored = head_logp(params, hidden_BTD, target_BT, scoring, mesh, others)
    logp_BT, entropy_BT, compared = jax.tree.map(lambda x_BT: x_BT[:, :T], scored)
    routing = routing._replace(expert=routing.expert[:, :, :T], logits=routing.logits[:, :, :T])
    return Outputs(logp_BT, entropy_BT, routing, compared)


def pad_rows(arrays: Rows, mesh: jax.sharding.Mesh) -> Rows:
    """Pad arrays `[B, T, ...]` at the end of T, so that the devices of a row get equal chunks of it."""
    size = mesh.shape["context"]
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2))), arrays)


def head_logp(
    params: Params,
    hidden_BTD: Array,
    target_BT: Target,
    scoring: Scoring,
    mesh: jax.sharding.Mesh,
    others: OtherRows,
) -> Scored:
    """Compute `losses.chunked_token_logp` with the model's head: float32 logp_BT and entropy_BT, and the comparisons.

    Args:
      hidden_BTD: from `transformer.apply`, in the compute dtype.
      mesh: rows and positions are sharded over it by `token_spec`, and must divide evenly.
      others: rows and positions as in `hidden_BTD`.
    """
    numbers, dtype = None if others.number_BT is None else others.number_BT[..., None], hidden_BTD.dtype
    hidden_BT = Hidden(hidden_BTD, others.hidden_BTE, numbers)
    if mesh.size == 1:
        head_DV = transformer.head(params)
        heads = Heads(jax.lax.stop_gradient(head_DV).astype(dtype), head_DV.astype(jnp.float32), _heads(others))
        return shift(partial(_device_logp, scoring, heads, over=()), hidden_BT, target_BT)
    split = own_axes(mesh, "batch") + mesh_axes("time")

    def on_mesh(heads_1: Heads, hidden_BT: Hidden, target_BT: Target) -> Scored:
        return _device_logp(scoring, jax.tree.map(lambda x_1: x_1[0], heads_1), hidden_BT, target_BT, over=split)

    own, into = PartitionSpec(split), token_spec(mesh, *target_BT.token.shape)
    mapped = jax.shard_map(
        on_mesh, mesh=mesh, in_specs=(own, into, into), out_specs=into, axis_names=set(split), check_vma=False
    )
    # In the backward pass the head's gradient is reduced before the layers run, not held whole meanwhile.
    head_DV, hidden_BTD = jax.lax.optimization_barrier((transformer.head(params), hidden_BTD))
    copy = _copier(mesh, split)
    both = copy(jax.lax.stop_gradient(head_DV).astype(dtype)), copy(head_DV.astype(jnp.float32))
    heads = Heads(*both, tuple(map(copy, _heads(others))))
    return shift(partial(mapped, heads), hidden_BT._replace(policy=hidden_BTD), target_BT, keep_length=True)


def _heads(others: OtherRows) -> tuple[Array, ...]:
    """Return the output projections of the other models, in the dtype of their hidden states."""
    if others.hidden_BTE is None:
        return ()
    return tuple(transformer.head(params).astype(others.hidden_BTE.dtype) for params in others.heads)


def _device_logp(
    scoring: Scoring, heads: Heads, hidden_BT: Hidden, target_BT: Target, *, over: tuple[str, ...]
) -> Scored:
    """Compute the log-probs, entropies, and comparisons of a device's targets, 0 where the target is -1.

    All devices of the mesh axes `over` compute the same number of chunks: the vocabulary may be sharded over others,
    and devices that exchange something in a chunk must all compute it.
    """
    (B, T), N, chunk = target_BT.token.shape, target_BT.token.size, scoring.chunk
    wanted_N = target_BT.token.reshape(N) >= 0
    hidden_N, target_N = jax.tree.map(lambda x_BT: x_BT.reshape(N, *x_BT.shape[2:]), (hidden_BT, target_BT))
    target_N = target_N._replace(token=jnp.maximum(target_N.token, 0))

    def only_wanted(x_N: Array) -> Array:
        wanted = wanted_N.reshape(N, *[1] * (x_N.ndim - 1))
        return jnp.where(wanted, x_N, 0).reshape(B, T, *x_N.shape[1:])

    if chunk >= N:
        return jax.tree.map(only_wanted, _chunk_logp(scoring, heads, hidden_N, target_N))
    order_N = jnp.argsort(~wanted_N, stable=True)
    inverse_N = jnp.argsort(order_N)
    K, count = -(-N // chunk), None
    if not scoring.scores_all:
        count = -(-wanted_N.sum(dtype=jnp.int32) // chunk)
        count = jax.lax.pmax(count, over) if over else count

    def split(x: Array) -> Array:
        return jnp.pad(x, ((0, K * chunk - N), *[(0, 0)] * (x.ndim - 1))).reshape(K, chunk, *x.shape[1:])

    hidden_KC = jax.tree.map(lambda x_ND: split(_permute(x_ND, order_N, inverse_N)), hidden_N)
    target_KC = jax.tree.map(lambda x_N: split(x_N[order_N]), target_N)
    scored_KC = _chunks_logp(scoring, heads, hidden_KC, target_KC, count)

    def join(x_KC: Array) -> Array:
        x_N = x_KC.reshape(-1, *x_KC.shape[2:])[:N]
        return only_wanted(_permute(x_N, inverse_N, order_N))

    return jax.tree.map(join, scored_KC)


def _chunk_logp(scoring: Scoring, heads: Heads, hidden_C: Hidden, target_C: Target) -> Scored:
    """Compute log-probs and entropies of one chunk, [C], and `scoring.compare` of its logits, [C, ...]."""
    logits_CV = cap_logits(_product(heads.policy_DV, heads.summed_DV, hidden_C.policy), scoring.cap)
    logp_C, entropy_C = logp_and_entropy(logits_CV, target_C.token, scoring.temperature, target_C.kept)
    if scoring.compare is None:
        return logp_C, entropy_C, None
    other_CV = logits_CV
    if hidden_C.other is not None:
        other_CV = jax.lax.stop_gradient(_other_logits(scoring, heads.others, hidden_C.other, hidden_C.number))
    both_CV = logits_CV / scoring.temperature, other_CV / scoring.temperature
    return logp_C, entropy_C, scoring.compare(*both_CV, *target_C)


def _other_logits(scoring: Scoring, heads: tuple[Array, ...], hidden_CE: Array, number_C1: Array | None) -> Array:
    """Compute float32 logits of each token's other model, [C, V]; of several, the logits of all are computed."""
    with jax.named_scope("teacher_head"):
        logits = [
            cap_logits(jnp.matmul(hidden_CE[:, : len(head_EV)], head_EV, preferred_element_type=jnp.float32), cap)
            for head_EV, cap in zip(heads, scoring.other_caps, strict=True)
        ]
    chosen_CV = logits[0]
    for number, logits_CV in enumerate(logits[1:], 1):
        chosen_CV = jnp.where(number_C1 == number, logits_CV, chosen_CV)
    return chosen_CV


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks_logp(scoring: Scoring, heads: Heads, hidden_KC: Hidden, target_KC: Target, count: Array | None) -> Scored:
    """Compute `_chunk_logp` of the first `count` chunks, [K, C, ...], and 0 for the others. None: all chunks."""

    def step(k: Array, scored_KC: Scored) -> Scored:
        scored_C = _chunk_logp(scoring, heads, *jax.tree.map(lambda x_KC: x_KC[k], (hidden_KC, target_KC)))
        return jax.tree.map(lambda x_KC, x_C: x_KC.at[k].set(x_C), scored_KC, scored_C)

    one = jax.tree.map(lambda x_KC: x_KC[0], (hidden_KC, target_KC))
    shapes = jax.eval_shape(partial(_chunk_logp, scoring, heads), *one)
    empty = jax.tree.map(lambda x_C: jnp.zeros((len(target_KC.token), *x_C.shape), x_C.dtype), shapes)
    return jax.lax.fori_loop(0, len(target_KC.token) if count is None else count, step, empty)


ChunkInputs = tuple[Heads, Hidden, Target, Array | None]  # the arrays that `_chunks_logp` takes


def _chunks_logp_forward(scoring: Scoring, *inputs: PyTree) -> tuple[Scored, tuple[PyTree, ...]]:
    return _chunks_logp(scoring, *inputs), inputs


def _chunks_logp_backward(
    scoring: Scoring, inputs: ChunkInputs, dscored_KC: Scored
) -> tuple[Heads, Hidden, None, None]:
    heads, hidden_KC, target_KC, count = inputs

    def step(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dsummed_DV, dhidden_KCD = carry
        hidden_C, target_C = jax.tree.map(lambda x_KC: x_KC[k], (hidden_KC, target_KC))

        def scored(summed_DV: Array, hidden_CD: Array) -> Scored:
            these = heads._replace(summed_DV=summed_DV), hidden_C._replace(policy=hidden_CD)
            return _chunk_logp(scoring, *these, target_C)

        _, pull = jax.vjp(scored, heads.summed_DV, hidden_C.policy)
        more_DV, dhidden_CD = pull(jax.tree.map(lambda x_KC: x_KC[k], dscored_KC))
        return dsummed_DV + more_DV, dhidden_KCD.at[k].set(dhidden_CD)

    start = jnp.zeros(heads.summed_DV.shape, jnp.float32), jnp.zeros_like(hidden_KC.policy)
    dsummed_DV, dhidden_KCD = jax.lax.fori_loop(0, len(target_KC.token) if count is None else count, step, start)
    nothing: Any = None
    return Heads(nothing, dsummed_DV, nothing), Hidden(dhidden_KCD, None, None), None, None


_chunks_logp.defvjp(_chunks_logp_forward, _chunks_logp_backward)


@jax.custom_vjp
def _permute(x_N: Array, order_N: Array, inverse_N: Array) -> Array:
    """Return x[order]. The gradient is a gather too, by the inverse, where autodiff would scatter."""
    del inverse_N
    return x_N[order_N]


def _permute_forward(x_N: Array, order_N: Array, inverse_N: Array) -> tuple[Array, Array]:
    return x_N[order_N], inverse_N


def _permute_backward(inverse_N: Array, dy_N: Array) -> tuple[Array, None, None]:
    return dy_N[inverse_N], None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _copier(mesh: jax.sharding.Mesh, split: tuple[str, ...]) -> Callable[[Array], Array]:
    """Make a function from a head to one copy per device of `split`: [X, D, V], sharded over X and V.

    The policy's head has one copy in the compute dtype without a gradient, and one in float32 that serves only for its
    gradient, so that it is never materialized: chunks multiply in the compute dtype but accumulate in
    float32, and the sum over copies is computed in shards, each on the device that owns that shard of the head.
    """
    gathered = mesh_axes("embed")
    copied = tuple(axis for axis in split if axis not in gathered)

    def copy(part_DV: Array) -> Array:
        # Before the gather, so that the backward pass reduces shards of the sum over these axes, not all of it.
        part_DV = jax.lax.pcast(part_DV, copied, to="varying")
        return jax.lax.all_gather(part_DV, gathered, tiled=True)[None]

    return jax.shard_map(
        copy, mesh=mesh, in_specs=spec("embed", "vocab"), out_specs=PartitionSpec(split, None, *spec("vocab"))
    )


@jax.custom_vjp
def _product(head_DV: Array, summed_DV: Array, hidden_CD: Array) -> Array:
    """Compute float32 logits hidden · head; the gradient of the head is assigned to `summed_DV`."""
    del summed_DV
    with jax.named_scope("head"):
        return jnp.matmul(hidden_CD, head_DV, preferred_element_type=jnp.float32)


def _product_forward(head_DV: Array, summed_DV: Array, hidden_CD: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(head_DV, summed_DV, hidden_CD), (head_DV, hidden_CD)


def _product_backward(kept: tuple[Array, Array], dlogits_CV: Array) -> tuple[None, Array, Array]:
    head_DV, hidden_CD = kept
    product = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)  # of factors as they are
    with jax.named_scope("head"):
        dhead_DV = product(hidden_CD, dlogits_CV, (((0,), (0,)), ((), ())))
        dhidden_CD = product(dlogits_CV, head_DV, (((1,), (1,)), ((), ())))
    return None, dhead_DV, dhidden_CD.astype(hidden_CD.dtype)


_product.defvjp(_product_forward, _product_backward)
