"""Log-probs and entropies of given tokens from hidden states, on one device or on a mesh.

Only the tokens that are asked for are scored: on each device they are moved to the front, and the head is multiplied
with chunks of them, as many as there are. Nothing of size [tokens, V] exists beyond a chunk; the backward pass computes
a chunk's logits again. Chunks are multiplied in the compute dtype, and the head's gradient is added up in float32.

On a mesh every device scores its own rows and positions, with the head gathered over the model dimension (and sharded
over the vocabulary). The head is gathered once for all chunks; the chunks' contributions to its gradient are
accumulated on each device and reduced over the devices once. Left to the partitioner, both happen for every chunk.

Axes: as in docs/architecture.md; N tokens of a device, K chunks of C tokens, X devices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspax.losses.logprobs import chunked_scores, shift
from gspax.model import transformer
from gspax.parallel.sharding import mesh_axes, own_axes, spec, token_spec
from gspax.types import Array, Params

LogpEntropy = tuple[Array, Array]  # log-probs and entropies


def score_tokens(
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
      mask_BT: the tokens to score; both results are 0 elsewhere. None: all.
      mesh: rows and positions are sharded over it by `token_spec`, and must divide evenly.
    """
    target_BT = tokens_BT if mask_BT is None else jnp.where(mask_BT, tokens_BT, -1)
    options: dict[str, Any] = {"temperature": temperature, "chunk": chunk, "all_of_them": mask_BT is None}
    if mesh.size == 1:
        head_DV = transformer.head(params)
        copies = jax.lax.stop_gradient(head_DV).astype(hidden_BTD.dtype), head_DV.astype(jnp.float32)
        return shift(partial(_score, *copies, over=(), **options), hidden_BTD, target_BT)
    split = own_axes(mesh, "batch") + mesh_axes("time")

    def on_device(head_1DV: Array, summed_1DV: Array, hidden_BTD: Array, target_BT: Array) -> LogpEntropy:
        return _score(head_1DV[0], summed_1DV[0], hidden_BTD, target_BT, over=split, **options)

    own, into = PartitionSpec(split), token_spec(mesh, *tokens_BT.shape)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=(own, own, into, into), out_specs=into, axis_names=set(split), check_vma=False
    )
    # In the backward pass the head's gradient is reduced before the layers run, not held whole meanwhile.
    head_DV, hidden_BTD = jax.lax.optimization_barrier((transformer.head(params), hidden_BTD))
    copies = _copies(head_DV, hidden_BTD.dtype, mesh, split)
    return shift(partial(mapped, *copies), hidden_BTD, target_BT, keep_length=True)


