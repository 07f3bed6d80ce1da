"""When a signal amid updates ends the run, and when the updates are finished first."""

import os
import signal

import jax.numpy as jnp
import pytest

from gspax.loop.pace import Pace
from gspax.run import interrupt

STATE = {"step": jnp.int32(1)}


def pace(grace, lost="7 steps", saving=0.0):
    return Pace(grace, lambda: saving, lambda: lost)


@pytest.mark.parametrize(
    ("signum", "grace", "saving", "lost", "ends"),
    [
        (signal.SIGTERM, 0.0, 0.0, "7 steps", True),
        (signal.SIGTERM, 30.0, 60.0, "7 steps", True),  # the save would take too long
        (signal.SIGTERM, 30.0, 0.0, "7 steps", False),  # both are done in time
        (signal.SIGTERM, 0.0, 0.0, None, False),  # without a checkpoint everything would be lost
        (signal.SIGINT, 0.0, 0.0, "7 steps", False),  # no machine is about to be gone
        (None, 0.0, 0.0, "7 steps", False),
    ],
)
def test_sigterm_ends_updates_that_take_longer_than_the_grace(signum, grace, saving, lost, ends, capfd):
    between = pace(grace, lost, saving).begin(4)
    assert between is not None, "nothing is known of the updates yet"
    saves = []
    with interrupt.watch():
        between(STATE, 3)
        if signum is not None:
            os.kill(os.getpid(), signum)
        if ends:
            with (
                pytest.raises(interrupt.Unsaved, match=r"SIGTERM: nothing is saved, .*; 7 steps"),
                interrupt.call_on_interrupt(lambda: saves.append(1)),
            ):
                between(STATE, 2)
        else:
            between(STATE, 2)
    assert saves == []


def test_the_host_waits_for_updates_only_where_they_are_long():
    found = pace(grace=30.0)
    assert found.begin(2) is not None
    found.end()
    assert found.begin(2) is None
    found.seconds = 16.0
    assert found.begin(2) is not None
