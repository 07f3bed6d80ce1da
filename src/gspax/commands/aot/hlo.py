"""Parse the text of a compiled program: its instructions, how often each runs, what it moves and what it sends.

The compiler's own cost analysis counts a loop's body once; here it counts as often as it runs. The trip count is an
attribute of the loop (CPU) or the constant that its condition compares the counter with (TPU). A loop with neither,
such as one that ends when all samples are finished, counts as often as the caller chooses. Of the branches of a
conditional the most expensive counts, except for the fallback for rows that exceed the buffer of a ragged all-to-all.

In a program for several slices the compiler has split each collective that crosses them: the part within a slice is a
collective, the part between slices a `send` and a `recv`, whose attributes name the collective.

Bytes move between a device's memory and its cores. Every instruction reads its arguments and writes its result; a
fusion is one instruction. A slice reads only its part and an in-place update writes only its part, also inside fusions
and nested fusions. Arrays that the compiler keeps on chip (memory space other than 0) cost nothing; the padding of
layouts is not counted. The kernel of the decoding attention (`model.kernels.decode_attention`) is a call into compiled
code, whose text does not show how much of the cache it fetches. Its bytes are computed: for each row the blocks with
active positions (`fetched_positions`), its queries and its results.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from gspax.config import Sampling
from gspax.model.kernels.decode_attention import KERNEL, fetched_positions

RAGGED = "ragged-all-to-all"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", RAGGED)
TRANSFERS = {  # between slices, by libtpu's names
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
SPREAD = "async_collective_fusion_config"  # marks a collective that the TPU compiler has spread over several fusions
CONTROL = {"while", "call", "conditional", "async-start"}  # run other computations and move nothing themselves
FREE = CONTROL | {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "add-dependency"),
}
FUSED = {"fusion", "custom-call"}  # their `calls` describe them; the instructions inside are not run one by one
ASYNC = "AsyncCollective"  # custom calls that start and end a collective that is spread over fusions
SLICES = {"dynamic-slice", "gather", "slice"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place -> the operand that is written
UNKNOWN = ("unknown",)  # the axes of a collective whose groups could not be parsed
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*?)\)(?:, (\w+=.*))?$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
_ON_CHIP = re.compile(r"\b[a-z]+\d*\w*\[[\d,]*\]\{[^}]*S\([1-9]\d*\)[^}]*\}")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str  # of the result, verbatim
    opcode: str
    arguments: str  # verbatim: operands, the value of a constant, the number of a parameter
    attributes: str  # verbatim
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments))

    @property
    def called(self) -> list[str]:
        """The computations that it runs, except for the branches of a conditional."""
        return [] if self.opcode.endswith(("-done", "-update")) else _CALLED.findall(self.attributes)

    @property
    def branches(self) -> list[str]:
        """The branches of a `conditional`."""
        groups = _BRANCHES.findall(self.attributes)
        return [name for several, one in groups for name in re.findall(r"[\w.\-]+", several or one)]

    def attribute(self, name: str) -> str:
        """The computation given by `name=%...`; empty if there is none."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""


Computation = dict[str, Instruction]
# How many positions of a cache with so many are fetched for a row, by the call with fewer query heads per key head or
# by the other one.
Fetched = Callable[[int, bool], float]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str


@dataclass(frozen=True)
class Collective:
    """One kind of collective over some axes of the mesh."""

    kind: str
    axes: tuple[str, ...]  # that its groups of devices extend over, or `UNKNOWN`
    size: int  # devices of a group; between slices, the number of slices
    dcn: bool = False  # between slices, over the data center's network


def parse(text: str) -> Module:
    """Parse a compiled program's `as_text()`. ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, type_, opcode, arguments, attributes = match.groups(default="")
            current[name] = Instruction(name, type_, opcode, arguments, attributes, bool(root))
    if not entry:
        raise ValueError("wanted the text of a compiled module, found no ENTRY computation")
    return Module(computations, entry)


def array_bytes(type_: str) -> list[int]:
    """Bytes of each array in a type such as `(f32[2,3]{1,0}, pred[])`."""
    return [
        math.ceil(math.prod(int(length) for length in shape.split(",") if length) * (int(bits) if bits else 8) / 8)
        for _, bits, shape, _ in _ARRAY.findall(type_)
    ]


def find_root(computation: Computation) -> Instruction:
    """The instruction whose result is the computation's."""
    return next(each for each in computation.values() if each.root)


def reach(instruction: Instruction, module: Module) -> Iterator[Instruction]:
    """The instruction, and all that it runs."""
    yield instruction
    for name in (*instruction.called, *instruction.branches):
        for inner in module.computations.get(name, {}).values():
            yield from reach(inner, module)


