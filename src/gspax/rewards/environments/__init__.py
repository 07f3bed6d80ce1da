"""Environments, which answer the policy's messages and reward them: tasks of several turns, with tools.

An environment is any object with `reset` and `step` (`protocols.Environment`).
"""

from gspax.config.protocols import Environment, Step
from gspax.rewards.environments.tool_use import Tool, ToolError, ToolUse, parse_brackets, parse_hermes
from gspax.rewards.environments.tools import calculator, python

__all__ = [
    "Environment",
    "Step",
    "Tool",
    "ToolError",
    "ToolUse",
    "calculator",
    "parse_brackets",
    "parse_hermes",
    "python",
]
