"""Shares the prefixes of samples that are several sequences, as an agent's are, so that no token is computed twice.

The sequences of a unit make a tree: each shares as much as it can of those before it, up to the first token that the
policy sampled in it. A sampled token stands once, in the sequence that it was sampled in, and directly after the token
before it, which predicts it. What branches off begins with the last shared token again, for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from gspax.learner.packing import Piece, Unit, fit_groups, unit_length


class Tokens(NamedTuple):
    """One sequence of a sample."""

    sample: int
    first: int  # position of its first token in the sample's own row
    tokens: np.ndarray  # int32
    sampled: np.ndarray  # bool, by the policy

    @property
    def prompt(self) -> int:
        """Count the tokens before the first sampled one."""
        return int(np.argmax(self.sampled)) if self.sampled.any() else len(self.tokens)


def split_sequences(
    tokens_NT: np.ndarray, mask_NT: np.ndarray, sequence_NT: np.ndarray, length_N: np.ndarray
) -> list[list[Tokens]]:
    """Split the rows of samples into their sequences (`Rollout.sequence_BT`)."""
    samples = []
    for sample, (tokens_T, mask_T, number_T, length) in enumerate(
        zip(tokens_NT, mask_NT, sequence_NT, length_N, strict=True)
    ):
        starts = [0, *(np.flatnonzero(np.diff(number_T[:length])) + 1).tolist()]
        spans = zip(starts, [*starts[1:], int(length)], strict=True)
        samples.append([Tokens(sample, first, tokens_T[first:end], mask_T[first:end]) for first, end in spans])
    return samples


def separate_sequences(samples: Sequence[Sequence[Tokens]]) -> list[Unit]:
    """Make one unit per sample, which shares nothing."""
    return [[Piece(one.sample, one.first, len(one.tokens)) for one in sample] for sample in samples]


def share_prefixes(
    samples: Sequence[Sequence[Tokens]], group_N: np.ndarray, capacity: int, *, deep: bool = True
) -> list[Unit]:
    """Make units that share prefixes within each sample, and among as many samples of a group as fit a row.

    Args:
      samples: the sequences of each.
      group_N: the group of each.
      capacity: the tokens of a row.
      deep: what continues a prefix may itself be one, as `Mixer.deep_prefixes` of all layers allows.

    Raises:
      ValueError: a sample does not fit a row.
    """

    def count_shared(members: list[int]) -> int:
        firsts = [samples[index][0] for index in members]
        return max(min(_common(firsts[0], other, other.prompt) for other in firsts) - 1, 0)

    length_N = np.array([unit_length(_share([sample], deep)) for sample in samples])
    rows = fit_groups(length_N, group_N, count_shared, capacity)
    return [_share([samples[index] for index in chosen], deep) for chosen, _ in rows]


@dataclass
class _Node:
    """Tokens of a sequence, from one number of it to another, and what continues them: its own rest first."""

    source: Tokens
    start: int
    end: int
    children: list[_Node] = field(default_factory=list)


def _share(samples: Sequence[Sequence[Tokens]], deep: bool) -> Unit:
    """Make one unit of samples."""
    root, unit = _Node(samples[0][0], 0, 0), Unit()
    for one in chain.from_iterable(samples):
        _insert(root, one, deep)
    _list_pieces(root, -1, unit)
    return unit


def _insert(node: _Node, new: Tokens, deep: bool) -> None:
    """Add a sequence below a node, all of whose tokens it shares."""
    found = max(node.children, key=lambda child: _common(child.source, new, new.prompt), default=None)
    common = 0 if found is None else _common(found.source, new, new.prompt)
    if found is None or common - 1 <= node.end:
        node.children.append(_Node(new, node.end, len(new.tokens)))
    elif deep and found.children and common > found.end:
        _insert(found, new, deep)
    elif deep or not found.children:
        found.children = [_Node(found.source, common - 1, found.end, found.children)]
        found.end = common - 1
        found.children.append(_Node(new, found.end, len(new.tokens)))
    else:  # what continues it repeats what is no longer shared
        found.end = min(common - 1, found.end)
        for child in found.children:
            child.start = found.end
        found.children.append(_Node(new, found.end, len(new.tokens)))


def _list_pieces(node: _Node, number: int, unit: Unit) -> None:
    """Add the pieces below a node, which has this number in the unit, in the order of their positions."""
    for child in node.children:
        source = child.source
        unit.append(Piece(source.sample, source.first + child.start, child.end - child.start, number))
        _list_pieces(child, len(unit) - 1, unit)


def _common(one: Tokens, other: Tokens, limit: int) -> int:
    """Count the tokens at the start that are equal, up to a limit."""
    limit = min(limit, len(one.tokens), len(other.tokens))
    differs = one.tokens[:limit] != other.tokens[:limit]
    return int(np.argmax(differs)) if differs.any() else limit
