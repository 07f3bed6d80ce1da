"""The settings of an evaluation of a published model, which has no experiment."""

from __future__ import annotations

from dataclasses import dataclass, field

from gspax.config.experiment import Evaluation, Grading, Mesh, Sampling
from gspax.config.model import ModelConfig
from gspax.config.protocols import Tokenizer
from gspax.config.ranges import Seed


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published model, and how its tasks are sampled and graded; each field as in `Experiment`."""

    model: ModelConfig
    tokenizer: Tokenizer
    sampling: Sampling
    evaluation: Evaluation
    grading: Grading = field(default_factory=Grading)
    mesh: Mesh = field(default_factory=Mesh)
    seed: Seed = 0
