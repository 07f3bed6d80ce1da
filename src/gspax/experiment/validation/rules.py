"""The rules of an experiment: `validate` reports every error at once, `warnings` settings that are only unwise.

`fields` reads types, ranges and signatures from the annotations of `gspax.config`. Rules for one part stand beside that
part, rules between parts are here. Each message is one sentence: where, what was wanted, what came.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain

from gspax.config import (
    Engine,
    Evaluation,
    Experiment,
    Guard,
    Lora,
    Mesh,
    ModelConfig,
    Optimizer,
    Placement,
    Published,
    Sampling,
    Schedule,
    Term,
    Trained,
    WarmStart,
    adapted_weights,
    filters_in_use,
    has_experts,
    updates_per_step,
)
from gspax.config.functions import Function, interface_problems, named_parts, title_of
from gspax.config.model import architecture_problems
from gspax.config.protocols import (
    Environment,
    Loss,
    Reward,
    Tokenizer,
)
from gspax.config.ranges import INT32
from gspax.data.sources import opening_notes, opening_problems, reading_problems
from gspax.data.token_bytes import stop_problems
from gspax.data.tokenizer import tokenizer_problems
from gspax.errors import UserError, describe_error, did_you_mean
from gspax.experiment.validation.advantages import (
    advantage_problems,
    credit_problems,
    overlong_problems,
)
from gspax.experiment.validation.chats import chat_problems, chat_warnings, unused_turns
from gspax.experiment.validation.contracts import contract_problems
from gspax.experiment.validation.fields import (
    WrongFieldError,
    function_problems,
    range_problems,
    takes_segments,
    type_problems,
    without,
)
from gspax.experiment.validation.first_calls import begin_with, first_problems, rewards_of
from gspax.experiment.validation.held import held_problems, held_widths
from gspax.experiment.validation.layers import Asked, layer_problems, part_problems
from gspax.experiment.validation.losses import (
    calibration_problems,
    clip_range_problems,
    loss_warnings,
    old_policy_problems,
    penalty_problems,
    router_problems,
    term_problems,
    unscored_problems,
)
from gspax.experiment.validation.own_terms import own_term_problems
from gspax.experiment.validation.pairs import PAIRS, pair_problems
from gspax.experiment.validation.servers import engine_problems, engine_warnings
from gspax.model.passes import Passes
from gspax.model.sizes import choose_sampler_layout, slot_problems, with_carried
from gspax.model.terms import MAKERS
from gspax.parallel import sharding
from gspax.rewards.calls import find_async_members
from gspax.storage.paths import to_path
from gspax.types import named_leaves

CHAT_METHODS = ("encode_chat", "encode_reply", "encode_completion")  # of a tokenizer, besides `turn_end`

Functions = Mapping[str, Function]  # the functions of log-probs besides the loss, by field


def validate(
    experiment: Experiment,
    devices: int = 0,
    slices: tuple[int, int] = (1, 1),
    broken: Iterable[str] = (),
) -> list[str]:
    """List all errors of an experiment, one sentence each; empty if it can run.

    A check ends where it reads a field with an error, so each sentence is about another error. No device is used; a
    problem of each split is loaded, and functions are called as `contracts` says.

    Args:
      experiment: as loaded and overridden.
      devices: the number of devices; 0: not known, which leaves out the checks that depend on it.
      slices: TPU slices of the learner's devices, and of a disaggregated sampler's.
      broken: fields with an error already, such as an override that cannot be parsed.
    """
    problems = list(type_problems(experiment))
    e = without(experiment, [*broken, *map(_key, problems)])
    checks = (
        lambda: range_problems(e),
        lambda: function_problems(e),
        lambda: interface_problems("data", e.data, ("train", "heldout")),
    )
    problems += dict.fromkeys(_run(*checks))
    e = without(experiment, [*broken, *map(_key, problems)])
    opening = list(_run(lambda: opening_problems(e.data, e.tokenizer)))  # they name a file
    problems += opening
    passes = Passes(e)
    problems += _run(
        lambda: tokenizer_problems(e.tokenizer, e.model.vocab_size, demonstrations=e.warm_start is not None),
        *_sampling_checks(e),
        lambda: chain(_rows(e.sampling, e.schedule), _packed_rows(e.sampling, e.schedule, 1)),
        *(partial(pair_problems, e, pair) for pair in PAIRS),
        lambda: layer_problems(e.model, e.schedule, e.sampling, served=e.engine is not None),
        lambda: chain(_shared_prompts(e.schedule), _partial_groups(e.sampling, x) if (x := e.separate_sampler) else ()),
        lambda: () if e.engine is None else engine_problems(e.engine, e.sampling),
        lambda: chain(_updates(e.schedule), _collapse(e.guard)),
        lambda: () if e.lora is None else _adapters(e.lora),
        lambda: part_problems(_asked(e.trained, e.optimizer, e.warm_start)),
        lambda: clip_range_problems(e.loss),
        lambda: () if e.calibration is None else calibration_problems(e.loss, e.schedule),
        lambda: penalty_problems(passes),
        *(partial(_own_problems, make, passes) for make in MAKERS),
        lambda: chain.from_iterable(_told_by(term, passes) for term in e.terms),
        lambda: chain(term_problems(passes), held_problems(passes)),
        lambda: _packing(e.schedule, e.loss, _functions(passes)),
        lambda: router_problems(passes),
        lambda: old_policy_problems(passes),
        lambda: unscored_problems(passes),
        lambda: advantage_problems(passes),
        lambda: overlong_problems(e.advantage, on=e.filter_overlong),
        lambda: _conversation(e.environment, e.tokenizer, e.sampling),
        lambda: credit_problems(e.turns, e.loss, e.advantage, _functions(passes)),
        lambda: _mesh(e, devices, slices),
    )
    e = without(experiment, [*broken, *map(_key, problems), *["data"] * len(opening)])
    calls = partial(contract_problems, e), lambda: own_term_problems(Passes(e))
    problems += _run(*calls, lambda: first_problems(e.data, begin_with(e.environment), e.evaluation))
    return [*problems, *_run(lambda: _frozen(e.optimizer.frozen, e.trained))]


def _own_problems(make: Callable[[Experiment], Term | None], passes: Passes) -> Iterable[str]:
    """The errors of a setting's term."""
    term = make(passes.experiment)
    return () if term is None else _problems_of(term, passes)


