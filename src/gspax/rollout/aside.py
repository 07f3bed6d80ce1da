"""What was set aside: servers whose samples a run does not train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gspax.parallel import multihost


@dataclass
class Aside:
    """The servers of a run that are asked for nothing more, by their number from 1 (`Rollout.source_BT`)."""

    addresses: Sequence[str] = ()  # of all servers
    reasons: dict[int, str] = field(default_factory=dict)

    def add(self, reasons: Mapping[int, str]) -> None:
        """Set servers aside, and say of each why in one line."""
        for number in reasons.keys() - self.reasons.keys():
            self.reasons[number] = reason = reasons[number]
            address = self.addresses[number - 1]
            multihost.warn_from_primary(
                f"engine: {address} is set aside: {reason}; other servers sample again what it sampled"
            )

    def numbers(self) -> frozenset[int]:
        """Return the numbers of these servers, which process 0 knows. Collective."""
        return frozenset(multihost.gather(sorted(self.reasons))[0])
