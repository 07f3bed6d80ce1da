"""Ranges of numbers, written in the annotation of a field or a keyword: `prompts: PositiveInt = 64`.

`experiment.validation` reads them there, from the dataclasses of an experiment and from the functions that it names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """The accepted values, and their description in an error message ("wanted at least 1, got 0")."""

    words: str
    accepts: Callable[[Any], bool]


def at_least(low: int) -> Range:
    """Make the range of finite numbers from `low` on."""
    return Range(f"at least {low}", lambda x: low <= x < math.inf)


def at_most(high: float) -> Range:
    """Make the range of numbers up to `high`."""
    return Range(f"at most {high}", lambda x: x <= high)


INT32 = 2**31 - 1  # what the devices count in
AXIS = Range("at least 1, or -1 for the devices that are left", lambda x: x >= 1 or x == -1)
CHOSEN_AXIS = Range("at least 1, 0 to have it chosen, or -1 for the devices that are left", lambda x: x >= -1)
NAME = Range(
    "letters, digits, '.', '_' and '-', a letter or digit first",
    lambda x: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", x) is not None,
)
NOT_EMPTY = Range("at least one", lambda x: len(x) > 0)  # element, or character

PositiveInt = Annotated[int, at_least(1), at_most(INT32)]
NonNegativeInt = Annotated[int, at_least(0), at_most(INT32)]
Positive = Annotated[float, Range("above 0", lambda x: 0 < x < math.inf)]
NonNegative = Annotated[float, at_least(0)]
Finite = Annotated[float, Range("a finite number", lambda x: abs(x) < math.inf)]
Share = Annotated[float, Range("above 0 and at most 1", lambda x: 0 < x <= 1)]
Below1 = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]
Between0And1 = Annotated[float, Range("above 0 and below 1", lambda x: 0 < x < 1)]
AtLeast2 = Annotated[int, at_least(2), at_most(2**20)]
# Larger than any model: a size beyond is a typo, which would run out of memory or take hours to estimate.
Size = Annotated[int, at_least(1), at_most(2**24)]
OptionalSize = Annotated[int, at_least(0), at_most(2**24)]
Seed = Annotated[int, Range("at least 0 and below 2^32", lambda x: 0 <= x < 2**32)]
