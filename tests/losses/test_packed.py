"""Packed rows: KL terms, penalties, corrections and metrics equal those of one row per sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_cases import CASES, Packed
from small_experiment import objective_with

from gspax import losses
from gspax.losses import correction, kl, regularizers, sequences

PACKED = {name: Packed(CASES[name], sequences_per_row=4) for name in ("some_empty-0.3", "ragged-0.001", "extreme")}
over_cases = pytest.mark.parametrize("name", PACKED)


def ordered(packed):
    """Columns of a packed row, in an order that keeps the token order of each sequence."""
    B, T = packed.case.mask.shape
    position = packed.pack(np.tile(np.arange(T), (B, 1)))
    return np.argsort(position, axis=-1, kind="stable")


def pack(packed, value):
    return np.take_along_axis(packed.pack(value), ordered(packed), -1)


def unpack(packed, value):
    return packed.unpack(np.take_along_axis(np.asarray(value), np.argsort(ordered(packed), -1), -1))


def segments(packed):
    return np.take_along_axis(packed.segment_ids, ordered(packed), -1)


def token_kl_with_old(logp, ref_logp, mask, **options):
    return kl.token_kl(logp, ref_logp, mask, old_logp=(logp + ref_logp) / 2, **options)


def routers(x):
    """Router logits [1, B, T, 3] whose gradient can be compared with that of `x`."""
    return jnp.stack([x, 2 * x, -x], -1)[None]


PENALTIES = {
    "token_kl": kl.token_kl,
    "token_kl by token": functools.partial(kl.token_kl, aggregate=losses.by_token),
    "token_kl with old_logp": token_kl_with_old,
    "sequence_kl": kl.sequence_kl,
    "grpo_kl": functools.partial(kl.grpo_kl, aggregate=losses.by_constant),
    "entropy_bonus": lambda x, _, mask, **options: regularizers.entropy_bonus(x, mask, **options),
    "log_ratio_square": regularizers.log_ratio_square,
    "log_ratio_size": lambda x, other, mask, **options: regularizers.log_ratio_size(
        x, other, jnp.ones(x.shape), mask, **options
    ),
    "router_z": lambda x, _, mask, **options: regularizers.router_z(routers(x), mask, **options),
    "load_balance": lambda x, _, mask, **options: regularizers.load_balance(
        routers(x), jnp.array([[1.0, 0.5, 1.5]]), mask, **options
    ),
}


def gradient_and_terms(penalty, *arrays, **options):
    def numerator(x, *rest):
        terms = penalty(x, *rest, **options)
        return terms.value.sum(), terms

    return jax.device_get(jax.grad(numerator, has_aux=True)(*map(jnp.asarray, arrays)))


def assert_near(got, wanted, rtol=5e-6):
    """Relative to the largest entry of the row."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    size = np.abs(wanted).max(-1, keepdims=True, initial=0) if wanted.ndim > 1 else np.abs(wanted)
    assert np.all(np.abs(got - wanted) <= rtol * size + 1e-9)


def assert_same_metrics(got, wanted):
    nothing = np.zeros(1, np.float32)
    got, wanted = (losses.reduce(losses.Terms(nothing, nothing, each))[1] for each in (got, wanted))
    assert got.keys() == wanted.keys()
    for key in wanted:
        np.testing.assert_allclose(got[key], wanted[key], rtol=2e-5, atol=1e-7, err_msg=key)


@over_cases
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_penalties_of_packed_rows_equal_one_row_per_sequence(name, penalty):
    packed = PACKED[name]
    x = packed.case
    logp = np.clip(x.logp, -30, 30)  # the logits of the routers: squares of 1e4 would drown the others
    wanted_gradient, wanted = gradient_and_terms(penalty, logp, x.old_logp, x.mask)
    arrays = (pack(packed, each) for each in (logp, x.old_logp, x.mask))
    gradient, terms = gradient_and_terms(penalty, *arrays, segment_ids=segments(packed))
    np.testing.assert_array_equal(terms.weight, wanted.weight.reshape(-1, 4).sum(-1))
    scale = np.abs(wanted.value).reshape(-1, 4).sum(-1)
    assert np.all(np.abs(terms.value - wanted.value.reshape(-1, 4).sum(-1)) <= 5e-6 * scale + 1e-9)
    assert_near(unpack(packed, gradient), wanted_gradient)
    assert_same_metrics(terms.metrics, wanted.metrics)


