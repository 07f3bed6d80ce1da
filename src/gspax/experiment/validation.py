"""What must hold before an experiment starts: `validate` finds every mistake at once, `warnings` what is only unwise.

Each message is one sentence: where, what was wanted, what came.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from gspax import sharding
from gspax.config import Experiment, ModelConfig, Placement, is_sparse
from gspax.errors import UserError
from gspax.experiment import loss_validation
from gspax.experiment.description import is_record, name_of, parameters, show, unwrap

Range = tuple[str, Callable[[Any], bool]]

AT_LEAST_0: Range = ("at least 0", lambda x: 0 <= x < float("inf"))
AT_LEAST_1: Range = ("at least 1", lambda x: x >= 1)
AT_LEAST_2: Range = ("at least 2", lambda x: x >= 2)
ABOVE_0: Range = ("above 0", lambda x: 0 < x < float("inf"))
SHARE: Range = ("above 0 and at most 1", lambda x: 0 < x <= 1)
BELOW_1: Range = ("at least 0 and below 1", lambda x: 0 <= x < 1)
FINITE: Range = ("a finite number", lambda x: abs(x) < float("inf"))
AXIS: Range = ("at least 1, or -1 for the devices that are left", lambda x: x >= 1 or x == -1)
CHOSEN_AXIS: Range = ("at least 1, 0 to have it chosen, or -1 for the devices that are left", lambda x: x >= -1)

OPTIMIZER: dict[str, Range] = {
    "learning_rate": ABOVE_0,
    "warmup_updates": AT_LEAST_0,
    "max_grad_norm": AT_LEAST_0,
    "weight_decay": AT_LEAST_0,
    "b1": BELOW_1,
    "b2": BELOW_1,
    "eps": ABOVE_0,
}
RANGES: dict[str, Range] = {
    "sampling.prompts": AT_LEAST_1,
    "sampling.group": AT_LEAST_2,
    "sampling.max_prompt_tokens": AT_LEAST_1,
    "sampling.max_tokens": AT_LEAST_1,
    "sampling.temperature": ABOVE_0,
    "sampling.top_k": AT_LEAST_0,
    "sampling.top_p": SHARE,
    "sampling.min_p": BELOW_1,
    **{f"optimizer.{name}": range_ for name, range_ in OPTIMIZER.items()},
    "schedule.steps": AT_LEAST_0,
    "schedule.minibatches": AT_LEAST_1,
    "schedule.microbatch_rows": AT_LEAST_0,
    "schedule.eval_every": AT_LEAST_0,
    "schedule.checkpoint_every": AT_LEAST_0,
    "schedule.keep_checkpoints": AT_LEAST_1,
    "evaluation.problems": AT_LEAST_1,
    "evaluation.samples": AT_LEAST_1,
    "evaluation.max_tokens": AT_LEAST_0,
    "warm_start.steps": AT_LEAST_1,
    "warm_start.rows": AT_LEAST_1,
    "reference.coefficient": AT_LEAST_0,
    "regularizers.entropy": FINITE,
    "regularizers.load_balance": AT_LEAST_0,
    "regularizers.router_z": AT_LEAST_0,
    "lora.rank": AT_LEAST_1,
    "lora.alpha": ABOVE_0,
    "calibration.share": ("above 0 and below 1", lambda x: 0 < x < 1),
    "calibration.tolerance": BELOW_1,
    "calibration.gain": AT_LEAST_0,
    **{f"warm_start.optimizer.{name}": range_ for name, range_ in OPTIMIZER.items()},
    **{
        f"{mesh}.{axis}": CHOSEN_AXIS if axis in ("slice", "expert") else AXIS
        for mesh in ("mesh", "placement.mesh")
        for axis in sharding.AXES
    },
    "placement.devices": AT_LEAST_1,
    "placement.staleness": AT_LEAST_0,
    "seed": ("at least 0 and below 2^32", lambda x: 0 <= x < 2**32),
    "model.vocab_size": AT_LEAST_1,
    "model.hidden_size": AT_LEAST_1,
    "model.num_hidden_layers": AT_LEAST_1,
    "model.num_attention_heads": AT_LEAST_1,
    "model.num_key_value_heads": AT_LEAST_1,
    "model.head_dim": AT_LEAST_2,
    "model.intermediate_size": AT_LEAST_0,
    "model.num_experts": AT_LEAST_0,
    "model.num_experts_per_tok": AT_LEAST_0,
    "model.moe_intermediate_size": AT_LEAST_0,
    "model.decoder_sparse_step": AT_LEAST_1,
    "model.rms_norm_eps": ABOVE_0,
    "model.rope_theta": ABOVE_0,
    "model.initializer_range": ABOVE_0,
    "model.max_position_embeddings": AT_LEAST_1,
}
SIGNATURES = {
    "reward": ("problem", "completion"),
    "advantage": ("rewards",),
    "loss": ("logp", "old_logp", "advantage", "mask"),
    "correction": ("old_logp", "sampler_logp", "mask"),
    "rejection": ("logp", "sampler_logp", "advantage", "mask"),
    "reference.loss": ("logp", "ref_logp", "mask"),
    "reference.reward": ("logp", "ref_logp", "mask"),
    "length_reward": ("length",),
    "warm_start.demonstration": ("problem", "rng"),
}
# parts that an experiment may have None for
OPTIONAL = ("warm_start", "reference", "calibration", "placement", "lora")


def validate(experiment: Experiment, devices: int | None = None, slices: tuple[int, int] = (1, 1)) -> list[str]:
    """Everything that is wrong with an experiment, one sentence each; empty if it can run.

    Args:
      experiment: as loaded and overridden.
      devices: how many there are; None leaves out what depends on it.
      slices: the TPU slices of the learner's devices and of a sampler's own.
    """
    problems = list(_types(experiment, ""))
    if problems:
        return problems  # comparing a string with a number says nothing more
    problems = [*_ranges(experiment), *_functions(experiment), *_parts(experiment)]
    if not problems:  # these divide by what was found positive above
        problems = [*_model(experiment), *_rows(experiment), *_mesh(experiment, devices, slices)]
        problems += loss_validation.problems(experiment)
    return problems


def check(experiment: Experiment, devices: int | None = None, slices: tuple[int, int] = (1, 1)) -> None:
    """Raise UserError with the sentences of `validate`, if there are any."""
    problems = validate(experiment, devices, slices)
    if problems:
        raise UserError("\n".join(problems))


def warnings(experiment: Experiment) -> list[str]:
    """What runs but is probably not meant, one sentence each, for an experiment without mistakes."""
    found = []
    sampling = experiment.sampling
    filters = [name for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)) if getattr(sampling, name) != off]
    if filters:
        found.append(
            f"{', '.join('sampling.' + name for name in filters)}: log-probabilities are of the unfiltered, "
            "temperature-scaled distribution, so sampling through a filter biases the policy ratio"
        )
    found += loss_validation.warnings(experiment)
    return found


def _types(record: Any, prefix: str) -> Iterator[str]:
    """Fields whose values are not what their annotations say, in gspax's own dataclasses."""
    for name, hint in typing.get_type_hints(type(record)).items():
        value = getattr(record, name)
        if not _fits(value, hint):
            yield f"{prefix}{name}: wanted {_words(hint)}, got {value!r}"
        elif is_record(value) and type(value).__module__.startswith("gspax.") and hint is not Any:
            yield from _types(value, f"{prefix}{name}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in members)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, members[0]) for each in value)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is typing.Literal:
        return value in members
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, members))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(member) for member in members)
    if origin is tuple:
        return "a tuple of integers"
    if origin is collections.abc.Callable:
        return "a function"
    plain = {int: "an integer", float: "a number", bool: "True or False", str: "a string", type(None): "None"}
    return plain.get(hint) or f"a {hint.__name__}"


