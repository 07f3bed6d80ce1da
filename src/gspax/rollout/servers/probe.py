"""Probes after every push, before any sampling, that an engine computes what the learner trained.

The same sequences are scored by both, and the engine continues some prompts, whose log-probs at the run's temperature
the learner computes too. The first shows wrong weights, the second a wrong temperature, a filter, or keys and values of
an older version in a prefix cache. The statistic is the mean of |difference| over the tokens of a sequence, the largest
of all sequences: one token that goes to another expert by rounding hardly moves it, a wrong expert does.

Axes: K sequences, T tokens, L sparse layers, A active experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from gspax.config import ModelConfig, Sampling
from gspax.errors import FailureError
from gspax.learner.objective import Scores
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.rollout.servers.server import CompletionRequest, pad_sets
from gspax.types import Params

LONGEST = 64  # tokens of a sequence
CONTINUED = 8  # tokens that the engine samples after a prompt
# Nats, far above what rounding gives and far below what a wrong weight does
LIMITS = {"float32": 1e-3, "bfloat16": 0.25}
FLOORS = {"float32": 5e-5, "bfloat16": 0.05}  # below it no later probe is too large
GROWTH = 8.0  # times the first probe, that a later one may reach: logits grow in training, and rounding with them

# The tokens, log-probs, and sets of an `Answer`, as they travel between processes
ProbeAnswer = tuple[list[int], list[float], list[list[int]]]
ScoreRows = Callable[..., Scores]  # a compiled `learner.train_step.make_score`


def learner_scores(
    score: ScoreRows,
    params: Params,
    rows: Sequence[Sequence[int]],
    mesh: jax.sharding.Mesh,
    sets: Sequence[np.ndarray] = (),
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Compute the learner's log-probs of each row's tokens after the first, and its experts [K, L, T, A]. Collective.

    Args:
      sets: of each row's last tokens, the ids that each was chosen from (`server.pad_sets`): log-probs are over these.
    """
    shards, length = batch_shards(mesh), max(map(len, rows))
    count = -(-len(rows) // shards) * shards
    tokens_BT, segment_BT = np.zeros((count, length), np.int32), np.zeros((count, length), np.int32)
    for number, row in enumerate(rows):
        tokens_BT[number, : len(row)] = row
        segment_BT[number, : len(row)] = 1
    mask_BT = segment_BT > 0
    mask_BT[:, 0] = False
    arrays = multihost.to_devices((tokens_BT, segment_BT, mask_BT), named_sharding(mesh, "batch"))
    kept_BTK = None
    if sets:
        whole_BTK = np.zeros((count, length, sets[0].shape[1]), np.int32)
        for number, (row, kept) in enumerate(zip(rows, sets, strict=True)):
            whole_BTK[number, len(row) - len(kept) : len(row)] = kept
        kept_BTK = multihost.to_devices(whole_BTK, named_sharding(mesh, "batch"))
    scores = multihost.to_host(score(params, *arrays, kept_BTK=kept_BTK)._asdict())
    logps = [scores["logp_BT"][number, 1 : len(row)] for number, row in enumerate(rows)]
    return logps, scores["expert_BLTA"]


def candidates(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Generate rows of random tokens, the same in every run."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab_size, length).tolist() for _ in range(count)]


def choose_rows(rows: Sequence[Sequence[int]], expert_KLTA: np.ndarray | None, count: int, experts: int) -> list[int]:
    """Choose the indices of `count` rows that together use the most experts; each in turn adds the most new ones."""
    if expert_KLTA is None:
        return list(range(count))
    used = [_used(expert_LTA, experts) for expert_LTA in expert_KLTA[: len(rows)]]
    chosen, covered = list[int](), set[tuple[int, int]]()
    for _ in range(min(count, len(rows))):
        best = max((n for n in range(len(rows)) if n not in chosen), key=lambda n: (len(used[n] - covered), -n))
        chosen.append(best)
        covered |= used[best]
    return chosen


def choose(
    score: ScoreRows, params: Params, mesh: jax.sharding.Mesh, model: ModelConfig, count: int, length: int
) -> list[list[int]]:
    """Choose the sequences of the probes, equal in all runs of a model; they use as many experts as possible."""
    found = candidates(4 * count, length, model.vocab_size)
    _, expert_KLTA = learner_scores(score, params, found, mesh)
    return [found[number] for number in choose_rows(found, expert_KLTA, count, model.num_experts)]


def _used(expert_LTA: np.ndarray, experts: int) -> set[tuple[int, int]]:
    """Return the (layer, expert) pairs of a row, without padding."""
    return {(layer, int(e)) for layer, ids in enumerate(expert_LTA) for e in np.unique(ids) if e < experts}


def largest_difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Compute the mean |difference| over each row's log-probs, and return the largest; NaN if a log-prob is NaN."""
    return float(np.max([np.abs(own - other).mean() for own, other in zip(ours, theirs, strict=True)]))


def sampled_difference(
    score: ScoreRows,
    params: Params,
    mesh: jax.sharding.Mesh,
    probes: Sequence[Sequence[int]],
    answers: Sequence[ProbeAnswer],
    *,
    size: int,
    vocab_size: int,
) -> float:
    """Return the largest difference for tokens that a server sampled after the probes' beginnings. Collective.

    Args:
      score: at the run's temperature.
      size: the size of sampling masks; 0: no masks.
      vocab_size: the id that pads masks.
    """
    whole = []
    for row, (tokens, _, _) in zip(probes, answers, strict=True):
        whole.append([*row[: max(1, len(row) - len(tokens))], *tokens])
    sets = [pad_sets(kept, size, vocab_size) for _, _, kept in answers] if size else []
    ours, _ = learner_scores(score, params, whole, mesh, sets)
    theirs = [np.array(logps, np.float32) for _, logps, _ in answers]
    return largest_difference([own[-len(logps) :] for own, logps in zip(ours, theirs, strict=True)], theirs)


def tolerance(model: ModelConfig, given: float, first: float | None) -> float:
    """Return the largest difference that counts as rounding: `given` if it is not 0, else a limit by the model's dtype.

    The first probe of a run calibrates it (`first`): later ones may reach `GROWTH` times as much, and always `FLOORS`.
    """
    limit, floor = LIMITS.get(model.dtype, LIMITS["bfloat16"]), FLOORS.get(model.dtype, FLOORS["bfloat16"])
    if given:
        return given
    return limit if first is None else min(limit, max(floor, GROWTH * first))


def require_equal(difference: float, limit: float, what: str, address: str = "a server") -> None:
    """Raise FailureError if log-probs differ by more than rounding, or are NaN."""
    if not difference <= limit:
        raise FailureError(
            f"engine: {address} does not compute what the learner trained: log-probs of {what} differ by "
            f"{difference:.2g} on average, wanted at most {limit:.2g} (engine.tolerance); nothing was sampled with "
            "these weights"
        )


def to_request(row: Sequence[int], number: int, sampling: Sampling, mask_size: int) -> CompletionRequest:
    """Build the request for a few tokens after the beginning of a probe, which no stop token ends."""
    most = min(CONTINUED, sampling.max_tokens)
    return CompletionRequest(row[: max(1, len(row) - most)], most, number, sampling, False, (), False, mask_size)
