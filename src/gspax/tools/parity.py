"""`gspax parity`: compare a checkpoint in gspax and in transformers, layer by layer, both in float32.

Each gspax layer gets the input of transformers' layer, so a difference belongs to that layer and does not propagate to
later ones. The last line is the learner's whole forward pass, from tokens to logits, including accumulated rounding.

Differences are relative to the largest value that transformers has for the same token: in the residual stream of a
trained model some tokens are a thousand times larger than others. Where two experts tie to within rounding, the two
routers may choose differently; the layer then differs at that token for no other reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gspax.commands.arguments import Parser, at_least, subcommand_parser
from gspax.config import ModelConfig, layer_places
from gspax.data.tokenizer import hf_tokenizer
from gspax.errors import UserError, display, how_to_install
from gspax.hf.config_json import read_config
from gspax.hf.source import locate

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from gspax.types import Params

TOLERANCE = 1e-4  # the largest relative difference that still counts as rounding


def make_parser() -> Parser:
    parser = subcommand_parser(
        "parity",
        "Compute a Hugging Face checkpoint in gspax and in transformers, in float32; exit code 1 if they differ.",
        "gspax parity Qwen/Qwen3-0.6B --prompt 'Sort: 3 1 2'",
    )
    parser.add_argument("checkpoint", metavar="HF", help="a folder, or a name on the Hub")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="for the checkpoint's tokenizer (default: 32 random tokens)")
    text.add_argument("--tokens", type=at_least(0), nargs="+", metavar="ID", help="ids instead of a text")
    return parser


def execute(options: argparse.Namespace) -> int:
    """Print the comparison; return 1 if a part differs.

    Raises:
      UserError: torch or transformers is missing, the checkpoint cannot be read, or a token is not in its vocabulary.
    """
    import jax

    from gspax.hf.parameters import read_params
    from gspax.learner.state import abstract_params
    from gspax.parallel.sharding import single_device_mesh

    _, theirs = _import("torch"), _import("transformers")
    folder = locate(options.checkpoint)
    config = replace(read_config(folder), dtype="float32")
    tokens = options.tokens
    if options.prompt is not None:
        tokens = hf_tokenizer(folder).encode(options.prompt)
    if tokens is None:
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, 32).tolist()
    if not tokens or not 0 <= min(tokens) <= max(tokens) < config.vocab_size:
        raise UserError(f"tokens: wanted at least one, from 0 to {config.vocab_size - 1}, got {list(tokens)}")
    params = read_params(folder, config, abstract_params(config, single_device_mesh()))
    theirs.utils.logging.disable_progress_bar()
    model = theirs.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    with jax.default_matmul_precision("highest"):  # by default accelerators round float32 products
        differences = compare(params, config, tokens, forward(model, tokens))
    display(render(differences))
    return 0 if first_disagreement(differences) is None else 1


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The activations of a model for one sequence, float32."""

    streams: Sequence[np.ndarray]  # [T, D] each: the embeddings, then the residual stream after each layer
    logits_TV: np.ndarray


@dataclass(frozen=True)
class Difference:
    """The difference between gspax and transformers in one part of the model."""

    part: str
    largest: float
    relative: float  # to the largest value of the same token


def _import(package: str) -> Any:
    """Import torch or transformers, which only this subcommand needs."""
    try:
        return importlib.import_module(package)
    except ImportError as missing:
        raise UserError(
            f"gspax parity runs transformers too and needs the package {package!r}: {how_to_install('parity')}"
        ) from missing


def forward(model: Any, tokens: Sequence[int]) -> Forward:
    """Record the activations of a transformers model for a sequence."""
    torch, streams = _import("torch"), []

    def keep(module: object, inputs: object, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output  # a tuple in transformers 4
        streams.append(stream[0].float().numpy())

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in (model.get_input_embeddings(), *model.model.layers):
            hooks.callback(module.register_forward_hook(keep).remove)
        logits_TV = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float().numpy()
    return Forward(streams=streams, logits_TV=logits_TV)


def compare(params: Params, config: ModelConfig, tokens: Sequence[int], theirs: Forward) -> list[Difference]:
    """Compare the embedding, every layer on the input of transformers' layer, and the logits, in this order."""
    import jax
    import jax.numpy as jnp

    from gspax.model import transformer
    from gspax.parallel.sharding import single_device_mesh

    tokens_1T, mesh = jnp.asarray(tokens, jnp.int32)[None], single_device_mesh()
    segment_1T = jnp.ones_like(tokens_1T)
    embedded_1TD = transformer.scale_embeddings(params["embedding"][tokens_1T], config)
    differences = [_difference("embedding", embedded_1TD[0], theirs.streams[0])]
    one_layer = jax.jit(transformer.apply_layer, static_argnames=("config", "stack", "mesh"))
    for number, (stack, index) in enumerate(layer_places(config)):
        before_1TD = jnp.asarray(theirs.streams[number])[None]
        inputs = jnp.int32(index), before_1TD, segment_1T
        after_1TD = one_layer(params, config, stack, *inputs, number=jnp.int32(number), mesh=mesh)
        differences.append(_difference(f"layer {number}", after_1TD[0], theirs.streams[number + 1]))
    whole = jax.jit(transformer.apply, static_argnames=("config", "mesh"))
    hidden_1TD, _ = whole(params, config, tokens_1T, segment_1T, mesh=mesh)
    logits_TV = transformer.logits(params, hidden_1TD, config.logit_cap)[0]
    return [*differences, _difference("logits", logits_TV, theirs.logits_TV)]


def _difference(part: str, ours: ArrayLike, theirs: np.ndarray) -> Difference:
    gap_T = np.abs(np.asarray(ours) - theirs).max(axis=-1)
    size_T = np.abs(theirs).max(axis=-1)
    relative_T = np.where(gap_T == 0, 0.0, gap_T / np.maximum(size_T, np.finfo(np.float32).tiny))
    return Difference(part, float(gap_T.max()), float(relative_T.max()))


def first_disagreement(differences: Sequence[Difference]) -> str | None:
    """Return the first part that differs by more than rounding; NaN differs."""
    return next((difference.part for difference in differences if not difference.relative <= TOLERANCE), None)


def render(differences: Sequence[Difference]) -> str:
    """Format the table, with the conclusion as its last line."""
    lines = [f"{'':<12}{'largest difference':>20}{'relative':>12}"]
    for difference in differences:
        note = "" if difference.relative <= TOLERANCE else "  differs"
        lines.append(f"{difference.part:<12}{difference.largest:>20.3g}{difference.relative:>12.3g}{note}")
    first = first_disagreement(differences)
    conclusion = f"The first part that differs by more than {TOLERANCE:g} is: {first}."
    return "\n".join([*lines, f"All parts agree to {TOLERANCE:g}." if first is None else conclusion])
