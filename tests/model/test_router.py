"""The router: scores, a correction bias, groups of experts, a scale; replayed choices, and what does not train it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_model
import stub_experiment
import tiny
from api import Routing, choose_experts, make_optimizer, router_logp, scores_of, transformer

from gspax import config
from gspax.config import Optimizer, Router
from gspax.config.model import architecture_problems
from gspax.config.optimizers import adamw, everything
from gspax.experiment import validate
from gspax.losses.regularizers import load_balance
from gspax.model.router_scores import log_scores, softmax_logits

SIGMOIDS = tiny.CONFIGS["a router of sigmoids"]
apply = jax.jit(transformer.apply, static_argnames=("config", "mesh"))


@pytest.mark.parametrize("groups", [(1, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [True, False])
def test_experts_are_chosen_as_the_reference_does(groups, scoring, biased):
    model = replace(SIGMOIDS, router=Router(scoring=scoring, groups=groups[0], top_groups=groups[1]))
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(40, 6)).astype(np.float32), 0.3 * rng.normal(size=6).astype(np.float32)
    bias = bias if biased else np.zeros_like(bias)
    chosen = choose_experts(log_scores(logits, model.router), jnp.asarray(bias) if biased else None, model.router, 2)
    score = reference_model.softmax if scoring == "softmax" else reference_model.sigmoid
    wanted = [reference_model.choose(score(row.astype(np.float64)), bias, model) for row in logits]
    np.testing.assert_array_equal(chosen, wanted)
    assert len({*np.asarray(chosen).reshape(-1).tolist()}) > 3


def test_a_bias_chooses_and_does_not_weigh():
    """With a bias that lifts one expert above all others, each token goes there with the gate that its score gives."""
    params = tiny.params(SIGMOIDS)
    tokens = np.arange(7)[None]

    def lift(path, leaf):
        return leaf.at[:, 5].add(100.0) if path[-1].key == "correction_bias" else leaf

    lifted = jax.tree_util.tree_map_with_path(lift, params)
    hidden, routing = apply(lifted, SIGMOIDS, tokens, np.ones_like(tokens), mesh=tiny.one_device())
    assert (np.asarray(routing.expert)[..., 0] == 5).all()
    logits, _ = reference_model.forward(lifted, SIGMOIDS, tokens[0])
    np.testing.assert_allclose(transformer.logits(params, hidden)[0], logits, atol=1e-4)


def test_replayed_choices_get_the_gates_of_the_current_router():
    """Also where the replayed experts are of groups that the router would not choose from."""
    params, tokens = tiny.params(SIGMOIDS), np.arange(7)[None]
    forced = np.random.default_rng(1).permuted(np.tile(np.arange(6), (2, 1, 7, 1)), axis=-1)[..., :2]
    hidden, routing = apply(params, SIGMOIDS, tokens, np.ones_like(tokens), forced_LBTA=forced, mesh=tiny.one_device())
    np.testing.assert_array_equal(routing.expert, forced)
    logits, _ = reference_model.forward(params, SIGMOIDS, tokens[0], forced=forced[:, 0])
    np.testing.assert_allclose(transformer.logits(params, hidden)[0], logits, atol=1e-4)


def test_where_the_sampler_knows_no_expert_the_router_chooses():
    """A response's last token, whose id is that of padding: it is no choice of the last expert."""
    params, tokens = tiny.params(SIGMOIDS), np.arange(7)[None]
    given = params, SIGMOIDS, tokens, np.ones_like(tokens)
    own = apply(*given, mesh=tiny.one_device())[1].expert
    forced = np.array(own, np.uint8)
    forced[:, :, -1] = 6
    routing = apply(*given, forced_LBTA=forced, mesh=tiny.one_device())[1]
    np.testing.assert_array_equal(routing.expert, own)
    np.testing.assert_array_equal(scores_of(jnp.ones((2, 6)), jnp.array([[0, 6], [6, 5]])), [[1, 0], [0, 1]])


def test_scores_whose_sigmoid_underflows_still_have_gates():
    """Renormalized gates are a softmax of log-scores, which two scores of exp(-200) have too."""
    log_score = log_scores(jnp.array([-200.0, -201.0]), Router(scoring="sigmoid"))
    np.testing.assert_allclose(jax.nn.softmax(log_score), reference_model.softmax(np.array([1.0, 0.0])), rtol=1e-5)


