"""Comparisons of runs: values at equal tokens, over seeds, with paired differences, on a page that needs no network."""

import csv
import json

import numpy as np
import pytest
from api import main
from matplotlib.figure import Figure

from gspax.errors import UserError
from gspax.tools.comparison import (
    common_tokens,
    compare,
    draw_metric,
    find_differences,
    read_variant,
    resample,
    summarize,
)

STEPS = 20


def write_run(folder, seed, *, tokens=100, gain=0.0, steps=STEPS, **settings):
    """A run whose reward at step n is gain + seed / 100 + n / 100, evaluated at every fifth step."""
    folder.mkdir(parents=True)
    (folder / "experiment.json").write_text(json.dumps({"name": folder.name, "seed": seed, **settings}))
    rows = [{"step": 0, "eval/reward": gain + seed / 100}]
    for n in range(1, steps + 1):
        rows.append({"step": n, "time/step": 2.0, "perf/tokens_per_second": tokens / 2, "reward/mean": n / 100})
        if n % 5 == 0:
            rows.append({"step": n, "eval/reward": gain + seed / 100 + n / 100})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def variants(tmp_path):
    """Variants of seeds 0 to 2; the second gains 0.1 and is trained on twice the tokens in a step."""
    for seed in range(3):
        write_run(tmp_path / "a" / f"seed{seed}", seed, epochs=1)
        write_run(tmp_path / "b" / f"seed{seed}", seed, tokens=200, gain=0.1, epochs=2)
    return [read_variant(name, tmp_path / name) for name in "ab"]


def test_values_are_compared_at_the_tokens_that_every_run_has_reached(variants):
    assert common_tokens(variants) == 2000  # 20 steps of 100; the other variant has reached 4,000
    a, b = compare(variants, "eval/reward", 2000)
    np.testing.assert_allclose(list(a.values.values()), [0.20, 0.21, 0.22], rtol=1e-12)
    np.testing.assert_allclose(list(b.values.values()), [0.20, 0.21, 0.22], rtol=1e-12)  # its step 10: 0.1 + 0.1
    np.testing.assert_allclose([b.difference.low, b.difference.high], 0, atol=1e-12)
    assert (a.difference, b.pairs) == (None, 3)


def test_an_evaluation_between_two_steps_is_interpolated(variants):
    run = variants[0].runs[0]
    assert run.value_at("eval/reward", 750) == pytest.approx(0.075)
    assert np.isnan(run.value_at("eval/reward", 2001))


def test_a_metric_of_every_step_is_the_mean_over_the_last_tenth_of_the_tokens(variants):
    assert variants[0].runs[0].value_at("reward/mean", 2000) == pytest.approx((0.19 + 0.20) / 2)
    assert variants[1].runs[0].value_at("reward/mean", 2000) == pytest.approx(0.10)


@pytest.mark.parametrize("steps", [1, 2])
def test_runs_of_one_or_two_steps_have_values(tmp_path, steps):
    """The longer run has neither a step nor an evaluation in the last tenth of the tokens."""
    for name, tokens in (("a", 100), ("b", 70)):
        run = write_run(tmp_path / name, 0, tokens=tokens, steps=steps)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": steps, "eval/reward": 0.5}) + "\n")
    a, _ = variants = [read_variant(name, tmp_path / name) for name in "ab"]
    tokens = common_tokens(variants)
    assert tokens == 70 * steps
    assert a.runs[0].value_at("reward/mean", tokens) == pytest.approx(steps / 100)
    assert a.runs[0].value_at("eval/reward", tokens) == pytest.approx(0.35)
    assert "no run has" not in "".join(summarize(variants, metric) for metric in ("reward/mean", "eval/reward"))


def test_a_curve_has_the_mean_of_each_bin_and_nan_outside_of_it(variants):
    found = resample(variants[0].runs[0], "reward/mean", np.array([0.0, 500.0, 1000.0, 3000.0]))
    np.testing.assert_allclose(found, [np.nan, 0.03, 0.08, 0.155])
    assert np.isnan(resample(variants[0].runs[0], "no/such", np.array([0.0, 1.0]))).all()


def test_without_two_common_seeds_the_difference_is_unpaired(tmp_path):
    for name, seeds in (("a", (0, 1)), ("b", (1, 2))):
        for seed in seeds:
            write_run(tmp_path / name / str(seed), seed)
    _, entry = compare([read_variant(name, tmp_path / name) for name in "ab"], "eval/reward", 2000)
    assert entry.pairs == 0
    assert entry.difference.mean == pytest.approx(0.01)


def test_fewer_than_three_seeds_are_printed_without_an_interval(tmp_path):
    for name, gain in (("a", 0.0), ("b", 0.1)):
        for seed in (3, 4):
            write_run(tmp_path / name / str(seed), seed, gain=gain)
    variants = [read_variant(name, tmp_path / name) for name in "ab"]
    lines = summarize(variants, "eval/reward").splitlines()[1:]
    assert lines == [
        "  a  0.235, seeds 3: 0.23, 4: 0.24",
        "  b  0.335, seeds 3: 0.33, 4: 0.34; difference +0.1, 2 pairs of seeds",
    ]
    axes = Figure().add_subplot()
    draw_metric(axes, variants, "eval/reward", 2000)
    assert [band.get_paths() for band in axes.collections] == [[], []]
    write_run(tmp_path / "a" / "5", 5)
    three, two = compare([read_variant(name, tmp_path / name) for name in "ab"], "eval/reward", 2000)
    assert three.mean.low < three.mean.mean and np.isnan([two.mean.low, two.difference.low]).all()


