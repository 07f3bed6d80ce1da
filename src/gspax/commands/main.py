"""The program `gspax`: dispatches to its subcommands and turns exceptions into sentences and exit codes.

Exit codes: 0 done; 1 a failure while running, where the same command may succeed; 2 invalid input, one line for each
error on stderr; 3 the run diverged; 128 + the signal's number for a run that a signal ended after a save (129 for a
closed terminal or pipe, 130 for Ctrl-C, 143 for SIGTERM). GSPAX_TRACEBACK=1 adds the traceback to
messages that come without one. GSPAX_COMPILATION_CACHE is the folder of compiled programs, 0 for none.

Each subcommand is a module of this package or of `gspax.tools`, with `make_parser()` and `execute(options)`, which
gives the exit code. It imports what needs jax in `execute`, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import gspax
from gspax.commands import environment, processes
from gspax.commands.arguments import Parser
from gspax.errors import FULL_DISK, Interrupted, UserError, did_you_mean, how_to_install, shorten, tell

SUBCOMMANDS = {  # name -> its package, and what the overview shows: its arguments, what it does
    "train": ("commands", "FILE --workdir DIR", "run an experiment; continue it if DIR holds a checkpoint of it"),
    "sft": ("commands", "FILE --workdir DIR", "run only its supervised warm start"),
    "eval": ("commands", "FILE --workdir DIR", "measure a checkpoint on held-out problems"),
    "bench": ("tools", "FILE", "measure speed on this machine"),
    "doctor": ("tools", "", "check that gspax computes correctly and fast on these devices"),
    "compile": ("tools", "FILE --topology T", "compile without TPU hardware: does it fit, how fast could it be"),
    "chat": ("tools", "SOURCE", "talk to the policy of a run, or to a published model"),
    "check": ("commands", "DIR", "verify the checkpoints of a run, or a converted one"),
    "launch": ("tools", "SUBCOMMAND ...", "run a subcommand in several processes here, and again after a failure"),
    "explain": ("tools", "FILE", "print what an experiment minimizes, as an equation, and its batches and rates"),
    "report": ("commands", "DIR", "write report.html of a run"),
    "diagnose": ("tools", "DIR", "say why a run's reward is flat"),
    "samples": ("tools", "DIR", "show completions of a run as a table, or one problem over its steps"),
    "compare": ("tools", "DIR…", "compare runs over seeds, at equal tokens"),
    "replay": (
        "tools",
        "FILE DUMP",
        "recompute the update that a diverged run dumped, and name what is not finite",
    ),
    "replay-rollouts": ("tools", "RUN --steps A:B FILE", "train on the rollouts that a run recorded, without sampling"),
    "convert": ("commands", "--from HF --to DIR", "convert a Hugging Face checkpoint to Orbax, to start from"),
    "serve": ("tools", "SOURCE", "serve a policy as OpenAI's server would, for lm-eval and other clients"),
    "serve-command": ("commands", "FILE", "print the command that starts a vLLM server for an experiment"),
    "export": ("commands", "--from DIR --to HF", "write a run's parameters as a Hugging Face checkpoint"),
    "parity": ("tools", "HF", "compare a Hugging Face checkpoint with transformers, layer by layer"),
}
# subcommands that use this machine's devices
COMPUTING = ("train", "sft", "eval", "bench", "doctor", "chat", "serve", "replay-rollouts")
IMPOSSIBLE_PATH = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG}
TRAIN_EXTRA = (  # top-level packages of the extra `train`
    "flax",
    "huggingface_hub",
    "jinja2",
    "latex2mathml",
    "matplotlib",
    "optax",
    "orbax",
    "rich",
    "tensorboardX",
    "transformers",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the process's by default) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    processes.follow_launcher()
    code = _run_and_report(arguments)
    processes.leave(code)
    return code


def program() -> NoReturn:
    """Run the program and end the process, as the installed `gspax` and `python -m gspax` do."""
    processes.end(main())


def _run_and_report(arguments: list[str]) -> int:
    """Run the subcommand, report any exception on stderr, and return the exit code."""
    try:
        return _run(arguments)
    except SystemExit as done:  # argparse, after --help and --version
        return int(done.code or 0)
    except UserError as problem:
        return _fail(problem, str(problem).splitlines(), problem.exit_code)
    except Interrupted as stop:
        return _fail(stop, [str(stop)], 128 + stop.signum)
    except KeyboardInterrupt as stop:
        return _fail(stop, ["interrupted"], 128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output has exited, as in `gspax ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in TRAIN_EXTRA:
            return _fail(missing, [f"this needs the package {package!r}: {how_to_install('train')}"], 2)
        traceback.print_exc()
        return 1
    except OSError as problem:
        if problem.errno not in FULL_DISK | IMPOSSIBLE_PATH:
            traceback.print_exc()
            return 1
        where = "" if problem.filename is None else f"{shorten(str(problem.filename))}: "
        return _fail(problem, [f"{where}{problem.strerror}"], 1 if problem.errno in FULL_DISK else 2)
    except Exception as problem:
        if _is_lost_connection(problem):
            reason = " ".join(str(problem).split("\n", 1)[0].split())[:300]
            return _fail(problem, [f"processes: another process did not take part in an operation of all: {reason}"], 1)
        traceback.print_exc()
        return 1


def _is_lost_connection(problem: Exception) -> bool:
    """Return whether gloo, which exchanges arrays between CPU processes, waited in vain: 30 s when they connect."""
    return type(problem).__name__ in ("JaxRuntimeError", "XlaRuntimeError") and "Gloo" in str(problem)


def _fail(problem: BaseException, lines: Sequence[str], code: int) -> int:
    if os.environ.get("GSPAX_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(problem)
    for line in lines:
        tell(line)
    return code


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name not in SUBCOMMANDS:
        _overview().parse_args([name])
        hint = did_you_mean(name, SUBCOMMANDS) or f"wanted one of {', '.join(SUBCOMMANDS)}"
        raise UserError(f"there is no subcommand {name!r}; {hint}")
    subcommand = importlib.import_module(f"gspax.{SUBCOMMANDS[name][0]}.{name.replace('-', '_')}")
    options = subcommand.make_parser().parse_intermixed_args(arguments[1:])
    environment.skip_absent_tpu()
    if getattr(options, "dry_run", False):
        environment.use_cpu()
    if name in COMPUTING:
        environment.prepare()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # without PyTorch its import prints a warning
    try:
        return subcommand.execute(options)
    except SystemExit as left:  # an exit code of 0 would say that the command is done
        raise UserError(f"{name}: wanted code that returns or raises an error, it called exit({left.code!r})") from left


def _overview() -> Parser:
    """Return the parser of `gspax --help` and `gspax --version`."""
    lines = [f"  {f'{name} {usage} ':27}{what}" for name, (_, usage, what) in SUBCOMMANDS.items()]
    parser = Parser(
        prog="gspax",
        description="GSPO and GRPO post-training of language models, dense or mixtures of experts, in JAX.",
        epilog="\n".join(
            [
                "subcommands:",
                *lines,
                "",
                "`gspax SUBCOMMAND --help` explains one. For a first look, without any computation:",
                "  gspax train experiments/sort_gspo.py --dry-run",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="gspax [-h] [--version] SUBCOMMAND ...",
    )
    parser.add_argument("subcommand", nargs="?", metavar="SUBCOMMAND", help=f"one of {', '.join(SUBCOMMANDS)}")
    parser.add_argument("--version", action="version", version=f"gspax {gspax.__version__}")
    return parser
