"""The experiments on data sets: a dry run of each as it is, and two steps with a tiny model on real data."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import equations
import pytest
from api import main as program
from api import read_rows

from gspax import experiment as experiments

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments"
DATASETS = (
    "gsm8k_gspo",
    "gsm8k_lora",
    "math_gspo",
    "code_gspo",
    "tools_gspo_token",
)  # read files in the working directory
ISOLATED = ("code_gspo", "tools_gspo_token")  # run programs in bubblewrap
SHARED = ROOT.parent / "shared" / "data"


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """A working directory with a few rows of our own in the schemas of the data sets."""
    for split, first in (("train", 1), ("test", 100)):
        sums = [(f"What is {a} and {a} together?", str(2 * a)) for a in range(first, first + 40)]
        write_rows(tmp_path / "gsm8k" / f"{split}.jsonl", [{"question": q, "answer": f"#### {a}"} for q, a in sums])
        write_rows(tmp_path / "math" / f"{split}.jsonl", [MATH | {"problem": q, "answer": a} for q, a in sums])
    dates = [f"2024-{month:02d}-01T00:00:00" for month in (1, 2, 3, 9, 10)]
    rows = [CODE | {"question_content": f"Add {i}.", "contest_date": date} for i, date in enumerate(dates)]
    write_rows(tmp_path / "livecodebench" / "test.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    for each in DATASETS:  # an experiment that another one imports has opened the files of another test
        monkeypatch.delitem(sys.modules, each, raising=False)


MATH = {"solution": "", "subject": "Algebra", "level": 1, "unique_id": "a"}
CASES = json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}])
CODE = {"starter_code": "", "public_test_cases": CASES, "private_test_cases": CASES, "metadata": "{}"}


@pytest.mark.parametrize("name", DATASETS)
def test_a_dry_run_of_an_experiment_on_a_data_set(name, datasets, capsys):
    code = program.main(["train", str(FOLDER / f"{name}.py"), "--dry-run", "--devices", "64"])
    if name in ISOLATED and shutil.which("bwrap") is None:
        assert (
            code == 2 and "isolation: wanted the program bwrap (apt-get install bubblewrap)" in capsys.readouterr().err
        )
        return
    shown = capsys.readouterr()
    assert code == 0, shown.err  # without the tokenizer too, which the pods have
    equations.compare(experiments.load(FOLDER / f"{name}.py"))
    assert re.search(r"together +[\d.]+ GiB", shown.out)


@pytest.mark.parametrize("name", ["gsm8k_gspo", "code_gspo"])  # two files, and a folder
def test_the_data_of_an_experiment_may_be_in_a_bucket(name, datasets, bucket, tmp_path, monkeypatch):
    for file in tmp_path.rglob("*.jsonl"):
        path = bucket[0] / "data" / file.relative_to(tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read_bytes())
        file.unlink()
    monkeypatch.setenv("GSPAX_DATA", f"{bucket[0]}/data")
    assert experiments.validate(experiments.load(FOLDER / f"{name}.py"), 64) == []


def test_a_path_of_a_task_is_a_field_as_that_of_the_data_is(datasets, tmp_path):
    (tmp_path / "gsm8k").rename(tmp_path / "elsewhere")
    experiment = experiments.load(FOLDER / "gsm8k_gspo.py")
    keys = [sentence.partition(":")[0] for sentence in experiments.validate(experiment, 64)]
    assert len(keys) == 3 and "evaluation.tasks.gsm8k.data.table.paths" in keys
    found = [f"{key}=elsewhere/{'train' if 'train' in key else 'test'}.jsonl" for key in keys]
    assert experiments.validate(experiments.override(experiment, found), 64) == []


# Everything but the size is the pod's: data, chat template, tokenizer, reward, loss, tasks.
TINY = [
    *("model=gspax.model.presets.tiny_moe", "model.vocab_size=151936", "model.max_position_embeddings=4096"),
    *("sampling.prompts=2", "sampling.group=2", "sampling.max_tokens=8", "schedule.microbatch_rows=0"),
    *("schedule.steps=2", "schedule.minibatches=2", "schedule.eval_every=0", "evaluation.problems=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", DATASETS)
def test_a_tiny_model_trains_on_a_data_set(name, tmp_path, monkeypatch):
    if not (SHARED / "qwen3_tokenizer").is_dir():
        pytest.skip("there is no ../shared/data/qwen3_tokenizer")
    if name in ("code_gspo", "tools_gspo_token") and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    gsm8k = {split: read_rows(SHARED / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")}
    math = read_rows(SHARED / "math500" / "test.jsonl")
    write_rows(tmp_path / "gsm8k" / "train.jsonl", gsm8k["train"])
    write_rows(tmp_path / "gsm8k" / "test.jsonl", gsm8k["test"][:3])
    write_rows(tmp_path / "math" / "train.jsonl", math[3:])
    write_rows(tmp_path / "math" / "test.jsonl", math[:3])
    code = read_rows(SHARED / "code_mini" / "problems.jsonl")
    dated = [row | {"contest_date": f"2024-{'01' if i > 2 else '09'}-01"} for i, row in enumerate(code)]
    write_rows(tmp_path / "livecodebench" / "test.jsonl", dated)
    monkeypatch.chdir(tmp_path)
    file, tokenizer = str(FOLDER / f"{name}.py"), f"tokenizer.checkpoint={SHARED / 'qwen3_tokenizer'}"
    command = [sys.executable, "-m", "gspax", "train", file, "--workdir", "run", *TINY, tokenizer]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, timeout=900)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert len([row for row in rows if "response/truncated" in row]) == 2
    (samples,) = (tmp_path / "run" / "evaluations" / "step_000002").glob("*.jsonl")
    assert f"eval/{samples.stem}/reward_low" in set().union(*rows) and len(read_rows(samples)) == 3 * 4
