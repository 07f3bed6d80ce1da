"""Lists the checks, in the order in which they run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import jax

from gspax.parallel import sharding
from gspax.tools.doctor import agreement, hardware, kernels, training
from gspax.tools.doctor.results import Check, Place, Result

DTYPES = "float32", "bfloat16"


def make_checks(place: Place, *, every_kind: bool = False) -> dict[str, Check]:
    """Make the checks of these devices by name. All processes of a pod run the same ones.

    Args:
      place: the folder for a checkpoint.
      every_kind: compare log-probs for every kind of layer, not for experts and attention alone.
    """
    devices = jax.devices()
    mesh, alone = training.make_mesh(devices), sharding.make_mesh(sharding.ONES, jax.local_devices()[:1])
    trainer = functools.cache(partial(training.make_trainer, devices))

    def with_trainer(check: Callable[[training.Trainer], Iterator[Result]], dtype: str) -> Check:
        return partial(in_full_precision, dtype, lambda: check(trainer(dtype)))

    def log_probs(kind: str, dtype: str) -> Iterator[Result]:
        one = trainer(dtype) if kind == "experts" else training.make_trainer(devices, dtype, agreement.KINDS[kind])
        return agreement.log_probs(one, kind)

    checks: dict[str, Check] = {"device": hardware.device, "collectives": partial(hardware.collectives, mesh)}
    for dtype in DTYPES:
        for kernel, where in (*((kernel, alone) for kernel in kernels.LOCAL), (kernels.expert_exchange, mesh)):
            name = f"{kernel.__name__.replace('_', ' ')}, {dtype}"
            checks[name] = partial(in_full_precision, dtype, partial(kernel, where, dtype))
    trained = DTYPES[:1] if sharding.platform(mesh) == "cpu" else DTYPES  # the dtypes that runs compute in
    for dtype in DTYPES if every_kind else trained:
        for kind in agreement.KINDS if every_kind else ("experts",):
            checks[f"log-probs, {kind}, {dtype}"] = partial(in_full_precision, dtype, partial(log_probs, kind, dtype))
    for dtype in trained:
        checks[f"same seed twice, {dtype}"] = with_trainer(training.same_seed, dtype)
    checks["update on the mesh and on one device"] = with_trainer(training.mesh_and_one_device, "float32")
    checks["checkpoint"] = with_trainer(partial(training.checkpoint, place=place), "float32")
    checks["speed"] = partial(training.speed, jax.local_devices()[0])
    return checks


def in_full_precision(dtype: str, check: Check) -> Iterator[Result]:
    """Run the check, with products in float32 as exact as on a CPU: accelerators round their operands by default."""
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        yield from check()
