"""`gspax doctor`: every fault that is planted is named by the check that looks for it, and nothing else is."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import Limits, Sampler, doctor, expert_ffn, main, manifest, quantization, segments, train_step
from jax import lax

from gspax.config import layers_of
from gspax.config.layers import Mixer, NoMixer
from gspax.model import latent_attention
from gspax.model.kernels import attention, expert_parallel, gated_delta
from gspax.parallel import watchdog
from gspax.tools.doctor import agreement, checklist, hardware, kernels, results, training
from gspax.tools.doctor.results import Result, compare, merge, rate

ALONE = tiny.one_device()
MESH = training.make_mesh(jax.devices()[:8])


def statuses(check):
    """The statuses of a check's results by name."""
    return {result.name: result.status for result in results.run("the check", check)}


def wrong(check):
    return {name for name, status in statuses(check).items() if status == "wrong"}


# Kernels


def shift_by_one(monkeypatch):
    """Attention to one key too few: a query does not attend to itself."""
    visit = attention.Blocks.visit

    def off_by_one(self, x, n, heads):
        return visit(self._replace(begin_I=self.begin_I - 1), x, n, heads)

    monkeypatch.setattr(attention.Blocks, "visit", off_by_one)


def scale_of_8_bits(monkeypatch):
    quantize = quantization.quantize

    def one_percent_more(x, axes):
        rounded = quantize(x, axes)
        return rounded._replace(scale=rounded.scale * 1.01)

    monkeypatch.setattr(quantization, "quantize", one_percent_more)


def last_position(monkeypatch):
    attend = segments.attend
    monkeypatch.setattr(
        segments, "attend", lambda q, cache, start, stop, **how: attend(q, cache, start, stop - 1, **how)
    )


def gate_of_an_expert(monkeypatch):
    """The gradient lacks the factor of the gate."""
    gradients = expert_ffn._block_gradients
    monkeypatch.setattr(
        expert_ffn, "_block_gradients", lambda x, gate, w, dy: gradients(x, jnp.where(gate != 0, 1.0, 0.0), w, dy)
    )


def gain_of_an_expert(monkeypatch):
    monkeypatch.setattr(expert_ffn, "GAIN", 1.7)


def absorbed_queries(monkeypatch):
    """The absorbed queries are those of the next head."""
    absorb = latent_attention.absorb
    monkeypatch.setattr(latent_attention, "absorb", lambda q, w: jnp.roll(absorb(q, w), 1, axis=2))


def narrow_values(monkeypatch):
    """The gradient of the keys lacks the dimensions beyond those of the values."""
    kernel = kernels.row_attention
    monkeypatch.setattr(
        kernels, "row_attention", lambda q, k, v, *rest: kernel(q, k.at[..., v.shape[-1] :].multiply(0), v, *rest)
    )


def corrections_of_a_chunk(monkeypatch):
    """The triangular system of a chunk is solved to first order."""
    monkeypatch.setattr(gated_delta, "unit_lower_inverse", lambda a: jnp.eye(a.shape[-1])[(None,) * (a.ndim - 2)] - a)


def decay_of_a_step(monkeypatch):
    step = gated_delta.recurrent_step
    monkeypatch.setattr(
        gated_delta, "recurrent_step", lambda one, *rest: step(one._replace(decay_BTKR=0.99 * one.decay_BTKR), *rest)
    )


ATTENTION = {
    f"attention, {case}, float32" for case in ("packed", "window", "sinks", "shared prompts", "shared prefixes")
}
DECODING = {f"decode attention, float32, cache {cache}" for cache in ("float32", "int8")}
FAULTS = {
    shift_by_one: (kernels.attention, ATTENTION, "context"),
    scale_of_8_bits: (kernels.int8, {"product with int8 weights, float32"}, "result"),
    last_position: (kernels.decode_attention, DECODING, "logsumexp"),
    gate_of_an_expert: (kernels.experts, {"experts, float32", "experts with biases, float32"}, "['d"),
    gain_of_an_expert: (kernels.experts, {"experts with biases, float32"}, ""),
    absorbed_queries: (kernels.latent_attention, {"latent attention, decoding, float32"}, "result"),
    narrow_values: (kernels.latent_attention, {"latent attention, rows, float32"}, ""),
    corrections_of_a_chunk: (kernels.delta_net, {"delta net, rows, float32"}, ""),
    decay_of_a_step: (kernels.delta_net, {"delta net, decoding, float32"}, ""),
}


