"""GSPO, GSPO-token and GRPO against the float64 reference, and the identities between them."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from loss_cases import (
    CASES,
    CISPO,
    DAPO,
    DPPO_KL,
    DPPO_TV,
    DR_GRPO,
    FAMILY,
    GMPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    IMPORTANCE,
    LUSPO,
    MASKS,
    MINIMUM,
    SEQUENCE,
    VESPO,
    Case,
    case,
)

from gspax import losses

over_family = pytest.mark.parametrize("member", FAMILY, ids=str)
over_minimum = pytest.mark.parametrize("member", MINIMUM, ids=str)
over_banded = pytest.mark.parametrize("member", (*MINIMUM, CISPO, GMPO), ids=str)


def value_and_gradient(member, arguments, **keywords):
    """((loss, metrics), gradient by logp), each member compiled once per choice of keywords and shape."""
    (loss, metrics), gradient = _compiled(member, *keywords.items())(*arguments)
    return (loss, metrics), gradient


@functools.cache
def _compiled(member, *keywords):
    return jax.jit(jax.value_and_grad(functools.partial(member.loss, **dict(keywords)), has_aux=True))


def rows_and_gradient(member, arguments, **arrays):
    """(terms, gradient of Σ value by logp)."""
    terms, gradient = jax.device_get(_compiled_rows(member)(*arguments, **arrays)[::-1])
    return terms, gradient


@functools.cache
def _compiled_rows(member):
    def numerator(logp, *rest, **arrays):
        terms = member.terms(logp, *rest, **arrays)
        return terms.value.sum(), terms

    return jax.jit(jax.grad(numerator, has_aux=True))


def assert_near(got, wanted, rtol=1e-6):
    """Relative to the largest entry of `wanted`, which is one row, or one number."""
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol * max(np.abs(wanted).max(initial=0), 1e-6))


@over_family
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_the_references(member, name):
    wanted = CASES[name].reference(member)
    terms, gradient = rows_and_gradient(member, CASES[name].arguments(member))
    # Per row, because the extreme case has rows of very different size.
    for b in range(len(wanted.value)):
        assert_near(terms.value[b], wanted.value[b])
        assert_near(gradient[b], wanted.gradient[b])
    np.testing.assert_array_equal(terms.weight, wanted.weight)
    assert terms.value.dtype == terms.weight.dtype == gradient.dtype == jnp.float32


@over_family
@pytest.mark.parametrize("name", CASES)
def test_reduced_loss_and_metrics_are_the_references(member, name):
    wanted = CASES[name].reference(member)
    (loss, metrics), gradient = value_and_gradient(member, CASES[name].arguments(member))
    assert_near(loss, wanted.loss, rtol=2e-6 * max(1, np.abs(wanted.value).sum() / max(abs(wanted.value.sum()), 1e-9)))
    assert_near(gradient, wanted.loss_gradient)
    assert metrics.keys() == wanted.metrics(member.split).keys()
    for key, value in wanted.metrics(member.split).items():
        # k3 of a tiny log-ratio x is x²/2 and inherits the rounding of x, which is 1e-4 of it here.
        np.testing.assert_allclose(metrics[key], value, rtol=2e-3 if key == "kl" else 1e-5, err_msg=key)
        assert metrics[key].shape == () and metrics[key].dtype == jnp.float32


@over_family
def test_on_policy_gradient_is_that_of_importance_sampling(member):
    """Minus the advantage, times a token's share in its aggregate."""
    x = CASES["some_empty-0.3"]
    _, _, advantage, mask = x.arguments(member)
    result = Case(x.logp, x.logp, x.advantage, mask).reference(IMPORTANCE, aggregate=member.aggregate)
    share = np.abs(result.gradient / np.where(mask, x.advantage[:, :1], 1)) / result.weight.sum()
    wanted = -share * (x.advantage if member.token_advantage else x.advantage[:, :1])
    (_, metrics), gradient = value_and_gradient(member, (x.logp, x.logp, advantage, mask))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)
    if not member.token_advantage:
        aggregate = getattr(losses, member.aggregate)
        _, wanted = value_and_gradient(IMPORTANCE, (x.logp, x.logp, advantage, mask), aggregate=aggregate)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6)
    assert metrics["clip_fraction_tokens"] == metrics["kl"] == 0
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1


