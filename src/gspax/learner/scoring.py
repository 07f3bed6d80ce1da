"""Log-probs and entropies of given tokens from hidden states, on one device or on a mesh.

On a mesh every device scores its own rows and positions, in chunks, with the head gathered over the model dimension
(and sharded over the vocabulary). The head is gathered once for all chunks; the chunks' contributions to its gradient
are accumulated on each device and reduced over the devices once. Left to the partitioner, both happen for every chunk.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gspax.losses.logprobs import chunked_scores, chunked_token_logp, shift
from gspax.model import transformer
from gspax.sharding import mesh_axes, spec, token_spec
from gspax.types import Array, Params


def score_tokens(
    params: Params,
    hidden_BTD: Array,
    tokens_BT: Array,
    *,
    temperature: float,
    chunk: int,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Array, Array]:
    """`chunked_token_logp` with the model's head: logp_BT and entropy_BT, float32.

    Args:
      hidden_BTD: from `transformer.apply`, in the compute dtype.
      chunk: positions at a time on each device.
      mesh: rows and positions are sharded over it by `token_spec`, and must divide evenly.
    """
    if mesh is None or mesh.size == 1:
        project = partial(transformer.logits, params)
        return chunked_token_logp(project, hidden_BTD, tokens_BT, temperature=temperature, chunk=chunk)
    split = mesh_axes("batch") + mesh_axes("time")

    def on_device(head_1DV: Array, summed_1DV: Array, hidden_BTD: Array, tokens_BT: Array) -> tuple[Array, Array]:
        project = partial(_product, head_1DV[0], summed_1DV[0])
        return chunked_scores(project, hidden_BTD, tokens_BT, temperature=temperature, chunk=chunk)

    own, into = PartitionSpec(split), token_spec(mesh, *tokens_BT.shape)
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(own, own, into, into), out_specs=into, axis_names=set(split))
    # In the backward pass the head's gradient is reduced before the layers run, not held whole meanwhile.
    head_DV, hidden_BTD = jax.lax.optimization_barrier((transformer.head(params), hidden_BTD))
    copies = _copies(head_DV, hidden_BTD.dtype, mesh, split)
    return shift(partial(mapped, *copies), hidden_BTD, tokens_BT, keep_length=True)


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
