"""The examples in the docstrings of every module."""

import doctest
import importlib
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from gspax import advantages, losses

SRC = Path(__file__).parents[1] / "src"
MODULES = [
    ".".join(path.relative_to(SRC).with_suffix("").parts)
    for path in sorted(SRC.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
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
    assert found, f"{name} has an example that is in no docstring"
    runner = doctest.DocTestRunner(Near(), optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in found:
        assert not runner.run(test).failed, test.name
