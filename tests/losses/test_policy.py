"""GSPO, GSPO-token and GRPO against the float64 reference, and the identities between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import CASES, FAMILY, GRPO, GSPO, GSPO_TOKEN, MASKS, Case, case

from gspax import losses

over_family = pytest.mark.parametrize("member", FAMILY, ids=str)


def value_and_gradient(member, arguments, **clip):
    """((loss, metrics), gradient by logp), each member compiled once per clip range and shape."""
    return _compiled(member, *clip.items())(*arguments)


@functools.cache
def _compiled(member, *clip):
    return jax.jit(jax.value_and_grad(functools.partial(member.loss, **dict(clip)), has_aux=True))


def rows_and_gradient(member, arguments):
    """(terms, gradient of Σ value by logp)."""
    return _compiled_rows(member)(*arguments)


@functools.cache
def _compiled_rows(member):
    def numerator(logp, *rest):
        terms = member.terms(logp, *rest)
        return terms.value.sum(), terms

    compiled = jax.jit(jax.grad(numerator, has_aux=True))
    return lambda *arguments: jax.device_get(compiled(*arguments)[::-1])


def assert_near(got, wanted, rtol=1e-5):
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
    assert_near(loss, wanted.loss)
    assert_near(gradient, wanted.loss_gradient)
    assert metrics.keys() == wanted.metrics(member.split).keys()
    for key, value in wanted.metrics(member.split).items():
        # k3 of a tiny log-ratio x is x²/2 and inherits the rounding of x, which is 1e-4 of it here.
        np.testing.assert_allclose(metrics[key], value, rtol=2e-3 if key == "kl" else 1e-5, err_msg=key)
        assert metrics[key].shape == () and metrics[key].dtype == jnp.float32


@over_family
def test_on_policy_gradient_is_minus_advantage_over_length_over_rows(member):
    x = CASES["some_empty-0.3"]
    _, _, advantage, mask = x.arguments(member)
    rows, length = mask.any(-1).sum(), np.maximum(mask.sum(-1, keepdims=True), 1)
    wanted = np.where(mask, -(x.advantage if member.token_advantage else x.advantage[:, :1]) / length / rows, 0)
    (_, metrics), gradient = value_and_gradient(member, (x.logp, x.logp, advantage, mask))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)
    assert metrics["clip_fraction_tokens"] == metrics["kl"] == 0
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1


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


@over_family
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


@over_family
def test_a_ratio_at_the_bound_is_not_clipped(member):
    """With widths of 0 and equal policies every ratio is 1, which is both bounds."""
    x = CASES["ragged-0.3"]
    _, _, advantage, mask = x.arguments(member)
    (_, metrics), gradient = value_and_gradient(member, (x.logp, x.logp, advantage, mask), clip_low=0, clip_high=0)
    (_, _), wanted = value_and_gradient(member, (x.logp, x.logp, advantage, mask))
    np.testing.assert_array_equal(gradient, wanted)
    assert metrics["clip_fraction_tokens"] == 0


@over_family
def test_infinite_widths_switch_clipping_off(member):
    x = CASES["ragged-0.3"]
    (_, metrics), gradient = value_and_gradient(member, x.arguments(member), clip_low=np.inf, clip_high=np.inf)
    assert metrics["clip_fraction_tokens"] == 0
    assert np.all((np.asarray(gradient) != 0) == x.mask)


@over_family
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
    default = member.loss(logp, old_logp, advantage, mask, clip_low=member.clip[0], clip_high=member.clip[1])
    assert default == by_name


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
