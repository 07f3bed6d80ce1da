"""Checks the devices: their description, their limits, and the correctness and speed of collectives."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspax.learner.state import device_memory
from gspax.parallel import multihost, sharding
from gspax.run.directory import describe_environment
from gspax.tools.aot.chips import CHIPS
from gspax.tools.benchmarks import Limits, measure_device, time_calls
from gspax.tools.doctor.results import Result, compare, rate, skipped

# By the beginning of a device's kind: peak FLOP/s of bfloat16 products, and bytes/s of the memory. TPUs: `CHIPS`. GPUs:
# NVIDIA's data sheets of A100 (the slower memory of 40 GB) and H100 SXM.
KINDS = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v6": "v6e", "TPU7x": "tpu7x"}
PEAKS = {kind: (CHIPS[chip].flops, CHIPS[chip].memory_rate) for kind, chip in KINDS.items()} | {
    "NVIDIA A100": (312e12, 1555e9),
    "NVIDIA H100 80GB HBM3": (989e12, 3350e9),
}
SHARE = 0.5  # of its peak that a device should reach
HOST_LINK = 2e9  # bytes/s between a host and its accelerator: less than half of PCIe 3.0 with 8 lanes


def describe() -> dict[str, object]:
    """Describe the versions, devices, variables, and load that a bug report needs."""
    device = jax.local_devices()[0]
    memory = device_memory(device)
    return {
        **describe_environment(),
        "memory": "not stated" if memory is None else f"{memory / 2**30:.2f} GiB a device",
        "runtime": " ".join(str(device.client.platform_version).split()),
        "cores": os.cpu_count(),
        "load": f"{os.getloadavg()[0]:.1f} (processes that want a core, mean of the last minute)",
    }


def peaks(kind: str) -> tuple[float, float] | None:
    """Return the published peaks of a device's kind, FLOP/s and bytes/s; None for a CPU and for unlisted kinds."""
    return next((PEAKS[name] for name in sorted(PEAKS, reverse=True) if kind.startswith(name)), None)


@functools.cache
def limits(dtype: str) -> Limits:
    """Measure the limits of one device, with sizes that take it a millisecond or more."""
    on_cpu = jax.default_backend() == "cpu"
    return measure_device(dtype, *((2048, 2**28) if on_cpu else (8192, 2**31)))


def device() -> Iterator[Result]:
    """Measure the rates of a matrix product and a copy against the published ones, and of the link to the host."""
    best = peaks(jax.local_devices()[0].device_kind)
    on_cpu = jax.default_backend() == "cpu"
    full, half = (limits(dtype).matmul_flops / 1e9 for dtype in ("float32", "bfloat16"))
    yield rate("matrix product, float32", full, None, "GFLOP/s")
    why = "no faster than float32 here: keep model.dtype=float32" if on_cpu and half <= full else ""
    yield rate("matrix product, bfloat16", half, SHARE * best[0] / 1e9 if best else None, "GFLOP/s", why)
    yield rate("copy", limits("float32").copy_bytes / 1e9, SHARE * best[1] / 1e9 if best else None, "GB/s")
    if on_cpu:
        yield skipped("host link", "the device is the host")
        return
    data = np.ones(2**27, np.float32)
    here = jax.local_devices()[0]
    seconds, _ = min(time_calls(lambda: jax.device_put(data, here), 3))
    yield rate("host to device", data.nbytes / seconds / 1e9, HOST_LINK / 1e9, "GB/s")
    placed = [jax.device_put(data + turn, here) for turn in range(2)]
    jax.block_until_ready(placed)
    jax.device_get(placed[0])
    began = time.perf_counter()
    jax.device_get(placed[1])  # each array is fetched once only
    yield rate("device to host", data.nbytes / (time.perf_counter() - began) / 1e9, HOST_LINK / 1e9, "GB/s")


# Of [n, ...] on each of the n devices of a group; and in numpy, of all devices' arrays stacked [n, n, ...].
COLLECTIVES: dict[str, tuple[Callable[[Array, str], Array], Callable[[np.ndarray], np.ndarray]]] = {
    "sum": (lambda x, axis: lax.psum(x, axis), lambda x: np.broadcast_to(x.sum(0), x.shape)),
    "gather": (lambda x, axis: lax.all_gather(x[0], axis), lambda x: np.broadcast_to(x[:, 0], x.shape)),
    "scatter of sums": (
        lambda x, axis: jnp.broadcast_to(lax.psum_scatter(x, axis)[None], x.shape),
        lambda x: np.broadcast_to(x.sum(0)[:, None], x.shape),
    ),
    "exchange": (lambda x, axis: lax.all_to_all(x, axis, 0, 0), lambda x: x.swapaxes(0, 1)),
    "shift": (
        lambda x, axis: lax.ppermute(x, axis, [(i, (i + 1) % lax.axis_size(axis)) for i in range(lax.axis_size(axis))]),
        lambda x: np.roll(x, 1, axis=0),
    ),
}


def collectives(mesh: Mesh) -> Iterator[Result]:
    """Check that each collective along each mesh axis takes the values of the right devices, and measure its speed."""
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    if not axes:
        yield skipped("collectives", "one device")
    for axis in axes:
        for name, (on_devices, in_numpy) in COLLECTIVES.items():
            yield collective(f"{name} over {axis} ({mesh.shape[axis]} devices)", mesh, axis, on_devices, in_numpy)


def collective(
    name: str,
    mesh: Mesh,
    axis: str,
    on_devices: Callable[[Array, str], Array],
    in_numpy: Callable[[np.ndarray], np.ndarray],
) -> Result:
    """Compare small arrays, with different numbers on each device, and time large ones."""
    n, number = mesh.shape[axis], list(mesh.shape).index(axis)
    every = PartitionSpec(*mesh.axis_names)

    @jax.jit
    def run(x: Array) -> Array:
        def on_device(x: Array) -> Array:
            return on_devices(x.reshape(x.shape[len(mesh.shape) :]), axis).reshape(x.shape)

        return jax.shard_map(on_device, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)(x)

    small = np.arange(mesh.size * n * 3, dtype=np.float32).reshape(*mesh.shape.values(), n, 3)
    placed = NamedSharding(mesh, every)
    got = multihost.to_host(run(multihost.to_devices(small, placed)))
    want = np.moveaxis(in_numpy(np.moveaxis(small, number, 0).swapaxes(1, -2)).swapaxes(1, -2), 0, number)
    result = compare(name, got, want, 0.0)
    if result.status == "wrong":
        return result
    columns = (2**18 if sharding.platform(mesh) == "cpu" else 2**23) // n
    large = jax.jit(lambda: jnp.ones((*mesh.shape.values(), n, columns)), out_shardings=placed)()
    seconds, _ = min(time_calls(lambda: run(large), 3))
    return rate(name, n * columns * 4 / seconds / 1e9, None, "GB/s")  # of the array on each device
