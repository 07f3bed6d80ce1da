"""The spread of ratios against loops in numpy, float64; packed rows and a mesh give the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from api import sharding

from gspax import config
from gspax.losses.ratio_spread import fit_exponent, ratio_spread

B, T = 16, 24


def drawn(seed=0, scale=0.3):
    """Rows of 2 prompt tokens and 0 to 22 response tokens; old log-probs near the new ones, NaN outside the mask."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, T - 1, B)
    length[3] = 0
    column = np.arange(T)[None]
    mask = (column >= 2) & (column < 2 + length[:, None])
    logp = rng.normal(size=(B, T)).astype(np.float32)
    old = np.where(mask, logp + scale * rng.normal(size=(B, T)), np.nan).astype(np.float32)
    return logp, old, mask


def reference(logp, old, mask):
    """The spread of the ratios, by loops over sequences."""
    rows = [
        p[m].astype(np.float64) - q[m].astype(np.float64) for p, q, m in zip(logp, old, mask, strict=True) if m.any()
    ]
    tokens, means = np.concatenate(rows), np.array([row.mean() for row in rows])
    found = {
        "token_min": np.exp(tokens.min()),
        "token_max": np.exp(tokens.max()),
        "token_std": tokens.std(ddof=1),
        "sequence_std": means.std(ddof=1),
        "ess_tokens": size(np.exp(tokens)),
        "ess_sequences": size(np.exp(means)),
        "ess_products": size(np.exp([row.sum() for row in rows])),
    }
    bins = []
    for k in range(T.bit_length()):
        inside = [row for row in rows if 2**k <= len(row) < 2 ** (k + 1)]
        lengths = [len(row) for row in inside]
        joined = np.concatenate(inside) if inside else np.zeros(0)
        bins.append(
            {
                "bin_sequences": len(inside),
                "bin_length": np.mean(lengths) if inside else 0,
                "bin_token_std": joined.std(ddof=1) if len(joined) > 1 else 0,
                "bin_sequence_std": np.std([row.mean() for row in inside], ddof=1) if len(inside) > 1 else 0,
            }
        )
    return found | {name: [each[name] for each in bins] for name in bins[0]}


def size(weight):
    return weight.sum() ** 2 / (len(weight) * (weight**2).sum())


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=1e-7, err_msg=name)


def test_spread_equals_the_loops():
    arrays = drawn()
    assert sum(np.array(reference(*arrays)["bin_sequences"]) > 1) >= 3, "several bins have several sequences"
    assert_same(ratio_spread(*arrays), reference(*arrays))


def test_packed_rows_give_the_spread_of_one_row_per_sequence():
    arrays = drawn()
    joined = [np.concatenate([x[0::2], x[1::2]], axis=1) for x in arrays]  # two sequences in each row
    segments = np.concatenate([np.full((B // 2, T), 1), np.full((B // 2, T), 2)], axis=1).astype(np.int32)
    got, wanted = ratio_spread(*joined, segments), reference(*arrays)
    got = {name: x[: T.bit_length()] if x.ndim else x for name, x in got.items()}  # the rows are longer
    assert_same(got, wanted)


def test_a_mesh_gives_the_spread_of_one_device():
    arrays = drawn()
    placed = jax.device_put(arrays, sharding.named_sharding(sharding.make_mesh(config.Mesh()), "batch"))
    assert len(placed[0].sharding.device_set) == 8
    assert_same(jax.jit(ratio_spread)(*placed), reference(*arrays))


def test_nothing_to_measure_is_0_and_equal_policies_do_not_spread():
    logp, _, mask = drawn()
    nothing = ratio_spread(logp, logp, np.zeros_like(mask))
    assert all(not np.any(nothing[name]) for name in nothing if name not in ("token_min", "token_max"))
    same = ratio_spread(logp, logp, mask)
    assert same["token_min"] == same["token_max"] == same["ess_products"] == 1 and same["sequence_std"] == 0


def test_products_that_overflow_have_an_effective_size():
    logp = jnp.array([[0.0] * 9, [0.0] * 9])
    old = jnp.stack([jnp.full(9, -50.0), jnp.full(9, -50.0 + 1e-6)])
    assert np.isclose(ratio_spread(logp, old, jnp.ones((2, 9), bool))["ess_products"], 1, rtol=1e-4)


def test_the_exponent_of_independent_tokens_is_minus_one_half():
    rng = np.random.default_rng(1)
    length = 2 ** rng.integers(2, 8, 4000)
    value = np.array([rng.normal(size=n).mean() for n in length])
    bins = [2**k for k in range(9)]
    count = np.array([(length == n).sum() for n in bins])
    deviation = np.array([value[length == n].std(ddof=1) if (length == n).sum() > 1 else 0.0 for n in bins])
    assert fit_exponent(np.array(bins, float), deviation, count) == pytest.approx(-0.5, abs=0.03)


@pytest.mark.parametrize("count", [[5, 1, 0], [1, 1, 1], [0, 0, 9]])
def test_an_exponent_needs_two_bins_of_two_sequences(count):
    assert np.isnan(fit_exponent(np.array([1.0, 2.0, 4.0]), np.array([0.3, 0.2, 0.1]), np.array(count)))


def test_large_bins_weigh_more_in_the_exponent():
    length, deviation = np.array([1.0, 4.0, 16.0]), np.array([0.4, 0.2, 0.2])
    steep = fit_exponent(length, deviation, np.array([101, 101, 2]))
    assert steep < fit_exponent(length, deviation, np.array([101, 101, 101])) < 0
    assert steep == pytest.approx(-0.5, abs=0.03)
