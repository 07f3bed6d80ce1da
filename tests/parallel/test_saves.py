"""A save of two processes of which one cannot write."""

import json

from processes import run_two

# A state sharded over both processes. The disk of process 1 is full from the moment at which the save has begun.
CHILD = """
import contextlib, json, resource, sys, time
import jax
import numpy as np
from gspax.parallel import joining, multihost
from gspax.errors import FailureError
from gspax.run import manifest
from gspax.run.checkpoints import Checkpoints, save

address, index, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
joining.join(joining.ProcessInfo(address, 2, index), {}, lambda a, b: [], 100, b"secret")
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
manifest.require_writable = lambda folder: None

@contextlib.contextmanager
def full_disk():
    if index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

def state(step):
    return {"w": multihost.to_devices(np.full(2000, step, np.float32), sharding)}

with Checkpoints(directory, keep=9) as checkpoints:
    save(checkpoints, 1, state(1), {}, is_last=False)
    checkpoints.wait()
    with full_disk():
        save(checkpoints, 2, state(2), {}, is_last=False)
        began = time.monotonic()
        save(checkpoints, 3, state(3), {}, is_last=False)  # waits for the one before
        seconds = time.monotonic() - began
    save(checkpoints, 4, state(4), {}, is_last=True)
    steps = checkpoints.steps()
    wanted = {"w": jax.ShapeDtypeStruct((2000,), np.float32, sharding=sharding)}
    restored, _ = checkpoints.restore(wanted)
    assert checkpoints.latest() == 4 and (multihost.to_host(restored["w"]) == 4).all()
    with full_disk():
        try:
            save(checkpoints, 5, state(5), {}, is_last=True)
        except FailureError as error:
            problem = str(error)
found = {"steps": steps, "seconds": seconds, "problem": problem, "newest": checkpoints.latest()}
print(json.dumps(found))
joining.leave(0)
"""


def test_a_disk_that_fills_during_a_save_costs_all_processes_that_save_only(tmp_path):
    (first, warned), (second, _) = run_two(["-c", CHILD], tmp_path / "saved")
    results = [json.loads(out.splitlines()[-1]) for out in (first, second)]
    for found in results:
        assert found["steps"][0] == 1 and found["steps"][-1] == 4 and 2 not in found["steps"]
        assert found["newest"] == 4 and found["problem"].endswith("(process 1)"), found
        assert found["seconds"] < 60, "Orbax's own barriers wait for 1200"
    assert "the run goes on and tries again at the next save" in warned
