"""The testbed of the studies of collapse at 3e-4 with 4 minibatches, with a router that a random term makes volatile.

After every update each weight of the routers has a normal term of standard deviation `sigma`, a new one each time,
added to what the optimizer made of it. The terms do not add up, so the experts chosen differ by about the same share
after 1 update and after 100, and everything else is learned as before.

Run: gspax train experiments/studies/volatility/experiment.py --workdir runs/volatile optimizer.transform.sigma=0.04
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from gspax.config import optimizers
from gspax.experiment import load


def volatile_router(learning_rate, *, sigma: float = 0.0):
    """AdamW, and a new normal term of standard deviation `sigma` in the routers' weights after each update.

    The terms are drawn with a key that is a hash of the first parameters, so that seeds have terms of their own.
    """
    inner = optimizers.adamw(learning_rate)

    def init(params):  # with the dose in the state one program serves all doses
        total = sum(leaf.sum() for leaf in jax.tree.leaves(params))
        seed = jax.lax.bitcast_convert_type(total, jnp.uint32)
        return inner.init(params), jnp.zeros((), jnp.int32), seed, jnp.float32(sigma)

    def update(grads, state, params=None):
        moments, count, seed, dose = state
        updates, moments = inner.update(grads, moments, params)

        def add(path, leaf):
            if "router" not in jax.tree_util.keystr(path):
                return leaf
            before = jnp.where(count > 0, term(seed, count, leaf), 0)
            return leaf + dose * (term(seed, count + 1, leaf) - before)

        return jax.tree_util.tree_map_with_path(add, updates), (moments, count + 1, seed, dose)

    return optax.GradientTransformation(init, update)


def term(seed, count, leaf):
    """Normal numbers for the routers of all layers, which are one array, after so many updates."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), count)
    return jax.random.normal(key, leaf.shape, leaf.dtype)


testbed = load(Path(__file__).parents[1] / "testbed" / "experiment.py")
experiment = replace(
    testbed,
    name="volatility",
    optimizer=replace(testbed.optimizer, learning_rate=3e-4, transform=volatile_router),
    schedule=replace(testbed.schedule, minibatches=4),
)
