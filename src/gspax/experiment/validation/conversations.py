"""Rules for an environment, its turns and the rest of an experiment. Each message is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gspax.config import Placement, Reference, Turns
from gspax.experiment.validation.fields import positional_count, short_name, takes_segments
from gspax.losses.traits import traits_of

METHODS = ("encode_chat", "encode_reply", "encode_completion")  # methods of a tokenizer, besides `turn_end`


def conversation_problems(environment: Any, turns: Turns, tokenizer: Any, placement: Placement | None) -> Iterator[str]:
    """The environment has its methods, the tokenizer encodes turns, and the placement waits for replies."""
    if environment is None:
        if turns.credit == "turn":
            yield 'turns.credit: wanted "conversation" without an environment, got "turn"'
        return
    missing = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
    if isinstance(environment, type):
        name = environment.__name__
        yield f"environment: wanted an instance, got the class {name} (write {name}(...))"
    elif missing:
        yield f"environment: wanted an object with reset and step, {type(environment).__name__} has no {missing[0]}"
    lacks = [name for name in METHODS if not callable(getattr(tokenizer, name, None))]
    lacks += ["turn_end"] if not hasattr(type(tokenizer), "turn_end") else []
    if lacks:
        yield (
            "tokenizer: wanted one for conversations with an environment (data.hf_chat, data.CharChat), "
            f"{type(tokenizer).__name__} has no {lacks[0]}"
        )
    if placement is not None and placement.staleness:
        yield (
            "placement.staleness: wanted 0 with an environment, whose replies the sampler waits for, "
            f"got {placement.staleness}"
        )
    if placement is not None and placement.partial is not None:
        yield "placement.partial: wanted null with an environment, whose conversations are drawn whole, got settings"


def credit_problems(
    turns: Turns, loss: Any, advantage: Any, correction: Any, rejection: Any, reference: Reference | None
) -> Iterator[str]:
    """Advantages of turns need a loss that takes those of tokens, and an advantage function that takes a mask."""
    if turns.credit != "turn":
        return
    if not traits_of(loss).token_advantage:
        yield f"turns.credit: wanted a loss with advantages of tokens (losses.gspo_token), got {short_name(loss)}"
    kl = reference.loss if reference is not None else None
    for field, function in {"correction": correction, "rejection": rejection, "reference.loss": kl}.items():
        if function is not None and not takes_segments(function):
            yield f"turns.credit: wanted a {field} that takes `segment_ids`, {short_name(function)} does not"
    if positional_count(advantage) < 2:
        yield (
            "turns.credit: wanted an advantage of (rewards, mask), because not every conversation has every turn; "
            f"{short_name(advantage)} takes no mask"
        )


def unused_turns(environment: Any, turns: Turns) -> Iterator[str]:
    """Settings of turns that change nothing."""
    default = Turns()
    if environment is None and turns.limit != default.limit:
        yield f"turns.limit={turns.limit}: without effect, because there is no environment"
    if turns.discount != default.discount and (environment is None or turns.credit != "turn"):
        yield f'turns.discount={turns.discount:g}: without effect, unless turns.credit="turn" with an environment'