@pytest.mark.parametrize(
    ("transform", "dtype"),
    [
        (adamw, "float32"),
        (adamw, "bfloat16"),
        (partial(adamw, weight_decay=0.1, decayed=everything), "float32"),
        (optax.lion, "bfloat16"),
    ],
    ids=["adamw", "adamw, bfloat16", "decay", "lion, bfloat16"],
)
def test_no_optimizer_moves_a_correction_bias(transform, dtype):
    model = replace(SIGMOIDS, param_dtype=dtype, num_hidden_layers=1, mlp_only_layers=())
    params = jax.tree.map(jnp.copy, tiny.params(model))
    optimizer = make_optimizer(Optimizer(learning_rate=0.1, transform=transform), dtype)
    biases = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if "correction_bias" in str(path)]
    assert [leaf.dtype for leaf in biases] == ["float32"] and np.abs(biases[0]).min() > 0

    grads = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.zeros_like(leaf) if path[-1].key == "correction_bias" else jnp.ones_like(leaf), params
    )

    @jax.jit
    def update(params, grads):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    before, after = jax.device_get((params, update(params, grads)))
    moved = jax.tree_util.tree_map_with_path(
        lambda path, old, new: (path[-1].key, bool((old != new).any())), before, after
    )
    moved = jax.tree.leaves(moved, is_leaf=lambda leaf: isinstance(leaf, tuple))
    assert {name for name, has_moved in moved if not has_moved} == {"correction_bias"}


def test_a_correction_bias_has_no_gradient():
    params, tokens = tiny.params(SIGMOIDS), jnp.arange(7)[None]

    def loss(params):
        hidden, _ = apply(params, SIGMOIDS, tokens, jnp.ones_like(tokens), mesh=tiny.one_device())
        return transformer.logits(params, hidden).std()

    grads = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params))
    assert {path[-1].key for path, leaf in grads if not leaf.any()} == {"correction_bias"}


def test_an_optimizer_without_correction_biases_has_the_state_of_its_transform():
    made = make_optimizer(Optimizer(learning_rate=0.1, max_grad_norm=0)).init({"head": jnp.ones(3)})
    assert jax.tree.structure(made) == jax.tree.structure(adamw(lambda step: 0.1).init({"head": jnp.ones(3)}))


def test_the_log_scores_of_a_router_shift_are_the_sigmoids():
    logits = jax.random.normal(jax.random.key(0), (2, 1, 3, 6))
    expert = jnp.array([[[[0, 5], [1, 2], [6, 6]]] * 2])
    found = router_logp(Routing(expert, logits), expert, SIGMOIDS.router)
    assert found.shape == (1, 2, 3, 2)
    np.testing.assert_allclose(
        found[0, 1, 0], np.log(reference_model.sigmoid(logits[1, 0, 0, jnp.array([0, 5])])), rtol=1e-5
    )


def test_the_load_balance_of_sigmoids_takes_their_shares():
    logits = jax.random.normal(jax.random.key(0), (1, 1, 3, 6))
    prob = jax.nn.softmax(softmax_logits(logits, SIGMOIDS.router))
    score = reference_model.sigmoid(np.asarray(logits, np.float64))
    np.testing.assert_allclose(prob, score / score.sum(axis=-1, keepdims=True), rtol=1e-5)
    terms = load_balance(prob, jnp.ones((1, 6)), jnp.ones((1, 3), bool))
    np.testing.assert_allclose(terms.value, [1.0], rtol=1e-6)  # balanced: E shares of 1 / E, which sum to one


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"router": Router(groups=4)},
            "model.router.groups: wanted a divisor of model.num_experts (6) with two experts or more in a group, got 4",
        ),
        (
            {"router": Router(groups=3, top_groups=4)},
            "model.router.top_groups: wanted at most model.router.groups (3), with model.num_experts_per_tok (2) "
            "experts or more in them, got 4",
        ),
        (
            {"rope_fraction": 0.4},
            "model.rope_fraction: wanted a share of model.head_dim (8) that is an even number of dimensions, got 0.4",
        ),
    ],
)
def test_routers_and_rotations_that_cannot_be_are_one_sentence(changes, sentence):
    assert list(architecture_problems(replace(SIGMOIDS, **changes))) == [sentence]


def test_correction_biases_can_only_be_moved_where_they_are_trained():
    optimizer = Optimizer(bias_update_speed=0.001)
    balanced = replace(stub_experiment.experiment, optimizer=optimizer)
    without = "optimizer.bias_update_speed: wanted 0 in a model without correction biases, got 0.001"
    frozen = "optimizer.bias_update_speed: wanted 0 beside lora, which does not train the routers, got 0.001"
    assert without in validate(balanced)
    assert frozen in validate(replace(balanced, model=SIGMOIDS, lora=config.Lora(rank=2)))
    stage = config.WarmStart(demonstration=lambda problem, rng: "", optimizer=optimizer)
    assert f"warm_start.{without}" in validate(replace(stub_experiment.experiment, warm_start=stage))
    assert not any("bias_update_speed" in each for each in validate(replace(balanced, model=SIGMOIDS)))


def test_a_regularizer_without_a_meaning_for_sigmoids_is_refused():
    penalties = config.Regularizers(router_z=0.1, load_balance=0.1)
    problems = validate(replace(stub_experiment.experiment, model=SIGMOIDS, regularizers=penalties))
    assert (
        "regularizers.router_z: wanted 0 with a router of sigmoids, which has no partition function to keep small, "
        "got 0.1"
    ) in problems
    assert not any("sigmoid" in each for each in problems if "load_balance" in each)
