"""Parse the text of a compiled program: its instructions, how often each runs, and what its collectives send.

The compiler's own cost analysis counts a loop's body once; here it counts as often as it runs. The trip count stands
beside the loop (CPU) or is the constant that its condition compares the counter with (TPU). A loop with neither, such
as one that ends when all samples have, counts as often as the caller chooses. Of the branches of a conditional the most
expensive counts, except for the fallback for rows that exceed the buffer of a ragged all-to-all.

In a program for several slices the compiler has split each collective that crosses them: the part within a slice stands
as a collective, the part between slices as `send` and `recv`, whose attributes name the collective.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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
UNKNOWN = ("unknown",)  # axes of a collective whose groups could not be read
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str  # of the result, verbatim
    opcode: str
    rest: str  # operands and attributes, verbatim
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest)]))

    @functools.cached_property
    def attributes(self) -> str:
        return self.rest[_closing(self.rest) :]

    def attribute(self, name: str) -> str:
        """The computation given by `name=%...`; empty if there is none."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, list[Instruction]]
    entry: str


@dataclass(frozen=True)
class Collective:
    """One kind of collective over some axes of the mesh."""

    kind: str
    axes: tuple[str, ...]  # that its groups of devices extend over, or `UNKNOWN`
    size: int  # devices of a group; between slices, the number of slices
    dcn: bool = False  # between slices, over the data centre's network


def _closing(text: str) -> int:
    """The index of the bracket that closes one opened before the text."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text)


def parse(text: str) -> Module:
    """Parse a compiled program's `as_text()`. ValueError if it has no entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            current.append(Instruction(found[2], found[3], found[4], found[5], bool(found[1])))
    if not entry:
        raise ValueError("wanted the text of a compiled module, found no ENTRY computation")
    return Module(computations, entry)


def array_bytes(type_: str) -> list[int]:
    """Bytes of each array in a type such as `(f32[2,3]{1,0}, pred[])`."""
    return [
        math.ceil(math.prod(int(length) for length in shape.split(",") if length) * (int(bits) if bits else 8) / 8)
        for _, bits, shape, _ in _ARRAY.findall(type_)
    ]


def trip_count(loop: Instruction, module: Module) -> int | None:
    """How often a `while` runs its body; None if unknown."""
    if known := re.search(r'known_trip_count[^}]*?"n":\s*"(\d+)"', loop.attributes):
        return int(known[1])
    condition = module.computations[loop.attribute("condition")]
    constants = {each.name: each.rest.split(")")[0] for each in condition if each.opcode == "constant"}
    root = next(each for each in condition if each.root)
    if root.opcode == "fusion":  # the comparison and its constant may have been fused
        inner = module.computations[root.attribute("calls")]
        outer, root = root, next(each for each in inner if each.root)
        constants |= {each.name: each.rest.split(")")[0] for each in inner if each.opcode == "constant"}
        for each in inner:
            if each.opcode == "parameter" and (given := outer.operands[int(each.rest.split(")")[0])]) in constants:
                constants[each.name] = constants[given]
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    limit = constants.get(root.operands[1], "")
    return int(limit) if limit.isdigit() else None


def total(module: Module, count: Callable[[str, Instruction], Counter], *, unknown_trips: int) -> Counter:
    """The sum of `count(computation, instruction)` over everything that the program runs, loops included.

    Args:
      unknown_trips: the trip count of loops that do not state it.
    """

    @functools.cache
    def of(name: str) -> Counter:
        found: Counter = Counter()
        for each in module.computations.get(name, []):
            found.update(count(name, each))
            known = trip_count(each, module) if each.opcode == "while" else 1
            times = unknown_trips if known is None else known
            called_here = () if each.opcode.endswith(("-done", "-update")) else _CALLED.findall(each.attributes)
            for called in called_here:
                for key, value in of(called).items():
                    found[key] += times * value
            if branches := _without_fallback(_branches(each), module):
                found.update(max(map(of, branches), key=lambda branch: sum(branch.values())))
        return found

    return of(module.entry)


def _branches(instruction: Instruction) -> list[str]:
    """The branches of a `conditional`."""
    found = _BRANCHES.findall(instruction.attributes)
    return [name for several, one in found for name in re.findall(r"[\w.\-]+", several or one)]


def _without_fallback(branches: list[str], module: Module) -> list[str]:
    """The branches with a ragged all-to-all, if any: the others are the fallback for rows beyond its buffer."""
    return [name for name in branches if _has_ragged(name, module)] or branches


def _has_ragged(name: str, module: Module) -> bool:
    inside = module.computations.get(name, [])
    return any(
        each.opcode.startswith(RAGGED)
        or any(_has_ragged(called, module) for called in [*_CALLED.findall(each.attributes), *_branches(each)])
        for each in inside
    )


def unknown_loops(module: Module) -> int:
    """The number of loops with unknown trip counts, without those inside of another one."""

    @functools.cache
    def count(name: str) -> int:
        found = 0
        for each in module.computations.get(name, []):
            if each.opcode == "while" and trip_count(each, module) is None:
                found += 1
            else:
                found += sum(map(count, [*_CALLED.findall(each.attributes), *_branches(each)]))
        return found

    return count(module.entry)


