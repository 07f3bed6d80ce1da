"""Computes the log-probs of the same tokens in every way that gspax has, and compares each two ways.

The sampler decodes all samples at once, in fewer slots, with drafts, and prefills what it has sampled; the learner
computes a row for each response in microbatches of several sizes, rows that are packed, and rows that share prompts.

Axes: B samples, T tokens, N prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspax.config import GatedDelta, Latent, ModelConfig, Sampling, Schedule, ShortConvolution, StateSpace, row_shape
from gspax.config.layers import Feature
from gspax.config.model import obstacle
from gspax.learner.forward import StepSettings
from gspax.learner.minibatches import score_minibatches, split_minibatches
from gspax.learner.train_step import make_score
from gspax.model import decoding
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards, named_sharding
from gspax.sampler import sampler
from gspax.sampler.placement import Sampler
from gspax.sampler.state import SampleOptions
from gspax.tools.doctor import training
from gspax.tools.doctor.results import Result, Status
from gspax.types import Array, Params, Rollout

EVERY = 8  # tokens of a response from one prefix that is prefilled to the next
CHUNK = 16  # prefixes that a device prefills at a time
MICROBATCHES = (1, 2, 4)  # rows of each device
SAMPLED = "decoding", "slots", "drafts", "prefill"  # the sampler's ways
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative to the largest
DENSE = replace(training.MODEL, num_experts=0, mlp_only_layers=())
KINDS = {  # a model of two layers for each kind of layer
    "attention": DENSE,
    "windows, sinks": replace(DENSE, sliding_window=48, sliding_layers=(0,), attention_sinks=True, qk_norm=False),
    "experts": training.MODEL,
    "latent attention": replace(
        DENSE,
        num_key_value_heads=4,
        head_dim=64,
        qk_norm=False,
        latent=Latent(rank=128, query_rank=128, nope_dim=64, value_dim=128),
    ),
    "gated delta nets": replace(
        DENSE, delta=GatedDelta(key_heads=2, value_heads=4, key_dim=64, value_dim=64), delta_layers=(0,)
    ),
    "state spaces": replace(DENSE, mixer=StateSpace(groups=2, heads=4, state_dim=64, head_dim=64), mixer_layers=(0,)),
    "short convolutions": replace(DENSE, mixer=ShortConvolution(width=DENSE.hidden_size), mixer_layers=(0,)),
}


class Policy(NamedTuple):
    """A model on some devices."""

    config: ModelConfig
    params: Params
    mesh: jax.sharding.Mesh  # the learner's
    sampler: Sampler


class Scored(NamedTuple):
    """The log-probs of one way, on the host."""

    logp_BT: np.ndarray  # float32
    there_BT: np.ndarray  # bool: the tokens that have one


class Difference(NamedTuple):
    """The largest difference between two ways."""

    nats: float  # infinity if a log-prob is not finite
    relative: float  # to the largest log-prob
    tokens: int  # that both ways have scored
    ways: tuple[str, str]

    def __str__(self) -> str:
        return f"{self.nats:.1e} nats, {' and '.join(self.ways)}"


def score_every_way(policy: Policy, prompts: Sequence[Sequence[int]], sampling: Sampling) -> dict[str, Scored]:
    """Sample completions, and compute the log-probs of their tokens in each way that the model's layers support.

    A way that samples anew has the same random numbers, and counts up to the first token that differs. Collective.

    Args:
      prompts: on every process, as many as `sampling.prompts`; their samples are a multiple of four rows a device.
      sampling: without a queue, drafts, or filters.
    """
    weights = policy.sampler.push(policy.params)
    draw = partial(_sample, policy, weights, prompts)
    first = draw(sampling)
    ends_B = first.prompt_length_B + first.length_B
    spans = zip(first.tokens_BT, first.prompt_length_B, ends_B, strict=True)
    texts = [np.asarray(row[begin:end]) for row, begin, end in spans]
    earlier = [texts[begin : begin + sampling.group] for begin in range(0, len(texts), sampling.group)]

    ways = {"decoding": Scored(np.asarray(first.logp_BT), np.asarray(first.mask_BT))}
    ways["slots"] = _where_equal(first, draw(replace(sampling, slots=len(texts) // 2)))
    if not obstacle(policy.config, Feature.DRAFTS):
        ways["drafts"] = _where_equal(first, draw(replace(sampling, drafts=3), earlier=earlier))
    ways["prefill"] = _prefill(policy, weights, first)
    shards, longest = batch_shards(policy.mesh), sampling.max_prompt_tokens + sampling.max_tokens
    for rows in MICROBATCHES:
        schedule = Schedule(minibatches=1, microbatch_rows=rows * shards)
        ways[f"{rows} row{'s' * (rows > 1)}"] = _score(policy, first, sampling, schedule)
    packed = Schedule(minibatches=1, microbatch_tokens=2 * longest * shards - 1)
    ways["packed rows"] = _score(policy, first, sampling, packed)
    if not obstacle(policy.config, Feature.SHARED_PROMPTS):
        ways["shared prompts"] = _score(policy, first, sampling, replace(packed, share_prompts=True))
    return ways


def _sample(
    policy: Policy,
    weights: Params,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    earlier: Sequence[Sequence[np.ndarray]] = (),
) -> Rollout:
    """Sample completions without stop tokens, on the host."""
    options = SampleOptions(model=policy.config, sampling=sampling, stop_ids=(), mesh=policy.sampler.mesh)
    rollout = sampler.sample(weights, prompts, range(len(prompts)), jax.random.key(1), options, earlier=earlier)
    return multihost.to_host(policy.sampler.fetch(rollout))


def _where_equal(first: Rollout, other: Rollout) -> Scored:
    """Return the log-probs of other samples up to the first token that differs."""
    equal_BT = np.logical_and.accumulate(first.tokens_BT == other.tokens_BT, axis=1)
    return Scored(np.asarray(other.logp_BT), equal_BT & np.asarray(first.mask_BT))


def _prefill(policy: Policy, weights: Params, rollout: Rollout) -> Scored:
    """Compute the log-probs of the tokens that follow some prefixes, which the sampler prefills as prompts."""
    mask_BT, mesh, config = np.asarray(rollout.mask_BT), policy.sampler.mesh, policy.config
    there_BT = mask_BT & (np.cumsum(mask_BT, axis=1) % EVERY == 0)
    row_N, column_N = np.nonzero(there_BT)
    padded = -len(row_N) % batch_shards(mesh)
    own_N, length_N = np.pad(row_N, (0, padded)), np.pad(column_N, (0, padded), constant_values=1)
    arrays = rollout.tokens_BT[own_N], length_N.astype(np.int32)

    @jax.jit
    def following(weights: Params, tokens_NT: Array, length_N: Array) -> Array:
        last_ND, *_ = decoding.prefill(weights, config, tokens_NT, length_N, chunk=CHUNK, mesh=mesh)
        logp_NV = jax.nn.log_softmax(decoding.logits(weights, last_ND, config.logit_cap))
        next_N1 = jnp.take_along_axis(tokens_NT, length_N[:, None], axis=1)
        return jnp.take_along_axis(logp_NV, next_N1, axis=1)[:, 0]

    logp_N = multihost.to_host(following(weights, *multihost.to_devices(arrays, named_sharding(mesh, "batch"))))
    logp_BT = np.zeros(mask_BT.shape, np.float32)
    logp_BT[row_N, column_N] = logp_N[: len(row_N)]
    return Scored(logp_BT, there_BT)


def _score(policy: Policy, rollout: Rollout, sampling: Sampling, schedule: Schedule) -> Scored:
    """Compute the learner's log-probs of a rollout as the settings of a run divide it."""
    shape = row_shape(sampling, schedule, batch_shards(policy.mesh))
    sharing = sampling.group if schedule.share_prompts else 0
    batches, (layout,) = split_minibatches(rollout, 1, shape, policy.mesh, sharing=sharing)
    settings = StepSettings(
        config=policy.config, mesh=policy.mesh, microbatch_rows=shape.microbatch, packed=shape.packed
    )
    (batch,), _ = score_minibatches(make_score(settings), policy.params, batches, range(1))
    row_BT, column_BT = np.broadcast_arrays(layout.response, layout.column)
    mask_BT, scored_BT = multihost.to_host((batch.mask_BT, batch.old_logp_BT))
    used_BT = (row_BT >= 0) & mask_BT
    logp_BT, there_BT = np.zeros(rollout.mask_BT.shape, np.float32), np.zeros(rollout.mask_BT.shape, bool)
    place = row_BT[used_BT], column_BT[used_BT]
    logp_BT[place], there_BT[place] = scored_BT[used_BT], True
    return Scored(logp_BT, there_BT)


