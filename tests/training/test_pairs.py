"""Every two settings that change what is sampled or trained: a dry run refuses them together, or a run of them works.

A run has as many settings as go together, so few runs have every pair that is not refused. In a run the objective
changes every two steps, while the model, what it samples, and its devices stay: another objective costs one program.
Where one fails, leave out settings one by one: it is seldom about more than two.

Of the 10,878 pairs of 148 settings a dry run refuses 541. Each of these settings is accepted alone, so no pair needs a
third setting: every other pair can run. The run of the release tier has 381 of those 10,342, the slow test has all.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from api import FirstPolicy, first_adapted, loop, make_steps, multihost, named_sharding, record, step
from few_devices import few_devices
from pair_options import OBJECTIVE, OPTIONS, REST, combined, device_count, problems

from gspax import config
from gspax.experiment.validation.first_calls import check_calls

SAMPLE, SIZES = 1, (9, 3, 8)  # runs of the release tier; settings and objectives of each, settings of an objective


def pairs(names):
    return set(map(frozenset, itertools.combinations(names, 2)))


def grow(names, candidates, most, left, rng):
    """These names and up to `most` of the candidates with a new pair, which a dry run accepts together."""
    grown = [*names]
    for name in rng.permutation([*candidates]).tolist():
        if len(grown) - len(names) == most:
            break
        new = {frozenset({name, other}) for other in grown} & left
        if new and name not in grown and not problems([*grown, name]):
            grown.append(name)
            left -= new
    return grown


def rows(seed, settings, objectives, size):
    """Settings, and objectives beside them, which a dry run accepts and which together have every accepted pair."""
    left, rng = pairs(OPTIONS), np.random.default_rng(seed)
    while left:
        pair = sorted(sorted(map(sorted, left))[rng.integers(len(left))])
        left.discard(frozenset(pair))
        if problems(pair):
            continue
        first = [name for name in pair if name in OBJECTIVE]
        own = grow([name for name in pair if name in REST], REST, settings, left, rng)
        found = [first] * (not problems([*own, *first]))
        for _ in range(objectives):
            found.append(grow(own, OBJECTIVE, size, left, rng)[len(own) :])
        yield own, found


def run(own, objectives, folder, monkeypatch):
    """Two steps with each objective, on as many devices as it takes; UserError from the dry run's calls."""
    steps = 2 * len(objectives)
    variants = [combined([*own, *names]) for names in objectives]
    variants = [replace(variant, schedule=replace(variant.schedule, steps=steps)) for variant in variants]
    base, taken, made = variants[0], itertools.count(), {}
    if any(variant.reference is not None for variant in variants):
        base = replace(base, reference=base.reference or config.Reference())

    def run_step(runtime, state, in_flight, opened):
        """As `step.run_step`, with the objective whose turn it is."""
        number, is_second = divmod(next(taken), 2)
        variant, mesh = variants[number], runtime.mesh
        if not is_second:
            made["steps"] = make_steps(variant, runtime.optimizer, mesh)
            adapted = first_adapted(variant.calibration, variant.regularizers)
            state = replace(state, adapted=multihost.to_devices(adapted, named_sharding(mesh)))
        if variant.reference is None:
            opened = [each for each in opened if not isinstance(each, FirstPolicy)]
        changed = replace(runtime, experiment=variant, steps=made["steps"])
        return step.run_step(changed, state, in_flight, opened)

    monkeypatch.setattr(loop, "run_step", run_step)
    with few_devices(device_count(base)):
        check_calls(base, lambda sentence: None)
        loop.train(base, folder / "run", report_to=())
    metrics = record.read_metrics(folder / "run" / "metrics.jsonl")
    wrong = {name: x for row in metrics for name, x in row.items() if not math.isfinite(x)}
    assert len(metrics) >= steps and not wrong and not any(row.get("optim/skipped", 0) for row in metrics)


@pytest.mark.parametrize("number", range(SAMPLE))
def test_settings_that_are_accepted_together_work_together(number, tmp_path, monkeypatch):
    run(*next(rows(number, *SIZES)), tmp_path, monkeypatch)


@pytest.mark.slow
def test_every_pair_of_settings_works_or_is_refused(tmp_path, monkeypatch):
    assert not any(problems([name]) for name in OPTIONS)
    failed = {}
    for number, (own, objectives) in enumerate(rows(0, 24, 8, 12)):
        with monkeypatch.context() as patch:
            try:
                run(own, objectives, tmp_path / str(number), patch)
            except Exception as error:
                failed[str((own, objectives))] = error
    assert not failed