def _at(experiment: Experiment, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), experiment)


def _absent(experiment: Experiment, key: str) -> bool:
    """Whether the key is in a part that the experiment does not have."""
    part = key.partition(".")[0]
    return part in OPTIONAL and getattr(experiment, part) is None


def _ranges(experiment: Experiment) -> Iterator[str]:
    for key, (words, holds) in RANGES.items():
        if _absent(experiment, key):
            continue
        value = _at(experiment, key)
        if not holds(value):
            yield f"{key}: wanted {words}, got {show(value)}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", experiment.name):
        yield f"name: wanted letters, digits, '.', '_' and '-', a letter or digit first, got {experiment.name!r}"
    if experiment.model.dtype not in ("float32", "bfloat16"):
        yield f"model.dtype: wanted float32 or bfloat16, got {experiment.model.dtype!r}"


def _functions(experiment: Experiment) -> Iterator[str]:
    """Functions that could not be called as the run calls them."""
    for key, names in SIGNATURES.items():
        if _absent(experiment, key) or (function := _at(experiment, key)) is None:
            continue
        problem = _misfit(function, names)
        if problem:
            yield f"{key}: wanted a function of ({', '.join(names)}), {problem}"


def _misfit(function: Any, names: tuple[str, ...]) -> str:
    """Why the function cannot take that many positional arguments; empty if it can."""
    inner = unwrap(function)
    title = name_of(inner) if hasattr(inner, "__qualname__") else type(inner).__name__
    known = parameters(inner)
    anything = not known or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    given = function.keywords if isinstance(function, functools.partial) else {}
    for keyword in given if not anything else ():
        if keyword not in known:
            near = difflib.get_close_matches(keyword, known, n=1)
            return f"{title} has no parameter {keyword!r}{f' (did you mean {near[0]!r}?)' if near else ''}"
    try:
        inspect.signature(function).bind(*names)
    except TypeError as problem:
        return f"{title} cannot be called so: {problem}"
    except ValueError:  # a built-in function that does not tell
        pass
    return ""


