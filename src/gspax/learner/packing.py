"""Several responses, each with its prompt, in one row of a minibatch: which row each goes to, and where in it."""

from __future__ import annotations

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


def pack(length_N: np.ndarray, shape: RowShape) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The sequence at each position, its column there, its number within the row, and how many microbatches are used.

    Axes: N sequences, B rows, T positions, as `shape` has them. The arrays are int32 [B, T]. The number of a sequence
    counts from 1 in each row; at padding it is 0 and the others are -1. Microbatch m takes the rows m, m + M, ...
    (`microbatches`), so that is where its rows are put; the first ones are filled.
    """
    sequence_BT = np.full((shape.rows, shape.length), -1, np.int32)
    column_BT, segment_BT = sequence_BT.copy(), np.zeros_like(sequence_BT)
    packed_N, first_N = first_fit_decreasing(length_N, shape.length)
    count, numbers = shape.rows // shape.microbatch, np.zeros(shape.rows, np.int32)
    for index in np.argsort(first_N, kind="stable"):
        microbatch, place = divmod(packed_N[index], shape.microbatch)
        row, first, length = place * count + microbatch, first_N[index], length_N[index]
        numbers[row] += 1
        here = row, slice(first, first + length)
        sequence_BT[here], column_BT[here], segment_BT[here] = index, np.arange(length), numbers[row]
    return sequence_BT, column_BT, segment_BT, int(packed_N.max(initial=-1)) // shape.microbatch + 1
