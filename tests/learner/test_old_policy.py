"""Where updates take old log-probs and routing from: the sampler's experts, router-shift weights, a frozen router."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from api import (
    Adapted,
    Batch,
    Inputs,
    Outputs,
    Rollout,
    Routing,
    UpdateConstants,
    forward,
    make_objective,
    make_optimizer,
    minibatches,
    new_state,
    router_logp,
    sharding,
    train_step,
)
from small_experiment import objective_with

from gspax import config, losses
from gspax.config import Optimizer, RouterShift, RowShape
from gspax.config.optimizers import adamw
from gspax.errors import UserError
from gspax.losses.router_shift import log_factor

MODEL = replace(tiny.MOE, num_hidden_layers=2)
N, T, L, A, E = 6, 9, 2, 2, MODEL.num_experts


def rollout():
    """Ragged responses; the id of an expert tells its row, layer and token."""
    total = np.array([4, 9, 3, 6, 5, 7])
    column = np.arange(T)[None]
    ids = np.arange(N * L * T * A, dtype=np.uint16).reshape(N, L, T, A)
    return Rollout(
        tokens_BT=np.arange(N * T, dtype=np.int32).reshape(N, T),
        mask_BT=(column >= 2) & (column < total[:, None]),
        logp_BT=np.full((N, T), -1.0, np.float32),
        prompt_length_B=np.full(N, 2, np.int32),
        length_B=(total - 2).astype(np.int32),
        finished_B=np.ones(N, bool),
        expert_BLTA=ids,
    )


@pytest.mark.parametrize("shape", [RowShape(4, T, 4, False), RowShape(2, 16, 2, True)], ids=["rows", "packed"])
def test_experts_of_the_sampler_stay_with_their_tokens(shape):
    sampled = rollout()
    mesh = sharding.make_mesh(config.Mesh(), jax.devices()[:1])
    batches, _ = minibatches.split_minibatches(sampled, 2, shape, mesh)
    seen = 0
    for batch in batches:
        for row, column in np.argwhere(np.asarray(batch.segment_BT) > 0):
            source, position = divmod(int(batch.tokens_BT[row, column]), T)
            np.testing.assert_array_equal(batch.expert_BLTA[row, :, column], sampled.expert_BLTA[source, :, position])
            seen += 1
    assert seen == 34, "every token of every response"


@pytest.mark.parametrize("shape", [RowShape(4, T, 4, False), RowShape(2, 16, 2, True)], ids=["rows", "packed"])
def test_versions_stay_with_their_tokens(shape):
    sampled = rollout()
    sampled = replace(sampled, version_BT=3 * sampled.tokens_BT)
    mesh = sharding.make_mesh(config.Mesh(), jax.devices()[:1])
    batches, _ = minibatches.split_minibatches(sampled, 2, shape, mesh)
    for batch in batches:
        kept = np.asarray(batch.segment_BT) > 0
        np.testing.assert_array_equal(np.asarray(batch.version_BT)[kept], 3 * np.asarray(batch.tokens_BT)[kept])


def a_batch(mask_BT, **arrays):
    zeros = jnp.zeros(mask_BT.shape, jnp.int32)
    return Batch(tokens_BT=zeros, segment_BT=zeros + 1, mask_BT=mask_BT, **arrays)


def test_interpolated_old_log_probs_follow_the_updates_of_the_rollout():
    """Four updates a rollout, two rollouts done; tokens are of the versions 0 to 2."""
    logp_BT, sampler_BT = jnp.full((1, 3), -1.0), jnp.full((1, 3), -3.0)
    batch = a_batch(jnp.ones((1, 3), bool), sampler_logp_BT=sampler_BT, version_BT=jnp.array([[0, 1, 2]]))
    for updates, share in ((8, [1, 1, 1]), (9, [2 / 2.25, 1 / 1.25, 0]), (11, [2 / 2.75, 1 / 1.75, 0])):
        found = train_step.interpolate_old_logp(batch, logp_BT, jnp.int32(updates), 4)
        np.testing.assert_allclose(found.old_logp_BT[0], [-3 + 2 * each for each in share], rtol=1e-6)


@pytest.mark.parametrize("rows", (0, 1, 2))
def test_an_update_interpolates_under_any_split(rows):
    """The ratio of the first update is 1 for every token, later ones by hand."""
    model = replace(MODEL, num_hidden_layers=1)
    rng = np.random.default_rng(0)
    params, mesh = tiny.params(model), tiny.one_device()
    mask_BT = jnp.ones((4, T), bool).at[:, 0].set(False)
    batch = a_batch(
        mask_BT,
        sampler_logp_BT=jnp.asarray(rng.normal(-2, 0.1, (4, T)), jnp.float32),
        old_logp_BT=jnp.full((4, T), jnp.nan),
        version_BT=jnp.asarray(rng.integers(0, 3, (4, T), np.int32)),
        advantage=jnp.asarray(rng.normal(size=4), jnp.float32),
    )
    settings = tiny.settings(model, mesh, microbatch_rows=rows, updates_per_rollout=4)
    gradient = jax.jit(train_step.make_gradient(settings, make_objective(losses.importance_sampling)))
    optimizer = make_optimizer(Optimizer())
    state = new_state(params, optimizer, jax.random.key(0))
    for updates in (8, 11):
        _, terms, scores = gradient(replace(state, step=jnp.int32(updates)), batch, False)
        progress = updates % 4 / 4
        age_BT = 2 - np.asarray(batch.version_BT)
        share_BT = np.ones((4, T)) if progress == 0 else age_BT / (age_BT + progress)
        ratio_BT = np.exp((1 - share_BT) * np.asarray(scores.logp_BT - batch.sampler_logp_BT, np.float64))
        wanted = -(np.asarray(batch.advantage)[:, None] * ratio_BT).mean(-1, where=np.asarray(mask_BT))
        np.testing.assert_allclose(terms.value, wanted, rtol=2e-5)


def test_scoring_gets_the_experts_of_the_rollout_and_the_reference_does_not():
    mesh = sharding.make_mesh(config.Mesh(), jax.devices()[:1])
    batches, _ = minibatches.split_minibatches(rollout(), 1, RowShape(N, T, N, False), mesh)
    given = []

    def score(params, tokens_BT, segment_BT, mask_BT, expert_BLTA, prefix_BT, kept_BTK):
        given.append((params, expert_BLTA))
        return train_step.Scores(jnp.zeros((N, T)), jnp.zeros((N, T)), router_logp_BLTA=jnp.ones(1))

    batches, _ = minibatches.score_minibatches(score, "policy", batches, range(1))
    (batch,) = minibatches.score_first(score, "reference", batches)
    assert [params for params, _ in given] == ["policy", "reference"]
    np.testing.assert_array_equal(given[0][1], rollout().expert_BLTA)
    assert given[1][1] is None
    np.testing.assert_array_equal(batch.expert_BLTA, rollout().expert_BLTA)
    assert batch.router_logp_BLTA == 1


def test_scoring_routes_to_the_experts_given_and_returns_the_routers_log_probs():
    rng = np.random.default_rng(0)
    tokens_BT = jnp.asarray(rng.integers(0, MODEL.vocab_size, (4, T), dtype=np.int32))
    segment_BT, mask_BT = jnp.ones((4, T), jnp.int32), jnp.ones((4, T), bool).at[:, 0].set(False)
    first = rng.integers(0, E, (4, L, T, 1))
    forced_BLTA = jnp.asarray(np.concatenate([first, (first + 1) % E], -1).astype(np.uint8))
    params = tiny.params(MODEL)
    score = train_step.make_score(tiny.settings(MODEL, microbatch_rows=2), keep_experts=True, keep_router_logp=True)
    found = score(params, tokens_BT, segment_BT, mask_BT, forced_BLTA)
    np.testing.assert_array_equal(found.expert_BLTA, forced_BLTA)
    rows = Inputs(tokens_BT, segment_BT, expert_BLTA=forced_BLTA)
    wanted = jax.jit(partial(forward, settings=tiny.settings(MODEL)))(params, rows=rows)
    np.testing.assert_allclose(found.logp_BT[mask_BT], wanted.logp_BT[mask_BT], rtol=1e-5, atol=1e-6)
    log_prob_BLTE = np.asarray(jax.nn.log_softmax(wanted.routing.logits)).swapaxes(0, 1)
    chosen_BLTA = np.take_along_axis(log_prob_BLTE, np.asarray(forced_BLTA, np.int64), -1)
    np.testing.assert_allclose(found.router_logp_BLTA, chosen_BLTA, rtol=1e-4, atol=1e-5)


def routed(seed=0):
    """Outputs and a batch whose routers have moved."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(L, 4, T, E)), jnp.float32)
    expert_BLTA = jnp.asarray(rng.permuted(np.tile(np.arange(E, dtype=np.uint8), (4, L, T, 1)), axis=-1)[..., :A])
    outputs = Outputs(jnp.asarray(rng.normal(-2, 0.1, (4, T)), jnp.float32), jnp.zeros((4, T)), Routing(None, logits))
    mask_BT = jnp.asarray(rng.random((4, T)) < 0.7).at[:, 0].set(False)
    old = router_logp(outputs.routing, expert_BLTA) + jnp.asarray(rng.normal(0, 0.1, (4, L, T, A)), jnp.float32)
    batch = Batch(
        tokens_BT=jnp.zeros((4, T), jnp.int32),
        segment_BT=jnp.ones((4, T), jnp.int32),
        mask_BT=mask_BT,
        old_logp_BT=outputs.logp_BT + 0.05,
        advantage=jnp.asarray(rng.normal(size=4), jnp.float32),
        expert_BLTA=expert_BLTA,
        router_logp_BLTA=old,
    )
    return outputs, batch


