"""The float64 reference: its gradients equal finite differences, and the cases cover every branch."""

import numpy as np
import pytest
import reference
from loss_cases import (
    BOUNDED,
    CASES,
    CISPO,
    DAPO,
    DIS,
    DPPO_KL,
    DPPO_TV,
    DR_GRPO,
    DRO,
    DUAL,
    FAMILY,
    GMPO,
    GRPO,
    GSPO,
    IMPORTANCE,
    IPO,
    LUSPO,
    MASKS,
    SAPO,
    VESPO,
    Case,
    case,
)


# Losses without a stop-gradient: not the token form, and no constant weight times log π.
@pytest.mark.parametrize("member", (GSPO, LUSPO, GRPO, DUAL, DR_GRPO, DAPO, IMPORTANCE, SAPO, GMPO, IPO, DRO), ids=str)
@pytest.mark.parametrize("scale", (1e-3, 0.3))
def test_gradient_equals_finite_difference(member, scale):
    x = case(MASKS["ragged"], scale)
    step = 1e-6
    numeric = np.zeros(x.mask.shape)
    for b, t in np.ndindex(*x.mask.shape):
        moved = [x.logp.astype(np.float64), x.logp.astype(np.float64)]
        moved[0][b, t] += step
        moved[1][b, t] -= step
        up, down = (Case(logp, x.old_logp, x.advantage, x.mask).reference(member).value.sum() for logp in moved)
        numeric[b, t] = (up - down) / (2 * step)
    np.testing.assert_allclose(x.reference(member).gradient, numeric, atol=1e-7)


@pytest.mark.parametrize("member", (CISPO, VESPO, DPPO_TV, DPPO_KL, DIS), ids=str)
@pytest.mark.parametrize("scale", (1e-3, 0.3))
def test_gradient_of_a_constant_weight_times_log_prob_is_the_weight(member, scale):
    x = case(MASKS["ragged"], scale)
    result = x.reference(member)
    np.testing.assert_allclose((result.gradient * x.logp).sum(-1), result.value, rtol=1e-12)


@pytest.mark.parametrize("member", FAMILY, ids=str)
def test_no_ratio_is_within_float32_rounding_of_a_bound(member):
    assert min(x.reference(member).margin for x in CASES.values()) > 2e-6


@pytest.mark.parametrize("member", FAMILY, ids=str)
def test_the_cases_have_tokens_clipped_from_both_sides_and_unclipped(member):
    results = [x.reference(member) for x in CASES.values()]
    assert any(r.high.any() for r in results) == any(r.low.any() for r in results) == (member in BOUNDED)
    assert any((r.gradient > 0).any() for r in results)
    assert any((r.gradient < 0).any() for r in results)


def test_the_sequence_ratio_by_hand():
    """A response of 10 tokens that is twice as likely has s = 2^(1/10), not 2."""
    logp, mask = np.full((1, 10), -1.0), np.ones((1, 10), bool)
    logp[0, 3] += np.log(2)
    x = Case(logp, np.full((1, 10), -1.0), np.ones((1, 10)), mask)
    assert x.reference(GSPO).ratio[0] == pytest.approx(2**0.1)


def test_binary_divergences_by_hand():
    assert reference.binary_tv(0.2, 0.3) == pytest.approx(0.1)
    assert reference.binary_kl(0.5, 0.25) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
