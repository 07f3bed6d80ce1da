"""A teacher's divergence from the policy on the policy's samples: its rules, its columns, and what an update computes.

The teacher's log-probs of the sampled tokens are computed before the updates, like a reference policy's.
Where other tokens of the vocabulary are compared as well, its last hidden states are, and every chunk of
`forward.head_logp` multiplies them with the teacher's head in addition to the policy's.

Axes: as in docs/architecture.md; K kept tokens, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from gspax import losses
from gspax.config import Teacher, filters_in_use, is_earlier_policy, teacher_models
from gspax.config.protocols import Divergence
from gspax.config.term import Comparison, Formula, Held, Pair, Term
from gspax.losses import distill
from gspax.losses.formulas import call_text, formula_of, words_of
from gspax.losses.kl import k3, token_kl
from gspax.losses.terms import mean_over
from gspax.model.low_rank import combine, partition
from gspax.model.terms.rules import stale_problems
from gspax.types import Array, Batch, Params, TrainState, known, segment_ids

if TYPE_CHECKING:
    from gspax.model.passes import Passes


# Settings of a teacher that have no use for others: log-probs of the sampled tokens compare no other tokens.
ALONE = {
    "score": ("model", "models", "divergence", "kept", "refresh_every"),
    "model": ("models",),
    "divergence": ("kept",),
    "as_advantage": ("divergence", "kept"),
}


class KeptLogp(NamedTuple):
    """The float32 log-probs of policy and teacher that `distill.reverse_kl` takes."""

    policy_CK: Array  # of the kept tokens, differentiable
    teacher_CK: Array
    sampled_C: Array  # the teacher's of the sampled token
    has_sampled_C: Array  # 1 where the sampled token is a kept one, else 0


@dataclass(frozen=True, kw_only=True)
class TeacherTerm(Term):
    """`Experiment.teacher`. Other passes, of `learner.teacher`, fill `teacher_logp_BT` or `teacher_hidden_BTE`."""

    settings: Teacher

    @property
    def needs(self) -> frozenset[str]:
        if self.comparison is None:
            return frozenset({"teacher_logp_BT"})
        several = {"teacher_BT"} if len(self.settings.models) > 1 else set()
        return frozenset({"teacher_hidden_BTE", *several})

    @property
    def comparison(self) -> Comparison | None:
        """What compares a chunk's logits; None if log-probs of the sampled tokens suffice."""
        others = hidden_states, earlier_parameters, teacher_models(self.settings)
        if self.settings.divergence is not None:
            return Comparison(CompareAll(self.settings.divergence), *others)
        kept, by_policy = self.settings.kept, self.settings.kept_by == "policy"
        return Comparison(CompareKept(kept, by_policy), *others) if kept else None

    @property
    def reads_problems(self) -> str:
        """Return which setting reads problems, if one does."""
        return "teacher.models" if self.settings.models else "teacher.prompt" if self.settings.prompt else ""

    @property
    def opens(self) -> str:
        return "gspax.training.teaching.Teaching"

    @property
    def signal(self) -> str:
        return "a teacher, which also trains on groups of equal rewards"

    @property
    def of_tokens(self) -> str:
        return "teacher.as_advantage" if self.settings.as_advantage else ""

    @property
    def penalized(self) -> tuple[str, ...]:
        return () if self.settings.as_advantage else ("teacher",)

    def held(self, trained_dtype: str) -> Iterator[Held]:
        """Yield the teachers' models, or the parameters of an earlier policy: an average is in float32."""
        teacher = self.settings
        if is_earlier_policy(teacher):
            dtype = trained_dtype if teacher.refresh_share == 1 else "float32"
            yield Held("teacher, an earlier policy", dtype, in_state=True)
        if teacher.model is not None:
            yield Held("teacher", teacher.model.param_dtype, teacher.model, "teacher.model")
        for name, model in teacher.models.items():
            yield Held("teacher", model.param_dtype, model, f"teacher.models[{name!r}]")

    @property
    def pairs(self) -> tuple[Pair, ...]:
        alone = [(name, each) for each, names in ALONE.items() for name in names]
        unmoved = [(name, each) for each in ("model", "models") for name in ("refresh_every", "refresh_share")]
        return (
            *(Pair(f"teacher.{name}", f"teacher.{each}") for name, each in alone),
            *(Pair(f"teacher.{name}", f"teacher.{each}", ", which is not refreshed") for name, each in unmoved),
            Pair("teacher.prompt", "environment", ", which begins the conversations"),
            Pair("teacher.max_prompt_tokens", "teacher.prompt", needed=True),
            Pair("teacher.kept_by", "teacher.kept", needed=True),
        )

    def problems(self, passes: Passes) -> Iterator[str]:
        teacher, sampling = self.settings, passes.experiment.sampling
        if not teacher.as_advantage and teacher.divergence is None:
            yield from stale_problems("teacher", passes, " or teacher.as_advantage=True")
        if teacher.score is not None and sampling.temperature != 1:
            got = f"got {sampling.temperature:g}"
            yield f"sampling.temperature: wanted 1 with teacher.score, whose log-probs are at 1, {got}"
        if teacher.divergence is None and (filters := filters_in_use(sampling)):
            yield (
                f"sampling.{filters[0]}: wanted no filter with a teacher without teacher.divergence, whose KL is "
                f"estimated from tokens of the whole distribution, got {getattr(sampling, filters[0]):g}"
            )
        yield from _prompt_problems(teacher, passes)
        yield from self._model_problems(passes) if teacher.score is None else ()

    def _model_problems(self, passes: Passes) -> Iterator[str]:
        """Check the settings of teachers that are models."""
        teacher, vocabulary = self.settings, passes.experiment.model.vocab_size
        named = [each.model for each in self.held("float32") if each.model is not None]
        if len(dtypes := {model.dtype for model in named}) > 1:
            yield f"teacher.models: wanted one dtype, got {' and '.join(sorted(dtypes))}"
        if teacher.refresh_share < 1 and not teacher.refresh_every:
            share = f"teacher.refresh_share={teacher.refresh_share:g}"
            yield f"teacher.refresh_every: wanted at least 1 with {share}, got 0"
        if teacher.kept > vocabulary:
            yield f"teacher.kept: wanted at most the {vocabulary} tokens of the vocabulary, got {teacher.kept}"

    @property
    def formula(self) -> Formula:
        teacher, coefficient = self.settings, self.settings.coefficient
        if teacher.as_advantage:
            mixed = formula_of(partial(distill.mixed_advantage, coefficient=coefficient), free={"logp": "old_logp"})
            return Formula(advantage=mixed or "")
        text = formula_of(token_kl, free={"ref_logp": "teacher_logp"})
        if teacher.divergence is not None:
            text = call_text(teacher.divergence, "logp_v", "teacher_logp_v")
        elif teacher.kept:
            text = formula_of(distill.reverse_kl)
        kept = f"sum over the {teacher.kept} tokens that the {teacher.kept_by} finds most probable at the position"
        words = {"sum_k": kept} if teacher.kept else {}
        unknown = {} if teacher.divergence is None else words_of(teacher.divergence)
        return Formula(penalty=f"{coefficient!r} * mean({text})", words=words | unknown)

    def mix(self, batch: Batch) -> tuple[Batch, losses.Metrics]:
        """Add the teacher's advantage to the batch's if `as_advantage`, and return its KL as a metric."""
        if not self.settings.as_advantage:
            return batch, {}
        logp_BT, teacher_logp_BT = known(batch, "old_logp_BT"), known(batch, "teacher_logp_BT")
        given = known(batch, "advantage"), logp_BT, teacher_logp_BT, batch.mask_BT
        mixed_BT = distill.mixed_advantage(*given, coefficient=self.settings.coefficient)
        kl_BT = k3(logp_BT, teacher_logp_BT, batch.mask_BT)
        return replace(batch, advantage=mixed_BT), {"teacher_kl": mean_over(kl_BT, batch.mask_BT)}

    def penalties(
        self, outputs: Any, batch: Batch, constants: Any, aggregate: losses.Aggregate
    ) -> Iterator[tuple[float, losses.Terms]]:
        if not self.settings.as_advantage:
            yield self.settings.coefficient, divergence_terms(self.settings, outputs, batch, aggregate)


