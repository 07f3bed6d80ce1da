"""Environments of verifiers in gspax and back: with the package where it is installed, else with a fake of it."""

import asyncio
import json
import pickle
import sys
import types
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

try:
    import mcp  # noqa: F401
    import verifiers.v1 as vf

    IS_REAL = True
except ImportError:
    import fake_verifiers

    fake_verifiers.install()
    import verifiers.v1 as vf

    IS_REAL = False
import verifiers_examples
from api import encode_demonstration
from local_server import serve

from gspax.config.protocols import Problem, Step
from gspax.data import GeneratedProblems, hf_chat, sequence, split_thinking
from gspax.rewards.calls import Batched
from gspax.rewards.combination import combine, weighted_sum
from gspax.rewards.environments import ToolUse, calculator
from gspax.rewards.environments.to_verifiers import offer
from gspax.rewards.environments.verifiers import VerifiersEnvironment, no_reward, problems
from gspax.rewards.scores import Score

QWEN3 = Path(__file__).parents[4] / "shared" / "data" / "qwen3_tokenizer"


@pytest.fixture(autouse=True)
def _examples(monkeypatch):
    """Each taskset as an installed module, with its environment if it has one."""
    for name, classes in verifiers_examples.EXPORTS.items():
        module = types.ModuleType(name)
        vars(module).update({each.__name__: each for each in classes}, __all__=[each.__name__ for each in classes])
        monkeypatch.setitem(sys.modules, name, module)


def settings(name, **agent):
    return {"taskset": {"id": name}, "agent": agent}


def play(environment, problem, *messages):
    """The results of the messages, one after the other, each from a pickled state."""
    state, opening = environment.reset(problem)
    steps = [Step(state, opening)]
    for message in messages:
        steps.append(environment.step(pickle.loads(pickle.dumps(steps[-1].state)), message))
    return steps


def test_the_tasks_are_problems_of_a_source():
    rows = problems(settings("toy_sums"))
    assert len(rows) == 20 and len(problems(settings("toy_sums"), most=7)) == 7
    source = sequence(rows, seed=1)
    assert source.train(0).prompt.endswith("= ?") and source.heldout_count > 0
    assert no_reward(rows[0], "9") == 0.0


def test_one_turn_has_the_weighted_rewards_and_the_metrics_of_its_task():
    environment, problem = VerifiersEnvironment(settings("toy_sums")), problems(settings("toy_sums"))[3]
    opening, end = play(environment, problem, "<think>3 + 4</think>7")
    assert list(opening.messages) == [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "3 + 4 = ?"},
    ]
    assert end == Step(done=True, reward=1.0, metrics={"is_right": 1.0, "is_short": 1.0, "length": 1.0})
    assert play(environment, problem, "8")[-1].reward == 0.25
    assert environment.schemas() == []


def test_an_environment_that_talks_is_the_user():
    environment, problem = VerifiersEnvironment(settings("toy_guesses")), problems(settings("toy_guesses"))[5]
    steps = play(environment, problem, "2", "7", "5")
    replies = [[message["content"] for message in step.messages] for step in steps]
    assert replies == [["Game 5: guess a number."], ["It is higher."], ["It is lower."], []]
    assert steps[-1].done and steps[-1].reward == pytest.approx(1 / 3) and steps[-1].metrics["stopped"] == 0.0


def test_a_stop_and_the_limit_of_turns_end_the_conversation():
    environment, problem = VerifiersEnvironment(settings("toy_guesses")), problems(settings("toy_guesses"))[5]
    last = play(environment, problem, "1", "1", "1", "1")[-1]
    assert last.done and last.metrics["stopped"] == 1.0 and last.reward == 0.0
    limited = VerifiersEnvironment(settings("toy_guesses", max_turns=2))
    assert [step.done for step in play(limited, problem, "1", "1")] == [False, False, True]


def call(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {str(arguments).replace(chr(39), chr(34))}}}</tool_call>'