def _problems_of(term: Term, passes: Passes) -> Iterator[str]:
    """The errors of a term's pairs of settings, and those that it finds."""
    yield from _run(*(partial(pair_problems, passes.experiment, pair) for pair in term.pairs))
    yield from term.problems(passes)


def _told_by(term: Term, passes: Passes) -> Iterator[str]:
    """The errors that an own term finds, or the exception that it raises."""
    try:
        yield from _run(lambda: _problems_of(term, passes))
    except Exception as error:
        yield f"terms: {type(term).__name__}.problems raised {describe_error(error)}"


def _sampling_checks(e: Experiment | Published) -> tuple[Callable[[], Iterable[str]], ...]:
    """Checks of what samples: the model, the lengths, and the tasks of evaluations."""
    return (
        lambda: chain(stop_problems(e.sampling, e.tokenizer), architecture_problems(e.model)),
        lambda: _async_rewards(rewards_of(e)),
        lambda: chain(_lengths(e.model, e.sampling, e.evaluation), _tasks(e.evaluation, e.sampling, e.model)),
        lambda: _tokens(e.sampling),
    )


def _run(*checks: Callable[[], Iterable[str]]) -> Iterator[str]:
    """The sentences of checks, each up to where it reads a field with an error."""
    for check in checks:
        with contextlib.suppress(WrongFieldError):
            yield from check()


def _key(sentence: str) -> str:
    """The field that a sentence is about."""
    return sentence.partition(":")[0]


def check(experiment: Experiment, devices: int = 0, slices: tuple[int, int] = (1, 1)) -> None:
    """Raise UserError with the sentences of `validate`, if there are any."""
    problems = validate(experiment, devices, slices)
    if problems:
        raise UserError("\n".join(problems))


def check_published(published: Published) -> None:
    """Raise UserError with a sentence for each error of an evaluation without an experiment, if there are any."""
    problems = list(type_problems(published))
    e = without(published, map(_key, problems))
    problems += dict.fromkeys(_run(lambda: range_problems(e), lambda: function_problems(e)))
    e = without(published, map(_key, problems))
    problems += _run(
        lambda: tokenizer_problems(e.tokenizer, e.model.vocab_size, demonstrations=False),
        *_sampling_checks(e),
        lambda: layer_problems(e.model, Schedule(), e.sampling, served=False),
    )
    if problems:
        raise UserError("\n".join(problems))