CORRECTIONS = {
    "truncate_tokens": correction.truncate_tokens,
    "truncate_sequences": correction.truncate_sequences,
    "truncate_geometric": correction.truncate_geometric,
    "mask_tokens": correction.mask_tokens,
    "mask_sequences": functools.partial(correction.mask_sequences, low=0.3, high=3.0),
    "reject_geometric": functools.partial(correction.reject_geometric, low=0.9, high=1.1),
    "product": functools.partial(
        correction.product,
        factors=(
            correction.truncate_tokens,
            functools.partial(correction.reject_tokens, estimate=kl.k1, low=-0.5, high=0.5),
            functools.partial(correction.reject_sequences, over=sequences.largest, high=0.2),
        ),
    ),
}


@over_cases
@pytest.mark.parametrize("function", CORRECTIONS.values(), ids=CORRECTIONS)
def test_corrections_of_packed_rows_equal_one_row_per_sequence(name, function):
    packed = PACKED[name]
    x = packed.case
    wanted = np.asarray(function(x.logp, x.old_logp, x.mask))
    if wanted.ndim == 1:
        wanted = np.where(x.mask, wanted[:, None], 0)
    arrays = [pack(packed, each) for each in (x.logp, x.old_logp, x.mask)]
    got = function(*arrays, segment_ids=segments(packed))
    assert got.dtype == jnp.float32 and got.shape == arrays[0].shape
    np.testing.assert_allclose(unpack(packed, got), wanted, rtol=2e-5, atol=1e-12)
    assert_same_metrics(
        correction.weight_metrics(got, arrays[2], segments(packed)), correction.weight_metrics(wanted, x.mask)
    )


@over_cases
def test_rejection_of_packed_rows_equals_one_row_per_sequence(name):
    packed = PACKED[name]
    x = packed.case
    advantage = x.advantage[:, 0]
    wanted = correction.reject_off_policy(x.logp, x.old_logp, advantage, x.mask, delta=0.02)
    rows = np.broadcast_to(advantage[:, None], x.mask.shape)
    arrays = [pack(packed, each) for each in (x.logp, x.old_logp, rows, x.mask)]
    got = correction.reject_off_policy(*arrays, delta=0.02, segment_ids=segments(packed))
    np.testing.assert_array_equal(unpack(packed, got), np.where(x.mask, np.asarray(wanted)[:, None], 0))


@over_cases
def test_mismatch_metrics_of_packed_rows_equal_one_row_per_sequence(name):
    packed = PACKED[name]
    x = packed.case
    arrays = [pack(packed, each) for each in (x.logp, x.old_logp, x.mask)]
    got = correction.mismatch_metrics(*arrays, segment_ids=segments(packed))
    assert_same_metrics(got, correction.mismatch_metrics(x.logp, x.old_logp, x.mask))
    with pytest.MonkeyPatch.context() as patch:  # ranges that rows this short have
        patch.setattr(correction, "PLACES", (1, 3, 6))
        placed = correction.mismatch_by_position(*arrays, segment_ids=segments(packed))
        assert_same_metrics(placed, correction.mismatch_by_position(x.logp, x.old_logp, x.mask))


def test_the_objective_of_packed_rows_equals_one_row_per_sequence():
    """Advantages [B, T] mark a batch of packed rows."""
    from api import Adapted, Batch, objective

    from gspax.config import Calibration, Reference, Regularizers

    packed = PACKED["some_empty-0.3"]
    x = packed.case
    minimized = objective_with(
        losses.gspo_token,
        correction=correction.truncate_geometric,
        rejection=functools.partial(correction.reject_off_policy, delta=0.02),
        reference=Reference(loss=kl.token_kl, coefficient=0.3),
        regularizers=Regularizers(entropy=0.1),
        calibration=Calibration(),
    )
    constants = objective.UpdateConstants(Adapted(*jnp.array([0.05, 0.1, 0.0])), None)
    rows = np.broadcast_to(x.advantage[:, :1], x.mask.shape)

    def found(change, advantage, segment):
        logp, old, mask = (jnp.asarray(change(each)) for each in (x.logp, x.old_logp, x.mask))
        batch = Batch(
            tokens_BT=segment,
            segment_BT=segment,
            mask_BT=mask,
            old_logp_BT=old,
            advantage=jnp.asarray(advantage),
            sampler_logp_BT=old + 0.1 * logp,
            ref_logp_BT=old,
        )

        def numerator(logp):
            terms = minimized(objective.Outputs(logp, -logp, None), batch, constants)
            return terms.value.sum(), terms

        return jax.device_get(jax.grad(numerator, has_aux=True)(logp))

    wanted_gradient, wanted = found(lambda a: a, x.advantage[:, 0], np.ones(x.mask.shape, np.int32))
    gradient, terms = found(functools.partial(pack, packed), pack(packed, rows), segments(packed))
    assert_near(unpack(packed, gradient), wanted_gradient, rtol=1e-5)
    assert_same_metrics(terms.metrics, wanted.metrics)
