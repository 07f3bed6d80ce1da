"""Sources of rows: splits, order, invalid and filtered rows, and what a resumed run compares."""

import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from api import open_run
from small_experiment import experiment

from gspax import data
from gspax.data import Problem
from gspax.data.problem import is_heldout, read_problem
from gspax.data.sources import opening_notes, opening_problems, reading_problems
from gspax.data.tasks import sort
from gspax.errors import UserError
from gspax.experiment import RESUMABLE, describe, difference, load, override, validate, warnings
from gspax.experiment.plan import plan

ROWS = [{"question": f"{a}+{b}?", "answer": f"so #### {a + b}", "level": a} for a in range(20) for b in range(20)]


def write(path, rows):
    """Rows as JSON lines; strings are written unchanged."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def source(file):
    return data.jsonl(file, prompt="question", metadata=("level",))


def trained(source, count=None):
    return [source.train(i) for i in range(len(source.opened.train) if count is None else count)]


def held(source):
    return [source.heldout(i) for i in range(len(source.opened.heldout))]


# Splits and order


def test_an_epoch_has_each_training_problem_once(source):
    first = trained(source)
    second = [source.train(len(first) + i) for i in range(len(first))]
    kept = [row for row in ROWS if not is_heldout(row["question"])]
    expected = sorted((row["question"], row["answer"], row["level"]) for row in kept)
    for epoch in (first, second):
        assert sorted((each.prompt, each.answer, each.metadata["level"]) for each in epoch) == expected
    assert first != second and [each.prompt for each in first] != [row["question"] for row in kept]


def test_held_out_problems_are_chosen_and_ordered_by_hash(source):
    prompts = [problem.prompt for problem in held(source)]
    assert set(prompts) == {row["question"] for row in ROWS if is_heldout(row["question"])}
    assert len(set(prompts)) == len(prompts) > 30
    assert not set(prompts) & {problem.prompt for problem in trained(source)}
    assert source.heldout(len(prompts)) == source.heldout(0)
    assert prompts != sorted(prompts, key=[row["question"] for row in ROWS].index)


def test_a_problem_depends_only_on_seed_split_and_index(source):
    forwards = trained(source, 50)
    again = replace(source)
    assert [again.train(i) for i in reversed(range(50))] == forwards[::-1]
    other = replace(source, seed=1)
    assert trained(other, 50) != forwards and held(other) == held(source)


def test_reordered_rows_keep_their_split(source, tmp_path):
    turned = data.jsonl(write(tmp_path / "turned.jsonl", ROWS[::-1]), prompt="question", metadata=("level",))
    assert {each.prompt for each in held(turned)} == {each.prompt for each in held(source)}


def test_a_template_does_not_change_the_split(source):
    changed = replace(source, schema=replace(source.schema, template="Solve: {prompt}"))
    assert [f"Solve: {each.prompt}" for each in held(source)] == [each.prompt for each in held(changed)]


def test_held_out_problems_from_a_separate_file(tmp_path):
    train, test = write(tmp_path / "train.jsonl", ROWS[:300]), write(tmp_path / "test.jsonl", ROWS[300:])
    source = data.jsonl(train, heldout=test, prompt="question")
    assert {each.prompt for each in trained(source)} == {row["question"] for row in ROWS[:300]}
    assert {each.prompt for each in held(source)} == {row["question"] for row in ROWS[300:]}


def test_a_training_prompt_that_is_held_out_is_an_invalid_row(tmp_path):
    train, test = write(tmp_path / "train.jsonl", ROWS[:30]), write(tmp_path / "test.jsonl", ROWS[28:40])
    with pytest.raises(UserError, match=r"2 of 30 rows \(\S*train\.jsonl, line 29: the prompt is among the held-out"):
        data.jsonl(train, heldout=test, prompt="question").train(0)
    source = data.jsonl(train, heldout=test, prompt="question", on_bad="skip")
    assert {each.prompt for each in trained(source)} == {row["question"] for row in ROWS[:28]}


def test_several_files_are_read_in_order(tmp_path, source):
    parts = [write(tmp_path / f"{i}.jsonl", ROWS[100 * i : 100 * i + 100]) for i in range(4)]
    several = data.jsonl(*parts, prompt="question", metadata=("level",))
    assert trained(several) == trained(source) and held(several) == held(source)
    assert several.train_rows.where(250) == f"{parts[2]}, line 51"


def test_long_lines_and_a_missing_final_newline_are_read(tmp_path):
    lines = [json.dumps({"prompt": f"é{i}" * (i % 7 + 1), "answer": "x"}, ensure_ascii=False) for i in range(200)]
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\r\n".join(lines).encode())
    rows = data.jsonl(path).train_rows
    assert [rows[i] for i in range(len(rows))] == [json.loads(line) for line in lines] == list(rows.rows())


# Invalid rows

BAD = ["{", "", "[1]", {"question": "x"}, {"question": "y", "answer": None}, {"question": 3, "answer": "3"}]


@pytest.fixture
def bad_file(tmp_path):
    return write(tmp_path / "bad.jsonl", [*ROWS[:100], *BAD])


def test_all_invalid_rows_are_reported_with_their_lines(bad_file):
    with pytest.raises(UserError) as caught:
        data.jsonl(bad_file, prompt="question").train(0)
    sentence = str(caught.value)
    assert sentence.startswith(f"data: 6 of 106 rows ({bad_file}, line 101: wanted a JSON object, got '{{")
    for part in (
        "line 102: wanted a JSON object, got an empty line",
        "line 103: wanted an object with columns, got [1]",
        "line 104: answer: there is no such column; the row has question",
        "line 105: answer: wanted a text that is not empty, got None",
        "; and 1 more) cannot be used; on_bad='skip' leaves them out",
    ):
        assert part in sentence
    assert "\n" not in sentence


def test_a_reason_that_rows_share_is_said_once(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS[:100])
    with pytest.raises(UserError) as caught:
        data.jsonl(path, prompt="problem").train(0)
    assert str(caught.value) == (
        f"data: 100 of 100 rows ({path}, line 1: problem: there is no such column; the row has question, answer, level "
        "(100 rows)) cannot be used; on_bad='skip' leaves them out"
    )


@pytest.mark.parametrize("name", ["gzip", "bz2", "lzma"])
def test_a_compressed_file_is_refused_in_one_sentence(name, tmp_path):
    module, path = importlib.import_module(name), tmp_path / "rows.jsonl.gz"
    path.write_bytes(module.compress(write(tmp_path / "rows.jsonl", ROWS).read_bytes()))
    with pytest.raises(
        UserError, match=r"rows\.jsonl\.gz: wanted lines of JSON, got a file compressed by \w+: decompress"
    ):
        data.jsonl(path).train(0)


KINDS = """
import datetime, fractions, numpy as np
from gspax import data
values = {"set": {"a", "b", "c", ("d", 1)}, "array": np.arange(2000.0), "date": datetime.date(2026, 1, 2),
          "number": fractions.Fraction(1, 3), "bytes": b"x", "scalar": np.int64(3)}
