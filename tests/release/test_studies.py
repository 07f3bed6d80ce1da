"""Studies parse, run once, are resumed, and their figure and table come from results.csv alone."""

import csv
import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gspax.errors import UserError
from gspax.experiment import load, override

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "studies"
STUDIES = sorted(path.parent.name for path in FOLDER.glob("*/study.py"))
STUDY = """
from common import Measure, Start, Study, Variant
small = Start("small", "{base}", ("schedule.steps=2", "schedule.eval_every=0", "warm_start.steps=2"))
study = Study(
    variants=(Variant("slow", small), Variant("fast", small, ("optimizer.learning_rate=2e-3",))),
    measures=(
        Measure("reward", "reward/mean"),
        Measure("clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("CPU", "run/cpu_seconds", over=0),
    ),
    seeds=(0, 1),
)
"""
README = (
    "# A fake study\n\nQuestion.\n\n<!-- results: written from results.csv -->\n<!-- end of results -->\n\nAnswer.\n"
)


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import common

    return common


@pytest.fixture
def fake(common, monkeypatch, tmp_path):
    """The folder of a study of two variants and two seeds."""
    folder = tmp_path / "studies" / "fake"
    folder.mkdir(parents=True)
    (folder / "study.py").write_text(STUDY.format(base=ROOT / "tests" / "small_experiment.py"))
    (folder / "README.md").write_text(README.format(common.BEGIN, common.END))
    monkeypatch.setattr(common, "FOLDER", folder.parent)
    return folder


