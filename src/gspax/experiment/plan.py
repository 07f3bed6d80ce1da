"""The dry run: what an experiment would cost, from its numbers alone. No array is made and no device is asked.

Parameters and the cache are exact; activations are an estimate of what the compiler keeps, without fragmentation and
its own scratch space. Parameters, gradients and moments are split over the mesh's axes fsdp, expert and tensor.

Letters: P prompts, G samples per prompt, B = P·G rows, T tokens, V vocabulary, D model, N query heads, K key/value
heads, H head, E experts, A active experts, F expert width, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, get_args

from gspax import optimizers, sharding
from gspax.config import (
    LOGIT_BUDGET,
    SCORE_BUDGET,
    Experiment,
    ModelConfig,
    Remat,
    expert_id_dtype,
    is_sparse,
    trained_dtype,
)
from gspax.experiment.aliases import current_key
from gspax.experiment.counts import active_parameter_count, attention_count, mlp_count, parameter_count, trained_count
from gspax.experiment.description import describe, flatten, show, unwrap
from gspax.protocols import Transform

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `plan` found. Bytes are per device, except the checkpoint's."""

    settings: dict[str, Any]  # dotted key -> value
    overridden: tuple[str, ...]  # keys given on the command line
    mesh: dict[str, int]
    sampler_mesh: dict[str, int] | None  # of a sampler's own devices
    why: str  # the (learner's) mesh is so
    parameters: int
    active_parameters: int
    rows: int  # of a rollout batch
    completion_tokens: int  # drawn in a step, at most
    tokens: int  # prompts and completions that a step trains on, at most
    updates: int  # per step
    steps: int
    warm_start_updates: int
    learner: dict[str, int]  # part -> bytes at the learner's peak
    sampler: dict[str, int]  # part -> bytes at the sampler's peak
    activations: dict[str, int]  # by `model.remat`
    host: int  # bytes of optimiser state in the host's memory, for each device
    checkpoint: int


def plan(experiment: Experiment, devices: int = 1, *, overridden: Collection[str] = ()) -> Plan:
    """The cost of an experiment that `validate` finds nothing wrong with, on so many devices.

    Raises:
      UserError: the mesh does not fit the devices.
    """
    config, sampling, schedule = experiment.model, experiment.sampling, experiment.schedule
    placement = experiment.placement
    own = sharding.mesh_shape(placement.mesh, placement.devices, config) if placement else None
    mesh = sharding.mesh_shape(experiment.mesh, devices - (placement.devices if placement else 0), config)
    rows, length = sampling.prompts * sampling.group, sampling.max_prompt_tokens + sampling.max_tokens
    parameters = parameter_count(config)
    return Plan(
        settings=flatten(describe(experiment)),
        overridden=tuple(map(current_key, overridden)),
        mesh=mesh,
        sampler_mesh=own,
        why=sharding.explain_mesh(experiment.mesh, mesh, config),
        parameters=parameters,
        active_parameters=active_parameter_count(config),
        rows=rows,
        completion_tokens=rows * sampling.max_tokens,
        tokens=rows * length,
        updates=schedule.minibatches,
        steps=schedule.steps,
        warm_start_updates=experiment.warm_start.steps if experiment.warm_start else 0,
        learner=_learner_bytes(experiment, mesh),
        sampler=_sampler_bytes(experiment, own or mesh),
        activations={
            remat: _activation_bytes(replace(experiment, model=replace(config, remat=remat)), mesh)
            for remat in get_args(Remat)
        },
        host=sum(_optimizer_bytes(experiment, mesh).values()) if experiment.optimizer.offload else 0,
        checkpoint=_trained_bytes(experiment) * trained_count(experiment)
        + sum(_optimizer_bytes(experiment, dict.fromkeys(mesh, 1)).values()),
    )


