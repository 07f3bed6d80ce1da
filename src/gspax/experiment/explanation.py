"""What a run minimizes, in words: the equation of an experiment's objective as it will be computed, and its numbers.

Each loss, correction, advantage, and term declares its own part (`losses.formulas`, `config.Term.formula`); this module
puts the parts together. The equation is Python: a test evaluates it on random batches and compares it with the learner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from gspax import advantages, losses
from gspax.config import Experiment, Formula, Optimizer, Sampling, Schedule, Term, updates_per_step
from gspax.config.functions import is_record, title_of
from gspax.experiment.description import describe, difference, show
from gspax.losses import formulas
from gspax.losses.formulas import call_text, formula_of, words_of
from gspax.losses.traits import aggregate_of, traits_of
from gspax.model.passes import Passes

PAPER = "arXiv 2507.18071"  # GSPO's
OF_OBJECTIVE = (
    *("correction", "rejection", "selection", "center_scores", "reference", "teacher", "terms", "regularizers"),
    *("length_reward", "filter_overlong", "calibration", "old_logp", "routing_replay", "router_shift", "turns"),
)
UNSAID = (  # what the paper leaves open, and what a run gives to functions
    *("advantage.ddof", "advantage.eps", "turns.limit", "loss.correction"),
    *("*.segment_ids", "*.old_logp", "*.loss.aggregate", "*source-hash"),  # a penalty is aggregated as the loss
)
OPTIONAL = ("loss", "advantage", "correction", "rejection", "selection", "reference", "regularizers", "length_reward")
LIMIT = "Log-ratios are limited to ±25, against overflow."


class Equation(NamedTuple):
    """Assignments in order, and what the names in them are."""

    lines: list[tuple[str, str]]
    words: dict[str, str]


def explain(passes: Passes) -> str:
    """Return all that is known of what a valid experiment minimizes, as text."""
    experiment = passes.experiment
    sections = {
        "Advantages of the samples": _block(advantage_equation(passes)),
        "Each update minimizes `loss`, over the response tokens of a minibatch": _block(loss_equation(passes)),
        "where": [*_where(advantage_equation(passes), loss_equation(passes)), LIMIT],
        "Batch": batch_lines(experiment.sampling, experiment.schedule, filtered=experiment.filter_overlong),
        "Learning rate": rate_lines(experiment.optimizer, experiment.schedule),
        "Without effect": without_effect(passes) or ["no setting of the objective was found without effect"],
        f"Other than in GSPO's paper ({PAPER})": paper_lines(passes) or ["nothing"],
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def objective_lines(passes: Passes) -> list[str]:
    """Return the equation alone, a line for each assignment: advantages, then the loss."""
    return [*_block(advantage_equation(passes)), *_block(loss_equation(passes))]


def advantage_equation(passes: Passes) -> Equation:
    """Return how the samples' rewards become advantages."""
    experiment = passes.experiment
    lines, words = [], dict(words_of(experiment.advantage))
    if (length_reward := experiment.length_reward) is not None:
        lines.append(("reward", f"reward + {call_text(length_reward, 'length')}"))
        words |= words_of(length_reward)
    for term in passes.terms:
        for penalty in term.reward_penalties():
            names = {"logp": "old_logp"}
            estimate = formula_of(penalty.function, free=names) or call_text(penalty.function, "old_logp", "ref_logp")
            lines.append(("reward", f"reward - {penalty.coefficient!r} * sum_t({estimate})"))
            words |= words_of(penalty.function)
    if lines:
        words["reward"] = "of each sample; of several rewards, what is added is one more"
    if experiment.turns.credit == "turn":
        to_go = formula_of(partial(advantages.by_turn, discount=experiment.turns.discount))
        lines.append(("reward", to_go or ""))
        words["reward"] = "of each turn of a sample; advantages compare the k-th turns of a prompt's samples"
    text = call_text(experiment.advantage, "reward")
    return Equation([*lines, *_assignments(text, "advantage")], words)


