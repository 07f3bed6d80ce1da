"""`gspax compile`: what an experiment would need on a TPU that is not there, from the code compiled for it.

Each program of a run is compiled ahead of time for the devices of a topology. Memory is what the compiler says, with
what the run holds besides; bytes moved and sent are read from the compiled text (`aot.traffic`, `aot.hlo`); FLOPs are
counted from the model's shape. The times are rooflines: a phase takes as long as the slowest of its products at the
chip's peak, its memory traffic, and what it sends to other devices of its slice and to other slices, as if all these
always overlapped.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import numpy as np

from gspax.aot import hlo
from gspax.aot.chips import Chip, Topology
from gspax.aot.hlo import Collective
from gspax.aot.programs import ROLLOUT, SCORE, TRAIN, Program, device_bytes, programs
from gspax.aot.sides import Rate, Side, sides
from gspax.aot.traffic import traffic
from gspax.config import Experiment
from gspax.experiment.counts import forward_flops
from gspax.rollout.placement import abstract_pushed

PUSH, PREFILL, DECODE = "push of weights", "prefill", "decode, a token"
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device while a program runs."""

    arguments: int
    results: int  # that do not take the place of arguments
    temporaries: int
    code: int
    peak: int  # what the program needs at once, code aside: by this the compiler decides whether to refuse
    besides: int  # what the run holds and the program is not given

    @property
    def together(self) -> int:
        return self.peak + self.code + self.besides


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program after compiling."""

    name: str
    seconds: float
    memory: Memory | None = None
    refusal: str = ""  # why the compiler made nothing of it
    text: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One run of one part of a step, on one device."""

    name: str
    runs: int  # in a step
    useful: float  # FLOPs of the model: forward, and backward twice that
    done: float  # with those of recomputation
    moved: int  # bytes from and to memory
    sent: dict[Collective, int]
    devices: int  # that run it


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a phase."""

    compute: float
    memory: float
    network: float  # within a slice
    dcn: float = 0.0  # between slices

    @property
    def bound(self) -> float:
        return getattr(self, self.reason)

    @property
    def reason(self) -> str:
        return max(("compute", "memory", "network", "dcn"), key=lambda name: getattr(self, name))


def run(experiment: Experiment, topology: Topology) -> bool:
    """Compile for the topology and print the report, program by program. Whether everything fits.

    Raises:
      UserError: as `sides` does.
    """
    jax.config.update("jax_platforms", "cpu")  # a TPU that may be here has nothing to do with it
    learner, sampler = sides(experiment, topology)
    print(heading(experiment, topology, learner, sampler), flush=True)
    compiled = []
    for program in programs(experiment, learner.mesh, sampler.mesh):
        compiled.append(compile_program(program))
        print(f"  {program.name}: compiled for {compiled[-1].seconds:.0f} s", flush=True)
    print("\n" + memory_table(compiled, topology))
    estimates = estimated(experiment, compiled, learner, sampler)
    if estimates:
        print("\n" + time_table(estimates, topology.chip))
        print("\n" + step_lines(experiment, estimates, topology))
        print("\n" + collective_table([phase for phase, _ in estimates]))
    for sentence in uncounted(compiled):
        print("\n" + sentence)
    wrong = misfits(compiled, topology)
    print("\n" + ("\n".join(wrong) or f"Everything fits {topology}."))
    return not wrong


def heading(experiment: Experiment, topology: Topology, learner: Side, sampler: Side) -> str:
    """What is compiled for which devices."""
    if learner is sampler:
        return f"{experiment.name} on {topology}: {learner}"
    lines = [f"{experiment.name} on {topology}"]
    for side, does in ((learner, f"{TRAIN}, {SCORE}"), (sampler, ROLLOUT)):
        lines.append(f"  {side.name}, {does}: {side} of {side.topology}")
    return "\n".join(lines)


def estimated(
    experiment: Experiment, compiled: list[Compiled], learner: Side, sampler: Side
) -> list[tuple[Phase, Times]]:
    """The phases of what compiled, and what each takes where it runs."""
    found = [] if learner is sampler else [(pushed(experiment, learner, sampler), sampler)]
    for each in compiled:
        side = sampler if each.name == ROLLOUT else learner
        if not each.refusal:
            found += [(phase, side) for phase in phases(experiment, each, side.sizes, side.topology.slices)]
    return [(phase, times(phase, side.topology.chip, side.link_rate())) for phase, side in found]


def compile_program(program: Program) -> Compiled:
    """Lower and compile; what the compiler refuses, for want of memory as a rule, is part of the answer."""
    began = time.perf_counter()
    try:
        with _uncached():
            made = program.lower().compile()
    except jax.errors.JaxRuntimeError as problem:
        return Compiled(name=program.name, seconds=time.perf_counter() - began, refusal=refusal(str(problem)))
    stats = made.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
        besides=program.besides,
    )
    return Compiled(name=program.name, seconds=time.perf_counter() - began, memory=memory, text=made.as_text())


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Nothing goes into jax's persistent cache: what is compiled for devices that are not there cannot be read back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def refusal(message: str) -> str:
    """The line of the compiler's long message that has the numbers, without full stop and at most 300 characters."""
    lines = message.strip().splitlines()
    line = next((line for line in lines if re.search(r"\d.*\bhbm\b", line, re.IGNORECASE)), lines[0])
    return line.strip()[:300].rstrip(".")


