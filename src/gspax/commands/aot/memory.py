"""Compiling a program ahead of time, and the memory that it needs on each device."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from gspax.commands.aot.chips import Topology
from gspax.commands.aot.programs import Program

GB = 1e9


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


def compile_program(program: Program) -> Compiled:
    """Lower and compile. An error of the compiler, usually lack of memory, is part of the result."""
    began = time.perf_counter()
    try:
        with _no_persistent_cache():
            compiled = program.lower().compile()
    except jax.errors.JaxRuntimeError as problem:
        return Compiled(name=program.name, seconds=time.perf_counter() - began, error=summarise_error(str(problem)))
    stats = compiled.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
        resident=program.resident,
    )
    return Compiled(name=program.name, seconds=time.perf_counter() - began, memory=memory, text=compiled.as_text())


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


def summarise_error(message: str) -> str:
    """The line of the compiler's message that has the numbers, at most 300 characters and without a full stop."""
    lines = message.strip().splitlines()
    line = next((line for line in lines if re.search(r"\d.*\bhbm\b", line, re.IGNORECASE)), lines[0])
    return line.strip()[:300].rstrip(".")


def describe_misfits(compiled: Sequence[Compiled], topology: Topology) -> list[str]:
    """One sentence for each program that does not compile or does not fit the chip's memory."""
    found = []
    for each in compiled:
        if each.error:
            found.append(f"Does not compile for {topology}: the {each.name}: {each.error}")
        elif each.memory is not None and each.memory.total > topology.chip.memory:
            found.append(
                f"Does not fit {topology}: the {each.name} needs {each.memory.total / GB:.2f} GB on each device, "
                f"a program may use {topology.chip.memory / GB:.2f}"
            )
    return found
