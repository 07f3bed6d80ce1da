"""A complete experiment that runs in seconds: sorting two or three digits, a few steps of each phase."""

from dataclasses import dataclass, replace
from typing import Any

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, ModelConfig, Optimizer, Sampling, Schedule, WarmStart
from gspax.data import Problem
from gspax.data.tasks import sort
from gspax.learner.objective import Objective, RoutingSettings, make_objective
from gspax.model.passes import Passes
from gspax.rewards.environments import Step


def share_right(problem, completion):
    """Share of the answer's digits in the right place: unlike exact match, it usually varies within a group."""
    right = sum(a == b for a, b in zip(problem.answer, completion, strict=False))
    return right / max(len(problem.answer), len(completion))


experiment = Experiment(
    name="small",
    model=ModelConfig(
        vocab_size=sort.tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        rope_theta=1e4,
        tie_word_embeddings=True,
        initializer_range=0.15,
    ),
    data=sort.Problems(min_digits=2, max_digits=3),
    tokenizer=sort.tokenizer,
    reward=share_right,
    advantage=advantages.standardize,
    loss=losses.gspo,
    sampling=Sampling(prompts=8, group=4, max_prompt_tokens=4, max_tokens=4),
    optimizer=Optimizer(learning_rate=1e-3),
    schedule=Schedule(steps=4, minibatches=2, eval_every=3, checkpoint_every=2),
    evaluation=Evaluation(problems=16),
    warm_start=WarmStart(demonstration=sort.half_wrong, steps=3, rows=16, optimizer=Optimizer(learning_rate=3e-3)),
)


@dataclass(frozen=True)
class Spoiled:
    """Problems some of which cannot be used for training."""

    inner: Any
    raising: tuple[int, ...] = ()
    too_long: tuple[int, ...] = ()

    def train(self, index):
        if index in self.raising:
            raise KeyError("answer")
        return Problem(prompt="123456=", answer="") if index in self.too_long else self.inner.train(index)

    def heldout(self, index):
        return self.inner.heldout(index)


class Countdown:
    """Replies with the number of messages that are left, 0 to 2 at first."""

    def reset(self, problem):
        return int(problem.prompt[:-1]) % 3, [{"role": "user", "content": problem.prompt}]

    def step(self, state, message):
        reply = {"role": "user", "content": str(state)}
        return Step(state - 1, [reply], done=state == 0, metrics={"letters": float(len(message))})


def objective_with(loss, **changes) -> Objective:
    """The objective of a loss with further settings."""
    return objective_of(replace(experiment, loss=loss, **changes))


def objective_of(variant: Experiment) -> Objective:
    """The objective that an experiment's train step minimizes."""
    routing = RoutingSettings(variant.model.router, variant.router_shift)
    return make_objective(variant.loss, Passes(variant).terms, calibration=variant.calibration, routing=routing)
