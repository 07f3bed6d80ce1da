"""Each entry of gspax.unstable does what gspax needs; if jax changes it, the failure quotes what to do."""

import contextlib
import inspect
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gspax import unstable


@contextlib.contextmanager
def advice(entry):
    """Turn any failure into one with the jax version and the entry's docstring."""
    try:
        yield
    except Exception as problem:  # AssertionError included
        what = f"{type(problem).__name__}: {problem}"
        pytest.fail(f"gspax.unstable.{entry.__name__} with jax {jax.__version__}: {what}\n{inspect.getdoc(entry)}")


def test_every_entry_has_a_reason_advice_and_a_test():
    entries = {name: value for name, value in vars(unstable).items() if inspect.isfunction(value)}
    assert set(re.findall(r"advice\(unstable\.(\w+)\)", Path(__file__).read_text())) == set(entries)
    for name, entry in entries.items():
        assert "When it goes:" in inspect.getdoc(entry), name


def test_a_failure_quotes_the_advice(monkeypatch):
    monkeypatch.delattr("jax._src.clusters.K8sCluster")
    with pytest.raises(
        pytest.fail.Exception, match=r"is_kubernetes with jax (?s:.*)When it goes: compare the class's name"
    ):
        test_is_kubernetes()


def test_create_device_mesh():
    with advice(unstable.create_device_mesh):
        grid = unstable.create_device_mesh((2, 4), jax.devices())
        assert grid.shape == (2, 4) and set(grid.flat) == set(jax.devices())


def test_row_major():
    with advice(unstable.row_major):
        lowered = jax.jit(unstable.row_major).lower(jax.ShapeDtypeStruct((2, 3, 4), np.float32))
        assert "LayoutConstraint" in lowered.as_text() and "dense<[2, 1, 0]>" in lowered.as_text()


@contextlib.contextmanager
def optimized():
    """XLA's optimizations, which the tests leave out."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    try:
        yield
    finally:
        jax.config.update(name, before)


def test_light_compilation():
    """A program compiles with the options, and its result is that of one without them."""
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    with advice(unstable.light_compilation):
        assert unstable.light_compilation(mesh) == {}  # the tests' own choice stays
        with optimized():
            tpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]))
            assert unstable.light_compilation(tpu) == {}
            options = unstable.light_compilation(mesh)
            assert bool(options) == (jax.__version_info__[:2] == (0, 10))
            assert jax.jit(lambda x: x * 2 + 1, compiler_options=options)(3.0) == 7.0


def test_get_topology_desc():
    with advice(unstable.get_topology_desc):
        from jax.experimental import topologies

        # It needs libtpu; tests/tools/test_compile.py calls it if libtpu is installed.
        arguments = {"platform": "tpu", "topology_name": "v5e:2x2", "num_slices": 1}
        inspect.signature(topologies.get_topology_desc).bind(**arguments)


def test_splash_attention():
    """The attention itself is compared with XLA's in tests/model/kernels/test_attention.py."""
    with advice(unstable.splash_attention):
        kernel, masks = unstable.splash_attention()
        inspect.signature(kernel.make_splash_mha).bind_partial(
            None, block_sizes=None, head_shards=1, q_seq_shards=1, interpret=True
        )
        sizes = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
        kernel.BlockSizes(**{f"block_{name}": 128 for name in sizes})
        kernel.SegmentIds(q=None, kv=None)
        assert callable(kernel.SplashAttentionKernel.manual_sharding_spec)
        mask = masks.LocalMask((4, 4), window_size=(1, 0), offset=0)
        assert mask.q_sequence.tolist() == [0, 1, 2, 3]
        wanted = np.tril(np.ones((4, 4), bool)) & ~np.tril(np.ones((4, 4), bool), -2)
        np.testing.assert_array_equal(mask[:, :], wanted)
        masks.MultiHeadMask([mask] * 2)


def test_pallas():
    """The kernel is compared with loops in tests/model/kernels/test_decode_attention.py."""
    with advice(unstable.pallas):
        pallas, tpu = unstable.pallas()
        assert all(map(callable, (pallas.BlockSpec, pallas.when, pallas.program_id, pallas.num_programs)))
        inspect.signature(pallas.pallas_call).bind_partial(
            None, out_shape=(), grid_spec=None, compiler_params=None, name="", interpret=True
        )
        tpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(1,), in_specs=[], out_specs=[], scratch_shapes=[])
        tpu.CompilerParams(dimension_semantics=("parallel",))
        tpu.VMEM((8, 128), np.float32)


SERVICE = """
import sys, jax
from gspax import unstable
service = unstable.coordination_service(sys.argv[1], 1)
jax.distributed.initialize(sys.argv[1], 1, 0, coordinator_bind_address="127.0.0.1:0")
jax.distributed.shutdown()
print("connected")
"""


def test_coordination_service():
    with socket.create_server(("localhost", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    done = subprocess.run([sys.executable, "-c", SERVICE, address], capture_output=True, text=True, timeout=100)
    with advice(unstable.coordination_service):
        assert done.returncode == 0 and done.stdout == "connected\n", done.stderr


def test_cluster_types():
    with advice(unstable.cluster_types):
        kinds = unstable.cluster_types()
        assert {"SlurmCluster", "GkeTpuCluster", "GceTpuCluster"} <= {kind.__name__ for kind in kinds}
        for kind in kinds:
            assert isinstance(kind.opt_in_only_method, bool)
            inspect.signature(kind.get_coordinator_address).bind(timeout_secs=1, override_coordinator_port="1")
            assert all(map(callable, (kind.is_env_present, kind.get_process_count, kind.get_process_id)))


def test_is_kubernetes():
    with advice(unstable.is_kubernetes):
        assert [kind.__name__ for kind in unstable.cluster_types() if unstable.is_kubernetes(kind)] == ["K8sCluster"]


@pytest.mark.parametrize("name", ["threefry2x32", "rbg"])
def test_key_impl_name(name):
    with advice(unstable.key_impl_name):
        key = jax.eval_shape(lambda: jax.random.key(0, impl=name))
        assert unstable.key_impl_name(key.dtype) == name


def test_attached_tpu_chips(tmp_path, monkeypatch):
    """Two v5e chips and a device of another vendor, as Linux lists them."""
    devices = {
        "0000:00:04.0": ("0x1ae0", "0x0063"),
        "0000:00:05.0": ("0x1ae0", "0x0063"),
        "0000:00:06.0": ("0x10de", "1"),
    }
    for address, (vendor, device) in devices.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(vendor + "\n")
        (tmp_path / address / "device").write_text(device + "\n")
    with advice(unstable.attached_tpu_chips):
        from jax._src import hardware_utils

        found = sorted(map(str, tmp_path.glob("*/vendor")))
        monkeypatch.setattr(hardware_utils.glob, "glob", lambda pattern: found)
        assert unstable.attached_tpu_chips() == 2
