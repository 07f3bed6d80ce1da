"""Every mesh makes the update and the samples of one device, with arrays sharded by the rules."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import (
    Batch,
    TrainedPolicy,
    abstract_inference_weights,
    abstract_params,
    abstract_state,
    adapters,
    copier,
    decoding,
    make_inference_weights,
    make_objective,
    make_optimizer,
    make_train_step,
    new_state,
    sampler,
    sharding,
)

from gspax import config, losses
from gspax.config import Mesh, Sampling
from gspax.config.optimizers import adamw

MOE = replace(tiny.MOE, num_hidden_layers=2, num_experts=4, vocab_size=24, attention_bias=True)
GLOBAL = tiny.OTHERS["global heads and normed experts"]
MODELS = {
    "both": replace(MOE, mlp_only_layers=(0,)),  # a dense layer and one with experts
    "dense": replace(MOE, num_experts=0, tie_word_embeddings=True),
    "sinks and biased experts": replace(
        MOE, qk_norm=False, attention_sinks=True, expert_bias=True, sliding_window=3, sliding_layers=(0,)
    ),
    "experts": replace(MOE, norm_topk_prob=False, remat="full"),
    "global heads and normed experts": replace(
        GLOBAL, num_experts=4, vocab_size=24, global_heads=replace(GLOBAL.global_heads, key_heads=2)
    ),
}
OPTIMIZER = make_optimizer(  # a large eps hides differences of rounding
    config.Optimizer(learning_rate=1e-2, transform=partial(adamw, eps=1e-2))
)
ROWS, LENGTH = 16, 8


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    index_T = np.arange(LENGTH)
    length_B1 = rng.integers(4, LENGTH + 1, (ROWS, 1))
    there = index_T[None] < length_B1
    floats = rng.normal(size=(2, ROWS, LENGTH)).astype(np.float32)
    return Batch(
        tokens_BT=np.where(there, rng.integers(0, MOE.vocab_size, there.shape), 0).astype(np.int32),
        segment_BT=there.astype(np.int32),
        mask_BT=there & (index_T[None] >= 2),
        old_logp_BT=-3 + 0.1 * floats[0],
        advantage=floats[1, :, 0],
    )


def update(model, mesh, lora=None):
    """One update from the same parameters: the new state and the metrics."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(TrainedPolicy(model, mesh, OPTIMIZER, lora)))
    params = tiny.params(model)
    if lora is not None:
        factors = adapters.init(model, lora, jax.random.key(3))
        params = adapters.attach_adapters(params, jax.tree.map(lambda leaf: leaf + 0.02, factors), lora)
    state = jax.tree.map(jnp.array, new_state(params, OPTIMIZER, jax.random.key(1)))
    step = make_train_step(tiny.settings(model, mesh), make_objective(losses.grpo), OPTIMIZER)
    return step(jax.device_put(state, shardings), jax.device_put(batch(), sharding.named_sharding(mesh, "batch")))


def make(mesh, devices=8):
    return sharding.make_mesh(mesh, jax.devices()[:devices])


@functools.cache
def alone(model, lora=None):
    return jax.device_get(update(model, make(Mesh(), 1), lora))


def assert_close(got, want, tolerance=1e-5):
    """Relative to the largest number of each array."""
    for a, b in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(want), strict=True):
        if not jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(initial=1e-6))


MESHES = {
    "fsdp": Mesh(),
    "data": Mesh(data=8),
    "slice": Mesh(slice=8),
    "tensor": Mesh(tensor=2),
    "expert": Mesh(expert=4),
    "expert alone": Mesh(expert=4, tensor=2),
    "expert and tensor": Mesh(fsdp=2, expert=2, tensor=2),
    "slices of experts": Mesh(slice=2, data=2, expert=2),
    "slices of tensor": Mesh(slice=2, fsdp=2, tensor=2),
    "context": Mesh(context=2),
    "experts, context and tensor": Mesh(expert=2, context=2, tensor=2),
}
DEFAULT = [("both", "expert and tensor"), ("global heads and normed experts", "experts, context and tensor")]
ALL = [(model, mesh) for model in MODELS for mesh in MESHES if MODELS[model].num_experts or MESHES[mesh].expert < 2]


@pytest.mark.parametrize(
    ("model", "mesh"),
    [*DEFAULT, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL if each not in DEFAULT)],
)
def test_an_update_equals_one_device(model, mesh):
    made = make(MESHES[mesh])
    state, metrics = update(MODELS[model], made)
    wanted, wanted_metrics = alone(MODELS[model])
    assert metrics.pop("ring_fallbacks", 0) == 0
    assert_close(state.opt_state, wanted.opt_state)  # the first moment is the gradient
    assert_close(state.params, wanted.params)
    assert_close(metrics, wanted_metrics)
    for tree in (state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        check_bytes(tree, made.shape)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["expert and tensor", "slices of experts"])