def warnings(experiment: Experiment) -> list[str]:
    """List the settings of a valid experiment that are probably not intended, one sentence each."""
    notes = [
        *opening_notes(experiment.data),
        *chat_warnings(experiment.tokenizer, experiment.environment, experiment.sampling.stop_token_ids),
    ]
    sampling = experiment.sampling
    if (filters := filters_in_use(sampling)) and not sampling.mask_replay:
        notes.append(
            f"{', '.join('sampling.' + name for name in filters)}: log-probabilities are of the unfiltered, "
            "temperature-scaled distribution, so sampling through a filter biases the gradient; set "
            f"sampling.mask_replay={sampling.top_k or 64} to train on the distribution that was sampled, for up to so "
            "many tokens that a filter keeps"
        )
    placement, passes = experiment.placement, Passes(experiment)
    uncorrected = not any(term.weighs and "sampler_logp_BT" in term.needs for term in passes.terms)
    unexplained = uncorrected and passes.old_logp != "sampler"
    key, ahead = ("placement", placement) if placement else ("engine", experiment.engine)
    if ahead is not None and ahead.staleness and unexplained:
        notes.append(
            f"{key}.staleness={ahead.staleness}: completions are sampled by older parameters than the ratio's "
            "denominator, and nothing corrects for that; set a correction or a rejection (gspax.losses.correction)"
        )
    return [
        *notes,
        *loss_warnings(passes),
        *unused_turns(experiment.environment, experiment.turns),
        *chain.from_iterable(term.warnings(passes) for term in passes.terms),
        *(() if experiment.engine is None else engine_warnings(experiment.engine, sampling, experiment.model)),
    ]


def _updates(schedule: Schedule) -> Iterator[str]:
    """The updates of a run can be counted."""
    updates = schedule.steps * updates_per_step(schedule)
    if updates > INT32:
        yield (
            f"schedule: wanted at most {INT32:,} updates, got {schedule.steps} steps x {schedule.epochs} epochs x "
            f"{schedule.minibatches} minibatches = {updates:,}"
        )


def _collapse(guard: Guard) -> Iterator[str]:
    """An alarm that counts can be given."""
    if guard.collapse is not None and set(guard.collapse.alarms) == {"gradient"} and not guard.collapse.grad_norm:
        yield 'guard.collapse.grad_norm: wanted more than 0, because no other alarm than "gradient" counts, got 0'


def _frozen(frozen: tuple[str, ...], trained: Trained) -> Iterator[str]:
    """Some trained parameter has each of the frozen names in its path (`learner.optimizer.freeze`)."""
    model, lora = trained
    if not frozen:
        return
    from gspax.model import transformer  # here, because other dry runs need no flax

    paths = [name.split("/") for name in named_leaves(transformer.abstract_params(model))]
    if lora is not None:
        adapted = {(part, name) for part, names in adapted_weights(lora).items() for name in names}
        paths = [[*path, "a", "b"] for path in paths if tuple(path[-2:]) in adapted]
    known = set(chain(*paths))
    for name in frozen:
        if name not in known:
            hint = did_you_mean(name, known, cutoff=0.7)
            yield f"optimizer.frozen: wanted names among {', '.join(sorted(known))}, got {name!r}{hint and f'; {hint}'}"


def _asked(trained: Trained, own: Optimizer, stage: WarmStart | None) -> Iterator[Asked]:
    """The settings of parts that not every model has."""
    model, lora = trained
    has_biases = has_experts(model) and model.router.correction_bias
    speeds = {"optimizer": own.bias_update_speed, "warm_start.optimizer": stage and stage.optimizer.bias_update_speed}
    for key, speed in speeds.items():
        yield Asked(f"{key}.bias_update_speed", 0, speed, "correction biases", has_biases)
    yield Asked("lora.delta", False, lora and lora.delta, "gated delta nets", model.delta is not None)


