"""Servers that hang, restart, answer slowly, or get damaged weights: waits end, nothing is lost, runs resume."""

import json
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import fake_sglang
import fake_vllm
import jax
import numpy as np
import pytest
import small_experiment
from api import (
    Checkpoints,
    InFlight,
    RunDir,
    UnreachableError,
    abstract_state,
    finished_steps,
    init_state,
    loop,
    make_runtime,
    prepare_minibatches,
    receive,
    record,
    run_step,
    start_rollout,
    tensors,
    weights,
)
from small_experiment import Countdown

from gspax.config import Engine, Optimizer, Turns
from gspax.data import CharChat
from gspax.errors import FailureError, UserError
from gspax.learner.metrics import Clock
from gspax.rewards.environments import Step
from gspax.training.step import take_trusted

pytestmark = pytest.mark.usefixtures("one_device")

CLOCKS = ("time/", "cpu/", "perf/", "engine/write_seconds", "engine/load_seconds")
experiment = replace(small_experiment.experiment, model=replace(small_experiment.experiment.model, num_hidden_layers=1))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def served(*fakes, timeout=30.0, **changes):
    """The small experiment with these servers."""
    addresses = tuple(fake.address for fake in fakes)
    settings = Engine(server=fakes[0].program, folder="weights", addresses=addresses, timeout=timeout, probes=2)
    return replace(experiment, warm_start=None, engine=settings, **changes)


def in_8_bits(params):
    return jax.tree.map(lambda leaf: leaf.astype("float8_e4m3fn").astype(leaf.dtype), params)


AFTER_THE_PUSH = {
    "wrong tokens": lambda fake: setattr(fake.faults, "replaces_tokens", 2),
    "no log-probs": lambda fake: setattr(fake.faults, "nulls", True),
    "exchanged experts": lambda fake: setattr(fake, "params", fake_vllm.exchange_experts(fake.params)),
}
IN_BFLOAT16 = {
    "late tokens": lambda fake: setattr(fake.faults, "late_tokens", 0.01),  # after the third turn
    "stale weights": lambda fake: setattr(fake, "params", fake.versions[0]),  # it says that it has version 1
    "exchanged experts": lambda fake: setattr(fake, "params", fake_vllm.exchange_experts(fake.params)),
    "8-bit weights": lambda fake: setattr(fake, "params", in_8_bits(fake.params)),
}


def test_a_wrong_server_of_16_is_set_aside_and_nothing_that_it_sampled_is_trained_on(here, capsys):
    """Its faults begin when all checks of the weights have passed. The step is that of 16 servers without a fault."""
    with ExitStack() as stack:
        fakes = [stack.enter_context(fake_vllm.serve(experiment.model)) for _ in range(16)]
        runtime = make_runtime(served(*fakes, sampling=replace(experiment.sampling, prompts=16)))
        results = {}
        for name, break_one in {"none": lambda fake: None, **AFTER_THE_PUSH}.items():
            state, faults = fresh(runtime), fakes[7].faults
            faults.replaces_tokens, faults.nulls = 0, False
            runtime.sampler.set_aside.reasons.clear()
            runtime.sampler.push(state.params, 0)
            for fake in fakes:
                fake.faults.delay = 0.3  # so that each has a group before the first is done
            break_one(fakes[7])
            capsys.readouterr()
            result = run_step(runtime, state, InFlight())
            results[name] = jax.device_get(result.state.params)
            jax.tree.map(np.testing.assert_array_equal, results[name], results["none"])
            lines = [line for line in capsys.readouterr().err.splitlines() if "is set aside" in line]
            assert result.metrics["engine/set_aside"] == len(lines) == (name != "none"), (name, lines)
            assert all(f"{fakes[7].address} is set aside" in line for line in lines), (name, lines)
            sampled = {server for completion in result.samples.completions for server in completion.sources}
            assert sampled == {*range(1, 17)} - ({8} if lines else set()), name


class SixTurns:
    """Replies with a digit to each of six turns."""

    def reset(self, problem):
        return 1, [{"role": "user", "content": problem.prompt}]

    def step(self, state, message):
        return Step(state + 1, [{"role": "user", "content": str(state)}], done=state == 6)


