"""The rules of models that terms hold beside the policy: they can be read, and have its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspax.config import ModelConfig
from gspax.config.model import architecture_problems
from gspax.config.protocols import Tokenizer
from gspax.data.files import read_object
from gspax.data.tokenizer import has_other_ids
from gspax.experiment.description import describe
from gspax.model.passes import Passes
from gspax.parallel import sharding


def held_models(passes: Passes) -> dict[str, ModelConfig]:
    """Return the models that the terms hold, by their field."""
    return {each.field: each.model for each in passes.held() if each.model is not None}


def held_problems(passes: Passes) -> Iterator[str]:
    """Check that each model can be built and read, and has the policy's tokens."""
    vocabulary, tokenizer = passes.experiment.model.vocab_size, passes.experiment.tokenizer
    for key, model in held_models(passes).items():
        sentences = architecture_problems(model)
        yield from (f"{key}{sentence.removeprefix('model').replace(' model.', f' {key}.')}" for sentence in sentences)
        if model.vocab_size < vocabulary:  # more are rows of padding, which loading leaves out
            yield f"{key}.vocab_size: wanted at least the policy's {vocabulary}, got {model.vocab_size}"
        elif not model.checkpoint:
            yield f"{key}.checkpoint: wanted the {key.partition('.')[0]}'s checkpoint, got none"
        else:
            yield from _tokenizer_problems(key, model.checkpoint, tokenizer)


def held_widths(passes: Passes, sizes: dict[str, int]) -> Iterator[str]:
    """Check that the widths of the models divide over the axes of the mesh."""
    for key, model in held_models(passes).items():
        for misfit in sharding.find_mismatches(sizes, model):
            if misfit.startswith("model."):
                yield f"{key}{misfit.removeprefix('model')}"


def _tokenizer_problems(key: str, checkpoint: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield one sentence if the checkpoint's folder shows that the model has other tokens than the policy."""
    recorded: Any = None
    folder = Path(checkpoint)  # for a name on the Hub there is none: loading compares
    if (folder / "experiment.json").is_file():  # a run
        recorded = read_object(folder / "experiment.json").get("tokenizer")
        folder = Path(recorded.get("path", folder))
    if has_other_ids(tokenizer, folder) or (recorded and "path" not in recorded and recorded != describe(tokenizer)):
        yield f"{key}.checkpoint: wanted a model with the experiment's tokenizer, got another one in {folder}"
