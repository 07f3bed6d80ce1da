"""Gated delta nets: the mixer of Qwen3-Next and Qwen3.5 between their layers of attention (arXiv 2412.06464).

A value head holds a state S [H, U] instead of keys and values. Each token lets it decay by exp(g), reads what it
predicts for its key k, and writes the share beta of the difference to its value v back:

    S <- exp(g) S;    S <- S + beta k (v - S^T k)^T;    output S^T q

with keys and queries of length 1. A state space layer (Mamba-2) writes k v^T without the
correction: its tokens have no beta. `recurrent_step` is this equation, for sampling. `chunked_rule` is the same for
whole rows (section 3.3 there, after arXiv 2406.06484): within a chunk the tokens' corrections solve a triangular
system, and the state moves once per chunk. It takes packed rows, whose segments start from an empty state or from that
after a prompt which they share, right-padded prompts, whose last state is returned, and blocks of new tokens after a
state.

Around the rule are a short causal convolution of queries, keys, and values (`kernels.convolution`), the gates
(`decay_and_beta`), and a norm of the output (`gated_rms_norm`). All are per head or per channel, so that heads may be
sharded.

Axes: B rows, T tokens, t and s tokens of a chunk, K key heads, R value heads of each, H dimension of a key, U of a
value, J inputs before a token that the convolution reads, Y and Z states that a row carries from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from gspax.model.kernels.convolution import convolve
from gspax.model.kernels.over_devices import accumulate, shift
from gspax.model.kernels.weights import Weight, contract
from gspax.parallel.sharding import spec, token_spec
from gspax.types import Array

CHUNK = 64  # tokens between two states; the work per token within a chunk grows with it, that between chunks shrinks
EPSILON = 1e-6  # in the norm of queries and keys, as in the published models
STEPS = 64.0  # a decay is split into a multiple of 1/64, sums of which are exact, and a small rest


class Tokens(NamedTuple):
    """The inputs of the rule for each token; for `recurrent_step` without the axis T."""

    q_BTKH: Array
    k_BTKH: Array
    v_BTKRU: Array
    decay_BTKR: Array  # float32, the logarithm g of the factor on the state, at most 0
    # float32, from 0 to 1; None: v is written as it is, and queries and keys have any length
    beta_BTKR: Array | None


def decay_and_beta(a_BTKR: Array, b_BTKR: Array, rate_KR: Array, bias_KR: Array) -> tuple[Array, Array]:
    """Compute the gates of `Tokens` in float32: -exp(rate) softplus(a + bias), and sigmoid(b)."""
    a_BTKR, b_BTKR = a_BTKR.astype(jnp.float32), b_BTKR.astype(jnp.float32)
    rate, bias = (x.astype(jnp.float32).reshape((1,) * (a_BTKR.ndim - x.ndim) + x.shape) for x in (rate_KR, bias_KR))
    return -jnp.exp(rate) * jax.nn.softplus(a_BTKR + bias), jax.nn.sigmoid(b_BTKR)


def gated_rms_norm(x_BTKRU: Array, z_BTKRU: Array, scale_U: Array, eps: float) -> Array:
    """Compute x / rms(x) * scale * silu(z) over the last axis in float32, returned in the dtype of z."""
    x32, z32 = x_BTKRU.astype(jnp.float32), z_BTKRU.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    scale = scale_U.astype(jnp.float32).reshape((1,) * (x32.ndim - 1) + (-1,))
    return (x32 * inverse * scale * jax.nn.silu(z32)).astype(z_BTKRU.dtype)


class Projection(NamedTuple):
    """What a layer reads from its inputs with a convolution after it: K heads, `...` the axes of a head."""

    weight: Weight  # [D, K, ...]
    taps: Array  # [K, ..., taps]
    bias: Array | float = 0.0  # [1, 1, K, ...]


def project(
    x_BTD: Array,
    projections: Sequence[Projection],
    segment_BT: Array,
    before: Sequence[Array | None],
    *prefix_BT: Array,
) -> tuple[list[Array], list[Array]]:
    """Project the inputs, convolve each projection, and apply silu.

    Args:
      before: of each projection, its last inputs as a state has them, [B, K, J, ...]; None: no state.

    Returns:
      The outputs [B, T, K, ...], and the last inputs of each for the next state.
    """
    convolved, last = [], []
    for (weight, taps, bias), before_BKJ in zip(projections, before, strict=True):
        equation = "btd,dkh->btkh" if taps.ndim == 3 else "btd,dkru->btkru"
        before_BJK = None if before_BKJ is None else before_BKJ.swapaxes(1, 2)
        projected_BTK = contract(equation, x_BTD, weight)
        y_BTK, after_BJK = convolve(projected_BTK, taps, segment_BT, before_BJK, *prefix_BT, bias=bias)
        convolved.append(jax.nn.silu(y_BTK).astype(projected_BTK.dtype))
        last.append(after_BJK.swapaxes(1, 2))
    return convolved, last


def recurrent_step(tokens: Tokens, state_BKRHU: Array, live_B: Array) -> tuple[Array, Array]:
    """Apply the rule to one token of each row.

    Args:
      tokens: without the axis T.
      state_BKRHU: float32.
      live_B: bool, the rows that have a token; the states of other rows do not change, bit for bit.

    Returns:
      The outputs float32 `[B, K, R, U]`, and the states after the token.
    """
    q_BKH, k_BKH = _lengths(tokens)
    q_BK1H1, k_BK1H1 = q_BKH[:, :, None, :, None], k_BKH[:, :, None, :, None]
    decayed_BKRHU = state_BKRHU * jnp.exp(tokens.decay_BTKR)[..., None, None]
    written_BKRU = tokens.v_BTKRU.astype(jnp.float32)
    if tokens.beta_BTKR is not None:
        written_BKRU = tokens.beta_BTKR[..., None] * (written_BKRU - (decayed_BKRHU * k_BK1H1).sum(axis=3))
    after_BKRHU = decayed_BKRHU + k_BK1H1 * written_BKRU[:, :, :, None]
    out_BKRU = (after_BKRHU * q_BK1H1).sum(axis=3)
    return out_BKRU, jnp.where(live_B[:, None, None, None, None], after_BKRHU, state_BKRHU)


def rule_over_rows(
    mesh: jax.sharding.Mesh, tokens: Tokens, segment_BT: Array, *prefix_BT: Array
) -> tuple[Array, Array]:
    """Apply the rule to whole rows as `chunked_rule` without a state, perhaps on several devices."""
    devices = mesh.shape["context"]
    # All layers share what depends on the segments alone, unless it waits for a layer's own tokens: else the masks of
    # all chunks are stored before the layers, as wide as the states.
    segment_BT, prefix_BT, _ = jax.lax.optimization_barrier((segment_BT, prefix_BT, tokens.decay_BTKR))
    with jax.named_scope("delta_rule"):
        if devices > 1 and segment_BT.shape[1] % devices == 0:
            return rule_over_devices(mesh, tokens, segment_BT, *prefix_BT)
        return chunked_rule(tokens, segment_BT, None, *prefix_BT)


def rule_after(state_BKRHU: Array, tokens: Tokens, segment_BT: Array) -> tuple[Array, Array]:
    """Apply the rule to new tokens after a state as `chunked_rule`: to one token of each row in a step."""
    with jax.named_scope("delta_rule"):
        if segment_BT.shape[1] > 1:
            return chunked_rule(tokens, segment_BT, state_BKRHU)
        one = jax.tree.map(lambda x_BT: x_BT[:, 0], tokens)
        out_BKRU, after_BKRHU = recurrent_step(one, state_BKRHU, segment_BT[:, 0] > 0)
        return out_BKRU[:, None], after_BKRHU


def chunked_rule(
    tokens: Tokens,
    segment_BT: Array,
    state_BKRHU: Array | None = None,
    prefix_BT: Array | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Array, Array]:
    """Apply the rule to whole rows.

    Args:
      tokens: of the rows.
      segment_BT: int32; a segment starts from an empty state, a row's first one from `state`; 0 is padding, which
        leaves the state as it is, bit for bit.
      state_BKRHU: float32; None: empty.
      prefix_BT: int32, the segment whose last state the token's own segment starts from, 0: none. Only segments with
        the same prefix stand between the two.
      chunk: tokens between two states.

    Returns:
      The outputs float32 `[B, T, K, R, U]`, 0 for padding, and the state float32 after the last token of each row.
    """
    B, _, K, R, U = tokens.v_BTKRU.shape
    empty_BKRHU = jnp.zeros((B, K, R, tokens.k_BTKH.shape[-1], U), jnp.float32)
    before_BKRHU = empty_BKRHU if state_BKRHU is None else state_BKRHU
    first_B1 = jnp.take_along_axis(segment_BT, jnp.argmax(segment_BT > 0, axis=1)[:, None], axis=1)
    states = States(before_BKRHU[:, None], first_B1)
    if prefix_BT is None:
        prefix_BT = jnp.zeros_like(segment_BT)
    else:
        states = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x)], axis=1), states)
    out_BTKRU, states = advance_states(tokens, segment_BT, prefix_BT, states, chunk=chunk)
    return out_BTKRU, states.state_BZKRHU[:, 0]


class _Map(NamedTuple):
    """What a part of a row does to the states before it: states -> move @ states + add. Y = Z H rows of all states."""

    move_BKRYY: Array
    add_BKRYU: Array


def _follow(earlier: _Map, later: _Map) -> _Map:
    """Join the maps of two parts, one after the other."""
    added_BKRYU = later.add_BKRYU + _product(later.move_BKRYY, earlier.add_BKRYU)
    return _Map(_product(later.move_BKRYY, earlier.move_BKRYY), added_BKRYU)


def rule_over_devices(
    mesh: jax.sharding.Mesh, tokens: Tokens, segment_BT: Array, *prefix_BT: Array
) -> tuple[Array, Array]:
    """Apply the rule to whole rows whose time is sharded, as `chunked_rule` without a state; perhaps with prefixes.

    The rule is affine in the state. Each device runs its part of the rows once, from empty states beside unit matrices:
    these columns of the state become its map, and those of the outputs what a token reads of a state before the part.
    The maps are joined over the devices; how large they are does not depend on the length.
    """
    (by_row, by_time), (by_head,) = token_spec(mesh, *segment_BT.shape), spec("heads")
    axis = str(by_time)

    def on_device(tokens: Tokens, segment_BT: Array, *prefix_BT: Array) -> tuple[Array, Array]:
        (B, _, K, R, U), H, Z = tokens.v_BTKRU.shape, tokens.k_BTKH.shape[-1], 1 + len(prefix_BT)
        of_BZ = shift(jnp.concatenate([x[:, -1:] for x in (segment_BT, *prefix_BT)], axis=1), axis)
        unit_1Z11HY = jnp.eye(Z * H).reshape(1, Z, 1, 1, H, Z * H)
        unit_BZKRHY = jnp.broadcast_to(unit_1Z11HY, (B, Z, K, R, H, Z * H))
        start = jnp.concatenate([jnp.zeros((B, Z, K, R, H, U)), unit_BZKRHY], axis=-1)
        v_BTKRU = tokens.v_BTKRU.astype(jnp.float32)
        wide = tokens._replace(v_BTKRU=jnp.pad(v_BTKRU, ((0, 0),) * 4 + ((0, Z * H),)))
        prefix = prefix_BT[0] if prefix_BT else jnp.zeros_like(segment_BT)
        out_BTKR, states = advance_states(wide, segment_BT, prefix, States(start, of_BZ))
        after_BKRY = jnp.moveaxis(states.state_BZKRHU, 1, 3).reshape(B, K, R, Z * H, -1)
        so_far = accumulate(_follow, _Map(after_BKRY[..., U:], after_BKRY[..., :U]), axis).add_BKRYU
        before_BKRYU = shift(so_far, axis)
        read_BKRTU = _product(jnp.moveaxis(out_BTKR[..., U:], 1, 3), before_BKRYU)
        is_last = jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1
        last_BKRHU = jax.lax.psum(jnp.where(is_last, so_far[:, :, :, :H], 0.0), axis)
        return out_BTKR[..., :U] + jnp.moveaxis(read_BKRTU, 3, 1), last_BKRHU

    by_token, by_token_and_head = PartitionSpec(by_row, by_time), PartitionSpec(by_row, by_time, by_head)
    of_row = PartitionSpec(by_row, by_head)
    in_specs = by_token_and_head, by_token, *(by_token for _ in prefix_BT)
    on_devices = jax.shard_map(
        on_device, mesh=mesh, in_specs=in_specs, out_specs=(by_token_and_head, of_row), check_vma=False
    )
    return on_devices(tokens, segment_BT, *prefix_BT)


class States(NamedTuple):
    """The states that a row's next tokens may continue: of the last token's segment, and of the one that it continues.

    Z is 1 in rows without prefixes, else 2.
    """

    state_BZKRHU: Array  # float32
    of_BZ: Array  # int32, their segments; 0: none


def advance_states(
    tokens: Tokens, segment_BT: Array, prefix_BT: Array, states: States, *, chunk: int = CHUNK
) -> tuple[Array, States]:
    """Apply the rule to a part of each row, from the states before it; return the outputs and the states after it."""
    B, T, K, R, U = tokens.v_BTKRU.shape
    chunk = min(chunk, T)
    live_BT11 = segment_BT[..., None, None] > 0
    rows = _Chunk(
        *_lengths(tokens),
        jnp.where(live_BT11[..., None], tokens.v_BTKRU.astype(jnp.float32), 0.0),
        jnp.where(live_BT11, tokens.decay_BTKR, 0.0),
        None if tokens.beta_BTKR is None else jnp.where(live_BT11, tokens.beta_BTKR, 0.0),
        segment_BT,
        prefix_BT,
    )
    count = -(-T // chunk)

    def split(x_BT: Array) -> Array:
        """Split by chunk: [count, B, chunk, ...]; the positions added at the end are padding."""
        x_BT = jnp.pad(x_BT, ((0, 0), (0, count * chunk - T)) + ((0, 0),) * (x_BT.ndim - 2))
        return x_BT.reshape(B, count, chunk, *x_BT.shape[2:]).swapaxes(0, 1)

    run = jax.checkpoint(_run_chunk, prevent_cse=False)  # saves the states between chunks only
    states, out = jax.lax.scan(run, states, jax.tree.map(split, rows))
    return out.swapaxes(0, 1).reshape(B, count * chunk, K, R, U)[:, :T], states


class _Chunk(NamedTuple):
    """The tokens of a chunk, float32; padding has value, decay, and beta 0."""

    q_BtKH: Array
    k_BtKH: Array
    v_BtKRU: Array
    decay_BtKR: Array
    beta_BtKR: Array | None
    segment_Bt: Array  # int32
    prefix_Bt: Array  # int32


def _run_chunk(states: States, chunk: _Chunk) -> tuple[States, Array]:
    """Advance the states over a chunk; return them and the outputs [B, t, K, R, U]."""
    (state_BZKRHU, of_BZ), t = states, chunk.segment_Bt.shape[1]
    live_Bt, decays = chunk.segment_Bt > 0, _split_decays(chunk.decay_BtKR)
    end_B1 = jnp.max(jnp.where(live_Bt, jnp.arange(t)[None], -1), axis=1)[:, None]  # the last token's index
    ends = [jnp.take_along_axis(x, jnp.maximum(end_B1, 0), axis=1) for x in (chunk.segment_Bt, chunk.prefix_Bt)]
    next_BZ = jnp.where(end_B1 >= 0, jnp.concatenate(ends, axis=1)[:, : of_BZ.shape[1]], of_BZ)
    prefix_BZ = jnp.concatenate([next_BZ[:, 1:], jnp.zeros_like(end_B1)], axis=1)

    # the decays from token s to token t and to the end of the chunk, and from the states before to both
    own_Bts = live_Bt[:, None] & jnp.tril(jnp.ones((t, t), bool))[None]
    to_tokens = _Path.of(chunk.segment_Bt, chunk.prefix_Bt, chunk.segment_Bt, own_Bts, of_BZ, decays)
    to_ends = _Path.of(next_BZ, prefix_BZ, chunk.segment_Bt, live_Bt[:, None], of_BZ, decays)
    between_BKRts, after_BKRZs = to_tokens.between(to_tokens.sums), to_ends.between(to_tokens.sums)
    before_BYKRt, keep_BYKRZ = to_tokens.before(), to_ends.before()

    written_BKRtU = chunk.v_BtKRU.transpose(0, 2, 3, 1, 4)
    if chunk.beta_BtKR is not None:
        beta_BKRt1 = chunk.beta_BtKR.transpose(0, 2, 3, 1)[..., None]
        gram_BKts = jnp.einsum("btkh,bskh->bkts", chunk.k_BtKH, chunk.k_BtKH)
        strictly_ts = jnp.tril(jnp.ones((t, t), bool), -1)
        system_BKRts = beta_BKRt1 * gram_BKts[:, :, None] * between_BKRts * strictly_ts[None, None, None]
        predicted_BKRtU = _read(chunk.k_BtKH, state_BZKRHU, before_BYKRt)
        written_BKRtU = unit_lower_inverse(system_BKRts) @ (beta_BKRt1 * (written_BKRtU - predicted_BKRtU))

    score_BKRts = jnp.einsum("btkh,bskh->bkts", chunk.q_BtKH, chunk.k_BtKH)[:, :, None] * between_BKRts
    out_BKRtU = _read(chunk.q_BtKH, state_BZKRHU, before_BYKRt) + score_BKRts @ written_BKRtU

    def move(z: int) -> Array:
        kept_BKRHU = (keep_BYKRZ[..., z, None, None] * state_BZKRHU).sum(axis=1)
        left_BKRsU = after_BKRZs[..., z, :, None] * written_BKRtU
        return kept_BKRHU + jnp.einsum("bskh,bkrsu->bkrhu", chunk.k_BtKH, left_BKRsU)

    moved_BZKRHU = jnp.stack([move(z) for z in range(of_BZ.shape[1])], axis=1)
    state_BZKRHU = jnp.where((end_B1 >= 0)[..., None, None, None, None], moved_BZKRHU, state_BZKRHU)
    return States(state_BZKRHU, next_BZ), out_BKRtU.transpose(0, 3, 1, 2, 4)


def _read(x_BtKH: Array, state_BYKRHU: Array, factor_BYKRt: Array) -> Array:
    """Read the states before the chunk with keys or queries, and add them up by tokens' factors: [B, K, R, t, U]."""
    pairs = zip(jnp.moveaxis(state_BYKRHU, 1, 0), jnp.moveaxis(factor_BYKRt, 1, 0), strict=True)
    reads = [factor[..., None] * jnp.einsum("btkh,bkrhu->bkrtu", x_BtKH, state) for state, factor in pairs]
    return sum(reads[1:], reads[0])


