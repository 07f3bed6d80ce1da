"""Mixtures of sources, and the rules for checks and filters."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from small_experiment import experiment

from gspax import data
from gspax.data.problem import is_heldout
from gspax.data.sources import opening_notes
from gspax.data.tasks import sort
from gspax.errors import UserError
from gspax.experiment import describe, difference, validate, warnings


def rows(name, count):
    return [{"prompt": f"{name}{i}?", "answer": str(i)} for i in range(count)]


def source(name, count=40, **settings):
    return data.sequence(rows(name, count), task=name, **settings)


def trained(source, count=None):
    return [source.train(i) for i in range(len(source.opened.train) if count is None else count)]


# Mixtures


def test_each_block_has_the_proportions_of_the_weights():
    mixed = data.mixture((source("a"), 3), (source("b"), 1), seed=5)
    tasks = [mixed.train(i).task for i in range(400)]
    blocks = [tuple(tasks[i : i + 4]) for i in range(0, 400, 4)]
    assert all(Counter(block) == {"a": 3, "b": 1} for block in blocks)
    assert set(map(tuple, blocks)) == {("a",) * i + ("b",) + ("a",) * (3 - i) for i in range(4)}
    assert Counter(mixed.heldout(i).task for i in range(40)) == {"a": 30, "b": 10}


def test_a_mixture_uses_all_problems_of_each_source():
    a, b = source("a"), source("b", 100)
    mixed = data.mixture((a, 3), (b, 2))
    count = 5 * len(a.opened.train)  # three epochs of a
    drawn = [mixed.train(i) for i in range(count)]
    assert Counter(each.prompt for each in drawn if each.task == "a") == {each.prompt: 3 for each in trained(a)}
    from_b = [each for each in drawn if each.task == "b"]
    assert Counter(from_b) == Counter(b.train(i) for i in range(2 * len(a.opened.train)))


def test_a_mixture_holds_each_problem_out_once():
    """In proportions while both have some; then those that are left, and from the first again."""
    a, b = source("a", heldout=rows("x", 3)), source("b", heldout=rows("y", 20))
    mixed = data.mixture((a, 1), (b, 1))
    assert [mixed.count_heldout(most) for most in (5, 23, 256)] == [5, 23, 23]
    held_out = [mixed.heldout(i) for i in range(23)]
    assert len(set(held_out)) == 23 and Counter(each.task for each in held_out[:6]) == {"a": 3, "b": 3}
    assert mixed.heldout(23 + 4) == held_out[4]
    few = sort.Problems(min_digits=2, max_digits=2)
    distinct = few.count_heldout(256)
    assert distinct == len({few.heldout(i).prompt for i in range(256)}) < 256
    assert data.mixture((few, 1), (b, 2)).count_heldout(256) == distinct + 20


def test_a_mixture_depends_only_on_seed_and_index():
    parts = (source("a"), 2), (source("b"), 3)
    one, other = data.mixture(*parts), data.mixture(*parts, seed=1)
    forwards = [one.train(i) for i in range(50)]
    assert [data.mixture(*parts).train(i) for i in reversed(range(50))] == forwards[::-1]
    assert [other.train(i) for i in range(50)] != forwards
    assert [other.heldout(i) for i in range(50)] == [one.heldout(i) for i in range(50)]


def test_weights_may_be_fractions():
    parts = source("a"), source("b"), source("c")
    assert data.mixture(*zip(parts, (0.5, 0.3, 0.2), strict=True)).weights == (5, 3, 2)
    assert data.mixture(*zip(parts, (4, 2, 2), strict=True)).weights == (2, 1, 1)


def test_any_source_can_be_in_a_mixture():
    mixed = data.mixture((sort.Problems(), 1), (source("a"), 1))
    assert Counter(mixed.train(i).task for i in range(20)) == {"": 10, "a": 10}


def test_no_source_trains_on_held_out_prompts_of_another():
    shared = rows("x", 60)
    files = data.sequence(shared[:30] + rows("y", 20), heldout=shared[50:])
    hashed = data.sequence(shared[20:] + rows("z", 20))
    mixed = data.mixture((files, 1), (hashed, 1))
    train = {mixed.train(i).prompt for i in range(400)}
    heldout = {mixed.heldout(i).prompt for i in range(400)}
    assert not train & heldout
    for part, alone in zip(mixed.parts, (files, hashed), strict=True):
        assert {each.prompt for each in trained(alone)} - {each.prompt for each in trained(part)} <= heldout
    left_out = [row for row in shared[20:30] if is_heldout(row["prompt"])]
    assert left_out and opening_notes(mixed)[0] == (
        f"data: filters left out {len(left_out)} of 50 rows (exclude {len(left_out)})"
    )


def test_held_out_prompts_of_a_benchmark_are_excluded_under_any_template():
    benchmark = data.sequence(rows("b", 5), heldout=rows("a", 10), template="Solve {prompt}")
    kept = source("a", exclude=(benchmark,))
    assert {each.prompt for each in trained(kept)} == {
        row["prompt"] for row in rows("a", 40)[10:] if not is_heldout(row["prompt"])
    }


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((), r"weights: wanted one for each of 0 sources, got \(\)"),
        ((("a", 0),), r"weights: wanted positive integers, got \(0,\)"),
        ((("a", 1), ("b", -1)), r"weights: wanted positive integers, got \(1, -1\)"),
    ],
)
def test_invalid_weights_are_rejected(parts, error):
    with pytest.raises(ValueError, match=error):
        data.mixture(*((source(name), weight) for name, weight in parts))


def test_a_mixture_in_an_experiment():
    digits = [{"prompt": f"{i}=", "answer": "".join(sorted(str(i)))} for i in range(10, 200)]
    mixed = replace(experiment, data=data.mixture((sort.Problems(), 1), (data.sequence(digits), 1)))
    assert validate(mixed) == [] and warnings(mixed) == []
    changed = replace(mixed, data=data.mixture((sort.Problems(), 1), (data.sequence(digits[1:]), 1)))
    assert difference(describe(mixed), describe(mixed)) == []
    (line,) = difference(describe(mixed), describe(changed))
    assert line.startswith("data.sources.1.train_rows: rows:")
    broken = replace(mixed, data=data.mixture((data.sequence([{}, *digits]), 1)))
    assert "1 of 191 rows (row 0 from 0: prompt: there is no such column" in validate(broken)[0]


# Checks and filters


def test_prompt_lengths_are_counted_by_the_tokenizer():
    problems = data.sequence(
        [{"prompt": f"{10**i}=", "answer": "1"} for i in range(30)] + [{"prompt": "1+1=", "answer": "2"}],
        checks=(data.PromptTokens(sort.tokenizer, most=29),),
    )
    with pytest.raises(UserError) as caught:
        problems.train(0)
    assert "3 of 31 rows (row 28 from 0: the prompt has 30 tokens, more than 29; row 29 from 0:" in str(caught.value)
    assert "row 30 from 0: the prompt cannot be encoded: character '+' of '1+1='" in str(caught.value)


def test_answers_can_be_required_to_match_a_pattern():
    rule = data.AnswerMatches(r"#### -?[\d,]+$")
    assert rule(data.Problem("?", "so\n#### 1,600")) is None
    assert rule(data.Problem("?", "so 3")) == r"the answer does not match '#### -?[\\d,]+$': 'so 3'"
    with pytest.raises(ValueError, match=r"pattern: wanted a regular expression, got '\('"):
        data.AnswerMatches("(")


@pytest.fixture
def samples(tmp_path):
    """Four samples for each of the prompts a0? to a19?, i // 5 of them correct, in two files."""
    lines = [json.dumps({"prompt": f"a{i}?", "reward": float(k < i // 5)}) + "\n" for i in range(20) for k in range(4)]
    (tmp_path / "step_1.jsonl").write_text("".join(lines[:30]))
    (tmp_path / "step_2.jsonl").write_text("".join(lines[30:]))
    return tmp_path


def kept(rule):
    return {i for i in range(40) if rule(data.Problem(f"a{i}?", "")) is None}


def test_prompts_are_filtered_by_their_pass_rate(samples):
    assert kept(data.PassRate(str(samples), low=0.25, high=0.5)) == set(range(5, 15))
    assert kept(data.PassRate(str(samples), low=0.75)) == set(range(15, 20))
    assert kept(data.PassRate(str(samples), low=0.75, unseen="keep")) == set(range(15, 40))
    assert kept(data.PassRate(str(samples / "step_1.jsonl"))) == set(range(8))
    filtered = source("a", filters=(data.PassRate(str(samples), low=0.25),))
    assert {each.prompt for each in trained(filtered)} == {f"a{i}?" for i in range(5, 20) if not is_heldout(f"a{i}?")}
    rule = data.PassRate(str(samples), low=0.25, high=0.5)
    assert rule(data.Problem("a0?", "")) == "the pass rate is 0, outside the range"


def test_samples_whose_reward_failed_do_not_count(samples):
    """A step of an evaluation has them among the others; the folder has those of every step in files of their own."""
    failed = json.dumps({"prompt": "a17?", "reward": 0.0, "error": "late"}) + "\n"
    unseen = json.dumps({"prompt": "a30?", "reward": 0.0, "error": "late"}) + "\n"
    (samples / "failed_000001.jsonl").write_text(9 * failed + unseen)
    (samples / "step_2.jsonl").write_text((samples / "step_2.jsonl").read_text() + 9 * failed)
    assert kept(data.PassRate(str(samples), low=0.75)) == set(range(15, 20))
    assert data.PassRate(str(samples))(data.Problem("a30?", "")).startswith("there is no sample of this prompt")


def test_the_samples_are_described_without_their_path(samples):
    rule = data.PassRate(str(samples))
    before = describe(rule)
    moved = samples.rename(samples.parent / "moved")
    assert describe(data.PassRate(str(moved))) == before
    (moved / "step_2.jsonl").write_text('{"prompt": "a?", "reward": 1}\n')
    assert describe(data.PassRate(str(moved))) != before


@pytest.mark.parametrize(
    ("line", "got"),
    [
        ("{", r"ValueError\(\"wanted a JSON object, got '{' "),
        ("[]", r"\[\]$"),
        ("{}", "{}$"),
        ('{"prompt": 3, "reward": 1}', "{'prompt': 3, 'reward': 1}$"),
        ('{"prompt": "a", "reward": "x"}', "{'prompt': 'a', 'reward': 'x'}$"),
    ],
)
def test_malformed_samples_are_one_error(samples, line, got):
    (samples / "step_3.jsonl").write_text(line)
    with pytest.raises(UserError, match=r"step_3\.jsonl, line 1: wanted a sample with prompt and reward, got " + got):
        kept(data.PassRate(str(samples)))


def test_missing_samples_are_one_error(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read: No such file"):
        kept(data.PassRate(str(tmp_path / "none.jsonl")))
    with pytest.raises(UserError, match=r"got a folder without \.jsonl files"):
        kept(data.PassRate(str(tmp_path)))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"low": 1.0, "high": 0.5}, r"low: wanted at most high=0\.5, got 1\.0"),
        ({"unseen": "x"}, "unseen: wanted 'drop'"),
    ],
)
def test_invalid_ranges_of_pass_rates_are_rejected(settings, error):
    with pytest.raises(ValueError, match=error):
        data.PassRate("x", **settings)
