"""Topologies: what is accepted, the errors for anything else, and the network of a device."""

import importlib.util
import os
import re

import pytest
from api import chips

from gspax.errors import UserError, how_to_install

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (requirements-tpu.txt)"
)


@pytest.mark.parametrize("text", ["v5p:4x4x4", "v5e:16x16", "v6e:2x4", "tpu7x:2x2x1", "2xv5p:4x4x4"])
def test_a_topology_round_trips(text):
    assert str(chips.parse_topology(text)) == text


def test_slices_and_their_devices():
    one, two = chips.parse_topology("1xv5e:4x4"), chips.parse_topology("12xtpu7x:2x2x1")
    assert (one, str(one)) == (chips.parse_topology("v5e:4x4"), "v5e:4x4")
    assert (two.slices, two.kind, two.slice_devices) == (12, "tpu7x", 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "v5p",
            "wanted a TPU generation and the shape of a slice such as v5p:4x4x4, or several slices such as 2xv5p:4x4x4",
        ),
        ("v5p:4x4x", "wanted a TPU generation and the shape"),
        ("v5p-64", "Google's v5p-64 has 32 chips, which is v5p:2x4x4 here; got 'v5p-64'"),
        ("v5p-128", "has 64 chips, which is v5p:4x4x4 here"),
        ("v5p-8", "has 4 chips, which is v5p:2x2x1 here"),
        ("v5litepod-16", "has 16 chips, which is v5e:4x4 here"),
        ("v6e-32", "has 32 chips, which is v6e:4x8 here"),
        ("v5b:4x4", "wanted one of v5e, v5p, v6e, tpu7x, got 'v5b' (did you mean 'v5"),
        ("gpu:4x4", "wanted one of v5e, v5p, v6e, tpu7x, got 'gpu'"),
        ("v5p:8x8", "v5p has 3 dimensions, such as v5p:4x4x4"),
        ("v5e:4x4x4", "v5e has 2 dimensions, such as v5e:4x4"),
        ("v5e:0x4", "v5e has 2 dimensions"),
        ("0xv5e:4x4", "wanted at least one slice, got '0xv5e:4x4'"),
        ("xv5e:4x4", "wanted one of v5e"),
        ("2 v5e:4x4", "wanted a TPU generation and the shape"),
    ],
)
def test_anything_else_is_rejected_in_one_sentence(text, said):
    with pytest.raises(UserError) as caught:
        chips.parse_topology(text)
    assert said in str(caught.value) and str(caught.value).startswith("--topology: ")
    assert "\n" not in str(caught.value)


def test_without_libtpu_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(f"needs the package libtpu: {how_to_install('tpu')}")):
        chips.describe_devices(chips.parse_topology("v5e:4x4"))


@needs_libtpu
def test_the_devices_of_a_topology_and_an_unsupported_one():
    before = dict(os.environ)
    assert len(chips.describe_devices(chips.parse_topology("v5p:2x2x4"))) == 16
    of_two = chips.describe_devices(chips.parse_topology("2xv5e:2x2"))
    assert [device.slice_index for device in of_two] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [device.coords for device in of_two[:4]] == [device.coords for device in of_two[4:]]
    with pytest.raises(UserError, match="--topology v5e:3x5: libtpu does not support it: "):
        chips.describe_devices(chips.parse_topology("v5e:3x5"))
    assert dict(os.environ) == before, "processes started later would see a TPU on this machine"
