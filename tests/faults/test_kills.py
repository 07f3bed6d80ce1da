"""A run that is killed at any moment and started again is, bit for bit, the run that was not killed."""

import itertools
import os
import random
from collections import Counter

import pytest
import runs
from api import finished_steps
from moments import BEGIN, REPEATED, SPAN, Kill
from runs import STEPS

SEED = int(os.environ.get("FAULTS_SEED", "0"))
KILLS = int(os.environ.get("FAULTS_KILLS", "50"))


def rows_of_steps(workdir):
    return {row["step"]: row for row in runs.metrics(workdir) if "policy/loss" in row}


def newest(workdir):
    """The step from which a run must continue."""
    return max(finished_steps(workdir / "checkpoints"), default=0)


def test_a_run_killed_in_an_evaluation_resumes_bit_for_bit(tmp_path, injected):
    """The steps between the checkpoint and the evaluation are computed twice, by two processes.

    The kill comes at step 6 if step 4 is saved by then, else at step 10: the save of step 8 waits for that of step 4.
    """
    workdir, changes = tmp_path / "run", ("schedule.checkpoint_every=4", "evaluation.problems=1")
    killed = runs.start(workdir, *changes, steps=10, kill=Kill("evaluation", 4, 0.0), with_report=False)
    assert killed.wait() == -9 and killed.resumed() == 0, killed.text()
    step, before = newest(workdir), rows_of_steps(workdir)
    assert step in (4, 8) and max(before) in (6, 10) and before[step + 1]["optim/grad_norm"] > 0
    resumed = runs.start(workdir, *changes, steps=10, with_report=False)
    assert resumed.wait() == 0 and resumed.resumed() == step, resumed.text()
    after = rows_of_steps(workdir)
    assert [*after] == [*range(1, 11)] and {each: after[each] for each in before} == before
    assert "removed the lock of a run that has ended" in resumed.text() and "Traceback" not in resumed.text()
    injected["killed: evaluation"] += 1


def draw(rng, counts, step, begins):
    """A kill at one of the rarest moments so far, of a run whose step `step` is saved: spread over the steps left.

    `begins` says that the kill before this one came before the first step of its process: then this one comes later.
    """
    possible = [*REPEATED, *(BEGIN if step and not begins else ())]
    fewest = min(counts[each] for each in possible)
    moment = rng.choice([each for each in possible if counts[each] == fewest])
    after = step if moment in BEGIN else min(max(2, step + rng.choice([0, 0, 2, 4])), STEPS - 2)
    return Kill(moment, after, rng.uniform(0, SPAN[moment]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills(reference, tmp_path, injected):
    """Each kill finds a whole checkpoint and steps to do. Each run is compared with the one that was not killed."""
    rng, counts, steps = random.Random(SEED), Counter(), Counter()
    for number in itertools.count():
        workdir, step, code, kill = tmp_path / f"run{number}", 0, -9, None
        while code == -9:
            begins = kill is not None and kill.moment in BEGIN
            kill = draw(rng, counts, step, begins) if counts.total() < KILLS else None
            run = runs.start(workdir, kill=kill)
            code = run.wait()
            assert code in (0, -9) and "Traceback" not in run.text(), (kill, code, run.text())
            assert run.resumed() == step or (code == -9 and kill.moment in BEGIN and run.resumed() is None), (
                kill,
                step,
            )
            step = newest(workdir)
            if code == -9 and step < STEPS:  # it may save the last step while it is killed
                assert step >= max(2, kill.after), (kill, step)
                counts[kill.moment] += 1
                steps[step] += 1
        assert runs.differences(workdir, reference) == [], (counts, steps)
        if counts.total() == KILLS:
            break
    print(f"\nkills by the step that was saved: {dict(sorted(steps.items()))}")
    assert len(steps) > STEPS // 4, f"spread over the run: {steps}"
    for moment, count in counts.items():
        injected[f"killed: {moment}"] += count


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", ["start", "restore", "compile", "update", "save", "report"])
def test_a_kill_before_the_first_checkpoint_and_after_the_last(moment, reference, tmp_path, injected):
    """The run begins again, or has its report to write."""
    rng, workdir = random.Random(f"{moment} {SEED}"), tmp_path / "run"
    run = runs.start(workdir, kill=Kill(moment, 0, rng.uniform(0, SPAN[moment] / 10)))
    assert run.wait() == -9, run.text()
    step = newest(workdir)
    assert step == STEPS if moment == "report" else step <= 2
    run = runs.start(workdir)
    assert run.wait() == 0 and run.resumed() == step and "Traceback" not in run.text(), run.text()
    assert (workdir / "report.html").exists() and runs.differences(workdir, reference) == []
    injected[f"killed: {moment}, {'all saved' if step == STEPS else 'nothing to restore'}"] += 1
