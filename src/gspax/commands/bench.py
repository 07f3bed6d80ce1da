"""How fast an experiment samples and trains on this machine: `gspax bench`.

It times `loop.run_step`, which `gspax train` runs. Seconds are medians over the steps after the first, which compiles.
FLOPs are counted from the model's shape (two per multiplied parameter and token, plus attention; backward twice
forward), not taken from the compiler, which counts a loop's body once.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from gspax.commands import launch
from gspax.commands.arguments import Parser, add_experiment, subcommand_parser
from gspax.commands.inputs import load_experiment

if TYPE_CHECKING:
    from gspax.config import Experiment, ModelConfig, Sampling
    from gspax.loop import PendingRollout

STEPS = 7  # after the first
PHASES = ("rollout", "old_logp", "train", "step")


def make_parser() -> Parser:
    parser = subcommand_parser(
        "bench",
        "Measure how fast an experiment samples and trains on this machine.",
        "gspax bench experiments/sort_gspo.py sampling.prompts=128",
    )
    add_experiment(parser)
    launch.add_options(parser)
    return parser


def execute(options: argparse.Namespace) -> int:
    experiment = load_experiment(options)
    launch.join("bench", options, experiment)
    run(experiment)
    return 0


def run(experiment: Experiment) -> None:
    """Measure, and print a table. Random parameters; nothing is written."""
    import jax
    import jax.numpy as jnp

    from gspax.learner.state import add_adapters, init_state
    from gspax.loop import make_learner, run_step

    began = time.perf_counter()
    learner = make_learner(experiment)
    state = init_state(experiment.model, learner.optimizer, jax.random.key(experiment.seed), learner.mesh)
    needed = experiment.reference is not None and experiment.lora is None
    reference = jax.tree.map(jnp.copy, state.params) if needed else None
    if experiment.lora is not None:
        state = add_adapters(state, experiment.model, experiment.lora, learner.optimizer, learner.mesh)
    measured = []
    ahead: deque[PendingRollout] = deque()
    for step in range(STEPS + 1):
        state, metrics, _ = run_step(learner, state, reference, ahead)
        measured.append(metrics)
        if step == 0 and jax.process_index() == 0:
            print(f"first step done after {time.perf_counter() - began:.1f} s, compilation included")
    if jax.process_index() != 0:
        return
    print(table(experiment.model, experiment.sampling, measured[1:], matmul_ceiling()))
    print(f"peak memory {peak_memory() / 2**30:.2f} GiB")


def table(model: ModelConfig, sampling: Sampling, measured: list[dict[str, float]], ceiling: float) -> str:
    """One row per phase: wall and CPU seconds, tokens/s, FLOP/s and its share of `ceiling`, also in FLOP/s."""
    import jax

    from gspax.experiment.counts import forward_flops

    median = {name: statistics.median(metrics[name] for metrics in measured) for name in measured[0]}
    rows = sampling.prompts * sampling.group
    drawn = rows * median["response/length_mean"]
    length = sampling.max_prompt_tokens + median["response/length_mean"]
    each = forward_flops(model, length)
    once = rows * length * each
    # a prompt is prefilled once for all its samples
    flops = {
        "rollout": (sampling.prompts * sampling.max_prompt_tokens + drawn) * each,
        "old_logp": once,
        "train": 3 * once,
    }
    flops["step"] = sum(flops.values())
    tokens = {"rollout": drawn, "old_logp": rows * length, "train": rows * length, "step": drawn}
    lines = [f"{'':10}{'wall s':>9}{'CPU s':>9}{'tokens/s':>12}{'GFLOP/s':>10}{'of matmul':>11}"]
    for phase in PHASES:
        wall, rate = median[f"time/{phase}"], flops[phase] / median[f"time/{phase}"]
        lines.append(
            f"{phase:10}{wall:9.3f}{median[f'cpu/{phase}']:9.3f}{tokens[phase] / wall:12,.0f}"
            f"{rate / 1e9:10.2f}{rate / ceiling:11.1%}"
        )
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return "\n".join([*lines, f"matmul ceiling {ceiling / 1e9:.1f} GFLOP/s ({model.dtype}, {devices})"])


def matmul_ceiling(size: int = 2048, repeats: int = 5) -> float:
    """FLOP/s of one large float32 matrix product on all local devices together, the best of a few."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((size, size))
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best * jax.local_device_count()


def peak_memory() -> int:
    """Bytes: the most that an accelerator held, or on CPU the process."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