@pytest.mark.parametrize("floor", [0.8, 0.97])
def test_the_factor_of_a_shift_by_loops(floor):
    outputs, batch = routed()
    now, old = np.asarray(router_logp(outputs.routing, batch.expert_BLTA)), np.asarray(batch.router_logp_BLTA)
    found = np.asarray(log_factor(now, batch.router_logp_BLTA, batch.mask_BT, floor=floor))
    floors = 0
    for b, t in np.ndindex(4, T):
        at = t - 1  # the position that computed the token's probability
        distance = np.mean([abs(now[b, layer, at, a] - old[b, layer, at, a]) for layer in range(L) for a in range(A)])
        wanted = np.log(max(np.exp(-distance), floor)) if batch.mask_BT[b, t] else 0.0
        floors += wanted == np.log(floor)
        np.testing.assert_allclose(found[b, t], wanted, rtol=1e-5, atol=1e-7)
    assert (floors > 0) == (floor == 0.97), "the floor is reached in one case and not in the other"


def test_a_factor_is_of_the_routing_that_computed_the_token():
    """Two sequences in a row: what the stop tokens do as inputs changes no factor, the last prompt tokens' the first.

    The sampler does not know the experts of the stop tokens.
    """
    stop, last, segment_BT = 7, 5, jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 0]])
    tokens_BT, mask_BT = jnp.array([[3, last, 2, stop, 4, last, 6, stop, 0]]), jnp.zeros((1, T), bool)
    mask_BT = mask_BT.at[0, jnp.array([2, 3, 6, 7])].set(True)
    params, run = tiny.params(MODEL), jax.jit(partial(forward, settings=tiny.settings(MODEL)))
    chosen_BLTA = run(params, rows=Inputs(tokens_BT, segment_BT)).routing.expert.swapaxes(0, 1)
    sampled_BLTA = jnp.where(tokens_BT[:, None, :, None] == stop, E, chosen_BLTA).astype(jnp.uint8)
    rows = Inputs(tokens_BT, segment_BT, expert_BLTA=sampled_BLTA)
    old = run(params, rows=rows)
    np.testing.assert_array_equal(old.routing.expert, chosen_BLTA.swapaxes(0, 1))

    def factors(moved):
        embedding = params["embedding"].at[moved].add(1.0)
        now = run({**params, "embedding": embedding}, rows=rows).routing
        given = router_logp(now, sampled_BLTA), router_logp(old.routing, sampled_BLTA)
        return np.asarray(log_factor(*given, mask_BT, floor=1e-3))[0]

    np.testing.assert_allclose(factors(stop), 0, atol=1e-6)
    assert (factors(last)[[2, 6]] < -0.01).all()


