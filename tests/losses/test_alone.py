"""Losses without optional packages, and their documentation page."""

import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from gspax import losses

ROOT = pathlib.Path(__file__).parents[2]

ALONE = """
import sys

BLOCKED = {"flax", "optax", "orbax", "chex", "transformers", "rich", "tensorboardX", "matplotlib", "scipy.stats"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED or name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} must not be imported")

sys.meta_path.insert(0, Blocker())
try:
    import optax
except ImportError:
    pass
else:
    raise AssertionError("the blocker does not block")

import gspax.losses, gspax.advantages
import jax.numpy as jnp

logp = jnp.zeros((2, 3))
advantage = gspax.advantages.standardize(jnp.array([[1.0, 0.0]])).reshape(-1)
print(float(gspax.losses.gspo_loss(logp, logp, advantage, jnp.ones((2, 3), bool))[0]))
names = "gspo_token grpo luspo dr_grpo dapo importance_sampling cispo sapo gmpo vespo dppo_tv dppo_kl dis ipo dro"
for name in names.split():
    getattr(gspax.losses, name)(logp, logp, advantage, jnp.ones((2, 3), bool))
assert not BLOCKED & set(sys.modules)
"""


def test_losses_and_advantages_need_only_jax():
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [abs(float(line)) for line in done.stdout.split()] == [0]


def blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "losses.md").read_text(), re.DOTALL)


def test_the_example_in_the_docs_runs():
    example = next(each for each in blocks() if "def update" in each)
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 18
    assert not re.search(r"import (flax|optax|orbax|chex)|from (flax|optax|orbax|chex)", example)
    scope = {}
    exec(compile(example, "docs/losses.md", "exec"), scope)
    # On policy the loss is minus the mean advantage, 0. The step raises the rewarded response.
    assert scope["value"] == pytest.approx(0, abs=1e-6)
    assert scope["metrics"]["ratio_mean"] == pytest.approx(1, abs=1e-6)
    change = scope["token_logp"](scope["table"]) - scope["old_logp"]
    np.testing.assert_array_equal(np.sign(np.sum(change, -1, where=scope["mask"])), [1, -1])


def test_the_docs_list_every_metric():
    page = (ROOT / "docs" / "losses.md").read_text()
    x = jnp.zeros((1, 2))
    for key in losses.gspo_loss(x, x, jnp.ones(1), x == 0)[1]:
        assert f"`{key}`" in page, key
