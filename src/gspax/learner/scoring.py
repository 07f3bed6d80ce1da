"""Log-probs and entropies of given tokens from hidden states, on one device or on a mesh.

On a mesh every device scores the rows and positions that it has, in chunks, with the whole model dimension of the head
(and its own part of the vocabulary). The head is gathered once for all chunks, and what the chunks add to its gradient
is added up on each device and summed over the devices once. Left to the partitioner, both were done for every chunk.
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
      hidden_BTD: what `transformer.apply` gives, in the compute dtype.
      chunk: positions at a time on each device.
      mesh: what the arrays are sharded over: rows and positions as `token_spec` says, all of which it divides.
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
    # In the backward pass the gradient is reduced before the layers' begin, and not held whole while they run.
    head_DV, hidden_BTD = jax.lax.optimization_barrier((transformer.head(params), hidden_BTD))
    copies = _copies(head_DV, hidden_BTD.dtype, mesh, split)
    return shift(partial(mapped, *copies), hidden_BTD, tokens_BT, keep_length=True)


def _copies(head_DV: Array, dtype: jnp.dtype, mesh: jax.sharding.Mesh, split: tuple[str, ...]) -> tuple[Array, Array]:
    """A copy of the head for each of the X devices of `split`, twice: [X, D, V], split over X, and over V as it was.

    The first is in this dtype and has no gradient. Of the second, in float32, nothing but the gradient is used, so it
    is made nowhere: chunks are added up in float32 although they are multiplied in the compute dtype, and the sum of
    all copies is made in parts, each where that part of the head lives.
    """
    gathered = mesh_axes("embed")
    copied = tuple(axis for axis in split if axis not in gathered)

    def copy(part_DV: Array) -> Array:
        # Before the parts are gathered, so that backward these axes add up parts of the sum and not the whole of it.
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
