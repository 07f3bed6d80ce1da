"""The rules of a teacher: its vocabulary, its tokenizer, and what is compared. Each message is one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspax.config import ModelConfig, Sampling, Teacher
from gspax.config.functions import Function
from gspax.config.model import architecture_problems
from gspax.config.protocols import Environment, Loss, Tokenizer
from gspax.data.files import read_object
from gspax.data.tokenizer import has_other_ids
from gspax.experiment.description import describe
from gspax.experiment.validation.losses import token_advantage_problems


def teacher_problems(
    teacher: Teacher | None, model: ModelConfig, tokenizer: Tokenizer, loss: Loss, terms: Mapping[str, Function]
) -> Iterator[str]:
    """All errors of a teacher.

    Args:
      terms: the functions of log-probs besides the loss that are called with its advantages, by field.
    """
    if teacher is None:
        return
    if teacher.as_advantage:
        yield from _advantage_problems(teacher, loss, terms)
    if teacher.score is not None:
        yield from _score_problems(teacher)
        return
    named = dict(keys_of_teachers(teacher))
    for key, taught in named.items():
        yield from _model_problems(key, taught, model.vocab_size, tokenizer)
    if teacher.model is not None and teacher.models:
        yield f"teacher.models: wanted none beside teacher.model, got {', '.join(teacher.models)}"
    if len(dtypes := {taught.dtype for taught in named.values()}) > 1:
        yield f"teacher.models: wanted one dtype, got {' and '.join(sorted(dtypes))}"
    for name, default in (("refresh_every", 0), ("refresh_share", 1.0)):
        if named and (value := getattr(teacher, name)) != default:
            yield f"teacher.{name}: wanted {default:g} with teacher.model, which is not refreshed, got {value:g}"
    if teacher.refresh_share < 1 and not teacher.refresh_every:
        yield f"teacher.refresh_every: wanted at least 1 with teacher.refresh_share={teacher.refresh_share:g}, got 0"
    if teacher.kept > model.vocab_size:
        yield f"teacher.kept: wanted at most the {model.vocab_size} tokens of the vocabulary, got {teacher.kept}"
    if teacher.kept_by == "policy" and not teacher.kept:
        yield "teacher.kept_by: wanted 'teacher' without teacher.kept, got 'policy'"
    if teacher.divergence is not None and teacher.kept:
        yield f"teacher.kept: wanted 0 beside teacher.divergence, which compares every token, got {teacher.kept}"


def _score_problems(teacher: Teacher) -> Iterator[str]:
    """A function gives log-probs of the sampled tokens alone, of a model that no update changes."""
    for name in ("model", "models", "divergence", "kept", "refresh_every"):
        if value := getattr(teacher, name):
            yield f"teacher.{name}: wanted none beside teacher.score, got {value if isinstance(value, int) else 'one'}"


def keys_of_teachers(teacher: Teacher | None) -> Iterator[tuple[str, ModelConfig]]:
    """The models of a teacher's checkpoints, by their field."""
    if teacher is not None and teacher.model is not None:
        yield "teacher.model", teacher.model
    yield from ((f"teacher.models[{name!r}]", model) for name, model in (teacher.models if teacher else {}).items())


def _model_problems(key: str, teacher: ModelConfig, vocabulary: int, tokenizer: Tokenizer) -> Iterator[str]:
    """The teacher's model can be built and read, and has the policy's tokens."""
    sentences = architecture_problems(teacher)
    yield from (f"{key}{sentence.removeprefix('model').replace(' model.', f' {key}.')}" for sentence in sentences)
    if teacher.vocab_size < vocabulary:  # more are rows of padding, which `learner.teacher` leaves out
        yield f"{key}.vocab_size: wanted at least the policy's {vocabulary}, got {teacher.vocab_size}"
    elif not teacher.checkpoint:
        yield f"{key}.checkpoint: wanted the teacher's checkpoint, got none"
    else:
        yield from _tokenizer_problems(key, teacher.checkpoint, tokenizer)


def prompt_problems(
    teacher: Teacher | None, environment: Environment | None, model: ModelConfig, sampling: Sampling
) -> Iterator[str]:
    """A teacher's own prompts replace those of single-turn tasks, and fit the models' contexts."""
    if teacher is None:
        return
    if teacher.prompt is None:
        if teacher.max_prompt_tokens:
            yield f"teacher.max_prompt_tokens: wanted 0 without teacher.prompt, got {teacher.max_prompt_tokens}"
        return
    if environment is not None:
        yield "teacher.prompt: wanted None with an environment, which begins the conversations, got a function"
    longest = (teacher.max_prompt_tokens or sampling.max_prompt_tokens) + sampling.max_tokens
    limit = min(taught.max_position_embeddings for _, taught in [*keys_of_teachers(teacher), ("", model)])
    if longest > limit:
        yield (
            f"teacher.max_prompt_tokens: wanted prompt and completion within the {limit} positions of the models, got "
            f"{longest - sampling.max_tokens} + {sampling.max_tokens} = {longest} tokens"
        )


def _advantage_problems(teacher: Teacher, loss: Loss, terms: Mapping[str, Function]) -> Iterator[str]:
    """An advantage is an estimate from the sampled token, and the loss has an advantage for each token."""
    if teacher.divergence is not None or teacher.kept:
        yield "teacher.as_advantage: wanted False beside teacher.divergence or teacher.kept, got True"
    yield from token_advantage_problems("teacher.as_advantage", loss, terms)


def _tokenizer_problems(key: str, checkpoint: str, tokenizer: Tokenizer) -> Iterator[str]:
    """One sentence if the checkpoint's folder shows that the teacher has other tokens than the policy."""
    recorded: Any = None
    folder = Path(checkpoint)  # for a name on the Hub there is none: `learner.teacher.load_teacher` compares
    if (folder / "experiment.json").is_file():  # a run
        recorded = read_object(folder / "experiment.json").get("tokenizer")
        folder = Path(recorded.get("path", folder))
    if has_other_ids(tokenizer, folder) or (recorded and "path" not in recorded and recorded != describe(tokenizer)):
        yield f"{key}.checkpoint: wanted a model with the experiment's tokenizer, got another one in {folder}"
