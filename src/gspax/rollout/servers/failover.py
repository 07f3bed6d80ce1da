"""Balances load across the servers of a run, and handles their failures.

Requests are balanced by the tokens that a server still has to sample; the samples of a group go to one server, which
then computes their prompt once. A server that does not answer is `gone`: a thread of its own looks for it, brings it
to the newest weights, and from then on it gets requests again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gspax.errors import FailureError, warn
from gspax.http_client import RefusedError, UnreachableError
from gspax.parallel import timeline
from gspax.rollout.servers.server import Answer, CompletionRequest, Server, WrongLogpError
from gspax.rollout.servers.weights import Written
from gspax.rollout.set_aside import ServersSetAside

STATE_TIMEOUT = 10.0  # seconds that a server may take to say which weights it has
PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two looks at a server that is gone
ATTEMPTS = 10  # times that a request is sent; more servers than that do not die by chance


class ServedAnswer(NamedTuple):
    """An answer, and the server that gave it.

    `instance` is the server's load of the weights when it was asked.
    """

    answer: Answer
    address: str
    instance: str
    number: int  # of the server, from 1

    def is_current(self, instances: Mapping[str, str]) -> bool:
        """Return whether the server still has that load of its weights, given the instances of all servers."""
        return instances.get(self.address) == self.instance


class Servers:
    """The servers of a run, for any number of threads.

    Args:
      servers: at least one.
      timeout: seconds in which one of them must be there.
      install: gives a server the newest weights and checks it; raises what servers raise.
    """

    def __init__(self, servers: Sequence[Server], timeout: float, install: Callable[[Server], object]) -> None:
        self._by_address = {server.address: server for server in servers}
        self._timeout, self._install = timeout, install
        self._unfinished = dict.fromkeys(self._by_address, 0)  # tokens, by address
        self._group = dict[int, str]()  # the address of each group
        self._instance = dict[str, str]()  # of the weights, by address
        self._gone = dict[str, str]()  # why, of those that do not answer, by address
        self.set_aside = ServersSetAside([*self._by_address])
        self._problem = ""  # of a server that is back, but is not to be used
        self.answered = 0  # requests
        self.pushes = 0  # that have begun: servers that are gone then need the weights of the newest
        self._changed = threading.Condition()

    def usable(self) -> list[Server]:
        """Return the servers that answer and were not set aside."""
        with self._changed:
            return [self._by_address[address] for address in self._usable_addresses()]

    def _usable_addresses(self) -> list[str]:
        numbered = enumerate(self._by_address, start=1)
        return [one for number, one in numbered if one not in self._gone and number not in self.set_aside.reasons]

    def _number(self, server: Server) -> int:
        """Return the number of a server, from 1 (`Rollout.source_BT`)."""
        return self.set_aside.addresses.index(server.address) + 1

    def confirm(self, address: str, instance: str) -> None:
        """Note which load of the weights a server has."""
        with self._changed:
            self._instance[address] = instance

    def instance(self, address: str) -> str:
        """Return which load of the weights a server has; empty before the first."""
        with self._changed:
            return self._instance.get(address, "")

    def ask(self, group: int, ask: CompletionRequest, stop: threading.Event) -> ServedAnswer:
        """Send a request to one server after the other until one answers.

        A server may have restarted meanwhile, unnoticed: the answer counts if its state still has the `instance`.

        Raises:
          FailureError: none is there within the timeout, one has refused the request, or it was sent `ATTEMPTS` times.
        """
        reason = ""
        for _ in range(ATTEMPTS):
            server, instance = self._choose_server(group, ask.max_tokens, stop)
            try:
                with timeline.span(server.address, "request"):
                    answer = server.sample(ask)
                with self._changed:
                    self.answered += 1
                return ServedAnswer(answer, server.address, instance, self._number(server))
            except UnreachableError as problem:
                reason = str(problem)
                if not stop.is_set():
                    self.lose(server, reason)
            except WrongLogpError as problem:
                if len(self._by_address) == 1:
                    raise FailureError(f"engine: {problem}") from None
                self.set_aside.add({self._number(server): str(problem)})
            except RefusedError as problem:
                raise FailureError(f"engine: {problem}") from None
            finally:
                with self._changed:
                    self._unfinished[server.address] -= ask.max_tokens
        raise FailureError(f"engine: a request was sent {ATTEMPTS} times and never answered: {reason}")

    def wait(self, stop: threading.Event) -> list[str]:
        """Wait until a server is there, and return the addresses of those that are.

        Raises:
          FailureError: none is there within the timeout, or `stop` is set.
        """
        end = time.monotonic() + self._timeout
        with self._changed:
            while True:
                if stop.is_set():
                    raise FailureError("engine: the request was ended")
                if self._problem:
                    raise FailureError(self._problem)
                if len(self.set_aside.reasons) == len(self._by_address):
                    raise FailureError(
                        f"engine: all servers were set aside: {'; '.join(self.set_aside.reasons.values())}"
                    )
                if there := self._usable_addresses():
                    return there
                if time.monotonic() > end:
                    raise FailureError(_describe_gone(self._timeout, self._gone))
                self._changed.wait(PAUSE)

    def _choose_server(self, group: int, tokens: int, stop: threading.Event) -> tuple[Server, str]:
        """Return a group's server and its instance; a new group gets the server with the fewest unfinished tokens."""
        with self._changed:
            there = self.wait(stop)
            address = self._group.get(group, "")
            if address not in there:
                address = self._group[group] = min(there, key=self._unfinished.__getitem__)
            self._unfinished[address] += tokens
            return self._by_address[address], self._instance.get(address, "")

    def forget_groups(self) -> None:
        """Forget which server each group uses, before other groups are sampled."""
        with self._changed:
            self._group.clear()

    def lose(self, server: Server, reason: str) -> None:
        """Note that a server does not answer, and look for it from now on."""
        with self._changed:
            if server.address in self._gone:
                return
            self._gone[server.address] = reason
        warn(f"engine: {reason}; its requests are sent again, to another server or once it is back")
        threading.Thread(target=self._look_for, args=(server,), name="gspax_lost", daemon=True).start()

    def _look_for(self, server: Server) -> None:
        def give(server: Server) -> None:
            pushes = self.pushes
            self._install(server)
            with self._changed:
                if pushes != self.pushes:  # one that begins later finds the server present
                    raise UnreachableError(f"{server.address}: newer weights were pushed while it loaded older ones")
                del self._gone[server.address]
                self._changed.notify_all()

        try:
            for reason in bring_back(server, give):
                with self._changed:
                    self._gone[server.address] = reason
        except Exception as problem:  # nothing else would end the requests that wait for the server
            with self._changed:
                self._problem = str(problem) if isinstance(problem, FailureError) else f"engine: {problem!r}"
                self._changed.notify_all()
            return
        warn(f"engine: {server.address} is back, with the newest weights")

    def close(self) -> None:
        """End all requests."""
        for server in self._by_address.values():
            server.close()


