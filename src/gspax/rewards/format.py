"""Rewards formats: 1 if a completion has the requested form, else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gspax.data.problem import Problem
from gspax.rewards.calls import PURE, concurrent, needs


def find_mistake(settings: Mapping[str, Any]) -> str:
    """Explain why a pattern is no regular expression; empty if it is one."""
    try:
        re.compile(settings["pattern"])
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"pattern: wanted a regular expression, got {settings['pattern']!r:.200}: {error}"
    return ""


@needs(find_mistake)
@concurrent(PURE)
def match(problem: Problem, completion: str, *, pattern: str) -> float:
    """Compute 1.0 if the whole completion matches a regular expression (`.` matches newlines too), else 0.0.

    The pattern runs in the training process without a time limit: nested repetitions, as in `(a+)+`, can take a time
    exponential in the length of the completion.
    """
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)


def find_wrong_tags(settings: Mapping[str, Any]) -> str:
    """Explain why these are no names of tags; empty if they are."""
    tags = settings["tags"]
    are_names = not isinstance(tags, str) and len(tags) > 0 and all(isinstance(tag, str) and tag for tag in tags)
    return "" if are_names else f"tags: wanted names of tags, such as ('think', 'answer'), got {tags!r:.200}"


@needs(find_wrong_tags)
@concurrent(PURE)
def match_tags(
    problem: Problem, completion: str, *, tags: Sequence[str] = ("think", "answer"), opened: bool = False
) -> float:
    """Compute 1.0 if the completion is `<think>…</think><answer>…</answer>`, ignoring white space between, else 0.0.

    Args:
      problem: not read.
      completion: any text; takes time linear in its length.
      tags: the names, in order. Each tag occurs once, with text inside.
      opened: whether the prompt ends with the first opening tag, so that the completion starts after it.
    """
    if opened and not completion.startswith(f"<{tags[0]}>"):  # in a run, a `<think>` of the prompt is in the text
        completion = f"<{tags[0]}>{completion}"
    rest = completion
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if completion.count(opening) != 1 or completion.count(closing) != 1:
            return 0.0
        before, _, rest = rest.partition(opening)
        inside, mark, rest = rest.partition(closing)
        if before.strip() or not inside.strip() or not mark:
            return 0.0
    return float(not rest.strip())
