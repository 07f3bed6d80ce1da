"""The order of rows: each epoch is a permutation that depends only on seed and index."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspax.data.sources.order import permute, shuffle


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 1000])
def test_every_epoch_is_a_permutation(size):
    for epoch in range(3):
        rows = [shuffle(7, epoch * size + position, size) for position in range(size)]
        assert sorted(rows) == list(range(size))


@given(st.integers(1, 300), st.binary(min_size=1, max_size=64))
def test_every_key_gives_a_permutation(size, key):
    assert {permute(position, size, key) for position in range(size)} == set(range(size))


def test_each_epoch_and_seed_has_its_own_order():
    orders = {tuple(shuffle(seed, epoch * 50 + i, 50) for i in range(50)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert tuple(range(50)) not in orders


def test_distant_indices_need_no_stored_permutation():
    size = 10**15
    rows = [shuffle(0, index, size) for index in range(200)]
    assert len(set(rows)) == 200 and min(rows) < size / 20 and max(rows) > size * 0.95


def test_permutations_are_close_to_uniform():
    found = Counter(tuple(permute(i, 4, str(key).encode()) for i in range(4)) for key in range(4800))
    assert len(found) == 24
    assert min(found.values()) > 140 and max(found.values()) < 270  # 200 expected, standard deviation 14


def test_the_order_does_not_change_between_versions():
    assert [shuffle(0, index, 10) for index in range(20)] == ORDER


ORDER = [0, 1, 6, 7, 4, 3, 5, 2, 8, 9, 4, 9, 0, 6, 2, 5, 3, 1, 7, 8]


def test_a_negative_index_is_rejected():
    with pytest.raises(ValueError, match="index must be at least 0; got -1"):
        shuffle(0, -1, 10)
