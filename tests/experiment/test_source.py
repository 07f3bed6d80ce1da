"""The source of a user's functions is part of a run's description."""

import textwrap
from functools import partial
from pathlib import Path

import optax
import pytest
from api import open_run

from gspax import losses
from gspax.errors import UserError
from gspax.experiment import RESUMABLE, describe, difference, load
from gspax.experiment.description import SOURCE, source_hash

HEAD = (
    "from dataclasses import replace\nfrom functools import partial\nfrom stub_experiment import experiment as stub\n"
)
TAIL = "\nexperiment = replace(stub, reward=reward)\n"
REWARD = """
SCALE = 2.0
def digits(text):
    # only the digits
    return [each for each in text if each.isdigit()]
def unused(text):
    return 0
def reward(problem, completion):
    return SCALE * (digits(completion) == digits(problem.answer))
"""


def described(folder, text, name="experiment.py"):
    file = Path(folder) / name
    file.write_text(HEAD + textwrap.dedent(text) + TAIL)
    return describe(load(file))


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("== digits(problem", "<= digits(problem", True),
        ("each.isdigit()", "each.isdecimal()", True),
        ("SCALE = 2.0", "SCALE = 3.0", True),
        ("    # only the digits\n", "\n", False),
        ("return 0", "return 1", False),
        ("SCALE = 2.0", "import math\n\n\nSCALE = 2.0  # twice", False),
    ],
)
def test_changing_a_reward_changes_its_source_and_changing_a_comment_does_not(tmp_path, old, new, changes):
    before = described(tmp_path, REWARD)
    assert before["reward"]["function"] == "experiment_file.reward"
    assert old in REWARD
    after = described(tmp_path, REWARD.replace(old, new), "another.py")
    lines = difference(before, after, ignore=RESUMABLE)
    assert len(lines) == changes
    assert all(line.startswith(f"reward.{SOURCE}: ") for line in lines)


@pytest.mark.parametrize(
    ("value", "other", "changes"),
    [("(2.0, (3.0,))", "(2.0, (4.0,))", 1), ("frozenset('ab')", "frozenset('ac')", 1), ("{'a': 2.0}", "{'a': 3.0}", 0)],
)
def test_constants_are_tuples_too_and_no_dictionary_which_may_be_a_cache(tmp_path, value, other, changes):
    texts = (REWARD.replace("SCALE = 2.0", f"SCALE = {each}") for each in (value, other))
    before, after = (described(tmp_path, text, f"{number}.py") for number, text in enumerate(texts))
    assert len(difference(before, after, ignore=RESUMABLE)) == changes


HELPER = """
import string
WORDS = {"a"}
LEAST = 3
def unused():
    return 0
def long(text):
    return len(text) > LEAST and string.capwords(text)
class Judge:
    def grade(self, text):
        return 1
"""


@pytest.mark.parametrize(
    ("importing", "call"),
    [("import {} as helper", "helper.long(text) * helper.Judge().grade(text)"),
     ("from {} import Judge, long", "long(text) * Judge().grade(text)")],
    ids=["module", "names"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("> LEAST", ">= LEAST", True),
        ("LEAST = 3", "LEAST = 4", True),
        ("return 0", "return 2", False),
        ("return 1", "return 2", False),  # a method, which is not covered
    ],
)
def test_functions_of_an_imported_file_count(tmp_path, monkeypatch, importing, call, old, new, changes):
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for name, text in (("first", HELPER), ("second", HELPER.replace(old, new))):
        module = f"helper_{name}_{tmp_path.name}"
        (tmp_path / f"{module}.py").write_text(text)
        reward = f"{importing.format(module)}\ndef reward(problem, text):\n    return {call}\n"
        found.append(described(tmp_path, reward, f"{name}.py"))
    assert bool(difference(*found, ignore=RESUMABLE)) == changes


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("len(text) - 1", "len(text) - 2", True),
        ("* 3", "* 4", True),
        ("  # a note", "", False),
        ("weigh(2)", "weigh(5)", True),
    ],
)
def test_lambdas_on_one_line_are_distinguished(tmp_path, old, new, changes):
    text = """
    def weigh(by):
        return lambda problem, text: by * len(text)
    first, reward = (lambda problem, text: len(text) * 3), (lambda problem, text: first(problem, text) +
        len(text) - 1 + second(problem, text))  # a note
    second = weigh(2)
    """
    assert text.count(old) == 1
    assert (described(tmp_path, text) != described(tmp_path, text.replace(old, new), "another.py")) == changes
    unrelated = text.replace("(lambda problem, text: len(text) * 3)", "(lambda problem, text: 0)")
    assert described(tmp_path, text) != described(tmp_path, unrelated), "it is used by the other"


def test_editing_the_file_after_loading_changes_nothing(tmp_path):
    file = tmp_path / "experiment.py"
    file.write_text(HEAD + REWARD + TAIL)
    experiment = load(file)
    before = describe(experiment)
    file.write_text(HEAD + REWARD.replace("==", "!=") + TAIL)
    assert describe(experiment) == before


def test_a_run_with_a_changed_reward_is_not_resumed(tmp_path):
    before = described(tmp_path, REWARD)
    open_run(tmp_path / "run", before).metrics.touch()
    with pytest.raises(UserError, match=f"reward.{SOURCE}: "):
        open_run(tmp_path / "run", described(tmp_path, REWARD.replace("==", "!=")))


def test_sources_of_installed_packages_are_not_described():
    for function in (losses.gspo, optax.adam, print, partial, Path.exists, textwrap.dedent):
        assert source_hash(function) is None
    assert describe(optax.adafactor) == "optax.adafactor"


def test_keywords_are_described_with_the_source():
    def reward(problem, completion, *, scale=1.0):
        return scale

    found = describe(partial(reward, scale=2.0))
    assert found.keys() == {"function", SOURCE, "scale"}
    assert len(found[SOURCE]) == 16