CHANGE
rows = [data.Problem(prompt=str(i), answer="1", metadata=values) for i in range(50)]
print(data.sequence(rows).described()["train_rows"])
"""


def test_metadata_that_json_lacks_has_one_hash_in_all_processes():
    def run(change="", seed="0"):
        done = subprocess.run(
            [sys.executable, "-c", KINDS.replace("CHANGE", change)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        return done.stdout

    assert len({run(seed=seed) for seed in "0123"}) == 1
    assert run("values['array'][1000] = 7.5") != run() != run("values['set'].add('z')"), "nothing changes unnoticed"


@pytest.mark.parametrize(
    "value", [object(), np.array([object()], object), {(1, 2): 3}], ids=["object", "objects", "key"]
)
def test_metadata_without_a_content_of_its_own_is_refused(value):
    rows = [data.Problem(prompt=str(i), answer="1", metadata={"extra": value}) for i in range(50)]
    with pytest.raises(UserError, match=r"50 of 50 rows \(row 0 from 0: metadata: wanted .*\(50 rows\)"):
        data.sequence(rows).train(0)


def test_invalid_rows_are_skipped_and_counted_on_request(bad_file, tmp_path):
    source = data.jsonl(bad_file, prompt="question", on_bad="skip")
    good = data.jsonl(write(tmp_path / "good.jsonl", ROWS[:100]), prompt="question")
    assert {each.prompt for each in trained(source)} == {each.prompt for each in trained(good)}
    (note,) = opening_notes(source)
    assert note.startswith("data: skipped 6 of 106 rows (") and "line 101" in note and "and 1 more" in note
    assert opening_notes(good) == []


def not_hard(problem, *, most=10):
    return f"level {problem.metadata['level']}, above {most}" if problem.metadata["level"] > most else None


def test_checks_invalidate_rows_and_filters_drop_training_rows(source):
    with pytest.raises(UserError, match=r"180 of 400 rows \(.*line 221: level 11, above 10 \(20 rows\);"):
        replace(source, checks=(not_hard,)).train(0)
    filtered = replace(source, filters=(not_hard,))
    assert {each.metadata["level"] for each in trained(filtered)} == set(range(11))
    assert held(filtered) == held(source)
    assert len(filtered.opened.train) == sum(each.metadata["level"] <= 10 for each in trained(source))
    left_out = len(source.opened.train) - len(filtered.opened.train)
    assert opening_notes(filtered) == [f"data: filters left out {left_out} of 400 rows (not_hard {left_out})"]


def test_an_invalid_check_is_one_error_with_the_row(source, file):
    def fails(problem):
        return {}[problem.prompt]

    with pytest.raises(
        UserError, match=rf"^data: {file}, line 1: fails raised KeyError: '0\+0\?' \(\S*test_sources.py:\d+\)$"
    ):
        replace(source, checks=(fails,)).train(0)
    with pytest.raises(UserError, match=r"line 1: wanted a reason or None from <lambda>, got True$"):
        replace(source, filters=(lambda problem: True,)).train(0)


@pytest.mark.parametrize("rows", [[], ROWS[:1]], ids=["none", "one"])
def test_a_source_without_problems_is_rejected(tmp_path, rows):
    with pytest.raises(UserError, match=r"^data: wanted at least one (training|held-out) problem, got none$"):
        data.jsonl(write(tmp_path / "few.jsonl", rows), prompt="question").train(0)


def test_filters_that_drop_everything_are_named(source):
    with pytest.raises(UserError, match=r"one training problem, got none; filters left out 3\d\d of 400 rows \(not_ha"):
        replace(source, filters=(partial(not_hard, most=-1),)).train(0)


def test_a_missing_file_is_one_error(tmp_path):
    source = data.jsonl(tmp_path / "none.jsonl")
    assert list(opening_problems(source, None)) == [
        f"data.train_rows.paths: {tmp_path}/none.jsonl: cannot be read: No such file or directory"
    ]


def test_a_file_that_changes_during_use_is_an_error(source, file):
    source.train(0)
    write(file, ROWS[::-1] + ROWS)
    with pytest.raises(
        UserError, match=r"^data: \S*rows\.jsonl, line \d+: OSError: \S*rows\.jsonl has changed since it"
    ):
        trained(source)
    with pytest.raises(
        UserError, match=r"^data: the rows cannot be read: OSError: \S*rows\.jsonl has changed since it"
    ):
        replace(source).train(0)


def test_negative_indices_are_rejected(source):
    for split in (source.train, source.heldout):
        with pytest.raises(ValueError, match="index must be at least 0; got -1"):
            split(-1)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"on_bad": "ignore"}, "on_bad: wanted 'error' or 'skip', got 'ignore'"),
        ({"checks": not_hard}, "checks: wanted a tuple of functions, got <function"),
        ({"filters": ("x",)}, r"filters: wanted a tuple of functions, got \('x',\)"),
        ({"color": 1}, "unexpected keyword argument 'color'"),
    ],
)
def test_invalid_settings_are_rejected_at_construction(file, settings, error):
    with pytest.raises((ValueError, TypeError), match=error):
        data.jsonl(file, **settings)


@pytest.mark.parametrize(
    ("paths", "heldout", "error"),
    [
        ((), (), "data: wanted at least one path"),
        ((["a.jsonl"],), (), r"data: wanted paths, got \['a.jsonl'\]"),
        (("a.jsonl",), ["b.jsonl"], r"heldout: wanted a path or a tuple of paths, got \['b.jsonl'\]"),
    ],
)
def test_what_is_no_path_is_rejected(paths, heldout, error):
    with pytest.raises(TypeError, match=error):
        data.jsonl(*paths, heldout=heldout)


# Sequences


class Rows:
    """A sequence whose element 3 cannot be read."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i == 3:
            raise RuntimeError("disk\nfailed")
        return {"prompt": f"{i}?", "answer": i}


