"""Runs of several real processes on this machine give the samples, metrics and checkpoints of one process.

Each process has its own devices; they connect over loopback.
"""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from api import (
    Checkpoints,
    InFlight,
    RunDir,
    Skipped,
    TrainedPolicy,
    abstract_state,
    evaluate_task,
    init_state,
    loop,
    main,
    make_mesh,
    make_optimizer,
    make_runtime,
    newest_step,
    record,
    restore_state,
    run_step,
)
from processes import finished, free_port, variables
from published import published, random_params, save
from small_experiment import Spoiled, experiment

from gspax import config
from gspax.config.optimizers import adamw
from gspax.evaluation.benchmark import EvaluatedPolicy
from gspax.losses import kl

FILE = str(Path(__file__).parents[1] / "small_experiment.py")
CLOCKS = ("time/", "cpu/", "perf/")

# The sampled evaluation has the shape of a rollout batch, which saves compiling a program. A large eps, because Adam's
# first updates amplify the rounding errors of the smallest gradients.
SMALL = replace(
    experiment,
    warm_start=None,
    optimizer=config.Optimizer(learning_rate=1e-2, transform=partial(adamw, eps=1e-2)),
    schedule=replace(experiment.schedule, steps=1, eval_every=0, checkpoint_every=0),
    sampling=replace(experiment.sampling, max_refills=1, chunk=2),
    evaluation=config.Evaluation(problems=8, samples=4),
)
# One dense layer for the default tests, whose time is mostly compilation. The slow tests shard experts too.
# Problems that cannot be used are read by the first process, by the second one, and for a refill.
DENSE = replace(
    SMALL,
    model=replace(SMALL.model, num_hidden_layers=1, num_experts=0, intermediate_size=32),
    data=Spoiled(SMALL.data, raising=(1, 12), too_long=(6,)),
)
SMALL_OVERRIDES = [
    *("warm_start=null", "schedule.steps=1", "schedule.eval_every=0", "schedule.checkpoint_every=0"),
    *("evaluation.problems=8", "evaluation.samples=4", "optimizer.learning_rate=1e-2", "optimizer.transform.eps=1e-2"),
    *("sampling.max_refills=1", "sampling.chunk=2"),
]


@pytest.fixture
def start():
    """`start(count, devices, workdir, *overrides)`: `count` processes of `gspax train` with `devices` devices each.

    `only` restricts which of them are started, and `command` is another one than `train`.
    """
    started = []

    def begin(count, devices, workdir, *overrides, file=FILE, only=None, command=("train",)):
        common = ["--coordinator", f"localhost:{free_port()}", "--processes", str(count)]
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "gspax", *command, file, "--workdir", str(workdir), *common),
                    *("--process", str(index), "--join-timeout", "100", *overrides),
                ],
                env=variables(devices),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in only or range(count)
        ]
        started.extend(processes)
        return processes

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for_steps(run, count, processes):
    """Wait until `count` steps are recorded; process 0 must stay alive."""
    deadline = time.monotonic() + 400
    while not (run.metrics.exists() and run.metrics.read_text().count('"reward/mean"') >= count):
        assert processes[0].poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def assert_close(got, wanted, rtol=1e-5):
    """Metrics of every step but the times are equal up to rounding: several processes sum in a different order."""
    rows, others = record.read_metrics(got.metrics), record.read_metrics(wanted.metrics)
    assert [row.keys() for row in rows] == [row.keys() for row in others]
    for row, other in zip(rows, others, strict=True):
        assert_close_rows(row, other, rtol)


def assert_close_rows(row, other, rtol=1e-5):
    assert row.keys() == other.keys()
    for name in row:
        if not name.startswith(CLOCKS):  # mismatches and noise floors are themselves rounding, at most 1e-6
            np.testing.assert_allclose(row[name], other[name], rtol, atol=2e-6, err_msg=name)


def assert_same_samples(got, wanted):
    """Text, reward and advantage of every completion are equal."""
    assert [path.name for path in sorted(got.samples.iterdir())] == [p.name for p in sorted(wanted.samples.iterdir())]
    for path in wanted.samples.iterdir():
        assert (got.samples / path.name).read_text() == path.read_text()