@pytest.mark.parametrize(
    ("servers", "faults"),
    [(4, ["late tokens"]), pytest.param(16, [*IN_BFLOAT16], marks=pytest.mark.slow)],
    ids=["4 servers", "16 servers"],
)
def test_a_wrong_server_is_found_in_one_rollout_of_six_turns_in_bfloat16(servers, faults, here, capsys):
    """Each server samples 2,900 tokens, whose log-probs differ from the learner's by 0.02 nats of rounding.

    The stale weights are those before a real update, and the 8-bit ones are those after it.
    """
    tokenizer, letters = CharChat(experiment.tokenizer.alphabet), 60
    changes = {"vocab_size": tokenizer.vocab_size, "dtype": "bfloat16", "initializer_range": 0.5}
    model = replace(experiment.model, **changes)
    talking = {"environment": SixTurns(), "turns": Turns(limit=6), "model": model, "tokenizer": tokenizer}
    talking["optimizer"] = Optimizer(learning_rate=0.01)
    sizes = {"prompts": servers, "group": 8, "max_prompt_tokens": 8, "max_tokens": 6 * letters + 12}
    schedule = replace(experiment.schedule, minibatches=1, microbatch_rows=8)
    with ExitStack() as stack:
        fakes = [stack.enter_context(fake_vllm.serve(model, max_tokens=512, hasty=letters)) for _ in range(servers)]
        sampling = replace(experiment.sampling, **sizes)
        runtime = make_runtime(served(*fakes, **talking, sampling=sampling, schedule=schedule))
        for name in faults:
            state = fresh(runtime)
            fakes[2].faults.late_tokens = 0.0
            runtime.sampler.set_aside.reasons.clear()
            runtime.sampler.push(state.params, 0)
            if name in ("stale weights", "8-bit weights"):
                state = run_step(runtime, state, InFlight()).state
                runtime.sampler.push(state.params, 1)
            for fake in fakes:
                fake.faults.delay = 0.3  # so that each has a group before the first is done
            IN_BFLOAT16[name](fakes[2])
            prepare = partial(prepare_minibatches, runtime, state, ())
            graded, _, metrics = take_trusted(runtime, state, InFlight(), prepare, Clock())
            lines = [line for line in capsys.readouterr().err.splitlines() if "is set aside" in line]
            assert metrics["engine/set_aside"] == len(lines) == 1 and fakes[2].address in lines[0], (name, lines)
            assert 3 not in np.unique(jax.device_get(graded.rollout.source_BT)), name


def sample(runtime, state, weights):
    return jax.device_get(receive(runtime, start_rollout(runtime, weights, state, 0, InFlight())).rollout)


def fresh(runtime):
    return init_state(runtime.experiment.model, runtime.optimizer, jax.random.key(0), runtime.mesh)


def push_first(experiment, version):
    """A runtime, a new state, and its weights, pushed to the servers."""
    runtime = make_runtime(experiment)
    state = fresh(runtime)
    return runtime, state, runtime.sampler.push(state.params, version)


def test_a_changed_byte_is_refused_with_the_tensor(here):
    with fake_vllm.serve(experiment.model) as fake:
        fake.faults.flips_byte = True
        runtime = make_runtime(served(fake))
        with pytest.raises(FailureError, match=r"engine: http://\S+ \S+: tensor \S+: wanted the checksum"):
            runtime.sampler.push(fresh(runtime).params, 0)
        assert fake.loaded is None


def test_a_push_that_is_killed_halfway_leaves_nothing_that_a_server_loads(here, monkeypatch):
    written = []

    def killed(place, *arguments):
        written.append(place.name)
        if len(written) == 5:
            raise KeyboardInterrupt
        return original(place, *arguments)

    with fake_vllm.serve(experiment.model) as fake:
        runtime, original = make_runtime(served(fake)), tensors.write
        state = fresh(runtime)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(tensors, "write", killed)
            runtime.sampler.push(state.params, 0)
        assert fake.loaded is None and not list(Path("weights").glob("weights_v??????"))
        Path("weights/weights_v000000.0123.tmp").mkdir()  # what SIGKILL leaves
        runtime.sampler.push(state.params, 0)
        assert fake.loaded["version"] == 0
        assert [path.name for path in Path("weights").iterdir()] == ["weights_v000000"]


