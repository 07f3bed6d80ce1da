"""Laws that every policy loss obeys. A loss added to `loss_cases.FAMILY` is tested against all of them.

Compilation is most of this file's time, so the tests share few programs: `evaluate` on batches of 8 rows and 9 tokens,
the gradient of packed rows, a scan over microbatches, and a program for eight devices.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from loss_cases import CASES, FAMILY, Case, Packed

from gspax import losses

over_family = pytest.mark.parametrize("member", FAMILY, ids=str)
# Half of the tokens outside the mask, empty rows, and ratios on both sides of every bound.
NAMES = ("some_empty-0.001", "some_empty-0.3", "holes-0.3")


def numerator(member, *arguments, **keywords):
    terms = member.terms(*arguments, **keywords)
    return terms.value.sum(), terms


@functools.cache
def compiled(member):
    return jax.jit(jax.value_and_grad(member.loss, has_aux=True))


def evaluate(member, arguments):
    """(loss, metrics, gradient by logp) of a batch."""
    (loss, metrics), gradient = jax.device_get(compiled(member)(*arguments))
    return loss, metrics, gradient


@functools.cache
def wanted(member, name):
    return evaluate(member, CASES[name].arguments(member))


@functools.cache
def compiled_terms(member):
    return jax.jit(jax.grad(functools.partial(numerator, member), has_aux=True))


def terms_and_gradient(member, arguments, segment_ids=None):
    return jax.device_get(compiled_terms(member)(*arguments, segment_ids=segment_ids)[::-1])


def assert_same(a, b, rtol=2e-6):
    (a_loss, a_metrics, a_gradient), (b_loss, b_metrics, b_gradient) = a, b
    np.testing.assert_allclose(a_loss, b_loss, rtol=rtol, atol=1e-7)
    np.testing.assert_allclose(a_gradient, b_gradient, rtol=rtol, atol=1e-9)
    assert_same_metrics(a_metrics, b_metrics)


def assert_same_metrics(a, b):
    assert a.keys() == b.keys()
    for key in a:
        # `kl` sums terms of different size; all others are counts or ratios near 1
        np.testing.assert_allclose(a[key], b[key], rtol=1e-5, err_msg=key)


def arrays(x: Case):
    return x.logp, x.old_logp, x.advantage, x.mask


def fill(x: Case, garbage: float) -> Case:
    """Replace every float outside the mask, and the advantage of empty rows."""

    def put(value, keep):
        return np.where(keep, value, np.float32(garbage))

    mask = x.mask
    advantage = put(x.advantage, mask | (mask.any(-1, keepdims=True) & (np.arange(mask.shape[1]) == 0)[None]))
    return Case(put(x.logp, mask), put(x.old_logp, mask), advantage, mask)


@over_family
@pytest.mark.parametrize("name", NAMES)
def test_padding_never_matters(member, name):
    x = CASES[name]
    for garbage in (np.nan, np.inf, -np.inf, 3e38, -7.0):
        got = evaluate(member, fill(x, garbage).arguments(member))
        assert_same(got, wanted(member, name), rtol=0)
        assert not got[2][~x.mask].any()


@over_family
def test_uncompiled_code_with_longer_padding_of_nan_agrees(member):
    """XLA may turn a product with the mask into a select, which hides a NaN that the product would propagate."""
    x = fill(CASES["some_empty-0.3"], np.nan)
    T = x.mask.shape[1]
    longer = Case(
        *(np.pad(a, ((0, 0), (0, 5)), constant_values=np.nan if a.dtype != bool else False) for a in arrays(x))
    )
    with jax.disable_jit():
        (loss, metrics), gradient = jax.value_and_grad(member.loss, has_aux=True)(
            *map(jnp.asarray, longer.arguments(member))
        )
    assert not gradient[:, T:].any()
    assert_same((loss, metrics, gradient[:, :T]), wanted(member, "some_empty-0.3"))


@over_family
def test_a_nan_in_a_response_propagates(member):
    logp, *rest = CASES["some_empty-0.3"].arguments(member)
    logp = logp.copy()
    logp[0, 1] = np.nan
    assert np.isnan(evaluate(member, (logp, *rest))[0])


@over_family
@pytest.mark.parametrize("name", NAMES)
def test_row_order_does_not_matter(member, name):
    x = CASES[name]
    order = np.random.default_rng(0).permutation(len(x.mask))
    loss, metrics, gradient = evaluate(member, Case(*(a[order] for a in arrays(x))).arguments(member))
    assert_same((loss, metrics, gradient[np.argsort(order)]), wanted(member, name))


@over_family
@pytest.mark.parametrize("rows", (1, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 4))))
def test_microbatches_of_a_scan_equal_the_batch(member, rows):
    """The sums and the weights of the microbatches are added, then divided once; `reduce` gets all terms stacked."""

    @jax.jit
    def accumulate(arguments):
        gradient = jax.grad(functools.partial(numerator, member), has_aux=True)
        return jax.lax.map(lambda microbatch: gradient(*microbatch), arguments)

    for name in NAMES:
        arguments = CASES[name].arguments(member)
        gradient, terms = accumulate([a.reshape(-1, rows, *a.shape[1:]) for a in arguments])
        loss, metrics = losses.reduce(terms)
        gradient = np.reshape(gradient, arguments[0].shape) / terms.weight.sum()
        assert_same((loss, metrics, gradient), wanted(member, name))


@over_family
def test_eight_devices_equal_one(member):
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    arguments = jax.device_put(CASES["some_empty-0.3"].arguments(member), rows)
    (loss, metrics), gradient = compiled(member)(*arguments)
    assert len(gradient.sharding.device_set) == 8
    assert_same((loss, metrics, gradient), wanted(member, "some_empty-0.3"))


def extreme_with_empty_rows() -> Case:
    mask = CASES["extreme"].mask.copy()
    mask[[3, 6]] = False
    return Case(*arrays(CASES["extreme"])[:3], mask)


@over_family
@pytest.mark.parametrize(
    "x",
    (
        extreme_with_empty_rows(),
        *(pytest.param(CASES[name], marks=pytest.mark.slow) for name in ("some_empty-0.001", "some_empty-0.3")),
    ),
    ids=("extreme", "some_empty-0.001", "some_empty-0.3"),
)
def test_packed_rows_equal_one_row_per_sequence(member, x):
    packed = Packed(x, sequences_per_row=4)
    terms, gradient = terms_and_gradient(member, packed.arguments(member), packed.segment_ids)
    unpacked, unpacked_gradient = terms_and_gradient(member, x.arguments(member))
    np.testing.assert_array_equal(terms.weight, unpacked.weight.reshape(-1, 4).sum(-1))
    scale = np.abs(unpacked.value).reshape(-1, 4).sum(-1)
    assert np.all(np.abs(terms.value - unpacked.value.reshape(-1, 4).sum(-1)) <= 2e-6 * scale)
    scale = np.abs(unpacked_gradient).max(-1, keepdims=True)
    assert np.all(np.abs(packed.unpack(gradient) - unpacked_gradient) <= 2e-6 * scale)
    assert_same_metrics(losses.reduce(terms)[1], losses.reduce(unpacked)[1])


@over_family
def test_padding_of_packed_rows_never_matters(member):
    x = extreme_with_empty_rows()
    packed, filled = (Packed(y, sequences_per_row=4) for y in (x, fill(x, np.nan)))
    clean = terms_and_gradient(member, packed.arguments(member), packed.segment_ids)
    logp, old_logp, advantage, mask = filled.arguments(member)
    advantage = np.where(mask, advantage, np.float32(np.nan))
    for masks in (mask, mask | (packed.segment_ids == 0)):  # segment 0 is padding whatever the mask
        got = terms_and_gradient(member, (logp, old_logp, advantage, masks), packed.segment_ids)
        jax.tree.map(np.testing.assert_array_equal, got, clean)


@over_family
def test_no_implicit_dtype_promotion(member):
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.value_and_grad(member.loss, has_aux=True), *CASES["ragged-0.3"].arguments(member))


HUGE = 2.0**100  # the sum of a few is finite in float32


@over_family
def test_finite_input_never_gives_nan(member):
    """Batches of ordinary, special and huge numbers of any magnitude."""
    rng = np.random.default_rng(0)
    shape = CASES["full-0.3"].mask.shape

    def draw():
        ordinary = rng.uniform(-30, 0, shape)
        special = rng.choice([0.0, -25.0, 25.0, HUGE, -HUGE], shape)
        any_size = rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-100, 100, shape)
        return np.choose(rng.integers(0, 3, shape), [ordinary, special, any_size]).astype(np.float32)

    for _ in range(30):
        logp, old_logp, advantage = draw(), draw(), np.clip(draw(), -1e6, 1e6)  # times e^25 this stays finite
        loss, metrics, gradient = evaluate(
            member, Case(logp, old_logp, advantage, rng.random(shape) < rng.random()).arguments(member)
        )
        assert all(np.isfinite(number).all() for number in jax.tree.leaves((loss, metrics, gradient)))
        assert 0 <= metrics["clip_fraction_tokens"] <= 1


@over_family
@pytest.mark.parametrize("impossible", (("logp",), ("old_logp",), ("logp", "old_logp")), ids="+".join)
def test_a_token_of_probability_0_gives_finite_numbers(member, impossible):
    """A log-prob of -inf under one policy or under both, at tokens with advantages of both signs."""
    x = CASES["some_empty-0.3"]
    token = x.mask & (np.cumsum(x.mask, axis=-1) == 1)
    assert {-1, 1} <= set(np.sign(x.advantage[:, 0][token.any(-1)]))
    zero = {name: np.where(token, np.float32(-np.inf), getattr(x, name)) for name in impossible}
    for number in jax.tree.leaves(evaluate(member, dataclasses.replace(x, **zero).arguments(member))):
        assert np.isfinite(number).all()


@over_family
def test_a_shape_compiles_once_whatever_the_values(member):
    wanted(member, "some_empty-0.3")
    programs = compiled(member)._cache_size()
    for name in ("ragged-0.001", "full-0.3", "all_empty-0.3"):
        evaluate(member, CASES[name].arguments(member))
    assert compiled(member)._cache_size() == programs