class _Path(NamedTuple):
    """What leads to some places of a chunk: earlier tokens of a place's segment and of its prefix, or a state before.

    Q places, Y states before the chunk.
    """

    related_BQs: Array  # bool
    reads_BYQ: Array  # bool
    sums: tuple[Array, Array]  # [B, K, R, Q], of the decays of the related tokens, in two parts

    @classmethod
    def of(
        cls,
        segment_BQ: Array,
        prefix_BQ: Array,
        segment_Bs: Array,
        earlier_BQs: Array,
        of_BY: Array,
        decays: tuple[Array, Array],
    ) -> _Path:
        """Find it from the numbers of the segments; `decays` are those of the chunk's tokens [B, K, R, s]."""
        follows_BQs = (prefix_BQ > 0)[..., None] & (prefix_BQ[..., None] == segment_Bs[:, None])
        related_BQs = earlier_BQs & ((segment_BQ[..., None] == segment_Bs[:, None]) | follows_BQs)
        own_BYQ = (of_BY > 0)[..., None] & (of_BY[..., None] == segment_BQ[:, None])
        prefix_BYQ = (prefix_BQ > 0)[:, None] & (of_BY[..., None] == prefix_BQ[:, None])
        reads_BYQ = own_BYQ | (prefix_BYQ & ~own_BYQ.any(axis=1, keepdims=True))
        path_B1sQ = related_BQs.swapaxes(1, 2)[:, None].astype(jnp.float32)
        coarse, rest = (_product(x_BKRs, path_B1sQ) for x_BKRs in decays)
        return cls(related_BQs, reads_BYQ, (coarse, rest))

    def between(self, sums: tuple[Array, Array]) -> Array:
        """Compute the factors [B, K, R, Q, s] on what the tokens write, with their own sums; 0 for unrelated ones."""
        coarse, rest = (own[..., :, None] - x[..., None, :] for own, x in zip(self.sums, sums, strict=True))
        return _exp((coarse, rest), self.related_BQs[:, None, None])

    def before(self) -> Array:
        """Compute the factors [B, Y, K, R, Q] on the states before; 0 for those that are not read."""
        coarse, rest = (x[:, None] for x in self.sums)
        return _exp((coarse, rest), self.reads_BYQ[:, :, None, None])


