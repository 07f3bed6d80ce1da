"""Damage to any file of a checkpoint is found before it is used, and the newest intact checkpoint is used instead."""

import contextlib
import json
import random
import resource
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from api import MANIFEST, Checkpoints, RunDir, find_damage, main, manifest, write_manifest
from api import checkpoints as checkpoints_module
from runs import VICTIM

from gspax.commands import check
from gspax.errors import FailureError, UserError

WANTED = {"params/w": jax.ShapeDtypeStruct((50,), jnp.float32)}


def save(run, *steps, keep=2):
    with Checkpoints(run.checkpoints, keep=keep, note=run.newest) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"params/w": jnp.full(50, step * 1.0)}, {"step": step})


def restore_some(run, step):
    with Checkpoints(run.checkpoints) as checkpoints:
        return checkpoints.restore_some(WANTED, step)


def restore(run):
    with Checkpoints(run.checkpoints, keep=2, note=run.newest) as checkpoints:
        state, _ = checkpoints.restore(WANTED)
    return float(state["params/w"][0])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run"
    save(RunDir(path), 2, 4)
    return path


@pytest.fixture
def run(saved, tmp_path):
    return RunDir(shutil.copytree(saved, tmp_path / "run"))


def files(run, step=4):
    return sorted(path for path in (run.checkpoints / str(step)).rglob("*") if path.is_file())


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def largest(run, step=4):
    return max((path for path in files(run, step) if path.name != MANIFEST), key=lambda path: path.stat().st_size)


@contextlib.contextmanager
def full_disk(size=100):
    """No file of this process can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_flipped_bit_truncation_or_deletion_is_silent(run):
    """Every bit of the manifest, 40 bits of every other file."""
    folder, rng = run.checkpoints / "4", random.Random(0)
    assert len(files(run)) >= 8 and find_damage(folder) == []
    for path in files(run):
        whole = path.read_bytes()
        for _ in range(40 if path.name != MANIFEST else 400):
            flip(path, rng.randrange(len(whole)), rng.randrange(8))
            assert find_damage(folder), path
            path.write_bytes(whole)
        path.write_bytes(whole[:-1])
        assert find_damage(folder), path
        path.unlink()
        assert find_damage(folder), path
        path.write_bytes(whole)
    assert find_damage(folder) == []


def test_a_damaged_step_is_set_aside_and_the_newest_intact_one_used(run, capsys):
    flip(largest(run), 3)
    assert restore(run) == 2.0
    first, second = capsys.readouterr().err.splitlines()
    assert "checkpoints/4 is damaged: " in first and first.endswith("another SHA-256: moved to damaged_4")
    assert second.endswith("using checkpoint 2, the newest intact one")
    save(run, 4)
    assert restore(run) == 4.0 and (run.checkpoints / "damaged_4").is_dir()


def test_a_step_that_was_set_aside_is_saved_again_in_the_same_process(run):
    with Checkpoints(run.checkpoints, keep=2) as checkpoints:
        for _ in range(2):
            checkpoints.save(6, {"params/w": jnp.ones(50)}, {})
            assert checkpoints.steps() == [4, 6]
        flip(largest(run, 6), 0)
        assert checkpoints.latest() == 4
        checkpoints.save(6, {"params/w": jnp.ones(50)}, {})
        assert checkpoints.latest() == 6


def test_a_reader_uses_the_newest_intact_step_and_renames_nothing(run, capsys):
    largest(run).unlink()
    with Checkpoints(run.checkpoints) as checkpoints:
        assert checkpoints.latest() == 2
        with pytest.raises(UserError, match=r"checkpoint 4 in .* is damaged: .* cannot be read"):
            checkpoints.restore(WANTED, 4)
        with pytest.raises(UserError, match=r"checkpoint 4 in .* is damaged"):
            checkpoints.restore_some(WANTED, 4)
    assert (run.checkpoints / "4").is_dir()


def test_a_step_whose_manifest_was_not_written_is_not_used(run, capsys):
    (run.checkpoints / "4" / MANIFEST).unlink()
    assert restore(run) == 2.0
    assert "checkpoint 4 has no manifest.json: its save was not finished, and it is not used" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"no checkpoint 4 with a manifest\.json in .*, only 2"):
        restore_some(run, 4)


def test_a_first_step_whose_manifest_was_not_written_is_saved_again(tmp_path, capsys):
    """The process was killed between Orbax's rename and the manifest, and then a file of the step was damaged."""
    run = RunDir(tmp_path / "run")
    save(run, 2)
    (run.checkpoints / "2" / MANIFEST).unlink()
    run.newest.unlink()
    flip(largest(run, 2), 0)
    with Checkpoints(run.checkpoints, keep=2, note=run.newest) as checkpoints:
        assert checkpoints.latest() is None and checkpoints.steps() == []
    save(run, 2)
    assert restore(run) == 2.0


