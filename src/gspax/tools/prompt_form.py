"""Reads how a run forms prompts from texts: its data's template and messages, and its environment's tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from gspax.config.functions import name_of
from gspax.config.protocols import ConversationTokenizer, Tokenizer
from gspax.data.files import show
from gspax.data.problem import chat_of, encode_prompt
from gspax.data.sources.mixture import Mixture
from gspax.data.sources.row_source import RowSource
from gspax.data.sources.schema import Schema
from gspax.errors import UserError
from gspax.hf.source import read_part
from gspax.rewards.environments.tool_use import Tool, ToolUse

_SHOWN = 80  # characters of a text
_WHERE, _WANTED = "experiment.json", "wanted what this version of gspax records"


@dataclass(frozen=True)
class Form:
    """A form of prompts: the template, messages and tools around a text.

    Attributes:
      schema: gives `template`, `system` and `examples`.
      tools: JSON schemas of functions, for the chat template.
    """

    schema: Schema
    tools: tuple[Mapping[str, Any], ...]

    def encode(self, tokenizer: Tokenizer, text: str) -> Sequence[int]:
        """Encode the prompt that contains the text."""
        problem, _ = self.schema.read({"prompt": text})
        if not self.tools:
            return encode_prompt(tokenizer, problem)
        return cast(ConversationTokenizer, tokenizer).encode_chat(chat_of(problem), self.tools)

    def __str__(self) -> str:
        schema, parts = self.schema, list[str]()
        if schema.template != "{prompt}":
            parts.append(f"in the template {_quote(schema.template)}")
        if schema.system is not None:
            parts.append(f"after the system message {_quote(schema.system)}")
        if schema.examples:
            parts.append(f"after {len(schema.examples)} examples")
        if self.tools:
            parts.append(
                f"with the tools {', '.join(str(tool.get('function', {}).get('name')) for tool in self.tools)}"
            )
        return ", ".join(parts)


def read_forms(recorded: Mapping[str, Any], environment: object = None) -> list[Form]:
    """Read the forms of a run's prompts, one per form in its sources; none where the texts are the prompts.

    Args:
      recorded: the description of the run's experiment.
      environment: the environment of the experiment's file; without it only the tools of a `ToolUse` are known.
    """
    schemas = getattr(environment, "schemas", None)
    tools = tuple(schemas() if schemas is not None else _recorded_tools(recorded.get("environment")))
    forms = {str(form): form for schema in _schemas(recorded.get("data")) for form in [Form(schema, tools)]}
    return [form for text, form in forms.items() if text]


def _recorded_tools(environment: object) -> list[dict[str, object]]:
    if not isinstance(environment, Mapping) or environment.get("type") != name_of(ToolUse):
        return []
    try:
        return [Tool(one["name"], one["description"], str, one["parameters"]).schema() for one in environment["tools"]]
    except (KeyError, TypeError, AttributeError) as problem:
        raise UserError(f"{_WHERE}: environment.tools: {_WANTED}: {problem}") from problem


def _schemas(data: object) -> Iterator[Schema]:
    kind = data.get("type") if isinstance(data, Mapping) else None
    if isinstance(data, Mapping) and kind == name_of(Mixture):
        if not isinstance(sources := data.get("sources"), Mapping):
            raise UserError(f"{_WHERE}: data.sources: {_WANTED}, got {show(sources)}")
        for source in sources.values():
            yield from _schemas(source)
    elif isinstance(data, Mapping) and kind == name_of(RowSource):
        schema = read_part(Schema, data.get("schema"), f"{_WHERE}: data.schema")
        yield replace(schema, prompt="prompt", answer=None, task_column=None, metadata=())
    else:
        yield Schema(answer=None)


def _quote(text: str) -> str:
    return json.dumps(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…", ensure_ascii=False)
