"""Checkpoints are exact, restore onto any mesh, and are complete or absent; failures are one error."""

import gc
import logging
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from api import Adapted, Checkpoints, TrainState
from jax.sharding import NamedSharding, PartitionSpec

from gspax.errors import UserError


def sharding(devices, *spec):
    mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_state(devices=8, seed=0, rows=16):
    """A state with values that are hard to save: a typed key, integer keys, bfloat16, NaN, optimizer tuples."""
    values_RD = jax.random.normal(jax.random.key(seed), (rows, 3)).at[0, 0].set(jnp.nan)
    params = {
        "runs": {0: {"w": jax.device_put(values_RD, sharding(devices, "fsdp"))}, 11: {"b": jnp.zeros((), jnp.int8)}},
        "half": jax.device_put(values_RD.astype(jnp.bfloat16), sharding(devices, "fsdp")),
        "mask": jnp.array([True, False]),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = TrainState(
        step=jnp.int32(7),
        position=jnp.int32(448),
        key=jax.random.key(seed, impl="rbg"),
        params=params,
        opt_state=optimizer.init(params),
        adapted=Adapted(jnp.float32(0.02), jnp.float32(0.03), jnp.float32(0.01)),
    )
    everywhere = sharding(devices)
    return jax.tree.map(lambda x: x if len(x.devices()) == devices else jax.device_put(x, everywhere), state)


def abstract(state, where=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where or x.sharding), state)


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_state_is_restored_bit_for_bit(tmp_path):
    state, extra = make_state(), {"experiment": {"name": "x", "values": [1, 0.5, None]}}
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.save(7, state, extra)
    with Checkpoints(tmp_path / "c") as checkpoints:
        got, got_extra = checkpoints.restore(abstract(state))
    assert_same(got, state)
    assert got_extra == extra
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        assert a.sharding == b.sharding
    assert jax.random.bits(got.key) == jax.random.bits(state.key)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_state_restores_onto_other_devices(tmp_path, devices):
    state = make_state(devices=8)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        target = abstract(make_state(devices=devices))
        got, _ = checkpoints.restore(target)
    assert_same(got, state)
    assert got.params["half"].sharding == target.params["half"].sharding
    assert len(got.key.devices()) == devices


def test_a_state_donated_right_after_save_is_saved_unchanged(tmp_path):
    def big(fill):
        return {"w": jnp.full((2_000_000,), fill)}

    state = big(1.0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        jax.block_until_ready(jax.jit(lambda s: jax.tree.map(jnp.negative, s), donate_argnums=0)(state))
        got, _ = checkpoints.restore(abstract(big(0.0)))
    assert_same(got, big(1.0))


def test_the_newest_checkpoints_are_kept(tmp_path):
    state = {"w": jnp.ones(2)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": jnp.full(2, step * 1.0)}, {"step": step})
        checkpoints.save(3, state, {})  # already written: does nothing
        assert checkpoints.restore(abstract(state))[1] == {"step": 3}
        assert (checkpoints.steps(), checkpoints.latest()) == ([2, 3], 3)
        got, extra = checkpoints.restore(abstract(state), step=2)
    assert (got["w"][0], extra) == (2.0, {"step": 2})


def test_a_save_after_an_older_restore_deletes_the_later_steps(tmp_path):
    for value, steps in ((1.0, (2, 4, 6)), (5.0, (4,))):
        with Checkpoints(tmp_path, keep=3) as checkpoints:
            for step in steps:
                checkpoints.save(step, {"w": jnp.full(2, value)}, {})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 4]
        assert checkpoints.restore(abstract({"w": jnp.ones(2)}))[0]["w"][0] == 5.0


def test_an_incomplete_step_is_ignored_and_replaced(tmp_path):
    (tmp_path / "9" / "d").mkdir(parents=True)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(5, {"w": jnp.ones(2)}, {})
        assert checkpoints.steps() == [5]


def refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400, message
    return message


def test_a_state_that_cannot_be_restored_is_one_error(tmp_path):
    state = make_state()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert "no checkpoint in" in refusal(lambda: checkpoints.restore(abstract(state)))
        checkpoints.save(7, state, {})
        assert "no checkpoint 3 with a manifest" in refusal(lambda: checkpoints.restore(abstract(state), step=3))
        smaller = abstract(make_state(rows=8))
        message = refusal(lambda: checkpoints.restore(smaller))
        assert (
            "another model" in message
            and "params/half is bfloat16[16, 3], wanted bfloat16[8, 3] (and 5 more" in message
        )
        other = abstract(state.params)
        assert "another model or optimizer" in refusal(lambda: checkpoints.restore(other))
        narrow = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), abstract(state)
        )
        assert "wanted float32" in refusal(lambda: checkpoints.restore(narrow))
    with Checkpoints(tmp_path / "none") as checkpoints:
        assert checkpoints.steps() == []
    assert not (tmp_path / "none").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from Orbax's closed event loop
def test_a_damaged_checkpoint_is_one_error(tmp_path):
    state = make_state()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(7, state, {})
    for path in (tmp_path / "7" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:20])
    with Checkpoints(tmp_path) as checkpoints:
        assert "checkpoint 7" in refusal(lambda: checkpoints.restore(abstract(state)))
    gc.collect()


def test_orbax_logs_nothing(tmp_path, capfd, caplog):
    caplog.set_level(logging.INFO)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, {})
        checkpoints.restore(abstract({"w": jnp.ones(2)}))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.latest()
    assert capfd.readouterr() == ("", "")
    assert not [each for each in caplog.records if each.name == "absl"]


CHILD = """
import sys, jax.numpy as jnp
from gspax.run.checkpoints import Checkpoints
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    for step in range(1, 1000):
        checkpoints.save(step, {"w": jnp.full((500_000,), step * 1.0)}, {"step": step})
        print(step, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_a_killed_save_leaves_only_complete_checkpoints(tmp_path, delay):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    begun = [int(child.stdout.readline()) for _ in range(3)][-1]
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    begun = max([begun, *map(int, child.stdout.read().split())])
    child.wait()
    child.stdout.close()
    target = abstract({"w": jnp.ones(500_000)})
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert begun - 1 <= checkpoints.latest() <= begun + 1
        for step in checkpoints.steps():
            got, extra = checkpoints.restore(target, step)
            assert (got["w"] == step).all() and extra == {"step": step}
        checkpoints.save(2000, got, {})
        assert checkpoints.latest() == 2000
    assert not list(tmp_path.glob("*tmp*"))
