"""The rules of an experiment: `validate` reports every error at once, `warnings` settings that are only unwise.

`fields` reads types, ranges and signatures from the annotations of `gspax.config`. Rules for one part stand beside that
part, rules between parts here, in `losses` and in `conversations`. Each message is one sentence: where, what was
wanted, what came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from gspax.config import (
    Evaluation,
    Experiment,
    Lora,
    Mesh,
    ModelConfig,
    PartialRollouts,
    Placement,
    Sampling,
    Schedule,
    WarmStart,
    layer_windows,
    updates_per_step,
)
from gspax.config.functions import title_of
from gspax.config.protocols import Reward
from gspax.config.ranges import INT32
from gspax.data.problem import data_problems
from gspax.data.sources import opening_notes, opening_problems
from gspax.data.tokenizer import tokenizer_problems
from gspax.errors import UserError
from gspax.experiment.validation import losses
from gspax.experiment.validation.contracts import contract_problems
from gspax.experiment.validation.conversations import conversation_problems, credit_problems, unused_turns
from gspax.experiment.validation.fields import function_problems, range_problems, type_problems
from gspax.experiment.validation.first_calls import first_problems
from gspax.model.architecture import architecture_problems
from gspax.model.sizes.counts import with_carried
from gspax.model.sizes.memory import slot_problems
from gspax.model.sizes.sampler_layout import choose_sampler_layout
from gspax.parallel import sharding
from gspax.rewards.calls import find_async_members


def validate(
    experiment: Experiment,
    devices: int | None = None,
    slices: tuple[int, int] = (1, 1),
    broken: Iterable[str] = (),
) -> list[str]:
    """All errors of an experiment, one sentence each; empty if it can run.

    A check that reads a field with an error is left out, so each sentence is about another error. No device is used; a
    problem of each split is loaded, and functions are called as `contracts` says.

    Args:
      experiment: as loaded and overridden.
      devices: the number of devices; None leaves out the checks that depend on it.
      slices: TPU slices of the learner's devices and of a disaggregated sampler's.
      broken: fields with an error already, such as an override that cannot be parsed.
    """
    problems = list(type_problems(experiment))
    wrong = {*broken, *map(_key, problems)}
    fields = [*range_problems(experiment), *function_problems(experiment), *data_problems(experiment.data)]
    problems += [sentence for sentence in dict.fromkeys(fields) if not _overlap(wrong, [_key(sentence)])]
    wrong.update(map(_key, problems))
    for check, names in _COMBINATIONS:
        if not _overlap(wrong, names.split()):
            parts = dict.fromkeys(name.partition(".")[0] for name in names.split())
            sentences = list(check(*(getattr(experiment, part) for part in parts)))
            problems += sentences
            if check is opening_problems and sentences:  # they name a file
                wrong.add("data")
    if not _overlap(wrong, _OF_MESH):
        problems += _mesh(experiment, devices, slices)
    wrong.update(map(_key, problems))
    problems += contract_problems(experiment, partial(_overlap, wrong))
    if not _overlap(wrong, ("data", "environment", "evaluation.problems")):
        problems += first_problems(experiment.data, experiment.environment, experiment.evaluation)
    return problems


def _key(sentence: str) -> str:
    """The field that a sentence is about."""
    return sentence.partition(":")[0]


def _overlap(some: Iterable[str], others: Iterable[str]) -> bool:
    """Whether one of these fields is, or is part of, one of the others, or the other way round."""
    pairs = ((one, other) for other in others for one in some)
    return any(f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.") for one, other in pairs)


def check(experiment: Experiment, devices: int | None = None, slices: tuple[int, int] = (1, 1)) -> None:
    """Raise UserError with the sentences of `validate`, if there are any."""
    problems = validate(experiment, devices, slices)
    if problems:
        raise UserError("\n".join(problems))


def warnings(experiment: Experiment) -> list[str]:
    """Settings of a valid experiment that are probably not intended, one sentence each."""
    notes = opening_notes(experiment.data)
    sampling = experiment.sampling
    filters = [name for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)) if getattr(sampling, name) != off]
    if filters:
        notes.append(
            f"{', '.join('sampling.' + name for name in filters)}: log-probabilities are of the unfiltered, "
            "temperature-scaled distribution, so sampling through a filter biases the policy ratio"
        )
    placement, uncorrected = experiment.placement, experiment.correction is None and experiment.rejection is None
    if placement and placement.staleness and uncorrected and experiment.old_logp == "scored":
        notes.append(
            f"placement.staleness={placement.staleness}: completions are sampled by older parameters than the ratio's "
            "denominator, and nothing corrects for that; set a correction or a rejection (gspax.losses.correction)"
        )
    return [
        *notes,
        *losses.warnings(experiment.loss, experiment.correction, experiment.calibration),
        *unused_turns(experiment.environment, experiment.turns),
    ]


def _tokenizer(tokenizer: Any, model: ModelConfig, warm_start: WarmStart | None) -> Iterator[str]:
    """The tokenizer's ids are the model's, and it has the methods that the run calls."""
    yield from tokenizer_problems(tokenizer, model.vocab_size, demonstrations=warm_start is not None)


def _updates(schedule: Schedule) -> Iterator[str]:
    """The updates of a run can be counted."""
    updates = schedule.steps * updates_per_step(schedule)
    if updates > INT32:
        yield (
            f"schedule: wanted at most {INT32:,} updates, got {schedule.steps} steps x {schedule.epochs} epochs x "
            f"{schedule.minibatches} minibatches = {updates:,}"
        )


def _adapters(lora: Lora | None) -> Iterator[str]:
    """There is something to train."""
    if lora is not None and not (lora.attention or lora.mlp):
        yield "lora: wanted attention or mlp, got neither, which trains nothing"


def _async_rewards(reward: Reward, evaluation: Evaluation) -> Iterator[str]:
    """Rewards inside a composition are plain functions."""
    of_tasks = {f"evaluation.tasks[{i}].reward": task.reward for i, task in enumerate(evaluation.tasks)}
    for key, function in ({"reward": reward} | of_tasks).items():
        for composition, member in find_async_members(function):
            yield f"{key}: wanted plain functions inside {title_of(composition)}, got the async {title_of(member)}"


def _lengths(model: ModelConfig, sampling: Sampling, evaluation: Evaluation) -> Iterator[str]:
    """Prompt and completion fit into the model's context."""
    longest = max(sampling.max_tokens, evaluation.max_tokens)
    total = sampling.max_prompt_tokens + longest
    if total > model.max_position_embeddings:
        where = "sampling" if longest == sampling.max_tokens else "evaluation"
        yield (
            f"{where}.max_tokens: wanted prompt and completion within model.max_position_embeddings "
            f"({model.max_position_embeddings}), got {sampling.max_prompt_tokens} + {longest} = {total} tokens"
        )


