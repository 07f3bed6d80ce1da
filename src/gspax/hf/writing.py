"""Writing parameters as a checkpoint in the Hub's layout, which transformers, vLLM and SGLang load."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspax.config import ModelConfig
from gspax.hf import config_json, names, tensors
from gspax.hf.loading import path_name
from gspax.hf.names import Chunk
from gspax.model import transformer

SHARD_SIZE = 5_000_000_000  # bytes of tensors in a file; that of transformers up to version 4


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    parameter: Callable[[str], Any],
    *,
    dtype: str = "bfloat16",
    shard_size: int = SHARD_SIZE,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and safetensors in the Hub's order and layout; tied models have no `lm_head.weight`.

    Args:
      folder: exists and is empty.
      parameter: returns a parameter by its path, such as `runs/0/attention/query`: an array, or an object that reads a
        part of one when it is indexed. Called once for each, and indexed once for each layer in order, so that neither
        parameters nor the layers of one need be in memory together.
      dtype: of the tensors, `bfloat16` or `float32`.
      shard_size: the maximum size of a file, in bytes of tensors.
      more: further keys of config.json, such as `eos_token_id`.
    """
    described = config_json.to_json(config) | {"torch_dtype": dtype} | dict(more or {})
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    table = names.list_chunks(config, parameter_shapes(config))
    everything = sorted((chunk for each in table.values() for chunk in each), key=_model_order)
    shapes = {chunk.published: chunk.shape for chunk in everything}
    stored = tensors.lay_out(folder, shapes, np.dtype(jax.numpy.dtype(dtype)), shard_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, chunks in table.items():
            array = parameter(name)
            for first, layer in itertools.groupby(chunks, key=lambda chunk: chunk.index[:1]):
                part = np.asarray(array[first])

                def write(chunk: Chunk, part=part) -> None:
                    place = stored[chunk.published]
                    tensor = part[chunk.index[1:]].astype(place.dtype, copy=False)
                    tensors.write(place, names.to_published(chunk.row, tensor))

                list(pool.map(write, layer))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of a model by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(transformer.abstract_params(config))
    return {path_name(path): leaf.shape for path, leaf in leaves}


def _model_order(chunk: Chunk) -> tuple[int, int]:
    """Sort key: embedding, layers, norm and head; within a layer the order of the table."""
    parts = chunk.published.split(".")
    if parts[1] == "layers":
        return 1, int(parts[2])
    return (0 if parts[1] == "embed_tokens" else 2), 0