def test_any_object_with_len_and_getitem_is_a_source():
    source = data.sequence(Rows(), on_bad="skip")
    line = Rows.__getitem__.__code__.co_firstlineno + 2
    (note,) = source.opened.notes
    assert note.startswith("skipped 1 of 40 rows (row 3 from 0: cannot be read: RuntimeError: disk failed (")
    assert note.endswith(f"test_sources.py:{line}))")
    assert {each.prompt for each in trained(source) + held(source)} == {f"{i}?" for i in range(40) if i != 3}


def test_a_failing_sequence_is_one_error():
    class Broken(Rows):
        def __len__(self):
            raise TypeError("no\nlength")

    (problem,) = opening_problems(data.sequence(Broken()), None)
    assert re.fullmatch(r"data: the rows cannot be read: TypeError: no length \(\S*test_sources.py:\d+\)", problem)


def test_a_list_of_problems_is_used_unchanged():
    problems = [Problem(f"{i}?", str(i)) for i in range(40)]
    source = data.sequence(problems[:30], heldout=problems[30:])
    assert set(trained(source)) == set(problems[:30]) and set(held(source)) == set(problems[30:])


def test_an_object_that_is_not_a_sequence_is_rejected():
    with pytest.raises(UserError, match=r"data\.sequence: wanted an object with len and \[\], got generator"):
        data.sequence(row for row in ROWS)


