"""Computes the last hidden states of a model on a minibatch: updates compare its logits (`Term.comparison`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from gspax import unstable
from gspax.config import ModelConfig
from gspax.learner.forward import StepSettings, pad_rows
from gspax.learner.train_step import count_held, run_microbatches
from gspax.model import transformer
from gspax.parallel.sharding import constrain_tokens
from gspax.types import Array, Params, PyTree

# (parameters, tokens_BT, segment_BT, mask_BT, prefix_BT) -> [B, T, E]
ReadHidden = Callable[..., Array]


def make_hidden(model: ModelConfig, settings: StepSettings, *, scope: str) -> ReadHidden:
    """Make a jitted `ReadHidden` of a model, in the microbatches of an update with these settings.

    Args:
      scope: the name of the pass in profiles.
    """

    @partial(jax.jit, compiler_options=unstable.light_compilation(settings.mesh))
    def read(
        params: Params, tokens_BT: Array, segment_BT: Array, mask_BT: Array, prefix_BT: Array | None = None
    ) -> Array:
        def of_microbatch(part: PyTree) -> tuple[tuple[()], Array]:
            with jax.named_scope(scope):
                rows = pad_rows((part["tokens_BT"], part["segment_BT"], part["prefix_BT"]), settings.mesh)
                return (), transformer.apply(params, model, *rows[:2], prefix_BT=rows[2], mesh=settings.mesh)[0]

        arrays = {"tokens_BT": tokens_BT, "segment_BT": segment_BT, "prefix_BT": prefix_BT}
        result = run_microbatches(of_microbatch, arrays, settings.microbatch_rows, count_held(settings, segment_BT))[1]
        return constrain_tokens(result, settings.mesh)

    return read
