"""Compiles the programs of a run for any devices from shapes alone, and computes the memory of each on a device.

They are the run's own functions; only their arguments are `ShapeDtypeStruct`s: no array is made. A test compares the
abstract minibatch with one that a rollout is split into.

The sampler's layers are unrolled (`model.decoding`), so compiling all of a large model takes up to an hour. Where a
pattern of layers repeats, each repetition adds the same instructions, so that bytes moved, bytes sent and memory are
linear in their number: two small programs, of fewer repetitions, are compiled and extrapolated. What the compiler does
across layers, such as prefetching, differs a little from layer to layer. One layer would not do: the compiler keeps
most of its weights on chip from token to token.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from gspax.config import (
    Experiment,
    ModelConfig,
    Sampling,
    expert_id_dtype,
    held_teachers,
    layers_of,
    row_shape,
    sampling_mask_size,
    sparse_layers,
    teacher_models,
    teacher_row_shape,
    token_id_dtype,
    updates_per_step,
    with_vocabulary,
)
from gspax.learner.hidden import make_hidden
from gspax.learner.optimizer import make_optimizer
from gspax.learner.state import TrainedPolicy, abstract_params, abstract_state
from gspax.learner.teacher import Teach, make_passes
from gspax.learner.updates import Steps, make_steps
from gspax.model.decoding import LayerCache, heads_axis
from gspax.model.low_rank import partition
from gspax.model.passes import Passes
from gspax.model.sizes import sampler_sizes, with_carried
from gspax.model.terms.teacher import TeacherTerm, earlier_parameters
from gspax.model.transformer import head_params
from gspax.parallel.sharding import batch_shards, named_sharding, token_spec
from gspax.sampler import continuous_batching, sampler
from gspax.sampler.inference_weights import abstract_inference_weights, copier
from gspax.sampler.state import Prompts, Replies, SampleOptions, State, row_axis
from gspax.tools.aot import hlo
from gspax.tools.aot.chips import Topology
from gspax.types import Array, Batch, Params, Rollout, TrainState

TRAIN, SCORE, COPY, ROLLOUT = "train step", "old log-probs", "inference weights", "rollout"
TEACHER, BEHAVIOR = "teacher", "policy that sampled"
PROMPTS, TURNS, REPLIES = "prompts", "turns", "replies"  # of multi-turn rollouts, instead of the rollout
SAMPLER = (COPY, ROLLOUT, PROMPTS, TURNS, REPLIES)  # run on the sampler's mesh

GB = 1e9
Tree = TypeVar("Tree")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to compile, and the memory that is in use while it runs."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    resident: int  # bytes that the run keeps on each device and does not pass to the program
    runs: int = 1  # in a step
    model: ModelConfig | None = None  # of a teacher's; None: the policy's


def make_programs(
    experiment: Experiment,
    mesh: jax.sharding.Mesh,
    sampler_mesh: jax.sharding.Mesh,
) -> list[Program]:
    """Make the programs of the learner and of the sampler.

    They are the train step, the log-probs of a minibatch (old ones; the reference's too), the teachers' passes, the
    inference weights of a colocated sampler, and the rollout: with an environment, the three programs of multi-turn
    rollouts.

    Prompts have their maximum length, replies `reply_tokens`. The devices of the meshes need not exist.

    Args:
      experiment: determines the parameters and the shapes of the programs.
      mesh: the learner's mesh.
      sampler_mesh: the sampler's mesh.
    """
    passes, model, weights_dtype = Passes(experiment), experiment.model, experiment.sampling.weights_dtype
    optimizer = make_optimizer(experiment.optimizer, experiment.trained.dtype)
    state = abstract_state(TrainedPolicy(model, mesh, optimizer, experiment.lora, passes.terms))
    batch = abstract_batch(experiment, mesh)
    steps = make_steps(experiment, optimizer, mesh, worst_case=True)
    params = device_bytes(state.params)
    heads, held = _abstract_heads(passes, state, mesh), _held_bytes(passes, state, mesh)
    learner_bytes = device_bytes(state) + held  # throughout the run
    other_batches = (experiment.schedule.minibatches - 1) * device_bytes(batch)
    scoring = learner_bytes - params + other_batches
    if experiment.placement is not None and experiment.placement.staleness > 0:
        # Log-probs do not wait for the parameters that are on their way to the sampler.
        scoring += device_bytes(abstract_inference_weights(model, mesh, weights_dtype))
    replayed = batch.expert_BLTA if passes.samples_experts else None
    scored = batch.tokens_BT, batch.segment_BT, batch.mask_BT, replayed, batch.prefix_BT
    score = _lower(steps.score, state.params, *scored, kept_BTK=batch.kept_BTK)
    scores = len(steps.scored) + passes.first_policy * experiment.schedule.minibatches
    copy = Program(
        name=COPY,
        lower=_lower(copier(model, sampler_mesh, weights_dtype), state.params),
        resident=learner_bytes - params,
    )
    return [
        Program(
            name=TRAIN,
            lower=_lower(steps.update, state, batch, False, *([heads] if heads else [])),
            resident=held - device_bytes(heads) + other_batches,
            runs=updates_per_step(experiment.schedule),
        ),
        Program(name=SCORE, lower=score, resident=scoring, runs=scores),
        *_make_readers(passes, steps, (state, batch), learner_bytes + other_batches, mesh),
        *([] if experiment.placement is not None else [copy]),
        *_make_sampler(experiment, state, sampler_mesh, learner_bytes),
    ]


def _abstract_heads(passes: Passes, state: TrainState, mesh: jax.sharding.Mesh) -> tuple[Params, ...]:
    """Return the heads of other models that updates read."""
    if passes.sampling_policy:
        return (head_params(state.params),)
    if (teacher := passes.experiment.teacher) is None or TeacherTerm(settings=teacher).comparison is None:
        return ()
    models = held_teachers(teacher, passes.experiment.model)
    return tuple(head_params(abstract_params(model, mesh)) for model in models)


def _held_bytes(passes: Passes, state: TrainState, mesh: jax.sharding.Mesh) -> int:
    """Return a device's bytes of what a run holds besides the state: parameters of terms, and of the first policy.

    The head of the policy that sampled is a copy of its own.
    """
    policy, (trained, _) = passes.experiment, partition(state.params)
    held = device_bytes(trained) if passes.first_policy else 0
    held += device_bytes(head_params(state.params)) if passes.sampling_policy else 0
    for each in passes.held(policy.trained.dtype):
        if not each.in_state:
            other = each.model and abstract_params(with_vocabulary(each.model, policy.model), mesh, each.dtype)
            held += device_bytes(other or _in_dtype(trained, each.dtype))
    return held


def _in_dtype(params: Params, dtype: str) -> Params:
    return jax.tree.map(lambda leaf: leaf.update(dtype=jnp.dtype(dtype)), params)


def _make_readers(
    passes: Passes, steps: Steps, arrays: tuple[TrainState, Batch], held: int, mesh: jax.sharding.Mesh
) -> Iterator[Program]:
    """Yield the passes of other models over a minibatch: each teacher's, and that of the policy that sampled.

    Args:
      arrays: the state, and a minibatch.
      held: bytes that the learner's devices hold, the teachers' parameters and the minibatches included.
    """
    (state, batch), experiment = arrays, passes.experiment
    model, teacher = experiment.model, experiment.teacher
    read: list[Array | None] = [batch.tokens_BT, batch.segment_BT, batch.mask_BT, batch.prefix_BT]
    found: list[tuple[str, ModelConfig, Teach, Params]] = []
    if passes.sampling_policy:
        found = [(BEHAVIOR, model, make_hidden(model, steps.settings, scope="sampling_policy"), state.params)]
    elif teacher is not None and teacher.score is None:
        shape = teacher_row_shape(teacher, experiment.sampling, experiment.schedule, batch_shards(mesh))
        models = held_teachers(teacher, model)
        params = tuple(abstract_params(each, mesh) for each in models) or (earlier_parameters(state),)
        models = models or (model,)
        names = [TEACHER] if len(models) == 1 else [f"{TEACHER} {number + 1}" for number in range(len(models))]
        found = list(zip(names, models, make_passes(teacher, model, steps.settings, shape), params, strict=True))
        if shape is not None:
            rows = partial(abstract_rows, mesh, (shape.rows, shape.length))
            read = [rows(jnp.int32), rows(jnp.int32), rows(jnp.bool_), None]
    for name, of, function, params_of in found:
        lower, resident = _lower(function, params_of, *read), held - device_bytes(params_of)
        yield Program(name=name, lower=lower, resident=resident, runs=experiment.schedule.minibatches, model=of)


def _lower(function: Callable[..., object], *arguments: object, **settings: object) -> Callable[[], jax.stages.Lowered]:
    """Make a function that lowers a jitted one for these arguments."""
    return partial(cast(jax.stages.Wrapped, function).lower, *arguments, **settings)


def _make_sampler(
    experiment: Experiment, state: TrainState, mesh: jax.sharding.Mesh, learner_bytes: int
) -> list[Program]:
    """Make the sampler's programs, for devices that hold `learner_bytes` throughout the run if shared with the learner.

    Each rollout that is sampled ahead adds inference weights and a rollout to the devices of a disaggregated sampler.
    """
    model, placement = experiment.model, experiment.placement
    params = abstract_inference_weights(model, mesh, experiment.sampling.weights_dtype)
    key = cast(Array, jax.ShapeDtypeStruct(state.key.shape, state.key.dtype, sharding=named_sharding(mesh)))
    resident = learner_bytes
    if placement is not None:
        rollouts = placement.staleness if placement.partial is None else 1
        rollout_bytes = device_bytes(abstract_rollout(model, experiment.sampling, mesh))
        resident = rollouts * (device_bytes(params) + rollout_bytes)
    sampling = replace(experiment.sampling, draft_cost=0.0)  # else two kinds of passes would be counted as one
    sampling = sampler.split_groups(with_carried(sampling, placement), mesh)
    P, rows = sampling.prompts, partial(abstract_rows, mesh)
    prompts = Prompts(rows((P, sampling.max_prompt_tokens), jnp.int32), rows((P,), jnp.int32), rows((P,), jnp.uint32))
    if sampling.drafts:
        prompts = prompts._replace(earlier_PGC=rows((P, sampling.group, sampling.max_tokens), jnp.int32))
    admits = placement is not None and placement.partial is not None
    options = replace(
        sampler.make_options(model, experiment.tokenizer, sampling, mesh),
        keep_versions=admits,
        mask_size=sampling_mask_size(sampling, model.vocab_size),
        admits=admits,
        turns=experiment.environment is not None,
    )
    if options.turns:
        return _make_conversations(params, prompts, key, options, experiment.turns.limit - 1, resident)
    rollout = _lower(sampler._generate, params, prompts, key, options=options)
    return [Program(name=ROLLOUT, lower=rollout, resident=resident)]


def reply_tokens(max_tokens: int) -> int:
    """Return the assumed length of an environment's reply with the stop token before it: 128, or less if too long.

    >>> reply_tokens(2048), reply_tokens(100)
    (128, 64)
    """
    return 1 << (min(128, max_tokens).bit_length() - 1)


def _make_conversations(
    params: Params, prompts: Prompts, key: Array, options: SampleOptions, replies: int, resident: int
) -> list[Program]:
    """Make the prefill of the prompts, a token of every slot, and the prefill of a reply to each of them.

    Prefills sample a token too; where there are fewer slots than conversations, slots have several, one after another.
    """
    sampling, rows = options.sampling, partial(abstract_rows, options.mesh)
    version = jax.ShapeDtypeStruct((), jnp.int32)
    B, reply = sampling.prompts * sampling.group, reply_tokens(sampling.max_tokens)
    state = _abstract_state(params, prompts, key, options)
    reply_rows = Replies(rows((B, reply - 1), jnp.int32), rows((B,), jnp.int32))
    turns = math.ceil(B / sampler_sizes(options.model, sampling, dict(options.mesh.shape)).slots)
    sampled = max(0, sampling.max_tokens - 1 - replies * reply)
    start = _lower(sampler.start, params, prompts, key, options=options)
    advance = _lower(sampler.advance_chunk, params, state, key, version, options=options)
    resume = _lower(sampler.resume, params, state, reply_rows, key, version, options=options)
    return [
        Program(name=PROMPTS, lower=start, resident=resident),
        Program(name=TURNS, lower=advance, resident=resident, runs=turns * sampled),
        Program(name=REPLIES, lower=resume, resident=resident, runs=turns * replies),
    ]


def _abstract_state(params: Params, prompts: Prompts, key: Array, options: SampleOptions) -> State:
    """Return `ShapeDtypeStruct`s, with shardings, of the sampler's state between two tokens."""
    mesh = options.mesh
    state = jax.eval_shape(partial(continuous_batching.start, options=options), params, prompts, key)
    axis = row_axis(mesh, len(state.rows.length_B), len(state.rows.active_W))

    def place(tree: Tree, *axes: str) -> Tree:
        sharding = named_sharding(mesh, *axes)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    def place_layer(layer: LayerCache) -> LayerCache:
        heads = heads_axis(jax.tree.leaves(layer.prompt)[0].shape[1])
        return LayerCache(place(layer.prompt, "batch", heads), place(layer.completion, axis, heads))

    cache = tuple(map(place_layer, state.cache))
    return replace(state, rows=place(state.rows, axis), step=place(state.step), cache=cache)


def abstract_batch(experiment: Experiment, mesh: jax.sharding.Mesh) -> Batch:
    """Return `ShapeDtypeStruct`s, with shardings, of a minibatch as an update receives it."""
    config, schedule, passes = experiment.model, experiment.schedule, Passes(experiment)
    B, T, _, packed = row_shape(experiment.sampling, schedule, batch_shards(mesh))
    experts = B, sparse_layers(config), T, config.num_experts_per_tok
    rows = partial(abstract_rows, mesh)
    of_tokens = packed or passes.token_advantages
    return Batch(
        tokens_BT=rows((B, T), jnp.int32),
        segment_BT=rows((B, T), jnp.int32),
        mask_BT=rows((B, T), jnp.bool_),
        old_logp_BT=rows((B, T), jnp.float32),
        advantage=rows((B, T) if of_tokens else (B,), jnp.float32),
        prefix_BT=rows((B, T), jnp.int32) if schedule.share_prompts else None,
        sampler_logp_BT=rows((B, T), jnp.float32),
        ref_logp_BT=rows((B, T), jnp.float32) if passes.first_policy else None,
        version_BT=rows((B, T), jnp.int32) if passes.old_logp == "update" else None,
        **dict.fromkeys(passes.selections, rows((B, T), jnp.float32)),
        **_teacher_arrays(passes, mesh, B, T),
        sampler_hidden_BTE=_hidden(mesh, (B, T), config) if passes.sampling_policy else None,
        expert_BLTA=rows(experts, expert_id_dtype(config)) if passes.reads_experts else None,
        router_logp_BLTA=rows(experts, jnp.float32) if passes.keeps_router_logp else None,
        kept_BTK=abstract_sets(config, experiment.sampling, mesh, (B, T)),
    )


def _teacher_arrays(passes: Passes, mesh: jax.sharding.Mesh, rows: int, length: int) -> dict[str, Array | None]:
    """Return `ShapeDtypeStruct`s of a minibatch's arrays of a teacher."""
    experiment = passes.experiment
    if (teacher := experiment.teacher) is None:
        return {}
    if TeacherTerm(settings=teacher).comparison is None:
        return {"teacher_logp_BT": abstract_rows(mesh, (rows, length), jnp.float32)}
    models = teacher_models(teacher) or (experiment.model,)
    number_BT = abstract_rows(mesh, (rows, length), jnp.float32) if len(models) > 1 else None
    return {"teacher_hidden_BTE": _hidden(mesh, (rows, length), *models), "teacher_BT": number_BT}


def _hidden(mesh: jax.sharding.Mesh, rows: tuple[int, int], *models: ModelConfig) -> Array:
    """Return the `ShapeDtypeStruct` of a minibatch's last hidden states of other models."""
    B, T = rows
    shape = B, T + -T % mesh.shape["context"], max(model.hidden_size for model in models)
    sharding = jax.sharding.NamedSharding(mesh, token_spec(mesh, *shape[:2]))
    return cast(Array, jax.ShapeDtypeStruct(shape, jnp.dtype(models[0].dtype), sharding=sharding))


def abstract_rollout(model: ModelConfig, sampling: Sampling, mesh: jax.sharding.Mesh) -> Rollout:
    """Return `ShapeDtypeStruct`s, with shardings, of the sampler's rollout."""
    B, T = sampling.prompts * sampling.group, sampling.max_prompt_tokens + sampling.max_tokens
    rows = partial(abstract_rows, mesh)
    return Rollout(
        tokens_BT=rows((B, T), jnp.int32),
        mask_BT=rows((B, T), jnp.bool_),
        logp_BT=rows((B, T), jnp.float32),
        prompt_length_B=rows((B,), jnp.int32),
        length_B=rows((B,), jnp.int32),
        finished_B=rows((B,), jnp.bool_),
        kept_BTK=abstract_sets(model, sampling, mesh, (B, T)),
        cut_BT=rows((B, T), jnp.bool_) if sampling.mask_replay else None,
    )


def abstract_sets(
    model: ModelConfig, sampling: Sampling, mesh: jax.sharding.Mesh, shape: tuple[int, int]
) -> Array | None:
    """Return the `ShapeDtypeStruct` of the sampling masks of tokens [B, T]; None without `Sampling.mask_replay`."""
    K = sampling_mask_size(sampling, model.vocab_size)
    return abstract_rows(mesh, (*shape, K), token_id_dtype(model)) if K else None


def abstract_rows(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return the `ShapeDtypeStruct` of an array with rows sharded as a batch."""
    return cast(Array, jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, "batch")))


def device_bytes(tree: Params | TrainState | Batch | Rollout) -> int:
    """Count the bytes of device memory that one device holds of a tree of `ShapeDtypeStruct`s with shardings.

    The padding of layouts is not included, and neither are arrays in the host's memory.
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != "pinned_host"
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes on one device while a program runs."""

    arguments: int
    results: int  # without those that reuse the memory of arguments
    temporaries: int
    code: int
    peak: int  # the compiler's peak of the first three, without host memory
    resident: int  # bytes that the run keeps on the device and does not pass to the program

    @property
    def total(self) -> int:
        return self.peak + self.code + self.resident


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The outcome of compiling a program: its memory and its text, or the compiler's error."""

    program: Program
    seconds: float
    memory: Memory | None = None
    error: str = ""
    text: str = field(default="", repr=False)
    few: Few | None = None  # what the program was extrapolated from, and the two programs
    small: tuple[Compiled, ...] = ()

    @property
    def name(self) -> str:
        return self.program.name

    @functools.cached_property
    def module(self) -> hlo.Module:
        return hlo.parse(self.text)


def compile_program(program: Program) -> Compiled:
    """Lower and compile a program. An error of the compiler, usually lack of memory, is part of the result."""
    began = time.perf_counter()
    try:
        with _no_persistent_cache():
            compiled = program.lower().compile()
    except jax.errors.JaxRuntimeError as problem:
        return Compiled(program=program, seconds=time.perf_counter() - began, error=summarize_error(str(problem)))
    stats, text = compiled.memory_analysis(), compiled.as_text()
    assert stats is not None and text is not None  # on TPU and CPU there are both
    # The compiler counts host memory in its peak, where temporaries of both may not be at the same time.
    host = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    arguments, results = stats.argument_size_in_bytes, stats.output_size_in_bytes - stats.alias_size_in_bytes
    memory = Memory(
        arguments=arguments,
        results=results,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=min(stats.peak_memory_in_bytes - host, arguments + results + stats.temp_size_in_bytes),
        resident=program.resident,
    )
    return Compiled(program=program, seconds=time.perf_counter() - began, memory=memory, text=text)


@contextlib.contextmanager
def _no_persistent_cache() -> Iterator[None]:
    """Write nothing to jax's persistent cache, which cannot read back programs for absent devices."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def summarize_error(message: str) -> str:
    """Return the line of the compiler's message that has the numbers, at most 300 characters, without a full stop."""
    lines = message.strip().splitlines()
    line = next((line for line in lines if re.search(r"\d.*\bhbm\b", line, re.IGNORECASE)), lines[0])
    return line.strip()[:300].rstrip(".")


class Few(NamedTuple):
    """Two models of fewer layers, for extrapolating the programs of a whole model."""

    less: int  # layers of one model
    more: int  # layers of the other model, which repeats the pattern once more
    layers: int  # of the whole model

    def extrapolate(self, less: float, more: float) -> float:
        """Extrapolate a quantity that is linear in the number of repetitions, and not negative."""
        return max(0.0, less + (self.layers - self.less) * (more - less) / (self.more - self.less))


def few_layers(model: ModelConfig) -> Few | None:
    """Choose leading layers and at least four layers of a repeated pattern; None if these are not fewer than all.

    A pattern has two layers or more. Of two and three equal layers, the chips of v5e and v6e hold most of the weights
    from token to token, which moved their figures by up to 18 %.
    """
    layers = layers_of(model)
    for period in range(2, len(layers) // 2 + 1):
        pairs = zip(layers, layers[period:], strict=False)
        first = 1 + max((number for number, (a, b) in enumerate(pairs) if a != b), default=-1)
        less = first + (len(layers) - first) % period + period * -(-4 // period)  # whole patterns follow
        if less + less + period < len(layers):
            return Few(less, less + period, len(layers))
    return None


def compile_few(program: Program, make: Callable[[int], Program], few: Few) -> Compiled:
    """Extrapolate a program from two programs of fewer layers by `make`; an error of either is its error."""
    small = compile_program(make(few.less)), compile_program(make(few.more))
    seconds = sum(compiled.seconds for compiled in small)
    less, more = (compiled.memory for compiled in small)
    if less is None or more is None:
        return Compiled(program=program, seconds=seconds, error=small[0].error or small[1].error)
    sizes = {name: round(few.extrapolate(size, getattr(more, name))) for name, size in vars(less).items()}
    memory = Memory(**sizes | {"resident": program.resident})
    return Compiled(program=program, seconds=seconds, memory=memory, text=small[1].text, few=few, small=small)


def describe_misfits(compiled: Sequence[Compiled], topology: Topology) -> list[str]:
    """Return one sentence for each program that does not compile or does not fit the chip's memory."""
    lines = []
    for program in compiled:
        if program.error:
            lines.append(f"Does not compile for {topology}: the {program.name}: {program.error}")
        elif program.memory is not None and program.memory.total > topology.chip.memory:
            lines.append(
                f"Does not fit {topology}: the {program.name} needs {program.memory.total / GB:.2f} GB on each device, "
                f"a program may use {topology.chip.memory / GB:.2f}"
            )
    return lines
