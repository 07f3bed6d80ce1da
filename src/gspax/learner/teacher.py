"""Loads and identifies a run's teachers, and runs their forward pass over a minibatch before the updates."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspax import unstable
from gspax.config import ModelConfig, RowShape, Teacher, held_teachers, teacher_models
from gspax.config.protocols import Tokenizer
from gspax.data.tokenizer import has_other_ids
from gspax.errors import UserError
from gspax.hf.source import locate
from gspax.learner.forward import Inputs, StepSettings, forward
from gspax.learner.hidden import make_hidden
from gspax.learner.state import abstract_params, load_model
from gspax.learner.train_step import count_held, run_microbatches
from gspax.model.terms.teacher import TeacherTerm
from gspax.model.transformer import head_params
from gspax.parallel import multihost
from gspax.parallel.sharding import constrain
from gspax.run import interrupt
from gspax.types import Array, Batch, Params, PyTree, named_leaves

# (the teacher's parameters, tokens_BT, segment_BT, mask_BT, prefix_BT) -> `teacher_logp_BT` or `teacher_hidden_BTE`
Teach = Callable[[Params, Array, Array, Array, Array | None], Array]

ODD = 2654435761  # a multiplier that spreads positions over 32 bits (Knuth)


class Teachers(NamedTuple):
    """The teachers' checkpoints, in the order of `config.teacher_models`; none for an earlier policy."""

    params: tuple[Params, ...] = ()
    heads: tuple[Params, ...] = ()  # what `transformer.head` reads; none if updates compare no logits
    identity: str = ""  # a fingerprint of all


def load_teachers(teacher: Teacher, policy: ModelConfig, mesh: jax.sharding.Mesh, tokenizer: Tokenizer) -> Teachers:
    """Load the teachers. UserError as for `load_teacher`."""
    params, heads, prints = [], [], []
    for published, held in zip(teacher_models(teacher), held_teachers(teacher, policy), strict=True):
        own = load_teacher(published, held, mesh, tokenizer)
        prints.append(fingerprint(own))
        if TeacherTerm(settings=teacher).comparison is not None:
            heads.append(head_params(own))
        params.append(own)
    return Teachers(tuple(params), tuple(heads), "+".join(prints))


def load_teacher(model: ModelConfig, held: ModelConfig, mesh: jax.sharding.Mesh, tokenizer: Tokenizer) -> Params:
    """Load the teacher's checkpoint, cut to the model `held`, sharded like the policy's parameters.

    UserError as for `load_model`, and if the checkpoint has another tokenizer than the experiment.
    """
    folder = locate(model.checkpoint)
    if has_other_ids(tokenizer, folder):
        raise UserError(f"teacher.model: wanted a model with the experiment's tokenizer, got another one in {folder}")
    whole = load_model(model, abstract_params(model, mesh))
    return jax.tree.map(_cut, whole, abstract_params(held, mesh))


def _cut(leaf: Array, wanted: jax.ShapeDtypeStruct) -> Array:
    """Cut a parameter to the wanted shape: its first rows or columns."""
    if leaf.shape == wanted.shape:
        return leaf
    size = wanted.shape
    return jax.jit(lambda x: x[tuple(map(slice, size))], out_shardings=wanted.sharding)(leaf)


def fingerprint(params: Params) -> str:
    """Return 16 hex digits that identify the parameters, independent of their mesh."""
    sums = multihost.to_host(_weighted_sums(params))
    lines = [f"{name} {leaf.shape} {leaf.dtype} {int(sums[name])}\n" for name, leaf in named_leaves(params).items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


@jax.jit
def _weighted_sums(params: Params) -> dict[str, Array]:
    """Sum each parameter's bits as integers times an odd number that depends on the position, modulo 2^32."""

    def weighted_sum(leaf: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.zeros(leaf.shape, jnp.uint32)
        for axis in range(leaf.ndim):
            stride = math.prod(leaf.shape[axis + 1 :]) % 2**32
            place += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(stride)
        return jnp.sum(bits * (2 * place * jnp.uint32(ODD) + 1), dtype=jnp.uint32)

    return {name: weighted_sum(leaf) for name, leaf in named_leaves(params).items()}


def make_passes(
    teacher: Teacher, policy: ModelConfig, settings: StepSettings, shape: RowShape | None
) -> tuple[Teach, ...]:
    """Make the `Teach` function of each teacher. Teachers with separate rows skip microbatches without a token.

    Args:
      policy: the policy's model, which a teacher that is an earlier policy shares.
      settings: the update's settings.
      shape: `config.teacher_row_shape`.
    """
    if teacher.score is not None:
        return ()
    if shape is not None:
        settings = replace(settings, microbatch_rows=shape.microbatch, packed=True)
    models = held_teachers(teacher, policy) or (policy,)
    return tuple(make_teach(model, settings) for model in models)


def make_teach(model: ModelConfig, settings: StepSettings) -> Teach:
    """Make a jitted `Teach`: log-probs of the sampled tokens, or last hidden states if updates compare logits."""
    if settings.comparison is not None:
        return make_hidden(model, settings, scope="teacher")
    own = replace(settings, config=model, routing_replay=False)

    @partial(jax.jit, compiler_options=unstable.light_compilation(settings.mesh))
    def teach(
        params: Params, tokens_BT: Array, segment_BT: Array, mask_BT: Array, prefix_BT: Array | None = None
    ) -> Array:
        def of_microbatch(part: PyTree) -> tuple[tuple[()], Array]:
            with jax.named_scope("teacher"):
                return (), forward(params, own, Inputs(**part)).logp_BT

        arrays = {"tokens_BT": tokens_BT, "segment_BT": segment_BT, "mask_BT": mask_BT, "prefix_BT": prefix_BT}
        result = run_microbatches(of_microbatch, arrays, own.microbatch_rows, count_held(own, segment_BT))[1]
        return constrain(result, own.mesh, "batch")

    return teach


def fill_teacher(teach: Teach, params: Params, batches: Sequence[Batch]) -> list[Batch]:
    """Fill the minibatches with the teacher's outputs, with a stop point after each (`run.interrupt`)."""
    filled = []
    for batch in batches:
        array = teach(params, batch.tokens_BT, batch.segment_BT, batch.mask_BT, batch.prefix_BT)
        name = "teacher_hidden_BTE" if array.ndim == 3 else "teacher_logp_BT"
        filled.append(replace(batch, **{name: jax.block_until_ready(array)}))
        interrupt.stop_point()
    return filled
