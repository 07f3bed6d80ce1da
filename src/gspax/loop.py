"""The main loop, read top down: sample, reward, advantage, old log-probs, updates, record, evaluate, checkpoint.

One rollout from prompt to gradient: `loop.py`, `rollout/sampler.py`, `advantages.py`, `learner/train_step.py`,
`losses/logprobs.py`, `losses/policy.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import optax

from gspax.config import Experiment, row_shape, trained_dtype, updates_per_step
from gspax.data.problem import Problem, read_problem
from gspax.distributed import multihost
from gspax.errors import DivergedError
from gspax.evaluation.checkpoint import evaluate
from gspax.experiment.description import describe
from gspax.learner import clipping, minibatches, rollback
from gspax.learner.alarms import alarm_metrics, warn_of_alarms
from gspax.learner.finite import check_finite, check_skipped, count_skipped
from gspax.learner.metrics import (
    Clock,
    response_metrics,
    routing_metrics,
    score_metrics,
    update_metrics,
)
from gspax.learner.optimizer import learning_rate, make_optimizer
from gspax.learner.restore import drop_frozen, load_reference, restore_state, save_start
from gspax.learner.state import (
    abstract_state,
    add_adapters,
    count_updates,
    init_state,
    new_state,
    require_memory,
)
from gspax.learner.train_step import Steps, first_update_scores, make_steps
from gspax.learner.updates import run_updates
from gspax.model.low_rank import base
from gspax.rewards.calls import RewardCalls
from gspax.rollout.dynamic_sampling import GradedBatch, refill
from gspax.rollout.placement import (
    Sampler,
    find_last_ahead,
    make_colocated_sampler,
    make_disaggregated_sampler,
    make_meshes,
)
from gspax.rollout.rewards import (
    Row,
    Started,
    compute_advantages,
    encode_prompts,
    gather_texts,
    reward_completions,
    reward_metrics,
    shape_rewards,
    start_rewards,
)
from gspax.rollout.sampler import lengths_to_host, sample
from gspax.run import interrupt, progress, report
from gspax.run.checkpoints import Checkpoints
from gspax.run.checkpoints import save as save_checkpoint
from gspax.run.compilation import count_compilations
from gspax.run.directory import RunDir, enter_run
from gspax.run.record import Recorder
from gspax.sft import warm_start
from gspax.sharding import batch_shards, named_sharding
from gspax.types import Params, Rollout, TrainState

SAMPLING = 1  # folded into the run's key


@dataclass(frozen=True)
class Learner:
    """What stays the same throughout a run; the steps are compiled once."""

    experiment: Experiment
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    steps: Steps
    sampler: Sampler
    rewards: RewardCalls


@dataclass(frozen=True)
class PendingRollout:
    """A rollout batch in flight: the sampler has it, or is working on it."""

    policy: int  # rollout batches that the parameters it is drawn with had learnt from
    problems: list[Problem | None]
    rollout: Rollout  # on the sampler's mesh
    started: Started  # rewards


@dataclass(frozen=True)
class RolloutBatch:
    """A rollout batch that has arrived; its lengths are on the host."""

    policy: int
    problems: list[Problem | None]
    sampled: Rollout  # on the sampler's mesh, where each process has the rows whose problems it has
    rollout: Rollout  # the same on the learner's mesh
    started: Started


def make_learner(experiment: Experiment) -> Learner:
    """The mesh, optimiser and jitted steps of an experiment. UserError if it does not fit the devices."""
    mesh, sampler_mesh = make_meshes(experiment)
    require_memory(experiment.model, experiment.lora, experiment.optimizer, mesh, reference=bool(experiment.reference))
    optimizer = make_optimizer(experiment.optimizer, trained_dtype(experiment.model, experiment.lora))
    steps = make_steps(experiment, optimizer, mesh)
    if experiment.placement is None:
        sampler = make_colocated_sampler(experiment.model, sampler_mesh, mesh)
    else:
        sampler = make_disaggregated_sampler(experiment.model, sampler_mesh, mesh)
    rewards = RewardCalls(experiment.reward, experiment.grading)
    return Learner(experiment, mesh, optimizer, steps, sampler, rewards)


def train(experiment: Experiment, workdir: Path) -> None:
    """Run or resume the experiment in `workdir`, and write its report.

    Raises:
      UserError: the directory belongs to another experiment, or the experiment's functions misbehave.
      DivergedError: updates still go wrong after `guard.rollbacks` returns to the newest checkpoint.
      Interrupted: Ctrl-C or SIGTERM; a checkpoint was saved first.
    """
    learner, keep = make_learner(experiment), experiment.schedule.keep_checkpoints
    remembered = rollback.Remembered(learner.steps.update)
    learner = replace(learner, steps=learner.steps._replace(update=remembered))
    with (
        enter_run(workdir, describe(experiment)) as run,
        learner.rewards,
        count_compilations() as compiled,
        interrupt.watch() as interrupted,
        Checkpoints(run.checkpoints, keep=keep, mesh=learner.mesh, note=run.newest) as checkpoints,
    ):
        while True:
            try:
                train_from_newest(learner, run, checkpoints, interrupted, compiled, remembered)
                break
            except DivergedError as problem:
                rollback.go_back(run, problem, checkpoints.latest() or 0, experiment.guard.rollbacks)
    if jax.process_index() == 0:
        report.write(run.path)


def train_from_newest(
    learner: Learner,
    run: RunDir,
    checkpoints: Checkpoints,
    interrupted: interrupt.Watch,
    compiled: object,
    remembered: rollback.Remembered,
) -> None:
    """The steps after the newest checkpoint. DivergedError if updates went wrong: what they did is not saved."""
    experiment, schedule = learner.experiment, learner.experiment.schedule

    def save(done: int, state: TrainState, is_last: bool) -> None:
        stored = drop_frozen(state)
        check_finite(stored, done)
        save_checkpoint(checkpoints, done, stored, {"experiment": describe(experiment)}, is_last=is_last)

    state = restore_or_start(learner, run, checkpoints, interrupted)
    started = done = count_rollouts(learner, state)
    state = rollback.skip_problems(run, state, done)
    with Recorder(run, done) as recorder, progress.track(schedule.steps, done, experiment.name) as bar:
        if done == 0:
            record_evaluation(learner, state, recorder, run, 0)
        wanted = experiment.reference is not None and experiment.lora is None  # adapters have their base in the state
        reference = load_reference(run, state, experiment.model, learner.mesh) if wanted else None
        ahead: deque[PendingRollout] = deque()
        skipped, alarms = 0, frozenset[str]()
        while done < schedule.steps:
            state, metrics, rows = run_step(learner, state, reference, ahead)
            done += 1
            if done == started + 1:
                bar.print(f"first step done; {compiled}")
            if done == 1:
                clipping.warn_of_noise(experiment.loss, experiment.calibration, metrics)
            alarms = warn_of_alarms(experiment.guard, metrics, alarms)
            recorder.write_metrics(done, {**metrics, **alarm_metrics(alarms)})
            if failed := [row for row in rows if "error" in row]:
                recorder.write_failures(done, gather_texts(failed))
            bar.update(done, metrics)
            skipped = count_skipped(skipped, int(metrics.get("optim/skipped", 0)))
            if skipped >= schedule.max_skipped:
                dumped = rollback.dump(run, done, state, remembered.last_skipped(), describe(experiment), learner.mesh)
                check_skipped(skipped, schedule.max_skipped, done, state, dumped)
            remembered.forget()
            if progress.is_due(done, schedule.eval_every, schedule.steps):
                record_evaluation(learner, state, recorder, run, done)
                recorder.write_samples(done, gather_texts(rows))
            due = progress.is_due(done, schedule.checkpoint_every, schedule.steps)
            if due and (not skipped or done == schedule.steps):  # amid skipped updates it is no state to go back to
                save(done, state, is_last=done == schedule.steps)
            if interrupted():  # after the save, so that a signal during it costs no further step
                save(done, state, is_last=True)  # once, if it was due
            interrupted.stop_here()


def count_rollouts(learner: Learner, state: TrainState) -> int:
    """The rollout batches that a state has learnt from."""
    return count_updates(state) // updates_per_step(learner.experiment.schedule)


def restore_or_start(
    learner: Learner, run: RunDir, checkpoints: Checkpoints, interrupted: interrupt.Watch
) -> TrainState:
    """The newest checkpoint's state; without one a fresh state, after the warm start if the experiment has one."""
    experiment, mesh, optimizer = learner.experiment, learner.mesh, learner.optimizer
    model, lora = experiment.model, experiment.lora
    if checkpoints.latest() is not None:
        return restore_state(run, checkpoints, model, optimizer, mesh, lora=lora)
    first = optimizer if lora is None else optax.identity()  # with adapters there are moments of those alone
    if experiment.warm_start is None:
        state = init_state(model, first, jax.random.key(experiment.seed), mesh)
    else:
        warm = warm_start(experiment, run, mesh, interrupted)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, first, mesh))
        start = jax.jit(lambda params, key: new_state(params, first, key), out_shardings=shardings)
        state = replace(start(warm.params, warm.key), position=warm.position)
    if experiment.reference is not None or lora is not None:
        save_start(run, state.params, mesh)
    if lora is not None:
        state = add_adapters(state, model, lora, optimizer, mesh)
    clip_range = clipping.initial_range(experiment.calibration)
    return replace(state, clip_range=multihost.to_devices(clip_range, named_sharding(mesh)))


