"""Environments answer the policy's messages, and reward them: tasks of several turns, with tools.

An environment is any object with `reset` and `step` (`protocols.Environment`).
"""

from gspax.environments.calculator import calculator
from gspax.environments.python import python
from gspax.environments.step import Step
from gspax.environments.tool_use import Tool, ToolError, ToolUse
from gspax.protocols import Environment

__all__ = ["Environment", "Step", "Tool", "ToolError", "ToolUse", "calculator", "python"]
