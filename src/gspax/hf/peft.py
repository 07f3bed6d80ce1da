"""LoRA adapters in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`, in and out.

PEFT names the factors of a module `base_model.model.MODULE.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank],
and adds alpha / rank · B A to its weight [out, in]. The modules are named in `hf.names`; each expert is a module. As in
`config.json`, no key of `adapter_config.json` is silently ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from gspax.config import Lora, ModelConfig
from gspax.data.files import SHOWN, Json, read_object, require_own_files, show
from gspax.errors import UserError
from gspax.hf import names, tensors
from gspax.hf.config_json import expect

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
READ = ("peft_type", "r", "lora_alpha", "use_rslora")
PERMITTED: dict[str, tuple[Json, ...]] = {
    "bias": (None, "none"),
    "task_type": (None, "CAUSAL_LM"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),  # the others change the base
    "loftq_config": (None, {}),
}
HARMLESS = (  # keys that do not change what the tensors mean; any other key must be null, false or empty
    *("target_modules", "exclude_modules"),  # the tensors name the modules
    *("base_model_name_or_path", "revision"),  # the experiment names the model
    *("peft_version", "auto_mapping", "inference_mode", "megatron_core"),  # how PEFT wrote and loads it
    "lora_dropout",  # training elsewhere; gspax has no dropout
    "qalora_group_size",  # for use_qalora only
)


def peft(folder: str | os.PathLike[str]) -> Lora:
    """The LoRA setting of an adapter that PEFT or `gspax export --adapter` wrote, for a run that starts from it.

        model=hf("Qwen/Qwen3-0.6B"), lora=peft("adapters/first")

    Args:
      folder: as for `hf`; only the configuration and the names of the tensors are read here.

    Raises:
      UserError: no such files, an adapter of another kind, or of other modules than gspax adapts.
    """
    rank, alpha = _read_config(Path(folder))
    modules = {module for name in _stored(Path(folder)) for module in name.split(".")[-3:-2]}
    for group in (ATTENTION, MLP):
        adapted = [name for name in group if name in modules]
        if adapted and len(adapted) < len(group):
            wanted, got = ", ".join(group), ", ".join(adapted)
            raise UserError(f"{folder}: wanted an adapter of all of {wanted} or of none, got {got}")
    if unknown := sorted(modules - {*ATTENTION, *MLP}):
        raise UserError(f"{folder}: wanted modules of {', '.join(ATTENTION + MLP)}, got {unknown[0][:SHOWN]}")
    return Lora(
        rank=rank,
        alpha=alpha,
        attention=bool(modules & {*ATTENTION}),
        mlp=bool(modules & {*MLP}),
        checkpoint=os.fspath(folder),
    )


def read_adapters(
    folder: Path, config: ModelConfig, lora: Lora, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """The factors of an adapter, float32, by paths such as `runs/0/attention/query/a`.

    Args:
      shapes: the shape of each factor by its path (`learner.adapters.abstract`).

    Raises:
      UserError: tensors are missing, unexpected, not finite or of another shape; the message names them.
    """
    stored = _stored(folder)
    tensors.require_shapes(folder, stored, _published_shapes(config, lora, shapes))
    factors = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    for path, index, published in _factors(config, shapes):
        part = factors[path][index]
        part[...] = tensors.read(stored[published]).T.reshape(part.shape)
    return factors


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
      shapes: the shape of each factor by its path (`learner.adapters.abstract`).
      factor: returns a factor by its path, such as `runs/0/attention/query/a`; called once for each.
      base: the model that PEFT loads first, a folder or a name on the Hub, and its revision.
      dtype: the dtype of the tensors, `bfloat16` or `float32`.

    Raises:
      UserError: PEFT has no names for these modules.
    """
    if lora.mlp and config.num_experts and names.family_of(config) == "mixtral":
        raise UserError(
            "lora.mlp: wanted false for an adapter of a Mixtral model: PEFT has no names for its experts, "
            "got true; without --adapter the merged weights are exported"
        )
    modules = [*(ATTENTION if lora.attention else ()), *(MLP if lora.mlp else ())]
    content = {
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
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    published_shapes = _published_shapes(config, lora, shapes)
    kind = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    stored = tensors.create(folder / WEIGHTS, published_shapes, kind)
    for path in shapes:
        array = factor(path)
        for _, index, published in _factors(config, [path]):
            transposed = np.asarray(array[index]).reshape(published_shapes[published][::-1])
            tensors.write(stored[published], np.ascontiguousarray(transposed.T, dtype=kind))


def _factors(config: ModelConfig, paths: Iterable[str]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(path of the factor, index into its leading axes, name of the tensor) of every module."""
    from gspax.hf.parameters import parameter_shapes  # imports jax, which reading a configuration needs not

    factors = set(paths)
    adapted = {path.rpartition("/")[0] for path in factors}
    shapes = {name: shape for name, shape in parameter_shapes(config).items() if name in adapted}
    for name, chunks in names.list_chunks(config, shapes).items():
        for letter, suffix in (("a", "lora_A"), ("b", "lora_B")):
            for chunk in chunks if f"{name}/{letter}" in factors else ():
                module = chunk.published.removesuffix(".weight")
                if chunk.part is not None:
                    raise UserError(f"lora: wanted weights that PEFT has as modules of their own, got {module}")
                yield f"{name}/{letter}", chunk.index, f"{PREFIX}{module}.{suffix}.weight"


def _published_shapes(
    config: ModelConfig, lora: Lora, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of PEFT's matrices by name. gspax holds the transpose: a is [in..., rank]."""
    published_shapes: dict[str, tuple[int, ...]] = {}
    for path, index, published in _factors(config, shapes):
        size = math.prod(shapes[path][len(index) :]) // lora.rank
        published_shapes[published] = (lora.rank, size) if path.endswith("/a") else (size, lora.rank)
    return published_shapes


def _stored(folder: Path) -> dict[str, tensors.Stored]:
    if not (folder / WEIGHTS).is_file():
        pickle = (folder / "adapter_model.bin").is_file()
        why = "adapter_model.bin is a pickle, which gspax does not read" if pickle else "there is none"
        raise UserError(f"{folder}: wanted {WEIGHTS}, {why}")
    return tensors.read_header(folder / WEIGHTS)


def _read_config(folder: Path) -> tuple[int, float]:
    """The rank and alpha of an adapter, which `use_rslora` divides by the square root of the rank."""
    path = folder / CONFIG
    if not path.exists():
        where = "" if folder.is_absolute() else f" (the working directory is {Path.cwd()})"
        raise UserError(f"{folder}: wanted the folder of an adapter with {CONFIG}, there is none{where}")
    raw = read_object(path)
    require_own_files(folder)
    try:
        expect("peft_type", raw.get("peft_type"), ["LORA"])
        for key, value in raw.items():
            if key in PERMITTED:
                expect(key, value, PERMITTED[key])
            elif key not in READ and key not in HARMLESS and value:
                raise ValueError(f"{key}: wanted null, false or nothing in it, got {show(value)}")
        rank, alpha = raw.get("r"), raw.get("lora_alpha")
        if type(rank) is not int or rank <= 0:
            raise ValueError(f"r: wanted an integer above 0, got {show(rank)}")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            raise ValueError(f"lora_alpha: wanted a number above 0, got {show(alpha)}")
    except ValueError as problem:
        raise UserError(f"{path}: {problem}") from None
    return rank, alpha * math.sqrt(rank) if raw.get("use_rslora") else float(alpha)
