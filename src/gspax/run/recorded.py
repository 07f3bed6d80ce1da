"""Reads the policy of a run directory: model and adapters, tokenizer, and the path of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from gspax.config import Lora, ModelConfig, Sampling
from gspax.config.functions import name_of
from gspax.config.model import architecture_problems
from gspax.data.chat import CharChat, ChatTokenizer
from gspax.data.files import read_object, show
from gspax.data.tokenizer import CharTokenizer, HFTokenizer
from gspax.errors import UserError
from gspax.experiment.validation.fields import range_problems
from gspax.hf.source import read_model, read_part
from gspax.run.directory import RunDir
from gspax.run.manifest import finished_steps

if TYPE_CHECKING:
    from gspax.config.protocols import Tokenizer
    from gspax.types import JsonObject


RECORDS = ("model", "data", "sampling", "tokenizer")  # fields of an experiment whose descriptions name a class


class Recorded(NamedTuple):
    """The experiment of a run as experiment.json has it, and the parts of it that are needed as records."""

    experiment: JsonObject
    model: ModelConfig
    lora: Lora | None
    sampling: Sampling


def read_recorded(run: RunDir) -> Recorded:
    """Read the experiment of a run. UserError if it is damaged."""
    experiment = read_object(run.experiment)
    loss = experiment.get("loss")
    types = {name: part.get("type") if isinstance(part := experiment.get(name), dict) else None for name in RECORDS}
    names = types | {"name": experiment.get("name"), "loss": loss.get("function") if isinstance(loss, dict) else loss}
    for field, name in names.items():
        if not isinstance(name, str):
            got = show(experiment.get(field))
            raise UserError(f"{run.experiment}: {field}: wanted what this version of gspax records, got {got}")
    sampling = read_part(Sampling, experiment["sampling"], f"{run.experiment}: sampling")
    model, lora = read_model(experiment, run.experiment)
    parts: dict[str, ModelConfig | Sampling | Lora] = {"model": model, "sampling": sampling}
    parts |= {} if lora is None else {"lora": lora}
    wrong = (f"{name}.{problem}" for name, part in parts.items() for problem in range_problems(part))
    for problem in chain(wrong, architecture_problems(model)):  # the latter counts layers: their number is in range
        raise UserError(f"{run.experiment}: {problem}")
    return Recorded(experiment, model, lora, sampling)


def read_tokenizer(described: Mapping[str, Any]) -> Tokenizer:
    """Make the tokenizer of a run's description. UserError if its class is not one of gspax's, or it is damaged."""
    kinds = {name_of(kind): kind for kind in (CharTokenizer, CharChat, HFTokenizer, ChatTokenizer)}
    if (recorded := str(described.get("type"))) not in kinds:
        raise UserError(f"tokenizer: wanted --file with the experiment's file, which defines {recorded}")
    return cast("Tokenizer", read_part(kinds[recorded], described, "tokenizer"))


def find_checkpoints(run: RunDir) -> Path:
    """Find the checkpoints of the run; before its first save, the warm start's. UserError if there are none."""
    if finished_steps(run.checkpoints):
        return run.checkpoints
    if run.newest.exists():
        raise UserError(f"{run.checkpoints} has no checkpoint, but {run.newest.name} records that one was saved")
    if finished_steps(run.warm_start.checkpoints):
        return run.warm_start.checkpoints
    raise UserError(f"{run.path}: wanted a checkpoint of the run or of its warm start, there is none")
