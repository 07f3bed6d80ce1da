"""Finds the usual causes of a flat reward in the metrics and samples of a run.

Each `find_*` takes the record of a run and gives a `Finding` if its cause shows, else None. A threshold stands next to
its reason. Means are over the last fifth of the steps, ten of them at least (`Record.recent`): what limits the run now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gspax.errors import UserError
from gspax.experiment.description import flatten
from gspax.losses.calibration import range_warnings
from gspax.report.curves import Series, read_series
from gspax.rewards.answers import reference
from gspax.run.directory import RunDir, read_description
from gspax.run.record import read_completions
from gspax.storage.paths import to_path
from gspax.types import JsonObject

EQUAL = 0.9  # of the groups: less than a tenth of the samples then has a gradient
TRUNCATED = 0.5  # of the responses: the median one then ends before its answer
LASTING = 0.5  # of the steps with an alarm: it is no episode
TOKENS_CLIPPED = 0.25  # only tokens that moved the way of their advantage are clipped, about half: this is half of them
# The share that is clipped in healthy runs (experiments/studies/clipping): of sequences by GSPO, of tokens by GRPO
USUAL_SEQUENCES, USUAL_TOKENS = 0.15, 5e-4
ENOUGH = 5  # clipped ones expected at that share; then none is an accident in less than 1 % of the runs
STILL = 3e-5  # |s - 1|: a tenth of the GSPO paper's clip range, beyond which its sequences move in one rollout
MISMATCH = 0.1  # |Δ log-prob|: noise of 0.08 cost GRPO nothing, noise of 0.24 cost both (experiments/studies/precision)
FALLEN = 0.1  # of the best mean: far below the dips of a healthy run, and of the guard's alarm, which is at 0.5
LOWER = 0.8  # of the best mean, and beyond `ERRORS`: 1 of 1,000 simulated healthy runs (experiments/studies/alarms)
LARGE_KL = 0.4  # nats per token: beyond it all runs with a clip range collapsed (experiments/studies/alarms)
HELD_OUT = 0.5  # of the gain in training; less says that most of what was learned are the training problems
NEWEST = 20  # files of samples that are read
COMPARED, ERRORS = 20, 4  # completions with and without the answer, of each; standard errors between their rewards
TWINS = 20  # pairs of equal completions
UNEXPLAINED = 0.5  # of the variance of the rewards, which the text does not explain


class Finding(NamedTuple):
    """A likely cause of a flat reward, found in a run."""

    cause: str
    evidence: str  # with the figures and the names of their metrics
    remedy: str  # the settings to try
    page: str  # where they are explained


@dataclass(frozen=True)
class Record:
    """The record that a run leaves: its metrics, its flat settings, and rows of samples, a list for each file."""

    series: Series
    settings: Mapping[str, object] = field(default_factory=dict)
    samples: Sequence[Sequence[JsonObject]] = ()

    def recent(self, name: str) -> float:
        """Return the mean of a metric's finite values in the last fifth of its steps, or the last ten; NaN if none."""
        return self._mean(name, slice(-self.window(name), None))

    def first(self, name: str) -> float:
        """Return the mean over the first `window` steps."""
        return self._mean(name, slice(self.window(name)))

    def best(self, name: str) -> float:
        """Return the largest mean over any `window` steps in a row."""
        values = np.nan_to_num(self.series[name][1])
        return float(np.convolve(values, np.full(size := self.window(name), 1 / size), "valid").max())

    def window(self, name: str) -> int:
        count = len(self.series[name][1])
        return min(count, max(10, count // 5))

    def number(self, key: str, default: float = math.nan) -> float:
        """Return a setting that is a number, else `default`."""
        value = self.settings.get(key)
        return float(value) if isinstance(value, int | float) else default

    def _mean(self, name: str, part: slice) -> float:
        values = np.asarray(self.series[name][1][part])
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else math.nan


def find_constant_reward(record: Record) -> Finding | None:
    """Check if every response has the same reward: the parser never matches, or no response is ever right."""
    if max(record.series["reward/std"][1]) > 0:
        return None
    rows = [row for rows in record.samples for row in rows if isinstance(row.get("completion"), str)]
    answered = [
        row for row in rows if (answer := reference(str(row.get("answer", "")))) and answer in row["completion"]
    ]
    constant = f"every response of every step has the reward {record.recent('reward/mean'):g} (reward/std is 0)"
    if answered:
        return Finding(
            "The reward's parser never matches",
            f"{constant}, yet {len(answered):,} of {len(rows):,} recorded completions contain their problem's answer",
            "the reward, by hand, on a completion in samples/; for `math.reward` the `form` that the prompt asks for",
            "docs/rewards.md",
        )
    return Finding(
        "The reward never varies",
        f"{constant}; none of {len(rows):,} recorded completions contains its problem's answer",
        "easier problems, a `warm_start`, a larger `sampling.group`, or a reward with partial credit",
        "docs/tutorials/own_task.md",
    )


def find_wrong_sign(record: Record) -> Finding | None:
    """Check if completions with their problem's answer get lower rewards than the others."""
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for row in _graded(chain.from_iterable(record.samples)):
        if answer := reference(str(row.get("answer", ""))):
            rewards[answer in str(row["completion"])].append(float(row["reward"]))
    if min(map(len, rewards.values())) < COMPARED:
        return None
    means = {side: float(np.mean(values)) for side, values in rewards.items()}
    error = math.sqrt(sum(np.var(values) / len(values) for values in rewards.values()))
    if not means[False] - means[True] > ERRORS * error:
        return None
    return Finding(
        "The reward is higher without the answer",
        f"{len(rewards[True]):,} recorded completions contain their problem's answer and have a mean reward of "
        f"{means[True]:.3g}, the {len(rewards[False]):,} others {means[False]:.3g}",
        "the sign of the reward, by hand, on a right and a wrong completion in samples/",
        "docs/rewards.md",
    )


def find_noise_reward(record: Record) -> Finding | None:
    """Check if equal completions of a prompt get different rewards, so that the reward is mostly noise.

    An environment may answer equal completions differently, so its runs are left out.
    """
    if any(name.partition(".")[0] == "environment" and value is not None for name, value in record.settings.items()):
        return None
    squares, every = list[float](), list[float]()
    for rows in record.samples:
        equal: dict[tuple[object, object], list[float]] = {}
        for row in _graded(rows):
            equal.setdefault((row.get("prompt"), row["completion"]), []).append(float(row["reward"]))
        for rewards in equal.values():
            every += rewards
            squares += [(one - other) ** 2 for one, other in zip(rewards[::2], rewards[1::2], strict=False)]
    variance = float(np.var(every)) if every else 0.0
    if len(squares) < TWINS or not (share := float(np.mean(squares)) / (2 * max(variance, 1e-30))) > UNEXPLAINED:
        return None
    return Finding(
        "The reward is noise",
        f"in {len(squares):,} pairs of equal completions of one prompt, rewards differ: {share:.0%} of their variance "
        "does not depend on the text",
        "the reward, called twice on one completion in samples/; a judge with temperature 0",
        "docs/rewards.md",
    )


def _graded(rows: Iterable[JsonObject]) -> Iterator[JsonObject]:
    """Yield the rows with a completion and a reward."""
    for row in rows:
        if isinstance(row.get("completion"), str) and isinstance(row.get("reward"), int | float):
            yield row


def find_collapse(record: Record) -> Finding | None:
    """Check if the reward was above 0 and has vanished."""
    best, now = record.best("reward/mean"), record.recent("reward/mean")
    if not (best > 0 and now <= FALLEN * best):
        return None
    evidence = f"reward/mean fell to {now:.3g} from a best of {best:.3g}"
    steps, sizes = record.series.get("policy/kl", ([], []))
    if (largest := max(filter(math.isfinite, sizes), default=0.0)) > LARGE_KL:
        evidence += f"; the updates of step {steps[sizes.index(largest)]} have a KL of {largest:.2g} (policy/kl)"
    return Finding(
        "The policy has collapsed",
        evidence,
        "a checkpoint from before the fall, with a smaller `optimizer.learning_rate` or fewer updates per rollout, and "
        "`guard.collapse=gspax.config.Collapse`",
        "docs/howto/diverged.md#when-a-policy-collapses",
    )


def find_fall(record: Record) -> Finding | None:
    """Check if the reward is below its best by more than its noise, and has not vanished."""
    values = [value for value in record.series["reward/mean"][1] if math.isfinite(value)]
    best, now = record.best("reward/mean"), record.recent("reward/mean")
    if len(values) < 2:
        return None
    error = float(np.diff(values).std()) / math.sqrt(record.window("reward/mean"))  # of two means' difference
    if not (best > 0 and now < min(LOWER * best, best - ERRORS * error)) or find_collapse(record):
        return None
    return Finding(
        "The reward falls",
        f"reward/mean is {now:.3g} on average over {record.window('reward/mean')} steps, and was {best:.3g} at best",
        "the problems of these steps, which may be harder; if eval/reward falls too, a checkpoint from before, with a "
        "smaller `optimizer.learning_rate` or a `reference` KL",
        "docs/howto/diverged.md#when-a-policy-collapses",
    )


def find_equal_groups(record: Record) -> Finding | None:
    """Check if nearly all groups have equal rewards, so their advantages are 0."""
    share, spread = record.recent("reward/zero_std_groups"), record.recent("reward/std")
    if not share >= EQUAL or max(record.series["reward/std"][1]) == 0 or find_collapse(record):
        return None
    before, now = record.first("reward/mean"), record.recent("reward/mean")
    evidence = (
        f"in {share:.0%} of the groups all rewards are equal (reward/zero_std_groups), so they have no gradient; "
        f"reward/mean is {now:.3g}, reward/std {spread:.3g}"
    )
    page = "docs/data.md#groups-without-a-signal"
    if now - before > spread:
        learned = f"{evidence}; it was {before:.3g} at first"
        return Finding("The problems are learned already", learned, "harder problems, such as by `data.PassRate`", page)
    return Finding(
        "Rewards within groups are equal",
        evidence,
        "`sampling.max_refills=3`, a larger `sampling.group`, or problems solved sometimes (`data.PassRate`)",
        page,
    )


def find_truncation(record: Record) -> Finding | None:
    """Check if most responses end at the limit of their length."""
    share = record.recent("response/truncated")
    if not share > TRUNCATED:
        return None
    rows = [row for rows in record.samples for row in rows if isinstance(row.get("reward"), int | float)]
    means = [
        f"{np.mean(rewards):.3g} {label}"
        for label, is_finished in (("truncated", False), ("finished", True))
        if (rewards := [row["reward"] for row in rows if row.get("finished") is is_finished])
    ]
    limit = f"sampling.max_tokens={record.number('sampling.max_tokens'):g}"
    return Finding(
        "Responses are truncated at the limit",
        f"{share:.0%} of the responses have no stop token (response/truncated), with {limit} and a mean length of "
        f"{record.recent('response/length_mean'):.3g}" + (f"; recorded rewards: {', '.join(means)}" if means else ""),
        "a larger `sampling.max_tokens`, a `warm_start` that shows the stop token, or a `length_reward`",
        "docs/advantages.md#length",
    )


def find_clipping(record: Record) -> Finding | None:
    """Check if the clip range clips nearly everything that it can, or nothing although the policy moves."""
    if not {"loss.clip_low", "loss.clip_high"} & record.settings.keys() or updates_per_step(record) < 2:
        return None
    if record.settings.get("calibration") is not None or not _has_signal(record) or not _moves(record):
        return None
    page, widths = "docs/howto/choose_a_loss.md", (record.number("loss.clip_low"), record.number("loss.clip_high"))
    of_tokens = "policy/token_ratio_mean" in record.series  # reported by losses with a ratio for each token
    kind = "tokens" if of_tokens else "sequences"
    share = record.recent(f"policy/clip_fraction_{kind}")
    clipped = f"{share:.2%} of the {kind} are clipped (policy/clip_fraction_{kind})"
    samples = record.number("sampling.prompts") * record.number("sampling.group") * record.window("reward/std")
    counted = samples * (record.recent("response/length_mean") if of_tokens else 1)
    if share == 0 and counted * (USUAL_TOKENS if of_tokens else USUAL_SEQUENCES) >= ENOUGH:
        range_ = f"the range {widths[0]:g} below and {widths[1]:g} above 1"
        return Finding(
            "The clip range clips nothing",
            f"{clipped}, of {counted:,.0f}, by {range_}; |s - 1| is {_deviation(record):.2g} (policy/ratio_deviation)",
            "the first range that the page lists for this loss, or `calibration=gspax.config.Calibration`",
            page,
        )
    floor = max(record.series.get("policy/noise_floor", ([], [0.0]))[1])
    noise = [] if of_tokens or not min(widths) >= 0 else range_warnings(*widths, floor=floor)
    noise = [line for line in noise if "noise floor" in line]
    if (of_tokens and share > TOKENS_CLIPPED) or noise:
        return Finding(
            "The clip range clips nearly everything",
            "; ".join([clipped, *noise]),
            "the first range that the page lists for this loss, fewer `schedule.minibatches`, or `calibration`",
            page,
        )
    return None


def find_lost_entropy(record: Record) -> Finding | None:
    """Check if the guard's alarm for the entropy lasts."""
    if not record.recent("alarm/entropy") >= LASTING:
        return None
    return Finding(
        "The entropy is gone",
        f"policy/entropy is {record.recent('policy/entropy'):.2g} nats per token, {record.first('policy/entropy'):.2g} "
        f"at first, and alarm/entropy was on in {record.recent('alarm/entropy'):.0%} of the steps: the samples of a "
        "group hardly differ",
        "a checkpoint from before, with `regularizers.adaptive_entropy`, a larger `clip_high`, or a smaller "
        "`optimizer.learning_rate`; a shorter `warm_start`",
        "docs/corrections.md#penalties-lossesregularizers",
    )


def find_no_effect(record: Record) -> Finding | None:
    """Check if updates have a gradient but do not move the policy."""
    if not _has_signal(record) or _moves(record):
        return None
    rate = record.recent("optim/learning_rate")
    skipped = record.recent("optim/skipped") / updates_per_step(record)
    stays = (
        f"|s - 1| is {_deviation(record):.2g} (policy/ratio_deviation)"
        if updates_per_step(record) > 1
        else "the held-out rewards, sampled and greedy, are those of the start"
    )
    return Finding(
        "The learning rate has no effect",
        f"{stays} after updates with a learning rate of {rate:.2g} and a gradient norm of "
        f"{record.recent('optim/grad_norm'):.2g}; {skipped:.0%} of the updates were skipped",
        "ten times the `optimizer.learning_rate`; a look at `optimizer.warmup_updates`, `.schedule` and `.frozen`",
        "docs/howto/choose_a_loss.md",
    )


def find_mismatch(record: Record) -> Finding | None:
    """Check if the sampling policy differs from the trained one, by its age or by its computation."""
    mean, age = record.recent("mismatch/abs_diff"), 0.0
    if not mean > MISMATCH:
        return None
    if "rollout/staleness" in record.series:
        age = record.recent("rollout/staleness")
    evidence = f"log-probs of the sampler and the learner differ by {mean:.2g} nats per token (mismatch/abs_diff)"
    if record.settings.get("correction") is None:
        evidence += ", and no `correction` is set"
    if age > 0:
        return Finding(
            "Rollouts are stale",
            f"{evidence}; tokens are {age:.2g} rollouts old on average (rollout/staleness)",
            "a smaller `staleness`, `correction=gspax.losses.correction.truncate_tokens`, or a smaller "
            "`optimizer.learning_rate`",
            "docs/howto/separate_sampler.md#staleness",
        )
    return Finding(
        "The sampler's log-probs differ from the learner's",
        f"{evidence}, although both have the same parameters",
        "`sampling.weights_dtype=auto`, `sampling.kv_cache_dtype=auto`, `model.dtype=float32`, or a `correction`",
        "docs/corrections.md#a-sampler-that-differs-from-the-learner-lossescorrection",
    )


def find_memorized(record: Record) -> Finding | None:
    """Check if the training reward rises and the held-out one does not: the policy overfits its problems."""
    gain = record.recent("reward/mean") - record.first("reward/mean")
    held_out, low, high = (record.series[f"eval/reward{bound}"][1] for bound in ("", "_low", "_high"))
    falls = high[-1] < low[0] or max(high[-2:]) < max(low[:-2], default=-math.inf)  # twice below its best
    is_small = high[-1] - low[0] < HELD_OUT * gain  # the largest gain that the intervals allow
    if not (gain > 0 and (falls or is_small)) or find_fall(record):
        return None
    epochs = estimate_epochs(record.samples, record.number("sampling.prompts"), len(record.series["reward/mean"][1]))
    seen = f"; by the prompts that recur in samples/, each was used {epochs:.1f} times" if epochs else ""
    best = f" and is {max(held_out) - held_out[-1]:.3g} below its best" if falls else ""
    return Finding(
        "The held-out reward falls while the training reward rises" if falls else "The policy overfits its problems",
        f"reward/mean rose by {gain:.3g}, eval/reward by {held_out[-1] - held_out[0]:.3g}{best}{seen}",
        "completions with a high reward in samples/, read by hand; " * falls
        + "more problems, fewer `schedule.steps`, or a `reference` KL",
        "docs/data.md#order",
    )


def estimate_epochs(samples: Sequence[Sequence[JsonObject]], prompts: float, steps: int) -> float:
    """Estimate how often a run used each prompt, from prompts that recur in samples of several steps; 0 if none does.

    Two steps of n and m prompts that are independent samples of N have n m / N in common on average, so all pairs of
    steps together give N (Lincoln-Petersen).
    """
    files = [{str(row["prompt"]) for row in rows if "prompt" in row} for rows in samples]
    pairs = list(combinations(files, 2))
    common = sum(len(one & other) for one, other in pairs)
    size = sum(len(one) * len(other) for one, other in pairs) / common if common else math.inf
    return prompts * steps / size


def updates_per_step(record: Record) -> float:
    """Return the updates of a step by the settings of the run."""
    return record.number("schedule.minibatches", 1.0) * record.number("schedule.epochs", 1.0)


def _has_signal(record: Record) -> bool:
    """Return whether some groups have different rewards. Without any, updates move nothing, and nothing is clipped."""
    return record.recent("reward/zero_std_groups") < EQUAL


def _deviation(record: Record) -> float:
    return record.recent("policy/ratio_deviation")


def _moves(record: Record) -> bool:
    """Return whether a step's updates move the policy by more than `STILL`; with one update, if evaluations differ."""
    if updates_per_step(record) > 1:
        return not _deviation(record) <= STILL  # NaN is no standstill
    rewards = [record.series.get(name, ([], []))[1] for name in ("eval/reward", "eval/greedy_reward")]
    return not all(len(values) > 1 and len(set(values)) == 1 for values in rewards)


class Check(NamedTuple):
    """A search for a cause, and the metrics that it needs."""

    find: Callable[[Record], Finding | None]
    metrics: tuple[str, ...]


REWARDS = ("reward/mean", "reward/std", "reward/zero_std_groups")
UPDATES = ("policy/ratio_deviation", "optim/learning_rate", "optim/grad_norm", "optim/skipped")
CHECKS = (
    Check(find_constant_reward, REWARDS),
    Check(find_wrong_sign, ("reward/std",)),
    Check(find_noise_reward, ("reward/std",)),
    Check(find_collapse, ("reward/mean",)),
    Check(find_fall, ("reward/mean",)),
    Check(find_equal_groups, REWARDS),
    Check(find_truncation, ("response/truncated", "response/length_mean")),
    Check(find_no_effect, (*REWARDS, *UPDATES)),
    Check(find_clipping, (*REWARDS, "policy/ratio_deviation", "policy/clip_fraction_tokens", "response/length_mean")),
    Check(find_lost_entropy, ("alarm/entropy", "policy/entropy")),
    Check(find_mismatch, ("mismatch/abs_diff",)),
    Check(find_memorized, ("reward/mean", "eval/reward", "eval/reward_low", "eval/reward_high")),
)


def read_record(workdir: Path) -> Record:
    """Read the record of a run, finished or not. UserError if it has no metrics yet, or its files cannot be read."""
    run = RunDir(to_path(workdir))
    if not (series := read_series(run.metrics)):
        raise UserError(f"{run.path}: wanted the directory of a run with metrics, {run.metrics.name} has none")
    samples = [read_completions(path) for path in sorted(run.samples.glob("step_*.jsonl"))[-NEWEST:]]
    return Record(series, flatten(read_description(run) or {}), samples)


def find_causes(record: Record) -> tuple[list[Finding], list[str]]:
    """Return the causes found, and the missing metrics, without which some causes cannot be found."""
    missing = sorted({name for check in CHECKS for name in check.metrics} - record.series.keys())
    findings = [check.find(record) for check in CHECKS if not set(check.metrics) & set(missing)]
    return [finding for finding in findings if finding is not None], missing


def summarize(record: Record) -> str:
    """Summarize the rewards at the start of a run and now in one line."""
    changes = {}
    if "reward/mean" in record.series:
        changes["reward/mean"] = record.first("reward/mean"), record.recent("reward/mean")
    for name in ("eval/reward", "eval/greedy_reward"):
        if name in record.series:
            changes[name] = record.series[name][1][0], record.series[name][1][-1]
    last = max(steps[-1] for steps, _ in record.series.values())
    return f"{', '.join(f'{name} {old:.3g} → {new:.3g}' for name, (old, new) in changes.items())}, at step {last}"