def _tasks(evaluation: Evaluation, sampling: Sampling, model: ModelConfig) -> Iterator[str]:
    """Tasks have names of their own, problems that can be counted, and completions that fit the model's context."""
    names = [task.name for task in evaluation.tasks]
    for i, task in enumerate(evaluation.tasks):
        key = f"evaluation.tasks[{i}]"
        if task.name in names[:i]:
            yield f"{key}.name: wanted a name that no other task has, got {task.name!r}"
        if not callable(getattr(task.data, "heldout", None)):
            yield f"{key}.data: wanted an object with heldout, got {type(task.data).__name__}"
        elif not task.problems and not hasattr(type(task.data), "heldout_count"):
            yield f"{key}.problems: wanted a number, because {type(task.data).__name__} has no heldout_count, got 0"
        prompt = task.max_prompt_tokens or sampling.max_prompt_tokens
        completion = task.max_tokens or evaluation.max_tokens or sampling.max_tokens
        if prompt + completion > model.max_position_embeddings:
            yield (
                f"{key}.max_tokens: wanted prompt and completion within model.max_position_embeddings "
                f"({model.max_position_embeddings}), got {prompt} + {completion} = {prompt + completion} tokens"
            )


def _tokens(sampling: Sampling) -> Iterator[str]:
    """The tokens of a rollout batch can be indexed."""
    tokens = sampling.prompts * sampling.group * (sampling.max_prompt_tokens + sampling.max_tokens)
    if tokens > INT32:
        yield (
            f"sampling: wanted at most {INT32:,} tokens in a rollout batch, got {sampling.prompts} prompts x "
            f"{sampling.group} samples x {sampling.max_prompt_tokens + sampling.max_tokens} tokens = {tokens:,}"
        )


def _rows(sampling: Sampling, schedule: Schedule) -> Iterator[str]:
    """A rollout batch divides into minibatches, and those into microbatches."""
    rows = sampling.prompts * sampling.group
    minibatches, micro = schedule.minibatches, schedule.microbatch_rows
    if rows % minibatches:
        yield f"schedule.minibatches: wanted a divisor of the {rows} rows of a rollout batch, got {minibatches}"
    elif micro and schedule.microbatch_tokens:
        yield f"schedule.microbatch_rows: wanted 0 beside schedule.microbatch_tokens, got {micro}"
    elif micro and rows // minibatches % micro:
        yield f"schedule.microbatch_rows: wanted a divisor of a minibatch's {rows // minibatches} rows, got {micro}"
    yield from _packed_rows(sampling, schedule, 1)


