"""The experts of a mixture-of-experts layer, dropless: every choice is computed, however uneven the routing is.

    y_n = Σ_a gate[n, a] · (silu(x_n W_gate[e]) * (x_n W_up[e])) W_down[e],      e = expert[n, a]

Experts with biases or another activation have another product (`gated_product`); the bias of W_down is the caller's.

Rows are copied once per choice and sorted by expert (dispatch), a backend multiplies each expert's rows by that
expert's matrices, and the A results of a row are summed (combine). There are two backends for the middle part:

- `blocked`, for CPU, is plain XLA: a scan over the experts and, inside it, a loop over blocks of the expert's rows.
  One block's intermediates stay in cache and its result overwrites its input.
- `ragged`, for accelerators, is `jax.lax.ragged_dot`: a grouped-matmul kernel on TPU, dense over the experts on CPU.

`expert_ffn` picks the backend when the program is lowered, so compiling for TPU on a CPU host needs no flag.

The backward pass is written by hand. It recomputes gate and up from x, which costs less than storing them across a
`lax.scan` over layers, and saves only the arguments and the sorting permutation. Dispatch and combine are each other's
transpose (at gate = 1), so no gather turns into a scatter-add.

On a mesh, call it inside `jax.shard_map`: the partitioner does not partition either backend.

Axes: N rows, A experts per row, M = N·A choices, S = M + BLOCK sorted rows, B rows of a block, D model, F expert width,
E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import Partial

from gspax.model.kernels.quantization import Quantized
from gspax.model.kernels.weights import Weight, cast, dequantize
from gspax.types import PyTree

BLOCK = 40  # rows, the least padding of an expert's last block; XLA:CPU multiplies such blocks with one thread
LIMIT, GAIN = 7.0, 1.702  # of `gated_product`
LARGE_BLOCK = 640  # rows, which XLA:CPU multiplies with two threads: in 0.6 of the time (320 rows: in 0.8)
MANY_ROWS = 128  # per expert: `ragged` converts weights of 8 bits first, instead of scaling float32 results

Carry = TypeVar("Carry")  # of a loop


class Permutation(NamedTuple):
    """The sorting of choices by expert. All int32."""

    order_S: Array  # the choice n·A + a at each sorted row; M for an empty row
    place_NA: Array  # the sorted row of each choice; S for a dropped choice
    count_E: Array  # rows of each expert


class Experts(NamedTuple):
    """The matrices of E experts, of any float dtype, or `Quantized` with scales [E, F], [E, F] and [E, D].

    Biases of gate and up change their product (`gated_product`), and so does an activation other than silu.
    """

    gate_EDF: Weight | None  # None: the activation is that of the product with up
    up_EDF: Weight
    down_EFD: Weight
    gate_bias_EF: Array | None = None
    up_bias_EF: Array | None = None
    activation: Any = None  # a `Partial` of a function, such as `GELU_TANH`


GELU_TANH = Partial(partial(jax.nn.gelu, approximate=True))


def squared_relu(x: Array) -> Array:
    """Compute max(x, 0)^2, the activation of networks without a gate."""
    return jnp.square(jax.nn.relu(x))


SQUARED_RELU = Partial(squared_relu)


class Backend(NamedTuple):
    """Two functions of sorted rows. Rows after the last expert's must not affect any result that is read.

    forward(x_SD, gate_S, experts, count_E) -> y_SD
    backward(x_SD, gate_S, experts, count_E, dy_SD) -> dx_SD, dgate_S, dexperts
    """

    forward: Callable[..., Array]
    backward: Callable[..., tuple[Array, Array, Experts]]


def expert_ffn(
    x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts, *, backend: Backend | None = None
) -> Array:
    """Compute the gate-weighted sum of each row's experts: y_ND in x's dtype.

    Differentiable in x, gate and the weights. A row's result does not depend on the other rows.

    Args:
        x_ND: float32 or bfloat16. Products are computed in this dtype and accumulated in float32.
        expert_NA: int32 in [0, E]. E drops the choice: it adds zero to the row and propagates no gradient and no NaN.
        gate_NA: the weight of each choice, used in float32.
        experts: cast to x's dtype; their gradients have their own. There is none for quantized ones.
        backend: default: the one for the platform that the program is lowered for.

    Raises:
        ValueError: the shapes do not fit together.
        TypeError: expert_NA is not int32.
    """
    (N, D), (E, _, F), A = x_ND.shape, experts.up_EDF.shape, expert_NA.shape[-1]
    entries = list(entry_matrices(experts))
    shapes = [a.shape for a in (expert_NA, gate_NA, *entries, experts.down_EFD)]
    if shapes != [(N, A), (N, A), *[(E, D, F)] * len(entries), (E, F, D)]:
        raise ValueError(f"for x {x_ND.shape}, wanted shapes [N, A] twice, [E, D, F] twice, [E, F, D]; got {shapes}")
    if expert_NA.dtype != jnp.int32:
        raise TypeError(f"expert_NA must be int32, got {expert_NA.dtype}")
    x_ND, gate_NA, experts = vary_alike(x_ND, gate_NA, experts)
    return _ffn(backend or BY_PLATFORM, x_ND, expert_NA, gate_NA, experts)


def vary_alike(*trees: PyTree) -> tuple[PyTree, ...]:
    """Type trees of arrays under `shard_map` as varying over every mesh axis that any of them varies over.

    A loop's carry must keep its type. Selecting with a constant False changes the type at no cost; outside the custom
    derivative it also makes JAX sum the gradient of a replicated array over the axes.
    """

    def typed_like(a: Array, b: Array) -> Array:
        return jnp.where(False, lax.stop_gradient(b[(0,) * b.ndim]).astype(a.dtype), a)

    arrays = jax.tree.leaves(trees)
    return jax.tree.map(lambda a: functools.reduce(typed_like, arrays, a), trees)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(backend: Backend, x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts) -> Array:
    return _ffn_forward(backend, x_ND, expert_NA, gate_NA, experts)[0]


def _ffn_forward(
    backend: Backend, x_ND: Array, expert_NA: Array, gate_NA: Array, experts: Experts
) -> tuple[Array, PyTree]:
    saved = sort_by_expert(expert_NA, experts.up_EDF.shape[0]), x_ND, gate_NA, experts
    return forward(*saved, backend=backend), saved


def _ffn_backward(backend: Backend, saved: PyTree, dy_ND: Array) -> tuple[Array, None, Array, Experts]:
    permutation, x_ND, gate_NA, experts = saved
    dx_ND, dgate_NA, dexperts = backward(permutation, x_ND, gate_NA, experts, dy_ND, backend=backend)
    return dx_ND, None, dgate_NA, dexperts


_ffn.defvjp(_ffn_forward, _ffn_backward)


def forward(
    permutation: Permutation, x_ND: Array, gate_NA: Array, experts: Experts, *, backend: Backend | None = None
) -> Array:
    """Run `expert_ffn` on choices that are already sorted: y_ND. Not differentiable; `backward` is its derivative."""
    x_SD, gate_S = dispatch(permutation, x_ND), take_rows(gate_NA.reshape(-1), permutation.order_S)
    return combine(permutation, (backend or BY_PLATFORM).forward(x_SD, gate_S, experts, permutation.count_E))


def backward(
    permutation: Permutation,
    x_ND: Array,
    gate_NA: Array,
    experts: Experts,
    dy_ND: Array,
    *,
    backend: Backend | None = None,
) -> tuple[Array, Array, Experts]:
    """Compute the gradients of Σ `forward` · dy with respect to x_ND, gate_NA and the experts, in their dtypes."""
    x_SD, gate_S = dispatch(permutation, x_ND), take_rows(gate_NA.reshape(-1), permutation.order_S)
    dx_SD, dgate_S, dexperts = (backend or BY_PLATFORM).backward(
        x_SD, gate_S, experts, permutation.count_E, dispatch(permutation, dy_ND)
    )
    return combine(permutation, dx_SD), take_rows(dgate_S, permutation.place_NA), dexperts


def sort_by_expert(expert_NA: Array, num_experts: int) -> Permutation:
    """Return the permutation that sorts the choices by expert, stable within an expert. ValueError: see `sort_keys`."""
    expert_M = expert_NA.reshape(-1)
    M = expert_M.size
    position_M, order_M = jnp.arange(M, dtype=jnp.int32), sort_keys(expert_M, num_experts + 1)
    place_M = jnp.zeros_like(order_M).at[order_M].set(position_M, unique_indices=True)
    count_E = count_keys(expert_M, num_experts)
    return Permutation(
        order_S=jnp.pad(jnp.where(position_M < count_E.sum(), order_M, M), (0, BLOCK), constant_values=M),
        place_NA=jnp.where(expert_M < num_experts, place_M, M + BLOCK).reshape(expert_NA.shape),
        count_E=count_E,
    )


def sort_keys(key_M: Array, keys: int) -> Array:
    """Return the indices that sort int32 keys below `keys`, stable.

    One int32 operand holds key and position, which is far cheaper to sort and to compile than two.

    Raises:
        ValueError: there are too many for an int32.
    """
    M = key_M.size
    if keys * M >= 2**31:
        raise ValueError(f"{M} choices with {keys} keys do not fit an int32 sort key")
    return lax.sort(key_M * M + jnp.arange(M, dtype=jnp.int32), is_stable=False) % M


def count_keys(key_M: Array, keys: int) -> Array:
    """Count how often each key below `keys` occurs, int32 [keys]."""
    return (key_M[None] == jnp.arange(keys, dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)


def dispatch(permutation: Permutation, x_ND: Array) -> Array:
    """Copy each row once per choice, sorted by expert: x_SD; empty rows are zero."""
    return take_rows(x_ND, permutation.order_S // permutation.place_NA.shape[1])


def combine(permutation: Permutation, y_SD: Array) -> Array:
    """Sum each row's choices, accumulated in float32 and returned in y's dtype: y_ND."""
    return take_rows(y_SD, permutation.place_NA).sum(1, dtype=jnp.float32).astype(y_SD.dtype)


def take_rows(x: Array, index: Array) -> Array:
    """Take rows of x; zeros where the index is past its end."""
    return x.at[index].get(mode="fill", fill_value=0)


def entry_matrices(experts: Experts) -> tuple[Weight, ...]:
    """Return the matrices of gate and up, or of up alone."""
    return (experts.up_EDF,) if experts.gate_EDF is None else (experts.gate_EDF, experts.up_EDF)


def gated_product(products: Sequence[Array], w: Experts, for_rows: Callable[[Array], Array]) -> Array:
    """Compute the input of the down projections from the products of rows with `entry_matrices`.

    Without biases it is silu(a) u, or another activation's; with them, as in gpt-oss (arXiv 2508.10925),
    (u + 1) a σ(1.702 a), where the biases are added first and a is then at most 7 and u from -7 to 7. `for_rows` gives
    the biases [E, F] the rows' axes. Without a gate it is the activation of u.
    """
    if w.gate_EDF is None:
        product: Array = w.activation(*products)
        return product
    a_F, u_F = products
    if w.gate_bias_EF is None or w.up_bias_EF is None:
        return (w.activation or jax.nn.silu)(a_F) * u_F
    a_F = jnp.minimum(a_F + for_rows(w.gate_bias_EF), LIMIT)
    u_F = jnp.clip(u_F + for_rows(w.up_bias_EF), -LIMIT, LIMIT)
    return (u_F + 1) * a_F * jax.nn.sigmoid(GAIN * a_F)


# --- blocked ---------------------------------------------------------------------------------------------------------


def _of_one(bias_F: Array) -> Array:
    """Return the bias of one expert, for its rows."""
    return bias_F[None]


def _blocked_forward(x_SD: Array, gate_S: Array, experts: Experts, count_E: Array) -> Array:
    """Overwrite x_SD with y_SD. A block may overlap the next expert's rows, which it writes back unchanged."""

    def one_expert(x_SD: Array, xs: PyTree) -> tuple[Array, None]:
        experts, start, count = xs
        w = cast(experts, x_SD.dtype)

        def one_block(x_SD: Array, at: Array, mine_B: Array) -> Array:
            x_BD, gate_B = _slice(x_SD, at, mine_B), _slice(gate_S, at, mine_B)
            products = [dot("bd,df->bf", x_BD, w_DF) for w_DF in entry_matrices(w)]
            h_BF = gated_product(products, w, _of_one) * gate_B[:, None]
            return _update(x_SD, at, mine_B, dot("bf,fd->bd", h_BF.astype(x_BD.dtype), w.down_EFD))

        return _over_blocks(one_block, x_SD, start, count, _has_large_blocks(x_SD, count_E)), None

    return lax.scan(one_expert, x_SD, (experts, jnp.cumsum(count_E) - count_E, count_E))[0]


