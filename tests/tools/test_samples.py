"""`gspax samples`: which completions are shown, in which order, and what has changed in one problem's."""

import json
import re

import pytest
from api import main

from gspax.tools import samples


def row(prompt, completion, reward, **more):
    return {"prompt": prompt, "answer": "42", "completion": completion, "reward": reward, "length": 3, **more}


ROWS = {
    "samples/before.jsonl": [row("6*7=", "the answer is 41", 0.0), row("1+1=", "3", 0.0)],
    "samples/step_000002.jsonl": [
        row("6*7=", "it is 41", 0.0, advantage=-1.0, finished=False),
        row("6*7=", "it is 42", 1.0, advantage=1.0, finished=True, servers=[3, 1]),
        row("2+3=", "5", 0.5, advantage=0.0, finished=True, reason="half", error="late\x1b[2J"),
    ],
    "samples/step_000010.jsonl": [row(f"{n}+0=", str(n), n / 30, advantage=0.25) for n in range(30)],
    "samples/after.jsonl": [row("1+1=", "2", 1.0), row("6*7=", "the answer is 42", 1.0)],
    "evaluations/step_000004/small.jsonl": [row("6*7=", "42!", 1.0, problem=0, sample=0)],
}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """A terminal with room for a table."""
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def run(tmp_path):
    for name, rows in ROWS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"half')
    return tmp_path


def shown(capsys, run, *arguments):
    assert main.main(["samples", str(run), *arguments]) == 0
    return capsys.readouterr().out


def objects(capsys, run, *arguments):
    return [json.loads(line) for line in shown(capsys, run, *arguments, "--json").splitlines()]


def test_the_newest_rollout_is_shown_up_to_a_screen(run, capsys):
    text = shown(capsys, run)
    assert re.search(r"10 +train +0.633 +\+0.25 +3 +19\+0= +42 +19 ", text)
    assert "20+0=" not in text and "and 10 more of this step" in text
    assert len(objects(capsys, run)) == 30


def test_a_step_the_best_and_the_worst(run, capsys):
    assert [each["completion"] for each in objects(capsys, run, "--step", "2")] == ["it is 41", "it is 42", "5"]
    assert [each["completion"] for each in objects(capsys, run, "--step", "0")] == ["the answer is 41", "3"]
    assert [each["completion"] for each in objects(capsys, run, "--step", "2", "--best", "2")] == ["it is 42", "5"]
    assert [each["completion"] for each in objects(capsys, run, "--worst", "2")] == ["0", "1"]


def test_a_text_that_completions_contain_selects_them(run, capsys):
    assert [each["completion"] for each in objects(capsys, run, "--step", "2", "--contains", "it is")] == [
        "it is 41", "it is 42"
    ]  # fmt: skip
    assert main.main(["samples", str(run), "--contains", "maybe"]) == 2
    assert "--contains: wanted a text of one of these completions, 'maybe' is in none" in capsys.readouterr().err


def test_the_completions_of_a_server(run, capsys):
    for server in ("1", "3"):
        assert [each["completion"] for each in objects(capsys, run, "--step", "2", "--server", server)] == ["it is 42"]
    text = shown(capsys, run, "--step", "2", "--server", "1")
    assert re.search(r"length +server ", text) and re.search(r"\+1.00 +3 +3, 1 ", text)


def test_empty_columns_are_left_out_and_an_answer_is_shown_once(run, capsys):
    text = shown(capsys, run, "--step", "2")
    assert "answer" in text and len(re.findall("= +42 ", text)) == 2  # of two prompts
    before = shown(capsys, run, "--step", "0")
    assert "advantage" not in before and "note" not in before and "completion" in before


@pytest.mark.parametrize("columns", ["60", "160"])
def test_what_befell_a_completion_is_noted_without_control_characters(run, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    text = shown(capsys, run, "--step", "2")
    assert "truncated" in text and r"half, late\x1b[2J" in text and "\x1b" not in text


def test_a_problem_over_the_steps_and_what_changed(run, capsys):
    rows = objects(capsys, run, "--problem", "6*7")
    assert [(each["step"], each["source"]) for each in rows] == [
        (0, "held-out"), (2, "train"), (2, "train"), (4, "small"), (10, "held-out")
    ]  # fmt: skip
    text = shown(capsys, run, "--problem", "6*7=")
    assert text.endswith("step 0 -> step 10: the answer is [-41-]{+42+}\n") and text.count("6*7=") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--step", "3"], "--step: wanted a step whose samples were written (0, 2, 10), got 3"),
        (["--problem", "+"], "--problem: wanted a text of one of the 33 prompts, '+' is in 32: '1+1=', "),
        (["--step", "1", "--problem", "x"], "not allowed with argument"),
        (["--step", "2", "--server", "2"], "a server that sampled one of these completions (1, 3), got 2"),
        (["--server", "2"], "a server that sampled one of these completions (none), got 2"),
    ],
)
def test_what_is_not_there_is_one_sentence(run, arguments, sentence, capsys):
    assert main.main(["samples", str(run), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_files_and_folders_of_other_names_are_left_out(run, capsys):
    (run / "samples" / "step_000010 (copy).jsonl").write_text("")
    (run / "evaluations" / "step_old").mkdir()
    (run / "evaluations" / "step_old" / "small.jsonl").write_text("")
    assert len(objects(capsys, run)) == 30


def test_a_narrow_terminal_shows_records(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip() for line in shown(capsys, run, "--step", "2").splitlines()]
    assert lines[:4] == [
        "step 2 · train · reward 0 · advantage -1.00 · 3 tokens · truncated",
        "  prompt      6*7=",
        "  answer      42",
        "  completion  it is 41",
    ]
    assert lines[4:7] == [
        "",
        "step 2 · train · reward 1 · advantage +1.00 · server 3, 1 · 3 tokens",
        "  completion  it is 42",
    ]
    assert "advantage" not in shown(capsys, run, "--step", "0")


def test_texts_of_several_lines_are_shown_as_records(run, capsys):
    (run / "samples" / "step_000011.jsonl").write_text(json.dumps(row("Why?\nThink.", "So.\n  Done.", 0.0)) + "\n")
    lines = [line.rstrip() for line in shown(capsys, run).splitlines()]
    assert lines[0] == "step 11 · train · reward 0 · 3 tokens"
    assert lines[1:3] == ["  prompt      Why?", "              Think."]
    assert lines[4:] == ["  completion  So.", "                Done."]


@pytest.mark.parametrize("columns", ["60", "150"])
def test_a_text_is_folded_and_not_cut(run, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    (run / "samples" / "step_000011.jsonl").write_text(json.dumps(row("6*7=", "b" * 270, 0.0)) + "\n")
    text = shown(capsys, run)
    assert text.count("b") == 270 and "…" not in text
    assert all(len(line) <= int(columns) for line in text.splitlines())
    assert sum("b" in line for line in text.splitlines()) <= 7  # 45 characters or more on each


def test_a_run_with_evaluations_alone_is_one_sentence(run, capsys):
    for file in (run / "samples").iterdir():
        file.unlink()
    assert main.main(["samples", str(run)]) == 2
    assert "wanted completions of a training step, there are only" in capsys.readouterr().err


def test_a_run_without_samples_is_one_sentence(tmp_path, capsys):
    assert main.main(["samples", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"gspax: {tmp_path}: wanted the directory of a run with completions, samples has none\n"
    )


def test_a_long_text_keeps_its_ends():
    assert len(samples.shorten("a" * 999 + "end")) < 620 and samples.shorten("a" * 999 + "end").endswith("end")
