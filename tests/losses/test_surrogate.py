"""Shared parts of the losses: a traced clip range, any linear aggregate, the k3 estimator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import CASES, CISPO, DUAL, GRPO, GSPO, GSPO_TOKEN, LUSPO

from gspax import losses
from gspax.losses import surrogate


def clipped_loss(member):
    """The loss as a function of the clip widths and logp."""
    logp, *rest = CASES["holes-0.3"].arguments(member)
    options = {name: value for name, value in member.options if not name.startswith("clip")}

    def loss(clip_low, clip_high, logp):
        terms = member.function(logp, *rest, clip_low=clip_low, clip_high=clip_high, **options)
        return losses.reduce(terms)[0]

    return loss, jnp.asarray(logp)


@pytest.mark.parametrize("member", (GSPO, GSPO_TOKEN, GRPO, DUAL, CISPO), ids=str)
def test_gradients_with_a_traced_clip_range_equal_those_with_numbers(member):
    loss, logp = clipped_loss(member)
    wanted = jax.grad(functools.partial(loss, 0.25, 0.5))(logp)
    assert np.abs(wanted).max() > 0

    def gradient(clip_low, clip_high):
        return jax.grad(functools.partial(loss, clip_low, clip_high))(logp)

    widths = jnp.array([0.25, 0.0], jnp.float32), jnp.array([0.5, 0.0], jnp.float32)
    np.testing.assert_allclose(jax.jit(gradient)(widths[0][0], widths[1][0]), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(gradient))(*widths)[0], wanted, rtol=1e-6)


@pytest.mark.parametrize("member", (GSPO, LUSPO), ids=str)
def test_sequence_losses_accept_any_linear_aggregate(member):
    """They aggregate ones and multiply. GSPO-token has the same value and aggregates tokens."""

    def later_tokens_more(value_BT, mask_BT, segment_BT=None):
        place_BT = jnp.broadcast_to(jnp.arange(1.0, value_BT.shape[1] + 1), value_BT.shape)
        return losses.by_token(value_BT * place_BT, mask_BT, segment_BT)

    x = CASES["some_empty-0.001"]
    got = member.terms(*x.arguments(member), aggregate=later_tokens_more)
    wanted = losses.gspo_token(*x.arguments(member), **dict(member.options), aggregate=later_tokens_more)
    np.testing.assert_allclose(got.value, wanted.value, rtol=1e-6)
    assert np.unique(got.value).size > 4


@pytest.mark.parametrize("sign", (1, -1))
def test_k3_is_exact_for_small_and_large_log_ratios(sign):
    x = sign * np.concatenate([np.geomspace(1e-6, 0.49999, 50), [0.5], np.geomspace(0.50001, 25, 50)])
    got = surrogate.k3_of(jnp.asarray(x, jnp.float32))
    x = np.asarray(x, np.float32).astype(np.float64)
    np.testing.assert_allclose(got, np.expm1(-x) + x, rtol=1e-6)
