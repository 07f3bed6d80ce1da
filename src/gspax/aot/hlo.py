"""The text of a compiled program, read: its instructions, how often each runs, and what its collectives move.

In a program for several slices the compiler has split each collective that crosses them: groups of devices are within a
slice and counted there, and what is left goes between slices by `send` and `recv`, which say what they stand for.

The compiler's own cost analysis counts the body of a loop once; here a loop's body counts as often as it runs. How
often is written beside the loop (CPU) or is the constant that its condition compares the counter with (TPU). A loop
that tells neither, such as one that ends when all samples have, counts as often as the caller says. Of the branches of
a condition the dearest counts, but none that is there for rows that a ragged all-to-all has no room for.
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
TRANSFERS = {  # between slices, as libtpu names them
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
STEPS = "async_collective_fusion_config"  # marks a collective that the TPU compiler has spread over several fusions
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")


@dataclass(frozen=True)
class Instruction:
    name: str
    type: str  # of the result, as written
    opcode: str
    rest: str  # operands and attributes, as written
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest)]))

    @functools.cached_property
    def attributes(self) -> str:
        return self.rest[_closing(self.rest) :]

    def attribute(self, name: str) -> str:
        """The computation that `name=%...` names; empty if there is none."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Module:
    computations: dict[str, list[Instruction]]
    entry: str


@dataclass(frozen=True)
class Collective:
    """One kind of collective over some axes of the mesh."""

    kind: str
    axes: tuple[str, ...]  # that its groups of devices extend over; ('unread',) if the text could not be read
    size: int  # devices of a group; slices where it goes between these
    dcn: bool = False  # between slices, over the data centre's network


def _closing(text: str) -> int:
    """Where the bracket closes that was opened before the text."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return len(text)


def parse(text: str) -> Module:
    """The computations of a compiled module's `as_text()`. ValueError if it has no entry."""
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
    """Bytes of each array in a type as written, such as `(f32[2,3]{1,0}, pred[])`."""
    return [
        math.ceil(math.prod(int(side) for side in sides.split(",") if side) * (int(bits) if bits else 8) / 8)
        for _, bits, sides, _ in _ARRAY.findall(type_)
    ]


def trips(loop: Instruction, module: Module) -> int | None:
    """How often a `while` runs its body; None if the text does not tell."""
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
    """The sum of `count(computation, instruction)` over everything that the module runs, loops included.

    Args:
      unknown_trips: how often the loops run that do not say.
    """

    @functools.cache
    def of(name: str) -> Counter:
        found: Counter = Counter()
        for each in module.computations.get(name, []):
            found.update(count(name, each))
            known = trips(each, module) if each.opcode == "while" else 1
            times = unknown_trips if known is None else known
            called_here = () if each.opcode.endswith(("-done", "-update")) else _CALLED.findall(each.attributes)
            for called in called_here:
                for key, value in of(called).items():
                    found[key] += times * value
            if branches := _usual(_branches(each), module):
                found.update(max(map(of, branches), key=lambda branch: sum(branch.values())))
        return found

    return of(module.entry)


def _branches(instruction: Instruction) -> list[str]:
    """The computations of which a `conditional` runs one."""
    found = _BRANCHES.findall(instruction.attributes)
    return [name for several, one in found for name in re.findall(r"[\w.\-]+", several or one)]


def _usual(branches: list[str], module: Module) -> list[str]:
    """Those with a ragged all-to-all, if there are any: the others are for rows that do not fit its buffer."""
    return [name for name in branches if _ragged(name, module)] or branches


def _ragged(name: str, module: Module) -> bool:
    inside = module.computations.get(name, [])
    return any(
        each.opcode.startswith(RAGGED)
        or any(_ragged(called, module) for called in [*_CALLED.findall(each.attributes), *_branches(each)])
        for each in inside
    )


def unread_loops(module: Module) -> int:
    """How many loops do not say how often they run."""
    loops = [each for inside in module.computations.values() for each in inside if each.opcode == "while"]
    return sum(trips(each, module) is None for each in loops)


def collectives(module: Module, mesh: dict[str, int], *, unknown_trips: int, slices: int = 1) -> dict[Collective, int]:
    """Bytes that a device must send, at the least, for the collectives of a program: for each kind and its axes.

    In a group of n devices an all-gather sends (n - 1)/n of its result, a reduce-scatter as much of its argument, an
    all-reduce both, one after the other; an all-to-all (n - 1)/n of its result, a permutation all of it. Between n
    slices it is the same, each device with those in its place in the other slices.

    Args:
      mesh: axis sizes in the order of the devices that the program was compiled for.
      unknown_trips: how often the loops run that do not say how often.
      slices: TPU slices that the program was compiled for; if several, the mesh's axis `slice` lies along them.
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
        if kind not in KINDS or (STEPS in each.attributes and computation not in starts):
            return Counter()
        axes, size = _group_axes(each.attributes, within)
        sizes = array_bytes(each.type)
        result = sum(sizes)
        if kind == "all-gather" and each.opcode != kind:  # the arguments stand before the results
            result = result * size // (size + 1)
        if kind == "collective-permute":
            return Counter({Collective(kind, axes, size): max(sizes)})
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):  # each device keeps its part alone
            kind, sent = "reduce-scatter", result * (size - 1) // size
        elif kind == "reduce-scatter":
            sent = result * (size - 1)
        else:
            sent = result * (size - 1) // size * (2 if kind == "all-reduce" else 1)
        return Counter({Collective(kind, axes, size): sent})

    return {key: sent for key, sent in total(module, count, unknown_trips=unknown_trips).items() if sent}


def _between_slices(send: Instruction, slices: int) -> Counter:
    """What a device sends to other slices by a `send`; nothing if it is to the host alone. Of a kind that is not known
    here it is the whole."""
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', send.attributes)
    if not found:
        return Counter()
    kind = TRANSFERS.get(found[1], found[1].lower())
    given = sum(array_bytes(send.type)[:-1])  # the last is a handle
    others = slices - 1
    sent = {
        "all-gather": given * others,
        "all-reduce": 2 * given * others // slices,
        "reduce-scatter": given * others // slices,
        "all-to-all": given * others // slices,
    }.get(kind, given)
    return Counter({Collective(kind, ("slice",), slices, dcn=True): sent})


def _group_axes(attributes: str, mesh: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """Axes that the groups of a collective extend over, and the devices of a group."""
    group = _first_group(attributes, math.prod(mesh.values()))
    if group is None or max(group) >= math.prod(mesh.values()):
        return ("unread",), math.prod(mesh.values())
    places = np.array(np.unravel_index(np.array(group), tuple(mesh.values())))
    return tuple(axis for axis, row in zip(mesh, places, strict=True) if len(set(row.tolist())) > 1), len(group)


def _first_group(attributes: str, devices: int) -> list[int] | None:
    """The devices of a collective's first group (all groups are alike), or of the first pair of a permutation that
    goes from one device to another; None if it is written in a way not known here.

    Three ways are: {{0,1},{2,3}}, and as arrays of device numbers whose rows are the groups, [2,2]<=[4] and
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
    """0, 1, 2, ... in this shape, its axes permuted."""
    sides = _integers(shape)
    grid = np.arange(math.prod(sides)).reshape(sides)
    return grid.transpose(_integers(transposed)) if transposed else grid
