"""Agents: their rollouts token by token, the endpoint that they talk to, and what it refuses."""

import asyncio
import json
import queue
import socket
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import calculations
import fake_vllm
import jax
import numpy as np
import pytest
from api import InFlight, Rollout, grade, init_state, loop, make_runtime, next_rollout, read_rows
from chat_templates import PUBLISHED, write_folder
from few_devices import few_devices
from small_experiment import Countdown
from small_experiment import experiment as small

from gspax import advantages
from gspax.config import Engine, Evaluation, Sampling, Turns
from gspax.data import CharChat, Problem, hf_chat
from gspax.experiment import validate
from gspax.rewards.environments import Agent, Command, calculator, parse_brackets
from gspax.rollout.agents import openai as protocol
from gspax.rollout.agents.conversation import Conversation, Limits
from gspax.rollout.agents.openai import Refusal
from gspax.rollout.agents.sequences import with_sequences

# --- conversations, without HTTP -------------------------------------------------------------------------------------

CHAT = CharChat("0123456789+-=?[]abc", user="{}?", tool="={}")


def chat(*messages, **fields):
    roles = ("user", "assistant")
    given = [m if isinstance(m, dict) else {"role": roles[i % 2], "content": m} for i, m in enumerate(messages)]
    return protocol.read_chat({"model": "policy", "messages": given, **fields}, "policy")


def converse(*, max_tokens=32, limit=4, sampling=None, tokenizer=CHAT):
    """A conversation, the turns that it asks for, and a function that answers the next one with a text."""
    sampling = sampling or Sampling(max_prompt_tokens=8, max_tokens=max_tokens)
    interaction = SimpleNamespace(
        agent=Agent(run=print), tokenizer=tokenizer, turns=Turns(limit=limit), sampling=sampling
    )
    turns = queue.SimpleQueue()
    limits = Limits(sampling, tokenizer.stop_ids, tokenizer.vocab_size)
    talk = Conversation(0, Problem("1+2"), interaction, limits, turns.put)

    def answer(text, *, stops=True):
        turn = turns.get_nowait()
        tokens = [*tokenizer.encode_completion(text), *([tokenizer.turn_end] if stops else [])]
        talk.take(tokens, [-0.5] * len(tokens))
        return turn

    return talk, turns, answer


def test_a_request_adds_only_the_tokens_of_its_new_messages():
    talk, _, answer = converse()
    first = talk.ask(chat("1+2"))
    assert answer("[1+2]").tokens == CHAT.encode("1+2")
    assert first.result().content == "[1+2]" and first.result().finish == "stop"
    talk.ask(chat("1+2", " [1+2]\n", "=3"))  # a client may have stripped the policy's message, or padded it
    turn = answer("3")
    assert turn.tokens == CHAT.encode_reply([{"role": "user", "content": "=3"}]) and not turn.first
    assert talk.spans == [(0, 6), (6 + len(turn.tokens), 6 + len(turn.tokens) + 2)]
    assert "".join(talk.texts) == "1+2[1+2]=33"


def test_the_turn_that_a_limit_cut_is_ended_before_the_reply():
    talk, _, answer = converse()
    talk.ask(chat("1", max_tokens=2))
    assert answer("12", stops=False).most == 2
    talk.ask(chat("1", "12", "3"))
    assert answer("4").tokens == [CHAT.turn_end, *CHAT.encode_reply([{"role": "user", "content": "3"}])]
    assert not talk.cut


@pytest.mark.parametrize("second", [chat("2", "[1+2]", "3"), chat("1+2", "[1+3]", "3"), chat("1+2")])
def test_a_changed_history_begins_another_sequence(second):
    talk, _, answer = converse(sampling=Sampling(max_prompt_tokens=20, max_tokens=64))
    talk.ask(chat("1+2"))
    answer("[1+2]")
    talk.ask(second)
    turn = answer("4")
    assert turn.first and turn.tokens == CHAT.encode_chat(second.messages)
    start = 6 + len(turn.tokens)  # spans count from the end of the first prompt
    assert talk.spans == [(0, 6), (start, start + 2)]