def _packed_rows(sampling: Sampling, schedule: Schedule, shards: int) -> Iterator[str]:
    """The longest response and its prompt fit a row of each of so many devices."""
    longest = sampling.max_prompt_tokens + sampling.max_tokens
    if 0 < schedule.microbatch_tokens < shards * longest:
        each = f" for each of the {shards} devices that rows are sharded over" if shards > 1 else ""
        yield (
            f"schedule.microbatch_tokens: wanted at least sampling.max_prompt_tokens + max_tokens "
            f"({longest} tokens){each}, got {schedule.microbatch_tokens}"
        )


def _shared_prompts(schedule: Schedule, model: ModelConfig) -> Iterator[str]:
    """Prompts are shared in packed rows, by models whose tokens attend to all before them."""
    if not schedule.share_prompts:
        return
    if not schedule.microbatch_tokens:
        yield "schedule.share_prompts: wanted schedule.microbatch_tokens, whose packed rows share prompts, got 0"
    if layer_windows(model):
        yield "schedule.share_prompts: wanted False in a model with sliding windows, got True"


def _drawn_ahead(sampling: Sampling, placement: Placement | None) -> Iterator[str]:
    """A rollout that is sampled ahead has fixed problems, and the host does not wait for it."""
    if placement is None:
        return
    if placement.partial is not None:
        yield from _partial_rollouts(sampling, placement.staleness, placement.partial)
    names = ("max_refills", "chunk") if placement.partial is None else ("max_refills",)
    for name in names if placement.staleness else ():
        if value := getattr(sampling, name):
            yield f"sampling.{name}: wanted 0 with placement.staleness={placement.staleness}, got {value}"


def _partial_rollouts(sampling: Sampling, staleness: int, partial: PartialRollouts) -> Iterator[str]:
    """Groups that are carried over or sampled ahead are trained on within the staleness bound."""
    carried, ahead, P = partial.carried, partial.ahead, sampling.prompts
    needed = (carried > 0) + (ahead > 0)
    if not needed:
        yield "placement.partial: wanted carried or ahead above 0, got 0 and 0"
    if carried > P:
        yield f"placement.partial.carried: wanted at most the {P} groups of a rollout batch, got {carried}"
    if staleness < needed:
        each = " and ".join(["carried"] * (carried > 0) + ["ahead"] * (ahead > 0))
        yield (
            f"placement.staleness: wanted at least {needed}, one rollout batch for each of placement.partial's {each}, "
            f"got {staleness}"
        )
    if not sampling.chunk:
        yield "sampling.chunk: wanted the tokens between two renewals of the parameters, with placement.partial, got 0"


def _mesh(experiment: Experiment, devices: int | None, slices: tuple[int, int]) -> Iterator[str]:
    """The axes fit the devices, and everything that is sharded over them divides evenly."""
    mesh = experiment.mesh
    given = {axis: getattr(mesh, axis) for axis in sharding.AXES}
    if devices is None:
        free = [f"{axis}=-1" for axis, size in given.items() if size == -1]
        if len(free) > 1:
            yield f"mesh: wanted at most one axis of -1, got {', '.join(free)}"
        if free:
            return
        devices = math.prod(size or 1 for size in given.values())
    elif experiment.placement is not None:
        if devices <= experiment.placement.devices:
            yield f"placement.devices: wanted fewer than the {devices} devices, got {experiment.placement.devices}"
            return
        devices -= experiment.placement.devices
        yield from _disaggregated_mesh(experiment.placement, experiment.sampling, experiment.model, slices[1])
    try:
        sizes = sharding.resolve_axes(mesh, devices, experiment.model, slices=slices[0])
    except UserError as problem:
        yield str(problem)
        return
    shards = sharding.batch_shards(sizes)
    yield from _undivided_rows(experiment.sampling, shards, "that rows are sharded over")
    split: dict[str, int] = {}
    if experiment.placement is None:
        split["sampling.slots"] = experiment.sampling.slots
    if experiment.schedule.microbatch_rows:
        split["schedule.microbatch_rows"] = experiment.schedule.microbatch_rows
    if shards > 1:
        yield from _packed_rows(experiment.sampling, experiment.schedule, shards)
    if experiment.warm_start is not None:
        split["warm_start.rows"] = experiment.warm_start.rows
    for key, count in split.items():
        if count % shards:
            yield f"{key}: wanted a multiple of the {shards} devices that rows are sharded over, got {count}"
    yield from sharding.find_mismatches(sizes, experiment.model)
    if experiment.sampler_mesh is not None:
        yield from _colocated_mesh(
            experiment.sampler_mesh, experiment.placement, experiment.sampling, experiment.model, sizes
        )
    elif experiment.placement is None and experiment.sampling.cache_gib:
        layout = choose_sampler_layout(experiment, sizes)
        yield from slot_problems(experiment.model, experiment.sampling, layout.sizes)


