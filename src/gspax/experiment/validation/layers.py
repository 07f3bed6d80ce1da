"""The rule on kinds of layers: each supports what the experiment asks of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gspax.config import (
    Feature,
    ModelConfig,
    Sampling,
    Schedule,
    obstacle,
)
from gspax.experiment.validation.pairs import describe


def layer_problems(model: ModelConfig, schedule: Schedule, sampling: Sampling, *, served: bool) -> Iterator[str]:
    """Yield a sentence for each setting that a kind of layer in the model does not support."""
    asked: dict[Feature, tuple[bool, str, object]] = {
        Feature.SHARED_PROMPTS: (schedule.share_prompts, "schedule.share_prompts: wanted False", True),
        Feature.DRAFTS: (sampling.drafts > 0, "sampling.drafts: wanted 0", sampling.drafts),
        Feature.INT8_CACHE: (sampling.kv_cache_dtype == "int8", 'sampling.kv_cache_dtype: wanted "auto"', '"int8"'),
        Feature.INT8_WEIGHTS: (sampling.weights_dtype == "int8", 'sampling.weights_dtype: wanted "auto"', '"int8"'),
        Feature.SERVERS: (served, "engine: wanted null", "an Engine"),
    }
    for feature, (is_asked, wanted, got) in asked.items():
        if is_asked and (found := obstacle(model, feature)):
            yield f"{wanted} in a model with {found}, got {got}"


class Asked(NamedTuple):
    """A setting of a part of the model, such as its correction biases."""

    key: str
    off: object
    value: object
    part: str
    is_there: bool


def part_problems(settings: Iterable[Asked]) -> Iterator[str]:
    """Yield a sentence for each setting of a part that the model does not have."""
    for asked in settings:
        if asked.value and not asked.is_there:
            yield f"{asked.key}: wanted {asked.off} in a model without {asked.part}, got {describe(asked.value)}"