def test_older_versions_are_removed(here):
    with fake_vllm.serve(experiment.model) as fake:
        runtime = make_runtime(served(fake))
        for version in (0, 1, 12):
            state = jax.tree.map(lambda leaf: leaf * (1.01 + version), fresh(runtime).params)  # noqa: B023
            runtime.sampler.push(state, version)
        assert [path.name for path in Path("weights").iterdir()] == ["weights_v000012"]
        manifest = json.loads(Path("weights/weights_v000012/manifest.json").read_text())
        assert manifest["version"] == 12 and manifest["digest"] == fake.loaded["digest"]
        assert manifest["digest"] == weights.digest_of(manifest["tensors"])


def test_a_folder_that_cannot_be_written_is_one_sentence(here):
    Path("weights").write_text("a file")
    with fake_vllm.serve(experiment.model) as fake:
        runtime = make_runtime(served(fake))
        with pytest.raises(UserError, match=r"engine.folder: wanted a folder to write to, got weights"):
            runtime.sampler.push(fresh(runtime).params, 0)


def test_a_server_that_does_not_answer_ends_the_run_within_its_timeout(here):
    with fake_vllm.serve(experiment.model) as fake:
        runtime, state, pushed = push_first(served(fake, timeout=1.0), 0)
        fake.faults.hangs = True
        begun = time.monotonic()
        with pytest.raises(
            FailureError, match=r"engine: no server for 1 seconds \(engine.timeout\): .*no answer"
        ) as one:
            sample(runtime, state, pushed)
        assert time.monotonic() - begun < 20 and "\n" not in str(one.value)


def test_a_server_that_is_not_there_ends_the_run_within_its_timeout(here):
    with fake_vllm.serve(experiment.model) as fake:
        settings = served(fake, timeout=0.5)
    runtime = make_runtime(settings)
    with pytest.raises(FailureError, match=r"no server for 0.5 seconds .*not reachable: Connection refused"):
        runtime.sampler.push(fresh(runtime).params, 0)


def test_a_server_that_starts_after_the_run_is_waited_for(here):
    with fake_vllm.serve(experiment.model) as fake:
        settings, port = served(fake), fake.port
    runtime = make_runtime(settings)
    state, found = fresh(runtime), []
    thread = threading.Thread(target=lambda: found.append(runtime.sampler.push(state.params, 2)))
    thread.start()
    time.sleep(0.7)
    assert not found
    with fake_vllm.serve(experiment.model, port=port) as fake:
        thread.join(timeout=20)
        assert found[0].version == 2 and fake.loaded["version"] == 2


def test_a_server_that_answers_slowly_only_takes_longer(here):
    with fake_vllm.serve(experiment.model) as fake:
        runtime, state, pushed = push_first(served(fake), 0)
        quick = sample(runtime, state, pushed)
        fake.faults.delay = 0.1
        np.testing.assert_array_equal(sample(runtime, state, pushed).tokens_BT, quick.tokens_BT)


def test_no_sample_is_lost_when_a_server_restarts(here):
    """It comes back with random weights, and gets the newest ones before it samples on."""
    with fake_vllm.serve(experiment.model) as fake:
        runtime, state, pushed = push_first(served(fake), 5)
        undisturbed = sample(runtime, state, pushed)
        fake.faults.restart_after = fake.completions + 10
        disturbed = sample(runtime, state, pushed)
        assert fake.faults.restart_after == 0, "it did restart"
        jax.tree.map(np.testing.assert_array_equal, disturbed, undisturbed)
        loads = [body["args"] for path, body in fake.seen if body and body.get("method") == "gspax_load"]
        assert len(loads) == 2 and loads[0][0] == loads[1][0]


