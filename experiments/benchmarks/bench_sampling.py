"""The sampler alone, without rewards: equal and ragged lengths, short and long, more experts, fewer slots.

Prints a table and writes its rows to a file: seconds are medians of three calls after the first, which compiles.

Run: python experiments/benchmarks/bench_sampling.py experiments/bench_small_moe.py --json sampling.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from gspax.config import Experiment, ModelConfig, Sampling
from gspax.experiment import load
from gspax.learner.state import abstract_params
from gspax.model import transformer
from gspax.model.sizes import count_with_experts, forward_flops, lookup_count, sampler_sizes, size_of
from gspax.parallel import multihost
from gspax.parallel.sharding import AXES
from gspax.rollout.runtime import make_runtime
from gspax.sampler.placement import make_sampler
from gspax.sampler.sampler import sample
from gspax.sampler.state import SampleOptions
from gspax.tools.benchmarks import measure_limits, time_calls

REPEATS = 3
RAGGED_SLOTS = 4  # ragged samples for each slot


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


def measure(experiment: Experiment) -> list[dict[str, Any]]:
    """A row of figures for each case, on the sampler's devices."""
    mesh, key = make_runtime(experiment).sampler.mesh, jax.random.key(experiment.seed)
    limits = measure_limits(experiment.model.dtype)
    rows = []
    for name, options in cases(experiment.model, experiment.sampling, mesh):
        model, sampling = options.model, options.sampling
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(model, mesh))
        params = jax.jit(partial(transformer.init, model), out_shardings=shardings)(key)
        weights = make_sampler(model, mesh, mesh).push(params)
        prompts = [[1 + i % (model.vocab_size - 1)] * sampling.max_prompt_tokens for i in range(sampling.prompts)]
        call = partial(sample, weights, prompts, range(sampling.prompts), key, options)
        length_B = multihost.to_host(call().length_B).astype(int).tolist()
        wall, cpu = (statistics.median(seconds) for seconds in zip(*time_calls(call, REPEATS), strict=True))
        tokens = sum(length_B)
        per_token = forward_flops(model, sampling.max_prompt_tokens + tokens / len(length_B))
        flops = (sampling.prompts * sampling.max_prompt_tokens + tokens) * per_token
        rates = {
            "of_matmul": flops / wall / limits.matmul_flops,
            "of_copy": bytes_needed(model, sampling, length_B) / wall / limits.copy_bytes,
        }
        rows.append({"name": name, "wall_s": wall, "cpu_s": cpu, "tokens": tokens, **rates})
    return rows


def bytes_needed(model: ModelConfig, sampling: Sampling, length_B: list[int]) -> float:
    """Bytes that sampling completions of these lengths must move at least.

    At every step these are the weights that its tokens need, once; for every token its sample's positions so far, and
    the prompt of each group.
    """
    at_once = min(sampling.slots or len(length_B), len(length_B))
    steps = max(max(length_B), math.ceil(sum(length_B) / at_once))
    experts = min(model.num_experts, at_once * model.num_experts_per_tok)
    weights = count_with_experts(model, experts) - lookup_count(model)
    completions = sum(length * (length + 1) / 2 for length in length_B)
    groups = [length_B[first : first + sampling.group] for first in range(0, len(length_B), sampling.group)]
    prompt = sampling.max_prompt_tokens * sum(map(max, groups))
    cache = (completions + prompt) * sampler_sizes(model, sampling, dict.fromkeys(AXES, 1)).position
    return steps * weights * size_of(model.dtype) + cache


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as lines of Markdown."""
    lines = ["| | wall s | CPU s | tokens | tokens per CPU s | of copy |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['wall_s']:.2f} | {row['cpu_s']:.2f} | {row['tokens']:,.0f} "
            f"| {row['tokens'] / row['cpu_s']:,.0f} | {row['of_copy']:.0%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="an experiment, whose model and sampling are measured")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the rows of the table")
    options = parser.parse_args()
    rows = measure(load(options.file))
    print("\n".join(table(rows)))
    options.json.write_text(json.dumps({"figures": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
