"""Environments, which answer the policy's messages and reward them: tasks of several turns, with tools.

An environment is any object with `reset` and `step` (`protocols.Environment`).
"""

from gspax.config.protocols import Environment, Step
from gspax.rewards.environments.agents import Agent, Command, Endpoint
from gspax.rewards.environments.family_calls import (
    parse_deepseek,
    parse_gemma,
    parse_glm,
    parse_harmony,
    parse_list,
    parse_llama,
    parse_minimax,
    parse_mistral,
)
from gspax.rewards.environments.tool_calls import parse_brackets, parse_hermes
from gspax.rewards.environments.tool_use import Tool, ToolError, ToolUse
from gspax.rewards.environments.tools import calculator, python

__all__ = [
    "Agent",
    "Command",
    "Endpoint",
    "Environment",
    "Step",
    "Tool",
    "ToolError",
    "ToolUse",
    "calculator",
    "parse_brackets",
    "parse_deepseek",
    "parse_gemma",
    "parse_glm",
    "parse_harmony",
    "parse_hermes",
    "parse_list",
    "parse_llama",
    "parse_minimax",
    "parse_mistral",
    "python",
]
