"""One table of what a GPU does with gspax: whether it computes right, and how fast it samples and trains.

    python experiments/benchmarks/rehearse_gpu.py DIR

At most 25 minutes on one card, with whatever jax is installed, and without a network. Each part is a command of gspax
with a time limit. A part that fails is a row with its last line, and the others go on:

1. `gspax doctor`
2. `gspax bench` of SmolLM2-135M's shape with random weights
3. `gspax bench` of Qwen3-30B-A3B with as many of its layers as fit, halved while the memory does not suffice
4. `gspax train` of the published SmolLM2 in bfloat16 (smollm2_constraints.py), if `make real` has converted it

DIR gets each part's output (`NAME.txt`), the figures (`NAME.json`), and the table (`gpu.md`). `--toy` takes shapes that
a CPU can do: it tests this script.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspax.experiment import load, override
from gspax.experiment.plan import Plan, plan
from gspax.tools.doctor.hardware import peaks

HERE = Path(__file__).parent
WORKLOAD = HERE / "gpu_workload.py"
REAL, CONVERTED = HERE.parent / "smollm2_constraints.py", ".cache/smollm2"
LIMITS = {"doctor": 420, "dense": 240, "moe": 420, "real": 420}  # seconds; 25 minutes together
MODELS = {"dense": "gpu_workload.smollm2_135m", "moe": "gpu_workload.qwen3_moe"}
TOY = (
    *("model.hidden_size=64", "model.num_hidden_layers=2", "model.head_dim=16", "model.num_attention_heads=2"),
    *("model.num_key_value_heads=1", "model.vocab_size=256", "tokenizer.vocab_size=256", "model.intermediate_size=32"),
    *(
        "sampling.prompts=2",
        "sampling.group=2",
        "sampling.max_tokens=8",
        "data.length=8",
        "sampling.max_prompt_tokens=8",
    ),
)
TOY_EXPERTS = ("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=16")
FREE = 0.6  # of the memory: the plan's arrays. The rest is for activations.


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    part: str
    result: str
    seconds: float


def run(part: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of a command of gspax within the part's limit; its output goes to a file, too."""
    began, command = time.monotonic(), [sys.executable, "-m", "gspax", *arguments]
    print(f"{part}: gspax {' '.join(arguments)}", flush=True)
    file = folder / f"{part}.txt"
    with file.open("w", encoding="utf-8") as output:
        try:
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=LIMITS[part]).returncode
        except subprocess.TimeoutExpired:
            output.write(f"stopped after {LIMITS[part]} seconds\n")
            code = 124
    print(f"{part}: exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code, file.read_text(encoding="utf-8", errors="replace")


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300].replace("|", "\\|") if lines else "no output"


def doctor(folder: Path) -> str:
    """The result of `gspax doctor`: how many checks are right, slow, wrong, or skipped, and which are wrong or slow."""
    code, output = run("doctor", folder, "doctor")
    _, results = read_doctor(output)
    by_status: dict[str, list[str]] = {}
    for status, name in results:
        by_status.setdefault(status, []).append(name)
    bad = [f"{status}: {', '.join(by_status[status])}" for status in ("wrong", "slow") if status in by_status]
    found = "; ".join([", ".join(f"{len(names)} {status}" for status, names in by_status.items()), *bad])
    # 1: a check is wrong, and the doctor has ended with a result
    ended = code == 0 or (code == 1 and "wrong" in by_status)
    return found if ended else f"failed: {'; '.join(filter(None, (last_line(output), found)))}"


