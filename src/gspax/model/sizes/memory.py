"""Bytes of the arrays that one device holds, and what follows from them: the sampler's layout, slots, and chunks.

All numbers follow from an experiment and the sizes of its mesh axes. Parameters, gradients, optimizer state, the cache
and the rollout are exact up to norms and biases, which are replicated. The activations of one layer are an estimate, on
which the chunks of a prefill and of logits depend; `gspax compile` reads those of a whole program from compiled code.

The sampler's mesh has the devices of the learner's, with other axes: what is cheap for an update, parameters in small
parts that each layer gathers, would send all weights for every token. `sharding.sampler_layouts` has the choices.

Axes: P prompts, G samples per prompt, B = P·G rows, T tokens, V vocabulary, D model, N query heads, K key/value heads,
H head, E experts, A active experts, F expert width, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gspax.config import (
    LOGIT_BUDGET,
    Experiment,
    Lora,
    Mesh,
    ModelConfig,
    Optimizer,
    Regularizers,
    RouterShift,
    RoutingReplay,
    SamplerDtype,
    Sampling,
    expert_id_dtype,
    is_sparse,
    optimizers,
    row_shape,
    trained_dtype,
)
from gspax.config.functions import unwrap
from gspax.model.sizes.counts import attention_count, mlp_count, parameter_count, trained_count, with_carried
from gspax.model.sizes.old_policy import reads_experts
from gspax.parallel import sharding

FLOAT32 = 4  # bytes
ID_BYTES = {"uint8": 1, "uint16": 2}
LOGIT_COPIES = 3  # the logits, their softmax and its gradient
PREFILL_BUDGET = 2**28  # bytes of a prefill's activations that always fit
USABLE = 0.9  # of a device's memory, when a sampler's layout is chosen: the rest is for what the estimate leaves out
AxisSizes = dict[str, int]


# Arrays


def learner_bytes(experiment: Experiment, mesh: AxisSizes) -> dict[str, int]:
    """The arrays of an update by name, without activations."""
    config, lora, sampling = experiment.model, experiment.lora, experiment.sampling
    trained = _sharded(trained_count(config, lora), mesh)
    shape = row_shape(sampling, experiment.schedule, sharding.batch_shards(mesh))
    updates = experiment.regularizers, experiment.routing_replay, experiment.router_shift
    parts = {
        **resident_bytes(config, lora, experiment.optimizer, mesh, reference=experiment.reference is not None),
        "adapters, float32": FLOAT32 * trained if lora is not None else 0,
        "gradients": size_of(trained_dtype(config, lora)) * trained,
        "sum of the microbatches' gradients": FLOAT32 * trained if shape.microbatch < shape.rows else 0,
        **_rollout_bytes(config, sampling, *updates, mesh),
    }
    return {part: size for part, size in parts.items() if size}


def sampler_bytes(experiment: Experiment, learner: AxisSizes, mesh: AxisSizes) -> dict[str, int]:
    """The arrays of a rollout by name. The layout of the sampler is chosen by their sum, so a prefill is estimated.

    Args:
      learner: axis sizes of the learner's mesh, whose devices hold its state; unused if the sampler is disaggregated.
      mesh: axis sizes of the sampler's mesh.
    """
    config, placement = experiment.model, experiment.placement
    sampling = with_carried(experiment.sampling, placement)
    rows = math.ceil(count_slots(config, sampling, mesh) / sharding.batch_shards(mesh))
    rows = rows if rows % mesh["context"] else rows // mesh["context"]
    position, prompts = position_bytes(config, sampling.kv_cache_dtype, mesh), count_device_prompts(sampling, mesh)
    weights, dtype = inference_weights_bytes(config, sampling, mesh), _dtype(sampling.weights_dtype, config)
    if placement is None:
        reference = experiment.reference is not None
        held = resident_bytes(config, experiment.lora, experiment.optimizer, learner, reference=reference)
        held[f"inference weights, {dtype}"] = weights
    else:
        pushes = 1 + (placement.staleness if placement.partial is None else 1)
        held = {f"inference weights, {dtype}, pushed {pushes} times": pushes * weights}
    completions = position * rows * sampling.max_tokens
    chunk = prefill_chunk(config, sampling, mesh)
    updates = experiment.regularizers, experiment.routing_replay, experiment.router_shift
    # The prefill is over when the completions' cache is made, except where that outlives the program of the prefill.
    prefill = chunk * _prefill_bytes(config, sampling, mesh) - (0 if sampling.chunk else completions)
    parts = {
        **held,
        "one gathered layer": _gathered_bytes(config, mesh) if mesh["fsdp"] > 1 else 0,
        "cache of the prompts, once per prompt": prompts * sampling.max_prompt_tokens * position,
        "cache of the completions": completions,
        f"prefill of {chunk} prompts, estimated, beyond that": prefill if prefill > PREFILL_BUDGET else 0,
        "logits of one position, and their exponentials": 2 * FLOAT32 * rows * config.vocab_size // mesh["tensor"],
        **_rollout_bytes(config, sampling, *updates, mesh),
    }
    return {part: size for part, size in parts.items() if size}


def resident_bytes(
    config: ModelConfig, lora: Lora | None, optimizer: Optimizer, mesh: AxisSizes, *, reference: bool
) -> dict[str, int]:
    """The arrays that the learner's devices hold throughout a run, by name."""
    parts = {f"parameters, {config.param_dtype}": size_of(config.param_dtype) * _sharded(parameter_count(config), mesh)}
    if not optimizer.offload:
        parts |= optimizer_bytes(optimizer, config, lora, mesh)
    if reference:  # with adapters a copy of these alone: the frozen parameters serve both policies
        dtype = trained_dtype(config, lora)
        parts[f"reference policy, {dtype}"] = size_of(dtype) * _sharded(trained_count(config, lora), mesh)
    return parts