def parameters(run, experiment, step=None):
    """The parameters of a checkpoint, restored by this process onto its eight devices."""
    mesh = make_mesh(experiment.mesh, model=experiment.model)
    with Checkpoints(run.checkpoints) as checkpoints:
        policy = TrainedPolicy(experiment.model, mesh, make_optimizer(experiment.optimizer))
        state = restore_state(run, checkpoints, policy, newest_step(checkpoints) if step is None else step)
    return jax.device_get(state.params)


def assert_near(params, others):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), params, others)


def evaluate(runtime, state, folder):
    """A task in two chunks of the shape of a rollout, which a compiled program samples already."""
    task = config.Task(name="sort", data=DENSE.data, reward=DENSE.reward, problems=11, samples=4)
    policy = EvaluatedPolicy(runtime.sampler, runtime.sampler.push(state.params, 0), DENSE)
    return evaluate_task(task, policy, jax.random.key(1), folder)


CHILD = """
import json, os, resource, signal, sys
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from gspax.parallel import joining, multihost; from gspax.run import interrupt
from gspax.training import loop
from gspax.training.in_flight import InFlight
from gspax.rollout.problems import Skipped
from gspax.rollout.runtime import make_runtime
from gspax.training.step import run_step
from gspax.parallel.transfer import transfer
from gspax.run.checkpoints import Checkpoints, save
from gspax.errors import UserError
from gspax.hf.parameters import read_params
from gspax.parallel.sharding import make_mesh, named_sharding
from gspax.learner.state import abstract_params, init_state
from pathlib import Path
from published import random_params
from test_processes import DENSE, evaluate

address, index, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
joining.join(joining.ProcessInfo(address, 2, index), {}, lambda a, b: [], 100, b"secret")
assert multihost.gather("long" * (1 + 999 * index)) == ["long", "long" * 1000]
assert multihost.gather_rows({1: "b"} if index else {0: "a"}, 2) == ["a", "b"]
for number in range(20):
    assert multihost.gather((index, number)) == [(0, number), (1, number)]
assert not jax._src.distributed.global_state.client.key_value_dir_get_bytes("gspax/"), "nothing passes through jax"

def fail():
    if index == 1:
        raise UserError("no")

try:
    multihost.all_or_raise(fail)
except UserError as error:
    assert str(error) == ("no" if index else "process 1: no")
else:
    raise AssertionError("must fail on both")

runtime = make_runtime(DENSE)
replicated = multihost.to_devices(np.zeros((4, 2)), named_sharding(runtime.mesh))
assert len(multihost.owned_rows(replicated)) == (0 if index else 4), "each row has one owner"
sharded = multihost.to_devices(np.arange(8), named_sharding(runtime.mesh, "batch"))
np.testing.assert_array_equal(multihost.to_host(sharded), np.arange(8))

TRANSFERS
with interrupt.listen():
    interrupt.stop_point()
    if index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        interrupt.stop_point()
        raise AssertionError("must stop both processes")
    except interrupt.Interrupted as stop:
        assert stop.signum == signal.SIGTERM

state = init_state(DENSE.model, runtime.optimizer, jax.random.key(DENSE.seed), runtime.mesh)
state, metrics, samples, *_ = run_step(runtime, state, InFlight(Skipped(DENSE.sampling.max_failed)))
with Checkpoints(directory, keep=1) as checkpoints:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))  # as a full disk
    save(checkpoints, 1, state, {}, is_last=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert checkpoints.steps() == [], "a save that one process cannot make is begun by none"
    save(checkpoints, 1, state, {}, is_last=True)
own = [row for row, each in enumerate(samples.completions) if each.texts is not None]
result = {"metrics": metrics, "own": own, "rows": samples.to_json()}
result["summary"] = evaluate(runtime, state, Path(directory).with_name("evaluated"))
Path(directory).with_name(f"{index}.json").write_text(json.dumps(result))
"""