def test_the_interval_of_a_share_stays_between_0_and_1(tmp_path):
    for seed in range(3):
        write_run(tmp_path / "low" / str(seed), seed, gain=0.2 * (seed == 2), steps=5)
        write_run(tmp_path / "high" / str(seed), seed, gain=0.9 - 0.2 * (seed == 2), steps=5)
        write_run(tmp_path / "more" / str(seed), seed, gain=0.9 + 0.2 * (seed == 2), steps=5)
    low, high, more = (read_variant(name, tmp_path / name) for name in ("low", "high", "more"))
    (entry,), (other,) = (compare([each], "eval/reward", 500) for each in (low, high))
    assert entry.mean.low == 0 and 0 < entry.mean.high < 1 and 0 < other.mean.low < other.mean.high == 1
    assert compare([more], "eval/reward", 500)[0].mean.high > 1.2  # rewards above 1 are not shares
    assert compare([low, more], "eval/reward", 500)[0].mean.low < 0  # and a metric has one scale
    for folder in tmp_path.glob("low/*"):
        path = folder / "metrics.jsonl"
        path.write_text(path.read_text().replace("eval/reward", "policy/kl"))
    assert compare([read_variant("low", tmp_path / "low")], "policy/kl", 500)[0].mean.low < 0  # nor is this, in nats


def test_values_that_are_not_finite_are_left_out(tmp_path):
    folder = write_run(tmp_path / "run", 0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "eval/reward": "NaN", "late": 1.0}\n')
    variant = read_variant("run", folder)
    assert variant.values_at("eval/reward", 2000) == {0: pytest.approx(0.2)}
    assert variant.values_at("late", 1000) == {}  # not recorded yet
    assert compare([variant], "late", 1000)[0].mean is None


def test_settings_are_compared_between_variants_and_within_them(variants, tmp_path):
    assert find_differences([variant.runs[0] for variant in variants]) == {"epochs": [1, 2]}
    assert find_differences(variants[0].runs) == {}
    write_run(tmp_path / "a" / "seed3", 3, epochs=4)
    assert find_differences(read_variant("a", tmp_path / "a").runs) == {"epochs": [1, 1, 1, 4]}


def test_two_runs_of_a_variant_with_one_seed_are_an_error(variants, tmp_path):
    write_run(tmp_path / "a" / "again", 1, epochs=1)
    with pytest.raises(UserError, match="wanted a seed for each run, but again and seed1 both have 1"):
        read_variant("a", tmp_path / "a")


def test_the_command_writes_a_page_and_a_table(variants, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert main.main(["compare", str(tmp_path / "a"), f"<b>={tmp_path / 'b'}", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "eval/reward at 2,000 response tokens:\n  a    0.21 [0.1852, 0.2348], 3 seeds\n" in printed
    assert printed.endswith(f"{out / 'compare.html'}\n")
    page = (out / "compare.html").read_text()
    assert "http" not in page and "<script" not in page and "<b>" not in page.replace("</b>", "")
    assert page.count("<svg") == len({"eval/reward", "reward/mean", "time/step"})
    assert "<code>epochs</code>" in page
    assert {path.name for path in out.iterdir()} == {"compare.html", "compare.csv"}
    rows = list(csv.DictReader((out / "compare.csv").open()))
    assert [row["value"][:4] for row in rows if (row["metric"], row["variant"]) == ("eval/reward", "a")] == [
        "0.2",
        "0.21",
        "0.22",
    ]


def test_a_metric_that_a_variant_lacks_is_named(variants, tmp_path, capsys):
    write_run(tmp_path / "own", 0)
    for path in (tmp_path / "a").glob("*/metrics.jsonl"):
        path.write_text(path.read_text().replace('"reward/mean"', '"policy/clip_fraction_tokens"'))
    options = ["--metrics", "policy/clip_fraction_tokens,reward/mean", "--out", str(tmp_path / "c")]
    assert main.main(["compare", str(tmp_path / "a"), str(tmp_path / "own"), *options]) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "c" / "compare.html").read_text()
    for said in ("no run has policy/clip_fraction_tokens, its loss does not report it", "no run has reward/mean"):
        assert said in printed and said in page
    assert "none" not in printed and "0 seeds" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such"], "no/such: wanted the directory of a run, there is none"),
        (["{}/empty"], "empty: wanted a run or a folder of runs, but no metrics.jsonl is in it or one level below"),
        (["{}/a", "{}/other/a"], "wanted a name of its own for every variant"),
        (["{}/a", "--metrics", "eval/rewrd"], "--metrics: no run has 'eval/rewrd'; did you mean 'eval/reward'?"),
        (["{}/a", "--out", "{}/a/seed0/metrics.jsonl"], "wanted a directory, but"),
        (["{}/warm"], "wanted the metrics of a training run, but no step is in it"),
    ],
)
def test_invalid_input_is_one_sentence_and_writes_nothing(arguments, said, variants, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "a").mkdir(parents=True)
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    arguments = [argument.format(tmp_path) for argument in arguments]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "out")]
    assert main.main(["compare", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_tokens_of_a_step_are_read_back_exactly(tmp_path):
    run = read_variant("run", write_run(tmp_path / "run", 0, tokens=12_345)).runs[0]
    assert run.tokens.tolist() == [12_345 * n for n in range(STEPS + 1)]
