"""The rule of gated delta nets by its chunk size: a gradient compiled for v5p, and its time on a CPU.

    python experiments/benchmarks/bench_chunks.py --to chunks.md

The heads are those of Qwen3-Next and Qwen3.5-35B-A3B, 16 of keys and 32 of values, all of 128 numbers, without the
projections and convolutions around the rule. FLOPs are counted in the program before it is compiled, a product in full
float32 precision as the six products of bfloat16 that a TPU makes of it. Times of the CPU are CPU-seconds of this
process, the least of the runs, with a quarter of the heads.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp

from gspax.model.kernels.gated_delta import Tokens, chunked_rule
from gspax.tools.aot import chips, hlo
from gspax.types import Array

K, R, H, U = 16, 2, 128, 128  # heads of keys, heads of values of each, numbers of a key and of a value
CHUNKS = 16, 32, 64, 128, 256
FULL_PRECISION = 6  # products of bfloat16 in one of float32


def abstract_tokens(length: int, heads: int) -> Tokens:
    """Shapes of one row's tokens."""
    shapes = (heads, H), (heads, H), (heads, R, U), (heads, R), (heads, R)
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32
    pairs = zip(shapes, dtypes, strict=True)
    return Tokens(*(jax.ShapeDtypeStruct((1, length, *shape), dtype) for shape, dtype in pairs))


def random_tokens(length: int, heads: int) -> Tokens:
    """Tokens whose gates are somewhere between forgetting and remembering."""
    shapes = abstract_tokens(length, heads)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    normal = [jax.random.normal(key, x.shape) for key, x in zip(keys, shapes, strict=True)]
    normal[3:] = [-0.1 * jnp.abs(normal[3]), jax.nn.sigmoid(normal[4])]
    return Tokens(*(x.astype(shape.dtype) for x, shape in zip(normal, shapes, strict=True)))


def loss(tokens: Tokens, chunk: int) -> Array:
    """A number that depends on every output."""
    segment_BT = jnp.ones(tokens.k_BTKH.shape[:2], jnp.int32)
    out_BTKRU, _ = chunked_rule(tokens, segment_BT, chunk=chunk)
    return out_BTKRU.std()


def products(jaxpr: jax.extend.core.Jaxpr, times: int = 1) -> Iterator[float]:
    """Yield the FLOPs of each product of a program, loops included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            flops = 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in summed)
            is_full = jax.lax.Precision.HIGHEST in (equation.params["precision"] or ())
            yield times * flops * (FULL_PRECISION if is_full else 1)
        inner = times * equation.params.get("length", 1)
        for each in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(each, inner)


def compiled_figures(chunk: int, length: int) -> list[str]:
    """Of a gradient on a chip of v5p: TFLOPs, GB moved, temporary GB, and the two bounds of its time."""
    topology = chips.parse_topology("v5p:2x2x1")
    mesh = jax.sharding.Mesh(chips.describe_devices(topology)[:1], "one")
    on_chip = jax.NamedSharding(mesh, jax.P())
    tokens = jax.tree.map(lambda x: x.update(sharding=on_chip), abstract_tokens(length, K))
    gradient = jax.grad(partial(loss, chunk=chunk))
    flops = sum(products(jax.make_jaxpr(gradient)(tokens).jaxpr))
    compiled = jax.jit(gradient).lower(tokens).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None  # on TPU there are both
    moved, temporary = hlo.traffic(hlo.parse(text), unknown_trips=1), memory.temp_size_in_bytes
    times = flops / topology.chip.flops, moved / topology.chip.memory_rate
    return [
        *(f"{each:.2f}" for each in (flops / 1e12, moved / 1e9, temporary / 1e9)),
        *(f"{1e3 * t:.1f}" for t in times),
    ]


def measured_figures(chunk: int, length: int, runs: int) -> list[str]:
    """CPU-seconds of the forward pass, and of a gradient, which has it too."""
    tokens = random_tokens(length, K // 4)

    def least(function: Callable[[Tokens], object]) -> str:
        compiled = jax.jit(function).lower(tokens).compile()
        return f"{min(seconds(partial(compiled, tokens)) for _ in range(runs)):.2f}"

    forward = partial(loss, chunk=chunk)
    return [least(forward), least(jax.grad(forward))]


def seconds(work: Callable[[], object]) -> float:
    """CPU-seconds of one call."""
    start = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - start


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--chunks", type=int, nargs="+", default=CHUNKS)
    parser.add_argument("--tokens", type=int, default=2048, help="on the CPU")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--compiled", type=int, default=8192, help="tokens for v5p")
    options = parser.parse_args()
    titles = (
        "chunk",
        "TFLOPs",
        "GB moved",
        "temporary GB",
        "ms of FLOPs",
        "ms of memory",
        "CPU, forward",
        "and backward",
    )
    lines = [f"| {' | '.join(titles)} |", "| --- |" + " --- |" * (len(titles) - 1)]
    for chunk in options.chunks:
        cells = compiled_figures(chunk, options.compiled) + measured_figures(chunk, options.tokens, options.runs)
        lines.append(f"| {chunk} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    options.to.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
