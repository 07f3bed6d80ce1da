"""Memory of one device, from an experiment's numbers alone: what the learner and the sampler hold at their peaks.

Parameters and the cache are exact; activations are an estimate of what the compiler keeps, without fragmentation and
scratch space. Parameters, gradients and moments are sharded over the mesh's axes fsdp, expert and tensor.

Axes: P prompts, G samples per prompt, B = P·G rows, T tokens, V vocabulary, D model, N query heads, K key/value heads,
H head, E experts, A active experts, F expert width, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gspax.config import (
    LOGIT_BUDGET,
    SCORE_BUDGET,
    DrawingDtype,
    Experiment,
    Lora,
    ModelConfig,
    Optimizer,
    Regularizers,
    RouterShift,
    RoutingReplay,
    Sampling,
    expert_id_dtype,
    is_sparse,
    optimizers,
    row_shape,
    trained_dtype,
)
from gspax.config.functions import unwrap
from gspax.config.protocols import Transform
from gspax.model.sizes.counts import attention_count, mlp_count, parameter_count, trained_count, with_carried
from gspax.model.sizes.old_policy import reads_experts
from gspax.parallel import sharding

FLOAT32 = 4  # bytes
ID_BYTES = {"uint8": 1, "uint16": 2}
LOGIT_COPIES = 3  # the logits, their softmax and its gradient
PREFILL_BUDGET = 2**28  # bytes of a prefill's activations that always fit
Mesh = dict[str, int]  # sizes of the axes


def learner_bytes(experiment: Experiment, mesh: Mesh) -> dict[str, int]:
    """What is alive during the backward pass of an update."""
    config, lora, sampling, schedule = experiment.model, experiment.lora, experiment.sampling, experiment.schedule
    trained = _sharded(trained_count(config, lora), mesh)
    shape = row_shape(sampling, schedule, sharding.batch_shards(mesh))
    rows, length = math.ceil(shape.microbatch / sharding.batch_shards(mesh)), shape.length
    positions, several = math.ceil(length / mesh["context"]), shape.microbatch < shape.rows
    chunk = logit_chunk(config, mesh, rows * positions)
    routers = experiment.regularizers.load_balance or experiment.regularizers.router_z
    routing = routing_bytes(config, experiment.regularizers, experiment.routing_replay, experiment.router_shift)
    parts = {
        **resident_bytes(config, lora, experiment.optimizer, mesh, reference=experiment.reference is not None),
        "adapters, float32": FLOAT32 * trained if lora is not None else 0,
        "gradients": size_of(trained_dtype(config, lora)) * trained,
        "sum of the microbatches' gradients": FLOAT32 * trained if several else 0,
        "one gathered layer": _gathered_bytes(config, mesh),
        "the head's gradient before it is summed, float32": 0 if lora is not None else _head_bytes(config, mesh),
        f"activations, estimated, remat={config.remat}": activation_bytes(config, mesh, rows, length),
        f"logits of {chunk} tokens": LOGIT_COPIES * FLOAT32 * chunk * config.vocab_size // mesh["tensor"],
        "router logits of all layers": _router_bytes(config, rows * positions) if routers else 0,
        "rollout batch": _rollout_bytes(sampling, mesh),
        "routing of the rollout batch": _rollout_positions(sampling, mesh) * routing,
    }
    return {part: size for part, size in parts.items() if size}


def sampler_bytes(experiment: Experiment, learner: Mesh, mesh: Mesh) -> dict[str, int]:
    """What is alive while completions are drawn.

    Args:
      learner: axis sizes of the learner's mesh, whose devices hold its state; not read if the sampler is disaggregated.
      mesh: axis sizes of the sampler's.
    """
    config, sampling = experiment.model, with_carried(experiment.sampling, experiment.placement)
    prompts = count_device_prompts(sampling, mesh)
    rows = math.ceil(count_slots(config, sampling, mesh) / sharding.batch_shards(mesh))
    rows = rows if rows % mesh["context"] else rows // mesh["context"]
    position = position_bytes(config, sampling.kv_cache_dtype, mesh)
    chunk = prefill_chunk(config, sampling, mesh)
    routing = routing_bytes(config, experiment.regularizers, experiment.routing_replay, experiment.router_shift)
    if experiment.placement is None:
        lora, reference = experiment.lora, experiment.reference is not None
        held = resident_bytes(config, lora, experiment.optimizer, learner, reference=reference)
        held[f"serving copy, {_dtype(sampling.weights_dtype, config)}"] = serving_bytes(config, sampling, mesh)
    else:
        placement, dtype = experiment.placement, _dtype(sampling.weights_dtype, config)
        pushes = 1 + (placement.staleness if placement.partial is None else 1)
        held = {f"parameters, {dtype}, pushed {pushes} times": pushes * serving_bytes(config, sampling, mesh)}
    completions = position * rows * sampling.max_tokens
    # Prefill has ended when the completions' cache is made, except where that outlives the program of the prefill.
    prefill = chunk * _prefill_bytes(config, sampling, mesh) - (0 if sampling.chunk else completions)
    prefill = prefill if prefill > PREFILL_BUDGET else 0
    parts = {
        **held,
        "one gathered layer": _gathered_bytes(config, mesh) if mesh["fsdp"] > 1 else 0,
        "cache of the prompts, once per prompt": position * prompts * sampling.max_prompt_tokens,
        "cache of the completions": completions,
        f"prefill of {chunk} prompts, estimated, beyond that": prefill,
        "logits of one position, and their exponentials": 2 * FLOAT32 * rows * config.vocab_size // mesh["tensor"],
        "rollout batch": _rollout_bytes(sampling, mesh),
        "routing of the rollout batch": _rollout_positions(sampling, mesh) * routing,
    }
    return {part: size for part, size in parts.items() if size}


def serving_bytes(config: ModelConfig, sampling: Sampling, mesh: Mesh) -> int:
    """A device's share of the serving copy: experts are over the axis expert too, all else is not."""
    D, F = config.hidden_size, config.moe_intermediate_size
    experts = _sparse_layers(config) * 3 * config.num_experts * D * F
    size = size_of(_dtype(sampling.weights_dtype, config))
    table = embedding_table_count(config)  # never in 8 bits
    others = parameter_count(config) - experts - table
    count = size * (experts / mesh["expert"] + others) + size_of(config.dtype) * table
    return math.ceil(count / (mesh["tensor"] * mesh["fsdp"]))


