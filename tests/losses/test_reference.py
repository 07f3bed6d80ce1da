"""The reference itself: its analytic gradients are those of its values, and the cases have what they are for."""

import numpy as np
import pytest
import reference
from loss_cases import CASES, FAMILY, GRPO, GSPO, MASKS, case


@pytest.mark.parametrize("member", (GSPO, GRPO), ids=str)  # the token form's gradient is not that of its value
@pytest.mark.parametrize("scale", (1e-3, 0.3))
def test_analytic_gradient_is_the_finite_difference(member, scale):
    logp, old_logp, advantage, mask = case(MASKS["ragged"], scale).arguments(member)
    logp, old_logp, advantage = (x.astype(np.float64) for x in (logp, old_logp, advantage))
    step = 1e-6
    numeric = np.zeros(mask.shape)
    for b, t in np.ndindex(*mask.shape):
        moved = [logp.copy(), logp.copy()]
        moved[0][b, t] += step
        moved[1][b, t] -= step
        up, down = (member.reference(x, old_logp, advantage, mask, *member.clip).value.sum() for x in moved)
        numeric[b, t] = (up - down) / (2 * step)
    analytic = member.reference(logp, old_logp, advantage, mask, *member.clip).gradient
    np.testing.assert_allclose(analytic, numeric, atol=1e-7)


@pytest.mark.parametrize("member", FAMILY, ids=str)
def test_no_ratio_of_a_case_is_so_near_a_bound_that_float32_may_fall_on_its_other_side(member):
    assert min(x.reference(member).margin for x in CASES.values()) > 2e-6


@pytest.mark.parametrize("member", FAMILY, ids=str)
def test_the_cases_clip_from_both_sides_and_leave_some_alone(member):
    results = [x.reference(member) for x in CASES.values()]
    assert any(r.high.any() for r in results)
    assert any(r.low.any() for r in results)
    assert any((r.gradient > 0).any() for r in results)
    assert any((r.gradient < 0).any() for r in results)


def test_worked_example_of_the_ratio():
    """A response of 10 tokens that became twice as likely has s = 2^(1/10), not 2."""
    logp, mask = np.full((1, 10), -1.0), np.ones((1, 10), bool)
    logp[0, 3] += np.log(2)
    result = reference.gspo(logp, np.full((1, 10), -1.0), np.ones(1), mask, *GSPO.clip)
    assert result.ratio[0] == pytest.approx(2**0.1)
