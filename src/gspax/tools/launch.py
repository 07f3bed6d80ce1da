"""Implements `gspax launch`: runs a subcommand in processes on this machine, and again after a failure."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from gspax.commands.arguments import Parser, at_least, subcommand_parser
from gspax.commands.processes import LAUNCHER
from gspax.errors import UserError, warn
from gspax.parallel.secret import VARIABLE, new_secret

RUNNING = ("train", "sft", "eval", "bench", "doctor")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROGRAM = (sys.executable, "-m", "gspax")
POLL = 0.1  # seconds
PATIENCE = 30.0  # seconds for the other processes to end after one has failed


class _LaunchParser(Parser):
    """A parser that leaves all arguments after the subcommand to it, options included."""

    parse_intermixed_args = Parser.parse_args


def make_parser() -> Parser:
    parser = subcommand_parser(
        "launch",
        "Run a subcommand in processes on this machine, which join with a secret made for this start. After exit code "
        "1 or a kill, start it again: a run continues from its newest checkpoint.",
        "gspax launch --restarts 20 train experiments/sort_gspo.py --workdir runs/sort",
        kind=_LaunchParser,
    )
    parser.add_argument(
        "--processes", type=at_least(1), default=1, metavar="N", help="the number of processes (default: 1)"
    )
    parser.add_argument(
        "--restarts", type=at_least(0), default=0, metavar="N", help="restart at most N times (default: 0)"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="...", help=f"one of {', '.join(RUNNING)}, and its arguments"
    )
    return parser


def execute(options: argparse.Namespace) -> int:
    """Run the command; return the exit code of the last start."""
    if not options.command or options.command[0] not in RUNNING:
        got = options.command[0] if options.command else "nothing"
        raise UserError(f"launch: wanted one of {', '.join(RUNNING)} and its arguments, got {got!r:.200}")
    processes: list[_Process] = []
    with _forward_signals(processes) as received:
        for left in range(options.restarts, -1, -1):
            code = combine(_run(options.command, options.processes, processes), received)
            if code != 1 or received or not left:
                break
            warn(f"launch: exit code 1, starting again ({left - 1} restarts left)")
    return code


def combine(codes: Sequence[int], forwarded: Sequence[int] = ()) -> int:
    """Combine exit codes: an error that a restart cannot fix, else a signal, else a failure or 0.

    A killed process counts as a failure, unless by a `forwarded` signal, which ends a process that has nothing to save.
    """
    different = {code if code >= 0 else 128 - code if -code in forwarded else 1 for code in codes}
    order = (2, 3, *sorted(code for code in different if code > 3), 1, 0)
    return next(code for code in order if code in different)


@contextlib.contextmanager
def _forward_signals(processes: Sequence[_Process]) -> Iterator[list[int]]:
    """Forward signals to the processes; yield the list of received signals."""
    received = []

    def forward(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        for process in processes:
            process.send_signal(signum)

    previous = {signum: signal.signal(signum, forward) for signum in SIGNALS}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _run(command: Sequence[str], count: int, processes: list[_Process]) -> list[int]:
    """Start the processes once, wait for all of them, and return their exit codes."""
    environment, joining = dict(os.environ), []
    if count > 1:
        environment[VARIABLE] = new_secret()
        joining = ["--coordinator", f"127.0.0.1:{_free_port()}", "--processes", str(count)]
    for index in range(count):
        which = [*joining, "--process", str(index)] if count > 1 else []
        processes.append(_Process([*PROGRAM, *command, *which], environment))
    try:
        return _wait(processes)
    finally:
        for process in processes:
            process.close()
        processes.clear()


class _Process:
    """A process of the command. It ends when this one does, and sends a byte when its command has ended.

    An exit code of 0 does not say so: code that the command runs, such as a reward or a library, may call `os._exit`.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            passed = {**environment, LAUNCHER: str(theirs.fileno())}
            self._process = subprocess.Popen(arguments, env=passed, pass_fds=[theirs.fileno()])

    def send_signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def code(self) -> int | None:
        """Return the exit code, 1 if the process ended before its command did; None while it runs."""
        code = self._process.poll()
        return 1 if code == 0 and not self._is_done() else code

    def _is_done(self) -> bool:
        try:
            return self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except OSError:
            return False

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._process.poll() == 0 and not self._is_done():
            warn("launch: a process ended with exit code 0 before its command did: that counts as a failure")
        self._process.kill()
        self._process.wait()
        self._link.close()


def _wait(processes: Sequence[_Process]) -> list[int]:
    """Return the exit codes; once a process has failed, the others have `PATIENCE` seconds."""
    failed_at = None
    while None in (codes := [process.code() for process in processes]):
        if failed_at is None and any(codes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > PATIENCE:
            for process in processes:
                process.send_signal(signal.SIGKILL)
        time.sleep(POLL)
    return [code for code in codes if code is not None]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
