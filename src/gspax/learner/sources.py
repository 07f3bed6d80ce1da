"""Which server sampled a token, and which servers' log-probs differ from the learner's by far more than the others'.

A server may compute wrong log-probs, or send other tokens than it sampled, while its weights have the right checksum.
The learner recomputes log-probs of each server's tokens. The mean of |log π_old - log μ| over them, in which a token
counts at most `EXTREME`, shows it where all tokens of a server differ, and the number of tokens that differ by more
where few do. A server is compared with the median of the others. Tokens of one response are alike, so a server with few
responses may differ more, as may one with few tokens. Where no pass computes the log-probs of a server's tokens before
the first update, rows with `ENOUGH` of them are computed for this purpose. The figures are of
`experiments/studies/sources/false_alarms.py`.

Axes: N responses, T tokens, S servers, R rows of a minibatch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gspax.types import Rollout

FACTOR = 4.0  # times the median of the others, with many responses
FEW_RESPONSES = 10.0  # both limits are 1 + FEW_RESPONSES / responses times as wide
FEW_TOKENS = 256.0  # and FEW_TOKENS / tokens is added to this for the limit of the mean
EXTREME = 2.0  # nats; rare in healthy tokens, usual in wrong ones
EXTREMES, EXTREME_FACTOR = 6.0, 4.0  # extreme tokens that are no sign, and times the others' median share
FLOOR = 1e-3  # nats; a smaller mean difference is not held against a server
ENOUGH = 4096  # tokens of a server that show such faults
FEWEST = 3  # servers; of two that differ nothing says which is wrong
TURNS = 8  # turns that have a metric of their own


class Differences(NamedTuple):
    """The differences of each server's tokens."""

    tokens_S: np.ndarray  # int64
    responses_S: np.ndarray  # int64    with any of these tokens
    mean_S: np.ndarray  # float64  nats; NaN without tokens, as the next one
    limited_S: np.ndarray  # float64  nats; mean of the differences, each at most `EXTREME`
    extreme_S: np.ndarray  # int64    tokens beyond `EXTREME`


def summarize(diff_NT: np.ndarray, source_NT: np.ndarray) -> Differences:
    """Summarize the differences of each server's tokens.

    Args:
      diff_NT: float; the differences of tokens in nats, NaN where they are not known.
      source_NT: int; the server of each token, from 1; 0 where none sampled it.
    """
    known_NT, S, N = np.isfinite(diff_NT) & (source_NT > 0), int(source_NT.max()), len(diff_NT)
    number_K, diff_K = source_NT[known_NT].astype(np.int64) - 1, diff_NT[known_NT]
    response_K = np.nonzero(known_NT)[0]
    tokens_S = np.bincount(number_K, minlength=S)
    responses_S = np.count_nonzero(np.bincount(number_K * N + response_K, minlength=S * N).reshape(S, N), axis=1)

    def mean(value_K: np.ndarray) -> np.ndarray:
        sum_S = np.bincount(number_K, value_K, minlength=S)
        return np.divide(sum_S, tokens_S, out=np.full(S, np.nan), where=tokens_S > 0)

    extreme_S = np.bincount(number_K[diff_K > EXTREME], minlength=S)
    return Differences(tokens_S, responses_S, mean(diff_K), mean(np.minimum(diff_K, EXTREME)), extreme_S)


def differences_by_source(old_logp_NT: np.ndarray, rollout: Rollout) -> Differences:
    """Compute the differences of each server's tokens.

    Args:
      old_logp_NT: the learner's log-probs, NaN where it has computed none.
      rollout: on the host, with `source_BT`.
    """
    diff_NT = np.abs(old_logp_NT - np.asarray(rollout.logp_BT))
    return summarize(np.where(np.asarray(rollout.mask_BT), diff_NT, np.nan), np.asarray(rollout.source_BT))


def count_lacking(old_logp_NT: np.ndarray, rollout: Rollout) -> np.ndarray:
    """Count the tokens of each server whose log-probs are to be computed still, so that `ENOUGH` are known, or all.

    The arguments are those of `differences_by_source`.

    Returns:
      int64 [S]; zeros if too few servers have sampled to compare them.
    """
    mask_NT, source_NT = np.asarray(rollout.mask_BT), np.asarray(rollout.source_BT)
    known_NT, S = mask_NT & np.isfinite(old_logp_NT), int(source_NT.max())
    sampled_S, known_S = (np.bincount(source_NT[here], minlength=S + 1)[1:] for here in (mask_NT, known_NT))
    lacking_S = np.maximum(np.minimum(sampled_S, ENOUGH) - known_S, 0)
    return lacking_S * (np.count_nonzero(sampled_S) >= FEWEST)


