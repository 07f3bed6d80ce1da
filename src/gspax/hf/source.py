"""Locating a checkpoint, a folder or a name on the Hugging Face Hub. This module imports no accelerator code."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gspax.config import Lora, ModelConfig
from gspax.config.functions import parse
from gspax.data.files import read_object, require_own_files, why_not_on_hub
from gspax.data.tokenizer import TOKENIZER_FILES
from gspax.errors import UserError, describe_error
from gspax.hf.config_json import read_config
from gspax.storage.buckets import is_bucket, to_path

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
CONFIG = ("config.json",)
RUN = "experiment.json"  # in the directory of a run
SMALL = ("*.json", "*.txt", "*.jinja")  # everything except the weights
ALL = (*SMALL, "*.safetensors")
COMPANIONS = (*TOKENIZER_FILES, "generation_config.json")  # of the weights


def hf(checkpoint: str | os.PathLike[str], **changes: Any) -> ModelConfig:
    """The model of a published checkpoint, of one written by `gspax convert`, or of a run, to start from or to teach.

    This reads `config.json`, or a run's `experiment.json`; the weights are read, and downloaded if necessary, when the
    run starts. Those of a run are of its newest checkpoint then.

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
    """The model and the adapters of a run, from its experiment.json. UserError if that is of another version."""
    try:
        return parse(ModelConfig, recorded["model"]), parse(Lora, recorded["lora"]) if recorded.get("lora") else None
    except (KeyError, TypeError) as problem:
        raise UserError(f"{file}: wanted a model of this version of gspax: {problem}") from problem


def locate(checkpoint: str, patterns: tuple[str, ...] = ALL, *, download: bool = True) -> Path:
    """The folder of a checkpoint; for a name on the Hub, files that match the patterns are downloaded first.

    With `download=False` only the local cache of earlier downloads is used.

    Raises:
      UserError: there is no such folder, and no such checkpoint on the Hub or no access to it; or a link leads out of
        the folder.
    """
    folder = to_path(checkpoint)
    if is_bucket(folder) or folder.is_dir():
        require_own_files(folder)
        return folder
    if folder.exists():
        advice = ": gspax convert --from FILE.gguf --to DIR writes one" if checkpoint.endswith(".gguf") else ""
        raise UserError(f"{checkpoint}: wanted the folder of a checkpoint, this is a file{advice}")
    if why := why_not_on_hub(checkpoint, HUB_NAME):
        raise UserError(
            f"{checkpoint}: wanted the folder of a checkpoint or a name on the Hub such as Qwen/Qwen3-30B-A3B; {why}"
        )
    from huggingface_hub import snapshot_download

    repository, _, revision = checkpoint.partition("@")
    try:
        snapshot = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(patterns), local_files_only=not download
        )
    except Exception as problem:  # of many kinds: no network, no such name, no permission, no disk space
        raise UserError(
            f"{checkpoint}: there is no such folder in the working directory {Path.cwd()}, and the download from the "
            f"Hub failed: {describe_error(problem)}"
        ) from problem
    return Path(snapshot)


def copy_companions(sources: Iterable[Path], target: Path) -> list[str]:
    """Copy each companion from the first folder that has it, and return the names of the copied files.

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
