"""Formulas in text: what a part of an objective declares beside its code, so that a run can print what it minimizes.

A formula is a Python expression of names: the arrays of `NAMES`, the functions of `FUNCTIONS`, and the function's own
keywords, which are replaced by their numbers. Lines before the last one define names of their own:

    ratio = exp(logp - old_logp)
    min(ratio * advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * advantage)

Its gradient is that of the code, too: `sg` marks what is a constant. A test evaluates the formulas on random batches
and compares value and gradient with the code's. `experiment.explanation` puts them together.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from gspax.losses.traits import keywords_of

Function = TypeVar("Function", bound=Callable[..., object])
Text = str | Callable[[Mapping[str, Any]], str]  # a function of the keywords, where these change more than numbers

NAMES = {
    "logp": "log-prob of a response token under the policy that is trained",
    "old_logp": "the same under the policy before the updates of this rollout; a constant",
    "sampler_logp": "the same as the sampler computed it; a constant",
    "ref_logp": "the same under the policy that the run started from; a constant",
    "teacher_logp": "the same under the teacher; a constant",
    "advantage": "of the token's sample; a constant",
    "entropy": "of the distribution that the token was sampled from",
    "old_entropy": "the entropy under the policy before the updates; a constant",
    "length": "response tokens of the token's sequence",
    "sequences": "sequences of the minibatch with a response token",
    "tokens": "response tokens of the minibatch",
    "age": "rollouts trained on between the weights that sampled the token and the policy before the updates",
    "progress": "updates of the rollout that are done, over their number",
    "router_distance": "mean over layers and the token's old experts of |log of the router's score - the old one|, at "
    "the position before the token; a constant",
    "router_prob": "the router's softmax over all experts, of each layer and token",
    "router_logits": "of the router, of each layer and token",
    "load": "each expert's share of the minibatch's choices, 1 if balanced; a constant",
    "entropy_coefficient": "changes after every update, to keep the entropy near its target",
    "clip_low": "measured: see calibration",
    "clip_high": "measured: see calibration",
    "reward": "of each sample",
    "group": "samples of the prompt",
    "score_norm": "squared norm of the gradient of log π by the logits, of each token",
    "kept_logp": "log-probs of the kept tokens under the policy that is trained",
    "kept_teacher_logp": "log-probs of the kept tokens under the teacher; constants",
    "sampled_is_kept": "the sampled token is one of the kept ones",
    "logp_v": "log-probs of all tokens of the vocabulary under the policy that is trained",
    "sampler_logp_v": "the same under the policy that sampled; constants; both over the sampling mask if there is one",
    "teacher_logp_v": "log-probs of all tokens of the vocabulary under the teacher; constants",
    "inf": "infinity",
}

FUNCTIONS = {
    "sg": "a constant: no gradient flows through x",
    "k1": "x",
    "k2": "x**2 / 2",
    "k3": "exp(-x) - 1 + x",
    "sum": "over the response tokens of the minibatch",
    "average": "over the response tokens of the minibatch",
    "mean_t": "mean over the response tokens of the token's sequence",
    "sum_t": "sum over the response tokens of the token's sequence",
    "max_t": "largest of the response tokens of the token's sequence",
    "from_t": "sum from the token to the end of its sequence",
    "up_to_t": "sum from the first response token of the sequence to the token",
    "mean_l": "mean over the layers with experts",
    "sum_e": "sum over the experts",
    "logsumexp_e": "log Σ exp x over the experts",
    "sum_k": "sum over the kept tokens",
    "sum_v": "sum over the vocabulary",
    "mean_g": "mean over the samples of the prompt",
    "sum_g": "sum over the samples of the prompt",
    "max_others_g": "largest of the prompt's other samples",
    "std_g": "std_g(x, d): standard deviation over the samples of the prompt; divides the sum of squares by G - d",
    "mean_b": "mean over all samples of the rollout",
    "std_b": "std_b(x, d): standard deviation over all samples of the rollout; divides the sum of squares by N - d",
    "sum_r": "sum over the rewards of a sample",
    "to_go": "to_go(x, d): a turn's reward and the sample's later ones, summed; a factor d for each turn between",
    "top": "top(x, s): 1 for the share s of the minibatch's tokens with the largest x, at least one; else 0",
    "small_mean": "small_mean(x, c): 1 for the tokens with the smallest x whose mean is below c, at least one; else 0",
    "drawn": "drawn(f, s): 1 for random tokens among those with f, a share s of the minibatch's, at least one; else 0",
    "inside": "inside(x, a, b): 1 if a <= x <= b, else 0",
    "weights": "a factor for each reward, in the alphabetical order of their names",
    "sigmoid": "1 / (1 + exp(-x))",
}
PLAIN = {"exp", "log", "min", "max", "abs", "clip", "where", "sign"}  # need no words

NOTHING: Mapping[str, str] = {}
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


class Declared(NamedTuple):
    """A formula and the function that declares it: `functools.wraps` copies it to others, of which it says nothing."""

    text: Text
    owner: object


def formula(text: Text) -> Callable[[Function], Function]:
    """Attach its formula to a function; a decorator.

    >>> @formula("min(exp(old_logp - sampler_logp), cap)")
    ... def weight(old_logp, sampler_logp, mask, *, cap=2.0): ...
    >>> formula_of(functools.partial(weight, cap=3.0))
    'min(exp(old_logp - sampler_logp), 3.0)'
    """

    def attach(function: Function) -> Function:
        setattr(function, "formula", Declared(text, function))  # noqa: B010 (mypy: functions have no such attribute)
        return function

    return attach


def formula_of(function: Callable[..., object], *, free: Mapping[str, str] = NOTHING) -> str | None:
    """Return the formula of a function or a `functools.partial` with its numbers; None if it declares none.

    Args:
      free: names of the formula to replace by other names or expressions.
    """
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    declared = getattr(inner, "formula", None)
    if not isinstance(declared, Declared) or declared.owner is not inner:
        return None
    values = bound_values(function)
    text = declared.text if isinstance(declared.text, str) else declared.text(values)
    numbers = {name: number_text(value) for name, value in values.items() if is_number(value)}
    return replace_names(text, numbers | dict(free))


def call_text(function: Callable[..., object], *arguments: str) -> str:
    """Return the formula of a function; a call with these arguments and its numbers if it declares none."""
    numbers = {name: value for name, value in bound_values(function).items() if is_number(value)}
    given = [*arguments, *(f"{name}={number_text(value)}" for name, value in numbers.items())]
    return formula_of(function) or f"{short_name(function)}({', '.join(given)})"


def aggregated(function: Callable[..., object], text: str, *, otherwise: Callable[..., object]) -> str:
    """Return a value per token, aggregated as a function does: as the loss does, by its own way, or by `otherwise`.

    Args:
      function: whose keyword `aggregate` is free, bound, or not there.
      otherwise: the aggregate of a function without that keyword.
    """
    bound = function.keywords if isinstance(function, functools.partial) else {}
    if "aggregate" not in bound and "aggregate" in keywords_of(function):
        return f"mean({text})"
    own = bound.get("aggregate", otherwise)
    return formula_of(own, free={"x": f"({text})"}) or f"{short_name(own)}({text})"


def words_of(function: Callable[..., object]) -> dict[str, str]:
    """Return what is said of a function without a formula, by its name; nothing if it has one."""
    return {} if formula_of(function) is not None else {short_name(function): undeclared(function)}


def undeclared(value: object) -> str:
    """Say that a function or a term declares no formula, with the first line of its documentation."""
    while isinstance(value, functools.partial):
        value = value.func
    lines = (getattr(value, "__doc__", None) or "").strip().splitlines()
    return "declares no formula" + (f": {lines[0].strip()}" if lines else "")


def short_name(function: Callable[..., object]) -> str:
    """Return the name of a function without its module, as an identifier."""
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__qualname__", type(function).__name__)).rpartition(".")[2]
    return name if name.isidentifier() else "function"


def bound_values(function: Callable[..., object]) -> dict[str, Any]:
    """Return the keywords of a function that have a value: bound ones, and defaults other than None."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return {name: value for name, value in keywords_of(function).items() if value is not None or name in bound}


