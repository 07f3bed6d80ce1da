"""`gspax parity` finds every difference and nothing else. The numpy reference replaces transformers."""

import sys

import jax
import numpy as np
import pytest
import reference_model
import tiny
from api import main

from gspax.errors import how_to_install
from gspax.tools import parity

CONFIG = tiny.CONFIGS["some layers dense"]  # one stack of one layer, then one of two
TOKENS = [3, 14, 15, 9, 2, 6, 5]


def reference(config, tokens=TOKENS):
    streams = []
    logits_TV, _ = reference_model.forward(tiny.params(config), config, tokens, streams=streams)
    return parity.Forward(streams=[np.float32(each) for each in streams], logits_TV=np.float32(logits_TV))


@pytest.fixture(scope="module")
def theirs():
    return reference(CONFIG)


def perturbed(path, index):
    """Parameters with one element changed by one percent."""
    params = jax.tree.map(np.array, tiny.params(CONFIG))
    leaf = params
    for key in path:
        leaf = leaf[key]
    leaf[index] *= 1.01
    return params


def test_a_model_agrees_with_itself(theirs):
    found = parity.compare(tiny.params(CONFIG), CONFIG, TOKENS, theirs)
    assert [each.part for each in found] == ["embedding", "layer 0", "layer 1", "layer 2", "logits"]
    assert parity.first_disagreement(found) is None
    assert max(each.relative for each in found) < 1e-5
    assert parity.render(found).splitlines()[-1] == "All parts agree to 0.0001."


@pytest.mark.parametrize(
    ("path", "index", "wrong"),
    [
        (("embedding",), (15, 0), ["embedding", "logits"]),
        (("runs", 0, "mlp", "down"), (0, 3, 4), ["layer 0", "logits"]),
        (("runs", 1, "attention", "query"), (0, 2), ["layer 1", "logits"]),
        (("runs", 1, "mlp_norm", "scale"), (1,), ["layer 2", "logits"]),
        (("norm", "scale"), 5, ["logits"]),
        (("head",), (0, 3), ["logits"]),
    ],
)
def test_a_changed_parameter_is_located(path, index, wrong, theirs):
    found = parity.compare(perturbed(path, index), CONFIG, TOKENS, theirs)
    assert [each.part for each in found if each.relative > parity.TOLERANCE] == wrong
    assert parity.first_disagreement(found) == wrong[0]
    table = parity.render(found).splitlines()
    assert [line.split("  ")[0].strip() for line in table if line.endswith("differs")] == wrong
    assert table[-1] == f"The first part that differs by more than 0.0001 is: {wrong[0]}."


def test_differences_are_relative_to_the_size_of_each_token():
    theirs = np.array([[1000.0, 1.0], [1.0, 0.5]], np.float32)
    large, small = theirs.copy(), theirs.copy()
    large[0, 1] += 0.01
    small[1, 1] += 0.01
    assert parity._difference("x", large, theirs).relative == pytest.approx(1e-5, rel=1e-2)
    assert parity._difference("x", small, theirs).relative == pytest.approx(1e-2, rel=1e-2)
    assert parity._difference("x", small, theirs).largest == pytest.approx(1e-2, rel=1e-2)


def test_nan_counts_as_a_difference():
    broken = parity._difference("x", np.full((2, 2), np.nan), np.ones((2, 2), np.float32))
    assert parity.first_disagreement([broken]) == "x"


def test_layers_use_their_position_and_number():
    config = tiny.CONFIGS["some layers slide"]
    assert parity.first_disagreement(parity.compare(tiny.params(config), config, TOKENS, reference(config))) is None


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_package_is_named(missing, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None if missing == "torch" else sys)
    monkeypatch.setitem(sys.modules, "transformers", None if missing == "transformers" else sys)
    assert main.main(["parity", str(tmp_path)]) == 2
    assert f"needs the package '{missing}': {how_to_install('parity')}\n" in capsys.readouterr().err
