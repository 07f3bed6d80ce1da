"""The pass that computes what updates read of the old policy: its log-probs, and where it routed the tokens."""

from __future__ import annotations

from gspax.config import Calibration, OldLogp, Reference, Regularizers, RouterShift, RoutingReplay


def keeps_experts(regularizers: Regularizers, routing_replay: RoutingReplay, router_shift: RouterShift | None) -> bool:
    """Whether the pass for old log-probs keeps the experts that the old policy chose, because updates read them.

    False if the rollout has those of the sampler.
    """
    read = routing_replay == "old" or bool(regularizers.load_balance) or router_shift is not None
    return read and routing_replay != "sampler"


def reads_experts(regularizers: Regularizers, routing_replay: RoutingReplay, router_shift: RouterShift | None) -> bool:
    """Whether updates read experts, the old policy's or the sampler's."""
    return routing_replay == "sampler" or keeps_experts(regularizers, routing_replay, router_shift)


def find_scored(
    count: int,
    reference: Reference | None,
    regularizers: Regularizers,
    calibration: Calibration | None,
    *,
    old_logp: OldLogp = "scored",
    routing_replay: RoutingReplay = "off",
    router_shift: RouterShift | None = None,
) -> range:
    """The minibatches, out of a rollout's `count`, whose old log-probs are computed before the first update.

    None if the sampler's log-probs are the old ones. Otherwise all but the first, whose update computes its own; the
    first too where its log-probs are read before the update: by a KL in the reward, for the routing that updates read,
    or for a calibrated clip range, which needs to know how differently the two passes round.
    """
    if old_logp == "sampler":
        return range(0)
    rewarded = reference is not None and reference.reward is not None
    routed = keeps_experts(regularizers, routing_replay, router_shift) or router_shift is not None
    return range(0 if rewarded or routed or calibration is not None else 1, count)