def trip_count(loop: Instruction, module: Module) -> int | None:
    """How often a `while` runs its body; None if unknown."""
    if known := re.search(r'known_trip_count[^}]*?"n":\s*"(\d+)"', loop.attributes):
        return int(known[1])
    condition = module.computations[loop.attribute("condition")]
    root, values = find_root(condition), _constants(condition)
    if root.opcode == "fusion":  # the comparison and its constant may have been fused
        inside, given = module.computations[root.attribute("calls")], [values.get(name, "") for name in root.operands]
        root, values = find_root(inside), _constants(inside, given)
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    limit = values.get(root.operands[1], "")
    return int(limit) if limit.isdigit() else None


def _constants(computation: Computation, given: Sequence[str] = ()) -> dict[str, str]:
    """The values of a computation's constants, and those that are `given` to its parameters."""
    values = {}
    for each in computation.values():
        if each.opcode == "constant":
            values[each.name] = each.arguments
        elif each.opcode == "parameter" and given:
            values[each.name] = given[int(each.arguments)]
    return values


def total(module: Module, count: Callable[[str, Instruction], Counter[Key]], *, unknown_trips: int) -> Counter[Key]:
    """The sum of `count(computation, instruction)` over everything that the program runs, loops included.

    Args:
      unknown_trips: the trip count of loops that do not state it.
    """

    @functools.cache
    def of(name: str) -> Counter[Key]:
        counts: Counter[Key] = Counter()
        for each in module.computations.get(name, {}).values():
            counts.update(count(name, each))
            known = trip_count(each, module) if each.opcode == "while" else 1
            times = unknown_trips if known is None else known
            for called in each.called:
                for key, value in of(called).items():
                    counts[key] += times * value
            if branches := _without_fallback(each.branches, module):
                counts.update(max(map(of, branches), key=lambda branch: sum(branch.values())))
        return counts

    return of(module.entry)


def _without_fallback(branches: list[str], module: Module) -> list[str]:
    """The branches with a ragged all-to-all, if any: the others are the fallback for rows beyond its buffer."""

    def has_ragged(name: str) -> bool:
        instructions = module.computations.get(name, {}).values()
        return any(inner.opcode.startswith(RAGGED) for each in instructions for inner in reach(each, module))

    return list(filter(has_ragged, branches)) or branches


def unknown_loops(module: Module) -> int:
    """The number of loops with unknown trip counts, without those inside of another one."""

    def count(computation: str, each: Instruction) -> Counter[tuple[str, str]]:
        is_unknown = each.opcode == "while" and trip_count(each, module) is None
        return Counter({(computation, each.name): 1} if is_unknown else {})

    return sum(runs > 0 for runs in total(module, count, unknown_trips=0).values())


