"""The main loop, read top down: sample, reward, advantage, old log-probs, updates, record, evaluate, checkpoint.

One rollout from prompt to gradient: `loop.py`, `sampler.py`, `advantages.py`, `train_step.py`, `losses/logprobs.py`,
`losses/policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspax import interrupt, progress, report
from gspax.checkpoint import Checkpoints
from gspax.config import Experiment
from gspax.description import describe
from gspax.evaluate import evaluate
from gspax.metrics import Clock, response_metrics, reward_metrics, routing_metrics, score_metrics, update_metrics
from gspax.optimizer import learning_rate, make_optimizer
from gspax.record import Recorder
from gspax.rewards import completions
from gspax.rundir import RunDir, open_run
from gspax.sampler import sample
from gspax.sft import warm_start
from gspax.sharding import make_mesh, named
from gspax.state import abstract_state, init_state, new_state
from gspax.train_step import make_score, make_train_step
from gspax.types import Array, Batch, Rollout, TrainState
from gspax.validation import check

SAMPLING = 1  # folded into the run's key


@dataclass(frozen=True)
class Learner:
    """What stays the same all through a run, compiled once."""

    experiment: Experiment
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    train_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]
    score: Callable[[Any, Batch], tuple[Array, Array, Array]]


def make_learner(experiment: Experiment) -> Learner:
    """The mesh, optimiser and jitted steps of an experiment. UserError where it does not fit the devices."""
    check(experiment, jax.device_count())
    mesh = make_mesh(experiment.mesh)
    optimizer = make_optimizer(experiment.optimizer)
    alike: dict[str, Any] = {
        "temperature": experiment.sampling.temperature,
        "microbatch_rows": experiment.schedule.microbatch_rows,
        "mesh": mesh,
    }
    return Learner(
        experiment,
        mesh,
        optimizer,
        make_train_step(experiment.model, experiment.loss, optimizer, **alike),
        make_score(experiment.model, **alike),
    )


def train(experiment: Experiment, workdir: Path) -> None:
    """Run or resume the experiment in `workdir`, and write its report.

    Raises:
      UserError: the directory belongs to another experiment, or the experiment's functions misbehave.
      Interrupted: Ctrl-C or SIGTERM; a checkpoint was saved first.
    """
    learner = make_learner(experiment)
    run = open_run(workdir, describe(experiment))
    schedule = experiment.schedule
    with (
        interrupt.watch() as interrupted,
        Checkpoints(run.checkpoints, keep=schedule.keep_checkpoints) as checkpoints,
    ):
        state = restore_or_start(learner, run, checkpoints, interrupted)
        done = rollouts_done(learner, state)
        with Recorder(run, done) as recorder, progress.bar(schedule.steps, done, experiment.name) as bar:
            if done == 0:
                record_evaluation(learner, state, recorder, 0, run.before)
            while done < schedule.steps:
                state, metrics, rows = rollout_and_update(learner, state)
                done += 1
                recorder.metrics(done, metrics)
                bar.step(done, metrics)
                if _due(done, schedule.eval_every, schedule.steps):
                    record_evaluation(learner, state, recorder, done, run.after)
                    recorder.samples(done, rows)
                if _due(done, schedule.checkpoint_every, schedule.steps) or interrupted():
                    checkpoints.save(done, state, {"experiment": describe(experiment)})
                interrupted.stop_here()
    if jax.process_index() == 0:
        report.write(run.path)


def _due(done: int, every: int, last: int) -> bool:
    return done == last or (every > 0 and done % every == 0)


def rollouts_done(learner: Learner, state: TrainState) -> int:
    return int(state.step) // learner.experiment.schedule.minibatches


def restore_or_start(
    learner: Learner, run: RunDir, checkpoints: Checkpoints, interrupted: interrupt.Watch
) -> TrainState:
    """The last checkpoint's state; else random parameters, after the warm start if the experiment has one."""
    experiment, mesh, optimizer = learner.experiment, learner.mesh, learner.optimizer
    if checkpoints.latest() is not None:
        state, _ = checkpoints.restore(abstract_state(experiment.model, optimizer, mesh))
        return state
    if experiment.warm_start is None:
        return init_state(experiment.model, optimizer, jax.random.key(experiment.seed), mesh)
    warm = warm_start(experiment, run, mesh, interrupted)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(experiment.model, optimizer, mesh))
    start = jax.jit(lambda params, key: new_state(params, optimizer, key), out_shardings=shardings)
    return replace(start(warm.params, warm.key), position=warm.position)


