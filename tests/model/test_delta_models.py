"""Models with gated delta nets: states of waiting slots, memory, meshes, and what is refused."""

import importlib.util
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import (
    Quantized,
    Slots,
    chips,
    decoding,
    make_inference_weights,
    programs,
    sampler_sizes,
    sharding,
    transformer,
)
from small_experiment import experiment

from gspax.config import GatedDelta, Lora, Mesh, Sampling, StateSpace, Turns, layer_groups, layers_of
from gspax.experiment import validate
from gspax.model.delta_net import DeltaState
from gspax.rewards.environments import ToolUse

DELTA = tiny.DELTA
SPACE = replace(tiny.CONFIGS["dense"], mixer=StateSpace(groups=2, heads=4, state_dim=6, head_dim=8), mixer_layers=(0,))


def test_three_layers_and_one_are_a_pattern():
    model = replace(DELTA, num_hidden_layers=8, mlp_only_layers=(), delta_layers=(0, 1, 2, 4, 5, 6))
    assert [(len(group.pattern), group.repeats) for group in layer_groups(model)] == [(4, 2)]


def test_a_layer_stores_no_masks_as_wide_as_its_states():
    """In a gradient over three chunks; the masks that remain are as wide as their tokens."""
    model = replace(DELTA, num_hidden_layers=1, mlp_only_layers=(0,), delta_layers=(0,))
    tokens_BT = jnp.zeros((1, 192), jnp.int32)

    def loss(params, segment_BT):
        return transformer.apply(params, model, tokens_BT, segment_BT, mesh=tiny.one_device())[0].sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(transformer.abstract_params(model), tokens_BT))
    masks = re.findall(r"bool\[3,([0-9,]+)\]", program)
    assert {np.prod([int(size) for size in mask.split(",")]) for mask in masks} == {64}


def cache_of(model, slots, lengths, max_tokens=8, dtype="auto"):
    """The inference weights, and the cache after random prompts of these lengths."""
    mesh, size = tiny.one_device(), max(lengths)
    tokens_PS = np.random.default_rng(0).integers(0, model.vocab_size, (len(lengths), size)).astype(np.int32)
    weights = make_inference_weights(tiny.params(model), model, mesh)

    @jax.jit
    def make(weights):
        options = {"kv_cache_dtype": dtype, "mesh": mesh}
        _, prompts, _ = decoding.prefill(weights, model, tokens_PS, np.array(lengths, np.int32), **options)
        return decoding.new_cache(prompts, model, slots, max_tokens, **options)

    return weights, make(weights)


def states(cache):
    return [layer.completion for layer in cache if isinstance(layer.completion, DeltaState)]


