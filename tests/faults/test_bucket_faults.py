"""Runs in a bucket whose server fails, and that are killed at any of their requests: bit for bit the local run.

The server is `tests/gcs.py`. It kills the run itself, so that a kill comes exactly at a request.
"""

import os
import random
import signal
from collections import Counter

import gcs
import pytest
import runs
from api import finished_steps, main
from runs import STEPS
from test_killed_hosts import PATIENCE, start

from gspax.commands import check
from gspax.storage.paths import to_path

SEED = int(os.environ.get("FAULTS_SEED", "0"))
KILLS = int(os.environ.get("FAULTS_KILLS", "20"))


class Bucket:
    """A bucket, and the runs in it."""

    def __init__(self, server, tmp_path):
        self.server, self.folder, self.name = server, tmp_path, f"bucket-{len(server.buckets)}"
        server.buckets[self.name] = {}
        self.url = f"gs://{self.name}/run"
        self.path = to_path(self.url)

    def start(self, *overrides, **settings):
        self.server.requests.clear()
        return runs.start(self.folder / "run", *overrides, url=self.url, env=self.server.env, **settings)

    def copy(self, name):
        self.server.copy_to(self.name, "run", self.folder / name)
        return self.folder / name


@pytest.fixture
def place(gcs_server, tmp_path):
    gcs_server.faults = lambda request: None
    yield Bucket(gcs_server, tmp_path)
    gcs_server.faults = lambda request: None


def finish(place, reference, **settings):
    """Run to the end, and compare."""
    run = place.start(**settings)
    assert run.wait() == 0 and "Traceback" not in run.text(), run.text()
    assert runs.differences(place.copy("copy"), reference) == []
    return run


def test_a_run_in_a_bucket_is_the_local_run_bit_for_bit(place, reference, capsys):
    run = finish(place, reference)
    assert f"{place.url}/report.html" in run.text()
    names = place.server.names(place.name)
    assert {"run/report.html", "run/samples/before.jsonl", "run/newest_checkpoint.json"} <= {*names}
    assert "run/lock.json" not in names and not [name for name in names if name.endswith(".tmp")]
    assert check.run(place.path) == 0 and main.main(["report", place.url]) == 0
    assert main.main(["compare", f"a={place.url}", "--out", f"gs://{place.name}/compare"]) == 0
    for workdir in (place.url, str(runs.copy(reference, place.folder / "local"))):
        assert main.main(["eval", runs.VICTIM, "--workdir", workdir, "--step", "24", "evaluation.problems=8"]) == 0
    assert (place.path / "evaluations.jsonl").read_text() == (place.folder / "local" / "evaluations.jsonl").read_text()


def test_a_run_moves_to_a_bucket_and_back(place, reference):
    local = place.folder / "local"
    assert runs.start(local, steps=6, with_report=False).wait() == 0
    place.server.copy_from(local, place.name, "run")
    run = place.start(steps=12, with_report=False)
    assert run.wait() == 0 and run.resumed() == 6, run.text()
    back = place.copy("back")
    assert (back / "metrics.jsonl.part_000000").exists()
    run = runs.start(back)
    assert run.wait() == 0 and run.resumed() == 12, run.text()
    assert runs.differences(back, reference) == [] and not (back / "metrics.jsonl.part_000000").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_at_any_request(place, reference, injected):
    """Each kill comes at a request that is drawn from those of the steps that are left."""
    rng, kills = random.Random(SEED), Counter()
    while kills.total() < KILLS:
        at, run = rng.randrange(400), []

        def fault(request, at=at, run=run):
            if len(place.server.requests) != at + 1 or not run:
                return None
            os.kill(run[0].process.pid, signal.SIGKILL)
            return gcs.RESET

        place.server.faults = fault
        run.append(place.start(with_report=False))
        code = run[0].wait()
        assert code in (0, -9) and "Traceback" not in run[0].text(), run[0].text()
        kills["killed at a request"] += code == -9
        if code == 0:
            assert runs.differences(place.copy(f"copy{kills.total()}"), reference) == []
            place.server.buckets[place.name].clear()
    place.server.faults = lambda request: None
    finish(place, reference)
    injected["bucket: killed at a request"] += kills.total()


