"""Problems that come again."""

from dataclasses import dataclass, replace
from typing import Any

from gspax.data.sources.order import shuffle


@dataclass(frozen=True)
class Epochs:
    """The first `count` training problems of a generator in epochs, each in an order of its own; 0: no problem twice.

    Held-out problems are the generator's.
    """

    source: Any
    count: int = 0
    seed: int = 0

    def train(self, index):
        return replace(self.source, seed=self.seed).train(
            shuffle(self.seed, index, self.count) if self.count else index
        )

    def heldout(self, index):
        return self.source.heldout(index)
