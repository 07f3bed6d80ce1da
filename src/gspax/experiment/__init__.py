"""Everything about an experiment before it runs: load the file, override fields, validate, describe, plan."""

from gspax.experiment.description import RESUMABLE, describe, difference, flatten
from gspax.experiment.loading import load
from gspax.experiment.overrides import override
from gspax.experiment.validation import check, validate, warnings

__all__ = [
    "RESUMABLE",
    "check",
    "describe",
    "difference",
    "flatten",
    "load",
    "override",
    "validate",
    "warnings",
]
