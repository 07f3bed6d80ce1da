"""Implements `gspax compare`: compares runs side by side, over seeds and at equal tokens."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspax.commands.arguments import Parser, require_directory, require_possible, subcommand_parser
from gspax.errors import UserError, did_you_mean, display, warn
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path

METRICS = (  # compared unless --metrics names others; those that no run has are left out
    "eval/reward",
    "eval/greedy_reward",
    "reward/mean",
    "policy/entropy",
    "policy/kl",
    "policy/clip_fraction_tokens",
    "policy/clip_fraction_sequences",
    "optim/grad_norm",
    "response/length_mean",
    "routing/changed",
    "mismatch/abs_diff",
    "time/step",
)


def make_parser() -> Parser:
    parser = subcommand_parser(
        "compare",
        "Compare runs, or folders that hold a run for each seed: curves, means and differences at equal tokens.",
        "gspax compare runs/gspo runs/grpo --out runs/compare",
    )
    parser.add_argument(
        "variants",
        nargs="+",
        metavar="[NAME=]DIR",
        help="a run, or a folder of runs of one experiment; the first is the baseline",
    )
    parser.add_argument(
        "--out", type=to_path, default=Path("compare"), metavar="DIR", help="where to write (default: compare)"
    )
    parser.add_argument("--metrics", metavar="A,B", help="the metrics to compare (default: the usual ones)")
    return parser


def execute(options: argparse.Namespace) -> int:
    require_possible(options.out)
    folders = dict(_split(text) for text in options.variants)
    if len(folders) < len(options.variants):
        raise UserError("wanted a name of its own for every variant, as in `gspax compare a=DIR b=DIR`")
    for folder in folders.values():
        require_directory(folder)
    from gspax.tools import comparison

    variants = [comparison.read_variant(name, folder) for name, folder in folders.items()]
    for variant in variants:
        if mixed := comparison.find_differences(variant.runs):
            warn(f"the runs of {variant.name} differ in more than their seeds: {', '.join(sorted(mixed))}")
    recorded = {metric for variant in variants for run in variant.runs for metric in run.series}
    wanted = METRICS if options.metrics is None else tuple(options.metrics.split(","))
    unknown = [metric for metric in wanted if metric not in recorded]
    if options.metrics is not None and unknown:
        hint = did_you_mean(unknown[0], recorded)
        raise UserError(f"--metrics: no run has {unknown[0]!r}{hint and f'; {hint}'}")
    metrics = [metric for metric in wanted if metric in recorded]
    page = comparison.write(variants, metrics, options.out)
    for metric in metrics[:3]:
        display(comparison.summarize(variants, metric))
    display(page)
    return 0


def _split(text: str) -> tuple[str, Path]:
    """Split `NAME=DIR` into name and path; the name of a plain DIR is its last part."""
    name, separator, folder = text.partition("=")
    if separator and name and "/" not in name:
        return name, to_path(folder)
    path = to_path(text)
    return open_storage(path).resolve(path).name, path
