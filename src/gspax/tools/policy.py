"""Loads the policy of a run, or a published model, for the commands that talk with it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gspax.errors import UserError, warn
from gspax.storage.paths import to_path

if TYPE_CHECKING:
    import jax

    from gspax.config import ModelConfig, Sampling
    from gspax.config.protocols import Tokenizer
    from gspax.run.directory import RunDir
    from gspax.types import Params

FILTERS = ("temperature", "top_k", "top_p", "min_p")


class LoadedPolicy(NamedTuple):
    """A policy with its tokenizer and its recommended temperature and filters."""

    weights: Params  # for the sampler
    model: ModelConfig
    tokenizer: Tokenizer
    sampling: Sampling  # of its lengths, the temperature, the filters, and the stops
    mesh: jax.sharding.Mesh
    recorded: Mapping[str, Any] | None  # the description of the run; None for a published model


def load_source(
    name: str, own: Tokenizer | None, *, context: int = 0, most: int = 0, temperature: str = "own"
) -> LoadedPolicy:
    """Load the policy of a run or a checkpoint.

    Args:
      name: a run, DIR or DIR@STEP; a checkpoint's folder; a name on the Hub.
      own: the tokenizer, if it is not to be found with the source.
      context: the most tokens of a prompt with what follows it; 0: at most 4096.
      most: the most tokens that follow a prompt; 0: half of `context`.
      temperature: "0" for greedy decoding; "own": the source's.

    Raises:
      UserError: there is no such policy, its tokenizer is not known, or a length or temperature is impossible.
    """
    from gspax.config import Evaluation, Mesh, Published, Sampling
    from gspax.data.chat import ChatTokenizer
    from gspax.evaluation.checkpoint import find_tokenizer, generation_settings
    from gspax.experiment.validation import check_published
    from gspax.experiment.validation.chats import missing_stops
    from gspax.experiment.validation.fields import range_problems, type_problems
    from gspax.hf import hf
    from gspax.learner.state import TrainedPolicy, abstract_params, load_model, load_policy
    from gspax.parallel.sharding import make_mesh
    from gspax.run.checkpoints import Checkpoints, newest_step
    from gspax.run.recorded import read_recorded, read_tokenizer
    from gspax.sampler.placement import make_sampler

    recorded = None
    if (located := locate_run(name)) is not None:
        run, checkpoints, step = located
        recorded, model, lora, used = read_recorded(run)
        tokenizer = own or read_tokenizer(recorded["tokenizer"])
        filters = {name: getattr(used, name) for name in (*FILTERS, "stop", "stop_token_ids")}
    else:
        model, tokenizer, filters = hf(name), own or find_tokenizer(name), {**generation_settings(name)}
    positions = model.max_position_embeddings
    if (context := context or min(4096, positions)) > positions:
        raise UserError(f"--context: wanted at most the {positions} tokens of the model's positions, got {context}")
    if (most := most or context - context // 2) >= context:
        raise UserError(f"--max-tokens: wanted less than the {context} tokens of --context, got {most}")
    sampling = Sampling(max_prompt_tokens=context - most, max_tokens=most, **filters)
    sampling = with_temperature(sampling, str(sampling.temperature) if temperature == "own" else temperature)
    if isinstance(tokenizer, ChatTokenizer):
        for sentence in missing_stops(tokenizer, sampling.stop_token_ids):
            warn(f"{name}: {sentence}")
    alone = replace(sampling, prompts=1, group=1, temperature=1.0)  # 0: greedy
    for problem in chain(type_problems(sampling), range_problems(alone)):
        raise UserError(f"{name}: {problem}")
    check_published(Published(model=model, tokenizer=tokenizer, sampling=alone, evaluation=Evaluation()))
    mesh = make_mesh(Mesh(), model=model)
    if located is not None:
        with Checkpoints(checkpoints, mesh=mesh) as opened:
            chosen = newest_step(opened) if step is None else step
            params = load_policy(run, opened, TrainedPolicy(model, mesh, lora=lora), chosen)
    else:
        params = load_model(model, abstract_params(model, mesh, model.dtype))
    weights = make_sampler(model, mesh, mesh).push(params)
    return LoadedPolicy(weights, model, tokenizer, sampling, mesh, recorded)


def with_temperature(sampling: Sampling, text: str) -> Sampling:
    """Return the settings with another temperature. UserError if the text is not one."""
    try:
        temperature = float(text)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature: wanted a number of at least 0, got {text!r}")
    return replace(sampling, temperature=temperature)


def locate_run(name: str) -> tuple[RunDir, Path, int | None] | None:
    """Return the run that DIR or DIR@STEP names, the folder of its checkpoints, and the step; None if there is none."""
    from gspax.run.directory import RunDir
    from gspax.run.recorded import find_checkpoints

    folder, _, step = name.rpartition("@") if re.search(r"[^@]@\d+$", name) else (name, "", "")
    run = RunDir(to_path(folder))
    if run.experiment.is_file():
        return run, find_checkpoints(run), int(step) if step else None
    above = RunDir(run.path.parent)
    if run.path.name == above.warm_start.path.name and above.experiment.is_file():
        return above, run.checkpoints, int(step) if step else None
    return None
