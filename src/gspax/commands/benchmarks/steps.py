"""Whole steps: `training.step.run_step`, which `gspax train` runs, phase by phase."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspax.commands.benchmarks.figures import Figure

if TYPE_CHECKING:
    from gspax.config import ModelConfig, Sampling
    from gspax.training.runtime import Runtime

STEPS = 7  # after the first
PHASES = ("rollout", "old_logp", "train", "step")


@dataclass(frozen=True)
class MeasuredSteps:
    """The metrics of the steps after the first, and what the first one cost."""

    metrics: list[dict[str, float]]
    first_step_s: float  # from the start of the process, imports and compilation included
    first_step_cpu_s: float  # the same in CPU seconds of all threads
    programs: int
    cached_programs: int  # of these, read from the compilation cache
    compile_s: float


def measure_steps(runtime: Runtime, trace: Path | None) -> MeasuredSteps:
    """Run the steps with random parameters; nothing is written but a trace of the last step, if asked for."""
    import jax
    import jax.numpy as jnp

    from gspax.learner.state import add_adapters, init_state
    from gspax.model.low_rank import partition
    from gspax.run.compilation import count_compilations
    from gspax.training.in_flight import InFlight
    from gspax.training.step import run_step

    experiment = runtime.experiment
    with count_compilations() as compiled, runtime.rewards:
        state = init_state(experiment.model, runtime.optimizer, jax.random.key(experiment.seed), runtime.mesh)
        if experiment.lora is not None:
            state = add_adapters(state, experiment.model, experiment.lora, runtime.optimizer, runtime.mesh)
        reference = None
        if experiment.reference is not None:
            reference = jax.tree.map(jnp.copy, partition(state.params)[0])
        in_flight = InFlight()
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
    return MeasuredSteps(metrics, *first_step)


def scored_share(runtime: Runtime) -> float:
    """The share of a rollout batch that is scored: mostly all minibatches but the first."""
    return len(runtime.steps.scored) / runtime.experiment.schedule.minibatches


def age() -> float:
    """Seconds since this process started."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="utf-8") as uptime:
            ticks = float(stat.read().rpartition(")")[2].split()[19])
            return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return time.perf_counter()  # elsewhere its start is often that of the machine; the difference is unknown


def figures(
    model: ModelConfig, sampling: Sampling, metrics: list[dict[str, float]], *, scored: float = 1.0, epochs: int = 1
) -> list[Figure]:
    """Medians of the steps' metrics, and the work of each phase.

    Args:
      scored: `scored_share`; at 0 there is no phase for old log-probs.
      epochs: passes of updates over the rollout batch.

    FLOPs are counted from the model's shape (two per multiplied parameter and token, plus attention; backward twice
    forward), not taken from the compiler, which counts a loop's body once.
    """
    from gspax.model.sizes.counts import forward_flops

    median = {name: statistics.median(step[name] for step in metrics) for name in metrics[0]}
    rows = sampling.prompts * sampling.group
    drawn = rows * median["response/length_mean"]
    length = sampling.max_prompt_tokens + median["response/length_mean"]
    each = forward_flops(model, length)
    once = rows * length * each
    # a prompt is prefilled once for all its samples
    flops = {
        "rollout": (sampling.prompts * sampling.max_prompt_tokens + drawn) * each,
        "old_logp": scored * once,
        "train": epochs * 3 * once,
    }
    flops["step"] = sum(flops.values())
    trained = rows * length
    tokens = {"rollout": drawn, "old_logp": scored * trained, "train": epochs * trained, "step": drawn}
    return [
        Figure(phase, median[f"time/{phase}"], median[f"cpu/{phase}"], tokens[phase], flops[phase])
        for phase in PHASES
        if flops[phase]
    ]


def measure(call: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
    """Median wall and CPU seconds of a call that gives jax arrays, after a first one that compiles."""
    import jax

    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
    return wall, cpu
