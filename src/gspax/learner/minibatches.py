"""Builds the minibatches of a rollout's updates: split or packed, with old log-probs and advantages.

Packed rows hold several responses, each with its prompt or after a shared one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import RewardPenalty, RowShape, Term
from gspax.learner.objective import Scores, mix
from gspax.learner.packing import Unit, number_samples, pack, separate, share_prompts
from gspax.learner.prefixes import separate_sequences, share_prefixes, split_sequences
from gspax.learner.train_step import Score
from gspax.losses.selection import Minibatch
from gspax.losses.shaping import filter_overlong
from gspax.model.passes import Passes
from gspax.parallel import multihost, timeline
from gspax.parallel.sharding import named_sharding
from gspax.run import interrupt
from gspax.types import Array, Batch, Params, PyTree, Rollout, known


@dataclass(frozen=True)
class Layout:
    """The positions of a rollout's responses in a minibatch, and the size of its padding."""

    response: np.ndarray  # int32 [B, T], or [B, 1] for one response in each row; -1: padding
    column: np.ndarray  # int32 [B, T], or [1, T] likewise: the position within the response's own row
    tokens: int  # tokens of completions, and of prompts as often as they occur
    positions: int  # positions that a pass computes


class Segments(NamedTuple):
    """The fields of `Batch` that say which tokens belong together; int32."""

    segment_BT: Array | np.ndarray
    prefix_BT: Array | np.ndarray | None = None
    sample_BT: Array | np.ndarray | None = None


def split_minibatches(
    rollout: Rollout,
    count: int,
    shape: RowShape,
    mesh: jax.sharding.Mesh,
    *,
    without_overlong: bool = False,
    sharing: int = 0,
    deep_prefixes: bool = True,
) -> tuple[list[Batch], list[Layout]]:
    """Split a rollout into `count` minibatches of adjacent responses, sharded over the mesh.

    Args:
      rollout: its lengths are on the host.
      shape: `config.row_shape`. Rows that are not packed keep the rollout's length.
      without_overlong: the loss leaves out completions that were truncated at the maximum length.
      sharing: the number of adjacent responses with one prompt, which packed rows hold once for several of them, as
        they do other prefixes of samples that are several sequences; 0: each response has its own.
      deep_prefixes: all layers have `Mixer.deep_prefixes`.
    """
    # rows that one device sampled are redistributed over all of them without passing through the host
    jit = partial(jax.jit, out_shardings=named_sharding(mesh, "batch"))
    total_N = np.asarray(rollout.prompt_length_B) + np.asarray(rollout.length_B)
    size, T = len(total_N) // count, rollout.tokens_BT.shape[1]
    parts = [range(i * size, (i + 1) * size) for i in range(count)]
    if not shape.packed:
        batches = jit(_split, static_argnums=(1, 2, 3))(rollout, count, shape.rows, without_overlong)
        padding, column_1T = np.full(shape.rows - size, -1, np.int32), np.arange(T, dtype=np.int32)[None]
        return batches, [
            Layout(np.concatenate([part, padding])[:, None], column_1T, int(total_N[part].sum()), shape.rows * T)
            for part in parts
        ]
    gather, batches, layouts = jit(_gather, static_argnums=3), [], []
    for part, units in zip(parts, _make_units(rollout, parts, shape.length, sharing, deep_prefixes), strict=True):
        sample_BT, column_BT, segment_BT, prefix_BT, used = pack(units, shape)
        response_BT = np.where(segment_BT > 0, sample_BT + part.start, -1).astype(np.int32)
        source_BT = np.where(segment_BT > 0, response_BT * T + column_BT, 0).astype(np.int32)
        numbers_BT = None if rollout.sequence_BT is None else number_samples(response_BT)
        related = Segments(segment_BT, prefix_BT if sharing else None, numbers_BT)
        placed = multihost.to_devices((source_BT, related), named_sharding(mesh, "batch"))
        batches.append(gather(rollout, *placed, without_overlong))
        positions = used * shape.microbatch * shape.length
        layouts.append(Layout(response_BT, column_BT, int((segment_BT > 0).sum()), positions))
    return batches, layouts


