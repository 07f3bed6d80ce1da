"""Sizes that follow from an experiment's numbers: parameters, FLOPs, bytes on a device, and decisions by them.

They decide the sampler's layout, its slots, and the chunks of a prefill and of logits. Parameters, gradients, optimizer
state, the cache and the rollout are exact up to norms and biases, which are replicated. Activations are estimated only
where one of these decisions depends on them; `gspax compile` reads a whole program's activations from compiled code.

The sampler's mesh has the devices of the learner's, with other axes: what is cheap for an update, parameters in small
parts that each layer gathers, would send all weights for every token. `sharding.sampler_layouts` has the choices.

Axes: P prompts, G samples per prompt, B = P·G rows, T tokens, V vocabulary, D model, N query heads, K key/value heads,
H head, E experts, A active experts, F expert width, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspax.config import (
    LOGIT_BUDGET,
    Engine,
    Experiment,
    Held,
    Lora,
    Mesh,
    ModelConfig,
    Optimizer,
    Placement,
    SamplerDtype,
    Sampling,
    Trained,
    adapted_weights,
    expert_id_dtype,
    layers_of,
    optimizers,
    row_shape,
    sampling_mask_size,
    sparse_layers,
    teacher_models,
    token_id_dtype,
    with_vocabulary,
)
from gspax.config.functions import unwrap
from gspax.model.passes import Passes
from gspax.parallel import sharding

FLOAT32 = 4  # bytes
LOGIT_COPIES = 3  # the logits, their softmax and its gradient
PREFILL_BUDGET = 2**28  # bytes of a prefill's activations that always fit
USABLE = 0.9  # of a device's memory, when a sampler's layout is chosen: the rest is for what the estimate leaves out
AxisSizes = dict[str, int]


# --- parameters and FLOPs --------------------------------------------------------------------------------------------


def parameter_count(config: ModelConfig) -> int:
    """Count the numbers in the model's parameters, embedding and head included."""
    return count_with_experts(config, config.num_experts)


def count_with_experts(config: ModelConfig, experts: int) -> int:
    """Count the numbers in the model's parameters if each layer had as many experts."""
    D = config.hidden_size
    head = 0 if config.tie_word_embeddings else config.vocab_size * D
    return config.vocab_size * D + head + D + sum(layer.parameters(D, experts) for layer in layers_of(config))


def active_parameter_count(config: ModelConfig) -> int:
    """Count the parameters used by one token: only its experts; embedding and head in full, as in "A3B"."""
    return count_with_experts(config, config.num_experts_per_tok)


def lookup_count(config: ModelConfig) -> int:
    """Count the numbers in an embedding that is not the head too: a token reads one row of it."""
    return 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size


def forward_flops(config: ModelConfig, length: float) -> float:
    """Count one token's FLOPs in a forward pass of `length` tokens: products, and attention to half the row."""
    mixing = sum(layer.mixer.flops(length) for layer in layers_of(config))
    return 2 * (active_parameter_count(config) - lookup_count(config)) + mixing


def trained_count(trained: Trained) -> int:
    """Count the numbers that have a gradient: the adapters, if there are any, else all parameters."""
    config, lora = trained
    return parameter_count(config) if lora is None else adapter_count(config, lora)


def adapter_count(config: ModelConfig, lora: Lora) -> int:
    """Count the numbers in the adapters of a model."""
    chosen = adapted_weights(lora)
    return lora.rank * sum(
        sides
        for layer in layers_of(config)
        for part, weights in layer.adapted(config.hidden_size).items()
        for name, sides in weights.items()
        if name in chosen[part]
    )


# --- arrays ----------------------------------------------------------------------------------------------------------


