"""A pass of the sampler with drafts on TPU pods, compiled: its bytes and bounds beside one without drafts.

Compiles the rollout of the experiments of pods.md with 0, 1, 3, and 7 drafts, one after the other, unless its figures
are in DIR already. One takes one to three CPU-minutes. The other parts of a step are read from pods.md.

Run: python experiments/benchmarks/pods_drafts.py DIR --commit COMMIT (pods_drafts.md)
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
from pods import HERE, PODS, read_columns

from gspax.config import Experiment
from gspax.experiment import load
from gspax.tools.aot.chips import Topology, make_targets, parse_topology
from gspax.tools.aot.compile_report import DECODE, PREFILL, Work, estimate
from gspax.tools.aot.programs import ROLLOUT, Program, compile_few, few_layers, make_programs

EXPERIMENTS = "v5p_64", "v5e_64", "v6e_64", "235B, v5p_512"
DRAFTS = 0, 1, 3, 7
TOKENS = 1, 2, 3, 4, 6  # per pass
CASES = [(0, 1), *((drafts, tokens) for drafts in DRAFTS[1:] for tokens in TOKENS if tokens <= drafts + 1)]
Figures = dict[str, float]


def measure(experiment: Experiment, topology: Topology) -> Figures:
    """The bounds of the prefill and of a pass, in seconds, and the bytes of a pass."""
    targets = learner, sampler = make_targets(experiment, topology)
    few = few_layers(experiment.model)
    assert few is not None

    def make(number: int) -> Program:
        small = replace(experiment, model=replace(experiment.model, num_hidden_layers=number))
        return next(each for each in make_programs(small, learner.mesh, sampler.mesh) if each.name == ROLLOUT)

    compiled = compile_few(make(few.layers), make, few)
    if compiled.memory is None:
        raise SystemExit(f"{experiment.name}: {compiled.error}")
    work = Work(model=experiment.model, sampling=experiment.sampling, minibatches=experiment.schedule.minibatches)
    phases = {phase.name: (phase, times) for phase, times in estimate([compiled], targets, work)}
    decode, times = phases[DECODE]
    return {
        "prefill": phases[PREFILL][1].bound,
        "passes": decode.runs,
        "pass": times.bound,
        "compute": times.compute,
        "memory": times.memory,
        "network": times.network,
        "moved": decode.moved,
        "sent": sum(decode.sent.values()),
        "peak": compiled.memory.total,
    }


def pass_table(found: dict[str, list[Figures]]) -> Iterator[str]:
    yield "| experiment | k | GB moved, sent | ms: FLOPs, memory, network | relative to k = 0 | GB at the peak |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, rows in found.items():
        for drafts, row in zip(DRAFTS, rows, strict=True):
            seconds = ", ".join(f"{1e3 * row[each]:.2f}" for each in ("compute", "memory", "network"))
            moved = f"{row['moved'] / 1e9:.2f}, {row['sent'] / 1e9:.2f}"
            ratio = row["pass"] / rows[0]["pass"]
            yield f"| {name} | {drafts} | {moved} | {seconds} | {ratio:.2f} | {row['peak'] / 1e9:.1f} |"


def step_table(found: dict[str, list[Figures]], rest: dict[str, float]) -> Iterator[str]:
    yield f"| experiment | {' | '.join(f'k = {drafts}, {tokens}' for drafts, tokens in CASES)} |"
    yield "| --- |" + " --- |" * len(CASES)
    for name, rows in found.items():
        of_drafts = dict(zip(DRAFTS, rows, strict=True))
        chosen = ((of_drafts[drafts], tokens) for drafts, tokens in CASES)
        cells = [rest[name] + row["prefill"] + row["pass"] * row["passes"] / tokens for row, tokens in chosen]
        yield f"| {name} | {' | '.join(f'{cell:.1f}' for cell in cells)} |"


def step_rest(columns: dict[str, dict[str, str]], names: Sequence[str]) -> dict[str, float]:
    """Seconds of a step without its rollout, from pods.md."""
    parts = {name: re.findall(r"([a-z -]+) ([\d.]+)", columns[name]["a step's parts, seconds"]) for name in names}
    return {
        name: sum(float(seconds) for part, seconds in found if part.strip() != ROLLOUT) for name, found in parts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="of the figures")
    parser.add_argument("--commit", required=True, help="what is compiled")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")
    found: dict[str, list[Figures]] = {name: [] for name in EXPERIMENTS}
    for name, rows in found.items():
        file, topology = PODS[name]
        for drafts in DRAFTS:
            path = options.folder / f"{Path(file).stem}_{drafts}.json"
            if not path.exists():
                experiment = load(HERE.parent / file)
                experiment = replace(experiment, sampling=replace(experiment.sampling, drafts=drafts))
                path.write_text(json.dumps(measure(experiment, parse_topology(topology))))
            rows.append(json.loads(path.read_text()))
    lines = [
        "# A pass with drafts on TPU pods, compiled",
        "",
        f"Written by `pods_drafts.py` at {options.commit}: the rollouts of the experiments of [pods.md](pods.md), with",
        "`sampling.drafts=k`, on each device. Nothing here has run on a TPU; times are rooflines, extrapolated from",
        "two models of 4 and 6 layers. Relative to k = 0 is the number of tokens per pass at which drafts break even.",
        "On v5e the network is the limit, and drafts do not pay: the rows of all devices are gathered for the experts.",
        "",
        *pass_table(found),
        "",
        "Seconds that a step takes at least, by k and the tokens per pass (`k = 3, 2`: 3 drafts, 2 tokens). The other",
        "parts of a step are those of pods.md.",
        "",
        *step_table(found, step_rest(read_columns(HERE / "pods.md"), EXPERIMENTS)),
        "",
    ]
    (HERE / "pods_drafts.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
