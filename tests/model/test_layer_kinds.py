"""Laws of every kind of layer, in a model of one layer: a new kind is one entry of `KINDS`."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import averages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import (
    Slots,
    config_json,
    decoding,
    make_inference_weights,
    names,
    parameter_count,
    parameters,
    sharding,
    transformer,
)
from averages import Averages
from small_experiment import experiment

from gspax.config import (
    Engine,
    Feature,
    Mesh,
    ModelConfig,
    Multipliers,
    Router,
    ShortConvolution,
    StateSpace,
    layers_of,
    obstacle,
)
from gspax.config.functions import parse
from gspax.errors import UserError
from gspax.experiment import describe, validate

PLAIN = replace(tiny.MOE, num_experts=0, num_hidden_layers=1)
SINKS = replace(tiny.OTHERS["sinks and biased experts"], num_hidden_layers=1, sliding_window=0, sliding_layers=())
DELTA = replace(tiny.DELTA, num_hidden_layers=1, delta_layers=(0,), num_experts=0, shared_expert_intermediate_size=0)
SPACE = StateSpace(groups=2, heads=4, state_dim=6, head_dim=8)
MULTIPLIERS = Multipliers(embedding=3.0, attention=0.2, residual=0.5, logits=2.0)
KINDS = {
    "attention": PLAIN,
    "sliding windows": replace(PLAIN, qk_norm=False, sliding_window=3, sliding_layers=(0,)),
    "attention sinks": SINKS,
    "global heads": replace(
        tiny.OTHERS["global heads and normed experts"],
        **{"num_hidden_layers": 1, "num_experts": 0, "shared_expert_intermediate_size": 0, "intermediate_size": 24},
        sliding_layers=(),
    ),
    "latent attention": replace(tiny.CONFIGS["latent attention"], num_hidden_layers=1),
    "gated delta nets": replace(DELTA, mlp_only_layers=()),
    "state space layers": replace(PLAIN, qk_norm=False, mixer=SPACE, mixer_layers=(0,), multipliers=MULTIPLIERS),
    "one part in each layer": replace(
        replace(PLAIN, qk_norm=False, mixer=SPACE, nope_layers=(0, 1), activation="relu2", model_type="nemotron_h"),
        **{"num_hidden_layers": 2, "no_mlp_layers": (0,), "no_mixer_layers": (1,), "num_experts": 6},
        **{"num_experts_per_tok": 2, "shared_expert_intermediate_size": 20, "shared_expert_gate": False},
        router=Router(scoring="sigmoid", correction_bias=True, groups=3, top_groups=2),
    ),
    "short convolutions": replace(PLAIN, mixer=ShortConvolution(width=PLAIN.hidden_size, bias=True), mixer_layers=(0,)),
    "averages": replace(PLAIN, mixer=Averages(), mixer_layers=(0,)),
}
PROMPT, T = 5, 9
TOKENS_T = np.random.default_rng(0).integers(0, PLAIN.vocab_size, T).astype(np.int32)
apply = jax.jit(transformer.apply, static_argnames=("config", "mesh"))


def rows(*parts):
    """Tokens and segments [1, 2T] of these slices of the sequence, each a segment of its own."""
    tokens, numbers = np.zeros((1, 2 * T), np.int32), np.zeros((1, 2 * T), np.int32)
    used = np.concatenate([TOKENS_T[part] for part in parts])
    tokens[0, : len(used)] = used
    numbers[0, : len(used)] = np.repeat(np.arange(len(parts)) + 1, [len(TOKENS_T[part]) for part in parts])
    return tokens, numbers


def hidden(config, *parts, mesh=None, **more):
    tokens_BT, segment_BT = rows(*parts)
    return apply(tiny.params(config), config, tokens_BT, segment_BT, mesh=mesh or tiny.one_device(), **more)[0][0]


@partial(jax.jit, static_argnames=("config", "mesh"))
def probe(params, config, arrays, prefix_BT, mesh):
    """The hidden states [1, 2T, D] of a row, and the gradient of a sum of them with the weights of the row."""
    tokens_BT, segment_BT, weight_BT = arrays

    def value(params):
        hidden, _ = transformer.apply(params, config, tokens_BT, segment_BT, mesh=mesh, prefix_BT=prefix_BT)
        return (hidden * jnp.sin(hidden) * weight_BT[..., None]).sum(), hidden

    gradient, found = jax.grad(value, has_aux=True)(params)
    return found[0], gradient


def decoded(config, sizes, *, spoiled=0, cache_dtype="auto", weights_dtype="auto"):
    """The hidden states [M, D] of the tokens after the prompt, run in blocks of these sizes.

    `spoiled` more tokens of each block are wrong drafts, which are not kept.
    """
    mesh = tiny.one_device()
    weights = make_inference_weights(tiny.params(config), config, mesh, weights_dtype=weights_dtype)
    fill = partial(decoding.prefill, config=config, kv_cache_dtype=cache_dtype, mesh=mesh)

    @jax.jit
    def run(weights):
        padded_PS = np.pad(TOKENS_T[:PROMPT], (0, 3), constant_values=7)[
            None
        ]  # as a shorter prompt beside a longer one
        _, prompts, _ = fill(weights, tokens_PS=padded_PS, length_P=np.array([PROMPT], np.int32))
        cache = decoding.new_cache(prompts, config, 1, 8, kv_cache_dtype=cache_dtype, mesh=mesh)
        found, first = [], 0
        for size in sizes:
            block = np.concatenate([TOKENS_T[PROMPT + first :][:size], np.full(spoiled, 7, np.int32)])[None]
            slots = Slots(*(jnp.array([x], jnp.int32) for x in (PROMPT, 0, first, size + spoiled)))
            states, keep, _ = decoding.decode_block(weights, config, block, cache, slots, mesh)
            cache = keep(jnp.array([size], jnp.int32))
            found.append(states[0, :size])
            first += size
        return jnp.concatenate(found)

    return run(weights)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_decoded_tokens_are_those_of_a_row_alone(kind):
    config, whole = KINDS[kind], hidden(KINDS[kind], slice(T))[:T]
    packed = hidden(config, slice(PROMPT), slice(T))[PROMPT : PROMPT + T]
    np.testing.assert_allclose(packed, whole, atol=2e-5)
    np.testing.assert_allclose(decoded(config, [1, 3]), whole[PROMPT:], atol=2e-5)


def run_shared_prompts(config, whole):
    """Two responses after one prompt, and rows of their own: hidden states, and the gradient of the responses' sum."""
    short, params, mesh = T - 1, tiny.params(config), tiny.one_device()
    shared_BT, separate_BT = rows(slice(PROMPT), slice(PROMPT, T), slice(PROMPT, short)), rows(slice(T), slice(short))
    prefix_BT = np.where(shared_BT[1] > 1, 1, 0).astype(np.int32)
    first = np.arange(2 * T)[None] % T >= PROMPT  # of the responses of the rows of their own
    found, gradient = probe(params, config, (*shared_BT, (prefix_BT > 0).astype(np.float32)), prefix_BT, mesh)
    wanted, exact = probe(params, config, (*separate_BT, (first & (separate_BT[1] > 0)).astype(np.float32)), None, mesh)
    expected = np.append(wanted[:T], wanted[T + PROMPT : T + short], axis=0)
    np.testing.assert_allclose(found[: len(expected)], expected, atol=2e-5)
    np.testing.assert_allclose(wanted[:T], whole, atol=2e-5)
    assert_close(gradient, exact)


