"""The model against a numpy reference, and the properties on which sampler and learner rely."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
import tiny
from api import RULES, decoding, make_inference_weights, spec, transformer

from gspax.model.kernels.trees import positions

apply = jax.jit(transformer.apply, static_argnames=("config", "mesh"))
prefill = jax.jit(decoding.prefill, static_argnames=("config", "mesh"))
decode = jax.jit(decoding.decode, static_argnames=("config", "mesh"))


TOGETHER = {f"{name}, all options": config for name, config in tiny.TOGETHER.items()}


def logits_of(params, config, tokens_BT, segment_BT, **kwargs):
    hidden, routing = apply(
        params, config, jnp.asarray(tokens_BT), jnp.asarray(segment_BT), mesh=tiny.one_device(), **kwargs
    )
    return np.asarray(transformer.logits(params, hidden)), np.asarray(routing.expert)


def random_tokens(config, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, dtype=np.int32)


@pytest.mark.parametrize("name", [*TOGETHER, *tiny.slow_but()])
def test_logits_and_experts_equal_the_numpy_reference(name):
    config = (TOGETHER | tiny.CONFIGS)[name]
    params = tiny.params(config)
    tokens = random_tokens(config, 1, 9)
    logits, experts = logits_of(params, config, tokens, np.ones_like(tokens))
    expected, expected_experts = reference_model.forward(params, config, tokens[0])
    np.testing.assert_allclose(logits[0], expected, atol=2e-5)
    if expected_experts.size:
        np.testing.assert_array_equal(experts[:, 0], expected_experts)
    else:
        assert experts.shape[0] == 0


@pytest.mark.parametrize("name", ["every layer slides", pytest.param("moe", marks=pytest.mark.slow)])
def test_padded_and_packed_rows_equal_single_sequences(name):
    config = tiny.CONFIGS[name]
    params = tiny.params(config)
    first, second = random_tokens(config, 4, seed=1), random_tokens(config, 5, seed=2)
    junk = random_tokens(config, 3, 12, seed=3)
    segment = np.zeros_like(junk)
    junk[0, 7:11], segment[0, 7:11] = first, 1  # padding on both sides
    junk[1, :5], segment[1, :5] = second, 1
    junk[2, :4], segment[2, :4], junk[2, 4:9], segment[2, 4:9] = first, 1, second, 2
    logits, experts = logits_of(params, config, junk, segment)
    want_first, _ = reference_model.forward(params, config, first)
    want_second, _ = reference_model.forward(params, config, second)
    for got, want in [
        (logits[0, 7:11], want_first),
        (logits[1, :5], want_second),
        (logits[2, :4], want_first),
        (logits[2, 4:9], want_second),
    ]:
        np.testing.assert_allclose(got, want, atol=2e-5)
    assert (experts[:, segment == 0] == config.num_experts).all()
    assert (experts[:, segment > 0] < config.num_experts).all()


def test_positions_restart_with_each_segment():
    segment = jnp.array([[0, 0, 1, 1, 1, 2, 2, 0], [1, 1, 2, 3, 3, 3, 3, 3]])
    expected = [[0, 1, 0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2, 3, 4]]
    np.testing.assert_array_equal(positions(segment), expected)


def test_a_row_does_not_depend_on_its_batch():
    config, params = tiny.MOE, tiny.params(tiny.MOE)
    tokens = random_tokens(config, 6, 8)
    others = random_tokens(config, 6, 8, seed=1)
    first, _ = logits_of(params, config, tokens, np.ones_like(tokens))
    for row in range(6):
        mixed = np.where(np.arange(6)[:, None] == row, tokens, others)
        second, _ = logits_of(params, config, mixed, np.ones_like(tokens))
        np.testing.assert_allclose(second[row], first[row], atol=1e-5)


@pytest.mark.parametrize("name", tiny.slow_but("some layers slide"))  # test_greedy.py has one with experts
def test_prefill_and_decode_equal_the_full_sequence(name):
    config = tiny.CONFIGS[name]
    params = tiny.params(config)
    P, G, S, C = 3, 2, 7, 5
    length_P = np.array([7, 2, 4], np.int32)
    prompts = random_tokens(config, P, S)
    completions = random_tokens(config, P * G, C, seed=1)
    mesh = tiny.one_device()
    weights = make_inference_weights(params, config, mesh)
    last, prompt_cache, _ = prefill(weights, config, prompts, jnp.asarray(length_P), mesh=mesh)
    cache = decoding.new_cache(prompt_cache, config, slots=P * G, max_tokens=C, mesh=mesh)
    steps = []
    for step in range(C):
        slots = decoding.Slots(jnp.repeat(length_P, G), None, jnp.int32(step), jnp.ones(P * G, jnp.int32))
        hidden, cache, _ = decode(weights, config, completions[:, step], cache, slots, mesh=mesh)
        steps.append(hidden)
    whole, segment = np.zeros((2, P * G, S + C), np.int32)
    for row in range(P * G):
        sequence = [*prompts[row // G, : length_P[row // G]], *completions[row]]
        whole[row, : len(sequence)], segment[row, : len(sequence)] = sequence, 1
    hidden, _ = apply(params, config, whole, segment, mesh=mesh)
    for row in range(P * G):
        length = length_P[row // G]
        np.testing.assert_allclose(last[row // G], hidden[row, length - 1], atol=1e-5)
        for step in range(C):
            np.testing.assert_allclose(steps[step][row], hidden[row, length + step], atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["some layers dense", *(pytest.param(name, marks=pytest.mark.slow) for name in ("moe", "gates not renormalized"))],
)
def test_forcing_the_routers_choice_changes_nothing(name):
    config = tiny.CONFIGS[name]
    params = tiny.params(config)
    tokens = random_tokens(config, 2, 9)
    segment = np.ones_like(tokens)
    segment[1, 6:] = 0
    free, experts = logits_of(params, config, tokens, segment)
    forced, again = logits_of(params, config, tokens, segment, forced_LBTA=jnp.asarray(experts))
    np.testing.assert_array_equal(free, forced)
    np.testing.assert_array_equal(experts, again)


@jax.jit
def forced_gradient(params, tokens, forced_LBTA):
    """The gradient of a function of the hidden states, the hidden states, and the experts."""

    def objective(params):
        hidden, routing = transformer.apply(
            params, tiny.MOE, tokens, jnp.ones_like(tokens), mesh=tiny.one_device(), forced_LBTA=forced_LBTA
        )
        return jnp.sin(hidden).sum(), (hidden, routing.expert)

    return jax.grad(objective, has_aux=True)(params)


def test_forced_experts_get_the_routers_gates_in_the_given_order():
    config, params = tiny.MOE, tiny.params(tiny.MOE)
    tokens = random_tokens(config, 1, 6)
    rng = np.random.default_rng(0)
    forced = np.array([[[rng.permutation(5)[:2] for _ in range(6)]] for _ in range(3)], np.int32)
    gradient, (hidden, experts) = forced_gradient(params, tokens, forced)
    expected, _ = reference_model.forward(params, config, tokens[0], forced=forced[:, 0])
    np.testing.assert_allclose(transformer.logits(params, hidden)[0], expected, atol=2e-5)
    np.testing.assert_array_equal(experts, forced)
    assert np.abs(gradient["runs"][0]["mlp"]["router"]).max() > 1e-4, "the router should still learn"


def test_forced_experts_of_zero_probability_have_finite_gates_and_gradients():
    config = tiny.MOE
    params = jax.tree.map(jnp.copy, tiny.params(config))
    params["runs"][0]["mlp"]["router"] *= 1e4  # all probabilities but one are 0 in float32
    tokens = random_tokens(config, 1, 6)
    _, experts = reference_model.forward(params, config, tokens[0])
    others = (experts[:, None, :, :1] + np.array([1, 2])) % config.num_experts
    gradient, (hidden, _) = forced_gradient(params, tokens, others.astype(np.int32))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradient, hidden)))


@pytest.mark.parametrize(
    "policy", ["full", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("offload", "products"))]
)
def test_remat_keeps_values_and_gradients(policy):
    config = tiny.MOE
    params, tokens = tiny.params(config), random_tokens(config, 2, 7)

    def objective(params, config):
        hidden, _ = transformer.apply(params, config, tokens, jnp.ones_like(tokens), mesh=tiny.one_device())
        return jnp.sin(hidden).sum()

    gradient = jax.jit(jax.value_and_grad(objective), static_argnums=1)
    remat = replace(config, remat=policy)
    chex.assert_trees_all_close(gradient(params, remat), gradient(params, config), rtol=1e-4, atol=1e-5)
    names = tiny.primitives(gradient, params, remat, static_argnums=1)
    assert any("remat" in name or "checkpoint" in name for name in names), "the layers are not recomputed"


def test_bfloat16_compute_keeps_float32_logits():
    config = replace(tiny.MOE, dtype="bfloat16")
    params, tokens = tiny.params(config), random_tokens(config, 2, 7)
    hidden, _ = apply(params, config, tokens, jnp.ones_like(tokens), mesh=tiny.one_device())
    logits = transformer.logits(params, hidden)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    exact = np.array([reference_model.forward(params, config, row)[0] for row in tokens])
    assert np.abs(logits - exact).mean() < 0.1 * np.abs(exact).mean()


@pytest.mark.parametrize("name", tiny.slow_but("moe", "some layers dense"))
def test_every_parameter_has_logical_axes_and_an_abstract_shape(name):
    config = tiny.CONFIGS[name]
    params = tiny.params(config)
    axes, abstract = transformer.logical_axes(config), transformer.abstract_params(config)

    def check(param, names, shape):
        assert len(names) == param.ndim and set(names) <= set(RULES)
        assert shape.shape == param.shape and shape.dtype == param.dtype == jnp.float32
        spec(*names)

    jax.tree.map(check, params, axes, abstract)


def test_stacked_layers_are_initialized_differently():
    router = tiny.params(tiny.MOE)["runs"][0]["mlp"]["router"]
    assert not np.array_equal(router[0], router[1])
    np.testing.assert_allclose(np.std(router), tiny.MOE.initializer_range, rtol=0.2)
