"""Supervised warm start: imitate demonstrations. A stage of its own, usable alone (`gspax sft`).

It is the reinforcement-learning train step with another loss, so the two stages share all of the gradient's code.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from gspax.config import Experiment, WarmStart, row_shape, trained_dtype
from gspax.config.protocols import CompletionTokenizer, ConversationTokenizer, DataSource, Environment
from gspax.data.problem import encode_prompt, read_problem
from gspax.data.tokenizer import check_ids
from gspax.errors import DivergedError, UserError
from gspax.experiment.description import describe
from gspax.learner import objective
from gspax.learner.optimizer import make_optimizer
from gspax.learner.restore import drop_frozen, first_state, restore_state
from gspax.learner.train_step import make_train_step
from gspax.losses import Terms
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.rewards.environments.demonstrations import encode_demonstration
from gspax.rollout.problems import Skipped, read_usable
from gspax.run import interrupt, progress
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import RunDir, enter_run
from gspax.run.record import Recorder
from gspax.sampler.placement import make_meshes
from gspax.training.guard import check_finite, count_skipped, too_many_skipped
from gspax.types import Array, Batch, TrainState


def nll(logp_BT: Array, old_logp_BT: Array, advantage_B: Array, mask_BT: Array) -> Terms:
    """Negative log-likelihood, every demonstrated token weighted equally. Reads log-probs and mask alone."""
    value_B = -logp_BT.sum(axis=-1, where=mask_BT)
    return Terms(value=value_B, weight=mask_BT.sum(axis=-1).astype(value_B.dtype), metrics={})


def imitation(outputs: objective.Outputs, batch: Batch, constants: objective.UpdateConstants) -> Terms:
    """`nll` as what an update minimises: there is no old policy, so no metric of a ratio."""
    return nll(outputs.logp_BT, batch.old_logp_BT, batch.advantage, batch.mask_BT)


def run(experiment: Experiment, workdir: Path) -> None:
    """`gspax sft`: this stage alone, in `workdir/warm_start`, where `gspax train` finds it."""
    if experiment.warm_start is None:
        raise UserError(f"sft: the experiment {experiment.name!r} has no warm_start")
    mesh, _ = make_meshes(experiment)
    with interrupt.listen(), enter_run(workdir, describe(experiment)) as run:
        skipped = Skipped(experiment.sampling.max_failed)
        skipped.load(run.skipped)
        warm_start(experiment, run, mesh, skipped)


def warm_start(experiment: Experiment, run: RunDir, mesh: jax.sharding.Mesh, skipped: Skipped) -> TrainState:
    """The state after `warm_start.steps` updates from scratch; an interrupted stage is resumed.

    With `lora` only the adapters are trained, as in the run that follows: their base stays the model's checkpoint.
    Its position is the number of training problems that were demonstrated or `skipped`.

    Raises:
      DivergedError: several updates in a row are skipped, or a parameter is not finite.
      Interrupted: the state was saved.
    """
    stage, model, lora = experiment.warm_start, experiment.model, experiment.lora
    assert stage is not None
    optimizer = make_optimizer(stage.optimizer, trained_dtype(model, lora))
    schedule, rows = experiment.schedule, experiment.schedule.microbatch_rows
    if schedule.microbatch_tokens:
        rows = row_shape(experiment.sampling, schedule, batch_shards(mesh)).microbatch
    rows = math.gcd(stage.rows, rows)  # the most that divide both, all if that is 0
    train_step = make_train_step(model, imitation, optimizer, microbatch_rows=rows, mesh=mesh)
    demonstrate = partial(
        make_demonstrations,
        stage,
        data=experiment.data,
        tokenizer=cast(CompletionTokenizer, experiment.tokenizer),  # checked by `experiment.validate`
        length=experiment.sampling.max_prompt_tokens + experiment.sampling.max_tokens,
        vocab_size=model.vocab_size,
        seed=experiment.seed,
        mesh=mesh,
        environment=experiment.environment,
        unusable=skipped,
    )
    with _final_failures(), Checkpoints(run.warm_start.checkpoints, keep=1, mesh=mesh) as checkpoints:
        if checkpoints.latest() is None:
            state = first_state(run, model, lora, optimizer, jax.random.key(experiment.seed), mesh)
        else:
            state = restore_state(run, checkpoints, model, optimizer, mesh, lora=lora)
        in_a_row = 0
        done, first = (int(x) for x in multihost.to_host((state.step, state.position)))

        def save() -> None:
            stored = drop_frozen(state)
            check_finite(stored, done)
            recorder.flush()
            checkpoints.save(done, stored, {})

        with (
            Recorder(run.warm_start, done) as recorder,
            progress.track(stage.steps, done, "warm start") as bar,
            interrupt.call_on_interrupt(save),
        ):
            if done:
                reached = "already at" if done >= stage.steps else "continuing from"
                bar.print(f"warm start: {reached} step {done} of {stage.steps}")
            progress.phase("updating")
            while done < stage.steps:
                batch, taken = demonstrate(first)
                state, metrics = train_step(state, batch)
                state = replace(state, position=state.position + taken)
                done, first = done + 1, first + taken
                shown = {name: float(value) for name, value in multihost.to_host(metrics).items()}
                recorder.write_metrics(done, shown)
                bar.update(done, {"loss": shown["loss"]})
                in_a_row = count_skipped(in_a_row, [bool(shown["skipped"])])[-1]
                if in_a_row >= (limit := experiment.schedule.max_skipped):
                    raise too_many_skipped(in_a_row, limit, done, state)
                if done == stage.steps:
                    save()
                interrupt.stop_point()
    return state


@contextlib.contextmanager
def _final_failures() -> Iterator[None]:
    """The run does not go back for a stage that starts from random parameters: the same updates would fail again."""
    try:
        yield
    except DivergedError as problem:
        raise DivergedError(f"warm start: {problem}", step=problem.step, final=True) from problem


def make_demonstrations(
    stage: WarmStart,
    first: int,
    *,
    data: DataSource,
    tokenizer: CompletionTokenizer,
    length: int,
    vocab_size: int,
    seed: int,
    mesh: jax.sharding.Mesh,
    environment: Environment | None = None,
    unusable: Skipped | None = None,
) -> tuple[Batch, int]:
    """`stage.rows` demonstrated problems from index `first` on, padded to `length` tokens, and how many were read.

    A row is a function of (seed, index) alone. With an environment a demonstration is the messages of a conversation.
    One that is longer than `length` or has an id out of range is skipped as `unusable` allows, by default none.
    """
    by_row = named_sharding(mesh, "batch")

    def encode(index: int) -> tuple[list[int], list[bool]]:
        """The tokens of prompt, demonstration and stop token together, and which of them are imitated."""
        problem = read_problem(data.train, index)
        shown = stage.demonstration(problem, np.random.default_rng((seed, index)))
        if environment is not None:
            messages = [shown] if isinstance(shown, str) else shown
            tokens, own = encode_demonstration(environment, cast(ConversationTokenizer, tokenizer), problem, messages)
        elif isinstance(shown, str):
            prompt, answer = encode_prompt(tokenizer, problem), tokenizer.encode_completion(shown)
            tokens = [*prompt, *answer, tokenizer.stop_ids[0]]
            own = [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
        else:
            raise UserError(f"warm_start.demonstration: wanted a text without an environment, got {shown!r}")
        check_ids(tokens, vocab_size, problem.prompt)
        if len(tokens) > length:
            raise UserError(
                f"warm_start: wanted at most {length} tokens of prompt and demonstration "
                f"(sampling.max_prompt_tokens + max_tokens), got {len(tokens)}"
            )
        return tokens, own

    wanted = dict(enumerate(range(first, first + stage.rows)))
    ids, encoded = read_usable(encode, wanted, stage.rows, by_row, unusable or Skipped())
    tokens_BT = np.zeros((stage.rows, length), np.int32)
    segment_BT = np.zeros_like(tokens_BT)
    mask_BT = np.zeros(tokens_BT.shape, bool)
    for row, (tokens, own) in encoded.items():
        tokens_BT[row, : len(tokens)] = tokens
        segment_BT[row, : len(tokens)] = 1
        mask_BT[row, : len(tokens)] = own
    columns: dict[str, Any] = {
        "tokens_BT": tokens_BT,
        "segment_BT": segment_BT,
        "mask_BT": mask_BT,
        "old_logp_BT": np.zeros(tokens_BT.shape, np.float32),
        "advantage": np.zeros(stage.rows, np.float32),
    }
    return multihost.to_devices(Batch(**columns), by_row), max(ids.values()) + 1 - first