def record_evaluation(learner: Learner, state: TrainState, recorder: Recorder, done: int, samples: Path) -> None:
    """Evaluate on the held-out problems, write the metrics and the completions that the report shows."""
    metrics, rows = evaluate(learner.experiment, state.params, state.key, learner.mesh)
    recorder.metrics(done, metrics)
    recorder.samples_to(samples, rows)


def rollout_and_update(
    learner: Learner, state: TrainState
) -> tuple[TrainState, dict[str, float], list[dict[str, Any]]]:
    """One rollout batch and its optimiser updates: the new state, the metrics, and every completion."""
    experiment = learner.experiment
    P, G = experiment.sampling.prompts, experiment.sampling.group
    clock = Clock()

    first = int(state.position)
    problems = [experiment.data.train(index) for index in range(first, first + P)]
    rollout = sample(
        state.params,
        experiment.model,
        [experiment.tokenizer.encode(problem.prompt) for problem in problems],
        range(first, first + P),
        jax.random.fold_in(state.key, SAMPLING),
        sampling=experiment.sampling,
        stop_ids=experiment.tokenizer.stop_ids,
        mesh=learner.mesh,
    )
    rollout = jax.device_get(rollout)
    clock.lap("rollout")

    rows = completions(experiment, problems, rollout)
    reward_PG = jnp.array([row["reward"] for row in rows], jnp.float32).reshape(P, G)
    advantage_B = np.asarray(experiment.advantage(reward_PG)).reshape(-1)
    clock.lap("reward")

    batches = minibatches(learner, rollout, advantage_B)
    scores = [learner.score(state.params, batch) for batch in batches]
    batches = [replace(batch, old_logp_BT=logp) for batch, (logp, _, _) in zip(batches, scores, strict=True)]
    jax.block_until_ready(scores)
    clock.lap("old_logp")

    updates = []
    for batch in batches:
        state, update = learner.train_step(state, batch)
        updates.append(update)
    state = replace(state, position=state.position + P)
    jax.block_until_ready(state)
    clock.lap("train")

    # on one mini-batch: a forward pass of them all would be a tenth of a step
    experts_before, experts_after = scores[0][2], learner.score(state.params, batches[0])[2]
    metrics = {
        **reward_metrics(reward_PG),
        **response_metrics(rollout),
        **update_metrics(jax.device_get(updates)),
        "optim/learning_rate": float(learning_rate(experiment.optimizer)(state.step - 1)),
        **score_metrics(rollout, scores),
        **routing_metrics(experts_before, experts_after, experiment.model.num_experts),
        **clock.metrics(int(rollout.length_B.sum())),
    }
    for row, advantage in zip(rows, advantage_B, strict=True):
        row["advantage"] = float(advantage)
    return state, metrics, rows


def minibatches(learner: Learner, rollout: Rollout, advantage_B: np.ndarray) -> list[Batch]:
    """The rollout cut into `schedule.minibatches` runs of whole groups, placed on the mesh. Old log-probs are zeros."""
    experiment = learner.experiment
    total_B1 = (rollout.prompt_length_B + rollout.length_B)[:, None]
    columns: dict[str, Any] = {
        "tokens_BT": rollout.tokens_BT,
        "segment_BT": (np.arange(rollout.tokens_BT.shape[1])[None] < total_B1).astype(np.int32),
        "mask_BT": rollout.mask_BT,
        "old_logp_BT": np.zeros_like(rollout.logp_BT),
        "advantage_B": advantage_B.astype(np.float32),
    }
    count = experiment.schedule.minibatches
    size = len(advantage_B) // count
    parts = [
        Batch(**{name: column[first : first + size] for name, column in columns.items()})
        for first in range(0, count * size, size)
    ]
    return [jax.device_put(part, named(learner.mesh, "batch")) for part in parts]