def is_number(value: object) -> bool:
    """Return whether a value stands in a formula as its digits."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_text(value: float) -> str:
    """Return a number as a formula has it: exact, and in parentheses where a sign would be ambiguous.

    >>> number_text(3e-4), number_text(-1)
    ('0.0003', '(-1)')
    """
    text = repr(value)
    return f"({text})" if text.startswith("-") else text


def replace_names(text: str, by: Mapping[str, str]) -> str:
    """Replace names in a formula.

    >>> replace_names("clip_low * low", {"low": "2"})
    'clip_low * 2'
    """
    return _NAME.sub(lambda match: by.get(match[0], match[0]), text)


def names_in(text: str) -> Iterator[str]:
    """Yield the names in a text, in order, with repetitions.

    >>> [*names_in("min(1e-6, x)")]
    ['min', 'x']
    """
    yield from _NAME.findall(text)


def sums(*parts: str) -> str:
    """Add terms, the signs of which their texts begin with.

    >>> sums("-mean(a)", "0.1 * b", "-c")
    '-mean(a) + 0.1 * b - c'
    """
    text = parts[0]
    for part in parts[1:]:
        text += f" - {part[1:]}" if part.startswith("-") else f" + {part}"
    return text


def factors(*parts: str) -> str:
    """Multiply expressions, each in parentheses unless it is alone or a call or a name."""
    if len(parts) == 1:
        return parts[0]
    return " * ".join(part if _is_atom(part) else f"({part})" for part in parts)


def _is_atom(text: str) -> bool:
    """Return whether an expression is a name, a number, or one call."""
    if not re.match(r"[\w.]+(\(|$)", text):
        return False
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ")" and depth == 0:
            return index == len(text) - 1
    return True
