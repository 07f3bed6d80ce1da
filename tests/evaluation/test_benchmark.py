"""A task's completions do not depend on chunks or slots; its summary, files and page show them all."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import jax
import published
import pytest
import tiny
from api import (
    Completion,
    InProcess,
    PhaseBar,
    RunDir,
    Texts,
    checkpoint,
    evaluate_task,
    grading,
    in_process,
    loop,
    make_mesh,
    make_sampler,
    read_rows,
)
from api import main as program
from small_experiment import experiment
from stub_experiment import experiment as stub

from gspax import config
from gspax.commands import eval as eval_command
from gspax.data import Problem
from gspax.errors import UserError
from gspax.evaluation import benchmark
from gspax.experiment import validate
from gspax.report import evaluation_page
from gspax.report.run_page import describe_task
from gspax.report.run_page import write as write_report
from gspax.rewards.scores import Score

pytestmark = pytest.mark.usefixtures("one_device")

PROBLEMS, SAMPLES = 5, 4


class Held:
    heldout_count = PROBLEMS

    def heldout(self, index):
        return [experiment.data.heldout(each) for each in range(PROBLEMS)][index]


def parity(problem, completion):
    """1 for an even number of characters."""
    right = len(completion) % 2 == 0
    return Score(float(right), "even: all" if right else "odd")


def vote(completion):
    return completion[:1] or None


TASK = config.Task(name="parity", data=Held(), reward=parity, vote=vote, samples=SAMPLES)


@pytest.fixture(scope="module")
def policy():
    mesh = make_mesh(config.Mesh(), jax.devices()[:1])
    sampler = InProcess(make_sampler(experiment.model, mesh, mesh))
    return benchmark.EvaluatedPolicy(sampler, sampler.push(tiny.params(experiment.model), 0), experiment)


def run(policy, task=TASK, **sampling):
    task = benchmark.apply_defaults(task, policy)
    changed = replace(policy, settings=replace(experiment, sampling=replace(experiment.sampling, **sampling)))
    return list(benchmark.run_task(task, changed, jax.random.key(0), PhaseBar(task.problems, task.name)))


def test_a_sample_does_not_depend_on_chunks_or_slots(policy):
    # all 20 samples at once; then chunks of two problems whose eight samples share three slots, the last one filled up
    together, apart = run(policy, prompts=8, group=4), run(policy, prompts=2, group=2, slots=3)
    assert [len(chunk) for chunk in (*together, *apart)] == [20, 8, 8, 4]
    samples = [each for chunk in apart for each in chunk]
    assert together == [samples]
    assert [(each.problem, each.sample) for each in samples] == [
        (p, n) for p in range(PROBLEMS) for n in range(SAMPLES)
    ]
    assert len({each.completion.texts.completion for each in samples}) > 5
    (other,) = run(policy, replace(TASK, name="other"), prompts=8, group=4)
    assert [each.completion.texts for each in other] != [each.completion.texts for each in samples]


def test_chunks_have_the_prompts_of_training_and_fewer_slots_than_samples():
    def plan(problems, samples, shards, **settings):
        task = replace(TASK, problems=problems, samples=samples)
        chunks, sampling = benchmark.plan_chunks(task, config.Sampling(prompts=4, group=8, **settings), shards)
        assert sampling.group == samples
        return [len(ids) for ids in chunks], sampling.prompts, sampling.slots

    assert plan(6, 16, 1) == ([4, 2], 4, 32)
    assert plan(6, 2, 1) == ([4, 2], 4, 0)
    assert plan(3, 1, 8) == ([3], 8, 0)
    assert plan(4, 16, 8, slots=12) == ([4], 8, 16)


@pytest.fixture
def settings(monkeypatch):
    """The settings of the sampler's calls, which generate nothing."""
    found = []

    def fake(params, prompts, ids, key, options, earlier, on_ended):
        found.append(options.sampling)
        raise InterruptedError

    monkeypatch.setattr(in_process, "sample", fake)
    return found


