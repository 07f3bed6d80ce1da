"""The programs that a run of an experiment compiles, lowered for any devices from shapes alone: no array is made.

They are the run's own functions; only their arguments are `ShapeDtypeStruct`s. A test compares the described minibatch
with one that a rollout is cut into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from gspax.config import (
    Experiment,
    ModelConfig,
    Placement,
    Sampling,
    Turns,
    expert_id_dtype,
    is_sparse,
    row_shape,
    trained_dtype,
    updates_per_step,
)
from gspax.learner.optimizer import make_optimizer
from gspax.learner.programs import make_steps
from gspax.learner.state import abstract_state
from gspax.model.decoding import LayerCache
from gspax.model.low_rank import partition
from gspax.model.sizes.counts import with_carried
from gspax.model.sizes.old_policy import reads_experts
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.sampler import chunks, conversations, engine, sampler
from gspax.sampler.engine import Prompts, SampleOptions
from gspax.sampler.inference_weights import abstract_inference_weights, copier
from gspax.types import Batch, Rollout, TrainState

TRAIN, SCORE, COPY, ROLLOUT = "train step", "old log-probs", "inference weights", "rollout"
PROMPTS, TURNS, REPLIES = "prompts", "turns", "replies"  # of conversations, instead of the rollout
SAMPLER = (COPY, ROLLOUT, PROMPTS, TURNS, REPLIES)  # run on the sampler's mesh


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to compile, and the memory that it runs beside."""

    name: str
    lower: Callable[[], Any]  # -> jax.stages.Lowered
    resident: int  # bytes that the run keeps on each device and does not pass to the program
    runs: int = 1  # in a step


def make_programs(
    experiment: Experiment, mesh: jax.sharding.Mesh, sampler_mesh: jax.sharding.Mesh | None = None
) -> list[Program]:
    """The train step, the scoring of a minibatch (old log-probs; the reference's too), the copy of the parameters that
    a colocated sampler reads, and the sampler: with an environment, the three programs of its conversations.

    Prompts have their maximum length, replies `reply_tokens`. The devices of the meshes need not exist.

    Args:
      mesh: the learner's.
      sampler_mesh: the sampler's; default: the learner's.
    """
    optimizer = make_optimizer(experiment.optimizer, trained_dtype(experiment.model, experiment.lora))
    state = abstract_state(experiment.model, optimizer, mesh, experiment.lora)
    batch = abstract_batch(experiment, mesh)
    reference: Any = ()
    if experiment.reference is not None:
        reference = partition(state.params)[0]
    batches = experiment.schedule.minibatches * device_bytes(batch)
    held = device_bytes(state) + device_bytes(reference)
    steps = make_steps(experiment, optimizer, mesh, worst_case=True)

    def train() -> Any:
        return cast(Any, steps.update).lower(state, batch, False)

    def score() -> Any:
        replayed = batch.expert_BLTA if experiment.routing_replay == "sampler" else None
        arrays = batch.tokens_BT, batch.segment_BT, batch.mask_BT, replayed, batch.prefix_BT
        return cast(Any, steps.score).lower(state.params, *arrays)

    scoring = held + batches - device_bytes(state.params) - device_bytes(batch)
    if experiment.placement is not None and experiment.placement.staleness > 0:
        # Scoring does not wait for the parameters that are on their way to the sampler.
        scoring += device_bytes(abstract_inference_weights(experiment.model, mesh, experiment.sampling.weights_dtype))
    sampler_mesh = mesh if sampler_mesh is None else sampler_mesh
    copy = Program(
        name=COPY,
        lower=lambda: copier(experiment.model, sampler_mesh, experiment.sampling.weights_dtype).lower(state.params),
        resident=held - device_bytes(state.params),
    )
    beside_training = held + batches - device_bytes(state) - device_bytes(batch)
    scores = len(steps.scored) + (experiment.reference is not None) * experiment.schedule.minibatches
    return [
        Program(name=TRAIN, lower=train, resident=beside_training, runs=updates_per_step(experiment.schedule)),
        Program(name=SCORE, lower=score, resident=scoring, runs=scores),
        *([] if experiment.placement is not None else [copy]),
        *_make_sampler(
            experiment.model,
            experiment.sampling,
            state,
            sampler_mesh,
            placement=experiment.placement,
            turns=None if experiment.environment is None else experiment.turns,
            stop_ids=experiment.tokenizer.stop_ids,
            held=held,
        ),
    ]


