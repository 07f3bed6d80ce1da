"""Whatever gspax reads from /proc or asks of Linux's kernel and C library has a substitute on macOS; none ran there."""

import builtins
import io
import os
import pathlib
import platform
import resource
import sys

import pytest
from api import benchmarks

from gspax.commands import environment
from gspax.errors import FailureError, UserError
from gspax.rewards import code
from gspax.rewards.workers import worker
from gspax.run import lock


@pytest.fixture
def macos(monkeypatch):
    """No /proc, no glibc, no limit on the address space, and sys.platform of macOS."""

    def hidden(function):
        def call(path, *given, **named):
            if str(path).startswith("/proc/"):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return function(path, *given, **named)

        return call

    def setrlimit(which, limits):
        if which == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    for owner, name in ((builtins, "open"), (io, "open"), (os, "readlink"), (os, "stat")):
        monkeypatch.setattr(owner, name, hidden(getattr(owner, name)))
    for name in ("MALLOC_ARENA_MAX", "XDG_CACHE_HOME", *environment.ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert not pathlib.Path("/proc/self/stat").exists()


def test_a_lock_is_held_and_that_of_a_dead_process_is_removed(macos, tmp_path):
    path = tmp_path / "lock.json"
    with lock.hold(path), pytest.raises(FailureError, match="is in use by another run"):
        lock.require_free(path)
    with lock.hold(path):
        dead = path.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {2**30}')
    path.write_text(dead)
    lock.require_free(path)
    assert not path.exists()


def test_the_settings_of_a_process_are_found(macos):
    assert environment.user_cache() == pathlib.Path.home() / "Library" / "Caches"
    assert environment.cpu_features() == platform.processor()
    assert not environment.keep_freed_pages()


def test_the_clock_and_the_memory_of_a_benchmark_are_read(macos):
    assert benchmarks.age() > 0
    assert benchmarks.peak_memory() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_answers_are_compared_without_a_limit_of_memory(macos):
    worker.limit_memory()


def test_a_judged_program_needs_linux_or_no_isolation(macos):
    with pytest.raises(UserError, match=r"^isolation: wanted Linux for bubblewrap, got darwin$"):
        code.Sandbox().pool()
    limits = {"memory": 1, "timeout": 1.0, "output": 1, "processes": 1}
    assert "RLIMIT_AS" not in worker.resource_limits(limits, sandboxed=False)
