"""The objective of an experiment equals its terms combined by hand."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import Adapted, Batch, Routing, objective
from small_experiment import experiment, objective_of

from gspax import losses
from gspax.config import AdaptiveEntropy, Calibration, CovarianceKL, Reference, Regularizers
from gspax.losses import correction, kl, regularizers

L, B, T, E, A = 2, 6, 7, 4, 2


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


MASK = jnp.asarray(np.random.default_rng(0).random((B, T)) < 0.7).at[2].set(False)
LOGP = -jnp.abs(draw(1, B, T))
OUTPUTS = objective.Outputs(LOGP, jnp.abs(draw(2, B, T)), Routing(jnp.zeros((L, B, T, A), int), draw(3, L, B, T, E)))
BATCH = Batch(
    tokens_BT=jnp.zeros((B, T), jnp.int32),
    segment_BT=jnp.ones((B, T), jnp.int32),
    mask_BT=MASK,
    old_logp_BT=LOGP + 0.1 * draw(4, B, T),
    advantage=draw(5, B),
    sampler_logp_BT=LOGP + 0.3 * draw(6, B, T),
    ref_logp_BT=LOGP + 0.3 * draw(7, B, T),
    penalized_BT=jnp.asarray(draw(9, B, T) > 0, jnp.float32),
)
CONSTANTS = objective.UpdateConstants(Adapted(*jnp.array([0.01, 0.02, 0.01])), jnp.abs(draw(8, L, E)))
GIVEN = (BATCH.old_logp_BT, BATCH.advantage, MASK)
TOKENS = partial(losses.grpo, aggregate=losses.by_token)


def truncated():
    return correction.truncate_tokens(BATCH.old_logp_BT, BATCH.sampler_logp_BT, MASK)


def kept(logp):
    return correction.reject_off_policy(logp, BATCH.sampler_logp_BT, BATCH.advantage, MASK, delta=0.01)


def penalized(loss, penalty, coefficient):
    return losses.kl.add_penalty(loss, penalty, coefficient=coefficient)


def entropy(outputs, **how):
    return regularizers.entropy_bonus(outputs.entropy_BT, MASK, **how)


CASES = {
    "bare": ({"loss": losses.gspo}, lambda o: losses.gspo(o.logp_BT, *GIVEN)),
    "correction": (
        {"correction": correction.truncate_tokens},
        lambda o: losses.gspo(o.logp_BT, *GIVEN, correction=truncated()),
    ),
    "rejection": (
        {"rejection": partial(correction.reject_off_policy, delta=0.01)},
        lambda o: losses.gspo(o.logp_BT, *GIVEN, correction=kept(o.logp_BT)),
    ),
    "both": (
        {
            "correction": correction.truncate_tokens,
            "rejection": partial(correction.reject_off_policy, delta=0.01),
        },
        lambda o: losses.gspo(o.logp_BT, *GIVEN, correction=truncated() * kept(o.logp_BT)[:, None]),
    ),
    "calibrated": (
        {"calibration": Calibration()},
        lambda o: losses.gspo(o.logp_BT, *GIVEN, clip_low=0.01, clip_high=0.02),
    ),
    "kl of the tokens that the old policy sampled": (
        {"reference": Reference(loss=kl.token_kl, coefficient=0.3)},
        lambda o: penalized(
            losses.gspo(o.logp_BT, *GIVEN),
            kl.token_kl(o.logp_BT, BATCH.ref_logp_BT, MASK, old_logp=BATCH.old_logp_BT),
            0.3,
        ),
    ),
    "kl aggregated as the loss is": (
        {"loss": TOKENS, "reference": Reference(loss=kl.grpo_kl, coefficient=0.3)},
        lambda o: penalized(
            TOKENS(o.logp_BT, *GIVEN),
            kl.grpo_kl(o.logp_BT, BATCH.ref_logp_BT, MASK, aggregate=losses.by_token),
            0.3,
        ),
    ),
    "kl told its own way": (
        {"reference": Reference(loss=partial(kl.token_kl, old_logp=None), coefficient=0.3)},
        lambda o: penalized(losses.gspo(o.logp_BT, *GIVEN), kl.token_kl(o.logp_BT, BATCH.ref_logp_BT, MASK), 0.3),
    ),
    "a reference that is only measured": ({"reference": Reference()}, lambda o: losses.gspo(o.logp_BT, *GIVEN)),
    "entropy": (
        {"loss": TOKENS, "regularizers": Regularizers(entropy=0.2)},
        lambda o: penalized(TOKENS(o.logp_BT, *GIVEN), entropy(o, aggregate=losses.by_token), 0.2),
    ),
    "kl_cov": (
        {"loss": TOKENS, "regularizers": Regularizers(kl_cov=CovarianceKL(coefficient=0.2))},
        lambda o: penalized(
            TOKENS(o.logp_BT, *GIVEN),
            regularizers.log_ratio_size(
                o.logp_BT, BATCH.old_logp_BT, BATCH.penalized_BT, MASK, aggregate=losses.by_token
            ),
            0.2,
        ),
    ),
    "the squared log-ratio to the sampler": (
        {"loss": TOKENS, "regularizers": Regularizers(log_ratio_square=0.2)},
        lambda o: penalized(
            TOKENS(o.logp_BT, *GIVEN),
            regularizers.log_ratio_square(o.logp_BT, BATCH.sampler_logp_BT, MASK, aggregate=losses.by_token),
            0.2,
        ),
    ),
    "an adaptive entropy coefficient": (
        {"loss": TOKENS, "regularizers": Regularizers(entropy=0.9, adaptive_entropy=AdaptiveEntropy())},
        lambda o: penalized(TOKENS(o.logp_BT, *GIVEN), entropy(o, aggregate=losses.by_token), 0.01),
    ),
    "routers": (
        {"regularizers": Regularizers(load_balance=0.2, router_z=0.1)},
        lambda o: penalized(
            penalized(
                losses.gspo(o.logp_BT, *GIVEN),
                regularizers.load_balance(jax.nn.softmax(o.routing.logits), CONSTANTS.load_LE, MASK),
                0.2,
            ),
            regularizers.router_z(o.routing.logits, MASK),
            0.1,
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_objective_equals_its_terms_combined_by_hand(name):
    changes, by_hand = CASES[name]
    made = objective_of(replace(experiment, **changes))

    def both(terms_of):
        def value(logp, entropy, logits):
            outputs = objective.Outputs(logp, entropy, OUTPUTS.routing._replace(logits=logits))
            terms = terms_of(outputs)
            return losses.reduce(terms)[0], terms

        given = (OUTPUTS.logp_BT, OUTPUTS.entropy_BT, OUTPUTS.routing.logits)
        return jax.grad(value, argnums=(0, 1, 2), has_aux=True)(*given)

    gradient, terms = both(lambda outputs: made(outputs, BATCH, CONSTANTS))
    wanted_gradient, wanted = both(by_hand)
    chex.assert_trees_all_close(gradient, wanted_gradient, rtol=1e-6, atol=1e-9)
    chex.assert_trees_all_close((terms.value, terms.weight), (wanted.value, wanted.weight), rtol=1e-6)
    assert terms.metrics.keys() >= wanted.metrics.keys()


def test_correction_metrics_by_hand():
    weight = jnp.array([[9.0, 2.0, 0.0], [0.0, 0.0, 9.0], [9.0, 9.0, 9.0]])
    mask = jnp.array([[False, True, True], [True, True, False], [False, False, False]])
    terms = losses.Terms(jnp.zeros(3), jnp.ones(3), correction.weight_metrics(weight, mask))
    found = losses.reduce(terms)[1]
    assert found["correction_mean"] == 0.5, "of the two rows that have tokens"
    assert (found["correction_min"], found["correction_max"]) == (0.0, 1.0)
    assert found["correction_rejected"] == 0.75
    by_row = correction.weight_metrics(jnp.array([2.0, 0.0, 5.0]), mask)
    assert losses.reduce(terms._replace(metrics=by_row))[1]["correction_mean"] == 1.0


def own(logp_BT, old_logp_BT, advantage_B, mask_BT):
    """A loss of a user's own, without metrics."""
    value_B = -(advantage_B[:, None] * jnp.exp(logp_BT - old_logp_BT)).sum(-1, where=mask_BT)
    return losses.Terms(value_B, mask_BT.any(-1).astype(jnp.float32), {})


