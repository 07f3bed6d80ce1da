"""Runs the supervised warm start, which imitates demonstrations before a run or alone (`gspax sft`).

It uses the train step of reinforcement learning with another loss, so both stages share the code of the gradient.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import jax
import numpy as np

from gspax.config import Experiment, Sampling, Schedule, WarmStart, row_shape
from gspax.config.protocols import ConversationTokenizer, DataSource, Environment
from gspax.data.chat_template import opening_of
from gspax.data.problem import encode_prompt, read_problem
from gspax.data.tokenizer import check_ids
from gspax.errors import DivergedError, UserError
from gspax.experiment.description import describe
from gspax.experiment.origin import find_origin
from gspax.experiment.validation.devices import check_on
from gspax.learner import objective
from gspax.learner.forward import StepSettings
from gspax.learner.optimizer import make_optimizer
from gspax.learner.state import TrainedPolicy, first_state, restore_state
from gspax.learner.train_step import make_train_step
from gspax.losses import Terms
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.rollout.episodes import encode_demonstration
from gspax.rollout.problems import Skipped, read_usable
from gspax.run import interrupt, progress
from gspax.run.checkpoints import Checkpoints, read_extra
from gspax.run.directory import RunDir, enter_run
from gspax.run.record import Recorder
from gspax.sampler.placement import make_meshes
from gspax.training.run_guard import NOT_FINITE, count_skipped, save_state, too_many_skipped
from gspax.types import Array, Batch, TrainState

SKIPPED = "skipped"  # the entry of a checkpoint that counts the updates skipped in a row


def nll(logp_BT: Array, mask_BT: Array) -> Terms:
    """Compute the negative log-likelihood; all demonstrated tokens weigh the same."""
    value_B = -logp_BT.sum(axis=-1, where=mask_BT)
    return Terms(value=value_B, weight=mask_BT.sum(axis=-1).astype(value_B.dtype), metrics={})


def imitation(outputs: objective.Outputs, batch: Batch, constants: objective.UpdateConstants) -> Terms:
    """Compute `nll` as the objective of an update. There is no old policy, so there is no metric of a ratio."""
    return nll(outputs.logp_BT, batch.mask_BT)


def run(experiment: Experiment, workdir: Path, file: str | None = None) -> None:
    """Run this stage alone (`gspax sft`), in `workdir/warm_start`, where `gspax train` finds it.

    Args:
      file: the experiment file; the run stores a copy.
    """
    if experiment.warm_start is None:
        raise UserError(f"sft: the experiment {experiment.name!r} has no warm_start")
    check_on(jax.devices(), experiment)
    mesh = make_meshes(experiment).learner
    with interrupt.listen(), enter_run(workdir, describe(experiment), find_origin(experiment, file)) as run:
        skipped = Skipped(experiment.sampling.max_failed)
        skipped.load(run.skipped)
        warm_start(experiment, run, mesh, skipped)


def warm_start(experiment: Experiment, run: RunDir, mesh: jax.sharding.Mesh, skipped: Skipped) -> TrainState:
    """Run `warm_start.steps` updates from a new state, or resume an interrupted stage, and return the state.

    With `lora` only the adapters are trained, as in the run that follows: their base stays the model's checkpoint.
    The state's position is the number of training problems that were demonstrated or `skipped`.

    Raises:
      DivergedError: several updates in a row are skipped, or a parameter is not finite.
      Interrupted: the state was saved.
    """
    stage, model, sampling = experiment.warm_start, experiment.model, experiment.sampling
    assert stage is not None
    policy = TrainedPolicy(model, mesh, make_optimizer(stage.optimizer, experiment.trained.dtype), experiment.lora)
    rows, speed = microbatch_rows(stage.rows, sampling, experiment.schedule, mesh), stage.optimizer.bias_update_speed
    settings = StepSettings(config=model, mesh=mesh, microbatch_rows=rows, bias_update_speed=speed)
    train_step = make_train_step(settings, imitation, policy.optimizer)
    demonstrations = Demonstrations(
        stage=stage,
        data=experiment.data,
        tokenizer=cast(ConversationTokenizer, experiment.tokenizer),  # checked by `experiment.validate`
        environment=experiment.environment,
        length=sampling.max_prompt_tokens + sampling.max_tokens,
        vocab_size=model.vocab_size,
        seed=experiment.seed,
    )
    steps, limits = stage.steps, (experiment.schedule.max_skipped, stage.steps)
    with Checkpoints(run.warm_start.checkpoints, keep=1, mesh=mesh) as checkpoints, final_errors():
        if (newest := checkpoints.latest()) is None:
            state, in_a_row = first_state(run, policy, jax.random.key(experiment.seed)), 0
        else:
            state = restore_state(run, checkpoints, policy, newest)
            in_a_row = int(read_extra(checkpoints, newest).get(SKIPPED, 0))
        done, first = (int(x) for x in multihost.to_host((state.step, state.position)))

        def save() -> None:
            save_state(checkpoints, recorder, done, state, {SKIPPED: in_a_row}, is_last=True)

        with (
            Recorder(run.warm_start, done) as recorder,
            progress.track(steps, done, "warm start") as bar,
            interrupt.call_on_interrupt(save),
        ):
            if done:
                bar.print(f"warm start: {'already at' if done >= steps else 'continuing from'} step {done} of {steps}")
            progress.phase("updating")
            while done < steps:
                batch, read = make_demonstrations(demonstrations, first, mesh=mesh, skipped=skipped)
                state, metrics = train_step(state, batch)
                state = replace(state, position=state.position + read)
                done, first = done + 1, first + read
                shown = {name: float(value) for name, value in multihost.to_host(metrics).items()}
                recorder.write_metrics(done, shown)
                bar.update(done, {"loss": shown["loss"]})
                in_a_row = count_skipped(in_a_row, [bool(shown["skipped"])])[-1]
                if in_a_row >= min(limits):
                    raise too_many_skipped(in_a_row, limits, done, state, NOT_FINITE)
                if done == steps:
                    save()
                interrupt.stop_point()
    return state


@contextlib.contextmanager
def final_errors() -> Iterator[None]:
    """Make a divergence final: the stage is deterministic, so the same updates would fail again."""
    try:
        yield
    except DivergedError as problem:
        raise DivergedError(f"warm start: {problem}", step=problem.step, final=True) from problem


def microbatch_rows(rows: int, sampling: Sampling, schedule: Schedule, mesh: jax.sharding.Mesh) -> int:
    """Return the largest divisor of a minibatch's rows that also divides the rows of the run's microbatches."""
    of_run = schedule.microbatch_rows
    if schedule.microbatch_tokens:
        of_run = row_shape(sampling, schedule, batch_shards(mesh)).microbatch
    return math.gcd(rows, of_run)  # all rows if `of_run` is 0


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The source of a warm start's demonstrations, indexed by problem.

    Attributes:
      length: the most tokens of a prompt and its demonstration.
    """

    stage: WarmStart
    data: DataSource
    tokenizer: ConversationTokenizer
    environment: Environment | None = None
    length: int
    vocab_size: int
    seed: int


