"""Where the time of a step and of the first step goes: the profile in speed.md.

Runs `gspax bench FILE --profile` without a compilation cache. XLA's text of the compiled programs says which source
line an operation comes from, and the trace says how long each operation ran. An operation counts to the innermost file
of gspax in its stack; a loop counts for what its body leaves. JAX's log says how long each program took to compile.

Run: python experiments/benchmarks/profile_parts.py FILE [PATH=VALUE ...]
"""

from __future__ import annotations

import collections
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROGRAMS = {"jit__generate": "rollout", "jit_update": "update"}
SLOWEST = 5  # programs that have a line of their own
PARTS = {  # by source file
    "expert_ffn.py": "experts",
    "expert_parallel.py": "experts",
    "moe.py": "router",
    "attention.py": "attention",
    "decode_attention.py": "attention",
    "online_softmax.py": "attention",
    "segments.py": "attention",
    "layers.py": "projections and norms",
    "quantization.py": "projections and norms",
    "logprobs.py": "head and log-probs",
    "optimizer.py": "optimizer",
    "train_step.py": "optimizer",
}


class Event(NamedTuple):
    """An operation that ran on a thread."""

    start: float  # microseconds
    end: float
    program: str
    operation: str


def read_sources(text: str) -> dict[str, str]:
    """The file of gspax that each operation of a program's text comes from."""
    tables = {
        name: dict(re.findall(r"^(\d+) (.*)$", text.split(f"\n{name}\n", 1)[1].split("\n\n", 1)[0], re.MULTILINE))
        for name in ("FileNames", "FileLocations", "StackFrames")
        if f"\n{name}\n" in text
    }
    found = {}
    for operation, frame in re.findall(r"^\s*(?:ROOT )?%([\w.\-]+) = .*stack_frame_id=(\d+)", text, re.MULTILINE):
        while frame != "0":
            location, parent = re.findall(r"=(\d+)", tables["StackFrames"][frame])
            path = tables["FileNames"][re.findall(r"=(\d+)", tables["FileLocations"][location])[0]].strip('"')
            if "/gspax/" in path:
                found[operation] = Path(path).name
                break
            frame = parent if parent != frame else "0"
    return found


def read_events(trace: Path) -> dict[int, list[Event]]:
    """The operations of a trace on each thread, an outer one before the ones inside it."""
    threads = collections.defaultdict(list)
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event.get("ph") == "X" and "hlo_op" in (where := event.get("args") or {}):
            start, end = event["ts"], event["ts"] + event["dur"]
            threads[event["tid"]].append(Event(start, end, where["hlo_module"], where["hlo_op"]))
    return {thread: sorted(events, key=lambda event: (event.start, -event.end)) for thread, events in threads.items()}


def self_times(events: list[Event]) -> Iterator[tuple[Event, float]]:
    """Each operation of a thread with the microseconds that no operation inside it accounts for."""
    inside: list[tuple[Event, float]] = []  # the operations that have begun, with the time of what ended in them

    def close(until: float) -> Iterator[tuple[Event, float]]:
        while inside and inside[-1][0].end <= until:
            event, covered = inside.pop()
            yield event, event.end - event.start - covered
            if inside:
                outer, before = inside[-1]
                inside[-1] = outer, before + event.end - event.start

    for event in events:
        yield from close(event.start)
        inside.append((event, 0.0))
    yield from close(float("inf"))


class Profile(NamedTuple):
    """The result of `measure`."""

    parts: dict[str, dict[str, float]]  # milliseconds of each part in a rollout and in an update, summed over threads
    compile_s: dict[str, float]  # seconds that XLA took for each program of the first step
    first_step_s: float  # from the start of the process


def measure(file: Path, overrides: list[str]) -> Profile:
    """Profile an experiment's steps."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}/programs --xla_dump_hlo_as_text"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_LOG_COMPILES": "1"}
        outputs = "--profile", f"{folder}/trace", "--json", f"{folder}/bench.json"
        command = [sys.executable, "-m", "gspax", "bench", str(file), *overrides, *outputs]
        log = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stderr
        first_step_s = json.loads(Path(folder, "bench.json").read_text())["first_step_s"]
        texts = [path.read_text() for path in Path(folder, "programs").glob("*after_optimizations.txt")]
        (trace,) = Path(folder).glob("trace/plugins/profile/*/perfetto_trace.json.gz")
        threads = read_events(trace)
    sources: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for text in texts:
        if program := re.match(r"HloModule ([^,\s]+)", text):
            sources[program[1]] |= read_sources(text)
    parts: dict[str, dict[str, float]] = {name: collections.defaultdict(float) for name in PROGRAMS.values()}
    for events in threads.values():
        for event, microseconds in self_times([event for event in events if event.program in PROGRAMS]):
            source = sources[event.program].get(event.operation, "")
            parts[PROGRAMS[event.program]][PARTS.get(source, "everything else")] += microseconds / 1e3
    compile_s: dict[str, float] = collections.defaultdict(float)
    for program, seconds in re.findall(r"Finished XLA compilation of jit\((.+?)\) in ([\d.]+) sec", log):
        compile_s[program] += float(seconds)
    return Profile(parts, compile_s, first_step_s)


def tables(profile: Profile) -> list[str]:
    """The Markdown tables, the largest part of an update first, then the programs that take longest to compile."""
    rollout, update = profile.parts["rollout"], profile.parts["update"]
    order = sorted(update, key=lambda part: -update[part])
    lines = ["| part of a step | rollout, ms | update, ms |", "| --- | --- | --- |"]
    lines += [f"| {part} | {rollout.get(part, 0):.0f} | {update[part]:.0f} |" for part in order]
    lines += [f"| sum over threads | {sum(rollout.values()):.0f} | {sum(update.values()):.0f} |", ""]
    compiled = profile.compile_s
    slowest = sorted(compiled, key=lambda program: -compiled[program])[:SLOWEST]
    rest = sum(compiled.values()) - sum(compiled[program] for program in slowest)
    lines += ["| part of the first step | seconds |", "| --- | --- |"]
    lines += [f"| compilation of `{program}` | {compiled[program]:.1f} |" for program in slowest]
    lines += [f"| compilation of {len(compiled) - len(slowest)} smaller programs | {rest:.1f} |"]
    lines += [f"| imports, tracing, and everything else | {profile.first_step_s - sum(compiled.values()):.1f} |"]
    return lines


if __name__ == "__main__":
    print("\n".join(tables(measure(Path(sys.argv[1]), sys.argv[2:]))))
