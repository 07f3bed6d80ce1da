"""`gspax chat`: the sources that it opens, what it prints, and its sentences."""

import io
import json
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import small_experiment
from api import (
    Checkpoints,
    adapters,
    dense,
    main,
    make_mesh,
    open_run,
    partition,
    save_start,
    single_device_mesh,
    transformer,
)
from chat_folder import write_folder
from published import published, random_params, save
from rich.console import Console

import gspax.data
from gspax.config import Lora, Mesh, Sampling
from gspax.errors import printable
from gspax.experiment import describe
from gspax.tools import chat
from gspax.tools.dialogue import Dialogue
from gspax.tools.terminal import dim_thinking

EXPERIMENT = small_experiment.experiment
PROMPT = "31="


def write_run(folder, steps=(1, 2), warm_start=(), experiment=EXPERIMENT):
    """A run whose parameters at a step are `random_params(model, step)`."""
    run = open_run(folder, describe(experiment))
    for directory, saved in ((run.checkpoints, steps), (run.warm_start.checkpoints, warm_start)):
        if saved:
            with Checkpoints(directory, keep=len(saved)) as checkpoints:
                for step in saved:
                    params = jax.tree.map(jax.numpy.asarray, random_params(experiment.model, step))
                    checkpoints.save(step, {"params": params}, {})
    return run


def greedy(params, prompt=PROMPT, limit=6):
    """The answer of the small experiment's model by a whole forward pass for each token."""
    row, answer, stops = EXPERIMENT.tokenizer.encode(prompt), [], EXPERIMENT.tokenizer.stop_ids
    params = jax.tree.map(jax.numpy.asarray, params)
    while len(answer) < limit and not (answer and answer[-1] in stops):
        tokens_BT = jax.numpy.asarray([row + answer + [0] * (limit - len(answer))])
        hidden_BTD = forward(params, tokens_BT)
        answer.append(int((hidden_BTD[0, len(row) + len(answer) - 1] @ transformer.head(params)).argmax()))
    return EXPERIMENT.tokenizer.decode(answer)


@jax.jit
def forward(params, tokens_BT):
    return transformer.apply(params, EXPERIMENT.model, tokens_BT, tokens_BT * 0 + 1, mesh=single_device_mesh())[0]


