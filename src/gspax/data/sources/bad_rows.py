"""Rows that cannot be used: how many there are, and the first different reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

_SHOWN = 5  # different reasons that a message lists


@dataclass
class BadRows:
    """Counts rows, and keeps the place of the first row of each of the first five reasons."""

    count: int = 0
    _shown: dict[str, tuple[str, int]] = field(default_factory=dict)  # reason -> place of the first, number of rows

    def add(self, where: str, reason: str) -> None:
        self.count += 1
        if reason in self._shown or len(self._shown) < _SHOWN:
            first, number = self._shown.get(reason, (where, 0))
            self._shown[reason] = first, number + 1

    def __str__(self) -> str:
        phrases = [
            f"{where}: {reason}" + (f" ({number} rows)" if number > 1 else "")
            for reason, (where, number) in self._shown.items()
        ]
        others = self.count - sum(number for _, number in self._shown.values())
        return "; ".join([*phrases, *([f"and {others} more"] if others else [])])
