"""The programs that a run of an experiment compiles, lowered for any devices from shapes alone: no array is made.

They are the run's own functions; only their arguments are described instead of made. A test compares the described
batch with the one that a rollout is cut into.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspax.config import Experiment, expert_id_dtype, is_sparse
from gspax.learner.optimizer import optimizer_of
from gspax.learner.state import abstract_params, abstract_state
from gspax.learner.train_step import make_steps
from gspax.rollout import sampler
from gspax.rollout.placement import abstract_pushed
from gspax.sharding import named_sharding
from gspax.types import Batch, Rollout, TrainState

TRAIN, SCORE, ROLLOUT = "train step", "old log-probs", "rollout"


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    lower: Callable[[], Any]  # -> jax.stages.Lowered
    besides: int  # bytes that the run holds on each device while this runs, and does not give it


def programs(
    experiment: Experiment, mesh: jax.sharding.Mesh, sampler_mesh: jax.sharding.Mesh | None = None
) -> list[Program]:
    """The train step, the scoring of a mini-batch (old log-probs; the reference's too) and the sampler.

    The sampler's prompts have their greatest length. The meshes may be of devices that are not there; the sampler's is
    the learner's unless the experiment places them apart.
    """
    optimizer = optimizer_of(experiment)
    state = abstract_state(experiment.model, optimizer, mesh, experiment.lora)
    batch = abstract_batch(experiment, mesh)
    reference: Any = ()
    if experiment.reference is not None and experiment.lora is None:
        reference = abstract_params(experiment.model, mesh)
    batches = experiment.schedule.minibatches * device_bytes(batch)
    held = device_bytes(state) + device_bytes(reference)
    steps: Any = make_steps(experiment, optimizer, mesh)

    def train() -> Any:
        return steps[0].lower(state, batch)

    def score() -> Any:
        return steps[1].lower(state.params, batch.tokens_BT, batch.segment_BT)

    params = device_bytes(state.params)
    scoring = held + batches - params - device_bytes(batch) + _in_flight(experiment, mesh)
    return [
        Program(name=TRAIN, lower=train, besides=held + batches - device_bytes(state) - device_bytes(batch)),
        Program(name=SCORE, lower=score, besides=scoring),
        _rollout(experiment, state, held, mesh if sampler_mesh is None else sampler_mesh),
    ]


def _rollout(experiment: Experiment, state: TrainState, held: int, mesh: jax.sharding.Mesh) -> Program:
    """The sampler. On devices of its own it is given the pushed parameters, and besides it there are those of each
    rollout batch drawn ahead, and as many rollouts."""
    params: Any = state.params
    key: Any = state.key
    besides = held - device_bytes(state.params) - device_bytes(state.key)
    if experiment.placement is not None:
        params = abstract_pushed(experiment.model, mesh)
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=named_sharding(mesh))
        one = device_bytes(params) + device_bytes(abstract_rollout(experiment, mesh))
        besides = experiment.placement.staleness * one

    def lower() -> Any:
        return sampler._generate.lower(
            params,
            *_prompts(experiment, mesh),
            key,
            config=experiment.model,
            sampling=experiment.sampling,
            stop_ids=experiment.tokenizer.stop_ids,
            mesh=mesh,
        )

    return Program(name=ROLLOUT, lower=lower, besides=besides)


def _in_flight(experiment: Experiment, mesh: jax.sharding.Mesh) -> int:
    """Bytes on a learner's device of the parameters on their way to a sampler apart, which scoring does not wait for
    where rollouts are drawn ahead."""
    if experiment.placement is None or experiment.placement.staleness == 0:
        return 0
    return device_bytes(abstract_pushed(experiment.model, mesh))


def abstract_batch(experiment: Experiment, mesh: jax.sharding.Mesh) -> Batch:
    """`ShapeDtypeStruct`s of a minibatch as `learner.minibatches` makes it, with shardings."""
    config, sampling = experiment.model, experiment.sampling
    rows = sampling.prompts * sampling.group // experiment.schedule.minibatches
    shape = (rows, sampling.max_prompt_tokens + sampling.max_tokens)
    columns: dict[str, Any] = {
        "tokens_BT": (shape, jnp.int32),
        "segment_BT": (shape, jnp.int32),
        "mask_BT": (shape, jnp.bool_),
        "old_logp_BT": (shape, jnp.float32),
        "advantage_B": (shape[:1], jnp.float32),
        "sampler_logp_BT": (shape, jnp.float32),
    }
    if experiment.reference is not None:
        columns["ref_logp_BT"] = (shape, jnp.float32)
    if experiment.routing_replay or experiment.regularizers.load_balance:
        sparse = sum(is_sparse(config, layer) for layer in range(config.num_hidden_layers))
        columns["expert_BLTA"] = (
            (rows, sparse, shape[1], config.num_experts_per_tok),
            jnp.dtype(expert_id_dtype(config)),
        )
    described: dict[str, Any] = {name: _rows(mesh, *column) for name, column in columns.items()}
    return Batch(**described)


def abstract_rollout(experiment: Experiment, mesh: jax.sharding.Mesh) -> Rollout:
    """`ShapeDtypeStruct`s of what the sampler hands over, with shardings."""
    sampling = experiment.sampling
    rows = (sampling.prompts * sampling.group,)
    shape = (*rows, sampling.max_prompt_tokens + sampling.max_tokens)
    described: dict[str, Any] = {
        "tokens_BT": _rows(mesh, shape, jnp.int32),
        "mask_BT": _rows(mesh, shape, jnp.bool_),
        "logp_BT": _rows(mesh, shape, jnp.float32),
        "prompt_length_B": _rows(mesh, rows, jnp.int32),
        "length_B": _rows(mesh, rows, jnp.int32),
        "finished_B": _rows(mesh, rows, jnp.bool_),
    }
    return Rollout(**described)


def _prompts(experiment: Experiment, mesh: jax.sharding.Mesh) -> tuple[Any, Any, Any]:
    """Tokens, lengths and ids of the prompts of a rollout."""
    P, S = experiment.sampling.prompts, experiment.sampling.max_prompt_tokens
    return _rows(mesh, (P, S), jnp.int32), _rows(mesh, (P,), jnp.int32), _rows(mesh, (P,), jnp.uint32)


def _rows(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, "batch"))


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of `ShapeDtypeStruct`s with shardings, the padding of layouts and what lies
    in the host's memory left out."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != "pinned_host"
    )
