"""A table of the faults that the tests injected, on the terminal and in the file that FAULTS_TABLE names."""

import os
import platform
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

_injected: Counter[str] = Counter()
_started = time.time(), os.times()


@pytest.fixture(scope="session")
def injected():
    """Counts the faults by name. A test counts one after the run has survived it."""
    return _injected


def pytest_terminal_summary(terminalreporter, exitstatus):
    if _injected:
        lines = ["| fault | injected and survived |", "| --- | --- |"]
        lines += [f"| {name} | {_injected[name]} |" for name in sorted(_injected)]
        terminalreporter.section("faults")
        terminalreporter.write_line("\n".join(lines))
        if (path := os.environ.get("FAULTS_TABLE")) and exitstatus == 0:
            Path(path).write_text("\n".join([*_head(terminalreporter), "", *lines, ""]), encoding="utf-8")


def _head(reporter):
    passed = len(reporter.stats.get("passed", ()))
    commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True).stdout.strip()
    minutes = (time.time() - _started[0]) / 60
    load = os.getloadavg()[2] if hasattr(os, "getloadavg") else float("nan")
    where = f"{os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f} in the last 15 minutes"
    return [
        "# Faults",
        "",
        f"Written by `make faults` at {commit}: {passed} tests passed in {minutes:.0f} minutes on {where}.",
        "Each fault hit a run of the experiment in `tests/faults/victim.py`. A run survived if it then ended, started",
        "again where it was killed, with the same bits in every metric, parameter and moment as the reference.",
    ]


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The directory of a run of the victim to which nothing happened."""
    import runs

    workdir = tmp_path_factory.mktemp("reference") / "run"
    run = runs.start(workdir)
    assert run.wait() == 0, run.text()
    return workdir