def _learner_bytes(experiment: Experiment, mesh: dict[str, int]) -> dict[str, int]:
    """What is alive during the backward pass of an update."""
    config = experiment.model
    own = _size(config.param_dtype) * math.ceil(parameter_count(config) / _weight_shards(mesh))
    trained = math.ceil(trained_count(experiment) / _weight_shards(mesh))
    rows = experiment.sampling.prompts * experiment.sampling.group
    micro_rows = _microbatch_rows(experiment, mesh)
    length = math.ceil(_length(experiment) / mesh["context"])
    split = micro_rows * sharding.batch_shards(mesh) < rows // experiment.schedule.minibatches
    chunk = min(length, max(1, LOGIT_BUDGET // (micro_rows * config.vocab_size // mesh["tensor"])))
    parts = {
        f"parameters, {config.param_dtype}": own,
        "adapters, float32": FLOAT32 * trained if experiment.lora is not None else 0,
        "gradients": _trained_bytes(experiment) * trained,
        "sum of the micro-batches' gradients": FLOAT32 * trained if split else 0,
        **_on_device(experiment, mesh),
        **_reference_bytes(experiment, own),
        "one gathered layer": _gathered_bytes(config, mesh),
        "the head's gradient before it is summed, float32": _head_bytes(experiment, mesh),
        f"activations, estimated, remat={config.remat}": _activation_bytes(experiment, mesh),
        # The logits, their softmax and its gradient.
        f"logits of {chunk} positions": 3 * FLOAT32 * micro_rows * chunk * config.vocab_size // mesh["tensor"],
        **_router_bytes(experiment, mesh),
        "rollout batch": _rollout_bytes(experiment, mesh),
    }
    return {part: size for part, size in parts.items() if size}


def _head_bytes(experiment: Experiment, mesh: dict[str, int]) -> int:
    """Where rows or positions are split, each device adds up what its own say about the whole head (`scoring`)."""
    if experiment.lora is not None or sharding.batch_shards(mesh) * mesh["context"] == 1:
        return 0
    return FLOAT32 * experiment.model.vocab_size * experiment.model.hidden_size // mesh["tensor"]


def _weight_shards(mesh: dict[str, int]) -> int:
    """Into how many parts each matrix is split; norms and the like, which are whole everywhere, weigh nothing."""
    return mesh["fsdp"] * mesh["expert"] * mesh["tensor"]


def _sampler_bytes(experiment: Experiment, mesh: dict[str, int]) -> dict[str, int]:
    """What is alive while completions are drawn on this mesh, the sampler's own or the learner's."""
    config, sampling = experiment.model, experiment.sampling
    prompts = math.ceil(sampling.prompts / sharding.batch_shards(mesh))
    rows = prompts * sampling.group
    rows = rows if rows % mesh["context"] else rows // mesh["context"]
    heads = config.num_key_value_heads // mesh["tensor"]
    position = 2 * _dtype_bytes(config) * config.num_hidden_layers * heads * config.head_dim
    parts = {
        **(_kept_bytes(experiment, mesh) if experiment.placement is None else _pushed_bytes(experiment, mesh)),
        "one gathered layer": _gathered_bytes(config, mesh),
        "cache of the prompts, once per prompt": position * prompts * sampling.max_prompt_tokens,
        "cache of the completions": position * rows * sampling.max_tokens,
        "logits of one position, and noise": 2 * FLOAT32 * rows * config.vocab_size // mesh["tensor"],
        "rollout batch": _rollout_bytes(experiment, mesh),
    }
    return {part: size for part, size in parts.items() if size}


def _kept_bytes(experiment: Experiment, mesh: dict[str, int]) -> dict[str, int]:
    """What the learner's devices hold while they draw: no gradients, but the moments stay."""
    own = _size(experiment.model.param_dtype) * math.ceil(parameter_count(experiment.model) / _weight_shards(mesh))
    return {
        f"parameters, {experiment.model.param_dtype}": own,
        "the same with adapters added": own if experiment.lora is not None else 0,
        **_on_device(experiment, mesh),
        **_reference_bytes(experiment, own),
    }


def _pushed_bytes(experiment: Experiment, mesh: dict[str, int]) -> dict[str, int]:
    """What a sampler's own devices hold: the parameters of the batch that is drawn, and of those drawn ahead."""
    assert experiment.placement is not None
    pushes = 1 + experiment.placement.staleness
    own = _dtype_bytes(experiment.model) * math.ceil(parameter_count(experiment.model) / _weight_shards(mesh))
    return {f"parameters, {experiment.model.dtype}, pushed {pushes} times": pushes * own}


def _microbatch_rows(experiment: Experiment, mesh: dict[str, int]) -> int:
    """Rows of one forward and backward pass on one device."""
    minibatch = experiment.sampling.prompts * experiment.sampling.group // experiment.schedule.minibatches
    return math.ceil((experiment.schedule.microbatch_rows or minibatch) / sharding.batch_shards(mesh))


def _microbatch_tokens(experiment: Experiment, mesh: dict[str, int]) -> int:
    """Tokens of one forward and backward pass on one device."""
    return _microbatch_rows(experiment, mesh) * math.ceil(_length(experiment) / mesh["context"])


def _length(experiment: Experiment) -> int:
    return experiment.sampling.max_prompt_tokens + experiment.sampling.max_tokens


def _gathered_bytes(config: ModelConfig, mesh: dict[str, int]) -> int:
    """The largest layer, or the head, in the compute dtype: each device needs what it computes of it as a whole."""
    if mesh["fsdp"] * mesh["expert"] == 1:
        return 0
    own = config.num_experts // mesh["expert"]
    layers = [mlp_count(config, layer, own) for layer in range(config.num_hidden_layers)]
    largest = max(max(layers) + attention_count(config), config.vocab_size * config.hidden_size)
    return _dtype_bytes(config) * largest // mesh["tensor"]


def _optimizer_bytes(experiment: Experiment, mesh: dict[str, int]) -> dict[str, int]:
    """The optimiser's state, a device's share of it."""
    trained = math.ceil(trained_count(experiment) / _weight_shards(mesh))
    return {
        **_moment_bytes(experiment.optimizer.transform, experiment.model, trained),
        "master copy, float32": _master_bytes(experiment) * trained,
    }


def _moment_bytes(transform: Transform, config: ModelConfig, trained: int) -> dict[str, int]:
    """AdamW has two moments of each of `trained` numbers. Any other state is traced for the whole model and scaled."""
    if unwrap(transform) is optimizers.adamw:
        return {"Adam moments, float32": 2 * FLOAT32 * trained}
    import jax

    from gspax.model import transformer

    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.numpy.float32), transformer.abstract_params(config)
    )
    state = jax.eval_shape(lambda params: transform(0.0).init(params), params)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return {"optimiser state": math.ceil(total * trained / parameter_count(config))}


