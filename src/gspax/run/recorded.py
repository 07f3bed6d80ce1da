"""Read from a run directory what its policy is: model and adapters, tokenizer, and where the parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gspax.config import Lora, ModelConfig
from gspax.config.functions import name_of, parse
from gspax.data.chat import CharChat, ChatTokenizer
from gspax.data.tokenizer import CharTokenizer, HFTokenizer
from gspax.errors import UserError
from gspax.hf.source import read_model
from gspax.run.directory import RunDir, read_json
from gspax.run.manifest import finished_steps

if TYPE_CHECKING:
    from gspax.config.protocols import Tokenizer
    from gspax.types import JsonObject


def read_recorded(run: RunDir) -> tuple[JsonObject, ModelConfig, Lora | None]:
    """Read the experiment of a run as experiment.json has it, its model, and its adapters. UserError if unreadable."""
    experiment = read_json(run.experiment)
    return experiment, *read_model(experiment, run.experiment)


def read_tokenizer(described: Mapping[str, Any]) -> Tokenizer:
    """Make the tokenizer of a run's description. UserError if its class is not one of gspax's."""
    kinds = {name_of(kind): kind for kind in (CharTokenizer, CharChat, HFTokenizer, ChatTokenizer)}
    if described["type"] not in kinds:
        raise UserError(f"tokenizer: wanted --file with the experiment's file, which defines {described['type']}")
    return cast("Tokenizer", parse(kinds[described["type"]], described))


def find_checkpoints(run: RunDir) -> Path:
    """Find the checkpoints of the run; before its first save, those of its warm start. UserError if there are none."""
    if finished_steps(run.checkpoints):
        return run.checkpoints
    if run.newest.exists():
        raise UserError(f"{run.checkpoints} has no checkpoint, but {run.newest.name} records that one was saved")
    if finished_steps(run.warm_start.checkpoints):
        return run.warm_start.checkpoints
    raise UserError(f"{run.path}: wanted a checkpoint of the run or of its warm start, there is none")
