"""Keeps the servers that were set aside: a run trains on nothing that they sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gspax.parallel import multihost


@dataclass
class ServersSetAside:
    """The servers of a run that are asked for nothing more, by their number from 1 (`Rollout.source_BT`)."""

    addresses: Sequence[str] = ()  # of all servers
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, reasons: Mapping[int, str], *, was_trained_on: bool = False) -> None:
        """Set servers aside, and say of each why in one line.

        Args:
          was_trained_on: an update has used what they sampled; otherwise it is sampled again.
        """
        then = "an update was trained on what it sampled" if was_trained_on else "others sample again what it sampled"
        for number in reasons.keys() - self.reasons.keys():
            self.reasons[number] = reason = reasons[number]
            address = self.addresses[number - 1]
            multihost.warn_from_primary(f"engine: {address} is set aside: {reason}; {then}")

    def numbers(self) -> frozenset[int]:
        """Return the numbers of these servers, which process 0 knows. Collective."""
        return frozenset(multihost.gather(sorted(self.reasons))[0])