# Four devices of two processes: meshes across both processes and within one.
TRANSFERS = """
def on(devices, *axes, shape=(-1, 1)):
    grid = np.array(devices).reshape(shape)
    return NamedSharding(Mesh(grid, ("a", "b"), axis_types=(AxisType.Auto,) * 2), PartitionSpec(*axes))

devices, values = jax.devices(), np.arange(96.0, dtype=np.float32).reshape(4, 4, 6)
for sources, targets, spec in [
    ((0, 1), (2, 3), ("a", None, "b")),
    ((2, 3), (0, 1), ()),
    ((0,), (1, 2), ()),
    ((1, 2), (3,), (None, ("a", "b"))),
    ((3,), (0, 1, 2), ()),
]:
    source = on([devices[i] for i in sources], *spec)
    target = on([devices[i] for i in targets], None, "b" if len(targets) == 2 else None, shape=(1, -1))
    made = jax.jit(lambda: jax.numpy.asarray(values), out_shardings=source)()
    moved = transfer({"x": made, "y": made, "small": made.astype(np.int8)}, target)
    assert moved["x"].sharding == target and moved["small"].dtype == np.int8
    for shard in moved["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])
    for got in multihost.to_host((made, *moved.values())):
        np.testing.assert_array_equal(got, values)

first = on(devices[:2], "a")  # on process 0
key = jax.jit(lambda: jax.random.key(3), out_shardings=on(devices[:2]))()
own_key = multihost.key_to_host(key)
assert own_key.is_fully_addressable
state = {"x": jax.jit(lambda: jax.numpy.arange(4.0), out_shardings=first)(), "key": key}
with Checkpoints(directory + "_first", keep=1, mesh=first.mesh) as checkpoints:
    assert checkpoints.latest() is None
    checkpoints.save(5, state, {"extra": 1})
    assert checkpoints.latest() == 5
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    read, extra = checkpoints.restore(shapes)
    assert extra == {"extra": 1} and read["x"].sharding == first
    np.testing.assert_array_equal(multihost.to_host(read["x"]), np.arange(4.0))
    for each in (own_key, multihost.key_to_host(read["key"])):
        np.testing.assert_array_equal(jax.random.uniform(each, 3), jax.random.uniform(jax.random.key(3), 3))
    some = checkpoints.restore_some({"x": shapes["x"]}, 5)
    np.testing.assert_array_equal(multihost.to_host(some["x"]), np.arange(4.0))
    try:
        checkpoints.restore({"x": shapes["x"]})
    except UserError as error:
        assert ("process 0: " if index else "") + "checkpoint 5 in " in str(error)
    else:
        raise AssertionError("must fail on both")

mesh = make_mesh(DENSE.mesh, devices[:2], DENSE.model)
params = read_params(Path(directory).with_name("published"), DENSE.model, abstract_params(DENSE.model, mesh))
jax.tree.map(np.testing.assert_array_equal, multihost.to_host(params), random_params(DENSE.model))
"""


def test_a_step_of_two_processes_equals_that_of_one(tmp_path):
    """Also a task, host-side exchange, transfers, a signal to one process, and a checkpoint of both restored by one."""
    save(tmp_path / "published", DENSE.model, published(DENSE.model, random_params(DENSE.model)))
    command = [sys.executable, "-c", CHILD.replace("TRANSFERS", TRANSFERS), f"localhost:{free_port()}"]
    popen = {"env": variables(2), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(index), str(tmp_path / "saved")], **popen) for index in (0, 1)]
    try:
        runtime = make_runtime(DENSE)
        state = init_state(DENSE.model, runtime.optimizer, jax.random.key(DENSE.seed), runtime.mesh)
        state, metrics, samples, *_ = run_step(runtime, state, InFlight(Skipped(DENSE.sampling.max_failed)))
        finished(processes)
        first, second = (json.loads((tmp_path / f"{index}.json").read_text()) for index in (0, 1))
        summary = evaluate(runtime, state, tmp_path / "alone")
    finally:
        for process in processes:
            process.kill()
    assert first["summary"] == second["summary"] == summary
    assert sorted(path.name for path in (tmp_path / "evaluated").iterdir()) == ["sort.html", "sort.json", "sort.jsonl"]
    evaluated, alone = (record.read_rows(tmp_path / folder / "sort.jsonl") for folder in ("evaluated", "alone"))
    assert evaluated == alone and len(alone) == 44 and len({row["completion"] for row in alone}) > 10
    assert sorted(first["own"] + second["own"]) == list(range(32)) and len(first["own"]) % 4 == 0, "each its own groups"
    assert (metrics["sampling/prompts"], metrics["data/skipped"]) == (19, 3) and 0 < metrics[
        "sampling/groups_replaced"
    ] < 8
    assert first["rows"] == second["rows"] == samples.to_json()
    for each in (first["metrics"], second["metrics"]):
        assert_close_rows(each, metrics)
    with Checkpoints(tmp_path / "saved") as checkpoints:
        saved, _ = checkpoints.restore(abstract_state(runtime.policy))
    assert_near(jax.device_get(saved.params), jax.device_get(state.params))
    assert (int(saved.step), int(saved.position)) == (2, 19)


