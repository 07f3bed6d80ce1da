"""The bytes that a compiled program moves between a device's memory and its cores, from its text.

Every instruction reads its arguments and writes its result; a fusion is one instruction. A slice reads only its part
and an in-place update writes only its part, also inside fusions and nested fusions. Arrays that the compiler keeps on
chip (memory space other than 0) cost nothing; the padding of layouts is not counted.

The kernel of the decoding attention (`model.kernels.decode_attention`) is a call into compiled code, whose text does
not show how much of the cache it fetches. Its bytes are computed: for each row the blocks with active positions
(`fetched_positions`), its queries and its results.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from gspax.commands.aot.hlo import KINDS, SPREAD, Computation, Instruction, Module, array_bytes, find_root, total
from gspax.config import Sampling
from gspax.model.kernels.decode_attention import KERNEL, fetched_positions

CONTROL = {"while", "call", "conditional", "async-start"}  # run other computations and move nothing themselves
FREE = CONTROL | {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "add-dependency"),
}
FUSED = {"fusion", "custom-call"}  # their `calls` describe them; the instructions inside are not run one by one
ASYNC = "AsyncCollective"  # custom calls that start and end a collective that is spread over fusions
SLICES = {"dynamic-slice", "gather", "slice"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place -> the operand that is written
_ON_CHIP = re.compile(r"\b[a-z]+\d*\w*\[[\d,]*\]\{[^}]*S\([1-9]\d*\)[^}]*\}")

# How many positions of a cache with so many are fetched for a row, by the call with fewer query heads per key head or
# by the other one.
Fetched = Callable[[int, bool], float]


def memory_bytes(type_: str) -> int:
    """Bytes of the arrays in a type, except those on chip."""
    return sum(array_bytes(_ON_CHIP.sub("", type_)))


def fetched_at(part: str, sampling: Sampling) -> Fetched:
    """The positions that the decoding attention fetches at the `start` or the `end` of a response, or on average
    (`mean`) over its tokens."""
    S, C = sampling.max_prompt_tokens, sampling.max_tokens
    lengths = {"start": [1], "end": [C], "mean": range(1, C + 1)}[part]

    def fetched(T: int, has_fewer_heads: bool) -> float:
        if T == C and has_fewer_heads:  # with as many prompt as completion positions, the heads tell the two apart
            return sum(fetched_positions(T, length) for length in lengths) / len(lengths)
        return fetched_positions(T, min(S, T))

    return fetched


def traffic(module: Module, *, unknown_trips: int, fetched: Fetched | None = None) -> int:
    """Bytes that one run of the program reads from and writes to a device's memory.

    Args:
      unknown_trips: the trip count of loops that do not state it.
      fetched: what the decoding attention fetches (`fetched_at`); None for its whole caches.
    """
    everything = [each for computation in module.computations.values() for each in computation.values()]
    inner = {each.attribute("calls") for each in everything if each.opcode in FUSED}
    inner |= {each.attribute("to_apply") for each in everything if each.opcode != "call"}

    def count(computation: str, each: Instruction) -> Counter[str]:
        if computation in inner:
            return Counter()
        around = module.computations[computation]
        if fetched is not None and _is_decode_attention(each):
            return Counter(bytes=_attention_bytes(each, around, fetched))
        return Counter(bytes=_moved(each, around, module))

    return total(module, count, unknown_trips=unknown_trips)["bytes"]


def _is_decode_attention(each: Instruction) -> bool:
    return each.opcode == "custom-call" and f"/{KERNEL}/" in each.attributes


def _attention_bytes(each: Instruction, around: Computation, fetched: Fetched) -> int:
    """Queries and results, and what is fetched of keys and values: the last two arguments, [X, K, T, H]."""
    q, k = (around[name].type for name in each.operands[-3:-1])
    (rows, _, per_key, _), (X, K, T, H) = _shape(q), _shape(k)
    fewest = min(_shape(around[other.operands[-3]].type)[2] for other in around.values() if _is_decode_attention(other))
    size = memory_bytes(k) / (X * K * T * H)  # 0 if the array is on chip
    return int(rows * K * fetched(T, per_key == fewest) * H * size * 2) + memory_bytes(q) + memory_bytes(each.type)


def _shape(type_: str) -> list[int]:
    match = re.search(r"\[([\d,]+)\]", type_)
    return [int(length) for length in match[1].split(",")] if match else []


def _moved(each: Instruction, around: Computation, module: Module) -> int:
    if each.opcode in FREE or each.opcode.endswith(("-done", "-update")):
        return 0
    if each.opcode == "copy-start":  # its type has both ends
        return memory_bytes(each.type)
    if each.opcode == "slice-start":
        source, target = each.type.rsplit("}), ", 1) if "}), " in each.type else ("", each.type)
        part = array_bytes(target)[0]
        return (part if memory_bytes(source + "}") else 0) + (part if memory_bytes(target) >= part else 0)
    read = [memory_bytes(around[name].type) if name in around else 0 for name in each.operands]
    if inside := _fused(each, module):
        return _fusion(each.type, read, inside, module)
    written = memory_bytes(each.type)
    if each.opcode in SLICES:
        read[0] = min(read[0], sum(array_bytes(each.type)))
    elif each.opcode in UPDATES:
        update = around[each.operands[UPDATES[each.opcode]]]
        read[0], written = 0, min(written, sum(array_bytes(update.type)))
    elif each.opcode == "send":  # its type repeats the argument
        written = 0
    return sum(read) + written


def _fused(each: Instruction, module: Module) -> Computation:
    """The computation of a fusion; empty for other instructions."""
    return module.computations.get(each.attribute("calls"), {}) if each.opcode in FUSED else {}


def _parameters(inside: Computation) -> Iterator[tuple[int, str]]:
    """The number and the name of each parameter."""
    return ((int(each.arguments), each.name) for each in inside.values() if each.opcode == "parameter")


def _unaliased(each: Instruction, inside: Computation, module: Module) -> Instruction:
    """The instruction that this one aliases: through bitcasts, and fusions of nothing but bitcasts."""
    if each.opcode == "bitcast":
        number = 0
    elif (nested := _fused(each, module)) and (
        source := _unaliased(find_root(nested), nested, module)
    ).opcode == "parameter":
        number = int(source.arguments)
    else:
        return each
    operand = each.operands[number]
    return _unaliased(inside[operand], inside, module) if operand in inside else each


def _fusion(type_: str, whole: list[int], inside: Computation, module: Module) -> int:
    """Bytes that a fusion reads of its arguments, `whole` bytes each, and writes of its results."""
    moved = sum(min(whole[number], _reads(name, inside, module)) for number, name in _parameters(inside))
    root = find_root(inside)
    if ASYNC in root.attributes:  # its result includes the collective's
        return moved + sum(_writes(inner, inside, module) for inner in inside.values() if _is_spread(inner))
    results = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
    types = re.findall(r"[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", type_) if root.opcode == "tuple" else [type_]
    written = (
        min(memory_bytes(each), _writes(result, inside, module)) for result, each in zip(results, types, strict=False)
    )
    return moved + sum(written)


def _is_spread(each: Instruction) -> bool:
    """Whether it is a collective that the compiler has spread over several fusions, each of which shows it."""
    return each.opcode in KINDS and SPREAD in each.attributes


def _is_elsewhere(each: Instruction, inside: Computation) -> bool:
    """Whether it belongs to a collective that another fusion starts."""
    is_start = (f'"{ASYNC}Start"' in other.attributes for other in inside.values())
    return ASYNC in each.attributes or (_is_spread(each) and not any(is_start))


def _reads(name: str, inside: Computation, module: Module) -> int:
    """Bytes of an array in a fusion that are read: all, only slices, or none if it is only passed on."""
    whole = sum(array_bytes(inside[name].type))
    read = 0
    for user in inside.values():
        for number in (number for number, operand in enumerate(user.operands) if operand == name):
            if _unaliased(user, inside, module) is _unaliased(inside[name], inside, module):
                read += _reads(user.name, inside, module)
            elif user.opcode in SLICES and number == 0:
                read += sum(array_bytes(user.type))
            elif nested := _fused(user, module):
                read += sum(_reads(inner, nested, module) for place, inner in _parameters(nested) if place == number)
            elif not (
                (user.opcode == "dynamic-update-slice" and number == 0)
                or (user.opcode == "tuple" and user.root)
                or _is_elsewhere(user, inside)
            ):
                return whole
    return min(whole, read)


def _writes(result: Instruction, inside: Computation, module: Module) -> int:
    """Bytes that a fusion writes of one of its results."""
    result = _unaliased(result, inside, module)
    if result.opcode == "parameter" or _is_elsewhere(result, inside):
        return 0
    if nested := _fused(result, module):
        return _writes(find_root(nested), nested, module)
    if result.opcode == "dynamic-update-slice":
        return sum(array_bytes(inside[result.operands[1]].type))
    return sum(array_bytes(result.type))