def learner_bytes(experiment: Experiment, mesh: AxisSizes) -> dict[str, int]:
    """Return a device's bytes of the arrays of an update by name, without activations."""
    config, lora, sampling = experiment.model, experiment.lora, experiment.sampling
    trained = _sharded(trained_count(experiment.trained), mesh)
    shape = row_shape(sampling, experiment.schedule, sharding.batch_shards(mesh))
    parts = {
        **resident_bytes(Passes(experiment), mesh),
        "adapters, float32": FLOAT32 * trained if lora is not None else 0,
        "gradients": size_of(experiment.trained.dtype) * trained,
        "sum of the microbatches' gradients": FLOAT32 * trained if shape.microbatch < shape.rows else 0,
        **_teacher_bytes(Passes(experiment), mesh),
        **_rollout_bytes(config, sampling, Passes(experiment), mesh),
    }
    return {part: size for part, size in parts.items() if size}


def sampler_bytes(experiment: Experiment, learner: AxisSizes, mesh: AxisSizes) -> dict[str, int]:
    """Return a device's bytes of a rollout's arrays by name. Their sum chooses the layout, so a prefill is estimated.

    Args:
      learner: axis sizes of the learner's mesh, whose devices hold its state; unused if the sampler is disaggregated.
      mesh: axis sizes of the sampler's mesh.
    """
    config, placement = experiment.model, experiment.placement
    sampling = with_carried(experiment.sampling, placement)
    weights, dtype = inference_weights_bytes(config, sampling, mesh), _dtype(sampling.weights_dtype, config)
    if placement is None:
        held = resident_bytes(Passes(experiment), learner)
        held[f"inference weights, {dtype}"] = weights
    else:
        pushes = 1 + (placement.staleness if placement.partial is None else 1)
        held = {f"inference weights, {dtype}, pushed {pushes} times": pushes * weights}
    sizes = sampler_sizes(config, sampling, mesh)
    # The prefill is over when the completions' cache is made, except where that outlives the program of the prefill.
    prefill = sizes.prefill - (0 if sampling.chunk else sizes.completion_cache)
    logits = sizes.device_slots * config.vocab_size // mesh["tensor"] * (1 + sampling.drafts)
    positions = f"{1 + sampling.drafts} positions" if sampling.drafts else "one position"
    parts = {
        **held,
        "cache of the prompts, once per prompt": sizes.prompt_cache,
        "cache of the completions": sizes.completion_cache - sizes.device_slots * sizes.state,
        "recurrent states of the slots": sizes.device_slots * sizes.state,
        f"prefill of {sizes.prefill_chunk} prompts, estimated, beyond that": prefill if prefill > PREFILL_BUDGET else 0,
        f"logits of {positions}, and their exponentials": 2 * FLOAT32 * logits,
        **_rollout_bytes(config, sampling, Passes(experiment), mesh),
    }
    return {part: size for part, size in parts.items() if size}


def resident_bytes(passes: Passes, mesh: AxisSizes) -> dict[str, int]:
    """Return a device's bytes of the arrays that the learner's devices hold throughout a run, by name."""
    experiment = passes.experiment
    config, optimizer = experiment.model, experiment.optimizer
    parts = {f"parameters, {config.param_dtype}": size_of(config.param_dtype) * _sharded(parameter_count(config), mesh)}
    if not optimizer.offload:
        parts["optimizer state"] = optimizer_bytes(optimizer, experiment.trained, mesh)
    dtype = experiment.trained.dtype
    if passes.first_policy:  # with adapters a copy of these alone: both policies share the rest
        parts[f"reference policy, {dtype}"] = size_of(dtype) * _sharded(trained_count(experiment.trained), mesh)
    for name, group in groupby(passes.held(dtype), lambda each: each.name):
        held = list(group)
        dtypes = " and ".join(sorted({each.dtype for each in held}))
        sizes = (size_of(each.dtype) * _sharded(_count(each, experiment.trained), mesh) for each in held)
        parts[f"{name}, {dtypes}"] = sum(sizes)
    return parts


def _count(held: Held, trained: Trained) -> int:
    """Count the parameters that a term holds."""
    if held.model is None:
        return trained_count(trained)
    return parameter_count(with_vocabulary(held.model, trained.model))


def checkpointed_bytes(passes: Passes) -> int:
    """Count the bytes of the parameters that terms hold in the training state, besides the policy's."""
    trained = passes.experiment.trained
    held = passes.held(trained.dtype)
    return sum(size_of(each.dtype) * _count(each, trained) for each in held if each.in_state)


