"""The policy's forward pass: the model, then log-probs and entropies of tokens, on one device or on a mesh.

The head is multiplied with the tokens of the mask only: on each device their hidden states are moved to the front, and
as many chunks are computed as they fill. Nothing of size [tokens, V] exists beyond a chunk; the backward pass computes
a chunk's logits again. Chunks are multiplied in the compute dtype, and the head's gradient is added up in float32.

On a mesh every device computes its own rows and positions, with the head gathered over the model dimension (and sharded
over the vocabulary). The head is gathered once for all chunks; the chunks' contributions to its gradient are
accumulated on each device and reduced over the devices once. Left to the partitioner, both happen for every chunk.

Axes: as in docs/architecture.md; N tokens of a device, K chunks of C tokens, X devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspax.config import ModelConfig
from gspax.learner.objective import Outputs
from gspax.losses.logprobs import logp_and_entropy, shift
from gspax.model import transformer
from gspax.model.sizes import logit_chunk
from gspax.parallel.sharding import axis_sizes, batch_shards, mesh_axes, own_axes, spec, token_spec
from gspax.types import Array, Params

LogpEntropy = tuple[Array, Array]  # log-probs and entropies, float32
Rows = TypeVar("Rows")  # a tree of arrays [B, T]


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings that the learner's compiled functions share."""

    config: ModelConfig
    mesh: jax.sharding.Mesh  # that the arrays are sharded over
    temperature: float = 1.0  # the sampler's; log-probs are of the logits divided by it
    microbatch_rows: int = 0  # rows of one forward and backward pass, a divisor of the batch's rows; 0: all at once
    # Rows are packed (`minibatches.pack`): advantages are [B, T], and microbatches without a token are not run. Their
    # number may change without a new compilation.
    packed: bool = False
    worst_case: bool = False  # run every microbatch and every position, so that each loop has a known length
    # Each token goes to the experts in `batch.expert_BLTA`, with the current router's gates (Routing Replay, arXiv
    # 2507.18071).
    routing_replay: bool = False
    updates_per_rollout: int = 1  # for old log-probs that are interpolated