def _adapters(lora: Lora) -> Iterator[str]:
    """There is something to train."""
    if not (lora.attention or lora.mlp or lora.delta):
        yield "lora: wanted attention or mlp, got neither, which trains nothing"
    if lora.checkpoint and not (to_path(lora.checkpoint) / "adapter_config.json").is_file():
        yield f"lora.checkpoint: wanted a folder with adapter_config.json, there is none at {lora.checkpoint!r}"


def _async_rewards(rewards: Iterable[tuple[str, Reward]]) -> Iterator[str]:
    """Rewards inside a composition are plain functions."""
    for key, function in rewards:
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
    for i, (key, task) in enumerate(named_parts(evaluation.tasks, "evaluation.tasks.").items()):
        if task.name in names[:i]:
            yield f"{key}.name: wanted a name that no other task has, got {task.name!r}"
        if not callable(getattr(task.data, "heldout", None)):
            yield f"{key}.data: wanted an object with heldout, got {type(task.data).__name__}"
        elif not task.problems and not hasattr(type(task.data), "heldout_count"):
            yield f"{key}.problems: wanted a number, because {type(task.data).__name__} has no heldout_count, got 0"
        else:
            yield from reading_problems(f"{key}.data", task.data)
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
    elif micro and not schedule.microbatch_tokens and rows // minibatches % micro:
        yield f"schedule.microbatch_rows: wanted a divisor of a minibatch's {rows // minibatches} rows, got {micro}"


def _packed_rows(sampling: Sampling, schedule: Schedule, shards: int) -> Iterator[str]:
    """The longest response and its prompt fit a row of each device."""
    longest = sampling.max_prompt_tokens + sampling.max_tokens
    if 0 < schedule.microbatch_tokens < shards * longest:
        each = f" for each of the {shards} devices that rows are sharded over" if shards > 1 else ""
        yield (
            f"schedule.microbatch_tokens: wanted at least sampling.max_prompt_tokens + max_tokens "
            f"({longest} tokens){each}, got {schedule.microbatch_tokens}"
        )


def _shared_prompts(schedule: Schedule) -> Iterator[str]:
    """Prompts are shared in packed rows."""
    if schedule.share_prompts and not schedule.microbatch_tokens:
        yield "schedule.share_prompts: wanted schedule.microbatch_tokens, whose packed rows share prompts, got 0"


def _partial_groups(sampling: Sampling, sampler: Placement | Engine) -> Iterator[str]:
    """Groups that are carried over or sampled ahead are trained on within the staleness bound."""
    if sampler.partial is None:
        return
    key, staleness = "engine" if isinstance(sampler, Engine) else "placement", sampler.staleness
    carried, ahead, P = sampler.partial.carried, sampler.partial.ahead, sampling.prompts
    needed = (carried > 0) + (ahead > 0)
    if not needed:
        yield f"{key}.partial: wanted carried or ahead above 0, got 0 and 0"
    if carried > P:
        yield f"{key}.partial.carried: wanted at most the {P} groups of a rollout batch, got {carried}"
    if staleness < needed:
        each = " and ".join(["carried"] * (carried > 0) + ["ahead"] * (ahead > 0))
        yield (
            f"{key}.staleness: wanted at least {needed}, one rollout batch for each of {key}.partial's {each}, "
            f"got {staleness}"
        )
    if not sampling.chunk:
        yield f"sampling.chunk: wanted at least 1 with {key}.partial, which renews parameters every chunk, got 0"


def _packing(schedule: Schedule, loss: Loss, terms: Functions) -> Iterator[str]:
    """Functions that sum over a response can tell the responses of a packed row apart."""
    for field, function in {"loss": loss, **terms}.items():
        if schedule.microbatch_tokens and not takes_segments(function):
            yield (
                f"schedule.microbatch_tokens: wanted a {field} that takes `segment_ids`, for packed rows; "
                f"{title_of(function)} does not"
            )


def _functions(passes: Passes) -> Functions:
    return {field: function for term in passes.terms for field, function in term.functions.items()}


