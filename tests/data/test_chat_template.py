"""What chat templates write, for templates in the structure of those that are published."""

import datetime
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import chat_table
import numpy as np
import pytest
from api import episodes, find_tokenizer, start_rewards, tasks
from chat_table import TOOLS, Talk
from chat_templates import PUBLISHED, write_folder

from gspax.config import Grading, Turns
from gspax.data import Problem, hf_chat, hf_tokenizer, split_thinking, templates
from gspax.data.chat import end_before
from gspax.data.chat_template import opening_of, write_call
from gspax.errors import UserError
from gspax.experiment import describe, override
from gspax.experiment.overrides import as_recorded
from gspax.experiment.validation.chats import chat_problems, chat_warnings
from gspax.rewards.environments import Step, parse_gemma, parse_list
from gspax.rollout.agents import history
from gspax.rollout.agents.openai import Asked
from gspax.run.recorded import read_tokenizer

USER = [{"role": "user", "content": "1 + 1?"}]
CALL = {"name": "calculator", "arguments": {"expression": "1"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each published template, by its name."""
    pytest.importorskip("transformers")
    return {name: write_folder(tmp_path_factory.mktemp("chat"), one) for name, one in PUBLISHED.items()}


@pytest.fixture(params=PUBLISHED)
def chat(request, folders):
    published = PUBLISHED[request.param]
    return hf_chat(folders[request.param], thinking=published.thinking, date=published.date)


def names(tokenizer, ids):
    texts = {i: text for text, i in tokenizer.added_tokens.items()}
    return [texts[i] for i in ids]


def by_transformers(tokenizer, messages, **settings):
    """The text that transformers renders, on the day of the tokenizer."""
    date = {"chat_template": tokenizer.template.texts["default"]}
    switches = {"enable_thinking": tokenizer.thinking, "thinking": tokenizer.thinking}
    return tokenizer._tokenizer.apply_chat_template(messages, tokenize=False, **switches, **date, **settings)


def test_a_prompt_is_rendered_as_by_transformers(chat):
    for messages in (USER, [*USER, {"role": "assistant", "content": "<think>\na\n</think>\n\n2"}, *USER]):
        for tools in (None, TOOLS.schemas()):
            wanted = by_transformers(chat, messages, tools=tools, add_generation_prompt=True)
            assert chat.render(messages, tools or ()) == wanted


def test_calls_of_a_chat_are_rendered_in_either_form(chat):
    """As transformers renders objects, or JSON where a template wants it: several templates write JSON into JSON."""
    reply = {"role": "tool", "content": "1", "name": "calculator", "tool_call_id": "call00000"}
    chats = []
    for arguments in ({"expression": "1"}, '{"expression": "1"}'):
        call = {"id": "call00000", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        chats.append([*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, reply])
    wanted = None
    for messages in chats:
        try:
            wanted = wanted or by_transformers(chat, messages, add_generation_prompt=True)
        except Exception as error:
            if "must alternate" in str(error):
                pytest.skip("has no tools")
    texts = {chat.render(messages) for messages in chats}
    assert texts == {wanted} and r"{\"expression" not in str(wanted)


def test_arguments_that_a_template_would_write_as_python_does_are_passed_as_json(tmp_path):
    template = "{% for call in messages[-1].tool_calls or [] %}{{ call.function.arguments }}{% endfor %}"
    chat = hf_chat(write_folder(tmp_path, PUBLISHED["SmolLM2"]._replace(template=template)))
    for arguments in ({"a": "x"}, '{"a": "x"}'):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert chat.render([*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]) == '{"a": "x"}'


ENDS = {  # of the last message; before a user's reply; before a tool's
    "Gemma 3": ("<end_of_turn>", "<end_of_turn>", None),
    "Phi-3.5": ("<|end|>", "<|end|>", None),
    "Phi-4-mini": ("<|end|>", "<|end|>", "<|end|>"),
    "Llama 3": ("<|eot_id|>", "<|eot_id|>", "<|eot_id|>"),
    "Llama 3.1": ("<|eot_id|>", "<|eot_id|>", "<|eot_id|>"),
    "GLM-4.5": ("<|user|>", "<|user|>", "<|observation|>"),
    "Gemma 4": ("<turn|>", "<turn|>", "<|tool_response>"),
    "Gemma 4, thinking": ("<turn|>", "<turn|>", "<|tool_response>"),
    "gpt-oss": ("<|return|>", "<|end|>", "<|call|>"),
    "DeepSeek-R1": ("<|end_of_sentence|>",) * 3,
    "MiniMax-M2": ("[e~[",) * 3,
    "Qwen3": ("<|im_end|>",) * 3,
    "Olmo 3": ("<|endoftext|>", "<|im_end|>", "<|im_end|>"),
    "Mistral": ("</s>",) * 3,
}


@pytest.mark.parametrize("name", ENDS)
def test_a_turn_ends_with_what_the_template_writes(folders, name):
    published = PUBLISHED[name]
    tokenizer = hf_chat(folders[name], thinking=published.thinking, date=published.date)
    last, user, tool = ENDS[name]
    assert names(tokenizer, [tokenizer.turn_end, end_before(tokenizer, USER)]) == [last, user]
    reply = [{"role": "tool", "content": "2"}]
    if tool is None:
        with pytest.raises(UserError, match=r"must alternate|writes nothing of a message with the role 'tool'"):
            end_before(tokenizer, reply)
    else:
        assert names(tokenizer, [end_before(tokenizer, reply)]) == [tool]


def test_a_turn_s_end_and_the_reply_are_the_ids_of_the_whole_chat(chat):
    kept = [end_before(chat, USER), *chat.encode_reply(USER)]
    assert chat.encode_chat([*USER, {"role": "assistant", "content": "2"}, *USER])[-len(kept) :] == kept


def take_step(tokenizer, stop, messages):
    """The reply to a turn that has ended with a stop token, what has failed, and whether the conversation is over."""
    interaction = SimpleNamespace(tokenizer=tokenizer, turns=Turns())
    episode = episodes.Episode(Problem("p", ""), None, spans=[(0, 1)])
    step = Step(None, messages)
    return *episodes._take_step(interaction, episode, step, tokenizer.added_tokens[stop], 10**6), episode.finished


@pytest.mark.parametrize(("name", "stop"), [(name, ends[1]) for name, ends in ENDS.items() if name != "gpt-oss"])
def test_a_conversation_goes_on_after_its_template_s_end(folders, name, stop):
    published = PUBLISHED[name]
    tokenizer = hf_chat(folders[name], thinking=published.thinking, date=published.date)
    reply, error, finished = take_step(tokenizer, stop, USER)
    assert (error, finished) == ("", False) and "1 + 1?" in tokenizer._tokenizer.decode(reply)
    for other in {*published.stops} - {stop}:
        assert take_step(tokenizer, other, USER) == ([], "", True)


REFUSED = {  # a part of the sentence without an environment, for one that answers as a user, and for tools
    "Qwen3-Base": (None, "wanted '<|im_end|>'", "wanted '<|im_end|>'"),
    "ERNIE-4.5": (None, "wanted '<|end_of_sentence|>'", "wanted '<|end_of_sentence|>'"),
    "gpt-oss": (None, "writes '<|end|>': no conversation would go on", None),
    "Gemma 3": (None, None, "must alternate"),
    "Phi-3.5": (None, None, "writes nothing of a message with the role 'tool'"),
    "DeepSeek-V2": (None, None, "writes nothing of a message with the role 'tool'"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dry_run_refuses_what_a_template_cannot_do(folders, name):
    published = PUBLISHED[name]
    tokenizer = hf_chat(folders[name], thinking=published.thinking, date=published.date)
    for environment, wanted in zip((None, Talk(), TOOLS), REFUSED.get(name, (None,) * 3), strict=True):
        problems = list(chat_problems(tokenizer, environment))
        assert len(problems) == (wanted is not None), problems
        assert wanted is None or wanted in problems[0]


def test_a_call_without_a_stop_before_its_reply_is_refused_with_the_tokens(tmp_path):
    """A Gemma 4 whose files lack the id of <|tool_response> as a stop: no call would get an answer."""
    published = PUBLISHED["Gemma 4"]
    *stops, missing = published.stops
    folder = write_folder(tmp_path, published._replace(stops=(*stops,), special=(*published.special, missing)))
    (told,) = chat_problems(hf_chat(folder), replace(TOOLS, parse=parse_gemma))
    assert "a stop id between a call and its reply, got '<|\"|>', '<tool_call|>', '<|tool_response>': add one" in told


@pytest.mark.parametrize("environment", [None, Talk()])
def test_a_stop_id_of_the_experiment_ends_turns_too(folders, environment):
    tokenizer = hf_chat(folders["ERNIE-4.5"])
    end = tokenizer.added_tokens[tokenizer.template.end]
    told = [*chat_problems(tokenizer, environment), *chat_warnings(tokenizer, environment)]
    assert len(told) == 1 and f"(sampling.stop_token_ids=({end},) ends turns with it)" in told[0]
    own = (tokenizer, environment, (end,))
    assert [*chat_problems(*own), *chat_warnings(*own)] == []
    assert take_step(tokenizer, tokenizer.template.end, USER)[1:] == ("", False)


@pytest.mark.parametrize(
    ("name", "environment", "sentence"),
    [
        ("ERNIE-4.5", None, r"tokenizer.stop_ids: wanted '<\|end_of_sentence\|>' .*, got '</s>': a policy"),
        ("Qwen3-Base", None, r"tokenizer.stop_ids: wanted '<\|im_end\|>' .*, got '<\|endoftext\|>': a policy"),
        ("SmolLM2", TOOLS, "writes no tools"),
        ("gpt-oss", TOOLS, "finds no call in what the chat template"),
        ("Qwen3", Talk(), r"it is not what the chat template .* would write: '<think>\\n\\n</think>"),
        ("DeepSeek-R1", Talk(), r"would write: '<think>\\nthought"),
        ("DeepSeek-V3", TOOLS, r"would write: '<\|tool_outputs_end\|><\|Assistant\|><\|tool_calls_begin"),
    ],
)
def test_a_dry_run_tells_what_is_not_in_a_conversation(folders, name, environment, sentence):
    published = PUBLISHED[name]
    tokenizer = hf_chat(folders[name], thinking=published.thinking, date=published.date)
    assert re.search(sentence, " ".join(chat_warnings(tokenizer, environment)))


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ("", "reads the calls that the model writes: the chat template in .* writes nothing of one"),
        (
            "{%- if m.tool_calls %}{{ raise_exception('no calls') }}{%- endif %}",
            "with one the chat template .* no calls",
        ),
    ],
)
def test_a_dry_run_tells_where_a_template_writes_no_call(form, sentence, tmp_path):
    message = "{{- '<|im_start|>' + m.role"
    template = PUBLISHED["SmolLM2"].template.replace(message, f"{{{{ tools or '' if loop.first }}}}{form}{message}", 1)
    tokenizer = hf_chat(write_folder(tmp_path, PUBLISHED["SmolLM2"]._replace(template=template)))
    assert [*chat_problems(tokenizer, TOOLS)] == []
    (told,) = chat_warnings(tokenizer, TOOLS)
    assert re.search(sentence, told)


def test_a_dry_run_tells_what_a_template_writes_at_the_end_of_a_conversation(tmp_path):
    template = (
        PUBLISHED["SmolLM2"].template
        + "{%- if messages[1:] and messages[1].content == 'answer' %}{{ 'Go on.' }}{%- endif %}"
    )
    chat = hf_chat(write_folder(tmp_path, PUBLISHED["SmolLM2"]._replace(template=template)))
    (told,) = chat_warnings(chat, Talk())
    assert told.endswith("would write: '', not 'Go on.'")


def test_a_reply_names_the_tool_where_the_template_writes_its_name(folders):
    tokenizer = hf_chat(folders["gpt-oss"], date="2026-01-31")
    said = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    text = tokenizer._tokenizer.decode(tokenizer.encode_reply(TOOLS.step(None, said).messages))
    assert "functions.calculator to=assistant" in text
    text = tokenizer._tokenizer.decode(
        tokenizer.encode_reply(TOOLS.step(None, said.replace("calculator", "x")).messages)
    )
    assert "functions.x" not in text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_call_and_its_reply_are_the_text_of_the_whole_chat(folders, name):
    """As transformers renders them at its end, with the tools, on which Hunyuan's replies depend."""
    published = PUBLISHED[name]
    tokenizer = hf_chat(folders[name], thinking=published.thinking, date=published.date)
    reply = {"role": "tool", "content": "42", "name": "calculator", "tool_call_id": "call00000"}
    calls = [{"id": "call00000", "type": "function", "function": CALL}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    if REFUSED.get(name, (None,) * 3)[2]:
        return
    try:
        whole = by_transformers(tokenizer, [*USER, said, reply], add_generation_prompt=True, tools=TOOLS.schemas())
    except Exception:  # it wants the arguments as a text
        text = [{**CALL, "arguments": json.dumps(CALL["arguments"])}]
        said["tool_calls"] = [{"id": "call00000", "type": "function", "function": one} for one in text]
        whole = by_transformers(tokenizer, [*USER, said, reply], add_generation_prompt=True, tools=TOOLS.schemas())
    tokenizer = tokenizer.with_tools(TOOLS.schemas())
    kept = [end_before(tokenizer, [reply]), *tokenizer.encode_reply([reply])]
    assert whole.endswith(tokenizer._tokenizer.decode(kept))


def test_a_run_writes_replies_with_its_tools(folders):
    """The reply that Hunyuan's template writes depends on them: of demonstrations, conversations, and other agents."""
    chat, tools = hf_chat(folders["Hunyuan-A13B"], date="2026-01-31"), replace(TOOLS, parse=parse_list)
    call = '<tool_calls>[{"name": "calculator", "arguments": {"expression": "6 * 7"}}]</tool_calls>'
    tokens, _ = episodes.encode_demonstration(tools, chat, Problem("6 * 7?", "42"), [call, "42"])
    own = episodes.interact(tools, chat, None, Turns(), Grading()).tokenizer
    asked = Asked(messages=(*USER, {"role": "assistant", "content": call}), tools=tuple(TOOLS.schemas()))
    more = replace(asked, messages=(*asked.messages, {"role": "tool", "content": "42"}))
    added, _ = history.read_more(chat, history.History(asked.messages, asked.tools), more)
    for ids in (tokens, own.encode_reply([{"role": "tool", "content": "42"}]), added):
        assert "<tool_response>42</tool_response><|extra_0|>" in chat._tokenizer.decode(ids)


def test_a_template_that_measures_its_tools_has_none_of_them(tmp_path):
    """As FunctionGemma's, which fails in transformers without tools."""
    template = "{{ tools|length }}" + PUBLISHED["SmolLM2"].template
    chat = hf_chat(write_folder(tmp_path, PUBLISHED["SmolLM2"]._replace(template=template)))
    assert chat.render(USER)[0] == "0" and chat.render(USER, TOOLS.schemas())[0] == "1"


def test_a_date_that_an_override_removes_or_spoils_is_refused(folders):
    chat = hf_chat(folders["Llama 3.1"], date="2026-01-31")
    (told,) = chat_problems(replace(chat, date=None), None)
    assert "prints today's date" in told
    with pytest.raises(ValueError, match="wanted a day such as 2026-01-31, got 'today'"):
        replace(chat, date="today")


@pytest.mark.parametrize(("name", "date"), [("Llama 3.1", datetime.date.today().isoformat()), ("Qwen3", None)])
def test_a_published_model_without_an_experiment_prints_today(folders, name, date):
    """As in `gspax chat` and `gspax eval --from`, which have no place for a date."""
    assert find_tokenizer(str(folders[name])).date == date


def test_a_variable_of_a_template_is_set_by_name(folders):
    """In the file or on the command line, and what a run records makes the same tokenizer."""
    settings = {"date": "2026-01-31", "variables": {"reasoning_effort": "high"}}
    chat, plain = hf_chat(folders["gpt-oss"], **settings), hf_chat(folders["gpt-oss"], date="2026-01-31")
    assert "Reasoning: high<|end|>" in chat.render(USER) and "Reasoning: medium<|end|>" in plain.render(USER)
    wanted = by_transformers(chat, USER, add_generation_prompt=True, reasoning_effort="high")
    assert chat.render(USER) == wanted
    assert override(plain, ["variables.reasoning_effort=high"]) == chat == read_tokenizer(describe(chat))
    assert override(chat, ["variables.reasoning_effort=low"]).variables == {"reasoning_effort": "low"}
    assert as_recorded(plain, describe(chat)) == chat
    assert override(plain, ["variables.n=2", "variables.on=true"]).variables == {"n": 2, "on": True}


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"reasoning_efort": "high"}, r"reads, got 'reasoning_efort' \(did you mean 'reasoning_effort'\?\)"),
        ({"enable_thinking": True}, "wanted names other than 'enable_thinking', which thinking sets, got True for it"),
        ({"eos_token": "<s>"}, "'eos_token', which the tokenizer's configuration sets"),
        ({"reasoning_effort": None}, "wanted a text, a number, True, or False for 'reasoning_effort', got None"),
    ],
)
def test_a_variable_that_a_template_does_not_read_is_refused(folders, variables, sentence):
    with pytest.raises(UserError, match=sentence):
        hf_chat(folders["gpt-oss"], date="2026-01-31", variables=variables)
    chat = replace(hf_chat(folders["gpt-oss"], date="2026-01-31"), variables=variables)  # as an override does
    assert [problem for problem in chat_problems(chat, None) if re.search(sentence, problem)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_parser_reads_the_calls_that_a_template_writes(folders, name):
    """The dry run names it, and `ToolUse` answers the call with it."""
    published = PUBLISHED[name]
    tokenizer = hf_chat(folders[name], thinking=published.thinking, date=published.date)
    told = " ".join(chat_warnings(tokenizer, TOOLS))
    if "writes no tools" in told:
        return
    parser = chat_table.with_tools(tokenizer).parse
    unread = f"finds no call in what the chat template in {folders[name]} writes"
    assert (unread in told) == (parser.__name__ != "parse_hermes")
    assert (f"{parser.__name__} reads it" in told) == (unread in told)
    written = write_call(tokenizer.template, "calculator", {"expression": "6 * 7"}, TOOLS.schemas())
    ids = tokenizer.encode_completion(written)
    step = replace(TOOLS, parse=parser).step(None, tokenizer.decode(ids))
    assert [reply["content"] for reply in step.messages] == ["42"]
    assert step.metrics == {"tool_calls": 1, "tool_failures": 0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_dry_run_tells_that_thinking_has_no_effect(folders, name):
    """Where the prompt is the same without it, and does not open thinking by itself."""
    tokenizer, without = (hf_chat(folders[name], thinking=on, date="2026-01-31") for on in (True, False))
    told = [one for one in chat_warnings(tokenizer, None) if one.startswith("tokenizer.thinking=True: without effect")]
    assert len(told) == (tokenizer.encode("1") == without.encode("1") and not tokenizer.template.opening)
    assert bool(told) or name not in ("SmolLM2", "Gemma 3", "Qwen2.5", "Llama 3")
    assert not told or not name.startswith(("Qwen3", "DeepSeek-R1", "GLM")) or name == "Qwen3-Instruct-2507"


def test_the_table_of_the_page_is_what_the_templates_write(folders):
    assert chat_table.written()[1] == chat_table.table(folders)


@pytest.mark.parametrize("name", ["Gemma 3", "Mistral", "Llama 3", "Qwen3"])
def test_a_base_model_s_prompt_begins_as_transformers_does(folders, name):
    tokenizer = hf_tokenizer(folders[name])
    for text in ("1 + 1 =", ""):
        assert tokenizer.encode(text) == tokenizer._tokenizer(text)["input_ids"]
    bos = PUBLISHED[name].bos or ""
    assert tokenizer.encode(f"{bos}1") == tokenizer.encode("1")  # not twice


# Thinking that the prompt opens


@pytest.mark.parametrize("name", ["Qwen3-Thinking-2507", "Qwen3.5", "DeepSeek-R1", "MiniMax-M2", "Olmo 3"])
def test_unfinished_thinking_is_no_answer_where_the_prompt_opens_it(folders, name):
    published = PUBLISHED[name]
    tokenizer = hf_chat(folders[name], thinking=True, date=published.date)
    opening = opening_of(tokenizer, tokenizer.encode("How many?"))
    assert opening.rstrip() == "<think>"
    seen, problem = [], Problem("How many?", "18")
    calls = SimpleNamespace(submit=lambda problems, texts: seen.extend(texts) or [None] * len(texts))
    for text in ("so maybe \\boxed{18}. But", "so 18\n</think>\n\n\\boxed{18}"):
        finished = {0: np.array(tokenizer.encode_completion(text))}
        own = {"tokenizer": tokenizer, "calls": calls, "group": 1, "openings": {0: opening}}
        start_rewards({0: problem}, {}, finished, **own)
    cut, whole = seen
    assert (tasks.vote_answer(cut), tasks.vote_answer(whole)) == (None, "18")
    assert split_thinking(cut)[1] == "" and split_thinking(whole)[1] == "\\boxed{18}"
    assert TOOLS.step(None, f'{opening}I could <tool_call>{{"name": "calculator"}}</tool_call>').done


def test_a_reply_can_open_thinking_too(folders):
    tokenizer = hf_chat(folders["Gemma 4, thinking"], thinking=True)
    opening = opening_of(tokenizer, tokenizer.encode_reply([{"role": "tool", "content": "2", "name": "calculator"}]))
    assert opening == "<|channel>thought\n"
    call = '<|tool_call>call:calculator{expression:<|"|>1<|"|>}<tool_call|>'
    tools = replace(TOOLS, parse=parse_gemma)
    assert (
        tools.step(None, f"{opening}I could {call}").done and not tools.step(None, f"{opening}a<channel|>{call}").done
    )


def test_a_plain_prompt_can_open_thinking_too(folders):
    tokenizer = hf_tokenizer(folders["Mistral"])
    assert opening_of(tokenizer, tokenizer.encode("Q: 1?\nA: <think>\n")) == "<think>\n"
    assert opening_of(tokenizer, tokenizer.encode("Q: <think> is a tag.")) == ""


# Limits

HOSTILE = {
    "{{ (9**(9**9)) > 1 }}": "no result after 0.5 s",
    "{{ ('a\\n' * 1000000)|indent(3000) }}": "no result after 0.5 s|MiB of memory",
    "{{ 'x' * 3000000000 }}": "at most 1024 MiB of memory",
    "{{ '{:>2000000000}'.format(1) }}": "at most 1024 MiB of memory",
    "{{ '%2000000000d' % 1 }}": "at most 1024 MiB of memory",
    "{{ 'x' * 20000000 }}": "at most 16777216 characters, got 20000000",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "nested too deeply",
    "{{ cycler.__init__.__globals__ }}": "unsafe",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_is_one_sentence(monkeypatch, template):
    assert templates.LONGEST == 30  # as docs/security.md promises
    monkeypatch.setattr(templates, "LONGEST", 0.5)
    if "**" not in template and "indent" not in template:
        monkeypatch.setattr(templates, "LONGEST", 30)
    with pytest.raises(templates.TemplateError, match=HOSTILE[template]):
        templates.render(template, {"messages": []})
    monkeypatch.setattr(templates, "LONGEST", 30)
    assert templates.render("{{ 1 }}", {}) == "1"  # the next template has a process again
