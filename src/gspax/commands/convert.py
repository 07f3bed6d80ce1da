"""`gspax convert`: a Hugging Face checkpoint or a GGUF file as an Orbax checkpoint, from which runs start."""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gspax.commands.arguments import Parser, add_target, subcommand_parser
from gspax.errors import display


def make_parser() -> Parser:
    parser = subcommand_parser(
        "convert",
        "Write a Hugging Face checkpoint or a GGUF file as an Orbax checkpoint, which an experiment names as "
        "model=hf(DIR).",
        "gspax convert --from Qwen/Qwen3-30B-A3B --to checkpoints/qwen3_30b",
    )
    parser.add_argument(
        "--from", dest="source", metavar="SOURCE", required=True, help="a folder, a name on the Hub, or FILE.gguf"
    )
    add_target(parser, "float32")
    return parser


def execute(options: argparse.Namespace) -> int:
    run(options.source, options.target, options.dtype)
    return 0


def run(source: str, target: Path, dtype: str = "float32") -> None:
    """Write `target`, completely or not at all: config.json, the tokenizer's files, the parameters in `checkpoints/0`.

    Args:
      source: the folder of a Hugging Face checkpoint, its name on the Hub, or a GGUF file.
      target: a new or empty folder.
      dtype: the dtype of the parameters on disk, `float32` or `bfloat16`; a run casts them to its `model.param_dtype`.

    Raises:
      UserError: the checkpoint is corrupt or its architecture not implemented, or `target` is not empty.
    """
    import jax

    from gspax.config import Mesh
    from gspax.hf.config_json import read_config
    from gspax.hf.parameters import read_params
    from gspax.hf.source import copy_companions
    from gspax.learner.state import CHECKPOINTS, abstract_params
    from gspax.parallel.sharding import make_mesh
    from gspax.run.checkpoints import Checkpoints
    from gspax.run.folders import atomic_folder
    from gspax.run.manifest import write_manifest

    origin = str(Path(source).resolve()) if Path(source).exists() else source
    with atomic_folder(target) as temporary, _checkpoint(source, temporary, dtype) as folder:
        config = read_config(folder)
        devices = jax.devices()
        mesh = make_mesh(Mesh(), devices[: math.gcd(len(devices), config.hidden_size)])
        params = read_params(folder, config, abstract_params(config, mesh, dtype))
        (temporary / "config.json").write_bytes((folder / "config.json").read_bytes())
        copy_companions([folder], temporary)
        write_manifest(temporary)  # of these files; the parameters have their own
        largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))  # at most this is compressed at once
        with Checkpoints(temporary / CHECKPOINTS, keep=1, concurrent_gb=1 + largest // 10**9) as checkpoints:
            checkpoints.save(0, {"params": params}, {"source": origin, "dtype": dtype})
    display(f"{target}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, {dtype}")


@contextlib.contextmanager
def _checkpoint(source: str, beside: Path, dtype: str) -> Iterator[Path]:
    """Yield the folder of a checkpoint; for a GGUF file, a temporary one next to `beside`, in the same dtype."""
    from gspax.hf.gguf import is_gguf, unpack
    from gspax.hf.source import locate

    if not is_gguf(source):
        yield locate(source)
        return
    with tempfile.TemporaryDirectory(dir=beside.parent, prefix=f".{beside.name}-") as unpacked:
        unpack(Path(source), Path(unpacked), dtype)
        yield Path(unpacked)
