"""What a compiled program moves between a device's memory and its cores, read from its text.

Every instruction reads its arguments and writes its result, a fusion being one instruction. A slice reads and an update
in place writes only its part, in a fusion too, and in a fusion of fusions. Arrays that the compiler keeps on the chip
(memory space other than 0) cost nothing; the padding of layouts is not counted.
"""

from __future__ import annotations

import re
from collections import Counter

from gspax.aot.hlo import KINDS, STEPS, Instruction, Module, array_bytes, total

CONTROL = {"while", "call", "conditional", "async-start"}  # run other computations, and move nothing themselves
FREE = CONTROL | {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier"),
}
FUSED = {"fusion", "custom-call"}  # their `calls` describe them, and are not run one by one
ASYNC = "AsyncCollective"  # the custom calls that start and end a collective spread over fusions
SLICES = {"dynamic-slice", "gather", "slice"}
_ON_CHIP = re.compile(r"\b[a-z]+\d*\w*\[[\d,]*\]\{[^}]*S\([1-9]\d*\)[^}]*\}")

Computation = dict[str, Instruction]


def memory_bytes(type_: str) -> int:
    """Bytes of the arrays in a type as written, those on the chip left out."""
    return sum(array_bytes(_ON_CHIP.sub("", type_)))


def traffic(module: Module, *, unknown_trips: int) -> int:
    """Bytes that one run of the program reads from and writes to a device's memory.

    Args:
      unknown_trips: how often the loops run that do not say how often.
    """
    named = {name: {each.name: each for each in inside} for name, inside in module.computations.items()}
    inner = {each.attribute("calls") for inside in named.values() for each in inside.values() if each.opcode in FUSED}
    inner |= {
        each.attribute("to_apply") for inside in named.values() for each in inside.values() if each.opcode != "call"
    }

    def count(computation: str, each: Instruction) -> Counter:
        if computation in inner:
            return Counter()
        return Counter({"bytes": _moved(each, named[computation], named)})

    return total(module, count, unknown_trips=unknown_trips)["bytes"]


def _moved(each: Instruction, around: Computation, named: dict[str, Computation]) -> int:
    if each.opcode in FREE or each.opcode.endswith(("-done", "-update")):
        return 0
    if each.opcode == "copy-start":  # its result names both ends
        return memory_bytes(each.type)
    if each.opcode == "send":  # its result names its argument again
        return _reads(each, around)
    if each.opcode == "slice-start":
        source, target = each.type.rsplit("}), ", 1) if "}), " in each.type else ("", each.type)
        part = array_bytes(target)[0]
        return (part if memory_bytes(source + "}") else 0) + (part if memory_bytes(target) >= part else 0)
    if inside := _fused(each, named):
        return _fusion(each, around, inside, named)
    return _reads(each, around) + _writes(each, around)


def _reads(each: Instruction, around: Computation) -> int:
    """Bytes that one instruction, not a fusion, reads."""
    types = [around[name].type for name in each.operands if name in around]
    if each.opcode in SLICES and types:
        whole = memory_bytes(types[0])
        return min(whole, sum(array_bytes(each.type))) + sum(map(memory_bytes, types[1:]))
    if each.opcode in ("dynamic-update-slice", "scatter") and types:
        return sum(map(memory_bytes, types[1:]))
    return sum(map(memory_bytes, types))


def _writes(each: Instruction, around: Computation) -> int:
    """Bytes that one instruction, not a fusion, writes."""
    place = {"dynamic-update-slice": 1, "scatter": 2}.get(each.opcode)
    if place is None or len(each.operands) <= place or each.operands[place] not in around:
        return memory_bytes(each.type)
    return min(memory_bytes(each.type), sum(array_bytes(around[each.operands[place]].type)))


def _fused(each: Instruction, named: dict[str, Computation]) -> Computation:
    """What a fusion is of; empty for other instructions."""
    return named.get(each.attribute("calls"), {}) if each.opcode in FUSED else {}


def _root(inside: Computation) -> Instruction:
    return next(each for each in inside.values() if each.root)


def _number(parameter: Instruction) -> int:
    return int(parameter.rest.split(")")[0])


def _unnamed(each: Instruction, inside: Computation, named: dict[str, Computation]) -> Instruction:
    """The instruction behind its further names: a bitcast gives one, or a fusion of nothing else."""
    if each.opcode == "bitcast":
        number = 0
    elif (nested := _fused(each, named)) and (made := _unnamed(_root(nested), nested, named)).opcode == "parameter":
        number = _number(made)
    else:
        return each
    given = each.operands[number]
    return _unnamed(inside[given], inside, named) if given in inside else each


def _fusion(each: Instruction, around: Computation, inside: Computation, named: dict[str, Computation]) -> int:
    """What a fusion reads of its arguments, and writes of its results."""
    given = [memory_bytes(around[name].type) if name in around else 0 for name in each.operands]
    moved = 0
    for parameter in inside.values():
        if parameter.opcode == "parameter" and (number := _number(parameter)) < len(given):
            moved += min(given[number], _read_of(parameter, inside, named))
    root = _root(inside)
    if ASYNC in root.attributes:  # its result is the collective's, among others
        return moved + sum(_writes_of(inner, inside, named) for inner in inside.values() if _in_steps(inner))
    results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    parts = _split(each.type) if root.opcode == "tuple" else [each.type]
    for result, type_ in zip(results, parts, strict=False):
        moved += min(memory_bytes(type_), _writes_of(result, inside, named))
    return moved


def _in_steps(each: Instruction) -> bool:
    """Whether it is a collective that the compiler has spread over several fusions, all of which show it."""
    return each.opcode in KINDS and STEPS in each.attributes


def _starts(inside: Computation) -> bool:
    return any(f'"{ASYNC}Start"' in each.attributes for each in inside.values())


def _read_of(parameter: Instruction, inside: Computation, named: dict[str, Computation]) -> int:
    """Bytes of a fusion's parameter that are looked at: all, what slices take, or none if it is only handed on."""
    whole = sum(array_bytes(parameter.type))
    read = 0
    for user in inside.values():
        if parameter.name not in user.operands:
            continue
        first = user.operands[0] == parameter.name
        if _unnamed(user, inside, named) is _unnamed(parameter, inside, named):
            read += _read_of(user, inside, named)
        elif user.opcode in SLICES and first:
            read += sum(array_bytes(user.type))
        elif (
            (user.opcode == "dynamic-update-slice" and first)
            or (user.opcode == "tuple" and user.root)
            or ASYNC in user.attributes
            or (_in_steps(user) and not _starts(inside))
        ):
            continue
        elif nested := _fused(user, named):
            for inner in nested.values():
                if inner.opcode == "parameter" and user.operands[_number(inner)] == parameter.name:
                    read += _read_of(inner, nested, named)
        else:
            return whole
    return min(whole, read)


def _writes_of(result: Instruction, inside: Computation, named: dict[str, Computation]) -> int:
    result = _unnamed(result, inside, named)
    if result.opcode == "parameter" or ASYNC in result.attributes or (_in_steps(result) and not _starts(inside)):
        return 0
    if nested := _fused(result, named):
        return _writes_of(_root(nested), nested, named)
    if result.opcode == "dynamic-update-slice" and result.operands[1] in inside:
        return sum(array_bytes(inside[result.operands[1]].type))
    return sum(array_bytes(result.type))


def _split(type_: str) -> list[str]:
    """The members of a flat tuple type."""
    return re.findall(r"[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", type_)
