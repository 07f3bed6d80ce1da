"""Calls the terms of one's own, as an update does, on rows of shapes alone. Each message is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from gspax import losses
from gspax.config import Comparison, Term
from gspax.errors import place_of
from gspax.losses.ratio_spread import ratio_metrics
from gspax.losses.traits import aggregate_of
from gspax.model.passes import Passes
from gspax.types import Adapted, Batch, packed, segment_ids

B, T, L, A = 2, 3, 1, 1
LATER = {  # metrics that an objective adds beside those of its loss and its penalties
    *("correction", "correction_rejected", "router_shift"),
    *("clip_fraction_nonzero", "clip_low_measured", "clip_high_measured"),
}


def own_term_problems(passes: Passes) -> Iterator[str]:
    """Yield a sentence for each term that raises, returns something else, or has a metric's name that is taken."""
    if not passes.experiment.terms:
        return
    taken = {**dict.fromkeys(LATER, "the objective"), **_names_of_loss(passes)}
    for term in passes.terms:
        name, is_own = type(term).__name__, any(term is own for own in passes.experiment.terms)
        if term.comparison is not None and not is_own:  # it may compare with a model that is not known here
            continue
        try:
            penalties = _penalties(term, passes)
        except Exception as error:  # of the user's code
            if is_own:
                yield f"terms: {name} raised {type(error).__name__}: {_first_line(error)}{place_of(error)}"
            continue
        for coefficient, penalty in penalties:
            if breach := _breach(coefficient, penalty):
                yield f"terms: wanted {name}.penalties to yield {breach}"
                continue
            for metric in penalty.metrics:
                if is_own and metric in taken:
                    yield (
                        f"terms: wanted a name for the metric of {name} that nothing else has, got {metric!r}, which "
                        f"{taken[metric]} has; make the name a setting of {name}"
                    )
                taken.setdefault(metric, f"another {name}" if is_own else name)


def _breach(coefficient: object, penalty: object) -> str:
    """Say what is wrong with what a term yielded; empty if nothing is."""
    if not isinstance(coefficient, int | float) or isinstance(coefficient, bool):
        return f"Python numbers as coefficients, got {type(coefficient).__name__}"
    if not isinstance(penalty, losses.Terms) or getattr(penalty.value, "shape", ()) != (B,):
        return f"losses.Terms with a value for each row, got {type(penalty).__name__}"
    return ""


def _penalties(term: Term, passes: Passes) -> list[tuple[Any, Any]]:
    """Trace a term, and return its penalties, of shapes alone."""
    found: list[tuple[Any, Any]] = []
    jax.eval_shape(lambda arrays: found.extend(_call(term, passes, arrays)), _arrays(passes))
    return found


def _names_of_loss(passes: Passes) -> dict[str, str]:
    """Return the names of the metrics of the loss; `contracts` says what is wrong with one that raises."""
    found: dict[str, str] = {}

    def call(arrays: dict[str, Any]) -> None:
        batch = arrays["batch"]
        rows = arrays["logp_BT"], batch.old_logp_BT, batch.mask_BT
        terms = passes.experiment.loss(rows[0], rows[1], batch.advantage, rows[2], **packed(batch))
        names = [*terms.metrics, *ratio_metrics(*rows, segment_ids=segment_ids(batch))]
        found.update(dict.fromkeys(names, "the loss"))

    try:
        jax.eval_shape(call, _arrays(passes))
    except Exception:  # of the user's code
        return {}
    return found


def _call(term: Term, passes: Passes, arrays: dict[str, Any]) -> Iterator[tuple[float, Any]]:
    """Call what an update calls of a term, and yield its penalties."""
    outputs = SimpleNamespace(
        logp_BT=arrays["logp_BT"],
        entropy_BT=arrays["entropy_BT"],
        routing=SimpleNamespace(
            logits=arrays["logits_LBTE"], expert=arrays["expert_LBTA"], fell_back=arrays["updates"]
        ),
        compared=None if term.comparison is None else _compared(term.comparison, arrays),
    )
    adapted, load_LE = Adapted(*arrays["adapted"]), arrays["load_LE"]
    constants = SimpleNamespace(adapted=adapted, load_LE=load_LE, updates=arrays["updates"], other_heads=())
    batch, _ = term.mix(arrays["batch"])
    term.weight(outputs.logp_BT, batch)
    yield from term.penalties(outputs, batch, constants, aggregate_of(passes.experiment.loss) or losses.by_sequence)


def _compared(comparison: Comparison, arrays: dict[str, Any]) -> Any:
    """Return what an update computes of a chunk's logits, here of all tokens: [B, T, ...]."""
    logits_CV = arrays["logits_CV"]
    found = comparison.function(logits_CV, logits_CV, arrays["batch"].tokens_BT.reshape(-1), None)
    return jax.tree.map(lambda x_C: x_C.reshape(B, T, *x_C.shape[1:]), found)


def _arrays(passes: Passes) -> dict[str, Any]:
    """Return the shapes of what an update has."""
    experiment = passes.experiment
    E = max(experiment.model.num_experts, 1)

    def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    of_tokens = bool(experiment.schedule.microbatch_tokens) or experiment.turns.credit == "turn"
    columns = ("old_logp_BT", "sampler_logp_BT", "ref_logp_BT", "teacher_logp_BT", "penalized_BT", "selected_BT")
    batch: Any = Batch(
        tokens_BT=shape(B, T, dtype=jnp.int32),
        segment_BT=shape(B, T, dtype=jnp.int32),
        mask_BT=shape(B, T, dtype=jnp.bool_),
        advantage=shape(B, T) if of_tokens else shape(B),
        expert_BLTA=shape(B, L, T, A, dtype=jnp.uint8),
        router_logp_BLTA=shape(B, L, T, A),
        sampler_hidden_BTE=shape(B, T, experiment.model.hidden_size),
        **{name: shape(B, T) for name in columns},
    )
    return {
        "batch": batch,
        "logp_BT": shape(B, T),
        "entropy_BT": shape(B, T),
        "logits_CV": shape(B * T, experiment.model.vocab_size),
        "logits_LBTE": shape(L, B, T, E),
        "expert_LBTA": shape(L, B, T, A, dtype=jnp.int32),
        "load_LE": shape(L, E),
        "adapted": [shape()] * 3,
        "updates": shape(dtype=jnp.int32),
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
