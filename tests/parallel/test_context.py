"""Positions sharded over the mesh axis `context`: the update of one device, and no full row on any device."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from api import Batch, TrainedPolicy, abstract_state, new_state, objective, sampler, sharding, train_step
from jax.sharding import AxisType, Mesh

from gspax import losses
from gspax.config import Latent, Sampling
from gspax.sampler.inference_weights import convert

SGD = optax.sgd(1.0)  # the parameters' change is the gradient
B, T = 8, 21  # no axis of 2, 4 or 8 divides T
MODELS = {
    "a window": replace(
        tiny.MOE,
        num_experts=0,
        num_hidden_layers=2,
        hidden_size=20,
        vocab_size=24,
        sliding_window=4,
        sliding_layers=(1,),
        remat="full",
    ),
    "experts": replace(tiny.MOE, num_experts=4, num_hidden_layers=1, vocab_size=24),
    "latents": replace(
        tiny.CONFIGS["latent attention"],
        **{"num_experts": 0, "num_hidden_layers": 1, "vocab_size": 24},
        latent=Latent(rank=8, query_rank=16, nope_dim=6, value_dim=8),
    ),
}


def mesh(**axes):
    """A mesh of the first devices. Axes that are not given have size 1."""
    shape = tuple(axes.get(name, 1) for name in sharding.AXES)
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, sharding.AXES, axis_types=(AxisType.Auto,) * len(shape))


@functools.cache
def batch(packed):
    """Rows of prompt, completion and padding; packed rows have two such segments."""
    rng = np.random.default_rng(0)
    first_B1, last_B1 = rng.integers(4, 10, (B, 1)), rng.integers(14, T + 1, (B, 1))
    column = np.arange(T)[None]
    segment_BT = np.where(column < last_B1, 1 + (packed & (column >= first_B1)), 0)
    mask_BT = (segment_BT > 0) & (column % 9 > 1)
    return Batch(
        tokens_BT=jnp.asarray(rng.integers(0, 24, (B, T)), jnp.int32),
        segment_BT=jnp.asarray(segment_BT, jnp.int32),
        mask_BT=jnp.asarray(mask_BT),
        old_logp_BT=jnp.asarray(-3 + 0.1 * rng.normal(size=(B, T)), jnp.float32),
        advantage=jnp.asarray(rng.normal(size=B), jnp.float32),
    )


@pytest.fixture(autouse=True)
def log_probs_in_chunks(monkeypatch):
    monkeypatch.setattr("gspax.learner.forward.logit_chunk", lambda config, mesh, tokens: max(1, tokens // 3))


@functools.cache
def step(model, packed, **axes):
    """The compiled train step on a mesh, and its arguments."""
    config, devices, data = MODELS[model], mesh(**axes), batch(packed)
    make = train_step.make_train_step(tiny.settings(config, devices), objective.make_objective(losses.gspo), SGD)
    state = new_state(jax.tree.map(jnp.copy, tiny.params(config)), SGD, jax.random.key(0))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(TrainedPolicy(config, devices, SGD)))
    given = jax.device_put(state, shardings), jax.device_put(data, sharding.named_sharding(devices, "batch"))
    return make.lower(*given).compile(), given


def update(model, packed, **axes):
    """The gradient of every parameter, and all metrics that one device has too."""
    compiled, given = step(model, packed, **axes)
    state, metrics = compiled(*jax.tree.map(jnp.copy, given))  # the state is donated
    metrics.pop("ring_fallbacks", None)
    return jax.device_get((jax.tree.map(jnp.subtract, tiny.params(MODELS[model]), state.params), metrics))


@functools.cache
def alone(model, packed):
    return update(model, packed)


@pytest.mark.parametrize(
    ("axes", "model", "packed"),
    [
        ({"expert": 2, "context": 4}, "experts", True),
        *(
            pytest.param(axes, model, packed, marks=pytest.mark.slow)
            for axes, model, packed in [
                ({"fsdp": 2, "context": 2, "tensor": 2}, "a window", False),
                ({"context": 8}, "a window", True),
                ({"context": 8}, "experts", False),
                ({"fsdp": 2, "context": 4}, "experts", True),
                ({"fsdp": 2, "context": 2, "tensor": 2}, "latents", True),
                ({"slice": 2, "data": 2, "context": 2}, "a window", True),
                ({"context": 4, "tensor": 2}, "experts", False),
                ({"fsdp": 2, "expert": 2, "context": 2}, "experts", False),
            ]
        ),
    ],
    ids=str,
)
def test_an_update_equals_one_device(axes, model, packed):
    got, want = update(model, packed, **axes), alone(model, packed)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max(initial=1e-6))


def test_only_keys_and_values_are_gathered_over_all_positions():
    """No array on a device is as large as the hidden states of its rows over all positions."""
    model = MODELS["a window"]
    whole = B * 24  # positions, padded to a multiple of 8
    text = step("a window", True, context=8)[0].as_text()
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", text)]
    keys = whole * model.num_key_value_heads * model.head_dim
    assert max(sizes) == keys < whole * model.hidden_size


def test_the_sampler_shards_rows_over_context_instead():
    model, sampling = MODELS["a window"], Sampling(prompts=2, group=4, max_prompt_tokens=4, max_tokens=6)

    def generate(devices):
        def run(params):
            prompts, key, stop = [[1, 2, 3], [4]], jax.random.key(0), (5,)
            weights = convert(params, model)
            return sampler.sample(weights, prompts, range(2), key, tiny.options(model, sampling, stop, devices))

        compiled = jax.jit(run).lower(tiny.params(model)).compile()
        return jax.device_get(compiled(tiny.params(model))), compiled.as_text()

    (want, _), (got, text) = generate(mesh()), generate(mesh(fsdp=2, context=2, tensor=2))
    np.testing.assert_array_equal(got.tokens_BT, want.tokens_BT)
    np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=1e-5)
    caches = set(re.findall(r"f32\[(\d+),1,6,8\]", text))  # [B, K / 2, C, H]
    assert caches == {"2"}, "8 rows on 4 devices, and two halves of the heads"