def test_tools_are_shown_and_called_with_the_data_of_the_task():
    environment, problem = VerifiersEnvironment(settings("toy_fruits")), problems(settings("toy_fruits"))[2]
    (schema,) = environment.schemas()
    assert schema["type"] == "function" and schema["function"]["name"] == "stock_count"
    assert schema["function"]["parameters"]["properties"] == {"fruit": {"title": "Fruit", "type": "string"}}
    first = call("stock_count", fruit="apples") + call("stock_count", fruit="pears") + call("weigh")
    steps = play(environment, problem, first, "6")
    apples, pears, unknown = steps[1].messages
    assert apples == {"role": "tool", "content": "6", "name": "stock_count"}
    assert "no pears here" in pears["content"]
    assert unknown["content"] == "error: wanted one of the tools stock_count, got 'weigh'"
    assert steps[2] == Step(done=True, reward=1.0, metrics={"right": 1.0, "calls": 3.0})


def test_a_message_with_a_malformed_call_is_the_answer():
    problem = problems(settings("toy_fruits"))[0]
    assert play(VerifiersEnvironment(settings("toy_fruits")), problem, "<tool_call>{")[-1].done


def test_another_course_with_the_same_answers_is_an_error(monkeypatch):
    environment, problem = VerifiersEnvironment(settings("toy_guesses")), problems(settings("toy_guesses"))[5]
    state = play(environment, problem, "2")[-1].state
    monkeypatch.setattr(verifiers_examples.Game, "run", verifiers_examples.vf.SingleAgentEnv.run)
    with pytest.raises(ValueError, match="is not deterministic"):
        environment.step(state, "7")


def own_tokens(tokenizer, trace, answers, monkeypatch):
    """The first branch of an episode as verifiers' training client, renderer, and message graph make it."""
    import renderers.client
    from verifiers.v1 import TrainClientConfig
    from verifiers.v1.clients import TrainClient
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.graph import prepare_turn

    written = iter(answers)

    async def generate(*, prompt_ids, prompt_attribution, **unused):
        ids = [*tokenizer.encode_completion(next(written)), tokenizer.turn_end]
        return {"prompt_ids": prompt_ids, "prompt_attribution": prompt_attribution, "completion_ids": ids}

    async def replay():
        settings = TrainClientConfig(renderer={"name": "qwen3"}, renderer_model_name=str(QWEN3))
        client, again = TrainClient(settings), trace.model_copy(update={"nodes": []}, deep=True)
        again._head_index.clear()
        for number, node in enumerate(trace.nodes):
            if node.sampled:
                turn = prepare_turn(again, [each.message for each in trace.nodes[:number]], trace.tools)
                response = await client.get_response(ChatDialect(), {"model": "m"}, vf.SamplingConfig(), turn=turn)
                turn.commit(response.model_copy(update={"message": node.message}))
        (branch,) = again.branches
        return branch

    monkeypatch.setattr(renderers.client, "generate", generate)
    return asyncio.run(replay())


@pytest.mark.skipif(not IS_REAL, reason="needs verifiers: pip install '.[verifiers]'")
@pytest.mark.skipif(not QWEN3.exists(), reason="needs ../shared/data/qwen3_tokenizer")
@pytest.mark.parametrize(
    ("name", "task", "answers"),
    [
        ("toy_sums", 3, ["<think>\n3 + 4\n</think>\n\n7"]),
        ("toy_guesses", 5, ["2", "7", "5"]),
        ("toy_fruits", 2, [call("stock_count", fruit="apples") + call("stock_count", fruit="pears"), "6"]),
    ],
)
def test_tokens_and_masks_are_those_of_verifiers(name, task, answers, monkeypatch):
    traces = []

    async def keep(self, task, episode):
        traces.append(episode.traces[0])

    monkeypatch.setattr(vf.Env, "finalize", keep)
    monkeypatch.setattr(verifiers_examples.Game, "finalize", keep)
    environment, tokenizer = VerifiersEnvironment(settings(name)), hf_chat(QWEN3, thinking=True)
    problem = problems(settings(name))[task]
    play(environment, problem, *answers)
    tokens, sampled = encode_demonstration(environment, tokenizer, problem, answers)
    branch = own_tokens(tokenizer, traces[0], answers, monkeypatch)
    assert tokens == branch.token_ids
    assert sampled == branch.sampled_mask and sum(sampled) == sum(
        len(tokenizer.encode_completion(answer)) + 1 for answer in answers
    )


