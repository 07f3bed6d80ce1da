"""A run that is killed at any moment and started again is, bit for bit, the run that was not killed."""

import itertools
import os
import random

import pytest
import runs
from moments import SPAN, Kill

SEED = int(os.environ.get("FAULTS_SEED", "0"))
REPEATED = "sampling", "update", "save", "evaluation"  # the moments that a run reaches several times


def draw(rng, moment):
    count = rng.randint(1, 4) if moment in REPEATED else 1
    return Kill(moment, count, rng.uniform(0, SPAN[moment]))


def rows_of_steps(workdir):
    return {row["step"]: row for row in runs.metrics(workdir) if "policy/loss" in row}


def test_a_run_killed_in_an_update_resumes_bit_for_bit(tmp_path, injected):
    """The step after the checkpoint is computed twice, by two processes."""
    workdir = tmp_path / "run"
    changes = ("schedule.eval_every=0", "evaluation.problems=1")
    killed = runs.start(workdir, *changes, steps=4, kill=Kill("update", 4, 0.0), with_report=False)
    assert killed.wait() == -9, killed.text()
    before = rows_of_steps(workdir)
    assert max(before) == 3 and before[3]["optim/grad_norm"] > 0
    resumed = runs.start(workdir, *changes, steps=4, with_report=False)
    assert resumed.wait() == 0, resumed.text()
    after = rows_of_steps(workdir)
    assert after[3] == before[3] and list(after) == [1, 2, 3, 4]
    assert "removed the lock of a run that has ended" in resumed.text() and "Traceback" not in resumed.text()
    injected["killed: update"] += 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills(reference, tmp_path, injected):
    """Each run is killed until it ends; then all of it is compared with the one that was not."""
    rng, queue = random.Random(SEED), [*SPAN] * 9
    rng.shuffle(queue := queue[:50])
    for number in itertools.count():
        workdir, killed, code = tmp_path / f"run{number}", [], -9
        while code != 0:
            kill = draw(rng, queue[0]) if queue else None
            run = runs.start(workdir, kill=kill)
            code = run.wait()
            assert code in (0, -9) and "Traceback" not in run.text(), (kill, code, run.text())
            if code == -9:
                killed.append(queue.pop(0))
            elif queue:  # the run ended before the moment came
                rng.shuffle(queue)
        assert runs.differences(workdir, reference) == [], killed
        for moment in killed:
            injected[f"killed: {moment}"] += 1
        if not queue:
            break
    assert injected.total() >= 50
