"""What an experiment file says: frozen dataclasses that name real functions.

Importing this module imports no model, optimiser or accelerator code, so that an experiment can be resolved,
checked and priced in well under a second (`gspax train --dry-run`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gspax.model.config import ModelConfig

LOGIT_BUDGET = 2**25  # logits that the learner holds at once on one device, in numbers (128 MiB)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn for training."""

    prompts: int = 64  # P, per rollout batch
    group: int = 8  # G, completions of each prompt
    max_prompt_tokens: int = 64
    max_tokens: int = 64  # of a completion, the stop token included
    temperature: float = 1.0
    top_k: int = 0  # 0: off. The filters bias the ratio (log-probs are of the unfiltered distribution)
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW behind a global-norm clip, with a linear warm-up to a constant rate."""

    learning_rate: float = 1e-6
    warmup_updates: int = 0
    max_grad_norm: float = 1.0  # 0: no clipping
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long, and how a rollout batch is cut up."""

    steps: int = 100  # rollout batches, a target and not a delta: raise it to continue a finished run
    minibatches: int = 4  # optimiser updates per rollout batch; the paper's 4
    microbatch_rows: int = 0  # rows of one forward and backward pass; 0: the whole mini-batch
    eval_every: int = 20  # steps; 0: only at the start and the end
    checkpoint_every: int = 20  # steps; 0: only at the end
    keep_checkpoints: int = 2


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out problems, sampled at temperature 1 and decoded greedily."""

    problems: int = 256
    samples: int = 1  # drawn per problem for the sampled accuracy
    max_tokens: int = 0  # 0: as in sampling


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A short supervised stage before reinforcement learning; `demonstration(problem, rng)` is the text to imitate."""

    demonstration: Callable[..., str]
    steps: int = 60
    rows: int = 128
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the device mesh's axes; at most one -1, filled in with the devices that are left."""

    data: int = 1  # parameters replicated, rows split
    fsdp: int = -1  # parameters and rows split


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A whole run. `data` has `train(index)` and `heldout(index)`, each giving a `gspax.data.Problem`."""

    name: str
    model: ModelConfig
    data: Any
    tokenizer: Any
    reward: Callable[..., float]  # (problem, completion text) -> float
    advantage: Callable[..., Any]  # rewards [P, G] -> advantages [P, G]
    loss: Callable[..., Any]  # (logp, old_logp, advantage, mask) -> losses.Terms
    sampling: Sampling = field(default_factory=Sampling)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    evaluation: Evaluation = field(default_factory=Evaluation)
    warm_start: WarmStart | None = None
    mesh: Mesh = field(default_factory=Mesh)
    seed: int = 0
