"""Tool calls in the formats of several families, as their templates and public parsers describe them."""

import pytest

from gspax.rewards.environments import (
    parse_deepseek,
    parse_gemma,
    parse_glm,
    parse_harmony,
    parse_hermes,
    parse_list,
    parse_llama,
    parse_minimax,
    parse_mistral,
)
from gspax.rewards.environments.family_calls import before_calls
from gspax.rewards.environments.tool_calls import Call

DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
READ = [
    (parse_hermes, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
    (parse_hermes, '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", {})]),
    (parse_llama, '{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
    (parse_llama, '<|python_tag|>{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
    (parse_llama, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
    (parse_llama, '\n\n{"name": "f", "parameters": "{\\"a\\": 1}"}', [("f", {"a": 1})]),
    (parse_llama, '<function=f>{"a": 1}</function>', [("f", {"a": 1})]),
    (parse_llama, '{"name": "f", "parameters": {"a": 1}', [None]),
    (parse_llama, '{"name": "f", "parameters": {"a": 1}} That calls it.', [("f", {"a": 1}), None]),
    (parse_llama, '<|python_tag|>print(1)', []),
    (parse_llama, '{"name": "Ada"}', []),
    (parse_llama, '{"answer": 3}', []),
    (parse_llama, '{3, 4}', []),
    (parse_llama, 'The call is {"name": "f", "parameters": {}}', []),
    (parse_mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', [("f", {"a": 1})]),
    (parse_mistral, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}]', [("f", {}), ("g", {})]),
    (parse_mistral, '[TOOL_CALLS]f{"a": "[TOOL_CALLS]g{}"}', [("f", {"a": "[TOOL_CALLS]g{}"})]),
    (parse_mistral, '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [("f", {"a": 1})]),
    (parse_mistral, '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}', [("f", {}), ("g", {})]),
    (parse_mistral, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}', [None]),
    (parse_mistral, '[TOOL_CALLS] []', [None]),
    (parse_mistral, 'no call', []),
    (parse_list, '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>', [("f", {"a": 1})]),
    (parse_list, '<|tool_call|> [{"name": "f", "arguments": {}}, {"name": "g"}]', [("f", {}), ("g", {})]),
    (parse_list, '<tool_calls>\n{"name": "f"}\n{"name": "g"}\n</tool_calls>', [("f", {}), ("g", {})]),
    (parse_list, ' [{"name": "f", "arguments": {"a": "<tool_calls>[]"}}]', [("f", {"a": "<tool_calls>[]"})]),
    (parse_list, '<tool_calls>[{"name": "f"', [None]),
    (parse_list, '<tool_calls>[]</tool_calls>', [None]),
    (parse_list, '[1, 2]', []),
    (parse_list, '[3, 4)', []),
    (parse_list, '[]', []),
    (parse_list, 'no call', []),
    (parse_glm, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [("f", {"a": "1"})]),
    (
        parse_glm,
        "<tool_call>f<arg_key>a</arg_key><arg_value>x\ny</arg_value><arg_key>b</arg_key><arg_value></arg_value>"
        "</tool_call>",
        [("f", {"a": "x\ny", "b": ""})],
    ),
    (
        parse_glm,
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>an </arg_value> tag</arg_value>\n</tool_call>",
        [("f", {"a": "an </arg_value> tag"})],
    ),
    (parse_glm, "<tool_call>f\n</tool_call><tool_call>g</tool_call>", [("f", {}), ("g", {})]),
    (parse_glm, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1", [None]),
    (parse_glm, "<tool_call>f(a=1)</tool_call>", [None]),
    (
        parse_minimax,
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1 < 2</parameter>\n</invoke>',
        [("f", {"a": "1 < 2"})],
    ),
    (parse_minimax, '<invoke name="f"></invoke><invoke name="g"></invoke>', [("f", {}), ("g", {})]),
    (parse_minimax, '<invoke name="f"><parameter name="a">1</parameter>', [None]),
    (parse_deepseek, DEEPSEEK.format("f", '{"a": 1}'), [("f", {"a": 1})]),
    (parse_deepseek, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>" * 2, [("f", {}), ("f", {})]),
    (parse_deepseek, KIMI.format("f", '{"a": 1}'), [("f", {"a": 1})]),
    (parse_deepseek, KIMI.format("f", '{"a": "<|tool_call_end|>"}'), [("f", {"a": "<|tool_call_end|>"})]),
    (parse_deepseek, DEEPSEEK.format("f", '{"a": 1'), [None]),
    (parse_deepseek, '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}', [None]),
    (
        parse_harmony,
        "<|channel|>analysis<|message|>Sum.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}',
        [("f", {"a": 1})],
    ),
    (parse_harmony, ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [("f", {"a": 1})]),
    (parse_harmony, "<|channel|>commentary to=functions.f<|message|>one", [None]),
    (parse_harmony, "<|channel|>final<|message|>3", []),
    (parse_gemma, '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>', [("f", {"a": "x"})]),
    (parse_gemma, '<|tool_call>call:f{a:[1,-2.5],b:{c:true,d:null}}<tool_call|>', [
        ("f", {"a": [1, -2.5], "b": {"c": True, "d": None}})]),
    (parse_gemma, '<|tool_call>call:f{a:<|"|>say "no" {}<tool_call|>,\n<|"|>}<tool_call|>', [
        ("f", {"a": 'say "no" {}<tool_call|>,\n'})]),
    (parse_gemma, '<|tool_call>call:f{}<tool_call|>\n<|tool_call>call:g{"a": "q\\"r"}<tool_call|>', [
        ("f", {}), ("g", {"a": 'q"r'})]),
    (parse_gemma, "<|tool_call>call:f{a:two words}<tool_call|>", [("f", {"a": "two words"})]),
    (parse_gemma, "<|tool_call>call:f{a:1<tool_call|>", [None]),
    (parse_gemma, "<|tool_call>call:f{a:1}", [None]),
    (parse_gemma, "<|tool_call>f(a=1)<tool_call|>", [None]),
    (parse_gemma, "no call", []),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "calls"), READ)
def test_calls_are_read_as_a_reader_reads_them(parse, text, calls):
    found = [(call.name, dict(call.arguments)) if isinstance(call, Call) else None for call in parse(text)]
    assert found == calls


def test_values_in_tags_get_the_types_of_the_schema():
    """JSON has types of its own."""
    schemas = {"a": {"type": "integer"}, "b": {"type": "string"}}
    (call,) = parse_glm(
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>1</arg_value></tool_call>"
    )
    assert call.typed(schemas) == {"a": 1, "b": "1"}
    (call,) = parse_hermes('<tool_call>{"name": "f", "arguments": {"b": "1"}}</tool_call>')
    assert call.typed(schemas) == {"b": "1"}


@pytest.mark.parametrize(("schema", "text", "value"), [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "02134", "02134"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "7", "7"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"type": ["string", "null"]}, "None", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
    ({"oneOf": [{"type": "integer"}, {"enum": ["all"]}]}, "7", "7"),
    ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "1"}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({}, "7", 7),
])  # fmt: skip
def test_texts_get_the_types_of_schemas_without_a_type_of_their_own(schema, text, value):
    """Pydantic writes an optional argument as `anyOf`."""
    assert Call("f", {"a": text}, as_texts=True).typed({"a": schema}) == {"a": value}


@pytest.mark.parametrize(("parse", "text"), [
    (parse, text) for parse, text, calls in READ if any(calls) and not text.startswith("<|channel|>analysis")
])  # fmt: skip
def test_calls_are_no_part_of_what_a_message_says(parse, text):
    assert before_calls(text) == ""
    said = f"Let me see.\n{text}"
    if any(isinstance(call, Call) for call in parse(said)):  # where the message may be more than the call
        assert before_calls(said) == "Let me see."
