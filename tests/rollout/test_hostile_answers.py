"""Answers that no right server gives, by vLLM's and SGLang's adapters: each is one sentence, before it is used."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from api import CompletionRequest, RefusedError, UnreachableError, Written, http_client, longest_answer
from small_experiment import experiment

from gspax.config import Sampling
from gspax.rollout.servers import sglang, vllm

ADDRESS = "http://127.0.0.1:1"
MODEL = replace(experiment.model, hidden_size=64, head_dim=32)  # of the recorded conversation
ASK = CompletionRequest([1, 2, 3], 4, 5, Sampling(), False, (11,), True)
FILTERED = ASK._replace(keep_experts=False, mask_size=2)
WRITTEN = Written(Path("WEIGHTS"), 2, "digest", 0, 0.0)
EXPERTS = np.array([[[0, 3], [2, 1]]] * 5)
NOT_A_LOGP = [float("nan"), float("inf"), -float("inf"), 0.1, "-0.5", None, True, [], 10**400]
NOT_AN_ID = [12, -1, 1.7, 4.0, "4", None, True, 10**12, [4]]
WRONG = [None, [], {}, "x", 5, 1.5, True, [[]], {"a": None}]  # of any field


def npy(array, dtype="u1", header=None):
    file = io.BytesIO()
    np.save(file, np.asarray(array).astype(dtype))
    content = file.getvalue()
    if header is not None:  # of another array, before these numbers
        content = content[:8] + len(header).to_bytes(2, "little") + header.encode() + content[128:]
    return base64.b64encode(content).decode()


def spoil(array, index, value):
    changed = np.array(array, float)
    changed[index] = value
    return changed


HEADER = "{'descr': '%s', 'fortran_order': False, 'shape': %s}\n"
BAD_EXPERTS = {
    "negative": npy(spoil(EXPERTS, (0, 0, 0), -1), "i4"),
    "beyond": npy(spoil(EXPERTS, (0, 0, 0), 4)),
    "nan": npy(spoil(EXPERTS, (0, 0, 0), np.nan), "f4"),
    "fractions": npy(EXPERTS + 0.5, "f4"),
    "whole floats": npy(EXPERTS, "f4"),
    "bools": npy(EXPERTS, "?"),
    "twice": npy(spoil(EXPERTS, (4, 1, 0), 1)),
    "other shape": npy(EXPERTS[:, :, :1]),
    "fewer tokens": npy(EXPERTS[:4]),
    "more tokens": npy([*EXPERTS, EXPERTS[0]]),
    "a number": npy(3),
    "a header of 3 TB": npy(EXPERTS, header=HEADER % ("|u1", "(750000000000, 2, 2)")),
    "a header of 10^30": npy(EXPERTS, header=HEADER % ("<i8", f"({10**30}, 2, 2)")),
    "a negative header": npy(EXPERTS, header=HEADER % ("|u1", "(-5, -2, 2)")),
    "a deep header": npy(EXPERTS, header="-" * 9000 + "1"),
    "an object": npy(EXPERTS, header=HEADER % ("|O", "(5, 2, 2)")),
    "no file": "AAAA",
    "no base64": "ä" * 5,
    "none": None,
    "a list": [1, 2],
}
CHOICE = {
    "token_ids": [4, 2, 11],
    "finish_reason": "stop",
    "prompt_token_ids": [1, 2, 3],
    "logprobs": {"token_logprobs": [-2.0, -1.0, -0.5], "top_logprobs": [{"token_id:4": -2.0, "token_id:7": -1.0}] * 3},
    "routed_experts": npy(EXPERTS),
}
META = {
    "prompt_tokens": 3,
    "finish_reason": {"type": "stop", "matched": 11},
    "output_token_logprobs": [[-2.0, 4, None], [-1.0, 2, None], [-0.5, 11, None]],
    "routed_experts": base64.b64encode(EXPERTS.astype("<i4").tobytes()).decode(),
}
SCORES = [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": -2.0}}]
STATE = {
    "loaded": {"version": 2, "digest": "digest", "instance": "i"},
    "vocab_size": 12,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "max_tokens": 17,
    "dtype": "float32",
    "logprobs_mode": "processed_logprobs",
    "routed_experts": True,
}


@pytest.fixture
def answers(monkeypatch):
    """Adapters whose server answers each path, by a list of pairs, with the value at it."""

    def adapter(kind, by_path):
        monkeypatch.setattr(
            http_client.Client, "_exchange", lambda self, _, call, end: by_path[call.path.partition("?")[0]]
        )
        return kind(ADDRESS, MODEL, 5.0)

    return adapter


def refusal(call):
    """The sentence of an answer that is refused, or whose request is sent again: short and of one line."""
    with pytest.raises((RefusedError, UnreachableError)) as problem:
        call()
    sentence = str(problem.value)
    assert sentence.startswith(ADDRESS) and "\n" not in sentence and len(sentence) < 700, sentence
    return sentence


def of_vllm(choice):
    return {"/v1/completions": {"choices": [choice]}}


def changes(good):
    """Answers like a good one, each with one field left out or of another type."""
    for name in good:
        yield {key: value for key, value in good.items() if key != name}
        yield from ({**good, name: wrong} for wrong in WRONG if type(wrong) is not type(good[name]))


def test_the_answers_that_are_spoiled_below_are_good(answers):
    one = answers(vllm.VLLM, of_vllm(CHOICE))
    assert one.sample(ASK).tokens == [4, 2, 11] and one.sample(ASK).expert_TLA.tolist() == EXPERTS.tolist()
    fortran = of_vllm(CHOICE | {"routed_experts": npy(np.asfortranarray(EXPERTS))})
    assert answers(vllm.VLLM, fortran).sample(ASK).expert_TLA.tolist() == EXPERTS.tolist()
    other = answers(sglang.SGLang, {"/generate": {"meta_info": META}})
    assert other.sample(ASK).tokens == [4, 2, 11] and other.sample(ASK).expert_TLA.tolist() == EXPERTS.tolist()


@pytest.mark.parametrize("name", BAD_EXPERTS)
def test_experts(answers, name):
    assert "experts" in refusal(
        lambda: answers(vllm.VLLM, of_vllm(CHOICE | {"routed_experts": BAD_EXPERTS[name]})).sample(ASK)
    )


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (spoil(EXPERTS, (0, 0, 0), -1), "from -1 to 3"),
        (spoil(EXPERTS, (0, 0, 0), 4), "from 0 to 4"),
        (spoil(EXPERTS, (4, 1, 0), 1), "one of them twice"),
        (EXPERTS[:4], "wanted the experts of 5 tokens"),
        ([*EXPERTS] * 2, r"wanted the experts of 5 tokens"),
    ],
)
def test_experts_of_sglang(answers, experts, words):
    text = base64.b64encode(np.asarray(experts).astype("<i4").tobytes()).decode()
    one = answers(sglang.SGLang, {"/generate": {"meta_info": META | {"routed_experts": text}}})
    assert words in refusal(lambda: one.sample(ASK))


def test_token_ids_and_log_probs(answers):
    for bad in NOT_AN_ID:
        words = "as a token id, not an integer from 0 to 11"
        one = answers(vllm.VLLM, of_vllm(CHOICE | {"token_ids": [bad, 2, 11]}))
        assert words in refusal(lambda: one.sample(ASK))  # noqa: B023  (called at once)
        listed = META["output_token_logprobs"]
        other = answers(
            sglang.SGLang, {"/generate": {"meta_info": META | {"output_token_logprobs": [[-1.0, bad], *listed[1:]]}}}
        )
        assert words in refusal(lambda: other.sample(ASK))  # noqa: B023
    for bad in NOT_A_LOGP:
        words = "as a log-prob, not a finite number of at most 0"
        one = answers(vllm.VLLM, of_vllm(CHOICE | {"logprobs": {"token_logprobs": [-1.0, bad, -1.0]}}))
        assert words in refusal(lambda: one.sample(ASK))  # noqa: B023
        one = answers(vllm.VLLM, of_vllm(CHOICE | {"prompt_logprobs": [*SCORES[:2], {"3": {"logprob": bad}}]}))
        assert words in refusal(lambda: one.score([1, 2, 3]))  # noqa: B023
        entries = [{"token_id:4": -2.0, "token_id:7": bad}] * 3
        logprobs = CHOICE["logprobs"] | {"top_logprobs": entries}
        assert words in refusal(lambda: answers(vllm.VLLM, of_vllm(CHOICE | {"logprobs": logprobs})).sample(FILTERED))  # noqa: B023
        other = answers(sglang.SGLang, {"/generate": {"meta_info": META | {"output_token_logprobs": [[bad, 4]] * 3}}})
        assert words in refusal(lambda: other.sample(ASK))  # noqa: B023
        meta = META | {"input_token_logprobs": [[None, 1], [-1.0, 2], [bad, 3]]}
        other = answers(sglang.SGLang, {"/generate": {"meta_info": meta}})
        assert words in refusal(lambda: other.score([1, 2, 3]))  # noqa: B023


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"token_ids": [4, 2], "routed_experts": npy(EXPERTS[:4])},
            "wanted 1 to 4 tokens with a log-prob each, got 2 and 3",
        ),
        ({"token_ids": [], "routed_experts": npy(EXPERTS[:2])}, "a log-prob each, got 0 and 3"),
        ({"token_ids": [4, 11, 11]}, "wanted no token after a stop token, got one after 11"),
        ({"finish_reason": "length"}, "wanted 4 tokens or a stop token at the end, got 3 tokens"),
        ({"finish_reason": "content_filter"}, "got 'content_filter' as finish_reason"),
        ({"finish_reason": "abort"}, "the request was aborted"),
        ({"prompt_token_ids": [2, 3]}, "wanted the prompt that was sent, 3 tokens, got 2"),
    ],
)
def test_answers_to_other_requests(answers, change, words):
    assert words in refusal(lambda: answers(vllm.VLLM, of_vllm(CHOICE | change)).sample(ASK))


@pytest.mark.parametrize(
    "entry",
    [None, 5, {"4": "x"}, {"token_id:12": -1.0}, {"token_id:-1": -1.0}, {"token_id:": 0}, {}, {"token_id:7": -1.0}],
)
def test_sets_of_tokens(answers, entry):
    logprobs = CHOICE["logprobs"] | {"top_logprobs": [entry] * 3}
    refusal(lambda: answers(vllm.VLLM, of_vllm(CHOICE | {"logprobs": logprobs})).sample(FILTERED))


def test_no_field_of_another_type_is_more_than_a_sentence(answers):
    """Every field of every answer that is read, left out or of each other type."""
    for choice in changes(CHOICE):
        refusal(lambda: answers(vllm.VLLM, of_vllm(choice)).sample(ASK))  # noqa: B023
    for choice in changes({"prompt_token_ids": [1, 2, 3], "prompt_logprobs": SCORES}):
        refusal(lambda: answers(vllm.VLLM, of_vllm(choice)).score([1, 2, 3]))  # noqa: B023
    for meta in changes(META):
        refusal(lambda: answers(sglang.SGLang, {"/generate": {"meta_info": meta}}).sample(ASK))  # noqa: B023
    for state in changes(STATE):
        if state.get("loaded", 0) is not None:
            refusal(lambda: answers(vllm.VLLM, {"/collective_rpc": {"results": [state]}}).state(1.0))  # noqa: B023
    for loaded in changes(STATE["loaded"]):
        state = STATE | {"loaded": loaded}
        refusal(lambda: answers(vllm.VLLM, {"/collective_rpc": {"results": [state]}}).state(1.0))  # noqa: B023
    rest = {"/pause": None, "/resume": None, "/update_weight_version": None, "/reset_prefix_cache": {"success": True}}
    answers(vllm.VLLM, rest | {"/collective_rpc": [STATE["loaded"]]}).load(WRITTEN)
    for loaded in changes({"version": 2, "digest": "digest"}):
        refusal(lambda: answers(vllm.VLLM, rest | {"/collective_rpc": [loaded]}).load(WRITTEN))  # noqa: B023
    for wrong in WRONG:
        for call in (lambda one: one.sample(ASK), lambda one: one.score([1, 2, 3])):
            refusal(lambda: call(answers(vllm.VLLM, {"/v1/completions": wrong})))  # noqa: B023
            refusal(lambda: call(answers(sglang.SGLang, {"/generate": wrong})))  # noqa: B023
        refusal(lambda: answers(vllm.VLLM, {"/collective_rpc": wrong}).state(1.0))  # noqa: B023
        pushed = rest | {"/collective_rpc": [STATE["loaded"]], "/reset_prefix_cache": wrong}
        refusal(lambda: answers(vllm.VLLM, pushed).load(WRITTEN))  # noqa: B023
        refusal(lambda: answers(sglang.SGLang, {"/get_model_info": wrong, "/get_server_info": {}}).state(1.0))  # noqa: B023
        paused = {"/pause_generation": None, "/update_weights_from_disk": wrong}
        refusal(lambda: answers(sglang.SGLang, paused).load(WRITTEN))  # noqa: B023


def test_a_version_of_a_million_digits_is_none_of_ours(answers):
    label = f"gspax {'9' * 10**6} digest instance"
    one = answers(sglang.SGLang, {"/get_model_info": {"weight_version": label}, "/get_server_info": {}})
    assert one.state(1.0).version is None


def test_an_answer_may_be_as_long_as_what_was_asked_for():
    """A generous answer: experts of 64 bits, and 20 most probable tokens of each."""
    ask = ASK._replace(tokens=[1] * 2000, max_tokens=2000, stop_ids=(), mask_size=20)
    entry = {f"token_id:{10**5 + number}": -12.345678901234567 for number in range(21)}
    answer = {
        "token_ids": [100000] * ask.max_tokens,
        "prompt_token_ids": [100000] * 2000,
        "logprobs": {
            "token_logprobs": [-12.345678901234567] * ask.max_tokens,
            "tokens": ["token_id:100000"] * ask.max_tokens,
        },
        "top_logprobs": [entry] * ask.max_tokens,
        "routed_experts": npy(np.zeros((4000, 2, 2)), "i4"),
    }
    size = len(json.dumps(answer))
    assert size < longest_answer(MODEL, 2000, 2000, 20) - http_client.SMALL < 4 * size
