"""`gspax export`: the parameters of a run, or of a converted checkpoint, as a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gspax.commands.arguments import Parser, add_target, at_least, require_directory, size, subcommand_parser
from gspax.config import Lora, ModelConfig
from gspax.errors import FailureError, UserError, brief, describe_error, display, warn
from gspax.hf.config_json import OF_WRAPPER, read_config, to_json
from gspax.hf.families import OF_MTP, WRAPPERS
from gspax.hf.source import HUB_NAME, RUN, SMALL, copy_companions, locate
from gspax.run.folders import atomic_folder
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path

if TYPE_CHECKING:
    from gspax.hf.tensors import Stored
    from gspax.run.checkpoints import StoredArray
    from gspax.run.directory import RunDir
    from gspax.run.recorded import Recorded
    from gspax.types import JsonObject

SHARD_SIZE = "5GB"  # that of transformers up to version 4
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys of config.json that ModelConfig does not have
T = TypeVar("T")


def make_parser() -> Parser:
    parser = subcommand_parser(
        "export",
        "Write a run's newest checkpoint as a Hugging Face one, which transformers and vLLM load.",
        "gspax export --from runs/sort --to exported/sort --dtype float32",
    )
    parser.add_argument(
        "--from", dest="source", type=to_path, metavar="DIR", required=True, help="a run, or what `gspax convert` wrote"
    )
    add_target(parser, "bfloat16")
    parser.add_argument(
        "--shard-size",
        type=size,
        default=SHARD_SIZE,
        metavar="SIZE",
        help=f"the maximum size of a file (default: {SHARD_SIZE})",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters of a LoRA run in PEFT's layout, not the merged weights",
    )
    parser.add_argument("--step", type=at_least(0), metavar="N", help="the checkpoint (default: the newest)")
    parser.add_argument("--push", metavar="NAME", help="then upload it to a new repository OWNER/NAME on the Hub")
    return parser


def execute(options: argparse.Namespace) -> int:
    require_directory(options.source)
    settings = {name: getattr(options, name) for name in ("dtype", "shard_size", "step", "adapter")}
    if options.push is not None:
        check_push(options.push, options.target)
    run(options.source, options.target, **settings)
    if options.push is not None:
        display(push(options.push, options.target))
    return 0


def run(
    source: Path,
    target: Path,
    *,
    dtype: str = "bfloat16",
    shard_size: int = size(SHARD_SIZE),
    step: int | None = None,
    adapter: bool = False,
) -> None:
    """Write `target`: config.json, safetensors with their index, the tokenizer's files if known, and for a run its
    model card (`report.card`) and generation_config.json.

    A parameter is read and written a few layers at a time, as many as the checkpoint stores together. Adapters are
    merged into the weights, or with `adapter` written alone, in PEFT's layout.

    Args:
      source: a run directory (the newest checkpoint of the run, else of its warm start), or what `gspax convert` wrote.
      target: a new or empty folder.
      dtype: the dtype of the tensors, `bfloat16` or `float32`.
      shard_size: the maximum bytes of tensors in a file.
      step: the checkpoint to export instead of the newest.
      adapter: write adapter_config.json and adapter_model.safetensors only; `shard_size` is not read.

    Raises:
      UserError: `source` has no readable checkpoint, or `target` is not empty.
    """
    from gspax.hf.parameters import write_checkpoint
    from gspax.hf.peft import write_adapters
    from gspax.run.checkpoints import Checkpoints, newest_step, open_array
    from gspax.run.directory import RunDir
    from gspax.run.recorded import find_checkpoints

    recorded, config, lora, companions = _read_source(source)
    run = RunDir(source)
    with Checkpoints(folder := find_checkpoints(run)) as checkpoints, atomic_folder(target) as temporary:
        chosen = newest_step(checkpoints) if step is None else step
        checkpoints.require_intact(chosen)
        stored = partial(open_array, checkpoints.directory, chosen)
        copied = copy_companions(companions, temporary)
        if not adapter:
            more, origin = _read_origin(config, _read_special_tokens(companions))
            write = partial(write_checkpoint, dtype=dtype, shard_size=shard_size, more=more, origin=origin)
            write(temporary, config, _parameters(run, config, lora, stored))
        elif lora is None:
            raise UserError(f"{source}: wanted a run with adapters (lora) for --adapter, got one without")
        else:
            shapes, base = _factor_shapes(config, lora), _find_base(config.checkpoint)
            factor = partial(_read_factor, stored, shapes)
            write_adapters(temporary, config, lora, shapes, factor, base=base, dtype=dtype)
        if recorded is not None:
            _describe_run(temporary, run, recorded, chosen, of_warm_start=folder != run.checkpoints, adapter=adapter)
    files = f"with {', '.join(copied)}" if copied else "without a tokenizer: none is known"
    display(f"{target}: step {chosen} of {checkpoints.directory}, {dtype}, {files}")


def _read_factor(
    stored: Callable[[str, tuple[int, ...]], StoredArray], shapes: Mapping[str, tuple[int, ...]], name: str
) -> np.ndarray:
    return stored(f"params/{name}", shapes[name])[()]


def _parameters(
    run: RunDir, config: ModelConfig, lora: Lora | None, stored: Callable[[str, tuple[int, ...]], StoredArray]
) -> Callable[[str], StoredArray | _Merged]:
    """Return path -> array, with adapters merged: the frozen parameters are in `start/`, the factors in `stored`."""
    from gspax.hf.parameters import parameter_shapes
    from gspax.learner.state import MODEL
    from gspax.run.checkpoints import Checkpoints, open_array

    shapes = parameter_shapes(config)
    if lora is None:
        return lambda name: stored(f"params/{name}", shapes[name])
    factors, scale = _factor_shapes(config, lora), lora.alpha / lora.rank
    with Checkpoints(run.start) as start:
        if MODEL not in start.steps():
            raise UserError(f"{run.start}: wanted the frozen parameters of the adapters, there are none")
        start.require_intact(MODEL)

    def merge(name: str) -> StoredArray | _Merged:
        base = open_array(run.start, MODEL, name, shapes[name])
        if f"{name}/a" not in factors:
            return base
        a, b = (stored(f"params/{name}/{factor}", factors[f"{name}/{factor}"]) for factor in "ab")
        return _Merged(base, a, b, scale)

    return merge


@dataclass(frozen=True)
class _Merged:
    """The matrix base + scale · a b; indexing the stacked axes reads and computes that part alone, in float32."""

    base: StoredArray
    a: StoredArray
    b: StoredArray
    scale: float

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        from gspax.model.low_rank import LowRank

        base, a, b = (np.asarray(stored[index], np.float32) for stored in (self.base, self.a, self.b))
        return np.asarray(LowRank(base, a, b, self.scale).dense())  # type: ignore[arg-type]  # of numpy arrays


def _factor_shapes(config: ModelConfig, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Return the shape of each factor of the adapters by its path."""
    from gspax.hf.parameters import named_shapes
    from gspax.learner import adapters

    return named_shapes(adapters.abstract(config, lora))


