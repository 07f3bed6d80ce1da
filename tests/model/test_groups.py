"""Layers in groups: which patterns repeat, and that a model of a repeated pattern is the model of its layers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
import tiny
from api import adapter_count, adapters, parameter_count, parameters, transformer
from published import load, published, random_params, same_bytes

from gspax.config import Lora, layer_groups, layer_places

MOE, DENSE = tiny.MOE, tiny.CONFIGS["dense"]
ALTERNATING = tiny.CONFIGS["layers that alternate"]  # dense, sparse, dense, sparse, dense
apply = jax.jit(transformer.apply, static_argnames=("config", "mesh"))


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (MOE, "S x 3"),
        (DENSE, "D x 3"),
        (replace(MOE, num_hidden_layers=1), "S x 1"),
        (replace(MOE, mlp_only_layers=(0,)), "D x 1, S x 2"),
        (replace(MOE, mlp_only_layers=(1,)), "S x 1, D x 1, S x 1"),
        (replace(MOE, num_hidden_layers=61, mlp_only_layers=(0, 1, 2)), "D x 3, S x 58"),
        (ALTERNATING, "DS x 2, D x 1"),
        (replace(MOE, num_hidden_layers=48, decoder_sparse_step=4), "DDDS x 12"),
        (replace(MOE, num_hidden_layers=24, decoder_sparse_step=2), "DS x 12"),
    ],
)
def test_a_group_covers_as_many_layers_as_a_repeated_pattern_can(config, groups):
    found = [
        f"{''.join('DS'[kind.sparse] for kind in group.pattern)} x {group.repeats}" for group in layer_groups(config)
    ]
    assert ", ".join(found) == groups
    places = layer_places(config)
    assert len({*places}) == len(places) == config.num_hidden_layers
    assert [place.position for place in places if place.stack == places[-1].stack][-1] == layer_groups(config)[
        -1
    ].repeats - 1


def test_layers_of_a_pattern_have_their_own_experts_and_windows():
    """A dense layer and two sparse ones, twice; windows on layers that no pattern of these explains."""
    config = replace(MOE, num_hidden_layers=6, mlp_only_layers=(0, 3), sliding_window=3, sliding_layers=(1, 5))
    assert [len(group.pattern) for group in layer_groups(config)] == [3]
    params, tokens = tiny.params(config), np.arange(9)[None]
    forced = np.random.default_rng(1).permuted(np.tile(np.arange(5), (4, 1, 9, 1)), axis=-1)[..., :2]
    hidden, routing = apply(params, config, tokens, np.ones_like(tokens), forced_LBTA=forced, mesh=tiny.one_device())
    np.testing.assert_array_equal(routing.expert, forced)
    logits, _ = reference_model.forward(params, config, tokens[0], forced=forced[:, 0])
    np.testing.assert_allclose(transformer.logits(params, hidden)[0], logits, atol=2e-5)


def test_rematerialized_patterns_have_the_same_gradient():
    params, tokens = tiny.params(ALTERNATING), jnp.arange(9)[None]

    def loss(params, config):
        hidden, _ = transformer.apply(params, config, tokens, jnp.ones_like(tokens), mesh=tiny.one_device())
        return transformer.logits(params, hidden).std()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    plain, full = (gradient(params, replace(ALTERNATING, remat=remat)) for remat in ("none", "full"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), plain, full)


def test_layers_of_a_pattern_are_written_by_their_number_and_counted(tmp_path):
    params = random_params(ALTERNATING)
    flat = parameters.named_leaves(params)
    assert parameter_count(ALTERNATING) == sum(leaf.size for leaf in flat.values())
    parameters.write_checkpoint(tmp_path, ALTERNATING, flat.__getitem__, dtype="float32")
    assert same_bytes(load(tmp_path), published(ALTERNATING, params))


def test_adapters_of_a_pattern_are_on_every_layer():
    lora = Lora(rank=2, alpha=4.0)
    factors = adapters.abstract(ALTERNATING, lora)
    assert sum(leaf.size for leaf in jax.tree.leaves(factors)) == adapter_count(ALTERNATING, lora)
    assert factors["runs"][0][1]["mlp"]["gate"]["a"].shape == (2, 5, 16, 2)


def test_a_program_does_not_grow_with_the_repeats_of_a_pattern():
    def size(layers):
        config = replace(MOE, num_hidden_layers=layers, decoder_sparse_step=2)
        tokens, params = jnp.zeros((1, 4), jnp.int32), transformer.abstract_params(config)
        lowered = apply.lower(params, config, tokens, jnp.ones_like(tokens), mesh=tiny.one_device())
        return len(lowered.as_text().splitlines())

    assert size(16) == size(4)
