"""`gspax compile`: rooflines by hand, its report, its exit codes, and a step compiled without TPU hardware."""

import functools
import importlib.util
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_experiment
from api import AXES, Collective, Compiled, Memory, chips, forward_flops, main, make_mesh, parameter_count, programs

from gspax.config import Mesh, PartialRollouts, Placement, Sampling
from gspax.errors import how_to_install
from gspax.experiment import load
from gspax.tools.aot import compile_report as report
from gspax.tools.aot.chips import Target
from gspax.tools.aot.compile_report import Phase, Times

ROOT = Path(__file__).parents[2]
SMALL = small_experiment.__file__
V5E = chips.parse_topology("v5e:4x4")
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed (requirements-tpu.txt)")


def phase(**changes):
    fields = {"name": "p", "runs": 3, "model_flops": 197e12, "flops": 394e12, "moved": 819 * 10**9}
    return Phase(**{**fields, "sent": {}, "devices": 16, **changes})


def make_phases(experiment, compiled, mesh, **options):
    return report.make_phases(compiled, work_of(experiment), mesh, **options)


def work_of(experiment):
    minibatches = experiment.schedule.minibatches
    return report.Work(model=experiment.model, sampling=experiment.sampling, minibatches=minibatches)


def outcome(name, *, runs=1, **changes):
    """The outcome of compiling a program."""
    program = programs.Program(name=name, lower=lambda: None, resident=0, runs=runs)
    return Compiled(program=program, seconds=1, **changes)


def test_a_roofline_by_hand():
    gather, reduce = Collective("all-gather", ("fsdp",), 16), Collective("all-reduce", ("tensor",), 4)
    between = Collective("all-reduce", ("slice",), 2, dcn=True)
    one = phase(sent={gather: 200 * 10**9, reduce: 50 * 10**9, between: 10 * 10**9})
    link_rate = {("fsdp",): 100e9, ("tensor",): 50e9}.__getitem__
    found = report.estimate_times(one, V5E.chip, link_rate)  # 394/197 s; 819/819 s; 2 s and 1 s; 10 GB at 25 Gb/s
    assert found == Times(compute=2.0, memory=1.0, network=3.0, dcn=3.2)
    assert (found.bound, found.limit) == (3.2, "dcn")
    (row,) = report.time_table([(one, found)], V5E.chip).splitlines()[1:]
    numbers = ["p", "394.000", "819.00", "260.00", "2.0000", "1.0000", "3.0000", "3.2000", "dcn", "31.2%", "3"]
    assert row.split() == numbers
    lines = report.collective_table([one]).splitlines()
    assert [line.split()[1:] for line in lines[1:]] == [
        ["all-gather", "fsdp", "(16)", "200.0000"],
        ["all-reduce", "tensor", "(4)", "50.0000"],
        ["all-reduce", "slice", "(2),", "DCN", "10.0000"],
    ]


def gigabytes(**changes):
    fields = {"arguments": 5, "results": 1, "temporaries": 6, "code": 1, "peak": 9, "resident": 2}
    return Memory(**{name: size * 10**9 for name, size in {**fields, **changes}.items()})


def test_each_misfit_is_reported_on_one_line():
    assert gigabytes().total == 12 * 10**9
    fits = outcome("old log-probs", memory=gigabytes())
    large = outcome("train step", memory=gigabytes(peak=15))
    refused = outcome("rollout", error="Used 20.00G of 15.75G hbm.")
    assert programs.describe_misfits([fits, large, refused], V5E) == [
        "Does not fit v5e:4x4: the train step needs 18.00 GB on each device, a program may use 16.91",
        "Does not compile for v5e:4x4: the rollout: Used 20.00G of 15.75G hbm.",
    ]
    table = report.memory_table([fits, large], V5E).splitlines()
    assert table[0].split()[-4:] == ["old", "log-probs", "train", "step"]
    assert table[7].split()[-2:] == ["12.000", "18.000"]
    names = [programs.TRAIN, programs.SCORE, *programs.SAMPLER]
    every = [outcome(name, memory=gigabytes()) for name in names]
    titles = report.memory_table(every, V5E).splitlines()[0].removeprefix("Memory per device, GB")
    assert re.split(" {2,}", titles.strip()) == names  # no two titles run together


