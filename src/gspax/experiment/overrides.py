"""Parses `a.b=c` on the command line: any field of an experiment, by its annotation.

A key is a field of a dataclass (a part of the experiment, a data source, a model), a name in a mapping
(`teacher.models.math.checkpoint`), a member of a tuple by its name, or by its number where members have none
(`evaluation.tasks.gsm8k.samples`, `data.checks.0.most`), or a keyword of a function (`loss.clip_low` makes a
`functools.partial`). Values:

    int             8, 1_000, 1e3 (any number that is whole)
    float           1e-5, 3
    bool            true, false
    str             as it is
    tuple           (1,2) or 1,2; () is empty; texts may be quoted, as in Python: "\\n\\n","a, b"
    optional        any of the above, null or none
    anything else   a dotted name: loss=gspax.losses.grpo, model=gspax.model.presets.qwen3_0_6b; a dataclass stands
                    for an instance with its defaults: reference=gspax.config.Reference

Overrides apply from left to right, so one may set a field of what an earlier one assigned.
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from gspax.config.functions import (
    Hint,
    has_parts,
    hints_of,
    is_function,
    is_record,
    keywords,
    name_of,
    named_parts,
    unwrap,
)
from gspax.config.protocols import is_function_protocol
from gspax.errors import UserError, did_you_mean
from gspax.experiment.description import SOURCE, complete, describe, flatten

T = TypeVar("T")

SYNONYMS: dict[str, tuple[str, ...]] = {  # the names of fields in other libraries
    **dict.fromkeys(
        ("epsilon", "epsilon_low", "clip_eps", "clip_ratio", "clip_ratio_low", "cliprange"), ("loss.clip_low",)
    ),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), ("loss.clip_high",)),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef"), ("reference.coefficient",)),
    **dict.fromkeys(
        ("n", "num_generations", "group_size", "rollout_n", "num_samples", "n_samples_per_prompt"), ("sampling.group",)
    ),
    **dict.fromkeys(("train_batch_size", "prompts_per_step", "rollout_batch_size"), ("sampling.prompts",)),
    **dict.fromkeys(
        ("max_completion_length", "max_new_tokens", "max_response_length", "max_length"), ("sampling.max_tokens",)
    ),
    **dict.fromkeys(("max_prompt_length", "prompt_length"), ("sampling.max_prompt_tokens",)),
    **dict.fromkeys(("lr", "peak_lr", "peak_value"), ("optimizer.learning_rate",)),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps"), ("optimizer.warmup_updates",)),
    **dict.fromkeys(("clip_grad", "grad_clip", "max_norm"), ("optimizer.max_grad_norm",)),
    **dict.fromkeys(("adam_beta1", "beta1"), ("optimizer.transform.b1",)),
    **dict.fromkeys(("adam_beta2", "beta2"), ("optimizer.transform.b2",)),
    **dict.fromkeys(("adam_epsilon", "adam_eps"), ("optimizer.transform.eps",)),
    "weight_decay": ("optimizer.transform.weight_decay",),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "num_ppo_epochs", "mu"), ("schedule.epochs",)),
    **dict.fromkeys(("max_steps", "total_training_steps", "num_steps"), ("schedule.steps",)),
    **dict.fromkeys(("save_steps", "save_freq"), ("schedule.checkpoint_every",)),
    **dict.fromkeys(("eval_steps", "test_freq"), ("schedule.eval_every",)),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), ("schedule.microbatch_rows",)),
    **dict.fromkeys(("lora_rank", "lora_r", "r"), ("lora.rank",)),
    "lora_alpha": ("lora.alpha",),
}
_GROUPED = re.compile(r"[-+]?\d{1,3}(_\d{3})+(\.\d*)?([eE][-+]?\d+)?")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def override(experiment: T, assignments: Iterable[str]) -> T:
    """Apply every `key=value` to the experiment, left to right.

    Raises:
      UserError: one line for each assignment with an unknown key or a value that does not fit.
    """
    experiment, problems = apply(experiment, assignments)
    if problems:
        raise UserError("\n".join(sentence for _, sentence in problems))
    return experiment


def apply(experiment: T, assignments: Iterable[str]) -> tuple[T, list[tuple[str, str]]]:
    """Apply the assignments that can be applied; return the experiment, and (key, error) for each of the others."""
    problems = []
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        try:
            if not equals or not key:
                raise UserError(f"{assignment!r}: an override is written key=value, as in optimizer.learning_rate=1e-5")
            experiment = _set(experiment, key, text)
        except UserError as problem:
            problems.append((key, str(problem)))
    return experiment, problems


def without_effect(assignments: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each assignment that a later one undoes: of the same key, or of a parent of the key."""
    keys_of = [assignment.partition("=")[0].strip() for assignment in assignments]
    for i, (key, assignment) in enumerate(zip(keys_of, assignments, strict=True)):
        for later, other in zip(keys_of[i + 1 :], assignments[i + 1 :], strict=True):
            if f"{key}.".startswith(f"{later}."):
                yield f"{assignment}: without effect, because {other} follows"
                break


