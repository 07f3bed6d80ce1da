"""The report is complete, self-contained and safe against hostile completions."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
from api import Recorder, RunDir, open_run

from gspax.errors import UserError
from gspax.report import run_page
from gspax.report.curves import draw_panel

HOSTILE = "<script>alert(1)</script><img src=x onerror=y>&amp;\x1b[2J\u202egnp.exe\x00\n'\""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 50 steps with every metric of the report's panels, one without a panel, and hostile completions."""
    description = {"name": "sort <b>", "loss": {"function": "gspax.losses.gspo", "clip_low": 3e-4}}
    run = open_run(tmp_path_factory.mktemp("run"), description)
    with Recorder(run.warm_start, 0) as recorder:
        recorder.write_metrics(1, {"loss": 2.0})
    names = [metric for panel in run_page.PANELS for metric in panel.lines.values()]
    with Recorder(run, 0) as recorder:
        recorder.write_metrics(0, {"eval/reward": 0.25, "eval/greedy_reward": 0.5})
        for step in range(1, 51):
            recorder.write_metrics(step, {name: 0.1 + step / 100 for name in names if not name.startswith("eval/")})
            recorder.write_metrics(step, {"my<metric>": math.nan if step == 7 else 1.0, "policy/kl": math.inf})
        recorder.write_metrics(50, {"eval/reward": 0.875, "eval/greedy_reward": 1.0})
        rows = [{"prompt": f"{n}<p>=", "answer": "1", "completion": HOSTILE, "reward": n / 2} for n in range(3)]
        recorder.write_samples_to(run.before, rows)
        recorder.write_samples_to(run.after, [*rows[:2], {"prompt": "other", "completion": "", "reward": math.nan}])
    assert run_page.write(run.path) == run.report
    return run


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "path", "use", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_summary_has_the_first_completion_before_and_after(run, tmp_path):
    first, greedy, prompt, before, after, title, *_ = run_page.summarize(run.path).splitlines()
    assert first == "held-out reward, sampled: 0.250 at step 0, 0.875 at step 50"
    assert (greedy[:6], title) == ("greedy", "Files:")
    assert prompt == "held-out prompt: 0<p>="
    assert before.startswith("before: <script>alert(1)") and after == before.replace("before", "after")
    assert "before" not in run_page.summarize(tmp_path)  # a run without completions


