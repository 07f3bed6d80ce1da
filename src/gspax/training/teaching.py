"""Queries the teachers during a step: each reads its responses once, with `Teacher.prompt` if it has one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import jax
import numpy as np

from gspax.config import Teacher, is_earlier_policy, teacher_models, teacher_row_shape
from gspax.config.protocols import Problem, TeacherPrompt, TeacherScore, Tokenizer
from gspax.data.tokenizer import check_ids
from gspax.errors import FailureError, UserError, describe_error
from gspax.learner.minibatches import Layout
from gspax.learner.state import refresh_kept
from gspax.learner.teacher import fill_teacher, load_teachers, make_passes
from gspax.learner.teacher_rows import (
    TeacherRows,
    as_sampled,
    fill_from_rows,
    number_tokens,
    take_positions,
    with_prompts,
)
from gspax.model.terms.teacher import TeacherTerm, earlier_parameters
from gspax.parallel import multihost
from gspax.parallel.sharding import batch_shards
from gspax.rollout.completion import Completion, GradedBatch
from gspax.rollout.runtime import Runtime
from gspax.training.open_term import GradedStep, OpenTerm
from gspax.types import Batch, Params, TrainState


class Teaching(OpenTerm):
    """The teachers of a run: their parameters, passes, and the columns that these fill (`training.open_terms`)."""

    def __init__(self, term: TeacherTerm, runtime: Runtime) -> None:
        """Load the teachers. UserError if one cannot be read."""
        experiment, shared = runtime.experiment, runtime.steps.settings
        self.settings = term.settings
        (self.dtype, *_) = (model.dtype for model in teacher_models(term.settings) or (experiment.model,))
        self.teachers = load_teachers(term.settings, experiment.model, runtime.mesh, experiment.tokenizer)
        shards = batch_shards(runtime.mesh)
        self.shape = teacher_row_shape(term.settings, experiment.sampling, experiment.schedule, shards)
        self.passes = make_passes(term.settings, experiment.model, shared, self.shape)

    @property
    def heads(self) -> tuple[Params, ...]:
        """The heads of the teachers whose logits updates compare."""
        return self.teachers.heads

    @property
    def identity(self) -> dict[str, str]:
        """A fingerprint of the teachers' parameters; none of an earlier policy."""
        return {"teacher": self.teachers.identity} if self.teachers.identity else {}

    def describe_change(self, recorded: object) -> str:
        """Say in one sentence that the parameters are not those that the run was trained with."""
        paths = ", ".join(model.checkpoint for model in teacher_models(self.settings))
        return (
            f"teacher.model: wanted the parameters that the run was trained with (fingerprint {recorded}), got others "
            f"({self.teachers.identity}) from {paths}"
        )

    def fill(self, step: GradedStep, batches: list[Batch]) -> list[Batch]:
        """Fill the minibatches with the teacher arrays that their updates read. Collective."""
        experiment, teacher, mesh = step.runtime.experiment, self.settings, step.runtime.mesh
        if teacher.score is not None:
            rows = build_teacher_rows(step.runtime, teacher, step.graded)
            return ask_teacher(teacher.score, rows, batches, step.layouts)
        params = self.teachers.params or (earlier_parameters(step.state),)
        shape = self.shape
        if shape is None:
            return fill_teacher(self.passes[0], params[0], batches)
        rows = build_teacher_rows(step.runtime, teacher, step.graded)
        number_N = number_responses(teacher, step.graded.problems, experiment.sampling.group)
        width = max(model.hidden_size for model in teacher_models(teacher) or (experiment.model,))
        for number, (read, own) in enumerate(zip(self.passes, params, strict=True)):
            places = list(zip(batches, step.layouts, strict=True))
            batches = fill_from_rows(read, own, rows, number_N == number, places, shape=shape, width=width, mesh=mesh)
        compares = any(batch.teacher_hidden_BTE is not None for batch in batches)
        return number_tokens(batches, step.layouts, number_N) if compares and len(self.passes) > 1 else batches

    def as_read(self, batch: Batch) -> Batch:
        """Return a minibatch that was read from a dump, with hidden states in the teachers' dtype."""
        if batch.teacher_hidden_BTE is None:
            return batch
        return replace(batch, teacher_hidden_BTE=batch.teacher_hidden_BTE.astype(self.dtype))

    def after_step(self, state: TrainState, done: int) -> TrainState:
        """Return the state after `done` steps, with its teacher moved to the policy if that is due."""
        every = self.settings.refresh_every if is_earlier_policy(self.settings) else 0
        return refresh_kept(state, self.settings.refresh_share) if every and done % every == 0 else state


