"""Parses the text of a compiled program: its instructions, their numbers of runs, the bytes that they move and send.

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
from typing import NamedTuple, TypeVar

import numpy as np

from gspax.config import NO_WINDOW, Sampling
from gspax.model.kernels.decode_attention import KERNEL, fetched_positions

RAGGED = "ragged-all-to-all"
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", RAGGED)
SPREAD = "async_collective_fusion_config"  # marks a collective that the TPU compiler has spread over several fusions
ASYNC = "AsyncCollective"  # custom calls that start and end such a collective
CONTROL = {"while", "call", "conditional", "async-start"}  # run other computations but move no bytes
FREE = CONTROL | {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "add-dependency"),
}
ALLOCATE = 'custom_call_target="AllocateBuffer"'  # memory that is not written
FUSED = {"fusion", "custom-call"}  # their `calls` describe them; the instructions inside are not run one by one
SLICES = {"dynamic-slice", "gather", "slice"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place -> the operand that is written
UNKNOWN = ("unknown",)  # the axes of a collective whose groups could not be parsed
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*?)\)(?:, (\w+=.*))?$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_BUFFER = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")


class Buffer(NamedTuple):
    """An array in the type of an instruction."""

    shape: tuple[int, ...]
    size: int  # bytes
    on_chip: bool


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

    @functools.cached_property
    def buffers(self) -> list[Buffer]:
        return parse_type(self.type)

    @property
    def size(self) -> int:
        """The bytes of the result."""
        return sum(buffer.size for buffer in self.buffers)

    @property
    def memory(self) -> int:
        """The bytes of the result that are in the device's memory, not on chip."""
        return sum(buffer.size for buffer in self.buffers if not buffer.on_chip)

    @property
    def called(self) -> list[str]:
        """The computations that the instruction runs, except for the branches of a conditional."""
        return [] if self.opcode.endswith(("-done", "-update")) else _CALLED.findall(self.attributes)

    @property
    def branches(self) -> list[str]:
        """The branches of a `conditional`."""
        groups = _BRANCHES.findall(self.attributes)
        return [name for several, one in groups for name in re.findall(r"[\w.\-]+", several or one)]

    def attribute(self, name: str) -> str:
        """Return the computation given by `name=%...`; empty if there is none."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""


Computation = dict[str, Instruction]
# The positions of a cache of this length that are fetched for a row, by the call with fewer query heads per key head or
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


def parse_type(type_: str) -> list[Buffer]:
    """Parse the arrays in a type such as `(f32[2,3]{1,0}, pred[])`."""
    buffers = []
    for bits, lengths, layout in _BUFFER.findall(type_):
        shape = _integers(lengths)
        size = math.ceil(math.prod(shape) * int(bits or 8) / 8)
        buffers.append(Buffer(shape, size, bool(re.search(r"S\([1-9]", layout))))
    return buffers


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def find_root(computation: Computation) -> Instruction:
    """Return the root instruction of a computation, which gives its result."""
    return next(op for op in computation.values() if op.root)


def reach(op: Instruction, module: Module) -> Iterator[Instruction]:
    """Yield the instruction, and all instructions that it runs."""
    yield op
    for name in (*op.called, *op.branches):
        for inner in module.computations.get(name, {}).values():
            yield from reach(inner, module)


def trip_count(loop: Instruction, module: Module) -> int | None:
    """Return the number of times that a `while` runs its body; None if unknown."""
    if known := re.search(r'known_trip_count[^}]*?"n":\s*"(\d+)"', loop.attributes):
        return int(known[1])
    condition = module.computations[loop.attribute("condition")]
    root = find_root(condition)
    fused = _fused(root, module)  # the comparison and its constant may have been fused
    compare = find_root(fused) if fused else root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    limit = (fused or condition)[compare.operands[1]]
    if fused and limit.opcode == "parameter":
        limit = condition[root.operands[int(limit.arguments)]]
    is_known = limit.opcode == "constant" and limit.arguments.isdigit()
    return int(limit.arguments) if is_known else None


def total(
    module: Module,
    count: Callable[[str, Instruction], Counter[Key]],
    *,
    unknown_trips: int,
    into_fusions: bool = True,
) -> Counter[Key]:
    """Sum `count(computation, instruction)` over all instructions that the program runs, loops included.

    Args:
      module: the program.
      count: counts one instruction, without the instructions that it runs; gets the name of its computation too.
      unknown_trips: the trip count of loops that do not state it.
      into_fusions: whether to count the instructions inside of fusions, kernels and reductions too.
    """

    @functools.cache
    def count_all(name: str) -> Counter[Key]:
        counts: Counter[Key] = Counter()
        for op in module.computations.get(name, {}).values():
            counts.update(count(name, op))
            known = trip_count(op, module) if op.opcode == "while" else 1
            times = unknown_trips if known is None else known
            for called in op.called if into_fusions or op.opcode in CONTROL else ():
                for key, value in count_all(called).items():
                    counts[key] += times * value
            if branches := _without_fallback(op.branches, module):
                counts.update(max(map(count_all, branches), key=lambda branch: sum(branch.values())))
        return counts

    return count_all(module.entry)


def _without_fallback(branches: list[str], module: Module) -> list[str]:
    """Return the branches with a ragged all-to-all, if any: the others are the fallback for rows beyond its buffer."""

    def has_ragged(name: str) -> bool:
        instructions = module.computations.get(name, {}).values()
        return any(inner.opcode.startswith(RAGGED) for op in instructions for inner in reach(op, module))

    return list(filter(has_ragged, branches)) or branches


def unknown_loops(module: Module) -> int:
    """Count the loops with unknown trip counts, except loops inside of another such loop."""

    def count(computation: str, op: Instruction) -> Counter[tuple[str, str]]:
        is_unknown = op.opcode == "while" and trip_count(op, module) is None
        return Counter({(computation, op.name): 1} if is_unknown else {})

    return sum(runs > 0 for runs in total(module, count, unknown_trips=0).values())


def collectives(module: Module, mesh: dict[str, int], *, unknown_trips: int, slices: int = 1) -> dict[Collective, int]:
    """Return the least bytes that a device must send for the collectives of a program, by kind and axes.

    In a group of n devices an all-gather sends (n - 1)/n of its result, a reduce-scatter as much of its argument, an
    all-reduce both, one after the other; an all-to-all (n - 1)/n of its result, a ragged one of the smaller of argument
    and result, a permutation all of it. Between n slices the same holds for a device and its counterparts in the other
    slices.

    Args:
      module: the program.
      mesh: axis sizes in the order of the devices that the program was compiled for.
      unknown_trips: the trip count of loops that do not state it.
      slices: TPU slices that the program was compiled for; if several, the mesh axis `slice` is along them.
    """
    within = {**mesh, "slice": mesh["slice"] // slices} if slices > 1 else mesh

    def count(name: str, op: Instruction) -> Counter[Collective]:
        if op.opcode == "send":
            return _between_slices(op, slices)
        computation, kind = module.computations[name], op.opcode.removesuffix("-start")
        # The TPU compiler spreads one collective over several fusions, which all show it. The first one counts.
        if kind not in KINDS or _starts_elsewhere(op, computation):
            return Counter()
        axes, size = _group_axes(op.attributes, within)
        whole = op.size
        if kind == "all-gather" and op.opcode != kind:  # the type lists the arguments before the results
            whole = whole * size // (size + 1)
        elif kind == "collective-permute":
            whole = max(buffer.size for buffer in op.buffers)
        elif kind == "reduce-scatter":
            whole *= size
        elif kind == "all-reduce" and name.startswith("all-reduce-scatter"):  # each device keeps only its part
            kind = "reduce-scatter"
        elif kind == RAGGED and (source := computation.get(op.operands[0])):
            # one end is a buffer with room to spare: the other is what the devices send on average
            whole = min(whole, source.size)
        return Counter({Collective(kind, axes, size): _sent(kind, whole, size)})

    return {key: sent for key, sent in total(module, count, unknown_trips=unknown_trips).items() if sent}


def _sent(kind: str, whole: int, size: int) -> int:
    """Return the bytes that each of `size` devices sends for a collective over arrays of `whole` bytes."""
    if kind not in KINDS or kind == "collective-permute":
        return whole
    return whole * (size - 1) // size * (2 if kind == "all-reduce" else 1)


def _between_slices(send: Instruction, slices: int) -> Counter[Collective]:
    """Count the bytes of a `send` to other slices: none if it goes to the host, everything for an unknown kind."""
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', send.attributes)
    if not transfer:
        return Counter()
    kind = transfer[1].lower().replace("_", "-").replace("one-to-one", "collective-permute")
    operand = sum(buffer.size for buffer in send.buffers[:-1])  # the last is a handle
    whole = operand * slices if kind == "all-gather" else operand
    return Counter({Collective(kind, ("slice",), slices, dcn=True): _sent(kind, whole, slices)})


def _group_axes(attributes: str, mesh: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """Return the axes that the groups of a collective extend over, and the number of devices in a group."""
    devices = math.prod(mesh.values())
    group = _first_group(attributes, devices)
    if group is None or max(group) >= devices:
        return UNKNOWN, devices
    coords = np.array(np.unravel_index(np.array(group), tuple(mesh.values())))
    return tuple(axis for axis, row in zip(mesh, coords, strict=True) if len(set(row.tolist())) > 1), len(group)


def _first_group(attributes: str, devices: int) -> list[int] | None:
    """Return the devices of a collective's first group (all groups are alike); None if the notation is unknown.

    For a permutation it is the first pair of different devices.

    Known are {{0,1},{2,3}}, and two notations of an array of device numbers whose rows are the groups, [2,2]<=[4] and
    mesh['a'=2,'b'=2] {'b'}, both of which may be transposed first.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        ends = [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1])]
        return list(next(((a, b) for a, b in ends if a != b), ends[0]))
    if "replica_groups={}" in attributes:
        return list(range(devices))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return list(_integers(listed[1]))
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


