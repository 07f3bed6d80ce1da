"""The subcommands that run on several hosts: their options, and joining the other processes before anything runs.

Functions import what needs jax, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import socket
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import gspax
from gspax.commands.arguments import at_least, require_address
from gspax.errors import UserError
from gspax.parallel import watchdog

if TYPE_CHECKING:
    from gspax.config import Experiment, Published

# XLA's threads for the devices of a CPU, by default one per core. A collective operation holds one while it waits, and
# several programs may run at once.
XLA_CPU_THREADS = "64"
LAUNCHER = "GSPAX_LAUNCHER"  # the descriptor of a socket, from `gspax launch` to a process that it starts
_launcher: socket.socket | None = None
# Seconds that a process may run on after its last line: threads that are no daemons, and exit handlers,
# of a tracker's library, or of jax, which waits for the update in flight. After a signal nobody wants to wait for it
PATIENCE, SIGNALLED = 10.0, 2.0
STALL_TIMEOUT = 7200  # seconds: more than a checkpoint takes to load, or a sampler without chunks samples


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the processes of a run, and `--stall-timeout`."""
    parser.add_argument(
        "--stall-timeout",
        type=at_least(0),
        default=STALL_TIMEOUT,
        metavar="SECONDS",
        help="exit with code 1 after SECONDS without progress (default: %(default)s; 0: never)",
    )
    group = parser.add_argument_group(
        "several hosts", "run the same command with the same secret on each; TPU pods and SLURM need no other option"
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0 (or JAX_COORDINATOR_ADDRESS)")
    group.add_argument("--processes", type=at_least(1), metavar="N", help="number of processes (or JAX_NUM_PROCESSES)")
    group.add_argument("--process", type=at_least(0), metavar="I", help="number of this process (or JAX_PROCESS_ID)")
    group.add_argument(
        "--join-timeout", type=at_least(1), default=300, metavar="SECONDS", help="wait for the others (default: 300)"
    )
    group.add_argument(
        "--secret-file", metavar="FILE", help="the secret of the run, the same on all hosts (or GSPAX_SECRET)"
    )


def join(subcommand: str, options: argparse.Namespace, experiment: Experiment | Published | None) -> bool:
    """Join the other processes of this command, if there are any; return whether this is the primary process.

    Raises:
      UserError: a process does not join in time, or has another subcommand, version, file or experiment.
    """
    from gspax.experiment.description import describe, difference
    from gspax.parallel import joining, secret

    if options.coordinator is not None:
        require_address(options.coordinator)
    info = joining.find_process(options.coordinator, options.processes, options.process, options.join_timeout)
    fingerprint = {
        "subcommand": subcommand,
        "gspax": gspax.__version__,
        "jax": metadata.version("jax"),
        "file": options.file and hashlib.sha256(Path(options.file).read_bytes()).hexdigest()[:16],
        "experiment": experiment and describe(experiment),
    }
    if info is None and options.secret_file is not None:
        raise UserError("--secret-file: wanted several processes (--coordinator, --processes, --process), got one")
    if info is not None:
        own_secret = secret.read_secret(info.host, options.secret_file, os.environ)
        os.environ.setdefault("NPROC", XLA_CPU_THREADS)
        joining.join(info, fingerprint, difference, options.join_timeout, own_secret)
    watchdog.start(options.stall_timeout)
    return info is None or info.index == 0


def follow_launcher() -> None:
    """End this process as soon as the `gspax launch` that started it is gone, also if that was killed.

    Nothing is sent to it: its end of the socket closes when it ends.
    """
    global _launcher
    if LAUNCHER not in os.environ:
        return
    _launcher = socket.socket(fileno=int(os.environ.pop(LAUNCHER)))
    _launcher.set_inheritable(False)

    def wait(launcher: socket.socket) -> None:
        with contextlib.suppress(OSError):
            launcher.recv(1)
        watchdog.end_process("the `gspax launch` that started this process has ended", 1)

    threading.Thread(target=wait, args=(_launcher,), name="gspax_launcher", daemon=True).start()


def leave(code: int) -> None:
    """Stop watching, tell a launcher, and call `joining.leave` if `join` was called."""
    if _launcher is not None:
        with contextlib.suppress(OSError):
            _launcher.send(b"\0")
    watchdog.stop()
    if "gspax.parallel.joining" in sys.modules:
        sys.modules["gspax.parallel.joining"].leave(code)


def end(code: int) -> NoReturn:
    """End this process with an exit code, after `leave`, also if a thread or an exit handler does not end.

    With several processes an orderly shutdown may wait for the others, also after a signal.
    """
    with contextlib.suppress(OSError, ValueError):  # closed
        sys.stdout.flush()
        sys.stderr.flush()
    connections = sys.modules.get("gspax.parallel.connections")
    is_alone = connections is None or connections.current() is None
    timer = threading.Timer(SIGNALLED if code > 128 and is_alone else PATIENCE, os._exit, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)
