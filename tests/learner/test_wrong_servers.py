"""Of 16 servers one is wrong in few tokens of late turns, or a little in all of them: it is found, and no other one."""

import numpy as np
import pytest

from gspax.learner.sources import differences_by_source, find_outliers, turn_metrics
from gspax.types import Rollout

SERVERS, RESPONSES, TURNS, LENGTH = 16, 16, 6, 43  # of each server; tokens of a turn, the last of which is a reply


def healthy():
    """A rollout, and the learner's log-probs, which differ by heavy-tailed rounding errors of 0.011 nats on average."""
    rng, shape = np.random.default_rng(0), (SERVERS * RESPONSES, TURNS * LENGTH)
    mask_NT = np.broadcast_to(np.arange(shape[1]) % LENGTH < LENGTH - 1, shape)
    logp_NT = np.where(mask_NT, -rng.exponential(size=shape), 0).astype(np.float32)
    source_NT = np.broadcast_to(np.arange(1, SERVERS + 1).repeat(RESPONSES)[:, None], shape)
    length_N = np.full(shape[0], shape[1], np.int32)
    rollout = Rollout(
        tokens_BT=np.zeros(shape, np.int32),
        mask_BT=mask_NT,
        logp_BT=logp_NT,
        prompt_length_B=np.zeros_like(length_N),
        length_B=length_N,
        finished_B=length_N > 0,
        source_BT=np.where(mask_NT, source_NT, 0),
    )
    return rollout, logp_NT + 0.0036 * np.exp(1.5 * rng.normal(size=shape)) * rng.choice([-1, 1], shape)


def late_tokens(rng, old_logp_NT):
    """One token in a hundred after the third turn is another one than the server's log-prob is of."""
    late = old_logp_NT[:, 3 * LENGTH :]
    late[rng.random(late.shape) < 0.01] -= 8


def stale_weights(rng, old_logp_NT):
    old_logp_NT += rng.normal(scale=0.3, size=old_logp_NT.shape)


@pytest.mark.parametrize(
    ("break_one", "reason"),
    [
        (late_tokens, "tokens differ from the learner's by more than 2 nats"),
        (stale_weights, "its log-probs differ from the learner's by 0.24 nats on average over 4,032 tokens"),
        (lambda *_: None, ""),
    ],
)
def test_a_wrong_server_of_16_is_found_in_a_rollout(break_one, reason):
    rollout, old_logp_NT = healthy()
    break_one(np.random.default_rng(1), old_logp_NT[7 * RESPONSES : 8 * RESPONSES])
    found = find_outliers(differences_by_source(old_logp_NT, rollout))
    assert [*found] == [7] * bool(reason) and all(reason in why for why in found.values()), found
    turns = [turn_metrics(old_logp_NT, rollout)[f"mismatch/abs_diff_turn_{turn}"] for turn in range(1, TURNS + 1)]
    if break_one is late_tokens:
        assert min(turns[3:]) > 1.2 * max(turns[:3])
