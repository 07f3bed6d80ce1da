"""How old the weights of a server must be until they are noticed, as a table.

Run it with `python experiments/studies/sources/stale.py`; it takes two minutes on a core.

It trains experiments/sort_gspo.py with 16 x 8 samples for 20 rollouts of four updates, and keeps the weights after
each. Then one of four servers samples with weights that are some rollouts old, or a part of the way to the rollout
before, the others with the newest ones, and the learner computes the log-probs of all with the newest: real updates,
the real rounding of a sampler, and 5,000 tokens or more of each server. For bfloat16 the same weights are rounded, as a
push does. The check is the one of a rollout (`gspax.learner.sources`). The probe is the one after a push, with eight
sequences (`gspax.rollout.servers.probe`); its limit is the one for a server whose first probe does not differ at all,
which is the smallest.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from gspax.config import row_shape
from gspax.experiment import load, override
from gspax.learner.forward import StepSettings
from gspax.learner.minibatches import gather_logp, score_minibatches, split_minibatches
from gspax.learner.sources import find_outliers, summarize
from gspax.learner.state import abstract_state
from gspax.learner.train_step import make_score
from gspax.model import transformer
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards
from gspax.rollout.runtime import Runtime, make_runtime
from gspax.rollout.servers import probe
from gspax.run.checkpoints import Checkpoints
from gspax.run.directory import RunDir
from gspax.training.in_flight import InFlight, receive, start_rollout
from gspax.training.loop import train
from gspax.types import TrainState

FILE = Path(__file__).parents[2] / "sort_gspo.py"
STEPS, AGES = 20, (1, 4, 16)
PARTS = (0.01, 0.1, 0.3)  # of what the last rollout's updates have changed, as slower ones would
SERVERS, STALE = 4, 2  # that are compared, and the index of the one with older weights
SETTINGS = (
    "sampling.prompts=16",
    f"schedule.steps={STEPS}",
    "schedule.eval_every=0",
    "schedule.checkpoint_every=1",
    f"schedule.keep_checkpoints={STEPS}",
)


def differences(runtime: Runtime, sampled_by: TrainState, newest: TrainState) -> np.ndarray:
    """Return how far the log-probs of sampled tokens are from the newest state's, in nats, [N, T]; NaN elsewhere."""
    experiment, mesh = runtime.experiment, runtime.mesh
    weights = runtime.sampler.push(sampled_by.params, 0)
    rollout = receive(runtime, start_rollout(runtime, weights, newest, 0, InFlight())).rollout
    shape = row_shape(experiment.sampling, experiment.schedule, batch_shards(mesh))
    batches, layouts = split_minibatches(rollout, experiment.schedule.minibatches, shape, mesh)
    _, scores = score_minibatches(runtime.steps.score, newest.params, batches, range(len(batches)))
    logp_NT = gather_logp(scores, layouts, rollout.tokens_BT.shape)
    mask_NT, sampler_NT = multihost.to_host((rollout.mask_BT, rollout.logp_BT))
    return np.where(mask_NT, np.abs(logp_NT - sampler_NT), np.nan)


def is_found(stale_NT: np.ndarray, healthy_NT: np.ndarray) -> bool:
    """Return whether the check of a rollout finds the server with older weights, and no other."""
    parts = np.array_split(healthy_NT, SERVERS - 1)
    parts.insert(STALE, stale_NT[: len(parts[0])])
    source_N = np.repeat(np.arange(1, SERVERS + 1), [len(part) for part in parts])
    diff_NT = np.concatenate(parts)
    found = find_outliers(summarize(diff_NT, np.broadcast_to(source_N[:, None], diff_NT.shape)))
    assert {*found} <= {STALE}, found
    return bool(found)


def between(newest: TrainState, older: TrainState, part: float) -> TrainState:
    """Return a state a part of the way from the newest to an older one."""
    move = lambda new, old: (new + part * (old - new)).astype(new.dtype)  # noqa: E731
    return replace(newest, params=jax.tree.map(move, newest.params, older.params))


def compare(runtime: Runtime, states: dict[float, TrainState]) -> list[str]:
    """Return the rows of the table for a dtype, by the states of each age."""
    model, mesh, newest = runtime.experiment.model, runtime.mesh, states[0]
    score = make_score(StepSettings(config=model, mesh=mesh), keep_experts=True)
    rows = probe.choose(score, newest.params, mesh, model, 8, 16)
    ours, _ = probe.learner_scores(score, newest.params, rows, mesh)
    healthy, limit = differences(runtime, newest, newest), probe.tolerance(model, 0.0, 0.0)
    lines = [f"| {model.dtype} | 0 | {np.nanmean(healthy):.2g} | | | |"]
    for age in (*PARTS, *AGES):
        stale = differences(runtime, states[age], newest)
        theirs, _ = probe.learner_scores(score, states[age].params, rows, mesh)
        probed = probe.largest_difference(ours, theirs)
        found = ["yes" if there else "no" for there in (is_found(stale, healthy), probed > limit)]
        lines.append(f"| {model.dtype} | {age} | {np.nanmean(stale):.2g} | {found[0]} | {probed:.2g} | {found[1]} |")
    return lines


def main() -> None:
    experiment = override(load(FILE), SETTINGS)
    large = replace(experiment, sampling=replace(experiment.sampling, prompts=512))
    with tempfile.TemporaryDirectory() as folder:
        train(experiment, Path(folder, "run"), report_to=())
        runtime = make_runtime(large)
        with Checkpoints(RunDir(Path(folder, "run")).checkpoints, mesh=runtime.mesh) as checkpoints:
            wanted = abstract_state(runtime.policy)
            states: dict[float, TrainState] = {age: checkpoints.restore(wanted, STEPS - age)[0] for age in (0, *AGES)}
    states |= {part: between(states[0], states[1], part) for part in PARTS}
    print("| dtype | rollouts old | mean difference, nats | found by the check | probe, nats | found by the probe |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(compare(runtime, states)), flush=True)
    model = replace(large.model, dtype="bfloat16")
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, transformer.abstract_params(model))
    rounded = {
        age: replace(state, params=jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), state.params, dtypes))
        for age, state in states.items()
    }
    print("\n".join(compare(make_runtime(replace(large, model=model)), rounded)))


if __name__ == "__main__":
    main()