def test_a_task_is_sampled_with_its_own_settings(policy, settings):
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "max_tokens": 3, "max_prompt_tokens": 4}
    with pytest.raises(InterruptedError):
        run(policy, replace(TASK, **own), temperature=0.5, top_k=3, top_p=0.5)
    assert {name: getattr(settings[0], name) for name in own} == own and settings[0].group == SAMPLES


def sample(problem, number, reward, vote=None, **fields):
    fields = {"length": 10, "finished": True, "rewards": (reward,)} | fields
    return benchmark.TaskSample(problem, number, Completion(**fields), vote)


def test_a_vote_that_fails_is_none(capsys):
    """An evaluation is repeated exactly, so a run that ended there would end there again."""

    def vote(completion):
        return float(completion)

    completion = Completion(length=1, finished=True, rewards=(1.0,), texts=Texts("?", "1", "one"))
    for _ in range(2):
        assert benchmark._make_sample(replace(TASK, vote=vote), 0, 0, completion).vote is None
    assert capsys.readouterr().err.count("evaluation: parity: vote failed") == 1
    numbered = replace(completion, texts=Texts("?", "1", "2"))
    assert benchmark._make_sample(replace(TASK, vote=vote), 0, 0, numbered).vote == 2.0


def test_the_summary():
    rewards = [[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    votes = [["8", "8", "9", "8"], [None, None, "1", "2"]]
    fields = {(0, 0): {"length": 30, "finished": False}, (0, 2): {"error": "late"}}
    samples = [sample(p, n, rewards[p][n], votes[p][n], **fields.get((p, n), {})) for p in range(2) for n in range(4)]
    found = benchmark.summarize(replace(TASK, problems=3), samples)
    assert (found["problems"], found["skipped"], found["samples"]) == (2, 1, 4)
    assert (found["truncated"], found["failed"]) == (0.125, 0.125)
    assert found["tokens"] == {"mean": 12.5, "max": 30, "total": 100}
    assert found["reward"]["mean"] == found["pass"]["1"]["mean"] == 0.5
    assert {k: each["mean"] for k, each in found["pass"].items()} == {"1": 0.5, "2": 0.75, "4": 1.0}
    assert {k: each["mean"] for k, each in found["majority"].items()} == {"4": 0.75}
    assert 0 <= found["reward"]["low"] < 0.5 < found["reward"]["high"] <= 1
    metrics = benchmark.metrics("x", found)
    assert (
        metrics["eval/x/pass_at_4"] == 1.0 and metrics["eval/x/maj_at_4"] == 0.75 and "eval/x/pass_at_1" not in metrics
    )


def test_rewards_between_0_and_1_have_no_pass_at_k_and_one_problem_no_interval():
    found = benchmark.summarize(replace(TASK, samples=2, vote=None), [sample(0, 0, 0.5), sample(0, 1, 1.0)])
    assert found["reward"] == {"mean": 0.75, "low": None, "high": None}
    assert "pass" not in found and "majority" not in found
    assert set(benchmark.metrics("x", found)) == {
        f"eval/x/{name}" for name in ("reward", "truncated", "reward_failed", "tokens")
    }


@pytest.mark.parametrize("is_local", [True, False])
def test_the_files_of_a_task_hold_every_completion(is_local, policy, bucket, tmp_path):
    folder = (tmp_path if is_local else bucket[0]) / "step_000001"
    task = benchmark.apply_defaults(replace(TASK, name="parity.v2"), policy)
    arguments = task, policy, jax.random.key(0), folder
    summary = evaluate_task(*arguments)
    assert sorted(each.name for each in folder.iterdir()) == [f"parity.v2.{end}" for end in ("html", "json", "jsonl")]
    rows = read_rows(folder / "parity.v2.jsonl")
    assert len(rows) == PROBLEMS * SAMPLES
    assert all(row["reason"] == ("even: all" if row["reward"] else "odd") for row in rows)
    result = json.loads((folder / "parity.v2.json").read_text())
    (samples,) = run(policy, task)
    assert result["summary"] == summary == benchmark.summarize(task, samples)
    assert rows == [benchmark.to_json(task, each) for each in samples]
    assert result["task"]["samples"] == SAMPLES and result["environment"]["packages"]["jax"]
    evaluate_task(*arguments, show=True)
    assert (folder / "parity.v2-2.json").exists() and len(read_rows(folder / "parity.v2-2.jsonl")) == 20


def test_problems_that_are_left_out_are_counted(policy, tmp_path, capsys):
    class Holes(Held):
        def heldout(self, index):
            if index in (1, 4):
                raise FileNotFoundError(index)
            return super().heldout(index)

    summary = evaluate_task(replace(TASK, data=Holes()), policy, jax.random.key(0), tmp_path, show=True)
    assert (summary["problems"], summary["skipped"]) == (3, 2)
    printed = capsys.readouterr()
    assert "parity: 3 problems x 4 samples, 2 left out\n" in printed.out
    assert "; problem 4: " in printed.err and ": 2 of 5 problems left out of the evaluation\n" in printed.err
    assert describe_task(summary)[0] == "3 x 4, 2 left out"


def test_failures_are_judged_over_the_whole_task(policy, tmp_path):
    """One of 20 completions, in a chunk of 4: no reason to end a run, or to warn."""
    first = []

    def late_once(problem, completion):
        first.append(completion)
        if len(first) == 1:
            raise TimeoutError("judge")
        return 1.0

    samples = [each for chunk in run(policy, replace(TASK, reward=late_once), prompts=1, group=4) for each in chunk]
    assert len(samples) == 20 and sum(bool(each.completion.error) for each in samples) == 1


def test_a_task_whose_reward_always_fails_is_an_error(policy, monkeypatch):
    def gone(problem, completion):
        raise TimeoutError("judge")

    with pytest.raises(UserError, match=r"^task parity: reward: .*gone failed for 20 of 20 completions .*: judge "):
        run(policy, replace(TASK, reward=gone), prompts=1, group=4)
    monkeypatch.setattr(grading, "SURE", 8)
    with pytest.raises(UserError, match="failed for 8 of 8 completions"):
        run(policy, replace(TASK, reward=gone), prompts=1, group=4)


def row(problem, sample, reward, **more):
    """A line of a task's file."""
    return {"problem": problem, "sample": sample, "reward": reward, "length": 10, "finished": True} | more


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=y>\u2028 $\\frac{1}{2}$ \x00"


def test_the_page_holds_texts_as_data_only_and_needs_no_network(tmp_path):
    rows = [
        row(0, n, n / 2, prompt=HOSTILE, completion=HOSTILE * (1 + 2000 * n), answer="<b>", reason="odd")
        for n in range(3)
    ]
    evaluation_page.write(tmp_path / "x.html", "<x>", ["mean <reward>"], rows)
    text = (tmp_path / "x.html").read_text()
    assert "<h1>&lt;x&gt;</h1>" in text and "mean &lt;reward&gt;" in text
    assert text.count("<script") == text.count("</script>") == 2 and "<img" not in text and "http" not in text
    held = json.loads(re.search(r"id=data>(.*?)</script>", text, re.DOTALL)[1])
    (formula,) = held["tex"]
    assert formula == ["$\\frac{1}{2}$", ["mfrac", {}, ["mn", {}, "1"], ["mn", {}, "2"]]]
    texts = ["".join(formula[0] if part == 0 else part for part in each["completion"]) for each in held["rows"]]
    assert texts[0] == HOSTILE
    assert len(texts[2]) < evaluation_page.LONGEST + 100 < len(rows[2]["completion"])
    assert "innerHTML" not in text and html.unescape("&lt;") == "<"


# As much of a document as the page's script uses: every element is {tag, children, ...}.
DOCUMENT = r"""
const fs = require("fs"), page = fs.readFileSync(process.argv[1], "utf8");
const [data, script] = [...page.matchAll(/<script[^>]*>(.*?)<\/script>/gs)].map(each => each[1]);
class Element {
  constructor(tag) { this.tag = tag; this.children = []; this.attributes = {}; }
  append(...all) { this.children.push(...all); }
  replaceChildren(...all) { this.children = all; }
  setAttribute(name, value) { this.attributes[name] = value; }
  addEventListener(type, listener) { this[type] = listener; }
  set textContent(text) { this.children = text === "" ? [] : [String(text)]; }
  get textContent() { return this.children.map(each => each.textContent ?? String(each)).join(""); }
  get text() { return this.textContent; }
}
const found = {}, values = JSON.parse(process.argv[2]);
const named = id => found[id] ??= new Element(id);
named("data").textContent = data;
named("filters").elements = { reason: new Element("select"), source: { checked: !!values.source } };
globalThis.FormData = class { *[Symbol.iterator]() {
  for (const name of ["reward", "end", "problems", "problem", "reason", "text"]) yield [name, values[name] ?? ""];
} };
globalThis.document = {
  getElementById: named, createElement: tag => new Element(tag), querySelector: () => ({ namespaceURI: "math" }),
  createElementNS: (space, tag) => new Element(`${space}:${tag}`),
};
new Function(script)();
const tree = each => each instanceof Element ? [each.tag, ...each.children.map(tree)] : String(each);
console.log(JSON.stringify({ count: named("count").textContent, list: named("list").children.map(tree) }));
"""


def test_the_script_of_the_page_filters_rows_and_draws_formulas(tmp_path):
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    texts = ["It is $\\frac12$.", "It is $\\unknown$, \\boxed{2}.", "<b>\U0001d465</b>" + "long " * 200]
    rows = [row(n, 0, n / 2, prompt="Is $x$ it?", completion=text, answer="1") for n, text in enumerate(texts)]
    evaluation_page.write(tmp_path / "x.html", "x", [], rows)

    def show(**values):
        command = ["node", "-e", DOCUMENT, str(tmp_path / "x.html"), json.dumps(values)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    shown = show()
    assert shown["count"] == "3 of 3 completions"
    (head, prompt, completion, reference), other, long = (each[1:] for each in shown["list"])
    assert "problem 0, sample 0" in str(head) and reference[-1] == ["pre", "1"]
    assert prompt[-1] == ["pre", "Is ", ["math:math", ["math:mi", "x"]], " it?"]
    half = ["math:mfrac", ["math:mn", "1"], ["math:mn", "2"]]
    assert completion == ["pre", "It is ", ["math:math", half], "."]
    assert other[2] == ["pre", "It is $\\unknown$, ", ["math:math", ["math:mrow", ["math:mn", "2"]]], "."]
    assert long[3][2] == ["pre", texts[2]]
    assert show(text="FRAC1", reward="zero")["count"] == "1 of 3 completions"
    assert show(source=True)["list"][0][3] == ["pre", texts[0]]


def test_a_page_that_would_be_too_large_names_the_file_with_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_page, "BUDGET", 100)
    monkeypatch.setattr(evaluation_page.select, "__defaults__", (100,))
    rows = [row(0, n, 0.0, prompt="?", completion="a" * 40) for n in range(9)]
    evaluation_page.write(tmp_path / "x.html", "x", [], rows)
    assert "the first 2 of 9 completions; all are in x.jsonl" in (tmp_path / "x.html").read_text()


def with_tasks(*tasks):
    return replace(stub, evaluation=config.Evaluation(tasks=tasks))


class Endless:
    def heldout(self, index):
        return Problem(str(index), "")


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        ((TASK, TASK), "evaluation.tasks.1.name: wanted a name that no other task has, got 'parity'"),
        ((replace(TASK, samples=0),), "evaluation.tasks.parity.samples: wanted at least 1, got 0"),
        (
            (replace(TASK, temperature=-1.0),),
            "evaluation.tasks.parity.temperature: wanted 0, or 0.001 to 1000, got -1.0",
        ),
        ((replace(TASK, name="a/b"),), "evaluation.tasks.0.name: wanted letters, digits, "),
        ((replace(TASK, reward=vote),), "evaluation.tasks.parity.reward: wanted a function of (problem, completion), "),
        ((replace(TASK, vote=parity),), "evaluation.tasks.parity.vote: wanted a function of (completion), "),
        ((replace(TASK, data=3),), "evaluation.tasks.parity.data: wanted an object with heldout, got int"),
        (
            (replace(TASK, data=Endless()),),
            "evaluation.tasks.parity.problems: wanted a number, because Endless has no ",
        ),
        ((replace(TASK, max_tokens=505),), "evaluation.tasks.parity.max_tokens: wanted prompt and completion within "),
        ((3,), "evaluation.tasks: wanted a tuple of Tasks, got (3,)"),
    ],
)
def test_tasks_are_checked_as_other_fields_are(tasks, sentence):
    (found,) = validate(with_tasks(*tasks))
    assert found.startswith(sentence)