def loss_equation(passes: Passes) -> Equation:
    """Return what an update minimizes."""
    loss, before = passes.experiment.loss, passes.ratio_formula
    lines, words, free = [*before.lines], {**before.words}, before.free
    parts = [_declared(term) for term in passes.terms]
    for part in parts:
        lines += [("advantage", part.advantage)] if part.advantage else []
        words |= part.words
    weights = [part.weight for part in parts if part.weight]
    lines += [("weight", formulas.factors(*weights))] if weights else []
    penalties = [part.penalty for part in parts if part.penalty]
    aggregate = aggregate_of(loss) or losses.by_sequence
    text = formula_of(loss, free=free)
    if text is None:
        given = ["logp", free.get("old_logp", "old_logp"), "advantage", *(["weight"] if weights else [])]
        total = call_text(loss, *given)
        words |= words_of(loss)
    else:
        lines += _assignments(text, "objective")
        total = f"-mean({'weight * ' if weights else ''}objective)"
    if text is not None or any("mean" in formulas.names_in(penalty) for penalty in penalties):
        lines.append(("mean(x)", formula_of(aggregate) or f"{formulas.short_name(aggregate)}(x)"))
        words |= words_of(aggregate)
    return Equation([*lines, ("loss", formulas.sums(total, *penalties))], words)


def _declared(term: Term) -> Formula:
    """Return a term's formula; the name of its class for what it computes without saying it.

    A formula speaks for the methods of its own class and of its bases, not for those of a class derived from it.
    """
    name = type(term).__name__
    own = term.formula if _overrides(term, "formula") else None
    undeclared = {
        part: text
        for part, method, text in (
            ("penalty", "penalties", name),
            ("weight", "weight", f"{name}(logp)"),
            ("advantage", "mix", f"{name}(advantage)"),
        )
        if _overrides(term, method) and (own is None or _order(term, method) < _order(term, "formula"))
    }
    if not undeclared:
        return own or Formula()
    words = {name: f"a term that {formulas.undeclared(type(term))}"}
    return Formula(**undeclared, words=words)


def _order(term: Term, member: str) -> int:
    """Return how far up in the order of a term's classes the member is defined; 0 is its own class."""
    return next(number for number, kind in enumerate(type(term).__mro__) if member in vars(kind))


def _overrides(term: Term, member: str) -> bool:
    return type(term).__mro__[_order(term, member)] is not Term


def _assignments(text: str, result: str) -> Iterator[tuple[str, str]]:
    """Yield the assignments of a formula; the last line is the result's."""
    *before, last = text.split("\n")
    for line in before:
        name, _, expression = line.partition(" = ")
        yield name, expression
    yield result, last


def _block(equation: Equation) -> list[str]:
    width = max(len(name) for name, _ in equation.lines)
    return [f"{name:<{width}} = {text}" for name, text in equation.lines]


def _where(*equations: Equation) -> list[str]:
    """Return a line for each name in the equations that is not assigned there."""
    used, known, assigned = dict[str, None](), formulas.NAMES | formulas.FUNCTIONS, {"x", "mean"}
    for equation in equations:
        known |= equation.words
        for _, text in equation.lines:
            used |= dict.fromkeys(formulas.names_in(text))
        assigned |= {name for name, _ in equation.lines} - formulas.NAMES.keys()
    named = {}
    for name in used.keys() - formulas.PLAIN - assigned:
        words = known.get(name, "")
        head, separator, rest = words.partition(": ")
        is_call = separator and head.startswith(f"{name}(")
        named[head if is_call else f"{name}(x)" if name in formulas.FUNCTIONS else name] = rest if is_call else words
    width = max(map(len, named))
    order = {name: number for number, name in enumerate(known)}
    ordered = sorted(named, key=lambda name: order.get(name.partition("(")[0], 0))
    return [f"{name:<{width}}  {named[name]}" for name in ordered]


def batch_lines(sampling: Sampling, schedule: Schedule, *, filtered: bool) -> list[str]:
    """Return the rows, updates, and tokens of a rollout; `filtered`: samples that were cut are left out."""
    rows, updates = sampling.prompts * sampling.group, updates_per_step(schedule)
    tokens = sampling.max_prompt_tokens + sampling.max_tokens
    each = rows // schedule.minibatches
    lines = [
        f"a rollout: {sampling.prompts:,} prompts x {sampling.group:,} samples = {rows:,}, at most "
        f"{rows * sampling.max_tokens:,} response tokens",
        f"an update: {each:,} samples, at most {each * tokens:,} tokens with their prompts; microbatches and "
        "devices do not change its result",
        f"a rollout has {updates:,} update{'s' if updates > 1 else ''}: {schedule.minibatches:,} minibatch"
        f"{'es' if schedule.minibatches > 1 else ''}, {schedule.epochs:,} epoch{'s' if schedule.epochs > 1 else ''}",
        f"the run: {schedule.steps:,} rollouts, {schedule.steps * updates:,} updates",
    ]
    if sampling.max_refills:
        lines.append(f"groups of equal rewards are replaced by new prompts, at most {sampling.max_refills:,} times")
    if filtered:
        lines.append("samples cut at the length limit count nowhere: not in advantages, denominators, or the loss")
    return lines


