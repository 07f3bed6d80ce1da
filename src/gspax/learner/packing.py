"""Packs samples into rows: which tokens stand where, and which segment each continues.

A sample has one sequence, or several (`Rollout.sequence_BT`). All of its tokens stand in one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gspax.config import RowShape


class Piece(NamedTuple):
    """Adjacent tokens of a sample, of one of its sequences."""

    sample: int
    first: int  # position of its first token in the sample's own row
    length: int
    parent: int = -1  # the piece of the unit that it continues; -1: none


Unit = list[Piece]  # pieces that stay together in a row; those that continue one follow it, as in `kernels.trees`


class Packed(NamedTuple):
    """The positions of the pieces in packed rows; int32 [B, T]."""

    sample_BT: np.ndarray  # the sample at each position; -1: padding
    column_BT: np.ndarray  # its position in that sample's own row; -1: padding
    segment_BT: np.ndarray  # the number of the piece, from 1 in each row; 0: padding
    prefix_BT: np.ndarray  # the number of the piece that it continues; 0: none
    used: int  # microbatches with a token; the others come last


def pack(units: Sequence[Unit], shape: RowShape) -> Packed:
    """Pack units into rows; the pieces of a unit are adjacent.

    Axes: B rows, T positions, as `shape` has them. Microbatch m takes the rows m, m + M, ...
    (`train_step.run_microbatches`), so that is where its rows are put.
    """
    sample_BT = np.full((shape.rows, shape.length), -1, np.int32)
    column_BT, segment_BT = sample_BT.copy(), np.zeros_like(sample_BT)
    prefix_BT = segment_BT.copy()
    packed_N, first_N = first_fit_decreasing(np.array([unit_length(unit) for unit in units], int), shape.length)
    count, numbers = shape.rows // shape.microbatch, np.zeros(shape.rows, np.int32)
    for index in np.argsort(first_N, kind="stable"):
        microbatch, place = divmod(packed_N[index], shape.microbatch)
        row, first = place * count + microbatch, first_N[index]
        root = numbers[row] + 1
        for piece in units[index]:
            numbers[row] += 1
            here = row, slice(first, first + piece.length)
            sample_BT[here], segment_BT[here] = piece.sample, numbers[row]
            column_BT[here] = piece.first + np.arange(piece.length)
            prefix_BT[here] = 0 if piece.parent < 0 else root + piece.parent
            first += piece.length
    used = int(packed_N.max(initial=-1)) // shape.microbatch + 1
    return Packed(sample_BT, column_BT, segment_BT, prefix_BT, used)


def unit_length(unit: Unit) -> int:
    """Count the tokens of a unit."""
    return sum(piece.length for piece in unit)


def number_samples(sample_BT: np.ndarray) -> np.ndarray:
    """Number the samples of each row 1, 2, ..., and padding, which is -1, 0: `Batch.sample_BT`."""
    numbered_BT = np.zeros_like(sample_BT)
    for row, sample_T in zip(numbered_BT, sample_BT, strict=True):
        row[sample_T >= 0] = np.unique(sample_T[sample_T >= 0], return_inverse=True)[1] + 1
    return numbered_BT


def first_fit_decreasing(length_N: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign each sequence a row and a start position: the longest first, each to the first row with room for it.

    At most 11/9 of the fewest rows possible, plus one (Johnson 1973).

    Raises:
      ValueError: a sequence is longer than `capacity`, the tokens of a row.
    """
    if length_N.max(initial=0) > capacity:
        raise ValueError(f"packing: wanted sequences of at most {capacity} tokens, got {length_N.max()}")
    row_N, first_N = np.zeros_like(length_N), np.zeros_like(length_N)
    free = np.full(len(length_N), capacity)
    for index in np.argsort(-length_N, kind="stable"):
        row = np.argmax(free >= length_N[index])
        row_N[index], first_N[index] = row, capacity - free[row]
        free[row] -= length_N[index]
    return row_N, first_N


def separate(length_N: np.ndarray) -> list[Unit]:
    """Make one unit per sample of one sequence, prompt included."""
    return [[Piece(index, 0, int(length))] for index, length in enumerate(length_N)]


def fit_groups(
    length_N: np.ndarray, group_N: np.ndarray, count_shared: Callable[[list[int]], int], capacity: int
) -> Iterator[tuple[list[int], int]]:
    """Yield the samples of a group that fit one row together, for each row of each group, and the tokens they share.

    Args:
      length_N: the tokens of each sample alone.
      group_N: samples with equal numbers share tokens.
      count_shared: counts the tokens that all of these samples share, which stand once in a row.
      capacity: the tokens of a row. ValueError if a sample is longer.
    """
    for group in np.unique(group_N):
        members = np.flatnonzero(group_N == group)
        shared = count_shared(members.tolist())
        row_M, _ = first_fit_decreasing(length_N[members] - shared, capacity - shared)
        for number in range(row_M.max() + 1):
            yield members[row_M == number].tolist(), shared


def share_prompts(length_N: np.ndarray, prompt_length_N: np.ndarray, group_N: np.ndarray, capacity: int) -> list[Unit]:
    """Make units that hold a prompt once for as many of its responses as fit a row of `capacity` tokens.

    The first piece of a unit is the prompt without its last token. The last token is repeated in every response, so
    that the token before each token of a response is in the same piece.

    Args:
      group_N: samples with equal numbers have one prompt.
    """
    units: list[Unit] = []
    for chosen, shared in fit_groups(length_N, group_N, lambda members: int(prompt_length_N[members[0]]) - 1, capacity):
        if len(chosen) == 1 or shared == 0:
            units += [[Piece(index, 0, int(length_N[index]))] for index in chosen]
            continue
        rests = [Piece(index, shared, int(length_N[index]) - shared, parent=0) for index in chosen]
        units.append([Piece(chosen[0], 0, shared), *rests])
    return units
