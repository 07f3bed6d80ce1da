"""The main loop, read top down: sample, reward, advantage, old log-probs, updates, record, evaluate, checkpoint.

One rollout from prompt to gradient: `loop.py`, `sampler.py`, `advantages.py`, `train_step.py`, `losses/logprobs.py`,
`losses/policy.py`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gspax.config import Experiment
from gspax.data.problem import Problem
from gspax.distributed import multihost
from gspax.distributed.transfer import transfer, transfer_key
from gspax.evaluate import evaluate
from gspax.experiment.description import describe
from gspax.learner import clipping, minibatches
from gspax.learner.metrics import (
    Clock,
    response_metrics,
    reward_metrics,
    routing_metrics,
    score_metrics,
    update_metrics,
)
from gspax.learner.optimizer import learning_rate, optimizer_of
from gspax.learner.restore import drop_frozen, load_start, restore_state, save_start
from gspax.learner.state import abstract_state, add_adapters, init_state, new_state
from gspax.learner.train_step import Score, make_steps
from gspax.model.low_rank import base
from gspax.rollout.placement import Sampler, last_ahead, make_meshes, make_sampler
from gspax.rollout.rewards import compute_advantages, encode_prompts, gather_texts, reward_completions
from gspax.rollout.sampler import lengths_to_host, sample
from gspax.run import interrupt, progress, report
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import RunDir, open_run, wait_until_shared
from gspax.run.record import Recorder
from gspax.sft import warm_start
from gspax.sharding import named_sharding
from gspax.types import Array, Batch, Params, Rollout, TrainState

SAMPLING = 1  # folded into the run's key


@dataclass(frozen=True)
class Learner:
    """What stays the same all through a run, compiled once."""

    experiment: Experiment
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    train_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]
    score: Callable[[Params, Batch], Score]
    sampler: Sampler


@dataclass(frozen=True)
class Drawn:
    """A rollout batch that the sampler has or is working at."""

    done: int  # rollout batches that its parameters had learnt from
    problems: list[Problem | None]
    rollout: Rollout  # on the sampler's mesh
    arrived: Rollout | None = None  # on the learner's, once it is `received`


def make_learner(experiment: Experiment) -> Learner:
    """The mesh, optimiser and jitted steps of an experiment. UserError where it does not fit the devices."""
    mesh, sampler_mesh = make_meshes(experiment)
    optimizer = optimizer_of(experiment)
    train_step, score = make_steps(experiment, optimizer, mesh)
    return Learner(experiment, mesh, optimizer, train_step, score, make_sampler(experiment, sampler_mesh))


def train(experiment: Experiment, workdir: Path) -> None:
    """Run or resume the experiment in `workdir`, and write its report.

    Raises:
      UserError: the directory belongs to another experiment, or the experiment's functions misbehave.
      Interrupted: Ctrl-C or SIGTERM; a checkpoint was saved first.
    """
    learner = make_learner(experiment)
    run = multihost.all_or_raise(lambda: open_run(workdir, describe(experiment)))
    wait_until_shared(run)
    schedule = experiment.schedule
    with (
        interrupt.watch() as interrupted,
        Checkpoints(run.checkpoints, keep=schedule.keep_checkpoints, mesh=learner.mesh) as checkpoints,
    ):
        state = restore_or_start(learner, run, checkpoints, interrupted)
        done = rollouts_done(learner, state)
        with Recorder(run, done) as recorder, progress.bar(schedule.steps, done, experiment.name) as bar:
            if done == 0:
                record_evaluation(learner, state, recorder, 0, run.before)
            reference = reference_policy(learner, run, state)
            ahead: deque[Drawn] = deque()
            while done < schedule.steps:
                clock = Clock()
                drawn = next_drawn(learner, state, done, ahead)
                state, metrics, rows = learn(learner, state, reference, drawn, clock)
                done += 1
                if done == 1:
                    warn_of_noise(learner.experiment, metrics)
                recorder.metrics(done, metrics)
                bar.step(done, metrics)
                if _due(done, schedule.eval_every, schedule.steps):
                    record_evaluation(learner, state, recorder, done, run.after)
                    recorder.samples(done, gather_texts(rows))
                if _due(done, schedule.checkpoint_every, schedule.steps) or interrupted():
                    checkpoints.save(done, drop_frozen(state), {"experiment": describe(experiment)})
                interrupted.stop_here()
    if jax.process_index() == 0:
        report.write(run.path)


def warn_of_noise(experiment: Experiment, metrics: dict[str, float]) -> None:
    """Say it, once in a run, if the clip range is one that arithmetic alone can reach."""
    for sentence in clipping.noise_warnings(experiment, metrics.get("policy/noise_floor", 0.0)):
        if jax.process_index() == 0:
            print(f"gspax: warning: {sentence}", file=sys.stderr)


def _due(done: int, every: int, last: int) -> bool:
    return done == last or (every > 0 and done % every == 0)


def rollouts_done(learner: Learner, state: TrainState) -> int:
    return updates_done(state) // learner.experiment.schedule.minibatches


def updates_done(state: TrainState) -> int:
    return int(multihost.to_host(state.step))


def problems_taken(state: TrainState) -> int:
    return int(multihost.to_host(state.position))


def restore_or_start(
    learner: Learner, run: RunDir, checkpoints: Checkpoints, interrupted: interrupt.Watch
) -> TrainState:
    """The last checkpoint's state; else random parameters, after the warm start if the experiment has one."""
    experiment, mesh, optimizer = learner.experiment, learner.mesh, learner.optimizer
    if checkpoints.latest() is not None:
        return restore_state(experiment, run, checkpoints, optimizer, mesh)
    first = optimizer if experiment.lora is None else optax.identity()  # moments are of the adapters alone
    if experiment.warm_start is None:
        state = init_state(experiment.model, first, jax.random.key(experiment.seed), mesh)
    else:
        warm = warm_start(experiment, run, mesh, interrupted)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(experiment.model, first, mesh))
        start = jax.jit(lambda params, key: new_state(params, first, key), out_shardings=shardings)
        state = replace(start(warm.params, warm.key), position=warm.position)
    save_start(experiment, run, state.params, mesh)
    if experiment.lora is not None:
        state = add_adapters(state, experiment.model, experiment.lora, optimizer, mesh)
    return replace(state, clip_range=multihost.to_devices(clipping.initial_range(experiment), named_sharding(mesh)))