def embedding_table_count(config: ModelConfig) -> int:
    """The numbers of an embedding that is not the head too: a token reads one row of it."""
    return 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size


def prefill_chunk(config: ModelConfig, sampling: Sampling, mesh: Mesh) -> int:
    """Prompts that a device prefills at once: its share of `sampling.prefill_prompts`, or as many as fit.

    Those that fit need as much memory as the cache of the completions, which does not exist yet, or `PREFILL_BUDGET`.
    """
    prompts, shards = count_device_prompts(sampling, mesh), sharding.batch_shards(mesh)
    if sampling.prefill_prompts:
        return min(prompts, math.ceil(sampling.prefill_prompts / shards))
    rows = math.ceil(count_slots(config, sampling, mesh) / (shards * mesh["context"]))
    completions = rows * sampling.max_tokens * position_bytes(config, sampling.kv_cache_dtype, mesh)
    fitting = max(1, max(PREFILL_BUDGET, completions) // _prefill_bytes(config, sampling, mesh))
    return math.ceil(prompts / math.ceil(prompts / fitting))


def _prefill_bytes(config: ModelConfig, sampling: Sampling, mesh: Mesh) -> int:
    """Activations of one prompt: those of one layer."""
    layer = max(_layer_bytes(config, layer, mesh) for layer in range(config.num_hidden_layers))
    return math.ceil(sampling.max_prompt_tokens / mesh["context"]) * layer


def count_slots(config: ModelConfig, sampling: Sampling, mesh: Mesh) -> int:
    """The samples that are drawn at once on all devices: as many as there are, `sampling.slots`, or as fit."""
    rows = sampling.prompts * sampling.group
    wanted = min(sampling.slots or rows, rows)
    return min(wanted, _fitting_slots(config, sampling, mesh)) if sampling.cache_gib else wanted


def slot_problems(config: ModelConfig, sampling: Sampling, mesh: Mesh) -> Iterator[str]:
    """One sentence if the slots' caches do not fit their budget."""
    if not sampling.cache_gib:
        return
    fitting, shards = _fitting_slots(config, sampling, mesh), sharding.batch_shards(mesh)
    needed = position_bytes(config, sampling.kv_cache_dtype, mesh) * (
        count_device_prompts(sampling, mesh) * sampling.max_prompt_tokens + sampling.max_tokens
    )
    if fitting < shards:
        yield (
            f"sampling.cache_gib: wanted at least {needed / 2**30:.3g} for the cache of a device's prompts and of one "
            f"slot, got {sampling.cache_gib:g}"
        )
    elif sampling.slots > fitting:
        yield (
            f"sampling.slots: wanted at most {fitting}, whose caches fit sampling.cache_gib={sampling.cache_gib:g}, "
            f"got {sampling.slots}"
        )


def count_device_prompts(sampling: Sampling, mesh: Mesh) -> int:
    """Prompts of a device; those whose samples are on several devices count on each (`sampler.split_groups`)."""
    return sampling.prompts // math.gcd(sampling.prompts, sharding.batch_shards(mesh))


def _fitting_slots(config: ModelConfig, sampling: Sampling, mesh: Mesh) -> int:
    shards, position = sharding.batch_shards(mesh), position_bytes(config, sampling.kv_cache_dtype, mesh)
    left = sampling.cache_gib * 2**30 - position * count_device_prompts(sampling, mesh) * sampling.max_prompt_tokens
    return max(0, int(left // (position * sampling.max_tokens))) * shards


def position_bytes(config: ModelConfig, kv_cache_dtype: DrawingDtype, mesh: Mesh) -> int:
    """Bytes of the keys and values of one position of one row, on one device; with those of their scales."""
    heads, scale = config.num_key_value_heads // mesh["tensor"], FLOAT32 if kv_cache_dtype == "int8" else 0
    vector = size_of(_dtype(kv_cache_dtype, config)) * config.head_dim + scale
    return 2 * config.num_hidden_layers * heads * vector


def _dtype(dtype: DrawingDtype, config: ModelConfig) -> str:
    return config.dtype if dtype == "auto" else dtype


def optimizer_bytes(optimizer: Optimizer, config: ModelConfig, lora: Lora | None, mesh: Mesh) -> dict[str, int]:
    """A device's share of the optimiser state."""
    trained = _sharded(trained_count(config, lora), mesh)
    master = 0 if trained_dtype(config, lora) == "float32" else FLOAT32
    return {**_moment_bytes(optimizer.transform, config, trained), "master copy, float32": master * trained}


def logit_chunk(config: ModelConfig, mesh: Mesh, tokens: int) -> int:
    """Tokens whose logits one device holds at once, of all the tokens of a pass on it.

    They take as much memory as one layer's backward pass, which is not alive at the same time, or `LOGIT_BUDGET` logits
    if those are more. Each chunk reads the whole head, so more of them are slower.
    """
    vocabulary = config.vocab_size // mesh["tensor"]
    layer = max(_layer_bytes(config, layer, mesh) for layer in range(config.num_hidden_layers))
    chunk = max(LOGIT_BUDGET // vocabulary, tokens * layer // (LOGIT_COPIES * FLOAT32 * vocabulary), 1)
    return math.ceil(tokens / math.ceil(tokens / chunk))


def activation_bytes(config: ModelConfig, mesh: Mesh, rows: int, length: int) -> int:
    """What a microbatch stores for its backward pass: of each layer what `model.remat` selects, and one layer in full.

    Args:
      rows: of a microbatch, on one device.
      length: tokens of a whole row.
    """
    tokens = rows * math.ceil(length / mesh["context"])
    numbers = range(config.num_hidden_layers)
    of_token = {
        "none": lambda layer: _saved_bytes(config, layer, mesh),
        "products": lambda layer: _product_bytes(config, layer, mesh["tensor"]),
        "full": lambda layer: size_of(config.dtype) * config.hidden_size,
        "offload": lambda layer: 0,
    }[config.remat]
    one = max(_layer_bytes(config, layer, mesh) for layer in numbers)
    scores = tokens * (config.num_attention_heads // mesh["tensor"]) * length
    # One layer's scores, their softmax, and that in the compute dtype; beyond the budget in chunks, recomputed.
    working = (2 * FLOAT32 + size_of(config.dtype)) * min(scores, SCORE_BUDGET)
    stored = FLOAT32 * scores * len(numbers) if config.remat == "none" and scores <= SCORE_BUDGET else 0
    return tokens * (sum(map(of_token, numbers)) + one) + working + stored


def row_length(sampling: Sampling) -> int:
    """Tokens of a row: prompt and completion."""
    return sampling.max_prompt_tokens + sampling.max_tokens


def resident_bytes(
    config: ModelConfig, lora: Lora | None, optimizer: Optimizer, mesh: Mesh, *, reference: bool
) -> dict[str, int]:
    """What the learner's devices hold throughout the run."""
    weights = size_of(config.param_dtype) * _sharded(parameter_count(config), mesh)
    parts = {f"parameters, {config.param_dtype}": weights}
    if not optimizer.offload:
        parts |= optimizer_bytes(optimizer, config, lora, mesh)
    if reference:  # with adapters a copy of these alone: the frozen parameters serve both policies
        dtype = trained_dtype(config, lora)
        parts[f"reference policy, {dtype}"] = size_of(dtype) * _sharded(trained_count(config, lora), mesh)
    return parts


def _moment_bytes(transform: Transform, config: ModelConfig, trained: int) -> dict[str, int]:
    """AdamW has two moments for each of `trained` numbers; any other state is traced for the whole model and scaled."""
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


def _head_bytes(config: ModelConfig, mesh: Mesh) -> int:
    """Where rows or positions are sharded, each device has its own sum of the head's gradient (`learner.head_logp`)."""
    if sharding.batch_shards(mesh) * mesh["context"] == 1:
        return 0
    return FLOAT32 * config.vocab_size * config.hidden_size // mesh["tensor"]


def _gathered_bytes(config: ModelConfig, mesh: Mesh) -> int:
    """The largest layer, or the head, in the compute dtype: gathered where it is used."""
    if mesh["fsdp"] * mesh["expert"] == 1:
        return 0
    own = config.num_experts // mesh["expert"]
    layers = [mlp_count(config, layer, own) for layer in range(config.num_hidden_layers)]
    largest = max(max(layers) + attention_count(config), config.vocab_size * config.hidden_size)
    return size_of(config.dtype) * largest // mesh["tensor"]


def _layer_bytes(config: ModelConfig, layer: int, mesh: Mesh) -> int:
    """Bytes per token that the backward pass of one layer reads, without the attention scores. Heads and widths are
    sharded over the axis tensor; keys and values are gathered over the axis context."""
    D, F, size, tensor = config.hidden_size, config.moe_intermediate_size, size_of(config.dtype), mesh["tensor"]
    if not is_sparse(config, layer):
        return size * (5 * D + 3 * config.intermediate_size // tensor) + _head_activation_bytes(config, mesh)
    mlp = size * (2 * D + config.num_experts_per_tok * (2 * D + 3 * F // tensor)) + 2 * FLOAT32 * config.num_experts
    if shared := config.shared_expert_intermediate_size:
        mlp += size * (2 * D + 3 * shared // tensor)
    return size * 3 * D + _head_activation_bytes(config, mesh) + mlp


def _saved_bytes(config: ModelConfig, layer: int, mesh: Mesh) -> int:
    """Bytes per token that a layer stores with remat="none", without the attention scores. The experts store their
    arguments only: the rows, which the router has in float32 too, and its log-probs."""
    D, size, tensor = config.hidden_size, size_of(config.dtype), mesh["tensor"]
    width = config.shared_expert_intermediate_size if is_sparse(config, layer) else config.intermediate_size
    router = FLOAT32 * (D + config.num_experts) if is_sparse(config, layer) else 0
    return size * (4 * D + 3 * width // tensor) + router + _head_activation_bytes(config, mesh)


def _head_activation_bytes(config: ModelConfig, mesh: Mesh) -> int:
    """Bytes per token of queries, keys and values (projected, normalised, rotated) and of the context."""
    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    gathered = 2 * K * H * mesh["context"] if mesh["context"] > 1 else 0
    return size_of(config.dtype) * ((3 * N * H + 3 * K * H + gathered) // mesh["tensor"])


def _product_bytes(config: ModelConfig, layer: int, tensor: int) -> int:
    """Bytes per token that a layer stores with remat="products": its input and the products with its own matrices,
    those of the experts excepted."""
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim // tensor
    width = config.shared_expert_intermediate_size if is_sparse(config, layer) else config.intermediate_size
    routers = FLOAT32 * config.num_experts if is_sparse(config, layer) else 0
    return size_of(config.dtype) * (2 * config.hidden_size + heads + 2 * width // tensor) + routers


def _router_bytes(config: ModelConfig, tokens: int) -> int:
    """The router logits of all layers and their gradient, which only the router losses keep."""
    return 2 * FLOAT32 * tokens * _sparse_layers(config) * config.num_experts


def _rollout_bytes(sampling: Sampling, mesh: Mesh) -> int:
    """Tokens, segments, three kinds of log-probs (4 bytes each) and a mask for every position of a rollout batch."""
    return _rollout_positions(sampling, mesh) * (5 * 4 + 1)


def routing_bytes(
    config: ModelConfig, regularizers: Regularizers, routing_replay: RoutingReplay, router_shift: RouterShift | None
) -> int:
    """What updates read of a token's routing: its experts' ids in all layers, and their log-probs for a shift."""
    if not reads_experts(regularizers, routing_replay, router_shift):
        return 0
    each = ID_BYTES[expert_id_dtype(config)] + (FLOAT32 if router_shift is not None else 0)
    return _sparse_layers(config) * config.num_experts_per_tok * each


def _rollout_positions(sampling: Sampling, mesh: Mesh) -> int:
    return math.ceil(sampling.prompts * sampling.group / sharding.batch_shards(mesh)) * row_length(sampling)


def _sparse_layers(config: ModelConfig) -> int:
    return sum(is_sparse(config, layer) for layer in range(config.num_hidden_layers))


def _sharded(count: int, mesh: Mesh) -> int:
    """One device's share of numbers in matrices; norms and biases, which are replicated, are negligible."""
    return math.ceil(count / (mesh["fsdp"] * mesh["expert"] * mesh["tensor"]))


def size_of(dtype: str) -> int:
    """Bytes of one number."""
    return {"int8": 1, "bfloat16": 2}.get(dtype, FLOAT32)