def record_evaluation(learner: Learner, state: TrainState, recorder: Recorder, run: RunDir, done: int) -> None:
    """Evaluate on the held-out problems and the tasks, and write metrics and completions."""
    metrics, rows = evaluate(learner.experiment, state, learner.mesh, learner.rewards, run.tasks_at(done))
    recorder.write_metrics(done, metrics)
    recorder.write_samples_to(run.after if done else run.before, rows)


def run_step(
    learner: Learner, state: TrainState, reference: Params | None, ahead: deque[PendingRollout]
) -> tuple[TrainState, dict[str, float], list[Row]]:
    """One rollout batch and its optimiser updates: the new state, the metrics, and a row for each completion.

    Args:
      reference: from `load_reference`.
      ahead: the rollout batches in flight, this one first; empty in the first step and after a restore. Those that
        the sampler starts on are appended.
    """
    experiment, clock = learner.experiment, Clock()
    batch = next_rollout(learner, state, ahead)
    clock.lap("rollout")
    graded = grade(learner, batch)
    clock.lap("reward")
    if experiment.sampling.max_refills:
        draw_more = partial(draw_graded, learner, state)
        graded = refill(
            graded, draw_more, experiment.sampling, learner.mesh, without_overlong=experiment.filter_overlong
        )
        clock.lap("refill")
    return learn(learner, state, reference, graded, clock)


