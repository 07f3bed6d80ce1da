"""Two steps of eight objectives, in plain and packed rows, with LoRA, and with experts: their numbers do not move.

Two processes have the numbers of one.

The same bits come from one machine only, so what is recorded here is compared closely instead. Run as a script, this
file prints the recorded numbers anew, and a hash of each case's parameters, by which two versions of the sources are
compared on one machine.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

if __name__ == "__main__" and not sys.argv[1:]:
    sys.path.append(str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  JAX as in the tests

import numpy as np
import optax
import pytest
from api import loop, multihost, named_leaves, record
from few_devices import few_devices
from pair_options import OPTIONS, combined, problems
from processes import run_two

from gspax import config
from gspax.losses import kl
from gspax.parallel import joining
from gspax.training import open_training
from gspax.training.run_log import RunLog

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
    ("GSPO", "LoRA"): (0.036300488, 5.379158, -3.7252903e-09, 1.815634, 0.16537983, 0.11120131),
    ("GSPO", "experts"): (0, 0.62791651, -3.7252903e-09, 0.81201762, 0.15048249, 0.0041991801),
    ("GSPO-token", "plain"): (-0.19509769, 1.5549593, -0.19775097, 0.98634127, 0.16519437, -0.051000628),
    ("GSPO-token", "packed"): (-0.19509768, 1.5549593, -0.19775099, 0.98634122, 0.16519437, -0.051000663),
    ("GSPO-token", "LoRA"): (-0.16902741, 5.0670773, -0.18686772, 1.5338808, 0.17233893, -0.079246247),
    ("GSPO-token", "experts"): (-0.19053764, 0.9134115, -0.20390733, 0.55286584, 0.17053794, -0.029724887),
    ("replay", "experts"): (0, 0.62791651, -3.7252903e-09, 0.81201762, 0.15048249, 0.0041991801),
    ("reference", "plain"): (0.0075976243, 1.6856517, 0.0028683932, 0.8052783, 0.17569407, -0.064047065),
    ("reference", "packed"): (0.0075976336, 1.685652, 0.0028684054, 0.80527849, 0.17569406, -0.064047323),
    ("reference", "LoRA"): (0.048907682, 5.259192, 0.045508103, 5.5123761, 0.18699221, -0.031545421),
    ("reference", "experts"): (0.0031284248, 0.80734986, 0.0011837124, 0.93152177, 0.13281389, 0.050292467),
    ("teacher", "experts"): (0.012920567, 1.2462115, 0.0050287701, 0.45741923, 0.10695819, -0.08126434),
    ("teacher with prompts", "plain"): (0.062387407, 2.8910272, 0.051673859, 2.5422841, 0.17697293, -0.1892332),
    ("correction", "plain"): (0.021172468, 1.151033, -0.031249769, 0.80302143, 0.1386205, -0.027421541),
    ("correction", "packed"): (0.021172445, 1.1510331, -0.031249717, 0.80302143, 0.13862049, -0.027421035),
    ("correction", "LoRA"): (0.0086043216, 1.9652722, -0.03124975, 1.8522546, 0.16755037, -0.031294823),
    ("correction", "experts"): (0.015624938, 0.13617794, -0.015624883, 0.43975851, 0.091052155, 0.14159741),
    ("sampler", "plain"): (0.0064370371, 1.6243342, 1.6763806e-08, 0.73836243, 0.18000723, -0.077213893),
    ("sampler", "packed"): (0.0064370334, 1.6243343, -2.0489097e-08, 0.73836219, 0.18000722, -0.077213776),
    ("sampler", "LoRA"): (0.043015311, 5.0399089, 1.4901161e-08, 1.2796569, 0.15843255, 0.011058627),
    ("sampler", "experts"): (1.1175871e-08, 0.62791651, -3.7252903e-09, 0.8120175, 0.15048249, 0.0041990517),
}
# Each objective and each layout is in one of these; the tests of the others are slow.
FEW = [
    ("GSPO", "plain"),
    ("GSPO", "packed"),
    ("GSPO-token", "LoRA"),
    ("replay", "experts"),
    ("reference", "packed"),
    ("teacher", "experts"),
    ("teacher with prompts", "plain"),
    ("correction", "packed"),
    ("sampler", "LoRA"),
]
IN_TWO_PROCESSES = [
    ("GSPO", "packed"),
    ("GSPO-token", "LoRA"),
    ("replay", "experts"),
    ("reference", "packed"),
    ("correction", "packed"),
    ("sampler", "LoRA"),
]


def run(objective, layout, folder):
    """The metrics of two steps on all devices, and the trained parameters before and after them, by name."""
    names = ["SGD", *OBJECTIVES[objective], *LAYOUTS[layout]]
    assert not problems(names)
    states = []

    def run_step(runtime, state, *rest):
        states.append(of_state(state))
        result = step(runtime, state, *rest)
        states.append(of_state(result.state))
        return result

    step = loop.run_step
    reporting = mock.patch.object(open_training, "run_page"), mock.patch.object(RunLog, "write_evaluation")
    with mock.patch.object(loop, "run_step", run_step), reporting[0], reporting[1]:
        loop.train(combined(names), folder, report_to=())
    return record.read_metrics(folder / "metrics.jsonl"), states[0], states[-1]


def of_state(state):
    return dict(named_leaves(multihost.to_host(state.params)))


def numbers(metrics, before, after):
    """The row of `GOLDEN`."""
    change = np.concatenate([np.ravel(after[name] - before[name]).astype(np.float64) for name in before])
    direction = np.random.default_rng(0).standard_normal(change.size)
    steps = [(each["policy/loss"], each["optim/grad_norm"]) for each in metrics if "policy/loss" in each]
    return *np.ravel(steps).tolist(), float(np.linalg.norm(change)), float(direction @ change)


@pytest.mark.parametrize(
    ("objective", "layout"), [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in GOLDEN]
)
def test_two_steps_have_the_recorded_numbers(objective, layout, tmp_path):
    with few_devices(1):
        found = numbers(*run(objective, layout, tmp_path / "run"))
    assert_recorded(found, objective, layout)


def test_two_processes_have_the_recorded_numbers_of_one(tmp_path):
    run_two([__file__], tmp_path)
    for index in (0, 1):
        rows = json.loads((tmp_path / f"{index}.json").read_text())
        for objective, layout, *found in rows:
            assert_recorded(found, objective, layout)


def assert_recorded(found, objective, layout):
    # A loss near 0 is a difference of terms of about 1, and a projection one of terms of the norm's size.
    np.testing.assert_allclose(found, GOLDEN[objective, layout], 1e-5, 1e-6, err_msg=f"{objective}, {layout}")


def run_as_process(address, index, folder):
    """Run each of `IN_TWO_PROCESSES` as process `index` of two, and write the numbers to a file of the folder."""
    joining.join(joining.ProcessInfo(address, 2, int(index)), {}, lambda a, b: [], 100, b"secret")
    rows = []
    for number, case in enumerate(IN_TWO_PROCESSES):
        rows.append((*case, *numbers(*run(*case, folder / str(number)))))
    (folder / f"{index}.json").write_text(json.dumps(rows))
    joining.leave(0)


def main():
    for objective, layout in GOLDEN:
        with tempfile.TemporaryDirectory() as folder, few_devices(1):
            found = run(objective, layout, Path(folder) / "run")
        bits = hashlib.sha256(b"".join(leaf.tobytes() for leaf in found[2].values())).hexdigest()[:16]
        row = ", ".join(f"{number:.8g}" for number in numbers(*found))
        print(f'    ("{objective}", "{layout}"): ({row}),  # {bits}', flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        run_as_process(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        main()