def _score(
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
    """The scores of a device's targets, 0 where the target is -1.

    All devices of the mesh axes `over` compute as many chunks: the vocabulary may be sharded over others, and devices
    that exchange something in a chunk must all compute it.
    """
    (B, T, D), N = hidden_BTD.shape, target_BT.size
    wanted_N = target_BT.reshape(N) >= 0
    hidden_ND, token_N = hidden_BTD.reshape(N, D), jnp.maximum(target_BT.reshape(N), 0)
    if chunk >= N:
        scores = _score_chunk(temperature, head_DV, summed_DV, hidden_ND, token_N)
        return jax.tree.map(lambda x_N: jnp.where(wanted_N, x_N, 0).reshape(B, T), scores)
    order_N = jnp.argsort(~wanted_N, stable=True)
    inverse_N = jnp.argsort(order_N)
    K, count = -(-N // chunk), None
    if not all_of_them:
        count = -(-wanted_N.sum(dtype=jnp.int32) // chunk)
        count = jax.lax.pmax(count, over) if over else count

    def split(x: Array) -> Array:
        return jnp.pad(x, ((0, K * chunk - N), *[(0, 0)] * (x.ndim - 1))).reshape(K, chunk, *x.shape[1:])

    hidden_KCD = split(_permute(hidden_ND, order_N, inverse_N))
    scores = _score_chunks(temperature, head_DV, summed_DV, hidden_KCD, split(token_N[order_N]), count)

    def join(x_KC: Array) -> Array:
        return jnp.where(wanted_N, _permute(x_KC.reshape(-1)[:N], inverse_N, order_N), 0).reshape(B, T)

    return jax.tree.map(join, scores)


def _score_chunk(temperature: float, head_DV: Array, summed_DV: Array, hidden_CD: Array, token_C: Array) -> LogpEntropy:
    """The scores of a chunk."""
    project = partial(_product, head_DV, summed_DV)
    scores = chunked_scores(project, hidden_CD[None], token_C[None], temperature=temperature, chunk=len(token_C))
    return scores[0][0], scores[1][0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score_chunks(
    temperature: float, head_DV: Array, summed_DV: Array, hidden_KCD: Array, token_KC: Array, count: Any
) -> LogpEntropy:
    """The scores of the first `count` chunks, [K, C]; those of the others are 0. None: all."""

    def step(k: Array, scores_KC: LogpEntropy) -> LogpEntropy:
        now = _score_chunk(temperature, head_DV, summed_DV, hidden_KCD[k], token_KC[k])
        return jax.tree.map(lambda of_all, x: of_all.at[k].set(x), scores_KC, now)

    empty = jnp.zeros(token_KC.shape, jnp.float32)
    return jax.lax.fori_loop(0, len(token_KC) if count is None else count, step, (empty, empty))


def _score_chunks_forward(temperature, *args):
    return _score_chunks(temperature, *args), args


def _score_chunks_backward(temperature, kept, dscores_KC):
    head_DV, summed_DV, hidden_KCD, token_KC, count = kept

    def step(k, carry):
        dsummed_DV, dhidden_KCD = carry

        def scores(summed_DV, hidden_CD):
            return _score_chunk(temperature, head_DV, summed_DV, hidden_CD, token_KC[k])

        _, pull = jax.vjp(scores, summed_DV, hidden_KCD[k])
        more_DV, dhidden_CD = pull(jax.tree.map(lambda x: x[k], dscores_KC))
        return dsummed_DV + more_DV, dhidden_KCD.at[k].set(dhidden_CD)

    start = jnp.zeros(summed_DV.shape, jnp.float32), jnp.zeros_like(hidden_KCD)
    dsummed_DV, dhidden_KCD = jax.lax.fori_loop(0, len(token_KC) if count is None else count, step, start)
    return None, dsummed_DV, dhidden_KCD, None, None


_score_chunks.defvjp(_score_chunks_forward, _score_chunks_backward)


@jax.custom_vjp
def _permute(x_N: Array, order_N: Array, inverse_N: Array) -> Array:
    """x[order]. Its gradient is a gather too, by the inverse, where autodiff would scatter."""
    del inverse_N
    return x_N[order_N]


def _permute_forward(x_N, order_N, inverse_N):
    return x_N[order_N], (order_N, inverse_N)


def _permute_backward(kept, dy_N):
    return dy_N[kept[1]], None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _copies(head_DV: Array, dtype: jnp.dtype, mesh: jax.sharding.Mesh, split: tuple[str, ...]) -> tuple[Array, Array]:
    """Two arrays of one copy of the head for each of the X devices of `split`: [X, D, V], sharded over X and V.

    The first is in `dtype` and has no gradient. Only the gradient of the second, in float32, is used, so the array
    itself is never materialised: chunks multiply in the compute dtype but accumulate in float32, and the sum over
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
def _product(head_DV: Array, summed_DV: Array, hidden_BCD: Array) -> Array:
    """Float32 logits hidden · head; the head's gradient is that of `summed_DV`."""
    del summed_DV
    with jax.named_scope("head"):
        return jnp.matmul(hidden_BCD, head_DV, preferred_element_type=jnp.float32)


def _product_forward(head_DV: Array, summed_DV: Array, hidden_BCD: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(head_DV, summed_DV, hidden_BCD), (head_DV, hidden_BCD)


def _product_backward(kept: tuple[Array, Array], dlogits_BCV: Array) -> tuple[None, Array, Array]:
    head_DV, hidden_BCD = kept
    product = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)  # of factors as they are
    with jax.named_scope("head"):
        dhead_DV = product(hidden_BCD, dlogits_BCV, (((0, 1), (0, 1)), ((), ())))
        dhidden_BCD = product(dlogits_BCV, head_DV, (((2,), (1,)), ((), ())))
    return None, dhead_DV, dhidden_BCD.astype(hidden_BCD.dtype)


_product.defvjp(_product_forward, _product_backward)