def test_missing_or_different_hosts_are_reported_before_anything_is_written(start, tmp_path, monkeypatch, capsys):
    """This process is one of the hosts; only the one that differs is another process."""
    monkeypatch.setenv("NPROC", "64")  # `gspax.commands.processes` sets it; restored after the test
    monkeypatch.delattr(jax.distributed, "initialize")  # must not be called: it would connect the test's own process
    command = ["train", FILE, "--workdir", str(tmp_path / "run"), "--processes", "2"]
    for index, sentence in enumerate(
        ["process 1 of 2 did not join within 1 seconds", "process 0 of 2 did not answer at localhost:"]
    ):
        place = ["--coordinator", f"localhost:{free_port()}", "--process", str(index)]
        assert main.main([*command, *place, "--join-timeout", "1"]) == 1
        assert capsys.readouterr().err.startswith(f"gspax: processes: {sentence}")

    changed = [each.replace("learning_rate=1e-2", "learning_rate=0.5") for each in SMALL_OVERRIDES]
    (other,) = start(2, 1, tmp_path / "run", *changed, only=[1])
    address = other.args[other.args.index("--coordinator") + 1]
    assert main.main([*command, "--coordinator", address, "--process", "0", *SMALL_OVERRIDES]) == 2
    (_, theirs), ours = finished([other], 2)[0], capsys.readouterr().err
    sentence = "processes: process 1 differs from process 0 in experiment.optimizer.learning_rate: 0.01 -> 0.5"
    assert theirs == ours == f"gspax: {sentence}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_of_two_processes_equals_that_of_one(start, tmp_path):
    processes = start(2, 4, tmp_path / "two", *SMALL_OVERRIDES)
    loop.train(SMALL, tmp_path / "one")
    two, one = RunDir(tmp_path / "two"), RunDir(tmp_path / "one")
    (first, _), (second, errors) = finished(processes)
    assert "report.html" in first and second == "" and "gspax" not in errors, "only the primary process prints"
    assert_close(two, one)
    assert_same_samples(two, one)
    assert_near(parameters(two, SMALL), parameters(one, SMALL))
    attempts = json.loads(two.environment.read_text())
    assert len(attempts) == 1 and attempts[0]["processes"] == 2 and attempts[0]["devices"] == "8 x cpu"
    assert two.report.stat().st_size > 0


EIGHT_BITS = ["sampling.kv_cache_dtype=int8", "sampling.weights_dtype=int8"]
TALKING_OVERRIDES = ["turns.limit=2", "sampling.max_tokens=12"]
TALKING = "environment=Countdown(), tokenizer=CharChat(small.tokenizer.alphabet), "
EVERYTHING = """
from dataclasses import replace
from functools import partial
from small_experiment import experiment as small, Countdown, Spoiled
from gspax import config, losses
from gspax.data import CharChat
from gspax.losses import kl
from gspax.config.optimizers import adamw
experiment = replace(
    small,
    seed=1,
    optimizer=config.Optimizer(learning_rate=1e-2, transform=partial(adamw, eps=1e-2)),
    schedule=replace(small.schedule, steps=3, eval_every=2, checkpoint_every=1, keep_checkpoints=3),
    reference=config.Reference(reward=kl.k3, coefficient=0.1),
    calibration=config.Calibration(tolerance=0.0),
    routing_replay="old",
    filter_overlong=True,
)
"""


