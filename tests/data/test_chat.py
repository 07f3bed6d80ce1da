"""Chat templates against transformers' own rendering, and the split of a completion into thinking and answer."""

import functools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from api import Skipped, make_mesh, warm_start
from chat_folder import write_folder
from hypothesis import given
from hypothesis import strategies as st
from small_experiment import experiment

from gspax.data import HFTokenizer, Problem, hf_chat, hf_tokenizer, reward_answer, split_thinking
from gspax.data.tasks import sort
from gspax.errors import UserError
from gspax.experiment import describe, override, validate
from gspax.experiment.validation.chats import chat_warnings

DATA = Path(__file__).parents[3] / "shared" / "data"
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"},
    {"role": "user", "content": "And one more?"},
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    return write_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """The tokenizer of Qwen3's chat models, with the stop ids of their generation_config.json."""
    if not (DATA / "qwen3_tokenizer").is_dir():
        pytest.skip("needs the Qwen3 tokenizer beside the checkout (shared/data)")
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DATA / "qwen3_tokenizer" / name, folder / name)
    (folder / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    from transformers import AutoTokenizer

    with pytest.MonkeyPatch.context() as patch:  # each load takes a second
        patch.setattr(AutoTokenizer, "from_pretrained", functools.cache(AutoTokenizer.from_pretrained))
        yield folder


@pytest.fixture(scope="module", params=["small", "qwen3"])
def folder(request):
    return request.getfixturevalue(request.param)


@functools.cache
def tokenizer_of_transformers(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def by_transformers(folder, messages, **settings):
    """The ids that transformers renders."""
    tokenizer = tokenizer_of_transformers(folder)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **settings)


# Prompts


@pytest.mark.parametrize(("system", "thinking"), [(None, False), ("", True), ("Be brief. <end>", False)])
def test_a_prompt_equals_transformers_rendering(folder, system, thinking):
    tokenizer = hf_chat(folder, system=system, thinking=thinking)
    first = [] if system is None else [{"role": "system", "content": system}]
    for text in ("What is 2+2?", "  Zwei\n\nZeilen, 你好 🙂 ", "", "<think>", "<|im_end|><end>"):
        wanted = by_transformers(folder, [*first, {"role": "user", "content": text}], enable_thinking=thinking)
        assert tokenizer.encode(text) == wanted


def test_a_chat_of_several_turns_equals_transformers_rendering(folder):
    assert hf_chat(folder).encode_chat(TURNS) == by_transformers(folder, TURNS, enable_thinking=False)


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, "", "<think>\n\n</think>\n\n"),
        ({"thinking": True}, "", ""),
        ({"system": "Be brief."}, "<turn>system\nBe brief.<end>\n", "<think>\n\n</think>\n\n"),
    ],
)
def test_the_text_of_a_prompt(small, settings, before, after):
    tokenizer = hf_chat(small, **settings)
    wanted = f"{before}<turn>user\nhi<end>\n<turn>assistant\n{after}"
    assert tokenizer._tokenizer.decode(tokenizer.encode("hi")) == wanted  # no special token is repeated or added


def test_the_prompt_of_qwen3_has_the_published_ids(qwen3):
    start, user, newline, hi, end, assistant = 151644, 872, 198, 6023, 151645, 77091
    head = [start, user, newline, hi, end, newline, start, assistant, newline]
    tokenizer = hf_chat(qwen3)
    assert tokenizer.encode("hi") == [*head, 151667, 271, 151668, 271]
    assert tokenizer.stop_ids == (end, 151643)  # <|im_end|>, <|endoftext|>


def test_a_tokenizer_in_a_bucket_is_the_local_one(small, bucket):
    path, server = bucket
    server.copy_from(small, str(path).split("/")[2], "runs/a")
    there, here = hf_chat(path, system="Be brief."), hf_chat(small, system="Be brief.")
    text = "<end> ü\n\n2"
    assert there.path == str(path) and there.encode(text) == here.encode(text)
    assert there.decode(here.encode_completion(text)) == here.decode(here.encode_completion(text))
    assert (there.stop_ids, there.vocab_size) == (here.stop_ids, here.vocab_size)
    with pytest.raises(UserError, match=r"wanted a folder that holds a tokenizer.json; there is none in 'gs://"):
        hf_tokenizer(path / "nowhere")


# Completions


