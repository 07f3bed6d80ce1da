"""The parameters that inference weights in 8 bits stand for."""

import jax
import jax.numpy as jnp
from api import _summed_axes, transformer


def rounded(params, config):
    """The learner's parameters that the sampler's weights in 8 bits stand for."""

    def round_(leaf, axes):
        if not (summed := _summed_axes(axes, config)):
            return leaf
        scale = jnp.abs(leaf).max(axis=summed, keepdims=True) / 127
        return jnp.round(leaf / scale) * scale

    return jax.tree.map(round_, params, transformer.logical_axes(config))