DAMAGES = {
    "emptied": lambda run, step: shutil.rmtree(run.checkpoints / str(step)),
    "all damaged": lambda run, step: flip(largest(run, step), 0),
    "all manifests deleted": lambda run, step: (run.checkpoints / str(step) / MANIFEST).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_lost_checkpoints_do_not_restart_the_run(run, damage):
    for step in (2, 4):
        DAMAGES[damage](run, step)
    with (
        Checkpoints(run.checkpoints, keep=2, note=run.newest) as checkpoints,
        pytest.raises(UserError, match=r"no intact checkpoint, but newest_checkpoint\.json records that one was saved"),
    ):
        checkpoints.latest()


@pytest.mark.parametrize("remains", ("nothing", "a file"))
def test_a_lost_newest_checkpoint_is_named(run, capsys, remains):
    shutil.rmtree(run.checkpoints / "4")
    if remains == "a file":
        (run.checkpoints / "4").write_text("")
    assert check.run(run.path) == 1
    lost = "checkpoints/4: lost, but newest_checkpoint.json records that it was saved"
    assert capsys.readouterr().out.splitlines() == ["checkpoints/2: intact", lost]
    for _ in range(2):
        assert restore(run) == 2.0
    line, *others = capsys.readouterr().err.splitlines()
    assert line.endswith("checkpoint 4 is lost, although newest_checkpoint.json records that it was saved: using 2")
    assert [other.partition("/4 ")[2] for other in others] == ["is no folder: moved to damaged_4"] * (
        remains != "nothing"
    )
    save(run, 4)
    capsys.readouterr()
    assert restore(run) == 4.0 and check.run(run.path) == 0 and not capsys.readouterr().err


def test_the_last_intact_step_is_not_pruned(run):
    save(run, 6, keep=3)
    for step in (4, 6):
        largest(run, step).unlink()
    manifest.prune(run.checkpoints, keep=1)
    assert manifest.list_steps(run.checkpoints) == [2, 4, 6]


def test_nothing_is_pruned_before_the_new_manifest_is_written(run, monkeypatch):
    def fail(folder):
        assert manifest.list_steps(run.checkpoints) == [2, 4, 6]
        raise OSError("no space left")

    monkeypatch.setattr(manifest, "write_manifest", fail)
    with pytest.raises(UserError, match="no space left"):
        save(run, 6)
    monkeypatch.undo()
    assert restore(run) == 4.0
    save(run, 6)
    assert restore(run) == 6.0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from threads that Orbax leaves behind
def test_a_full_disk_costs_one_save(run, capsys):
    def save_one(step, is_last=False):
        checkpoints_module.save(checkpoints, step, {"params/w": jnp.ones(50)}, {}, is_last=is_last)

    with Checkpoints(run.checkpoints, keep=2, note=run.newest) as checkpoints:
        with full_disk():
            save_one(6)
            save_one(7)
        save_one(8)
        assert checkpoints.latest() == 8 and checkpoints.steps() == [4, 8]
        with full_disk(), pytest.raises(FailureError, match="could not be written"):  # in the background or at once
            save_one(9, is_last=True)
            checkpoints.wait()
    assert restore(run) == 1.0
    err = capsys.readouterr().err
    assert err.count("the run goes on and tries again at the next save") >= 2 and "Traceback" not in err


def test_a_save_may_begin_while_an_exception_is_handled(run):
    """As that of a run that a signal ends."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        save(run, 6)
    assert restore(run) == 6.0


def test_a_full_disk_at_the_start_is_one_sentence(tmp_path, capsys):
    with full_disk(0):
        assert main.main(["train", VICTIM, "--workdir", str(tmp_path / "run")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith(": File too large\n"), err


def test_a_save_that_cannot_fit_is_not_begun(run, capsys, monkeypatch):
    wanted = manifest.size_of(run.checkpoints / "4")
    assert wanted > 1000
    with Checkpoints(run.checkpoints, keep=2, note=run.newest) as checkpoints:
        for step, free in ((6, wanted - 1), (7, wanted)):
            monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
            checkpoints_module.save(checkpoints, step, {"params/w": jnp.ones(50)}, {}, is_last=False)
        assert checkpoints.steps() == [4, 7]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"checkpoint 6 could not be written to {run.checkpoints}: no space left: wanted {wanted:,} bytes" in line


def test_check_names_the_damaged_file(run, capsys):
    assert main.main(["check", str(run.path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["checkpoints/2: intact", "checkpoints/4: intact"]
    flip(largest(run), 5)
    assert check.run(run.path) == 1
    name = largest(run).relative_to(run.checkpoints / "4")
    assert f"checkpoints/4: damaged: {name} has another SHA-256" in capsys.readouterr().out
    (run.checkpoints / "4" / MANIFEST).unlink()
    assert check.run(run.path) == 1
    assert "checkpoints/4: no manifest.json, not verified and not used" in capsys.readouterr().out
    shutil.rmtree(run.checkpoints)
    assert check.run(run.path) == 1
    with pytest.raises(UserError, match="it has no checkpoint"):
        check.run(run.checkpoints.parent.parent)


def test_leftovers_of_killed_processes_are_deleted(run):
    """Killed while it looked for space, and while it deleted an old step."""
    (run.checkpoints / "host.1.probe.tmp").write_bytes(bytes(9))
    (run.checkpoints / "2").rename(run.checkpoints / "deleted_2")
    assert restore(run) == 4.0
    assert [each.name for each in run.checkpoints.iterdir()] == ["4"]


def test_a_manifest_names_versions_and_every_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"xyz")
    write_manifest(tmp_path)
    content = json.loads((tmp_path / MANIFEST).read_text())
    assert content["files"].keys() == {"a/b"} and content["files"]["a/b"]["bytes"] == 3
    assert content["packages"]["jax"] == jax.__version__
