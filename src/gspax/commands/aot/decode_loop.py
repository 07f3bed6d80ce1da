"""One token of the decoding loop, from the compiled text: what it moves and sends beside what it needs.

The need is arithmetic: the weights on the device once, except for the table of embeddings, of which a token reads a
row; the live part of the completions' cache, and the prompts' cache once per prompt.

The kernel of the decoding attention (`model.kernels.decode_attention`) is a call into compiled code, whose text does
not show how much of the cache it fetches. Its bytes are computed: for each row the blocks with live positions
(`fetched_positions`), its queries and its results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gspax.commands.aot.hlo import KINDS, Instruction, Module, array_bytes, trip_count
from gspax.commands.aot.traffic import Live
from gspax.config import ModelConfig, Sampling
from gspax.model.kernels.decode_attention import fetched_positions
from gspax.model.sizes.memory import embedding_table_count, inference_weights_bytes, position_bytes, size_of
from gspax.parallel.sharding import batch_shards

PARTS = ("start", "mean", "end")  # of a response


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token on one device, in bytes."""

    part: str  # of a response
    moved: int
    need: int


def live_at(part: str, sampling: Sampling) -> Live:
    """The positions that the attention reads when the first or the last token is drawn, or on average over tokens."""
    S, C = sampling.max_prompt_tokens, sampling.max_tokens

    def fetched(T: int, own: bool) -> float:
        """Of a row with T positions, of a completion (`own`) or of a prompt."""
        if not own:
            return fetched_positions(T, min(S, T))
        lengths = {"start": [1], "end": [C], "mean": range(1, C + 1)}[part]
        return sum(fetched_positions(T, length) for length in lengths) / len(lengths)

    return Live(completion=C, fetched=fetched)


def needed(part: str, model: ModelConfig, sampling: Sampling, mesh: dict[str, int]) -> int:
    """Bytes that a device must read for one token of each of its rows."""
    prompts = sampling.prompts // math.gcd(sampling.prompts, batch_shards(mesh))
    rows = sampling.prompts * sampling.group / batch_shards(mesh)
    length = {"start": 1.0, "end": sampling.max_tokens, "mean": (1 + sampling.max_tokens) / 2}[part]
    positions = rows * length + prompts * sampling.max_prompt_tokens
    cache = position_bytes(model, sampling.kv_cache_dtype, mesh) * positions
    table = size_of(model.dtype) * embedding_table_count(model)
    return int(inference_weights_bytes(model, sampling, mesh) - table // mesh["tensor"] // mesh["fsdp"] + cache)


def gathered_weights(module: Module) -> list[str]:
    """The collectives in the loop over tokens whose argument is the same for every token, as "kind of type"."""
    return [
        found
        for inside in [module.computations[module.entry]]
        for each in inside
        if each.opcode == "while" and trip_count(each, module) is None
        for found in _constant_collectives(module, each.attribute("body"), _kept(module, each.attribute("body")))
    ]


def _kept(module: Module, body: str) -> set[int]:
    """The elements of a loop's state that its body returns as they came."""
    inside = {each.name: each for each in module.computations[body]}
    root = next(each for each in inside.values() if each.root)
    if root.opcode != "tuple":
        return set()
    elements = enumerate(inside.get(name) for name in root.operands)
    return {
        index
        for index, each in elements
        if each is not None and each.opcode == "get-tuple-element" and _index(each) == index and _of_state(each, inside)
    }


def _index(element: Instruction) -> int:
    found = re.search(r"index=(\d+)", element.attributes)
    return int(found[1]) if found else -1


def _of_state(element: Instruction, inside: dict[str, Instruction]) -> bool:
    return inside[element.operands[0]].opcode == "parameter"


def _constant_collectives(module: Module, name: str, kept: set[int]) -> Iterator[str]:
    """Collectives of a loop's body that depend on nothing but the elements `kept` of its state."""
    inside = {each.name: each for each in module.computations[name]}
    constant: dict[str, bool] = {}
    for each in inside.values():
        if each.opcode == "get-tuple-element" and _of_state(each, inside):
            constant[each.name] = _index(each) in kept
        else:
            known = [constant[operand] for operand in each.operands if operand in constant]
            constant[each.name] = each.opcode == "constant" or (bool(known) and all(known))
        if not constant[each.name] or each.opcode == "constant":
            continue
        for kind in sorted(_kinds(module, each)):
            yield f"{kind} of {each.type.split('{')[0].lstrip('(')}, {sum(array_bytes(each.type)) / 1e6:.1f} MB"


def _kinds(module: Module, each: Instruction) -> set[str]:
    """The collectives that an instruction is or starts, those inside of what it calls included."""
    kind = each.opcode.removesuffix("-start")
    found = {kind} if kind in KINDS else set()
    called = re.findall(r"\b(?:calls|to_apply|body)=%?([\w.\-]+)", each.attributes)
    for name in called if not each.opcode.endswith(("-done", "-update")) else ():
        for inner in module.computations.get(name, []):
            found |= _kinds(module, inner)
    return found