def _make_units(
    rollout: Rollout, parts: Sequence[range], capacity: int, sharing: int, deep: bool
) -> Iterator[list[Unit]]:
    """Make the units of each part of a rollout. Collective if samples are several sequences."""
    prompt_N = np.asarray(rollout.prompt_length_B)
    total_N = prompt_N + np.asarray(rollout.length_B)
    samples = None
    if rollout.sequence_BT is not None:
        tokens_NT, mask_NT, sequence_NT = multihost.to_host((rollout.tokens_BT, rollout.mask_BT, rollout.sequence_BT))
        samples = split_sequences(tokens_NT, mask_NT, sequence_NT, total_N)
    for part in parts:
        here, group_N = slice(part.start, part.stop), np.array(part) // max(sharing, 1)
        if samples is None:
            shared = partial(share_prompts, total_N[here], prompt_N[here])
            yield shared(group_N, capacity) if sharing else separate(total_N[here])
        else:
            own = [[one._replace(sample=one.sample - part.start) for one in sample] for sample in samples[here]]
            yield share_prefixes(own, group_N, capacity, deep=deep) if sharing else separate_sequences(own)


def _split(rollout: Rollout, count: int, rows: int, without_overlong: bool) -> list[Batch]:
    """Make one row per response, and empty rows at the end of each minibatch."""
    total_B1 = (rollout.prompt_length_B + rollout.length_B)[:, None]
    responses, columns = rollout.tokens_BT.shape
    sample_BT = (jnp.arange(columns)[None] < total_B1).astype(jnp.int32)
    related = Segments(sample_BT)
    if rollout.sequence_BT is not None:
        related = Segments(rollout.sequence_BT, None, sample_BT)
    batch, size = Batch(**related._asdict(), **_arrays(rollout, without_overlong)), responses // count

    def part(x: Array, first: int) -> Array:
        return jnp.pad(x[first : first + size], ((0, rows - size), *[(0, 0)] * (x.ndim - 1)))

    return [jax.tree.map(partial(part, first=i * size), batch) for i in range(count)]


def _gather(rollout: Rollout, source_BT: Array, related: Segments, without_overlong: bool) -> Batch:
    """Build packed rows; `source_BT` is each position's index in the concatenated rows of the rollout."""

    def take(x_BT: Array) -> Array:  # sets and experts of padding are any: nothing reads them
        taken_BT = x_BT.reshape(-1, *x_BT.shape[2:])[source_BT]
        return taken_BT if x_BT.ndim > 2 else jnp.where(related.segment_BT > 0, taken_BT, jnp.zeros((), x_BT.dtype))

    arrays = _arrays(rollout, without_overlong)
    expert_BLTA = arrays.pop("expert_BLTA")
    if expert_BLTA is not None:
        expert_BLTA = take(expert_BLTA.swapaxes(1, 2)).swapaxes(1, 2)
    taken = jax.tree.map(take, arrays)
    return Batch(**related._asdict(), expert_BLTA=expert_BLTA, **taken)


def _arrays(rollout: Rollout, without_overlong: bool) -> dict[str, PyTree]:
    """Return the rollout's arrays by the field of `Batch`; None for arrays that the rollout lacks."""
    mask_BT = rollout.mask_BT
    return {
        "tokens_BT": rollout.tokens_BT,
        "mask_BT": filter_overlong(mask_BT, ~rollout.finished_B) if without_overlong else mask_BT,
        "sampler_logp_BT": rollout.logp_BT,
        "version_BT": rollout.version_BT,
        "expert_BLTA": rollout.expert_BLTA,
        "kept_BTK": rollout.kept_BTK,
    }


