"""The devices that a model needs, their memory, and the least time of a step, as a table in docs/tutorials/pod.md.

Memory is that of the dry run's plan, so without activations; a tenth of a device is left to them. The time is that of
the floating-point operations alone, at the devices' peak. Nothing is compiled or trained.

Run: python experiments/benchmarks/sizes.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gspax.config import Experiment
from gspax.errors import UserError
from gspax.experiment import load
from gspax.experiment.plan import Plan, memory_problems, plan
from gspax.model import presets
from gspax.model.sizes import forward_flops
from gspax.run.folders import write_atomically
from gspax.tools.aot.chips import CHIPS
from gspax.tools.doctor.hardware import PEAKS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "pod.md"
BEGIN, END = "<!-- written by experiments/benchmarks/sizes.py -->", "<!-- end -->"
MODELS = {
    "Qwen3-0.6B": presets.qwen3_0_6b,
    "Qwen3-30B-A3B": presets.qwen3_30b_a3b,
    "Qwen3-235B-A22B": presets.qwen3_235b_a22b,
}
DEVICES = {"H100": (74.5, PEAKS["NVIDIA H100 80GB HBM3"][0])} | {  # GiB, FLOP/s of bfloat16
    f"{name} chip": (CHIPS[name].memory_gib, CHIPS[name].flops) for name in ("v5e", "v6e", "v5p")
}
TOKENS = 1024  # of a response, and as many of its prompt at most
PASSES = 5  # forward passes in FLOPs: one samples, one computes old log-probs, and an update takes three


def sized(name: str) -> Experiment:
    """GSPO with 128 prompts x 16 responses of 1,024 tokens, the sampler with 2 GiB of keys and values per device."""
    base = load(ROOT / "experiments" / "qwen3_30b_a3b_v5p_64.py")
    sampling = replace(base.sampling, max_prompt_tokens=TOKENS, max_tokens=TOKENS, cache_gib=2.0)
    return replace(base, model=MODELS[name], sampling=sampling)


def fewest(experiment: Experiment, gib: float) -> tuple[int, Plan] | None:
    """The smallest power of two of devices on which the experiment fits, with its plan; None up to 1,024."""
    for exponent in range(11):
        try:
            found = plan(experiment, 2**exponent)
        except UserError:  # the rows cannot be divided
            continue
        if not memory_problems(found, 0.9 * gib):
            return 2**exponent, found
    return None


def row(name: str) -> list[str]:
    experiment, cells = sized(name), [name]
    rows = experiment.sampling.prompts * experiment.sampling.group
    flops = PASSES * rows * 2 * TOKENS * forward_flops(experiment.model, 2 * TOKENS)
    for gib, rate in DEVICES.values():
        if (found := fewest(experiment, gib)) is None:
            cells.append("not with 1,024")
            continue
        devices, sizes = found
        largest = max(sum(sizes.learner.values()), sum(sizes.sampler.values())) * 1e-9
        cells.append(f"{devices:,} x {largest:.1f} GB, {flops / (devices * rate):,.0f} s")
    return [*cells, f"{plan(experiment, 64).checkpoint * 1e-9:,.0f} GB"]


def table() -> str:
    lines = [["model", *DEVICES, "a checkpoint"], ["---"] * (len(DEVICES) + 2), *map(row, MODELS)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    write_atomically(PAGE, f"{before}{BEGIN}\n{table()}\n{END}{after}")
    print(PAGE)


if __name__ == "__main__":
    main()