def phases(experiment: Experiment, compiled: Compiled, mesh: dict[str, int], slices: int = 1) -> list[Phase]:
    """The parts of a step that a compiled program is: the sampler's are its prefill and its loop over tokens."""
    config, sampling, schedule = experiment.model, experiment.sampling, experiment.schedule
    devices = int(np.prod(list(mesh.values())))
    S, C = sampling.max_prompt_tokens, sampling.max_tokens
    rows = sampling.prompts * sampling.group / devices
    tokens = rows / schedule.minibatches * (S + C)
    module = hlo.parse(compiled.text)
    moved = [traffic(module, unknown_trips=trips) for trips in (0, 1)]
    sent = [Counter(hlo.collectives(module, mesh, unknown_trips=trips, slices=slices)) for trips in (0, 1)]

    def phase(name: str, runs: int, useful: float, done: float, moved: int, sent: Counter) -> Phase:
        return Phase(name=name, runs=runs, useful=useful, done=done, moved=moved, sent=dict(sent), devices=devices)

    if compiled.name != ROLLOUT:
        once = tokens * forward_flops(config, S + C)
        useful, done = (3, 3 + (config.remat in ("full", "offload"))) if compiled.name == TRAIN else (1, 1)
        scored = 1 + (experiment.reference is not None)
        runs = schedule.minibatches * (1 if compiled.name == TRAIN else scored)
        return [phase(compiled.name, runs, useful * once, done * once, moved[1], sent[1])]
    prompts = sampling.prompts / devices * S * forward_flops(config, S)
    drawn = rows * forward_flops(config, 2 * (S + C / 2))  # a drawn token looks at all before it, not at half a row
    return [
        phase(PREFILL, 1, prompts, prompts, moved[0], sent[0]),
        phase(DECODE, C - 1, drawn, drawn, moved[1] - moved[0], sent[1] - sent[0]),
    ]


def pushed(experiment: Experiment, learner: Side, sampler: Side) -> Phase:
    """The learner's parameters on their way to a sampler apart: what the side with fewer devices sends or receives."""
    received = device_bytes(abstract_pushed(experiment.model, sampler.mesh))
    sent = received * max(sampler.mesh.size, learner.mesh.size) // learner.mesh.size
    axes = tuple(axis for axis, size in sampler.sizes.items() if size > 1)
    over = Collective("push", axes, sampler.mesh.size, dcn=learner.topology is not sampler.topology)
    return Phase(name=PUSH, runs=1, useful=0, done=0, moved=0, sent={over: sent}, devices=learner.mesh.size)


def times(phase: Phase, chip: Chip, link_rate: Rate) -> Times:
    """What a phase takes at the chip's peak rates. Collectives follow one another, over all links that they can use;
    what goes between slices goes over the device's share of the data centre's network, meanwhile."""
    within = [(each.axes, sent) for each, sent in phase.sent.items() if not each.dcn]
    between = sum(sent for each, sent in phase.sent.items() if each.dcn)
    return Times(
        compute=phase.done / chip.flops,
        memory=phase.moved / chip.memory_rate,
        network=sum(sent / link_rate(axes) for axes, sent in within),
        dcn=between / chip.dcn_rate,
    )


def misfits(compiled: list[Compiled], topology: Topology) -> list[str]:
    """One sentence for each program that is too large."""
    found = []
    for each in compiled:
        if each.refusal:
            found.append(f"Does not compile for {topology}: the {each.name}: {each.refusal}")
        elif each.memory is not None and each.memory.together > topology.chip.memory:
            found.append(
                f"Does not fit {topology}: the {each.name} needs {each.memory.together / GB:.2f} GB on each device, "
                f"a program may use {topology.chip.memory / GB:.2f}"
            )
    return found