FAULTS = {
    "429": lambda rng: gcs.Status(429),
    "500": lambda rng: gcs.Status(500),
    "503": lambda rng: gcs.Status(503),
    "reset in a request": lambda rng: gcs.RESET,
    "answer lost": lambda rng: gcs.RESET_AFTER,
    "download cut short": lambda rng: gcs.TRUNCATED,
    "slow answer": lambda rng: gcs.Slow(rng.uniform(0, 1)),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_server_are_repeated_requests(name, place, reference, injected):
    """One request in fifty fails, also of the lock, the manifests, and the requests of Orbax."""
    rng, count = random.Random(f"{name} {SEED}"), Counter()

    def fault(request):
        if rng.random() > 0.02:
            return None
        count[name] += 1
        return FAULTS[name](rng)

    place.server.faults = fault
    finish(place, reference, with_report=False)
    assert count[name] > 3
    injected[f"bucket: {name}"] += count[name]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_goes_on_while_its_token_is_refused(place, reference, injected):
    """Saves fail with a warning; the next one after the token is accepted again succeeds."""
    refused = []

    def fault(request):
        if "checkpoints" not in request.name or not (refused or "checkpoints/8/" in request.name):
            return None
        refused.append(request)
        return gcs.Status(401) if len(refused) < 30 else None

    place.server.faults = fault
    run = place.start()
    assert run.wait() == 0 and "Traceback" not in run.text(), run.text()
    assert "the run goes on" in run.text() and "PERMISSION_DENIED" in run.text()
    assert finished_steps(place.path / "checkpoints")[-1] == STEPS
    assert runs.differences(place.copy("copy"), reference) == []
    injected["bucket: token refused"] += 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_second_run_is_refused(place, injected):
    first = place.start(steps=200)
    while not (place.path / "lock.json").exists():
        assert first.process.is_alive(), first.text()
    second = place.start(steps=200, log="second")
    assert second.wait() == 1 and "is in use by another run" in second.text()
    first.process.terminate()
    assert first.wait() == 128 + signal.SIGTERM
    injected["bucket: second run"] += 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("count", "mesh"), [(2, ()), (4, ()), (4, ("mesh.slice=2", "mesh.data=2"))])
def test_processes_share_a_bucket_and_one_is_killed_in_a_save(count, mesh, place, injected):
    """The others end, and the same command continues from the checkpoint before; also with two slices."""
    steps, reference = 8, place.folder / "reference"
    for each in start(reference, count, steps, *mesh, with_report=False):
        assert each.wait(PATIENCE) == 0, each.text()
    processes, killed = [], []

    def fault(request):
        if "checkpoints/4/" in request.name and request.method == "PUT" and processes and not killed:
            killed.append(processes[-1])
            os.kill(processes[-1].process.pid, signal.SIGKILL)

    place.server.faults = fault
    # A report that takes process 0 longer than 100 s would be the end of it: the others have left by then
    settings = {"url": place.url, "env": place.server.env, "with_report": False}
    processes += start(place.folder / "run", count, steps, *mesh, **settings)
    assert [each.wait(PATIENCE) for each in processes] == [1] * (count - 1) + [-9], processes[0].text()
    assert finished_steps(place.path / "checkpoints") == [2]
    for each in start(place.folder / "run", count, steps, *mesh, **settings):
        assert each.wait(PATIENCE) == 0 and "Traceback" not in each.text(), each.text()
    assert runs.differences(place.copy("copy"), reference, steps) == []
    injected[f"bucket: one of {count} processes{' in two slices' if mesh else ''} killed in a save"] += 1
