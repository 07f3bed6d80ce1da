"""An experiment with the settings that a run has recorded, so that its overrides need not be repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from gspax.experiment.description import SOURCE, describe, flatten
from gspax.experiment.overrides import apply

T = TypeVar("T")


def as_recorded(experiment: T, description: Mapping[str, Any]) -> T:
    """The experiment with every setting of the description that an override can set.

    What no override can set, such as the content of a data file or the code of a function, stays as it is;
    `description.difference` names it.

    Args:
      description: of the experiment with other settings (`experiment.json` of its run).
    """
    wanted = flatten(description)
    while True:  # a function or a part that was set brings keys of its own
        now = flatten(json.loads(json.dumps(describe(experiment))))
        keys = [key for key in wanted if key in now and wanted[key] != now[key] and not key.endswith(SOURCE)]
        outer = [key for key in keys if not any(key.startswith(f"{other}.") for other in keys)]
        before = experiment
        experiment, _ = apply(experiment, [f"{key}={_to_text(wanted[key])}" for key in outer])
        if describe(experiment) == describe(before):
            return experiment


def _to_text(value: Any) -> str:
    """A value of a description as an override is written."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"({','.join(map(_to_text, value))})"
    return str(value)
