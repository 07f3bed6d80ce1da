"""Several responses, each with its prompt or after a shared one, in one row of a minibatch: which row, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gspax.config import RowShape


def first_fit_decreasing(length_N: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The row of each sequence and its first position there: the longest first, each in the first row with room for it.

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


class Piece(NamedTuple):
    """Adjacent tokens of a sequence."""

    sequence: int
    first: int  # position of its first token in the sequence
    length: int


Unit = list[Piece]  # pieces that stay together in a row: one sequence, or a prompt and what continues it


def separate(length_N: np.ndarray) -> list[Unit]:
    """Each sequence by itself, with its prompt."""
    return [[Piece(index, 0, int(length))] for index, length in enumerate(length_N)]


def share_prompts(length_N: np.ndarray, prompt_length_N: np.ndarray, group_N: np.ndarray, capacity: int) -> list[Unit]:
    """Each prompt once for as many of its responses as fit a row of `capacity` tokens.

    The first piece of a unit is the prompt without its last token. That belongs to every response, so that the token
    before each token of a response is in the same piece.

    Args:
      group_N: sequences with equal numbers have one prompt.
    """
    units: list[Unit] = []
    for group in np.unique(group_N):
        members = np.flatnonzero(group_N == group)
        shared = int(prompt_length_N[members[0]]) - 1
        own = length_N[members] - shared
        row, _ = first_fit_decreasing(own, capacity - shared)
        for number in range(row.max() + 1):
            chosen = members[row == number].tolist()
            if len(chosen) == 1 or shared == 0:
                units += [[Piece(index, 0, int(length_N[index]))] for index in chosen]
                continue
            units.append([Piece(chosen[0], 0, shared)])
            units[-1] += [Piece(index, shared, int(length_N[index]) - shared) for index in chosen]
    return units


class Packed(NamedTuple):
    """Where everything is; int32 [B, T]."""

    sequence_BT: np.ndarray  # the sequence at each position; -1: padding
    column_BT: np.ndarray  # its position in that sequence; -1: padding
    segment_BT: np.ndarray  # the number of the piece, from 1 in each row; 0: padding
    prefix_BT: np.ndarray  # the number of the piece that it continues; 0: none
    used: int  # microbatches with a token; the others come last


def pack(units: Sequence[Unit], shape: RowShape) -> Packed:
    """Units in rows, the first of their pieces first.

    Axes: B rows, T positions, as `shape` has them. Microbatch m takes the rows m, m + M, ... (`microbatches`), so that
    is where its rows are put.
    """
    sequence_BT = np.full((shape.rows, shape.length), -1, np.int32)
    column_BT, segment_BT = sequence_BT.copy(), np.zeros_like(sequence_BT)
    prefix_BT = segment_BT.copy()
    lengths = np.array([sum(piece.length for piece in unit) for unit in units], int)
    packed_N, first_N = first_fit_decreasing(lengths, shape.length)
    count, numbers = shape.rows // shape.microbatch, np.zeros(shape.rows, np.int32)
    for index in np.argsort(first_N, kind="stable"):
        microbatch, place = divmod(packed_N[index], shape.microbatch)
        row, first = place * count + microbatch, first_N[index]
        root = numbers[row] + 1
        for piece in units[index]:
            numbers[row] += 1
            here = row, slice(first, first + piece.length)
            sequence_BT[here], segment_BT[here] = piece.sequence, numbers[row]
            column_BT[here] = piece.first + np.arange(piece.length)
            prefix_BT[here] = root if numbers[row] > root else 0
            first += piece.length
    used = int(packed_N.max(initial=-1)) // shape.microbatch + 1
    return Packed(sequence_BT, column_BT, segment_BT, prefix_BT, used)