def test_the_page_is_self_contained(run):
    page = run.report.read_text()
    assert "http" not in page and "@import" not in page and "//" not in re.sub(r"</?\w[^>]*>", "", page)
    tags = Tags(page)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(tags.tags)
    references = [value for name, value in tags.attributes if name in ("src", "href", "xlink:href")]
    assert all(value.startswith("#") for value in references)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_completions_are_escaped(run):
    page = run.report.read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\\x1b[2J" in page and "\\u202e" in page and "\\x00" in page
    assert not any(char in page for char in "\x1b\u202e\x00")
    assert "my&lt;metric&gt;" in page and "sort &lt;b&gt;" in page


def test_the_report_shows_improvement_curves_and_settings(run):
    page = run.report.read_text()
    assert "<b>0.250</b> at step 0" in page and "<b>0.875</b> at step 50" in page
    for panel in run_page.PANELS:
        assert panel.title in page
    assert page.count("<svg") == len(run_page.PANELS) + 2  # the metric without a panel, the warm start's loss
    assert "loss.clip_low" in page and "3e-4" in page and "packages.jax" in page
    assert page.count("&lt;p&gt;=") == 2  # prompts with completions before and after training


def test_failed_rewards_are_counted_by_error_and_their_newest_completions_shown(run, tmp_path):
    assert "Failed rewards" not in run.report.read_text()
    with Recorder(RunDir(tmp_path), 0) as recorder:
        recorder.write_metrics(8, {"reward/failed": 0.5})
        for step in (3, 7):
            row = {"prompt": "2<3", "completion": f"at {step} {HOSTILE}", "reward": 0.0, "error": "late"}
            recorder.write_failures(step, [row] * step)
        others = [{**row, "error": f"ValueError: <{n}>"} for n in range(30)]
        recorder.write_failures(8, [*others, others[-1]])
    page = run_page.write(tmp_path).read_text()
    assert "41 completions of 3 steps have no reward of their own. The 20 most frequent of 31 errors" in page
    late, second = re.findall(r"<tr><td>(\d+)</td><td><code>([^<]*)</code></td><td>(\d+)</td>", page)[:2]
    assert late == ("10", "late", "7") and second == ("2", "ValueError: &lt;29&gt;", "8")
    assert page.count("ValueError") == 19 and "at 7 &lt;script&gt;" in page and "at 3" not in page
    assert Tags(page).open == []


def test_each_panel_is_drawn_once(tmp_path, monkeypatch):
    with Recorder(RunDir(tmp_path), 0) as recorder:
        recorder.write_metrics(1, {"reward/mean": 0.5, "my/metric": 1.0})
    drawn = []

    def draw(axes, panel, series):
        drawn.append(panel.title)
        draw_panel(axes, panel, series)

    monkeypatch.setattr(run_page, "draw_panel", draw)
    run_page.write(tmp_path)
    assert drawn == ["Reward", "my/metric"]


def test_a_metric_that_is_always_zero_has_no_panel_but_is_named(tmp_path):
    with Recorder(RunDir(tmp_path), 0) as recorder:
        for step in range(1, 4):
            recorder.write_metrics(step, {"reward/mean": 0.0, "alarm/<low>": 0.0, "optim/skipped": float(step == 2)})
    page = run_page.write(tmp_path).read_text()
    assert re.findall(r'aria-label="([^"]*)"', page) == ["Reward", "optim/skipped"]
    assert "0 at every step: alarm/&lt;low&gt;." in page


def test_a_text_keeps_its_lines_and_an_instruction_its_empty_box(tmp_path):
    prompt = "How many?\nPut the answer in \\boxed{}."
    with Recorder(RunDir(tmp_path), 0) as recorder:
        recorder.write_metrics(1, {"reward/mean": 0.5})
        row = {"prompt": prompt, "answer": "3", "completion": "One.\r\n\\boxed{3}", "reward": 1.0}
        recorder.write_samples_to(RunDir(tmp_path).before, [row])
        recorder.write_samples_to(RunDir(tmp_path).after, [row])
    page = run_page.write(tmp_path).read_text()
    assert f"<code>{prompt}</code>" in page
    assert page.count('<code>One.\\r\n<math title="\\boxed{3}"><mrow class="boxed">') == 2


def test_rewards_and_tasks_come_first_and_completions_have_equal_columns(tmp_path):
    run = RunDir(tmp_path)
    with Recorder(run, 0) as recorder:
        recorder.write_metrics(1, {"reward/mean": 0.5, "eval/reward": 0.5, "policy/entropy": 1.0, "my/metric": 1.0})
        rows = [{"prompt": f"<{n}>=", "answer": "way " * 20, "completion": "1", "reward": 1.0} for n in range(7)]
        recorder.write_samples_to(run.before, rows)
        recorder.write_samples_to(run.after, rows)
    interval = {"mean": 0.5, "low": 0.4, "high": 0.6}
    summary = {"problems": 9, "samples": 1, "reward": interval, "truncated": 0.0, "tokens": {"mean": 2.0}}
    run.tasks_at(1).mkdir(parents=True)
    (run.tasks_at(1) / "small.json").write_text(json.dumps({"summary": summary}))
    page = run_page.write(tmp_path).read_text()
    order = (
        "class=tiles",
        '"Reward"',
        '"Held-out reward"',
        ">Tasks<",
        ">before<",
        "3 more",
        '"Entropy"',
        '"my/metric"',
    )
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    assert page.count('aria-label="Reward"') == 1 and Tags(page).open == []
    first, rest = (page.index(f"&lt;{n}&gt;=") for n in (3, 4))
    assert first < page.index("<details><summary>3 more") < rest  # folded
    assert page.count(f"<details><summary>reference</summary><code>{'way ' * 20}</code></details>") == 7
    heads = "<th>prompt</th><th>before</th><th>after</th>"
    assert page.count(f"<div class=samples><div class=wide><table><tr>{heads}") == 1 and page.count(heads) == 2


@pytest.mark.parametrize(("answer", "reference"), [("", ""), ("42", "<details open><summary>reference</summary>")])
def test_a_few_completions_and_short_answers_are_not_folded(tmp_path, answer, reference):
    run = RunDir(tmp_path)
    with Recorder(run, 0) as recorder:
        recorder.write_metrics(1, {"reward/mean": 0.5})
        rows = [{"prompt": f"{n}=", "answer": answer, "completion": "1", "reward": 1.0} for n in range(4)]
        recorder.write_samples_to(run.before, rows)
        recorder.write_samples_to(run.after, rows)
    page = run_page.write(tmp_path).read_text()
    assert ">before<" in page and "<details>" not in page
    assert set(re.findall("<details.*?</summary>", page)) == {*filter(None, [reference])}


def test_a_run_without_evaluation_or_samples_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    page = run_page.write(tmp_path).read_text()
    assert "Reward" in page and "Held-out" not in page


@pytest.mark.parametrize("content", [None, "", '{"step": 1}\n'])
def test_a_run_without_metrics_is_one_error(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match="wanted the directory of a run with metrics"):
        run_page.write(tmp_path)
