"""Programs whose layers are unrolled, from two small ones: compiled with one and with two layers, then extrapolated.

The sampler's layers are unrolled (`model.decoding`), so that compiling all of them for a large model takes up to an
hour. Where all layers are alike, each adds the same instructions: bytes moved and sent, and memory, are linear in their
number. What the compiler does across layers, such as prefetching, differs a little from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from gspax.aot.memory import Compiled, Memory, compile_program
from gspax.aot.programs import Program
from gspax.aot.roofline import Phase
from gspax.config import ModelConfig, layer_runs, layer_windows

FEWEST = 6  # layers from which on it is worth it


def are_alike(model: ModelConfig) -> bool:
    """Whether the layers are many and all of one kind."""
    return model.num_hidden_layers >= FEWEST and len(layer_runs(model)) == 1 and not layer_windows(model)


def compile_few(program: Program, few: Callable[[int], Program], layers: int) -> Compiled:
    """The program with `layers` layers, from `few(1)` and `few(2)`; an error of either is its error.

    Only `resident` is taken from the program itself.
    """
    found = [compile_program(replace(few(number), resident=program.resident)) for number in (1, 2)]
    seconds = sum(each.seconds for each in found)
    errors = [each.error for each in found if each.error]
    if errors:
        return Compiled(name=program.name, seconds=seconds, error=errors[0])
    one, two = (each.memory for each in found)
    assert one is not None and two is not None
    memory = Memory(
        **{
            field.name: round(extrapolate(getattr(one, field.name), getattr(two, field.name), layers))
            for field in fields(Memory)
        }
    )
    return Compiled(name=program.name, seconds=seconds, memory=memory, text=found[1].text, few=tuple(found))


def extrapolate(one: float, two: float, layers: int) -> float:
    """A quantity that is linear in the number of layers, and not negative."""
    return max(0.0, one + (layers - 1) * (two - one))


def extrapolate_phases(one: list[Phase], two: list[Phase], layers: int) -> list[Phase]:
    """The phases of a program with `layers` layers, from those with one and two. FLOPs are those of `one`."""

    def scale(first: dict, second: dict) -> dict:
        keys = {**first, **second}
        return {key: round(extrapolate(first.get(key, 0), second.get(key, 0), layers)) for key in keys}

    return [
        replace(
            a,
            moved=round(extrapolate(a.moved, b.moved, layers)),
            sent={key: sent for key, sent in scale(a.sent, b.sent).items() if sent},
            moved_at=scale(a.moved_at, b.moved_at),
        )
        for a, b in zip(one, two, strict=True)
    ]
