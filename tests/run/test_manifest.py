"""Manifests made by a stranger: damage is reported whatever they contain, and nothing outside the folder is read."""

import json
import os

import pytest
from api import MANIFEST, find_damage, manifest, write_manifest


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "data").write_bytes(b"12345678")
    (tmp_path / "private").write_bytes(b"12345678")
    write_manifest(folder)
    assert find_damage(folder) == []
    return folder


def test_a_manifest_exists_only_once_what_it_describes_is_on_the_disk(checkpoint, monkeypatch):
    """The loss of power cannot be tried: this is the order in which the kernel is asked."""
    events, fsync, replace = [], os.fsync, os.replace

    def record_fsync(descriptor):
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_replace(source, target):
        events.append(("renamed", os.stat(source).st_ino))
        replace(source, target)

    (checkpoint / MANIFEST).unlink()
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_manifest(checkpoint)
    own = (checkpoint / MANIFEST).stat().st_ino
    described = {checkpoint.stat().st_ino} | {path.stat().st_ino for path in checkpoint.rglob("*")} - {own}
    renamed = events.index(("renamed", own))
    assert len(described) == 3 and described <= {*events[:renamed]}, "files and folders before the manifest"
    assert own in events[:renamed], "the manifest before its name"
    assert checkpoint.stat().st_ino in events[renamed:], "and its name at last"


ENTRY = {"bytes": 8, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "files",
    [
        [],
        3,
        {"state/data": []},
        {"state/data": "8"},
        {"state/data": {"bytes": "8", "sha256": "0"}},
        {"state/data": {"bytes": 8}},
        {"state/data": ENTRY | {"more": 1}},
    ],
)
def test_a_manifest_of_another_form_is_damage(files, checkpoint):
    (checkpoint / MANIFEST).write_text(manifest._render({"version": 1, "packages": {}, "files": files}))
    (found,) = find_damage(checkpoint)
    assert found.startswith("manifest.json cannot be read")


@pytest.mark.parametrize("name", ["../private", "state/../../private", "/etc/hostname"])
def test_no_file_outside_of_a_checkpoint_is_read(name, checkpoint, monkeypatch):
    content = {"version": 1, "packages": {}, "files": {name: ENTRY}}
    (checkpoint / MANIFEST).write_text(manifest._render(content))
    monkeypatch.setattr(manifest, "_digest", lambda path, **options: pytest.fail(f"{path} was read"))
    assert find_damage(checkpoint) == [f"{name} is outside of the checkpoint"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "3", json.dumps({"sha256": []}), "\0"])
def test_a_manifest_that_is_no_manifest_is_damage(text, checkpoint):
    (checkpoint / MANIFEST).write_text(text)
    (found,) = find_damage(checkpoint)
    assert found.startswith("manifest.json cannot be read")


def test_a_link_out_of_the_checkpoint_is_damage(checkpoint):
    (checkpoint / "state" / "data").unlink()
    (checkpoint / "state" / "data").symlink_to("../../private")
    assert find_damage(checkpoint) == ["state/data is outside of the checkpoint"]


def test_a_checkpoint_under_another_ones_name_is_damage(checkpoint):
    """A copied folder is whole, but a run would go on from it at the wrong step."""
    step = checkpoint.rename(checkpoint.with_name("28"))
    (step / MANIFEST).unlink()
    write_manifest(step)
    assert find_damage(step) == []
    assert find_damage(step.rename(step.with_name("30"))) == ["it is checkpoint 28 under another name"]
