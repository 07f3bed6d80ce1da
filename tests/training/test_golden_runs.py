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
from pair_options import OPTIONS, combined, length, problems
from processes import run_two

from gspax import config
from gspax.losses import kl
from gspax.parallel import joining
from gspax.training import open_training
from gspax.training.run_log import RunLog

SETTINGS = OPTIONS | {
    # Adam would divide rounding by rounding where a gradient is nearly 0. Rewards differ within every group, so that
    # every minibatch has a gradient.
    "SGD": {"optimizer": {"transform": optax.sgd, "learning_rate": 0.1}, "reward": length},
    "kl of GRPO": {"reference": config.Reference(loss=kl.grpo_kl, coefficient=0.1)},
}
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
    ("GSPO", "plain"): (-6.5617263e-05, 3.3062911, 2.983585e-05, 1.3209557, 0.15608107, -0.17840707),
    ("GSPO", "packed"): (-6.5617263e-05, 3.3062909, 2.9828399e-05, 1.3209558, 0.15608108, -0.17840772),
    ("GSPO", "LoRA"): (0.013367087, 9.3402619, 5.5879354e-09, 5.2661662, 0.15680475, -0.045733902),
    ("GSPO", "experts"): (0.0051601492, 2.7035979, 0.0070437267, 3.202127, 0.21430032, 0.062841015),
    ("GSPO-token", "plain"): (-0.20626438, 3.5600438, -0.20190693, 2.3521554, 0.1437869, -0.2756664),
    ("GSPO-token", "packed"): (-0.20626436, 3.5600438, -0.2019069, 2.3521551, 0.14378689, -0.27566628),
    ("GSPO-token", "LoRA"): (-0.19569428, 9.5426773, -0.20308862, 4.5453318, 0.16988335, -0.049005669),
    ("GSPO-token", "experts"): (-0.18449211, 2.7845859, -0.18577206, 3.1828804, 0.2098442, 0.029817956),
    ("replay", "experts"): (-0.038591191, 2.7608897, -0.02341282, 3.2685859, 0.2238596, 0.17352537),
    ("reference", "plain"): (-0.020516451, 3.6759044, 0.007025864, 3.2258878, 0.20993252, -0.29902682),
    ("reference", "packed"): (-0.020516455, 3.6759042, 0.007025871, 3.225888, 0.20993252, -0.2990266),
    ("reference", "LoRA"): (-5.143811e-05, 9.4218729, 0.034078776, 3.3513029, 0.1591106, 0.12588897),
    ("reference", "experts"): (-0.027682666, 2.946386, -0.038796587, 3.5697806, 0.19122279, 0.070271545),
    ("teacher", "experts"): (0.038074285, 3.2855685, 0.026266669, 3.0295564, 0.18096524, -0.0024685338),
    ("teacher with prompts", "plain"): (0.056518916, 3.9561496, 0.12971051, 2.4502196, 0.1393833, -0.21210829),
    ("correction", "plain"): (0.0021778066, 2.3883346, -0.014852116, 2.4927537, 0.18509789, -0.028504618),
    ("correction", "packed"): (0.0021778122, 2.3883345, -0.014852106, 2.4927537, 0.18509788, -0.028504467),
    ("correction", "LoRA"): (0.14444924, 14.791515, 0.023635082, 4.2743988, 0.15711573, 0.13853057),
    ("correction", "experts"): (-0.010936655, 2.2124779, -0.070480946, 2.3407839, 0.22826832, -0.071984473),
    ("sampler", "plain"): (-0.024472732, 3.6193526, -0.014362209, 2.0501781, 0.18998741, -0.18127253),
    ("sampler", "packed"): (-0.024472743, 3.6193526, -0.014362201, 2.0501782, 0.18998741, -0.18127275),
    ("sampler", "LoRA"): (-0.0074913539, 9.3103405, -5.5879354e-09, 4.3483524, 0.15960399, -0.075759419),
    ("sampler", "experts"): (-0.038591173, 2.7608898, -0.019783083, 3.3407824, 0.22430294, 0.17785111),
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
    assert not problems(names, SETTINGS)
    states = []

    def run_step(runtime, state, *rest):
        states.append(of_state(state))
        result = step(runtime, state, *rest)
        states.append(of_state(result.state))
        return result

    step = loop.run_step
    reporting = mock.patch.object(open_training, "run_page"), mock.patch.object(RunLog, "write_evaluation")
    with mock.patch.object(loop, "run_step", run_step), reporting[0], reporting[1]:
        loop.train(combined(names, SETTINGS), folder, report_to=())
    return record.read_metrics(folder / "metrics.jsonl"), states[0], states[-1]


def of_state(state):
    return dict(named_leaves(multihost.to_host(state.params)))


def numbers(metrics, before, after):
    """The row of `GOLDEN`."""
    change = np.concatenate([np.ravel(after[name] - before[name]).astype(np.float64) for name in before])
    direction = np.random.default_rng(0).standard_normal(change.size)
    steps = [(each["policy/loss"], each["optim/grad_norm"]) for each in metrics if "policy/loss" in each]
    return *np.ravel(steps).tolist(), float(np.linalg.norm(change)), float(direction @ change)


def test_the_recorded_numbers_tell_objectives_apart():
    for layout in LAYOUTS:
        norms = sorted(row[3] for case, row in GOLDEN.items() if case[1] == layout)
        assert len(norms) > 3 and np.diff(norms).min() > 1e-3, layout


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