def test_an_update_of_adapters_equals_one_device(mesh):
    lora = config.Lora(rank=2, alpha=2.0)
    got, wanted = update(MODELS["both"], make(MESHES[mesh]), lora), alone(MODELS["both"], lora)
    got[1].pop("ring_fallbacks")
    assert_close(got, wanted)


DELTA = replace(
    tiny.DELTA,
    **{"vocab_size": 24, "num_hidden_layers": 2, "delta_layers": (0,)},
    **{"num_experts": 0, "shared_expert_intermediate_size": 0, "mlp_only_layers": ()},
)


SPACE = replace(
    DELTA,
    **{"delta": None, "delta_layers": (), "mixer_layers": (0,), "multipliers": config.Multipliers(logits=2.0)},
    mixer=config.StateSpace(groups=2, heads=4, state_dim=6, head_dim=8),
)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [(DELTA, "tensor"), (SPACE, "tensor"), pytest.param(DELTA, "slices of tensor", marks=pytest.mark.slow)],
    ids=["delta-tensor", "space-tensor", "delta-slices of tensor"],
)
def test_layers_with_a_state_are_sharded_by_heads(model, mesh):
    made = make(MESHES[mesh])
    got, wanted = update(model, made), alone(model)
    assert_close(got, wanted, 2e-4)
    weight = got[0].params["runs"][0]["mixer"]["gate"]
    assert weight.sharding.shard_shape(weight.shape)[2] == weight.shape[2] // 2
    generated, want = jax.device_get(generate(model, made, slots=8)), generated_alone(model)
    np.testing.assert_array_equal(generated.tokens_BT, want.tokens_BT)
    np.testing.assert_allclose(generated.logp_BT, want.logp_BT, atol=5e-5)


@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_heads_of_delta_nets_need_no_collective_before_the_last_projection(tensor):
    """In the compiled prefill and decoding step embedding, mixers, and MLPs are summed, and nothing else is sent."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = replace(DELTA, delta=replace(DELTA.delta, key_heads=4, value_heads=8), **heads)
    mesh, P, W = make(Mesh(fsdp=1, tensor=tensor), tensor), 2, 4
    weights, ones = abstract_inference_weights(model, mesh), jnp.ones(W, jnp.int32)
    prefill = jax.jit(partial(decoding.prefill, config=model, mesh=mesh))
    lowered = prefill.lower(weights, tokens_PS=jnp.zeros((P, 5), jnp.int32), length_P=ones[:P])
    _, prompts, _ = lowered.out_info
    cache = jax.eval_shape(lambda: decoding.new_cache(zeros(prompts), model, W, 8, mesh=mesh))
    step = jax.jit(partial(decoding.decode, config=model, mesh=mesh)).lower(
        weights, token_W=ones, cache=cache, slots=decoding.Slots(ones, ones, ones, ones)
    )
    for program in (lowered, step):
        found = re.findall(COLLECTIVE, program.compile().as_text())
        assert found == ["all-reduce"] * (1 + 2 * model.num_hidden_layers)


COLLECTIVE = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def zeros(shapes):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def check_bytes(params, sizes):
    """Each device holds its shard: matrices are sharded over three axes, biases over one, norms are replicated."""
    across, along = sizes["fsdp"] * sizes["expert"], sizes["tensor"]
    special = {"router": across, "router_bias": 1, "out_bias": across, "down_bias": across, "sinks": along}
    special |= {"layer_scale": 1, "expert_scale": 1}
    special |= dict.fromkeys(("query_bias", "key_bias", "value_bias"), along)
    special |= {"gate_bias": sizes["expert"] * along, "up_bias": sizes["expert"] * along}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        parts = 1 if name == "scale" else special.get(name, across * along)
        assert {shard.data.nbytes for shard in leaf.addressable_shards} == {leaf.nbytes // parts}, path


def generate(model, mesh, slots=0, learner=None):
    prompts = [list(range(1, 2 + row % 3)) for row in range(8)]
    trained = abstract_params(model, learner or mesh)
    params = jax.device_put(tiny.params(model), jax.tree.map(lambda leaf: leaf.sharding, trained))
    params = make_inference_weights(params, model, mesh)
    sampling = Sampling(prompts=8, group=2, max_prompt_tokens=16, max_tokens=5, slots=slots)
    key = jax.random.key(2)
    return sampler.sample(params, prompts, range(8), key, tiny.options(model, sampling, (0,), mesh))


@functools.cache
def generated_alone(model):
    return jax.device_get(generate(model, make(Mesh(), 1)))


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("both", "expert and tensor"),
        *(
            pytest.param(model, mesh, marks=pytest.mark.slow)
            for model, mesh in ALL
            if model != "both" and mesh in ("expert alone", "slices of experts", "slices of tensor")
        ),
    ],
)
def test_samples_equal_one_device(model, mesh):
    got, want = jax.device_get(generate(MODELS[model], make(MESHES[mesh]))), generated_alone(MODELS[model])
    np.testing.assert_array_equal(got.tokens_BT, want.tokens_BT)
    np.testing.assert_array_equal(got.mask_BT, want.mask_BT)
    np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=1e-5)
    assert len(np.unique(want.tokens_BT)) > 10, "the tokens should vary"


@pytest.mark.parametrize(
    "mesh",
    ["expert and tensor", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("context", "slices of experts"))],
)
def test_on_a_mesh_the_slots_of_a_device_take_its_own_samples(mesh):
    got, want = jax.device_get(generate(MODELS["both"], make(MESHES[mesh]), slots=8)), generated_alone(MODELS["both"])
    np.testing.assert_array_equal(got.tokens_BT, want.tokens_BT)
    np.testing.assert_array_equal(got.finished_B, want.finished_B)
    np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=1e-5)


LAYOUTS = list(sharding.sampler_layouts(dict.fromkeys(sharding.AXES, 1) | {"fsdp": 8}, MODELS["both"], rows=8))


@pytest.mark.parametrize("layout", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(LAYOUTS)))])
def test_samples_of_every_sampler_layout_equal_one_device(layout):
    """The parameters come from the learner's mesh; nothing but experts is sharded in the first layout."""
    model, learner = MODELS["both"], make(MESHES["fsdp"])
    mesh = sharding.reshape_mesh(learner, LAYOUTS[layout])
    got, want = jax.device_get(generate(model, mesh, learner=learner)), generated_alone(model)
    np.testing.assert_array_equal(got.tokens_BT, want.tokens_BT)
    np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=1e-5)