def as_recorded(experiment: T, description: Mapping[str, object]) -> T:
    """Return the experiment with every setting of the description that an override can set.

    What no override can set, such as the content of a data file or the code of a function, stays as it is;
    `description.difference` names it. A field that the description lacks is set to its default, and a
    function that has keywords which the description's has not is set anew, without them.

    Args:
      description: of the experiment with other settings (`experiment.json` of its run).
    """
    wanted, before = flatten(complete(description)), None
    while (now := describe(experiment)) != before:  # what was set brings keys of its own
        before, flat = now, flatten(now)
        changed = [key for key in wanted if wanted[key] != flat.get(key, _ABSENT) and not key.endswith(SOURCE)]
        changed += {key.rpartition(".")[0] for key in flat.keys() - wanted.keys() if _is_keyword(experiment, key)}
        outer = [key for key in changed if not any(key.startswith(f"{other}.") for other in changed)]
        experiment, _ = apply(experiment, [f"{key}={_to_text(wanted[key])}" for key in outer if key in wanted])
    return experiment


_ABSENT = object()


def _is_keyword(experiment: object, key: str) -> bool:
    """Return whether a key is a keyword that a partial binds."""
    *names, last = key.split(".")
    node = experiment
    for name in names:
        node = _children(node).get(name, (None, None))[0]
    return last in getattr(node, "keywords", {})


def _to_text(value: object) -> str:
    """Format a value of a description as in an override."""
    if isinstance(value, list):
        return f"({','.join(map(_to_text, value))})"
    return "null" if value is None else str(value)


def keys(value: object, prefix: str = "") -> Iterator[str]:
    """Yield every key that an override can set."""
    for name, (child, _) in _children(value).items():
        yield prefix + name
        yield from keys(child, f"{prefix}{name}.")


def _set(experiment: T, key: str, text: str) -> T:
    """Set the field at `key` to the value parsed from `text`."""
    names, nodes, hint = key.split("."), [experiment], None
    for depth, name in enumerate(names):
        children, item = _children(nodes[-1]), _item_hint(hint)
        if name not in children and (item is None or depth + 1 < len(names)):
            raise UserError(_unknown(experiment, names, depth, nodes[-1]))
        value, hint = children.get(name, (None, item))
        hint = item or hint
        nodes.append(value)
    try:
        value = _parse(text, hint, nodes.pop())
    except ValueError as wanted:
        raise UserError(f"{key}: wanted {wanted}, got {text!r}") from None
    for node, name in zip(reversed(nodes), reversed(names), strict=True):
        try:
            value = _with(node, name, value)
        except (TypeError, ValueError) as problem:  # a check of the dataclass itself
            raise UserError(f"{key}={text}: {problem}") from problem
    return value


def _with(node: Hint, name: str, value: object) -> Hint:
    """Return a dataclass, mapping, tuple, or function with one field, value, or keyword replaced."""
    if is_record(node):
        return dataclasses.replace(node, **{name: value})
    if isinstance(node, Mapping):
        return {**node, name: value}
    if has_parts(node):
        return type(node)({**named_parts(node), name: value}.values())
    bound = {**getattr(node, "keywords", {}), name: value}
    return functools.partial(unwrap(node), *getattr(node, "args", ()), **bound)


def _children(node: object) -> dict[str, tuple[Hint, Hint]]:
    """Return the fields of a dataclass, the values of a mapping or tuple, or the keywords of a function, each with its
    annotation."""
    if is_record(node):
        hints = hints_of(type(node))
        values = {field.name: getattr(node, field.name) for field in dataclasses.fields(node) if field.init}
    elif isinstance(node, Mapping):
        hints, values = {}, {name: value for name, value in node.items() if isinstance(name, str)}
    elif has_parts(node):
        values = named_parts(node)
        hints = {name: type(part) for name, part in values.items() if is_record(part)}
    elif isinstance(node, functools.partial) or is_function(node):
        hints, values = hints_of(unwrap(node)), keywords(node)
    else:
        return {}
    return {name: (value, hints.get(name, object)) for name, value in values.items()}


def _item_hint(hint: Hint) -> Hint:
    """Return the annotation of the values of a mapping to which a name can be added, one of scalars; else None."""
    if typing.get_origin(hint) is not collections.abc.Mapping:
        return None
    item = typing.get_args(hint)[1]
    return item if all(member in _SCALARS for member in typing.get_args(item) or (item,)) else None