def uncounted(compiled: list[Compiled]) -> list[str]:
    """One sentence for each program with loops of which the text does not say how often they run, but for the
    sampler's loop over tokens."""
    found = []
    for each in compiled:
        loops = 0 if each.refusal else hlo.unread_loops(hlo.parse(each.text)) - (each.name == ROLLOUT)
        if loops > 0:
            found.append(f"The {each.name} has loops ({loops}) that do not say how often they run; each counts once.")
    return found


def memory_table(compiled: list[Compiled], topology: Topology) -> str:
    """Memory per device of each program that compiled, part by part."""
    rows = {
        "arguments": "arguments",
        "results that replace none": "results",
        "temporaries": "temporaries",
        "needed at once": "peak",
        "code": "code",
        "held by the run besides": "besides",
        "together, last three": "together",
    }
    fitting = [each for each in compiled if each.memory is not None]
    lines = [f"{'Memory per device, GB':<28}" + "".join(f"{each.name:>16}" for each in fitting)]
    for title, name in rows.items():
        cells = [f"{getattr(each.memory, name) / GB:>16.3f}" for each in fitting]
        lines.append(f"  {title:<26}" + "".join(cells))
    usable = topology.chip.memory / GB
    return "\n".join([*lines, f"  {'a program may use':<26}" + f"{usable:>16.2f}" * len(fitting)])


def time_table(estimates: list[tuple[Phase, Times]], chip: Chip) -> str:
    """What each phase does on one device, and how long it takes at least."""
    head = f"{'Per device and run':<18}{'TFLOP':>9}{'moved GB':>10}{'sent GB':>9}"
    lines = [
        head + f"{'compute s':>11}{'memory s':>10}{'network s':>11}{'DCN s':>9}{'bound by':>10}{'MFU':>8}{'runs':>7}"
    ]
    for phase, found in estimates:
        mfu = phase.useful / found.bound / chip.flops if found.bound else 0.0
        lines.append(
            f"  {phase.name:<16}{phase.done / 1e12:9.3f}{phase.moved / GB:10.2f}{sum(phase.sent.values()) / GB:9.2f}"
            f"{found.compute:11.4f}{found.memory:10.4f}{found.network:11.4f}{found.dcn:9.4f}{found.reason:>10}"
            f"{mfu:>8.1%}{phase.runs:>7,}"
        )
    return "\n".join(lines)


def step_lines(experiment: Experiment, estimates: list[tuple[Phase, Times]], topology: Topology) -> str:
    """The whole step: rollout, scores and updates, if all of them compiled.

    A sampler apart that draws ahead works while the learner does, so that the slower of them makes the step.
    """
    parts = {phase.name: phase.runs * found.bound for phase, found in estimates}
    if not {TRAIN, SCORE, PREFILL, DECODE} <= set(parts):
        return "No estimate of a whole step: not all of it compiled."
    sampler = parts.get(PUSH, 0.0) + parts[PREFILL] + parts[DECODE]
    learner = parts[SCORE] + parts[TRAIN]
    step = max(sampler, learner) if draws_ahead(experiment) else sampler + learner
    push = f"push of weights {parts[PUSH]:.2f}, " if PUSH in parts else ""
    meanwhile = " and meanwhile" if draws_ahead(experiment) else ","
    devices = topology.slices * topology.slice_devices
    drawn = experiment.sampling.prompts * experiment.sampling.group * experiment.sampling.max_tokens
    useful = sum(phase.runs * phase.useful * phase.devices for phase, _ in estimates)
    return (
        f"A step takes at least {step:.2f} s: {push}rollout {parts[PREFILL] + parts[DECODE]:.2f}{meanwhile} "
        f"old log-probs {parts[SCORE]:.2f}, updates {parts[TRAIN]:.2f}\n"
        f"(responses of {experiment.sampling.max_tokens} tokens, perfect overlap); "
        f"MFU at most {useful / step / devices / topology.chip.flops:.1%}, "
        f"{drawn / step / devices:,.0f} drawn tokens/s on each device"
    )


def draws_ahead(experiment: Experiment) -> bool:
    """Whether the sampler draws while the learner updates, but for once after each checkpoint."""
    placement = experiment.placement
    return placement is not None and placement.staleness > 0 and experiment.schedule.checkpoint_every != 1


def collective_table(found: list[Phase]) -> str:
    """What each phase sends, by collective and axes."""
    lines = ["Sent by each device in one run, GB"]
    for phase in found:
        for collective, sent in sorted(phase.sent.items(), key=lambda item: -item[1]):
            over = f"{'+'.join(collective.axes) or 'no axis'} ({collective.size})" + ", DCN" * collective.dcn
            lines.append(f"  {phase.name:<18}{collective.kind:<20}{over:<24}{sent / GB:12.4f}")
    return "\n".join(lines)
