"""Supervised warm start: imitate demonstrations. A small stage of its own, usable alone (`gspax sft`).

It is the reinforcement-learning train step with another loss, so the two stages share every line of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from gspax.config import Experiment, WarmStart
from gspax.distributed import multihost
from gspax.errors import UserError
from gspax.experiment.description import describe
from gspax.learner import objective
from gspax.learner.optimizer import make_optimizer
from gspax.learner.state import abstract_state, init_state
from gspax.learner.train_step import make_train_step
from gspax.losses import Terms
from gspax.protocols import CompletionTokenizer
from gspax.rollout.placement import make_meshes
from gspax.run import interrupt, progress
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import RunDir, open_run, wait_until_shared
from gspax.run.record import Recorder
from gspax.sharding import named_sharding
from gspax.types import Array, Batch, TrainState


def nll(logp_BT: Array, old_logp_BT: Array, advantage_B: Array, mask_BT: Array) -> Terms:
    """Negative log-likelihood, every demonstrated token weighing the same. Only log-probs and mask are read."""
    value_B = -logp_BT.sum(axis=-1, where=mask_BT)
    return Terms(value=value_B, weight=mask_BT.sum(axis=-1).astype(value_B.dtype), metrics={})


def run(experiment: Experiment, workdir: Path) -> None:
    """`gspax sft`: only this stage, in `workdir/warm_start`, where `gspax train` finds it again."""
    if experiment.warm_start is None:
        raise UserError(f"sft: the experiment {experiment.name!r} has no warm_start")
    mesh, _ = make_meshes(experiment)
    with interrupt.watch() as interrupted:
        run = multihost.all_or_raise(lambda: open_run(workdir, describe(experiment)))
        wait_until_shared(run)
        warm_start(experiment, run, mesh, interrupted)


def warm_start(
    experiment: Experiment, run: RunDir, mesh: jax.sharding.Mesh, interrupted: interrupt.Watch
) -> TrainState:
    """Parameters after `warm_start.steps` updates from scratch, resuming the stage where it was left.

    The state's position says how many training problems were demonstrated.
    """
    stage = experiment.warm_start
    assert stage is not None
    optimizer = make_optimizer(stage.optimizer, experiment.model.param_dtype)
    train_step = make_train_step(experiment.model, objective.from_loss(nll), optimizer, mesh=mesh)
    with Checkpoints(run.warm_start.checkpoints, keep=1, mesh=mesh) as checkpoints:
        if checkpoints.latest() is None:
            state = init_state(experiment.model, optimizer, jax.random.key(experiment.seed), mesh)
        else:
            state, _ = checkpoints.restore(abstract_state(experiment.model, optimizer, mesh))
        done, first = (int(x) for x in multihost.to_host((state.step, state.position)))
        with Recorder(run.warm_start, done) as recorder, progress.bar(stage.steps, done, "warm start") as bar:
            while done < stage.steps:
                state, metrics = train_step(state, demonstrations(experiment, stage, first, mesh))
                state = replace(state, position=state.position + stage.rows)
                done, first = done + 1, first + stage.rows
                shown = {name: float(value) for name, value in multihost.to_host(metrics).items()}
                recorder.metrics(done, shown)
                bar.step(done, {"loss": shown["loss"]})
                if interrupted() or done == stage.steps:
                    checkpoints.save(done, state, {})
                interrupted.stop_here()
    return state


def demonstrations(experiment: Experiment, stage: WarmStart, first: int, mesh: jax.sharding.Mesh) -> Batch:
    """`stage.rows` demonstrated problems from index `first` on; a function of (seed, index) only."""
    longest, by_row = (
        experiment.sampling.max_prompt_tokens + experiment.sampling.max_tokens,
        named_sharding(mesh, "batch"),
    )
    ids = range(first, first + stage.rows)
    texts = multihost.all_or_raise(
        lambda: multihost.local_rows(partial(_demonstration, experiment, stage, longest), ids, by_row)
    )
    tokens_BT = np.zeros((stage.rows, longest), np.int32)
    segment_BT = np.zeros_like(tokens_BT)
    mask_BT = np.zeros(tokens_BT.shape, bool)
    for row, text in enumerate(texts):
        if text is not None:
            prompt, whole = text
            tokens_BT[row, : len(whole)] = whole
            segment_BT[row, : len(whole)] = 1
            mask_BT[row, len(prompt) : len(whole)] = True
    columns: dict[str, Any] = {
        "tokens_BT": tokens_BT,
        "segment_BT": segment_BT,
        "mask_BT": mask_BT,
        "old_logp_BT": np.zeros(tokens_BT.shape, np.float32),
        "advantage_B": np.zeros(stage.rows, np.float32),
    }
    return multihost.to_devices(Batch(**columns), by_row)


def _demonstration(
    experiment: Experiment, stage: WarmStart, longest: int, index: int
) -> tuple[Sequence[int], list[int]]:
    """The tokens of a training problem's prompt, and of prompt, demonstration and stop token together."""
    problem = experiment.data.train(index)
    rng = np.random.default_rng((experiment.seed, index))
    prompt = experiment.tokenizer.encode(problem.prompt)
    tokenizer = cast(CompletionTokenizer, experiment.tokenizer)  # checked by `experiment.validate`
    answer = tokenizer.encode_completion(stage.demonstration(problem, rng))
    text = [*prompt, *answer, experiment.tokenizer.stop_ids[0]]
    if len(text) > longest:
        raise UserError(
            f"warm_start: wanted at most {longest} tokens of prompt and demonstration "
            f"(sampling.max_prompt_tokens + max_tokens), got {len(text)} for training problem {index}"
        )
    return prompt, text