def test_an_exception_in_a_users_source_is_one_error():
    class Mine:
        def train(self, index):
            return ROWS[index + 1000]

    line = Mine.train.__code__.co_firstlineno + 1
    with pytest.raises(
        UserError,
        match=rf"^data: \S*Mine\.train\(3\) raised IndexError: list index out of range \(.*test_sources.py:{line}\)$",
    ):
        read_problem(Mine().train, 3)
    assert read_problem(sort.Problems().heldout, 3) == sort.Problems().heldout(3)
    with pytest.raises(UserError, match=r"^data: Problems.train\(-1\) raised ValueError: a problem's index must be at"):
        read_problem(sort.Problems().train, -1)


# In an experiment


@pytest.fixture
def digits(tmp_path):
    rows = [{"prompt": f"{i}=", "answer": "".join(sorted(str(i)))} for i in range(10, 200)]
    return replace(experiment, data=data.jsonl(write(tmp_path / "digits.jsonl", rows)))


def test_an_experiment_on_rows_can_be_validated_and_planned(digits):
    assert validate(digits) == [] and warnings(digits) == []
    description = describe(digits)
    assert description["data"]["train_rows"].startswith("sha256:")
    assert json.loads(json.dumps(description)) == description
    assert plan(digits, 1).mesh["fsdp"] == 1


