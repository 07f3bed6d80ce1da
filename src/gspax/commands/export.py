"""`gspax export`: the parameters of a run, or of a converted checkpoint, as a published checkpoint."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspax.commands.arguments import Parser, add_target, at_least, size, subcommand_parser
from gspax.commands.inputs import require_directory
from gspax.config import Lora, ModelConfig
from gspax.errors import UserError
from gspax.hf.config_json import read_config
from gspax.hf.source import SMALL, locate
from gspax.run.folders import atomic_folder, copy_companions

if TYPE_CHECKING:
    from gspax.run.checkpoints import Checkpoints
    from gspax.run.directory import RunDir

SHARD_SIZE = "5GB"  # that of transformers up to version 4
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json; no part of a ModelConfig


def make_parser() -> Parser:
    parser = subcommand_parser(
        "export",
        "Write a run's newest checkpoint as a Hugging Face one, which transformers, vLLM and SGLang load.",
        "gspax export --from runs/sort --to exported/sort --dtype float32",
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", required=True, help="a run, or what `gspax convert` wrote"
    )
    add_target(parser, "bfloat16")
    parser.add_argument(
        "--shard-size",
        type=size,
        default=SHARD_SIZE,
        metavar="SIZE",
        help=f"the maximum size of a file (default: {SHARD_SIZE})",
    )
    parser.add_argument("--step", type=at_least(0), metavar="N", help="the checkpoint (default: the newest)")
    return parser


def execute(options: argparse.Namespace) -> int:
    require_directory(options.source)
    run(options.source, options.target, dtype=options.dtype, shard_size=options.shard_size, step=options.step)
    return 0


def run(
    source: Path, target: Path, *, dtype: str = "bfloat16", shard_size: int = size(SHARD_SIZE), step: int | None = None
) -> None:
    """Write `target`: config.json, safetensors with their index, and the tokenizer's files where they are known.

    One parameter at a time is in memory: the largest is that of all layers' and experts' gates. What a run trained with
    adapters is written as the sum of its frozen parameters and theirs.

    Args:
      source: a run directory (the newest checkpoint of the run, else of its warm start), or what `gspax convert` wrote.
      target: a new or empty folder.
      dtype: of the tensors, `bfloat16` or `float32`.
      shard_size: the most bytes of tensors in a file.
      step: another checkpoint than the newest.

    Raises:
      UserError: `source` holds no checkpoint that can be read, or `target` is not free.
    """
    from gspax.hf.writing import parameter_shapes, write_checkpoint
    from gspax.run.checkpoints import Checkpoints
    from gspax.run.directory import RunDir

    config, lora, companions = _describe(source)
    run = RunDir(source)
    with Checkpoints(_directory(run)) as checkpoints, atomic_folder(target) as temporary:
        chosen = checkpoints.latest() if step is None else step
        if chosen is None or chosen not in checkpoints.steps():
            raise UserError(f"there is no checkpoint {'' if chosen is None else chosen} in {checkpoints.directory}")
        if lora is not None and checkpoints.directory == run.checkpoints.absolute():
            parameter = _sums(checkpoints, chosen, run, config, lora)
        else:
            shapes = parameter_shapes(config)

            def parameter(name: str) -> np.ndarray:
                return _read(checkpoints, chosen, {f"params/{name}": shapes[name]}, dtype)[0]

        found = copy_companions(companions, temporary)
        special = _special_tokens(companions)
        write_checkpoint(temporary, config, parameter, dtype=dtype, shard_size=shard_size, more=special)
    beside = f"with {', '.join(found)}" if found else "without a tokenizer: none was known"
    print(f"{target}: step {chosen} of {checkpoints.directory}, {dtype}, {beside}")


def _read(
    checkpoints: Checkpoints, step: int, shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32"
) -> list[np.ndarray]:
    """Leaves of a checkpoint by their paths, cast."""
    import jax

    wanted = {path: jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for path, shape in shapes.items()}
    found = checkpoints.restore_some(wanted, step)
    return [found[path] for path in shapes]


def _sums(
    checkpoints: Checkpoints, step: int, run: RunDir, config: ModelConfig, lora: Lora
) -> Callable[[str], np.ndarray]:
    """Parameters of a run with adapters, float32: the frozen ones lie in `start/`, the factors in the checkpoint."""
    import jax

    from gspax.hf.reading import path_name
    from gspax.hf.writing import parameter_shapes
    from gspax.learner import adapters
    from gspax.model.low_rank import LowRank
    from gspax.run.checkpoints import Checkpoints

    shapes = parameter_shapes(config)
    leaves = jax.tree_util.tree_leaves_with_path(adapters.abstract(config, lora))
    factors = {path_name(path): leaf.shape for path, leaf in leaves}

    def parameter(name: str) -> np.ndarray:
        with Checkpoints(run.start) as start:
            first = start.latest()
            if first is None:
                raise UserError(f"{run.start}: wanted the parameters that the adapters stand beside, there are none")
            (base,) = _read(start, first, {name: shapes[name]})
        if f"{name}/a" in factors:
            paths = {f"params/{name}/{factor}": factors[f"{name}/{factor}"] for factor in "ab"}
            a, b = _read(checkpoints, step, paths)
            for layer in range(len(base)):
                base[layer] = LowRank(base[layer], a[layer], b[layer], lora.alpha / lora.rank).dense()
        return base

    return parameter


def _describe(source: Path) -> tuple[ModelConfig, Lora | None, list[Path]]:
    """The model, its adapters, and the folders in which its tokenizer's files may be, the likeliest first."""
    from gspax.run.directory import RunDir, read_json

    run = RunDir(source)
    if run.experiment.is_file():
        experiment = read_json(run.experiment)
        try:
            config = _undescribed(ModelConfig, experiment["model"])
            lora = _undescribed(Lora, experiment["lora"]) if experiment.get("lora") else None
        except (KeyError, TypeError) as problem:
            raise UserError(f"{run.experiment}: wanted a model of this version of gspax: {problem}") from problem
        tokenizer = experiment.get("tokenizer")
        path = tokenizer.get("path") if isinstance(tokenizer, dict) else None
        return config, lora, [*([Path(path)] if path else []), *_local(config.checkpoint)]
    if (source / "config.json").is_file():
        return read_config(source), None, [source]
    raise UserError(f"{source}: wanted a run directory (experiment.json) or a converted checkpoint (config.json)")


