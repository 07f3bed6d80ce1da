"""Several sources as one: `mixture`.

Grain's `MapDataset.mix` interleaves in one fixed pattern whatever the seed, and ends with its shortest part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from gspax.config.protocols import DataSource
from gspax.data.problem import Problem, at_least_0, count_distinct
from gspax.data.sources.order import block_key, permute
from gspax.data.sources.row_source import RowSource


@dataclass(frozen=True)
class Mixture:
    """Problems of several sources in fixed proportions.

    Every block of `sum(weights)` problems has exactly `weights[k]` from source k, in an order that depends on the seed
    and the block; each source gives its problems in its own order and none is left out. A prompt that one source holds
    out is not a training problem of another one.

    Attributes:
      sources: any data sources.
      weights: positive integers, one for each.
      seed: the seed of the order within the blocks of training problems.
    """

    sources: tuple[DataSource, ...]
    weights: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sources or len(self.sources) != len(self.weights):
            raise ValueError(f"weights: wanted one for each of {len(self.sources)} sources, got {self.weights}")
        if not all(isinstance(weight, int) and weight > 0 for weight in self.weights):
            raise ValueError(f"weights: wanted positive integers, got {self.weights}")

    def train(self, index: int) -> Problem:
        """Return training problem number `index`, from 0."""
        source, inner = self._find(index, f"mixture {self.seed}")
        return self.parts[source].train(inner)

    def heldout(self, index: int) -> Problem:
        """Return held-out problem number `index`, from 0, in the same proportions and an order that ignores the seed.

        A source without further held-out problems is skipped. After the last problem of all sources the list repeats.
        """
        if self.count_heldout(at_least_0(index) + 1) == 0:
            raise ValueError("none of the sources has a held-out problem")
        _, source, inner = self._heldout[index % len(self._heldout)]
        return self.parts[source].heldout(inner)

    def count_heldout(self, most: int) -> int:
        """Count the held-out problems of all sources, up to `most`."""
        found, block = self._heldout, sum(self.weights)
        index = found[-1][0] + 1 if found else 0
        since = index  # the first index after the last problem that was found
        while len(found) < most and index - since < 2 * block:  # a whole block without a problem: none is left
            source, inner = self._find(index, "mixture heldout")
            if count_distinct(self.parts[source], inner + 1) > inner:
                found.append((index, source, inner))
                since = index
            index += 1
        return min(most, len(found))

    @functools.cached_property
    def _heldout(self) -> list[tuple[int, int, int]]:
        """The held-out problems counted so far: (index in the mixture, source, index in the source)."""
        return []

    def described(self) -> dict[str, object]:
        """Describe the mixture for `experiment.describe`; numbered sources let a difference name their fields."""
        return {"sources": dict(enumerate(self.parts)), "weights": self.weights, "seed": self.seed}

    @functools.cached_property
    def parts(self) -> tuple[DataSource, ...]:
        """Return the sources, each without the training prompts that another one holds out."""
        return tuple(map(self._without_heldout, self.sources))

    def _without_heldout(self, source: DataSource) -> DataSource:
        if not isinstance(source, RowSource):
            return source
        others = [other for other in self.sources if isinstance(other, RowSource) and other is not source]
        if source.heldout_rows is None:  # sources split by the same hash cannot overlap
            others = [other for other in others if other.heldout_rows is not None]
        return dataclasses.replace(source, exclude=(*source.exclude, *others)) if others else source

    def _find(self, index: int, key: str) -> tuple[int, int]:
        """Return the number of the source that problem `index` comes from, and the problem's index in that source."""
        ends = list(accumulate(self.weights))
        block, position = divmod(at_least_0(index), ends[-1])
        slot = permute(position, ends[-1], block_key(f"{key} {block}"))
        source = bisect_right(ends, slot)
        return source, block * self.weights[source] + slot - (ends[source] - self.weights[source])


def mixture(*parts: tuple[DataSource, float], seed: int = 0) -> Mixture:
    """Mix sources by weight: `mixture((gsm8k, 3), (math, 1))`; `(gsm8k, 0.75), (math, 0.25)` is the same."""
    weights = [Fraction(str(weight)) for _, weight in parts]
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*whole) or 1
    return Mixture(tuple(source for source, _ in parts), tuple(weight // divisor for weight in whole), seed)
