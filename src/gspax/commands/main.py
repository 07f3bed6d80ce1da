"""The program `gspax`: train, sft, eval, bench, compile, report, convert, export, parity.

Exit codes: 0 done; 1 a failure while running; 2 a mistake in the input, told in one line each on stderr; 128 + the
signal's number for a run that a signal ended (130 for ctrl-c, 143 for SIGTERM). GSPAX_TRACEBACK=1 adds the traceback to
the messages that come without one.

jax and what stands on it are imported by the verbs, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gspax
from gspax.commands import launch
from gspax.commands.arguments import Parser, at_least, size, verb_parser
from gspax.errors import AbsentError, UserError

if TYPE_CHECKING:
    from gspax.config import Experiment

OWN_EXTRA = (
    "flax",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "optax",
    "orbax",
    "rich",
    "tensorboardX",
    "transformers",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (those of the process by default) and give its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = _run_and_tell(arguments)
    launch.leave(code)
    return code


def _run_and_tell(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except SystemExit as done:  # argparse, after --help and --version
        return int(done.code or 0)
    except UserError as problem:
        return _fail(problem, str(problem).splitlines(), 1 if isinstance(problem, AbsentError) else 2)
    except _interrupted() as stop:
        return _fail(stop, [str(stop)], 128 + getattr(stop, "signum", signal.SIGINT))
    except KeyboardInterrupt as stop:
        return _fail(stop, ["interrupted"], 128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output has gone, as in `gspax ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in OWN_EXTRA:
            return _fail(missing, [f"this needs the package {package!r}: pip install 'gspax[train]'"], 2)
        traceback.print_exc()
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def _interrupted() -> Any:
    """The exception of a run that a signal ended; none can be raised before its module, with jax, is imported."""
    return getattr(sys.modules.get("gspax.run.interrupt"), "Interrupted", ())


def _fail(problem: BaseException, lines: Sequence[str], code: int) -> int:
    if os.environ.get("GSPAX_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(problem)
    for line in lines:
        print(f"gspax: {line}", file=sys.stderr)
    return code


def _run(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if verb not in VERBS:
        _overview().parse_args([verb])
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it is one of {', '.join(VERBS)}"
        raise UserError(f"there is no verb {verb!r}; {hint}")
    parse, act = VERBS[verb]
    act(parse().parse_intermixed_args(arguments[1:]))
    return 0


def _overview() -> Parser:
    parser = Parser(
        prog="gspax",
        description="GSPO and GRPO post-training of mixture-of-experts language models in JAX.",
        epilog="verbs:\n"
        "  train FILE --workdir DIR   run an experiment; continue it if DIR holds a checkpoint of it\n"
        "  sft FILE --workdir DIR     only its supervised warm start\n"
        "  eval FILE --workdir DIR    measure a checkpoint on held-out problems\n"
        "  bench FILE                 measure speed on this machine\n"
        "  compile FILE --topology T  compile for a TPU that is not there: does it fit, how fast could it be\n"
        "  report DIR                 write report.html of a run\n"
        "  convert --from HF --to DIR a Hugging Face checkpoint as an Orbax one, to start from\n"
        "  export --from DIR --to HF  a run's parameters as a Hugging Face checkpoint\n"
        "  parity HF                  a Hugging Face checkpoint beside transformers, layer by layer\n\n"
        "`gspax VERB --help` explains one. For a first look, without any computation:\n"
        "  gspax train experiments/sort_gspo.py --dry-run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="gspax [-h] [--version] VERB ...",
    )
    parser.add_argument("verb", nargs="?", metavar="VERB", help=f"one of {', '.join(VERBS)}")
    parser.add_argument("--version", action="version", version=f"gspax {gspax.__version__}")
    parser.set_defaults(verb="--help")
    return parser


def _add_experiment(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="a Python file that defines `experiment = Experiment(...)`")
    parser.add_argument(
        "overrides", nargs="*", metavar="a.b=c", help="set a field of the experiment; later ones win (null for None)"
    )


def _add_dry_run(parser: Parser) -> None:
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="where the run writes (not needed for a dry run)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print settings and costs, and stop")
    parser.add_argument("--devices", type=at_least(1), metavar="N", help="of the dry run's machine (default: 1)")


def _train_parser() -> Parser:
    parser = verb_parser(
        "train",
        "Run an experiment: warm start, sampling, updates, evaluation. If DIR holds a checkpoint of it, continue.",
        "gspax train experiments/sort_gspo.py --workdir runs/sort schedule.steps=200 optimizer.learning_rate=1e-4",
    )
    _add_experiment(parser)
    _add_dry_run(parser)
    launch.add_options(parser)
    return parser


def _train(options: argparse.Namespace) -> None:
    experiment = _experiment(options)
    if not _dry_run(options, experiment):
        speaks = launch.join("train", options, experiment)
        _verb("loop").train(experiment, options.workdir)
        if speaks:
            print(_verb("run.report").summary(options.workdir))
            print(_next_commands(options, experiment))


def _next_commands(options: argparse.Namespace, experiment: Experiment) -> str:
    """Three things to do after a run: go on, measure more closely, compare with another loss."""
    from gspax.experiment.description import unwrap

    steps, loss = experiment.schedule.steps, "gspo" if unwrap(experiment.loss).__name__ == "grpo" else "grpo"
    kept = [each for each in options.overrides if not each.startswith("schedule.steps=")]
    same = shlex.join([options.file, "--workdir", str(options.workdir), *kept])
    other = shlex.join([options.file, "--workdir", f"{options.workdir}_{loss}", *kept, f"loss=gspax.losses.{loss}"])
    return (
        "Next:\n"
        f"  gspax train {same} schedule.steps={2 * steps}\n"
        f"  gspax eval {same} evaluation.problems=2048\n"
        f"  gspax train {other}"
    )


def _sft_parser() -> Parser:
    parser = verb_parser(
        "sft",
        "Only the supervised warm start of an experiment.",
        "gspax sft experiments/sort_gspo.py --workdir runs/sort_sft warm_start.steps=100",
    )
    _add_experiment(parser)
    _add_dry_run(parser)
    launch.add_options(parser)
    return parser


def _sft(options: argparse.Namespace) -> None:
    experiment = _experiment(options)
    if experiment.warm_start is None:
        raise UserError("warm_start: wanted a WarmStart for `gspax sft`, the experiment has None")
    if not _dry_run(options, experiment):
        launch.join("sft", options, experiment)
        _verb("sft").run(experiment, options.workdir)


def _eval_parser() -> Parser:
    parser = verb_parser(
        "eval",
        "Measure a checkpoint on held-out problems, sampled at temperature 1 and decoded greedily.",
        "gspax eval experiments/sort_gspo.py --workdir runs/sort --step 100 evaluation.problems=1024",
    )
    _add_experiment(parser)
    parser.add_argument("--workdir", type=Path, metavar="DIR", required=True, help="of the run")
    parser.add_argument("--step", type=at_least(0), metavar="N", help="the checkpoint (default: the newest)")
    launch.add_options(parser)
    return parser


def _eval(options: argparse.Namespace) -> None:
    experiment = _experiment(options)
    _directory(options.workdir)
    launch.join("eval", options, experiment)
    _verb("evaluate").run(experiment, options.workdir, options.step)


def _bench_parser() -> Parser:
    parser = verb_parser(
        "bench",
        "Measure how fast an experiment samples and trains on this machine.",
        "gspax bench experiments/sort_gspo.py sampling.prompts=128",
    )
    _add_experiment(parser)
    launch.add_options(parser)
    return parser


def _bench(options: argparse.Namespace) -> None:
    experiment = _experiment(options)
    launch.join("bench", options, experiment)
    _verb("commands.bench").run(experiment)


def _compile_parser() -> Parser:
    parser = verb_parser(
        "compile",
        "Compile an experiment for a TPU that is not there: memory, traffic, roofline; exit code 1 if it does not fit.",
        "gspax compile experiments/qwen3_30b_a3b_v5p_64.py --topology v5p:4x4x4 sampling.max_tokens=2048",
    )
    _add_experiment(parser)
    in_chips = "such as v5e:8x8 or v5p:4x4x4, in chips; 2xv5p:4x4x4 are two slices"
    parser.add_argument("--topology", metavar="CHIP:AxB", required=True, help=in_chips)
    return parser


def _compile(options: argparse.Namespace) -> None:
    topology = _verb("aot.chips").topology(options.topology)
    if not _verb("commands.compile").run(_experiment(options), topology):
        raise SystemExit(1)


def _report_parser() -> Parser:
    parser = verb_parser("report", "Write report.html of a run: curves, samples, settings.", "gspax report runs/sort")
    parser.add_argument("workdir", type=Path, metavar="DIR", help="of the run")
    return parser


def _report(options: argparse.Namespace) -> None:
    _directory(options.workdir)
    print(_verb("run.report").write(options.workdir))


def _convert_parser() -> Parser:
    parser = verb_parser(
        "convert",
        "Write a Hugging Face checkpoint of a Qwen3 model as an Orbax one, which an experiment names as model=hf(DIR).",
        "gspax convert --from Qwen/Qwen3-30B-A3B --to checkpoints/qwen3_30b",
    )
    parser.add_argument("--from", dest="source", metavar="SOURCE", required=True, help="a folder, or a name on the Hub")
    _add_target(parser, "float32")
    return parser


def _convert(options: argparse.Namespace) -> None:
    _verb("commands.convert").run(options.source, options.target, options.dtype)


def _export_parser() -> Parser:
    parser = verb_parser(
        "export",
        "Write a run's newest checkpoint as a Hugging Face one, which transformers, vLLM and SGLang load.",
        "gspax export --from runs/sort --to exported/sort --dtype float32",
    )
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", required=True, help="a run, or what `gspax convert` wrote"
    )
    _add_target(parser, "bfloat16")
    parser.add_argument(
        "--shard-size", type=size, default="5GB", metavar="SIZE", help="the most bytes in a file (default: 5GB)"
    )
    parser.add_argument("--step", type=at_least(0), metavar="N", help="the checkpoint (default: the newest)")
    return parser


def _export(options: argparse.Namespace) -> None:
    _directory(options.source)
    alike = {"dtype": options.dtype, "shard_size": options.shard_size, "step": options.step}
    _verb("commands.export").run(options.source, options.target, **alike)


def _add_target(parser: Parser, dtype: str) -> None:
    parser.add_argument(
        "--to", dest="target", type=Path, metavar="DIR", required=True, help="a new folder; written whole or not at all"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=dtype, help=f"of the parameters (default: {dtype})"
    )


def _parity_parser() -> Parser:
    parser = verb_parser(
        "parity",
        "Compute a Hugging Face checkpoint in gspax and in transformers, in float32; exit code 1 if they differ.",
        "gspax parity Qwen/Qwen3-0.6B --prompt 'Sort: 3 1 2'",
    )
    parser.add_argument("checkpoint", metavar="HF", help="a folder, or a name on the Hub")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="for the checkpoint's tokenizer (default: 32 random tokens)")
    text.add_argument("--tokens", type=at_least(0), nargs="+", metavar="ID", help="instead of a text")
    return parser


def _parity(options: argparse.Namespace) -> None:
    agree = _verb("commands.parity").run(options.checkpoint, prompt=options.prompt, tokens=options.tokens)
    if not agree:
        raise SystemExit(1)


VERBS: dict[str, tuple[Callable[[], Parser], Callable[[argparse.Namespace], None]]] = {
    "train": (_train_parser, _train),
    "sft": (_sft_parser, _sft),
    "eval": (_eval_parser, _eval),
    "bench": (_bench_parser, _bench),
    "compile": (_compile_parser, _compile),
    "report": (_report_parser, _report),
    "convert": (_convert_parser, _convert),
    "export": (_export_parser, _export),
    "parity": (_parity_parser, _parity),
}


def _experiment(options: argparse.Namespace) -> Experiment:
    """The experiment of the command line, checked as far as it can be without asking for the devices."""
    from gspax import experiment as experiments

    dry_run = getattr(options, "dry_run", False)
    if getattr(options, "devices", None) is not None and not dry_run:
        raise UserError("--devices is for --dry-run; a run uses all devices that it finds")
    if not dry_run and "workdir" in options and options.workdir is None:
        raise UserError("wanted --workdir DIR, the directory that the run writes to (or --dry-run)")
    experiment = experiments.override(experiments.load(options.file), options.overrides)
    experiments.check(experiment, (options.devices or 1) if dry_run else None)
    for sentence in experiments.warnings(experiment):
        print(f"gspax: warning: {sentence}", file=sys.stderr)
    return experiment


def _dry_run(options: argparse.Namespace, experiment: Experiment) -> bool:
    """Print the plan if that is all that was asked for."""
    if options.dry_run:
        from gspax.experiment import plan

        keys = [assignment.partition("=")[0].strip() for assignment in options.overrides]
        print(plan.render(plan.plan(experiment, options.devices or 1, overridden=keys)))
    return options.dry_run


def _verb(module: str) -> Any:
    """A module that is imported only by the verb that needs it."""
    return importlib.import_module(f"gspax.{module}")


def _directory(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"{path}: wanted the directory of a run, there is none")


if __name__ == "__main__":
    sys.exit(main())
