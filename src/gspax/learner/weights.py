"""Initial parameters from a published checkpoint or one that `gspax convert` wrote, and adapters from one of PEFT."""

from __future__ import annotations

from pathlib import Path

import jax

from gspax.config import Lora, ModelConfig
from gspax.errors import UserError
from gspax.hf.parameters import named_leaves, named_shapes, read_params
from gspax.hf.peft import read_adapters
from gspax.hf.source import locate
from gspax.parallel import multihost
from gspax.run.checkpoints import Checkpoints
from gspax.run.manifest import MANIFEST, find_damage, has_manifest
from gspax.types import Params

CHECKPOINTS = "checkpoints"  # in a converted folder, beside config.json and the tokenizer's files


def load(config: ModelConfig, wanted: Params) -> Params:
    """The parameters of `config.checkpoint`, with the shardings and dtypes of `wanted` (`ShapeDtypeStruct`s).

    Raises:
      UserError: the checkpoint is broken, or of another architecture than `config`.
    """
    folder = locate(config.checkpoint)
    if (folder / CHECKPOINTS).is_dir():
        require_intact(folder)
        return _load_converted(folder / CHECKPOINTS, wanted)
    return read_params(folder, config, wanted)


def require_intact(folder: Path) -> None:
    """UserError if config.json or the tokenizer of a converted checkpoint is damaged; a warning without a manifest."""
    if not has_manifest(folder):
        multihost.warn_from_primary(f"{folder}: config.json and the tokenizer are not verified: there is no {MANIFEST}")
    elif damage := find_damage(folder):
        raise UserError(
            f"{folder}: damaged: {damage[0]}; convert the checkpoint again, or delete {MANIFEST} if the change is yours"
        )


def load_adapters(config: ModelConfig, lora: Lora, wanted: Params) -> Params:
    """The adapters of `lora.checkpoint`, with the shardings of `wanted` (`ShapeDtypeStruct`s). UserError as `load`."""
    leaves, shapes = named_leaves(wanted), named_shapes(wanted)
    found = multihost.all_or_raise(lambda: read_adapters(Path(lora.checkpoint), config, lora, shapes))
    arrays = [multihost.to_devices(found[name], leaf.sharding) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(wanted), arrays)


def _load_converted(directory: Path, wanted: Params) -> Params:
    leaves = {f"params/{name}": leaf for name, leaf in named_leaves(wanted).items()}
    mesh = next(iter(leaves.values())).sharding.mesh
    with Checkpoints(directory, mesh=mesh) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise UserError(f"there is no checkpoint in {directory}")
        arrays = checkpoints.restore_some(leaves, step)
    return jax.tree.unflatten(jax.tree.structure(wanted), [arrays[name] for name in leaves])
