"""Implements `gspax explain`: what an experiment minimizes, in words, or what another library's configuration does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gspax.commands.arguments import Parser, add_experiment, at_least, load_experiment, require_file, subcommand_parser
from gspax.errors import UserError, display

if TYPE_CHECKING:
    from gspax.config import Experiment
    from gspax.tools.peers import Line, Parts

LIBRARIES = ("verl", "trl", "tunix")


def make_parser() -> Parser:
    parser = subcommand_parser(
        "explain",
        "Print the equation of an experiment's objective with every factor, denominator, clip, and term as it will be "
        "computed; the batch and the learning rate of its updates; settings without effect; and what differs from "
        "GSPO's paper. With --from, FILE is another library's configuration (YAML, a shell script, or a Python file): "
        "it is translated to an experiment file, and what could not be carried over is listed.",
        "gspax explain experiments/sort_gspo.py loss.clip_high=1e-3\n  gspax explain --from verl run.sh --to mine.py",
    )
    add_experiment(parser)
    parser.add_argument("--from", dest="library", choices=LIBRARIES, help="the library whose configuration FILE is")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="with --from: the experiment file to write (default: from_LIBRARY.py)"
    )
    parser.add_argument(
        "--devices", type=at_least(1), metavar="N", help="with --from: devices of the configuration, where it has none"
    )
    return parser


def execute(options: argparse.Namespace) -> int:
    from gspax.commands import environment
    from gspax.experiment.explanation import explain
    from gspax.model.passes import Passes

    environment.use_cpu()
    if options.library is None:
        for name in ("to", "devices"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name} is for --from, which translates another library's configuration")
        display(explain(Passes(load_experiment(options))))
        return 0
    return _translate(options)


def _translate(options: argparse.Namespace) -> int:
    """Print what a translated configuration minimizes, and what was lost, and write its experiment file."""
    from gspax.experiment.explanation import explain
    from gspax.experiment.overrides import override
    from gspax.model.passes import Passes
    from gspax.tools.peer_files import read_settings
    from gspax.tools.peers import LIBRARIES as RULES
    from gspax.tools.peers import Given

    target = options.to or Path(f"from_{options.library}.py")
    require_file(target)
    if target.exists():
        raise UserError(f"{target}: wanted a new file, this one exists; --to names another")
    library, source = RULES[options.library], Path(options.file)
    given = Given(read_settings(source), library.why)
    lines, parts = list(library.lines(given, options.devices or 0)), library.parts(given)
    experiment = override(_stand_in(), [*(line.override for line in lines), *options.overrides])
    display(explain(Passes(experiment)))
    left = given.left()
    title = "Not carried over" if left else "Every setting was carried over"
    display("\n".join(["", title, *(f"  {key}: {why}" for key, why in left)]))
    text = write_file(options.library, source.name, lines, parts, left)
    with target.open("x", encoding="utf-8") as file:
        file.write(text)
    display(f"\n{target}: check its data, tokenizer, and reward; then `gspax train {target} --dry-run`")
    return 0


def _stand_in() -> Experiment:
    """Return a small experiment that stands for the translated one: its model and its data do not matter here."""
    from gspax import advantages, losses
    from gspax.config import Experiment
    from gspax.data.tasks import sort
    from gspax.model import presets

    return Experiment(
        name="translated",
        model=presets.tiny_moe,
        data=sort.Problems(),
        tokenizer=sort.tokenizer,
        reward=sort.reward,
        advantage=advantages.standardize,
        loss=losses.gspo,
    )


def write_file(library: str, name: str, lines: list[Line], parts: Parts, left: list[tuple[str, str]]) -> str:
    """Return the text of the experiment file of translated settings."""
    lost = [f"- {key}: {why}" for key, why in left] or ["- nothing"]
    settings = [f'        "{line.override}",  # {line.source}' for line in lines]
    return "\n".join(
        [
            f'r"""The settings of {name} of {library}, translated by `gspax explain`. Never trained.',
            "",
            "Not carried over:",
            *(line.replace('"""', "'''").rstrip("\\") for line in lost),
            '"""',
            "",
            "from gspax import advantages, data, losses",
            "from gspax.config import Experiment",
            "from gspax.experiment import override",
            "from gspax.hf import hf",
            "from gspax.rewards import math",
            "",
            f"CHECKPOINT = {parts.model or 'checkpoint'!r}  # a folder, or a name on the Hub",
            "",
            "experiment = override(",
            "    Experiment(",
            f'        name="from_{library}",',
            '        model=hf(CHECKPOINT, dtype="bfloat16"),',
            f"        data={_data(parts)},  # check the columns",
            "        tokenizer=data.hf_chat(CHECKPOINT),",
            "        reward=math.reward,  # check: the last number, formula, or box against the answer",
            "        advantage=advantages.standardize,",
            "        loss=losses.gspo,",
            "    ),",
            "    [",
            *settings,
            "    ],",
            ")",
            "",
        ]
    )


def _data(parts: Parts) -> str:
    """Return the data source of an experiment file, as Python."""
    if parts.train and parts.train[0].endswith(".parquet"):
        files, heldout = ", ".join(map(repr, parts.train)), tuple(parts.heldout)
        return f'data.parquet({files}, heldout={heldout!r}, prompt="prompt", answer="reward_model.ground_truth")'
    name = parts.train[0] if parts.train else "name/of-the-data-set"
    return f'data.huggingface({name!r}, split="train", heldout="test", prompt="prompt", answer="answer")'