def _mesh(experiment: Experiment, devices: int, slices: tuple[int, int]) -> Iterator[str]:
    """The axes fit the devices, and everything that is sharded over them divides evenly."""
    mesh, placement, sampling = experiment.mesh, experiment.placement, experiment.sampling
    model, schedule = experiment.model, experiment.schedule
    if not devices:
        axes = {axis: getattr(mesh, axis) for axis in sharding.AXES}
        free = [f"{axis}=-1" for axis, size in axes.items() if size == -1]
        if len(free) > 1:
            yield f"mesh: wanted at most one axis of -1, got {', '.join(free)}"
        if free:
            return
        devices = math.prod(size or 1 for size in axes.values())
    else:
        taken = placement.devices if placement is not None else 0
        if taken >= devices:
            yield f"placement.devices: wanted fewer than the {devices} devices, got {taken}"
            return
        devices -= taken
    if placement is not None:
        held = with_carried(sampling, placement)
        yield from _sampler_mesh(
            "placement.mesh", placement.mesh, placement.devices, slices[1], sampling=sampling, held=held, model=model
        )
    try:
        sizes = sharding.resolve_axes(mesh, devices, model, slices=slices[0])
    except UserError as problem:
        yield str(problem)
        return
    shards = sharding.batch_shards(sizes)
    undivided = list(_undivided_rows(sampling, shards, "that rows are sharded over"))
    held = with_carried(sampling, experiment.engine)
    yield from undivided or _undivided_rows(held, shards, "that rows are sharded over", key="engine.partial.carried")
    if shards > 1:
        yield from _packed_rows(sampling, schedule, shards)
    divided = {
        "sampling.slots": 0 if placement is not None else sampling.slots,
        "schedule.microbatch_rows": schedule.microbatch_rows,
        "warm_start.rows": 0 if experiment.warm_start is None else experiment.warm_start.rows,
    }
    for key, count in divided.items():
        if count % shards:
            yield f"{key}: wanted a multiple of the {shards} devices that rows are sharded over, got {count}"
    yield from sharding.find_mismatches(sizes, model)
    yield from held_widths(Passes(experiment), sizes)
    if experiment.sampler_mesh is None:
        if placement is None and sampling.cache_gib:
            yield from slot_problems(model, sampling, choose_sampler_layout(experiment, sizes))
    elif placement is None:
        own = experiment.sampler_mesh
        yield from _sampler_mesh(
            "sampler_mesh", own, devices, sizes["slice"], sampling=sampling, held=sampling, model=model
        )


def _undivided_rows(sampling: Sampling, shards: int, which: str, key: str = "sampling.prompts") -> Iterator[str]:
    """The rows of a rollout batch divide over the devices; its prompts need not."""
    rows = sampling.prompts * sampling.group
    if rows % shards:
        yield (
            f"{key}: wanted rows in multiples of the {shards} devices {which}, got {sampling.prompts} "
            f"prompts x {sampling.group} samples = {rows}"
        )


def _sampler_mesh(
    key: str, mesh: Mesh, devices: int, slices: int, *, sampling: Sampling, held: Sampling, model: ModelConfig
) -> Iterator[str]:
    """The axes of the sampler's mesh fit its devices, and its rows, those `held` over included, divide over them."""
    try:
        sizes = sharding.resolve_axes(mesh, devices, model, slices=slices)
    except UserError as problem:
        yield f"{key.removesuffix('mesh')}{problem}"
        return
    shards, which = sharding.batch_shards(sizes), f"of {key} for rows"
    undivided = list(_undivided_rows(sampling, shards, which))
    yield from undivided or _undivided_rows(held, shards, which, key="placement.partial.carried")
    if sampling.slots % shards:
        yield f"sampling.slots: wanted a multiple of the {shards} devices {which}, got {sampling.slots}"
    yield from (f"{key.removesuffix('.mesh')}: {misfit}" for misfit in sharding.find_mismatches(sizes, model))
    yield from slot_problems(model, held, sizes)


def _conversation(environment: Environment | None, tokenizer: Tokenizer, sampling: Sampling) -> Iterator[str]:
    """The environment has its methods, and the tokenizer encodes turns."""
    yield from chat_problems(tokenizer, environment, sampling.stop_token_ids)
    if environment is None:
        return
    yield from interface_problems("environment", environment, ("reset", "step"))
    lacks = [name for name in CHAT_METHODS if not callable(getattr(tokenizer, name, None))]
    lacks += ["turn_end"] if not hasattr(type(tokenizer), "turn_end") else []
    if lacks:
        yield (
            "tokenizer: wanted one for conversations with an environment (data.hf_chat, data.CharChat), "
            f"{type(tokenizer).__name__} has no {lacks[0]}"
        )
