"""Alarms of a policy whose entropy collapses or whose responses are truncated; an alarm that lasts is a collapse.

An alarm warns. With `guard.collapse`, an alarm that lasts for `guard.collapse.steps` steps is a collapse, and the run
warns or stops (`guard.collapse.action`). A `Watch` is the record so far: a checkpoint stores it, so a resumed run finds
a collapse at the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gspax.config import Collapse, Guard
from gspax.errors import DivergedError
from gspax.parallel import multihost

NAMES = ("entropy", "length")  # alarms of every run
OF_COLLAPSE = ("reward", "gradient")  # further ones with `guard.collapse`


@dataclass(frozen=True)
class Watch:
    """The record of a run up to some step."""

    lasting: dict[str, int] = field(default_factory=dict)  # steps in a row with an alarm, by its name
    rewards: tuple[float, ...] = ()  # mean rewards of the last `collapse.window` steps
    best: float | None = None  # their largest mean over a whole window
    skipped: int = 0  # updates skipped in a row until now

    def mean(self, window: int) -> float | None:
        """The mean reward of the window; None before it is full."""
        return sum(self.rewards) / window if len(self.rewards) == window else None


def to_json(watch: Watch) -> dict[str, Any]:
    """The watch as a checkpoint stores it."""
    return asdict(watch)


def from_json(stored: Mapping[str, Any] | None) -> Watch:
    """The inverse of `to_json`; a new watch for a checkpoint that has none."""
    if stored is None:
        return Watch()
    return Watch(stored["lasting"], tuple(stored["rewards"]), stored["best"], stored["skipped"])


def follow(guard: Guard, before: Watch, metrics: Mapping[str, float]) -> Watch:
    """The watch after a step; warns of the alarms that begin with it."""
    watch = before if guard.collapse is None else _add_reward(guard.collapse, before, metrics)
    found = find_alarms(guard, metrics, watch)
    for name in found:
        if name not in before.lasting:
            multihost.warn_from_primary(found[name])
    return replace(watch, lasting={name: before.lasting.get(name, 0) + 1 for name in found})


def find_alarms(guard: Guard, metrics: Mapping[str, float], watch: Watch | None = None) -> dict[str, str]:
    """A sentence for each alarm that the metrics of a step give, with the rewards of a watch until then."""
    found = {}
    entropy, truncated = metrics.get("policy/entropy"), metrics.get("response/truncated")
    if entropy is not None and entropy < guard.min_entropy:
        found["entropy"] = (
            f"policy/entropy is {entropy:.2g}, below guard.min_entropy ({guard.min_entropy:g}): the samples of a group "
            "hardly differ, so little is left to learn from"
        )
    if truncated is not None and truncated > guard.max_truncated:
        found["length"] = (
            f"response/truncated is {truncated:.2g}, above guard.max_truncated ({guard.max_truncated:g}): most "
            "responses reach sampling.max_tokens without a stop token"
        )
    if guard.collapse is not None:
        found |= _find_more(guard.collapse, metrics, watch or Watch())
    return found


def _find_more(settings: Collapse, metrics: Mapping[str, float], watch: Watch) -> dict[str, str]:
    found, mean, norm = {}, watch.mean(settings.window), metrics.get("optim/grad_norm")
    if mean is not None and _is_below(settings.reward, mean, watch.best):
        found["reward"] = (
            f"the mean of reward/mean over {settings.window} steps is {mean:.3g}, below guard.collapse.reward "
            f"({settings.reward:g}) of its best, {watch.best:.3g}"
        )
    if settings.grad_norm and norm is not None and not norm <= settings.grad_norm:
        found["gradient"] = f"optim/grad_norm is {norm:.3g}, above guard.collapse.grad_norm ({settings.grad_norm:g})"
    return found


def alarm_metrics(guard: Guard, watch: Watch) -> dict[str, float]:
    """`alarm/entropy`, `alarm/length`, ...: 1 while there is that alarm, else 0; `alarm/collapse` likewise."""
    names = NAMES if guard.collapse is None else NAMES + OF_COLLAPSE
    metrics = {f"alarm/{name}": float(name in watch.lasting) for name in names}
    if guard.collapse is not None:
        metrics["alarm/collapse"] = float(bool(_find_lasting(guard.collapse, watch)))
    return metrics


def answer_collapse(settings: Collapse | None, watch: Watch, step: int, position: int) -> DivergedError | None:
    """Warn if the run collapses with this step, or return an error if the run is to stop then.

    Args:
      position: the number of training problems that the run has consumed.
    """
    sentence = None if settings is None else find_collapse(settings, watch)
    if settings is None or sentence is None:
        return None
    if settings.action == "stop":
        return DivergedError(sentence, step=step, position=position, final=True)
    multihost.warn_from_primary(sentence)
    return None


def find_collapse(settings: Collapse, watch: Watch) -> str | None:
    """A sentence if the run collapses with this step: an alarm has now lasted long enough. None otherwise."""
    begun = [name for name in _find_lasting(settings, watch) if watch.lasting[name] == settings.steps]
    if not begun:
        return None
    return f"guard.collapse: wanted fewer than {settings.steps} steps in a row with alarm/{begun[0]}, got so many."


def _add_reward(settings: Collapse, watch: Watch, metrics: Mapping[str, float]) -> Watch:
    if "reward/mean" not in metrics:
        return watch
    watch = replace(watch, rewards=(*watch.rewards, metrics["reward/mean"])[-settings.window :])
    mean = watch.mean(settings.window)
    return watch if mean is None or (watch.best is not None and mean <= watch.best) else replace(watch, best=mean)


def _is_below(share: float, value: float, best: float | None) -> bool:
    """Whether a reward is below this share of the best; never while that is not above 0."""
    return best is not None and best > 0 and not value >= share * best


def _find_lasting(settings: Collapse, watch: Watch) -> list[str]:
    return [name for name in settings.alarms if watch.lasting.get(name, 0) >= settings.steps]
