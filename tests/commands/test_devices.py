"""The command line loads libtpu only where there may be a TPU."""

import importlib.util
import os
import subprocess
import sys

import jax
import pytest
import tiny
from jax.extend import backend
from published import published, random_params, save

from gspax import unstable
from gspax.commands import environment

# A command that uses devices and succeeds; afterwards libtpu must not be mapped.
CONVERT = """
import sys
from gspax.commands import main
code = main.main(["convert", "--from", sys.argv[1], "--to", sys.argv[2]])
assert "libtpu" not in open("/proc/self/maps").read()
sys.exit(code)
"""
STAND_IN = """
import sys
import jax._src.xla_bridge as bridge
bridge.make_tpu_client = lambda *arguments: sys.stderr.write("libtpu was loaded")
"""


@pytest.fixture
def no_tpu(monkeypatch):
    """A machine without signs of a TPU, where jax may choose its devices; yields the backends that are replaced."""
    for name in environment.TPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(unstable, "attached_tpu_chips", lambda: 0)
    monkeypatch.setattr(environment.glob, "glob", lambda pattern: [])
    replaced = []
    monkeypatch.setattr(backend, "register_backend_factory", lambda name, *_, **__: replaced.append(name))
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield replaced
    jax.config.update("jax_platforms", before)


def run_convert(tmp_path, code):
    save(tmp_path / "hf", tiny.CONFIGS["dense"], published(tiny.CONFIGS["dense"], random_params(tiny.CONFIGS["dense"])))
    hidden = {"JAX_PLATFORMS", *environment.TPU_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hf"), str(tmp_path / "orbax")],
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.skipif(environment.has_tpu(), reason="there may be a TPU here")
def test_without_a_tpu_a_command_prints_no_errors_and_loads_no_libtpu(tmp_path):
    """Where libtpu is not installed, a stand-in takes its place."""
    done = run_convert(tmp_path, CONVERT if importlib.util.find_spec("libtpu") else STAND_IN + CONVERT)
    assert (done.returncode, done.stderr) == (0, "")


def test_tpus_are_skipped_where_nothing_indicates_one(no_tpu):
    environment.skip_absent_tpu()
    assert no_tpu == ["tpu"]


@pytest.mark.parametrize("sign", ["PCI", "device file", *environment.TPU_VARIABLES, "JAX_PLATFORMS"])
def test_any_sign_of_a_tpu_leaves_the_choice_to_jax(no_tpu, sign, monkeypatch):
    if sign == "PCI":
        monkeypatch.setattr(unstable, "attached_tpu_chips", lambda: 4)
    elif sign == "device file":
        monkeypatch.setattr(environment.glob, "glob", lambda pattern: ["/dev/accel0"])
    elif sign == "JAX_PLATFORMS":
        jax.config.update("jax_platforms", "tpu,cpu")
    else:
        monkeypatch.setenv(sign, "0")
    environment.skip_absent_tpu()
    assert no_tpu == []


def test_importing_gspax_changes_neither_the_environment_nor_the_path_nor_jax():
    code = (
        "import os, sys, jax, flax, optax, orbax.checkpoint, tensorboardX\n"
        "before = dict(os.environ), list(sys.path), jax.config.values.copy()\n"
        "import gspax.training.loop, gspax.training.warm_start, gspax.evaluation.checkpoint\n"
        "import gspax.commands.main, gspax.commands.train\n"
        "assert (dict(os.environ), sys.path, jax.config.values) == before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