def _prompt_problems(teacher: Teacher, passes: Passes) -> Iterator[str]:
    """Check that a teacher's own prompts replace those of single-turn tasks, and fit the models' contexts."""
    if teacher.prompt is None:
        return
    experiment = passes.experiment
    sampling, models = experiment.sampling, [*teacher.models.values(), teacher.model, experiment.model]
    longest = (teacher.max_prompt_tokens or sampling.max_prompt_tokens) + sampling.max_tokens
    limit = min(model.max_position_embeddings for model in models if model is not None)
    if longest > limit:
        yield (
            f"teacher.max_prompt_tokens: wanted prompt and completion within the {limit} positions of the models, got "
            f"{longest - sampling.max_tokens} + {sampling.max_tokens} = {longest} tokens"
        )


def hidden_states(batch: Batch) -> tuple[Array, Array | None]:
    """Return the teachers' last hidden states, and the number of each token's teacher if there are several."""
    return known(batch, "teacher_hidden_BTE"), batch.teacher_BT


def earlier_parameters(state: TrainState) -> Params:
    """Return the parameters of a teacher that is an earlier policy."""
    return combine(state.teacher, partition(state.params)[1])


@dataclass(frozen=True)
class CompareAll:
    """Compares whole distributions."""

    divergence: Divergence

    def __call__(self, logits_CV: Array, teacher_CV: Array, *_: Array | None) -> Array:
        return self.divergence(jax.nn.log_softmax(logits_CV), jax.nn.log_softmax(teacher_CV))


