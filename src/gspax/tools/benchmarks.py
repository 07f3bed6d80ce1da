"""Measures whole steps and the machine's limits for `gspax bench`.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from gspax.learner.state import abstract_kept, abstract_policy, add_adapters, init_state, start_kept
from gspax.model.low_rank import partition
from gspax.model.sizes import forward_flops
from gspax.rollout.problems import Skipped
from gspax.rollout.runtime import Runtime
from gspax.run.compilation import count_compilations
from gspax.training.first_policy import FirstPolicy
from gspax.training.in_flight import InFlight
from gspax.training.open_terms import open_terms
from gspax.training.step import run_step

PHASES = ("rollout", "old_logp", "train", "step")


@dataclass(frozen=True)
class Limits:
    """The measured limits of the machine."""

    matmul_flops: float  # FLOP/s
    copy_bytes: float  # bytes/s, read and written


@dataclass(frozen=True)
class Figure:
    """The figures of one phase: medians of its calls after the first, and the work of one call."""

    name: str
    wall_s: float
    cpu_s: float  # of all threads of this process
    tokens: float
    flops: float  # counted from the model's shape

    def to_json(self, limits: Limits) -> dict[str, str | float]:
        """Return the figure with its rates and their share of the limit."""
        rate = self.flops / self.wall_s
        rates = {"flops_per_s": rate, "of_matmul": rate / limits.matmul_flops}
        return {**vars(self), "tokens_per_s": self.tokens / self.wall_s, **rates}


def table(figures: Sequence[Figure], limits: Limits) -> str:
    """Format one row per figure: seconds, tokens/s, and FLOP/s with their share of the limit."""
    lines = [f"{'':10}{'wall s':>9}{'CPU s':>9}{'tokens/s':>12}{'GFLOP/s':>10}{'of matmul':>11}"]
    for figure in figures:
        row = figure.to_json(limits)
        lines.append(
            f"{figure.name:10}{figure.wall_s:9.3f}{figure.cpu_s:9.3f}{row['tokens_per_s']:12,.0f}"
            f"{figure.flops / figure.wall_s / 1e9:10.2f}{row['of_matmul']:11.1%}"
        )
    return "\n".join(lines)


def measure_limits(dtype: str = "float32") -> Limits:
    """Measure the limits of all local devices together."""
    one, devices = measure_device(dtype), jax.local_device_count()
    return Limits(matmul_flops=one.matmul_flops * devices, copy_bytes=one.copy_bytes * devices)


def measure_device(dtype: str, size: int = 2048, copied: int = 2**28) -> Limits:
    """Measure one device's rates in a product of matrices of `size` rows, and in a copy of `copied` bytes."""
    square, line = jnp.ones((size, size), dtype), jnp.ones(copied // 4, jnp.float32)
    multiply, copy = jax.jit(jnp.matmul), jax.jit(jnp.negative)
    return Limits(
        matmul_flops=2 * size**3 / min(time_calls(lambda: multiply(square, square), 5))[0],
        copy_bytes=2 * copied / min(time_calls(lambda: copy(line), 5))[0],
    )


def time_calls(call: Callable[[], object], repeats: int, most: float = math.inf) -> list[tuple[float, float]]:
    """Measure wall and CPU seconds of calls that return jax arrays, after a first call that compiles.

    Fewer calls than `repeats`, but one at least, if these take more than `most` seconds.
    """
    jax.block_until_ready(call())
    times: list[tuple[float, float]] = []
    while len(times) < repeats and sum(wall for wall, _ in times) < most:
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def peak_memory() -> int:
    """Return the peak memory in bytes, of the first local accelerator, or on CPU of the process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def age() -> float:
    """Return the seconds since this process started."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="utf-8") as uptime:
            ticks = float(stat.read().rpartition(")")[2].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.perf_counter()  # elsewhere its start is often that of the machine; the difference is unknown


@dataclass(frozen=True)
class MeasuredSteps:
    """The metrics of the steps after the first, the cost of the first step, and the peak memory of all."""

    metrics: list[dict[str, float]]
    first_step_s: float  # from the start of the process, imports and compilation included
    first_step_cpu_s: float  # CPU seconds of all threads
    programs: int
    cached_programs: int  # of these, read from the compilation cache
    compile_s: float
    peak_memory_bytes: int


def measure_steps(runtime: Runtime, trace: Path | None, number: int) -> MeasuredSteps:
    """Run a first step and `number` more; nothing is written but a trace of a last step, if asked for."""
    experiment = runtime.experiment
    with count_compilations() as compiled, runtime.rewards:
        state = init_state(experiment.model, runtime.optimizer, jax.random.key(experiment.seed), runtime.mesh)
        if experiment.lora is not None:
            state = add_adapters(state, runtime.policy, experiment.lora)
        opened = open_terms(runtime)
        if runtime.passes.first_policy:
            opened = (FirstPolicy(jax.tree.map(jnp.copy, partition(state.params)[0])), *opened)
        if (kept := abstract_kept(runtime.policy, abstract_policy(runtime.policy))) is not None:
            state = start_kept(state, kept)
        in_flight = InFlight(Skipped(experiment.sampling.max_failed))
        state = run_step(runtime, state, in_flight, opened).state
        first_step = age(), time.process_time(), compiled.programs, compiled.cached, compiled.seconds
        metrics = []
        for _ in range(number):
            result = run_step(runtime, state, in_flight, opened)
            state = result.state
            metrics.append(result.metrics)
        if trace is not None:
            with jax.profiler.trace(str(trace), create_perfetto_trace=True):
                run_step(runtime, state, in_flight, opened)
    return MeasuredSteps(metrics, *first_step, peak_memory_bytes=peak_memory())


def phases(runtime: Runtime, metrics: list[dict[str, float]]) -> list[Figure]:
    """Compute medians of the metrics of steps, and the work of each phase.

    Old log-probs are computed for `steps.scored`, mostly all minibatches but the first; without any, the phase is left
    out.
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
