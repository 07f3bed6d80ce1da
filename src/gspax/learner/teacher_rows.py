"""Builds the rows that a teacher reads and the policy does not: other prompts, or only the problems of this teacher.

Such rows are packed by themselves. The teacher's outputs for a response are then moved to the response's positions in
the policy's minibatch.

Axes: as in docs/architecture.md; N responses of a rollout, S positions of the teacher's prompts, U of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import RowShape
from gspax.learner.minibatches import Layout
from gspax.learner.packing import pack, separate
from gspax.learner.teacher import Teach
from gspax.parallel import multihost
from gspax.parallel.sharding import named_sharding, token_spec
from gspax.run import interrupt
from gspax.types import Array, Batch, Params, Rollout


class TeacherRows(NamedTuple):
    """The responses of a rollout in the rows that teachers read."""

    tokens_NU: Array
    mask_NU: Array
    length_N: np.ndarray  # int32  tokens of a row
    shift_N: np.ndarray  # int32  columns by which a response is further right than in the policy's rollout
    first_N: np.ndarray  # int32  the last column of the policy's prompt, whose output predicts the response


def as_sampled(rollout: Rollout) -> TeacherRows:
    """Build the teachers' rows with the policy's prompts."""
    prompt_N = np.asarray(rollout.prompt_length_B)
    length_N = prompt_N + np.asarray(rollout.length_B)
    return TeacherRows(rollout.tokens_BT, rollout.mask_BT, length_N, np.zeros_like(prompt_N), prompt_N - 1)


def with_prompts(
    rollout: Rollout, prompts: Sequence[Sequence[int]], longest: int, mesh: jax.sharding.Mesh
) -> TeacherRows:
    """Build the teachers' rows with each response's prompt replaced by `prompts`, each at most `longest` tokens."""
    prompt_NS = np.zeros((len(prompts), longest), np.int32)
    for row, tokens in enumerate(prompts):
        prompt_NS[row, : len(tokens)] = tokens
    own_N, before_N = np.array(list(map(len, prompts)), np.int32), np.asarray(rollout.prompt_length_B)
    by_row = named_sharding(mesh, "batch")
    arrays = multihost.to_devices((prompt_NS, own_N, before_N), by_row)
    replace_prompts = jax.jit(_replace_prompts, out_shardings=by_row)
    tokens_NU, mask_NU = replace_prompts(rollout.tokens_BT, rollout.mask_BT, *arrays)
    return TeacherRows(tokens_NU, mask_NU, own_N + np.asarray(rollout.length_B), own_N - before_N, before_N - 1)


def _replace_prompts(
    tokens_NT: Array, mask_NT: Array, prompt_NS: Array, own_N: Array, before_N: Array
) -> tuple[Array, Array]:
    S, T = prompt_NS.shape[1], tokens_NT.shape[1]
    column_1U = jnp.arange(S + T, dtype=jnp.int32)[None]
    is_prompt_NU = column_1U < own_N[:, None]
    source_NU = column_1U + (before_N - own_N)[:, None]
    is_response_NU = ~is_prompt_NU & (source_NU < T)
    take = partial(jnp.take_along_axis, indices=jnp.clip(source_NU, 0, T - 1), axis=1)
    tokens_NU = jnp.where(is_response_NU, take(tokens_NT), jnp.pad(prompt_NS, ((0, 0), (0, T))))
    return tokens_NU, is_response_NU & take(mask_NT)


def fill_from_rows(
    teach: Teach,
    params: Params,
    rows: TeacherRows,
    is_own_N: np.ndarray,
    minibatches: Sequence[tuple[Batch, Layout]],
    *,
    shape: RowShape,
    width: int,
    mesh: jax.sharding.Mesh,
) -> list[Batch]:
    """Fill the minibatches with a teacher's outputs for its responses, with a stop point after each (`run.interrupt`).

    Args:
      is_own_N: bool, the responses that this teacher reads.
      shape: the shape of the teacher's rows, with room for all responses of a minibatch.
      width: the width of the widest teacher's hidden states; narrower ones are padded with zeros.
    """
    filled = []
    for batch, layout in minibatches:
        chosen = np.unique(layout.response[layout.response >= 0])
        chosen = chosen[is_own_N[chosen]]
        if len(chosen):
            values, place_BT = _read(teach, params, rows, chosen, layout, shape=shape, mesh=mesh)
            name = "teacher_logp_BT" if values.ndim == 2 else "teacher_hidden_BTE"
            array = _put(getattr(batch, name), values, place_BT, width, mesh)
            batch = replace(batch, **{name: jax.block_until_ready(array)})
            interrupt.stop_point()
        filled.append(batch)
    return filled


def _read(
    teach: Teach,
    params: Params,
    rows: TeacherRows,
    chosen: np.ndarray,
    layout: Layout,
    *,
    shape: RowShape,
    mesh: jax.sharding.Mesh,
) -> tuple[Array, np.ndarray]:
    """Run `teach` on the chosen responses; return its result and the index of each minibatch position in it, or -1."""
    by_row, (N, U) = named_sharding(mesh, "batch"), rows.tokens_NU.shape
    packed = pack(separate(rows.length_N[chosen]), shape)
    there_BU = packed.segment_BT > 0
    response_BU = np.where(there_BU, chosen[packed.sample_BT], 0)
    source_BU = np.where(there_BU, response_BU * U + packed.column_BT, 0).astype(np.int32)
    arrays = multihost.to_devices((source_BU, packed.segment_BT), by_row)
    take = jax.jit(_take, out_shardings=by_row)
    tokens_BU, segment_BU, mask_BU = take(rows.tokens_NU, rows.mask_NU, *arrays)
    values = teach(params, tokens_BU, segment_BU, mask_BU, None)

    place_NU = np.full((N, U), -1, np.int32)
    row, column = np.nonzero(there_BU)
    place_NU[response_BU[there_BU], packed.column_BT[there_BU]] = row * values.shape[1] + column
    return values, take_positions(place_NU, rows, layout, -1)


def take_positions(of_NU: np.ndarray, rows: TeacherRows, layout: Layout, rest: float) -> np.ndarray:
    """Gather the value of each minibatch position, [B, T]; `rest` for padding and prompts, but not their last token."""
    response_BT, column_BT = np.broadcast_arrays(layout.response, layout.column)
    number_BT, U = np.maximum(response_BT, 0), of_NU.shape[1]
    wanted_BT = column_BT + rows.shift_N[number_BT]
    found_BT = (response_BT >= 0) & (column_BT >= rows.first_N[number_BT]) & (wanted_BT < U)
    return np.where(found_BT, of_NU[number_BT, np.clip(wanted_BT, 0, U - 1)], rest)


def _take(tokens_NU: Array, mask_NU: Array, source_BU: Array, segment_BU: Array) -> tuple[Array, Array, Array]:
    def take(x_NU: Array) -> Array:
        return jnp.where(segment_BU > 0, x_NU.reshape(-1)[source_BU], jnp.zeros((), x_NU.dtype))

    return take(tokens_NU), segment_BU, take(mask_NU)


def _put(into: Array | None, values: Array, place_BT: np.ndarray, width: int, mesh: jax.sharding.Mesh) -> Array:
    """Write values into `into` (default: zeros) at the positions with an index of 0 or more in `place_BT`."""
    if values.ndim == 3:  # positions are padded as `forward` pads them
        place_BT = np.pad(place_BT, ((0, 0), (0, -place_BT.shape[1] % mesh.shape["context"])), constant_values=-1)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, width - values.shape[2])))
    sharding = jax.sharding.NamedSharding(mesh, token_spec(mesh, *place_BT.shape))
    place = multihost.to_devices(place_BT.astype(np.int32), named_sharding(mesh, "batch"))
    return cast(Array, jax.jit(_move, out_shardings=sharding)(into, values, place))


def _move(into: Array | None, values: Array, place_BT: Array) -> Array:
    moved = values.reshape(-1, *values.shape[2:])[jnp.maximum(place_BT, 0)]
    has_place = place_BT.reshape(*place_BT.shape, *[1] * (moved.ndim - 2)) >= 0
    return jnp.where(has_place, moved, jnp.zeros_like(moved) if into is None else into)


def number_tokens(batches: Sequence[Batch], layouts: Sequence[Layout], number_N: np.ndarray) -> list[Batch]:
    """Fill the minibatches with the index of each token's teacher, for updates that compare the logits of several."""
    filled = []
    for batch, layout in zip(batches, layouts, strict=True):
        number_BT = np.where(layout.response >= 0, number_N[layout.response], 0).astype(np.float32)
        number_BT = np.broadcast_to(number_BT, batch.tokens_BT.shape)
        sharding = batch.tokens_BT.sharding
        filled.append(replace(batch, teacher_BT=multihost.to_devices(np.array(number_BT), sharding)))
    return filled
