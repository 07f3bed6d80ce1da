"""Evaluate a checkpoint of a run, a published checkpoint, or a state during training; write what is found.

A task leaves three files: TASK.json (the summary, the task's settings, the environment), TASK.jsonl (every completion
with its reward and the reason for it) and TASK.html (a page to read them).
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import jax

from gspax.config import Evaluation, Experiment, Grading, ModelConfig, SamplerDtype, Sampling, Task, trained_dtype
from gspax.config.protocols import Tokenizer
from gspax.errors import UserError
from gspax.evaluation import heldout
from gspax.evaluation.benchmark import TaskSample, apply_defaults, metrics, plan_chunks, run_task, summarize, to_json
from gspax.evaluation.completions import Policy
from gspax.experiment.description import describe
from gspax.learner import weights
from gspax.learner.optimizer import make_optimizer
from gspax.learner.restore import restore_state
from gspax.learner.state import abstract_params
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards
from gspax.report import evaluation_page, statistics
from gspax.rewards.calls import Calls
from gspax.rewards.scores import Result, reward_calls
from gspax.rollout.completion import Completion
from gspax.rollout.episodes import Interaction, interact
from gspax.run import progress
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import RunDir, describe_environment, find_run
from gspax.run.folders import write_atomically
from gspax.run.record import to_line
from gspax.sampler.inference_weights import make_inference_weights
from gspax.sampler.placement import Sampler, make_meshes, make_sampler
from gspax.types import Array, TrainState


def evaluate(
    experiment: Experiment,
    state: TrainState,
    sampler: Sampler,
    rewards: Calls[Result],
    folder: Path,
    interaction: Interaction | None = None,
) -> tuple[dict[str, float], list[Completion], list[Completion]]:
    """During training: the metrics of the held-out problems and of the tasks, and completions for the report.

    The last value has the held-out completions whose rewards failed; those of a task are in its files.

    Completions are drawn where the sampler draws: a disaggregated one first finishes the batches that it was given. The
    files of the tasks are written to `folder`, in place of those of an interrupted evaluation.
    """
    settings, training = experiment.evaluation, experiment.sampling
    policy, key = _push(state, experiment.model, experiment.tokenizer, sampler)
    policy = replace(policy, interaction=interaction)
    found, shown, failed = heldout.evaluate(policy, key, experiment.data, rewards, settings=settings, training=training)
    for task in settings.tasks:
        task, path = apply_defaults(task, settings, training), folder / task.name
        summary = evaluate_task(task, policy, key, path, training=training, grading=experiment.grading)
        found |= metrics(task.name, summary)
    return found, shown, failed


def evaluate_run(experiment: Experiment, workdir: Path, step: int | None, tasks: Sequence[Task] | None = None) -> None:
    """`gspax eval FILE`: evaluate a checkpoint (`step`, or the newest) and print the results.

    Without `tasks`, on the held-out problems, appended to evaluations.jsonl, and on the experiment's own tasks.
    """
    mesh, sampler_mesh = make_meshes(experiment)
    sampler = make_sampler(experiment.model, sampler_mesh, mesh, experiment.sampling.weights_dtype)
    run = find_run(workdir, describe(experiment))
    with Checkpoints(run.checkpoints, mesh=mesh) as checkpoints:
        step = checkpoints.latest() if step is None else step
        state = restore_state(
            run,
            checkpoints,
            experiment.model,
            make_optimizer(experiment.optimizer, trained_dtype(experiment.model, experiment.lora)),
            mesh,
            lora=experiment.lora,
            step=step,
        )
    assert step is not None  # else restoring has raised
    policy, key = _push(state, experiment.model, experiment.tokenizer, sampler)
    del state  # the optimiser's memory is for the cache
    settings, training = experiment.evaluation, experiment.sampling
    rewards = reward_calls(experiment.reward, experiment.grading)
    interaction = interact(
        experiment.environment,
        experiment.turns,
        rewards=rewards,
        tokenizer=experiment.tokenizer,
        grading=experiment.grading,
    )
    policy = replace(policy, interaction=interaction)
    if tasks is None:
        tasks = settings.tasks
        progress.say(f"step {step}: evaluating {settings.problems} held-out problems")
        with rewards:
            found, _, _ = heldout.evaluate(policy, key, experiment.data, rewards, settings=settings, training=training)
        if jax.process_index() == 0:
            _record_heldout(run, step, found, settings)
    for task in tasks:
        task, path = apply_defaults(task, settings, training), run.tasks_at(step) / task.name
        evaluate_task(task, policy, key, path, training=training, grading=experiment.grading, show=True)


def evaluate_published(
    policy: Policy, workdir: Path, settings: Evaluation, *, training: Sampling, grading: Grading, seed: int = 0
) -> None:
    """`gspax eval --from HF`: evaluate a published model (`load_policy`) on tasks; the files are in `workdir`."""
    for task in settings.tasks:
        task, path = apply_defaults(task, settings, training), workdir / task.name
        evaluate_task(task, policy, jax.random.key(seed), path, training=training, grading=grading, show=True)


def _push(state: TrainState, model: ModelConfig, tokenizer: Tokenizer, sampler: Sampler) -> tuple[Policy, Array]:
    """The policy of a state on the sampler's devices, and the run's key on the host."""
    return Policy(sampler.push(state.params), model, tokenizer, sampler.mesh), multihost.key_to_host(state.key)


def load_policy(
    model: ModelConfig, tokenizer: Tokenizer, mesh: jax.sharding.Mesh, weights_dtype: SamplerDtype = "auto"
) -> Policy:
    """The policy of `model.checkpoint` itself."""
    params = weights.load(model, abstract_params(model, mesh, model.dtype))
    return Policy(make_inference_weights(params, model, mesh, weights_dtype), model, tokenizer, mesh)


def evaluate_task(
    task: Task, policy: Policy, key: Array, path: Path, *, training: Sampling, grading: Grading, show: bool = False
) -> dict[str, Any]:
    """Run one task and write `path`.json, .jsonl and .html. The summary, on every process. Collective.

    Args:
      task: from `apply_defaults`.
      policy: the model and its tokenizer.
      key: of the run.
      path: of the files, without a suffix.
      training: as for `run_task`, and `grading`.
      grading: likewise.
      show: print progress and results, and write to `path`-2, … rather than over the files of an earlier evaluation.
    """
    chunks, _ = plan_chunks(task.problems, task.samples, training, batch_shards(policy.mesh))
    samples: list[TaskSample] = []
    primary = jax.process_index() == 0
    path = _free_path(path) if show else path
    sampled = run_task(task, policy, key, training=training, grading=grading)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(progress.track(len(chunks), title=task.name, every=1)) if show else None
        file = stack.enter_context(_open_part(path)) if primary else None
        for done, chunk in enumerate(sampled, start=1):
            samples += chunk
            if file is not None:
                file.writelines(to_line(to_json(task, each)) for each in chunk)
                file.flush()
            if bar is not None:
                bar.update(done, {"reward": sum(each.completion.reward for each in samples) / max(len(samples), 1)})
    if not samples:
        raise UserError(f"task {task.name}: wanted problems, got none of {task.problems} that can be used")
    summary = summarize(task, samples)
    if primary:
        _part(path).replace(_file(path, ".jsonl"))
        text = describe_summary(task.name, summary)
        evaluation_page.write(_file(path, ".html"), path.name, text, [to_json(task, each) for each in samples])
        result = {"summary": summary, "task": describe(task), "model": describe(policy.model)}
        result |= {"environment": describe_environment()}
        write_atomically(_file(path, ".json"), json.dumps(result, indent=2) + "\n")
        if show:
            print("\n".join([*text, f"  {_file(path, '.html')}"]))
    return summary


def _file(path: Path, suffix: str) -> Path:
    """The path with a suffix; a dot in a task's name stays."""
    return path.with_name(path.name + suffix)


