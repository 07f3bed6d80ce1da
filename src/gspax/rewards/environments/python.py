"""A Python tool: it runs programs of the policy in the sandbox of `rewards.code`, and replies with their output."""

from __future__ import annotations

from functools import partial

from gspax.errors import UserError
from gspax.rewards.code import Sandbox, run_program
from gspax.rewards.environments.tool_use import Tool, ToolError

_SANDBOX = Sandbox()


def python(*, allow_code_execution: bool = False, sandbox: Sandbox = _SANDBOX) -> Tool:
    """The tool `python(code)`; every call runs in a fresh interpreter.

    Args:
      allow_code_execution: must be True: this runs programs that a model has written.
      sandbox: where they run.

    Raises:
      UserError: `allow_code_execution` is not True.
    """
    if not allow_code_execution:
        raise UserError("environment: wanted allow_code_execution=True for a tool that runs programs of a model")
    return Tool(
        name="python",
        description="Runs a Python program without network or files; the reply is what it prints.",
        run=partial(run_python, sandbox=sandbox),
        parameters={"code": {"type": "string"}},
    )


def run_python(code: str, *, sandbox: Sandbox) -> str:
    """The output of a program. ToolError with the last line of its errors if it fails, or if it takes too long."""
    ran = run_program(code, allow_code_execution=True, sandbox=sandbox)
    if ran.status != "exited":
        raise ToolError(f"the program was ended after {sandbox.limits.timeout:g} s")
    if ran.code != 0:
        raise ToolError(f"{ran.output}{ran.last_error()}")
    return ran.output
