"""Interpolated old log-probs against a loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pair_cases import CASES

from gspax.losses.proximal import interpolated_logp


def drawn(seed=0):
    x = CASES["ragged-0.3"]
    return x.logp, x.other, np.random.default_rng(seed).integers(0, 4, x.mask.shape).astype(np.int32)


@pytest.mark.parametrize("progress", (0.0, 0.25, 0.75))
def test_log_probs_lie_where_the_age_does(progress):
    """With versions v as in the paper: α = (v_old - v_μ) / (v - v_μ), and π itself where v is v_old."""
    logp, sampler_logp, age = drawn()
    wanted = np.zeros(logp.shape)
    for at in np.ndindex(logp.shape):
        version_old, version = 7.0, 7.0 + progress
        version_sampled = version_old - int(age[at])
        share = 1.0 if version == version_old else (version_old - version_sampled) / (version - version_sampled)
        wanted[at] = float(sampler_logp[at]) + share * (float(logp[at]) - float(sampler_logp[at]))
    got = jax.jit(interpolated_logp)(logp, sampler_logp, age, jnp.float32(progress))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=2e-7, atol=1e-6)
    np.testing.assert_array_equal(got[age == 0], (logp if progress == 0 else sampler_logp)[age == 0])


def test_before_the_first_update_the_ratio_is_exactly_1():
    logp, sampler_logp, age = drawn()
    np.testing.assert_array_equal(interpolated_logp(logp, sampler_logp, age, 0.0), logp)


def test_there_is_no_gradient():
    logp, sampler_logp, age = drawn()
    for argument in (0, 1):
        gradient = jax.grad(lambda *x: interpolated_logp(*x, age, 0.5).sum(), argument)(logp, sampler_logp)
        assert not np.asarray(gradient).any()


def test_invalid_arguments_are_rejected():
    logp, sampler_logp, age = drawn()
    for arguments, error, message in (
        ((logp.astype(np.float64), sampler_logp, age), TypeError, r"^logp must be a float32 array"),
        ((logp, sampler_logp, age.astype(np.float32)), TypeError, r"^age must be an int32 array"),
        ((logp, sampler_logp[:1], age), ValueError, r"^sampler_logp must have shape \[8, 9\], as logp has"),
    ):
        with pytest.raises(error, match=message):
            interpolated_logp(*arguments, 0.5)