def _parts(experiment: Experiment) -> Iterator[str]:
    """The data source and the tokenizer have what the run asks of them."""
    asked = {"data": ["train", "heldout"], "tokenizer": ["encode", "decode"]}
    if experiment.warm_start is not None:
        asked["tokenizer"].append("encode_completion")
    for key, names in asked.items():
        part = getattr(experiment, key)
        missing = [name for name in names if not callable(getattr(part, name, None))]
        if isinstance(part, type):
            yield f"{key}: wanted an instance, got the class {part.__name__} (write {part.__name__}(...))"
        elif missing:
            yield f"{key}: wanted an object with {' and '.join(names)}, {type(part).__name__} has no {missing[0]}"
    if isinstance(experiment.tokenizer, type):
        return
    size, stops = (getattr(experiment.tokenizer, name, None) for name in ("vocab_size", "stop_ids"))
    if not isinstance(size, int):
        yield f"tokenizer.vocab_size: wanted an integer, got {size!r}"
    elif experiment.model.vocab_size < size:
        yield f"model.vocab_size: wanted at least the tokenizer's {size}, got {experiment.model.vocab_size}"
    elif not isinstance(stops, tuple) or not all(stop in range(size) for stop in stops):
        yield f"tokenizer.stop_ids: wanted a tuple of ids below {size}, got {stops!r}"
    elif experiment.warm_start and not stops:
        yield "tokenizer.stop_ids: wanted at least one, which ends a demonstration of the warm_start, got none"


def _model(experiment: Experiment) -> Iterator[str]:
    m = experiment.model
    if m.num_attention_heads % m.num_key_value_heads:
        yield (
            f"model.num_attention_heads: wanted a multiple of model.num_key_value_heads ({m.num_key_value_heads}), "
            f"got {m.num_attention_heads}"
        )
    if m.head_dim % 2:
        yield f"model.head_dim: wanted an even number (RoPE turns pairs), got {m.head_dim}"
    yield from _layers(m)
    longest = max(experiment.sampling.max_tokens, experiment.evaluation.max_tokens)
    total = experiment.sampling.max_prompt_tokens + longest
    if total > m.max_position_embeddings:
        where = "sampling" if longest == experiment.sampling.max_tokens else "evaluation"
        yield (
            f"{where}.max_tokens: wanted prompt and completion within model.max_position_embeddings "
            f"({m.max_position_embeddings}), got {experiment.sampling.max_prompt_tokens} + {longest} = {total} tokens"
        )


