"""Process settings of commands that compute. jax's settings are restored after each test."""

import os
import time

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from gspax.commands import environment
from gspax.run.compilation import COMPILED, count_compilations

ASYNC = "jax_cpu_enable_async_dispatch"
NAMES = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_platforms")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """No cache folder in jax's settings and none of the user's variables."""
    before = {name: getattr(jax.config, name) for name in NAMES} | {ASYNC: jax.config.read(ASYNC)}
    jax.config.update("jax_compilation_cache_dir", None)
    for name in ("GSPAX_COMPILATION_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_cache_is_in_the_users_folder_and_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment.use_compilation_cache()
    folder = environment.cache_folder()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.parent == tmp_path / "gspax" / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_variable_moves_or_disables_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPAX_COMPILATION_CACHE", str(tmp_path))
    assert environment.cache_folder().parent == tmp_path
    monkeypatch.setenv("GSPAX_COMPILATION_CACHE", "0")
    environment.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None


def test_programs_are_stored_in_a_bucket_and_read_from_there(bucket, monkeypatch):
    path, server = bucket
    monkeypatch.setenv("GSPAX_COMPILATION_CACHE", str(path))
    compilation_cache.reset_cache()
    environment.use_compilation_cache()
    try:
        for expected in (False, True):
            jax.clear_caches()
            with count_compilations() as counted:
                assert jax.jit(lambda x: x * 37 + 41)(1.0) == 78
            assert (counted.programs > 0, counted.cached == counted.programs) == (True, expected)
    finally:
        compilation_cache.reset_cache()
    assert [name for name in server.names(str(path).split("/")[2]) if "jit__lambda" in name]


def test_a_folder_already_set_in_jax_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPAX_COMPILATION_CACHE", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", "mine")
    environment.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == "mine" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["shared", "a file"])
def test_a_folder_that_is_unsafe_or_cannot_be_created_is_not_used(fault, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GSPAX_COMPILATION_CACHE", str(tmp_path / "cache"))
    if fault == "shared":
        environment.cache_folder().mkdir(parents=True)
        environment.cache_folder().chmod(0o777)
    else:
        (tmp_path / "cache").touch()
    environment.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    assert capsys.readouterr().err.startswith("gspax: warning: compilation cache ")


def test_machines_with_different_cpus_have_different_folders(monkeypatch):
    here = environment.cache_folder()
    monkeypatch.setattr(environment, "cpu_features", lambda: "avx512_of_another_machine")
    assert environment.cache_folder() != here


def test_old_cache_entries_are_removed(tmp_path):
    for name, days in (("old", 31), ("new", 29)):
        (tmp_path / name).touch()
        then = time.time() - days * 86_400
        os.utime(tmp_path / name, (then, then))
    environment.remove_old(tmp_path, 30)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_the_users_allocator_settings_are_kept(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    calls = []
    fake = type("libc", (), {"mallopt": staticmethod(lambda *option: calls.append(option) or 1)})
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(environment.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert environment.keep_freed_pages() and len(calls) == 2
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert not environment.keep_freed_pages() and len(calls) == 2


@pytest.mark.parametrize(("kept", "users", "dispatched"), [(True, None, False), (False, None, True), (True, "1", True)])
def test_programs_run_on_the_calling_thread_if_the_allocator_keeps_its_pages(kept, users, dispatched, monkeypatch):
    monkeypatch.delenv(ASYNC.upper(), raising=False)
    if users is not None:
        monkeypatch.setenv(ASYNC.upper(), users)
    monkeypatch.setattr(environment, "has_accelerator", lambda: False)
    monkeypatch.setattr(environment, "keep_freed_pages", lambda: kept)
    for name in ("use_compilation_cache", "silence_failed_saves", "release_after_compilation"):
        monkeypatch.setattr(environment, name, lambda: None)
    jax.config.update(ASYNC, True)
    environment.prepare()
    assert jax.config.read(ASYNC) is dispatched


def test_an_accelerator_is_detected_from_jax_platforms():
    jax.config.update("jax_platforms", "cpu")
    assert not environment.has_accelerator()
    jax.config.update("jax_platforms", "cuda,cpu")
    assert environment.has_accelerator()


def test_a_long_compilation_returns_its_memory(monkeypatch):
    trimmed = []
    fake = type("libc", (), {"malloc_trim": staticmethod(trimmed.append)})
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda name: fake)
    listener = environment.release_after_compilation(least_s=0.5)
    try:
        jax.monitoring.record_event_duration_secs(COMPILED, 0.4)
        jax.monitoring.record_event_duration_secs("/another/event", 0.6)
        assert not trimmed
        jax.monitoring.record_event_duration_secs(COMPILED, 0.6)
        assert trimmed == [0]
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
