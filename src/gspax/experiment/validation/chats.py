"""Rules of a chat template: its output fits the stop ids, the environment, its tools, and demonstrations.

Each message is one sentence. `data.chat_template` analyzes what a template writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspax.config import Turns
from gspax.config.functions import title_of
from gspax.config.protocols import Environment, Message, Tokenizer
from gspax.data.chat import ChatTokenizer, tools_of
from gspax.data.chat_template import check_settings, compare_history, shows_tools, whole_tag, write_call
from gspax.errors import UserError
from gspax.rewards.environments.family_calls import PARSERS

_SHOWN = 60  # characters of a template's output in a message


def chat_problems(tokenizer: Tokenizer, environment: Environment | None, stop_ids: Sequence[int] = ()) -> Iterator[str]:
    """Yield the reasons why a chat tokenizer's template cannot be used.

    Args:
      tokenizer: of any kind; only a `ChatTokenizer` has a template.
      environment: the environment that replies to the policy, if any.
      stop_ids: ids that end a completion besides the tokenizer's.
    """
    if not isinstance(tokenizer, ChatTokenizer):
        return
    try:
        check_settings(tokenizer.folder, tokenizer.path, tokenizer.date, tokenizer.variables)  # overrides change them
        missing = list(missing_stops(tokenizer, stop_ids))  # also tests whether the template can be used at all
    except UserError as problem:
        yield f"tokenizer: {problem}"
        return
    if environment is not None:
        yield from missing
        tokenizer = tokenizer.with_tools(tools_of(environment))
        try:
            yield from _reply_problems(tokenizer, environment)
        except UserError as problem:
            role = _role(environment)
            yield f"environment: wanted replies that the template can write, got ones of the role {role!r}: {problem}"


def missing_stops(tokenizer: ChatTokenizer, stop_ids: Sequence[int]) -> Iterator[str]:
    """Check that the token with which the template ends a turn is a stop id."""
    end = tokenizer.template.end
    if end is not None and (i := tokenizer.added_tokens[end]) not in (*tokenizer.stop_ids, *stop_ids):
        yield (
            f"tokenizer.stop_ids: wanted {end!r} ({i}), with which the chat template in {tokenizer.path} ends a turn, "
            f"got {_name(tokenizer, tokenizer.stop_ids)}: a policy that has learned it would run on to the limit of "
            f"tokens (sampling.stop_token_ids=({i},) ends turns with it)"
        )


def _reply_problems(tokenizer: ChatTokenizer, environment: Environment) -> Iterator[str]:
    """Check that the template writes replies after a stop id, or after the end that is already reported."""
    end, role = tokenizer.template.end, _role(environment)
    stops = {*tokenizer.stop_ids, *([tokenizer.added_tokens[end]] if end is not None else [])}
    if (i := tokenizer.end_before([_message(role)])) not in stops and end is not None:
        yield (
            f"environment: wanted a stop id before a reply of the role {role!r}, one of "
            f"{_name(tokenizer, tokenizer.stop_ids)}, the chat template in {tokenizer.path} writes "
            f"{_name(tokenizer, [i])}: no conversation would go on"
        )


def chat_warnings(tokenizer: Tokenizer, environment: Environment | None, stop_ids: Sequence[int] = ()) -> Iterator[str]:
    """Yield warnings about a template: unread settings, missing tools, and turns that it renders differently."""
    if not isinstance(tokenizer, ChatTokenizer):
        return
    yield from _unused_thinking(tokenizer)
    if environment is None:
        yield from missing_stops(tokenizer, stop_ids)
        return
    tools, role = tools_of(environment), _role(environment)
    tokenizer = tokenizer.with_tools(tools)
    template = tokenizer.template
    if tools and not shows_tools(template, tools):
        yield (
            f"tokenizer: the chat template in {tokenizer.path} writes no tools, so the policy does not see those of "
            "the environment: describe them, and the form of a call, in the prompt"
        )
    elif tools:
        yield from _call_warnings(tokenizer, environment, tools)
    try:
        kept, written = compare_history(template, role)
    except UserError:  # the template requires its own form of calls before a reply
        return
    if kept != written:
        shared = min(len(kept), len(written))
        differ = (i for i, (a, b) in enumerate(zip(kept, written, strict=False)) if a != b)
        place = whole_tag(kept, next(differ, shared))
        yield (
            f"tokenizer: a conversation keeps what was sampled, so from its second turn on it is not what the chat "
            f"template in {tokenizer.path} would write: {kept[place:][:_SHOWN]!r}, not {written[place:][:_SHOWN]!r}"
        )


def _unused_thinking(tokenizer: ChatTokenizer) -> Iterator[str]:
    """Check that `thinking` changes the prompt, unless the template always opens thinking."""
    template, chat = tokenizer.template, [_message("user")]
    has_switch = not template.thinking or template.render(chat) != replace(template, thinking=False).render(chat)
    if not has_switch and not template.opening:
        yield (
            f"tokenizer.thinking=True: without effect, because the chat template in {tokenizer.path} writes the same "
            "prompt with False: ask for thinking in the prompt"
        )


def _call_warnings(
    tokenizer: ChatTokenizer, environment: Environment, tools: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Check that the environment's parser reads the calls that the template describes."""
    parse, function = getattr(environment, "parse", None), tools[0].get("function", {})
    if parse is None:
        return
    name, parameters = str(function.get("name")), function.get("parameters", {}).get("properties", {})
    unknown = f"environment.parse: check that {title_of(parse)} reads the calls that the model writes:"
    try:
        written = write_call(tokenizer.template, name, dict.fromkeys(parameters, "1"), tools)
    except UserError as problem:
        yield f"{unknown} with one {problem}"
        return
    if name not in written:
        yield f"{unknown} the chat template in {tokenizer.path} writes nothing of one"
    elif not _reads(parse, written, name):
        fits = (title_of(one) for one in PARSERS if _reads(one, written, name))
        hint = f"{one} reads it" if (one := next(fits, "")) else "`parse` may be a function of your own"
        yield (
            f"environment.parse: {title_of(parse)} finds no call in what the chat template in {tokenizer.path} writes "
            f"for one, {written[-2 * _SHOWN :]!r}: a policy that follows the template calls no tool ({hint}, as in "
            "docs/environments.md#tools)"
        )


def _reads(parse: Callable[[str], Sequence[object]], written: str, name: str) -> bool:
    """Return whether a parser finds a call of this tool in a text."""
    return any(getattr(call, "name", None) == name for call in parse(written))


def unused_turns(environment: Environment | None, turns: Turns) -> Iterator[str]:
    """Yield the settings of turns that have no effect."""
    default = Turns()
    if environment is None and turns.limit != default.limit:
        yield f"turns.limit={turns.limit}: without effect, because there is no environment"
    if turns.discount != default.discount and (environment is None or turns.credit != "turn"):
        yield f'turns.discount={turns.discount:g}: without effect, unless turns.credit="turn" with an environment'


def _role(environment: Environment) -> str:
    """Return the role of the replies, as far as it can be inferred: an environment of tools has schemas."""
    return "tool" if tools_of(environment) else "user"


def _message(role: str) -> Message:
    return {"role": role, "content": "reply"}


def _name(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    names = {i: text for text, i in tokenizer.ids.items() if i in ids}
    return ", ".join(repr(names.get(i, i)) for i in ids)