@dataclass(frozen=True)
class Games(GeneratedProblems):
    def generate(self, rng):
        return Problem(prompt=str(rng.integers(10**6)), answer=str(rng.integers(100)))


class HigherOrLower:
    def reset(self, problem):
        return 0, [{"role": "system", "content": "Guess."}, {"role": "user", "content": f"Game {problem.prompt}"}]

    def step(self, state, message):
        return Step(
            state + 1, [{"role": "user", "content": f"{state}: higher than {message}"}], 0.5, state == 1, {"n": 1}
        )


def last_digit(problem, completion):
    return {"right": completion == "2", "long": len(completion) > 1}


def offered(monkeypatch, *arguments, **keywords):
    """An environment of gspax, offered to verifiers and read back."""
    tasks, conversation = offer(*arguments, **keywords)
    module = types.ModuleType("ours")
    vars(module).update(Tasks=tasks, Conversation=conversation, __all__=["Tasks", "Conversation"])
    monkeypatch.setitem(sys.modules, "ours", module)
    return VerifiersEnvironment(settings("ours")), problems(settings("ours"))


def test_an_environment_of_gspax_is_one_of_verifiers(monkeypatch):
    """Read back, it is the same conversation with the same rewards."""
    environment, rows = offered(monkeypatch, Games(), last_digit, HigherOrLower(), tasks=3)
    assert len(rows) == 3
    ours = HigherOrLower()
    state, opening = ours.reset(Games().train(1))
    steps = play(environment, rows[1], "1", "2")
    first = ours.step(state, "1")
    assert (list(steps[0].messages), list(steps[1].messages)) == (opening, list(first.messages))
    assert steps[2] == Step(done=True, reward=2.0, metrics={"right": 1.0, "long": 0.0, "environment": 1.0, "n": 2.0})


def test_tools_of_gspax_are_text_for_verifiers(monkeypatch):
    tools = ToolUse(tools=(calculator(),), call_reward=0.25)
    environment, rows = offered(monkeypatch, Games(), lambda problem, text: float(text == "3"), tools)
    environment = replace(environment, parse=lambda text: [])  # as with a server that parses no calls
    steps = play(environment, rows[0], call("calculator", expression="1+2"), "3")
    assert [message["role"] for message in steps[0].messages] == ["system", "user"]
    assert '"name": "calculator"' in steps[0].messages[0]["content"]
    assert steps[1].messages == ({"role": "user", "content": "<tool_response>\n3\n</tool_response>"},)
    assert steps[2].done and steps[2].reward == 1.25 and steps[2].metrics["tool_calls"] == 1.0


def test_a_task_of_one_turn_and_the_limit_of_turns(monkeypatch):
    environment, rows = offered(monkeypatch, Games(), lambda problem, text: text == problem.answer)
    answer = Games().train(4).answer
    assert [play(environment, rows[4], text)[-1].reward for text in (answer, "x")] == [1.0, 0.0]
    environment, rows = offered(monkeypatch, Games(), last_digit, HigherOrLower(), turns=1)
    assert play(environment, rows[0], "2")[-1].done


def answered(problem, completion):
    return float(split_thinking(completion)[1] == problem.answer)


@pytest.mark.parametrize("opened", [False, True])
def test_thinking_that_the_server_s_template_opens_is_no_answer(opened, monkeypatch):
    """A cut message is the thinking that it would be in a run; one whose thinking was told apart is an answer."""
    environment, rows = offered(monkeypatch, Games(), answered, opened=opened)
    answer = Games().train(4).answer
    texts = (answer, f"hm</think>{answer}", f"<think>hm</think>{answer}")
    assert [play(environment, rows[4], text)[-1].reward for text in texts] == [float(not opened), 1.0, 1.0]


@pytest.mark.parametrize("opened", [False, True])
def test_an_environment_is_asked_with_the_thinking_too(opened, monkeypatch):
    tools = ToolUse(tools=(calculator(),))
    environment, rows = offered(monkeypatch, Games(), lambda problem, text: 0.0, tools, opened=opened)
    environment = replace(environment, parse=lambda text: [])
    steps = play(environment, rows[0], call("calculator", expression="1+2"))
    assert steps[1].done == opened  # within thinking it is no call