def _grid(shape: str, transposed: str | None) -> np.ndarray:
    """Return 0, 1, 2, ... in this shape, with its axes permuted."""
    grid = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return grid.transpose(_integers(transposed)) if transposed else grid


def seen_at(part: str, sampling: Sampling, windows: Sequence[int], *, of_prompt: bool) -> list[tuple[int, int]]:
    """Return the positions of the prompt or response that a token sees, each as first position and end (exclusive).

    Returns a pair for each window, at the `start` or the `end` of a response, or at each of its tokens (`mean`).
    """
    S, C = sampling.max_prompt_tokens, sampling.max_tokens
    lengths = {"start": [1], "end": [C], "mean": range(1, C + 1)}[part]
    pairs = [(length, window) for length in lengths for window in windows]
    if of_prompt:
        return [(min(max(S + length - window, 0), S), S) for length, window in pairs]
    return [(max(length - window, 0), length) for length, window in pairs]


def fetched_at(part: str, sampling: Sampling, windows: Sequence[int] = (NO_WINDOW,)) -> Fetched:
    """Make a function that returns the positions that the decoding attention fetches.

    They are counted at the `start` or the `end` of a response, or on average (`mean`) over its tokens; and on average
    over the layers' windows.
    """
    C = sampling.max_tokens

    def fetched(T: int, has_fewer_heads: bool) -> float:
        # with as many prompt as completion positions, the heads tell the two apart
        seen = seen_at(part, sampling, windows, of_prompt=not (T == C and has_fewer_heads))
        return sum(fetched_positions(T, min(stop, T), start) for start, stop in seen) / len(seen)

    return fetched


