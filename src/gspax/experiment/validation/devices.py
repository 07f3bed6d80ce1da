"""Whether an experiment is valid on the devices that it runs on."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from gspax.config import Experiment
from gspax.experiment.validation.rules import check
from gspax.parallel.sharding import group_by_slice, split_devices


def check_on(devices: Sequence[jax.Device], experiment: Experiment) -> None:
    """Raise UserError if an experiment is invalid, on these devices or on any (`check`)."""
    learner, sampler = (len(group_by_slice(part)) for part in split_devices(devices, experiment.placement))
    check(experiment, len(devices), (learner, sampler))