def recorded_bytes(passes: Passes) -> int:
    """Count the bytes of a recorded rollout's arrays: tokens, mask, log-probs, and on request versions and more."""
    experiment = passes.experiment
    config, sampling = experiment.model, experiment.sampling
    positions = sampling.prompts * sampling.group * (sampling.max_prompt_tokens + sampling.max_tokens)
    position = 2 * FLOAT32 + 1 + size_of("uint16")  # the last one is a server's number
    if experiment.environment is not None:
        position += size_of("int32")  # an agent's sequences
    if experiment.partial is not None:
        position += size_of("int32")
    if passes.samples_experts:
        position += sparse_layers(config) * config.num_experts_per_tok * size_of(expert_id_dtype(config))
    if kept := sampling_mask_size(sampling, config.vocab_size):
        position += kept * size_of(token_id_dtype(config)) + 1
    return positions * position


def _teacher_bytes(passes: Passes, mesh: AxisSizes) -> dict[str, int]:
    """Return the bytes of the teacher's arrays that updates read: log-probs, or last hidden states and the head."""
    experiment = passes.experiment
    config, sampling, teacher = experiment.model, experiment.sampling, experiment.teacher
    if teacher is None:
        return {}
    rows = math.ceil(sampling.prompts * sampling.group / sharding.batch_shards(mesh))
    positions = rows * (sampling.max_prompt_tokens + sampling.max_tokens)
    if teacher.divergence is None and not teacher.kept:
        return {"teacher's log-probs of the rollout": FLOAT32 * positions}
    models = teacher_models(teacher) or (config,)
    width, size = max(model.hidden_size for model in models), max(size_of(model.dtype) for model in models)
    return {
        "teacher's hidden states of the rollout": math.ceil(size * width * positions / mesh["context"]),
        "teacher's head, gathered": size * sum(m.hidden_size for m in models) * config.vocab_size // mesh["tensor"],
    }


def optimizer_bytes(optimizer: Optimizer, trained: Trained, mesh: AxisSizes) -> int:
    """Compute a device's share of the optimizer state and of a float32 master copy, in bytes.

    AdamW has two moments; the state of any other transform is traced for the whole model.
    """
    count = _sharded(trained_count(trained), mesh)
    master = 0 if trained.dtype == "float32" else FLOAT32 * count
    if unwrap(optimizer.transform) is optimizers.adamw:
        return 2 * FLOAT32 * count + master
    from gspax.model import transformer  # here, because a dry run with AdamW needs neither flax nor optax

    params = transformer.abstract_params(replace(trained.model, param_dtype="float32"))
    leaves = jax.tree.leaves(jax.eval_shape(optimizer.transform(0.0).init, params))
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return math.ceil(total * count / parameter_count(trained.model)) + master


def inference_weights_bytes(config: ModelConfig, sampling: Sampling, mesh: AxisSizes) -> int:
    """Compute a device's share of the inference weights, in bytes: only experts are sharded over the axis expert."""
    shared, table = count_with_experts(config, 0), lookup_count(config)  # the table is never in 8 bits
    experts, others = parameter_count(config) - shared, shared - table
    count = size_of(_dtype(sampling.weights_dtype, config)) * (experts / mesh["expert"] + others)
    return math.ceil((count + size_of(config.dtype) * table) / (mesh["tensor"] * mesh["fsdp"]))


