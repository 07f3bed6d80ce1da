"""The rule on kinds of layers: each supports what the experiment asks of it."""

from __future__ import annotations

from collections.abc import Iterator

from gspax.config import Engine, Feature, ModelConfig, Sampling, Schedule, obstacle


def layer_problems(model: ModelConfig, schedule: Schedule, sampling: Sampling, engine: Engine | None) -> Iterator[str]:
    """One sentence for each setting that a kind of layer in the model does not support."""
    asked: dict[Feature, tuple[bool, str, object]] = {
        "shared prompts": (schedule.share_prompts, "schedule.share_prompts: wanted False", True),
        "drafts": (sampling.drafts > 0, "sampling.drafts: wanted 0", sampling.drafts),
        "8-bit cache": (sampling.kv_cache_dtype == "int8", 'sampling.kv_cache_dtype: wanted "auto"', '"int8"'),
        "servers": (engine is not None, "engine: wanted null", "an Engine"),
    }
    for feature, (is_asked, wanted, got) in asked.items():
        if is_asked and (found := obstacle(model, feature)):
            yield f"{wanted} in a model with {found}, got {got}"