def collectives(module: Module, mesh: dict[str, int], *, unknown_trips: int, slices: int = 1) -> dict[Collective, int]:
    """The least bytes that a device must send for the collectives of a program, by kind and axes.

    In a group of n devices an all-gather sends (n - 1)/n of its result, a reduce-scatter as much of its argument, an
    all-reduce both, one after the other; an all-to-all (n - 1)/n of its result, a ragged one of the smaller of argument
    and result, a permutation all of it. Between n slices the same holds for a device and its counterparts in the other
    slices.

    Args:
      mesh: axis sizes in the order of the devices that the program was compiled for.
      unknown_trips: the trip count of loops that do not state it.
      slices: TPU slices that the program was compiled for; if several, the mesh axis `slice` is along them.
    """
    # The TPU compiler spreads one collective over several fusions, which all show it; the one that starts it counts.
    starts = {
        name
        for name, inside in module.computations.items()
        if any('custom_call_target="AsyncCollectiveStart"' in each.attributes for each in inside.values())
    }
    within = {**mesh, "slice": mesh["slice"] // slices} if slices > 1 else mesh

    def count(computation: str, each: Instruction) -> Counter[Collective]:
        if each.opcode == "send":
            return _between_slices(each, slices)
        kind = each.opcode.removesuffix("-start")
        if kind not in KINDS or (SPREAD in each.attributes and computation not in starts):
            return Counter()
        axes, size = _group_axes(each.attributes, within)
        sizes = array_bytes(each.type)
        whole = sum(sizes)
        if kind == "all-gather" and each.opcode != kind:  # the type lists the arguments before the results
            whole = whole * size // (size + 1)
        elif kind == "collective-permute":
            whole = max(sizes)
        elif kind == "reduce-scatter":
            whole *= size
        elif kind == "all-reduce" and computation.startswith("all-reduce-scatter"):  # each device keeps only its part
            kind = "reduce-scatter"
        elif kind == RAGGED and (source := module.computations[computation].get(each.operands[0])):
            # one end is a buffer with room to spare: the other is what the devices send on average
            whole = min(whole, sum(array_bytes(source.type)))
        return Counter({Collective(kind, axes, size): _sent(kind, whole, size)})

    return {key: sent for key, sent in total(module, count, unknown_trips=unknown_trips).items() if sent}


def _sent(kind: str, whole: int, size: int) -> int:
    """The bytes that each of `size` devices sends for a collective over arrays of `whole` bytes."""
    if kind not in KINDS or kind == "collective-permute":
        return whole
    return whole * (size - 1) // size * (2 if kind == "all-reduce" else 1)


def _between_slices(send: Instruction, slices: int) -> Counter[Collective]:
    """The bytes of a `send` to other slices: none if it goes to the host, everything for an unknown kind."""
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', send.attributes)
    if not transfer:
        return Counter()
    kind = TRANSFERS.get(transfer[1], transfer[1].lower())
    operand = sum(array_bytes(send.type)[:-1])  # the last is a handle
    whole = operand * slices if kind == "all-gather" else operand
    return Counter({Collective(kind, ("slice",), slices, dcn=True): _sent(kind, whole, slices)})


def gathered_weights(module: Module) -> list[str]:
    """The collectives in the loop over tokens whose argument is equal for all tokens, as "kind of type"."""
    return [
        line
        for each in module.computations[module.entry].values()
        if each.opcode == "while" and trip_count(each, module) is None
        for line in _constant_collectives(module, module.computations[each.attribute("body")])
    ]


def _constant_collectives(module: Module, body: Computation) -> Iterator[str]:
    """Collectives of a loop's body that depend only on constants and on state that the body returns unchanged."""
    elements = {
        name: int(index[1])
        for name, each in body.items()
        if each.opcode == "get-tuple-element" and body[each.operands[0]].opcode == "parameter"
        if (index := re.search(r"index=(\d+)", each.attributes))
    }
    root = find_root(body)
    results = root.operands if root.opcode == "tuple" else ()
    unchanged = {number for number, name in enumerate(results) if elements.get(name) == number}
    constant = {name for name, each in body.items() if each.opcode == "constant" or elements.get(name) in unchanged}
    for name, each in body.items():
        known = [operand for operand in each.operands if operand in body]
        if name not in elements and known and constant.issuperset(known):
            constant.add(name)
            kinds = {inner.opcode.removesuffix("-start") for inner in reach(each, module)} & set(KINDS)
            size = sum(array_bytes(each.type)) / 1e6
            yield from (f"{kind} of {each.type.split('{')[0].lstrip('(')}, {size:.1f} MB" for kind in sorted(kinds))


def _group_axes(attributes: str, mesh: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """The axes that the groups of a collective extend over, and the number of devices in a group."""
    devices = math.prod(mesh.values())
    group = _first_group(attributes, devices)
    if group is None or max(group) >= devices:
        return UNKNOWN, devices
    coords = np.array(np.unravel_index(np.array(group), tuple(mesh.values())))
    return tuple(axis for axis, row in zip(mesh, coords, strict=True) if len(set(row.tolist())) > 1), len(group)


def _first_group(attributes: str, devices: int) -> list[int] | None:
    """The devices of a collective's first group (all groups are alike), or the first pair of different devices of a
    permutation; None if the notation is unknown.

    Known are {{0,1},{2,3}}, and two notations of an array of device numbers whose rows are the groups, [2,2]<=[4] and
    mesh['a'=2,'b'=2] {'b'}, both of which may be transposed first.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        ends = [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1])]
        return list(next(((a, b) for a, b in ends if a != b), ends[0]))
    if "replica_groups={}" in attributes:
        return list(range(devices))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return _integers(listed[1])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        return _grid(iota[2], iota[3]).reshape(_integers(iota[1]))[0].tolist()
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\]?\)?)\))? \{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[3])
        order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", named[2] or f"[{devices}]")
        if order is None or not set(over) <= set(sizes) or ":" in named[3]:
            return None
        grid = _grid(order[1], order[2]).reshape([*sizes.values()])
        return grid[tuple(slice(None) if name in over else 0 for name in sizes)].reshape(-1).tolist()
    return None


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _grid(shape: str, transposed: str | None) -> np.ndarray:
    """0, 1, 2, ... in this shape, with its axes permuted."""
    grid = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return grid.transpose(_integers(transposed)) if transposed else grid


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