def find_differences(ways: Mapping[str, Scored]) -> Iterator[Difference]:
    """Yield the largest difference of each two ways."""
    for one, other in combinations(ways, 2):
        both_BT = ways[one].there_BT & ways[other].there_BT
        left_X, right_X = (ways[name].logp_BT[both_BT].astype(np.float64) for name in (one, other))
        gap = np.abs(left_X - right_X)
        nats = float(np.where(np.isfinite(gap), gap, np.inf).max(initial=0))
        relative = nats / float(np.nanmax(np.abs(left_X), initial=1e-30))
        yield Difference(nats, relative, int(both_BT.sum()), (one, other))


def log_probs(trainer: training.Trainer, kind: str) -> Iterator[Result]:
    """Compare the ways to the log-probs of a model's own samples."""
    experiment = trainer.experiment
    policy = Policy(experiment.model, trainer.new_state().params, trainer.mesh, trainer.sampler)
    ways = score_every_way(policy, trainer.prompts(), experiment.sampling)
    dtype = experiment.model.dtype
    yield from compare_ways(f"log-probs, {kind}, {dtype}", ways, TOLERANCE[dtype])


def compare_ways(name: str, ways: Mapping[str, Scored], bound: float) -> Iterator[Result]:
    """Yield the largest difference of two ways of the sampler, of two of the learner, and of one of each."""
    if not any((way.logp_BT[way.there_BT] < -1e-3).any() for way in ways.values()):
        yield Result(name=name, status="wrong", why="all log-probs are 0")
        return
    found = list(find_differences(ways))
    for where, count in (("sampler", 2), ("learner", 0), ("both", 1)):
        pairs = [each for each in found if sum(way in SAMPLED for way in each.ways) == count]
        worst = max(pairs, key=lambda each: each.relative)
        status: Status = "ok" if worst.relative <= bound else "wrong"
        yield Result(name=f"{name}, {where}", status=status, measured=worst.relative, bound=bound, why=str(worst))