def _unknown(experiment: object, names: list[str], depth: int, node: object) -> str:
    """Word the error for an unknown key: it suggests a sibling or a key of this name, else the closest, else all."""
    key, parent, rest = ".".join(names), ".".join(names[:depth]), names[depth + 1 :]
    children, every = _children(node), list(keys(experiment))
    if parent and not children:
        kinds = _records(_hint_at(experiment, names[:depth])) if node is None else []
        first = f"; set {parent}={name_of(kinds[0])} before it" if kinds else ""
        return f"unknown key {key!r}: {parent} is {_kind(node)} and has no fields{first}"
    if (dotted := _name_numbers(experiment, key)) in every:
        return f"unknown key {key!r}; did you mean {dotted!r}?"
    for other in SYNONYMS.get(names[-1], ()):
        if other in every:
            return f"unknown key {key!r}; did you mean {other!r}?"
        if (owner := other.rpartition(".")[0]) in every and _records(_hint_at(experiment, owner.split("."))):
            return f"unknown key {key!r}; did you mean {other!r}? ({owner} is None)"
    siblings = [".".join([*names[:depth], name, *rest]) for name in difflib.get_close_matches(names[depth], children)]
    near = [sibling for sibling in siblings if sibling in every]  # with the rest of the path it may be no key
    same = [other for other in every if other.rpartition(".")[2] == names[-1]]
    near = same or near if key == names[-1] else near or same
    near = near or difflib.get_close_matches(key, [other for other in every if not key.startswith(f"{other}.")], n=1)
    if near:
        return f"unknown key {key!r}; did you mean {near[0]!r}?"
    return f"unknown key {key!r}; {parent or 'an experiment'} has {', '.join(children)}"


def _name_numbers(experiment: object, key: str) -> str:
    """Name the members of tuples in a key: `tasks.gsm8k.samples` for `tasks[0].samples`."""
    node, names = experiment, []
    for written in re.sub(r"\[(\d+)\]", r".\1", key).split("."):
        children, name = _children(node), written
        if has_parts(node) and name not in children and name.isdecimal() and int(name) < len(children):
            name = list(children)[int(name)]
        names.append(name)
        node = children.get(name, (None, None))[0]
    return ".".join(names)


def _hint_at(experiment: object, names: Sequence[str]) -> Hint:
    """Return the annotation of a key."""
    node, hint = experiment, None
    for name in names:
        node, hint = _children(node)[name]
    return hint


def _records(hint: Hint) -> list[type]:
    """Return the dataclasses that a field with this annotation may have as values."""
    members = typing.get_args(hint) or (hint,)
    return [member for member in members if isinstance(member, type) and dataclasses.is_dataclass(member)]


def _kind(node: object) -> str:
    return "None" if node is None else name_of(node) if is_function(node) else f"of type {type(node).__name__}"


def _parse(text: str, hint: Hint, current: object) -> object:
    """Parse `text` as a value of the type `hint`. Raises ValueError saying what was wanted."""
    origin: Hint = typing.get_origin(hint)
    members = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _parse_union(text, members, current)
    if hint in _UNKNOWN and isinstance(current, bool | int | float | str | tuple | list):
        hint = type(current)
    if hint is not str:
        text = text.strip()
    if origin is typing.Literal:
        for choice in members:
            if text == str(choice):
                return choice
        raise ValueError("one of " + ", ".join(map(str, members)))
    if hint in (tuple, list) or origin in (tuple, list, collections.abc.Sequence):
        return _parse_tuple(text, origin or hint, members, current)
    return _SCALARS[hint](text) if hint in _SCALARS else _named(text, hint)


def _parse_union(text: str, members: tuple[Hint, ...], current: object) -> object:
    if types.NoneType in members and text.strip().lower() in ("null", "none"):
        return None
    wanted = []
    for member in members:
        if member is not types.NoneType:
            try:
                return _parse(text, member, current)
            except ValueError as problem:
                wanted.append(str(problem))
    raise ValueError(" or ".join([*wanted, *["null"] * (types.NoneType in members)]))


def _parse_tuple(text: str, kind: Hint, members: tuple[Hint, ...], current: object) -> Sequence[object]:
    if not text or (text.lower() in ("null", "none") and members[:1] not in ((), (str,))):
        raise ValueError("values with commas between them, or () for none")
    if members[:1] == (str,) and (quoted := _quoted(text)):
        return quoted
    inner = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
    texts = [part.strip() for part in inner.split(",")]
    if texts[-1] == "":
        texts.pop()  # () is the empty tuple, and a trailing comma is allowed
    is_fixed = kind is tuple and len(members) != 0 and members[-1] is not ...
    if is_fixed and len(texts) != len(members):
        raise ValueError(f"{len(members)} values with commas between them")
    default = type(current[0]) if isinstance(current, Sequence) and current else str
    hints = members if is_fixed else [members[0] if members else default] * len(texts)
    values = [_parse(part, hint, None) for part, hint in zip(texts, hints, strict=True)]
    return values if kind is list else tuple(values)


