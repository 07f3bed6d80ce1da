"""Tool calls as models write them, tools that fail, the calculator and the sandboxed Python tool."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from gspax.data import Problem
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.rewards.environments import Tool, ToolError, ToolUse, calculator, python, tools
from gspax.rewards.environments.tool_calls import Call, Malformed, parse_brackets, parse_hermes
from gspax.rewards.environments.tools import calculate
from gspax.rewards.workers.worker import Ran

CALCULATE = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
environment = ToolUse(tools=(calculator(),), call_reward=0.1, failure_reward=-0.5)


def replies(message, tools=environment):
    return [each["content"] for each in tools.step(None, message).messages]


def test_calls_are_answered_until_a_message_has_none():
    state, messages = environment.reset(
        Problem(prompt="6*7?", answer="42", context=({"role": "system", "content": "s"},))
    )
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "6*7?"}]
    step = environment.step(state, f"I multiply. {CALCULATE % '6*7'} and {CALCULATE % '1/8'}")
    reply = {"role": "tool", "name": "calculator"}  # some templates write which tool replies
    assert step.messages == [reply | {"content": "42"}, reply | {"content": "0.125"}]
    assert (step.done, step.reward, step.metrics) == (False, 0.2, {"tool_calls": 2, "tool_failures": 0})
    assert environment.step(state, "It is 42.").done
    assert environment.step(state, f"<think>{CALCULATE % '1'}</think>It is 42.").done, (
        "a call in thinking does not count"
    )
    assert pickle.loads(pickle.dumps(step)) == step


@pytest.mark.parametrize(
    ("message", "reply"),
    [
        ("<tool_call>{", "error: wanted </tool_call> after a tool call, got none"),
        ("<tool_call>{]</tool_call>", 'error: wanted {"name": ..., "arguments": {...}} as JSON, got invalid JSON: '),
        ("<tool_call>[1]</tool_call>", 'error: wanted {"name": ..., "arguments": {...}} as JSON, got no name'),
        ('<tool_call>{"name": "calculator", "arguments": 3}</tool_call>', "arguments that are no object"),
        ('<tool_call>{"name": "search"}</tool_call>', "error: wanted one of the tools calculator, got 'search'"),
        ('<tool_call>{"name": "calculator"}</tool_call>', "error: calculator: wanted expression, got no arguments"),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": "1", "x": 2}}</tool_call>',
            "error: calculator: wanted expression, got expression, x",
        ),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": 3}}</tool_call>',
            "error: calculator: wanted expression of type string, got int",
        ),
        (CALCULATE % "1/0", "error: division by zero"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: wanted"),
    ],
)
def test_a_wrong_call_is_answered_and_the_conversation_goes_on(message, reply):
    step = environment.step(None, message)
    assert reply in step.messages[0]["content"] and not step.done
    assert (step.reward, step.metrics["tool_failures"]) == (-0.5, 1)


def test_calls_beyond_the_limit_and_long_replies():
    short = ToolUse(tools=(calculator(),), most_calls=1, longest_reply=3, error="!")
    assert replies(CALCULATE % "99999" + CALCULATE % "2", short) == ["999…", "!"]


def test_an_exception_in_a_tool_is_its_failure_and_not_the_policys():
    def broken():
        raise KeyError("x")

    with pytest.raises(KeyError):
        ToolUse(tools=(Tool("broken", "", broken),)).step(None, '<tool_call>{"name": "broken"}</tool_call>')


def test_parsers():
    assert parse_hermes("no call") == [] == parse_brackets("no call")
    assert parse_brackets("[1+2] and [3") == [
        Call("calculator", {"expression": "1+2"}),
        Malformed("wanted ] after a call"),
    ]


LOOK_UP = Tool(
    "look_up",
    "An entry of a dictionary.",
    lambda word, most=1, deep=None: f"{word!r} {most!r} {deep!r}",
    {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "most": {"type": "integer", "enum": [1, 20]},
            "deep": {"type": ["boolean", "null"]},
        },
        "required": ["word"],
    },
)


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        ('{"name": "look_up", "parameters": {"word": "a"}}', "'a' 1 None"),
        ('{"name": "look_up", "args": {"word": "a"}, "id": "1", "type": "tool_call"}', "'a' 1 None"),
        ('{"type": "function", "function": {"name": "look_up", "arguments": "{\\"word\\": \\"a\\"}"}}', "'a' 1 None"),
        ('{"tool": "look_up", "tool_input": {"word": "a"}}', "'a' 1 None"),
        ('{"function": "look_up", "arguments": {"word": "a", "most": 20}}', "'a' 20 None"),
        ('{"name": "look_up", "arguments": {"word": "</tool_call><tool_call>"}}', "'</tool_call><tool_call>' 1 None"),
        ('{"name": "look_up", "arguments": {"word": "a\nb"}}', r"'a\nb' 1 None"),
        ('[{"name": "look_up", "arguments": {"word": "a"}}]', "'a' 1 None"),
        ('{"name": "look_up", "arguments": {"word": "a"}, "why": 1}', "error: wanted {}, got the unknown key 'why'"),
        ('{"name": "look_up", "args": {}, "input": {}}', "error: wanted {}, got args and input"),
        ('{"name": "look_up", "arguments": {"word": "a"}}}', "error: wanted {}, got invalid JSON: text after the call"),
        ('{"name": "look_up", "arguments": {"most": 20}}', "wanted word, most (optional), deep (optional), got most"),
        ('{"name": "look_up", "arguments": {"word": "a", "most": 2}}', "wanted most to be one of [1, 20], got 2"),
        ('{"name": "look_up", "arguments": {"word": "a", "deep": 1}}', "wanted deep of type boolean or null, got int"),
    ],
)
def test_calls_are_read_with_the_keys_of_other_frameworks(call, reply):
    (text,) = replies(f"<tool_call>\n{call}\n</tool_call>", ToolUse(tools=(LOOK_UP,)))
    assert reply.replace("{}", '{"name": ..., "arguments": {...}} as JSON') in text


@pytest.mark.parametrize(
    ("body", "reply"),
    [
        ("<parameter=word>\na\n\nb\n</parameter>\n<parameter=most>\n20\n</parameter>", r"'a\n\nb' 20 None"),
        ("<parameter=word>5</parameter><parameter=deep>True</parameter>", "'5' 1 True"),
        ("<parameter=word></parameter> </tool_call></parameter>", "'</parameter> </tool_call>' 1 None"),
        ('{"word": "a"}', "'a' 1 None"),
        ("<parameter=word>a</parameter><parameter=most>x</parameter>", "wanted most of type integer, got str"),
        ("<parameter=word>a", "wanted </parameter> after the parameter word, got none"),
        ("word=a", "wanted <parameter=NAME> or </function> in a call, got neither"),
    ],
)
def test_calls_in_xml_are_read_as_qwen3_coder_writes_them(body, reply):
    call = f"<function=look_up>\n{body}\n</function>"
    for text in (f"I look.\n<tool_call>\n{call}\n</tool_call>", call):
        (text,) = replies(text, ToolUse(tools=(LOOK_UP,)))
        assert reply in text


def test_several_calls_are_read_in_their_order():
    both = (
        CALCULATE % "1" + "<tool_call>{]</tool_call><function=calculator><parameter=expression>2</parameter></function>"
    )
    first, second, third = replies(both + "<tool_call>")[:3]
    assert (first, third) == ("1", "2") and "invalid JSON" in second
    assert len(replies(both + "<tool_call>")) == 4


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"word": "string"}, "wanted a JSON schema for each argument, got 'string' for 'word'"),
        ({"word": {"type": "str"}}, "wanted one of the types string, .* for 'word', got 'str'"),
        ({"type": "array"}, "wanted a JSON schema for each argument, got 'array' for 'type'"),
        ({"type": "object", "properties": ["word"]}, "wanted a JSON schema for each argument, got"),
        ({"type": "object", "properties": {}, "required": ["word"]}, "wanted `required` to list arguments, got"),
    ],
)
def test_parameters_that_are_no_schema_are_refused(parameters, problem):
    with pytest.raises(UserError, match=f"tool look_up: parameters: {problem}"):
        Tool("look_up", "", print, parameters)


def test_a_full_schema_is_shown_as_it_is():
    assert LOOK_UP.schema()["function"]["parameters"] == LOOK_UP.parameters
    assert Tool("f", "", print, {"type": {"type": "string"}}).required == ["type"]


def test_the_schema_is_that_of_chat_templates():
    (schema,) = environment.schemas()
    assert schema["type"] == "function" and schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["required"] == ["expression"]


def test_the_description_names_the_environment_and_its_tools():
    described = describe(environment)
    assert described["type"] == "gspax.rewards.environments.ToolUse"
    assert described["tools"][0]["run"] == "gspax.rewards.environments.tools.calculate"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("-(2 - 5)**3", "27"),
        ("7//2, ", "3"),
        ("1,600 % 7", "4"),
        ("2^10", "1024"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("2**-2", "0.25"),
        ("123456789*987654321", "121932631112635269"),
    ],
)
def test_the_calculator_is_exact(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x",
        "1 +",
        "__import__('os').system('true')",
        "().__class__",
        "[1][0]",
        "'a'*9",
        "1 if 1 else 2",
        "True",
        "1e999",
        "2**0.5",
        "9**9**9**9",
        "10**10**10",
        "(" * 300 + ")" * 300,
        "1" * 500,
        "2**4000*2**4000",
        "1j",
        "\0",
    ],
)
def test_the_calculator_evaluates_nothing_else(expression):
    with pytest.raises(ToolError):
        calculate(expression)


@pytest.mark.parametrize("allowed", [{}, *({"allow_code_execution": value} for value in (False, None, "no", 1))])
def test_python_is_off_unless_it_is_allowed(allowed):
    with pytest.raises(UserError, match="allow_code_execution=True"):
        python(**allowed)


@pytest.mark.parametrize(("status", "raised"), [("crashed", RuntimeError), ("timeout", ToolError)])
def test_a_program_that_could_not_run_is_no_mistake_of_the_policy(status, raised, monkeypatch):
    monkeypatch.setattr(tools, "run_program", lambda *_, **__: Ran(status, -1, "", ""))
    with pytest.raises(raised):
        python(allow_code_execution=True).run(code="print(1)")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_python_tool_prints_and_fails():
    tools = ToolUse(tools=(python(allow_code_execution=True),))

    def call(code):
        return f'<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'

    good, bad = replies(call("print(6 * 7)") + call("open('/nowhere/y', 'w')"), tools)
    assert good == "42\n" and bad.startswith("error: FileNotFoundError")


def test_calls_are_read_as_a_reader_reads_them():
    """Of completions.jsonl: what SmolLM2-135M-Instruct wrote, and shapes that bug reports describe.

    By hand: the calls, None for one that is malformed.
    """
    lines = (Path(__file__).parents[1] / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["asked"] == "tool"]
    for row in rows:
        found = [
            [one.name, dict(one.arguments)] if isinstance(one, Call) else None for one in parse_hermes(row["text"])
        ]
        assert found == row["calls"], row["text"]
    assert {row["of"] for row in rows} == {"SmolLM2", "reports"}
