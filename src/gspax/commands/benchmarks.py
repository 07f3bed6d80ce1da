"""The measurements of `gspax bench`: whole steps, sampling alone, log-probs alone, and what the machine can do at most.

FLOPs are counted from the model's shape (two per multiplied parameter and token, plus attention; backward twice
forward), not taken from the compiler, which counts a loop's body once.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from gspax.config import ModelConfig, Sampling
from gspax.learner.state import abstract_params, add_adapters, init_state
from gspax.model import transformer
from gspax.model.low_rank import partition
from gspax.model.sizes import forward_flops, lookup_count, parameter_count, sampler_sizes, size_of
from gspax.parallel import multihost
from gspax.parallel.sharding import AXES, named_sharding
from gspax.rollout.problems import Skipped
from gspax.rollout.runtime import Runtime
from gspax.run.compilation import count_compilations
from gspax.sampler.engine import SampleOptions
from gspax.sampler.placement import make_sampler
from gspax.sampler.sampler import sample
from gspax.training.in_flight import InFlight
from gspax.training.step import run_step

STEPS = 7  # after the first
REPEATS = 3  # of sampling and of log-probs, after the first call, which compiles
PHASES = ("rollout", "old_logp", "train", "step")
RAGGED_SLOTS = 4  # ragged samples for each slot


@dataclass(frozen=True)
class Limits:
    """The machine's limits, measured."""

    matmul_flops: float  # FLOP/s
    copy_bytes: float  # bytes/s, read and written


@dataclass(frozen=True)
class Figure:
    """One part: medians of its calls after the first, and the work of one call."""

    name: str
    wall_s: float
    cpu_s: float  # of all threads of this process
    tokens: float
    flops: float  # counted from the model's shape
    bytes: float = 0.0  # that must be moved at least, where memory is the limit; 0: not counted

    def to_json(self, limits: Limits) -> dict[str, str | float]:
        """The figure with its rates and their share of the limits."""
        rates = {
            "tokens_per_s": self.tokens / self.wall_s,
            "flops_per_s": self.flops / self.wall_s,
            "of_matmul": self.flops / self.wall_s / limits.matmul_flops,
        }
        if self.bytes:
            moved = self.bytes / self.wall_s
            rates |= {"bytes_per_s": moved, "of_copy": moved / limits.copy_bytes}
        return {**vars(self), **rates}


def table(figures: Sequence[Figure], limits: Limits) -> str:
    """One row per figure: seconds, tokens/s, FLOP/s and bytes/s with their share of the limit."""
    width = max(10, *(len(figure.name) + 1 for figure in figures))
    head = f"{'':{width}}{'wall s':>9}{'CPU s':>9}{'tokens/s':>12}{'GFLOP/s':>10}{'of matmul':>11}"
    lines = [f"{head}{'GB/s':>8}{'of copy':>9}"]
    for figure in figures:
        row = figure.to_json(limits)
        moved = f"{figure.bytes / figure.wall_s / 1e9:8.2f}{row['of_copy']:9.1%}" if figure.bytes else ""
        lines.append(
            f"{figure.name:{width}}{figure.wall_s:9.3f}{figure.cpu_s:9.3f}{row['tokens_per_s']:12,.0f}"
            f"{figure.flops / figure.wall_s / 1e9:10.2f}{row['of_matmul']:11.1%}{moved}"
        )
    return "\n".join(lines)


