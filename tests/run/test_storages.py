"""What a run asks of the place of its files, by each kind of place; a new one is a file and a line of `STORAGES`."""

import jax
import jax.numpy as jnp
import pytest
from api import Checkpoints, Recorder, RunDir, append_line, atomic_folder, enter_run, manifest, read_metrics
from flat_files import FlatFiles

from gspax.errors import UserError
from gspax.run import growing
from gspax.storage import files
from gspax.storage.local import Local

STORAGES = {
    "this machine": lambda folder: Local(),
    "flat files": FlatFiles,
}


@pytest.fixture(params=STORAGES)
def place(request, tmp_path, monkeypatch):
    folder = tmp_path / "store" / "run"
    monkeypatch.setattr(files, "STORAGES", [STORAGES[request.param](folder), Local()])
    return folder


def save(run, *steps):
    with Checkpoints(run.checkpoints, keep=2, note=run.newest) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"params/w": jnp.full(50, step * 1.0)}, {"step": step})


def test_checkpoints_are_kept_verified_and_set_aside(place, capsys):
    run = RunDir(place)
    with enter_run(place, {"name": "x"}):
        save(run, 1, 2, 3, 4)
        assert manifest.finished_steps(run.checkpoints) == [3, 4], "the newest two"
        step = run.checkpoints / "4"
        assert manifest.find_damage(step) == [] == manifest.find_damage(step, hashes=False)
        extra = manifest.extra_file(run.checkpoints, 4)
        extra.write_bytes(bytes(extra.stat().st_size))
        assert "SHA-256" in manifest.find_damage(step)[0]
        manifest.set_step_aside(run.checkpoints, 4, "is damaged")
        assert manifest.finished_steps(run.checkpoints) == [3] and "is damaged" in capsys.readouterr().err
        (run.checkpoints / "7").mkdir()
        (run.checkpoints / "7" / "half").write_bytes(b"1")
        manifest.remove_unfinished(run.checkpoints)
        assert 7 not in manifest.list_steps(run.checkpoints)
        assert len(list(run.checkpoints.glob("*/extra.json"))) == 2, "what is set aside is the user's"
        wanted = {"params/w": jax.ShapeDtypeStruct((50,), jnp.float32)}
        with Checkpoints(run.checkpoints) as checkpoints:
            assert checkpoints.latest() == 3
            assert float(checkpoints.restore(wanted)[0]["params/w"][0]) == 3.0


def test_lines_are_added_and_read_as_one(place):
    run = RunDir(place)
    with enter_run(place, {"name": "x"}):
        for first in (1, 3):
            with Recorder(run, first - 1) as recorder:
                for step in (first, first + 1):
                    recorder.write_metrics(step, {"loss": step / 2})
                recorder.flush()()
                assert recorder.measure_traffic() == {}
        assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2, 3, 4]
        for number in "12":
            append_line(run.evaluations, f"{number}\n")
        assert growing.read_growing(run.evaluations) == b"1\n2\n"


def test_a_folder_appears_whole_or_not_at_all(place):
    with atomic_folder(place / "out") as folder:
        (folder / "a").mkdir()
        (folder / "a" / "b").write_text("1")
        (folder / "config.json").write_text("{}")
    assert sorted(files.open_storage(place).list(place / "out")) == ["a/b", "config.json"]
    with pytest.raises(UserError, match="wanted a new or an empty folder"), atomic_folder(place / "out"):
        raise AssertionError
    with pytest.raises(KeyError), atomic_folder(place / "other") as folder:
        (folder / "a").write_text("1")
        raise KeyError
    assert not (place / "other").exists()