def make_demonstrations(
    source: Demonstrations, first: int, *, mesh: jax.sharding.Mesh, skipped: Skipped
) -> tuple[Batch, int]:
    """Build a batch of `stage.rows` demonstrations from problem `first` on; return it and the number of problems read.

    A row is a function of (seed, index) alone. A demonstration that is too long or has an id out of range is skipped.
    """
    by_row, rows = named_sharding(mesh, "batch"), source.stage.rows
    ids, encoded = read_usable(
        partial(demonstrate, source), dict(enumerate(range(first, first + rows))), rows, by_row, skipped
    )
    tokens_BT = np.zeros((rows, source.length), np.int32)
    segment_BT, mask_BT = np.zeros_like(tokens_BT), np.zeros(tokens_BT.shape, bool)
    for row, (tokens, imitated) in encoded.items():
        tokens_BT[row, : len(tokens)] = tokens
        segment_BT[row, : len(tokens)] = 1
        mask_BT[row, : len(tokens)] = imitated
    arrays = {"tokens_BT": tokens_BT, "segment_BT": segment_BT, "mask_BT": mask_BT}
    return Batch(**multihost.to_devices(arrays, by_row)), max(ids.values()) + 1 - first


def demonstrate(source: Demonstrations, index: int) -> tuple[list[int], list[bool]]:
    """Encode prompt, demonstration, and stop token, and mark the tokens to imitate.

    With an environment a demonstration is the messages of a conversation.
    """
    problem, environment, tokenizer = read_problem(source.data.train, index), source.environment, source.tokenizer
    shown = source.stage.demonstration(problem, np.random.default_rng((source.seed, index)))
    if environment is not None:
        messages = [shown] if isinstance(shown, str) else shown
        tokens, imitated = encode_demonstration(environment, tokenizer, problem, messages)
    elif isinstance(shown, str):
        prompt = encode_prompt(tokenizer, problem)
        answer = tokenizer.encode_completion(shown.removeprefix(opening_of(tokenizer, prompt)))
        tokens = [*prompt, *answer, getattr(tokenizer, "turn_end", tokenizer.stop_ids[0])]
        imitated = [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
    else:
        raise UserError(f"warm_start.demonstration: wanted a text without an environment, got {shown!r}")
    check_ids(tokens, source.vocab_size, problem.prompt)
    if len(tokens) > source.length:
        raise UserError(
            f"warm_start: wanted at most {source.length} tokens of prompt and demonstration "
            f"(sampling.max_prompt_tokens + max_tokens), got {len(tokens)}"
        )
    return tokens, imitated
