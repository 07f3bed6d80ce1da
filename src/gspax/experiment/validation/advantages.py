"""Rules of an advantage: the groups, rewards, and turns that it needs. Each message is one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gspax.advantages import compares_groups, takes_negative
from gspax.config import Sampling, Turns
from gspax.config.functions import Function, takes_lengths, title_of
from gspax.config.protocols import Advantage, Loss
from gspax.experiment.validation.contracts import takes_rewards
from gspax.experiment.validation.fields import positional_count, takes_segments
from gspax.losses.traits import traits_of
from gspax.model.passes import Passes


def advantage_problems(passes: Passes) -> Iterator[str]:
    """Check that the groups and the rewards are those that the advantage needs."""
    e = passes.experiment
    advantage, sampling, length_reward = e.advantage, e.sampling, e.length_reward
    yield from _group_problems(sampling, [term.signal for term in passes.terms if term.signal], advantage)
    added: dict[str, Function] = {} if length_reward is None else {"length_reward": length_reward}
    added |= {penalty.field: penalty.function for term in passes.terms for penalty in term.reward_penalties()}
    for field, function in added.items() if not takes_negative(advantage) else ():
        yield (
            f"{field}: wanted null with {title_of(advantage)}, which takes no negative rewards, got "
            f"{title_of(function)}"
        )


def _group_problems(sampling: Sampling, signals: Sequence[str], advantage: Advantage) -> Iterator[str]:
    """Check that groups are large enough to compare, and not replaced if groups of equal rewards are useful."""
    if sampling.group == 1 and not signals and not compares_groups(advantage):
        yield "sampling.group: wanted at least 2, got 1"
    if sampling.group == 1:
        reason = "sampling.group=1, where all groups would be replaced"
    elif compares_groups(advantage):
        reason = f"{title_of(advantage)}, which learns from groups of equal rewards too"
    elif signals:
        reason = signals[0]
    else:
        return
    if sampling.max_refills:
        yield f"sampling.max_refills: wanted 0 with {reason}, got {sampling.max_refills}"


def overlong_problems(advantage: Advantage, *, on: bool) -> Iterator[str]:
    """Check that the advantage can leave samples out of their group, if overlong ones are filtered."""
    if on and positional_count(advantage) < 2:
        yield (
            "filter_overlong: wanted an advantage of (rewards, mask), so that the responses left out do not count "
            f"in their groups; {title_of(advantage)} takes no mask"
        )


def credit_problems(turns: Turns, loss: Loss, advantage: Advantage, terms: Mapping[str, Function]) -> Iterator[str]:
    """Check that advantages of turns have a loss that takes them per token, and an advantage that takes a mask."""
    if turns.credit != "turn":
        return
    if not traits_of(loss).token_advantage:
        yield f"turns.credit: wanted a loss with advantages of tokens (losses.gspo_token), got {title_of(loss)}"
    for field, function in terms.items():
        if not takes_segments(function):
            yield f"turns.credit: wanted a {field} that takes `segment_ids`, {title_of(function)} does not"
    if takes_lengths(advantage):
        yield f"turns.credit: wanted an advantage of rewards alone, {title_of(advantage)} takes lengths of responses"
    if not takes_rewards(advantage, (2, 2), masked=True) and takes_rewards(advantage, (2, 2, 2), masked=True):
        yield f"turns.credit: wanted an advantage of one reward per turn, {title_of(advantage)} takes several"
    if positional_count(advantage) < 2:
        yield (
            "turns.credit: wanted an advantage of (rewards, mask), because not every conversation has every turn; "
            f"{title_of(advantage)} takes no mask"
        )