def reference_policy(learner: Learner, run: RunDir, state: TrainState) -> Params | None:
    """The parameters that reinforcement learning started from, apart from the state; None if none are needed.

    A policy with adapters has them in its state.
    """
    if learner.experiment.reference is None or learner.experiment.lora is not None:
        return None
    if updates_done(state) == 0:
        return jax.tree.map(jnp.copy, state.params)  # the state is donated to the first update
    return load_start(learner.experiment, run, learner.mesh)


def record_evaluation(learner: Learner, state: TrainState, recorder: Recorder, done: int, samples: Path) -> None:
    """Evaluate on the held-out problems, write the metrics and the completions that the report shows."""
    metrics, rows = evaluate(learner.experiment, state.params, state.key, learner.mesh)
    recorder.metrics(done, metrics)
    recorder.samples_to(samples, rows)


def rollout_and_update(
    learner: Learner, state: TrainState, reference: Params | None = None
) -> tuple[TrainState, dict[str, float], list[dict[str, Any]]]:
    """One rollout batch and its optimiser updates: the new state, the metrics, and `rewards.reward_completions`."""
    clock = Clock()
    drawn = draw(learner, learner.sampler.push(state.params), state, problems_taken(state))
    return learn(learner, state, reference, received(learner, drawn), clock)


def next_drawn(learner: Learner, state: TrainState, done: int, ahead: deque[Drawn]) -> Drawn:
    """Rollout batch number `done`, drawn and brought to the learner; the sampler goes on with what it may draw ahead.

    In this order: between processes, bringing a batch here waits for all that the sampler was told to do before.

    Args:
      ahead: the batches from `done` on that the sampler has already or is working at; those that it begins are added.
    """
    schedule = learner.experiment.schedule
    last = last_ahead(learner.experiment, done, lambda n: _due(n, schedule.checkpoint_every, schedule.steps))
    if not ahead:
        draw_batches(learner, state, done, range(done, done + 1), ahead)
    drawn = received(learner, ahead.popleft())
    draw_batches(learner, state, done, range(done + 1 + len(ahead), last + 1), ahead)
    return drawn


def draw_batches(learner: Learner, state: TrainState, done: int, batches: range, ahead: deque[Drawn]) -> None:
    """Have the sampler begin with the rollout batches of these numbers, by the parameters after `done` of them."""
    if batches:
        params, first = learner.sampler.push(state.params), problems_taken(state)
        P = learner.experiment.sampling.prompts
        ahead.extend(draw(learner, params, state, first + (batch - done) * P) for batch in batches)


