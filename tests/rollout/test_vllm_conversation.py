"""The HTTP of vLLM: a conversation with the real server, replayed to our adapter and compared with the fake's."""

import json
from dataclasses import replace
from pathlib import Path

import fake_vllm
import numpy as np
from api import Answer, CompletionRequest, Written, http_client
from small_experiment import experiment

from gspax.config import Sampling
from gspax.rollout.servers import vllm

EXCHANGES = json.loads(Path(__file__).with_name("vllm_conversation.json").read_text())["exchanges"]
MODEL = replace(experiment.model, hidden_size=64, head_dim=32)
DIGEST = EXCHANGES[0]["answer"]["results"][0]["loaded"]["digest"]
ASK = CompletionRequest([1, 2, 3], 4, 5, Sampling(), False, (11,), True)
FILTERS = Sampling(temperature=0.8, top_k=5, top_p=0.6, min_p=0.05, mask_replay=5)
FILTERED = CompletionRequest([1, 2, 3], 4, 6, FILTERS, False, (), False, mask_size=5)


def talk(server):
    """The recorded exchange: a state, a push, a state, a score, samples with stop tokens, without, and with filters."""
    found = [server.state(5.0)]
    server.load(Written(Path("WEIGHTS"), 2, DIGEST, 0, 0.0))
    found += [server.state(5.0), server.score([1, 2, 3, 4, 5]), server.sample(ASK)]
    return [*found, server.sample(ASK._replace(seed=2**53 - 1, stop_ids=())), server.sample(FILTERED)]


def test_our_requests_and_what_we_read_are_those_of_the_recorded_conversation(monkeypatch):
    left = iter(EXCHANGES)

    def exchange(self, connection, call, end):
        recorded = next(left)
        sent, wanted = json.loads(json.dumps([call.body, recorded["body"]]))
        if sent and sent.get("method") == "gspax_load":
            sent["args"], wanted["args"] = sent["args"][:1], wanted["args"][:1]
        assert (call.path, sent) == (recorded["path"], wanted)
        return recorded["answer"]

    monkeypatch.setattr(http_client.Client, "_exchange", exchange)
    before, after, scores, stopped, whole, filtered = talk(vllm.VLLM("http://127.0.0.1:1", MODEL, 5.0))
    assert next(left, None) is None
    assert before.version == after.version == 2 and after.digest == DIGEST and before.instance != after.instance
    assert after.limits["vocab_size"] == 12 and after.dtype == "float32"
    assert scores.shape == (4,) and scores.dtype == np.float32 and (scores < 0).all()
    for answer in (stopped, whole):
        assert isinstance(answer, Answer) and answer.stopped == (answer.tokens[-1] == 11) == (answer is stopped)
        assert answer.expert_TLA.shape == (3 + len(answer.tokens) - 1, 2, 2)
    assert len(whole.tokens) == 4
    assert list(map(len, filtered.kept)) == [3, 3, 3, 3] and not any(filtered.cut)
    assert all(token in ids for token, ids in zip(filtered.tokens, filtered.kept, strict=True))


def shape_of(value):
    """A value with its leaves as the names of their types, and lists as that of their last element."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(value[-1])] if value else []
    return type(value).__name__


def test_the_fake_answers_as_the_real_server(tmp_path, monkeypatch):
    """Every key of the fake's answers is one of the real server's, with the same type."""
    monkeypatch.chdir(tmp_path)
    with fake_vllm.serve(experiment.model) as fake:
        fake.loaded = {"version": 1, "digest": "d", "instance": "i"}
        for recorded in EXCHANGES:
            path, body = recorded["path"].partition("?")[0], recorded["body"]
            if body and body.get("method") == "gspax_load":
                continue  # checked by the pushes of test_server_sampling.py
            ours, real = fake.answer(path, body), recorded["answer"]
            if path != "/v1/completions":
                assert shape_of(ours) == shape_of(real), path
                continue
            ours, real = ours["choices"][0], real["choices"][0]
            assert set(ours) <= set(real)
            experts = () if body.get("top_k") else ("routed_experts",)  # the last server was started without
            for key in ("token_ids", "finish_reason", "prompt_token_ids", *experts):
                assert shape_of(ours[key]) == shape_of(real[key]), key
            if body.get("top_k"):
                lengths = [set(map(len, each["logprobs"]["top_logprobs"])) for each in (ours, real)]
                assert lengths == [{5}, {5}]
            assert (ours["prompt_logprobs"] is None) == (real["prompt_logprobs"] is None)