def _part(path: Path) -> Path:
    """The completions of an evaluation that has not ended, or was interrupted."""
    return _file(path, ".jsonl.part")


def _open_part(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return _part(path).open("w", encoding="utf-8")


def _free_path(path: Path) -> Path:
    """The path, or `path`-2, …: the first one without results."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain((path,), others) if not _file(each, ".json").exists())


def _record_heldout(run: RunDir, step: int, found: Mapping[str, float], settings: Evaluation) -> None:
    with run.evaluations.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **found, "evaluation": describe(settings)}) + "\n")
    print(f"step {step}, {settings.problems} held-out problems")
    for name, value in found.items():
        print(f"  {name:22} {value:.4f}")


def describe_summary(name: str, summary: Any) -> list[str]:
    """The summary as lines of text."""
    lines = [f"{name}: {summary['problems']} problems x {summary['samples']} samples"]
    lines.append(f"  {'mean reward':12} {statistics.show(summary['reward'], digits=4)}")
    for title, key in (("pass@", "pass"), ("maj@", "majority")):
        lines += [f"  {title + k:12} {statistics.show(each, digits=4)}" for k, each in summary.get(key, {}).items()]
    tokens = summary["tokens"]
    lines.append(
        f"  {'tokens':12} {tokens['mean']:.1f} on average, {tokens['max']} at most, {tokens['total']:,} in all"
    )
    lines.append(f"  {'truncated':12} {100 * summary['truncated']:.1f} %")
    if summary["failed"]:
        lines.append(f"  {'failed':12} {100 * summary['failed']:.1f} % of the completions have no reward")
    return lines