def optimizer_bytes(optimizer: Optimizer, config: ModelConfig, lora: Lora | None, mesh: AxisSizes) -> dict[str, int]:
    """A device's share of the optimizer state. AdamW has two moments; any other state is traced for the whole model."""
    trained = _sharded(trained_count(config, lora), mesh)
    if unwrap(optimizer.transform) is optimizers.adamw:
        state = {"Adam moments, float32": 2 * FLOAT32 * trained}
    else:
        import jax

        from gspax.model import transformer

        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.numpy.float32), transformer.abstract_params(config)
        )
        leaves = jax.tree.leaves(jax.eval_shape(lambda params: optimizer.transform(0.0).init(params), params))
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        state = {"optimizer state": math.ceil(total * trained / parameter_count(config))}
    master = 0 if trained_dtype(config, lora) == "float32" else FLOAT32
    return {**state, "master copy, float32": master * trained}


def inference_weights_bytes(config: ModelConfig, sampling: Sampling, mesh: AxisSizes) -> int:
    """A device's share of the inference weights: only experts are sharded over the axis expert."""
    experts = _sparse_layers(config) * 3 * config.num_experts * config.hidden_size * config.moe_intermediate_size
    table = embedding_table_count(config)  # never in 8 bits
    others = parameter_count(config) - experts - table
    count = size_of(_dtype(sampling.weights_dtype, config)) * (experts / mesh["expert"] + others)
    return math.ceil((count + size_of(config.dtype) * table) / (mesh["tensor"] * mesh["fsdp"]))


def embedding_table_count(config: ModelConfig) -> int:
    """The numbers of an embedding that is not the head too: a token reads one row of it."""
    return 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size


def position_bytes(config: ModelConfig, kv_cache_dtype: SamplerDtype, mesh: AxisSizes) -> int:
    """Bytes of the keys, the values and their scales of one position of one row on one device."""
    heads, scale = config.num_key_value_heads // mesh["tensor"], FLOAT32 if kv_cache_dtype == "int8" else 0
    vector = size_of(_dtype(kv_cache_dtype, config)) * config.head_dim + scale
    return 2 * config.num_hidden_layers * heads * vector


def _rollout_bytes(
    config: ModelConfig,
    sampling: Sampling,
    regularizers: Regularizers,
    replay: RoutingReplay,
    shift: RouterShift | None,
    mesh: AxisSizes,
) -> dict[str, int]:
    """Tokens, segments, three kinds of log-probs (4 bytes each), a mask, and what updates read of a token's routing.

    That is its experts' ids in all layers, and their log-probs for a shift.
    """
    positions = math.ceil(sampling.prompts * sampling.group / sharding.batch_shards(mesh)) * row_length(sampling)
    parts = {"rollout": positions * (5 * 4 + 1)}
    if reads_experts(regularizers, replay, shift):
        expert = ID_BYTES[expert_id_dtype(config)] + (FLOAT32 if shift is not None else 0)
        parts["routing of the rollout"] = positions * _sparse_layers(config) * config.num_experts_per_tok * expert
    return parts


