"""Programs whose layers are unrolled, from two small ones: compiled with two and with three layers, then extrapolated.

The sampler's layers are unrolled (`model.decoding`), so that compiling all of them for a large model takes up to an
hour. Where all layers are alike, each adds the same instructions: bytes moved and sent, and memory, are linear in their
number. What the compiler does across layers, such as prefetching, differs a little from layer to layer. One layer would
not do: the compiler keeps most of its weights on chip from token to token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from gspax.commands.aot.memory import Compiled, Memory, compile_program
from gspax.commands.aot.programs import Program
from gspax.commands.aot.roofline import Phase
from gspax.config import ModelConfig, layer_runs, layer_windows

FEW = (2, 3)  # layers of the small programs
FEWEST = 6  # layers from which on it is worth it


def are_alike(model: ModelConfig) -> bool:
    """Whether the layers are many and all of one kind."""
    return model.num_hidden_layers >= FEWEST and len(layer_runs(model)) == 1 and not layer_windows(model)


def compile_few(program: Program, few: Callable[[int], Program], layers: int) -> Compiled:
    """The program with `layers` layers, from `few` of each number in `FEW`; an error of either is its error.

    Only `resident` is taken from the program itself.
    """
    found = [compile_program(replace(few(number), resident=program.resident)) for number in FEW]
    seconds = sum(each.seconds for each in found)
    errors = [each.error for each in found if each.error]
    if errors:
        return Compiled(name=program.name, seconds=seconds, error=errors[0])
    less, more = (each.memory for each in found)
    assert less is not None and more is not None
    memory = Memory(
        **{
            field.name: round(extrapolate(getattr(less, field.name), getattr(more, field.name), layers))
            for field in fields(Memory)
        }
    )
    return Compiled(name=program.name, seconds=seconds, memory=memory, text=found[1].text, few=tuple(found))


def extrapolate(less: float, more: float, layers: int) -> float:
    """A quantity that is linear in the number of layers, and not negative, from those of the numbers in `FEW`."""
    return max(0.0, less + (layers - FEW[0]) * (more - less) / (FEW[1] - FEW[0]))


def extrapolate_phases(less: list[Phase], more: list[Phase], layers: int) -> list[Phase]:
    """The phases of a program with `layers` layers, from those of the small ones. FLOPs are those of `less`."""

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
        for a, b in zip(less, more, strict=True)
    ]
