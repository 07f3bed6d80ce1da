"""The policy losses against the float64 reference, and identities between them."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from loss_cases import (
    CASES,
    CISPO,
    DAPO,
    DIS,
    DPPO_KL,
    DPPO_TV,
    DR_GRPO,
    DRO,
    FAMILY,
    GMPO,
    GRPO,
    GSPO,
    GSPO_TOKEN,
    IMPORTANCE,
    IPO,
    LUSPO,
    MASKS,
    MINIMUM,
    SEQUENCE,
    VESPO,
    Case,
    case,
)

from gspax import losses
from gspax.losses import kl, regularizers

over_family = pytest.mark.parametrize("member", FAMILY, ids=str)
over_minimum = pytest.mark.parametrize("member", MINIMUM, ids=str)
over_banded = pytest.mark.parametrize("member", (*MINIMUM, CISPO, GMPO), ids=str)


def run(member, arguments, **keywords):
    """(loss, metrics, terms, gradient of the loss by logp). Arrays and clip widths are traced, to share programs."""
    traced = {name: x for name, x in keywords.items() if name.startswith("clip") or name == "correction"}
    traced = {name: np.asarray(x, np.float32) for name, x in traced.items()}
    static = {name: x for name, x in keywords.items() if name not in traced}
    (loss, (metrics, terms)), gradient = jax.device_get(_compiled(member, *static.items())(*arguments, **traced))
    return loss, metrics, terms, gradient


@functools.cache
def _compiled(member, *static):
    def loss(*arguments, **traced):
        terms = member.terms(*arguments, **dict(static), **traced)
        loss, metrics = losses.reduce(terms)
        return loss, (metrics, terms)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def value_and_gradient(member, arguments, **keywords):
    """((loss, metrics), gradient of the loss by logp)."""
    loss, metrics, _, gradient = run(member, arguments, **keywords)
    return (loss, metrics), gradient


def rows_and_gradient(member, arguments, **keywords):
    """(terms, gradient of Σ value by logp)."""
    _, _, terms, gradient = run(member, arguments, **keywords)
    return terms, gradient * max(terms.weight.sum(), np.float32(1))


def assert_near(got, wanted, rtol=1e-6):
    """Relative to the largest entry of `wanted`, which is one row, or one number."""
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol * max(np.abs(wanted).max(initial=0), 1e-6))


@over_family
@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_metrics_equal_the_reference(member, name):
    arguments, wanted = CASES[name].arguments(member), CASES[name].reference(member)
    terms, gradient = rows_and_gradient(member, arguments)
    # Per row, because the extreme case has rows of very different size.
    for b in range(len(wanted.value)):
        assert_near(terms.value[b], wanted.value[b])
        assert_near(gradient[b], wanted.gradient[b])
    np.testing.assert_array_equal(terms.weight, wanted.weight)
    assert terms.value.dtype == terms.weight.dtype == gradient.dtype == np.float32

    (loss, metrics), gradient = value_and_gradient(member, arguments)
    assert_near(loss, wanted.loss, rtol=2e-6 * max(1, np.abs(wanted.value).sum() / max(abs(wanted.value.sum()), 1e-9)))
    assert_near(gradient, wanted.loss_gradient)
    wanted_metrics = wanted.metrics(member.split)
    assert metrics.keys() == wanted_metrics.keys()
    for key, value in wanted_metrics.items():
        # k3 of a tiny log-ratio x is x²/2 and inherits the rounding of x, here 1e-4.
        np.testing.assert_allclose(metrics[key], value, rtol=2e-3 if key == "kl" else 1e-5, err_msg=key)
        assert metrics[key].shape == () and metrics[key].dtype == np.float32


@over_family
def test_on_policy_gradient_equals_importance_sampling(member):
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
def test_every_loss_takes_every_aggregate(member, aggregate):
    x = CASES["some_empty-0.3"]
    wanted = x.reference(member, aggregate=aggregate)
    with jax.disable_jit():
        terms = member.terms(*x.arguments(member), aggregate=getattr(losses, aggregate))
    np.testing.assert_array_equal(terms.weight, wanted.weight)
    for b in range(len(wanted.value)):
        assert_near(terms.value[b], wanted.value[b], rtol=2e-6)


@pytest.mark.parametrize(
    ("member", "axes"),
    [
        *((member, "BT") for member in FAMILY),
        *(  # `prepare` broadcasts it for all losses
            pytest.param(member, "B", marks=[] if member in (GSPO, GRPO) else pytest.mark.slow) for member in FAMILY
        ),
    ],
    ids=str,
)
def test_a_correction_multiplies_the_objective_of_each_token(member, axes):
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
def test_gradients_flow_to_the_policys_log_probs_only(member):
    """Not to the old policy, the advantage or a correction, and not from the metrics."""
    arguments = *CASES["ragged-0.001"].arguments(member), np.ones(MASKS["ragged"].shape, np.float32)

    @jax.jit
    def gradients(*arguments):
        def loss(logp, old_logp, advantage, mask, correction):
            return member.loss(logp, old_logp, advantage, mask, correction=correction)

        of_metrics = jax.grad(lambda *x: sum(loss(*x)[1].values()))(*arguments)
        return of_metrics, jax.grad(lambda *x: loss(*x)[0], argnums=(1, 2, 4))(*arguments)

    for gradient in jax.tree.leaves(gradients(*map(jnp.asarray, arguments))):
        np.testing.assert_array_equal(gradient, 0)


def test_signatures_and_defaults_are_as_documented():
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
        losses.dis: (0.5, 1.0, losses.by_token),
        losses.ipo: (0.1, losses.by_token),
        losses.dro: (0.1, losses.by_token),
        losses.dppo_tv: (0.15, 20.0, losses.by_token),
        losses.dppo_kl: (0.05, 20.0, losses.by_token),
    }
    assert wanted.keys() == {member.function for member in FAMILY}
    for function, defaults in wanted.items():
        parameters = inspect.signature(function).parameters.values()
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        assert tuple(p.default for p in keywords) == (*defaults, None, None), function.__name__
        assert [p.name for p in parameters][:4] == ["logp", "old_logp", "advantage", "mask"]
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in list(parameters)[:4])
        assert [p.name for p in keywords][-3:] == ["aggregate", "segment_ids", "correction"]


@pytest.mark.parametrize("name", ("some_empty-0.001", "some_empty-0.3", "extreme"))
@pytest.mark.parametrize("relative, base", ((LUSPO, GSPO), (DR_GRPO, GRPO), (DAPO, GRPO)), ids=str)
def test_luspo_dr_grpo_and_dapo_differ_from_their_base_by_the_aggregate(relative, base, name):
    arguments = CASES[name].arguments(base)
    keywords = dict(relative.options)
    terms = relative.terms(*arguments)
    same = base.terms(*arguments, aggregate=getattr(losses, relative.aggregate), **keywords)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), terms, same))
    # A row has one sequence, so its value is that of the base times the number of tokens.
    length = CASES[name].mask.sum(-1)
    np.testing.assert_allclose(terms.value, base.terms(*arguments, **keywords).value * length, rtol=1e-6)


def test_a_dual_clip_beyond_all_ratios_changes_nothing():
    x = CASES["ragged-0.3"]
    (loss, metrics), gradient = value_and_gradient(GRPO, x.arguments(GRPO))
    (dual_loss, dual_metrics), dual_gradient = value_and_gradient(GRPO, x.arguments(GRPO), dual_clip=1e6)
    assert dual_loss == loss and dual_metrics == metrics
    np.testing.assert_array_equal(dual_gradient, gradient)


@pytest.mark.parametrize("member", SEQUENCE, ids=str)
def test_all_tokens_of_a_sequence_have_the_same_gradient(member):
    x = CASES["holes-0.3"]
    _, gradient = value_and_gradient(
        member, Case(x.logp, x.old_logp, x.advantage[:, :1] + 0 * x.advantage, x.mask).arguments(member)
    )
    for row, keep in zip(np.asarray(gradient), x.mask, strict=True):
        assert np.ptp(row[keep]) <= 1e-6 * np.abs(row).max()


def test_gmpo_without_clipping_equals_gspo_without_clipping():
    x = CASES["ragged-0.3"]
    wide = dict(clip_low=np.inf, clip_high=np.inf)
    (loss, _), gradient = value_and_gradient(GMPO, x.arguments(GMPO), **wide)
    (gspo_loss, _), gspo_gradient = value_and_gradient(GSPO, x.arguments(GSPO), **wide)
    np.testing.assert_allclose(loss, gspo_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient, gspo_gradient, rtol=1e-6)


def test_cispo_without_clipping_has_the_gradient_of_importance_sampling():
    x = CASES["ragged-0.3"]
    wide = dict(clip_low=np.inf, clip_high=np.inf)
    _, gradient = value_and_gradient(CISPO, x.arguments(CISPO), **wide)
    _, wanted = value_and_gradient(IMPORTANCE, x.arguments(IMPORTANCE), aggregate=losses.by_token)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens_and_grpo_does_not():
    x = CASES["ragged-0.3"]
    _, gradient = value_and_gradient(CISPO, x.arguments(CISPO))
    (_, metrics), cut = value_and_gradient(GRPO, x.arguments(GRPO))
    assert metrics["clip_fraction_tokens"] > 0
    assert np.all((np.asarray(gradient) != 0) == x.mask) and not np.all((np.asarray(cut) != 0) == x.mask)


def test_dppo_masks_a_frequent_token_at_a_ratio_at_which_a_rare_one_moves():
    p = np.array([[1e-4, 0.5]])
    logp, old_logp = (np.log(p * factor).astype(np.float32) for factor in (1.8, 1.0))
    mask = np.ones((1, 2), bool)
    for member in (DPPO_TV, DPPO_KL):
        _, gradient = value_and_gradient(member, (logp, old_logp, np.ones(1, np.float32), mask))
        assert gradient[0, 0] == pytest.approx(-1.8 / 2, rel=1e-5) and gradient[0, 1] == 0


def test_dis_without_bounds_has_the_gradient_of_importance_sampling():
    x = CASES["ragged-0.3"]
    wide = dict(clip_low=np.inf, clip_high=np.inf)
    _, gradient = value_and_gradient(DIS, x.arguments(DIS), **wide)
    _, wanted = value_and_gradient(IMPORTANCE, x.arguments(IMPORTANCE), aggregate=losses.by_token)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", ("ragged-0.3", "holes-0.3"))
def test_dppo_tv_and_the_squared_log_ratio_are_the_default_loss_of_prime_rl(name):
    """Its formula by token in float64: -M ρ A + τ log² ρ, M by the sign of A, the square of masked tokens too."""
    x = CASES[name]
    logp, sampler_logp, advantage, mask = x.arguments(DPPO_TV)

    def ours(logp):
        terms = losses.dppo_tv(logp, sampler_logp, advantage, mask, threshold=0.2, ratio_limit=1e9)
        square = regularizers.log_ratio_square(logp, sampler_logp, mask, aggregate=losses.by_token)
        return losses.reduce(kl.add_penalty(terms, square, coefficient=1e-3))[0]

    wanted, masked = np.zeros(mask.shape), 0
    for b, t in np.argwhere(mask):
        log_p, log_q, a = float(logp[b, t]), float(sampler_logp[b, t]), float(advantage[b])
        moved = math.exp(min(log_p, 0)) - math.exp(min(log_q, 0))
        keep = moved <= 0.2 if a > 0 else moved >= -0.2
        masked += not keep
        wanted[b, t] = (-keep * a * math.exp(log_p - log_q) + 2e-3 * (log_p - log_q)) / mask.sum()
    assert masked > 0
    assert_near(jax.grad(ours)(jnp.asarray(logp)), wanted, rtol=2e-6)


def test_vespo_weight_is_1_on_policy_and_peaks_at_k_over_lambda():
    w = np.array([0.25, 0.5, 2 / 3, 1.0, 2.0], np.float32)[:, None]
    mask = np.ones_like(w, bool)
    _, gradient = value_and_gradient(VESPO, (np.log(w), 0 * w, np.ones(5, np.float32), mask))
    weight = -5 * np.asarray(gradient)[:, 0]
    assert weight[3] == 1 and weight.argmax() == 2
    np.testing.assert_allclose(weight, (w**2 * np.exp(3 * (1 - w)))[:, 0], rtol=1e-6)


def test_vespo_clamps_log_w_to_25():
    """With λ = 0, φ(W) = W^k shows it."""
    logp = np.array([[1e4], [30], [20], [-1e4]], np.float32)
    arguments = logp, 0 * logp, np.ones(4, np.float32), np.ones_like(logp, bool)
    _, gradient = value_and_gradient(VESPO, arguments, k_positive=0.5, lambda_positive=0.0)
    np.testing.assert_allclose(gradient[:, 0], -np.exp([12.5, 12.5, 10, -12.5]) / 4, rtol=1e-6)


def test_the_weight_of_vespo_is_finite():
    logp = np.full((1, 1000), 0.03, np.float32)
    arguments = logp, 0 * logp, np.ones(1, np.float32), np.ones_like(logp, bool)
    _, gradient = value_and_gradient(VESPO, arguments, k_positive=4.0, lambda_positive=0.0)
    np.testing.assert_allclose(gradient, -np.exp(25) / 1000, rtol=1e-5)
    with pytest.raises(ValueError, match="lambda_positive must be finite and at least 0; got inf"):
        losses.vespo(*arguments, lambda_positive=np.inf)


@pytest.mark.parametrize("name", CASES)
def test_gspo_token_with_one_advantage_per_sequence_equals_gspo(name):
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
def test_grpo_equals_gspo_on_sequences_of_one_token(name):
    arguments = CASES[name].arguments(GSPO)
    clip = dict(clip_low=0.1, clip_high=0.2)
    (loss, metrics), gradient = value_and_gradient(GSPO, arguments, **clip)
    (grpo_loss, grpo_metrics), grpo_gradient = value_and_gradient(GRPO, arguments, **clip)
    np.testing.assert_allclose(grpo_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(grpo_gradient, gradient, rtol=1e-6)
    assert grpo_metrics == metrics


def test_token_gradients_of_a_sequence_are_equal_in_gspo_and_differ_in_grpo():
    x = CASES["full-0.3"]
    _, gspo = value_and_gradient(GSPO, x.arguments(GSPO), clip_low=9.0, clip_high=9.0)
    _, grpo = value_and_gradient(GRPO, x.arguments(GRPO), clip_low=9.0, clip_high=9.0)
    assert np.ptp(gspo[:, 1:], axis=-1).max() == 0
    assert np.ptp(grpo[:, 1:], axis=-1).min() > 1e-3


def test_gspo_token_clips_by_the_sign_of_each_tokens_advantage():
    """At s > 1 + clip_high, only tokens with a positive advantage are clipped."""
    mask = np.ones((1, 4), bool)
    old_logp = np.full((1, 4), -1, np.float32)
    advantage = np.array([[1, -1, 2, -2]], np.float32)
    (_, metrics), gradient = value_and_gradient(GSPO_TOKEN, (old_logp + np.float32(0.01), old_logp, advantage, mask))
    np.testing.assert_allclose(gradient, np.exp(0.01) / 4 * np.array([[0, 1, 0, 2]]), rtol=1e-5)
    assert metrics["clip_fraction_tokens"] == 0.5
    assert metrics["clip_fraction_sequences"] == metrics["clip_fraction_high"] == 1


@over_minimum
@pytest.mark.parametrize("sign", (1.0, -1.0))
def test_the_clip_fraction_counts_exactly_the_tokens_without_gradient(member, sign):
    """At ratios around both bounds. A partial gradient would be a tie, which minimum() splits."""
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
def test_infinite_widths_disable_clipping(member):
    x = CASES["ragged-0.3"]
    (_, metrics), gradient = value_and_gradient(member, x.arguments(member), clip_low=np.inf, clip_high=np.inf)
    assert metrics["clip_fraction_tokens"] == 0
    assert np.all((np.asarray(gradient) != 0) == x.mask)


# CISPO, DIS, and IPO clip whatever the advantage; DRO's square has a gradient without one.
@pytest.mark.parametrize("member", [m for m in FAMILY if m not in (CISPO, DIS, IPO, DRO)], ids=str)
def test_a_zero_advantage_is_never_clipped(member):
    x = CASES["full-0.3"]
    (loss, metrics), gradient = value_and_gradient(
        member, (x.logp, x.old_logp, np.zeros_like(x.arguments(member)[2]), x.mask)
    )
    assert loss == 0 and not gradient.any() and metrics["clip_fraction_sequences"] == 0


def test_gspo_loss_reduces_the_terms_of_gspo():
    x = CASES["ragged-0.001"]
    assert losses.gspo_loss(*x.arguments(GSPO)) == losses.reduce(losses.gspo(*x.arguments(GSPO)))
    wide = dict(clip_low=0.5, clip_high=0.5)
    assert losses.gspo_loss(*x.arguments(GSPO), **wide) == losses.reduce(losses.gspo(*x.arguments(GSPO), **wide))


def test_loss_works_on_a_batch_of_no_rows():
    x = case(np.ones((0, 4), bool), 1.0)
    for member in FAMILY:
        (loss, metrics), gradient = jax.value_and_grad(member.loss, has_aux=True)(
            *map(jnp.asarray, x.arguments(member))
        )
        assert loss == 0 and gradient.shape == (0, 4) and all(value == 0 for value in metrics.values())


def test_clip_fraction_of_gspo_counts_all_tokens_of_a_clipped_sequence():
    """One long clipped sequence and three short unclipped ones: 6 of 9 tokens, 1 of 4 sequences."""
    mask = np.arange(6)[None, :] < np.array([[6], [1], [1], [1]])
    logp = np.where(np.arange(4)[:, None] == 0, np.float32(0.01), np.float32(0)) * np.ones((1, 6), np.float32)
    advantage = np.ones(4, np.float32)
    _, metrics = losses.gspo_loss(logp, np.zeros_like(logp), advantage, mask)
    assert metrics["clip_fraction_tokens"] == pytest.approx(6 / 9)
    assert metrics["clip_fraction_sequences"] == metrics["clip_fraction_high"] == 0.25
    assert metrics["clip_fraction_low"] == 0


def test_clip_fractions_of_grpo_count_single_tokens():
    """The first sequence has 4 tokens, one clipped from above; the second has 2, one clipped from below."""
    mask = np.array([[True] * 4, [True, True, False, False]])
    logp = np.array([[0.5, 0.1, -0.5, 0], [0.5, -0.5, -0.5, -0.5]], np.float32)
    _, metrics = losses.reduce(losses.grpo(logp, np.zeros_like(logp), np.array([1, -1], np.float32), mask))
    assert metrics["clip_fraction_tokens"] == pytest.approx(2 / 6)
    assert metrics["clip_fraction_high"] == metrics["clip_fraction_low"] == pytest.approx(1 / 6)
    assert metrics["clip_fraction_sequences"] == 1


@pytest.mark.parametrize("name", MASKS)
def test_weights_depend_only_on_the_mask(name):
    a, b = case(MASKS[name], 1e-3, seed=1), case(MASKS[name], 0.3, seed=2)
    for member in FAMILY:
        weights = [run(member, x.arguments(member))[2].weight for x in (a, b)]
        np.testing.assert_array_equal(*weights)
