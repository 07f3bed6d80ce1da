"""A layer of each kind at a length, measured and compiled for v5p, and compiling models of mixed layers: three tables.

    python experiments/benchmarks/bench_layers.py --to layers.md

All times are CPU-seconds of this process, the least of the runs. Compiling is tracing, lowering, and XLA's work on the
gradient of the learner's forward pass, and on one decoding step of the sampler, whose layers are unrolled.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from gspax.config import GatedDelta, Mesh, ModelConfig
from gspax.model import decoding, transformer
from gspax.model.sizes import forward_flops
from gspax.parallel.sharding import make_mesh, single_device_mesh
from gspax.sampler.inference_weights import abstract_inference_weights
from gspax.tools.aot import chips, hlo
from gspax.types import Array, Params

# A quarter of Qwen3.5-35B-A3B: attention and delta nets with 1,024 numbers of context, of 512 of a token.
QUARTER = ModelConfig(
    vocab_size=16,
    hidden_size=512,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    intermediate_size=1,
    attention_gate=True,
    delta=GatedDelta(key_heads=4, value_heads=8, key_dim=128, value_dim=128),
)
NETS = replace(QUARTER, delta_layers=(0,))
WHOLE = replace(  # the widths of Qwen3.5-35B-A3B
    QUARTER,
    hidden_size=2048,
    num_attention_heads=16,
    num_key_value_heads=2,
    delta=GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    dtype="bfloat16",
)
SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    delta=GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8),
)
EXPERTS = replace(SMALL, num_experts=4)
PATTERNS = {  # the mixed layers, and the models of equal layers of their kinds
    "dense, experts": (replace(EXPERTS, decoder_sparse_step=2), (SMALL, EXPERTS)),
    "three delta nets, attention": (
        replace(SMALL, delta_layers=tuple(n for n in range(24) if n % 4 < 3)),
        (replace(SMALL, delta_layers=tuple(range(24))), SMALL),
    ),
}
MESH = single_device_mesh()


def seconds(work: Callable[[], object]) -> float:
    """CPU-seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def loss(params: Params, config: ModelConfig, tokens_BT: Array, mesh: jax.sharding.Mesh = MESH) -> Array:
    """A number that depends on everything that the layers compute."""
    hidden, _ = transformer.apply(params, config, tokens_BT, jnp.ones_like(tokens_BT), mesh=mesh)
    return hidden.astype(jnp.float32).std()


gradient = jax.jit(jax.grad(loss), static_argnames=("config", "mesh"))


def layer_times(config: ModelConfig, length: int, runs: int = 1) -> tuple[float, float]:
    """Forward alone, and forward with backward, of a layer over one row."""
    params = transformer.init(config, jax.random.key(0))
    tokens_BT = jnp.arange(length)[None] % 16
    forward = jax.jit(loss, static_argnames="config")

    def least(function: jax.stages.Wrapped) -> float:
        compiled = function.lower(params, config, tokens_BT).compile()
        return min(seconds(lambda: jax.block_until_ready(compiled(params, tokens_BT))) for _ in range(runs))

    return least(forward), least(gradient)


def compiled_line(name: str, config: ModelConfig, length: int) -> str:
    """A gradient of a layer over one row on a chip of v5p: FLOPs, GB moved, temporary GB, and the bound of its time."""
    topology = chips.parse_topology("v5p:2x2x1")
    mesh = make_mesh(Mesh(), chips.describe_devices(topology)[:1])
    on_chip = jax.NamedSharding(mesh, jax.P())
    params, tokens_BT = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_chip),
        (transformer.abstract_params(config), jax.ShapeDtypeStruct((1, length), jnp.int32)),
    )
    compiled = gradient.lower(params, config, tokens_BT, mesh=mesh).compile()
    flops = 3 * length * forward_flops(config, length)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None  # on TPU there are both
    moved, temporary = hlo.traffic(hlo.parse(text), unknown_trips=1), memory.temp_size_in_bytes
    times = flops / topology.chip.flops, moved / topology.chip.memory_rate
    figures = f"{flops / 1e12:.2f}", f"{moved / 1e9:.2f}", f"{temporary / 1e9:.2f}", *(f"{1e3 * t:.1f}" for t in times)
    return f"| {length:,} | {name} | " + " | ".join(figures) + " |"


def compiled_table(lengths: list[int]) -> list[str]:
    """Lines of a table of both mixers, compiled for v5p."""
    lines = ["| tokens | layer | TFLOPs | GB moved | temporary GB | ms of FLOPs | ms of memory |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for length in lengths:
        for name, config in (("attention", WHOLE), ("delta net", replace(WHOLE, delta_layers=(0,)))):
            lines.append(compiled_line(name, config, length))
            print(lines[-1], flush=True)
    return lines


def compile_update(config: ModelConfig) -> float:
    """CPU-seconds to compile a gradient."""
    params, tokens_BT = transformer.abstract_params(config), jnp.zeros((2, 32), jnp.int32)
    jax.clear_caches()
    return seconds(lambda: gradient.lower(params, config, tokens_BT).compile())


def compile_step(config: ModelConfig) -> float:
    """CPU-seconds to compile one token of 4 slots of 2 prompts."""
    weights, one_W = abstract_inference_weights(config, MESH), jnp.ones(4, jnp.int32)
    prefill = partial(decoding.prefill, config=config, mesh=MESH)
    _, prompts, _ = jax.eval_shape(
        lambda weights: prefill(weights, tokens_PS=jnp.zeros((2, 8), jnp.int32), length_P=one_W[:2]), weights
    )
    cache = jax.eval_shape(lambda prompts: decoding.new_cache(prompts, config, 4, 8, mesh=MESH), prompts)
    slots = decoding.Slots(one_W, one_W, one_W, one_W)
    step = jax.jit(partial(decoding.decode, config=config, mesh=MESH))
    jax.clear_caches()
    return seconds(lambda: step.lower(weights, token_W=one_W, cache=cache, slots=slots).compile())


def layer_table(lengths: list[int]) -> list[str]:
    """Lines of a table of the two mixers' times."""
    lines = ["| tokens | attention, forward | and backward | delta net, forward | and backward |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for length in lengths:
        times = [each for config in (QUARTER, NETS) for each in layer_times(config, length)]
        lines.append(f"| {length:,} | " + " | ".join(f"{each:.2f}" for each in times) + " |")
        print(lines[-1], flush=True)
    return lines


def compile_table() -> list[str]:
    """Lines of a table of the compilations of 24 layers."""
    lines = ["| 24 layers | program | mixed | equal layers, of each kind | mixed / the slower kind |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, (mixed, equal) in PATTERNS.items():
        for program, compile_ in (("update", compile_update), ("token", compile_step)):
            found, *kinds = (compile_(config) for config in (mixed, *equal))
            each = ", ".join(f"{kind:.1f}" for kind in kinds)
            lines.append(f"| {name} | {program} | {found:.1f} | {each} | {found / max(kinds):.2f} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--compiled", type=int, nargs="*", default=[8192], help="tokens of layers for v5p")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    tables = [layer_table(arguments.tokens)] if arguments.tokens else []
    tables += [compiled_table(arguments.compiled)] if arguments.compiled else []
    tables += [] if arguments.no_compile else [compile_table()]
    arguments.to.write_text("\n\n".join("\n".join(lines) for lines in tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
