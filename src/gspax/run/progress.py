"""Shows progress on the screen: a bar on a terminal; elsewhere a line every few steps, and every 30 s.

`phase` names what the run does now. It is shown when a step takes long, with the time that is left of the phase if it
has been seen before. The first step compiles: it shows the programs compiled so far and an estimate of when the next
one is ready, and in a run that is continued the time that is left by its slowest step, which compiled too.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TextIO, cast

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from gspax.errors import printable
from gspax.parallel import timeline
from gspax.run import interrupt
from gspax.run.compilation import Compilations, count_compilations

# The metrics of a run (`group/name`) that are shown, and their labels. A metric without a group is always shown.
SHOWN = {
    "reward/mean": "reward",
    "response/length_mean": "length",
    "policy/entropy": "entropy",
    "eval/reward": "eval",
    "perf/tokens_per_second": "tokens/s",
}
SILENCE = 30.0  # seconds without a line, after which the phase is printed where there is no terminal
SHORT = 2.0  # seconds of a step before a bar shows its phase


@dataclass
class _Phases:
    """The current phase of the run, its start, and the latest duration of each phase."""

    name: str = ""
    since: float = 0.0
    has_ended: bool = False  # with its step, until another phase or step begins
    part: str = ""  # how much of it is done, if that is counted
    took: dict[str, float] = field(default_factory=dict)

    def begin(self, name: str) -> None:
        if not self.has_ended:
            self.end()
        self.name, self.since, self.has_ended, self.part = name, time.monotonic(), False, ""

    def end(self) -> None:
        now = time.monotonic()
        if self.name:
            timeline.add(timeline.PHASES, self.name, self.since, now)
        self.took[self.name] = now - self.since
        self.since, self.has_ended = now, True


_phases = _Phases()
NOTHING_TOOK: Mapping[str, float] = MappingProxyType({})


def is_due(done: int, every: int, last: int) -> bool:
    """Return whether an action every `every` steps (0: none) and at the last step is due after step `done`."""
    return done == last or (every > 0 and done % every == 0)


def phase(name: str) -> None:
    """Note the phase that the run enters. Cheap: it prints nothing and waits for no device."""
    _phases.begin(name)


def end_phase() -> None:
    """Note that the current phase has ended."""
    _phases.end()


def say(message: str) -> None:
    """Print a line where no `track` is active. Of several processes only process 0 prints it."""
    _print(_console(), message)


def show_table(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and texts, some of several lines, in two columns, as `say`."""
    console, width = _console(), max(len(name) for name, _ in rows)
    for name, text in rows:
        shown = printable(text).replace("\n", "\n" + " " * (width + 2))
        console.print(Text.assemble((f"{name:<{width}}  ", "bold"), shown), soft_wrap=True)


@contextlib.contextmanager
def track(
    total: int,
    start: int = 0,
    title: str = "step",
    *,
    every: int = 10,
    console: Console | None = None,
    took: Mapping[str, float] = NOTHING_TOOK,
    compiled: Compilations | None = None,
) -> Iterator[Bar]:
    """Show progress from `start` to `total` steps; during the first one also how many programs were compiled.

    `took` has the seconds that phases took in an earlier step that compiled. Programs are counted from here, or in
    `compiled`.

    Without a terminal, print every `every`th step, the last, any that ends `SILENCE` seconds after the last line, and
    the current phase whenever `SILENCE` seconds pass without a line. Of several processes only process 0 shows it.
    """
    console = console or _console()
    phase("running")  # until another is named
    _phases.took = dict(took)
    with contextlib.nullcontext(compiled) if compiled else count_compilations() as compiled:
        clock = _Clock(total, start, compiled)
        if console.is_terminal:
            text = TextColumn("{task.fields[text]}", markup=False)
            columns = (TextColumn(title, markup=False), MofNCompleteColumn(), BarColumn(24), text, _Phase(clock))
            with Progress(*columns, console=console) as live:
                live.add_task("", total=total, completed=start, text="")
                yield Bar(console, clock, title, every, live)
            return
        bar, finished = Bar(console, clock, title, every), threading.Event()
        thread = threading.Thread(target=bar.break_silence, args=(finished,), name="progress", daemon=True)
        thread.start()
        try:
            yield bar
        finally:
            finished.set()
            thread.join(1)  # not for long: it may hang in a write, as the run's own would


