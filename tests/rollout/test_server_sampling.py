"""Engines: the sampler of this process, and the HTTP of vLLM and SGLang, by fake servers, behind one contract."""

from dataclasses import replace

import fake_sglang
import fake_vllm
import jax
import numpy as np
import pytest
import reference
import tiny
from api import InFlight, init_state, make_runtime, pad_replies, receive, run_step, server, start_rollout
from small_experiment import experiment

from gspax.config import Engine
from gspax.errors import FailureError
from gspax.rollout.servers import rows

FOLDER = "weights"


KINDS = {"vllm": fake_vllm.Fake, "sglang": fake_sglang.FakeSGLang}
both = pytest.mark.parametrize("fake", KINDS, indirect=True)


@pytest.fixture
def fake(request, tmp_path, monkeypatch):
    """A vLLM server, or the one that a test asks for."""
    monkeypatch.chdir(tmp_path)
    with fake_vllm.serve(experiment.model, KINDS[getattr(request, "param", "vllm")]) as server:
        yield server


def served(fake, **changes):
    """The small experiment with this server."""
    settings = Engine(server=fake.program, folder=FOLDER, addresses=(fake.address,), timeout=30.0, probes=2)
    return replace(experiment, warm_start=None, engine=settings, **changes)


def fresh(runtime, seed=0):
    return init_state(runtime.experiment.model, runtime.optimizer, jax.random.key(seed), runtime.mesh)


@both
def test_a_server_scores_what_the_model_scores(fake):
    runtime = make_runtime(served(fake))
    state = fresh(runtime)
    runtime.sampler.push(state.params, 0)
    (one,) = runtime.sampler.servers.usable()
    for row in ([1, 2, 3, 4, 5], [7, 7]):
        logps, _ = fake_vllm.forward(jax.device_get(state.params), experiment.model, row)
        np.testing.assert_allclose(one.score(row), logps[np.arange(len(row) - 1), row[1:]], atol=2e-6)


@both
def test_a_step_trains_on_what_a_server_has_sampled(fake):
    runtime = make_runtime(served(fake))
    state = fresh(runtime)
    result = run_step(runtime, state, InFlight())
    metrics = result.metrics
    assert metrics["mismatch/abs_diff"] < 2e-6, "the learner computes the server's log-probs"
    assert metrics["engine/probe_abs_diff"] < 2e-6 and metrics["engine/probe_sampled_abs_diff"] < 2e-6
    assert metrics["engine/push_bytes"] == sum(x.nbytes for x in jax.tree.leaves(fresh(runtime).params))
    assert len(result.samples.completions) == 32 and np.isfinite(metrics["optim/grad_norm"])