@pytest.fixture
def commands(common, monkeypatch):
    """The commands of `gspax`; a run gets metrics instead, whose reward is 0.1 larger in the second variant."""
    called = []

    def gspax(*command, log, devices=1):
        called.append(command)
        if command[0] != "export":
            override(load(command[1]), command[4:])  # as the subcommand does
        folder = Path(command[command.index("--workdir") + 1] if "--workdir" in command else command[4])
        folder.mkdir(parents=True, exist_ok=True)
        if command[0] == "export":
            (folder / "config.json").write_text("{}")
        if command[0] == "train":
            seed = int(next(each for each in command if each.startswith("seed=")).removeprefix("seed="))
            (folder / "experiment.json").write_text(json.dumps({"seed": seed}))
            gain = 0.1 if "optimizer.learning_rate=2e-3" in command else 0.0
            row = {"time/step": 1.0, "perf/tokens_per_second": 50.0 + seed, "policy/clip_fraction_tokens": 0.25}
            rows = [{"step": n, "reward/mean": seed + gain + n / 100, **row} for n in range(1, 11)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        return SimpleNamespace(ru_utime=3.0, ru_stime=1.0, ru_maxrss=2048)

    monkeypatch.setattr(common, "gspax", gspax)
    return called


def run(common, fake, runs):
    study = common.load_study("fake")
    common.run_study(study, runs, jobs=2)
    common.write_csv(study, common.collect(study, runs), fake / "results.csv")
    common.write_results(study, fake)


@pytest.mark.parametrize("name", STUDIES)
def test_the_experiments_of_every_study_are_valid_and_its_page_has_room_for_results(common, name):
    if not name.startswith("real_"):  # test_smollm2.py has these, with a small model in the place of the published one
        common.check_study(common.load_study(name))
    page = (FOLDER / name / "README.md").read_text()
    assert page.count(common.BEGIN) == page.count(common.END) == 1
    assert (FOLDER / name / "results.csv").is_file() or "Not run yet" in page


def test_every_study_has_a_row_with_the_days_of_its_runs():
    rows = [
        line.split("|")[1:3] for line in (ROOT / "docs" / "studies.md").read_text().splitlines() if "| [" in line[:3]
    ]
    names = {re.search(r"studies/(\w+)/README", link)[1] for link, _ in rows}
    assert names == {path.parent.name for path in FOLDER.glob("*/README.md")}
    assert all(re.fullmatch(r" \d\d(, \d\d)* ", days) for _, days in rows)


def test_differences_of_differences_are_written_by_the_script_of_the_study(common):
    study = common.load_study("volatility")
    variants = common.read_csv(FOLDER / "volatility" / "results.csv")
    tokens = common.common_tokens(variants)
    table = study.more({variant.name: variant for variant in variants}, tokens)
    assert f"{table}\n\n![Results]" in (FOLDER / "volatility" / "README.md").read_text()
    grpo, control, grpo_0, control_0 = (  # by hand, from the seeds' means
        study.measures[0].values(next(each for each in variants if each.name == name), tokens)
        for name in ("GRPO, 0.05", "on policy, 0.05", "GRPO", "on policy")
    )
    difference = sum(grpo[s] - control[s] - grpo_0[s] + control_0[s] for s in study.seeds) / len(study.seeds)
    assert f"| {difference:.3g} [-0.115, -0.00804] |" in table
    page = (ROOT / "docs" / "studies.md").read_text()
    assert page.count(f"{-difference:.3f} [0.008, 0.115]") == 2, "in the table of the studies and in what they found"


@pytest.mark.parametrize("name", ["students", "variance"])
def test_the_tables_of_distillation_come_from_their_csv(name):
    script = runpy.run_path(str(FOLDER / "distillation" / f"{name}.py"))
    table = script["tabulate"](FOLDER / "distillation" / f"{name}.csv")
    page = (FOLDER / "distillation" / "README.md").read_text()
    assert f"{script['BEGIN']}\n{table}\n{script['END']}" in page and len(table.splitlines()) > 10


def test_an_unknown_study_is_refused():
    found = subprocess.run([sys.executable, str(FOLDER), "cliping"], capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert found.stderr == f"studies: NAME: wanted one of {', '.join(STUDIES)}, got 'cliping'\n"


def test_an_override_that_does_not_fit_is_refused_before_anything_runs(common, fake, commands):
    file = fake / "study.py"
    file.write_text(file.read_text().replace("optimizer.learning_rate=2e-3", "optimizer.learning_rate=fast"))
    with pytest.raises(UserError, match=r"optimizer\.learning_rate"):
        common.check_study(common.load_study("fake"))
    assert not commands


def test_variants_continue_one_warm_start_of_each_seed(common, fake, commands, tmp_path):
    run(common, fake, tmp_path / "runs")
    assert sorted(command[0] for command in commands) == ["export"] * 2 + ["sft"] * 2 + ["train"] * 4
    starts = {seed: set() for seed in (0, 1)}
    for command in commands:
        if command[0] == "train":
            assert "warm_start=none" in command
            checkpoint = next(each for each in command if each.startswith("model.checkpoint="))
            starts[0 if "seed=0" in command else 1].add(checkpoint)
    assert [len(found) for found in starts.values()] == [1, 1] and starts[0] != starts[1]


def test_variants_of_a_checkpoint_train_it_without_a_warm_start(common, fake, commands, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    study = common.load_study("fake")
    start = replace(study.variants[0].start, base=str(ROOT / "tests" / "small_experiment.py"), checkpoint="published")
    study = replace(study, variants=(common.Variant("one", start),), seeds=(0,))
    with pytest.raises(UserError, match="published: wanted the folder of a checkpoint, got none"):
        common.run_study(study, tmp_path / "runs", jobs=1)
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text("{}")
    common.run_study(study, tmp_path / "runs", jobs=1)
    ((command, *_, checkpoint),) = [(command[0], *command[4:5]) for command in commands]
    assert command == "train" and checkpoint == f"model.checkpoint={tmp_path / 'published'}"


def test_starts_that_share_a_warm_start_train_it_once_by_the_first_variant(common, fake, commands, tmp_path):
    study = common.load_study("fake")
    first = study.variants[0]
    other = replace(first.start, name="other", overrides=("schedule.steps=9",), warm_start=first.start.name)
    study = replace(study, variants=(first, common.Variant("also", other)), seeds=(0,))
    (finished,) = (job for job in common.jobs_of(study, tmp_path) if job.variant is first)
    finished.folder.mkdir(parents=True)
    record = {"overrides": common.variant_overrides(first, 0)}
    (finished.folder / "finished.json").write_text(json.dumps(record))
    common.run_study(study, tmp_path, jobs=1)
    assert [command[0] for command in commands] == ["sft", "export", "train"]
    assert "schedule.steps=9" not in commands[0] and "schedule.steps=9" in commands[2]


def test_finished_runs_are_skipped_and_the_others_run_again(common, fake, commands, tmp_path):
    run(common, fake, tmp_path / "runs")
    del commands[:]
    run(common, fake, tmp_path / "runs")
    assert not commands
    (tmp_path / "runs" / "fast" / "1" / "finished.json").unlink()  # killed before its end
    run(common, fake, tmp_path / "runs")
    assert [command[0] for command in commands] == ["train"]
    assert {"optimizer.learning_rate=2e-3", "seed=1"} <= set(commands[0])


def test_every_seed_and_the_paired_difference_are_in_the_table(common, fake, commands, tmp_path):
    run(common, fake, tmp_path / "runs")
    page = (fake / "README.md").read_text()
    assert "| slow | 0.595 [-5.69, 6.88] |  | 0.1, 1.09 | 25 % [25, 25] | 4 [4, 4] |" in page
    assert "| fast | 0.695 [-5.59, 6.98] | +0.1 [+0.1, +0.1] | 0.2, 1.19 | 25 % [25, 25] | 4 [4, 4] |" in page
    assert page.startswith("# A fake study\n\nQuestion.") and page.endswith("\n\nAnswer.\n")


def test_a_variant_can_be_compared_with_another_than_the_first(common, fake, commands, tmp_path):
    run(common, fake, tmp_path / "runs")
    study, (slow, fast) = common.load_study("fake"), common.read_csv(fake / "results.csv")
    third = replace(study.variants[1], name="third", against="fast")
    group = [slow, fast, replace(fast, name="third")]
    table = common.tabulate(replace(study, variants=(*study.variants, third)), group, common.common_tokens(group))
    assert "| variant | reward | difference | each seed |" in table
    assert "| third | 0.695 [-5.59, 6.98] | +0 [+0, +0] from fast |" in table
    assert "| fast | 0.695 [-5.59, 6.98] | +0.1 [+0.1, +0.1] from slow |" in table


def test_the_figure_and_the_table_come_from_the_csv_alone(common, fake, commands, tmp_path):
    run(common, fake, tmp_path / "runs")
    study, page = common.load_study("fake"), (fake / "README.md").read_bytes()
    figure = (fake / "figure.png").read_bytes()
    (fake / "figure.png").unlink()
    common.write_results(study, fake)
    assert ((fake / "README.md").read_bytes(), (fake / "figure.png").read_bytes()) == (page, figure)
    with (fake / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["seed"], row["step"], row["reward/mean"]) for row in rows[-11::9]] == [
        ("fast", "1", "0", ""),
        ("fast", "1", "9", "1.19"),
    ]
    (fake / "results.csv").write_text((fake / "results.csv").read_text().replace("1.19", "1.32"))
    common.write_results(study, fake)
    assert "0.2, 1.32" in (fake / "README.md").read_text()


def test_columns_and_probed_values_are_in_the_csv_but_not_in_the_table(common, fake, commands, tmp_path):
    run(common, fake, tmp_path / "runs")
    speed = common.Measure("speed", "perf/tokens_per_second")
    folders = common.Measure("folder", "run/seed", over=0)

    def probe(folder):
        return {"run/seed": float(folder.name)}

    study = replace(common.load_study("fake"), columns=(speed, folders), probe=probe)
    common.write_csv(study, common.collect(study, tmp_path / "runs"), fake / "results.csv")
    slow, fast = common.read_csv(fake / "results.csv")
    tokens = common.common_tokens([slow, fast])
    assert speed.values(slow, tokens) == {0: 50.0, 1: 51.0}
    assert folders.values(fast, tokens) == {0: 0.0, 1: 1.0}
    assert "speed" not in common.tabulate(study, [slow, fast], tokens)


def test_a_study_without_results_has_no_figure(common, fake):
    with pytest.raises(UserError, match="has not been run"):
        common.write_results(common.load_study("fake"), fake)


def test_a_failed_run_names_its_log(common, tmp_path):
    with pytest.raises(UserError, match=r"gspax train ended with 2: see .*run\.log"):
        common.gspax("train", str(tmp_path / "absent.py"), "--workdir", str(tmp_path / "run"), log=tmp_path / "run")
    assert "absent.py" in (tmp_path / "run.log").read_text()


@pytest.mark.slow
def test_a_study_runs_from_nothing_to_its_page(common, fake, tmp_path):
    run(common, fake, tmp_path / "runs")
    with (fake / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["variant"], row["seed"], row["step"]) for row in rows} == {
        (variant, seed, step) for variant in ("slow", "fast") for seed in "01" for step in "012"
    }
    assert all(float(row["run/cpu_seconds"]) > 1 for row in rows if row["step"] == "2")
    assert (fake / "figure.png").stat().st_size > 10_000