def _describe_gone(timeout: float, gone: Mapping[str, str]) -> str:
    """Describe servers that have not answered for `timeout` seconds, with the reasons by address."""
    return (
        f"engine: no server for {timeout:g} seconds (engine.timeout): {'; '.join(gone.values())}. Completed steps are "
        "saved: start it again and repeat the command"
    )


def find_restarted(servers: Servers, written: Written) -> dict[str, str]:
    """Mark restarted servers as lost, and return the instances of the servers with the newest weights.

    Raises:
      FailureError: another run has pushed to a server.
    """
    instances = dict[str, str]()
    for server in servers.usable():
        try:
            loaded = server.state(STATE_TIMEOUT)
        except UnreachableError as problem:
            servers.lose(server, str(problem))
            continue
        except RefusedError as problem:
            raise FailureError(f"engine: {problem}") from None
        if loaded.version is None:
            servers.lose(server, f"{server.address} was started again")
        elif loaded.digest != written.digest or loaded.instance != servers.instance(server.address):
            raise FailureError(
                f"engine: {server.address}: wanted version {written.version} of this run, it has other weights, "
                f"version {loaded.version}: does another run push to it?"
            )
        else:
            instances[server.address] = loaded.instance
    return instances


def bring_back(server: Server, install: Callable[[Server], object]) -> Iterator[str]:
    """Install the newest weights as soon as a server answers, and yield the reason of each failed attempt.

    Raises:
      FailureError: it answers, and cannot be used.
    """
    pause = PAUSE
    while True:
        time.sleep(pause)
        try:
            install(server)
            return
        except UnreachableError as problem:
            yield str(problem)
        except RefusedError as problem:
            raise FailureError(f"engine: {problem}") from None
        pause = min(2 * pause, LONGEST_PAUSE)