def _console() -> Console:
    return Console(file=cast(TextIO, _Output(sys.stdout)), highlight=False, quiet=jax.process_index() != 0)


def _print(console: Console, message: str) -> None:
    console.print(Text(printable(message)), soft_wrap=True)
    console.file.flush()


class _Output:
    """A file that may be closed at its other end: then the run is ended as by SIGHUP, and nothing is raised.

    Text that does not fit on a full disk is lost.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with _hang_up_if_closed():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with _hang_up_if_closed():
            self._file.flush()

    def __getattr__(self, name: str) -> object:
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

    def __init__(self, total: int, start: int, compiled: Compilations) -> None:
        self.total = total
        self.compiled = compiled
        self.values: dict[str, float] = {}
        self._marks = [(start, time.monotonic())]

    def text(self, step: int, values: Mapping[str, float]) -> str:
        self.values |= {SHOWN.get(name, name): x for name, x in values.items() if name in SHOWN or "/" not in name}
        if len(self._marks) == 1:
            _phases.took.clear()  # they compiled
        self._marks = [*self._marks[:2], (step, time.monotonic())]
        (first, began), (last, now) = self._marks[-2:]
        pace = (now - began) / max(last - first, 1)
        shown = [
            f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.3g}" for name, value in self.values.items()
        ]
        left = [f"{_duration(pace * (self.total - step))} left"] if step < self.total else []
        return "  ".join([*shown, f"{pace:.2g} s/step", *left])

    def waiting(self) -> tuple[int, float, str]:
        """Return the last finished step, the seconds of the current phase, and a phrase that describes it."""
        name, seconds, note = _phases.name, time.monotonic() - _phases.since, ""
        if len(self._marks) == 1 and self._marks[0][0] < self.total:
            ready = self.compiled.left()
            following = f", the next in about {_duration(ready)}" if ready >= 1 else ""
            note = f" (the first step compiles: {self.compiled.programs} programs so far{following})"
        left = _phases.took.get(name, 0.0) - seconds
        promise = f", {_duration(left)} left" if left > 0 else ""
        return self._marks[-1][0], seconds, f"{name}{_phases.part}{note}, {_duration(seconds)} so far{promise}"


class Bar:
    """The progress of a run on the screen: live on a terminal, else in lines."""

    def __init__(self, console: Console, clock: _Clock, title: str, every: int, live: Progress | None = None) -> None:
        self._console, self._clock, self._title, self._every, self._live = console, clock, title, every, live
        self._lock = threading.RLock()  # a signal's handler may print while the main thread does
        self._printed = time.perf_counter()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show a finished step. Metrics that are not given keep their last value."""
        end_phase()
        text = self._clock.text(step, values)
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=step, text=text)
        elif step % self._every == 0 or step == self._clock.total or self._silence() >= SILENCE:
            self.print(f"{self._title} {step}/{self._clock.total}  {text}")

    def print(self, message: str) -> None:
        """Print a line of text above the bar."""
        with self._lock:
            _print(self._console, message)
            self._printed = time.perf_counter()

    def break_silence(self, finished: threading.Event) -> None:
        """Print the phase whenever nothing else was printed for `SILENCE` seconds, until `finished` is set."""
        while not finished.wait(max(SILENCE - self._silence(), 0.01)):
            if self._silence() >= SILENCE:
                step, _, doing = self._clock.waiting()
                self.print(f"{self._title} {step}/{self._clock.total}  {doing}")

    def _silence(self) -> float:
        return time.perf_counter() - self._printed


class PhaseBar:
    """A bar for work inside a phase of a run, such as an evaluation: the run's own bar shows how much is done."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self.update(0, {})

    def update(self, done: int, values: Mapping[str, float]) -> None:
        """Note what is done; the values are not shown."""
        _phases.part = f" {self._what}, {done:,} of {self._total:,} done"


class _Phase(ProgressColumn):
    """The phase, shown during a long step."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock

    def render(self, task: Task) -> Text:
        _, seconds, doing = self._clock.waiting()
        return Text(doing if seconds >= SHORT else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
