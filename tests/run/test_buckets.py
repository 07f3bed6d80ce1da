"""A run directory in a bucket: paths, conditional writes, the lock, checkpoints, logs, and what is refused."""

import contextlib
import itertools
import json
import os
import threading
import time
from pathlib import Path

import gcs
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import tensorstore
from api import (
    Checkpoints,
    Recorder,
    RunDir,
    append_line,
    atomic_folder,
    enter_run,
    manifest,
    open_array,
    read_metrics,
    save,
    take_traffic,
    write_atomically,
)
from etils import epath
from event_files import scalar_steps
from fsspec.registry import _registry

from gspax.errors import FailureError, UserError
from gspax.run import growing, lock
from gspax.storage import object_files, objects, paths
from gspax.storage.paths import require_usable, to_path

DESCRIPTION = {"name": "sort", "schedule": {"steps": 10}}
WANTED = {"params/w": jax.ShapeDtypeStruct((50,), jnp.float32)}


@pytest.fixture
def impatient(monkeypatch):
    """Requests are repeated twice, after milliseconds."""
    monkeypatch.setattr(objects, "RETRIES", {"max_retries": 2, "initial_delay": "1ms", "max_delay": "2ms"})
    objects._open_store.cache_clear()
    yield
    objects._open_store.cache_clear()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)
    monkeypatch.setattr(lock, "STALE", 0.5)


def state(step):
    return {"params/w": jnp.full(50, step * 1.0)}


def save_steps(run, *steps, keep=2):
    with Checkpoints(run.checkpoints, keep=keep, note=run.newest) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"step": step})


# Paths


def test_a_local_path_stays_one_of_pathlib(tmp_path):
    assert type(to_path(tmp_path)) is type(tmp_path) and to_path("runs/a") == Path("runs/a")


def test_a_path_in_a_bucket_reads_and_writes_objects(bucket):
    path, server = bucket
    name = str(path).split("/")[2]
    assert to_path(str(path) + "/") == to_path(path) == path and str(path) == f"gs://{name}/runs/a"
    (path / "b" / "c.json").write_text("ü")
    (path / "b" / "d" / "e.json").write_bytes(b"2")
    assert server.names(name) == ["runs/a/b/c.json", "runs/a/b/d/e.json"]
    assert (path / "b" / "c.json").read_text(encoding="utf-8") == "ü"
    assert (path / "b").is_dir() and not (path / "b").is_file() and (path / "b" / "c.json").is_file()
    assert not (path / "b" / "c").exists() and not (path / "bb").exists()
    assert sorted(child.name for child in (path / "b").iterdir()) == ["c.json", "d"]
    assert [*path.glob("b/*/*.json")] == [path / "b" / "d" / "e.json"]
    assert objects.list_files(path) == ["b/c.json", "b/d/e.json"]
    with pytest.raises(FileNotFoundError):
        (path / "none").read_bytes()
    objects.delete_folder(path / "b" / "d")
    assert server.names(name) == ["runs/a/b/c.json"]