def packing_efficiency(layouts: Sequence[Layout]) -> float:
    """Compute the share of the positions in a forward pass that hold a token instead of padding."""
    return sum(layout.tokens for layout in layouts) / sum(layout.positions for layout in layouts)


def score_minibatches(
    score: Score, params: Params, batches: Sequence[Batch], scored: range
) -> tuple[list[Batch], dict[int, Scores]]:
    """Compute the old log-probs, and the routing if `score` keeps it.

    Collective, with a stop point after each minibatch (`run.interrupt`).

    Args:
      scored: the minibatches whose old log-probs are computed (`Steps.scored`). If it starts at 1, the first
        one is left to its update.

    Returns:
      The minibatches with these arrays, and the old policy's scores of those in `scored`, by number.
    """
    filled, of_old = list(batches), dict[int, Scores]()
    for index in scored:
        batch = filled[index]
        of_old[index] = scores = _score(score, params, batch, batch.expert_BLTA)
        expert_BLTA = batch.expert_BLTA if scores.expert_BLTA is None else scores.expert_BLTA
        filled[index] = replace(
            batch, old_logp_BT=scores.logp_BT, expert_BLTA=expert_BLTA, router_logp_BLTA=scores.router_logp_BLTA
        )
    return filled, of_old


def score_first(score: Score, first: Params, batches: Sequence[Batch]) -> list[Batch]:
    """Compute the log-probs of the first policy, `ref_logp_BT`. Collective, as `score_minibatches`.

    It routes by itself, but chooses from the tokens that the sampler did.
    """
    return [replace(batch, ref_logp_BT=_score(score, first, batch, None).logp_BT) for batch in batches]


def score_rows(score: Score, params: Params, batch: Batch, rows: np.ndarray, mesh: jax.sharding.Mesh) -> Array:
    """Compute the log-probs of some rows of a minibatch, float32 [R, T]. Collective, as `score_minibatches`.

    Args:
      rows: int [R]; R is a microbatch, so one compiled program serves any choice of rows.
    """
    part: Batch = jax.jit(_take, out_shardings=named_sharding(mesh, "batch"))(batch, rows)
    return _score(score, params, part, part.expert_BLTA).logp_BT


def _take(batch: Batch, row_R: Array) -> Batch:
    return jax.tree.map(lambda x: x[row_R], batch)


def _score(score: Score, params: Params, batch: Batch, expert_BLTA: Array | None) -> Scores:
    rows = batch.tokens_BT, batch.segment_BT, batch.mask_BT
    with timeline.span(timeline.LEARNER, "log-probs"):
        scores = score(params, *rows, expert_BLTA, batch.prefix_BT, kept_BTK=batch.kept_BTK)
        jax.block_until_ready(scores)  # dispatched ahead, they would leave no moment to stop between minibatches
    interrupt.stop_point()
    return scores


# (batch, entropy_BT of the old policy, key) -> weights [B, T] by the field of `Batch` that they belong to
Select = Callable[[Batch, Array, Array], dict[str, Array]]


def make_select(passes: Passes, mesh: jax.sharding.Mesh) -> Select:
    """Make a jitted function that computes all selections of a batch with old log-probs and advantages.

    The advantages are those that the loss gets, with those of terms.
    """
    terms, functions = passes.terms, passes.selections

    @partial(jax.jit, out_shardings=named_sharding(mesh, "batch"))
    def select(batch: Batch, entropy_BT: Array, key: Array) -> dict[str, Array]:
        batch, _ = mix(terms, batch)
        advantage, mask_BT = known(batch, "advantage"), batch.mask_BT
        advantage_BT = jnp.broadcast_to(advantage if advantage.ndim == 2 else advantage[:, None], mask_BT.shape)
        policies = known(batch, "old_logp_BT"), known(batch, "sampler_logp_BT")
        minibatch = Minibatch(*policies, entropy_BT, advantage_BT, mask_BT, key)
        return {field: function(minibatch).astype(jnp.float32) for field, function in functions.items()}

    return select


