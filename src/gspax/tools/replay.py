"""Implements `gspax replay`: recomputes the update of a dumped minibatch, and names its numbers that are not finite."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from gspax.commands.arguments import Parser, load_experiment, subcommand_parser
from gspax.errors import display
from gspax.storage.paths import to_path

if TYPE_CHECKING:
    from gspax.types import Batch, Params

SHOWN = 10  # rows, and parameters, that are named at most


def make_parser() -> Parser:
    parser = subcommand_parser(
        "replay",
        "Recompute the update of a minibatch that a diverged run dumped, and name the rows and parameters with numbers "
        "that are not finite. Overrides show what another setting does to it.",
        "gspax replay experiments/sort_gspo.py runs/sort/dumps/step_000012 model.dtype=float32",
    )
    parser.add_argument("file", metavar="FILE", help="the run's file, which defines `experiment = Experiment(...)`")
    parser.add_argument("dump", type=to_path, metavar="DUMP", help="a folder in the run's dumps/")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings to try; those of the run are in DUMP")
    return parser


def execute(options: argparse.Namespace) -> int:
    import jax
    import optax

    from gspax import losses
    from gspax.experiment.description import describe, difference, resumable
    from gspax.learner.state import restore_state
    from gspax.learner.train_step import is_healthy, largest_ratio
    from gspax.parallel import multihost
    from gspax.parallel.sharding import named_sharding
    from gspax.rollout.runtime import make_runtime
    from gspax.run.checkpoints import Checkpoints, newest_step
    from gspax.run.directory import RunDir
    from gspax.training import run_guard
    from gspax.training.open_terms import heads_of, open_terms

    about, batch = run_guard.read_about(options.dump), run_guard.read_minibatch(options.dump)
    experiment = load_experiment(options, about["experiment"])
    described = describe(experiment)
    for line in difference(about["experiment"], described, ignore=resumable(described)):
        display(f"changed: {line}")
    runtime = make_runtime(experiment)
    mesh, run = runtime.mesh, RunDir(options.dump.parent.parent)
    with Checkpoints(options.dump / run_guard.STATE, mesh=mesh) as checkpoints:
        state = restore_state(run, checkpoints, runtime.policy, newest_step(checkpoints))
    opened, rows = open_terms(runtime), batch
    for term in opened:
        rows = term.as_read(rows)
    gradient, heads = jax.jit(runtime.steps.gradient), heads_of(opened)
    grads, terms, _ = gradient(state, multihost.to_devices(rows, named_sharding(mesh, "batch")), False, heads)
    loss, metrics = losses.reduce(terms)
    norm = optax.tree.norm(grads)
    display(f"step {about['step']}, a minibatch of {len(batch.tokens_BT)} rows")
    display(f"loss           {float(loss):.6g}\ngradient norm  {float(norm):.6g}")
    if (largest := largest_ratio(metrics)) is not None:
        display(f"largest ratio  {float(largest):.6g}")
    display(f"the update is {'applied' if is_healthy(experiment.guard, loss, norm, metrics) else 'skipped'}")
    lines = [*_list_rows(batch, np.asarray(terms.value))]
    parameters = [*_list_leaves("parameter", state.params), *_list_leaves("gradient of", grads)]
    display("\n".join([*_shorten(lines, "rows"), *_shorten(parameters, "parameters")]))
    return 0


def _list_rows(batch: Batch, value_B: np.ndarray) -> Iterator[str]:
    """Yield a line for each row with numbers that are not finite, with the arrays that hold them."""
    floats = {name: x for name, x in vars(batch).items() if x is not None and np.issubdtype(x.dtype, np.floating)}
    for row in range(len(value_B)):
        where = [name for name, x in floats.items() if not np.isfinite(x[row]).all()]
        where += [] if np.isfinite(value_B[row]) else ["loss"]
        if where:
            yield f"row {row}: not finite in {', '.join(where)}"


def _list_leaves(what: str, tree: Params) -> Iterator[str]:
    """Yield a line for each leaf with numbers that are not finite, with their count."""
    import jax.numpy as jnp

    from gspax.types import named_leaves

    for name, leaf in named_leaves(tree).items():
        if count := int(leaf.size - jnp.isfinite(leaf).sum()):
            yield f"{what} {name}: {count} of {leaf.size} numbers are not finite"


def _shorten(lines: list[str], what: str) -> list[str]:
    more = [f"and {len(lines) - SHOWN} more {what}"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more or [f"{what}: every number is finite"]
