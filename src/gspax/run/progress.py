"""Progress on the screen: a bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from gspax.run import interrupt


class Bar(Protocol):
    """What `track` yields."""

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show a finished step. Metrics that are not given keep their last value."""

    def print(self, message: str) -> None:
        """Print a line of text above the bar."""


# The metrics of a run (`group/name`) that are shown, and their labels. A metric without a group is always shown.
SHOWN = {
    "reward/mean": "reward",
    "response/length_mean": "length",
    "policy/entropy": "entropy",
    "eval/reward": "eval",
}


def is_due(done: int, every: int, last: int) -> bool:
    """Whether something that happens `every` so many steps (0: never) and at the last one happens after `done`."""
    return done == last or (every > 0 and done % every == 0)


@contextlib.contextmanager
def track(
    total: int, start: int = 0, title: str = "step", *, every: int = 10, console: Console | None = None
) -> Iterator[Bar]:
    """Show progress from `start` to `total` steps. Without a terminal, print every `every`th step and the last.

    Of several processes only process 0 shows it.
    """
    file: Any = _Output(sys.stdout)
    console = console or Console(file=file, highlight=False, quiet=jax.process_index() != 0)
    clock = _Clock(total, start)
    if not console.is_terminal:
        yield _Lines(console, clock, title, every)
        return
    text = TextColumn("{task.fields[text]}", markup=False)
    with Progress(
        TextColumn(title, markup=False), MofNCompleteColumn(), BarColumn(24), text, console=console
    ) as progress:
        task = progress.add_task("", total=total, completed=start, text="")
        yield _Live(progress, task, clock)


class _Output:
    """A file that may be closed at its other end: then the run is ended as by SIGHUP, and nothing is raised.

    What does not fit on a full disk is left out.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with _hang_up_if_closed():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with _hang_up_if_closed():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _hang_up_if_closed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            interrupt.hang_up()


class _Clock:
    """The latest values, and the remaining time by the mean step since the first one, which compiles."""

    def __init__(self, total: int, start: int) -> None:
        self.total = total
        self.values: dict[str, float] = {}
        self._marks = [(start, time.monotonic())]

    def text(self, step: int, values: Mapping[str, float]) -> str:
        self.values |= {SHOWN.get(name, name): x for name, x in values.items() if name in SHOWN or "/" not in name}
        self._marks = [*self._marks[:2], (step, time.monotonic())]
        (first, began), (last, now) = self._marks[-2:]
        pace = (now - began) / max(last - first, 1)
        numbers = "  ".join(f"{name} {value:.3g}" for name, value in self.values.items())
        return f"{numbers}  {pace:.2g} s/step  {_duration(pace * (self.total - step))} left"


class _Lines:
    def __init__(self, console: Console, clock: _Clock, title: str, every: int) -> None:
        self._console, self._clock, self._title, self._every = console, clock, title, every

    def update(self, step: int, values: Mapping[str, float]) -> None:
        text = self._clock.text(step, values)
        if step % self._every == 0 or step == self._clock.total:
            self.print(f"{self._title} {step}/{self._clock.total}  {text}")

    def print(self, message: str) -> None:
        self._console.print(Text(message), soft_wrap=True)
        self._console.file.flush()


class _Live:
    def __init__(self, progress: Progress, task: object, clock: _Clock) -> None:
        self._progress, self._task, self._clock = progress, task, clock

    def update(self, step: int, values: Mapping[str, float]) -> None:
        text = self._clock.text(step, values)
        self._progress.update(self._task, completed=step, text=text)  # type: ignore[arg-type]

    def print(self, message: str) -> None:
        self._progress.console.print(Text(message))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