def _make_sampler(
    model: ModelConfig,
    sampling: Sampling,
    state: TrainState,
    mesh: jax.sharding.Mesh,
    *,
    placement: Placement | None,
    turns: Turns | None,
    stop_ids: tuple[int, ...],
    held: int,
) -> list[Program]:
    """The sampler, on devices that hold `held` bytes throughout the run if they are the learner's.

    Each rollout batch drawn ahead adds inference weights and a rollout to the devices of a disaggregated sampler.
    """
    params = abstract_inference_weights(model, mesh, sampling.weights_dtype)
    key: Any = jax.ShapeDtypeStruct(state.key.shape, state.key.dtype, sharding=named_sharding(mesh))
    resident = held
    if placement is not None:
        batches = placement.staleness if placement.partial is None else 1
        resident = batches * (device_bytes(params) + device_bytes(abstract_rollout(sampling, mesh)))
    split = sampler.split_groups(with_carried(sampling, placement), mesh)
    prompts = _abstract_prompts(split, mesh)
    admits = placement is not None and placement.partial is not None
    options = SampleOptions(
        model=model,
        sampling=split,
        stop_ids=stop_ids,
        mesh=mesh,
        keep_versions=admits,
        admits=admits,
        turns=turns is not None,
    )
    if turns is not None:
        return _make_conversations(params, prompts, key, options, replies=turns.limit - 1, resident=resident)
    return [
        Program(
            name=ROLLOUT,
            lower=lambda: sampler._generate.lower(params, prompts, key, options=options),
            resident=resident,
        )
    ]


def reply_tokens(max_tokens: int) -> int:
    """The assumed length of an environment's reply, with the stop token before it: 128, or less if that is too long.

    >>> reply_tokens(2048), reply_tokens(100)
    (128, 64)
    """
    return 1 << (min(128, max_tokens).bit_length() - 1)


def _make_conversations(
    params: Any, prompts: Prompts, key: Any, options: SampleOptions, *, replies: int, resident: int
) -> list[Program]:
    """The prefill of the prompts, a token of every slot, and the prefill of a reply to each of them.

    Prefills sample a token too; where there are fewer slots than conversations, slots have several, one after another.
    """
    sampling, version = options.sampling, jax.ShapeDtypeStruct((), jnp.int32)
    B, reply = sampling.prompts * sampling.group, reply_tokens(sampling.max_tokens)

    def state() -> engine.State:
        return _abstract_state(params, prompts, key, options)

    def advance() -> Any:
        return cast(Any, chunks.advance_chunk).lower(params, state(), key, version, options=options)

    def resume() -> Any:
        rows = ((B, reply - 1), jnp.int32), ((B,), jnp.int32)
        given = conversations.Replies._make(cast(Any, _abstract_rows(options.mesh, *each)) for each in rows)
        return cast(Any, chunks.resume).lower(params, state(), given, key, version, options=options)

    def start() -> Any:
        return cast(Any, chunks.start).lower(params, prompts, key, options=options)

    turns = math.ceil(B / engine.count_slots_of(options, sampling.prompts))
    sampled = max(0, sampling.max_tokens - 1 - replies * reply)
    return [
        Program(name=PROMPTS, lower=start, resident=resident),
        Program(name=TURNS, lower=advance, resident=resident, runs=turns * sampled),
        Program(name=REPLIES, lower=resume, resident=resident, runs=turns * replies),
    ]


