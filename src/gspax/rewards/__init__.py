"""Rewards for verifiable tasks: mathematical equality, formats, lengths and tests of programs.

A reward is a plain function `(problem, completion) -> float`; `functools.partial` sets its keyword-only parameters. See
docs/rewards.md.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULES = (
    "answers",
    "calls",
    "code",
    "combination",
    "environments",
    "format",
    "guard",
    "http",
    "length",
    "math",
    "scores",
)


def __getattr__(name: str) -> ModuleType:
    """Import a module of this package when `rewards.NAME` is first used, as in `from gspax import rewards`."""
    if name not in _MODULES:
        raise AttributeError(f"module 'gspax.rewards' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    return importlib.import_module(f"{__name__}.{name}")
