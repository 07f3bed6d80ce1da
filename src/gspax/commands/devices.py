"""Keeps libtpu out of processes that have no TPU.

Where libtpu is installed, jax loads it to look for a TPU, and without one libtpu prints errors. The command line
therefore looks for signs of a TPU first. This changes jax's choice of devices for the whole process, so importing
gspax does not do it.
"""

from __future__ import annotations

import glob
import os

TPU_VARIABLES = (  # set on TPU VMs, in TPU containers, or by hand to use some of the chips
    "CLOUD_TPU_TASK_ID",
    "TPU_ACCELERATOR_TYPE",
    "TPU_NAME",
    "TPU_PROCESS_ADDRESSES",
    "TPU_TOPOLOGY",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
)


def skip_absent_tpu() -> None:
    """Remove TPUs from the devices that jax looks for, unless there is a sign of one. Call before jax uses a device.

    Other accelerators are found as before, and JAX_PLATFORMS is honoured.
    """
    import jax
    from jax.extend import backend

    if jax.config.jax_platforms or has_tpu():  # type: ignore[attr-defined]
        return
    backend.register_backend_factory("tpu", lambda: None, priority=300, fail_quietly=True)  # None: no such backend


def has_tpu() -> bool:
    """Whether the PCI bus, a device file or a variable indicates a TPU."""
    from gspax import unstable

    chips = unstable.attached_tpu_chips() or glob.glob("/dev/accel[0-9]*")
    return bool(chips) or any(os.environ.get(name) for name in TPU_VARIABLES)