def ask_teacher(
    score: TeacherScore, rows: TeacherRows, batches: Sequence[Batch], layouts: Sequence[Layout]
) -> list[Batch]:
    """Fill the minibatches with the log-probs that `score` returns for the responses. Collective.

    Raises:
      FailureError: the answer does not fit the request; errors of `score` itself are passed on.
    """
    tokens_NU = multihost.to_host(rows.tokens_NU)
    texts = [tokens[:length].tolist() for tokens, length in zip(tokens_NU, rows.length_N, strict=True)]
    own = np.array_split(np.arange(len(texts)), jax.process_count())[jax.process_index()]
    scores = multihost.gather(multihost.all_or_raise(lambda: score_all(score, [texts[n] for n in own])))
    logp_NU = np.zeros(tokens_NU.shape, np.float32)
    for logp_U, logps in zip(logp_NU, itertools.chain.from_iterable(scores), strict=True):
        logp_U[1 : len(logps) + 1] = logps
    filled = []
    for batch, layout in zip(batches, layouts, strict=True):
        logp_BT = take_positions(logp_NU, rows, layout, 0)
        filled.append(replace(batch, teacher_logp_BT=multihost.to_devices(logp_BT, batch.tokens_BT.sharding)))
    return filled


def score_all(score: TeacherScore, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Call `score` on the sequences of two or more tokens, and return all log-probs. FailureError if any is invalid."""
    asked = [tokens for tokens in sequences if len(tokens) > 1]
    answered = list(score(asked)) if asked else []
    if len(answered) != len(asked):
        raise FailureError(f"teacher.score: wanted log-probs of {len(asked)} sequences, got those of {len(answered)}")
    answers = iter(answered)
    all_logps = []
    for tokens in sequences:
        logps = np.asarray(next(answers) if len(tokens) > 1 else (), np.float32)
        if logps.shape != (max(len(tokens) - 1, 0),) or not (logps <= 1e-3).all():  # false for NaN
            raise FailureError(f"teacher.score: wanted {len(tokens) - 1} log-probs of at most 0, got {logps}"[:300])
        all_logps.append(logps)
    return all_logps


def number_responses(teacher: Teacher, problems: Sequence[Problem | None], group: int) -> np.ndarray:
    """Return the index of each response's teacher, int32 [N]. Collective."""
    numbers = {name: number for number, name in enumerate(teacher.models)}
    own = dict.fromkeys(range(len(problems)), 0)
    if numbers:
        own = {place: numbers[one.teacher] for place, one in enumerate(problems) if one is not None}
    return np.repeat(np.array(multihost.gather_rows(own, len(problems)), np.int32), group)


def build_teacher_rows(runtime: Runtime, teacher: Teacher, graded: GradedBatch) -> TeacherRows:
    """Build the teachers' inputs from a rollout's responses. Collective. UserError if a teacher's prompt is invalid."""
    if teacher.prompt is None:
        return as_sampled(graded.rollout)
    sampling, tokenizer, prompt = runtime.experiment.sampling, runtime.experiment.tokenizer, teacher.prompt
    longest = teacher.max_prompt_tokens or sampling.max_prompt_tokens
    vocabulary = runtime.experiment.model.vocab_size

    def encode(row: int) -> list[int] | None:
        problem, completion = graded.problems[row // sampling.group], graded.completions[row]
        if problem is None or completion.texts is None:
            return None
        text = write_prompt(prompt, problem, completion)
        ids = encode_prompt(tokenizer, problem, text)
        check_ids(ids, vocabulary, text)
        if not 0 < len(ids) <= longest:
            raise UserError(f"teacher.prompt: wanted 1 to {longest} tokens (teacher.max_prompt_tokens), got {len(ids)}")
        return ids

    rows = range(len(graded.completions))
    prompts = multihost.all_or_raise(lambda: {row: ids for row in rows if (ids := encode(row)) is not None})
    return with_prompts(graded.rollout, multihost.gather_rows(prompts, len(rows)), longest, runtime.mesh)


def write_prompt(prompt: TeacherPrompt, problem: Problem, completion: Completion) -> str:
    """Call the experiment's `teacher.prompt`. UserError if it raises or does not return a text."""
    assert completion.texts is not None
    try:
        text = prompt(problem, completion.texts.completion, completion.reason)
    except Exception as error:  # a user's function
        raise UserError(f"teacher.prompt: {describe_error(error)} for the prompt {problem.prompt[:100]!r}") from error
    if not isinstance(text, str):
        raise UserError(f"teacher.prompt: wanted a text, got {text!r}")
    return text


def encode_prompt(tokenizer: Tokenizer, problem: Problem, text: str) -> list[int]:
    """Encode the teacher's prompt text to token ids, after the problem's `context` if it has one."""
    encode = cast(Callable[..., Sequence[int]], tokenizer.encode)
    context = getattr(problem, "context", ())
    return list(encode(text, context) if context else encode(text))