def test_tasks_in_training_are_metrics_and_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "evaluate_heldout", lambda *args, **settings: ({"eval/reward": 0.5}, [], []))
    schedule, evaluation = replace(experiment.schedule, steps=0), config.Evaluation(tasks=(TASK,))
    loop.train(replace(experiment, warm_start=None, schedule=schedule, evaluation=evaluation), tmp_path)
    metrics = [row for row in read_rows(tmp_path / "metrics.jsonl") if "eval/parity/reward" in row]
    run = RunDir(tmp_path)
    (result,) = run.tasks.glob("*/*.json")
    assert result.parent == run.tasks_at(0)
    assert metrics[0]["eval/parity/reward"] == json.loads(result.read_text())["summary"]["reward"]["mean"]
    write_report(tmp_path)
    assert '<a href="evaluations/step_000000/parity.html">parity</a>' in run.report.read_text()


def write_tokenizer(folder):
    """A tokenizer of bytes with a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{% if enable_thinking %} ?{% endif %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_published_checkpoint_is_evaluated(tmp_path, capsys):
    pytest.importorskip("transformers")
    model = replace(tiny.CONFIGS["dense"], vocab_size=300, max_position_embeddings=512)
    folder = published.save(tmp_path / "hf", model, published.published(model, published.random_params(model)))
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    rows = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["eval", "--from", str(folder), "--workdir", str(tmp_path / "out"), "--tasks", f"gsm8k={tmp_path}"]
    assert program.main([*command, "--samples", "2", "--max-tokens", "4", "--top-k", "5", "sampling.prompts=8"]) == 0
    assert "gsm8k: 2 problems x 2 samples\n  mean reward  0." in capsys.readouterr().out
    task = json.loads((tmp_path / "out" / "gsm8k.json").read_text())["task"]
    assert (task["temperature"], task["top_k"], task["max_tokens"]) == (0.6, 5, 4)
    assert len(read_rows(tmp_path / "out" / "gsm8k.jsonl")) == 4
    wrong = {"loss.clip_low=1": "unknown key 'loss.clip_low'", "model.vocab_size=9": "at least the tokenizer's 257"}
    for override, sentence in wrong.items():
        assert program.main([*command, override]) == 2 and sentence in capsys.readouterr().err


def test_settings_without_names_are_of_the_tasks_of_the_experiment():
    other = replace(TASK, name="other", temperature=0.0)
    found = eval_command.find_tasks(None, (TASK, other), {"samples": 9})
    assert found == (replace(TASK, samples=9), replace(other, samples=9))
    assert eval_command.find_tasks("other", (TASK, other), {"samples": 9}) == found[1:]
    with pytest.raises(UserError, match=r"wanted --tasks, .* no tasks of its own"):
        eval_command.find_tasks(None, (), {"samples": 9})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "gsm8k"], "wanted the FILE of an experiment, or --from HF without one"),
        (["x.py", "--from", "y"], "wanted the FILE of an experiment, or --from HF without one"),
        (["--from", "y"], "wanted --tasks with --from"),
        (["--from", "y", "--tasks", "gsm8k", "--step", "3"], "--step is for the checkpoints of a run, not for --from"),
    ],
)
def test_options_that_do_not_fit_together(arguments, message, tmp_path, capsys):
    assert program.main(["eval", *arguments, "--workdir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