def _quoted(text: str) -> tuple[str, ...]:
    """Parse a tuple of texts that are all quoted as in Python; empty if they are not."""
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(f"[{text}]")
        values = value[0] if len(value) == 1 and isinstance(value[0], tuple | list) else value
        return tuple(values) if all(isinstance(one, str) for one in values) else ()
    return ()


def _integer(text: str) -> int:
    if "_" in text and not _GROUPED.fullmatch(text):
        raise ValueError("an integer, with _ between groups of three digits only")
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError, OverflowError):
        if (number := float(text)) == int(number):
            return int(number)
    raise ValueError("an integer")


def _float(text: str) -> float:
    if "_" in text and not _GROUPED.fullmatch(text):
        raise ValueError("a number, with _ between groups of three digits only")
    with contextlib.suppress(ValueError):
        return float(text)
    raise ValueError("a number")


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


_UNKNOWN = (typing.Any, object)  # annotations without information
_SCALARS: dict[Hint, collections.abc.Callable[[str], object]] = {
    int: _integer,
    float: _float,
    bool: _boolean,
    str: str,
}


def _named(text: str, hint: Hint) -> object:
    """Import the object with this dotted name if it fits the annotation. Raises ValueError saying what was wanted."""
    # Any is a class since Python 3.11
    is_class: bool = isinstance(hint, type) and hint not in _UNKNOWN and not getattr(hint, "_is_protocol", False)
    is_callable = collections.abc.Callable in (hint, typing.get_origin(hint)) or is_function_protocol(hint)
    wanted = f"the dotted name of a {hint.__name__}" if is_class else "a dotted name"
    wanted = "the dotted name of a function" if is_callable else wanted
    if not _DOTTED.fullmatch(text):
        raise ValueError(wanted + (_example(text, hint) if is_callable else ""))
    value = lookup(text)
    if is_class and isinstance(value, type) and issubclass(value, hint) and dataclasses.is_dataclass(value):
        try:
            value = value()
        except TypeError:
            raise ValueError(f"a {value.__name__} made in a file (it has fields without defaults)") from None
    fits = isinstance(value, hint) if is_class else callable(value) or not is_callable
    if not fits or inspect.ismodule(value):
        got = "names a module" if inspect.ismodule(value) else f"names {_kind(value)}".replace("names of", "is of")
        raise ValueError(f"{wanted} (it {got})")
    return value


_PACKAGES = {  # protocol -> a package with functions for it, and one of them
    "Loss": ("gspax.losses", "gspo"),
    "Advantage": ("gspax.advantages", "standardize"),
    "Correction": ("gspax.losses.correction", "truncate_tokens"),
    "Rejection": ("gspax.losses.correction", "truncate_tokens"),
    "KLLoss": ("gspax.losses.kl", "token_kl"),
    "KLEstimate": ("gspax.losses.kl", "k1"),
    "Reward": ("gspax.rewards.math", "reward"),
    "LearningRate": ("gspax.config.optimizers", "cosine"),
    "Transform": ("gspax.config.optimizers", "adamw"),
}


def _example(text: str, hint: Hint) -> str:
    """Return an example of a dotted name for the annotation: of `text` itself, if there is such a function."""
    package, usual = _PACKAGES.get(getattr(hint, "__name__", ""), ("gspax.losses", "gspo"))
    own = getattr(importlib.import_module(package), text, None) if text.isidentifier() else None
    return f", as in {package}.{text if is_function(own) else usual}"


def lookup(text: str) -> Hint:
    """Import the object with this dotted name, and modules as needed. ValueError names the part that is missing."""
    owner, *names = text.split(".")
    value: Hint = _import(owner, text)
    if value is None:
        raise ValueError(f"a name that can be imported (there is no module {owner!r})")
    for name in names:
        child = getattr(value, name, None)
        if child is None and inspect.ismodule(value):
            child = _import(f"{owner}.{name}", text)
        if child is None:
            hint = did_you_mean(name, dir(value))
            raise ValueError(f"a name that exists ({owner} has no {name!r}{hint and f'; {hint}'})")
        owner, value = f"{owner}.{name}", child
    return value


def _import(module: str, text: str) -> types.ModuleType | None:
    """Import a module; None if no module has this name."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        # the module itself is missing, or its parent is a module and not a package
        if missing.name is not None and f"{module}.".startswith(f"{missing.name}."):
            return None
        raise UserError(f"{text}: importing {module} needs the module {missing.name!r}") from missing
    except Exception as problem:
        raise UserError(f"{text}: importing {module} failed: {type(problem).__name__}: {problem}") from problem
