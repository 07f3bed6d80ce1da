"""Which server a request goes to, and what happens while one of them does not answer.

Requests are balanced by the tokens that a server still has to sample; the samples of a group go to one server, which
then computes their prompt once. A server that does not answer is `gone`: a thread of its own looks for it, brings it
to the newest weights, and from then on it gets requests again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gspax.errors import FailureError, warn
from gspax.parallel import watchdog
from gspax.rollout.engines.client import RefusedError, UnreachableError
from gspax.rollout.engines.server import Answer, Ask, Server

PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two looks at a server that is gone


class Given(NamedTuple):
    """An answer, and the load of the weights that the server had when it was asked."""

    answer: Answer
    address: str
    instance: str


class Servers:
    """The servers of a run, for any number of threads.

    Args:
      servers: at least one.
      timeout: seconds in which one of them must be there.
      install: gives a server the newest weights and checks that it has them; raises what servers raise.
    """

    def __init__(self, servers: Sequence[Server], timeout: float, install: Callable[[Server], object]) -> None:
        self._by_address = {server.address: server for server in servers}
        self._timeout, self._install = timeout, install
        self._unfinished = dict.fromkeys(self._by_address, 0)  # tokens, by address
        self._group = dict[int, str]()  # the address of each group
        self._instance = dict[str, str]()  # of the weights, by address
        self._gone = dict[str, str]()  # why, of those that do not answer, by address
        self._problem = ""  # of a server that is back, but is not to be used
        self._changed = threading.Condition()

    def present(self) -> list[Server]:
        """The servers that are not gone."""
        with self._changed:
            return [server for address, server in self._by_address.items() if address not in self._gone]

    def confirm(self, address: str, instance: str) -> None:
        """Note which load of the weights a server has."""
        with self._changed:
            self._instance[address] = instance

    def instance(self, address: str) -> str:
        """The load of the weights that a server had when it was last confirmed."""
        with self._changed:
            return self._instance.get(address, "")

    def ask(self, group: int, ask: Ask, stop: threading.Event) -> Given:
        """Send a request to one server after the other until one answers.

        A server may have restarted meanwhile, unnoticed: the answer counts if its state still has the `instance`.

        Raises:
          FailureError: none is there within the timeout, or one has refused the request.
        """
        while True:
            server, instance = self._take(group, ask.most, stop)
            try:
                answer = server.sample(ask)
                watchdog.progress()
                return Given(answer, server.address, instance)
            except UnreachableError as problem:
                if not stop.is_set():
                    self.lose(server, str(problem))
            except RefusedError as problem:
                raise FailureError(f"engine: {problem}") from None
            finally:
                with self._changed:
                    self._unfinished[server.address] -= ask.most

    def _take(self, group: int, tokens: int, stop: threading.Event) -> tuple[Server, str]:
        """The server of a group, or for a new group the one with the fewest unfinished tokens, and its instance."""
        end = time.monotonic() + self._timeout
        with self._changed:
            while True:
                if stop.is_set():
                    raise FailureError("engine: the request was ended")
                self.raise_problem()
                if there := [address for address in self._by_address if address not in self._gone]:
                    break
                if time.monotonic() > end:
                    raise FailureError(self.describe_gone())
                self._changed.wait(PAUSE)
            address = self._group.get(group, "")
            if address not in there:
                address = self._group[group] = min(there, key=self._unfinished.__getitem__)
            self._unfinished[address] += tokens
            return self._by_address[address], self._instance.get(address, "")

    def raise_problem(self) -> None:
        """FailureError if a server that was gone is back, but cannot be used."""
        if self._problem:
            raise FailureError(self._problem)

    def describe_gone(self) -> str:
        """A sentence about the servers that do not answer."""
        reasons = "; ".join(self._gone.values())
        return (
            f"engine: no server for {self._timeout:g} seconds (engine.timeout): {reasons}. Completed steps are saved: "
            "start it again and repeat the command"
        )

    def forget_groups(self) -> None:
        """Before other groups are sampled."""
        with self._changed:
            self._group.clear()

    def lose(self, server: Server, reason: str) -> None:
        """Note that a server does not answer, and look for it from now on."""
        with self._changed:
            if server.address in self._gone:
                return
            self._gone[server.address] = reason
        warn(f"engine: {reason}; its requests are sent again, to another server or once it is back")
        threading.Thread(target=self._find, args=(server,), name="gspax_engine_lost", daemon=True).start()

    def _find(self, server: Server) -> None:
        """Wait for a server, and install the newest weights."""
        pause = PAUSE
        while True:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                self._install(server)
            except UnreachableError as problem:
                with self._changed:
                    self._gone[server.address] = str(problem)
            except (RefusedError, FailureError) as problem:
                with self._changed:
                    self._problem = str(problem) if isinstance(problem, FailureError) else f"engine: {problem}"
                    self._changed.notify_all()
                return
            else:
                with self._changed:
                    del self._gone[server.address]
                    self._changed.notify_all()
                warn(f"engine: {server.address} is back, with the newest weights")
                return

    def close(self) -> None:
        """End all requests."""
        for server in self._by_address.values():
            server.close()