TEXT = """HloModule m

%body (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %r = f32[64]{0} all-gather(%x), replica_groups={}, dimensions={0}
}

%test (x: f32[64]) -> pred[] {
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %y = f32[64]{0} all-to-all(%x), replica_groups={}, dimensions={0}
  ROOT %w = f32[64]{0} while(%y), condition=%test, body=%body
}
"""


def test_the_phases_of_the_rollout_are_prefill_and_decode():
    experiment = small_experiment.experiment
    mesh = {"data": 1, "fsdp": 16}
    prefill, decode = make_phases(experiment, outcome(programs.ROLLOUT, text=TEXT), mesh)
    sampling, config = experiment.sampling, experiment.model
    S, C = sampling.max_prompt_tokens, sampling.max_tokens
    assert (prefill.name, prefill.runs, decode.runs) == ("prefill", 1, C - 1)
    assert prefill.sent == {Collective("all-to-all", ("fsdp",), 16): 240}
    assert decode.sent == {Collective("all-gather", ("fsdp",), 16): 240}
    assert prefill.moved == decode.moved == 512
    # prompts once, and each sampled token attends to the whole prompt and to half a completion
    assert prefill.flops == sampling.prompts * S / 16 * forward_flops(config, S)
    assert decode.flops == sampling.prompts * sampling.group / 16 * forward_flops(config, 2 * (S + C / 2))


def test_the_phases_of_conversations_are_prefill_decode_and_replies():
    """Two conversations of a slot one after the other, with one reply of 4 tokens each."""
    experiment = small_experiment.experiment
    sampling = replace(experiment.sampling, max_tokens=7, slots=16)  # of 32 conversations
    experiment = replace(experiment, sampling=sampling)
    runs = {programs.PROMPTS: 1, programs.TURNS: 4, programs.REPLIES: 2}
    prompts, turns, replies = (
        make_phases(experiment, outcome(name, runs=times, text=TEXT), dict.fromkeys(AXES, 1) | {"fsdp": 16})
        for name, times in runs.items()
    )
    assert [(each.name, each.runs) for each in (*prompts, *turns, *replies)] == [
        (report.PREFILL, 1),
        (report.DECODE, 4),
        (report.REPLY, 2),
    ]
    rows = sampling.prompts * sampling.group / 2 / 16
    (turns,), (replies,) = turns, replies
    assert turns.flops == rows * forward_flops(experiment.model, 2 * (sampling.max_prompt_tokens + 7 / 2))
    assert replies.flops == 4 * turns.flops
    assert turns.moved == 512 and replies.moved == 2 * 512  # the loop over its blocks once, and what is outside


def test_unknown_trip_counts_are_reported():
    train, rollout = (outcome(name, text=TEXT) for name in (programs.TRAIN, programs.ROLLOUT))
    assert report.describe_uncounted([train, rollout]) == [
        "The train step has loops (1) with unknown trip counts; each is counted once."
    ]


def test_the_flops_of_an_update_are_three_forward_passes_and_one_more_with_remat():
    experiment = small_experiment.experiment
    each = 8 * 4 / 2 / 16 * 8 * forward_flops(experiment.model, 8)  # half of 8 x 4 rows of 8 tokens on 16 devices
    for remat, passes in (("none", 3), ("products", 3), ("full", 4), ("offload", 4)):
        model = replace(experiment.model, remat=remat)
        compiled = outcome(programs.TRAIN, runs=2, text=TEXT)
        (part,) = make_phases(replace(experiment, model=model), compiled, {"data": 1, "fsdp": 16})
        assert (part.model_flops, part.flops, part.runs) == (3 * each, passes * each, 2)


NAMES = (programs.TRAIN, programs.SCORE, report.PREFILL, report.DECODE)


def test_the_step_time_needs_every_phase():
    times = Times(compute=1.0, memory=0.5, network=0.5)
    estimates = [(phase(name=name, flops=197e12), times) for name in NAMES]
    lines = report.step_lines(small_experiment.experiment.sampling, estimates, V5E, ahead=False)
    assert "A step takes at least 12.00 s: rollout 6.00, old log-probs 3.00, updates 3.00" in lines
    assert "MFU at most 100.0%, 1 sampled tokens/s on each device" in lines  # 128 tokens in 12 s on 16 devices
    taught = [*estimates, *((phase(name=f"teacher {number}", flops=197e12), times) for number in (1, 2))]
    lines = report.step_lines(small_experiment.experiment.sampling, taught, V5E, ahead=False)
    assert "A step takes at least 18.00 s: rollout 6.00, old log-probs 3.00, teacher 6.00, updates 3.00" in lines
    read = [*estimates, (phase(name=programs.BEHAVIOR, flops=197e12), times)]
    lines = report.step_lines(small_experiment.experiment.sampling, read, V5E, ahead=False)
    assert "at least 15.00 s: rollout 6.00, old log-probs 3.00, policy that sampled 3.00, updates 3.00" in lines
    assert "not all of it compiled" in report.step_lines(
        small_experiment.experiment.sampling, estimates[1:], V5E, ahead=False
    )


