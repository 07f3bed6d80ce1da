"""Benchmarks in their published schemas, from small files of our own."""

import json
import shutil

import pytest
from api import tasks

from gspax import data
from gspax.commands.eval import find_task
from gspax.config import Task
from gspax.data import Problem
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.rewards.program_tests import from_answer

GSM8K = [
    {"question": "Two cats have how many legs?", "answer": "4 + 4 = <<4+4=8>>8\n#### 8"},
    {"question": "A thousand cats?", "answer": "#### 4,000"},
]
CODE = [
    {
        "question_content": "Print the sum of two integers.",
        "question_id": str(month),
        "starter_code": starter,
        "contest_date": f"2024-0{month}-01" + "T00:00:00" * (month != 5),
        "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
        "private_test_cases": json.dumps([{"input": "2 2\n", "output": "4\n", "testtype": "stdin"}]),
        "metadata": "{}",
    }
    for month, starter in ((1, ""), (5, "class Solution:\n    pass"), (9, ""))
]


@pytest.fixture
def write(tmp_path):
    def write(rows, name="test.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    return write


def test_gsm8k_is_read_whole_and_in_order(write):
    task = tasks.gsm8k(write(GSM8K), samples=4, temperature=0.6)
    assert (task.name, task.samples, task.temperature, task.data.heldout_count) == ("gsm8k", 4, 0.6, 2)
    first, second = map(task.data.heldout, range(2))
    assert first.prompt.startswith(GSM8K[0]["question"]) and "\\boxed{}" in first.prompt
    assert task.reward(first, "so it is \\boxed{8}").value == 1.0 and task.reward(first, "\\boxed{9}").value == 0.0
    assert task.reward(second, "\\boxed{4000}").reason == "equal"


def test_a_truncated_thought_has_no_reward_and_no_vote(write):
    task = tasks.gsm8k(write(GSM8K))
    problem = task.data.heldout(0)
    for completion, reward, vote in [
        ("<think>\\boxed{8}", 0.0, None),
        ("<think>\\boxed{9}</think>\\boxed{8.0}", 1.0, "8"),
        ("\\boxed{\\frac{16}{2}}", 1.0, "8"),
    ]:
        assert task.reward(problem, completion).value == reward
        assert task.vote(completion) == vote


def test_math500_keeps_level_and_subject(write):
    row = {"problem": "$x^2=4$, $x>0$", "answer": "2", "solution": "…", "subject": "Algebra", "level": 2}
    problem = tasks.math500(write([row | {"unique_id": "a/1.json"}])).data.heldout(0)
    assert problem.metadata == {"subject": "Algebra", "level": 2, "unique_id": "a/1.json"} and problem.answer == "2"


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "Find x.", "answer": "204", "id": 60},
        {"ID": "2024-I-1", "Problem": "Find x.", "Solution": "Thus \\boxed{204}.", "Answer": 204},
        {"problem": "Find x.", "solution": "Thus $\\boxed{204}$."},
    ],
)
def test_aime_in_any_of_its_published_spellings(row, write):
    task = tasks.aime24(write([row]), **tasks.QWEN3_THINKING)
    assert (task.temperature, task.top_p, task.top_k, task.max_tokens) == (0.6, 0.95, 20, 32_768)
    assert task.reward(task.data.heldout(0), "\\boxed{204}").value == 1.0


def test_livecodebench_by_date_with_hidden_tests(write):
    everything = tasks.livecodebench(write(CODE))
    some = tasks.livecodebench(write(CODE).parent, since="2024-05-01", until="2024-09-01")
    assert (everything.data.heldout_count, some.data.heldout_count, some.vote) == (3, 1, None)
    problem = some.data.heldout(0)
    assert problem.metadata["question_id"] == "5" and "class Solution" in problem.prompt
    assert [expected for _, expected in from_answer(problem.answer).cases] == ["3\n", "4\n"]


def test_livecodebench_runs_programs(write):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    task = tasks.livecodebench(write(CODE))
    problem = task.data.heldout(0)
    right = "<think>hm</think>\n```python\nprint(sum(map(int, input().split())))\n```"
    assert task.reward(problem, right).value == 1.0
    wrong = task.reward(problem, "```python\nprint(3)\n```")
    assert (wrong.value, wrong.reason) == (0.0, "wrong: test 2")


def test_rows_that_do_not_fit_are_reported_together_with_their_place(write):
    path = write([*GSM8K, {"question": "?"}, {"question": "", "answer": "1"}])
    with pytest.raises(UserError, match=r"2 rows cannot be used .*line 3: answer: there is no such column.*line 4: "):
        tasks.gsm8k(path).data.heldout_count  # noqa: B018
    with pytest.raises(UserError, match="wanted at least one problem, got none"):
        tasks.livecodebench(write(CODE), since="2025").data.heldout(0)


def test_the_description_follows_the_content_not_the_path(write):
    one, moved = describe(tasks.gsm8k(write(GSM8K))), describe(tasks.gsm8k(write(GSM8K, "moved.jsonl")))
    other = describe(tasks.gsm8k(write(GSM8K[:1])))
    assert one == moved != other
    assert json.loads(json.dumps(one)) == one


def test_training_data_can_exclude_a_benchmark(write):
    benchmark = tasks.gsm8k(write(GSM8K)).data
    rows = [*({"question": row["question"], "answer": "1"} for row in GSM8K), {"question": "New?", "answer": "1"}]
    held = [{"question": "Held out?", "answer": "1"}]
    source = data.sequence(rows, heldout=held, prompt="question", exclude=(benchmark,))
    assert {source.train(i).prompt for i in range(6)} == {"New?"}


MINE = Task(name="mine", data=data.sequence(GSM8K), reward=lambda problem, completion: 0.0, problems=1)
NO_TASK = Problem("a", "b")


def test_a_task_is_found_by_name(write):
    path = write(GSM8K)
    own = {"mine": MINE}
    assert find_task("mine", own, {"samples": 3}).samples == 3
    assert describe(find_task(f"gsm8k={path}", own, {})) == describe(tasks.gsm8k(path))
    assert find_task(f"gspax.evaluation.tasks.gsm8k={path}", own, {}).name == "gsm8k"
    assert find_task(f"{__name__}.MINE", {}, {}) == MINE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", r"--tasks: wanted a name that exists .*did you mean 'gsm8k'\?.*the experiment's tasks \(mine\)"),
        ("livecodebench", r"--tasks: wanted livecodebench=PATH, got 'livecodebench'"),
        (f"{__name__}.NO_TASK", r"wanted the name of a task, got .*, which names a Problem"),
    ],
)
def test_a_name_that_is_no_task_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        find_task(name, {"mine": MINE}, {})