def assert_close(found, wanted):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(np.abs(theirs).max(), 1e-3))


def run_drafts(config, whole):
    np.testing.assert_allclose(decoded(config, [1, 2], spoiled=2), whole[PROMPT : PROMPT + 3], atol=2e-5)


def run_8_bits(config, whole, **dtypes):
    error = np.abs(decoded(config, [1, 3], **dtypes) - whole[PROMPT:])
    if "cache_dtype" in dtypes and not layers_of(config)[0].mixer.cache(1).vectors:
        assert error.max() < 2e-5, "a state is not rounded"
    else:
        assert 0 < error.mean() < 0.1


def run_servers(config, whole):
    shapes = parameters.parameter_shapes(config)
    assert names.list_chunks(config, shapes).keys() == shapes.keys()


def run_context(config, whole):
    mesh = sharding.make_mesh(Mesh(fsdp=1, context=2), jax.devices()[:2])
    arrays_BT = *rows(slice(PROMPT), slice(T)), np.ones((1, 2 * T), np.float32)
    wanted, exact = probe(tiny.params(config), config, arrays_BT, None, tiny.one_device())
    np.testing.assert_allclose(wanted[PROMPT : PROMPT + T], whole, atol=2e-5)
    with jax.set_mesh(mesh):
        found, gradient = probe(tiny.params(config), config, arrays_BT, None, mesh)
    np.testing.assert_allclose(found[: PROMPT + T], wanted[: PROMPT + T], atol=2e-5)
    assert_close(jax.device_get(gradient), exact)


