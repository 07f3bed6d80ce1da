"""The rules of a teacher: its vocabulary, its tokenizer, and what is compared. Each message is one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspax.config import ModelConfig, Teacher
from gspax.config.functions import Function, title_of
from gspax.config.model import architecture_problems
from gspax.config.protocols import Loss, Tokenizer
from gspax.data.files import read_object
from gspax.data.tokenizer import has_other_ids
from gspax.experiment.description import describe
from gspax.experiment.validation.fields import takes_segments
from gspax.losses.traits import traits_of


def teacher_problems(
    teacher: Teacher | None, model: ModelConfig, tokenizer: Tokenizer, loss: Loss, terms: Mapping[str, Function]
) -> Iterator[str]:
    """All errors of a teacher.

    Args:
      terms: the functions of log-probs besides the loss that are called with its advantages, by field.
    """
    if teacher is None:
        return
    if teacher.model is not None:
        yield from _model_problems(teacher.model, model.vocab_size, tokenizer)
    for name, default in (("refresh_every", 0), ("refresh_share", 1.0)):
        if teacher.model is not None and (value := getattr(teacher, name)) != default:
            yield f"teacher.{name}: wanted {default:g} with teacher.model, which is not refreshed, got {value:g}"
    if teacher.refresh_share < 1 and not teacher.refresh_every:
        yield f"teacher.refresh_every: wanted at least 1 with teacher.refresh_share={teacher.refresh_share:g}, got 0"
    if teacher.kept > model.vocab_size:
        yield f"teacher.kept: wanted at most the {model.vocab_size} tokens of the vocabulary, got {teacher.kept}"
    if teacher.divergence is not None and teacher.kept:
        yield f"teacher.kept: wanted 0 beside teacher.divergence, which compares every token, got {teacher.kept}"
    if teacher.as_advantage:
        yield from _advantage_problems(teacher, loss, terms)


def _model_problems(teacher: ModelConfig, vocabulary: int, tokenizer: Tokenizer) -> Iterator[str]:
    """The teacher's model can be built and read, and has the policy's tokens."""
    sentences = architecture_problems(teacher)
    yield from (f"teacher.{sentence.replace(' model.', ' teacher.model.')}" for sentence in sentences)
    if teacher.vocab_size != vocabulary:
        yield f"teacher.model.vocab_size: wanted the policy's {vocabulary}, got {teacher.vocab_size}"
    elif not teacher.checkpoint:
        yield "teacher.model.checkpoint: wanted the teacher's checkpoint, got none"
    else:
        yield from _tokenizer_problems(teacher.checkpoint, tokenizer)


def _advantage_problems(teacher: Teacher, loss: Loss, terms: Mapping[str, Function]) -> Iterator[str]:
    """An advantage is an estimate from the sampled token, and the loss has an advantage for each token."""
    if teacher.divergence is not None or teacher.kept:
        yield "teacher.as_advantage: wanted False beside teacher.divergence or teacher.kept, got True"
    traits = traits_of(loss)
    if not (traits.token_advantage or traits.ratio == traits.correction == "token"):
        yield (
            "teacher.as_advantage: wanted a loss with an advantage for each token (losses.gspo_token, losses.grpo), "
            f"got {title_of(loss)}"
        )
    for field, function in {"loss": loss, **terms}.items():
        if not takes_segments(function):
            yield f"teacher.as_advantage: wanted a {field} that takes `segment_ids`, {title_of(function)} does not"


def _tokenizer_problems(checkpoint: str, tokenizer: Tokenizer) -> Iterator[str]:
    """One sentence if the checkpoint's folder shows that the teacher has other tokens than the policy."""
    recorded: Any = None
    folder = Path(checkpoint)  # for a name on the Hub there is none: `learner.teacher.load_teacher` compares
    if (folder / "experiment.json").is_file():  # a run
        recorded = read_object(folder / "experiment.json").get("tokenizer")
        folder = Path(recorded.get("path", folder))
    if has_other_ids(tokenizer, folder) or (recorded and "path" not in recorded and recorded != describe(tokenizer)):
        yield f"teacher.model.checkpoint: wanted a model with the experiment's tokenizer, got another one in {folder}"
