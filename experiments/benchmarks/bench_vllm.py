"""A vLLM server on this machine beside the sampler in process; prints the rows of vllm.md.

    python experiments/benchmarks/bench_vllm.py VLLM FOLDER bfloat16 float32 large

VLLM is the environment of vLLM's CPU build, FOLDER is for weights. The parts are the small mixture of experts in each
dtype, and a dense model of 0.6B parameters. Both samplers get the same prompts, one after the other on the same cores.
The models are random. CPU-seconds are of all threads of this process, and with vLLM of the server's processes too; on a
busy machine they say more than seconds.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from gspax.config import Engine, Experiment, Sampling
from gspax.hf import parameters
from gspax.learner.state import init_state
from gspax.model import presets, transformer
from gspax.rollout.contract import Request
from gspax.rollout.runtime import make_runtime
from gspax.rollout.servers import vllm
from gspax.rollout.servers.sampler import context_length
from gspax.training.in_flight import InFlight, read_prompts, sample_options
from gspax.training.step import run_step

sys.path.append(str(Path(__file__).parents[1]))
from sort_gspo import experiment

ROUNDS = 2
MISMATCH = ("engine/probe_abs_diff", "mismatch/abs_diff", "mismatch/abs_diff_largest_max", "mismatch/extreme_tokens")
SMALL = replace(experiment, warm_start=None, model=replace(experiment.model, head_dim=32))
LARGE = replace(
    SMALL,
    model=replace(presets.qwen3_0_6b, max_position_embeddings=512),
    sampling=Sampling(prompts=4, group=2, max_prompt_tokens=8, max_tokens=16),
)


@contextlib.contextmanager
def serve(environment: Path, folder: Path, settings: Experiment) -> Iterator[tuple[Experiment, int]]:
    """A server for an experiment: the experiment with it, and its process group."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    model, is_sparse = folder / "model", settings.model.num_experts > 0
    model.mkdir(parents=True, exist_ok=True)
    parameters.write_config(model, settings.model, settings.model.dtype)
    length = context_length(settings.sampling, settings.evaluation)
    command = vllm.command(model, settings.model, length, address, experts=is_sparse, cpu=True)
    variables = {**os.environ, "PATH": f"{environment}/bin:{os.environ['PATH']}"}
    with (folder / "vllm.log").open("a") as log:
        process = subprocess.Popen(command, shell=True, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        yield replace(settings, engine=Engine(folder=str(folder), addresses=(address,), probes=2)), process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cpu_seconds(group: int | None) -> float:
    """The CPU-seconds of this process, and of a process group."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = used.ru_utime + used.ru_stime
    for stat in Path("/proc").glob("[0-9]*/stat") if group else ():
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def time_rollouts(settings: Experiment, params: Any, group: int | None) -> dict[str, float]:
    """Medians of seconds and CPU-seconds of a rollout, after one that compiles."""
    runtime, taken = make_runtime(settings), []
    weights, places = runtime.sampler.push(params, 0), settings.sampling.prompts
    ids, encoded = read_prompts(runtime, {place: place for place in range(places)}, places, InFlight())
    options = sample_options(runtime)
    for number in range(1 + ROUNDS):
        key, begun, cpu = jax.random.key(number), time.monotonic(), cpu_seconds(group)
        request = Request(encoded=encoded, prompt_ids=[ids[place] for place in range(places)], key=key, options=options)
        rollout, _ = runtime.sampler.sample(weights, request).result()
        jax.block_until_ready(rollout)
        taken.append((time.monotonic() - begun, cpu_seconds(group) - cpu))
    seconds, cpu = (statistics.median(each) for each in zip(*taken[1:], strict=True))
    return {"s": seconds, "cpu": cpu, "rate": places * settings.sampling.group / seconds, **weights.metrics}


def train_steps(settings: Experiment, count: int) -> list[dict[str, float]]:
    """The metrics of the first steps of a run."""
    runtime, found = make_runtime(settings), []
    state = init_state(settings.model, runtime.optimizer, jax.random.key(0), runtime.mesh)
    for _ in range(count):
        result = run_step(runtime, state, InFlight())
        state = result.state
        found.append(result.metrics)
    return found


def measure_small(environment: Path, folder: Path, dtype: str) -> None:
    name, small = f"small mixture of experts, {dtype}", replace(SMALL, model=replace(SMALL.model, dtype=dtype))
    params = transformer.init(small.model, jax.random.key(0))
    with serve(environment, folder / dtype, small) as (served, group):
        print_samples(name, small, served, params, group)
        for replay in ("sampler", "off"):
            found = train_steps(replace(served, routing_replay=replay), 4)
            figures = [f"{max(step[name] for step in found):.1e}" for name in MISMATCH]
            print_row(f"| {dtype} | {replay} | {' | '.join(figures)} |")


def measure_large(environment: Path, folder: Path) -> None:
    name, params = "0.6B parameters, dense, bfloat16", transformer.init(LARGE.model, jax.random.key(0))
    with serve(environment, folder / "large", LARGE) as (served, group):
        print_samples(name, LARGE, served, params, group)


def print_samples(name: str, alone: Experiment, served: Experiment, params: Any, group: int) -> None:
    own, theirs = time_rollouts(alone, params, None), time_rollouts(served, params, group)
    count = alone.sampling.prompts * alone.sampling.group
    what = f"{count} of at most {alone.sampling.max_tokens} tokens"
    figures = [f"{one['s']:.2f} | {one['cpu']:.2f} | {one['rate']:.0f}" for one in (own, theirs)]
    print_row(f"| {name} | {what} | {' | '.join(figures)} |")


def print_row(row: str) -> None:
    print(row, f"<!-- load {os.getloadavg()[0]:.0f} -->", flush=True)


def main(environment: Path, folder: Path, parts: list[str]) -> None:
    for part in parts:
        if part == "large":
            measure_large(environment, folder)
        else:
            measure_small(environment, folder, part)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute(), sys.argv[3:])
