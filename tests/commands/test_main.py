"""The command line: what it calls, what it prints, and its exit codes."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import stub_experiment
from api import main, progress, write_atomically

import gspax
from gspax import errors, losses
from gspax.commands import train
from gspax.errors import DivergedError, FailureError, UserError, how_to_install

STUB = stub_experiment.__file__


@pytest.fixture
def called(monkeypatch):
    """Stand-ins for what the subcommands call; the calls that they received."""
    calls = []

    def stand_in(module, function):
        made = ModuleType(f"gspax.{module}")
        setattr(made, function, lambda *given, **_: calls.append((module, *given)) or Path("report.html"))
        made.summarize = lambda workdir: f"summary of {workdir}"
        monkeypatch.setitem(sys.modules, made.__name__, made)

    functions = {
        "training.loop": "train",
        "training.warm_start": "run",
        "evaluation.checkpoint": "evaluate_run",
        "report.run_page": "write",
    }
    for module, function in functions.items():
        stand_in(module, function)
    monkeypatch.setattr("gspax.tools.bench.run", lambda experiment, *_: calls.append(("bench", experiment)))
    return calls


def failing(monkeypatch, problem, *overrides):
    """A `gspax.training.loop` whose `train` raises."""

    def train(experiment, workdir, report_to, file):
        raise problem

    module = ModuleType("gspax.training.loop")
    module.train = train
    monkeypatch.setitem(sys.modules, "gspax.training.loop", module)
    return main.main(["train", STUB, "--workdir", "w", *overrides])


def test_the_overview_names_what_can_be_trained(capsys):
    assert main.main(["--help"]) == 0
    assert "language models, dense or mixtures of experts" in capsys.readouterr().out


def test_train_accepts_options_in_any_order(called, tmp_path):
    assert main.main(["train", STUB, "seed=3", "--workdir", str(tmp_path), "schedule.steps=4"]) == 0
    ((module, experiment, workdir),) = called
    assert module == "training.loop"
    assert workdir == tmp_path
    assert (experiment.seed, experiment.schedule.steps) == (3, 4)


def test_a_run_ends_with_a_summary_and_the_next_commands(called, capsys):
    assert main.main(["train", STUB, "--workdir", "my runs/w", "seed=3", "schedule.steps=4"]) == 0
    first, title, *commands = capsys.readouterr().out.splitlines()
    assert (first, title) == ("summary of my runs/w", "Next:")
    same = f"{shlex.quote(STUB)} --workdir 'my runs/w' seed=3"
    assert [command.strip() for command in commands] == [
        f"gspax train {same} schedule.steps=8",
        f"gspax eval {same} schedule.steps=4 evaluation.problems=2048",
        "gspax samples 'my runs/w' --best 5",
        "gspax chat 'my runs/w'",
        "gspax export --from 'my runs/w' --to exported/w",
    ]


def test_a_chat_with_a_layer_kind_of_ones_own_finds_its_file_and_no_export_is_suggested(called, capsys):
    kind = ["model.mixer=averages.Averages", "model.mixer_layers=0"]
    assert main.main(["train", STUB, "--workdir", "w", *kind]) == 0
    *_, samples, chat = capsys.readouterr().out.splitlines()
    assert samples == "  gspax samples w --best 5"
    assert chat == f"  PYTHONPATH={shlex.quote(str(Path(__file__).parents[1]))} gspax chat w"


def test_the_suggested_command_works_in_the_users_shell(monkeypatch, tmp_path):
    """With and without the virtual environment's folder on the PATH."""
    called, other = tmp_path / "env" / "gspax", tmp_path / "bin" / "gspax"
    for each in (called, other):
        each.parent.mkdir()
        each.write_text("#!/bin/sh\n")
        each.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(called), "train"])
    for folder, shown in (("empty", [str(called)]), ("bin", [str(called)]), ("env", ["gspax"])):
        monkeypatch.setenv("PATH", str(tmp_path / folder))
        assert train.program() == shown
        options = Namespace(overrides=[], file="a.py", workdir=Path("w"))
        assert train.next_commands(options, 4, 2048).count(f"\n  {shown[0]} ") == 5
    monkeypatch.setattr(sys, "argv", ["/src/gspax/__main__.py", "train"])
    assert train.program() == [sys.executable, "-m", "gspax"]


