"""A measured part of a benchmark, as a row of a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """What the machine can do at most (`limits`)."""

    matmul_flops: float  # FLOP/s
    copy_bytes: float  # bytes/s, read and written


@dataclass(frozen=True)
class Figure:
    """One part: medians of its calls after the first, and the work of one call."""

    name: str
    wall_s: float
    cpu_s: float  # of all threads of this process
    tokens: float
    flops: float  # counted from the model's shape
    bytes: float = 0.0  # that must be moved at least, where memory is the limit; 0: not counted

    def to_json(self, limits: Limits) -> dict[str, Any]:
        """The figure with its rates and their share of the limits."""
        rates = {
            "tokens_per_s": self.tokens / self.wall_s,
            "flops_per_s": self.flops / self.wall_s,
            "of_matmul": self.flops / self.wall_s / limits.matmul_flops,
        }
        if self.bytes:
            rates |= {
                "bytes_per_s": self.bytes / self.wall_s,
                "of_copy": self.bytes / self.wall_s / limits.copy_bytes,
            }
        return {**vars(self), **rates}


def table(figures: Sequence[Figure], limits: Limits) -> str:
    """One row per figure: seconds, tokens/s, FLOP/s and bytes/s with their share of the limit."""
    width = max(10, *(len(figure.name) + 1 for figure in figures))
    head = f"{'':{width}}{'wall s':>9}{'CPU s':>9}{'tokens/s':>12}{'GFLOP/s':>10}{'of matmul':>11}"
    lines = [f"{head}{'GB/s':>8}{'of copy':>9}"]
    for figure in figures:
        row = figure.to_json(limits)
        moved = f"{row['bytes_per_s'] / 1e9:8.2f}{row['of_copy']:9.1%}" if figure.bytes else ""
        lines.append(
            f"{figure.name:{width}}{figure.wall_s:9.3f}{figure.cpu_s:9.3f}{row['tokens_per_s']:12,.0f}"
            f"{row['flops_per_s'] / 1e9:10.2f}{row['of_matmul']:11.1%}{moved}"
        )
    return "\n".join(lines)