# The sampler's layout


@dataclass(frozen=True, kw_only=True)
class SamplerLayout:
    """The sizes of the sampler's mesh axes, and the reason for them, one line for each decision."""

    sizes: dict[str, int]
    why: tuple[str, ...]


def choose_sampler_layout(experiment: Experiment, sizes: AxisSizes, memory: int | None = None) -> SamplerLayout:
    """The layout on devices whose axes have these sizes: the one of the experiment, or the fastest that fits.

    Args:
      sizes: of the learner's mesh, or of a disaggregated sampler's.
      memory: bytes of a device; None: unknown, and not compared.

    Raises:
      UserError: the experiment's axes do not fit the devices.
    """
    placement, model, sampling = experiment.placement, experiment.model, experiment.sampling
    wanted = experiment.sampler_mesh
    if placement is not None:
        wanted = placement.mesh if placement.mesh != Mesh() else None
    if wanted is not None:
        resolved = sharding.resolve_axes(wanted, math.prod(sizes.values()), model, slices=sizes["slice"])
        return SamplerLayout(sizes=resolved, why=("as given",))
    held = with_carried(sampling, placement).prompts
    rows = math.gcd(sampling.prompts * sampling.group, held * sampling.group, sampling.slots)
    layouts = list(sharding.sampler_layouts(sizes, model, rows))
    needs = [sum(sampler_bytes(experiment, sizes, layout).values()) for layout in layouts]
    fits = [memory is None or need <= USABLE * memory for need in needs]
    chosen = fits.index(True) if any(fits) else len(layouts) - 1
    why = _describe(layouts[chosen], model)
    if chosen and memory is not None:
        why.append(
            f"a faster layout would need {needs[0] / 1e9:.1f} GB of a device's {memory / 1e9:.1f} GB while sampling; "
            "optimizer.offload=true moves the optimizer state out of its way"
        )
    return SamplerLayout(sizes=layouts[chosen], why=tuple(why))


def _describe(sizes: AxisSizes, model: ModelConfig) -> list[str]:
    """One line for experts, one for everything else."""
    expert, tensor, fsdp = sizes["expert"], sizes["tensor"], sizes["fsdp"]
    lines = []
    if model.num_experts:
        parts = f", each in {tensor} parts" if tensor > 1 else ""
        lines.append(f"experts: {model.num_experts // expert} of {model.num_experts} on each device{parts}")
    whole = f"over {tensor} devices by heads, widths and vocabulary" if tensor > 1 else "whole on each device"
    gathered = f", in {fsdp} parts that every token gathers" if fsdp > 1 else ""
    return [*lines, f"attention and head: {whole}{gathered}"]


# Slots and chunks


def count_device_prompts(sampling: Sampling, mesh: AxisSizes) -> int:
    """Prompts of a device; those whose samples are on several devices count on each (`sampler.split_groups`)."""
    return sampling.prompts // math.gcd(sampling.prompts, sharding.batch_shards(mesh))


def count_slots(config: ModelConfig, sampling: Sampling, mesh: AxisSizes) -> int:
    """The samples that all devices generate at once: all of them, `sampling.slots`, or as many as fit."""
    rows = sampling.prompts * sampling.group
    wanted = min(sampling.slots or rows, rows)
    return min(wanted, _fitting_slots(config, sampling, mesh)) if sampling.cache_gib else wanted