def _describe_run(
    folder: Path, run: RunDir, recorded: Recorded, step: int, *, of_warm_start: bool, adapter: bool
) -> None:
    """Write a run's model card, and generation_config.json, or the run's stop ids in one that was copied."""
    from gspax.report import card
    from gspax.run.directory import read_json

    text = card.render(run, recorded.experiment, step, of_warm_start=of_warm_start, adapter=adapter)
    (folder / "README.md").write_text(text, encoding="utf-8")
    generation, content = folder / "generation_config.json", {} if adapter else describe_generation(recorded)
    if content and generation.exists():
        content = _with_stop_ids(read_json(generation), [*_stop_ids(recorded), *recorded.sampling.stop_token_ids])
    if content:
        generation.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def describe_generation(recorded: Recorded) -> JsonObject:
    """Return a run's generation_config.json: temperature, filters, and stop ids if its tokenizer is gspax's."""
    sampling = recorded.sampling
    content: JsonObject = {"do_sample": sampling.temperature > 0}
    if content["do_sample"]:
        content |= {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    if ids := _stop_ids(recorded):
        content["eos_token_id"] = list(dict.fromkeys([*ids, *sampling.stop_token_ids]))
    return content


def _stop_ids(recorded: Recorded) -> list[int]:
    """Return the stop ids of a run's tokenizer; none if it is not one of gspax's."""
    from gspax.run.recorded import read_tokenizer

    with contextlib.suppress(UserError):
        return [*read_tokenizer(recorded.experiment["tokenizer"]).stop_ids]
    return []


def _with_stop_ids(generation: JsonObject, ids: list[int]) -> JsonObject:
    """Add the stop ids with which a run has ended its samples to generation_config.json; {} if it has them all."""
    found = generation.get("eos_token_id", [])
    known = found if isinstance(found, list) else [found]
    lacking = [i for i in dict.fromkeys(ids) if i not in known]
    return generation | {"eos_token_id": [*known, *lacking]} if lacking else {}


def check_push(name: str, target: Path) -> None:
    """Check, before anything is computed, that a new repository can be pushed to; else UserError or FailureError."""
    from huggingface_hub import HfApi

    if not open_storage(target).has_folders:
        raise UserError(f"--push: wanted --to with a folder of this machine, got {target}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"--push: wanted OWNER/NAME, got {name!r}")
    with _explained(name):
        HfApi().whoami()
        if HfApi().repo_exists(name):
            raise UserError(f"--push {name}: wanted the name of a new repository, this one exists")


def push(name: str, folder: Path) -> str:
    """Upload a folder to a new repository on the Hub; return the commit's address. UserError or FailureError."""
    from huggingface_hub import HfApi

    with _explained(f"{name} ({folder} is complete)"):
        HfApi().create_repo(name)
        commit = HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Export from gspax")
    return str(commit.commit_url)


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn an exception of the Hub's client into a UserError or FailureError of one sentence."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    token = "wanted a token that may write there: `hf auth login`, or the variable HF_TOKEN"
    try:
        yield
    except UserError:
        raise
    except LocalTokenNotFoundError as problem:
        raise UserError(f"--push {name}: {token}, got none") from problem
    except HfHubHTTPError as problem:
        code = problem.response.status_code
        if code in (401, 403):
            raise UserError(f"--push {name}: {token}, the Hub refused it ({code})") from problem
        if code == 409:
            raise UserError(f"--push {name}: wanted the name of a new repository, this one exists") from problem
        raise FailureError(f"--push {name}: the Hub answered {code}: {brief(problem)}") from problem
    except Exception as problem:  # of many kinds: no network, offline mode, a time limit
        raise FailureError(f"--push {name}: the Hub cannot be reached: {describe_error(problem)}") from problem


def _read_source(source: Path) -> tuple[Recorded | None, ModelConfig, Lora | None, list[Path]]:
    """Return a run's experiment, the model, its adapters, and folders that may have the tokenizer, best first."""
    from gspax.learner.state import require_intact
    from gspax.run.directory import RunDir
    from gspax.run.recorded import read_recorded

    run = RunDir(source)
    if run.experiment.is_file():
        recorded = read_recorded(run)
        companions = _find_companions(recorded.experiment["tokenizer"], recorded.model.checkpoint)
        return recorded, recorded.model, recorded.lora, companions
    if (source / "config.json").is_file():
        require_intact(source)
        return None, replace(read_config(source), checkpoint=str(source)), None, [source]
    raise UserError(f"{source}: wanted a run directory (experiment.json) or a converted checkpoint (config.json)")


def _read_origin(config: ModelConfig, special: dict[str, object]) -> tuple[dict[str, object], dict[str, Stored]]:
    """Read further keys of an export's config.json, and the tensors of the published checkpoint of the model.

    The keys are the special tokens, and the keys of copied parts (`names.is_carried`): a vision tower, and layers that
    predict several tokens ahead.
    """
    from gspax.hf import names, tensors
    from gspax.run.directory import read_json

    origin, carries = _find_origin(config.checkpoint), names.carries(config)
    if not origin:
        return special, {}
    try:
        folder = locate(origin, download=carries)
        found, raw, ours = tensors.find(folder), read_json(folder / "config.json"), to_json(config)
    except UserError as problem:
        if config.model_type in WRAPPERS:  # whose export is not complete without a tower
            raise
        if carries:
            warn(f"layers that predict several tokens ahead (MTP), if {origin} has some, are not copied: {problem}")
        return special, {}
    keys = special | {key: raw[key] for key in OF_WRAPPER if key in raw and key not in ours}
    if count := sum(names.is_carried(name, config) for name in found):
        warn(
            f"{count} tensors of a vision tower or of layers that predict several tokens ahead (MTP) are copied "
            f"from {folder}; they were not trained"
        )
        keys |= {key: raw[key] for key in OF_MTP if key in raw}
        if isinstance(text := ours.get("text_config"), dict):
            keys["text_config"] = text | {key: x for key, x in raw["text_config"].items() if key in OF_MTP}
    return keys, found


def _find_origin(checkpoint: str) -> str:
    """Find the published checkpoint that a model descends from, through runs and converted folders; or ""."""
    from gspax.learner.state import CHECKPOINTS
    from gspax.run.checkpoints import Checkpoints, read_extra
    from gspax.run.directory import RunDir
    from gspax.run.recorded import read_recorded

    folder = to_path(checkpoint)
    if checkpoint and (folder / RUN).is_file():
        return _find_origin(read_recorded(RunDir(folder)).model.checkpoint)
    if not checkpoint or not (folder / CHECKPOINTS).is_dir():
        return checkpoint
    with Checkpoints(folder / CHECKPOINTS) as converted:
        return str(read_extra(converted, converted.steps()[-1])["source"])


def _find_base(checkpoint: str) -> tuple[str | None, str | None]:
    """Find the model of a run's adapters, as PEFT finds it from any working directory, and its revision."""
    is_run = bool(checkpoint) and (to_path(checkpoint) / RUN).is_file()
    name = checkpoint if is_run else _find_origin(checkpoint)  # PEFT cannot load what `gspax convert` wrote
    folder = to_path(name)
    if name and not is_run and open_storage(folder).has_folders and folder.is_dir():
        return str(folder.resolve()), None
    if not name:
        warn("the adapters have no published base (random start): export without --adapter")
        return None, None
    if is_run or not HUB_NAME.fullmatch(name):
        what = f"{name} is a run, whose `gspax export` it can load" if is_run else f"{name} is not here"
        warn(f"adapter_config.json: base_model_name_or_path names no model that PEFT could load: {what}")
        return name, None
    name, _, revision = name.partition("@")
    return name, revision or None


def _find_companions(tokenizer: object, checkpoint: str) -> list[Path]:
    """Find the folders of a run's tokenizer, by its description, and of the checkpoint that it started from.

    A checkpoint that is not on this machine is left out.
    """
    fields = tokenizer if isinstance(tokenizer, dict) else {}
    folders = [to_path(str(fields["path"]))] if fields.get("path") else []
    named = fields.get("checkpoint")
    if folders and not folders[0].is_dir():
        warn(f"the tokenizer is not exported: there is no folder {folders[0]} (working directory {Path.cwd()})")
    for name in filter(None, (named if isinstance(named, str) else "", checkpoint, _find_origin(checkpoint))):
        with contextlib.suppress(UserError):
            folders.append(locate(name, SMALL, download=False))
    return folders


def _read_special_tokens(folders: list[Path]) -> dict[str, object]:
    """Read the special token ids of config.json, which transformers uses without a generation_config.json."""
    from gspax.run.directory import read_json

    files = [folder / "config.json" for folder in folders if (folder / "config.json").is_file()]
    raw = read_json(files[0]) if files else {}
    return {name: raw[name] for name in SPECIAL_TOKENS if name in raw}
