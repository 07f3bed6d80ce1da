"""`gspax compile`: rooflines by hand, what it says, its exit codes, and a step compiled for a TPU that is not there."""

import importlib.util
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_experiment

from gspax import cli, compile
from gspax.aot import chips, programs
from gspax.aot.hlo import Collective
from gspax.bench import forward_flops
from gspax.compile import Compiled, Memory, Phase, Times
from gspax.config import Mesh, Sampling
from gspax.experiment import load
from gspax.plan import parameter_count
from gspax.sharding import make_mesh

ROOT = Path(__file__).parents[1]
SMALL = small_experiment.__file__
V5E = chips.topology("v5e:4x4")
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu is not installed (requirements-tpu.txt)")


def grid(*sides):
    return np.stack(np.meshgrid(*map(np.arange, sides), indexing="ij"), axis=-1).reshape(-1, len(sides))


def test_axes_of_the_mesh_cross_dimensions_of_the_torus():
    mesh = {"data": 2, "fsdp": 4, "tensor": 2}
    crossed = compile.dimensions_crossed(grid(4, 4), mesh)  # 16 devices, row by row: data is half of the rows
    assert crossed(("data",)) == (0,)
    assert crossed(("fsdp",)) == (0, 1)
    assert crossed(("tensor",)) == (1,)
    assert crossed(("data", "tensor")) == (0, 1)
    assert crossed(()) == ()


def phase(**changes):
    fields = {"name": "p", "runs": 3, "useful": 197e12, "done": 394e12, "moved": 819 * 10**9, "sent": {}}
    return Phase(**{**fields, **changes})


def test_a_roofline_by_hand():
    gather, reduce = Collective("all-gather", ("fsdp",), 16), Collective("all-reduce", ("tensor",), 4)
    one = phase(sent={gather: 200 * 10**9, reduce: 50 * 10**9})
    crossed = {("fsdp",): (0, 1), ("tensor",): (1,)}.__getitem__
    found = compile.times(one, V5E, crossed)  # 394/197 s; 819/819 s; two links of 50 GB/s, then one
    assert found == Times(compute=2.0, memory=1.0, network=3.0)
    assert (found.bound, found.reason) == (3.0, "network")
    (row,) = compile.time_table([(one, found)], V5E).splitlines()[1:]
    assert row.split() == ["p", "394.000", "819.00", "250.00", "2.0000", "1.0000", "3.0000", "network", "33.3%", "3"]


def test_groups_that_could_not_be_read_are_taken_to_cross_everything():
    unread = phase(sent={Collective("all-gather", ("unread",), 16): 100 * 10**9})
    assert compile.times(unread, V5E, lambda axes: pytest.fail(f"asked for {axes}")).network == 1.0


def memory(**changes):
    fields = {"arguments": 5, "results": 1, "temporaries": 6, "code": 1, "peak": 9, "besides": 2}
    return Memory(**{name: size * 10**9 for name, size in {**fields, **changes}.items()})


def test_what_does_not_fit_is_said_in_one_sentence_each():
    assert memory().together == 12 * 10**9
    fits = Compiled(name="old log-probs", seconds=1, memory=memory())
    large = Compiled(name="train step", seconds=1, memory=memory(peak=15))
    refused = Compiled(name="rollout", seconds=1, refusal="Used 20.00G of 15.75G hbm.")
    assert compile.misfits([fits, large, refused], V5E) == [
        "Does not fit v5e:4x4: the train step needs 18.00 GB on each device, a program may use 16.91",
        "Does not compile for v5e:4x4: the rollout: Used 20.00G of 15.75G hbm.",
    ]
    table = compile.memory_table([fits, large, refused], V5E).splitlines()
    assert table[0].split()[-4:] == ["old", "log-probs", "train", "step"]  # no column for what did not compile
    assert table[7].split()[-2:] == ["12.000", "18.000"]


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


def test_the_rollout_is_its_prefill_and_a_loop_over_tokens():
    experiment = small_experiment.experiment
    mesh = {"data": 1, "fsdp": 16}
    parts = compile.phases(experiment, Compiled(name=programs.ROLLOUT, seconds=1, text=TEXT), mesh)
    prefill, decode = parts
    sampling, config = experiment.sampling, experiment.model
    S, C = sampling.max_prompt_tokens, sampling.max_tokens
    assert (prefill.name, prefill.runs, decode.runs) == ("prefill", 1, C - 1)
    assert prefill.sent == {Collective("all-to-all", ("fsdp",), 16): 240}
    assert decode.sent == {Collective("all-gather", ("fsdp",), 16): 240}
    assert prefill.moved == decode.moved == 512
    # prompts once, and each drawn token looks at the whole prompt and at half a completion
    assert prefill.done == sampling.prompts * S / 16 * forward_flops(config, S)
    assert decode.done == sampling.prompts * sampling.group / 16 * forward_flops(config, 2 * (S + C / 2))