@dataclass(frozen=True)
class CompareKept:
    """Compares the most probable tokens."""

    count: int
    by_policy: bool  # the policy's most probable ones, not the teacher's

    def __call__(self, logits_CV: Array, teacher_CV: Array, token_C: Array, _: Array | None) -> KeptLogp:
        ranked_CV = jax.lax.stop_gradient(logits_CV if self.by_policy else teacher_CV)
        kept_CK = jax.lax.top_k(ranked_CV, self.count)[1]

        def of(logits_CV: Array, ids_CK: Array) -> Array:
            return distill.select_logp(logits_CV[None], ids_CK[None].astype(jnp.int32))[0]

        return KeptLogp(
            of(logits_CV, kept_CK),
            of(teacher_CV, kept_CK),
            of(teacher_CV, token_C[:, None])[:, 0],
            (kept_CK == token_C[:, None]).any(-1).astype(jnp.float32),
        )


def divergence_terms(teacher: Teacher, outputs: Any, batch: Batch, aggregate: losses.Aggregate) -> losses.Terms:
    """Compute the teacher's divergence over the response tokens, aggregated like the policy loss.

    Args:
      outputs: as for `penalties`; of `compared`, there is none with `batch.teacher_logp_BT`.
    """
    mask_BT, compared, ids = batch.mask_BT, outputs.compared, segment_ids(batch)
    if teacher.divergence is not None:
        return distill.mean_divergence(compared, mask_BT, aggregate=aggregate, segment_ids=ids)
    if teacher.kept:
        teacher_logp_BT = compared.sampled_C
        kept = distill.Kept(compared.policy_CK, compared.teacher_CK, compared.has_sampled_C > 0)
    else:
        teacher_logp_BT, none_BTK = known(batch, "teacher_logp_BT"), jnp.zeros((*mask_BT.shape, 0), jnp.float32)
        kept = distill.Kept(none_BTK, none_BTK, jnp.zeros_like(mask_BT))
    terms = distill.reverse_kl(
        outputs.logp_BT,
        teacher_logp_BT,
        mask_BT,
        kept,
        old_logp=known(batch, "old_logp_BT"),
        aggregate=aggregate,
        segment_ids=ids,
    )
    return terms if teacher.kept else terms._replace(metrics={"teacher_kl": terms.metrics["teacher_kl"]})
