"""The bytes that a compiled program moves between a device's memory and its cores, from its text.

Every instruction reads its arguments and writes its result; a fusion is one instruction. A slice reads only its part
and an in-place update writes only its part, also inside fusions and nested fusions. Arrays that the compiler keeps on
chip (memory space other than 0) cost nothing; the padding of layouts is not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from gspax.commands.aot.hlo import KINDS, SPREAD, Instruction, Module, array_bytes, total
from gspax.model.kernels.decode_attention import KERNEL

CONTROL = {"while", "call", "conditional", "async-start"}  # run other computations and move nothing themselves
FREE = CONTROL | {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "add-dependency"),
}
FUSED = {"fusion", "custom-call"}  # their `calls` describe them; the instructions inside are not run one by one
ASYNC = "AsyncCollective"  # custom calls that start and end a collective that is spread over fusions
SLICES = {"dynamic-slice", "gather", "slice"}
_ON_CHIP = re.compile(r"\b[a-z]+\d*\w*\[[\d,]*\]\{[^}]*S\([1-9]\d*\)[^}]*\}")

Computation = dict[str, Instruction]


def memory_bytes(type_: str) -> int:
    """Bytes of the arrays in a type, except those on chip."""
    return sum(array_bytes(_ON_CHIP.sub("", type_)))


class Live(NamedTuple):
    """How much of a cache the kernel of the decoding attention fetches."""

    completion: int  # positions of a row of the completions' cache
    fetched: Callable[[int, bool], float]  # (positions of a row, whether it is a completion's) -> those fetched


def traffic(module: Module, *, unknown_trips: int, live: Live | None = None) -> int:
    """Bytes that one run of the program reads from and writes to a device's memory.

    Args:
      unknown_trips: the trip count of loops that do not state it.
      live: of the caches; None: all positions are.
    """
    named = {name: {each.name: each for each in inside} for name, inside in module.computations.items()}
    inner = {each.attribute("calls") for inside in named.values() for each in inside.values() if each.opcode in FUSED}
    inner |= {
        each.attribute("to_apply") for inside in named.values() for each in inside.values() if each.opcode != "call"
    }

    def count(computation: str, each: Instruction) -> Counter:
        if computation in inner:
            return Counter()
        if live is not None and _is_decode_attention(each):
            return Counter({"bytes": _attention_bytes(each, named[computation], live)})
        return Counter({"bytes": _moved(each, named[computation], named)})

    return total(module, count, unknown_trips=unknown_trips)["bytes"]


def _is_decode_attention(each: Instruction) -> bool:
    return each.opcode == "custom-call" and f"/{KERNEL}/" in each.attributes


def _attention_bytes(each: Instruction, around: Computation, live: Live) -> int:
    """Queries and results, and what is fetched of keys and values: the last two arguments, [X, K, T, H]."""
    q, k = (around[name].type for name in each.operands[-3:-1])
    (rows, _, per_key, _), (_, K, T, H) = _shape(q), _shape(k)
    # With as many prompt as completion positions, the call with fewer query heads per key head is the completions'.
    fewest = min(_shape(around[other.operands[-3]].type)[2] for other in around.values() if _is_decode_attention(other))
    fetched = live.fetched(T, live.completion == T and per_key == fewest)
    size = memory_bytes(k) / (_shape(k)[0] * K * T * H)  # 0 if the array is on chip
    return int(rows * K * fetched * H * size * 2) + memory_bytes(q) + memory_bytes(each.type)


def _shape(type_: str) -> list[int]:
    found = re.search(r"\[([\d,]+)\]", type_)
    return [int(length) for length in found[1].split(",")] if found else []


def _moved(each: Instruction, around: Computation, named: dict[str, Computation]) -> int:
    if each.opcode in FREE or each.opcode.endswith(("-done", "-update")):
        return 0
    if each.opcode == "copy-start":  # its type has both ends
        return memory_bytes(each.type)
    if each.opcode == "send":  # its type repeats the argument
        return _bytes_read(each, around)
    if each.opcode == "slice-start":
        source, target = each.type.rsplit("}), ", 1) if "}), " in each.type else ("", each.type)
        part = array_bytes(target)[0]
        return (part if memory_bytes(source + "}") else 0) + (part if memory_bytes(target) >= part else 0)
    if inside := _fused(each, named):
        return _fusion(each, around, inside, named)
    return _bytes_read(each, around) + _bytes_written(each, around)


def _bytes_read(each: Instruction, around: Computation) -> int:
    """Bytes that an instruction other than a fusion reads."""
    types = [around[name].type for name in each.operands if name in around]
    if each.opcode in SLICES and types:
        whole = memory_bytes(types[0])
        return min(whole, sum(array_bytes(each.type))) + sum(map(memory_bytes, types[1:]))
    if each.opcode in ("dynamic-update-slice", "scatter") and types:
        return sum(map(memory_bytes, types[1:]))
    return sum(map(memory_bytes, types))


def _bytes_written(each: Instruction, around: Computation) -> int:
    """Bytes that an instruction other than a fusion writes."""
    update = {"dynamic-update-slice": 1, "scatter": 2}.get(each.opcode)
    if update is None or len(each.operands) <= update or each.operands[update] not in around:
        return memory_bytes(each.type)
    return min(memory_bytes(each.type), sum(array_bytes(around[each.operands[update]].type)))


def _fused(each: Instruction, named: dict[str, Computation]) -> Computation:
    """The computation of a fusion; empty for other instructions."""
    return named.get(each.attribute("calls"), {}) if each.opcode in FUSED else {}


def _root(inside: Computation) -> Instruction:
    return next(each for each in inside.values() if each.root)


def _parameter_number(parameter: Instruction) -> int:
    return int(parameter.rest.split(")")[0])


def _unaliased(each: Instruction, inside: Computation, named: dict[str, Computation]) -> Instruction:
    """The instruction that this one aliases: through bitcasts, and fusions of nothing but bitcasts."""
    if each.opcode == "bitcast":
        number = 0
    elif (nested := _fused(each, named)) and (source := _unaliased(_root(nested), nested, named)).opcode == "parameter":
        number = _parameter_number(source)
    else:
        return each
    given = each.operands[number]
    return _unaliased(inside[given], inside, named) if given in inside else each


def _fusion(each: Instruction, around: Computation, inside: Computation, named: dict[str, Computation]) -> int:
    """Bytes that a fusion reads of its arguments and writes of its results."""
    given = [memory_bytes(around[name].type) if name in around else 0 for name in each.operands]
    moved = 0
    for parameter in inside.values():
        if parameter.opcode == "parameter" and (number := _parameter_number(parameter)) < len(given):
            moved += min(given[number], _fusion_reads(parameter, inside, named))
    root = _root(inside)
    if ASYNC in root.attributes:  # its result includes the collective's
        return moved + sum(_fusion_writes(inner, inside, named) for inner in inside.values() if _is_spread(inner))
    results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    parts = _split(each.type) if root.opcode == "tuple" else [each.type]
    for result, type_ in zip(results, parts, strict=False):
        moved += min(memory_bytes(type_), _fusion_writes(result, inside, named))
    return moved


def _is_spread(each: Instruction) -> bool:
    """Whether it is a collective that the compiler has spread over several fusions, each of which shows it."""
    return each.opcode in KINDS and SPREAD in each.attributes


def _starts(inside: Computation) -> bool:
    return any(f'"{ASYNC}Start"' in each.attributes for each in inside.values())


def _fusion_reads(parameter: Instruction, inside: Computation, named: dict[str, Computation]) -> int:
    """Bytes of a fusion's parameter that are read: all, only slices, or none if it is only passed on."""
    whole = sum(array_bytes(parameter.type))
    read = 0
    for user in inside.values():
        if parameter.name not in user.operands:
            continue
        first = user.operands[0] == parameter.name
        if _unaliased(user, inside, named) is _unaliased(parameter, inside, named):
            read += _fusion_reads(user, inside, named)
        elif user.opcode in SLICES and first:
            read += sum(array_bytes(user.type))
        elif (
            (user.opcode == "dynamic-update-slice" and first)
            or (user.opcode == "tuple" and user.root)
            or ASYNC in user.attributes
            or (_is_spread(user) and not _starts(inside))
        ):
            continue
        elif nested := _fused(user, named):
            for inner in nested.values():
                if inner.opcode == "parameter" and user.operands[_parameter_number(inner)] == parameter.name:
                    read += _fusion_reads(inner, nested, named)
        else:
            return whole
    return min(whole, read)


def _fusion_writes(result: Instruction, inside: Computation, named: dict[str, Computation]) -> int:
    """Bytes that a fusion writes of one of its results."""
    result = _unaliased(result, inside, named)
    if result.opcode == "parameter" or ASYNC in result.attributes or (_is_spread(result) and not _starts(inside)):
        return 0
    if nested := _fused(result, named):
        return _fusion_writes(_root(nested), nested, named)
    if result.opcode == "dynamic-update-slice" and result.operands[1] in inside:
        return sum(array_bytes(inside[result.operands[1]].type))
    return sum(array_bytes(result.type))


def _split(type_: str) -> list[str]:
    """The members of a flat tuple type."""
    return re.findall(r"[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", type_)
