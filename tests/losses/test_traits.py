"""Traits of a loss, however it is wrapped or named."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import Adapted, Batch, noise_warnings, objective
from loss_cases import CASES, FAMILY
from small_experiment import experiment, objective_with

from gspax import losses
from gspax.config import Calibration, Reference, Regularizers
from gspax.config.functions import title_of
from gspax.experiment import validate, warnings
from gspax.losses import correction, kl
from gspax.losses.traits import aggregate_of, level_of

BUILT_IN = tuple({member.function: None for member in FAMILY})


def wrapped(loss):
    @functools.wraps(loss)
    def other(*args, **options):
        return loss(*args, **options)

    other.__name__ = other.__qualname__ = "other"
    return other


def defined(loss):
    @losses.has_traits(losses.traits_of(loss))
    def mine(logp, old_logp, advantage, mask, **options):
        return loss(logp, old_logp, advantage, mask, **options)

    return functools.partial(mine, **bounds(loss))


def bounds(loss):
    """The clip range. A run reads it from the keywords of a loss, not from its traits."""
    return {name: loss.__kwdefaults__[name] for name in ("clip_low", "clip_high") if name in loss.__kwdefaults__}


WRAPS = {
    "partial": functools.partial,
    "partial of a partial": lambda loss: functools.partial(functools.partial(loss), **bounds(loss)),
    "wraps": wrapped,
    "partial of wraps": lambda loss: functools.partial(wrapped(loss), **bounds(loss)),
    "def with the record": defined,
}
over_losses = pytest.mark.parametrize("loss", BUILT_IN, ids=lambda loss: loss.__name__)
over_wraps = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
# Traits are compared for every pair of a loss and a wrap, what they lead to for some.
PAIRS = [
    *zip(BUILT_IN, itertools.cycle(WRAPS.values()), strict=False),
    *((losses.gspo, wrap) for wrap in WRAPS.values()),
]
over_pairs = pytest.mark.parametrize(("loss", "wrap"), PAIRS)


@over_losses
def test_traits_agree_with_the_signature(loss):
    traits, keywords = losses.traits_of(loss), loss.__kwdefaults__
    assert traits.clip_range == ("clip_low" in keywords) == ("clip_high" in keywords)
    assert (traits.correction is not None) == ("correction" in keywords)
    assert traits.aggregate is keywords["aggregate"]


@over_losses
@over_wraps
def test_a_wrapped_loss_keeps_its_traits(loss, wrap):
    assert losses.traits_of(wrap(loss)) == losses.traits_of(loss)
    assert aggregate_of(wrap(loss)) is losses.traits_of(loss).aggregate
    other = functools.partial(wrap(loss), aggregate=losses.by_token)
    assert aggregate_of(other) is losses.by_token


EXPERIMENTS = (
    {"calibration": Calibration()},
    {"correction": correction.truncate_tokens},
    {"reference": Reference(loss=kl.sequence_kl), "regularizers": Regularizers(entropy=0.1)},
    {"clip_low": 1.5},
    {"clip_high": 0.3},
)


def messages(loss, bounds):
    """The errors and warnings of each of the experiments with this loss, without its name.

    Args:
      bounds: the names of the clip widths that it has.
    """
    found = []
    for changes in EXPERIMENTS:
        clip = {name: value for name, value in changes.items() if name in bounds}
        rest = {name: value for name, value in changes.items() if not name.startswith("clip_")}
        variant = replace(experiment, loss=functools.partial(loss, **clip), **rest)
        sentences = *validate(variant), *warnings(variant)
        found.append([sentence.replace(title_of(loss), "LOSS") for sentence in sentences])
    return found


unwrapped_messages = functools.cache(messages)


@over_pairs
def test_a_wrapped_loss_is_validated_the_same(loss, wrap):
    """Apart from its name in the messages."""
    names = tuple(bounds(loss))
    assert messages(wrap(loss), names) == unwrapped_messages(loss, names)
    assert noise_warnings(wrap(loss), 0.01) == noise_warnings(loss, 0.01)


@over_pairs
def test_a_wrapped_loss_trains_the_same(loss, wrap):
    """The gradient of an objective with every term that reads traits."""
    x = CASES["some_empty-0.3"]
    zeros = jnp.zeros(x.mask.shape, jnp.int32)
    batch = Batch(
        tokens_BT=zeros,
        segment_BT=zeros + 1,
        mask_BT=x.mask,
        old_logp_BT=x.old_logp,
        advantage=x.advantage[:, 0],
        sampler_logp_BT=x.old_logp,
        ref_logp_BT=x.old_logp,
    )
    constants = objective.UpdateConstants(Adapted(*jnp.array([0.01, 0.02, 0.0])), None)

    def gradient(function):
        minimized = objective_with(
            function,
            correction=correction.truncate_tokens,
            reference=Reference(loss=kl.token_kl, coefficient=0.1),
            calibration=Calibration() if losses.traits_of(function).clip_range else None,
        )
        return jax.grad(lambda logp: minimized(objective.Outputs(logp, logp, None), batch, constants).value.sum())(
            jnp.asarray(x.logp)
        )

    np.testing.assert_array_equal(gradient(wrap(loss)), gradient(loss))


def test_traits_default_to_the_signature():
    def own(logp, old_logp, advantage, mask, *, clip_low=0.1, clip_high=0.2, aggregate=losses.by_token): ...

    traits = losses.Traits(ratio="token", clip_range=True, aggregate=losses.by_token)
    assert losses.traits_of(own) == losses.traits_of(functools.partial(own, clip_low=0.3)) == traits
    assert losses.traits_of(lambda logp, old_logp, advantage, mask: None) == losses.Traits()
    assert losses.traits_of(lambda *x, correction=None: None).correction == "token"
    assert losses.traits_of(max) == losses.Traits(), "its signature cannot be read"


def test_aggregates_and_corrections_have_a_level():
    assert level_of(functools.partial(losses.by_constant, length=3)) == level_of(losses.by_sequence) == "sequence"
    assert level_of(losses.by_token) == level_of(functools.partial(correction.truncate_tokens, cap=3.0)) == "token"
    assert level_of(correction.mask_tokens) == "token" and level_of(correction.truncate_geometric) == "sequence"
    assert level_of(lambda value, mask: None) is None
    sequence, token = correction.reject_sequences, functools.partial(correction.reject_tokens, high=1.0)
    for factors, level in (((sequence, sequence), "sequence"), ((sequence, token), "token"), ((max,), None)):
        assert level_of(functools.partial(correction.product, factors=factors)) == level


@pytest.mark.parametrize("name", ("full-0.001", "full-0.3"))
def test_a_token_correction_scales_each_token_if_the_traits_allow(name):
    """`correction="token"`: the gradient of a token is multiplied by its own weight."""
    x = CASES[name]
    weight = np.random.default_rng(0).uniform(0.5, 2, x.mask.shape).astype(np.float32)
    for member in FAMILY:
        logp, *rest = x.arguments(member)

        def gradient(weight, member=member, rest=rest, logp=logp):
            return jax.grad(lambda logp: member.terms(logp, *rest, correction=weight).value.sum())(jnp.asarray(logp))

        plain, got = gradient(None), gradient(weight)
        mean = (weight * x.mask).sum(-1, keepdims=True) / x.mask.sum(-1, keepdims=True)
        by_token = losses.traits_of(member.function).correction == "token"
        np.testing.assert_allclose(
            got, plain * (weight if by_token else mean), rtol=2e-5, atol=1e-8, err_msg=str(member)
        )


def test_a_token_correction_of_a_sequence_loss_warns():
    for loss in (losses.gspo, losses.luspo, losses.gmpo):
        variant = replace(experiment, loss=loss, correction=correction.truncate_tokens)
        (sentence,) = [each for each in warnings(variant) if each.startswith("correction: ")]
        assert f"the gradient of {title_of(loss)} has one weight per sequence" in sentence
        assert not [
            each
            for each in warnings(replace(variant, correction=correction.truncate_geometric))
            if each.startswith("correction: ")
        ]
    assert warnings(replace(experiment, loss=losses.gspo_token, correction=correction.truncate_tokens)) == []


def test_gspo_token_gradient_equals_the_corrected_token_surrogate():
    """The form of frameworks that write GSPO as sg[s_i] π_it / sg[π_it] and weight each token."""
    x = CASES["full-0.001"]
    member = next(each for each in FAMILY if each.name == "gspo_token")
    logp, old_logp, _, mask = x.arguments(member)
    advantage, weight = x.advantage[:, 0], np.random.default_rng(0).uniform(0.5, 2, mask.shape).astype(np.float32)
    low, high = member.clip

    def by_hand(logp):
        log_s = jnp.where(mask, logp - old_logp, 0).sum(-1, keepdims=True) / mask.sum(-1, keepdims=True)
        ratio = jnp.exp(jax.lax.stop_gradient(log_s) + logp - jax.lax.stop_gradient(logp))
        a = advantage[:, None]
        surrogate = jnp.minimum(ratio * a, jnp.clip(ratio, 1 - low, 1 + high) * a)
        return -(jnp.where(mask, weight * surrogate, 0).sum(-1) / mask.sum(-1)).sum()

    got = jax.grad(lambda x: losses.gspo_token(x, old_logp, advantage, mask, correction=weight).value.sum())(
        jnp.asarray(logp)
    )
    np.testing.assert_allclose(got, jax.grad(by_hand)(jnp.asarray(logp)), rtol=1e-5, atol=1e-8)
