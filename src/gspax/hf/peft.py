"""LoRA adapters in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`, in and out.

PEFT names the factors of a module `base_model.model.MODULE.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank],
and adds alpha / rank · B A to its weight [out, in]. The modules are those of `hf.names`, each expert one of them. As in
`config.json`, no key of `adapter_config.json` is silently ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gspax.config import Lora, ModelConfig
from gspax.data.files import SHOWN, read_json, require_own_files, show
from gspax.errors import UserError
from gspax.hf import names, tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
READ = ("peft_type", "r", "lora_alpha", "use_rslora")
PERMITTED: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "task_type": (None, "CAUSAL_LM"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),  # the others change the base
    "loftq_config": (None, {}),
}
HARMLESS = {  # keys that do not change what the tensors mean, and why
    "target_modules": "the tensors name the modules",
    "exclude_modules": "the tensors name the modules",
    "base_model_name_or_path": "the experiment names the model",
    "revision": "the experiment names the model",
    "auto_mapping": "a class of transformers",
    "inference_mode": "a state of PEFT",
    "lora_dropout": "training elsewhere; gspax has no dropout",
    "megatron_core": "the name of a package",
    "qalora_group_size": "read with use_qalora only",
    "peft_version": "the writer of the file",
}  # any other key must be null, false or empty


def peft(folder: str | os.PathLike[str]) -> Lora:
    """The LoRA setting of an adapter that PEFT or `gspax export --adapter` wrote, for a run that starts from it.

        model=hf("Qwen/Qwen3-0.6B"), lora=peft("adapters/first")

    Args:
      folder: as for `hf`; only the configuration and the names of the tensors are read here.

    Raises:
      UserError: no such files, an adapter of another kind, or of other modules than gspax adapts.
    """
    raw = _read_config(Path(folder))
    rank, alpha = _positive(folder, raw, "r"), _positive(folder, raw, "lora_alpha")
    modules = {module for name in _stored(Path(folder)) for module in name.split(".")[-3:-2]}
    for group in (ATTENTION, MLP):
        if 0 < len(modules & {*group}) < len(group):
            got = ", ".join(name for name in group if name in modules)
            raise UserError(f"{folder}: wanted an adapter of all of {', '.join(group)} or of none, got {got}")
    if unknown := sorted(modules - {*ATTENTION, *MLP}):
        raise UserError(f"{folder}: wanted modules of {', '.join(ATTENTION + MLP)}, got {unknown[0][:SHOWN]}")
    return Lora(
        rank=rank,
        alpha=alpha * math.sqrt(rank) if raw.get("use_rslora") else float(alpha),
        attention=bool(modules & {*ATTENTION}),
        mlp=bool(modules & {*MLP}),
        checkpoint=os.fspath(folder),
    )


def read_adapters(
    folder: Path, config: ModelConfig, lora: Lora, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """The factors of an adapter, float32, by paths such as `runs/0/attention/query/a`.

    Args:
      shapes: of each factor (`learner.adapters.abstract`).

    Raises:
      UserError: tensors are missing, unexpected, not finite or of another shape; the message names them.
    """
    stored = _stored(folder)
    found = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    expected = set()
    for factor, index, published in _factors(config, shapes):
        expected.add(published)
        part = found[factor][index]
        shape = (lora.rank, part.size // lora.rank)
        shape = shape if factor.endswith("/a") else shape[::-1]
        if published not in stored:
            raise UserError(f"{folder}: tensor {published} is missing")
        if stored[published].shape != shape:
            got = list(stored[published].shape)
            raise UserError(f"{stored[published].file}: tensor {published}: wanted the shape {list(shape)}, got {got}")
        tensor = tensors.read(stored[published])
        tensors.require_finite(published, stored[published], tensor)
        part[...] = tensor.T.reshape(part.shape)
    if unknown := sorted(set(stored) - expected):
        raise UserError(f"{folder / WEIGHTS}: tensor {unknown[0]} is not part of the model in config.json")
    return found


def write_adapters(
    folder: Path,
    config: ModelConfig,
    lora: Lora,
    shapes: Mapping[str, tuple[int, ...]],
    factor: Callable[[str], np.ndarray],
    *,
    base: tuple[str | None, str | None] = (None, None),
    dtype: str = "float32",
) -> None:
    """Write both files into `folder`, which exists.

    Args:
      shapes: of each factor (`learner.adapters.abstract`).
      factor: returns a factor by its path, such as `runs/0/attention/query/a`; called once for each.
      base: what PEFT loads first, a folder or a name on the Hub, and its revision.
      dtype: of the tensors, `bfloat16` or `float32`.

    Raises:
      UserError: PEFT has no names for these modules.
    """
    if lora.mlp and config.num_experts and names.family_of(config) == "mixtral":
        raise UserError(
            "lora.mlp: wanted false for an adapter of a Mixtral model: PEFT has no names for its experts, "
            "got true; without --adapter the merged weights are exported"
        )
    modules = [*(ATTENTION if lora.attention else ()), *(MLP if lora.mlp else ())]
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base[0],
        "revision": base[1],
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": False,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    sizes = {}
    for path, index, published in _factors(config, shapes):
        size = math.prod(shapes[path][len(index) :]) // lora.rank
        sizes[published] = (lora.rank, size) if path.endswith("/a") else (size, lora.rank)
    kind = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    stored = tensors.create(folder / WEIGHTS, sizes, kind)
    for path in shapes:
        array = factor(path)
        for _, index, published in _factors(config, {path: shapes[path]}):
            part = _to_published(path, np.asarray(array[index]), lora.rank)
            tensors.write(stored[published], np.ascontiguousarray(part, dtype=kind))


def _factors(config: ModelConfig, paths: Iterable[str]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(path of the factor, index into its leading axes, name of the tensor) of every module."""
    factors = set(paths)
    for name, found in names.list_tensors(config, {path.rpartition("/")[0] for path in factors}).items():
        for letter, suffix in (("a", "lora_A"), ("b", "lora_B")):
            for _, published, index in found if f"{name}/{letter}" in factors else ():
                module = published.removesuffix(".weight")
                yield f"{name}/{letter}", index, f"{PREFIX}{module}.{suffix}.weight"