def _undivided_rows(sampling: Sampling, shards: int, which: str, key: str = "sampling.prompts") -> Iterator[str]:
    """The rows of a rollout batch divide over the devices; its prompts need not."""
    rows = sampling.prompts * sampling.group
    if rows % shards:
        yield (
            f"{key}: wanted rows in multiples of the {shards} devices {which}, got {sampling.prompts} "
            f"prompts x {sampling.group} samples = {rows}"
        )


def _disaggregated_mesh(placement: Placement, sampling: Sampling, model: ModelConfig, slices: int) -> Iterator[str]:
    """The axes of a disaggregated sampler fit its devices."""
    try:
        sizes = sharding.resolve_axes(placement.mesh, placement.devices, model, slices=slices)
    except UserError as problem:
        yield f"placement.{problem}"
        return
    shards, held = sharding.batch_shards(sizes), with_carried(sampling, placement)
    yield from _undivided_rows(sampling, shards, "of placement.mesh for rows")
    if not sampling.prompts * sampling.group % shards:
        yield from _undivided_rows(held, shards, "of placement.mesh for rows", key="placement.partial.carried")
    yield from _sampler_sizes("placement.mesh", sizes, held, model)


def _colocated_mesh(
    given: Mesh, placement: Placement | None, sampling: Sampling, model: ModelConfig, learner: dict[str, int]
) -> Iterator[str]:
    """The axes of the learner's devices during a rollout fit them."""
    if placement is not None:
        yield "sampler_mesh: wanted null with placement, whose placement.mesh is the sampler's, got a mesh"
        return
    try:
        sizes = sharding.resolve_axes(given, math.prod(learner.values()), model, slices=learner["slice"])
    except UserError as problem:
        yield f"sampler_{problem}"
        return
    yield from _undivided_rows(sampling, sharding.batch_shards(sizes), "of sampler_mesh for rows")
    yield from _sampler_sizes("sampler_mesh", sizes, sampling, model)


def _sampler_sizes(key: str, sizes: dict[str, int], sampling: Sampling, model: ModelConfig) -> Iterator[str]:
    shards = sharding.batch_shards(sizes)
    if sampling.slots % shards:
        yield f"sampling.slots: wanted a multiple of the {shards} devices of {key} for rows, got {sampling.slots}"
    where = key.removesuffix(".mesh")
    yield from (f"{where}: {misfit}" for misfit in sharding.find_mismatches(sizes, model))
    yield from slot_problems(model, sampling, sizes)


# (check, fields that it reads): a check takes the parts of the experiment that these fields are in, and is left out if
# one of the fields has an error
_COMBINATIONS: tuple[tuple[Callable[..., Iterator[str]], str], ...] = (
    (opening_problems, "data tokenizer"),
    (_tokenizer, "tokenizer model.vocab_size warm_start"),
    (architecture_problems, "model"),
    (_lengths, "model.max_position_embeddings sampling.max_prompt_tokens sampling.max_tokens evaluation.max_tokens"),
    (_async_rewards, "reward evaluation"),
    (_tasks, "evaluation sampling.max_prompt_tokens sampling.max_tokens model.max_position_embeddings"),
    (_rows, "sampling.prompts sampling.group sampling.max_prompt_tokens sampling.max_tokens schedule"),
    (_shared_prompts, "schedule.share_prompts schedule.microbatch_tokens model"),
    (_drawn_ahead, "sampling placement"),
    (_tokens, "sampling.prompts sampling.group sampling.max_prompt_tokens sampling.max_tokens"),
    (_updates, "schedule"),
    (_adapters, "lora"),
    *losses.COMBINATIONS,
    (conversation_problems, "environment turns tokenizer placement"),
    (credit_problems, "turns.credit loss advantage correction rejection reference"),
)
_OF_MESH = ("sampling", "schedule", "model", "mesh", "placement", "sampler_mesh", "warm_start.rows")