def test_inference_weights_are_replicated_but_for_experts():
    model, learner = MODELS["both"], make(MESHES["fsdp"])
    copy = abstract_inference_weights(model, sharding.reshape_mesh(learner, LAYOUTS[0]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(copy):
        names = [part.key for part in path if hasattr(part, "key")]
        in_parts = len(leaf.shape) == 3 and names[-1] in ("gate", "up", "down")
        assert math.prod(leaf.sharding.shard_shape(leaf.shape)) == leaf.size // (4 if in_parts else 1), path


@pytest.mark.parametrize("weights_dtype", ["auto", "int8"])
def test_no_device_gathers_all_experts_where_the_sampler_splits_them_among_more(weights_dtype):
    """On 128 chips the gathered experts of GLM-4.5-Air were 199 GB on each."""
    model, learner = replace(MODELS["experts"], moe_intermediate_size=16), make(MESHES["fsdp"])
    mesh = sharding.reshape_mesh(learner, dict.fromkeys(sharding.AXES, 1) | {"expert": 4, "tensor": 2})
    compiled = copier(model, mesh, weights_dtype).lower(abstract_params(model, learner)).compile()
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", compiled.as_text())
    gathered = [math.prod(map(int, shape.split(","))) for shape in shapes]
    assert gathered, "the other weights are replicated"
    experts = model.num_experts * model.hidden_size * model.moe_intermediate_size
    assert max(gathered) < experts / 2


def test_the_cache_is_sharded_over_rows_and_heads():
    mesh, model = make(MESHES["expert and tensor"]), MODELS["both"]
    tokens_PS, length_P = np.ones((8, 4), np.int32), np.full(8, 4, np.int32)

    @jax.jit
    def make_cache(params):
        _, prompts, _ = decoding.prefill(params, model, tokens_PS, length_P, mesh=mesh)
        return decoding.new_cache(prompts, model, slots=16, max_tokens=3, mesh=mesh)

    cache = make_cache(make_inference_weights(tiny.params(model), model, mesh))
    assert len(cache) == model.num_hidden_layers
    for leaf in jax.tree.leaves(cache):
        assert leaf.sharding.shard_shape(leaf.shape) == (leaf.shape[0] // 4, 1, *leaf.shape[2:])
