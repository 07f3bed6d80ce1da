"""The examples in the docstrings of losses, advantages and corrections."""

import doctest
import importlib
import math
import re

import jax
import jax.numpy as jnp
import pytest

from gspax import advantages, losses

MODULES = {
    "gspax.losses.terms": 4,
    "gspax.losses.gspo_family": 4,
    "gspax.losses.grpo_family": 3,
    "gspax.losses.traits": 1,
    "gspax.losses.logprobs": 1,
    "gspax.losses.kl": 3,
    "gspax.losses.distill": 2,
    "gspax.losses.correction": 4,
    "gspax.losses.regularizers": 3,
    "gspax.losses.calibration": 2,
    "gspax.losses.ratio_spread": 1,
    "gspax.advantages": 9,
    "gspax.losses.shaping": 3,
}


NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


class Near(doctest.OutputChecker):
    """Numbers with a decimal point may differ by rounding, 1e-5 relative."""

    def check_output(self, want, got, optionflags):
        if super().check_output(NUMBER.sub("_", want), NUMBER.sub("_", got), optionflags):
            numbers = zip(NUMBER.findall(want), NUMBER.findall(got), strict=True)
            return all(math.isclose(float(a), float(b), rel_tol=1e-5) for a, b in numbers)
        return False


def test_the_checker_compares_numbers():
    assert Near().check_output("[1.25, 2]\n", "[1.2500001, 2]\n", 0)
    assert not Near().check_output("[1.25, 2]\n", "[1.26, 2]\n", 0)
    assert not Near().check_output("[1.25, 2]\n", "[1.25, 3]\n", 0)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    scope = vars(module) | {"jax": jax, "jnp": jnp, "losses": losses, "advantages": advantages}
    found = [test for test in doctest.DocTestFinder().find(module, globs=scope) if test.examples]
    assert len(found) >= MODULES[name], f"{name} has {len(found)} functions with an example"
    runner = doctest.DocTestRunner(Near(), optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in found:
        assert not runner.run(test).failed, test.name