def everything(tmp_path):
    """An experiment file that uses everything that crosses processes, with a warm start and a reference; its value."""
    file = tmp_path / "everything.py"
    file.write_text(EVERYTHING)
    whole = replace(
        experiment,
        seed=1,
        optimizer=SMALL.optimizer,
        schedule=replace(experiment.schedule, steps=3, eval_every=2, checkpoint_every=1, keep_checkpoints=3),
        reference=config.Reference(reward=kl.k3, coefficient=0.1),
        calibration=config.Calibration(tolerance=0.0),
        routing_replay="old",
        filter_overlong=True,
    )
    return str(file), whole


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_of_four_processes_resumes_on_one_and_on_two(start, tmp_path):
    file, whole = everything(tmp_path)
    loop.train(whole, tmp_path / "one")
    finished(start(4, 2, tmp_path / "four", "schedule.steps=2", file=file))
    one, four = RunDir(tmp_path / "one"), RunDir(tmp_path / "four")
    assert_near(parameters(four, whole, 2), parameters(one, whole, 2))

    copied = tmp_path / "then_two"
    subprocess.run(["cp", "-r", str(four.path), str(copied)], check=True)
    loop.train(whole, four.path)
    finished(start(2, 4, copied, file=file))
    for run in (four, RunDir(copied)):
        assert_near(parameters(run, whole), parameters(one, whole))
        steps = [[row for row in record.read_metrics(each.metrics) if "policy/loss" in row] for each in (run, one)]
        for name in ("policy/loss", "optim/grad_norm", "reward/mean", "reference/kl", "policy/clip_low"):
            got, wanted = ([row[name] for row in rows] for rows in steps)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("settings", "ages", "sampling", "fields"),
    [
        ("staleness=1", [0, 1, 0, 1], [], ""),
        ("staleness=2, partial=config.PartialRollouts(carried=4, ahead=1)", None, [], ""),
        ("staleness=2, partial=config.PartialRollouts(carried=4, ahead=1)", None, EIGHT_BITS, ""),
        ("staleness=2, partial=config.PartialRollouts(carried=4, ahead=1)", None, TALKING_OVERRIDES, TALKING),
    ],
    ids=["whole", "partial", "partial, 8 bits", "partial, conversations"],
)
def test_a_sampler_on_separate_processes(start, tmp_path, settings, ages, sampling, fields):
    """Four processes, two of them for the sampler; then two, one of them; compared with one process of four devices."""
    file = tmp_path / "disaggregated.py"
    overrides = ["schedule.checkpoint_every=2", "schedule.steps=4", *sampling]
    if ages is None:  # features beside the sampler are in the other run
        overrides += ["sampling.chunk=1", "warm_start=null", "calibration=null", "reference=null", "routing_replay=off"]
        overrides += ["model.num_hidden_layers=1", "model.num_experts=0", "model.intermediate_size=32"]
        overrides += ["schedule.eval_every=0", "evaluation.problems=8", "evaluation.samples=4"]
    data = "Spoiled(small.data, raising=(1, 60), too_long=(6, 12))"
    fields += f"data={data}, placement=config.Placement(devices=2, {settings})"
    file.write_text(f"{EVERYTHING}experiment = replace(experiment, {fields})\n")
    finished(start(1, 4, tmp_path / "one", *overrides, file=str(file)))
    finished(start(4, 1, tmp_path / "many", *overrides, "schedule.steps=2", file=str(file)))
    finished(start(2, 2, tmp_path / "many", *overrides, file=str(file)))
    many, one = (RunDir(tmp_path / name) for name in ("many", "one"))
    assert record.read_rows(many.skipped) == record.read_rows(one.skipped) != []
    many, one = (record.read_metrics(run.metrics) for run in (many, one))
    many, one = ([row for row in rows if "policy/loss" in row] for rows in (many, one))
    assert [row["rollout/staleness"] for row in many] == [row["rollout/staleness"] for row in one]
    if ages is None:
        for name in ("reward/mean", "response/length_mean", "rollout/turns"):
            assert [row.get(name) for row in many] == [row.get(name) for row in one]
        assert [row["rollout/carried"] for row in many] == [4, 0, 4, 0]
        assert [row["rollout/staleness_max"] for row in many] == [row["rollout/staleness_max"] for row in one]
    else:
        assert [row["rollout/staleness"] for row in many] == ages
    for row, other in zip(many, one, strict=True):
        assert_close_rows(row, other, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ["mesh.tensor=2", "mesh.fsdp=2"],
        ["mesh.expert=4", "mesh.fsdp=1"],
        ["mesh.context=4", "mesh.data=1"],
        ["sampling.slots=8", "sampling.max_tokens=8"],
        ["sampling.prompts=2"],
        [*EIGHT_BITS, "sampling.slots=16"],
    ],
    ids=" ".join,
)
def test_rows_on_devices_of_several_processes(start, tmp_path, mesh):
    """Four processes of one device: rows are sharded across processes."""
    changed = [*SMALL_OVERRIDES, "model.num_key_value_heads=2", "model.num_hidden_layers=1", *mesh]
    finished(start(4, 1, tmp_path / "four", *changed))
    finished(start(1, 4, tmp_path / "one", *changed))
    assert_close(RunDir(tmp_path / "four"), RunDir(tmp_path / "one"))
    assert_same_samples(RunDir(tmp_path / "four"), RunDir(tmp_path / "one"))


