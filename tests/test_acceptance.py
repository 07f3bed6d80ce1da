"""Full runs of the default experiment and its GRPO variant with three seeds, minutes each: `pytest -m slow`."""

import subprocess
import sys
from pathlib import Path

import pytest

from gspax.run.record import read_metrics

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["sort_gspo", "sort_grpo"])
def test_the_sampled_reward_doubles_and_reaches_three_quarters_within_two_minutes(name, seed, tmp_path):
    workdir = tmp_path / name
    overrides = [f"seed={seed}", f"data.seed={seed}"]
    command = [sys.executable, "-m", "gspax", "train", str(EXPERIMENTS / f"{name}.py"), *overrides]
    subprocess.run([*command, "--workdir", str(workdir)], check=True, timeout=600)
    rows = read_metrics(workdir / "metrics.jsonl")
    reward = [row["eval/reward"] for row in rows if "eval/reward" in row]
    seconds = sum(row["time/step"] for row in rows if "time/step" in row)
    assert reward[-1] >= max(2 * reward[0], 0.75)
    assert seconds <= 120
