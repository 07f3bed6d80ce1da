"""Which problems are skipped, with one process and with several."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from api import FIRST, Skipped, multihost, read_usable
from jax.sharding import NamedSharding, PartitionSpec

from gspax.errors import UserError

HERE = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec("x"))


class Half:
    """A sharding of 8 rows over two processes."""

    def __init__(self, process):
        self.rows = slice(4 * process, 4 * process + 4)

    def addressable_devices_indices_map(self, shape):
        assert shape == (8,)
        return {"a device": (self.rows,)}


def even(index):
    if index % 2:
        raise ValueError(f"{index} is odd")
    return -index


def test_the_next_problems_take_the_places_of_those_that_cannot_be_used(capsys):
    skipped = Skipped(share=0.01)
    ids, made = read_usable(even, {0: 10, 1: 11, 3: 12, 4: 13}, 5, HERE, skipped)
    assert ids == {0: 10, 1: 14, 3: 12, 4: 16} and made == {place: -index for place, index in ids.items()}
    assert list(skipped.reasons) == [11, 13, 15]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert " data: problem 15: ValueError: 15 is odd (tests/rollout/test_skipped_problems.py:" in said[1]


def test_processes_agree_on_what_is_skipped_by_any_of_them(monkeypatch):
    """Two processes as threads. Each reads its own half, and the places of the other's failures move on here too."""
    barrier, sent, here = threading.Barrier(2), [None, None], threading.local()

    def gather(value):
        sent[here.process] = value
        barrier.wait(10)
        found = list(sent)
        barrier.wait(10)
        return found

    monkeypatch.setattr(multihost, "gather", gather)
    wanted, alone = dict(enumerate(range(8))), Skipped(share=0.5)

    def run(process):
        here.process = process
        skipped = Skipped(share=0.5)
        return *read_usable(even, wanted, 8, Half(process), skipped), skipped.reasons

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, (0, 1))
    assert first[0] == second[0] and first[2] == second[2]
    assert {**first[1], **second[1]} == {place: -index for place, index in first[0].items()}
    assert sorted(first[1]) == [0, 1, 2, 3] and sorted(second[1]) == [4, 5, 6, 7]
    monkeypatch.undo()
    assert read_usable(even, wanted, 8, HERE, alone)[0] == first[0], "as one process"


@pytest.mark.parametrize(("share", "allowed"), [(0.01, 10), (0.0, 0)])
def test_more_than_the_share_of_them_end_the_run_with_a_sentence_that_names_them(share, allowed, tmp_path):
    skipped = Skipped(share)
    skipped.load(tmp_path / "skipped.jsonl")
    for index in range(allowed):
        skipped.add({index: "too long"}, loaded=index + 1)
    skipped.add({}, loaded=100)
    with pytest.raises(
        UserError,
        match=rf"^data: {allowed + 1} of 200 problems cannot be used \(sampling.max_failed={100 * share:g} % allows "
        rf"{allowed}\): problem {'0: too' if allowed else '150: gone'}",
    ):
        skipped.add({150: "gone"}, loaded=200)
    resumed = Skipped(share)
    resumed.load(tmp_path / "skipped.jsonl")
    assert resumed.reasons == skipped.reasons and len(resumed.reasons) == allowed + 1
    if share:
        resumed.add({3: "too long"}, loaded=2 * FIRST)  # known, and of more problems more may be


def test_data_without_any_usable_problem_ends(capsys):
    with pytest.raises(UserError, match=r"16 of 16 problems .*: problem 0: .*; problem 2: [^;]*; and 13 more$"):
        read_usable(lambda index: 1 / 0, dict(enumerate(range(8))), 8, HERE, Skipped(0.01))


def test_a_damaged_record_blocks_nothing(tmp_path, capsys):
    path = tmp_path / "skipped.jsonl"
    path.write_bytes(b'{"problem": 3, "reason": "x"}\n\0\0\n[1]\n{"problem": "4"}\n{"reason": 5}\n')
    skipped = Skipped(0.01)
    skipped.load(path)
    assert skipped.reasons == {3: "x"}
