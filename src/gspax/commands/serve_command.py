"""`gspax serve-command`: the command that starts a server for an experiment with `engine`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gspax.commands.arguments import Parser, add_experiment, load_experiment, require_possible, subcommand_parser
from gspax.errors import UserError, display
from gspax.run.folders import write_atomically


def make_parser() -> Parser:
    parser = subcommand_parser(
        "serve-command",
        "Print the command that starts a vLLM or SGLang server for an experiment, for the first of engine.addresses, "
        "and write the model's config.json, which the server reads, into engine.folder. Run the printed command in the "
        "environment of vLLM or SGLang.",
        "gspax serve-command experiments/sort_gspo.py engine=gspax.config.Engine",
    )
    add_experiment(parser)
    parser.add_argument("--cpu", action="store_true", help="for a server without a GPU, such as vLLM's CPU build")
    return parser


def execute(options: argparse.Namespace) -> int:
    experiment = load_experiment(options)
    if (engine := experiment.engine) is None:
        raise UserError("engine: wanted an Engine for `gspax serve-command` (engine=gspax.config.Engine), got None")
    from gspax.hf import config_json
    from gspax.model.passes import Passes
    from gspax.rollout.servers import sglang, vllm
    from gspax.rollout.servers.sampler import context_length

    model, folder = config_json.text_only(experiment.model), Path(engine.folder).absolute() / "model"
    require_possible(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {**config_json.to_json(model), "torch_dtype": model.dtype}
    write_atomically(folder / "config.json", json.dumps(content, indent=2) + "\n")
    length = context_length(experiment.sampling, experiment.evaluation)
    experts = Passes(experiment).samples_experts
    program = sglang if engine.server == "sglang" else vllm
    display(program.command(folder, model, length, engine.addresses[0], experts=experts, cpu=options.cpu))
    return 0