def test_a_slot_that_waits_keeps_its_state_bit_for_bit():
    """Four slots of two prompts decode; then two of them wait while the others decode, and get a block."""
    weights, cache = cache_of(DELTA, 4, [5, 3])
    length_W, prompt_W = np.array([5, 5, 3, 3], np.int32), np.array([0, 0, 1, 1], np.int32)
    slots = Slots(length_W, jnp.asarray(prompt_W), np.zeros(4, np.int32), np.ones(4, np.int32))
    token_W, mesh = np.arange(4, dtype=np.int32), tiny.one_device()
    decode = jax.jit(partial(decoding.decode, config=DELTA, mesh=mesh))
    _, before, _ = decode(weights, token_W=token_W, cache=cache, slots=slots)
    some = slots._replace(first=np.ones(4, np.int32), count_W=np.array([1, 0, 0, 1], np.int32))
    _, after, _ = decode(weights, token_W=token_W, cache=before, slots=some)
    blocks = np.arange(12, dtype=np.int32).reshape(4, 3)
    some = some._replace(count_W=np.array([3, 0, 0, 2], np.int32))
    extend = jax.jit(partial(decoding.extend, config=DELTA, mesh=mesh))
    _, later, _ = extend(weights, tokens_WX=blocks, cache=before, slots=some)
    for new in (after, later):
        for old_state, new_state in zip(states(before), states(new), strict=True):
            for old, leaf in zip(old_state, new_state, strict=True):
                assert np.asarray(old[1:3]).tobytes() == np.asarray(leaf[1:3]).tobytes()
            assert not (old_state.memory_XKRHU[0] == new_state.memory_XKRHU[0]).all()


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_the_memory_of_states_and_keys_is_that_of_their_arrays(dtype):
    model, sizes = replace(DELTA, dtype="bfloat16"), {"prompts": 2, "max_prompt_tokens": 5, "max_tokens": 8}
    sampling = Sampling(group=3, kv_cache_dtype=dtype, **sizes)
    _, cache = jax.eval_shape(lambda: cache_of(model, 6, [5, 3], dtype=dtype))
    assert {leaf.dtype for state in states(cache) for leaf in state[:1]} == {np.dtype("float32")}
    assert any(leaf.dtype == "int8" for leaf in jax.tree.leaves(cache)) == (dtype == "int8")
    sizes = sampler_sizes(model, sampling, dict.fromkeys(sharding.AXES, 1))
    for name, held in (
        ("prompt_cache", [layer.prompt for layer in cache]),
        ("completion_cache", [layer.completion for layer in cache]),
    ):
        assert getattr(sizes, name) == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(held))
    few = replace(sampling, cache_gib=(sizes.prompt_cache + 4 * sizes.completion_cache // 6) / 2**30)
    assert sampler_sizes(model, few, dict.fromkeys(sharding.AXES, 1)).slots == 4


def test_matrices_are_quantized_and_rates_and_taps_are_not():
    weights = make_inference_weights(tiny.params(DELTA), DELTA, tiny.one_device(), weights_dtype="int8")
    mixer = weights["layers"][0]["mixer"]
    assert {name for name, leaf in mixer.items() if isinstance(leaf, Quantized)} == {
        *("query", "key", "value", "gate", "decay", "beta", "out")
    }
    low = make_inference_weights(tiny.params(DELTA), replace(DELTA, dtype="bfloat16"), tiny.one_device())
    assert low["layers"][0]["mixer"]["decay_rate"].dtype == low["layers"][0]["mixer"]["key_taps"].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (requirements-tpu.txt)")
def test_a_step_on_tpu_reads_and_writes_each_state_once(devices):
    """Compiled for v5p, with slots that wait: one fusion of the loop has the new states, and nothing copies them.

    Only the states of slots that begin are written besides, one by one, in a loop within.
    """
    model = replace(
        experiment.model,
        **{"num_hidden_layers": 1, "num_experts": 0, "intermediate_size": 64, "dtype": "bfloat16"},
        delta=GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        delta_layers=(0,),
    )
    sampling = Sampling(prompts=4 * devices, group=8, max_prompt_tokens=64, max_tokens=128)
    talking = {"environment": ToolUse(tools=()), "turns": Turns(limit=2)}
    chosen = chips.describe_devices(chips.parse_topology("v5p:2x2x1"))[:devices]
    learner, sampler = (sharding.make_mesh(mesh, chosen) for mesh in (Mesh(), Mesh(fsdp=1, expert=devices)))
    made = programs.make_programs(replace(experiment, model=model, sampling=sampling, **talking), learner, sampler)
    (turns,) = (program for program in made if program.name == programs.TURNS)
    states = r"= \(?f32\[32,16,2,128,128\].* (copy|copy-start|conditional|fusion)\(.*"
    writes = re.finditer(states, turns.lower().compile().as_text())
    begun = re.compile("mixer/(shard_map/)?while")
    assert [write[1] for write in writes if not begun.search(write[0])] == ["fusion"]


REFUSED = {
    "heads": (
        {"mesh": Mesh(fsdp=1, tensor=2), "model": replace(DELTA, delta=replace(DELTA.delta, key_heads=1))},
        "model.delta.key_heads: wanted a multiple of mesh.tensor (2), got 1",
    ),
    "adapters": (
        {"lora": Lora(delta=True), "model": replace(DELTA, delta=None, delta_layers=())},
        "lora.delta: wanted False in a model without gated delta nets, got True",
    ),
    "value heads": (
        {"model": replace(DELTA, delta=replace(DELTA.delta, value_heads=3))},
        "model.delta.value_heads: wanted a multiple of model.delta.key_heads (2), got 3",
    ),
    "groups": (
        {"mesh": Mesh(fsdp=1, tensor=2), "model": replace(SPACE, mixer=replace(SPACE.mixer, groups=1))},
        "model.mixer.groups: wanted a multiple of mesh.tensor (2), got 1",
    ),
    "heads of groups": (
        {"model": replace(SPACE, mixer=replace(SPACE.mixer, heads=3))},
        "model.mixer.heads: wanted a multiple of model.mixer.groups (2), got 3",
    ),
    "layers": (
        {"model": replace(DELTA, delta_layers=(0, 4))},
        "model.delta_layers: wanted layers below 4, got 4",
    ),
    "layers of a kind of one's own": (
        {"model": replace(DELTA, mixer_layers=(3,))},
        "model.mixer_layers: wanted none without model.mixer, got (3,)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_states_cannot_do_is_refused(name):
    changes, said = REFUSED[name]
    vocabulary = experiment.model.vocab_size
    changes = {"model": DELTA, "lora": None} | changes
    changes["model"] = replace(changes["model"], vocab_size=vocabulary)
    assert said in validate(replace(experiment, **changes), devices=2 if "mesh" in changes else 1)
    assert layers_of(DELTA)[0].mixer.cache(1).vectors == 0