@pytest.mark.parametrize(
    ("placement", "checkpoint_every", "takes"),
    [
        ({"staleness": 0}, 2, "10.00 s: weight push 1.00, rollout 6.00, old log-probs 1.00, updates 2.00"),
        (
            {"staleness": 1},
            2,
            "7.00 s: weight push 1.00, rollout 6.00 and meanwhile old log-probs 1.00, updates 2.00",
        ),
        ({"staleness": 2}, 0, "7.00 s: weight push 1.00, rollout 6.00 and meanwhile"),
        # no rollout is sampled ahead across a checkpoint
        ({"staleness": 1}, 1, "10.00 s: weight push 1.00, rollout 6.00, old"),
        ({"staleness": 2, "partial": PartialRollouts(carried=2)}, 2, "7.00 s: "),
        ({"staleness": 1, "partial": PartialRollouts(carried=2, ahead=0)}, 2, "10.00 s: "),
    ],
)
def test_learner_and_sampler_alternate_or_overlap(placement, checkpoint_every, takes):
    seconds = dict(zip((report.PUSH, *NAMES), (1.0, 2.0, 1.0, 2.0, 4.0), strict=True))
    estimates = [
        (
            phase(name=name, runs=1, model_flops=197e12 * (name != report.PUSH), devices=12),
            Times(compute=0, memory=t, network=0),
        )
        for name, t in seconds.items()
    ]
    ahead = report.samples_ahead(Placement(devices=4, **placement), checkpoint_every)
    lines = report.step_lines(small_experiment.experiment.sampling, estimates, V5E, ahead=ahead)
    assert f"A step takes at least {takes}" in lines
    share = 4 * 12 / 16 / float(takes.split()[0])  # four seconds of work at peak FLOP/s, on 12 of 16 devices
    assert f"MFU at most {share:.1%}" in lines


def target(sizes, topology):
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(tuple(sizes.values()))
    return Target(mesh=jax.sharding.Mesh(devices, tuple(sizes)), topology=topology)


def test_the_push_is_bound_by_the_target_with_fewer_devices():
    def mesh(devices, topology):
        return target(dict.fromkeys(AXES, 1) | {"fsdp": devices}, topology)

    experiment = small_experiment.experiment
    one, other = chips.parse_topology("v5e:2x2"), chips.parse_topology("v5e:2x2")
    whole = 4 * parameter_count(experiment.model)  # float32
    few = report.push_phase(work_of(experiment), mesh(4, one), mesh(2, other))
    ((over, sent),) = few.sent.items()
    assert over == Collective("push", ("fsdp",), 2, dcn=True)
    assert whole / 2 <= sent <= whole / 2 * 1.1  # norms and routers are replicated
    ((over, sent),) = report.push_phase(work_of(experiment), mesh(2, one), mesh(4, one)).sent.items()
    assert over == Collective("push", ("fsdp",), 4, dcn=False)
    assert whole / 2 <= sent <= whole / 2 * 1.2


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (512.00G) "
            "exceeds available HBM (15.75G).",
            "the total memory required for HLO temporaries (512.00G) exceeds available HBM (15.75G)",
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.20G of 15.75G hbm. Exceeded hbm "
            "capacity by 2.45G.\n\nTotal hbm usage >= 18.73G:\n    reserved 530.00M",
            "Used 18.20G of 15.75G hbm. Exceeded hbm capacity by 2.45G",
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom:\nthe program's 112.36G exceeds available HBM (15.75G)\nMore",
            "the program's 112.36G exceeds available HBM (15.75G)",
        ),
        ("RESOURCE_EXHAUSTED: something new\nand more", "RESOURCE_EXHAUSTED: something new"),
    ],
)
def test_the_line_with_the_numbers_of_a_compiler_error_is_kept(message, said):
    found = programs.summarize_error(message)
    assert found.endswith(said) and len(found.splitlines()) == 1