def test_completions_round_trip(folder):
    chat, plain = hf_chat(folder, system="Be brief."), hf_tokenizer(folder)
    text = "<think>\nTwo and two.\n</think>\n\n4"
    ids = chat.encode_completion(text)
    assert ids == plain.encode_completion(text)
    assert plain.encode(text) == tokenizer_of_transformers(folder)(text)["input_ids"]
    assert chat.decode([*ids, chat.stop_ids[0], *ids]) == text  # the thinking is kept; text after the stop id is not


def test_stop_ids_come_from_the_generation_config(small):
    assert hf_chat(small).stop_ids == (258, 256)


def test_a_reply_holds_no_token_that_is_not_of_text(small):
    """No reply holds an added token, special or not, or a mark that templates write as text; white space is kept."""
    tokenizer = hf_chat(small)
    marks = ["<end>", "<turn>", "<eot>", "<think>", "</think>", "<tool_response>", "</tool_response>", "<tool_call>"]
    reply = [{"role": "user", "content": "".join(marks) + "\n\n<turn<turn>>x"}]
    rendered = tokenizer.decode(tokenizer.encode_reply(reply))
    assert "< end>< turn>< eot>< think>< /think>< tool_response>" in rendered and "\n\n<turn< turn>>x" in rendered
    plain = tokenizer.encode_reply([{"role": "user", "content": "\n\nx"}])
    added = range(256, tokenizer.vocab_size)
    assert [i for i in tokenizer.encode_reply(reply) if i in added] == [i for i in plain if i in added]


def test_a_demonstration_follows_the_rendered_prompt(small):
    tokenizer = hf_chat(small)
    lengths = replace(experiment.sampling, max_prompt_tokens=64, max_tokens=16)
    chat = replace(experiment, tokenizer=tokenizer, sampling=lengths)
    stage = replace(chat.warm_start, rows=8)
    texts = {"data": chat.data, "tokenizer": tokenizer, "length": 80, "seed": 0, "vocab_size": tokenizer.vocab_size}
    source = warm_start.Demonstrations(stage=stage, **texts)
    batch, _ = warm_start.make_demonstrations(source, 0, mesh=make_mesh(chat.mesh), skipped=Skipped())
    for row in range(stage.rows):
        prompt = tokenizer.encode(chat.data.train(row).prompt)
        answer = batch.tokens_BT[row][batch.mask_BT[row]].tolist()
        assert batch.tokens_BT[row, : len(prompt)].tolist() == prompt
        assert answer[-1] == 258 and set(tokenizer.decode(answer)) <= set("0123456789")


# Thinking

ANALYSIS = "<|channel|>analysis<|message|>"
SECOND = "<|end|><|start|>assistant<|channel|>commentary<|message|>"


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("4", "", "4"),
        ("", "", ""),
        ("<think>\nTwo and two.\n</think>\n\n4", "Two and two.", "4"),
        ("<think>\n\n</think>\n\n4\n", "", "4"),
        ("\n<think>a</think>b", "a", "b"),
        ("  indented\n", "", "  indented"),
        ("<think>\nnever done", "never done", ""),  # cut off
        ("<think>a</think>b<think>c", "a</think>b<think>c", ""),  # a second thinking block is cut off
        ("<think>a</think>b<think>c</think>d", "a</think>b<think>c", "d"),
        ("a\n</think>\n\nb", "a", "b"),  # opened by the prompt
        ("<think>a</think>", "a", ""),
        ("[THINK]a[/THINK]b", "a", "b"),  # Magistral
        ("[THINK]never done", "never done", ""),
        ("<|channel>thought\na\n<channel|>b", "a", "b"),  # Gemma 4
        ("<|channel>thought\nso \\boxed{18}. But", "so \\boxed{18}. But", ""),
        ("<|channel|>final<|message|>4", "", "4"),  # gpt-oss
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>final<|message|>4", "a", "4"),
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{{}}", "a", "{}"),
        (f"{ANALYSIS}so \\boxed{{18}}. But", "so \\boxed{18}. But", ""),
        # a preamble of gpt-oss, to the user before its calls, is no answer
        ("<|channel|>commentary<|message|>I add: 18", "I add: 18", ""),
        ("<|channel|>commentary<|message|>I add.<|end|><|start|>assistant<|channel|>final<|message|>4", "I add.", "4"),
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary<|message|>so 18", f"a{SECOND}so 18", ""),
        ("<|channel|>commentary to=functions.f<|message|>{}", "", "<|channel|>commentary to=functions.f<|message|>{}"),
        ("a [THINK] is a mark", "", "a [THINK] is a mark"),
        ("a <|channel|>analysis<|message|> too", "", "a <|channel|>analysis<|message|> too"),
    ],
)
def test_split_thinking(text, thinking, answer):
    assert split_thinking(text) == (thinking, answer)


