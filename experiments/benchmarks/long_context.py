"""A layer's attention to one long row over the devices of `mesh.context`, compiled for v5p: its work and its exchange.

    python experiments/benchmarks/long_context.py --to table.md

The widths are those of Qwen3-30B-A3B, in bfloat16, forward and backward once. Work is counted in the kernel's tables:
the blocks that a device does not skip, two matrix products forward and seven backward.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from gspax import config
from gspax.model.kernels import attention
from gspax.parallel.sharding import make_mesh
from gspax.tools.aot import chips, hlo
from gspax.types import Array

N, K, H = 32, 4, 128  # query heads, key heads, and their size
TOPOLOGIES = {4: "v5p:2x2x1", 8: "v5p:2x2x2"}
MB = 1e6
HEAD = [
    "| devices | tokens | matrix products of each device, s | of the last one, s | gathered and reduced, MB "
    "| exchanged, MB | network, s |",
    "| --- | --- | --- | --- | --- | --- | --- |",
]


def products(tokens: int, devices: int) -> np.ndarray:
    """FLOPs of each device's matrix products."""
    tables, products_of = attention.splash_masks(tokens // devices, devices, N, tokens), (2, 3, 4)
    blocks = tables.kwargs["block_sizes"]
    infos = tables.fwd_mask_info, tables.dq_mask_info, tables.dkv_mask_info
    kept = [[np.count_nonzero(part) for part in np.split(info.block_mask, devices, axis=1)] for info in infos]
    return 2 * H * N * blocks.block_q * blocks.block_kv * np.array(products_of) @ np.array(kept)


def sent_bytes(tokens: int, target: chips.Target) -> dict[str, int]:
    """Compile a gradient, and return the bytes that a device sends by kind of collective."""
    rows = attention.Rows(jnp.zeros((1, tokens), jnp.int32), target.mesh, time="context")

    def loss(q: Array, k: Array, v: Array) -> Array:
        return attention.row_attention(q, k, v, 0, rows).astype(jnp.float32).sum()

    by_time = jax.NamedSharding(target.mesh, jax.P(None, "context"))
    given = [jax.ShapeDtypeStruct((1, tokens, n, H), jnp.bfloat16, sharding=by_time) for n in (N, K, K)]
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), out_shardings=(None, (by_time,) * 3))
    module = hlo.parse(gradient.lower(*given).compile().as_text())
    found = hlo.collectives(module, target.sizes, unknown_trips=1)
    return {kind: sum(sent for key, sent in found.items() if key.kind == kind) for kind in {key.kind for key in found}}


def line(tokens: int, devices: int) -> str:
    """A line of the table."""
    topology = chips.parse_topology(TOPOLOGIES[devices])
    mesh = make_mesh(config.Mesh(fsdp=1, context=devices), chips.describe_devices(topology))
    target = chips.Target(mesh=mesh, topology=topology)
    seconds = products(tokens, devices) / topology.chip.flops
    sent = sent_bytes(tokens, target)
    exchanged = sent.pop("collective-permute", 0)
    network = (exchanged + sum(sent.values())) / target.link_rate(("context",))
    figures = f"{seconds.mean():.4f} | {seconds[-1]:.4f}", f"{sum(sent.values()) / MB:.1f}", f"{exchanged / MB:.1f}"
    return f"| {devices} | {tokens:,} | " + " | ".join((*figures, f"{network:.4f}")) + " |"


def main() -> None:
    """Compile, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    lines = [*HEAD, *(line(tokens, devices) for devices in TOPOLOGIES for tokens in (8192, 65536))]
    parser.parse_args().to.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
