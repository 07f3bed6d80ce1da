"""The checks of an experiment before it starts. `rules.validate` runs them all."""

from gspax.experiment.validation.rules import check, check_published, validate, warnings

__all__ = ["check", "check_published", "validate", "warnings"]
