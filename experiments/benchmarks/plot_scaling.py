"""Weak scaling by compilation, from 16 to 512 devices of v5p: writes scaling.png and prints scaling.md.

A train step of a small mixture of experts with the same rows on each device is compiled for each topology; the bytes
that a device sends are read from the compiled text. Nothing runs. FLOPs are the compiler's own count, in which the body
of the loop over layers counts once; it shows whether a device's share of the work grows.

Run: python experiments/benchmarks/plot_scaling.py > experiments/benchmarks/scaling.md (needs requirements-tpu.txt)
"""

from dataclasses import replace
from pathlib import Path

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from gspax import config
from gspax.experiment import loading
from gspax.parallel.sharding import make_mesh
from gspax.tools.aot import chips, hlo, programs

ROOT = Path(__file__).parents[2]
TOPOLOGIES = ["v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8", "v5p:8x8x8"]
MESHES = {
    "fsdp": lambda devices: config.Mesh(fsdp=devices, expert=1),
    "expert=8, fsdp up to 8, data": lambda devices: config.Mesh(data=-1, fsdp=min(devices // 8, 8), expert=8),
}
MB = 1e6
HEADING = """# Weak scaling, compiled

Written by `plot_scaling.py`: a train step of a small mixture of experts (4 layers of width 512, 16 experts, two rows of
128 tokens on each device) on v5p. FLOPs are the compiler's count for one device, with the body of the loop over layers
counted once; MB are what a device sends in a step. Nothing was run.

| devices | mesh | GFLOP | MB sent | of which |
| --- | --- | --- | --- | --- |"""


def small(devices, mesh):
    """Two rows of 128 tokens on each device."""
    start = loading.load(ROOT / "experiments" / "bench_small_moe.py")
    model = replace(start.model, hidden_size=512, head_dim=64, num_experts=16, dtype="bfloat16", remat="full")
    return replace(
        start,
        model=model,
        sampling=config.Sampling(prompts=devices, group=2, max_prompt_tokens=64, max_tokens=64),
        mesh=mesh,
    )


def measure(topology, make):
    """(GFLOP by the compiler, MB sent by collective) of one train step on one device."""
    devices = chips.describe_devices(chips.parse_topology(topology))
    found = small(len(devices), make(len(devices)))
    mesh = make_mesh(found.mesh, devices)
    train = programs.make_programs(found, mesh, mesh)[0].lower().compile()
    sent = {}
    for collective, size in hlo.collectives(hlo.parse(train.as_text()), dict(mesh.shape), unknown_trips=1).items():
        sent[collective.kind] = sent.get(collective.kind, 0) + size / MB
    return train.cost_analysis()["flops"] / 1e9, sent


def table(title, make):
    """Print a row for each topology once it is compiled; (devices, GFLOP, MB sent) of all."""
    rows = []
    for topology in TOPOLOGIES:
        devices = len(chips.describe_devices(chips.parse_topology(topology)))
        flops, kinds = measure(topology, make)
        rows.append((devices, flops, sum(kinds.values())))
        parts = ", ".join(f"{kind} {size:.1f}" for kind, size in sorted(kinds.items(), key=lambda item: -item[1]))
        print(f"| {devices} | {title} | {flops:.3f} | {rows[-1][2]:.1f} | {parts} |", flush=True)
    return rows


def draw(tables, path):
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for title, rows in tables.items():
        counts, flops, sent = zip(*rows, strict=True)
        axes[0].plot(counts, flops, "o-", label=title)
        axes[1].plot(counts, sent, "o-", label=title)
    for axis, name in zip(axes, ("GFLOP per device (loop body once)", "MB sent per device"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("devices, the same rows on each")
        axis.set_title(name, fontsize=10)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main():
    jax.config.update("jax_platforms", "cpu")
    print(HEADING)
    draw({title: table(title, make) for title, make in MESHES.items()}, Path(__file__).with_name("scaling.png"))
    print("\n![GFLOP and MB sent for each device](scaling.png)")


if __name__ == "__main__":
    main()
