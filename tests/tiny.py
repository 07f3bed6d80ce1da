"""Model configs small enough for loops in numpy, one for each option of a Qwen3 config."""

import functools
from dataclasses import replace

import jax
import jax.extend
import pytest
from api import SampleOptions, StepSettings, single_device_mesh, transformer

from gspax.config import (
    GatedDelta,
    GlobalHeads,
    Latent,
    LinearRope,
    ModelConfig,
    Multipliers,
    ProportionalRope,
    Router,
    Yarn,
)

MOE = ModelConfig(
    vocab_size=23,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,  # heads x head_dim differs from hidden_size on purpose
    intermediate_size=24,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    rope_theta=1e4,
    initializer_range=0.3,
)

YARN_MSCALE = Yarn(
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=4.0,
    beta_slow=0.1,
    truncate=False,
    mscale=2.0,
    mscale_all_dim=0.5,
)

STIRRED = ("_bias", "sinks")  # parameters that begin at zero

CONFIGS = {
    "moe": MOE,
    "dense": replace(MOE, num_experts=0),
    "tied": replace(MOE, tie_word_embeddings=True),
    "gates not renormalized": replace(MOE, norm_topk_prob=False),
    "some layers dense": replace(MOE, mlp_only_layers=(0,)),
    "every second layer sparse": replace(MOE, decoder_sparse_step=2),
    "layers that alternate": replace(MOE, num_hidden_layers=5, decoder_sparse_step=2),
    "one key head": replace(MOE, num_key_value_heads=1),
    "all experts": replace(MOE, num_experts_per_tok=5),
    "biases": replace(MOE, attention_bias=True),
    "a shared expert": replace(
        MOE, head_dim=4, qk_norm=False, qkv_bias=True, norm_topk_prob=False, shared_expert_intermediate_size=20
    ),
    "a router of sigmoids": replace(
        MOE,
        num_experts=6,
        mlp_only_layers=(0,),
        rope_fraction=0.5,
        shared_expert_intermediate_size=24,
        shared_expert_gate=False,
        router=Router(scoring="sigmoid", correction_bias=True, groups=3, top_groups=2, scale=1.5),
    ),
    "latent attention": replace(
        MOE,
        num_experts=6,
        mlp_only_layers=(0,),
        num_key_value_heads=4,
        head_dim=4,
        qk_norm=False,
        latent=Latent(rank=6, query_rank=10, nope_dim=6, value_dim=8),
        rope_interleaved=True,
        rope_scaling=YARN_MSCALE,
        shared_expert_intermediate_size=24,
        shared_expert_gate=False,
        router=Router(scoring="sigmoid", correction_bias=True, scale=1.5),
    ),
    "yarn": replace(MOE, rope_scaling=Yarn(factor=4.0, original_max_position_embeddings=64)),
    "yarn with mscale": replace(MOE, rope_scaling=YARN_MSCALE),
    "every layer slides": replace(MOE, sliding_window=4, sliding_layers=(0, 1, 2)),
    "some layers slide": replace(MOE, num_experts=0, sliding_window=3, sliding_layers=(0, 2)),
}

DELTA = replace(  # layers with gated delta nets and with attention, as in Qwen3-Next
    MOE,
    num_hidden_layers=4,
    mlp_only_layers=(1,),
    shared_expert_intermediate_size=20,
    delta=GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=12),
    delta_layers=(0, 1, 2),
    rope_fraction=0.5,
    attention_gate=True,
    norm_plus_one=True,
)

OTHERS = {  # parts that only some families have, and that no other checkpoint can express
    "sinks and biased experts": replace(
        CONFIGS["biases"],
        qk_norm=False,
        attention_sinks=True,
        expert_bias=True,
        sliding_window=3,
        sliding_layers=(0, 2),
    ),
    "norms around": replace(
        CONFIGS["some layers slide"],
        norm_place="around",
        norm_plus_one=True,
        activation="gelu_tanh",
        scale_embedding=True,
        query_pre_attn_scalar=5,
        sliding_rope_theta=100.0,
        rope_scaling=LinearRope(factor=2.0),
    ),
    "global heads and normed experts": replace(  # as in Gemma 4
        MOE,
        norm_place="around",
        activation="gelu_tanh",
        scale_embedding=True,
        multipliers=Multipliers(attention=1.0),
        global_heads=GlobalHeads(head_dim=12, key_heads=1, keys_as_values=True),
        value_norm=True,
        layer_scale=True,
        logit_cap=3.0,
        sliding_window=3,
        sliding_layers=(0, 1),
        sliding_rope_theta=100.0,
        rope_scaling=ProportionalRope(partial_rotary_factor=0.5),
        normed_experts=True,
        shared_expert_intermediate_size=24,
        shared_expert_gate=False,
        intermediate_size=0,
    ),
}


def slow_but(*fast):
    """The names of CONFIGS as parameters of a test, all but these marked `slow`."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


TOGETHER = {  # every option at once, for tests that compile longer
    "dense": replace(
        CONFIGS["some layers slide"],
        tie_word_embeddings=True,
        attention_bias=True,
        rope_scaling=CONFIGS["yarn"].rope_scaling,
    ),
    "experts": replace(
        CONFIGS["every layer slides"],
        norm_topk_prob=False,
        mlp_only_layers=(0,),
        attention_bias=True,
        rope_scaling=YARN_MSCALE,
    ),
}


@functools.cache
def params(config, seed=0):
    """Shared by all tests of a process, so copy before donating. Biases are random instead of 0."""
    key = jax.random.key(seed)

    def stir(path, leaf):
        return 0.3 * jax.random.normal(key, leaf.shape) if str(path[-1].key).endswith(STIRRED) else leaf

    return jax.tree_util.tree_map_with_path(stir, jax.jit(transformer.init, static_argnums=0)(config, key))


def first_layers(config, count):
    """A config with its first layers alone: a sampler's program has each layer anew."""
    numbers = ("mlp_only_layers", "delta_layers", "sliding_layers")
    few = {name: tuple(number for number in getattr(config, name) if number < count) for name in numbers}
    return replace(config, num_hidden_layers=count, **few)


def one_device():
    """The mesh of one device."""
    return single_device_mesh()


def options(model, sampling, stop_ids=(), mesh=None, **more):
    """Options of the sampler; without a mesh, on one device."""
    return SampleOptions(model=model, sampling=sampling, stop_ids=stop_ids, mesh=mesh or one_device(), **more)


def settings(model, mesh=None, **more):
    """Settings of the learner's compiled functions; without a mesh, on one device."""
    return StepSettings(config=model, mesh=mesh or one_device(), **more)


def equations(jaxpr):
    """All equations of a jaxpr and of the jaxprs within it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def primitives(function, *args, **kwargs):
    """The names of all primitives in a function of these arguments, with repetitions."""
    return [str(equation.primitive) for equation in equations(jax.make_jaxpr(function, **kwargs)(*args).jaxpr)]