def _abstract_state(params: Any, prompts: Prompts, key: Any, options: SampleOptions) -> engine.State:
    """`ShapeDtypeStruct`s, with shardings, of the engine between two tokens."""
    mesh = options.mesh
    state = jax.eval_shape(partial(engine.start, options=options), params, prompts, key)
    axis = engine.row_axis(mesh, len(state.rows.length_B), len(state.rows.active_W))

    def place(tree: Any, *axes: str) -> Any:
        sharding = named_sharding(mesh, *axes)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)

    cache = tuple(
        LayerCache(place(each.prompt, "batch", "heads"), place(each.completion, axis, "heads")) for each in state.cache
    )
    return replace(state, rows=place(state.rows, axis), step=place(state.step), cache=cache)


def abstract_batch(experiment: Experiment, mesh: jax.sharding.Mesh) -> Batch:
    """`ShapeDtypeStruct`s, with shardings, of a minibatch as an update receives it."""
    config, sampling = experiment.model, experiment.sampling
    rows, length, _, packed = row_shape(sampling, experiment.schedule, batch_shards(mesh))
    shape = rows, length
    columns: dict[str, Any] = {
        "tokens_BT": (shape, jnp.int32),
        "segment_BT": (shape, jnp.int32),
        "mask_BT": (shape, jnp.bool_),
        "old_logp_BT": (shape, jnp.float32),
        "advantage": (shape if packed or experiment.turns.credit == "turn" else shape[:1], jnp.float32),
        "sampler_logp_BT": (shape, jnp.float32),
    }
    if experiment.schedule.share_prompts:
        columns["prefix_BT"] = (shape, jnp.int32)
    if experiment.reference is not None:
        columns["ref_logp_BT"] = (shape, jnp.float32)
    if reads_experts(experiment.regularizers, experiment.routing_replay, experiment.router_shift):
        experts = (rows, _sparse_layers(config), shape[1], config.num_experts_per_tok)
        columns["expert_BLTA"] = (experts, jnp.dtype(expert_id_dtype(config)))
        if experiment.router_shift is not None:
            columns["router_logp_BLTA"] = (experts, jnp.float32)
    described: dict[str, Any] = {name: _abstract_rows(mesh, *column) for name, column in columns.items()}
    return Batch(**described)


def abstract_rollout(sampling: Sampling, mesh: jax.sharding.Mesh) -> Rollout:
    """`ShapeDtypeStruct`s, with shardings, of what the sampler returns."""
    rows = (sampling.prompts * sampling.group,)
    shape = (*rows, sampling.max_prompt_tokens + sampling.max_tokens)
    described: dict[str, Any] = {
        "tokens_BT": _abstract_rows(mesh, shape, jnp.int32),
        "mask_BT": _abstract_rows(mesh, shape, jnp.bool_),
        "logp_BT": _abstract_rows(mesh, shape, jnp.float32),
        "prompt_length_B": _abstract_rows(mesh, rows, jnp.int32),
        "length_B": _abstract_rows(mesh, rows, jnp.int32),
        "finished_B": _abstract_rows(mesh, rows, jnp.bool_),
    }
    return Rollout(**described)


def _abstract_prompts(sampling: Sampling, mesh: jax.sharding.Mesh) -> Prompts:
    """Tokens, lengths and ids of the prompts of a rollout."""
    P, S = sampling.prompts, sampling.max_prompt_tokens
    shapes = ((P, S), jnp.int32), ((P,), jnp.int32), ((P,), jnp.uint32)
    return Prompts._make(cast(Any, _abstract_rows(mesh, *each)) for each in shapes)


def _abstract_rows(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, "batch"))


def _sparse_layers(config: ModelConfig) -> int:
    return sum(is_sparse(config, layer) for layer in range(config.num_hidden_layers))


def device_bytes(tree: Any) -> int:
    """Bytes of device memory that one device holds of a tree of `ShapeDtypeStruct`s with shardings.

    The padding of layouts is not included, and neither are arrays in the host's memory.
    """
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != "pinned_host"
    )
