"""Run gspax and its peers on the same shape, in processes that alternate, so that other load hits all alike."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspax.commands.environment import VARIABLE, has_accelerator
from gspax.config import ModelConfig, Sampling

SCRIPTS = {"google-tunix": "tunix_grpo.py", "TRL": "trl_gspo.py"}  # of each peer, in this folder
MODEL_KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
)
FIRST_STEP = {"first_step_cpu_s": "CPU", "first_step_s": "wall"}  # from the start of the process
SAMPLING_KEYS = ("prompts", "group", "max_prompt_tokens", "max_tokens")


def compare(pythons: Mapping[str, str], ours: Sequence[str], shape: dict[str, int], rounds: int) -> dict[str, Any]:
    """Run all `rounds` times; the medians and every run's figures.

    The first gspax run compiles everything, the later ones read the compilation cache, which no peer has.

    Args:
      pythons: the interpreter that has a peer, by its name in `SCRIPTS`.
      ours: FILE and its overrides.
      shape: of `shape`.

    Raises:
      SystemExit: one of them fails; the message has the end of what it printed.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("gspax", *pythons)}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, VARIABLE: f"{folder}/cache"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        if not has_accelerator():
            environment["JAX_PLATFORMS"] = "cpu"
        result = Path(folder) / "bench.json"
        for _ in range(rounds):
            run([sys.executable, "-m", "gspax", "bench", *ours, "--json", str(result)], environment)
            runs["gspax"].append(by_phase(json.loads(result.read_text(encoding="utf-8"))))
            for name, python in pythons.items():
                script = str(Path(__file__).with_name(SCRIPTS[name]))
                printed = run([python, script, json.dumps(shape)], environment)
                runs[name].append(json.loads(printed.splitlines()[-1]))
    return {"rows": compare_figures(runs), "runs": runs}


def shape(model: ModelConfig, sampling: Sampling) -> dict[str, int]:
    """The sizes that all have in common: those of the model and of a rollout."""
    return {
        **{name: getattr(model, name) for name in MODEL_KEYS},
        **{name: getattr(sampling, name) for name in SAMPLING_KEYS},
    }


def run(command: Sequence[str], environment: dict[str, str]) -> str:
    """The output of a command. SystemExit with the end of it if it fails."""
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


def compare_figures(runs: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Each quantity's value for gspax and for each peer: medians over the rounds.

    The first step of gspax's first run compiles; the later runs read the cache.
    """
    rows = {
        f"{title}, {clock} s": {
            name: statistics.median(each["phases"][phase][field] for each in figures) for name, figures in runs.items()
        }
        for title, phase in (("step", "step"), ("rollout", "rollout"), ("update", "train"))
        for clock, field in (("wall", "wall_s"), ("CPU", "cpu_s"))
    }
    rows["peak memory, GB"] = {
        name: statistics.median(each["peak_memory_bytes"] / 1e9 for each in figures) for name, figures in runs.items()
    }
    for field, clock in FIRST_STEP.items():
        firsts = {name: [each[field] for each in figures] for name, figures in runs.items()}
        medians = {name: statistics.median(seconds) for name, seconds in firsts.items()}
        rows[f"first step, {clock} s"] = medians | {"gspax": firsts["gspax"][0]}
        if cached := firsts["gspax"][1:]:
            rows[f"first step with a warm cache, {clock} s"] = medians | {"gspax": statistics.median(cached)}
    return rows