def forward(
    params: Params,
    settings: StepSettings,
    tokens_BT: Array,
    segment_BT: Array,
    *,
    mask_BT: Array | None = None,
    expert_BLTA: Array | None = None,
    prefix_BT: Array | None = None,
) -> Outputs:
    """Log-probs, entropies, and routing of these tokens under the policy.

    Logits exist for one chunk of tokens at a time (`sizes.logit_chunk`) and are recomputed in the backward pass.

    Args:
      mask_BT: the tokens whose log-probs and entropies are computed; they are 0 elsewhere. None, or `worst_case`: all.
      expert_BLTA: the experts that the tokens go to; None: those that the routers choose.
      prefix_BT: as for `transformer.apply`.
    """
    config, mesh = settings.config, settings.mesh
    T, sizes = tokens_BT.shape[1], axis_sizes(mesh)
    mask_BT = None if settings.worst_case else mask_BT
    tokens_BT, segment_BT, mask_BT, prefix_BT = pad_rows((tokens_BT, segment_BT, mask_BT, prefix_BT), mesh)
    forced_LBTA = None
    if expert_BLTA is not None:
        fill = (0, tokens_BT.shape[1] - T)
        forced_LBTA = jnp.pad(expert_BLTA.astype(jnp.int32).swapaxes(0, 1), ((0, 0), (0, 0), fill, (0, 0)))
    hidden_BTD, routing = transformer.apply(
        params, config, tokens_BT, segment_BT, prefix_BT=prefix_BT, forced_LBTA=forced_LBTA, mesh=mesh
    )
    chunk = logit_chunk(config, sizes, tokens_BT.size // (batch_shards(sizes) * sizes["context"]))
    both = head_logp(
        params, hidden_BTD, tokens_BT, temperature=settings.temperature, chunk=chunk, mask_BT=mask_BT, mesh=mesh
    )
    logp_BT, entropy_BT = (x_BT[:, :T] for x_BT in both)
    routing = routing._replace(expert=routing.expert[:, :, :T], logits=routing.logits[:, :, :T])
    return Outputs(logp_BT, entropy_BT, routing)


def pad_rows(arrays: Rows, mesh: jax.sharding.Mesh) -> Rows:
    """The arrays `[B, T]` with padding at the end, so that the devices of a row have equal chunks of it."""
    size = mesh.shape["context"]
    return jax.tree.map(lambda x_BT: jnp.pad(x_BT, ((0, 0), (0, -x_BT.shape[1] % size))), arrays)


def head_logp(
    params: Params,
    hidden_BTD: Array,
    tokens_BT: Array,
    *,
    temperature: float,
    chunk: int,
    mesh: jax.sharding.Mesh,
    mask_BT: Array | None = None,
) -> LogpEntropy:
    """`losses.chunked_token_logp` with the model's head: logp_BT and entropy_BT, float32.

    Args:
      hidden_BTD: from `transformer.apply`, in the compute dtype.
      chunk: tokens at a time on each device.
      mask_BT: as for `forward`.
      mesh: rows and positions are sharded over it by `token_spec`, and must divide evenly.
    """
    target_BT = tokens_BT if mask_BT is None else jnp.where(mask_BT, tokens_BT, -1)
    on_device = partial(_device_logp, temperature=temperature, chunk=chunk, all_of_them=mask_BT is None)
    if mesh.size == 1:
        head_DV = transformer.head(params)
        copies = jax.lax.stop_gradient(head_DV).astype(hidden_BTD.dtype), head_DV.astype(jnp.float32)
        return shift(partial(on_device, *copies, over=()), hidden_BTD, target_BT)
    split = own_axes(mesh, "batch") + mesh_axes("time")

    def on_mesh(head_1DV: Array, summed_1DV: Array, hidden_BTD: Array, target_BT: Array) -> LogpEntropy:
        return on_device(head_1DV[0], summed_1DV[0], hidden_BTD, target_BT, over=split)

    own, into = PartitionSpec(split), token_spec(mesh, *tokens_BT.shape)
    mapped = jax.shard_map(
        on_mesh, mesh=mesh, in_specs=(own, own, into, into), out_specs=into, axis_names=set(split), check_vma=False
    )
    # In the backward pass the head's gradient is reduced before the layers run, not held whole meanwhile.
    head_DV, hidden_BTD = jax.lax.optimization_barrier((transformer.head(params), hidden_BTD))
    copies = _copies(head_DV, hidden_BTD.dtype, mesh, split)
    return shift(partial(mapped, *copies), hidden_BTD, target_BT, keep_length=True)


def _device_logp(
    head_DV: Array,
    summed_DV: Array,
    hidden_BTD: Array,
    target_BT: Array,
    *,
    temperature: float,
    chunk: int,
    all_of_them: bool,
    over: tuple[str, ...],
) -> LogpEntropy:
    """Log-probs and entropies of a device's targets, 0 where the target is -1.

    All devices of the mesh axes `over` compute the same number of chunks: the vocabulary may be sharded over others,
    and devices that exchange something in a chunk must all compute it.
    """
    (B, T, D), N = hidden_BTD.shape, target_BT.size
    wanted_N = target_BT.reshape(N) >= 0
    hidden_ND, token_N = hidden_BTD.reshape(N, D), jnp.maximum(target_BT.reshape(N), 0)
    if chunk >= N:
        both_N = _chunk_logp(temperature, head_DV, summed_DV, hidden_ND, token_N)
        return jax.tree.map(lambda x_N: jnp.where(wanted_N, x_N, 0).reshape(B, T), both_N)
    order_N = jnp.argsort(~wanted_N, stable=True)
    inverse_N = jnp.argsort(order_N)
    K, count = -(-N // chunk), None
    if not all_of_them:
        count = -(-wanted_N.sum(dtype=jnp.int32) // chunk)
        count = jax.lax.pmax(count, over) if over else count

    def split(x: Array) -> Array:
        return jnp.pad(x, ((0, K * chunk - N), *[(0, 0)] * (x.ndim - 1))).reshape(K, chunk, *x.shape[1:])

    hidden_KCD = split(_permute(hidden_ND, order_N, inverse_N))
    both_KC = _chunks_logp(temperature, head_DV, summed_DV, hidden_KCD, split(token_N[order_N]), count)

    def join(x_KC: Array) -> Array:
        return jnp.where(wanted_N, _permute(x_KC.reshape(-1)[:N], inverse_N, order_N), 0).reshape(B, T)

    return jax.tree.map(join, both_KC)


def _chunk_logp(temperature: float, head_DV: Array, summed_DV: Array, hidden_CD: Array, token_C: Array) -> LogpEntropy:
    """Log-probs and entropies of one chunk, [C]."""
    return logp_and_entropy(_product(head_DV, summed_DV, hidden_CD), token_C, temperature)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunks_logp(
    temperature: float, head_DV: Array, summed_DV: Array, hidden_KCD: Array, token_KC: Array, count: Array | None
) -> LogpEntropy:
    """Log-probs and entropies of the first `count` chunks, [K, C], and 0 for the others. None: all."""

    def step(k: Array, both_KC: LogpEntropy) -> LogpEntropy:
        both_C = _chunk_logp(temperature, head_DV, summed_DV, hidden_KCD[k], token_KC[k])
        return jax.tree.map(lambda x_KC, x_C: x_KC.at[k].set(x_C), both_KC, both_C)

    empty = jnp.zeros(token_KC.shape, jnp.float32)
    return jax.lax.fori_loop(0, len(token_KC) if count is None else count, step, (empty, empty))


ChunkInputs = tuple[Array, Array, Array, Array, Array | None]  # the arrays that `_chunks_logp` takes


def _chunks_logp_forward(temperature: float, *inputs: Array) -> tuple[LogpEntropy, tuple[Array, ...]]:
    return _chunks_logp(temperature, *inputs), inputs


def _chunks_logp_backward(
    temperature: float, inputs: ChunkInputs, dboth_KC: LogpEntropy
) -> tuple[None, Array, Array, None, None]:
    head_DV, summed_DV, hidden_KCD, token_KC, count = inputs

    def step(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dsummed_DV, dhidden_KCD = carry

        def both(summed_DV: Array, hidden_CD: Array) -> LogpEntropy:
            return _chunk_logp(temperature, head_DV, summed_DV, hidden_CD, token_KC[k])

        _, pull = jax.vjp(both, summed_DV, hidden_KCD[k])
        more_DV, dhidden_CD = pull(jax.tree.map(lambda x_KC: x_KC[k], dboth_KC))
        return dsummed_DV + more_DV, dhidden_KCD.at[k].set(dhidden_CD)

    start = jnp.zeros(summed_DV.shape, jnp.float32), jnp.zeros_like(hidden_KCD)
    dsummed_DV, dhidden_KCD = jax.lax.fori_loop(0, len(token_KC) if count is None else count, step, start)
    return None, dsummed_DV, dhidden_KCD, None, None


_chunks_logp.defvjp(_chunks_logp_forward, _chunks_logp_backward)


@jax.custom_vjp
def _permute(x_N: Array, order_N: Array, inverse_N: Array) -> Array:
    """x[order]. Its gradient is a gather too, by the inverse, where autodiff would scatter."""
    del inverse_N
    return x_N[order_N]


def _permute_forward(x_N: Array, order_N: Array, inverse_N: Array) -> tuple[Array, Array]:
    return x_N[order_N], inverse_N


def _permute_backward(inverse_N: Array, dy_N: Array) -> tuple[Array, None, None]:
    return dy_N[inverse_N], None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _copies(head_DV: Array, dtype: jnp.dtype, mesh: jax.sharding.Mesh, split: tuple[str, ...]) -> tuple[Array, Array]:
    """Two arrays of one copy of the head for each of the X devices of `split`: [X, D, V], sharded over X and V.

    The first is in `dtype` and has no gradient. Only the gradient of the second, in float32, is used, so the array
    itself is never materialized: chunks multiply in the compute dtype but accumulate in float32, and the sum over
    copies is computed in shards, each on the device that owns that shard of the head.
    """
    gathered = mesh_axes("embed")
    copied = tuple(axis for axis in split if axis not in gathered)

    def copy(part_DV: Array) -> Array:
        # Before the gather, so that the backward pass reduces shards of the sum over these axes, not all of it.
        part_DV = jax.lax.pcast(part_DV, copied, to="varying")
        return jax.lax.all_gather(part_DV, gathered, tiled=True)[None]

    spread = jax.shard_map(
        copy, mesh=mesh, in_specs=spec("embed", "vocab"), out_specs=PartitionSpec(split, None, *spec("vocab"))
    )
    return spread(jax.lax.stop_gradient(head_DV).astype(dtype)), spread(head_DV.astype(jnp.float32))


@jax.custom_vjp
def _product(head_DV: Array, summed_DV: Array, hidden_CD: Array) -> Array:
    """Float32 logits hidden · head; the head's gradient is that of `summed_DV`."""
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