def next_rollout(learner: Learner, state: TrainState, ahead: deque[PendingRollout]) -> RolloutBatch:
    """The next rollout batch, on the learner's mesh; the sampler then starts on those that it may draw ahead.

    In this order, because between processes fetching a batch waits for all that the sampler was given before.
    """
    schedule, placement = learner.experiment.schedule, learner.experiment.placement
    done = count_rollouts(learner, state)
    staleness = placement.staleness if placement is not None else 0
    last = find_last_ahead(staleness, done, lambda n: progress.is_due(n, schedule.checkpoint_every, schedule.steps))
    if not ahead:
        draw_ahead(learner, state, range(1), ahead)
    batch = receive(learner, ahead.popleft())
    draw_ahead(learner, state, range(1 + len(ahead), last - done + 1), ahead)
    return batch


def draw_ahead(learner: Learner, state: TrainState, batches: range, ahead: deque[PendingRollout]) -> None:
    """Start the sampler on these rollout batches, counted from the state's next one, with the state's parameters."""
    if batches:
        params, first = learner.sampler.push(state.params), int(multihost.to_host(state.position))
        P = learner.experiment.sampling.prompts
        ahead.extend(draw(learner, params, state, first + batch * P) for batch in batches)


def draw(learner: Learner, params: Params, state: TrainState, first: int) -> PendingRollout:
    """Start sampling the problems from `first` on, with the sampler's parameters. Waits only with `sampling.chunk`."""
    experiment, sampler = learner.experiment, learner.sampler
    ids = range(first, first + experiment.sampling.prompts)
    read, by_row = partial(read_problem, experiment.data.train), named_sharding(sampler.mesh, "batch")
    problems = multihost.all_or_raise(lambda: multihost.local_rows(read, ids, by_row))
    tokenizer, group, started = experiment.tokenizer, experiment.sampling.group, Started()
    begin = partial(start_rewards, problems, started, tokenizer=tokenizer, calls=learner.rewards, group=group)
    rollout = sample(
        params,
        experiment.model,
        encode_prompts(tokenizer, problems, experiment.model.vocab_size),
        ids,
        sampler.push_key(jax.random.fold_in(state.key, SAMPLING)),
        sampling=experiment.sampling,
        stop_ids=tokenizer.stop_ids,
        mesh=sampler.mesh,
        ended=begin,
    )
    return PendingRollout(count_rollouts(learner, state), problems, rollout, started)


