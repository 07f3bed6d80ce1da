"""`gspax serve`: answers are what the sampler samples for each request alone, cut where the request says."""

import queue
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
from api import make_inference_weights, make_options, sample

from gspax.config import Sampling
from gspax.data import CharChat
from gspax.rollout.agents.openai import Refusal, read_chat, read_completion
from gspax.tools.desk import Desk, sample_orders
from gspax.tools.policy import LoadedPolicy

KEY = jax.random.key(5)
CHAT = CharChat("abcdefghijklmnopqrst#", user="{}#")
SAMPLING = Sampling(max_prompt_tokens=8, max_tokens=20)
MODEL = tiny.CONFIGS["dense"]


@pytest.fixture(scope="module")
def policy():
    weights = make_inference_weights(tiny.params(MODEL), MODEL, tiny.one_device())
    return LoadedPolicy(weights, MODEL, CHAT, SAMPLING, tiny.one_device(), None)


def greedy(policy, prompt):
    """The tokens and log-probs of one prompt alone."""
    options = make_options(MODEL, CHAT, replace(SAMPLING, prompts=1, group=1, temperature=0.0), policy.mesh)
    rollout = jax.device_get(sample(policy.weights, [prompt], [0], KEY, options))
    kept = slice(len(prompt), len(prompt) + rollout.length_B[0])
    return rollout.tokens_BT[0, kept].tolist(), rollout.logp_BT[0, kept]


def answers(policy, *requests):
    """The answers to requests that are sampled together."""
    desk = Desk(policy, queue.SimpleQueue())
    futures = [desk.ask(request) for request in requests]
    sample_orders(policy, [desk.orders.get_nowait() for _ in requests], KEY, 0)
    return [future.result(timeout=0) for future in futures]


def chat(text, **fields):
    return read_chat({"messages": [{"role": "user", "content": text}], **fields}, "policy")


def test_requests_together_get_what_each_gets_alone(policy):
    """A chat, a text, token ids, and a shorter answer, decoded greedily."""
    asked = {"temperature": 0}
    together = answers(
        policy,
        chat("abc", logprobs=True, **asked),
        read_completion({"prompt": "hello", **asked}, "policy"),
        read_completion({"prompt": [3, 4, 5], **asked}, "policy"),
        chat("abc", max_tokens=2, **asked),
    )
    tokens, logps = greedy(policy, CHAT.encode("abc"))
    assert together[0].content == CHAT.decode(tokens) and together[0].written == len(tokens)
    np.testing.assert_allclose([logp for _, logp in together[0].logps], logps, atol=1e-5)
    assert together[0].finish == ("stop" if tokens[-1] in CHAT.stop_ids else "length")
    assert together[1].content == CHAT.decode(greedy(policy, CHAT.encode_completion("hello"))[0])
    assert together[2].content == CHAT.decode(greedy(policy, [3, 4, 5])[0]) and together[2].read == 3
    assert together[3].content == CHAT.decode(tokens[:2]) and together[3].finish == "length"


def test_a_stop_string_ends_an_answer_before_it(policy):
    whole = CHAT.decode(greedy(policy, CHAT.encode("abc"))[0])
    assert len(whole) > 4
    (answered,) = answers(policy, chat("abc", temperature=0, stop=[whole[2:4]]))
    assert answered.content == whole[: whole.index(whole[2:4])] and answered.finish == "stop"


def test_what_does_not_fit_is_refused(policy):
    desk = Desk(policy, queue.SimpleQueue())
    for request, sentence in (
        (chat("abcdefgh"), r"wanted a prompt of 1 to 8 tokens \(--context less --max-tokens\), got 9"),
        (read_completion({"prompt": [99]}, "policy"), "prompt: wanted ids below 23, got 99"),
        (chat("abc", tools=[{"type": "function", "function": {"name": "f"}}]), "tools: wanted none"),
    ):
        with pytest.raises(Refusal, match=sentence):
            desk.ask(request)
    assert desk.orders.empty()
