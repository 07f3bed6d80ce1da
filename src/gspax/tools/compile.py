"""Implements `gspax compile`: ahead-of-time compilation for a TPU topology; see `tools.aot.compile_report`."""

from __future__ import annotations

import argparse

from gspax.commands.arguments import Parser, add_experiment, load_experiment, subcommand_parser


def make_parser() -> Parser:
    parser = subcommand_parser(
        "compile",
        "Compile an experiment without TPU hardware: memory, traffic, roofline; exit code 1 if it does not fit.",
        "gspax compile experiments/qwen3_30b_a3b_v5p_64.py --topology v5p:4x4x4 sampling.max_tokens=2048",
    )
    add_experiment(parser)
    in_chips = "such as v5e:8x8 or v5p:4x4x4, in chips; 2xv5p:4x4x4 are two slices"
    parser.add_argument("--topology", metavar="CHIP:AxB", required=True, help=in_chips)
    parser.add_argument(
        "--all-layers",
        action="store_true",
        help="compile the sampler with all layers, instead of extrapolating from a few",
    )
    return parser


def execute(options: argparse.Namespace) -> int:
    """Print the report; return 1 if the experiment does not fit the topology."""
    from gspax.tools.aot.chips import parse_topology
    from gspax.tools.aot.compile_report import run

    topology = parse_topology(options.topology)
    return 0 if run(load_experiment(options), topology, all_layers=options.all_layers) else 1
