"""The rule on kinds of layers: each supports what the experiment asks of it."""

from __future__ import annotations

from collections.abc import Iterator

from gspax.config import Engine, Feature, ModelConfig, Sampling, Schedule, obstacle


def layer_problems(model: ModelConfig, schedule: Schedule, sampling: Sampling, engine: Engine | None) -> Iterator[str]:
    """One sentence for each setting that a kind of layer in the model does not support."""
    asked: dict[Feature, tuple[bool, str, object]] = {
        Feature.SHARED_PROMPTS: (schedule.share_prompts, "schedule.share_prompts: wanted False", True),
        Feature.DRAFTS: (sampling.drafts > 0, "sampling.drafts: wanted 0", sampling.drafts),
        Feature.INT8_CACHE: (sampling.kv_cache_dtype == "int8", 'sampling.kv_cache_dtype: wanted "auto"', '"int8"'),
        Feature.INT8_WEIGHTS: (sampling.weights_dtype == "int8", 'sampling.weights_dtype: wanted "auto"', '"int8"'),
        Feature.SERVERS: (engine is not None, "engine: wanted null", "an Engine"),
    }
    for feature, (is_asked, wanted, got) in asked.items():
        if is_asked and (found := obstacle(model, feature)):
            yield f"{wanted} in a model with {found}, got {got}"