def _split_decays(decay_BtKR: Array) -> tuple[Array, Array]:
    """Split the decays in two parts [B, K, R, t], to add after differences of the sums of each are taken.

    A large decay, which forgets, would take the digits of the small ones after it: differences of sums of multiples of
    1/64 are exact, and the rests stay small.
    """
    decay_BKRt = decay_BtKR.transpose(0, 2, 3, 1)
    coarse_BKRt = jax.lax.stop_gradient(jnp.round(decay_BKRt * STEPS) / STEPS)
    return coarse_BKRt, decay_BKRt - coarse_BKRt


def _exp(parts: tuple[Array, ...], where: Array) -> Array:
    """Compute the exponential of the sum of two parts, 0 outside `where`."""
    coarse, rest = parts  # a masked sum may be above 0, and its exponential infinite
    return jnp.where(where, jnp.exp(jnp.where(where, coarse + rest, 0.0)), 0.0)


def _lengths(tokens: Tokens) -> tuple[Array, Array]:
    """Return queries and keys in float32; with a correction their lengths are H**-0.5 and 1."""
    q, k = tokens.q_BTKH, tokens.k_BTKH
    if tokens.beta_BTKR is None:
        return q.astype(jnp.float32), k.astype(jnp.float32)
    return _normalize(q) * q.shape[-1] ** -0.5, _normalize(k)