def _rollout_bytes(config: ModelConfig, sampling: Sampling, passes: Passes, mesh: AxisSizes) -> dict[str, int]:
    """Return the bytes of tokens, segments, three kinds of log-probs (4 bytes each), a mask, and the routing.

    The routing is what updates read: experts' ids in all layers, and log-probs for a shift. Mask replay has the ids
    that a token was chosen from, and whether they are all.
    """
    rows = math.ceil(sampling.prompts * sampling.group / sharding.batch_shards(mesh))
    positions = rows * (sampling.max_prompt_tokens + sampling.max_tokens)
    parts = {"rollout": positions * (5 * 4 + 1)}
    if passes.reads_experts:
        expert = size_of(expert_id_dtype(config)) + (FLOAT32 if passes.keeps_router_logp else 0)
        parts["routing of the rollout"] = positions * sparse_layers(config) * config.num_experts_per_tok * expert
    if passes.sampling_policy:
        width, size = config.hidden_size, size_of(config.dtype)
        parts["hidden states of the policy that sampled"] = math.ceil(size * width * positions / mesh["context"])
        parts["head of the policy that sampled, gathered"] = size * width * config.vocab_size // mesh["tensor"]
    if kept := sampling_mask_size(sampling, config.vocab_size):
        parts["sampling masks of the rollout"] = positions * (kept * size_of(token_id_dtype(config)) + 1)
    return parts


def size_of(dtype: str) -> int:
    """Return the bytes of one number."""
    return jnp.dtype(dtype).itemsize


def _dtype(dtype: SamplerDtype, config: ModelConfig) -> str:
    return config.dtype if dtype == "auto" else dtype


def _sharded(count: int, mesh: AxisSizes) -> int:
    """Compute one device's share of numbers in matrices."""
    return math.ceil(count / (mesh["fsdp"] * mesh["expert"] * mesh["tensor"]))


# --- the sampler ------------------------------------------------------------------------------------------------------


def choose_sampler_layout(experiment: Experiment, sizes: AxisSizes, memory: float = math.inf) -> AxisSizes:
    """Choose the sampler's axes on devices with these axes: the experiment's, or the fastest that fit.

    Args:
      sizes: the axis sizes of the learner's mesh, or of a disaggregated sampler's.
      memory: bytes of a device, as far as they are known.

    Raises:
      UserError: the experiment's axes do not fit the devices.
    """
    placement, model, sampling = experiment.placement, experiment.model, experiment.sampling
    wanted = experiment.sampler_mesh
    if placement is not None:
        wanted = placement.mesh if placement.mesh != Mesh() else None
    if wanted is not None:
        return sharding.resolve_axes(wanted, math.prod(sizes.values()), model, slices=sizes["slice"])
    held = with_carried(sampling, placement).prompts
    rows = math.gcd(sampling.prompts * sampling.group, held * sampling.group, sampling.slots)
    for layout in sharding.sampler_layouts(sizes, model, rows):
        if memory == math.inf or sum(sampler_bytes(experiment, sizes, layout).values()) <= USABLE * memory:
            return layout
    return sizes


def with_carried(sampling: Sampling, sampler: Placement | Engine | None) -> Sampling:
    """Return the settings with as many prompts as the sampler holds at once, carried ones of partial rollouts too."""
    carried = sampler.partial.carried if sampler is not None and sampler.partial is not None else 0
    return replace(sampling, prompts=sampling.prompts + carried)


class SamplerSizes(NamedTuple):
    """The sizes of a rollout on the sampler's devices. Bytes are per device."""

    prompts: int  # of a device; those whose samples are on several devices count on each (`sampler.split_groups`)
    slots: int  # of all devices: one for each sample, `sampling.slots`, or as many as fit, but one for each device
    fitting: int  # slots whose caches fit `sampling.cache_gib`
    device_slots: int
    position: int  # bytes of the keys, the values and their scales of one position of a row
    state: int  # bytes of what gated delta nets keep of a row, whatever its length
    prompt_cache: int  # bytes
    completion_cache: int  # bytes
    prefill_chunk: int  # prompts that a device prefills at once
    prefill: int  # bytes of their activations in one layer, an estimate


