"""The tools of gspax: a calculator, and Python programs in a sandbox.

The calculator parses exact arithmetic itself; nothing is evaluated as a program.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from functools import partial

from gspax.errors import UserError
from gspax.rewards.calls import needs
from gspax.rewards.code import Sandbox, find_missing_sandbox, run_program
from gspax.rewards.environments.tool_use import Tool, ToolError
from gspax.rewards.scores import FAILED

_LONGEST_EXPRESSION = 400  # characters
_MOST_BITS = 4096  # bits of a numerator or a denominator
_DIGITS = 12  # significant digits of a result that is not an integer

_BINARY: dict[type, Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SANDBOX = Sandbox()


def calculator() -> Tool:
    """Make the tool `calculator(expression)`."""
    return Tool(
        name="calculator",
        description="The value of an arithmetic expression with + - * / // % ** and parentheses.",
        run=calculate,
        parameters={"expression": {"type": "string", "description": "for example (17 + 4) * 3"}},
    )


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression with fractions: an integer, or 12 significant digits.

    >>> calculate("(17 + 4) * 3"), calculate("1 / 8"), calculate("2 / 3")
    ('63', '0.125', '0.666666666667')

    Raises:
      ToolError: it is not such an expression, divides by 0, or has a result or a power that is too large.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ToolError(f"wanted at most {_LONGEST_EXPRESSION} characters, got {len(expression)}")
    try:
        tree = ast.parse(expression.strip().replace("^", "**").replace(",", ""), mode="eval")
        return _show(_value(tree.body))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"wanted an arithmetic expression, got {expression[:80]!r}") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if isinstance(number, float) and not math.isfinite(number):
                raise ToolError("wanted finite numbers")
            return _bounded(Fraction(str(number)) if isinstance(number, float) else Fraction(number))
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(op)](_value(left), _value(right))))
    raise ToolError(f"wanted numbers and + - * / // % **, got {ast.unparse(node)[:80]!r}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    size = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * size > _MOST_BITS:
        raise ToolError("wanted a whole exponent and a smaller power")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator).bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise ToolError("the result is too large")
    return value


def _show(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{_DIGITS}g}"
    except OverflowError:
        raise ToolError("the result is too large") from None


def python(*, allow_code_execution: bool = False, sandbox: Sandbox = _SANDBOX) -> Tool:
    """Make the tool `python(code)`; every call runs in a fresh interpreter.

    Args:
      allow_code_execution: must be True: this runs programs that a model has written.
      sandbox: the sandbox of the programs.

    Raises:
      UserError: `allow_code_execution` is not True.
    """
    if allow_code_execution is not True:
        raise UserError("environment: wanted allow_code_execution=True for a tool that runs programs of a model")
    return Tool(
        name="python",
        description="Runs a Python program without network or files; the reply is what it prints.",
        run=partial(run_python, sandbox=sandbox),
        parameters={"code": {"type": "string"}},
    )


@needs(find_missing_sandbox)
def run_python(code: str, *, sandbox: Sandbox) -> str:
    """Run a program and return its output. ToolError with the last line of its errors if it fails or takes too long.

    RuntimeError if it could not be run, which is not the program's fault.
    """
    ran = run_program(code, allow_code_execution=True, sandbox=sandbox)
    if ran.status in FAILED:
        raise RuntimeError(f"the program could not be run: {ran.status}")
    if ran.status != "exited":
        raise ToolError(f"the program was ended after {sandbox.limits.timeout:g} s")
    if ran.code != 0:
        raise ToolError(f"{ran.output}{ran.last_error()}")
    return ran.output