def test_a_request_may_go_on_from_any_earlier_answer():
    """Its tokens are those that were sampled; an answer further on is not in them."""
    talk, _, answer = converse(sampling=Sampling(max_prompt_tokens=20, max_tokens=64))
    talk.ask(chat("1+2"))
    answer("12")
    talk.ask(chat("1+2", "12", "3"))
    assert not answer("45").first
    talk.ask(chat("1+2", "12", "9"))
    turn = answer("6")
    reply = list(CHAT.encode_reply([{"role": "user", "content": "9"}]))
    assert turn.first and turn.tokens == [*CHAT.encode("1+2"), *CHAT.encode_completion("12"), CHAT.turn_end, *reply]
    talk.ask(chat("1+2", "12", "3", "45", "1"))  # back in the first one
    third = answer("7")
    assert third.first and third.tokens[: len(turn.tokens) - len(reply)] == turn.tokens[: -len(reply)]


def test_requests_wait_for_each_other_and_a_retry_gets_the_same_answer():
    talk, turns, answer = converse(max_tokens=64)
    first = talk.ask(chat("1+2"))
    assert talk.ask(chat("1+2"), again=True) is first
    answer("3")
    assert talk.ask(chat("1+2"), again=True) is first and turns.empty()
    talk.ask(chat("1+2", "3", "4"))
    waiting = talk.ask(chat("1+2", "3", "5"))
    assert not answer("6").first and not waiting.done()
    assert answer("7").first and waiting.result().content == "7"


def test_limits_of_turns_and_tokens_are_refusals_but_no_failures():
    talk, _, answer = converse(limit=1)
    talk.ask(chat("1"))
    answer("2")
    with pytest.raises(Refusal, match=r"wanted at most 1 requests in a rollout \(turns.limit\)"):
        talk.ask(chat("1", "2", "3"))
    assert talk.limited
    talk, _, answer = converse(max_tokens=6)
    with pytest.raises(Refusal, match=r"at most 8 tokens in the first request \(sampling.max_prompt_tokens\), got 10"):
        talk.ask(chat("123456789"))
    talk.ask(chat("1"))
    answer("2")
    with pytest.raises(Refusal, match=r"wanted at most 5 tokens .* \(sampling.max_tokens\), got 7") as refused:
        talk.ask(chat("1", "2", "1234"))
    assert refused.value.body["error"]["code"] == "context_length_exceeded"
    talk.ask(chat("1", "2", "3"))
    assert answer("4", stops=False).most == 2


def test_a_closed_conversation_refuses_and_frees_who_waits():
    talk, _, _ = converse()
    waiting = talk.ask(chat("1"))
    talk.close()
    with pytest.raises(Refusal, match="has ended"):
        waiting.result()
    with pytest.raises(Refusal, match="has ended") as refused:
        talk.ask(chat("1"))
    assert refused.value.status == 401


def test_completions_continue_a_text():
    own = Sampling(max_prompt_tokens=8, max_tokens=32, stop=("=",))
    talk, _, answer = converse(sampling=own)

    def ask(text, **fields):
        return talk.ask(protocol.read_completion({"prompt": text, "stop": "=", **fields}, "policy"))

    first = ask("12", logprobs=1)
    answer("3=", stops=False)
    assert first.result().content == "3" and first.result().logps[0] == ("3", -0.5)
    ask("123=4")  # the client adds the stop string, which the policy has written
    assert answer("5").tokens == CHAT.encode_completion("4")
    ask("12")
    assert answer("5").first


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'


def test_calls_are_those_of_the_template_and_their_results_are_its_replies(tmp_path):
    pytest.importorskip("transformers")
    tokenizer = hf_chat(write_folder(tmp_path, PUBLISHED["Qwen3"]))
    tools = [calculator().schema()]
    talk, _, answer = converse(sampling=Sampling(max_prompt_tokens=2000, max_tokens=2000), tokenizer=tokenizer)
    first = talk.ask(chat("6*7", tools=tools))
    written = f"<think>\nhm\n</think>\n\nLet me see. {CALL}"
    assert answer(written).tokens == tokenizer.encode_chat([{"role": "user", "content": "6*7"}], tools)
    message = protocol.chat_body(first.result(), {})["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "6*7"}'}
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "hm")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "42<|im_end|>"}
    again = call | {
        "function": {"name": "calculator", "arguments": '{"expression":"6*7"}'}
    }  # as other clients write it
    talk.ask(chat("6*7", message | {"audio": None, "tool_calls": [again]}, result, tools=tools))
    expected = tokenizer.encode_reply([{"role": "tool", "content": "42<|im_end|>", "name": "calculator"}])
    assert answer("42").tokens == expected
    talk.ask(chat("6*7", message, result, "42", "and?", tools=[]))
    assert answer("42").first, "without the tools the prompt is another one"


TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model": "gpt-4o"}, "model: wanted 'policy', the policy, got 'gpt-4o'"),
        ({"n": 2}, "n: wanted 1 or none, got 2"),
        ({"logit_bias": {"5": 1}}, 'logit_bias: wanted {} or none, got {"5": 1}'),
        ({"temperature": 0.2}, "temperature: wanted 1 (sampling.temperature, the run's own) or none, got 0.2"),
        ({"stop": ["a"]}, "stop: wanted texts of sampling.stop, the run's own (there are none), got 'a'"),
        ({"tools": TOOLS}, "tools: wanted none, because the policy's chat template writes no tools"),
        ({"tool_choice": "required"}, 'tool_choice: wanted "auto" or none, got "required"'),
        ({"response_format": {"type": "json_object"}}, 'response_format: wanted {"type": "text"} or none'),
        ({"top_logprobs": 5}, "top_logprobs: wanted 0 or none, got 5"),
        ({"max_tokens": 0}, "max_tokens: wanted an integer from 1 to 2147483648, got 0"),
        ({"functions": []}, "functions: wanted a field that gspax serves, got this one"),
        ({"messages": []}, "messages: wanted a list with at least one message, got []"),
        ({"messages": [{"role": "critic", "content": "1"}]}, "messages[0]: wanted a message with one of the roles"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            'messages[0].content: wanted text, which is all that the policy reads, got "image_url"',
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(fields, sentence):
    talk, turns, _ = converse()
    body = {"model": "policy", "messages": [{"role": "user", "content": "1"}], **fields}
    with pytest.raises(Refusal) as refused:
        talk.ask(protocol.read_chat(body, "policy"))
    assert str(refused.value).startswith(sentence) and turns.empty()
    assert refused.value.body["error"]["message"] == str(refused.value)


def test_what_does_not_fit_an_agent_is_refused_at_the_dry_run():
    agent = Agent(run=print)
    pairs = [
        {"sampling": replace(COUNTING.sampling, noise="problem")},
        {"sampling": replace(COUNTING.sampling, drafts=2)},
    ]
    for changes in pairs:
        assert any("beside an Agent" in each for each in validate(replace(COUNTING, environment=agent, **changes)))
    assert not [each for each in validate(replace(COUNTING, environment=agent)) if "Agent" in each]
    assert any("timeout" in each for each in validate(replace(COUNTING, environment=Agent(run=print, timeout=0))))


# --- rollouts --------------------------------------------------------------------------------------------------------

COUNTING = replace(
    small,
    model=replace(small.model, num_hidden_layers=1),
    environment=Countdown(),
    tokenizer=CharChat(small.tokenizer.alphabet),
    warm_start=None,
    turns=Turns(limit=3),
    sampling=Sampling(prompts=8, group=4, max_prompt_tokens=4, max_tokens=24),
)


def post(endpoint, path, body):
    """Ask as any client does; return the answer, or the error's body."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.base_url}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as problem:
        return json.loads(problem.read())


def count_down(problem, endpoint):
    """What `Countdown` replies, as a program of its own."""
    left, messages = int(problem.prompt[:-1]) % 3, [{"role": "user", "content": problem.prompt}]
    while True:
        answer = post(endpoint, "/chat/completions", {"model": "policy", "messages": messages})
        if "error" in answer:
            assert "turns.limit" in answer["error"]["message"] or "max_tokens" in answer["error"]["message"]
            return None
        messages.append(answer["choices"][0]["message"])
        if left == 0:
            return None
        messages.append({"role": "user", "content": str(left)})
        left -= 1


def need_extra():
    for name in ("starlette", "uvicorn"):
        pytest.importorskip(name, reason="the extra `agents` is not installed")


def sample_once(experiment):
    """The first rollout of an experiment, on the host, and its completions."""
    need_extra()
    runtime = make_runtime(experiment)
    state = init_state(experiment.model, runtime.optimizer, jax.random.key(0), runtime.mesh)
    with runtime.interaction.steps, runtime.rewards:
        batch = next_rollout(runtime, state, InFlight())
        return jax.device_get(batch.rollout), grade(runtime, batch).completions


def test_an_agent_samples_what_the_environment_samples_that_replies_the_same():
    """Tokens, mask, experts and rewards; log-probs up to rounding: each prompt of a group is run by itself."""
    ours, graded = sample_once(replace(COUNTING, environment=Agent(run=count_down), routing_replay="sampler"))
    theirs, expected = sample_once(replace(COUNTING, routing_replay="sampler"))
    for name in ("tokens_BT", "mask_BT", "length_B", "reply_B", "prompt_length_B", "finished_B", "expert_BLTA"):
        width = getattr(ours, name).shape
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=f"{name} {width}")
    np.testing.assert_allclose(ours.logp_BT, theirs.logp_BT, atol=1e-5)
    assert max(len(each.turns.spans) for each in graded) > 1, "conversations of several turns"
    assert [each.rewards for each in graded] == [each.rewards for each in expected]
    assert [each.turns.spans for each in graded] == [each.turns.spans for each in expected]
    assert not any(each.error for each in graded)


TRAINED = replace(
    COUNTING,
    sampling=replace(COUNTING.sampling, prompts=8, group=4),
    schedule=replace(COUNTING.schedule, steps=1, eval_every=1, checkpoint_every=1),
    evaluation=Evaluation(problems=8),
)


def ask(endpoint, *messages, **fields):
    given = [{"role": "user", "content": text} if isinstance(text, str) else text for text in messages]
    return post(endpoint, "/chat/completions", {"model": "policy", "messages": given, **fields})


class Numbered:
    """Problems that know their number."""

    def train(self, index):
        return Problem(prompt="321=", answer="123", metadata={"number": index})

    heldout = train


class Misbehaved:
    """One program for each row of a rollout, which does what its name says."""

    def __init__(self):
        self.errors, self.keys, self.free = {}, [], threading.Event()
        self.kinds = [name for name in vars(type(self)) if not name.startswith("_")]

    def __call__(self, problem, endpoint):
        self.keys.append(endpoint)
        return getattr(self, self.kinds[problem.metadata["number"]])(problem.prompt, endpoint)

    def never_asks(self, prompt, endpoint):
        return 1.0

    def raises(self, prompt, endpoint):
        ask(endpoint, prompt)
        raise KeyError("tool")

    def is_late(self, prompt, endpoint):
        ask(endpoint, prompt)
        self.free.wait(60)
        self.errors["late"] = ask(endpoint, prompt)

    def asks_too_often(self, prompt, endpoint):
        messages = [{"role": "user", "content": prompt}]
        for _ in range(20):
            answer = ask(endpoint, *messages, max_tokens=2)
            if "error" not in answer:
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "1"}]
        self.errors["often"] = answer

    def branches(self, prompt, endpoint):
        ask(endpoint, prompt)
        self.errors["branch"] = ask(endpoint, "12")
        return 1.0

    def returns_a_reward(self, prompt, endpoint):
        """Vanish amid the body of a request first."""
        address = urllib.parse.urlsplit(endpoint.base_url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {endpoint.api_key}\r\n"
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        ask(endpoint, prompt)
        return {"speed": 0.25}

    def returns_an_answer(self, prompt, endpoint):
        ask(endpoint, prompt)
        return "".join(sorted(prompt[:-1]))

    def returns_something_else(self, prompt, endpoint):
        ask(endpoint, prompt)
        return object()


def test_what_programs_do_wrong_fails_their_own_rollouts_in_a_sentence(caplog):
    agent = Misbehaved()
    experiment = replace(
        COUNTING,
        sampling=replace(COUNTING.sampling, prompts=8, group=1),
        advantage=advantages.reinforce_plus_plus,
        grading=replace(COUNTING.grading, max_failed=1),
        data=Numbered(),
        environment=Agent(run=agent, timeout=10.0),
    )
    rollout, graded = sample_once(experiment)
    assert not caplog.records, "of a client that has gone"
    by_kind = dict(zip(agent.kinds, graded, strict=True))
    errors = {kind: each.error for kind, each in by_kind.items()}
    assert errors["never_asks"] == "the agent ended without an answer of the policy"
    assert (
        errors["raises"].startswith("KeyError: 'tool' (")
        and "late: no answer after 10 s (environment.timeout)" in errors["is_late"]
    )
    assert errors["returns_something_else"].startswith("wanted a number, a tuple or a mapping of numbers, got <object")
    fine = ("asks_too_often", "branches", "returns_a_reward", "returns_an_answer")
    assert not any(errors[kind] for kind in fine), errors
    assert {each.blamed for each in graded if each.error} == {"environment: the agent"}
    assert by_kind["returns_a_reward"].reward == 0.25 and by_kind["returns_an_answer"].reward == 1.0
    assert len(by_kind["asks_too_often"].turns.spans) == 3 and not by_kind["asks_too_often"].finished
    assert "turns.limit" in agent.errors["often"]["error"]["message"]
    assert not rollout.mask_BT[agent.kinds.index("never_asks")].any() and rollout.mask_BT.any(axis=1).sum() == 7
    assert len({each.api_key for each in agent.keys}) == 8
    agent.free.set()  # the endpoint is gone


def test_keys_open_their_own_rollouts_alone():
    errors = {}

    async def knock(problem, endpoint):
        loop = asyncio.get_running_loop()
        wrong = endpoint._replace(api_key="another")
        errors["key"] = await loop.run_in_executor(None, ask, wrong, problem.prompt)
        errors["path"] = await loop.run_in_executor(None, post, endpoint, "/embeddings", {})
        errors["json"] = await loop.run_in_executor(None, post, endpoint, "/completions", [1])
        answer = await loop.run_in_executor(None, lambda: ask(endpoint, problem.prompt, logprobs=True, max_tokens=1))
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])

    rollout, graded = sample_once(
        replace(
            COUNTING,
            sampling=replace(COUNTING.sampling, prompts=8, group=1),
            advantage=advantages.reinforce_plus_plus,
            environment=Agent(run=knock),
        )
    )
    assert errors["key"]["error"] == {
        "message": "wanted the key of a rollout, got another one",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }
    assert errors["path"]["error"]["message"].endswith("got POST /v1/embeddings")
    assert errors["json"]["error"]["message"] == "the body: wanted a JSON object, got [1]"
    assert (rollout.mask_BT.sum(axis=1) == 1).all(), "max_tokens of the request"
    np.testing.assert_allclose([each.reward for each in graded], rollout.logp_BT.sum(axis=1), atol=1e-6)


PROGRAM = """
import json, os, sys, urllib.request
prompt = json.loads(sys.stdin.readline())["prompt"]
messages = [{"role": "user", "content": prompt}]
body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 2}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
json.load(urllib.request.urlopen(request))
print("".join(sorted(prompt[:-1])))
sys.exit(3 if prompt[0] > prompt[1] else 0)
"""


def test_a_program_gets_the_address_in_its_environment():
    _, graded = sample_once(
        replace(
            COUNTING,
            sampling=replace(COUNTING.sampling, prompts=8, group=1),
            advantage=advantages.reinforce_plus_plus,
            grading=replace(COUNTING.grading, max_failed=1),
            environment=Agent(run=Command((sys.executable, "-c", PROGRAM))),
        )
    )
    for each in graded:
        fails = each.texts.prompt[0] > each.texts.prompt[1]
        assert each.reward == (0.0 if fails else 1.0) and ("wanted the exit code 0, got 3" in each.error) == fails
    assert {bool(each.error) for each in graded} == {True, False}


def delegate(problem, endpoint):
    """Ask, let a copy of itself do a part, go on from the first answer, and begin again with less."""
    said = ask(endpoint, problem.prompt, max_tokens=4)["choices"][0]["message"]
    ask(endpoint, problem.prompt[1:], max_tokens=4)
    ask(endpoint, problem.prompt, said, "1", max_tokens=4)
    ask(endpoint, problem.prompt[:1] + "=", max_tokens=4)


DELEGATED = replace(
    TRAINED,
    environment=Agent(run=delegate),
    turns=Turns(limit=4),
    sampling=Sampling(prompts=4, group=2, max_prompt_tokens=16, max_tokens=32),
    evaluation=Evaluation(problems=1),
    reward=lambda problem, completion: float(len(set(completion))),
)


def test_a_rollout_of_several_sequences_has_each_in_its_place():
    with few_devices(1):
        rollout, graded = sample_once(replace(DELEGATED, routing_replay="sampler"))
    assert not any(each.error for each in graded)
    tokenizer = COUNTING.tokenizer
    for row, each in enumerate(graded):
        number_T, tokens_T, mask_T = (x[row] for x in (rollout.sequence_BT, rollout.tokens_BT, rollout.mask_BT))
        starts = np.flatnonzero(np.diff(number_T, prepend=0) > 0)
        assert number_T.max() == 4 and not mask_T[starts].any()
        first, third = (tokens_T[number_T == number] for number in (1, 3))
        np.testing.assert_array_equal(third[: len(first)], first, err_msg="the tokens that were sampled")
        assert not mask_T[number_T == 3][: len(first)].any()
        prompt = tokenizer.decode(tokens_T[number_T == 1][: rollout.prompt_length_B[row]].tolist())
        assert tokenizer.decode(tokens_T[number_T == 2].tolist()).startswith(prompt[1:])
        spans = np.zeros_like(mask_T)
        for start, end in each.turns.spans:
            spans[rollout.prompt_length_B[row] + start : rollout.prompt_length_B[row] + end] = True
        np.testing.assert_array_equal(spans, mask_T)
        assert rollout.reply_B[row] == rollout.length_B[row] - mask_T.sum()
        known_T = (rollout.expert_BLTA[row] < COUNTING.model.num_experts).all(axis=(0, 2))
        ends = np.append(starts[1:], (number_T > 0).sum()) - 1
        np.testing.assert_array_equal(known_T, (number_T > 0) & ~np.isin(np.arange(len(number_T)), ends))


def test_a_run_trains_on_several_sequences_as_if_each_stood_alone(tmp_path):
    """The learner's log-probs are the sampler's; packed rows with shared prefixes take the same step."""
    need_extra()
    steps = {}
    for name, packing in {"rows": {}, "shared": {"microbatch_tokens": 256, "share_prompts": True}}.items():
        schedule = replace(DELEGATED.schedule, eval_every=0, **packing)
        experiment = replace(DELEGATED, schedule=schedule)
        assert not validate(experiment)
        with few_devices(1):
            loop.train(experiment, tmp_path / name)
        (steps[name],) = [row for row in read_rows(tmp_path / name / "metrics.jsonl") if "policy/loss" in row]
        assert steps[name]["mismatch/abs_diff"] < 1e-4 and steps[name]["optim/grad_norm"] > 0
    assert steps["shared"]["learner/tokens"] < 0.9 * steps["rows"]["learner/tokens"]
    for metric in ("policy/loss", "optim/grad_norm", "reward/mean", "policy/entropy"):
        np.testing.assert_allclose(steps["shared"][metric], steps["rows"][metric], rtol=1e-3, atol=1e-5, err_msg=metric)


def react(tool):
    """A loop as users of `openai` write it: act until there is no call."""
    openai = pytest.importorskip("openai", reason="the client `openai` is not installed")

    async def run(problem, endpoint):
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        assert [model.id async for model in client.models.list()] == [endpoint.model]
        messages = [{"role": "user", "content": problem.prompt}]
        for _ in range(4):
            answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
            message = answer.choices[0].message
            calls = parse_brackets(message.content)
            if answer.choices[0].finish_reason == "length" or not calls:
                break
            messages.append(message)
            for call in calls:
                try:
                    messages.append({"role": "tool", "content": tool(**call.arguments), "tool_call_id": "1"})
                except Exception:
                    messages.append({"role": "tool", "content": "!", "tool_call_id": "1"})
        return message.content

    return run


def test_a_run_trains_and_evaluates_a_react_loop_of_openais_client(tmp_path):
    """The policy is untrained; the advantages come from a reward that differs, the log-probs are the learner's."""
    experiment = replace(
        TRAINED,
        data=calculations.Problems(),
        tokenizer=calculations.tokenizer,
        model=replace(COUNTING.model, vocab_size=calculations.tokenizer.vocab_size),
        environment=Agent(run=react(calculator().run)),
        turns=Turns(limit=4),
        sampling=replace(TRAINED.sampling, max_prompt_tokens=12, max_tokens=32),
        reward=lambda problem, completion: float(len(set(completion))),
    )
    need_extra()
    assert not validate(experiment)
    loop.train(experiment, tmp_path)
    rows = read_rows(tmp_path / "metrics.jsonl")
    (step,) = [row for row in rows if "policy/loss" in row]
    assert step["mismatch/abs_diff"] < 1e-4 and step["reward/failed"] == 0 and step["reward/std"] > 0
    assert step["rollout/turns_max"] > 1 and step["rollout/reply_tokens"] > 0
    assert step["optim/skipped"] == 0 and step["optim/grad_norm"] > 0
    assert all(row["eval/reward"] > 0 and row["eval/reward_failed"] == 0 for row in rows if "eval/reward" in row)