def receive(learner: Learner, pending: PendingRollout) -> RolloutBatch:
    """Wait for a rollout batch, and bring it to the learner's mesh."""
    sampled = lengths_to_host(pending.rollout)
    return RolloutBatch(pending.policy, pending.problems, sampled, learner.sampler.fetch(sampled), pending.started)


def draw_graded(learner: Learner, state: TrainState, taken: int) -> GradedBatch:
    """The batch after so many of the prompts that the state has not learnt from, drawn at once and rewarded."""
    first = int(multihost.to_host(state.position)) + taken
    return grade(learner, receive(learner, draw(learner, learner.sampler.push(state.params), state, first)))


def grade(learner: Learner, batch: RolloutBatch) -> GradedBatch:
    """A rollout batch with its rewards."""
    reward = partial(reward_completions, tokenizer=learner.experiment.tokenizer, calls=learner.rewards)
    rows = reward(batch.problems, batch.sampled, started=batch.started)
    return GradedBatch(batch.policy, len(batch.problems), batch.rollout, rows)


def learn(
    learner: Learner, state: TrainState, reference: Params | None, batch: GradedBatch, clock: Clock
) -> tuple[TrainState, dict[str, float], list[Row]]:
    """The optimiser updates of a rollout batch; see `run_step`."""
    experiment, rollout, rows = learner.experiment, batch.rollout, batch.rows
    G, overlong = experiment.sampling.group, experiment.filter_overlong
    shape = row_shape(experiment.sampling, experiment.schedule, batch_shards(learner.mesh))
    batches, layouts = minibatches.split_minibatches(
        rollout, experiment.schedule.minibatches, shape, learner.mesh, without_overlong=overlong
    )
    if experiment.reference is not None and experiment.lora is not None:
        reference = base(state.params)
    on_policy = first_update_scores(
        experiment.reference,
        experiment.regularizers,
        experiment.calibration,
        routing_replay=experiment.routing_replay,
    )
    if count_updates(state) == 0 and updates_per_step(experiment.schedule) > 1:
        on_policy = False  # a run's first step measures the noise floor, to warn of it
    scored = minibatches.score_minibatches(learner.steps.score, state.params, reference, batches, on_policy=on_policy)
    jax.block_until_ready(scored.batches)
    clock.lap("old_logp")

    added_B, added = shape_rewards(
        rollout,
        minibatches.reference_kl(experiment.reference, scored.batches, layouts),
        length_reward=experiment.length_reward,
        coefficient=experiment.reference.coefficient if experiment.reference else 0.0,
    )
    advantage_B, with_added = compute_advantages(
        experiment.advantage, rows, added_B, group=G, finished_B=rollout.finished_B if overlong else None
    )
    batches = minibatches.set_advantages(scored.batches, layouts, advantage_B, learner.mesh)
    scored = replace(scored, batches=batches)
    stale = {"rollout/staleness": float(count_rollouts(learner, state) - batch.policy)} if experiment.placement else {}
    rate = learning_rate(experiment.optimizer)
    updated = run_updates(
        learner.steps,
        state,
        scored,
        learner.mesh,
        epochs=experiment.schedule.epochs,
        rate=rate,
        calibration=experiment.calibration,
    )
    state = replace(updated.state, position=updated.state.position + batch.prompts)
    jax.block_until_ready(state)
    clock.lap("train")

    metrics = {
        **reward_metrics(rows, G),
        **added,
        **with_added,
        **stale,
        **batch.metrics,
        **response_metrics(rollout),
        "learner/packing_efficiency": minibatches.packing_efficiency(layouts),
        **update_metrics(updated.metrics),
        "optim/learning_rate": float(rate(count_updates(state) - 1)),
        **score_metrics(updated.scored.batches, updated.scored.entropies),
        **(routing_metrics(*updated.routing) if updated.routing else {}),
        **clock.metrics(int(rollout.length_B.sum())),
    }
    for row, advantage in zip(rows, advantage_B, strict=True):
        row["advantage"] = float(advantage)
    return state, metrics, rows
