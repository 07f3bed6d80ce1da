"""When a signal amid updates ends the run, and when the updates are finished first."""

import os
import signal

import jax.numpy as jnp
import pytest

from gspax.run import interrupt
from gspax.training.pace import Pace

STATE = {"step": jnp.int32(1)}


@pytest.fixture(autouse=True)
def hang_ups_are_not_ignored():
    """Whatever started the tests, such as nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def pace(grace, lost="steps 3 to 4", saving=0.0):
    return Pace(grace, lambda: saving, lambda: lost)


@pytest.mark.parametrize("signum", interrupt.SIGNALS)
@pytest.mark.parametrize(("grace", "saving"), [(0.0, 0.0), (30.0, 60.0)], ids=["updates", "save"])
def test_every_signal_ends_updates_that_take_longer_than_the_grace(signum, grace, saving, capfd):
    between = pace(grace, saving=saving).begin(4)
    assert between is not None, "nothing is known of the updates yet"
    saves, name = [], signal.Signals(signum).name
    with interrupt.listen():
        between(STATE, 3)
        os.kill(os.getpid(), signum)
        with (
            pytest.raises(interrupt.Unsaved, match=rf"{name}: nothing is saved, .*; steps 3 to 4"),
            interrupt.call_on_interrupt(lambda: saves.append(1)),
        ):
            between(STATE, 2)
    assert saves == []


@pytest.mark.parametrize(("signum", "grace"), [(signal.SIGTERM, 30.0), (None, 0.0)])
def test_updates_in_time_are_finished(signum, grace, capfd):
    between = pace(grace).begin(4)
    with interrupt.listen():
        between(STATE, 3)
        if signum is not None:
            os.kill(os.getpid(), signum)
        between(STATE, 2)


def test_without_a_checkpoint_updates_are_finished_and_the_run_says_so_once(capfd):
    between = pace(grace=0.0, lost=None).begin(4)
    with interrupt.listen():
        os.kill(os.getpid(), signal.SIGTERM)
        for left in (3, 2, 1):
            between(STATE, left)
    assert capfd.readouterr().err.count("no checkpoint yet: the updates are finished first") == 1


def test_the_host_waits_for_updates_only_where_they_are_long():
    found = pace(grace=30.0)
    assert found.begin(2) is not None
    found.end()
    assert found.begin(2) is None
    found.seconds = 16.0
    assert found.begin(2) is not None
