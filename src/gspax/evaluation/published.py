"""An experiment around a published checkpoint, to evaluate it with its own tokenizer, chat template and sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, Sampling, Task
from gspax.config.protocols import Tokenizer
from gspax.data.chat import hf_chat
from gspax.data.problem import Problem
from gspax.data.sources import sequence
from gspax.data.tokenizer import hf_tokenizer, settings
from gspax.errors import UserError
from gspax.hf.source import CONFIG, SMALL, hf, locate

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_UNUSED = sequence([Problem("unused", "")], heldout=[Problem("not used", "")])


def make_experiment(checkpoint: str, tasks: tuple[Task, ...]) -> Experiment:
    """An experiment whose model, tokenizer and lengths are those of a checkpoint; what training needs is not used.

    The chat template is used if there is one, with thinking where the template knows it.
    """
    folder, model = locate(checkpoint, SMALL), hf(checkpoint)
    length = min(2048, model.max_position_embeddings // 2)
    return Experiment(
        name="eval",
        model=model,
        data=_UNUSED,
        tokenizer=_find_tokenizer(folder),
        reward=no_reward,
        advantage=advantages.standardize,
        loss=losses.gspo,
        sampling=Sampling(prompts=16, group=4, max_prompt_tokens=length, max_tokens=length),
        evaluation=Evaluation(tasks=tasks),
    )


def generation_settings(checkpoint: str) -> dict[str, Any]:
    """The sampling that generation_config.json recommends, as fields of a `Task`; empty if there is none."""
    config = settings(locate(checkpoint, (*CONFIG, "generation_config.json")), "generation_config.json")
    found = {name: config[name] for name in SAMPLING if config.get(name) is not None}
    return {**found, "temperature": 0.0} if config.get("do_sample") is False else found


def no_reward(problem: Problem, completion: str) -> float:
    """The reward of an experiment that is not trained."""
    raise UserError("reward: this experiment only holds a published checkpoint")


def _find_tokenizer(folder: Path) -> Tokenizer:
    has_template = (folder / "chat_template.jinja").is_file() or settings(folder, "tokenizer_config.json").get(
        "chat_template"
    )
    return hf_chat(folder, thinking=True) if has_template else hf_tokenizer(folder)