def _blocked_backward(
    x_SD: Array, gate_S: Array, experts: Experts, count_E: Array, dy_SD: Array
) -> tuple[Array, Array, Experts]:
    """Overwrite x_SD with dx_SD and gate_S with dgate_S, expert by expert, and sum each expert's gradient."""

    def one_expert(rows: tuple[Array, Array], xs: PyTree) -> tuple[tuple[Array, Array], Experts]:
        experts, start, count = xs
        w = cast(experts, x_SD.dtype)

        def one_block(carry: PyTree, at: Array, mine_B: Array) -> PyTree:
            (x_SD, gate_S), dw = carry
            x_BD, dy_BD, gate_B = (_slice(x_S, at, mine_B) for x_S in (x_SD, dy_SD, gate_S))
            dx_BD, dgate_B, dw_block = _block_gradients(x_BD, jnp.where(mine_B, gate_B, 0), w, dy_BD)
            rows = _update(x_SD, at, mine_B, dx_BD), _update(gate_S, at, mine_B, dgate_B)
            return rows, jax.tree.map(jnp.add, dw, dw_block)

        zero = jax.tree.map(lambda a: jnp.zeros_like(a, jnp.float32), experts)
        rows, dw = _over_blocks(one_block, (rows, zero), start, count, _has_large_blocks(x_SD, count_E))
        return rows, jax.tree.map(lambda d, a: d.astype(a.dtype), dw, experts)

    (dx_SD, dgate_S), dexperts = lax.scan(one_expert, (x_SD, gate_S), (experts, jnp.cumsum(count_E) - count_E, count_E))
    return dx_SD, dgate_S, dexperts