def sampler_sizes(config: ModelConfig, sampling: Sampling, mesh: AxisSizes) -> SamplerSizes:
    """Compute the sizes of a rollout of `sampling.prompts` on a mesh whose axes have these sizes.

    A prefill's activations fit in the memory of the completions' cache, which does not exist yet, or in
    `PREFILL_BUDGET`, unless `sampling.prefill_prompts` says how many prompts all devices prefill at once.
    """
    shards, samples = sharding.batch_shards(mesh), sampling.prompts * sampling.group
    dtype = _dtype(sampling.kv_cache_dtype, config)
    kept = [layer.mixer.cache(mesh["tensor"]) for layer in layers_of(config)]
    scale = FLOAT32 if dtype == "int8" else 0
    position = sum(each.vectors * (size_of(dtype) * each.width + scale) for each in kept)
    state = sum(FLOAT32 * each.state + size_of(config.dtype) * each.inputs for each in kept)
    prompts = sampling.prompts // math.gcd(sampling.prompts, shards)
    prompt_cache = prompts * (sampling.max_prompt_tokens * position + state)
    slots = fitting = min(sampling.slots or samples, samples)
    if sampling.cache_gib:
        left = sampling.cache_gib * 2**30 - prompt_cache
        fitting = max(0, int(left // (position * sampling.max_tokens + state))) * shards
        slots = max(shards, min(slots, fitting))
    device_slots = math.ceil(slots / shards)
    if device_slots % mesh["context"] == 0:  # sharded over it too (`sharding.sample_axis`)
        device_slots //= mesh["context"]
    completion_cache = device_slots * (sampling.max_tokens * position + state)
    one_prompt = math.ceil(sampling.max_prompt_tokens / mesh["context"]) * _layer_bytes(config, mesh)
    if sampling.prefill_prompts:
        chunk = min(prompts, math.ceil(sampling.prefill_prompts / shards))
    else:
        at_once = max(1, max(PREFILL_BUDGET, completion_cache) // one_prompt)
        chunk = math.ceil(prompts / math.ceil(prompts / at_once))
    return SamplerSizes(
        prompts=prompts,
        slots=slots,
        fitting=fitting,
        device_slots=device_slots,
        position=position,
        state=state,
        prompt_cache=prompt_cache,
        completion_cache=completion_cache,
        prefill_chunk=chunk,
        prefill=chunk * one_prompt,
    )


def slot_problems(config: ModelConfig, sampling: Sampling, mesh: AxisSizes) -> Iterator[str]:
    """Yield one sentence if the slots' caches do not fit their budget."""
    if not sampling.cache_gib:
        return
    sizes = sampler_sizes(config, sampling, mesh)
    if not sizes.fitting:
        needed = sizes.prompt_cache + sizes.position * sampling.max_tokens + sizes.state
        yield (
            f"sampling.cache_gib: wanted at least {needed / 2**30:.3g} for the cache of a device's prompts and of one "
            f"slot, got {sampling.cache_gib:g}"
        )
    elif sampling.slots > sizes.fitting:
        yield (
            f"sampling.slots: wanted at most {sizes.fitting}, whose caches fit "
            f"sampling.cache_gib={sampling.cache_gib:g}, got {sampling.slots}"
        )


def logit_chunk(config: ModelConfig, mesh: AxisSizes, tokens: int) -> int:
    """Return the number of tokens whose logits one device holds at once, of all tokens of a pass on it.

    The logits take as much memory as one layer's backward pass, which is not alive at the same time, or `LOGIT_BUDGET`
    logits if those are more. Each chunk reads the whole head, so more of them are slower.
    """
    vocabulary = config.vocab_size // mesh["tensor"]
    layer = tokens * _layer_bytes(config, mesh) // (LOGIT_COPIES * FLOAT32 * vocabulary)
    chunk = max(LOGIT_BUDGET // vocabulary, layer, 1)
    return math.ceil(tokens / math.ceil(tokens / chunk))


def _layer_bytes(config: ModelConfig, mesh: AxisSizes) -> int:
    """Estimate the bytes per token that the backward pass of the largest layer reads, without attention scores.

    Heads and widths are sharded over the axis tensor; keys and values are gathered over the axis context.
    """
    D, size, tensor = config.hidden_size, size_of(config.dtype), mesh["tensor"]
    return max(
        size * (3 * D + layer.mixer.activations(tensor, mesh["context"])) + layer.mlp.activation_bytes(D, size, tensor)
        for layer in set(layers_of(config))
    )