def traffic(module: Module, *, unknown_trips: int, fetched: Fetched | None = None) -> int:
    """Count the bytes that one run of the program reads from and writes to a device's memory.

    Args:
      module: the program.
      unknown_trips: the trip count of loops that do not state it.
      fetched: the positions that the decoding attention fetches (`fetched_at`); None for its whole caches.
    """

    def count(name: str, op: Instruction) -> Counter[str]:
        computation = module.computations[name]
        if fetched is not None and _is_decode_attention(op):
            return Counter(bytes=_attention_bytes(op, computation, fetched))
        return Counter(bytes=_moved(op, computation, module))

    return total(module, count, unknown_trips=unknown_trips, into_fusions=False)["bytes"]


def _is_decode_attention(op: Instruction) -> bool:
    return op.opcode == "custom-call" and f"/{KERNEL}/" in op.attributes


def _attention_bytes(op: Instruction, computation: Computation, fetched: Fetched) -> int:
    """Count the bytes of queries, results, and fetched keys and values [X, K, T, H], which may be one array."""

    def arrays(call: Instruction) -> list[Instruction]:
        """Return the call's arguments with four axes: queries, and keys and values."""
        operands = (computation[name] for name in call.operands)
        return [each for each in operands if len(each.buffers[0].shape) == 4]

    def heads_per_key(call: Instruction) -> int:
        return arrays(call)[0].buffers[0].shape[2]

    q, k, *_ = arrays(op)
    (rows, *_), (X, K, T, H) = q.buffers[0].shape, k.buffers[0].shape
    fewest = min(heads_per_key(other) for other in computation.values() if _is_decode_attention(other))
    number_size = k.memory / (X * K * T * H)  # 0 if the array is on chip
    cache = int(rows * K * fetched(T, heads_per_key(op) == fewest) * H * number_size * (len(arrays(op)) - 1))
    return cache + q.memory + op.memory


