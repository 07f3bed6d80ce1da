"""A run of several processes, one of which is killed at a random moment: the others end, and nothing is lost."""

import os
import random
import socket
import time

import pytest
import runs

SEED = int(os.environ.get("FAULTS_SEED", "0"))
COUNT = 4
NOTICED = 15.0  # seconds until all other processes must have ended
PATIENCE = 1500.0  # seconds for a run, on a busy machine


def start(workdir, count, steps, *overrides, **settings):
    """All processes of the run in `workdir`, on this machine; the rest goes to `runs.start`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    return [
        runs.start(
            workdir,
            *("--coordinator", address, "--processes", str(count), "--process", str(index)),
            *overrides,
            steps=steps,
            log=f"{workdir.name}_{index}",
            **settings,
        )
        for index in range(count)
    ]


def steps_of(workdir):
    try:
        return [row["step"] for row in runs.metrics(workdir) if "policy/loss" in row]
    except (OSError, ValueError):  # not there yet, or a line is being written
        return []


def last_line(run):
    return run.text().rstrip().splitlines()[-1]


def kill_one(workdir, processes, rng):
    """Kill a process some steps after the start, and check how the others end; which one, or None if the run ended."""
    already, wanted, deadline = len(steps_of(workdir)), rng.randint(1, 3), time.monotonic() + PATIENCE
    while len(steps_of(workdir)) < already + wanted:
        if not all(each.process.is_alive() for each in processes) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.2))
    killed = rng.randrange(len(processes))
    processes[killed].process.kill()
    began = time.monotonic()
    codes = [each.wait(PATIENCE) for each in processes]
    if codes[killed] != -9:
        assert codes == [0] * len(processes), [each.text() for each in processes]
        return None
    assert time.monotonic() - began < NOTICED
    for index, each in enumerate(processes):
        if index != killed:
            assert codes[index] == 1, each.text()
            name = f"gspax: processes: process {killed} of {len(processes)} on 127.0.0.1 has ended"
            assert last_line(each).startswith(name), each.text()
    return killed


def kill_at_random(workdir, kills, rng, steps, count=COUNT):
    """Start the run in `workdir` again and again until so many processes were killed, then let it end."""
    found = []
    while len(found) < kills:
        killed = kill_one(workdir, start(workdir, count, steps), rng)
        if killed is None:
            return found
        found.append(killed)
    for each in start(workdir, count, steps):
        assert each.wait(PATIENCE) == 0, each.text()
    return found


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_kills_among_four_processes(tmp_path, injected):
    kills, steps = int(os.environ.get("FAULTS_HOSTS", "20")), 60
    for each in start(tmp_path / "reference", COUNT, steps):
        assert each.wait(PATIENCE) == 0, each.text()
    killed = kill_at_random(tmp_path / "run", kills, random.Random(SEED), steps)
    assert len(killed) == kills
    assert runs.differences(tmp_path / "run", tmp_path / "reference", steps) == []
    for index in killed:
        injected[f"killed: process {index} of {COUNT}"] += 1
