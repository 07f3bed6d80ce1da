"""Locates a checkpoint: a folder or a name on the Hugging Face Hub. This module imports no accelerator code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gspax.config import Lora, ModelConfig
from gspax.config.functions import parse
from gspax.data.files import read_object, require_own_files
from gspax.data.hub import ALL as ALL
from gspax.data.hub import HUB_NAME as HUB_NAME
from gspax.data.hub import SMALL as SMALL
from gspax.data.hub import locate as locate
from gspax.data.tokenizer import TOKENIZER_FILES
from gspax.errors import UserError
from gspax.hf.config_json import read_config

CONFIG = ("config.json",)
RUN = "experiment.json"  # in a run directory
T = TypeVar("T")
COMPANIONS = (*TOKENIZER_FILES, "generation_config.json")  # files next to the weights


def hf(checkpoint: str | os.PathLike[str], **changes: Any) -> ModelConfig:
    """Return the model of a published checkpoint, of one that `gspax convert` wrote, or of a run.

    This reads `config.json`, or a run's `experiment.json`; the weights are read, and downloaded if necessary, when the
    run starts. For a run, they are those of its newest checkpoint at that time.

    Args:
      checkpoint: a folder, also of a bucket (gs://BUCKET/NAME), or a name on the Hub, such as "Qwen/Qwen3-30B-A3B";
        "name@revision" pins a revision. A relative folder is looked up in the working directory, as the paths of the
        command line are; one beside the experiment file is `Path(__file__).parent / "folder"`. A name whose owner is
        also a folder here is taken for a mistyped path, unless it has a revision.
      **changes: fields of the ModelConfig to replace, such as `remat="full"`, and `dtype="bfloat16"`: activations and
        products are in float32 by default, whatever the dtype of the checkpoint's tensors.

    Raises:
      UserError: there is no such checkpoint, or gspax does not implement its architecture.
    """
    name = os.fspath(checkpoint)
    folder = locate(name, CONFIG)
    file = folder / RUN
    config, lora = read_model(read_object(file), file) if file.is_file() else (read_config(folder), None)
    if lora is not None:
        raise UserError(f"{folder}: wanted a run without lora, whose checkpoints hold every parameter; export it")
    return dataclasses.replace(config, checkpoint=name, **changes)


def read_model(recorded: Mapping[str, Any], file: Path) -> tuple[ModelConfig, Lora | None]:
    """Read the model and the adapters of a run from its experiment.json. UserError if they are damaged."""
    model = read_part(ModelConfig, recorded.get("model"), f"{file}: model")
    lora = recorded.get("lora")
    return model, None if lora is None else read_part(Lora, lora, f"{file}: lora")


def read_part(kind: type[T], described: object, where: str) -> T:
    """Read a dataclass from its description. UserError if it is damaged or another version of gspax wrote it."""
    try:
        return parse(kind, described)
    except (TypeError, ValueError) as problem:
        raise UserError(f"{where}: wanted what this version of gspax records: {problem}") from problem


def copy_companions(sources: Iterable[Path], target: Path) -> list[str]:
    """Copy each companion file from the first folder that has it, and return the names of the copied files.

    Raises:
      UserError: a link in one of the folders leads out of it.
    """
    folders = [folder for folder in sources if folder.is_dir()]
    for folder in folders:
        require_own_files(folder)
    files = {name: folder / name for name in COMPANIONS for folder in reversed(folders) if (folder / name).is_file()}
    for name, file in files.items():
        (target / name).write_bytes(file.read_bytes())
    return list(files)
