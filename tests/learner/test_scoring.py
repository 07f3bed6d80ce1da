"""Log-probs on a mesh: equal to one device, with one all-gather of the head and one reduce-scatter of its gradient."""

import functools
import itertools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from api import (
    Batch,
    OtherRows,
    Scoring,
    Target,
    TrainedPolicy,
    abstract_state,
    head_logp,
    hlo,
    objective,
    sharding,
    train_step,
)

from gspax import config, losses
from gspax.config import Mesh

V, D, B, T, CHUNK = 1000, 16, 16, 12, 3
MODEL = replace(tiny.MOE, num_experts=0, num_hidden_layers=1, vocab_size=V)
LORA = config.Lora(rank=2, alpha=2.0)
ONCE = {"all-gather, whole": 1, "reduce-scatter": 1}  # collectives by their result


def compiled_step(mesh, lora, sets=0):
    """The text of a train step that scores CHUNK positions of its rows at a time."""
    state = abstract_state(TrainedPolicy(MODEL, mesh, optax.sgd(1.0), lora))
    rows = sharding.named_sharding(mesh, "batch")
    shapes = {"tokens_BT": jnp.int32, "segment_BT": jnp.int32, "mask_BT": jnp.bool_, "old_logp_BT": jnp.float32}
    columns = {name: jax.ShapeDtypeStruct((B, T), dtype, sharding=rows) for name, dtype in shapes.items()}
    kept = jax.ShapeDtypeStruct((B, T, sets), jnp.uint16, sharding=rows) if sets else None
    batch = Batch(**columns, advantage=jax.ShapeDtypeStruct((B,), jnp.float32, sharding=rows), kept_BTK=kept)
    step = train_step.make_train_step(tiny.settings(MODEL, mesh), objective.make_objective(losses.gspo), optax.sgd(1.0))
    return step.lower(state, batch).compile().as_text()