@pytest.mark.parametrize(
    "url",
    [
        *("gs:/bucket/run", "gs://bucket", "gs://bucket/", "gs:///run", "gs://ab/run", "gs://Bucket/run"),
        *("gcs://bucket/run", "https://storage.googleapis.com/bucket/run"),
        *("gs//bucket/run", "gs:bucket/run"),
    ],
)
def test_a_url_with_a_mistake_is_refused_with_a_sentence(url):
    with pytest.raises(UserError, match=r"wanted a local path or gs://BUCKET/NAME, got another URL") as caught:
        to_path(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3a://bucket/run", "s3:/bucket/run", "s3//bucket/run"])
def test_a_url_of_s3_is_refused_with_the_reason_and_what_to_do(url):
    with pytest.raises(UserError, match=r"got a URL of S3, where Orbax cannot write .*: use a directory") as caught:
        to_path(url)
    assert "\n" not in str(caught.value)


def test_orbax_cannot_write_an_array_to_s3(tmp_path, monkeypatch):
    """Why gspax refuses s3://. If Orbax has learned it, buckets.md of the benchmarks has what else is needed."""

    class Amazon(object_files.Objects):
        protocol = "s3"

    bucket = tensorstore.KvStore.open({"driver": "memory"}).result()
    monkeypatch.setattr(objects, "locate", lambda path: (bucket, str(path).removeprefix("s3://")))
    monkeypatch.setitem(_registry, "s3", Amazon)
    monkeypatch.chdir(tmp_path)  # where Orbax also writes to a folder with the name "s3:"
    path = epath.Path("s3://bucket/run")
    (path / "a.json").write_text("{}")
    assert (path / "a.json").read_text() == "{}"
    writer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    with writer, pytest.raises(ValueError, match="Checkpoint path should be absolute"):
        writer.save(path / "1", args=ocp.args.PyTreeSave(state(1)))


def test_a_bucket_that_cannot_be_used_is_refused_before_anything_starts(bucket, impatient, monkeypatch):
    path, server = bucket
    require_usable(path)
    assert server.names(str(path).split("/")[2]) == []
    with pytest.raises(UserError, match=r"^gs://no-bucket/run: wanted a bucket that answers: .*not exist"):
        require_usable(to_path("gs://no-bucket/run"))
    server.faults = lambda request: gcs.Status(403) if request.method == "PUT" else None
    with pytest.raises(UserError, match=r"wanted credentials that may write to the bucket: .*PERMISSION_DENIED"):
        enter_run(path, DESCRIPTION).__enter__()
    server.faults = lambda request: gcs.Status(503)
    with pytest.raises(UserError, match=r"wanted a bucket that answers: .*2 retry attempts"):
        require_usable(path)
    monkeypatch.setattr(paths.metadata, "version", lambda package: "0.11.39")
    with pytest.raises(UserError, match=r"wanted orbax-checkpoint 0.12.5 or newer to write to a bucket, got 0.11.39"):
        require_usable(path)


def test_a_folder_for_an_export_is_refused_before_it_is_filled(bucket):
    with (
        pytest.raises(UserError, match=r"^gs://no-bucket/out: wanted a bucket that answers: .*not exist"),
        atomic_folder(to_path("gs://no-bucket/out")),
    ):
        raise AssertionError("it was filled")


def test_a_request_that_fails_is_not_taken_for_a_missing_object(bucket, impatient):
    """fsspec answers "there is none", and a run would begin again."""
    path, server = bucket
    save_steps(RunDir(path), 2)
    server.faults = lambda request: gcs.Status(503)
    for ask in (path.exists, path.is_dir, path.is_file, lambda: manifest.finished_steps(path / "checkpoints")):
        with pytest.raises(OSError, match="retry attempts failed"):
            ask()


@pytest.mark.parametrize("refuses_ranges", [True, False])
def test_the_end_of_an_object_is_found(refuses_ranges, bucket, monkeypatch):
    path, server = bucket
    monkeypatch.setattr(server, "refuses_ranges", refuses_ranges)
    (path / "x").write_bytes(b"0123")
    assert objects.read_ranges(path / "x", [(1, 2), (0, 0), (3, 1)]) == [b"12", b"", b"3"]
    assert [objects.ends_at(path / "x", size) for size in (3, 4, 5)] == [False, True, False]


# Conditional writes


def test_a_write_is_refused_once_another_one_came_first(bucket):
    path, _ = bucket
    _, nothing = objects.read_object(path / "x")
    first = objects.write_if(path / "x", b"1", nothing)
    assert first and objects.write_if(path / "x", b"2", nothing) is None
    second = objects.write_if(path / "x", b"3", first)
    assert second and objects.write_if(path / "x", None, first) is None
    assert objects.read_object(path / "x") == (b"3", second)
    assert objects.write_if(path / "x", None, second) and objects.read_object(path / "x") == (None, nothing)


def test_a_write_whose_answer_is_lost_counts_as_done(bucket, impatient):
    """tensorstore repeats it, and the repetition is refused because of the first one."""
    path, server = bucket
    _, nothing = objects.read_object(path / "x")
    left = ["PUT"]
    server.faults = lambda request: (
        gcs.RESET_AFTER if request.method in left and left.remove(request.method) is None else None
    )
    generation = objects.write_if(path / "x", b"1", nothing)
    assert generation and server.count()["PUT"] == 2
    assert objects.read_object(path / "x") == (b"1", generation)


# The lock


def test_a_second_run_is_refused_and_changes_nothing(bucket):
    path, server = bucket
    name = str(path).split("/")[2]
    with enter_run(path, DESCRIPTION) as run:
        before = dict(server.buckets[name])
        with (
            pytest.raises(FailureError, match=rf"is in use by another run \(process {os.getpid()} on .* since 20"),
            enter_run(path, {**DESCRIPTION, "schedule": {"steps": 20}}),
        ):
            pass
        assert server.buckets[name] == before
    assert not run.lock.exists() and (path / "experiment.json").exists()


def test_the_lock_of_a_process_that_has_ended_is_taken_over(bucket):
    path, _ = bucket
    with lock.hold(path / "lock.json"):
        content = json.loads((path / "lock.json").read_bytes())
    (path / "lock.json").write_text(json.dumps(content | {"start": "1"}))
    with lock.hold(path / "lock.json"):
        pass


def test_the_lock_of_another_host_is_free_once_it_is_not_renewed(bucket, quick):
    path, _ = bucket
    other, done = lock._ObjectLock(path / "lock.json"), threading.Event()
    other._description |= {"machine": "another", "host": "far"}
    other.acquire()
    beating = threading.Thread(target=lock._beat, args=(other, done, other.watch()))
    beating.start()
    with pytest.raises(FailureError, match="on far since"), lock.hold(path / "lock.json"):
        pass
    done.set()
    beating.join()
    with lock.hold(path / "lock.json"):
        assert not other.is_held()
    other.release()  # it is not this one's to delete


def test_of_several_that_start_at_once_one_holds_the_lock(bucket):
    path, _ = bucket
    barrier, held, refused = threading.Barrier(8), [], []

    def start():
        each = lock._ObjectLock(path / "lock.json")
        barrier.wait()
        try:
            each.acquire()
            held.append(each)
        except FailureError:
            refused.append(each)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 1 and len(refused) == 7 and held[0].is_held()


def test_a_run_that_has_lost_its_lock_writes_nothing(bucket, quick):
    path, _ = bucket
    with lock.hold(path / "lock.json"), pytest.raises(lock.LostError, match="is no longer the lock of this run"):
        write_atomically(path / "x", "1")
        (path / "lock.json").write_text("another's")
        time.sleep(0.1)
        write_atomically(path / "x", "2")
    assert (path / "x").read_text() == "1" and (path / "lock.json").read_text() == "another's"


def test_a_renewal_whose_answers_were_all_lost_is_still_this_process(bucket, impatient):
    """The object is newer than this process knows; it recognizes its own token."""
    path, server = bucket
    with lock.hold(path / "lock.json"):
        server.faults = lambda request: gcs.RESET_AFTER if request.method == "PUT" else None
        (held,) = lock._held
        with pytest.raises(OSError, match="retry attempts failed"):
            held.renew()
        server.faults = lambda request: None
        lock.require_held(fresh=True)
        assert held.renew()
    assert not (path / "lock.json").exists()


@pytest.mark.parametrize("act", ["delete", "finish"])
def test_a_process_that_lost_its_lock_a_moment_ago_deletes_and_finishes_no_step(act, bucket):
    """Between two renewals, a write checks the lock only if it cannot be undone."""
    path, _ = bucket
    run = RunDir(path)
    save_steps(run, 2)
    with lock.hold(path / "lock.json"):
        (path / "lock.json").write_text("another's")
        lock._held[0]._renewed -= 2 * lock.FRESH
        lock.require_held()
        with pytest.raises(lock.LostError):
            if act == "delete":
                manifest.remove_steps(run.checkpoints, [2])
            else:
                manifest.write_manifest(path)
    assert manifest.finished_steps(run.checkpoints) == [2]


@pytest.mark.parametrize("code", [401, 403, 404, 429, 500, 503])
def test_a_run_goes_on_while_its_bucket_does_not_answer(code, bucket, quick, impatient, capsys):
    """Its lock may be another's by then: saves fail with a warning until it could be renewed. 404: it is gone."""
    path, server = bucket
    run, name = RunDir(path), str(path).split("/")[2]
    with lock.hold(run.lock), Checkpoints(run.checkpoints, keep=2) as checkpoints:
        save(checkpoints, 1, state(1), {}, is_last=False)
        checkpoints.wait()
        whole = server.buckets[name]
        if code == 404:
            del server.buckets[name]
        else:
            server.faults = lambda request: gcs.Status(code)
        time.sleep(0.2)
        save(checkpoints, 2, state(2), {}, is_last=False)
        with pytest.raises(FailureError, match=r"checkpoint 2 could not be written .* its lock cannot be renewed"):
            save(checkpoints, 2, state(2), {}, is_last=True)
        server.buckets[name], server.faults = whole, lambda request: None
        save(checkpoints, 3, state(3), {}, is_last=True)
        assert checkpoints.steps() == [1, 3]
    assert "checkpoint 2 is not written: its lock cannot be renewed" in capsys.readouterr().err


# Checkpoints


def test_a_checkpoint_is_saved_and_restored(bucket):
    path, server = bucket
    run = RunDir(path)
    save_steps(run, 2, 4, 6)
    with Checkpoints(run.checkpoints, keep=2, note=run.newest) as checkpoints:
        assert checkpoints.steps() == [4, 6]
        restored, extra = checkpoints.restore(WANTED)
    assert float(restored["params/w"][3]) == 6 and extra == {"step": 6}
    assert not [name for name in server.names(str(path).split("/")[2]) if "/checkpoints/2/" in name]
    array = open_array(run.checkpoints, 6, "params/w", (50,))
    server.requests.clear()
    assert array[()].tolist() == [6.0] * 50
    assert not [request for request in server.requests if request.name.endswith("manifest.ocdbt")]


@pytest.mark.parametrize(
    "numbers",
    [pytest.param(range(0, 400, 17), id="some"), pytest.param(range(400), id="all", marks=pytest.mark.slow)],
)
def test_a_run_that_is_killed_in_a_save_has_the_step_or_not(numbers, bucket, capsys):
    """From the n-th request of a save on, none arrives any more, for some or all n."""
    path, server = bucket
    run, seen = RunDir(path), set()
    objects_of_bucket = server.buckets[str(path).split("/")[2]]
    save_steps(run, 2, keep=1)
    before = dict(objects_of_bucket)
    for number in numbers:
        objects_of_bucket.clear()
        objects_of_bucket.update(before)
        left = itertools.count(number, -1)
        with Checkpoints(run.checkpoints, keep=1, note=run.newest) as checkpoints:
            server.faults = lambda request, left=left: gcs.Status(403) if next(left) <= 0 else None
            with contextlib.suppress(FailureError):
                checkpoints.save(4, state(4), {"step": 4})
                checkpoints.wait()
            server.faults = lambda request: None
        finished = manifest.finished_steps(run.checkpoints)
        assert not any(manifest.find_damage(run.checkpoints / str(step)) for step in finished), number
        with Checkpoints(run.checkpoints, keep=1, note=run.newest) as checkpoints:
            restored, _ = checkpoints.restore(WANTED)
            assert float(restored["params/w"][0]) == finished[-1], number
            checkpoints.save(6, state(6), {"step": 6})
            checkpoints.wait()
        assert manifest.list_steps(run.checkpoints) == [6], number
        seen.add(tuple(finished))
        if is_enough := next(left) > 0:  # the save needs no more requests
            break
    assert is_enough and {(2,), (4,)} <= seen <= {(2,), (2, 4), (4,)} and number > 50


def test_two_processes_do_not_finish_one_step(bucket):
    """The second one's manifest would describe the objects of both."""
    path, _ = bucket
    (path / "a").write_text("1")
    manifest.write_manifest(path)
    with pytest.raises(FileExistsError, match="another process has finished this folder"):
        manifest.write_manifest(path)


def test_damage_is_found_and_the_step_is_set_aside(bucket, capsys):
    path, _ = bucket
    run = RunDir(path)
    save_steps(run, 2, 4)
    largest = max((run.checkpoints / "4" / name for name in objects.list_files(run.checkpoints / "4")), key=str)
    content = (run.checkpoints / "4" / "_METADATA").read_bytes()
    (run.checkpoints / "4" / "_METADATA").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    largest.unlink()
    damage = manifest.find_damage(run.checkpoints / "4")
    assert any("_METADATA has another SHA-256" in line for line in damage) and len(damage) == 2
    with Checkpoints(run.checkpoints, keep=2, note=run.newest) as checkpoints:
        assert checkpoints.latest() == 2
    assert (run.checkpoints / "4" / "damaged_manifest.json").exists() and manifest.finished_steps(run.checkpoints) == [
        2
    ]
    assert "its manifest was renamed to damaged_manifest.json" in capsys.readouterr().err


# Logs


def test_metrics_are_written_in_parts_and_read_as_one(bucket, monkeypatch):
    path, _ = bucket
    monkeypatch.setattr(growing, "PART", 100)
    run = RunDir(path)
    with Recorder(run, 0) as recorder:
        for step in range(1, 11):
            recorder.write_metrics(step, {"x": step})
            if step % 2 == 0:
                recorder.flush()
    assert [row["step"] for row in read_metrics(run.metrics)] == [*range(1, 11)]
    assert len(growing.list_parts(run.metrics)) > 1
    with Recorder(run, 5) as recorder:  # resumed from step 5
        recorder.write_metrics(6, {"x": 60})
    assert [row["x"] for row in read_metrics(run.metrics)] == [1, 2, 3, 4, 5, 60]


def test_no_step_and_no_save_waits_for_a_request(bucket):
    """The server answers nothing until they have returned."""
    path, server = bucket
    run, returned, waited_for = RunDir(path), threading.Event(), []

    def fault(request):
        if not returned.wait(30):
            waited_for.append(request)

    with (
        lock.hold(run.lock),
        Checkpoints(run.checkpoints, keep=2, note=run.newest) as checkpoints,
        Recorder(run, 0) as recorder,
    ):
        for step in (1, 2):
            server.faults = fault
            recorder._files[run.metrics]._due = 0.0
            recorder.write_metrics(step, {"x": step})
            save(checkpoints, step, state(step), {}, recorder.flush(), is_last=False)
            returned.set()
            checkpoints.wait()
            server.faults = lambda request: None
            returned.clear()
        assert checkpoints.steps() == [1, 2]
    assert waited_for == []


def test_a_step_has_its_metrics_before_its_manifest(bucket):
    path, server = bucket
    run, found = RunDir(path), []

    def fault(request):
        if request.name.endswith(manifest.MANIFEST) and request.method == "PUT":
            found.append(read_part())
        return gcs.Slow(0.5) if ".part_" in request.name else None

    def read_part():
        return server.buckets[str(path).split("/")[2]].get("runs/a/metrics.jsonl.part_000000")

    with Recorder(run, 0) as recorder, Checkpoints(run.checkpoints, keep=2) as checkpoints:
        server.faults = fault
        recorder.write_metrics(1, {"x": 1})
        save(checkpoints, 1, state(1), {}, recorder.flush(), is_last=True)
    assert len(found) == 1 and found[0] is not None


def test_what_the_thread_of_the_logs_raises_ends_the_run(bucket):
    path, _ = bucket
    run, raised = RunDir(path), []
    with lock.hold(run.lock), pytest.raises(lock.LostError), Recorder(run, 0) as recorder:
        lock._held[0]._generation = None
        recorder.write_metrics(1, {"x": 1})
        with pytest.raises(lock.LostError):
            recorder.flush()()
        try:
            recorder.write_metrics(2, {"x": 2})
        except lock.LostError as problem:
            raised.append(problem)
    assert len(raised) == 1


def test_a_step_takes_no_request_and_a_flush_one(bucket):
    path, server = bucket
    with Recorder(RunDir(path), 0) as recorder:
        recorder._events = None
        recorder.write_metrics(1, {"x": 1})
        server.requests.clear()
        for step in range(2, 100):
            recorder.write_metrics(step, {"x": step})
        assert server.requests == []
        recorder.flush()()
        recorder.flush()()
        assert len(server.requests) == 1


def test_requests_and_bytes_are_counted_as_the_server_has_them(bucket, impatient):
    path, server = bucket
    run = RunDir(path)
    with Recorder(run, 0) as recorder, Checkpoints(run.checkpoints, keep=2) as checkpoints:
        recorder.measure_traffic()
        server.requests.clear()
        (path / "x").write_bytes(bytes(1000))
        left = [gcs.Status(429), gcs.Status(503)]
        server.faults = lambda request: left.pop() if left else None
        (path / "x").read_bytes()
        (path / "x").read_bytes()
        step = recorder.measure_traffic()
        assert step == {
            "bucket/requests": len(server.requests),
            "bucket/repeated": 2,
            "bucket/read_bytes": 2000,
            "bucket/written_bytes": 1000,
        }
        assert recorder.measure_traffic() == dict.fromkeys(step, 0)
        server.requests.clear()
        checkpoints.save(1, state(1), {})
        checkpoints.wait()
        save = take_traffic(checkpoints)
        assert len(server.requests) - 5 <= save["bucket/save_requests"] <= len(server.requests)  # before: it makes room
        stored = sum(len(content) for content, _ in server.buckets[str(path).split("/")[2]].values()) - 1000
        assert stored - 100 < save["bucket/save_written_bytes"] < 2 * stored
        assert take_traffic(checkpoints) == {} and recorder.measure_traffic()["bucket/requests"] > 0


def test_a_local_run_has_no_requests(tmp_path):
    with Recorder(RunDir(tmp_path), 0) as recorder:
        assert recorder.measure_traffic() == {}


def test_repeated_requests_are_a_line_at_most_once_a_minute(bucket, quick, impatient, monkeypatch):
    path, server = bucket
    line = f"{path}: requests sent again after 429, 5xx, or no answer:"
    said = []
    monkeypatch.setattr(objects, "warn", said.append)

    def repeat_one():
        left = [gcs.Status(429)]
        server.faults = lambda request: left.pop() if left and request.name.endswith("/x") else None
        (path / "x").write_bytes(b"1")

    with lock.hold(path / "lock.json"):  # its heartbeat looks
        repeat_one()
        end = time.monotonic() + 10
        while not said and time.monotonic() < end:
            time.sleep(0.01)
    assert said == [f"{line} 1"]
    repeats = objects.Repeats(path)
    repeats.warn()
    for _ in range(3):
        repeat_one()
        repeats.warn()
    assert said[1:] == [f"{line} 1"]
    repeats._due -= objects.QUIET
    repeats.warn()
    repeats.warn()
    assert said[2:] == [f"{line} 2"]


def test_a_run_killed_between_the_file_and_its_parts_has_each_line_once(bucket):
    path, _ = bucket
    run = RunDir(path)
    with Recorder(run, 0) as recorder:
        for step in (1, 2, 3):
            recorder.write_metrics(step, {"x": step})
    write_atomically(run.metrics, growing.read_growing(run.metrics))  # and killed before it deletes the parts
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2, 3]


