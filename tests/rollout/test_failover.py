"""Which server a request goes to while servers go and come back."""

import threading
import time

import pytest
from api import Answer, CompletionRequest, UnreachableError

from gspax.config import Sampling
from gspax.errors import FailureError
from gspax.rollout.servers import failover
from gspax.rollout.servers.failover import Servers

ASK = CompletionRequest([1, 2], 1, 0, Sampling(), False, (), False)
ADDRESS = "http://127.0.0.1:1"


class Stub:
    """A server that answers, or does not."""

    address = ADDRESS

    def __init__(self):
        self.answers, self.asked, self.loads = True, 0, 0

    def sample(self, ask):
        self.asked += 1
        if not self.answers:
            raise UnreachableError(f"{self.address} is not reachable")
        return Answer([3], [-1.0], True, None)

    def load(self, known):
        self.loads += 1
        known.confirm(self.address, str(self.loads))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(failover, "PAUSE", 0.01)


def servers_with(stub):
    """The servers of a run, which has given this one its weights."""
    known = Servers([stub], 5.0, lambda server: server.load(known))
    stub.load(known)
    return known


def wait_until(done):
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_request_that_ends_every_server_is_not_sent_for_ever():
    stub = Stub()
    stub.answers = False
    known = servers_with(stub)
    with pytest.raises(FailureError, match=r"a request was sent 10 times and never answered: .*reachable"):
        known.ask(0, ASK, threading.Event())
    assert stub.asked == failover.ATTEMPTS


def test_any_failure_to_give_a_lost_server_its_weights_ends_the_requests():
    """The thread that looks for it would end unseen, and they would wait for the timeout."""
    stub = Stub()
    known = servers_with(stub)
    stub.answers, stub.load = False, lambda known: {}["no such key"]
    with pytest.raises(FailureError, match=r"engine: KeyError\('no such key'\)"):
        known.ask(0, ASK, threading.Event())


def test_a_server_is_not_back_with_weights_that_a_push_has_replaced_meanwhile():
    stub, installed, begun = Stub(), [], threading.Event()

    def install(server):
        installed.append(known.usable())  # of which a push knows
        if len(installed) == 1:
            known.pushes += 1  # the push does not see the server, whose weights are old now
        else:
            begun.wait(30)

    known = Servers([stub], 5.0, install)
    known.lose(stub, "gone")
    wait_until(lambda: len(installed) == 2)
    assert not known.usable(), "it has the older weights"
    begun.set()
    wait_until(known.usable)
    assert installed == [[], []]