@over_family
@pytest.mark.parametrize("aggregate", reference.AGGREGATES)
def test_any_loss_can_be_aggregated_in_any_way(member, aggregate):
    x = CASES["some_empty-0.3"]
    wanted = x.reference(member, aggregate=aggregate)
    terms = member.terms(*x.arguments(member), aggregate=getattr(losses, aggregate))
    np.testing.assert_array_equal(terms.weight, wanted.weight)
    for b in range(len(wanted.value)):
        assert_near(terms.value[b], wanted.value[b], rtol=2e-6)


@over_family
@pytest.mark.parametrize("axes", ("B", "BT"))
def test_a_correction_multiplies_each_tokens_objective(member, axes):
    x = CASES["some_empty-0.3"]
    correction = np.random.default_rng(3).exponential(size=x.mask.shape[: len(axes)]).astype(np.float32)
    wanted = x.reference(member, correction=correction.astype(np.float64))
    garbage = np.where(x.mask if axes == "BT" else x.mask.any(-1), correction, np.float32(np.nan))
    for given in (correction, garbage):
        terms, gradient = rows_and_gradient(member, x.arguments(member), correction=given)
        for b in range(len(wanted.value)):
            assert_near(terms.value[b], wanted.value[b], rtol=2e-6)
            assert_near(gradient[b], wanted.gradient[b], rtol=2e-6)
        np.testing.assert_array_equal(terms.weight, wanted.weight)


@over_family
def test_no_gradient_flows_through_a_correction(member):
    x = CASES["some_empty-0.3"]
    correction = jnp.ones(x.mask.shape, jnp.float32)
    gradient = jax.grad(lambda c: member.loss(*x.arguments(member), correction=c)[0])(correction)
    np.testing.assert_array_equal(gradient, 0)


def test_the_defaults_are_those_that_the_docstrings_state():
    wanted = {
        losses.gspo: (3e-4, 4e-4, losses.by_sequence),
        losses.gspo_token: (3e-4, 4e-4, losses.by_sequence),
        losses.luspo: (2e-3, 2.5e-3, losses.by_constant),
        losses.grpo: (0.2, 0.27, None, losses.by_sequence),
        losses.dr_grpo: (0.2, 0.2, None, losses.by_constant),
        losses.dapo: (0.2, 0.28, None, losses.by_token),
        losses.importance_sampling: (losses.by_sequence,),
        losses.cispo: (1.0, 4.0, losses.by_token),
        losses.sapo: (1.0, 1.05, losses.by_sequence),
        losses.gmpo: (0.4, 0.4, losses.by_sequence),
        losses.vespo: (2.0, 3.0, 3.0, 2.0, losses.by_token),
        losses.dppo_tv: (0.15, 20.0, losses.by_token),
        losses.dppo_kl: (0.05, 20.0, losses.by_token),
    }
    assert wanted.keys() == {member.function for member in FAMILY}
    for function, defaults in wanted.items():
        parameters = inspect.signature(function).parameters.values()
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert tuple(p.default for p in keywords) == (*defaults, None, None), function.__name__
        assert [p.name for p in parameters][:4] == ["logp", "old_logp", "advantage", "mask"]
        assert [p.name for p in keywords][-3:] == ["aggregate", "segment_ids", "correction"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("relative, base", ((LUSPO, GSPO), (DR_GRPO, GRPO), (DAPO, GRPO)), ids=str)
def test_luspo_is_gspo_and_dr_grpo_and_dapo_are_grpo_but_for_the_aggregate(relative, base, name):
    arguments = CASES[name].arguments(base)
    keywords = dict(relative.options)
    terms = relative.terms(*arguments)
    same = base.terms(*arguments, aggregate=getattr(losses, relative.aggregate), **keywords)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), terms, same))
    # A row has one sequence, so its value is that of the base times the number of tokens.
    length = CASES[name].mask.sum(-1)
    np.testing.assert_allclose(terms.value, base.terms(*arguments, **keywords).value * length, rtol=1e-6)


def test_a_dual_clip_that_no_ratio_reaches_is_none():
    x = CASES["ragged-0.3"]
    (loss, metrics), gradient = value_and_gradient(GRPO, x.arguments(GRPO))
    (dual_loss, dual_metrics), dual_gradient = value_and_gradient(GRPO, x.arguments(GRPO), dual_clip=1e6)
    assert dual_loss == loss and dual_metrics == metrics
    np.testing.assert_array_equal(dual_gradient, gradient)


