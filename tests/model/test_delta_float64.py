"""A whole gated delta net, and a state space layer, in chunks and token by token, against loops in float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
import tiny
from api import presets
from flax import nnx

from gspax.config import GatedDelta, StateSpace
from gspax.model.delta_net import GatedDeltaNet
from gspax.model.state_space import StateSpaceNet

EMBED, EPS = 16, 1e-6
# Of each kind: its module, its loop, the gates besides decay_bias and decay_rate, and the tolerance. A token that is
# alone in a state space reads a multiple of its input, and the norm makes small differences of a small multiple large.
KINDS = {
    "delta": (
        partial(GatedDeltaNet, GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=12)),
        *(reference_model.delta_net, ("decay", "beta"), 5e-6),
    ),
    "space": (
        partial(StateSpaceNet, StateSpace(groups=2, heads=4, state_dim=8, head_dim=12)),
        *(reference_model.state_space, ("step",), 3e-5),
    ),
}
LENGTHS = 330, 1, 64, 3, 70  # of the segments of a row; a chunk has 64 tokens
# decay_bias and decay_rate of the two key heads, and how far the gates of tokens spread
GATES = {
    "as initialized": ((1.0, 1.0), (0.0, 2.0), 1.0),
    "forgets nothing": ((-30.0, -12.0), (0.0, -3.0), 40.0),
    "forgets all": ((40.0, 200.0), (2.77, 2.77), 40.0),
    "forgets all or nothing, by token": ((0.0, 0.0), (2.77, 0.0), 40.0),
}


def layer(make, gates, bias, rate, spread):
    """The layer's graph, its state, and its parameters, float32."""
    graph, state = nnx.split(make(replace(presets.tiny_moe, hidden_size=EMBED, rms_norm_eps=EPS), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = {name: rng.normal(0, 0.4, leaf.shape).astype(np.float32) for name, leaf in nnx.to_pure_dict(state).items()}
    params |= {
        "decay_bias": np.repeat(np.float32(bias)[:, None], 2, axis=1),
        "decay_rate": np.repeat(np.float32(rate)[:, None], 2, axis=1),
        **{name: spread * params[name] for name in gates},
        "norm": 1 + params["norm"],
    }
    nnx.replace_by_pure_dict(state, params)
    return graph, state, params


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_a_state_is_the_loop_in_float64(kind, gates):
    make, loop, own, tolerance = KINDS[kind]
    graph, state, params = layer(make, own, *GATES[gates])
    x_TD = np.random.default_rng(1).standard_normal((sum(LENGTHS), EMBED)).astype(np.float32)
    x_TD[40:60] = x_TD[40]  # keys that repeat
    segments = np.repeat(np.arange(1, 1 + len(LENGTHS)), LENGTHS)
    packed, _ = run(graph, state, x_TD[None], jnp.asarray(segments[None], jnp.int32))
    stepped = steps(graph, state, x_TD[None], jnp.asarray(np.append(True, np.diff(segments) > 0)))
    parts = np.split(x_TD, np.cumsum(LENGTHS)[:-1])
    exact = np.concatenate([loop(params, part, EPS) for part in parts])
    for found in (packed[0], stepped):
        np.testing.assert_allclose(found, exact, atol=tolerance * np.abs(exact).max(), rtol=0)


@jax.jit
def run(graph, state, x_BTD, segment_BT):
    return nnx.merge(graph, state).run(x_BTD, tiny.one_device(), segment_BT)


@jax.jit
def steps(graph, state, x_BTD, new_T):
    """The outputs [T, D], a token at a time, from an empty state where a segment begins."""
    one_11 = jnp.ones((1, 1), jnp.int32)
    empty = jax.tree.map(jnp.zeros_like, jax.eval_shape(run, graph, state, x_BTD[:, :1], one_11)[1])

    def advance(before, inputs):
        x_D, is_new = inputs
        before = jax.tree.map(lambda x: jnp.where(is_new, 0, x), before)
        y_BTD, after = nnx.merge(graph, state).run(x_D[None, None], tiny.one_device(), one_11, before)
        return after, y_BTD[0, 0]

    return jax.lax.scan(advance, empty, (x_BTD[0], new_T))[1]