def test_loops_that_could_not_be_counted_are_told():
    train, rollout = (Compiled(name=name, seconds=1, text=TEXT) for name in (programs.TRAIN, programs.ROLLOUT))
    assert compile.uncounted([train, rollout]) == [
        "The train step has loops (1) that do not say how often they run; each counts once."
    ]


def test_the_flops_of_an_update_are_three_forward_passes_and_one_more_with_remat():
    experiment = small_experiment.experiment
    each = 8 * 4 / 2 / 16 * 8 * forward_flops(experiment.model, 8)  # half of 8 x 4 rows of 8 tokens on 16 devices
    for remat, passes in (("none", 3), ("products", 3), ("full", 4), ("offload", 4)):
        model = replace(experiment.model, remat=remat)
        compiled = Compiled(name=programs.TRAIN, seconds=1, text=TEXT)
        (part,) = compile.phases(replace(experiment, model=model), compiled, {"data": 1, "fsdp": 16})
        assert (part.useful, part.done, part.runs) == (3 * each, passes * each, 2)


def test_a_step_needs_all_its_parts():
    times = Times(compute=1.0, memory=0.5, network=0.5)
    names = (programs.TRAIN, programs.SCORE, compile.PREFILL, compile.DECODE)
    estimates = [(phase(name=name, done=197e12), times) for name in names]
    lines = compile.step_lines(small_experiment.experiment, estimates, V5E, 16)
    assert "A step takes at least 12.00 s: rollout 6.00, old log-probs 3.00, updates 3.00" in lines
    assert "MFU at most 100.0%, 1 drawn tokens/s on each device" in lines  # 128 tokens in 12 s on 16 devices
    assert "not all of it compiled" in compile.step_lines(small_experiment.experiment, estimates[1:], V5E, 16)


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
def test_the_sentence_with_the_numbers_out_of_a_refusal(message, said):
    found = compile.refusal(message)
    assert found.endswith(said) and len(found.splitlines()) == 1


def test_whatever_the_compiler_refuses_is_part_of_the_answer():
    """The ragged all-to-all of an expert axis, for one, which it does not have for every topology."""

    def lower():
        raise jax.errors.JaxRuntimeError("INTERNAL: Ragged all-to-all is not supported here\nat line 325")

    found = compile.compile_program(programs.Program(name="train step", lower=lower, besides=0))
    assert found.memory is None
    assert compile.misfits([found], V5E) == [
        "Does not compile for v5e:4x4: the train step: INTERNAL: Ragged all-to-all is not supported here"
    ]