@pytest.mark.parametrize(("available", "suggested"), [(1319, 1319), (5000, 2048), (None, 2048)])
def test_the_suggested_evaluation_has_no_more_problems_than_the_data(monkeypatch, capsys, available, suggested):
    data = Namespace(heldout_count=available, heldout=None)
    experiment = Namespace(
        data=data, schedule=Namespace(steps=2), evaluation=Namespace(problems=64), model=Namespace(mixer=None)
    )
    options = Namespace(report_to=(), dry_run=False, overrides=[], file="a.py", workdir=Path("w"))
    monkeypatch.setattr(train, "load_experiment", lambda _: experiment)
    monkeypatch.setattr(train.processes, "join", lambda *_: True)
    monkeypatch.setattr("gspax.training.loop.train", lambda *_, **__: None)
    assert train.execute(options) == 0
    assert f" evaluation.problems={suggested}\n" in capsys.readouterr().out


def test_a_diverged_run_ends_with_the_command_that_replays_its_dump(monkeypatch, tmp_path, capsys):
    (tmp_path / "w" / "dumps" / "step_000012").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert failing(monkeypatch, DivergedError("no", step=12), "seed=3") == 3
    assert capsys.readouterr().out == f"Next:\n  gspax replay {shlex.quote(STUB)} w/dumps/step_000012 seed=3\n"
    assert failing(monkeypatch, DivergedError("no", step=11)) == 3
    assert capsys.readouterr().out == ""


def test_the_suggested_command_repeats_no_override(called, capsys):
    overrides = ["evaluation.problems=3000", "schedule.steps=4", "schedule.steps = 6"]
    assert main.main(["train", STUB, "--workdir", "w", *overrides]) == 0
    _, _, train, evaluation, *_ = capsys.readouterr().out.splitlines()
    assert shlex.split(train)[3:] == ["--workdir", "w", overrides[0], "schedule.steps=12"]
    assert shlex.split(evaluation)[3:] == ["--workdir", "w", *overrides[1:], "evaluation.problems=6000"]


def test_each_subcommand_calls_its_function(called, tmp_path, capsys):
    assert main.main(["sft", "--workdir", "new", STUB]) == 0
    assert main.main(["eval", STUB, "--workdir", str(tmp_path), "--step", "12"]) == 0
    assert main.main(["eval", STUB, "--workdir", str(tmp_path)]) == 0
    assert main.main(["bench", STUB, "seed=2"]) == 0
    assert main.main(["report", str(tmp_path)]) == 0
    assert [(call[0], *call[2:]) for call in called] == [
        ("training.warm_start", Path("new"), STUB),
        ("evaluation.checkpoint", tmp_path, 12, None),
        ("evaluation.checkpoint", tmp_path, None, None),
        ("bench",),
        ("report.run_page",),
    ]
    assert called[-1] == ("report.run_page", tmp_path)
    assert capsys.readouterr().out == "report.html\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "there is no subcommand 'trian'; did you mean 'train'?"),
        (["xyz"], "there is no subcommand 'xyz'; wanted one of train, sft, eval, bench, doctor, compile"),
        (["train"], "the following arguments are required: FILE"),
        (["train", STUB], "wanted --workdir DIR"),
        (["train", STUB, "--workdir", "w", "--devices", "2"], "--devices is for --dry-run"),
        (["train", STUB, "--workdir", "w", "--all-settings"], "--all-settings is for --dry-run"),
        (["train", STUB, "--dry-run", "--devices", "0"], "wanted an integer of at least 1, got '0'"),
        (["train", STUB, "--dryrun", "--workdir", "w"], "unrecognized arguments: --dryrun"),
        (["train", "none.py", "--dry-run"], "none.py: there is no such file"),
        (["train", STUB, "--dry-run", "sede=1"], "unknown key 'sede'; did you mean 'seed'?"),
        (["train", STUB, "--dry-run", "sampling.group=1"], "sampling.group: wanted at least 2, got 1"),
        (["train", STUB, "--dry-run", "--devices", "3"], "sampling.prompts: wanted rows in multiples of the 3 devices"),
        (["eval", STUB], "the following arguments are required: --workdir"),
        (["eval", STUB, "--workdir", "no/such"], "no/such: wanted the directory of a run, there is none"),
        (["eval", STUB, "--workdir", ".", "--step", "-1"], "at least 0, got '-1'"),
        (
            ["sft", STUB, "--dry-run", "warm_start=null"],
            "warm_start: wanted a WarmStart for `gspax sft`, got None",
        ),
        (["report", "no/such"], "no/such: wanted the directory of a run, there is none"),
    ],
)
def test_invalid_input_prints_one_error_and_exits_2(arguments, said, called, capsys):
    assert main.main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("gspax: ")
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert called == []