def graded(problem, completion):
    return Score(0.5, "half", parts={"length": len(completion)})


def several(problem, completion):
    return 1, Score(0.25)


async def batched(problems, completions):
    return [Score(float(len(each))) for each in completions]


@pytest.mark.parametrize(
    ("reward", "total", "metrics"),
    [
        (last_digit, 1.0, {"right": 1.0, "long": 0.0}),
        (graded, 0.5, {"reward": 0.5, "length": 1.0}),
        (several, 1.25, {"reward_0": 1.0, "reward_1": 0.25}),
        (Batched(batched), 1.0, {"reward": 1.0}),
        (partial(weighted_sum, rewards={"a": graded, "b": graded}), 1.0, {"reward": 1.0, "a": 0.5, "b": 0.5}),
        (partial(combine, rewards={"a": graded, "b": graded}), 1.0, {"a": 0.5, "b": 0.5}),
    ],
)
def test_every_kind_of_reward_is_offered(reward, total, metrics, monkeypatch):
    environment, rows = offered(monkeypatch, Games(), reward, tasks=1)
    assert play(environment, rows[0], "2")[-1] == Step(done=True, reward=total, metrics=metrics)


@pytest.mark.parametrize("value", [None, "0.5", float("nan")])
def test_a_reward_that_gives_no_number_is_an_error_there_too(value, monkeypatch):
    environment, rows = offered(monkeypatch, Games(), lambda problem, completion: value, tasks=1)
    with pytest.raises(Exception, match=r"reward: wanted "):  # the package wraps it
        play(environment, rows[0], "2")


class Answers(BaseHTTPRequestHandler):
    """A chat-completions server whose n-th message of a conversation is `server.answers[n]`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = sum(message["role"] == "assistant" for message in body["messages"])
        message = {"role": "assistant", "content": self.server.answers[number]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *arguments):
        """Print nothing."""


def add_harness(monkeypatch):
    """A harness that asks once for each turn, in this process: those of verifiers need uv and a network."""
    import httpx
    from verifiers.v1.dialects.chat import message_to_wire

    class Ask(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT, SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, True, False, False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
            given = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
            body = {"model": "m", "messages": [message_to_wire(message) for message in (*system, *given)]}
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as client:
                (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status()
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = types.ModuleType("ask")
    vars(module).update(Ask=Ask, __all__=["Ask"])
    monkeypatch.setitem(sys.modules, "ask", module)


@pytest.mark.skipif(not IS_REAL, reason="needs verifiers: pip install '.[verifiers]'")
@pytest.mark.parametrize(
    ("name", "answers"),
    [("toy_sums", ["11"]), ("toy_sums", ["many"]), ("toy_guesses", ["2", "7", "5"]), ("toy_guesses", ["1"] * 4)],
)
def test_an_episode_is_that_of_verifiers(name, answers, monkeypatch):
    """Messages, rewards, and metrics of the same answers, as `Env.run_episode` of verifiers has them."""
    add_harness(monkeypatch)
    agent = {"harness": {"id": "ask"}, "runtime": {"type": "subprocess"}}

    async def run(port):
        env = vf.load_environment(vf.resolve_env_config(settings(name, **agent)))
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1")
        async with env.serving():
            episode = await env.run_episode([*env.taskset][5], vf.ModelContext(model="m", client=client))
        return episode.traces[0]

    with serve(Answers, answers=answers) as server:
        trace = asyncio.run(run(server.server_address[1]))
    *_, before, end = play(VerifiersEnvironment(settings(name)), problems(settings(name))[5], *answers)
    said = [*before.state.read, {"role": "assistant", "content": answers[-1]}]
    assert trace.ok and said == [{"role": each.role, "content": each.content} for each in trace.messages]
    rewards = {reward: each.score for reward, each in trace.rewards.items()}
    assert end == Step(done=True, reward=trace.reward, metrics=rewards | trace.metrics)