def _moved(op: Instruction, computation: Computation, module: Module) -> int:
    if op.opcode in FREE or op.opcode.endswith(("-done", "-update")) or ALLOCATE in op.attributes:
        return 0
    if op.opcode == "copy-start":  # its type has both ends
        return op.memory
    if op.opcode == "slice-start":  # its type has the argument and the part
        argument, part = op.buffers[:2]
        return part.size * ((not argument.on_chip) + (not part.on_chip))
    read = [computation[name].memory if name in computation else 0 for name in op.operands]
    if inside := _fused(op, module):
        return _fusion(op, read, inside, module)
    written = op.memory
    if op.opcode in SLICES:
        read[0] = min(read[0], op.size)
    elif op.opcode in UPDATES:
        read[0], written = 0, min(written, computation[op.operands[UPDATES[op.opcode]]].size)
    elif op.opcode == "send":  # its type repeats the argument
        written = 0
    return sum(read) + written


def _fused(op: Instruction, module: Module) -> Computation:
    """Return the computation of a fusion; empty for other instructions."""
    return module.computations.get(op.attribute("calls"), {}) if op.opcode in FUSED else {}


def _parameters(inside: Computation) -> Iterator[tuple[int, str]]:
    """Yield the number and the name of each parameter."""
    return ((int(op.arguments), op.name) for op in inside.values() if op.opcode == "parameter")


def _unaliased(op: Instruction, inside: Computation, module: Module) -> Instruction:
    """Return the instruction that this one aliases: through bitcasts, and fusions of nothing but bitcasts."""
    if op.opcode == "bitcast":
        number = 0
    elif (nested := _fused(op, module)) and (
        source := _unaliased(find_root(nested), nested, module)
    ).opcode == "parameter":
        number = int(source.arguments)
    else:
        return op
    operand = op.operands[number]
    return _unaliased(inside[operand], inside, module) if operand in inside else op


def _fusion(fusion: Instruction, whole: list[int], inside: Computation, module: Module) -> int:
    """Count the bytes that a fusion reads of its arguments, `whole` bytes each, and writes of its results."""
    read = sum(min(whole[number], _reads(name, inside, module)) for number, name in _parameters(inside))
    root = find_root(inside)
    if ASYNC in root.attributes:  # its result includes the collective's
        return read + sum(_writes(op, inside, module) for op in inside.values() if SPREAD in op.attributes)
    if root.opcode != "tuple":
        return read + min(fusion.memory, _writes(root, inside, module))
    results = zip(fusion.buffers, root.operands, strict=False)
    return read + sum(
        min(buffer.size, _writes(inside[name], inside, module)) for buffer, name in results if not buffer.on_chip
    )


def _starts_elsewhere(op: Instruction, inside: Computation) -> bool:
    """Return whether the instruction belongs to a collective spread over several fusions that another fusion starts."""
    starts = any(f'"{ASYNC}Start"' in other.attributes for other in inside.values())
    return ASYNC in op.attributes or (SPREAD in op.attributes and not starts)


def _reads(name: str, inside: Computation, module: Module) -> int:
    """Count the bytes of an array that a fusion reads: all, only slices, or none if it is only passed on."""
    whole = inside[name].size
    read = 0
    for user in inside.values():
        for number in (number for number, operand in enumerate(user.operands) if operand == name):
            if _unaliased(user, inside, module) is _unaliased(inside[name], inside, module):
                read += _reads(user.name, inside, module)
            elif user.opcode in SLICES and number == 0:
                read += user.size
            elif nested := _fused(user, module):
                read += sum(_reads(inner, nested, module) for place, inner in _parameters(nested) if place == number)
            elif not (
                (user.opcode == "dynamic-update-slice" and number == 0)
                or (user.opcode == "tuple" and user.root)
                or _starts_elsewhere(user, inside)
            ):
                return whole
    return min(whole, read)


def _writes(result: Instruction, inside: Computation, module: Module) -> int:
    """Count the bytes that a fusion writes of one of its results."""
    result = _unaliased(result, inside, module)
    if result.opcode == "parameter" or _starts_elsewhere(result, inside):
        return 0
    if nested := _fused(result, module):
        return _writes(find_root(nested), nested, module)
    if result.opcode == "dynamic-update-slice":
        return inside[result.operands[1]].size
    return result.size
