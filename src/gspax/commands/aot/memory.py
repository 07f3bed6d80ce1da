"""Compile a program ahead of time: its text, and the memory that it needs on each device.

The sampler's layers are unrolled (`model.decoding`), so compiling all of a large model takes up to an hour. Where all
layers are alike, each adds the same instructions, so that bytes moved, bytes sent and memory are linear in their
number: two small programs, of two and of three layers, are compiled and extrapolated. What the compiler does across
layers, such as prefetching, differs a little from layer to layer. One layer would not do: the compiler keeps most of
its weights on chip from token to token.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax

from gspax.commands.aot import hlo
from gspax.commands.aot.chips import Topology
from gspax.commands.aot.programs import Program
from gspax.config import ModelConfig, layer_runs, layer_windows

GB = 1e9
FEW = (2, 3)  # layers of the small programs
FEWEST = 6  # layers from which on it is worth it


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while a program runs."""

    arguments: int
    results: int  # without those that reuse the memory of arguments
    temporaries: int
    code: int
    peak: int  # the compiler's peak of all these but the code, by which it accepts or rejects a program
    resident: int  # what the run keeps on the device and does not pass to the program

    @property
    def total(self) -> int:
        return self.peak + self.code + self.resident


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The outcome of compiling a program: its memory and its text, or the compiler's error."""

    name: str
    seconds: float
    memory: Memory | None = None
    error: str = ""
    text: str = field(default="", repr=False)
    few: tuple[Compiled, ...] = ()  # with fewer layers, if the program was extrapolated from them

    @functools.cached_property
    def module(self) -> hlo.Module:
        return hlo.parse(self.text)


def compile_program(program: Program) -> Compiled:
    """Lower and compile. An error of the compiler, usually lack of memory, is part of the result."""
    began = time.perf_counter()
    try:
        with _no_persistent_cache():
            compiled = program.lower().compile()
    except jax.errors.JaxRuntimeError as problem:
        return Compiled(name=program.name, seconds=time.perf_counter() - began, error=summarize_error(str(problem)))
    stats, text = compiled.memory_analysis(), compiled.as_text()
    assert stats is not None and text is not None  # on TPU and CPU there are both
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
        resident=program.resident,
    )
    return Compiled(name=program.name, seconds=time.perf_counter() - began, memory=memory, text=text)


@contextlib.contextmanager
def _no_persistent_cache() -> Iterator[None]:
    """Write nothing to jax's persistent cache, which cannot read back programs for absent devices."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def summarize_error(message: str) -> str:
    """The line of the compiler's message that has the numbers, at most 300 characters and without a full stop."""
    lines = message.strip().splitlines()
    line = next((line for line in lines if re.search(r"\d.*\bhbm\b", line, re.IGNORECASE)), lines[0])
    return line.strip()[:300].rstrip(".")


def are_alike(model: ModelConfig) -> bool:
    """Whether the layers are many and all of one kind."""
    return model.num_hidden_layers >= FEWEST and len(layer_runs(model)) == 1 and not layer_windows(model)


def compile_few(program: Program, few: Callable[[int], Program], layers: int) -> Compiled:
    """The program with `layers` layers, from `few` of each number in `FEW`; an error of either is its error.

    Only `resident` is taken from the program itself.
    """
    small = tuple(compile_program(replace(few(number), resident=program.resident)) for number in FEW)
    seconds = sum(each.seconds for each in small)
    less, more = (each.memory for each in small)
    if less is None or more is None:
        return Compiled(name=program.name, seconds=seconds, error=small[0].error or small[1].error)
    sizes = {name: round(extrapolate(size, getattr(more, name), layers)) for name, size in vars(less).items()}
    return Compiled(name=program.name, seconds=seconds, memory=Memory(**sizes), text=small[1].text, few=small)


def extrapolate(less: float, more: float, layers: int) -> float:
    """A quantity that is linear in the number of layers, and not negative, from those of the numbers in `FEW`."""
    return max(0.0, less + (layers - FEW[0]) * (more - less) / (FEW[1] - FEW[0]))


def describe_misfits(compiled: Sequence[Compiled], topology: Topology) -> list[str]:
    """One sentence for each program that does not compile or does not fit the chip's memory."""
    lines = []
    for each in compiled:
        if each.error:
            lines.append(f"Does not compile for {topology}: the {each.name}: {each.error}")
        elif each.memory is not None and each.memory.total > topology.chip.memory:
            lines.append(
                f"Does not fit {topology}: the {each.name} needs {each.memory.total / GB:.2f} GB on each device, "
                f"a program may use {topology.chip.memory / GB:.2f}"
            )
    return lines