RUNS = {  # how a feature that a kind supports is run, and how an experiment asks for it
    Feature.SHARED_PROMPTS: (run_shared_prompts, {"schedule": {"microbatch_tokens": 64, "share_prompts": True}}),
    Feature.DRAFTS: (run_drafts, {"sampling": {"drafts": 2}}),
    Feature.INT8_CACHE: (partial(run_8_bits, cache_dtype="int8"), {"sampling": {"kv_cache_dtype": "int8"}}),
    Feature.INT8_WEIGHTS: (partial(run_8_bits, weights_dtype="int8"), {"sampling": {"weights_dtype": "int8"}}),
    Feature.SERVERS: (run_servers, {"engine": Engine()}),
    Feature.CONTEXT_PARALLEL: (run_context, {"mesh": Mesh(fsdp=1, context=2)}),
}
ASKED = [(kind, feature) for kind in KINDS for feature in Feature]
SUPPORTED = [(kind, feature) for kind, feature in ASKED if layers_of(KINDS[kind])[0].mixer.supports(feature)]


def named(pairs):
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1].value}") for pair in pairs]


@pytest.mark.parametrize(("kind", "feature"), named(SUPPORTED))
def test_what_a_kind_supports_runs(kind, feature):
    RUNS[feature][0](KINDS[kind], hidden(KINDS[kind], slice(T))[:T])


@pytest.mark.parametrize(("kind", "feature"), named(ASKED))
def test_what_a_kind_does_not_support_is_refused_and_nothing_else(kind, feature):
    changes = {
        name: replace(getattr(experiment, name), **value) if isinstance(value, dict) else value
        for name, value in RUNS[feature][1].items()
    }
    model = replace(KINDS[kind], vocab_size=experiment.model.vocab_size)
    found = validate(replace(experiment, model=model, **changes), devices=2 if "mesh" in changes else 1)
    reason = obstacle(model, feature)
    assert (reason is None) == ((kind, feature) in SUPPORTED)
    refused = [line for line in found if f"in a model with {reason}, got" in line]
    assert len(refused) == (reason is not None), found


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_counts_its_parameters_and_comes_back_from_files_or_is_refused(kind, tmp_path):
    config = KINDS[kind]
    model = replace(config, vocab_size=experiment.model.vocab_size)
    assert parse(ModelConfig, describe(replace(experiment, model=model))["model"]) == model
    assert parameter_count(config) == sum(leaf.size for leaf in jax.tree.leaves(transformer.abstract_params(config)))
    if config.mixer is not None and not type(config.mixer).__module__.startswith("gspax."):  # it has no family
        with pytest.raises(UserError, match=r"^model: wanted a model of one of the families"):
            config_json.to_json(config)
        return
    (tmp_path / "config.json").write_text(json.dumps(config_json.to_json(config)), encoding="utf-8")
    assert layers_of(config_json.read_config(tmp_path)) == layers_of(config)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Averages(heads=0), "model.mixer.heads: wanted at least 1, got 0"),
        (Averages(width="4"), "model.mixer.width: wanted an integer, got '4'"),
    ],
)
def test_the_settings_of_a_kind_of_ones_own_are_checked(kind, said):
    model = replace(KINDS["averages"], vocab_size=experiment.model.vocab_size, mixer=kind)
    assert validate(replace(experiment, model=model)) == [said]


def test_the_page_shows_the_file():
    """The kind that these tests take from one file is the one that the page explains."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "add_a_layer_kind.md"
    assert Path(averages.__file__).read_text(encoding="utf-8") in page.read_text(encoding="utf-8")