def test_the_parts_of_an_event_file_are_event_files(bucket, monkeypatch):
    monkeypatch.setattr(growing, "PART", 300)
    monkeypatch.setattr(growing, "WAIT", -1.0)
    path, _ = bucket
    with Recorder(RunDir(path), 0) as recorder:
        for step in range(1, 11):
            recorder.write_metrics(step, {"x": step})
    files = sorted((path / "tensorboard").iterdir())
    assert len(files) > 1 and all("tfevents" in file.name for file in files)
    assert [step for file in files for step in scalar_steps(file)] == [*range(1, 11)]


def test_a_line_is_added_to_an_object(bucket):
    path, _ = bucket
    append_line(path / "x.jsonl", "1\n")
    append_line(path / "x.jsonl", "2\n")
    assert (path / "x.jsonl").read_text() == "1\n2\n"


def test_logs_that_cannot_be_written_cost_a_warning(bucket, impatient, capsys):
    path, server = bucket
    with Recorder(RunDir(path), 0) as recorder:
        recorder._events = None
        server.faults = lambda request: gcs.Status(503)
        for step in (1, 2, 3):
            recorder.write_metrics(step, {"x": step})
            recorder.flush()()
        recorder.write_samples(3, [{"a": 1}])
        server.faults = lambda request: None
        recorder.flush()()
    assert [row["step"] for row in read_metrics(path / "metrics.jsonl")] == [1, 2, 3]
    warnings = capsys.readouterr().err
    assert warnings.count("metrics.jsonl could not be written: All 2 retry attempts failed: a fault (ABORTED)") == 1
    assert "metrics.jsonl is written again" in warnings