def _has_large_blocks(x_SD: Array, count_E: Array) -> bool:
    """Return whether experts have a large block of rows on average, by shapes: smaller programs have no second loop."""
    return x_SD.shape[0] >= LARGE_BLOCK * count_E.size


def _over_blocks(
    one_block: Callable[[Carry, Array, Array], Carry], carry: Carry, start: Array, count: Array, large: bool
) -> Carry:
    """Run `one_block(carry, first row, which rows of the block are the expert's)` for `count` rows from `start`."""

    def blocks(carry: Carry, start: Array, count: Array, number: Array, size: int) -> Carry:
        def body(i: Array, carry: Carry) -> Carry:
            return one_block(carry, start + i * size, jnp.arange(size) < count - i * size)

        return lax.fori_loop(0, number, body, carry)

    if large:
        number = count // LARGE_BLOCK
        carry = blocks(carry, start, count, number, LARGE_BLOCK)
        start, count = start + number * LARGE_BLOCK, count - number * LARGE_BLOCK
    return blocks(carry, start, count, -(-count // BLOCK), BLOCK)


def _block_gradients(x_BD: Array, gate_B: Array, w: Experts, dy_BD: Array) -> tuple[Array, Array, Experts]:
    """Compute dx, dgate and the gradient of an expert's matrices from one block; rows of gate 0 add nothing to it."""
    dtype = x_BD.dtype
    products = [dot("bd,df->bf", x_BD, w_DF) for w_DF in entry_matrices(w)]
    dh_BF = dot("bd,fd->bf", dy_BD, w.down_EFD)  # the gradient of gate · h, before the factor gate
    if w.gate_EDF is None or w.gate_bias_EF is not None or w.activation is not None:
        return _other_gradients(x_BD, gate_B, w, dy_BD, (*products, dh_BF))
    a_BF, u_BF = products
    sigmoid_BF = jax.nn.sigmoid(a_BF)
    silu_BF = a_BF * sigmoid_BF
    h_BF = silu_BF * u_BF
    dgate_B = (dh_BF * h_BF).sum(1)
    dh_BF, h_BF = dh_BF * gate_B[:, None], h_BF * gate_B[:, None]
    du_BF = (dh_BF * silu_BF).astype(dtype)
    da_BF = (dh_BF * u_BF * sigmoid_BF * (1 + a_BF * (1 - sigmoid_BF))).astype(dtype)
    dx_BD = dot("bf,df->bd", da_BF, w.gate_EDF) + dot("bf,df->bd", du_BF, w.up_EDF)
    dw = Experts(
        dot("bd,bf->df", x_BD, da_BF), dot("bd,bf->df", x_BD, du_BF), dot("bf,bd->fd", h_BF.astype(dtype), dy_BD)
    )
    return dx_BD, dgate_B, dw


def _other_gradients(
    x_BD: Array, gate_B: Array, w: Experts, dy_BD: Array, products: tuple[Array, ...]
) -> tuple[Array, Array, Experts]:
    """Compute `_block_gradients` of an expert with another product, given the products with its matrices."""
    *entries, dh_BF = products
    h_BF, pullback = jax.vjp(lambda *entries: gated_product(entries, w, _of_one), *entries)
    dgate_B = (dh_BF * h_BF).sum(1)
    gradients = pullback(dh_BF * gate_B[:, None])
    h_BF, *rounded = (x.astype(x_BD.dtype) for x in (h_BF * gate_B[:, None], *gradients))
    parts = [dot("bf,df->bd", d_BF, w_DF) for d_BF, w_DF in zip(rounded, entry_matrices(w), strict=True)]
    no_gate = [None] if w.gate_EDF is None else []
    matrices = [*no_gate, *(dot("bd,bf->df", x_BD, d_BF) for d_BF in rounded), dot("bf,bd->fd", h_BF, dy_BD)]
    biases = [None, None] if w.gate_bias_EF is None else [d_BF.sum(0) for d_BF in gradients]
    return functools.reduce(jnp.add, parts), dgate_B, Experts._make((*matrices, *biases, w.activation))


def _slice(x_S: Array, at: Array, mine_B: Array) -> Array:
    return lax.dynamic_slice_in_dim(x_S, at, len(mine_B))


def _update(x_S: Array, at: Array, mine_B: Array, new_B: Array) -> Array:
    """Write only the block's own rows."""
    mine = mine_B.reshape(-1, *[1] * (new_B.ndim - 1))
    return lax.dynamic_update_slice_in_dim(
        x_S, jnp.where(mine, new_B.astype(x_S.dtype), _slice(x_S, at, mine_B)), at, 0
    )


def dot(subscripts: str, a: Array, b: Weight) -> Array:
    """Compute the float32 product of rows with matrices, one for each of their leading axes."""
    if isinstance(b, Quantized):
        return dot(subscripts, a, b.values.astype(a.dtype)) * b.scale[..., None, :]
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def dot_and_sum(subscripts: str, a: Array, b: Weight) -> Array:
    """Compute `dot` and sum over the matrices, whose axis is k and not in the result of `subscripts`, in a's dtype."""
    if isinstance(b, Quantized):  # each matrix has scales of its own
        factors, result = subscripts.split("->")
        return dot(f"{factors}->k{result}", a, b).sum(0).astype(a.dtype)
    return dot(subscripts, a, b).astype(a.dtype)


# --- ragged ----------------------------------------------------------------------------------------------------------


def _ragged_forward(x_SD: Array, gate_S: Array, experts: Experts, count_E: Array, *, mixed: bool = False) -> Array:
    """Compute y_SD; with `mixed`, the backend multiplies rows with 8-bit matrices, which a conversion would copy.

    Many rows, as in prefill, are multiplied with the converted weights: float32 results and the scales of their rows
    would be larger than the copies.
    """
    if x_SD.shape[0] >= MANY_ROWS * count_E.size:
        matrices = (None if w is None else dequantize(w, x_SD.dtype, axis=1) for w in experts[:3])
        experts = Experts._make((*matrices, *experts[3:]))
    # Rows after the last group are undefined and may not be finite: masked, but for the result, where none is read.
    row_S = jnp.arange(x_SD.shape[0], dtype=jnp.int32)
    used_S1 = (row_S < count_E.sum())[:, None]
    expert_S = (row_S[:, None] >= jnp.cumsum(count_E)[None]).sum(1)

    def grouped(x_SK: Array, w_EKO: Weight) -> Array:
        if not isinstance(w_EKO, Quantized):
            return lax.ragged_dot(x_SK, w_EKO, count_E)
        values = w_EKO.values if mixed else w_EKO.values.astype(x_SK.dtype)
        y_SO = lax.ragged_dot(x_SK, values, count_E, preferred_element_type=jnp.float32)
        return y_SO * w_EKO.scale.at[expert_S].get(mode="clip")

    w = cast(experts, x_SD.dtype)
    products = [jnp.where(used_S1, grouped(x_SD, w_EDF), 0).astype(jnp.float32) for w_EDF in entry_matrices(w)]
    h_SF = gated_product(products, w, lambda b_EF: b_EF.at[expert_S].get(mode="clip")) * gate_S[:, None]
    return grouped(h_SF.astype(x_SD.dtype), w.down_EFD).astype(x_SD.dtype)


def _ragged_backward(
    x_SD: Array, gate_S: Array, experts: Experts, count_E: Array, dy_SD: Array
) -> tuple[Array, Array, Experts]:
    _, pullback = jax.vjp(lambda x, gate, w: _ragged_forward(x, gate, w, count_E), x_SD, gate_S, experts)
    return pullback(dy_SD)


BLOCKED = Backend(_blocked_forward, _blocked_backward)
RAGGED = Backend(_ragged_forward, _ragged_backward)
BY_PLATFORM = Backend(
    partial(
        lax.platform_dependent,
        cpu=_blocked_forward,
        tpu=partial(_ragged_forward, mixed=True),
        default=_ragged_forward,
    ),
    partial(lax.platform_dependent, cpu=_blocked_backward, default=_ragged_backward),
)