@pytest.mark.parametrize("kind", [fake_vllm.Fake, fake_sglang.FakeSGLang])
def test_a_server_that_restarted_between_two_steps_gets_the_weights_again(kind, here):
    with fake_vllm.serve(experiment.model, kind) as fake:
        runtime, state, pushed = push_first(served(fake), 5)
        undisturbed = sample(runtime, state, pushed)
        fake.start()
        jax.tree.map(np.testing.assert_array_equal, sample(runtime, state, pushed), undisturbed)


def test_a_push_whose_file_is_damaged_ends_the_run(here):
    with fake_vllm.serve(experiment.model) as fake:
        fake.faults.flips_byte = True
        with pytest.raises(FailureError, match=r"weights_v000000: tensor \S+ wanted the checksum"):
            push_first(served(fake), 0)


@pytest.mark.parametrize("keeps_old", [False, True], ids=["deleted", "loaded"])
def test_a_server_that_loads_while_a_newer_version_is_pushed_is_tried_again(here, monkeypatch, keeps_old):
    """It was gone and is back: the version that it was told to load is deleted by the push, or is there but older."""
    with fake_vllm.serve(experiment.model) as fake:
        runtime, state, _ = push_first(served(fake), 0)
        (server,) = runtime.sampler.servers.usable()
        load = server.load

        def slow(written):
            monkeypatch.setattr(server, "load", load)
            if keeps_old:
                load(written)
            factor = 1.0 if keeps_old else 1.01  # all weights change, so nothing is left of the older version
            runtime.sampler.push(jax.tree.map(lambda leaf: leaf * factor, state.params), 1)
            if not keeps_old:
                load(written)

        monkeypatch.setattr(server, "load", slow)
        with pytest.raises(UnreachableError, match="newer weights were pushed while it loaded older ones"):
            runtime.sampler.install(server)
        runtime.sampler.install(server)
        assert fake.loaded["version"] == 1


@pytest.mark.parametrize("digest", ["of another run", None], ids=["other", "equal"])
def test_another_run_that_pushes_to_the_same_server_is_noticed(here, digest):
    """Also weights that are equal: what was answered in between was of others, perhaps."""
    with fake_vllm.serve(experiment.model) as fake:
        runtime, state, pushed = push_first(served(fake), 5)
        fake.loaded = {"version": 9, "digest": digest or fake.loaded["digest"], "instance": "other"}
        with pytest.raises(
            FailureError, match=r"wanted version 5 of this run, .* version 9: does another run push to it"
        ):
            sample(runtime, state, pushed)


def test_several_servers_share_the_work_by_groups_and_one_may_die(here):
    with ExitStack() as stack:
        first, second = (stack.enter_context(fake_vllm.serve(experiment.model)) for _ in range(2))
        runtime, state, pushed = push_first(served(first, second), 0)
        for fake in (first, second):
            fake.seen.clear()
        both = sample(runtime, state, pushed)
        asked = [[body for path, body in fake.seen if path == "/v1/completions"] for fake in (first, second)]
        assert asked[0] and asked[1]
        assert len({body["seed"] for body in (*asked[0], *asked[1])}) == len(asked[0]) + len(asked[1]) == 32
        for bodies in asked:
            samples = Counter(tuple(body["prompt"]) for body in bodies)
            assert not any(count % 4 for count in samples.values()), "the four samples of a prompt are at one server"
        second.faults.hangs, second.faults.restart_after = False, second.completions + 3
        alone = sample(runtime, state, pushed)
        assert not np.array_equal(alone.source_BT, both.source_BT)
        jax.tree.map(np.testing.assert_array_equal, replace(alone, source_BT=both.source_BT), both)


