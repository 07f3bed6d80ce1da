"""Run gspax and google-tunix on the same shape, in processes that alternate, so that other load hits both alike."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspax.commands.environment import VARIABLE, has_accelerator
from gspax.config import ModelConfig, Sampling

SCRIPT = Path(__file__).with_name("tunix_grpo.py")
MODEL_KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
)
FIRST_STEP = {"first_step_cpu_s": "CPU", "first_step_s": "wall"}  # from the start of the process
SAMPLING_KEYS = ("prompts", "group", "max_prompt_tokens", "max_tokens")


def compare(python: str, ours: Sequence[str], shape: dict[str, int], rounds: int) -> dict[str, Any]:
    """Run both `rounds` times; the medians and every run's figures.

    The first gspax run compiles everything, the later ones read the compilation cache, which tunix does not have.

    Args:
      python: the interpreter that has google-tunix.
      ours: FILE and its overrides.
      shape: of `shape`.

    Raises:
      SystemExit: one of them fails; the message has the end of what it printed.
    """
    gspax_runs, tunix_runs = [], []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, VARIABLE: f"{folder}/cache"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        if not has_accelerator():
            environment["JAX_PLATFORMS"] = "cpu"
        result = Path(folder) / "bench.json"
        for _ in range(rounds):
            run([sys.executable, "-m", "gspax", "bench", *ours, "--json", str(result)], environment)
            gspax_runs.append(by_phase(json.loads(result.read_text(encoding="utf-8"))))
            tunix_runs.append(json.loads(run([python, str(SCRIPT), json.dumps(shape)], environment).splitlines()[-1]))
    return {"rows": compared(gspax_runs, tunix_runs), "gspax": gspax_runs, "tunix": tunix_runs}


def shape(model: ModelConfig, sampling: Sampling) -> dict[str, int]:
    """What both have in common: the model's sizes and the rollout batch's."""
    return {
        **{name: getattr(model, name) for name in MODEL_KEYS},
        **{name: getattr(sampling, name) for name in SAMPLING_KEYS},
    }


def run(command: Sequence[str], environment: dict[str, str]) -> str:
    """What a command prints. SystemExit with the end of it if it fails."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise SystemExit(f"{Path(command[0]).name} {command[1]} ended with code {done.returncode}: {last}")
    return done.stdout


def by_phase(result: dict[str, Any]) -> dict[str, Any]:
    """Our JSON in the form of the other script's."""
    phases = {row["name"]: {"wall_s": row["wall_s"], "cpu_s": row["cpu_s"]} for row in result["figures"]}
    return {name: result[name] for name in (*FIRST_STEP, "peak_memory_bytes")} | {"phases": phases}


def compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Name of a quantity -> {gspax, tunix, ratio}: medians over the rounds, and tunix's over ours."""

    def phase(name: str, clock: str) -> tuple[float, float]:
        a, b = (statistics.median(each["phases"][name][clock] for each in side) for side in (ours, theirs))
        return a, b

    peaks = [max(each["peak_memory_bytes"] for each in side) / 1e9 for side in (ours, theirs)]
    pairs = {
        "step, CPU s": phase("step", "cpu_s"),
        "step, wall s": phase("step", "wall_s"),
        "rollout, CPU s": phase("rollout", "cpu_s"),
        "update, CPU s": phase("train", "cpu_s"),
        "peak memory, GB": (peaks[0], peaks[1]),
    }
    for field, clock in FIRST_STEP.items():
        first = statistics.median(each[field] for each in theirs)
        pairs[f"first step, {clock} s"] = (ours[0][field], first)
        if len(ours) > 1:
            cached = statistics.median(each[field] for each in ours[1:])
            pairs[f"first step with a warm cache, {clock} s"] = (cached, first)
    return {name: {"gspax": a, "tunix": b, "ratio": b / a} for name, (a, b) in pairs.items()}