def read_doctor(output: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """What `gspax doctor` prints, also if it was stopped: the environment by name, and (status, name) of each check."""
    above, heading, below = output.partition("status   check")
    environment = dict(re.findall(r"^(\w+) {2,}(.+)$", above, re.MULTILINE))
    width = len((heading + below).partition("difference")[0])
    lines = re.findall(r"^(?:ok|slow|wrong|skipped) .*", below, re.MULTILINE)
    checks = [line[:width].partition(" ") for line in lines]
    return environment, [(status, name.strip()) for status, _, name in checks]


def environment_of(folder: Path) -> dict[str, str]:
    """Versions and devices, as `gspax doctor` states them; nothing if it has printed nothing."""
    file = folder / "doctor.txt"
    return read_doctor(file.read_text(encoding="utf-8", errors="replace"))[0] if file.exists() else {}


def memory_gib(folder: Path) -> float | None:
    """GiB of a device's memory, as `gspax doctor` states it; None if it does not."""
    found = re.match(r"([\d.]+) GiB", environment_of(folder).get("memory", ""))
    return float(found[1]) if found else None


def planned(overrides: Sequence[str]) -> Plan:
    return plan(override(load(WORKLOAD), list(overrides)))


def most_layers(overrides: Sequence[str], gib: float) -> int:
    """The largest number of layers whose arrays take at most `FREE` of the memory; 1 at least."""

    def fits(layers: int) -> bool:
        costs = planned([*overrides, f"model.num_hidden_layers={layers}"])
        return max(sum(costs.learner.values()), sum(costs.sampler.values())) <= FREE * gib * 2**30

    return max((layers for layers in range(1, 49) if fits(layers)), default=1)


def bench(part: str, folder: Path, overrides: Sequence[str]) -> str:
    """The result of `gspax bench`: rates of an update and of a rollout, their shares of the limits, the first step."""
    file = folder / f"{part}.json"
    file.unlink(missing_ok=True)
    code, output = run(part, folder, "bench", str(WORKLOAD), "--json", str(file), *overrides)
    if code or not file.exists():
        return f"failed: {last_line(output)}"
    found, costs = json.loads(file.read_text(encoding="utf-8")), planned(overrides)
    phases, device = {each["name"]: each for each in found["figures"]}, found["devices"].partition(" x ")[2]
    train, rollout = phases["train"], phases["rollout"]
    peak = peaks(device)
    shares = [f"{train['of_matmul']:.0%} of the measured product"]
    if peak is not None:
        shares.append(f"MFU {train['flops_per_s'] / peak[0]:.0%} of {peak[0] / 1e12:.0f} TFLOP/s")
    read = read_by_sampling(costs) / rollout["wall_s"]
    of_peak = f", {read / peak[1]:.0%} of {peak[1] / 1e9:,.0f} GB/s" if peak is not None else ""
    return (
        f"update {train['tokens_per_s']:,.0f} tokens/s, {train['flops_per_s'] / 1e12:.3g} TFLOP/s, "
        f"{', '.join(shares)}; "
        f"rollout {rollout['tokens_per_s']:,.0f} tokens/s, at least {read / 1e9:,.3g} GB/s read{of_peak}; "
        f"first step {found['first_step_s']:.0f} s; peak {found['peak_memory_bytes'] / 2**30:.1f} GiB"
    )


def read_by_sampling(costs: Plan) -> float:
    """Bytes that decoding reads in a rollout: for each token of a slot all weights, and half of the full caches."""
    sampling, sizes = costs.experiment.sampling, costs.sizes
    rounds = -(-sampling.prompts * sampling.group // sizes.slots)
    weights = sum(size for name, size in costs.sampler.items() if name.startswith("inference weights"))
    return rounds * sampling.max_tokens * (weights + sizes.prompt_cache + sizes.completion_cache / 2)


def real(folder: Path, overrides: Sequence[str]) -> str:
    """The result of a few steps of the published model in bfloat16."""
    if not Path(CONVERTED).is_dir():
        return f"skipped: there is no {CONVERTED} (make real)"
    work = folder / "real"
    code, output = run("real", folder, "train", str(REAL), "--workdir", str(work), "model.dtype=bfloat16", *overrides)
    if code:
        return f"failed: {last_line(output)}"
    rows = [json.loads(line) for line in (work / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    seconds = sorted(row["time/step"] for row in rows if "time/step" in row)
    middle = seconds[len(seconds) // 2]
    return (
        f"mean reward {rewards[0]:.2f} in step 1, {rewards[-1]:.2f} in step {len(rewards)}; median step {middle:.2f} s"
    )


def rehearse(folder: Path, *, toy: bool, gib: float | None) -> Iterator[Row]:
    """The rows of the table, each when its part has ended."""
    began = time.monotonic()

    def row(part: str, result: str) -> Row:
        nonlocal began
        began, before = time.monotonic(), began
        return Row(part, result, began - before)

    yield row("gspax doctor", doctor(folder))
    dense = [f"model={MODELS['dense']}", *(TOY if toy else ("tokenizer.vocab_size=49152",))]
    yield row("135M dense, bfloat16, bench", bench("dense", folder, dense))
    moe = [f"model={MODELS['moe']}", *((*TOY, *TOY_EXPERTS) if toy else ())]
    layers = 2 if toy else most_layers(moe, gib or memory_gib(folder) or 16)
    while True:
        result = bench("moe", folder, [*moe, f"model.num_hidden_layers={layers}"])
        yield row(f"Qwen3-30B-A3B with {layers} of 48 layers, bfloat16, bench", result)
        if "RESOURCE_EXHAUSTED" not in (folder / "moe.txt").read_text(encoding="utf-8") or layers == 1:
            break
        layers //= 2
    yield row("SmolLM2-135M-Instruct, bfloat16, train", real(folder, ["schedule.steps=2"] if toy else []))


def describe(folder: Path) -> list[str]:
    """What was measured."""
    return [f"- {name}: {value}" for name, value in environment_of(folder).items()] or [
        "`gspax doctor` stated nothing."
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="for outputs, figures, and the table")
    parser.add_argument("--toy", action="store_true", help="shapes that a CPU can do")
    parser.add_argument("--gib", type=float, help="memory of the card, if jax does not state it")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = list(rehearse(options.folder, toy=options.toy, gib=options.gib))
    lines = [
        *("# A rehearsal on a GPU", "", "Written by `rehearse_gpu.py`; medians of seven steps after the first."),
        "FLOPs are counted from the model's shape, without recomputed layers.",
        *(["Toy shapes: the rows test the script, and say nothing of the models."] if options.toy else []),
        *("", *describe(options.folder), "", "| part | result | s |", "| --- | --- | --- |"),
        *(f"| {row.part} | {row.result} | {row.seconds:.0f} |" for row in rows),
    ]
    (options.folder / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\n{options.folder / 'gpu.md'}")
    sys.exit(any(row.result.startswith("failed") for row in rows))


if __name__ == "__main__":
    main()