@pytest.mark.parametrize("member", SEQUENCE, ids=str)
def test_tokens_of_a_sequence_have_the_same_weight(member):
    x = CASES["holes-0.3"]
    _, gradient = value_and_gradient(
        member, Case(x.logp, x.old_logp, x.advantage[:, :1] + 0 * x.advantage, x.mask).arguments(member)
    )
    for row, keep in zip(np.asarray(gradient), x.mask, strict=True):
        assert np.ptp(row[keep]) <= 1e-6 * np.abs(row).max()


def test_gmpo_with_infinite_widths_is_gspo_with_infinite_widths():
    x = CASES["ragged-0.3"]
    wide = dict(clip_low=np.inf, clip_high=np.inf)
    (loss, _), gradient = value_and_gradient(GMPO, x.arguments(GMPO), **wide)
    (gspo_loss, _), gspo_gradient = value_and_gradient(GSPO, x.arguments(GSPO), **wide)
    np.testing.assert_allclose(loss, gspo_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient, gspo_gradient, rtol=1e-6)


def test_cispo_with_infinite_widths_has_the_gradient_of_importance_sampling():
    x = CASES["ragged-0.3"]
    wide = dict(clip_low=np.inf, clip_high=np.inf)
    _, gradient = value_and_gradient(CISPO, x.arguments(CISPO), **wide)
    _, wanted = value_and_gradient(IMPORTANCE, x.arguments(IMPORTANCE), aggregate=losses.by_token)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


def test_cispo_keeps_a_gradient_where_grpo_cuts_it():
    x = CASES["ragged-0.3"]
    _, gradient = value_and_gradient(CISPO, x.arguments(CISPO))
    (_, metrics), cut = value_and_gradient(GRPO, x.arguments(GRPO))
    assert metrics["clip_fraction_tokens"] > 0
    assert np.all((np.asarray(gradient) != 0) == x.mask) and not np.all((np.asarray(cut) != 0) == x.mask)


def test_dppo_lets_a_rare_token_move_by_a_ratio_at_which_it_stops_a_frequent_one():
    p = np.array([[1e-4, 0.5]])
    logp, old_logp = (np.log(p * factor).astype(np.float32) for factor in (1.8, 1.0))
    mask = np.ones((1, 2), bool)
    for member in (DPPO_TV, DPPO_KL):
        _, gradient = value_and_gradient(member, (logp, old_logp, np.ones(1, np.float32), mask))
        assert gradient[0, 0] == pytest.approx(-1.8 / 2, rel=1e-5) and gradient[0, 1] == 0


def test_vespos_weight_is_1_on_policy_and_largest_at_k_over_lambda():
    w = np.array([0.25, 0.5, 2 / 3, 1.0, 2.0], np.float32)[:, None]
    mask = np.ones_like(w, bool)
    _, gradient = value_and_gradient(VESPO, (np.log(w), 0 * w, np.ones(5, np.float32), mask))
    weight = -5 * np.asarray(gradient)[:, 0]
    assert weight[3] == 1 and weight.argmax() == 2
    np.testing.assert_allclose(weight, (w**2 * np.exp(3 * (1 - w)))[:, 0], rtol=1e-6)


