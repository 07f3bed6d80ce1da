"""The order of rows, computed instead of stored.

`shuffle` permutes [0, size) by a keyed Feistel network with cycle walking: position -> row is a function of seed and
index alone, so that an epoch needs no list of its rows and a run resumes with one integer. Grain's `MapDataset.shuffle`
would make Grain a requirement of every JSONL file, and `shuffle(seed=s)` gives epoch e the order of epoch 0 of seed
s + e, so that runs with neighboring seeds share their orders.
"""

from __future__ import annotations

import functools
import hashlib

from gspax.data.problem import at_least_0

_ROUNDS = 8


def shuffle(seed: int, index: int, size: int) -> int:
    """Return the row in [0, size) at position `index` of an endless series of epochs, each of them a permutation."""
    epoch, position = divmod(at_least_0(index), size)
    return permute(position, size, block_key(f"epoch {seed} {epoch}"))


def permute(position: int, size: int, key: bytes) -> int:
    """Permute [0, size): return the image of `position` under the permutation that `key` (at most 64 bytes) chooses.

    The network permutes the smallest [0, 4^h) that contains [0, size); a value outside [0, size) is permuted again
    until it is inside, which takes fewer than four tries on average.
    """
    half = (max(size - 1, 1).bit_length() + 1) // 2
    value = _feistel(position, half, key)
    while value >= size:
        value = _feistel(value, half, key)
    return value


def _feistel(value: int, half: int, key: bytes) -> int:
    """Permute [0, 4^half) by a keyed Feistel network."""
    left, right = value >> half, value & ((1 << half) - 1)
    for number in range(_ROUNDS):
        message = number.to_bytes(1, "big") + right.to_bytes(8, "big")
        noise = int.from_bytes(hashlib.blake2b(message, key=key, digest_size=8).digest(), "big")
        left, right = right, left ^ (noise & ((1 << half) - 1))
    return left << half | right


@functools.lru_cache(maxsize=64)
def block_key(text: str) -> bytes:
    """Hash a text to a key for `permute`, the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
