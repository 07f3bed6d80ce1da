"""What two processes push and sample with servers: the weights are those of one process, and so are the samples."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_vllm
import jax
import numpy as np
from api import Writer, tensors
from processes import free_port, run_two, variables
from published import random_params
from small_experiment import experiment

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from test_weights import BFLOAT16, read

CHILD = """
import sys
from pathlib import Path
import jax
from gspax.config import Mesh
from gspax.errors import UserError
from gspax.learner.state import abstract_params
from gspax.parallel import joining
from gspax.parallel.sharding import make_mesh
from gspax.rollout.servers.weights import Writer
from processes import free_port, run_two, variables
from published import random_params
from test_weights import BFLOAT16

address, index, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
joining.join(joining.ProcessInfo(address, 2, index), {}, lambda a, b: [], 100, b"secret")
wanted = abstract_params(BFLOAT16, make_mesh(Mesh(data=1, fsdp=2, expert=2), model=BFLOAT16))

def place(params):
    make = lambda leaf, whole: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index])
    return jax.tree.map(make, wanted, params)

writer, params = Writer(folder / "both", BFLOAT16), random_params(BFLOAT16)
assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(place(params)))
writer.write(0, place(params))
try:
    Writer(folder / str(index), BFLOAT16).write(0, place(params))
except UserError as error:
    assert "engine.folder: wanted a folder that all processes share" in str(error), error
else:
    raise AssertionError("must fail on both")
"""


def test_two_processes_write_the_bytes_of_one(tmp_path):
    """Each writes a share of the tensors of a model that neither has all of."""
    run_two(["-c", CHILD], tmp_path, devices=2)
    written = Writer(tmp_path / "alone", BFLOAT16).write(0, random_params(BFLOAT16))
    path = tmp_path / "both" / "weights_v000000"
    own, theirs = read(written.path), read(path)
    assert own.keys() == theirs.keys()
    jax.tree.map(np.testing.assert_array_equal, own, theirs)
    assert json.loads((path / "manifest.json").read_text())["digest"] == written.digest
    assert len(list(path.glob("*.safetensors"))) >= 2, "of each process"
    whole = tensors.find(path)  # with an index, as transformers reads it
    assert whole.keys() == own.keys()


SAMPLING = """
import sys
import threading
from dataclasses import replace
import jax
import numpy as np
from gspax import config
from gspax.learner.state import init_state
from gspax.parallel import joining, multihost, watchdog
from gspax.rollout.runtime import make_runtime
from gspax.training.in_flight import InFlight, receive, start_rollout
from small_experiment import experiment as small

address, index, *addresses = sys.argv[1:]
joining.join(joining.ProcessInfo(address, 2, int(index)), {}, lambda a, b: [], 100, b"secret")
model = replace(small.model, num_hidden_layers=1, num_experts=0, intermediate_size=32)
engine = config.Engine(folder="weights", addresses=tuple(addresses), probes=1)
sampling = replace(small.sampling, prompts=4)
runtime = make_runtime(replace(small, model=model, warm_start=None, engine=engine, sampling=sampling))
steps, progress = [], watchdog.progress
watchdog.progress = lambda *doing: steps.append(sys._getframe(1).f_code.co_name) or progress(*doing)
state = init_state(model, runtime.optimizer, jax.random.key(0), runtime.mesh)
weights = runtime.sampler.push(state.params, 0)
batch = receive(runtime, start_rollout(runtime, weights, state, 0, InFlight()))
rollout = batch.rollout
own = {row for row in range(16) if batch.problems[row // 4] is not None}
assert batch.started.keys() == own and len(own) == 8, "each process has begun the rewards of its rows"
assert "_on_primary" in steps
assert int(index) == 0 or runtime.sampler.servers.answered == 0, "process 0 alone talks to servers"
np.save(f"tokens{index}.npy", multihost.to_host(rollout.tokens_BT))
np.save(f"logps{index}.npy", multihost.to_host(rollout.logp_BT))
for thread in [thread for thread in threading.enumerate() if thread.name == "gspax_lost"]:
    thread.join(60)  # it gives a server that restarted its weights again
"""


def test_two_processes_sample_with_servers_that_restart(tmp_path):
    """Process 0 asks for all rows, also where a server restarts; the watchdog of the other sees progress, too."""
    model = replace(experiment.model, num_hidden_layers=1, num_experts=0, intermediate_size=32)
    with fake_vllm.serve(model) as first, fake_vllm.serve(model) as second:
        first.faults.restart_after = 3  # the probe is one completion
        popen = {"env": variables(1), "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
        command = [sys.executable, "-c", SAMPLING, f"localhost:{free_port()}"]
        processes = [
            subprocess.Popen([*command, str(index), first.address, second.address], stdout=subprocess.PIPE, **popen)
            for index in (0, 1)
        ]
        try:
            output = [process.communicate(timeout=1200)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0], output
        assert first.faults.restart_after == 0, "it did restart"
        loads = [body["args"][1] for path, body in first.seen if body and body.get("method") == "gspax_load"]
        assert len(loads) == len(set(loads)) == 2
        assert f"{first.address} is back" in output[0] and "is back" not in output[1]
        params = jax.device_get(first.params)
    tokens, logps = (np.load(tmp_path / f"{name}0.npy") for name in ("tokens", "logps"))
    np.testing.assert_array_equal(tokens, np.load(tmp_path / "tokens1.npy"))
    for row, own in zip(tokens.tolist(), logps, strict=True):
        theirs, _ = fake_vllm.forward(params, model, row)
        sampled = np.flatnonzero(own)
        assert len(sampled) > 0
        np.testing.assert_allclose(own[sampled], [theirs[t - 1, row[t]] for t in sampled], atol=2e-6)