def reduced(loss, batch=BATCH):
    return losses.reduce(objective.make_objective(loss)(OUTPUTS, batch, CONSTANTS))[1]


def test_a_loss_of_ones_own_gets_the_metrics_that_do_not_depend_on_it():
    wanted = {name: x for name, x in reduced(losses.grpo).items() if not name.startswith("clip_fraction")}
    assert wanted.keys() == {
        *("kl", "ratio_mean", "ratio_min", "ratio_max", "ratio_deviation"),
        *("token_ratio_mean", "token_ratio_min", "token_ratio_max"),
        *("weight_ess_min", "weight_share_max"),
    }
    chex.assert_trees_all_equal(reduced(own), wanted)
    names = {"kl": losses.Share(jnp.ones(B), jnp.ones(B))}
    assert reduced(lambda *given: own(*given)._replace(metrics=names))["kl"] == 1, "what it reports itself stays"


def test_the_token_ratio_is_reported_for_losses_that_have_it():
    ratio_BT = np.exp(np.asarray(LOGP - BATCH.old_logp_BT, np.float64))[np.asarray(MASK)]
    found = reduced(losses.grpo)
    for name, value in (("mean", ratio_BT.mean()), ("min", ratio_BT.min()), ("max", ratio_BT.max())):
        np.testing.assert_allclose(found[f"token_ratio_{name}"], value, rtol=1e-5)
    assert "token_ratio_max" not in reduced(losses.gspo)