def test_validation_reports_errors_and_notes_of_the_source(digits, tmp_path):
    bad = write(
        tmp_path / "digits_bad.jsonl", ["{", *(json.dumps({"prompt": f"{i}", "answer": "1"}) for i in range(99))]
    )
    broken = replace(digits, data=data.jsonl(bad))
    assert len(validate(broken)) == 1 and "1 of 100 rows" in validate(broken)[0]
    skipping = override(broken, ["data.on_bad=skip"])
    assert validate(skipping) == []
    assert warnings(skipping)[0].startswith("data: skipped 1 of 100 rows")


def test_moving_a_file_keeps_the_source_and_changing_its_rows_does_not(digits, tmp_path):
    content = (tmp_path / "digits.jsonl").read_text()
    (tmp_path / "moved.jsonl").write_text(content)
    (tmp_path / "changed.jsonl").write_text(content.replace("137", "173", 1))
    moved, changed = (
        override(digits, [f"data.train_rows.paths={tmp_path}/{name}.jsonl"]) for name in ("moved", "changed")
    )
    before = describe(digits)
    assert difference(before, describe(moved), ignore=RESUMABLE) == []
    (line,) = difference(before, describe(changed), ignore=RESUMABLE)
    assert line.startswith("data.train_rows: sha256:")


def test_a_run_resumes_with_a_moved_file_but_not_with_changed_rows(digits, tmp_path):
    open_run(tmp_path / "run", describe(digits)).metrics.touch()
    moved = (tmp_path / "digits.jsonl").rename(tmp_path / "moved.jsonl")
    assignment = f"data.train_rows.paths={moved}"
    open_run(tmp_path / "run", describe(override(digits, [assignment])))
    moved.write_text(moved.read_text().replace("137", "173", 1))
    with pytest.raises(UserError, match=r"data\.train_rows: sha256:\w+ -> sha256:"):
        open_run(tmp_path / "run", describe(override(digits, [assignment])))


def test_changing_elements_of_a_sequence_changes_the_source():
    rows = [{"prompt": f"{i}?", "answer": i, "note": i} for i in range(40)]
    first, same, changed = (
        describe(data.sequence(each))["train_rows"]
        for each in (rows, [{**row, "note": 0} for row in rows], [{**row, "answer": 0} for row in rows])
    )
    assert first == same != changed and first.startswith("rows:")


def test_settings_are_described_and_can_be_overridden(digits):
    changed = override(digits, ["data.seed=3", "data.schema.template=Sort {prompt}"])
    assert difference(describe(digits), describe(changed)) == [
        "data.schema.template: {prompt} -> Sort {prompt}",
        "data.seed: 0 -> 3",
    ]
    assert changed.data.train(0).prompt.startswith("Sort ")


def test_chat_rows_need_a_chat_tokenizer(digits):
    talking = override(digits, ["data.schema.system=Sort."])
    assert validate(talking) == [
        "tokenizer: wanted one for chats (data.hf_chat), because the problems have messages before their prompt; "
        "got CharTokenizer"
    ]


def test_an_experiment_file_loads_before_its_data_exist(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import replace\nfrom small_experiment import experiment\nfrom gspax import data\n"
        "experiment = replace(experiment, data=data.jsonl('missing.jsonl'))\n"
    )
    assert validate(load(path)) == ["data.train_rows.paths: missing.jsonl: cannot be read: No such file or directory"]


@pytest.mark.parametrize("read", [data.jsonl, data.parquet])
def test_a_pipe_or_a_device_is_not_waited_for(read, tmp_path):
    if read is data.parquet:
        pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        (sentence,) = reading_problems("data", read(path, prompt="q", answer="a"))
        why = "Is a directory" if path == tmp_path else "it is a pipe, a socket or a device"
        assert sentence == f"data.train_rows.paths: {path}: cannot be read: {why}"