def select_tokens(select: Select, batches: Sequence[Batch], scores: Mapping[int, Scores], key: Array) -> list[Batch]:
    """Fill the minibatches with the weights of the selections, each computed over a whole minibatch.

    Args:
      scores: the old policy's, of each minibatch.
      key: a random key for this rollout alone.
    """
    return [
        replace(batch, **select(batch, scores[index].entropy_BT, jax.random.fold_in(key, index)))
        for index, batch in enumerate(batches)
    ]


def take_sampler_logp(batches: Sequence[Batch]) -> list[Batch]:
    """Use the sampler's log-probs as the old log-probs of the minibatches."""
    return [replace(batch, old_logp_BT=known(batch, "sampler_logp_BT")) for batch in batches]


def sum_penalties(
    terms: Sequence[Term], batches: Sequence[Batch], layouts: Sequence[Layout]
) -> list[tuple[RewardPenalty, np.ndarray]]:
    """Sum each term's penalty on rewards over the tokens of each response, float32 [N]."""
    summed = []
    for penalty in chain.from_iterable(term.reward_penalties() for term in terms):
        sums = map(_sum_by_response, multihost.to_host([penalty.estimate(batch) for batch in batches]), layouts)
        summed.append((penalty, np.concatenate([*sums]).astype(np.float32)))
    return summed


def _sum_by_response(value_BT: np.ndarray, layout: Layout) -> np.ndarray:
    number_BT = np.broadcast_to(layout.response, value_BT.shape)
    there_BT = number_BT >= 0
    number = number_BT[there_BT]
    return np.bincount(number - number.min(), value_BT[there_BT])


def gather_measured(
    scores: Mapping[int, Scores], layouts: Sequence[Layout], shape: tuple[int, ...]
) -> np.ndarray | None:
    """Gather what the pass measured of tokens into the rows of the rollout, float32 [N, T]; None if it did not."""
    measured = [x.measured_BT for x in scores.values() if x.measured_BT is not None]
    if not measured:
        return None
    return to_rows(measured, layouts, np.zeros(shape, np.float32))


def gather_logp(scores: Mapping[int, Scores], layouts: Sequence[Layout], shape: tuple[int, ...]) -> np.ndarray:
    """Gather the pass's log-probs into the rows of the rollout, float32 [N, T]; NaN where it did not run."""
    scored = [layouts[index] for index in scores]
    return to_rows([x.logp_BT for x in scores.values()], scored, np.full(shape, np.nan, np.float32))


def to_rows(values: Sequence[Array], layouts: Sequence[Layout], rows_NT: np.ndarray) -> np.ndarray:
    """Write the values of minibatches [B, T] into the rows of the rollout that they are of, and return these."""
    for value_BT, layout in zip(multihost.to_host(list(values)), layouts, strict=True):
        row_BT, column_BT = np.broadcast_arrays(layout.response, layout.column)
        there_BT = row_BT >= 0
        rows_NT[row_BT[there_BT], column_BT[there_BT]] = value_BT[there_BT]
    return rows_NT


def set_advantages(
    batches: Sequence[Batch], layouts: Sequence[Layout], advantage: np.ndarray, mesh: jax.sharding.Mesh
) -> list[Batch]:
    """Fill the minibatches with advantages of the responses, [N], or of their tokens, [N, T].

    Advantages of responses are set by row, in packed rows by token.
    """

    def place(layout: Layout) -> np.ndarray:
        there, column_BT = layout.response >= 0, np.maximum(layout.column, 0)
        placed = advantage[layout.response] if advantage.ndim == 1 else advantage[layout.response, column_BT]
        placed = np.where(there, placed, 0).astype(np.float32)
        return placed[:, 0] if placed.shape[1] == 1 else placed

    placed = multihost.to_devices([place(layout) for layout in layouts], named_sharding(mesh, "batch"))
    return [replace(batch, advantage=values) for batch, values in zip(batches, placed, strict=True)]