def _on_device(experiment: Experiment, mesh: dict[str, int]) -> dict[str, int]:
    return {} if experiment.optimizer.offload else _optimizer_bytes(experiment, mesh)


def _trained_bytes(experiment: Experiment) -> int:
    """Of one number that is trained."""
    return _size(trained_dtype(experiment))


def _master_bytes(experiment: Experiment) -> int:
    """Of the copy of one number that is trained, where there is one."""
    return 0 if trained_dtype(experiment) == "float32" else FLOAT32


def _activation_bytes(experiment: Experiment, mesh: dict[str, int]) -> int:
    """What a micro-batch keeps for its backward pass: of each layer what `model.remat` says, and one layer in full."""
    config = experiment.model
    tokens = _microbatch_tokens(experiment, mesh)
    layers = [_layer_bytes(config, layer, mesh) for layer in range(config.num_hidden_layers)]
    stream = _dtype_bytes(config) * config.hidden_size
    whole = config.remat == "none"
    products = sum(_product_bytes(config, layer, mesh["tensor"]) for layer in range(len(layers)))
    inputs = {"none": 0, "offload": 0, "full": len(layers) * stream, "products": products}[config.remat]
    kept = tokens * (sum(layers) if whole else inputs + max(layers))
    scores = tokens * (config.num_attention_heads // mesh["tensor"]) * _length(experiment)
    # The scores, their softmax, and that in the compute dtype; more than the budget of them are not kept but made anew.
    times = len(layers) if whole and scores <= SCORE_BUDGET else 1
    return kept + times * (2 * FLOAT32 + _dtype_bytes(config)) * min(scores, SCORE_BUDGET)


def _layer_bytes(config: ModelConfig, layer: int, mesh: dict[str, int]) -> int:
    """Bytes per token that the backward pass of one layer reads, but for the attention's scores; heads and widths are
    split over the axis tensor, and keys and values gathered over the axis context."""
    D, N, K, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    size, tensor = _dtype_bytes(config), mesh["tensor"]
    whole_rows = 2 * K * H * mesh["context"] if mesh["context"] > 1 else 0
    # stream, norm, output; projected, rotated, context
    attention = size * (3 * D + (3 * N * H + 3 * K * H + whole_rows) // tensor)
    if is_sparse(config, layer):
        A, F = config.num_experts_per_tok, config.moe_intermediate_size
        mlp = size * (2 * D + A * (2 * D + 3 * F // tensor)) + 2 * FLOAT32 * config.num_experts
    else:
        mlp = size * (2 * D + 3 * config.intermediate_size // tensor)
    return attention + mlp


def _product_bytes(config: ModelConfig, layer: int, tensor: int) -> int:
    """Bytes per token that a layer keeps with remat="products": its input and the products with its own matrices; those
    of the experts are not kept."""
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim // tensor
    wide = 0 if is_sparse(config, layer) else 2 * config.intermediate_size // tensor + config.hidden_size
    routers = FLOAT32 * config.num_experts if is_sparse(config, layer) else 0
    return _dtype_bytes(config) * (2 * config.hidden_size + heads + wide) + routers


def _rollout_bytes(experiment: Experiment, mesh: dict[str, int]) -> int:
    """Tokens, segments, three kinds of log-probs (4 bytes each) and a mask for every position of a rollout batch; the
    experts too where updates read them."""
    each = 5 * 4 + 1
    if experiment.routing_replay or experiment.regularizers.load_balance:
        ids = _sparse_layers(experiment.model) * experiment.model.num_experts_per_tok
        each += ids * (1 if expert_id_dtype(experiment.model) == "uint8" else 2)
    rows = experiment.sampling.prompts * experiment.sampling.group
    return math.ceil(rows / sharding.batch_shards(mesh)) * _length(experiment) * each


def _router_bytes(experiment: Experiment, mesh: dict[str, int]) -> dict[str, int]:
    """The router's logits of all layers and their gradient, which only the routers' losses keep."""
    regularizers, config = experiment.regularizers, experiment.model
    if not (regularizers.load_balance or regularizers.router_z):
        return {}
    tokens = _microbatch_tokens(experiment, mesh)
    return {"router logits of all layers": 2 * FLOAT32 * tokens * _sparse_layers(config) * config.num_experts}


def _reference_bytes(experiment: Experiment, own: int) -> dict[str, int]:
    """A copy of the parameters; with adapters their base is the reference."""
    needed = experiment.reference is not None and experiment.lora is None
    return {f"reference policy, {experiment.model.param_dtype}": own} if needed else {}


def _sparse_layers(config: ModelConfig) -> int:
    return sum(is_sparse(config, layer) for layer in range(config.num_hidden_layers))


def _dtype_bytes(config: ModelConfig) -> int:
    return _size(config.dtype)


def _size(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else FLOAT32


def render(plan: Plan) -> str:
    """The plan as text."""
    lines = ["Settings" + (" (* given on the command line)" if plan.overridden else "")]
    width = max(map(len, plan.settings))
    for key, value in plan.settings.items():
        mark = "*" if any(key == given or key.startswith(given + ".") for given in plan.overridden) else " "
        lines.append(f"{mark} {key:<{width}}  {show(value)}")
    per_step = f"{plan.updates} updates, at most {plan.completion_tokens:,} tokens drawn, {plan.tokens:,} trained on"
    lines += [
        "",
        f"Model       {_count(plan.parameters)} parameters, {_count(plan.active_parameters)} active per token "
        "(embedding and head counted in both)",
        f"Mesh        {_meshes(plan)} (--devices N for another number)",
        f"            {plan.why}",
        f"One step    {plan.rows:,} rows, {per_step}",
        f"In total    {plan.steps:,} steps, {plan.steps * plan.updates:,} updates, "
        f"at most {plan.steps * plan.tokens:,} tokens",
    ]
    if plan.warm_start_updates:
        lines.append(f"Warm start  {plan.warm_start_updates:,} supervised updates before them")
    lines.append(f"Checkpoint  {_bytes(plan.checkpoint)}: what is trained, and the optimiser's state")
    for title, parts in (("learner, backward pass", plan.learner), ("sampler", plan.sampler)):
        lines += ["", f"Memory per device, {title}"]
        lines += [f"  {part:<44}{_bytes(size):>12}" for part, size in parts.items()]
        lines.append(f"  {'together':<44}{_bytes(sum(parts.values())):>12}")
    lines += [
        "",
        "Activations by model.remat, estimated: "
        + ", ".join(f"{remat} {_bytes(size)}" for remat, size in plan.activations.items()),
    ]
    if plan.host:
        lines.append(f"In the host's memory, for each device: the optimiser's state, {_bytes(plan.host)}")
    return "\n".join(lines)


def _meshes(plan: Plan) -> str:
    def axes(mesh: dict[str, int]) -> str:
        devices = math.prod(mesh.values())
        named = ", ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "all axes 1"
        return f"{named}: {devices} device{'s' if devices > 1 else ''}"

    own = plan.sampler_mesh
    return axes(plan.mesh) + (f" of the learner; {axes(own)} of the sampler" if own else "")


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"


def _bytes(number: int) -> str:
    size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.2f} {units[0]}"