@pytest.fixture
def plant(monkeypatch):
    """The monkeypatch; what was traced before and with the fault is dropped."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_named(fault, plant):
    check, named, where = FAULTS[fault]
    fault(plant)
    found = results.run("", partial(check, ALONE, "float32"))
    assert {result.name for result in found if result.status == "wrong"} == named
    assert all(where in result.why for result in found if result.status == "wrong")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", {check: None for check, *_ in FAULTS.values()})
def test_healthy_kernels_pass(kernel, dtype):
    assert set(statuses(partial(kernel, ALONE, dtype)).values()) == {"ok"}


def test_an_expert_exchange_with_the_wrong_neighbor_is_named(plant):
    check = partial(kernels.expert_exchange, MESH, "float32")
    names = "expert exchange, update, float32", "expert exchange, decoding, float32"
    assert statuses(check) == dict.fromkeys(names, "ok")
    own = expert_parallel._own_experts
    plant.setattr(expert_parallel, "_own_experts", lambda axis, x, experts: own(axis, (x + 1) % 8, experts))
    assert wrong(check) == {*names}
    assert statuses(partial(kernels.expert_exchange, ALONE, "float32")) == {"expert exchange, float32": "skipped"}


# Collectives


@pytest.fixture
def fast(monkeypatch):
    """Nothing is timed."""
    monkeypatch.setattr(hardware, "time_calls", lambda call, repeats: [(1e-3, 1e-3)])


def test_every_collective_of_every_axis_is_checked(fast):
    found = statuses(partial(hardware.collectives, MESH))
    axes = "fsdp", "expert", "tensor"
    assert found == {f"{name} over {axis} (2 devices)": "ok" for axis in axes for name in hardware.COLLECTIVES}
    assert statuses(partial(hardware.collectives, ALONE)) == {"collectives": "skipped"}


CALLS = {"sum": "psum", "gather": "all_gather", "exchange": "all_to_all", "shift": "ppermute"}


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_over_the_wrong_group_is_named(name, fast, monkeypatch):
    right = getattr(lax, CALLS[name])

    def over_another_axis(x, axis, *rest):
        return right(x, "fsdp" if axis == "expert" else axis, *rest)

    monkeypatch.setattr(lax, CALLS[name], over_another_axis)
    assert wrong(partial(hardware.collectives, MESH)) == {f"{name} over expert (2 devices)"}


# Sampler and learner

SHORT = replace(training.SAMPLING, max_prompt_tokens=24, max_tokens=8)


def make_trainer(devices):
    return training.make_trainer(jax.devices()[:devices], "float32", sampling=SHORT)


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(1)


def test_a_healthy_trainer_passes(trainer, tmp_path):
    assert statuses(partial(training.same_seed, trainer)) == {
        "same seed twice, samples, float32": "ok",
        "same seed twice, updates, float32": "ok",
    }
    assert statuses(partial(training.mesh_and_one_device, trainer)) == {
        "update on the mesh and on one device": "skipped"
    }


@pytest.mark.parametrize("is_local", [True, False])
def test_a_checkpoint_is_written_read_and_deleted(is_local, trainer, bucket, tmp_path):
    folder = tmp_path if is_local else bucket[0]
    assert statuses(partial(training.checkpoint, trainer, results.Place(folder, shared=True))) == {"checkpoint": "ok"}
    assert not [*tmp_path.iterdir()] and bucket[1].names(str(bucket[0]).split("/")[2]) == []
    if not is_local:
        assert "PUT" in bucket[1].count()


WAYS = {f"log-probs, experts, float32, {where}" for where in ("sampler", "learner", "both")}


def test_log_probs_are_compared_for_every_kind_of_layer_on_demand(tmp_path):
    place, begins = results.Place(tmp_path, shared=False), "log-probs, "
    some, every = (
        [name for name in checklist.make_checks(place, every_kind=all_of_them) if name.startswith(begins)]
        for all_of_them in (False, True)
    )
    assert some == ["log-probs, experts, float32"]
    assert every == [f"log-probs, {kind}, {dtype}" for dtype in ("float32", "bfloat16") for kind in agreement.KINDS]
    mixers = {type(layer.mixer) for model in agreement.KINDS.values() for layer in layers_of(model)}
    assert mixers == {kind for kind in Mixer.__subclasses__() if kind.__module__ == Mixer.__module__} - {NoMixer}


@pytest.mark.slow
def test_all_ways_to_log_probs_agree_and_a_sampler_with_other_weights_is_named(trainer):
    found = results.run("", partial(agreement.log_probs, trainer, "experts"))
    assert {result.name for result in found} == WAYS
    assert all(result.status == "ok" and result.measured > 0 for result in found), found
    push, fetch = trainer.sampler.push, trainer.sampler.fetch
    stale = Sampler(trainer.sampler.mesh, lambda params: push(jax.tree.map(lambda x: 1.01 * x, params)), fetch)
    other = trainer._replace(sampler=stale)
    assert wrong(partial(agreement.log_probs, other, "experts")) == {"log-probs, experts, float32, both"}


@pytest.mark.parametrize(
    ("way", "change", "bad"),
    [
        ("drafts", 1e-2, {"sampler", "both"}),
        ("4 rows", 1e-2, {"learner", "both"}),
        ("packed rows", np.nan, {"learner", "both"}),
        ("drafts", 1e-6, set()),
    ],
)
def test_the_way_that_differs_is_named(way, change, bad):
    """The other tokens of a way are not compared: drafts may have sampled another token."""
    there_BT = np.ones((2, 3), bool)
    every = ("decoding", "slots", "drafts", "prefill", "1 row", "4 rows", "packed rows")
    ways = {name: agreement.Scored(np.full((2, 3), -2, np.float32), there_BT.copy()) for name in every}
    ways[way].logp_BT[1, 2] += change
    ways[way].logp_BT[0, 0], ways[way].there_BT[0, 0] = 100, False
    found = [*agreement.compare_ways("log-probs", ways, bound=1e-4)]
    assert {result.name for result in found if result.status == "wrong"} == {f"log-probs, {where}" for where in bad}
    assert all(way in result.why for result in found if result.status == "wrong")


def test_a_reduction_in_another_order_each_time_is_named(monkeypatch):
    """Each update rounds its steps differently, as a sum whose order depends on which thread comes first."""
    apply, calls = train_step.optax.apply_updates, iter(range(1000))

    def unordered(params, updates):
        noise = jax.pure_callback(lambda: np.float32(next(calls) * 1e-6), jax.ShapeDtypeStruct((), np.float32))
        return apply(params, jax.tree.map(lambda x: (x + noise) - noise, updates))

    monkeypatch.setattr(train_step.optax, "apply_updates", unordered)
    check = partial(training.same_seed, make_trainer(1))
    assert wrong(check) == {"same seed twice, updates, float32"}


def test_an_update_that_differs_on_the_mesh_is_named(monkeypatch):
    """On the mesh every other row is left out, as if one of two devices did not take part in the sum."""
    trainer, alone = make_trainer(2), make_trainer(1)
    monkeypatch.setattr(training, "make_trainer", lambda *_: alone)  # both checks share its program
    (result,) = results.run("", partial(training.mesh_and_one_device, trainer))
    assert (result.name, result.status) == ("update on the mesh and on one device, fsdp=2", "ok")
    own = training.make_batch

    def every_other_row(trainer):
        batch = own(trainer)
        if trainer.mesh.size == 1:
            return batch
        return training.replace(batch, mask_BT=batch.mask_BT.at[::2].set(False))

    monkeypatch.setattr(training, "make_batch", every_other_row)
    assert wrong(partial(training.mesh_and_one_device, trainer)) == {result.name}


def test_a_byte_of_a_checkpoint_that_flips_is_named(trainer, tmp_path, monkeypatch):
    write = manifest.write_manifest

    def then_flip(folder):
        write(folder)
        largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(largest.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))

    monkeypatch.setattr(manifest, "write_manifest", then_flip)
    (result,) = results.run("checkpoint", partial(training.checkpoint, trainer, results.Place(tmp_path, shared=True)))
    assert result.status == "wrong" and "is damaged: " in result.why
    assert not [*tmp_path.iterdir()]


# Results


def test_the_largest_difference_is_named_with_its_place():
    want = {"a": np.ones((2, 3)), "b": np.full(4, 100.0)}
    got = {"a": want["a"] + [[0, 0, 0], [0, 0.01, 0]], "b": want["b"] + 0.5}
    result = compare("it", got, want, 1e-3)
    assert (result.status, result.why) == ("wrong", "largest in ['a'] at [1, 1]")
    assert result.measured == pytest.approx(0.01)
    assert compare("it", got, want, 0.02).status == "ok"
    assert compare("it", {**got, "b": np.full(4, np.nan)}, want, 0.02).status == "wrong"


def test_a_rate_below_its_bound_is_slow():
    assert str(rate("copy", 3.0, 10.0, "GB/s")).split() == ["slow", "copy", "3", "GB/s", "(at", "least", "10)"]
    assert rate("copy", 3.0, None, "GB/s").status == rate("copy", 11.0, 10.0, "GB/s").status == "ok"


@pytest.mark.parametrize(("half", "says"), [(2e10, True), (3e11, False)])
def test_a_processor_on_which_bfloat16_gains_nothing_is_told_so(half, says, monkeypatch):
    flops = {"float32": 4e10, "bfloat16": half}
    monkeypatch.setattr(hardware, "limits", lambda dtype: Limits(flops[dtype], 1e9))
    notes = {result.name: result.why for result in results.run("device", hardware.device)}
    assert ("keep model.dtype=float32" in notes["matrix product, bfloat16"]) == says
    assert not notes["matrix product, float32"]


def test_an_exception_is_a_result():
    def check():
        yield rate("first", 1.0, None, "GB/s")
        raise ZeroDivisionError("one\ntwo")

    first, second = results.run("second", check)
    assert first.status == "ok" and (second.name, second.status) == ("second", "wrong")
    assert second.why == "ZeroDivisionError: one two"


def test_the_worst_of_the_processes_is_reported_with_its_number():
    fast, slow = rate("copy", 12.0, 10.0, "GB/s"), rate("copy", 3.0, 10.0, "GB/s")
    (found,) = merge([[fast], [slow], [fast]])
    assert (found.status, found.measured, found.why) == ("slow", 3.0, "process 1")
    broken = Result(name="other", status="wrong", why="an error")
    assert [each.why for each in merge([[fast], [broken]])] == ["", "process 1: an error"]
    assert merge([[fast, broken]]) == [fast, broken]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("slow", 0), ("skipped", 0), ("wrong", 1)])
def test_the_exit_code_and_the_files(status, code, monkeypatch, tmp_path, capsys):
    result = Result(name="it", status=status, why="because")
    monkeypatch.setattr(checklist, "make_checks", lambda place, every_kind: {"it": lambda: iter([result])})
    text, data = tmp_path / "doctor.txt", tmp_path / "doctor.json"
    assert main.main(["doctor", "--output", str(text), "--json", str(data)]) == code
    printed = capsys.readouterr().out
    assert text.read_text() == printed and "because" in printed
    assert re.search(rf"\n\n1 {status} in \d+ s \(\d+ s of CPU time\)\n", printed)
    assert ("check_hardware.md" in printed) == (status in ("slow", "wrong"))
    written = json.loads(data.read_text())
    assert written["results"] == [vars(result)]
    assert f"jax {written['environment']['packages']['jax']}" in printed


def test_while_a_check_runs_it_is_named_and_the_file_has_the_results_before_it(monkeypatch, tmp_path):
    """For a check that hangs until the watchdog ends the process."""
    text, seen = tmp_path / "doctor.txt", []

    def hang():
        seen.append((watchdog._doing, text.read_text()))
        yield compare("hangs", 0.0, 0.0, 0.0)

    first = Result(name="first", status="skipped", why="one device")
    monkeypatch.setattr(
        checklist, "make_checks", lambda place, every_kind: {"first": lambda: iter([first]), "hangs": hang}
    )
    assert main.main(["doctor", "--output", str(text)]) == 0
    ((named, written),) = seen
    assert named == "hangs" and re.search(r"^skipped +first +one device\n\Z", written, re.M)
    assert re.search(r"^ok +hangs +equal bits$", text.read_text(), re.M)


def test_statuses_are_in_color():
    colored = doctor.color("wrong    a check")
    assert colored.plain == "wrong    a check" and colored.spans[0].style == doctor.COLORS["wrong"]
    assert not any(span.style for span in doctor.color("devices      1 x cpu").spans)


def test_a_workdir_that_is_not_there(capsys):
    assert main.main(["doctor", "--workdir", "missing"]) == 2
    assert "missing: wanted the directory" in capsys.readouterr().err


SOME_CHECKS = """
import sys
from gspax.commands import main
from gspax.tools.doctor import checklist

make = checklist.make_checks
some = "collectives", "update on the mesh and on one device", "checkpoint"
checklist.make_checks = lambda place, every_kind: {name: make(place)[name] for name in some}
sys.exit(main.main(["doctor", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_two_processes_check_their_devices_together(tmp_path):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-c", SOME_CHECKS, "--coordinator", f"127.0.0.1:{port}", "--processes", "2"]
    command += ["--workdir", str(tmp_path), "--json", str(tmp_path / "found.json"), "--process"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""}
    started = [subprocess.Popen([*command, str(index)], env=environment) for index in range(2)]
    assert [process.wait(600) for process in started] == [0, 0]
    written = json.loads((tmp_path / "found.json").read_text())
    found = {result["name"]: result["status"] for result in written["results"]}
    assert set(found.values()) == {"ok"}
    assert {"sum over fsdp (2 devices)", "update on the mesh and on one device, fsdp=2", "checkpoint"} <= set(found)