def test_conversations_are_token_ids_that_only_grow(here):
    """A turn's request begins with the tokens of the turn before, as they were sampled."""
    talking = {
        "environment": Countdown(),
        "tokenizer": CharChat(experiment.tokenizer.alphabet),
        "turns": Turns(limit=3),
        "sampling": replace(experiment.sampling, max_prompt_tokens=8, max_tokens=32),
    }
    model = replace(experiment.model, vocab_size=talking["tokenizer"].vocab_size)
    with fake_vllm.serve(model, max_tokens=64) as fake:
        runtime = make_runtime(served(fake, model=model, routing_replay="sampler", **talking))
        state = fresh(runtime)
        batch = receive(runtime, start_rollout(runtime, runtime.sampler.push(state.params, 0), state, 0, InFlight()))
        rollout = jax.device_get(batch.sampled)
        assert len(batch.started) == 32 and rollout.reply_B.sum() > 0
        asked = [body["prompt"] for path, body in fake.seen if body and body.get("stop_token_ids")]
        for row in range(32):
            start, count = rollout.prompt_length_B[row], rollout.length_B[row]
            tokens = rollout.tokens_BT[row, : start + count].tolist()
            turns = batch.started[row].turns.spans
            for begin, end in turns:
                assert tokens[: start + begin] in asked
                assert rollout.mask_BT[row, start + begin : start + end].all()
            assert (
                rollout.mask_BT[row].sum() == sum(end - begin for begin, end in turns) == count - rollout.reply_B[row]
            )
            logps, experts = fake_vllm.forward(jax.device_get(state.params), model, tokens)
            wanted = np.where(rollout.mask_BT[row, 1 : start + count], logps[np.arange(len(tokens) - 1), tokens[1:]], 0)
            np.testing.assert_allclose(rollout.logp_BT[row, 1 : start + count], wanted, atol=5e-6)
            np.testing.assert_array_equal(rollout.expert_BLTA[row, :, : len(tokens) - 1], experts[:-1].swapaxes(0, 1))


def final(run, settings):
    runtime = make_runtime(settings)
    with Checkpoints(run.checkpoints) as checkpoints:
        state, _ = checkpoints.restore(abstract_state(runtime.policy), None)
    rows = [{k: x for k, x in row.items() if not k.startswith(CLOCKS)} for row in record.read_metrics(run.metrics)]
    return jax.device_get(replace(state, key=jax.random.key_data(state.key))), rows


def test_a_run_whose_server_died_resumes_bit_for_bit(here):
    """With dynamic sampling and evaluations; the server dies in the third step and is started again for the resume."""
    with fake_vllm.serve(experiment.model) as fake:
        settings = served(fake, sampling=replace(experiment.sampling, max_refills=1))
        loop.train(settings, here / "whole")
        asked = fake.completions
    with fake_vllm.serve(experiment.model, port=fake.port) as again:
        again.faults.dies_after = asked * 3 // 5
        impatient = replace(settings, engine=replace(settings.engine, timeout=2.0))
        with pytest.raises(FailureError, match="engine: no server for 2 seconds"):
            loop.train(impatient, here / "cut")
        assert finished_steps(RunDir(here / "cut").checkpoints) == [2]
    with fake_vllm.serve(experiment.model, port=fake.port):
        loop.train(settings, here / "cut")
    (state, rows), (other, others) = (final(RunDir(here / name), settings) for name in ("whole", "cut"))
    jax.tree.map(np.testing.assert_array_equal, state, other)
    assert rows == others and len(rows) == 7


@pytest.mark.parametrize("old_logp", ["interpolated", pytest.param("learner", marks=pytest.mark.slow)])
def test_staleness_1_samples_while_the_learner_updates(old_logp, here):
    """The second rollout is of the first parameters; none is asked for past a checkpoint, and evaluations wait."""
    with fake_vllm.serve(experiment.model) as fake:
        settings = served(fake, schedule=replace(experiment.schedule, checkpoint_every=3, eval_every=1))
        settings = replace(settings, engine=replace(settings.engine, staleness=1), old_logp=old_logp)
        loop.train(settings, here / "whole")
        _, rows = final(RunDir(here / "whole"), settings)
        ages = [row["rollout/staleness"] for row in rows if "rollout/staleness" in row]
        assert ages == [0.0, 1.0, 1.0, 0.0], "a checkpoint after the third step"
        assert all(row["mismatch/abs_diff"] < 2e-6 for row in rows if row.get("rollout/staleness") == 0.0)
        assert all(row["mismatch/abs_diff"] > 1e-5 for row in rows if row.get("rollout/staleness") == 1.0)
