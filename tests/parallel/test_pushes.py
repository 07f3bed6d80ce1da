"""Weights that two processes push: each writes a share, and servers read the bytes of one process."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from published import random_params
from test_processes import free_port, variables

from gspax.hf import tensors
from gspax.rollout.engines.weights import Writer

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from test_weights import BFLOAT16, read, train

CHILD = """
import sys
from pathlib import Path
import jax
from gspax.config import Mesh
from gspax.errors import UserError
from gspax.learner.state import abstract_params
from gspax.parallel import joining
from gspax.parallel.sharding import make_mesh
from gspax.rollout.engines.weights import Writer
from published import random_params
from test_weights import BFLOAT16, train

address, index, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
joining.join(joining.ProcessInfo(address, 2, index), {}, lambda a, b: [], 100, b"secret")
wanted = abstract_params(BFLOAT16, make_mesh(Mesh(data=1, fsdp=2, expert=2), model=BFLOAT16))

def place(params):
    make = lambda leaf, whole: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index])
    return jax.tree.map(make, wanted, params)

writer, params = Writer(folder / "both", BFLOAT16, changes=True), random_params(BFLOAT16)
assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(place(params)))
first = writer.write(0, place(params))
second = writer.write(1, place(train(params, 1)))
assert second.bytes < 0.1 * first.bytes, second
try:
    Writer(folder / str(index), BFLOAT16, changes=True).write(0, place(params))
except UserError as error:
    assert "engine.folder: wanted a folder that all processes share" in str(error), error
else:
    raise AssertionError("must fail on both")
"""


def test_two_processes_write_the_bytes_of_one(tmp_path):
    """Each writes a share of the tensors of a model that neither has all of, also of the changes."""
    command = [sys.executable, "-c", CHILD, f"localhost:{free_port()}"]
    popen = {"env": variables(2), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*command, str(index), str(tmp_path)], **popen) for index in (0, 1)]
    try:
        output = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], output
    alone = Writer(tmp_path / "alone", BFLOAT16, changes=True)
    params = random_params(BFLOAT16)
    for version in (0, 1):
        params = train(params, 1) if version else params
        written, path = alone.write(version, params), tmp_path / "both" / f"weights_v{version:06d}"
        own, theirs = read(written.path), read(path)
        assert own.keys() == theirs.keys()
        jax.tree.map(np.testing.assert_array_equal, own, theirs)
        assert json.loads((path / "manifest.json").read_text())["digest"] == written.digest
        suffixes = {"safetensors", "npz"} if version else {"safetensors"}
        files = [file for file in path.iterdir() if file.name.split(".")[-1] in suffixes]
        assert len(files) >= 2, "of each process"
    whole = tensors.find(tmp_path / "both" / "weights_v000000")  # with an index, as transformers reads it
    assert whole.keys() == own.keys()