def _fitting_slots(config: ModelConfig, sampling: Sampling, mesh: AxisSizes) -> int:
    shards, position = sharding.batch_shards(mesh), position_bytes(config, sampling.kv_cache_dtype, mesh)
    left = sampling.cache_gib * 2**30 - position * count_device_prompts(sampling, mesh) * sampling.max_prompt_tokens
    return max(0, int(left // (position * sampling.max_tokens))) * shards


def slot_problems(config: ModelConfig, sampling: Sampling, mesh: AxisSizes) -> Iterator[str]:
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


def prefill_chunk(config: ModelConfig, sampling: Sampling, mesh: AxisSizes) -> int:
    """Prompts that a device prefills at once: its share of `sampling.prefill_prompts`, or as many as fit.

    Their activations fit in the memory of the completions' cache, which does not exist yet, or in `PREFILL_BUDGET`.
    """
    prompts, shards = count_device_prompts(sampling, mesh), sharding.batch_shards(mesh)
    if sampling.prefill_prompts:
        return min(prompts, math.ceil(sampling.prefill_prompts / shards))
    rows = math.ceil(count_slots(config, sampling, mesh) / (shards * mesh["context"]))
    completions = rows * sampling.max_tokens * position_bytes(config, sampling.kv_cache_dtype, mesh)
    fitting = max(1, max(PREFILL_BUDGET, completions) // _prefill_bytes(config, sampling, mesh))
    return math.ceil(prompts / math.ceil(prompts / fitting))


def _prefill_bytes(config: ModelConfig, sampling: Sampling, mesh: AxisSizes) -> int:
    """Activations of one prompt in one layer."""
    return math.ceil(sampling.max_prompt_tokens / mesh["context"]) * _largest_layer_bytes(config, mesh)


def logit_chunk(config: ModelConfig, mesh: AxisSizes, tokens: int) -> int:
    """Tokens whose logits one device holds at once, of all the tokens of a pass on it.

    The logits take as much memory as one layer's backward pass, which is not alive at the same time, or `LOGIT_BUDGET`
    logits if those are more. Each chunk reads the whole head, so more of them are slower.
    """
    vocabulary = config.vocab_size // mesh["tensor"]
    layer = _largest_layer_bytes(config, mesh)
    chunk = max(LOGIT_BUDGET // vocabulary, tokens * layer // (LOGIT_COPIES * FLOAT32 * vocabulary), 1)
    return math.ceil(tokens / math.ceil(tokens / chunk))


def _largest_layer_bytes(config: ModelConfig, mesh: AxisSizes) -> int:
    return max(_layer_bytes(config, layer, mesh) for layer in range(config.num_hidden_layers))


def _layer_bytes(config: ModelConfig, layer: int, mesh: AxisSizes) -> int:
    """An estimate of the bytes per token that the backward pass of one layer reads, without the attention scores.

    Heads and widths are sharded over the axis tensor; keys and values are gathered over the axis context.
    """
    D, F, size, tensor = config.hidden_size, config.moe_intermediate_size, size_of(config.dtype), mesh["tensor"]
    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    gathered = 2 * K * H * mesh["context"] if mesh["context"] > 1 else 0
    heads = size * ((3 * N * H + 3 * K * H + gathered) // tensor)  # projected, normalized, rotated, and the context
    if not is_sparse(config, layer):
        return size * (5 * D + 3 * config.intermediate_size // tensor) + heads
    mlp = size * (2 * D + config.num_experts_per_tok * (2 * D + 3 * F // tensor)) + 2 * FLOAT32 * config.num_experts
    if shared := config.shared_expert_intermediate_size:
        mlp += size * (2 * D + 3 * shared // tensor)
    return size * 3 * D + heads + mlp


def _gathered_bytes(config: ModelConfig, mesh: AxisSizes) -> int:
    """The largest layer, or the head, in the compute dtype: gathered where it is used."""
    experts = config.num_experts // mesh["expert"]
    layers = [mlp_count(config, layer, experts) for layer in range(config.num_hidden_layers)]
    largest = max(max(layers) + attention_count(config), config.vocab_size * config.hidden_size)
    return size_of(config.dtype) * largest // mesh["tensor"]


# Numbers


def row_length(sampling: Sampling) -> int:
    """Tokens of a row: prompt and completion."""
    return sampling.max_prompt_tokens + sampling.max_tokens


def size_of(dtype: str) -> int:
    """Bytes of one number."""
    return {"int8": 1, "bfloat16": 2}.get(dtype, FLOAT32)


def _dtype(dtype: SamplerDtype, config: ModelConfig) -> str:
    return config.dtype if dtype == "auto" else dtype


def _sparse_layers(config: ModelConfig) -> int:
    return sum(is_sparse(config, layer) for layer in range(config.num_hidden_layers))


def _sharded(count: int, mesh: AxisSizes) -> int:
    """One device's share of numbers in matrices."""
    return math.ceil(count / (mesh["fsdp"] * mesh["expert"] * mesh["tensor"]))