def run_chat(monkeypatch, capsys, *arguments, lines=PROMPT):
    """The exit code, the lines of standard output, and standard error of a chat with these lines of standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines + "\n"))
    code = main.main(["chat", *map(str, arguments), "--max-tokens", "6", "--context", "24"])
    shown = capsys.readouterr()
    return code, shown.out.splitlines(), shown.err


def test_a_run_a_step_and_its_warm_start_answer(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run", steps=(1, 2), warm_start=(3,))
    answers = {}
    for name in ("run", "run@1", "run/warm_start"):
        code, (answer,), _ = run_chat(monkeypatch, capsys, tmp_path / name, "--temperature", "0")
        answers[name] = answer
        assert code == 0
    expected = [greedy(random_params(EXPERIMENT.model, step)) for step in (2, 1, 3)]
    assert [*answers.values()] == expected and len({*expected}) == 3


def test_a_message_is_put_into_the_template_of_the_run_until_that_is_switched_off(tmp_path, monkeypatch, capsys):
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("31", "20")]
    data = gspax.data.sequence(rows, heldout=[{"prompt": "42", "answer": "24"}], template="{prompt}=")
    write_run(tmp_path / "run", steps=(1,), experiment=replace(EXPERIMENT, data=data))
    lines = "31\n/template\n31=\n/template\n31\n/template 1\n31"
    code, answers, told = run_chat(monkeypatch, capsys, tmp_path / "run", "--temperature", "0", lines=lines)
    assert code == 0 and answers == [greedy(random_params(EXPERIMENT.model, 1))] * 4
    sent = [line.partition("first messages are sent ")[2] for line in told.splitlines()]
    assert [one for one in sent if one] == [
        'in the template "{prompt}="',
        "as they are",
        *['in the template "{prompt}="'] * 2,
    ]


def test_adapters_answer_beside_their_base(tmp_path, monkeypatch, capsys):
    """Side by side, with log-probs, and a temperature that is set on the way."""
    lora, params = Lora(rank=2, alpha=64.0), jax.tree.map(jax.numpy.asarray, random_params(EXPERIMENT.model))
    run = open_run(tmp_path / "lora", describe(replace(EXPERIMENT, lora=lora)))
    rng = np.random.default_rng(1)
    shapes = adapters.abstract(EXPERIMENT.model, lora)
    factors = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)
    policy = adapters.attach_adapters(params, factors, lora)
    save_start(run, params, make_mesh(Mesh()))
    with Checkpoints(run.checkpoints, keep=1) as checkpoints:
        checkpoints.save(1, {"params": partition(policy)[0]}, {})
    write_run(tmp_path / "base", steps=(0,))
    lines = f"/temperature 0\n{PROMPT}\n/logps\n{PROMPT}"
    code, shown, _ = run_chat(monkeypatch, capsys, tmp_path / "lora", "--beside", tmp_path / "base", lines=lines)
    assert code == 0
    answers = {name: greedy(params) for name, params in (("lora", dense(policy)), ("base", params))}
    assert shown[:2] == [f"{tmp_path / name}: {answer}" for name, answer in answers.items()]
    pieces = re.sub(r" -?\d+\.\d\d( \| )?", "", shown[3].partition(": ")[2].partition(";")[0]).replace("(stop)", "")
    assert pieces == answers["lora"] and answers["lora"] != answers["base"]


def test_a_special_token_that_ends_no_answer_is_not_called_a_stop():
    tokenizer = SimpleNamespace(decode=lambda ids: "", stop_ids=(7,))
    talk = SimpleNamespace(tokenizer=tokenizer, dialogue=SimpleNamespace(logp=lambda: [-1.0, -2.0]))
    assert chat.describe_logps(talk, [5, 7]) == "(special) -1.00 | (stop) -2.00; 2 tokens, sum -3.00"


def test_a_published_folder_answers_with_its_chat_template(tmp_path, monkeypatch, capsys):
    model = replace(EXPERIMENT.model, vocab_size=272)
    folder = write_folder(save(tmp_path, model, published(model, random_params(model))))
    (folder / "generation_config.json").write_text('{"eos_token_id": [258], "temperature": 0.5, "top_k": 3}')
    seen = []
    ask = Dialogue.ask
    monkeypatch.setattr(Dialogue, "ask", lambda *given, **named: seen.append(named) or ask(*given, **named))
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\nAnd?\n"))
    assert main.main(["chat", str(folder), "--max-tokens", "6", "--context", "128"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2
    assert (seen[1]["sampling"].temperature, seen[1]["sampling"].top_k, seen[1]["limit"]) == (0.5, 3, 6)


@pytest.mark.parametrize("settings", [{"temperature": "hot"}, {"temperature": -1.0}, {"top_p": 1.5}, {"top_k": -1}])
def test_recommended_settings_are_checked(settings, tmp_path, capsys):
    model = replace(EXPERIMENT.model, vocab_size=272)
    folder = write_folder(save(tmp_path, model, published(model, random_params(model))))
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert main.main(["chat", str(folder)]) == 2
    ((name, value),) = settings.items()
    err = capsys.readouterr().err
    assert f"{name}: wanted" in err and str(value) in err


@pytest.mark.parametrize(
    ("arguments", "lines", "sentence"),
    [
        (["run"], "31x=", "gspax: character 'x' of '31x=' is not in the alphabet"),
        (["run"], "/temperatur 1", "gspax: wanted /temperature T, "),
        (["run"], "/template 2", "gspax: /template: wanted a number from 1 to 0, or none, got '2'"),
        (["run"], '"""31=', 'gspax: wanted """ after a message that begins with it, got the end of the input'),
        (["run"], "/temperature hot", "gspax: temperature: wanted a number of at least 0, got 'hot'"),
        (["run", "--temperature", "-1"], PROMPT, "gspax: temperature: wanted a number of at least 0, got '-1'"),
        (["run@7"], PROMPT, "gspax: there is no checkpoint 7"),
        (["own"], PROMPT, "gspax: tokenizer: wanted --file with the experiment's file, which defines a.Bytes"),
        (["gone/there"], PROMPT, "gspax: gone/there: there is no such folder in the working directory "),
        (["run", "--context", "1000000"], PROMPT, "gspax: --context: wanted at most the "),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(arguments, lines, sentence, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run")
    own = json.loads(write_run(tmp_path / "own").experiment.read_text())
    (tmp_path / "own" / "experiment.json").write_text(json.dumps(own | {"tokenizer": {"type": "a.Bytes"}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO(lines + "\n"))
    assert main.main(["chat", *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Scripted:
    """A dialogue whose answers are given; after the first token of the second one the user presses Ctrl-C."""

    opened, asked = False, 0

    def ask(self, message, *, sampling, limit):
        self.asked += 1
        for end in range(1, len(message) + 1):
            yield [ord(letter) for letter in message[:end]]
            if self.asked == 2:
                signal.raise_signal(signal.SIGINT)


class Letters:
    def decode(self, ids):
        return "".join(map(chr, ids))


def talk(name):
    return chat.Talk(name, Scripted(), Letters(), Sampling())


def test_an_answer_is_streamed_with_thinking_dim_and_ctrl_c_stops_it():
    screen = Terminal()
    one = chat.Chat(Console(file=screen, force_terminal=True, soft_wrap=True), [talk("a")], 9)
    one.answer("<think>hm</think>so \x1b[2J")
    assert screen.getvalue().count("\x1b[2m") >= 4 and "\x1b[2J" not in screen.getvalue()
    plain = re.sub(r"\x1b\[\d+m", "", screen.getvalue())
    assert plain == "<think>hm</think>so \\x1b[2J\n"
    screen.truncate(0)
    one.answer("stopped")
    assert screen.getvalue().strip("\0") == "st\n"


def test_two_answers_are_columns_on_a_terminal():
    screen = Terminal()
    chat.Chat(Console(file=screen, force_terminal=True, width=60), [talk("left"), talk("right")], 9).answer("abc")
    last = screen.getvalue().rpartition("left")[2]
    assert re.search(r"right.*\n.*\n.* abc .* abc ", last)


def test_a_terminal_is_asked_and_keeps_on_after_an_error(tmp_path, monkeypatch, capsys):
    typed = iter(["/nothing", "", "abc", "/quit", "not read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(chat, "open_talk", lambda name, options: talk(name))
    assert main.main(["chat", "run"]) == 0
    shown = capsys.readouterr()
    assert shown.out.endswith("abc\n") and "got '/nothing'" in shown.err and next(typed) == "not read"


@pytest.mark.parametrize("interactive", [False, True])
def test_a_message_may_have_several_lines(interactive, monkeypatch):
    lines = ['"""', "  a", "", "b\t", '"""', "c", '"""/d', 'e"""', '"""/f"""', '""""""', "/g", '"""', "h", "", '"""']
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    monkeypatch.setattr(chat, "_typed", lambda: iter(lines))
    messages = [*chat.read_messages(interactive)]
    assert messages == ["  a\n\nb\t", "c", "/d\ne", "/f", "/g", "h\n"]
    assert [isinstance(one, chat.Line) for one in messages] == [False, True, False, False, True, False]


def test_thinking_that_the_prompt_opened_is_dim():
    spans = dim_thinking("hm</think>so", opened=True).spans
    assert [(span.start, span.end, span.style) for span in spans if span.style] == [(0, 2, "dim"), (2, 10, "dim")]
    assert printable("a\tb\n\x1b[1m\u202e") == "a\tb\n\\x1b[1m\\u202e"
