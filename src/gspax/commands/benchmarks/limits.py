"""What the machine can do at most, measured: matrix products, copies. And the memory that was used."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def matmul_ceiling(dtype: str = "float32", size: int = 2048) -> float:
    """FLOP/s of one large matrix product, on all local devices together."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((size, size), dtype)
    return 2 * size**3 / _fastest(jax.jit(jnp.matmul), x, x) * jax.local_device_count()


def copy_bandwidth(size: int = 2**28) -> float:
    """Bytes/s that are read and written when `size` bytes are copied, on all local devices together."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(size // 4, jnp.float32)
    return 2 * size / _fastest(jax.jit(jnp.negative), x) * jax.local_device_count()


def _fastest(function: Callable[..., Any], *arguments: Any, repeats: int = 5) -> float:
    """Seconds of the fastest call after the first, which compiles."""
    function(*arguments).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(*arguments).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def peak_memory() -> int:
    """Bytes: the most that an accelerator held, or on CPU the process."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