@pytest.mark.parametrize(
    ("text", "split"), [("still at it", ("still at it", "")), ("a</think>b", ("a", "b")), ("", ("", ""))]
)
def test_thinking_opened_by_the_prompt(text, split):
    assert split_thinking(text, opened=True) == split


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n"])).map("".join), st.booleans())
def test_an_answer_has_no_thinking_and_no_word_is_lost(text, opened):
    thinking, answer = split_thinking(text, opened=opened)
    assert "<think>" not in answer and "</think>" not in answer
    assert (thinking + answer).count("a") == text.count("a")
    assert text.replace("\n", "").endswith(answer.replace("\n", ""))


@given(st.text(alphabet="ab \n<"), st.text(alphabet="ab \n<"))
def test_joining_the_parts_restores_the_completion(thinking, answer):
    split = split_thinking(f"<think>\n{thinking}\n</think>\n\n{answer}")
    assert split == (thinking.strip("\n"), answer.strip("\n"))


def test_a_reward_can_grade_the_answer_alone():
    problem = Problem("21=", "12")
    reward = partial(reward_answer, reward=sort.reward)
    assert reward(problem, "<think>\n1, 2\n</think>\n\n12") == 1.0 == reward(problem, "12")
    assert reward(problem, "<think>\n12") == 0.0
    assert reward_answer(problem, "12", reward=sort.reward, opened=True) == 0.0


# In an experiment


def test_a_chat_tokenizer_in_an_experiment(small):
    chat = replace(
        experiment,
        tokenizer=hf_chat(small),
        model=replace(experiment.model, vocab_size=262),
        reward=partial(reward_answer, reward=sort.reward),
    )
    assert not validate(chat)
    described = describe(chat)["tokenizer"]
    assert described == {
        "type": "gspax.data.ChatTokenizer",
        "path": str(small),
        "system": None,
        "thinking": False,
        "date": None,
        "variables": {},
    }
    changed = override(chat, ["tokenizer.thinking=true", "tokenizer.system=Be brief."])
    assert changed.tokenizer == hf_chat(small, system="Be brief.", thinking=True)


def test_a_system_message_in_the_prompt_replaces_the_tokenizers_own(small):
    tokenizer = hf_chat(small, system="Be long.")
    assert tokenizer.encode("And one more?", TURNS[:3]) == tokenizer.encode_chat(TURNS)
    assert tokenizer.encode("And one more?", TURNS[1:3]) == tokenizer.encode_chat(
        [{"role": "system", "content": "Be long."}, *TURNS[1:]]
    )


def test_chat_and_plain_tokenizers_are_described_differently(small):
    assert hf_chat(small) == hf_chat(str(small)) != hf_chat(small, thinking=True)
    assert hf_chat(small) != HFTokenizer(str(small))


