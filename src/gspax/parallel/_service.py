"""Runs jax's coordination service in a separate process, started by process 0.

jax runs it in process 0, and then the C++ client of every other process aborts as soon as process 0 is killed, before
Python can say why. Here it outlives process 0 by `GRACE` seconds, in which the others notice the loss (`connections`)
and exit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from gspax import unstable
from gspax.errors import UserError

GRACE = 5.0  # seconds
READY, ORDERLY = b"ready\n", b"orderly\n"


def start(address: str, count: int) -> Callable[[], None]:
    """Start the service for `count` processes at `address`; return a function to call before an orderly exit.

    Raises:
      UserError: it cannot listen there.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from gspax.parallel import _service; _service._serve()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, address, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # an interrupt at the terminal is for the run alone
    )
    assert process.stdin is not None and process.stdout is not None
    answer = process.stdout.readline()
    if answer != READY:
        process.kill()
        raise UserError(f"processes: cannot listen on {address}: {answer.decode(errors='replace').strip()[:200]}")
    return partial(_announce_end, process)


def _announce_end(process: subprocess.Popen[bytes]) -> None:
    """Announce an orderly end. The pipe stays open until this process exits: jax's later shutdown needs the service."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(ORDERLY)


def _serve() -> None:
    """Serve until process 0 is gone: the main function of the process."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # process 0 receives them too, and decides
        signal.signal(signum, signal.SIG_IGN)
    answer, service = os.dup(1), None
    os.dup2(2, 1)
    try:
        service = unstable.coordination_service(sys.argv[1], int(sys.argv[2]))
        os.write(answer, READY)
    except Exception as problem:  # of jaxlib's own types
        os.write(answer, f"{' '.join(str(problem).split())}\n".encode())
        os._exit(1)
    os.close(answer)
    if sys.stdin.buffer.read() != ORDERLY:
        time.sleep(GRACE)
    del service
    os._exit(0)
