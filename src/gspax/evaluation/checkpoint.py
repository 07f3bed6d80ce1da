"""Evaluates a checkpoint of a run, a published checkpoint, or a state during training, and writes the results.

A task produces three files: TASK.json (the summary, the task's settings, the environment), TASK.jsonl (every
completion with its reward and the reason for it) and TASK.html (a page to read them).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import jax

from gspax.config import Evaluation, Experiment, Published, Sampling, Task
from gspax.data.chat import hf_chat
from gspax.data.chat_template import prints_date
from gspax.data.tokenizer import HFTokenizer, hf_tokenizer, read_settings
from gspax.errors import UserError, display, naming
from gspax.evaluation.benchmark import (
    EvaluatedPolicy,
    Summary,
    TaskSample,
    apply_defaults,
    count_heldout,
    evaluate_heldout,
    metrics,
    run_task,
    summarize,
    to_json,
)
from gspax.evaluation.tasks import Settings
from gspax.experiment.description import describe
from gspax.hf import hf
from gspax.hf.source import CONFIG, SMALL, locate
from gspax.learner.optimizer import make_optimizer
from gspax.learner.state import abstract_params, load_model, restore_state
from gspax.parallel import multihost
from gspax.parallel.sharding import make_mesh
from gspax.report import evaluation_page, statistics
from gspax.rollout.completion import Completion
from gspax.rollout.in_process import InProcess
from gspax.rollout.runtime import Runtime, count_rollouts, make_runtime
from gspax.run import progress
from gspax.run.checkpoints import Checkpoints, newest_step
from gspax.run.directory import RunDir, describe_environment, find_run
from gspax.run.folders import append_line, as_warning, write_atomically
from gspax.run.manifest import finished_steps
from gspax.run.record import to_line
from gspax.sampler.placement import make_sampler
from gspax.types import Array, TrainState

SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # settings that generation_config.json recommends


def evaluate(
    runtime: Runtime, state: TrainState, folder: Path
) -> tuple[dict[str, float], list[Completion], list[Completion]]:
    """Evaluate during training: return metrics of held-out problems and tasks, samples for the report, and failures.

    The failures are the held-out completions whose rewards failed; those of a task are in its files.

    Completions are sampled on the sampler's devices: a disaggregated sampler first finishes its pending rollouts.
    The files of the tasks are written to `folder`, and replace those of an interrupted evaluation.
    """
    experiment = runtime.experiment
    policy, key = _make_policy(runtime, state)
    bar = progress.PhaseBar(count_heldout(experiment.evaluation, experiment.data), "held-out problems")
    values, shown, failed = evaluate_heldout(policy, key, experiment.data, runtime.rewards, bar)
    for task in experiment.evaluation.tasks:
        values |= metrics(task.name, evaluate_task(task, policy, key, folder))
    return values, shown, failed


def evaluate_run(experiment: Experiment, workdir: Path, step: int | None, tasks: Sequence[Task] | None = None) -> None:
    """Evaluate a checkpoint (`step`, or the newest) for `gspax eval FILE`, and print the results.

    Before a run's first checkpoint, evaluate one of the warm start. Without `tasks`, evaluate the held-out problems,
    appended to evaluations.jsonl, and the experiment's tasks.
    """
    settings, runtime = experiment.evaluation, make_runtime(experiment)
    trained, rewards, stage = runtime.policy, runtime.rewards, experiment.warm_start
    run = place = find_run(workdir, describe(experiment))
    if stage is not None and not finished_steps(run.checkpoints) and finished_steps(run.warm_start.checkpoints):
        place = run.warm_start
        trained = replace(trained, optimizer=make_optimizer(stage.optimizer, experiment.trained.dtype), terms=())
    with Checkpoints(place.checkpoints, mesh=runtime.mesh) as checkpoints:
        step = newest_step(checkpoints) if step is None else step
        state = restore_state(run, checkpoints, trained, step)
    policy, key = _make_policy(runtime, state)
    del state  # frees the optimizer's memory for the cache
    if tasks is None:
        tasks = settings.tasks
        problems = count_heldout(settings, experiment.data)
        progress.say(f"step {step}: evaluating {problems} held-out problems")
        with rewards, progress.track(problems, title="held-out problems") as bar:
            progress.phase("evaluating")
            values, _, _ = evaluate_heldout(policy, key, experiment.data, rewards, bar)
        if jax.process_index() == 0:
            _record_heldout(place, step, values, settings, problems)
    for task in tasks:
        evaluate_task(task, policy, key, place.tasks_at(step), show=True)


def _make_policy(runtime: Runtime, state: TrainState) -> tuple[EvaluatedPolicy, Array]:
    """Return the policy of a state on the sampler's devices, and the run's key on the host."""
    weights = runtime.sampler.push(state.params, count_rollouts(runtime, state))
    policy = EvaluatedPolicy(runtime.sampler, weights, runtime.experiment, runtime.interaction)
    return policy, multihost.key_to_host(state.key)


def find_tokenizer(checkpoint: str) -> HFTokenizer:
    """Load a checkpoint's tokenizer; if it has a chat template, one for chats with thinking.

    A template that prints the date gets the day on which the tokenizer is loaded, as in transformers.
    """
    folder = locate(checkpoint, SMALL)
    has_template = (folder / "chat_template.jinja").is_file()
    has_template = has_template or bool(read_settings(folder, "tokenizer_config.json").get("chat_template"))
    if not has_template:
        return hf_tokenizer(folder)
    today = datetime.date.today().isoformat() if prints_date(folder, checkpoint) else None
    return hf_chat(folder, thinking=True, date=today)


def find_published(checkpoint: str, tasks: tuple[Task, ...]) -> Published:
    """Read a checkpoint's model and tokenizer, to be sampled on the tasks in lengths that fit the model."""
    model, tokenizer = hf(checkpoint), find_tokenizer(checkpoint)
    length = min(2048, model.max_position_embeddings // 2)
    sampling = Sampling(prompts=16, group=4, max_prompt_tokens=length, max_tokens=length)
    return Published(model=model, tokenizer=tokenizer, sampling=sampling, evaluation=Evaluation(tasks=tasks))


def generation_settings(checkpoint: str) -> Settings:
    """Read the sampling that generation_config.json recommends, as fields of a `Task`; empty if there is none."""
    config = read_settings(locate(checkpoint, (*CONFIG, "generation_config.json")), "generation_config.json")
    settings = cast(Settings, {name: config[name] for name in SAMPLING if config.get(name) is not None})
    return settings if config.get("do_sample") is not False else settings | {"temperature": 0.0}


def evaluate_published(settings: Published, workdir: Path) -> None:
    """Evaluate a published model on its tasks for `gspax eval --from HF`, and write to `workdir`."""
    model = settings.model
    mesh = make_mesh(settings.mesh, model=model)
    params = load_model(model, abstract_params(model, mesh, model.dtype))
    sampler = InProcess(make_sampler(model, mesh, mesh, settings.sampling.weights_dtype))
    policy, key = EvaluatedPolicy(sampler, sampler.push(params, 0), settings), jax.random.key(settings.seed)
    del params
    for task in settings.evaluation.tasks:
        evaluate_task(task, policy, key, workdir, show=True)


def evaluate_task(task: Task, policy: EvaluatedPolicy, key: Array, folder: Path, *, show: bool = False) -> Summary:
    """Run one task, write its files to `folder`, and return the summary on every process. Collective.

    Args:
      task: the task; lengths that it does not set come from the policy's settings.
      policy: the policy that samples.
      key: the run's key.
      folder: the folder of TASK.json, TASK.jsonl and TASK.html.
      show: print progress and results, and write to TASK-2, … instead of overwriting an earlier evaluation's files.
    """
    task = apply_defaults(task, policy)
    primary = jax.process_index() == 0
    if primary:
        folder.mkdir(parents=True, exist_ok=True)
    path = _claim(folder / task.name) if show and primary else folder / task.name
    part = _file(path, ".jsonl.part")  # the completions of an unfinished evaluation
    samples: list[TaskSample] = []
    with contextlib.ExitStack() as stack:
        file = None
        if primary:
            stack.enter_context(naming(part))
            file = stack.enter_context(part.open("w", encoding="utf-8"))
        bar: progress.Bar | progress.PhaseBar = progress.PhaseBar(task.problems, f"problems of {task.name}")
        if show:
            bar = stack.enter_context(progress.track(task.problems, title=task.name, every=1))
        for chunk in run_task(task, policy, key, bar):
            samples += chunk
            if file is not None:
                file.writelines(to_line(to_json(task, sample)) for sample in chunk)
                file.flush()
    if not samples:
        raise UserError(f"task {task.name}: wanted problems, got none of {task.problems} that can be used")
    summary = summarize(task, samples)
    if primary:
        part.replace(_file(path, ".jsonl"))
        text = describe_summary(task.name, summary)
        with as_warning(_file(path, ".html")):
            evaluation_page.write(_file(path, ".html"), path.name, text, [to_json(task, sample) for sample in samples])
        result = {"summary": summary, "task": describe(task), "model": describe(policy.settings.model)}
        result |= {"environment": describe_environment()}
        write_atomically(_file(path, ".json"), json.dumps(result, indent=2) + "\n")
        if show:
            display("\n".join([*text, f"  {_file(path, '.html')}"]))
    return summary


def _file(path: Path, suffix: str) -> Path:
    """Append a suffix to the path; a dot in a task's name stays."""
    return path.with_name(path.name + suffix)


def _claim(path: Path) -> Path:
    """Return the first of `path`, `path`-2, … that has no results, and that no other evaluation writes to; claim it."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    for free in itertools.chain((path,), others):
        with contextlib.suppress(FileExistsError):
            if not _file(free, ".json").exists():
                _file(free, ".jsonl.part").touch(exist_ok=False)
                return free
    raise AssertionError("there are more numbers than files")


def _record_heldout(run: RunDir, step: int, values: Mapping[str, float], settings: Evaluation, problems: int) -> None:
    append_line(run.evaluations, json.dumps({"step": step, **values, "evaluation": describe(settings)}) + "\n")
    skipped = int(values["eval/skipped"])
    left_out = f", {skipped} left out" if skipped else ""
    display(f"step {step}, {problems - skipped} held-out problems{left_out}")
    for name, value in values.items():
        display(f"  {name:22} {value:.4f}")


def describe_summary(name: str, summary: Summary) -> list[str]:
    """Format the summary as lines of text."""
    tokens = summary["tokens"]
    figures = {
        "mean reward": statistics.show(summary["reward"], ".4f"),
        **{f"pass@{k}": statistics.show(interval, ".4f") for k, interval in summary.get("pass", {}).items()},
        **{f"maj@{k}": statistics.show(interval, ".4f") for k, interval in summary.get("majority", {}).items()},
        "tokens": f"{tokens['mean']:.1f} on average, {tokens['max']} at most, {tokens['total']:,} in all",
        "truncated": f"{100 * summary['truncated']:.1f} %",
    }
    if summary["failed"]:
        figures["failed"] = f"{100 * summary['failed']:.1f} % of the completions have no reward"
    left_out = f", {summary['skipped']} left out" if summary["skipped"] else ""
    heading = f"{name}: {summary['problems']} problems x {summary['samples']} samples{left_out}"
    return [heading, *(f"  {title:12} {figure}" for title, figure in figures.items())]