def test_a_compiler_error_is_part_of_the_report():
    """Such as the ragged all-to-all of an expert axis, which is not supported on every topology."""

    def lower():
        raise jax.errors.JaxRuntimeError("INTERNAL: Ragged all-to-all is not supported here\nat line 325")

    found = programs.compile_program(programs.Program(name="train step", lower=lower, resident=0))
    assert found.memory is None
    assert programs.describe_misfits([found], V5E) == [
        "Does not compile for v5e:4x4: the train step: INTERNAL: Ragged all-to-all is not supported here"
    ]


def gspax(*arguments):
    return main.main(["compile", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([SMALL], "the following arguments are required: --topology"),
        ([SMALL, "--topolgy", "v5e:4x4"], "--topology"),
        (
            [SMALL, "--topology", "v5e"],
            "--topology: wanted a TPU generation and the shape of a slice such as v5p:4x4x4",
        ),
        ([SMALL, "--topology", "0xv5e:4x4"], "--topology: wanted at least one slice, got '0xv5e:4x4'"),
        ([SMALL, "--topology", "v5f:4x4"], "--topology: wanted one of v5e, v5p, v6e, tpu7x, got 'v5f'"),
        ([SMALL, "--topology", "v5e:4x4", "smapling.group=4"], "sampling"),
        (["gone.py", "--topology", "v5e:4x4"], "gone.py: there is no such file"),
    ],
)
def test_invalid_input_prints_one_error_and_exits_2(arguments, said, capsys):
    assert gspax(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1


def test_without_libtpu_it_exits_2(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gspax(SMALL, "--topology", "v5e:4x4") == 2
    assert f"needs the package libtpu: {how_to_install('tpu')}\n" in capsys.readouterr().err


@pytest.mark.parametrize("fits", [True, False])
def test_the_exit_code_is_whether_it_fits(fits, monkeypatch):
    monkeypatch.setattr(report, "run", lambda experiment, topology, **options: fits)
    assert gspax(SMALL, "--topology", "v5e:4x4") == (0 if fits else 1)


@needs_libtpu
def test_a_mesh_that_does_not_fit_the_topology_exits_2(capsys):
    assert gspax(SMALL, "--topology", "v5e:4x4", "mesh.data=3") == 2
    assert "mesh: " in capsys.readouterr().err.splitlines()[0]


@needs_libtpu
def test_a_program_that_is_too_large_is_reported_with_the_numbers():
    mesh = jax.sharding.Mesh(np.array(chips.describe_devices(V5E)[:1]), ("x",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((2**18, 2**18), jnp.float32, sharding=replicated)
    program = programs.Program(name="sum", lower=lambda: jax.jit(lambda x: x + 1).lower(x), resident=0)
    found = programs.compile_program(program)
    assert found.memory is None and "15.75G" in found.error
    assert len(programs.describe_misfits([found], V5E)) == 1


ROWS = ["warm_start=null", "sampling.prompts=16", "sampling.group=2", "schedule.minibatches=1"]


@pytest.fixture
def sent(monkeypatch):
    """Bytes by (kind, axes, over DCN) of each phase in the report of `gspax compile`."""
    found = {}
    phases = report.make_phases

    def keep(*arguments, **options):
        for each in (kept := phases(*arguments, **options)):
            found[each.name] = Counter()
            for collective, size in each.sent.items():
                found[each.name][collective.kind, collective.axes, collective.dcn] += size
        return kept

    monkeypatch.setattr(report, "make_phases", keep)
    return found


@needs_libtpu
def test_a_step_compiled_without_tpu_hardware(capsys, sent):
    """The full command: the step fits, the learner has only the collectives of parameters sharded over fsdp, and no
    weight is gathered for a token."""
    assert gspax(SMALL, "--topology", "v5e:4x4", *ROWS) == 0
    out = capsys.readouterr().out
    assert "learner, train step, old log-probs: 16 devices, fsdp=16" in out
    assert "sampler, rollout: 16 devices, data=4, expert=4" in out and out.endswith("Everything fits v5e:4x4.\n")
    assert "all-gather" not in {kind for kind, *_ in sent[report.DECODE]}
    assert set(sent) == {programs.TRAIN, programs.SCORE, programs.COPY, report.PREFILL, report.DECODE}
    for name in (programs.TRAIN, programs.SCORE):
        found = sent[name]
        assert found["all-gather", ("fsdp",), False] > 0, name
        assert {(axes, dcn) for _, axes, dcn in found} == {(("fsdp",), False)}, name
    reduced = {kind for kind, _, _ in sent[programs.TRAIN]} & {"reduce-scatter", "all-reduce"}
    assert reduced, "gradients are summed over the devices"
    # the update must gather at least the parameters that a device does not hold
    missing = 15 / 16 * 4 * parameter_count(small_experiment.experiment.model)
    assert sent[programs.TRAIN]["all-gather", ("fsdp",), False] >= missing / 2


@needs_libtpu
def test_host_memory_is_not_counted():
    """A state that is fetched, changed, and put back is on the device twice; the compiler counts it three times."""
    device = jax.sharding.SingleDeviceSharding(chips.describe_devices(V5E)[0])
    size, host = 2**28, jax.memory.Space.Host
    state = jax.ShapeDtypeStruct((size // 4,), jnp.float32, sharding=device.with_memory_kind("pinned_host"))

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state):
        return jax.device_put(jax.device_put(state, jax.memory.Space.Device) + 1, host)

    found = programs.compile_program(programs.Program(name="update", lower=lambda: update.lower(state), resident=0))
    assert found.memory.arguments == found.memory.results == 0
    assert size <= found.memory.peak < 2.1 * size


@needs_libtpu
def test_an_update_compiled_for_two_slices():
    """Only the sum of a device's shard of the gradients crosses slices."""
    small = small_experiment.experiment
    model = replace(small.model, num_experts=0, intermediate_size=32)
    experiment = replace(small, model=model, warm_start=None, sampling=replace(small.sampling, prompts=8))
    learner, *_ = chips.make_targets(experiment, chips.parse_topology("2xv5e:2x2"))
    compiled = programs.compile_program(programs.make_programs(experiment, learner.mesh, learner.mesh)[0])
    (update,) = make_phases(experiment, compiled, learner.sizes, slices=2)
    assert {each.axes for each in update.sent if not each.dcn} == {("fsdp",)}
    over = Collective("all-reduce", ("slice",), 2, dcn=True)
    assert [each for each in update.sent if each.dcn] == [over]
    mine = 4 * parameter_count(model) / 4  # bytes of a device's part of the gradients
    assert mine <= update.sent[over] <= 4.4 * mine  # rows of 32 numbers are sent as rows of 128


def placed(tmp_path, **changes):
    """The file of an experiment with a disaggregated sampler on four devices."""
    file = tmp_path / "placed.py"
    given = ", ".join(f"{name}={value}" for name, value in changes.items())
    file.write_text(
        "import dataclasses\nimport small_experiment\nfrom gspax.config import Mesh, Placement\n"
        "small = dataclasses.replace(small_experiment.experiment, warm_start=None)\n"
        f"experiment = dataclasses.replace(small, placement=Placement(devices=4, {given}))\n"
    )
    return str(file)


TOPOLOGIES = pytest.mark.parametrize(
    ("topology", "part", "dcn"), [("2xv5e:2x2", "v5e:2x2", ", DCN"), ("v5e:2x4", "v5e:2x4", "")]
)


@needs_libtpu
@TOPOLOGIES
def test_the_report_of_a_disaggregated_sampler(topology, part, dcn, capsys, monkeypatch, tmp_path):
    """On whole slices or part of one, each program is compiled for and counted on its target's four devices."""
    stub = outcome("", memory=gigabytes(), text=TEXT)
    meshes, counted = [], {}

    def listed(experiment, *those):
        meshes.extend(mesh.shape["fsdp"] for mesh in those)
        return programs.make_programs(experiment, *those)

    def phases(compiled, work, sizes, slices, of=report.make_phases):
        counted[compiled.name] = (sizes["data"], sizes["fsdp"], slices)
        return of(compiled, work, sizes, slices)

    monkeypatch.setattr(report, "make_programs", listed)
    monkeypatch.setattr(report, "make_phases", phases)
    monkeypatch.setattr(report, "compile_program", lambda program: replace(stub, program=program))
    assert gspax(placed(tmp_path, staleness=1, mesh="Mesh(data=2, fsdp=2)"), "--topology", topology) == 0
    assert meshes == [4, 2]
    assert counted == {programs.TRAIN: (1, 4, 1), programs.SCORE: (1, 4, 1), programs.ROLLOUT: (2, 2, 1)}
    out = capsys.readouterr().out
    assert f"small on {topology}\n  learner, train step, old log-probs: 4 devices, fsdp=4 of {part}\n" in out
    assert f"  sampler, rollout: 4 devices, data=2, fsdp=2 of {part}\n" in out
    assert " and meanwhile old log-probs " in out and out.endswith(f"Everything fits {topology}.\n")
    rows = [line.split() for line in out.splitlines() if line.split()[:1] == ["weight"]]
    assert rows[-1][2:-1] == f"push data+fsdp (4){dcn}".split()


@needs_libtpu
@pytest.mark.slow
@TOPOLOGIES
def test_a_disaggregated_sampler(topology, part, dcn, capsys, sent, tmp_path):
    """With every program compiled, neither target sends anything to the other slice."""
    assert gspax(placed(tmp_path, staleness=1), "--topology", topology) == 0
    assert f"fsdp=4 of {part}\n" in capsys.readouterr().out
    assert set(sent) == {programs.TRAIN, programs.SCORE, report.PREFILL, report.DECODE}
    over = {(axes, dcn) for found in sent.values() for _, axes, dcn in found}
    assert over == {(("fsdp",), False), (("expert",), False)}  # the learner's, and the sampler's that it chose


@needs_libtpu
@pytest.mark.slow
def test_expert_and_tensor_axes_add_their_collectives():
    """Rows are exchanged along `expert`; partial sums are reduced along `tensor`."""
    small = small_experiment.experiment
    experiment = replace(
        small,
        model=replace(small.model, num_key_value_heads=2),
        mesh=Mesh(fsdp=2, expert=4, tensor=2),
        sampling=Sampling(prompts=16, group=2, max_prompt_tokens=4, max_tokens=4),
        schedule=replace(small.schedule, minibatches=1),
    )
    mesh = make_mesh(experiment.mesh, chips.describe_devices(V5E), experiment.model)
    compiled = programs.compile_program(programs.make_programs(experiment, mesh, mesh)[0])
    (update,) = make_phases(experiment, compiled, dict(mesh.shape))
    found = {(each.kind, each.axes, each.size) for each in update.sent}
    assert ("ragged-all-to-all", ("expert",), 4) in found
    assert found & {("all-reduce", ("tensor",), 2), ("reduce-scatter", ("tensor",), 2)}
    assert ("all-gather", ("fsdp", "expert"), 8) in found  # attention's weights are sharded over both


SHORT = Sampling(prompts=64, group=4, max_prompt_tokens=1024, max_tokens=1024)
LONG = Sampling(prompts=64, group=8, max_prompt_tokens=1024, max_tokens=3072)
BUDGETS = {  # the commands of experiments/benchmarks/README.md, and the bytes of a hand-written step of the same size
    "v5e": ("qwen3_30b_a3b_v5e_64.py", "v5e:8x8", Mesh(expert=1), SHORT, 12.4e9),
    "v5e by the ring": ("qwen3_30b_a3b_v5e_64.py", "v5e:8x8", Mesh(), SHORT, 12.4e9),
    "v5p": ("qwen3_30b_a3b_v5p_64.py", "v5p:4x4x4", Mesh(), LONG, 14.9e9),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_libtpu
@pytest.mark.parametrize(
    ("file", "topology", "axes", "sampling", "budget"), [pytest.param(*case, id=name) for name, case in BUDGETS.items()]
)
def test_an_update_of_a_30b_model_stays_within_its_memory_budget(file, topology, axes, sampling, budget):
    """Rows of 2,048 tokens, one on each device, on v5e; of 4,096 tokens, two on each, on v5p."""
    experiment = load(ROOT / "experiments" / file)
    schedule = replace(experiment.schedule, microbatch_rows=0)
    experiment = replace(experiment, sampling=sampling, schedule=schedule, mesh=axes)
    mesh = make_mesh(axes, chips.describe_devices(chips.parse_topology(topology)), experiment.model)
    found = programs.compile_program(programs.make_programs(experiment, mesh, mesh)[0])
    assert found.error == "" and found.memory.total <= budget