AGENT = """
from dataclasses import replace
from pathlib import Path

from small_experiment import experiment as small
from sorting_agent import ask

from gspax.config import Sampling, Turns
from gspax.data import CharChat
from gspax.rewards.environments import Agent


def solve(problem, endpoint):
    with Path(__file__).with_suffix(".txt").open("a") as started:
        print(problem.prompt, file=started)
    first = ask(endpoint, problem.prompt)
    if first.startswith("1"):
        raise ValueError("a tool that fails")
    part = ask(endpoint, problem.prompt[:2] + "=")
    return ask(endpoint, problem.prompt, first, part[:1] + "=")


experiment = replace(
    small,
    tokenizer=CharChat("0123456789="),
    environment=Agent(run=solve),
    turns=Turns(limit=3),
    grading=replace(small.grading, max_failed=1.0),
    sampling=Sampling(prompts=8, group=4, max_prompt_tokens=16, max_tokens=24, chunk=2),
    model=replace(small.model, num_hidden_layers=1, vocab_size=CharChat("0123456789=").vocab_size),
)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [[], ["model.num_key_value_heads=2", "sampler_mesh=gspax.config.Mesh", "sampler_mesh.tensor=2"]],
    ids=["rows", "halves of rows"],
)
def test_each_process_runs_the_agents_of_its_rows(start, tmp_path, mesh):
    """Two processes, which have each a half of the rows, or a half of each row: then the first runs all programs."""
    file = tmp_path / "agent.py"
    file.write_text(AGENT)
    changed = ["warm_start=null", "schedule.steps=2", "schedule.eval_every=0", "evaluation.problems=8", *mesh]
    finished(start(2, 1, tmp_path / "two", *changed, file=str(file)))
    programs = file.with_suffix(".txt").read_text().splitlines()
    finished(start(1, 2, tmp_path / "one", *changed, file=str(file)))
    two, one = RunDir(tmp_path / "two"), RunDir(tmp_path / "one")
    assert_close(two, one)
    assert_same_samples(two, one)
    assert sorted(2 * programs) == sorted(file.with_suffix(".txt").read_text().splitlines()), "each runs once"
    rows = [row for row in record.read_metrics(two.metrics) if "policy/loss" in row]
    assert all(row["rollout/turns"] > 1 and row["optim/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_adapters_are_trained_and_replayed_across_processes(start, tmp_path):
    file = tmp_path / "adapted.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from small_experiment import experiment as small\n"
        "from gspax.config import Lora\n"
        "experiment = replace(small, lora=Lora(rank=2))\n"
    )
    overrides = [*SMALL_OVERRIDES, "schedule.steps=2"]
    recorded = [*overrides, "schedule.record_rollouts=true"]
    finished(start(2, 1, tmp_path / "two", *recorded, file=str(file)))
    replay = "replay-rollouts", str(tmp_path / "two"), "--steps", "0:2"
    finished(start(2, 1, tmp_path / "again", *recorded, file=str(file), command=replay))
    again, two = (record.read_metrics(RunDir(tmp_path / name).metrics) for name in ("again", "two"))
    steps = [
        {name: x for name, x in row.items() if not name.startswith((*CLOCKS, "eval/"))}
        for row in (*again, *two)
        if "reward/mean" in row
    ]
    assert len(steps) == 4 and steps[:2] == steps[2:]
    finished(start(1, 2, tmp_path / "one", *recorded, file=str(file)))
    assert_close(RunDir(tmp_path / "two"), RunDir(tmp_path / "one"))


@pytest.mark.slow
def test_a_signal_to_one_host_ends_the_run_on_all_and_the_run_resumes(start, tmp_path):
    overrides = [*SMALL_OVERRIDES, "schedule.steps=1000"]
    processes = start(2, 1, tmp_path / "run", *overrides)
    run = RunDir(tmp_path / "run")
    wait_for_steps(run, 2, processes)
    processes[1].send_signal(signal.SIGTERM)
    for _, errors in finished(processes, 143):
        assert "SIGTERM: completed steps are saved" in errors and "Traceback" not in errors
    with Checkpoints(run.checkpoints) as checkpoints:
        done = checkpoints.latest()
    assert 2 <= done < 1000
    finished(start(2, 1, run.path, *overrides[:-1], f"schedule.steps={done + 1}"))
    steps = [row["step"] for row in record.read_metrics(run.metrics) if "policy/loss" in row]
    assert steps == list(range(1, done + 2))


@pytest.mark.slow
def test_an_error_on_one_process_ends_all_processes(start, tmp_path):
    file = tmp_path / "failing.py"
    file.write_text(
        "import jax\n"
        "from dataclasses import replace\n"
        "from small_experiment import experiment as small, share_right\n"
        "def reward(problem, completion):\n"
        "    if jax.process_index() == 1:\n"
        "        raise KeyError('answer')\n"
        "    return share_right(problem, completion)\n"
        "experiment = replace(small, reward=reward)\n"
    )
    output = finished(start(2, 1, tmp_path / "run", *SMALL_OVERRIDES, file=str(file)), 2)
    assert "gspax: reward: experiment_file.reward failed for" in output[1][1] and "KeyError: 'answer'" in output[1][1]
    assert "gspax: reward: experiment_file.reward failed for" in output[0][1]  # both have counted the failures


@pytest.mark.slow
def test_a_killed_process_ends_the_others(start, tmp_path):
    processes = start(2, 1, tmp_path / "run", *SMALL_OVERRIDES, "schedule.steps=1000")
    run = RunDir(tmp_path / "run")
    wait_for_steps(run, 1, processes)
    processes[1].kill()
    assert processes[0].wait(timeout=150) != 0


@pytest.mark.slow
def test_conversations_are_answered_by_the_process_that_has_them(start, tmp_path):
    """Two processes hold the conversations of one, with advantages of turns; none is answered twice."""
    file = str(Path(__file__).parents[2] / "experiments" / "calculator_gspo_token.py")
    overrides = [
        *(
            "sampling.prompts=4",
            "sampling.group=4",
            "warm_start.steps=20",
            "warm_start.rows=16",
            "evaluation.problems=8",
        ),
        *("schedule.steps=1", "schedule.minibatches=2", "schedule.eval_every=0", "schedule.checkpoint_every=0"),
    ]
    assert main.main(["train", file, "--workdir", str(tmp_path / "one"), *overrides]) == 0
    finished(start(2, 4, tmp_path / "two", *overrides, file=file))
    one, two = RunDir(tmp_path / "one"), RunDir(tmp_path / "two")
    assert_close(two, one, rtol=1e-4)
    assert_same_samples(two, one)
