"""Drawing alone: equal and ragged lengths, short and long ones, few experts and many; scoring alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gspax.commands.benchmarks.figures import Figure
from gspax.commands.benchmarks.steps import measure
from gspax.config import ModelConfig, Sampling

if TYPE_CHECKING:
    from gspax.training.runtime import Runtime

REPEATS = 3  # after the first call, which compiles
RAGGED_SLOTS = 4  # ragged samples for each slot


@dataclass(frozen=True)
class Case:
    """What is drawn, by a model with random parameters."""

    name: str
    model: ModelConfig
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()


def cases(model: ModelConfig, sampling: Sampling) -> Iterator[Case]:
    """The experiment's own shape, and others around it.

    Ragged lengths are geometric: the distribution of random parameters is nearly uniform, so n stop ids among V end a
    sample after V / n tokens on average. They have a mean of half of `max_tokens` and end at 4 × `max_tokens`; twice
    the experiment's samples are drawn, at once and then in a quarter as many slots.
    """
    C = sampling.max_tokens
    yield Case("equal", model, sampling)
    yield Case("short", model, replace(sampling, max_tokens=max(1, C // 4)))
    yield Case("long", model, replace(sampling, max_tokens=4 * C))
    if model.num_experts:
        many = replace(model, num_experts=8 * model.num_experts)
        yield Case(f"{many.num_experts} experts", many, sampling)
    ragged = replace(sampling, prompts=2 * sampling.prompts, max_tokens=4 * C, slots=0)
    stop_ids = tuple(range(max(1, 2 * model.vocab_size // C)))
    yield Case("ragged", model, ragged, stop_ids)
    slots = ragged.prompts * ragged.group // RAGGED_SLOTS
    yield Case(f"{slots} slots", model, replace(ragged, slots=slots), stop_ids)


def measure_drawing(runtime: Runtime) -> list[Figure]:
    """A figure of each case, on the sampler's devices, without rewards."""
    import jax

    from gspax.learner.state import abstract_params
    from gspax.model import transformer
    from gspax.model.sizes.counts import forward_flops
    from gspax.parallel import multihost
    from gspax.sampler.engine import SampleOptions
    from gspax.sampler.placement import make_colocated_sampler
    from gspax.sampler.sampler import sample

    experiment, mesh = runtime.experiment, runtime.sampler.mesh
    key = jax.random.key(experiment.seed)
    found = []
    for case in cases(experiment.model, experiment.sampling):
        model, sampling = case.model, case.sampling
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(model, mesh))
        params = jax.jit(partial(transformer.init, model), out_shardings=shardings)(key)
        served = make_colocated_sampler(model, mesh, mesh).push(params)
        prompts = [[1 + i % (model.vocab_size - 1)] * sampling.max_prompt_tokens for i in range(sampling.prompts)]
        options = SampleOptions(model=model, sampling=sampling, stop_ids=case.stop_ids, mesh=mesh)
        draw = partial(sample, served, prompts, range(sampling.prompts), key, options)
        length_B = multihost.to_host(draw().length_B).astype(int).tolist()
        wall, cpu = measure(draw, REPEATS)
        tokens = sum(length_B)
        each = forward_flops(model, sampling.max_prompt_tokens + tokens / len(length_B))
        prefilled = sampling.prompts * sampling.max_prompt_tokens
        moved = bytes_needed(model, sampling, length_B)
        found.append(Figure(f"drawing, {case.name}", wall, cpu, tokens, (prefilled + tokens) * each, moved))
    return found


def bytes_needed(model: ModelConfig, sampling: Sampling, length_B: list[int]) -> float:
    """Bytes that drawing these lengths must move at least.

    At every step the weights that its tokens need, once; for every token its sample's live positions, and the prompt of
    each group.
    """
    from gspax.model.sizes.counts import attention_count, mlp_count

    size = 2 if model.dtype == "bfloat16" else 4
    at_once = min(sampling.slots or len(length_B), len(length_B))
    steps = max(max(length_B), math.ceil(sum(length_B) / at_once))
    experts = min(model.num_experts, at_once * model.num_experts_per_tok)
    weights = model.vocab_size * model.hidden_size + sum(
        attention_count(model) + mlp_count(model, layer, experts) for layer in range(model.num_hidden_layers)
    )
    position = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    own = sum(length * (length + 1) / 2 for length in length_B)
    groups = [length_B[first : first + sampling.group] for first in range(0, len(length_B), sampling.group)]
    prompt = sampling.max_prompt_tokens * sum(map(max, groups))
    return size * (steps * weights + (own + prompt) * position)


def measure_scoring(runtime: Runtime) -> Figure:
    """Log-probs of a rollout batch's tokens, in the microbatches of the update."""
    import jax
    import jax.numpy as jnp

    from gspax.learner.state import init_state
    from gspax.model.sizes.counts import forward_flops
    from gspax.parallel.sharding import named_sharding

    experiment = runtime.experiment
    model, sampling = experiment.model, experiment.sampling
    state = init_state(model, runtime.optimizer, jax.random.key(experiment.seed), runtime.mesh)
    rows = sampling.prompts * sampling.group // experiment.schedule.minibatches
    T = sampling.max_prompt_tokens + sampling.max_tokens
    by_row = named_sharding(runtime.mesh, "batch")

    def full_rows() -> tuple[Any, Any, Any]:
        tokens_BT = jax.random.randint(jax.random.key(0), (rows, T), 0, model.vocab_size, jnp.int32)
        mask_BT = jnp.broadcast_to(jnp.arange(T) >= sampling.max_prompt_tokens, (rows, T))
        return tokens_BT, jnp.ones((rows, T), jnp.int32), mask_BT

    arrays = jax.jit(full_rows, out_shardings=by_row)()
    wall, cpu = measure(lambda: runtime.steps.score(state.params, *arrays), REPEATS)
    return Figure("scoring", wall, cpu, rows * T, rows * T * forward_flops(model, T))