@pytest.mark.parametrize("loss", [losses.gspo, losses.grpo], ids=["gspo", "grpo"])
def test_a_router_shift_multiplies_ratios_before_clipping(loss):
    outputs, batch = routed()
    constants = UpdateConstants(Adapted(*jnp.zeros(3)), None)
    found = objective_with(loss, router_shift=RouterShift(floor=0.5))(outputs, batch, constants)
    gamma_BT = np.exp(
        log_factor(router_logp(outputs.routing, batch.expert_BLTA), batch.router_logp_BLTA, batch.mask_BT)
    )
    scaled = replace(batch, old_logp_BT=batch.old_logp_BT - jnp.log(gamma_BT))
    wanted = make_objective(loss)(outputs, scaled, constants)
    np.testing.assert_allclose(found.value, wanted.value, rtol=1e-5)
    _, metrics = losses.reduce(found)
    np.testing.assert_allclose(metrics["router_shift"], gamma_BT[np.asarray(batch.mask_BT)].mean(), rtol=1e-5)
    assert metrics["router_shift"] < 0.95


def test_a_router_shift_has_no_gradient_and_does_nothing_while_routers_stand_still():
    outputs, batch = routed()
    still = replace(batch, router_logp_BLTA=router_logp(outputs.routing, batch.expert_BLTA))
    constants = UpdateConstants(Adapted(*jnp.zeros(3)), None)
    shifted, plain = objective_with(losses.gspo, router_shift=RouterShift()), make_objective(losses.gspo)
    np.testing.assert_array_equal(shifted(outputs, still, constants).value, plain(outputs, still, constants).value)

    def value(logits):
        moved = outputs._replace(routing=outputs.routing._replace(logits=logits))
        return shifted(moved, batch, constants).value.sum()

    assert not jax.grad(value)(outputs.routing.logits).any()


def test_a_frozen_router_stays_and_has_no_moments():
    params = tiny.params(MODEL)
    settings = Optimizer(learning_rate=0.1, transform=partial(adamw, weight_decay=0.1), frozen=("router",))
    optimizer = make_optimizer(settings)
    state = optimizer.init(params)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    after = optax.apply_updates(params, updates)
    for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(params), strict=True):
        assert np.array_equal(new, old) == ("router" in jax.tree_util.keystr(path)), path
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    routers = [leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params) if "router" in str(path)]
    assert routers and not shapes & set(routers)


def test_a_frozen_name_that_no_parameter_has_is_one_sentence():
    optimizer = make_optimizer(Optimizer(frozen=("routr",)))
    with pytest.raises(UserError, match=r"optimizer\.frozen: wanted names among .*router.*, got 'routr'"):
        optimizer.init(tiny.params(MODEL))
