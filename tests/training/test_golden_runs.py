"""Two steps of eight objectives, in plain and packed rows, with LoRA, and with experts: their numbers do not move.

The same bits come from one machine only, so what is recorded here is compared closely instead. Run as a script, this
file prints the recorded numbers anew, and a hash of each case's parameters, by which two versions of the sources are
compared on one machine.
"""

import hashlib
import sys
import tempfile
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  JAX as in the tests

import numpy as np
import optax
import pytest
from few_devices import few_devices
from pair_options import OPTIONS, combined, problems

from gspax import config
from gspax.losses import kl
from gspax.run import record
from gspax.training import loop, open_training
from gspax.types import named_leaves

# Adam would divide rounding by rounding where a gradient is nearly 0.
OPTIONS["SGD"] = {"optimizer": {"transform": optax.sgd, "learning_rate": 0.1}}
OPTIONS["kl of GRPO"] = {"reference": config.Reference(loss=kl.grpo_kl, coefficient=0.1)}
LAYOUTS = {
    "plain": ["dense"],
    "packed": ["dense", "shared prompts"],
    "LoRA": ["dense", "lora"],
    "experts": [],
}
OBJECTIVES = {
    "GSPO": [],
    "GSPO-token": ["loss=gspo_token", "entropy"],
    "replay": ["loss=grpo", "replay=old"],
    "reference": ["loss=grpo", "kl of GRPO"],
    "teacher": ["teacher, kept"],
    "teacher with prompts": ["teacher, prompt"],
    "correction": ["loss=grpo", "truncate_tokens", "top_entropy"],
    "sampler": ["loss=grpo", "old_logp=sampler"],
}
# Of each objective and layout: loss and gradient norm of each step, then of the parameters' change the norm and a
# random projection.
GOLDEN = {
    ("GSPO", "plain"): (0.013101824, 1.5777989, -3.7252903e-09, 0.84822869, 0.1689469, 0.014000674),
    ("GSPO", "packed"): (0.013101805, 1.577799, -3.7252903e-09, 0.84822869, 0.1689469, 0.014000443),
    ("GSPO-token", "LoRA"): (-0.16902741, 5.0670773, -0.18686772, 1.5338808, 0.17233893, -0.079246247),
    ("replay", "experts"): (0, 0.62791651, -3.7252903e-09, 0.81201762, 0.15048249, 0.0041991801),
    ("reference", "packed"): (0.0075976336, 1.685652, 0.0028684054, 0.80527849, 0.17569406, -0.064047323),
    ("teacher", "experts"): (0.012920567, 1.2462115, 0.0050287701, 0.45741923, 0.10695819, -0.08126434),
    ("teacher with prompts", "plain"): (0.062387407, 2.8910272, 0.051673859, 2.5422841, 0.17697293, -0.1892332),
    ("correction", "packed"): (0.021172445, 1.1510331, -0.031249717, 0.80302143, 0.13862049, -0.027421035),
    ("sampler", "LoRA"): (0.043015311, 5.0399089, 1.4901161e-08, 1.2796569, 0.15843255, 0.011058627),
}


def run(objective, layout, folder):
    """The metrics of two steps on one device, and the trained parameters before and after them, by name."""
    names = ["SGD", *OBJECTIVES[objective], *LAYOUTS[layout]]
    assert not problems(names)
    states = []

    def run_step(runtime, state, *rest):
        states.append(of_state(state))
        result = step(runtime, state, *rest)
        states.append(of_state(result.state))
        return result

    step = loop.run_step
    with few_devices(1), mock.patch.object(loop, "run_step", run_step), mock.patch.object(open_training, "run_page"):
        loop.train(combined(names), folder, report_to=())
    return record.read_metrics(folder / "metrics.jsonl"), states[0], states[-1]


def of_state(state):
    return {name: np.array(leaf) for name, leaf in named_leaves(state.params).items()}


def numbers(metrics, before, after):
    """The row of `GOLDEN`."""
    change = np.concatenate([np.ravel(after[name] - before[name]).astype(np.float64) for name in before])
    direction = np.random.default_rng(0).standard_normal(change.size)
    steps = [(each["policy/loss"], each["optim/grad_norm"]) for each in metrics if "policy/loss" in each]
    return *np.ravel(steps).tolist(), float(np.linalg.norm(change)), float(direction @ change)


@pytest.mark.parametrize(("objective", "layout"), GOLDEN)
def test_two_steps_have_the_recorded_numbers(objective, layout, tmp_path):
    found, wanted = numbers(*run(objective, layout, tmp_path / "run")), GOLDEN[objective, layout]
    # A loss near 0 is a difference of terms of about 1, and a projection one of terms of the norm's size.
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def main():
    for objective, layout in GOLDEN:
        with tempfile.TemporaryDirectory() as folder:
            found = run(objective, layout, Path(folder) / "run")
        bits = hashlib.sha256(b"".join(leaf.tobytes() for leaf in found[2].values())).hexdigest()[:16]
        row = ", ".join(f"{number:.8g}" for number in numbers(*found))
        print(f'    ("{objective}", "{layout}"): ({row}),  # {bits}', flush=True)


if __name__ == "__main__":
    main()