def measure_limits(dtype: str = "float32", size: int = 2048, copied: int = 2**28) -> Limits:
    """The rates of one large matrix product and of a copy, on all local devices together."""
    square, line = jnp.ones((size, size), dtype), jnp.ones(copied // 4, jnp.float32)
    multiply, copy = jax.jit(jnp.matmul), jax.jit(jnp.negative)
    devices = jax.local_device_count()
    return Limits(
        matmul_flops=2 * size**3 / min(_time(lambda: multiply(square, square), 5))[0] * devices,
        copy_bytes=2 * copied / min(_time(lambda: copy(line), 5))[0] * devices,
    )


def _time(call: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Wall and CPU seconds of calls that return jax arrays, after a first one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def measure(call: Callable[[], object]) -> tuple[float, float]:
    """Median wall and CPU seconds of a call that returns jax arrays, after a first one that compiles."""
    wall, cpu = (statistics.median(seconds) for seconds in zip(*_time(call, REPEATS), strict=True))
    return wall, cpu


def peak_memory() -> int:
    """Bytes: the most that an accelerator held, or on CPU the process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def age() -> float:
    """Seconds since this process started."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="utf-8") as uptime:
            ticks = float(stat.read().rpartition(")")[2].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.perf_counter()  # elsewhere its start is often that of the machine; the difference is unknown


@dataclass(frozen=True)
class MeasuredSteps:
    """The metrics of the steps after the first, what the first one cost, and the peak of all."""

    metrics: list[dict[str, float]]
    first_step_s: float  # from the start of the process, imports and compilation included
    first_step_cpu_s: float  # CPU seconds of all threads
    programs: int
    cached_programs: int  # of these, read from the compilation cache
    compile_s: float
    peak_memory_bytes: int


def measure_steps(runtime: Runtime, trace: Path | None) -> MeasuredSteps:
    """Run the steps with random parameters; nothing is written but a trace of the last step, if asked for."""
    experiment = runtime.experiment
    with count_compilations() as compiled, runtime.rewards:
        state = init_state(experiment.model, runtime.optimizer, jax.random.key(experiment.seed), runtime.mesh)
        if experiment.lora is not None:
            state = add_adapters(state, experiment.model, experiment.lora, runtime.optimizer, runtime.mesh)
        reference = None
        if experiment.reference is not None:
            reference = jax.tree.map(jnp.copy, partition(state.params)[0])
        in_flight = InFlight(Skipped(experiment.sampling.max_failed))
        state = run_step(runtime, state, reference, in_flight).state
        first_step = age(), time.process_time(), compiled.programs, compiled.cached, compiled.seconds
        metrics = []
        for _ in range(STEPS):
            result = run_step(runtime, state, reference, in_flight)
            state = result.state
            metrics.append(result.metrics)
        if trace is not None:
            with jax.profiler.trace(str(trace), create_perfetto_trace=True):
                run_step(runtime, state, reference, in_flight)
    return MeasuredSteps(metrics, *first_step, peak_memory_bytes=peak_memory())


def phases(runtime: Runtime, metrics: list[dict[str, float]]) -> list[Figure]:
    """Medians of the metrics of steps, and the work of each phase.

    Old log-probs are those of `steps.scored`, mostly all minibatches but the first; if there are none, the phase is
    left out.
    """
    model, sampling, schedule = runtime.experiment.model, runtime.experiment.sampling, runtime.experiment.schedule
    scored = len(runtime.steps.scored) / schedule.minibatches
    median = {name: statistics.median(step[name] for step in metrics) for name in metrics[0]}
    rows = sampling.prompts * sampling.group
    sampled = rows * median["response/length_mean"]
    length = sampling.max_prompt_tokens + median["response/length_mean"]
    per_token = forward_flops(model, length)
    trained = rows * length
    # a prompt is prefilled once for all its samples
    flops = {
        "rollout": (sampling.prompts * sampling.max_prompt_tokens + sampled) * per_token,
        "old_logp": scored * trained * per_token,
        "train": schedule.epochs * 3 * trained * per_token,
    }
    flops["step"] = sum(flops.values())
    tokens = {"rollout": sampled, "old_logp": scored * trained, "train": schedule.epochs * trained, "step": sampled}
    return [
        Figure(phase, median[f"time/{phase}"], median[f"cpu/{phase}"], tokens[phase], flops[phase])
        for phase in PHASES
        if flops[phase]
    ]


def cases(model: ModelConfig, sampling: Sampling, mesh: jax.sharding.Mesh) -> Iterator[tuple[str, SampleOptions]]:
    """The experiment's own shape, and others around it, for a model with random parameters.

    Ragged lengths are geometric: the distribution of random parameters is nearly uniform, so n stop ids among V end a
    sample after V / n tokens on average. They have a mean of half of `max_tokens` and end at 4 × `max_tokens`; twice
    the experiment's samples are sampled, at once and then in a quarter as many slots.
    """
    C = sampling.max_tokens
    equal = SampleOptions(model=model, sampling=sampling, stop_ids=(), mesh=mesh)
    yield "equal", equal
    yield "short", replace(equal, sampling=replace(sampling, max_tokens=max(1, C // 4)))
    yield "long", replace(equal, sampling=replace(sampling, max_tokens=4 * C))
    if model.num_experts:
        many = replace(model, num_experts=8 * model.num_experts)
        yield f"{many.num_experts} experts", replace(equal, model=many)
    longer = replace(sampling, prompts=2 * sampling.prompts, max_tokens=4 * C, slots=0)
    ragged = replace(equal, sampling=longer, stop_ids=tuple(range(max(1, 2 * model.vocab_size // C))))
    yield "ragged", ragged
    slots = longer.prompts * longer.group // RAGGED_SLOTS
    yield f"{slots} slots", replace(ragged, sampling=replace(longer, slots=slots))


def measure_sampling(runtime: Runtime) -> list[Figure]:
    """A figure of each case, on the sampler's devices, without rewards."""
    mesh, key = runtime.sampler.mesh, jax.random.key(runtime.experiment.seed)
    figures = []
    for name, options in cases(runtime.experiment.model, runtime.experiment.sampling, mesh):
        model, sampling = options.model, options.sampling
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(model, mesh))
        params = jax.jit(partial(transformer.init, model), out_shardings=shardings)(key)
        weights = make_sampler(model, mesh, mesh).push(params)
        prompts = [[1 + i % (model.vocab_size - 1)] * sampling.max_prompt_tokens for i in range(sampling.prompts)]
        call = partial(sample, weights, prompts, range(sampling.prompts), key, options)
        length_B = multihost.to_host(call().length_B).astype(int).tolist()
        wall, cpu = measure(call)
        tokens = sum(length_B)
        per_token = forward_flops(model, sampling.max_prompt_tokens + tokens / len(length_B))
        flops = (sampling.prompts * sampling.max_prompt_tokens + tokens) * per_token
        moved = bytes_needed(model, sampling, length_B)
        figures.append(Figure(f"drawing, {name}", wall, cpu, tokens, flops, moved))
    return figures


def bytes_needed(model: ModelConfig, sampling: Sampling, length_B: list[int]) -> float:
    """Bytes that sampling completions of these lengths must move at least.

    At every step these are the weights that its tokens need, once; for every token its sample's positions so far, and
    the prompt of each group.
    """
    at_once = min(sampling.slots or len(length_B), len(length_B))
    steps = max(max(length_B), math.ceil(sum(length_B) / at_once))
    experts = min(model.num_experts, at_once * model.num_experts_per_tok)
    weights = parameter_count(model, experts) - lookup_count(model)
    completions = sum(length * (length + 1) / 2 for length in length_B)
    groups = [length_B[first : first + sampling.group] for first in range(0, len(length_B), sampling.group)]
    prompt = sampling.max_prompt_tokens * sum(map(max, groups))
    cache = (completions + prompt) * sampler_sizes(model, sampling, dict.fromkeys(AXES, 1)).position
    return steps * weights * size_of(model.dtype) + cache


def measure_logprobs(runtime: Runtime) -> Figure:
    """Log-probs of a minibatch of full rows, in the microbatches of the update."""
    experiment = runtime.experiment
    model, sampling = experiment.model, experiment.sampling
    state = init_state(model, runtime.optimizer, jax.random.key(experiment.seed), runtime.mesh)
    B = sampling.prompts * sampling.group // experiment.schedule.minibatches
    T = sampling.max_prompt_tokens + sampling.max_tokens

    def full_rows() -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens_BT = jax.random.randint(jax.random.key(0), (B, T), 0, model.vocab_size, jnp.int32)
        mask_BT = jnp.broadcast_to(jnp.arange(T) >= sampling.max_prompt_tokens, (B, T))
        return tokens_BT, jnp.ones((B, T), jnp.int32), mask_BT

    arrays = jax.jit(full_rows, out_shardings=named_sharding(runtime.mesh, "batch"))()
    wall, cpu = measure(lambda: runtime.steps.score(state.params, *arrays))
    return Figure("scoring", wall, cpu, B * T, B * T * forward_flops(model, T))