def rate_lines(optimizer: Optimizer, schedule: Schedule) -> list[str]:
    """Return the learning rate of some updates of the run, first and last included."""
    updates = updates_per_step(schedule)
    rate = optimizer.schedule(optimizer.learning_rate, optimizer.warmup_updates)
    count = updates * schedule.steps
    if not count:
        return ["the run has no update"]
    marks = {0, 1, optimizer.warmup_updates, *(count * part // 4 for part in (1, 2, 3)), count - 1}
    shown = {number: float(rate(number)) for number in sorted(marks) if number < count}
    lines = [f"{title_of(optimizer.schedule)}, with {title_of(optimizer.transform)}"]
    if len({*shown.values()}) == 1:
        return [*lines, f"{shown[0]:.4g} in every update"]
    return lines + [
        f"update {number + 1:,} (rollout {number // updates + 1:,}): {value:.4g}" for number, value in shown.items()
    ]


def without_effect(passes: Passes) -> list[str]:
    """Return a sentence for each setting of the objective that was given a value and changes nothing.

    A number has no effect if the equations are the same with another one.
    """
    experiment, said = passes.experiment, _said(passes)
    found = [
        f"{key}={show(value)}: the equation above does not contain it"
        for key, value, changed in _numbers(passes)
        if _said(Passes(changed(value * 2 + 1 if math.isfinite(value) else 1.0))) == said
    ]
    is_on_policy = updates_per_step(experiment.schedule) == 1 and passes.old_logp == "pass"
    if is_on_policy and not passes.ratio_formula.free and traits_of(experiment.loss).clip_range:
        found.append("the clip range: a rollout has one update, in which all ratios are 1")
    return found


def _said(passes: Passes) -> object:
    equations = advantage_equation(passes), loss_equation(passes)
    return [(equation.lines, equation.words) for equation in equations]


Changed = Callable[[Any], Experiment]  # a value -> the experiment with it


def _numbers(passes: Passes) -> Iterator[tuple[str, float, Changed]]:
    """Yield the key of each number of the objective that was given, its value, and what makes another of it."""
    for name in OPTIONAL:
        value = getattr(passes.experiment, name)
        yield from _numbers_in(value, name, partial(_with, passes.experiment, name))


def _with(record: Any, name: str, value: Any) -> Any:
    """Return a record, or a partial, with another value of a field or a keyword."""
    if is_record(record):
        return replace(record, **{name: value})
    return partial(record.func, *record.args, **{**record.keywords, name: value})


def _numbers_in(value: Any, key: str, changed: Changed) -> Iterator[tuple[str, float, Changed]]:
    given: dict[str, Any] = {}
    if is_record(value):
        defaults = {each.name: each.default for each in dataclasses.fields(value)}
        given = {name: x for name, default in defaults.items() if (x := getattr(value, name)) is not default}
    elif isinstance(value, partial):
        given = value.keywords
    for name, inner in given.items():
        renewed = partial(_renewed, changed, value, name)
        if formulas.is_number(inner):
            yield f"{key}.{name}", inner, renewed
        else:
            yield from _numbers_in(inner, f"{key}.{name}", renewed)


def _renewed(changed: Changed, value: Any, name: str, new: Any) -> Experiment:
    return changed(_with(value, name, new))


def paper_lines(passes: Passes) -> list[str]:
    """Return each setting of the objective and the updates that differs from the paper's: the paper's -> here."""
    experiment = passes.experiment
    fields = {field.name: field for field in dataclasses.fields(experiment)}
    plain = {name: _default(fields[name]) for name in OF_OBJECTIVE}
    schedule = replace(experiment.schedule, minibatches=4, epochs=1)
    paper = replace(experiment, loss=losses.gspo, advantage=advantages.standardize, schedule=schedule, **plain)
    lines = difference(describe(paper), describe(experiment), ignore=UNSAID)
    return [line.replace(" -> ", " in the paper, here ", 1) for line in lines]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