def _to_published(path: str, part: np.ndarray, rank: int) -> np.ndarray:
    """a is [in..., rank] and b is [rank, out...]: PEFT's matrices, transposed."""
    return part.reshape(-1, rank).T if path.endswith("/a") else part.reshape(rank, -1).T


def _stored(folder: Path) -> dict[str, tensors.Stored]:
    if not (folder / WEIGHTS).is_file():
        pickle = (folder / "adapter_model.bin").is_file()
        why = "adapter_model.bin is a pickle, which gspax does not read" if pickle else "there is none"
        raise UserError(f"{folder}: wanted {WEIGHTS}, {why}")
    return tensors.read_header(folder / WEIGHTS)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        raw = dict(read_json(path))
        require_own_files(folder)
    except FileNotFoundError:
        where = "" if folder.is_absolute() else f" (the working directory is {Path.cwd()})"
        raise UserError(f"{folder}: wanted the folder of an adapter with {CONFIG}, there is none{where}") from None
    except (OSError, ValueError, TypeError) as problem:
        raise UserError(f"{path}: wanted a JSON object, got a file that cannot be read: {problem}") from problem
    if raw.get("peft_type") != "LORA":
        raise UserError(f'{path}: peft_type: wanted "LORA", got {show(raw.get("peft_type"))}')
    for key, value in raw.items():
        if key in PERMITTED:
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in PERMITTED[key]):
                wanted = " or ".join(map(json.dumps, PERMITTED[key]))
                raise UserError(f"{path}: {key}: wanted {wanted}, got {show(value)}")
        elif key not in READ and key not in HARMLESS and value:
            raise UserError(f"{path}: {key}: wanted null, false or nothing in it, got {show(value)}")
    return raw


def _positive(folder: Any, raw: Mapping[str, Any], key: str) -> Any:
    value = raw.get(key)
    kinds = (int,) if key == "r" else (int, float)
    if type(value) not in kinds or value is None or not 0 < value < math.inf:
        raise UserError(f"{Path(folder) / CONFIG}: {key}: wanted a number above 0, got {show(value)}")
    return value
