"""Laws that every loss of the family keeps. A new loss joins `loss_cases.FAMILY` and inherits them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding, PartitionSpec
from loss_cases import CASES, FAMILY, Case, Packed

from gspax import losses

over_family = pytest.mark.parametrize("member", FAMILY, ids=str)
# Half of the tokens outside the mask, empty rows, and ratios on both sides of every bound.
over_cases = pytest.mark.parametrize("name", ("some_empty-0.001", "some_empty-0.3", "holes-0.3"))


def numerator_and_terms(member, arguments):
    """Gradient of Σ value by logp, and the terms: what a trainer takes from a microbatch."""

    return _numerator(member)(*arguments)


@functools.cache
def _numerator(member):
    def numerator(logp, *rest):
        terms = member.terms(logp, *rest)
        return terms.value.sum(), terms

    return jax.jit(jax.grad(numerator, has_aux=True))


def everything(member, arguments):
    """Loss, metrics and gradient of one whole batch."""
    (loss, metrics), gradient = compiled(member)(*arguments)
    return loss, metrics, gradient


@functools.cache
def compiled(member):
    return jax.jit(jax.value_and_grad(member.loss, has_aux=True))


def assert_same(a, b, rtol=2e-6):
    (a_loss, a_metrics, a_gradient), (b_loss, b_metrics, b_gradient) = a, b
    np.testing.assert_allclose(a_loss, b_loss, rtol=rtol, atol=1e-7)
    np.testing.assert_allclose(a_gradient, b_gradient, rtol=rtol, atol=1e-9)
    assert a_metrics.keys() == b_metrics.keys()
    for key in a_metrics:
        # kl adds up terms that differ in size; everything else is a count or a ratio near 1
        np.testing.assert_allclose(a_metrics[key], b_metrics[key], rtol=1e-5, err_msg=key)


def fill(x: Case, garbage: float) -> Case:
    """The garbage in every float outside the mask; also in the advantage of an empty row."""

    def put(value, keep):
        return np.where(keep, value, np.float32(garbage))

    mask = x.mask
    advantage = put(x.advantage, mask | (mask.any(-1, keepdims=True) & (np.arange(mask.shape[1]) == 0)[None]))
    return Case(put(x.logp, mask), put(x.old_logp, mask), advantage, mask)


@over_family
@over_cases
@pytest.mark.parametrize("garbage", (np.nan, np.inf, -np.inf, 3e38, -7.0))
def test_padding_never_matters(member, name, garbage):
    x = CASES[name]
    got = everything(member, fill(x, garbage).arguments(member))
    assert_same(got, everything(member, x.arguments(member)), rtol=0)
    assert not np.asarray(got[2])[~x.mask].any()


@over_family
def test_padding_never_matters_to_uncompiled_code_either(member):
    """The compiler may make a selection of a product with the mask, and so hide a NaN that the product keeps."""
    x = CASES["some_empty-0.3"]
    arguments = tuple(map(jnp.asarray, fill(x, np.nan).arguments(member)))
    (loss, metrics), gradient = jax.value_and_grad(member.loss, has_aux=True)(*arguments)
    assert_same((loss, metrics, gradient), everything(member, x.arguments(member)))


@over_family
def test_a_nan_at_a_response_token_is_not_hidden(member):
    x = CASES["full-0.3"]
    logp = x.logp.copy()
    logp[0, 1] = np.nan
    assert np.isnan(member.loss(logp, *x.arguments(member)[1:])[0])


@over_family
@over_cases
def test_longer_padding_changes_nothing(member, name):
    x = CASES[name]
    B, T = x.mask.shape
    longer = Case(
        *(np.concatenate([a, np.ones((B, 5), a.dtype) * (a.dtype != bool)], 1).astype(a.dtype) for a in _of(x))
    )
    loss, metrics, gradient = everything(member, longer.arguments(member))
    assert not np.asarray(gradient)[:, T:].any()
    assert_same((loss, metrics, gradient[:, :T]), everything(member, x.arguments(member)))


@over_family
@over_cases
def test_row_order_does_not_matter(member, name):
    x = CASES[name]
    order = np.random.default_rng(0).permutation(len(x.mask))
    loss, metrics, gradient = everything(member, Case(*(a[order] for a in _of(x))).arguments(member))
    assert_same((loss, metrics, gradient[np.argsort(order)]), everything(member, x.arguments(member)))


@over_family
@over_cases
@pytest.mark.parametrize("cuts", ([4], [1, 2], [2, 4, 6], [1, 2, 3, 4, 5, 6, 7]), ids=str)
def test_any_split_into_microbatches_agrees(member, name, cuts):
    """Σ value is differentiated in each part and divided once by the whole weight; `reduce` sees all rows."""
    x = CASES[name]
    parts = [np.split(a, cuts) for a in x.arguments(member)]
    gradients, terms = zip(*(numerator_and_terms(member, part) for part in zip(*parts, strict=True)), strict=True)
    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *terms)
    loss, metrics = losses.reduce(whole)
    gradient = jnp.concatenate(gradients) / whole.weight.sum()
    assert_same((loss, metrics, gradient), everything(member, x.arguments(member)))


@over_family
def test_terms_stacked_by_a_scan_reduce_to_the_same(member):
    arguments = CASES["some_empty-0.3"].arguments(member)
    stacked = jax.tree.map(lambda a: jnp.asarray(a).reshape(4, 2, *a.shape[1:]), arguments)
    _, terms = jax.lax.scan(lambda carry, part: (carry, member.terms(*part)), None, stacked)
    loss, metrics = losses.reduce(terms)
    wanted_loss, wanted_metrics = member.loss(*arguments)
    np.testing.assert_allclose(loss, wanted_loss, rtol=2e-6)
    for key in wanted_metrics:
        np.testing.assert_allclose(metrics[key], wanted_metrics[key], rtol=1e-5, err_msg=key)


@over_family
def test_jit_agrees(member):
    arguments = CASES["some_empty-0.3"].arguments(member)
    with jax.disable_jit():
        (loss, metrics), gradient = jax.value_and_grad(member.loss, has_aux=True)(*map(jnp.asarray, arguments))
    assert_same((loss, metrics, gradient), everything(member, arguments))


@over_family
def test_one_device_and_eight_agree(member):
    assert jax.device_count() == 8
    arguments = CASES["some_empty-0.3"].arguments(member)
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    split = tuple(jax.device_put(a, NamedSharding(mesh, PartitionSpec("rows"))) for a in arguments)
    (loss, metrics), gradient = jax.jit(jax.value_and_grad(member.loss, has_aux=True))(*split)
    assert len(gradient.sharding.device_set) == 8
    assert_same((loss, metrics, gradient), everything(member, arguments))


@over_family
@pytest.mark.parametrize(
    "name", ("extreme", *(pytest.param(f"some_empty-{size}", marks=pytest.mark.slow) for size in (0.001, 0.3)))
)
def test_packed_rows_agree_with_one_row_per_sequence(member, name):
    x = CASES[name]
    packed = Packed(x, sequences_per_row=4)
    terms, gradient = packed_terms_and_gradient(member, packed.arguments(member), packed.segment_ids)
    wanted_gradient, wanted = numerator_and_terms(member, x.arguments(member))
    np.testing.assert_array_equal(terms.weight, wanted.weight.reshape(-1, 4).sum(-1))
    scale = np.abs(wanted.value).reshape(-1, 4).sum(-1)
    assert np.all(np.abs(terms.value - wanted.value.reshape(-1, 4).sum(-1)) <= 2e-6 * scale)
    got, wanted_gradient = packed.unpack(gradient), np.asarray(wanted_gradient)
    rows = np.abs(wanted_gradient).max(-1, keepdims=True)
    assert np.all(np.abs(got - wanted_gradient) <= 2e-6 * rows)
    got_metrics, wanted_metrics = losses.reduce(terms)[1], losses.reduce(wanted)[1]
    assert got_metrics.keys() == wanted_metrics.keys()
    for key in wanted_metrics:
        np.testing.assert_allclose(got_metrics[key], wanted_metrics[key], rtol=1e-5, err_msg=key)


@over_family
def test_padding_of_packed_rows_never_matters(member):
    x = CASES["some_empty-0.3"]
    packed, garbage = (Packed(y, sequences_per_row=4) for y in (x, fill(x, np.nan)))
    terms, gradient = packed_terms_and_gradient(member, packed.arguments(member), packed.segment_ids)
    arguments = list(garbage.arguments(member))
    arguments[2] = np.where(arguments[3], arguments[2], np.float32(np.nan))
    got, got_gradient = packed_terms_and_gradient(member, arguments, packed.segment_ids)
    jax.tree.map(np.testing.assert_array_equal, (got, got_gradient), (terms, gradient))
    # The segments say as much as the mask where they are 0.
    arguments[3] = arguments[3] | (packed.segment_ids == 0)
    got, got_gradient = packed_terms_and_gradient(member, arguments, packed.segment_ids)
    jax.tree.map(np.testing.assert_array_equal, (got, got_gradient), (terms, gradient))


def packed_terms_and_gradient(member, arguments, segment_ids):
    return jax.device_get(_packed(member)(*arguments, segment_ids)[::-1])


@functools.cache
def _packed(member):
    def numerator(logp, old_logp, advantage, mask, segment_ids):
        terms = member.terms(logp, old_logp, advantage, mask, segment_ids=segment_ids)
        return terms.value.sum(), terms

    return jax.jit(jax.grad(numerator, has_aux=True))


@over_family
def test_compiled_once_per_shape(member):
    traces = 0

    @jax.jit
    def loss(*arguments):
        nonlocal traces
        traces += 1
        return member.loss(*arguments)

    for name in ("ragged-0.001", "ragged-0.3", "some_empty-0.3", "all_empty-0.3"):
        loss(*CASES[name].arguments(member))
    assert traces == 1
    loss(*(a[:4] for a in CASES["ragged-0.3"].arguments(member)))
    assert traces == 2


@over_family
def test_no_implicit_dtype_promotion(member):
    with jax.numpy_dtype_promotion("strict"):
        jax.value_and_grad(member.loss, has_aux=True)(*map(jnp.asarray, CASES["ragged-0.3"].arguments(member)))


HUGE = 2.0**100  # the sum of a few of them is finite in float32 too
finite = st.floats(-HUGE, HUGE, width=32, allow_subnormal=False)


@over_family
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_finite_input_never_gives_nan(member, data):
    shape = (2, 3)
    elements = st.one_of(finite, st.floats(-30, 0, width=32), st.sampled_from([0.0, -25.0, 25.0, HUGE, -HUGE]))
    logp, old_logp, advantage = (data.draw(hnp.arrays(np.float32, shape, elements=elements)) for _ in range(3))
    advantage = np.clip(advantage, -1e6, 1e6)  # times e^25 this stays finite
    mask = data.draw(hnp.arrays(bool, shape))
    arguments = Case(logp, old_logp, advantage, mask).arguments(member)
    loss, metrics, gradient = everything(member, arguments)
    for number in jax.tree.leaves((loss, metrics, gradient)):
        assert np.isfinite(number).all()
    assert 0 <= metrics["clip_fraction_tokens"] <= 1


def _of(x: Case):
    return x.logp, x.old_logp, x.advantage, x.mask