def _normalize(x: Array) -> Array:
    """Divide x, in float32, by its length over the last axis."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + EPSILON)


@jax.custom_vjp
def unit_lower_inverse(a: Array) -> Array:
    """Invert 1 + a for strictly lower triangular matrices a `[..., t, t]`, from the inverses of diagonal blocks.

    Two neighboring blocks with the inverses X and Y and the block b below them make a block with -Y b X below its own:
    log2(t) times two products. Unlike the series 1 - a + a² - ..., whose terms cancel where keys repeat, no
    intermediate result is larger than the inverse. Its gradient needs the inverse alone.
    """
    t = a.shape[-1]
    index, leading = np.arange(t), (1,) * (a.ndim - 2)
    inverse = jnp.broadcast_to(jnp.eye(t, dtype=a.dtype).reshape(*leading, t, t), a.shape)
    size = 1
    while size < t:
        block = index // size
        below = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        b = a * jnp.asarray(below, a.dtype).reshape(*leading, t, t)
        inverse = inverse - (b if size == 1 else _product(_product(inverse, b), inverse))
        size *= 2
    return inverse


def _inverse_forward(a: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    transposed = inverse.swapaxes(-1, -2)
    return (-jnp.tril(_product(_product(transposed, gradient), transposed), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _product(x: Array, y: Array) -> Array:
    """Multiply matrices of small numbers in full float32, on TPU too."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