def gspax(*arguments):
    return cli.main(["compile", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([SMALL], "the following arguments are required: --topology"),
        ([SMALL, "--topolgy", "v5e:4x4"], "--topology"),
        ([SMALL, "--topology", "v5e"], "--topology: wanted a chip and the sides of its box such as v5p:4x4x4"),
        ([SMALL, "--topology", "v5f:4x4"], "--topology: wanted a chip out of v5e, v5p, v6e, tpu7x, got 'v5f'"),
        ([SMALL, "--topology", "v5e:4x4", "smapling.group=4"], "sampling"),
        (["gone.py", "--topology", "v5e:4x4"], "gone.py: there is no such file"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_2(arguments, said, capsys):
    assert gspax(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and len(err.splitlines()) == 1


def test_without_libtpu_exit_2(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gspax(SMALL, "--topology", "v5e:4x4") == 2
    assert "needs the package libtpu: pip install 'gspax[tpu]'" in capsys.readouterr().err


@pytest.mark.parametrize("fits", [True, False])
def test_the_exit_code_says_whether_it_fits(fits, monkeypatch):
    monkeypatch.setattr(compile, "run", lambda experiment, topology: fits)
    assert gspax(SMALL, "--topology", "v5e:4x4") == (0 if fits else 1)


@needs_libtpu
def test_a_mesh_that_does_not_fit_the_topology_is_exit_2(capsys):
    assert gspax(SMALL, "--topology", "v5e:4x4", "mesh.data=3") == 2
    assert "mesh: " in capsys.readouterr().err.splitlines()[0]


@needs_libtpu
def test_a_program_that_is_too_large_is_refused_with_the_numbers():
    mesh = jax.sharding.Mesh(np.array(chips.devices(V5E)[:1]), ("x",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((2**18, 2**18), jnp.float32, sharding=replicated)
    program = programs.Program(name="sum", lower=lambda: jax.jit(lambda x: x + 1).lower(x), besides=0)
    found = compile.compile_program(program)
    assert found.memory is None and "15.75G" in found.refusal
    assert len(compile.misfits([found], V5E)) == 1


ROWS = ["warm_start=null", "sampling.prompts=16", "sampling.group=2", "schedule.minibatches=1"]


@needs_libtpu
def test_a_step_compiled_for_a_tpu_that_is_not_there(capsys, monkeypatch):
    """The whole command: it fits, and the collectives of parameters split over fsdp are there and no others."""
    found = {}
    phases = compile.phases

    def keep(*arguments):
        for each in (kept := phases(*arguments)):
            found[each.name] = Counter()
            for collective, sent in each.sent.items():
                found[each.name][collective.kind, collective.axes] += sent
        return kept

    monkeypatch.setattr(compile, "phases", keep)
    assert gspax(SMALL, "--topology", "v5e:4x4", *ROWS) == 0
    out = capsys.readouterr().out
    assert "small on v5e:4x4: 16 devices, fsdp=16" in out and out.endswith("Everything fits v5e:4x4.\n")
    assert set(found) == {programs.TRAIN, programs.SCORE, compile.PREFILL, compile.DECODE}
    over_fsdp = ("fsdp",)
    for name, sent in found.items():
        assert sent["all-gather", over_fsdp] > 0, name
        assert {axes for _, axes in sent} == {over_fsdp}, name
    reduced = {kind for kind, _ in found[programs.TRAIN]} & {"reduce-scatter", "all-reduce"}
    assert reduced, "gradients are summed over the devices"
    # a device cannot train without having been sent what it has not of the parameters, nor without its gradients' sum
    missing = 15 / 16 * 4 * parameter_count(small_experiment.experiment.model)
    assert found[programs.TRAIN]["all-gather", over_fsdp] >= missing / 2


@needs_libtpu
@pytest.mark.slow
def test_experts_and_heads_have_collectives_of_their_own():
    """Rows travel to their experts along `expert`; what `tensor` splits is added up along it."""
    small = small_experiment.experiment
    experiment = replace(
        small,
        model=replace(small.model, num_key_value_heads=2),
        mesh=Mesh(fsdp=2, expert=4, tensor=2),
        sampling=Sampling(prompts=16, group=2, max_prompt_tokens=4, max_tokens=4),
        schedule=replace(small.schedule, minibatches=1),
    )
    mesh = make_mesh(experiment.mesh, chips.devices(V5E), experiment.model)
    compiled = compile.compile_program(programs.programs(experiment, mesh)[0])
    (update,) = compile.phases(experiment, compiled, dict(mesh.shape))
    found = {(each.kind, each.axes, each.size) for each in update.sent}
    assert ("ragged-all-to-all", ("expert",), 4) in found
    assert found & {("all-reduce", ("tensor",), 2), ("reduce-scatter", ("tensor",), 2)}
    assert ("all-gather", ("fsdp", "expert"), 8) in found  # attention's weights are split over both


MARKS = {  # bytes of a hand-written step of the same size: docs/compile.md
    "v5e_64": ("v5e:8x8", {"prompts": 64, "group": 4, "max_prompt_tokens": 1024, "max_tokens": 1024}, 12.4e9),
    "v5p_64": ("v5p:4x4x4", {"prompts": 64, "group": 8, "max_prompt_tokens": 1024, "max_tokens": 3072}, 14.9e9),
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_libtpu
@pytest.mark.parametrize("name", MARKS)
def test_an_update_of_a_30b_model_stays_below_the_mark(name):
    """Rows of 2,048 tokens, one on each device, on v5e; of 4,096 tokens, two on each, on v5p."""
    text, sampling, mark = MARKS[name]
    experiment = load(ROOT / "experiments" / f"qwen3_30b_a3b_{name}.py")
    schedule = replace(experiment.schedule, microbatch_rows=0)
    experiment = replace(experiment, sampling=Sampling(**sampling), schedule=schedule)
    mesh = make_mesh(experiment.mesh, chips.devices(chips.topology(text)), experiment.model)
    found = compile.compile_program(programs.programs(experiment, mesh)[0])
    assert found.refusal == "" and found.memory.together <= mark
