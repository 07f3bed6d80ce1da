"""Ending a run in the middle of the updates of a rollout batch, where finishing them would take too long.

Updates donate the state, so amid them there is none to save that a resumed run could continue from bit for bit. They
are therefore finished, and the state is saved, if both fit into the grace that is left after a signal. Otherwise the
run ends between two updates without a save, and on resume repeats the steps since its newest checkpoint. Without a
checkpoint the updates are finished in any case: the whole run would be lost.

Updates are dispatched ahead of the devices, which leaves no moment between two of them. The host waits for each one
only if a rollout batch's are expected to take longer than the grace, or nothing is known of them yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from gspax.parallel import multihost
from gspax.run import interrupt
from gspax.types import TrainState


@dataclass
class Pace:
    """How long updates take.

    Attributes:
      grace: seconds that a run has to end after a signal.
      saving: gives the seconds of a save, as far as known.
      lost: gives what is lost without a save; None without a checkpoint.
    """

    grace: float
    saving: Callable[[], float]
    lost: Callable[[], str | None]
    seconds: float = math.inf  # of the last update
    _began: float = 0.0
    _count: int = 0

    def begin(self, count: int) -> Callable[[TrainState, int], None] | None:
        """Before the updates of a rollout batch: what to call after each of them, if anything. Collective."""
        self._began, self._count = time.monotonic(), count
        is_long = count * self.seconds + self.saving() > self.grace
        return self._between if multihost.gather(is_long)[0] else None

    def end(self) -> None:
        """After the updates of a rollout batch."""
        self.seconds = (time.monotonic() - self._began) / max(self._count, 1)

    def _between(self, state: TrainState, left: int) -> None:
        """Wait for an update. Raises `interrupt.Unsaved` after a signal, if the updates that are left take too long."""
        jax.block_until_ready(state)
        now, self._count = time.monotonic(), left
        self.seconds, self._began = now - self._began, now
        interrupt.stop_without_save(left * self.seconds + self.saving(), self.grace, self.lost)