def test_several_errors_are_printed_on_separate_lines(capsys):
    assert main.main(["train", STUB, "--dry-run", "seed=x", "sede=1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "gspax: seed: wanted an integer, got 'x'",
        "gspax: unknown key 'sede'; did you mean 'seed'?",
    ]


def test_unknown_names_types_ranges_and_combinations_are_reported_in_one_round(capsys):
    wrong = [
        "sampling.grup=1",
        "sampling.prompts=abc",
        "optimizer.learning_rate=-1",
        "schedule.epochs=0",
        "model.head_dim=15",
    ]
    assert main.main(["train", STUB, "--dry-run", *wrong, "mesh.data=0", "optimizer.frozen="]) == 2
    assert [line.removeprefix("gspax: ")[:50] for line in capsys.readouterr().err.splitlines()] == [
        "unknown key 'sampling.grup'; did you mean 'samplin",
        "sampling.prompts: wanted an integer, got 'abc'",
        "optimizer.frozen: wanted values with commas betwee",
        "optimizer.learning_rate: wanted above 0 and at mos",
        "schedule.epochs: wanted at least 1, got 0",
        "mesh.data: wanted at least 1, or -1 for the device",
        "model.head_dim: wanted an even number (RoPE rotate",
    ]


def write_description(folder, *overrides):
    """A run directory of the stub with these overrides."""
    from gspax.experiment import describe, load, override

    (folder / "experiment.json").write_text(json.dumps(describe(override(load(STUB), overrides))))


def test_an_evaluation_has_the_settings_of_its_run(called, tmp_path, capsys):
    write_description(tmp_path, "loss.clip_low=0.1", "sampling.prompts=8", "evaluation.problems=64", "seed=3")
    assert main.main(["eval", STUB, "--workdir", str(tmp_path), "evaluation.problems=16"]) == 0
    ((_, experiment, *_),) = called
    assert experiment.loss.keywords == {"clip_low": 0.1}
    assert (experiment.sampling.prompts, experiment.evaluation.problems, experiment.seed) == (8, 16, 3)
    assert "loss.clip_low: 2e-4 -> 0.1" in capsys.readouterr().err


def test_an_evaluation_has_the_functions_of_its_run(called, tmp_path):
    changes = ["loss=gspax.losses.grpo", "loss.clip_high=0.3", "warm_start=null", "reference=gspax.config.Reference"]
    write_description(tmp_path, *changes, "reference.loss=gspax.losses.kl.token_kl", "optimizer.frozen=router")
    assert main.main(["eval", STUB, "--workdir", str(tmp_path)]) == 0
    ((_, experiment, *_),) = called
    assert experiment.loss.func is losses.grpo and experiment.loss.keywords["clip_high"] == 0.3
    assert experiment.reference.loss is losses.kl.token_kl and experiment.warm_start is None
    assert experiment.optimizer.frozen == ("router",)


def test_the_traceback_is_printed_on_request(monkeypatch, capsys):
    monkeypatch.setenv("GSPAX_TRACEBACK", "1")
    assert main.main(["train", "none.py", "--dry-run"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_warning_does_not_stop_the_run(called, capsys):
    assert main.main(["train", STUB, "--workdir", "w", "sampling.top_p=0.5"]) == 0
    assert "gspax: warning: sampling.top_p: " in capsys.readouterr().err
    assert len(called) == 1


def test_a_process_that_gloo_waited_for_in_vain_is_one_sentence(monkeypatch, capsys):
    """What jax 0.10 raises when another process is too slow to connect in 30 seconds."""
    raised = type("JaxRuntimeError", (RuntimeError,), {})
    problem = raised("INTERNAL: Gloo context initialization failed: Connect timeout\n[127.0.0.1]:1")
    assert failing(monkeypatch, problem) == 1
    assert capsys.readouterr().err == (
        "gspax: processes: another process did not take part in an operation of all: "
        "INTERNAL: Gloo context initialization failed: Connect timeout\n"
    )
    assert failing(monkeypatch, raised("INTERNAL: out of memory")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_failure_while_running_exits_1_with_its_traceback(monkeypatch, capsys):
    assert failing(monkeypatch, ZeroDivisionError("oh")) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (UserError("no"), 2),
        (FailureError("no"), 1),
        (DivergedError("no"), 3),
        (OSError(errno.ENOSPC, "no", "file"), 1),
        (OSError(errno.EROFS, "no", "file"), 2),
        (OSError(errno.ENAMETOOLONG, "no", "x" * 400), 2),
    ],
    ids=repr,
)
def test_the_exit_code_tells_whether_a_restart_may_help(monkeypatch, capsys, problem, code):
    assert failing(monkeypatch, problem) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line in ("gspax: no", "gspax: file: no", f"gspax: {'x' * 300}…: no")


def test_a_full_disk_is_told_with_the_file(monkeypatch, tmp_path, capsys):
    def fill(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space") as caught:
        patched.setattr(os, "fsync", fill)
        write_atomically(tmp_path / "a", "b")
    assert failing(monkeypatch, caught.value) == 1
    assert capsys.readouterr().err == f"gspax: {tmp_path / 'a'}: No space left on device\n"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_exits_with_the_signals_code(monkeypatch, capsys, signum, code):
    from gspax.errors import Interrupted

    assert failing(monkeypatch, Interrupted(signum)) == code
    assert capsys.readouterr().err == (f"gspax: {signum.name}: completed steps are saved, the same command continues\n")


def test_ctrl_c_outside_a_run_exits_130(monkeypatch):
    assert failing(monkeypatch, KeyboardInterrupt()) == 130


def test_a_missing_package_is_one_error(monkeypatch, capsys):
    assert failing(monkeypatch, ModuleNotFoundError("No module named 'flax'", name="flax.nnx")) == 2
    assert capsys.readouterr().err == f"gspax: this needs the package 'flax': {how_to_install('train')}\n"
    assert failing(monkeypatch, ModuleNotFoundError("No module named 'gspax.nope'", name="gspax.nope")) == 1


@pytest.mark.parametrize("name", main.SUBCOMMANDS)
def test_every_subcommand_has_help_with_an_example(name, capsys):
    assert main.main([name, "--help"]) == 0
    assert f"example:\n  gspax {name} " in capsys.readouterr().out


def test_help_and_version(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gspax {gspax.__version__}\n"
    for arguments in ([], ["--help"]):
        assert main.main(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in main.SUBCOMMANDS)


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)


def test_help_imports_no_jax():
    done = run(
        "import sys; from gspax.commands import main\n"
        "for name in main.SUBCOMMANDS: assert main.main([name, '--help']) == 0 and 'jax' not in sys.modules, name"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("overrides", "initialized"),
    [(["loss=gspax.losses.gspo", "advantage=gspax.advantages.standardize"], set()), ([], {"cpu"})],
    ids=["a loss of gspax", "an own loss"],
)
def test_the_dry_run_touches_no_device_and_writes_nothing(overrides, initialized, tmp_path):
    """It is quick, initializes no backend, and imports neither the model's nor the optimizer's packages.

    A loss and an advantage of one's own are computed once, on the CPU.
    """
    code = (
        "import sys; from gspax.commands import main; code = main.main(sys.argv[1:]); "
        "import jax._src.xla_bridge as bridge; "
        f"assert set(bridge._backends) == {initialized}; "
        "assert not {'flax', 'optax', 'orbax'} & set(sys.modules); "
        "sys.exit(code)"
    )
    workdir = tmp_path / "run"
    start = time.monotonic()
    done = run(
        code, "train", STUB, "model=gspax.model.presets.qwen3_235b_a22b", "--dry-run", "--devices", "16",
        "--workdir", str(workdir), *overrides,
    )  # fmt: skip
    wall = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert "235.09 B parameters, 22.19 B active" in done.stdout
    assert "16 devices" in done.stdout
    assert not workdir.exists()
    assert wall < 15  # about 1.5 seconds on an idle machine


def test_an_override_may_name_a_module_next_to_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("from stub_experiment import reward as other\n")
    (tmp_path / "file.py").write_text(Path(STUB).read_text())
    assert main.main(["train", str(tmp_path / "file.py"), "reward=beside.other", "--dry-run"]) == 0
    assert "stub_experiment.reward" in capsys.readouterr().out


def test_a_closed_pipe_is_not_a_failure():
    command = f"{sys.executable} -m gspax train {STUB} --dry-run | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_what_others_wrote_reaches_no_terminal_as_it_is(capsys):
    """A message may repeat a key of a file, an answer, or an exception; the funnels of both outputs escape it."""
    hostile = "key \x1b]0;title\x07 \x9b31m \u202e\ttab"
    shown = "key \\x1b]0;title\\x07 \\x9b31m \\u202e\ttab"
    errors.warn(hostile)
    errors.tell(hostile)
    assert capsys.readouterr().err == f"gspax: warning: {shown}\ngspax: {shown}\n"
    errors.display(f"{hostile}\n{hostile}")
    assert capsys.readouterr().out == f"{shown}\n{shown}\n"
    progress.show_table([("model", hostile)])
    (row,) = capsys.readouterr().out.splitlines()
    assert row.startswith("model  key \\x1b]0;title") and row.isprintable()
    assert errors.shorten(hostile) == shown.replace("\t", " ")
    assert errors.describe_error(KeyError("\x1b[2J")).isprintable() and errors.brief(OSError("\x1b[2J")).isprintable()


LEFT = {
    "a thread": "threading.Thread(target=time.sleep, args=(50,)).start()",
    "an exit handler": "atexit.register(time.sleep, 50)",
    "an exit handler in C": "atexit.register(ctypes.CDLL(None).sleep, 50)",  # as that of jax waits for a computation
}


@pytest.mark.parametrize(("left", "code"), [("a thread", 0), ("an exit handler", 1), ("an exit handler in C", 143)])
def test_a_process_that_is_done_ends_whatever_is_left_in_it(left, code):
    """As a tracker's library or jax, which waits for the update in flight, leaves it; its last line is printed."""
    script = (
        "import atexit, ctypes, threading, time\n"
        "from gspax.commands import main, processes\n"
        "processes.PATIENCE = processes.SIGNALLED\n"
        + f"main.main = lambda: [{LEFT[left]}, print('done'), {code}][-1]\n"
        "main.program()"
    )
    began = time.monotonic()
    done = run(script)
    assert done.returncode == code and done.stdout == "done\n" and not done.stderr, done.stderr
    assert time.monotonic() - began < 45, "it waited for what was left"
