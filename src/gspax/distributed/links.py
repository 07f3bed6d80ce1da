"""The connections of a run: host values travel over them, and a process that ends is noticed on them.

Each process keeps its connection to process 0 from the rendezvous until the run ends, and a thread reads from it. The
kernel closes the connections of a process that is killed, so the other end notices at once; process 0 then names it to
all others, and every process exits with code 1. A process that fails announces its exit code first: the others have
`LEAVE_TIMEOUT` seconds to fail in the same way, as they do when the input is invalid on all of them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from gspax.distributed import wire
from gspax.distributed.channel import Channel
from gspax.distributed.ending import end_process
from gspax.distributed.wire import MessageError

LEAVE_TIMEOUT = 8.0  # seconds that a failing process and the others wait for each other
CAUSE_TIMEOUT = 2.0  # seconds in which a lost connection is taken for the cause of this process's failure
LIMIT = 4 * 2**30  # bytes of a message: the rows of a rollout batch have some megabytes
SENT, RESULT, LEAVING, ALL_LEAVE, LOST = range(16, 21)  # kinds
CONTINUES = "the same command continues the run"

_current: Links | None = None


class Links:
    """The connections of process `index` of `count`; process 0 has one to each other, the others one to process 0."""

    def __init__(self, index: int, count: int, channels: dict[int, Channel]) -> None:
        self._index, self._count, self._channels = index, count, channels
        self._received: dict[int, queue.SimpleQueue[bytes]] = {each: queue.SimpleQueue() for each in channels}
        self._announced: dict[int, int] = {}  # exit codes of processes that are about to exit
        self._announced_at = 0.0  # when this process did so
        self._all_leave = threading.Event()
        for peer in channels:
            threading.Thread(target=self._read, args=(peer,), name=f"gspax_link_{peer}", daemon=True).start()

    def exchange(self, own: bytes) -> Sequence[bytes | memoryview]:
        """What each process passes to this call, in their order. All processes call it in the same order."""
        if self._index:
            self._channels[0].send(SENT, own)
            return wire.split(self._received[0].get())
        parts = [own, *(self._received[peer].get() for peer in range(1, self._count))]
        result = wire.join(parts)
        for peer in range(1, self._count):
            self._channels[peer].send(RESULT, result)
        return parts

    def leave(self, code: int) -> bool:
        """Announce that this process is about to exit, and wait for the others; whether all of them are.

        With code 0 nobody waits here: jax's own shutdown does. A second call changes nothing.
        """
        if self._index in self._announced:
            return True
        self._announced_at = time.monotonic()
        self._announced[self._index] = code
        self._tell(LEAVING, {"process": self._index, "code": code})
        self._check_all_leave()
        return code == 0 or self._all_leave.wait(LEAVE_TIMEOUT)

    def _read(self, peer: int) -> None:
        """Handle what another process sends, until the connection is lost."""
        try:
            while True:
                kind, content = self._channels[peer].receive(LIMIT)
                if kind in (SENT, RESULT):
                    self._received[peer].put(content)
                else:
                    self._handle(kind, wire.decode(content))
        except (OSError, MessageError, TypeError, KeyError, ValueError) as problem:
            if peer not in self._announced:
                host = self._channels[peer].host
                self._end_if_cause(f"process {peer} of {self._count} on {host} has ended ({problem}); {CONTINUES}")

    def _handle(self, kind: int, content: Any) -> None:
        if kind == ALL_LEAVE:
            self._all_leave.set()
        elif kind == LOST:
            self._end_if_cause(str(content["sentence"]))
        elif kind == LEAVING:
            process, code = int(content["process"]), int(content["code"])
            if process == self._index:
                return
            self._announced[process] = code
            if self._index == 0:
                self._tell(LEAVING, content)
                self._check_all_leave()
            if code != 0:
                sentence = f"process {process} of {self._count} ended with exit code {code}, see its output"
                timer = threading.Timer(LEAVE_TIMEOUT, self._end_if_alone, [sentence])
                timer.daemon = True
                timer.start()

    def _check_all_leave(self) -> None:
        """On process 0: once all processes have announced that they leave, tell them."""
        if self._index == 0 and len(self._announced) == self._count:
            self._tell(ALL_LEAVE, None)
            self._all_leave.set()

    def _end_if_alone(self, sentence: str) -> None:
        """End because another process has failed, unless this one is about to exit itself."""
        if self._index not in self._announced:
            self._end(sentence)

    def _end_if_cause(self, sentence: str) -> None:
        """End because another process is gone, unless this one has a reason of its own to exit."""
        own = self._announced.get(self._index)
        follows = own == 1 and time.monotonic() - self._announced_at < CAUSE_TIMEOUT
        if own is None or follows:
            self._end(sentence)

    def _end(self, sentence: str) -> None:
        def tell() -> None:
            if self._index == 0:
                self._tell(LOST, {"sentence": sentence})

        end_process(f"processes: {sentence}", 1, first=tell)

    def _tell(self, kind: int, content: Any) -> None:
        """Send to all others, as far as they can be reached."""
        encoded = wire.encode(content)
        for each in self._channels.values():
            with contextlib.suppress(OSError):
                each.send(kind, encoded)


def start(index: int, count: int, channels: dict[int, Channel]) -> Links:
    """Make these the connections of this process."""
    global _current
    _current = Links(index, count, channels)
    return _current


def current() -> Links | None:
    """The connections of this process; None if it runs alone."""
    return _current