@pytest.mark.parametrize(
    ("axes", "lora", "sets", "wanted"),
    [
        # `context` shards no parameters: shards of the head's and the embedding's gradient are summed over it
        (Mesh(fsdp=2, context=2, tensor=2), None, 0, ONCE | {"all-reduce": 2}),
        pytest.param(Mesh(fsdp=2, context=2, tensor=2), None, 4, ONCE | {"all-reduce": 2}, marks=pytest.mark.slow),
        pytest.param(Mesh(), None, 0, ONCE, marks=pytest.mark.slow),
        pytest.param(Mesh(tensor=2), None, 0, ONCE, marks=pytest.mark.slow),
        pytest.param(Mesh(), LORA, 0, {"all-gather, whole": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_head_is_gathered_once_and_its_gradient_reduced_once_for_all_chunks(monkeypatch, axes, lora, sets, wanted):
    mesh = sharding.make_mesh(axes)
    vocabulary = V // mesh.shape["tensor"]
    monkeypatch.setattr("gspax.learner.forward.logit_chunk", lambda config, mesh, tokens: CHUNK)

    def count(_, each):
        kind = each.opcode.removesuffix("-start")
        wide = re.search(rf"\[{vocabulary},|,{vocabulary}\]", each.type)
        if kind not in hlo.KINDS or not wide or not hlo._group_axes(each.attributes, dict(mesh.shape))[0]:
            return Counter()
        return Counter([kind + ", whole" * bool(re.search(rf"{D},{vocabulary}\]|{vocabulary},{D}\]", each.type))])

    assert hlo.total(hlo.parse(compiled_step(mesh, lora, sets)), count, unknown_trips=5) == wanted


def scored(mesh, head, hidden, tokens, chunk, tied=False, masked=False, sets=False):
    """Gradients of a loss by head and hidden states, and the scores."""
    kept = jnp.stack([tokens, (tokens + 3) % 40, jnp.where(tokens % 2, 40, (tokens + 5) % 40)], -1) if sets else None

    def total(head, hidden):
        params = {"embedding": head.T} if tied else {"head": head}
        target = Target(jnp.where(MASK, tokens, -1) if masked else tokens, kept)
        scoring = Scoring(0.7, None, chunk, not masked)
        logp, entropy, _ = head_logp(params, hidden, target, scoring, mesh, OtherRows())
        return (WEIGHT * logp + WEIGHT[:, ::-1] * entropy).sum(), (logp, entropy)

    return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(head, hidden)


@pytest.mark.parametrize("chunk", [3, B * T])
def test_capped_logits_are_those_of_the_model_and_of_the_others(chunk):
    """The policy's cap has a gradient; each other model has its own cap."""
    head, hidden, tokens = inputs()
    params, others = {"head": 4 * head}, OtherRows(({"head": 5 * head},), hidden[..., ::-1])
    scoring = Scoring(0.7, lambda own, other, token, kept: other[:, :3], chunk, True, 2.0, (3.0,))

    def ours(params):
        logp, _, compared = head_logp(params, hidden, Target(tokens, None), scoring, tiny.one_device(), others)
        return logp.sum(), (logp, compared)

    def wanted(params):
        logits = 2 * jnp.tanh(hidden @ params["head"] / 2) / 0.7
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], 2)[..., 0]
        return logp.sum(), logp

    (_, (logp, compared)), gradient = jax.value_and_grad(ours, has_aux=True)(params)
    (_, want), want_gradient = jax.value_and_grad(wanted, has_aux=True)(params)
    np.testing.assert_allclose(logp[:, 1:], want, atol=1e-5)
    np.testing.assert_allclose(gradient["head"], want_gradient["head"], atol=1e-4)
    other = 3 * jnp.tanh(5 * hidden[..., ::-1] @ head / 3) / 0.7
    np.testing.assert_allclose(compared[:, 1:], other[:, :-1, :3], atol=1e-5)


MASK = np.random.default_rng(2).random((B, T)) < 0.3
MASK[:, 0] = False
WEIGHT = np.random.default_rng(1).standard_normal((B, T)).astype(np.float32)


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    head, hidden = rng.standard_normal((D, 40)) / 4, rng.standard_normal((B, T, D))
    tokens = rng.integers(0, 40, (B, T), dtype=np.int32)
    return jnp.asarray(head, jnp.float32), jnp.asarray(hidden, dtype), jnp.asarray(tokens)


@functools.cache
def scored_alone(tied, masked, sets=False):
    return scored(tiny.one_device(), *inputs(), B * T, tied, masked, sets)


AXES = (
    Mesh(),
    Mesh(slice=2, fsdp=2, context=2),
    Mesh(fsdp=2, expert=2, tensor=2),
    *(Mesh(data=8), Mesh(fsdp=1, context=4, tensor=2), Mesh(fsdp=1, tensor=8), Mesh(data=2, context=2, tensor=2)),
)
CHUNKS = ((2, False, True), (5, True, False), (B * T, False, True))  # tokens, whether tied, whether masked
DEFAULT = tuple(zip(AXES[:3], (CHUNKS[2], CHUNKS[0], CHUNKS[1]), strict=True))


@pytest.mark.parametrize(
    ("axes", "how"),
    [
        pytest.param(*each, marks=[] if each in DEFAULT else pytest.mark.slow)
        for each in itertools.product(AXES, CHUNKS)
    ],
    ids=str,
)
def test_scores_and_gradients_equal_one_device(axes, how):
    chunk, tied, masked = how
    got = scored(sharding.make_mesh(axes), *inputs(), chunk, tied, masked)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(scored_alone(tied, masked)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(Mesh(fsdp=2, context=2, tensor=2)),
        *(pytest.param(axes, marks=pytest.mark.slow) for axes in (*AXES, Mesh(fsdp=1, tensor=4))),
    ],
    ids=str,
)
def test_scores_over_sets_equal_one_device(axes):
    mesh = sharding.make_mesh(axes, jax.devices()[: 4 if axes == Mesh(fsdp=1, tensor=4) else 8])
    got, wanted = scored(mesh, *inputs(), 2, False, True, True), scored_alone(False, True, True)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    without = scored_alone(False, True)
    assert np.abs(wanted[1][0] - without[1][0]).max() > 0.1


def test_gradients_of_bfloat16_chunks_are_summed_in_float32():
    """On a mesh, chunks give the gradient of one chunk. Rounding each sum to bfloat16 would show: 1 part in 256."""
    mesh = sharding.make_mesh(Mesh())
    (got, _), _ = scored(mesh, *inputs(jnp.bfloat16), 1)
    (wanted, _), _ = scored(mesh, *inputs(jnp.bfloat16), B * T)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(wanted - wanted.astype(jnp.bfloat16)).max() > 1e-4 * np.abs(wanted).max()