@both
def test_a_rollout_is_what_the_server_answered(fake):
    runtime = make_runtime(served(fake, routing_replay="sampler"))
    state = fresh(runtime)
    batch = receive(runtime, start_rollout(runtime, runtime.sampler.push(state.params, 3), state, 0, InFlight()))
    rollout = jax.device_get(batch.sampled)
    assert batch.version == 3
    for row in range(32):
        start, count = rollout.prompt_length_B[row], rollout.length_B[row]
        tokens = rollout.tokens_BT[row, : start + count]
        prompt = experiment.tokenizer.encode(batch.problems[row // 4].prompt)
        assert tokens[:start].tolist() == list(prompt)
        logps, experts = fake_vllm.forward(jax.device_get(state.params), experiment.model, tokens.tolist())
        wanted = logps[np.arange(start - 1, start + count - 1), tokens[start:]]
        np.testing.assert_allclose(rollout.logp_BT[row, start : start + count], wanted, atol=2e-6)
        np.testing.assert_array_equal(rollout.expert_BLTA[row, :, : start + count - 1], experts[:-1].swapaxes(0, 1))
        assert (rollout.expert_BLTA[row, :, start + count - 1 :] == experiment.model.num_experts).all()
        assert rollout.mask_BT[row].tolist() == [start <= t < start + count for t in range(rollout.mask_BT.shape[1])]
        assert rollout.finished_B[row] == (tokens[-1] in experiment.tokenizer.stop_ids)
        assert rollout.finished_B[row] or count == 4


@both
def test_a_sample_of_a_server_ends_at_the_token_that_completes_a_stop_string(fake):
    """The server knows tokens alone: it goes on where several tokens make a string."""
    kept, stop = {}, ("13", "30", "42", "7", "9=", "85")
    for stops in ((), stop):
        runtime = make_runtime(served(fake, sampling=replace(experiment.sampling, stop=stops)))
        state = fresh(runtime)
        batch = receive(runtime, start_rollout(runtime, runtime.sampler.push(state.params, 0), state, 0, InFlight()))
        kept[stops] = jax.device_get(batch.sampled)
    ends = set()
    for row in range(32):
        texts = {}
        for stops, rollout in kept.items():
            start = rollout.prompt_length_B[row]
            texts[stops] = rollout.tokens_BT[row, start : start + rollout.length_B[row]].tolist()
        decoded = [experiment.tokenizer.decode(texts[()][:count]) for count in range(len(texts[()]) + 1)]
        count = next((n for n, text in enumerate(decoded) if text.endswith(stop)), None)
        assert texts[stop] == texts[()][:count]
        assert kept[stop].finished_B[row] == (count is not None or kept[()].finished_B[row])
        ends.add(None if count is None else next(len(each) for each in stop if decoded[count].endswith(each)))
    assert ends == ({None, 1, 2} if fake.program == "vllm" else {None, 1})  # what the fakes sample


FILTERED = replace(experiment.sampling, temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, mask_replay=8)


def test_a_server_tells_the_tokens_that_filters_leave(fake):
    """The learner's log-probs over them are the server's."""
    runtime = make_runtime(served(fake, sampling=FILTERED))
    state = fresh(runtime)
    batch = receive(runtime, start_rollout(runtime, runtime.sampler.push(state.params, 0), state, 0, InFlight()))
    rollout, V = jax.device_get(batch.sampled), experiment.model.vocab_size
    assert rollout.kept_BTK.shape[2] == 5 and rollout.kept_BTK.dtype == np.uint8 and not rollout.cut_BT.any()
    sizes = set()
    for row, column in np.argwhere(rollout.mask_BT):
        tokens = rollout.tokens_BT[row, : column + 1].tolist()
        logps, _ = fake_vllm.forward(jax.device_get(state.params), experiment.model, tokens[:-1])
        scaled = logps[-1] / 0.8
        wanted = reference.kept_tokens(scaled, 5, 0.9, 0.05)
        ids = sorted(wanted, key=lambda token: -scaled[token])
        assert rollout.kept_BTK[row, column].tolist() == ids + [V] * (5 - len(ids)) and tokens[-1] in wanted
        logp = scaled[tokens[-1]] - np.log(np.exp(scaled[ids]).sum())
        np.testing.assert_allclose(rollout.logp_BT[row, column], logp, atol=2e-6)
        sizes.add(len(ids))
    assert len(sizes) > 1
    metrics = run_step(make_runtime(runtime.experiment), state, InFlight()).metrics
    assert metrics["mismatch/abs_diff_largest_max"] < 2e-6 and metrics["engine/probe_sampled_abs_diff"] < 2e-6
    assert 1 < metrics["sampling/mask_size"] < 5 and metrics["sampling/mask_cut"] == 0


def test_of_tokens_that_tie_at_the_edge_of_a_filter_the_sampled_one_stays():
    """The server has chosen among four tokens, of which two are kept."""
    logps = {7: np.log(0.4), 3: np.log(0.2), 9: np.log(0.2)}
    ids, logp, cut = server.keep_set(logps, 9, 2)
    assert ids == [7, 9] and cut
    np.testing.assert_allclose(np.exp(logp), 0.2 / 0.6)
    ids, logp, cut = server.keep_set({7: np.log(0.75), 3: np.log(0.25), 9: -9999.0}, 7, 3)
    assert ids == [7, 3] and not cut
    np.testing.assert_allclose(np.exp(logp), 0.75)
    for excluded in (-9999.0, np.log(0.1)):
        with pytest.raises(ValueError, match="token 9, which the filters exclude"):
            server.keep_set({7: np.log(0.6), 3: np.log(0.3), 9: excluded}, 9, 2)


def test_the_tokens_of_a_reply_have_no_sets():
    options = tiny.options(experiment.model, replace(FILTERED, prompts=1, group=1), (1,), turns=True, mask_size=2)
    row, V = rows.Row([1, 2, 3], 0, 0, False), experiment.model.vocab_size
    for token in (4, 5):
        rows.add(row, server.Answer([token], [-0.5], True, None, [[token, 6]], [token == 5]), 0, options)
        rows.add_replies({0: row}, pad_replies([[8, 9]] if token == 4 else [[]]))
    rollout = jax.device_get(rows.assemble({0: row}, 1, options))
    start = rollout.prompt_length_B[0]
    assert rollout.tokens_BT[0, start : start + 4].tolist() == [4, 8, 9, 5]
    assert rollout.kept_BTK[0, start : start + 4].tolist() == [[4, 6], [V, V], [V, V], [5, 6]]
    assert np.flatnonzero(rollout.cut_BT[0]).tolist() == [start + 3]


@both
def test_equal_keys_give_equal_samples(fake):
    """A resumed run samples what the uninterrupted one did, in whatever order its requests are answered."""
    runtime = make_runtime(served(fake))
    state = fresh(runtime)
    weights = runtime.sampler.push(state.params, 0)
    first, again, other = (
        jax.device_get(receive(runtime, start_rollout(runtime, weights, state, start, InFlight())).rollout.tokens_BT)
        for start in (0, 0, 8)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def refuses(runtime, state, *words):
    with pytest.raises(FailureError) as problem:
        run_step(runtime, state, InFlight())
    sentence = str(problem.value)
    assert "\n" not in sentence and all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("fake", "faults", "words"),
    [
        (
            "vllm",
            {"exchanges_experts": True},
            ("does not compute what the learner trained", "tokens that it was given"),
        ),
        ("vllm", {"keeps_old": True}, ("does not compute what the learner trained", "nothing was sampled")),
        (
            "vllm",
            {"stays_at": {"version": 4, "digest": "old", "instance": "old"}},
            ("wanted version 0", "it still has 4"),
        ),
        ("vllm", {"state": {"vocab_size": 11}}, ("wanted the run's model, vocab_size 12, got 11",)),
        ("vllm", {"state": {"max_tokens": 7}}, ("wanted a context of 9 tokens", "got 7")),
        ("vllm", {"state": {"dtype": "bfloat16"}}, ("wanted float32 (model.dtype), got bfloat16",)),
        ("vllm", {"state": {"logprobs_mode": "raw_logprobs"}}, ("wanted --logprobs-mode processed_logprobs",)),
        ("vllm", {"truncates": 3}, ("wanted the prompt that was sent", "truncated or tokenized again")),
        ("vllm", {"stops_early": True}, ("its context is shorter than prompt and completion",)),
        ("sglang", {"exchanges_experts": True}, ("does not compute what the learner trained", "that it was given")),
        ("sglang", {"keeps_old": True}, ("does not compute what the learner trained", "nothing was sampled")),
        ("sglang", {"flips_byte": True}, ("does not compute what the learner trained",)),
        ("sglang", {"stays_at": "gspax 4 old old"}, ("wanted version 0", "it still has 4")),
        ("sglang", {"stays_at": "default"}, ("wanted version 0", "it still has None")),
        ("sglang", {"state": {"context_length": 7}}, ("wanted a context of 9 tokens", "got 7")),
        ("sglang", {"state": {"dtype": "bfloat16"}}, ("wanted float32 (model.dtype), got bfloat16",)),
        ("sglang", {"truncates": 3}, ("wanted the prompt that was sent", "truncated or tokenized again")),
        ("sglang", {"stops_early": True}, ("its context is shorter than prompt and completion",)),
        ("vllm", {"ignores_filters": True}, ("which the filters exclude",)),
    ],
    indirect=["fake"],
)
def test_a_wrong_server_is_refused_before_it_samples(fake, faults, words):
    for name, value in faults.items():
        setattr(fake.faults, name, value)
    filters = {"top_k": 3, "mask_replay": 3} if "ignores_filters" in faults else {}
    runtime = make_runtime(served(fake, sampling=replace(experiment.sampling, **filters)))
    refuses(runtime, fresh(runtime), *words)
    bodies = [body.get("sampling_params", body) for path, body in fake.seen if path == fake.path]
    asked = [body for body in bodies if body.get("stop_token_ids")]
    assert not asked, "nothing was sampled for the run"


@both
def test_a_temperature_that_is_applied_twice_is_refused(fake):
    hot = served(fake, sampling=replace(experiment.sampling, temperature=0.5))
    runtime = make_runtime(hot)
    state = fresh(runtime)
    runtime.sampler.push(state.params, 0)
    fake.faults.temperatures = 2
    refuses(make_runtime(hot), fresh(runtime), "does not compute what the learner trained", "tokens that it sampled")