def collectives(module: Module, mesh: dict[str, int], *, unknown_trips: int, slices: int = 1) -> dict[Collective, int]:
    """The least bytes that a device must send for the collectives of a program, by kind and axes.

    In a group of n devices an all-gather sends (n - 1)/n of its result, a reduce-scatter as much of its argument, an
    all-reduce both, one after the other; an all-to-all (n - 1)/n of its result, a ragged one of the smaller of argument
    and result, a permutation all of it. Between n
    slices the same holds for a device and its counterparts in the other slices.

    Args:
      mesh: axis sizes in the order of the devices that the program was compiled for.
      unknown_trips: the trip count of loops that do not state it.
      slices: TPU slices that the program was compiled for; if several, the mesh axis `slice` is along them.
    """
    # The TPU compiler spreads one collective over several fusions, which all show it; the one that starts it counts.
    starts = {
        name
        for name, inside in module.computations.items()
        if any('custom_call_target="AsyncCollectiveStart"' in each.attributes for each in inside)
    }
    within = {**mesh, "slice": mesh["slice"] // slices} if slices > 1 else mesh

    def count(computation: str, each: Instruction) -> Counter:
        if each.opcode == "send":
            return _between_slices(each, slices)
        kind = each.opcode.removesuffix("-start")
        if kind not in KINDS or (SPREAD in each.attributes and computation not in starts):
            return Counter()
        axes, size = _group_axes(each.attributes, within)
        sizes = array_bytes(each.type)
        result = sum(sizes)
        if kind == "all-gather" and each.opcode != kind:  # the type lists the arguments before the results
            result = result * size // (size + 1)
        if kind == "collective-permute":
            return Counter({Collective(kind, axes, size): max(sizes)})
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):  # each device keeps only its part
            kind, sent = "reduce-scatter", result * (size - 1) // size
        elif kind == "reduce-scatter":
            sent = result * (size - 1)
        elif kind == RAGGED:  # one end is a buffer with room to spare: the other is what the devices send on average
            sent = min(result, _first_operand_bytes(each, computation, module)) * (size - 1) // size
        else:
            sent = result * (size - 1) // size * (2 if kind == "all-reduce" else 1)
        return Counter({Collective(kind, axes, size): sent})

    return {key: sent for key, sent in total(module, count, unknown_trips=unknown_trips).items() if sent}


def _first_operand_bytes(each: Instruction, computation: str, module: Module) -> int:
    found = [other.type for other in module.computations[computation] if other.name == each.operands[0]]
    return sum(array_bytes(found[0])) if found else sum(array_bytes(each.type))


def _between_slices(send: Instruction, slices: int) -> Counter:
    """What a device sends to other slices by a `send`: nothing for one to the host, everything for an unknown kind."""
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', send.attributes)
    if not found:
        return Counter()
    kind = TRANSFERS.get(found[1], found[1].lower())
    operand = sum(array_bytes(send.type)[:-1])  # the last is a handle
    others = slices - 1
    sent = {
        "all-gather": operand * others,
        "all-reduce": 2 * operand * others // slices,
        "reduce-scatter": operand * others // slices,
        "all-to-all": operand * others // slices,
    }.get(kind, operand)
    return Counter({Collective(kind, ("slice",), slices, dcn=True): sent})


def _group_axes(attributes: str, mesh: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """The axes that the groups of a collective extend over, and the number of devices in a group."""
    group = _first_group(attributes, math.prod(mesh.values()))
    if group is None or max(group) >= math.prod(mesh.values()):
        return UNKNOWN, math.prod(mesh.values())
    coords = np.array(np.unravel_index(np.array(group), tuple(mesh.values())))
    return tuple(axis for axis, row in zip(mesh, coords, strict=True) if len(set(row.tolist())) > 1), len(group)


def _first_group(attributes: str, devices: int) -> list[int] | None:
    """The devices of a collective's first group (all groups are alike), or the first pair of different devices of a
    permutation; None if the notation is unknown.

    Known are {{0,1},{2,3}}, and two notations of an array of device numbers whose rows are the groups, [2,2]<=[4] and
    mesh['a'=2,'b'=2] {'b'}, both of which may be transposed first.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        found = [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1])]
        return list(next(((a, b) for a, b in found if a != b), found[0]))
    if "replica_groups={}" in attributes:
        return list(range(devices))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return [int(device) for device in listed[1].split(",")]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        return _numbers(iota[2], iota[3]).reshape(_integers(iota[1]))[0].tolist()
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\]?\)?)\))? \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        over = re.findall(r"'(\w+)'", named[3])
        if not set(over) <= set(sizes) or ":" in named[3]:
            return None
        order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", named[2] or f"[{devices}]")
        if order is None:
            return None
        grid = _numbers(order[1], order[2]).reshape([int(size) for size in sizes.values()])
        return grid[tuple(slice(None) if name in over else 0 for name in sizes)].reshape(-1).tolist()
    return None


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _numbers(shape: str, transposed: str | None) -> np.ndarray:
    """0, 1, 2, ... in this shape, with its axes permuted."""
    lengths = _integers(shape)
    grid = np.arange(math.prod(lengths)).reshape(lengths)
    return grid.transpose(_integers(transposed)) if transposed else grid