def _layers(m: ModelConfig) -> Iterator[str]:
    """The widths of the feed-forward networks that the layers need."""
    sparse = [is_sparse(m, layer) for layer in range(m.num_hidden_layers)]
    stray = [layer for layer in m.mlp_only_layers if not 0 <= layer < m.num_hidden_layers]
    if stray:
        yield f"model.mlp_only_layers: wanted layers below {m.num_hidden_layers}, got {stray[0]}"
    if not all(sparse) and m.intermediate_size < 1:
        yield f"model.intermediate_size: wanted at least 1 for the dense layers, got {m.intermediate_size}"
    if any(sparse) and m.moe_intermediate_size < 1:
        yield f"model.moe_intermediate_size: wanted at least 1 for the experts, got {m.moe_intermediate_size}"
    if any(sparse) and not 1 <= m.num_experts_per_tok <= m.num_experts:
        yield (
            f"model.num_experts_per_tok: wanted 1 to model.num_experts ({m.num_experts}), got {m.num_experts_per_tok}"
        )


def _rows(experiment: Experiment) -> Iterator[str]:
    """A rollout batch falls into whole mini-batches and micro-batches."""
    rows = experiment.sampling.prompts * experiment.sampling.group
    minibatches, micro = experiment.schedule.minibatches, experiment.schedule.microbatch_rows
    if rows % minibatches:
        yield f"schedule.minibatches: wanted a divisor of the {rows} rows of a rollout batch, got {minibatches}"
    elif micro and rows // minibatches % micro:
        yield f"schedule.microbatch_rows: wanted a divisor of a mini-batch's {rows // minibatches} rows, got {micro}"


def _mesh(experiment: Experiment, devices: int | None, slices: tuple[int, int]) -> Iterator[str]:
    """The axes fit the devices, and what is split over them comes in multiples."""
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
        yield from _sampler_mesh(experiment, experiment.placement, slices[1])
    try:
        sizes = sharding.mesh_shape(mesh, devices, experiment.model, slices=slices[0])
    except UserError as problem:
        yield str(problem)
        return
    shards = sharding.batch_shards(sizes)
    rows = experiment.sampling.prompts * experiment.sampling.group // experiment.schedule.minibatches
    split = {"sampling.prompts": experiment.sampling.prompts}
    if experiment.schedule.microbatch_rows:
        split["schedule.microbatch_rows"] = experiment.schedule.microbatch_rows
    else:
        split["schedule.minibatches"] = rows
    if experiment.warm_start is not None:
        split["warm_start.rows"] = experiment.warm_start.rows
    for key, count in split.items():
        if count % shards:
            what = f"{count} rows in a mini-batch" if key == "schedule.minibatches" else str(count)
            yield f"{key}: wanted a multiple of the {shards} devices that rows are split over, got {what}"
    yield from sharding.mismatches(sizes, experiment.model)


def _sampler_mesh(experiment: Experiment, placement: Placement, slices: int) -> Iterator[str]:
    """The same for the sampler's own devices."""
    try:
        sizes = sharding.mesh_shape(placement.mesh, placement.devices, experiment.model, slices=slices)
    except UserError as problem:
        yield f"placement.{problem}"
        return
    if experiment.sampling.prompts % (shards := sharding.batch_shards(sizes)):
        got = experiment.sampling.prompts
        yield f"sampling.prompts: wanted a multiple of the {shards} devices of placement.mesh for rows, got {got}"
    yield from (f"placement: {misfit}" for misfit in sharding.mismatches(sizes, experiment.model))