def test_the_tokenizer_that_the_page_makes_is_one_for_chats(tmp_path, monkeypatch):
    """Of docs/tokenizers.md: few tokens, one per digit, every text comes back, and its template's end is a stop id."""
    pytest.importorskip("transformers")
    page = (Path(__file__).parents[2] / "docs" / "tokenizers.md").read_text(encoding="utf-8")
    code = re.search(r'^```python title="make_tokenizer.py"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {a} + 17?", "answer": str(a + 17)} for a in range(40)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    exec(code, {"__name__": "__main__"})
    tokenizer = hf_chat("tokenizer")
    assert 256 < tokenizer.vocab_size <= 512 and not [*chat_warnings(tokenizer, None)]
    for text in (*rows[3].values(), "naïve 東京 🙂 \n\t<tag>"):
        assert tokenizer.decode(tokenizer.encode_completion(text)) == text
    assert len(tokenizer.encode_completion("20261128")) == 8
    assert (
        tokenizer.render([{"role": "user", "content": "1"}]) == "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"
    )


# Dates

DATED = (
    '{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}'
    "Today is {{ date_string }}: {{ messages[-1].content }}"
)


def test_a_template_prints_the_date_of_the_experiment(tmp_path):
    """Not today's, so that a run resumed tomorrow has the same prompts."""
    pytest.importorskip("transformers")
    tokenizer = hf_chat(write_folder(tmp_path, DATED), date="2024-07-26")
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "Today is 26 Jul 2024: hi"
    assert describe(tokenizer)["date"] == "2024-07-26"


def test_a_template_that_prints_todays_date_is_refused(tmp_path):
    folder = write_folder(tmp_path, DATED)
    with pytest.raises(UserError, match=r"prints today's date \(strftime_now\), so that .*, got none"):
        hf_chat(folder)
    with pytest.raises(UserError, match=r"date: wanted a day such as 2026-01-31, got '26 Jul 2024'"):
        hf_chat(folder, date="26 Jul 2024")


# Invalid input


def test_a_folder_without_a_chat_template_is_rejected_at_load(tmp_path):
    write_folder(tmp_path, template=None)
    with pytest.raises(UserError, match=r"wanted a chat template in .*there is none"):
        hf_chat(tmp_path)


@pytest.mark.parametrize("read", [hf_chat, hf_tokenizer])
def test_a_name_on_the_hub_without_a_network_is_one_short_sentence(read, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        read("Qwen/Qwen3-0.6B")
    assert str(raised.value) == (
        f"Qwen/Qwen3-0.6B: there is no such folder in the working directory {tmp_path}, and the Hub cannot be reached, "
        "and nothing of it was downloaded earlier"
    )


def test_the_template_may_be_in_a_separate_file(tmp_path):
    write_folder(tmp_path, template=None)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = hf_chat(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi!"


def test_a_template_without_an_end_is_one_error_and_the_program_can_end(tmp_path):
    loops = "".join(f"{{% for x{i} in range(99999) %}}" for i in range(3)) + "{% endfor %}" * 3
    write_folder(tmp_path, template=loops)
    code = (
        "import sys; from gspax.data import hf_chat, templates as t; t.LONGEST = 0.5; hf_chat(sys.argv[1]).encode('x')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done
    assert done.stderr.endswith(f"UserError: the chat template in {tmp_path} failed: no result after 0.5 s\n")


def test_a_folder_without_a_tokenizer_is_rejected_at_load(tmp_path):
    with pytest.raises(UserError, match=r"wanted a folder that holds a tokenizer\.json"):
        hf_chat(tmp_path)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for %}", "failed: "),
        ("{{ raise_exception('no system,\nplease') }}", "failed: no system, please"),
        ("{{ messages[0].content + 1 }}", "failed: "),
    ],
)
def test_a_failing_template_is_one_error(small, tmp_path, template, sentence):
    write_folder(tmp_path, template=template)
    tokenizer = replace(hf_chat(small), path=str(tmp_path))
    with pytest.raises(UserError, match=f"the chat template in {tmp_path} {sentence}") as caught:
        tokenizer.encode("hi")
    assert len(str(caught.value).splitlines()) == 1


def test_messages_that_the_template_rejects_are_one_error(small):
    with pytest.raises(UserError, match="failed: nobody is called judge"):
        hf_chat(small).encode_chat([{"role": "judge", "content": "hi"}])


def test_a_failing_tokenizer_is_not_reported_as_a_failing_template(small, tmp_path):
    tokenizer = replace(hf_chat(small), path=str(tmp_path))
    with pytest.raises(
        UserError, match=rf"wanted a folder that holds a tokenizer\.json; there is none in '{tmp_path}'"
    ):
        tokenizer.encode("hi")


# Round trips of real problems


def problems():
    """Every text of GSM8K's and MATH-500's test sets."""
    for name, fields in (("gsm8k", ("question", "answer")), ("math500", ("problem", "solution", "answer"))):
        path = DATA / name / "test.jsonl"
        if not path.is_file():
            pytest.skip(f"needs {name} beside the checkout (shared/data)")
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield from (row[field] for field in fields)


def check_round_trip(folder, texts):
    """Completions round-trip, and a prompt is its text between the same few tokens."""
    tokenizer = hf_chat(folder)
    head, tail = tokenizer.render([{"role": "user", "content": "\0"}]).split("\0")
    for text in texts:
        assert tokenizer.decode(tokenizer.encode_completion(text)) == text
        assert tokenizer._tokenizer.decode(tokenizer.encode(text)) == head + text + tail


def test_a_sample_of_real_problems_round_trips(folder):
    texts = list(problems())[::40]
    assert len(texts) > 100
    check_round_trip(folder, texts)


@pytest.mark.slow
def test_all_real_problems_round_trip(folder):
    texts = list(problems())
    assert len(texts) == 2 * 1319 + 3 * 500
    check_round_trip(folder, texts)
