"""What an environment returns for a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gspax.data.problem import Message


class Step(NamedTuple):
    """The result of one of the policy's messages."""

    state: Any = None
    messages: Sequence[Message] = ()  # the reply, which the policy reads before its next turn; not read if `done`
    reward: float = 0.0  # of this message, besides what the experiment's reward gives the last one
    done: bool = False  # the conversation is over
    metrics: Mapping[str, float] = {}  # summed over the conversation: `rollout/NAME` is the mean over conversations