def test_vespo_holds_log_w_within_25():
    """Seen where the exponential does not hide it, with λ = 0: then φ(W) = W^k."""
    logp = np.array([[1e4], [30], [20], [-1e4]], np.float32)
    arguments = logp, 0 * logp, np.ones(4, np.float32), np.ones_like(logp, bool)
    _, gradient = value_and_gradient(VESPO, arguments, k_positive=0.5, lambda_positive=0.0)
    np.testing.assert_allclose(gradient[:, 0], -np.exp([12.5, 12.5, 10, -12.5]) / 4, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gspo_token_with_one_advantage_per_sequence_is_gspo(name):
    arguments = CASES[name].arguments(GSPO)
    (loss, metrics), gradient = value_and_gradient(GSPO, arguments)
    logp, old_logp, advantage, mask = arguments
    for same in (advantage, np.repeat(advantage[:, None], mask.shape[1], axis=1)):
        (token_loss, token_metrics), token_gradient = value_and_gradient(GSPO_TOKEN, (logp, old_logp, same, mask))
        np.testing.assert_allclose(token_loss, loss, rtol=1e-6)
        np.testing.assert_allclose(token_gradient, gradient, rtol=1e-6)
        assert token_metrics == metrics
        np.testing.assert_array_equal(token_gradient == 0, gradient == 0)


@pytest.mark.parametrize("name", ("length_one-0.001", "length_one-0.3"))
def test_grpo_is_gspo_on_sequences_of_one_token(name):
    arguments = CASES[name].arguments(GSPO)
    clip = dict(clip_low=0.1, clip_high=0.2)
    (loss, metrics), gradient = value_and_gradient(GSPO, arguments, **clip)
    (grpo_loss, grpo_metrics), grpo_gradient = value_and_gradient(GRPO, arguments, **clip)
    np.testing.assert_allclose(grpo_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(grpo_gradient, gradient, rtol=1e-6)
    assert grpo_metrics == metrics


def test_gspo_gives_every_token_of_a_sequence_the_same_weight_and_grpo_does_not():
    x = CASES["full-0.3"]
    _, gspo = value_and_gradient(GSPO, x.arguments(GSPO), clip_low=9.0, clip_high=9.0)
    _, grpo = value_and_gradient(GRPO, x.arguments(GRPO), clip_low=9.0, clip_high=9.0)
    assert np.ptp(gspo[:, 1:], axis=-1).max() == 0
    assert np.ptp(grpo[:, 1:], axis=-1).min() > 1e-3


def test_gspo_token_follows_the_sign_of_each_tokens_advantage():
    """At s > 1 + clip_high, only the tokens with a positive advantage are cut."""
    mask = np.ones((1, 4), bool)
    old_logp = np.full((1, 4), -1, np.float32)
    advantage = np.array([[1, -1, 2, -2]], np.float32)
    (_, metrics), gradient = value_and_gradient(GSPO_TOKEN, (old_logp + np.float32(0.01), old_logp, advantage, mask))
    np.testing.assert_allclose(gradient, np.exp(0.01) / 4 * np.array([[0, 1, 0, 2]]), rtol=1e-5)
    assert metrics["clip_fraction_tokens"] == 0.5
    assert metrics["clip_fraction_sequences"] == metrics["clip_fraction_high"] == 1


@over_minimum
@pytest.mark.parametrize("sign", (1.0, -1.0))
def test_a_token_is_counted_as_clipped_exactly_if_its_gradient_is_cut(member, sign):
    """Ratio by ratio around both bounds. A gradient between whole and none would be a tie that minimum() splits."""
    steps = np.arange(-20, 20) * 2.0**-24  # the spacing of float32 just below 1
    logp = np.concatenate([np.log1p(bound) + steps for bound in (-member.clip[0], member.clip[1])]).astype(np.float32)
    mask = np.ones((logp.size, 1), bool)
    # Times 0.3, r A and the bound's product round to the same float for some r beyond the bound.
    advantage = np.full((logp.size, 1), sign * 0.3, np.float32)
    x = Case(logp[:, None], np.zeros_like(mask, np.float32), advantage, mask)
    terms, gradient = rows_and_gradient(member, x.arguments(member))
    cut = np.asarray(terms.metrics["clip_fraction_tokens"].part) == 1
    assert cut.any() and not cut.all()
    whole = -advantage[:, 0] * np.exp(logp)
    np.testing.assert_allclose(gradient[:, 0], np.where(cut, 0, whole), rtol=1e-6)


@over_minimum
def test_a_ratio_at_the_bound_is_not_clipped(member):
    """With widths of 0 and equal policies every ratio is 1, which is both bounds."""
    x = CASES["ragged-0.3"]
    _, _, advantage, mask = x.arguments(member)
    (_, metrics), gradient = value_and_gradient(member, (x.logp, x.logp, advantage, mask), clip_low=0, clip_high=0)
    (_, _), wanted = value_and_gradient(member, (x.logp, x.logp, advantage, mask))
    np.testing.assert_array_equal(gradient, wanted)
    assert metrics["clip_fraction_tokens"] == 0


@over_banded
def test_infinite_widths_switch_clipping_off(member):
    x = CASES["ragged-0.3"]
    (_, metrics), gradient = value_and_gradient(member, x.arguments(member), clip_low=np.inf, clip_high=np.inf)
    assert metrics["clip_fraction_tokens"] == 0
    assert np.all((np.asarray(gradient) != 0) == x.mask)


@pytest.mark.parametrize("member", [m for m in FAMILY if m is not CISPO], ids=str)  # CISPO holds weights, not updates
def test_a_zero_advantage_is_never_clipped(member):
    x = CASES["full-0.3"]
    (loss, metrics), gradient = value_and_gradient(
        member, (x.logp, x.old_logp, np.zeros_like(x.arguments(member)[2]), x.mask)
    )
    assert loss == 0 and not gradient.any() and metrics["clip_fraction_sequences"] == 0


@over_family
def test_no_gradient_flows_through_metrics_old_policy_or_advantage(member):
    arguments = tuple(map(jnp.asarray, CASES["ragged-0.001"].arguments(member)))
    through_metrics = jax.jit(jax.grad(lambda *x: sum(member.loss(*x)[1].values())))(*arguments)
    np.testing.assert_array_equal(through_metrics, 0)
    for constant in jax.jit(jax.grad(lambda *x: member.loss(*x)[0], argnums=(1, 2)))(*arguments):
        np.testing.assert_array_equal(constant, 0)


@over_family
def test_parameters_are_called_as_documented(member):
    logp, old_logp, advantage, mask = CASES["ragged-0.001"].arguments(member)
    by_name = member.loss(logp=logp, old_logp=old_logp, advantage=advantage, mask=mask)
    assert by_name == member.loss(logp, old_logp, advantage, mask)


@pytest.mark.parametrize("loss", (losses.gspo, losses.gspo_token, losses.grpo))
def test_the_reduced_losses_reduce(loss):
    x = CASES["ragged-0.001"]
    reduced = getattr(losses, f"{loss.__name__}_loss")
    assert reduced(*x.arguments(GSPO)) == losses.reduce(loss(*x.arguments(GSPO)))
    wide = dict(clip_low=0.5, clip_high=0.5)
    assert reduced(*x.arguments(GSPO), **wide) == losses.reduce(loss(*x.arguments(GSPO), **wide))


def test_loss_works_on_a_batch_of_no_rows():
    x = case(np.ones((0, 4), bool), 1.0)
    for member in FAMILY:
        (loss, metrics), gradient = value_and_gradient(member, x.arguments(member))
        assert loss == 0 and gradient.shape == (0, 4) and all(value == 0 for value in metrics.values())


def test_clip_fraction_of_gspo_counts_all_tokens_of_a_clipped_sequence():
    """One long clipped sequence beside three short ones that are not: 6 of 9 tokens, 1 of 4 sequences."""
    mask = np.arange(6)[None, :] < np.array([[6], [1], [1], [1]])
    logp = np.where(np.arange(4)[:, None] == 0, np.float32(0.01), np.float32(0)) * np.ones((1, 6), np.float32)
    advantage = np.ones(4, np.float32)
    _, metrics = losses.gspo_loss(logp, np.zeros_like(logp), advantage, mask)
    assert metrics["clip_fraction_tokens"] == pytest.approx(6 / 9)
    assert metrics["clip_fraction_sequences"] == metrics["clip_fraction_high"] == 0.25
    assert metrics["clip_fraction_low"] == 0


def test_clip_fractions_of_grpo_count_single_tokens():
    """Of 4 + 2 tokens the first sequence has one cut from above, the second one from below."""
    mask = np.array([[True] * 4, [True, True, False, False]])
    logp = np.array([[0.5, 0.1, -0.5, 0], [0.5, -0.5, -0.5, -0.5]], np.float32)
    _, metrics = losses.grpo_loss(logp, np.zeros_like(logp), np.array([1, -1], np.float32), mask)
    assert metrics["clip_fraction_tokens"] == pytest.approx(2 / 6)
    assert metrics["clip_fraction_high"] == metrics["clip_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["clip_fraction_sequences"] == 1


@pytest.mark.parametrize("name", MASKS)
def test_weights_depend_on_the_mask_alone(name):
    a, b = case(MASKS[name], 1e-3, seed=1), case(MASKS[name], 0.3, seed=2)
    for member in FAMILY:
        weights = [member.terms(*x.arguments(member)).weight for x in (a, b)]
        np.testing.assert_array_equal(*weights)