def choose_rows(source_RT: np.ndarray, lacking_S: np.ndarray, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose rows that have the tokens that servers lack, the fullest rows first, and others up to a multiple.

    >>> source_RT = np.array([[1, 1], [1, 1], [2, 0], [1, 2]])
    >>> rows, lacking = choose_rows(source_RT, np.array([1, 2]), 1)
    >>> rows.tolist(), lacking.tolist()
    ([0, 2, 3], [0, 0])

    Args:
      source_RT: the server of each sampled token, 0 elsewhere; R is divisible by `multiple`.
      lacking_S: from `count_lacking`.

    Returns:
      The rows in their order, and what is still lacking then.
    """
    lacking_S, chosen = lacking_S.copy(), np.zeros(len(source_RT), bool)
    for row in np.argsort(-np.count_nonzero(source_RT, axis=1), kind="stable"):
        count_S = np.bincount(source_RT[row], minlength=len(lacking_S) + 1)[1:]
        if count_S[lacking_S > 0].any():
            chosen[row], lacking_S = True, np.maximum(lacking_S - count_S, 0)
    chosen[np.nonzero(~chosen)[0][: -chosen.sum() % multiple]] = True
    return np.nonzero(chosen)[0], lacking_S


def find_outliers(differences: Differences) -> dict[int, str]:
    """Find the servers whose differences are far beyond the others'; return by their index a phrase that says how.

    >>> diff_NT = np.full((64, 64), 0.01)
    >>> diff_NT[1::4] = 0.1
    >>> [*find_outliers(summarize(diff_NT, np.tile([[1], [2], [3], [4]], (16, 64))))]
    [1]
    """
    tokens_S, responses_S, _, limited_S, extreme_S = differences
    found, (asked,) = dict[int, str](), np.nonzero(tokens_S)
    for source in asked.tolist() if len(asked) >= FEWEST else []:
        others, tokens = asked[asked != source], int(tokens_S[source])
        usual, share = float(np.median(limited_S[others])), float(np.median(extreme_S[others] / tokens_S[others]))
        slack = 1 + FEW_RESPONSES / responses_S[source]
        if limited_S[source] > max(FLOOR, FACTOR * usual * (slack + FEW_TOKENS / tokens)):
            found[source] = (
                f"its log-probs differ from the learner's by {limited_S[source]:.2g} nats on average over {tokens:,} "
                f"tokens, the others' by {usual:.2g}"
            )
        elif extreme_S[source] > EXTREMES * slack + EXTREME_FACTOR * share * tokens:
            found[source] = (
                f"the log-probs of {extreme_S[source]:,} of its {tokens:,} tokens differ from the learner's by more "
                f"than {EXTREME:g} nats, of the others' a share of {share:.2g}"
            )
    return found


def source_metrics(mean_S: np.ndarray) -> dict[str, float]:
    """Return `mismatch/abs_diff_server_N` of the servers that sampled; N counts from 1, in the order of addresses."""
    means = dict(enumerate(mean_S.tolist(), start=1))
    return {f"mismatch/abs_diff_server_{number}": mean for number, mean in means.items() if np.isfinite(mean)}


def turn_metrics(old_logp_NT: np.ndarray, rollout: Rollout) -> dict[str, float]:
    """Return `mismatch/abs_diff_turn_N`: the mean difference of the tokens of each response's N-th turn, to `TURNS`."""
    mask_NT = np.asarray(rollout.mask_BT)
    begins_NT = mask_NT & ~np.pad(mask_NT, ((0, 0), (1, 0)))[:, :-1]
    turn_NT, diff_NT = np.cumsum(begins_NT, axis=1), np.abs(old_logp_NT - np.asarray(rollout.logp_BT))
    known_NT = mask_NT & np.isfinite(diff_NT)
    turns = {turn: diff_NT[known_NT & (turn_NT == turn)] for turn in range(1, TURNS + 1)}
    return {f"mismatch/abs_diff_turn_{turn}": float(diff.mean()) for turn, diff in turns.items() if len(diff)}
