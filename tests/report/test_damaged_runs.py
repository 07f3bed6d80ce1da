"""Every tool that reads a run answers a damaged file with a page, a warning or a sentence, never with a traceback."""

import json
import os
import shutil
from functools import partial

import pytest
from api import Recorder, RunDir, main, open_run

PIPE, LOOP = object(), object()
SUMMARY = {"problems": 2, "samples": 1, "reward": {"mean": 0.5, "low": None, "high": None}, "truncated": 0.0}
SUMMARY |= {"pass": {}, "majority": {}, "tokens": {"mean": 3.0}}
ROW = {"prompt": "1+1=", "answer": "2", "completion": "2", "reward": 1.0, "advantage": 0.5, "length": 1}
NUMBERS = {"perf/tokens_per_second": 10.0, "time/step": 1.0, "reward/mean": 0.5}
FILES = (
    *("experiment.json", "environment.json", "metrics.jsonl", "evaluations.jsonl", "newest_checkpoint.json"),
    *("samples/before.jsonl", "samples/after.jsonl", "samples/step_000002.jsonl", "samples/failed_000002.jsonl"),
    *("evaluations/step_000002/own.json", "evaluations/step_000002/own.jsonl", "warm_start/metrics.jsonl"),
    *("report.html", "lock.json", "checkpoints", "start"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small run with every file, but checkpoints."""
    run = open_run(tmp_path_factory.mktemp("whole") / "run", {"name": "own", "seed": 0})
    with Recorder(run.warm_start, 0) as recorder:
        recorder.write_metrics(1, {"loss": 2.0})
    with Recorder(run, 0) as recorder:
        for step in range(3):
            recorder.write_metrics(step, {**NUMBERS, "eval/reward": 0.5} if step else {"eval/reward": 0.25})
        for path in (run.before, run.after):
            recorder.write_samples_to(path, [ROW])
        recorder.write_samples(2, [ROW, {**ROW, "reward": 0.0}])
        recorder.write_failures(2, [{**ROW, "error": "late"}])
    folder = run.tasks_at(2)
    folder.mkdir(parents=True)
    (folder / "own.json").write_text(json.dumps({"summary": SUMMARY}))
    (folder / "own.jsonl").write_text(json.dumps(ROW) + "\n")
    run.evaluations.write_text(json.dumps({"step": 2, "eval/reward": 0.5, "evaluation": {"problems": 4}}) + "\n")
    run.newest.write_text('{"step": 2}')
    return run.path


def spoil_values(value):
    """Variants of a JSON line with one value of another type."""
    for name in value:
        for other in ("abc", [1], 1e300):
            yield {**value, name: other}


def damages(file):
    """Contents instead of a file's; None for a folder, PIPE for a pipe without a writer, LOOP for a link to itself."""
    yield from (
        None,
        PIPE,
        LOOP,
        b"",
        b"5",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b"{",
        b"\xff\x00\n",
        b"[" * 100_000,
        b"5\n[]\nnull\n",
    )
    if file == "metrics.jsonl":
        lines = [{"step": 1, **NUMBERS, r"$\class{x}$": 1.0}, {"step": 2, "reward/mean": 1.0}]
        yield b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    line = {"metrics.jsonl": {"step": 1, **NUMBERS}, "environment.json": {"packages": {}, "command": []}}.get(file)
    line = line or (ROW if file.endswith(".jsonl") else {"summary": SUMMARY} if file.endswith("own.json") else {})
    line = line or {"name": "own", "seed": 0, "step": 2}
    before = json.dumps({"step": 1, **NUMBERS}).encode() + b"\n" if file == "metrics.jsonl" else b""
    for spoiled in spoil_values(line):
        yield before + json.dumps(spoiled).encode() + b"\n"
    if file.endswith("own.json"):
        for summary in spoil_values(SUMMARY):
            yield json.dumps({"summary": summary}).encode()


TOOLS = {
    "compare": lambda run: ["compare", str(run), f"b={run}", "--out", str(run.parent / "out")],
    "samples": lambda run: ["samples", str(run)],
    "worst": lambda run: ["samples", str(run), "--worst", "2"],
    "problem": lambda run: ["samples", str(run), "--problem", "1+1="],
    "diagnose": lambda run: ["diagnose", str(run)],
    "check": lambda run: ["check", str(run)],
    "report": lambda run: ["report", str(run)],
}
READ = {  # the files that a tool reads; the others change nothing
    "compare": ("experiment.json", "metrics.jsonl", "checkpoints"),
    "samples": ("samples/before", "samples/step_000002", "evaluations/step_000002/own"),
    "diagnose": ("experiment.json", "metrics.jsonl", "samples/step_000002.jsonl"),
    "check": ("newest_checkpoint.json", "checkpoints", "start", "experiment.json"),
    "report": tuple(set(FILES) - {"samples/after.jsonl", "evaluations.jsonl", "evaluations/step_000002/own.jsonl"}),
}
READ |= {"worst": READ["samples"][1:2], "problem": READ["samples"][1:2]}


@pytest.mark.parametrize("tool", TOOLS)
def test_no_damaged_file_gives_a_traceback(whole, tool, tmp_path, capfd, monkeypatch):
    if tool in ("report", "compare"):  # drawing takes most of the time, and is tried below
        monkeypatch.setattr("gspax.report.run_page.render_figures", lambda panels: "")
        monkeypatch.setattr("gspax.tools.comparison.render_figures", lambda panels: "")
    failures = []
    for file in [file for file in FILES if file.startswith(READ[tool])]:
        for content in damages(file):
            run = tmp_path / "run"
            shutil.copytree(whole, run)
            path = run / file
            path.unlink(missing_ok=True)
            others = {None: path.mkdir, PIPE: partial(os.mkfifo, path), LOOP: partial(path.symlink_to, path.name)}
            others.get(content, partial(path.write_bytes, content))()
            code = main.main(TOOLS[tool](run))
            said = capfd.readouterr().err
            if code not in (0, 1, 2) or "Traceback" in said:
                failures.append((file, content, said[-500:]))
            shutil.rmtree(run)
    assert not failures, "\n".join(map(str, failures))


def test_metrics_with_names_of_formulas_are_drawn(whole, tmp_path, capfd):
    run = RunDir(tmp_path / "run")
    shutil.copytree(whole, run.path)
    line = {"step": 2, r"$\class{x}$": 1.0, "a_$b": 2.0, **NUMBERS}
    run.metrics.write_text(json.dumps(line) + "\n")
    assert main.main(["report", str(run.path)]) == 0
    assert main.main(["compare", str(run.path), "--metrics", r"$\class{x}$", "--out", str(tmp_path / "out")]) == 0
    assert r"class{x}" in run.report.read_text()
