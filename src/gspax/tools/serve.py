"""Implements `gspax serve`: a policy at an endpoint that speaks OpenAI's protocol, for harnesses and clients."""

from __future__ import annotations

import argparse
import queue

from gspax.commands.arguments import Parser, add_source, at_least, load_file, subcommand_parser
from gspax.errors import UserError, brief, tell


def make_parser() -> Parser:
    parser = subcommand_parser(
        "serve",
        "Serve the policy of a run, or a published model, at http://HOST:PORT/v1 as OpenAI's server would: chat "
        "completions and completions, for lm-eval, Inspect or a client of openai. Ctrl-C ends it.",
        "gspax serve runs/sort --port 8000",
    )
    add_source(parser)
    parser.add_argument("--file", metavar="FILE", help="the run's experiment file, if its tokenizer is your own class")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=at_least(0), default=8000, metavar="N", help="its port; 0: any (default: 8000)")
    parser.add_argument("--model", metavar="NAME", help="the name that requests must have (default: SOURCE)")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="seed of the answers (default: 0)")
    parser.add_argument(
        "--context", type=at_least(2), metavar="N", help="limit of prompt and answer in tokens (default: at most 4096)"
    )
    parser.add_argument("--max-tokens", type=at_least(1), metavar="N", help="limit of an answer (default: half of it)")
    parser.add_argument(
        "--rows", type=at_least(1), default=16, metavar="N", help="requests that are sampled at once (default: 16)"
    )
    return parser


def execute(options: argparse.Namespace) -> int:
    import jax

    from gspax.rewards.environments.agents import find_missing_packages
    from gspax.rollout.agents.door import open_door
    from gspax.run import interrupt
    from gspax.tools.desk import Desk, serve
    from gspax.tools.policy import load_source

    if missing := find_missing_packages():
        raise UserError(f"gspax serve: {missing}")
    file = load_file(options.file) if options.file else None
    own, context, most = file.tokenizer if file else None, options.context or 0, options.max_tokens or 0
    policy = load_source(options.source, own, context=context, most=most)
    desk = Desk(policy, queue.SimpleQueue())
    model = options.model or options.source
    try:
        with (
            interrupt.listen(lambda: "unfinished answers are lost", other="the server"),
            open_door(lambda key: desk, model, options.host, options.port) as address,
        ):
            tell(f"serving {model!r} at {address}/v1; Ctrl-C ends it")
            serve(desk, jax.random.key(options.seed), options.rows)
    except OSError as problem:
        raise UserError(f"--port: wanted a free port of {options.host}, got {options.port}: {brief(problem)}") from None
    return 0
