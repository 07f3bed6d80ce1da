"""The forward passes that a step takes before its updates, and the columns of `Batch` that they fill.

Everything that depends on this asks here: the compiled functions, the step, the sizes, the dry run, and `tools.aot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

from gspax.config import Experiment, Placement, filters_in_use
from gspax.config.protocols import Selection
from gspax.config.term import Compare, Comparison, Held, Term
from gspax.losses.formulas import formula_of
from gspax.losses.proximal import interpolated_logp
from gspax.losses.router_shift import log_factor
from gspax.losses.traits import traits_of
from gspax.model.terms import MAKERS


class RatioFormula(NamedTuple):
    """What stands before a loss in the printed equation: assignments, and names that replace those of its formula."""

    lines: list[tuple[str, str]]
    free: dict[str, str]
    words: dict[str, str]


@dataclass(frozen=True)
class Passes:
    """The passes of an experiment's step, in this order: the policy, then the first policy.

    Each property reads only the settings that it depends on, so a dry run can ask although others are wrong.
    """

    experiment: Experiment

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the objective: those of the experiment's settings, then its own (`Experiment.terms`)."""
        made = (make(self.experiment) for make in MAKERS)
        return (*(term for term in made if term is not None), *self.experiment.terms)

    def held(self, trained_dtype: str = "float32") -> Iterator[Held]:
        """Yield the parameters that the terms keep in memory, beside a policy whose trained arrays have this dtype."""
        yield from chain.from_iterable(term.held(trained_dtype) for term in self.terms)
        if self.sampling_policy and (staleness := self.experiment.staleness):
            yield from (Held("policies that sampled", trained_dtype) for _ in range(1 + staleness))

    @property
    def old_logp(self) -> Literal["pass", "update", "sampler"]:
        """The source of `old_logp_BT`: a pass, each update (from the tokens' ages), or the rollout's sampler."""
        if "sampler" in (self.experiment.old_logp, traits_of(self.experiment.loss).old_logp):
            return "sampler"
        return "update" if self.experiment.old_logp == "interpolated" else "pass"

    @property
    def ratio_formula(self) -> RatioFormula:
        """What the loss gets in place of `old_logp` and of its own clip range, for the printed equation."""
        e, lines, free = self.experiment, list[tuple[str, str]](), dict[str, str]()
        sources = {"sampler": "sampler_logp", "update": formula_of(interpolated_logp) or ""}
        if source := sources.get(self.old_logp):
            lines.append(("old_logp", source))
        if (shift := e.router_shift) is not None:
            lines.append(("shifted_logp", f"old_logp - {formula_of(partial(log_factor, floor=shift.floor))}"))
            free["old_logp"] = "shifted_logp"
        if (measured := e.calibration) is None:
            return RatioFormula(lines, free, {})
        follows = f"followed with a gain of {measured.gain!r} where it is off by more than {measured.tolerance!r}"
        width = f"the measured width that clips the share {measured.share!r} of the sequences, {follows}"
        widths = dict.fromkeys(("clip_low", "clip_high"), f"{width}; nothing is clipped before the second update")
        return RatioFormula(lines, free | {name: name for name in widths}, widths)

    @property
    def staleness_setting(self) -> str:
        """The setting by which samples are older than the policy, `placement.staleness=1`; empty without one."""
        sampler = self.experiment.separate_sampler
        if sampler is None or not sampler.staleness:
            return ""
        return f"{'placement' if isinstance(sampler, Placement) else 'engine'}.staleness={sampler.staleness}"

    @property
    def scored(self) -> range:
        """The minibatches that the policy's pass reads.

        The first one's update computes its own old log-probs, unless something reads them, or an output of that pass,
        before it: a KL in the reward, the experts, a selection of tokens, an advantage, or a calibrated clip range,
        which needs to know how differently the two passes round.
        """
        if self.old_logp != "pass":
            return range(0)
        e = self.experiment
        before = (
            any(term.waits for term in self.terms),
            self.keeps_experts or self.keeps_router_logp,
            e.calibration is not None,
        )
        return range(0 if any(before) else 1, e.schedule.minibatches)

    @property
    def samples_experts(self) -> bool:
        """True if the sampler records `expert_BLTA`."""
        return self.experiment.routing_replay == "sampler"

    @property
    def reads_experts(self) -> bool:
        """True if updates read `expert_BLTA`, from the sampler or from the policy's pass."""
        e = self.experiment
        return e.routing_replay != "off" or e.router_shift is not None or self._reads("expert_BLTA")

    @property
    def keeps_experts(self) -> bool:
        """True if the policy's pass fills `expert_BLTA`."""
        return self.reads_experts and not self.samples_experts

    @property
    def keeps_router_logp(self) -> bool:
        """True if the policy's pass fills `router_logp_BLTA`."""
        return self.experiment.router_shift is not None

    @property
    def measure(self) -> Compare | None:
        """What the policy's pass computes of its own logits, besides log-probs and entropies."""
        return next((term.measure for term in self.terms if term.measure is not None), None)

    @property
    def token_advantages(self) -> bool:
        """True if a step assigns advantages to tokens."""
        return self.experiment.turns.credit == "turn" or self.measure is not None

    @property
    def selections(self) -> dict[str, Selection]:
        """The selections of tokens before the updates, by the column that each fills."""
        return {column: function for term in self.terms for column, function in term.selections.items()}

    @property
    def comparison(self) -> Comparison | None:
        """What updates compute of the policy's logits and another model's."""
        return next((term.comparison for term in self.terms if term.comparison is not None), None)

    @property
    def first_policy(self) -> bool:
        """True if the policy that the run started from reads all minibatches, for `ref_logp_BT`."""
        return self._reads("ref_logp_BT")

    @property
    def sampling_policy(self) -> bool:
        """True if the policy that sampled a rollout reads all its minibatches, for `sampler_hidden_BTE`."""
        return self._reads("sampler_hidden_BTE")

    @property
    def unrecorded_filter(self) -> str:
        """The filter of the sampler whose sets no token records, such as "top_p"; empty without one."""
        sampling = self.experiment.sampling
        return "" if sampling.mask_replay else next(iter(filters_in_use(sampling)), "")

    def _reads(self, column: str) -> bool:
        return any(column in term.needs for term in self.terms)