def test_streams_and_errors_are_what_openais_client_reads():
    openai = pytest.importorskip("openai", reason="the client `openai` is not installed")
    seen = {}

    def run(problem, endpoint):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        user = {"role": "user", "content": problem.prompt}
        for name, fields in REFUSED.items():
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**{"model": "policy", "messages": [user], **fields})
            seen[name] = refused.value.body["message"]
        with pytest.raises(openai.NotFoundError, match="model: wanted 'policy'"):
            client.chat.completions.create(model="gpt-4o", messages=[user])
        stream = client.chat.completions.create(
            model="policy", messages=[user], max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        seen["usage"] = chunks[-1].usage.completion_tokens, chunks[-1].usage.prompt_tokens
        later = [{"role": "assistant", "content": text}, {"role": "user", "content": "1"}]
        more = client.chat.completions.create(model="policy", messages=[user, *later], max_completion_tokens=4)
        return text + more.choices[0].message.content

    experiment = replace(
        COUNTING,
        sampling=replace(COUNTING.sampling, prompts=8, group=1, max_tokens=32),
        advantage=advantages.reinforce_plus_plus,
        environment=Agent(run=run),
        reward=lambda problem, completion: float(len(completion)),
    )
    _, graded = sample_once(experiment)
    assert not any(each.error for each in graded), [each.error for each in graded]
    assert all(len(each.turns.spans) == 2 for each in graded)
    assert seen["n"] == "n: wanted 1 or none, got 2" and "text, which is all" in seen["image"]
    assert seen["bias"].startswith("logit_bias: wanted {} or none") and "writes no tools" in seen["tools"]
    assert seen["long"].startswith("wanted at most 4 tokens in the first request (sampling.max_prompt_tokens), got ")
    assert seen["usage"][0] >= 1 and 0 < seen["usage"][1] <= 4


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
REFUSED = {
    "n": {"n": 2},
    "image": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "bias": {"logit_bias": {"5": 1}},
    "tools": {"tools": TOOLS},
    "long": {"messages": [{"role": "user", "content": "1234567"}]},
}


def test_agents_on_servers_sample_what_the_environment_does_there(tmp_path, monkeypatch):
    """One request of theirs is one of the server's: the same seeds, prefixes and limits."""
    monkeypatch.chdir(tmp_path)
    rollouts = []
    for environment in (Agent(run=count_down), Countdown()):
        with fake_vllm.serve(COUNTING.model, fake_vllm.Fake) as server:
            settings = Engine(folder="weights", addresses=(server.address,), timeout=30.0, probes=2)
            few = replace(COUNTING.sampling, prompts=4, group=2, max_tokens=11)  # the server has 16 positions
            rollout, graded = sample_once(replace(COUNTING, engine=settings, environment=environment, sampling=few))
        assert not any(each.error for each in graded)
        rollouts.append(rollout)
    ours, theirs = rollouts
    for name in ("tokens_BT", "mask_BT", "logp_BT", "source_BT", "length_B", "reply_B", "finished_B"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert (ours.reply_B > 0).any()


def test_every_column_of_a_rollout_is_as_wide_as_its_sequences():
    """The server of each token, and its version, move with the token."""
    ones_BT, ones_B = np.ones((2, 4), np.int32), np.ones(2, np.int32)
    columns = {"tokens_BT": ones_BT, "mask_BT": ones_BT > 0, "logp_BT": -ones_BT.astype(np.float32)}
    columns |= {"source_BT": ones_BT.astype(np.uint16), "version_BT": ones_BT}
    rollout = Rollout(**columns, prompt_length_B=ones_B, length_B=3 * ones_B, finished_B=ones_B > 0)
    wide = with_sequences(rollout, 6, 0)
    for name in columns:
        np.testing.assert_array_equal(getattr(wide, name), np.pad(columns[name], ((0, 0), (0, 2))), err_msg=name)
