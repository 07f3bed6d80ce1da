"""Progress is a bar on a terminal and lines elsewhere."""

import errno
import io
import time
from types import SimpleNamespace

import pytest
from api import progress
from rich.console import Console

from gspax.run.compilation import Compilations


def show(terminal, total=20, start=0, every=10):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, highlight=False)
    with progress.track(total, start, "sort", every=every, console=console) as bar:
        for step in range(start + 1, total + 1):
            bar.update(step, {"reward/mean": step / 100, "policy/loss": 9.0})
            if step == 4:
                bar.update(step, {"eval/reward": 0.625})
                bar.print("checkpoint [red] saved")
    return file.getvalue()


def test_without_a_terminal_a_line_is_printed_every_tenth_step_and_at_the_end():
    lines = show(terminal=False, total=23).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "checkpoint [red] saved",
        "sort 10/23",
        "sort 20/23",
        "sort 23/23",
    ]
    assert "reward 0.1  eval 0.625" in lines[1] and "left" in lines[1]
    assert "loss" not in lines[1] and "\x1b" not in "".join(lines)


def set_clock(monkeypatch, read):
    """Let this module alone read another clock: threads of other tests read the real one."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(**vars(time) | {"monotonic": read}))


def wait_for(file, text):
    deadline = time.monotonic() + 10
    while text not in file.getvalue():
        assert time.monotonic() < deadline, file.getvalue()
        time.sleep(0.01)


def test_a_long_step_prints_its_phase_without_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "SILENCE", 0.05)
    file = io.StringIO()
    with progress.track(20, 4, "sort", console=Console(file=file, width=120, highlight=False)) as bar:
        wait_for(file, "sort 4/20  running (the first step compiles: 0 programs so far), 0:00 so far\n")
        progress.phase("sampling")
        wait_for(file, "sort 4/20  sampling (the first step compiles: 0 programs so far), 0:00 so far\n")
        bar.update(5, {"reward/mean": 0.5})
        progress.phase("updating")
        wait_for(file, "sort 5/20  updating, 0:00 so far\n")
    done = file.getvalue()
    time.sleep(0.2)
    assert file.getvalue() == done


def test_a_phase_shows_the_time_that_it_took_in_the_last_step_but_not_in_the_first(monkeypatch):
    now = [0.0]
    set_clock(monkeypatch, lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=True)
    with progress.track(4, 0, "sort", console=console) as bar:
        said = []

        def run(name, seconds):
            progress.phase(name)
            now[0] += seconds / 2
            said.append(bar._clock.waiting()[2])
            now[0] += seconds / 2

        run("sampling", 60)
        bar._clock.compiled.programs = 7
        run("updating", 80)
        bar.update(1, {})
        for step in (2, 3):
            run("sampling", 6)
            run("updating", 8)
            bar.update(step, {})
        run("sampling", 20)
    assert said == [
        "sampling (the first step compiles: 0 programs so far), 0:30 so far",
        "updating (the first step compiles: 7 programs so far), 0:40 so far",
        *("sampling, 0:03 so far", "updating, 0:04 so far"),
        *("sampling, 0:03 so far, 0:03 left", "updating, 0:04 so far, 0:04 left"),
        "sampling, 0:10 so far",  # longer than the last time
    ]


def test_a_phase_that_compiles_shows_the_time_that_it_took_before_the_run_was_continued(monkeypatch):
    now = [0.0]
    set_clock(monkeypatch, lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=True)
    with progress.track(9, 5, "sort", console=console, took={"sampling": 70.0}) as bar:
        progress.phase("sampling")
        now[0] += 30
        compiling = "(the first step compiles: 0 programs so far)"
        assert bar._clock.waiting()[2] == f"sampling {compiling}, 0:30 so far, 0:40 left"
        now[0] += 50  # longer than before
        assert bar._clock.waiting()[2] == f"sampling {compiling}, 1:20 so far"
        progress.phase("updating")
        now[0] += 30
        assert bar._clock.waiting()[2] == f"updating {compiling}, 0:30 so far"


def test_while_the_first_step_compiles_it_is_said_when_the_next_program_is_ready():
    console, compiled = Console(file=io.StringIO(), force_terminal=True), Compilations(programs=3)
    with progress.track(9, 0, "sort", console=console, compiled=compiled) as bar:
        progress.phase("updating")
        compiled.left = lambda: 84.0
        note = "(the first step compiles: 3 programs so far, the next in about 1:24)"
        assert bar._clock.waiting()[2] == f"updating {note}, 0:00 so far"
        bar.update(1, {})
        assert "about" not in bar._clock.waiting()[2]


def test_throughput_is_shown_without_an_exponent():
    clock = progress._Clock(3, 0, Compilations())
    assert clock.text(1, {"perf/tokens_per_second": 12345.6, "reward/mean": 0.25}).startswith(
        "tokens/s 12,346  reward 0.25"
    )


def test_a_step_that_ends_after_a_silence_is_printed(monkeypatch):
    assert "sort 7/20" not in show(terminal=False)
    monkeypatch.setattr(progress, "SILENCE", 0.0)
    assert "sort 7/20  reward 0.07" in show(terminal=False)


def test_a_bar_shows_the_phase_of_a_long_step(monkeypatch):
    monkeypatch.setattr(progress, "SHORT", 0.0)
    file = io.StringIO()
    with progress.track(20, 0, "sort", console=Console(file=file, force_terminal=True, width=120)):
        progress.phase("sampling")
        wait_for(file, "sampling (the first step compiles: 0 programs so far), 0:00 so far")


def test_a_phase_shows_how_much_of_it_is_done():
    with progress.track(20, 4, "sort", console=Console(file=io.StringIO())) as bar:
        bar.update(5, {})
        progress.phase("evaluating")
        inner = progress.PhaseBar(1200, "held-out problems")
        assert bar._clock.waiting()[2] == "evaluating held-out problems, 0 of 1,200 done, 0:00 so far"
        inner.update(64, {"reward": 0.5})
        assert bar._clock.waiting()[2] == "evaluating held-out problems, 64 of 1,200 done, 0:00 so far"
        progress.phase("sampling")
        assert bar._clock.waiting()[2] == "sampling, 0:00 so far"


def test_the_last_line_promises_no_time():
    assert "left" not in show(terminal=False).splitlines()[-1]


def test_what_is_said_outside_of_a_bar_is_printed_at_once(capsys):
    progress.say("continuing from step 20 of 150 [x]")
    assert capsys.readouterr().out == "continuing from step 20 of 150 [x]\n"


def test_a_table_of_settings_is_text_without_a_terminal(capsys):
    progress.show_table([("Model", "a [red] one"), ("In total", f"4 steps of {'x' * 100}")])
    assert capsys.readouterr().out.splitlines() == ["Model     a [red] one", f"In total  4 steps of {'x' * 100}"]


def test_a_resumed_run_continues_its_count():
    assert show(terminal=False, total=23, start=20).splitlines()[-1].startswith("sort 23/23")


def test_on_a_terminal_messages_are_printed_above_a_bar():
    text = show(terminal=True)
    assert "20/20" in text and "reward 0.2" in text and "━" in text
    assert "checkpoint [red] saved\n" in text


def test_the_remaining_time_ignores_the_first_step(monkeypatch):
    now = iter([0.0, 100.0, 101.0, 102.0])
    set_clock(monkeypatch, lambda: next(now))
    clock = progress._Clock(63, 0, Compilations())
    assert clock.text(1, {}).endswith("1e+02 s/step  1:43:20 left")
    clock.text(2, {})
    assert clock.text(3, {}).endswith("1 s/step  1:00 left")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61, "1:01"), (3661, "1:01:01")])
def test_durations_are_formatted(seconds, text):
    assert progress._duration(seconds) == text


@pytest.mark.parametrize(("code", "hung_up"), [(errno.ENOSPC, 0), (errno.EPIPE, 2), (errno.EIO, 2)])
def test_a_closed_output_ends_the_run_and_a_full_disk_does_not(code, hung_up, monkeypatch):
    class Failing(io.StringIO):
        def write(self, text):
            raise OSError(code, "no")

        def flush(self):
            raise OSError(code, "no")

    calls = []
    monkeypatch.setattr(progress.interrupt, "hang_up", lambda: calls.append(1))
    output = progress._Output(Failing())
    output.write("step 1")
    output.flush()
    assert len(calls) == hung_up