def _undescribed(kind: Any, described: Mapping[str, Any]) -> Any:
    """The dataclass that `description.describe` gave this of."""
    fields = {}
    for name, hint in typing.get_type_hints(kind).items():
        value = described[name]
        if isinstance(value, dict):
            (hint,) = (each for each in typing.get_args(hint) if each is not types.NoneType)
            value = _undescribed(hint, value)
        fields[name] = tuple(value) if isinstance(value, list) else value
    return kind(**fields)


def _local(checkpoint: str) -> list[Path]:
    """The folder of the checkpoint that a run started from, if it is still on this machine."""
    try:
        return [locate(checkpoint, SMALL, download=False)] if checkpoint else []
    except UserError:
        return []


def _directory(run: RunDir) -> Path:
    """The checkpoints of the run; while it has none, those of its warm start."""
    from gspax.run.checkpoints import Checkpoints

    for directory in (run.checkpoints, run.warm_start.checkpoints):
        if directory.is_dir():
            with Checkpoints(directory) as checkpoints:
                if checkpoints.latest() is not None:
                    return directory
    raise UserError(f"{run.path}: wanted a checkpoint of the run or of its warm start, there is none")


def _special_tokens(folders: list[Path]) -> dict[str, Any]:
    """What config.json says of them, where transformers looks when there is no generation_config.json."""
    from gspax.run.directory import read_json

    for folder in folders:
        if (folder / "config.json").is_file():
            raw = read_json(folder / "config.json")
            return {name: raw[name] for name in SPECIAL_TOKENS if name in raw}
    return {}
