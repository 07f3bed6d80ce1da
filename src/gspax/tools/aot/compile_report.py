"""Reports for `gspax compile` whether an experiment fits a TPU topology, and its best possible speed.

Each program of a run is compiled for the devices of the topology. Memory is the compiler's, plus what else the run
keeps on a device.

Times are rooflines, lower bounds from the compiled programs. A phase takes as long as the slowest of its matrix
products at the chip's peak rate, its memory traffic, and what it sends to other devices of its slice and to other
slices, as if all four overlapped perfectly. Bytes are read from the compiled text (`hlo`); FLOPs are counted from the
model's shape, because the compiler counts a loop's body once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax

from gspax.config import NO_WINDOW, Experiment, ModelConfig, Placement, Sampling, layer_windows
from gspax.errors import display
from gspax.model.decoding import BLOCK
from gspax.model.sizes import (
    forward_flops,
    inference_weights_bytes,
    lookup_count,
    sampler_sizes,
    size_of,
)
from gspax.parallel.sharding import batch_shards
from gspax.sampler.inference_weights import abstract_inference_weights
from gspax.tools.aot import hlo
from gspax.tools.aot.chips import Chip, Rate, Target, Targets, Topology, make_targets
from gspax.tools.aot.hlo import Collective
from gspax.tools.aot.programs import (
    BEHAVIOR,
    COPY,
    GB,
    PROMPTS,
    REPLIES,
    ROLLOUT,
    SAMPLER,
    SCORE,
    TEACHER,
    TRAIN,
    TURNS,
    Compiled,
    Few,
    Program,
    compile_few,
    compile_program,
    describe_misfits,
    device_bytes,
    few_layers,
    make_programs,
    reply_tokens,
)

PUSH, PREFILL, DECODE, REPLY = "weight push", "prefill", "decode, a token", "a reply"
PARTS = ("start", "mean", "end")  # of a response
Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One execution of one phase of a step, on one device."""

    name: str
    runs: int  # executions in a step
    model_flops: float  # forward, and twice that for the backward pass
    flops: float  # model_flops and recomputation
    moved: int  # bytes between memory and cores
    sent: dict[Collective, int]  # bytes
    devices: int  # that execute it
    moved_at: dict[str, int] = field(default_factory=dict)  # of a decoded token, by part of a response


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a phase, at the peak rate of each resource."""

    compute: float
    memory: float
    network: float  # within a slice
    dcn: float = 0.0  # between slices

    @property
    def bound(self) -> float:
        return getattr(self, self.limit)

    @property
    def limit(self) -> str:
        """The name of the slowest resource."""
        return max(("compute", "memory", "network", "dcn"), key=lambda name: getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Work:
    """The sizes that determine the work of a step."""

    model: ModelConfig
    sampling: Sampling
    minibatches: int


Estimates = Sequence[tuple[Phase, Times]]


def run(experiment: Experiment, topology: Topology, *, all_layers: bool = False) -> bool:
    """Compile for the topology and print the report, program by program; return True if everything fits.

    Args:
      experiment: the experiment to compile.
      topology: the devices to compile for.
      all_layers: compile the sampler with all layers, instead of extrapolating from a few.

    Raises:
      UserError: as `make_targets`.
    """
    jax.config.update("jax_platforms", "cpu")  # a TPU on this machine is not used
    model = experiment.model
    targets = learner, sampler = make_targets(experiment, topology)
    display(heading(experiment.name, topology, targets, turns=experiment.environment is not None))

    def make(model: ModelConfig) -> list[Program]:
        return make_programs(replace(experiment, model=model), learner.mesh, sampler.mesh)

    compiled = [_compile(program, model, make, all_layers=all_layers) for program in make(model)]
    succeeded = [program for program in compiled if not program.error]
    display("\n" + memory_table(succeeded, topology))
    work = Work(model=model, sampling=experiment.sampling, minibatches=experiment.schedule.minibatches)
    estimates = estimate(succeeded, targets, work)
    if experiment.placement is not None:
        push = push_phase(work, learner, sampler)
        estimates.insert(0, (push, estimate_times(push, topology.chip, sampler.link_rate)))
    if estimates:
        display("\n" + time_table(estimates, topology.chip))
        placement, every = experiment.placement, experiment.schedule.checkpoint_every
        ahead = placement is not None and samples_ahead(placement, every)
        display("\n" + step_lines(experiment.sampling, estimates, topology, ahead=ahead))
        if experiment.environment is not None:
            reply = reply_tokens(experiment.sampling.max_tokens)
            display(f"Assumed: conversations of {experiment.turns.limit} turns, replies of {reply} tokens.")
        display("\n" + collective_table([phase for phase, _ in estimates]))
    if any(phase.moved_at for phase, _ in estimates):
        display("\n" + token_table(work, sampler.sizes, estimates))
    misfits = describe_misfits(compiled, topology)
    conclusion = "\n".join(misfits) or f"Everything fits {topology}."
    display("\n" + "\n\n".join([*describe_uncounted(succeeded), conclusion]))
    return not misfits


def _compile(
    program: Program, model: ModelConfig, make: Callable[[ModelConfig], list[Program]], *, all_layers: bool
) -> Compiled:
    """Compile a program, from smaller models by `make` if possible, and print the seconds."""
    how, few = "", few_layers(model)

    def make_small(number: int) -> Program:
        smaller = make(replace(model, num_hidden_layers=number))
        return next(small for small in smaller if small.name == program.name)

    if program.name in SAMPLER and few is not None and not all_layers:
        compiled = compile_few(program, make_small, few)
        how = f"with {few.less} and {few.more} of {few.layers} layers "
    else:
        compiled = compile_program(program)
    display(f"  {program.name}: compiled {how}in {compiled.seconds:.0f} s")
    return compiled


def estimate(compiled: Sequence[Compiled], targets: Targets, work: Work) -> list[tuple[Phase, Times]]:
    """Estimate the phases of the compiled programs, and their times on their targets."""
    estimates = []
    for program in compiled:
        target = _target_of(program.name, targets)
        phases, *more = (
            make_phases(small, work, target.sizes, target.topology.slices) for small in program.small or (program,)
        )
        if program.few is not None:
            phases = extrapolate_phases(phases, more[0], program.few)
        estimates += [(phase, estimate_times(phase, target.topology.chip, target.link_rate)) for phase in phases]
    return estimates


def samples_ahead(placement: Placement, checkpoint_every: int) -> bool:
    """Return whether the sampler works while the learner updates. Nothing is sampled ahead across a checkpoint."""
    if checkpoint_every == 1:
        return False
    return placement.staleness > 0 if placement.partial is None else placement.partial.ahead > 0


def _target_of(name: str, targets: Targets) -> Target:
    """Return the target that a program is compiled for."""
    if name in SAMPLER:
        return targets.sampler
    return targets.learner


def make_phases(compiled: Compiled, work: Work, mesh: dict[str, int], slices: int = 1) -> list[Phase]:
    """Make the phases of a compiled program: a rollout has prefill and a loop over tokens, others have one phase.

    Args:
      compiled: the program.
      work: the work of a step.
      mesh: axis sizes, in the order of the devices that the program was compiled for.
      slices: the number of slices that the mesh spans.
    """
    model, sampling = work.model, work.sampling
    S, C = sampling.max_prompt_tokens, sampling.max_tokens
    devices = math.prod(mesh.values())
    rows = sampling.prompts * sampling.group / devices

    def phase(name: str, model_flops: float, flops: float, *, trips: int = 1) -> Phase:
        return Phase(
            name=name,
            runs=compiled.program.runs,
            model_flops=model_flops,
            flops=flops,
            moved=hlo.traffic(compiled.module, unknown_trips=trips),
            sent=hlo.collectives(compiled.module, mesh, unknown_trips=trips, slices=slices),
            devices=devices,
        )

    if compiled.name == COPY:
        return [phase(COPY, 0, 0)]
    if compiled.name not in SAMPLER:
        forward = rows / work.minibatches * (S + C) * forward_flops(compiled.program.model or model, S + C)
        passes, recomputed = (3, model.remat in ("full", "offload")) if compiled.name == TRAIN else (1, 0)
        return [phase(compiled.name, passes * forward, (passes + recomputed) * forward)]
    in_turn = 1  # conversations of a slot
    if compiled.name != ROLLOUT:
        in_turn = math.ceil(sampling.prompts * sampling.group / sampler_sizes(model, sampling, mesh).slots)
    token = rows / in_turn * forward_flops(model, 2 * (S + C / 2))  # a sampled token attends to all before it
    if compiled.name == REPLIES:
        reply = reply_tokens(C)
        return [phase(REPLY, reply * token, reply * token, trips=-(-reply // BLOCK))]
    prompts = sampling.prompts / devices * S * forward_flops(model, S)
    prefill = phase(PREFILL, prompts, prompts, trips=0)
    if compiled.name == PROMPTS:
        return [prefill]
    windows = layer_windows(model) or (NO_WINDOW,)
    fetched_at = {part: hlo.fetched_at(part, sampling, windows) for part in PARTS}
    moved_at = {
        part: hlo.traffic(compiled.module, unknown_trips=1, fetched=fetched) - prefill.moved
        for part, fetched in fetched_at.items()
    }
    both = phase(DECODE, token, token * (1 + sampling.drafts))
    sent = dict(Counter(both.sent) - Counter(prefill.sent))
    decode = replace(both, moved=moved_at["mean"], sent=sent, moved_at=moved_at)
    return [decode] if compiled.name == TURNS else [prefill, replace(decode, runs=C - 1)]


def extrapolate_phases(less: list[Phase], more: list[Phase], few: Few) -> list[Phase]:
    """Extrapolate the phases of a whole program from two small ones. FLOPs are taken from `less`."""

    def scale(first: dict[Key, int], second: dict[Key, int]) -> dict[Key, int]:
        keys = {**first, **second}
        return {key: round(few.extrapolate(first.get(key, 0), second.get(key, 0))) for key in keys}

    return [
        replace(
            a,
            moved=round(few.extrapolate(a.moved, b.moved)),
            sent={key: sent for key, sent in scale(a.sent, b.sent).items() if sent},
            moved_at=scale(a.moved_at, b.moved_at),
        )
        for a, b in zip(less, more, strict=True)
    ]


def push_phase(work: Work, learner: Target, sampler: Target) -> Phase:
    """Make the phase that sends parameters to a disaggregated sampler, at the rate of the target with fewer devices."""
    weights = abstract_inference_weights(work.model, sampler.mesh, work.sampling.weights_dtype)
    sent = device_bytes(weights) * max(sampler.mesh.size, learner.mesh.size) // learner.mesh.size
    axes = tuple(axis for axis, size in sampler.sizes.items() if size > 1)
    over = Collective("push", axes, sampler.mesh.size, dcn=learner.topology is not sampler.topology)
    return Phase(name=PUSH, runs=1, model_flops=0, flops=0, moved=0, sent={over: sent}, devices=learner.mesh.size)


def estimate_times(phase: Phase, chip: Chip, link_rate: Rate) -> Times:
    """Estimate the seconds of a phase at the chip's peak rates.

    Collectives within a slice follow one another over all links that they can use; those between slices overlap with
    them and use the device's share of the data center's network.
    """
    return Times(
        compute=phase.flops / chip.flops,
        memory=phase.moved / chip.memory_rate,
        network=sum(sent / link_rate(over.axes) for over, sent in phase.sent.items() if not over.dcn),
        dcn=sum(sent for over, sent in phase.sent.items() if over.dcn) / chip.dcn_rate,
    )


def needed(part: str, model: ModelConfig, sampling: Sampling, mesh: dict[str, int]) -> int:
    """Return the bytes that a device must read for one token of each of its rows, at a part of the response.

    These are the weights on the device once, except for the table of embeddings, of which a token reads a row; the
    positions of the completions' cache that a token sees; those of the prompts' cache, once per prompt; and the states
    of gated delta nets, which are written too.
    """
    sizes = sampler_sizes(model, sampling, mesh)
    rows = sampling.prompts * sampling.group / batch_shards(mesh)
    windows = layer_windows(model) or (NO_WINDOW,)

    def seen(*, of_prompt: bool) -> float:
        pairs = hlo.seen_at(part, sampling, windows, of_prompt=of_prompt)
        return sum(stop - start for start, stop in pairs) / len(pairs)

    cache = sizes.position * (rows * seen(of_prompt=False) + sizes.prompts * seen(of_prompt=True))
    table = size_of(model.dtype) * lookup_count(model) // mesh["tensor"] // mesh["fsdp"]
    weights = inference_weights_bytes(model, sampling, mesh) - table
    return int(weights + cache + 2 * rows * sizes.state)


def heading(name: str, topology: Topology, targets: Targets, *, turns: bool) -> str:
    """Format the title: the programs, and the devices that they are compiled for."""
    sampling = f"{PROMPTS}, {TURNS}, {REPLIES}" if turns else ROLLOUT
    parts = [(targets.learner, f"learner, {TRAIN}, {SCORE}"), (targets.sampler, f"sampler, {sampling}")]
    return "\n".join([f"{name} on {topology}", *(f"  {of}: {target} of {target.topology}" for target, of in parts)])


def memory_table(compiled: Sequence[Compiled], topology: Topology) -> str:
    """Format the memory per device of each compiled program, item by item."""
    rows = {
        "arguments": "arguments",
        "results (not aliased)": "results",
        "temporaries": "temporaries",
        "peak of these": "peak",
        "code": "code",
        "resident in the run": "resident",
        "total of the last three": "total",
    }
    lines = [f"{'Memory per device, GB':<28}" + "".join(f"{program.name:>19}" for program in compiled)]
    for title, name in rows.items():
        cells = [f"{getattr(program.memory, name) / GB:>19.3f}" for program in compiled]
        lines.append(f"  {title:<26}" + "".join(cells))
    usable = topology.chip.memory / GB
    return "\n".join([*lines, f"  {'a program may use':<26}" + f"{usable:>19.2f}" * len(compiled)])


def time_table(estimates: Estimates, chip: Chip) -> str:
    """Format the work of each phase on one device, and its minimum time."""
    head = f"{'Per device and run':<18}{'TFLOP':>9}{'moved GB':>10}{'sent GB':>9}"
    lines = [
        head + f"{'compute s':>11}{'memory s':>10}{'network s':>11}{'DCN s':>9}{'bound by':>10}{'MFU':>8}{'runs':>7}"
    ]
    for phase, times in estimates:
        mfu = phase.model_flops / times.bound / chip.flops if times.bound else 0.0
        lines.append(
            f"  {phase.name:<16}{phase.flops / 1e12:9.3f}{phase.moved / GB:10.2f}{sum(phase.sent.values()) / GB:9.2f}"
            f"{times.compute:11.4f}{times.memory:10.4f}{times.network:11.4f}{times.dcn:9.4f}{times.limit:>10}"
            f"{mfu:>8.1%}{phase.runs:>7,}"
        )
    return "\n".join(lines)


def step_lines(sampling: Sampling, estimates: Estimates, topology: Topology, *, ahead: bool) -> str:
    """Describe the whole step: rollout, old log-probs, other models' passes and updates, if all of them compiled.

    With `ahead` the sampler and the learner work at the same time, and the slower of them bounds the step.
    """
    seconds = {phase.name: phase.runs * times.bound for phase, times in estimates}
    if not {TRAIN, SCORE, PREFILL, DECODE} <= set(seconds):
        return "No estimate of a whole step: not all of it compiled."
    copied = seconds.get(PUSH, 0.0) + seconds.get(COPY, 0.0)
    rollout = seconds[PREFILL] + seconds[DECODE] + seconds.get(REPLY, 0.0)
    others = {of: sum(time for name, time in seconds.items() if name.startswith(of)) for of in (TEACHER, BEHAVIOR)}
    learner = seconds[SCORE] + sum(others.values()) + seconds[TRAIN]
    step = max(copied + rollout, learner) if ahead else copied + rollout + learner
    push = f"{PUSH if PUSH in seconds else COPY} {copied:.2f}, " if copied else ""
    taught = "".join(f"{of} {time:.2f}, " for of, time in others.items() if time)
    devices = topology.slices * topology.slice_devices
    tokens = sampling.prompts * sampling.group * sampling.max_tokens
    flops = sum(phase.runs * phase.model_flops * phase.devices for phase, _ in estimates)
    return (
        f"A step takes at least {step:.2f} s: {push}rollout {rollout:.2f}{' and meanwhile' if ahead else ','} "
        f"old log-probs {seconds[SCORE]:.2f}, {taught}updates {seconds[TRAIN]:.2f}\n"
        f"(responses of {sampling.max_tokens} tokens, perfect overlap); "
        f"MFU at most {flops / step / devices / topology.chip.flops:.1%}, "
        f"{tokens / step / devices:,.0f} sampled tokens/s on each device"
    )


def collective_table(phases: Sequence[Phase]) -> str:
    """Format the bytes that each phase sends, by collective and mesh axes."""
    lines = ["Sent by each device in one run, GB"]
    for phase in phases:
        for collective, sent in sorted(phase.sent.items(), key=lambda item: -item[1]):
            over = f"{'+'.join(collective.axes) or 'no axis'} ({collective.size})" + ", DCN" * collective.dcn
            lines.append(f"  {phase.name:<18}{collective.kind:<20}{over:<24}{sent / GB:12.4f}")
    return "\n".join(lines)


def token_table(work: Work, mesh: dict[str, int], estimates: Estimates) -> str:
    """Format one token of the decoding loop: bytes moved and sent, and the minimum that must be read."""
    lines = [f"{'A token, GB':<28}{'moved':>9}{'needed':>9}{'ratio':>8}{'sent':>9}"]
    for phase, _ in estimates:
        for part, moved in phase.moved_at.items():
            need, sent = needed(part, work.model, work.sampling, mesh), sum(phase.sent.values())
            where = "mean of a response" if part == "mean" else f"at its {part}"
            lines.append(f"  {where:<26}{moved / GB:9.3f}{need / GB:9.3f}{moved / need:8.2f}{sent / GB:9.3f}")
    return "\n".join(lines)


def describe_uncounted(compiled: Sequence[Compiled]) -> list[str]:
    """Return one sentence for each program with loops of unknown trip count.

    The sampler's loop over tokens (of a reply: over blocks) is not reported.
    """
    lines = []
    for program in compiled:
        loops = hlo.unknown_loops(program.module) - (program.name in (ROLLOUT, TURNS, REPLIES))
        if loops > 0:
            lines.append(f"The {program.name} has loops ({loops}) with unknown trip counts; each is counted once.")
    return lines