def draw(learner: Learner, params: Params, state: TrainState, first: int) -> Drawn:
    """The completions of a rollout batch, by the parameters on the sampler's mesh. It does not wait for them."""
    experiment, mesh = learner.experiment, learner.sampler.mesh
    key = jax.random.fold_in(state.key, SAMPLING)
    if experiment.placement is not None:
        key = transfer_key(key, named_sharding(mesh))
    ids = range(first, first + experiment.sampling.prompts)
    problems = multihost.all_or_raise(
        lambda: multihost.local_rows(experiment.data.train, ids, named_sharding(mesh, "batch"))
    )
    rollout = sample(
        params,
        experiment.model,
        encode_prompts(experiment, problems),
        ids,
        key,
        sampling=experiment.sampling,
        stop_ids=experiment.tokenizer.stop_ids,
        mesh=mesh,
    )
    return Drawn(rollouts_done(learner, state), problems, rollout)


def received(learner: Learner, drawn: Drawn) -> Drawn:
    """The same when it has been drawn: lengths on the host, and `arrived` on the learner's mesh."""
    rollout = lengths_to_host(drawn.rollout)
    if learner.experiment.placement is None:
        return replace(drawn, rollout=rollout, arrived=rollout)
    large = {name: x for name, x in vars(rollout).items() if isinstance(x, jax.Array)}
    moved = replace(rollout, **transfer(large, named_sharding(learner.mesh, "batch")))
    return replace(drawn, rollout=rollout, arrived=moved)


def learn(
    learner: Learner, state: TrainState, reference: Params | None, drawn: Drawn, clock: Clock
) -> tuple[TrainState, dict[str, float], list[dict[str, Any]]]:
    """The optimiser updates of a rollout batch that was `received`; see `rollout_and_update`."""
    experiment = learner.experiment
    P, G = experiment.sampling.prompts, experiment.sampling.group
    clock.lap("rollout")

    rows = reward_completions(experiment, drawn.problems, drawn.rollout)
    clock.lap("reward")

    assert drawn.arrived is not None
    rollout, stale = drawn.arrived, {}
    if experiment.placement is not None:
        stale = {"rollout/staleness": float(rollouts_done(learner, state) - drawn.done)}
    batches = minibatches.split_minibatches(experiment, rollout, learner.mesh)
    if experiment.reference is not None and experiment.lora is not None:
        reference = base(state.params)
    batches, scores = minibatches.score_minibatches(experiment, learner.score, state.params, reference, batches)
    jax.block_until_ready(batches)
    clock.lap("old_logp")

    advantage_B, added = compute_advantages(experiment, rows, rollout, batches)
    batches = minibatches.set_advantages(batches, advantage_B, learner.mesh)
    state, updates = update(learner, state, batches)
    state = replace(state, position=state.position + P)
    jax.block_until_ready(state)
    clock.lap("train")

    # on one mini-batch: a forward pass of them all would be a tenth of a step
    experts_before, experts_after = scores[0][2], learner.score(state.params, batches[0])[2]
    metrics = {
        **reward_metrics(jnp.array([row["reward"] for row in rows], jnp.float32).reshape(P, G)),
        **added,
        **stale,
        **response_metrics(rollout),
        **update_metrics(updates),
        "optim/learning_rate": float(learning_rate(experiment.optimizer)(updates_done(state) - 1)),
        **score_metrics(batches, [entropy_BT for _, entropy_BT, _ in scores]),
        **routing_metrics(experts_before, experts_after, experiment.model.num_experts),
        **clock.metrics(int(rollout.length_B.sum())),
    }
    for row, advantage in zip(rows, advantage_B, strict=True):
        row["advantage"] = float(advantage)
    return state, metrics, rows


def update(learner: Learner, state: TrainState, batches: list[Batch]) -> tuple[TrainState, list[dict[str, Any]]]:
    """One optimiser update of each batch, and the metrics of each on the host; the clip range follows if it is to."""
    experiment, place = learner.experiment, partial(multihost.to_devices, sharding=named_sharding(learner.mesh))
    updates: list[dict[str, Any]] = []
    begins = experiment.calibration is not None and updates_done(state) == 0
    for batch in batches:
        if begins and len(updates) == 1:
            floor, logp_BT = clipping.ratio_noise(multihost.to_host(updates[0])), learner.score(state.params, batch)[0]
            state = replace(state, clip_range=place(clipping.measure_range(experiment, floor, logp_BT, batch)))
        state, metrics = learner.train_step(state, batch)
        updates.append(metrics)
    updates = multihost.to_host(updates)
    if "ratio_max" in updates[0]:  # a loss of the user's may not say
        updates = [{**metrics, "noise_floor": clipping.ratio_noise(updates[0])} for metrics in updates]
    if experiment.calibration is not None:
        clip_range = multihost.to_host(state.clip_range)
        low, high = clip_range
        updates = [{**metrics, "clip_low": low, "clip_high": high} for metrics in updates]
        state = replace(state, clip_range=place(clipping.adapt_range(experiment, clip_range, batches, updates)))
    return state, updates
