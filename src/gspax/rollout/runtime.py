"""The parts of a run that stay the same: mesh, optimizer, compiled functions, sampler, rewards."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import optax

from gspax.config import Experiment, updates_per_step
from gspax.experiment.validation.devices import check_on
from gspax.learner.optimizer import make_optimizer
from gspax.learner.state import TrainedPolicy, count_updates, require_memory
from gspax.learner.updates import Steps, make_steps
from gspax.model.passes import Passes
from gspax.model.sizes import resident_bytes
from gspax.rewards.calls import Calls
from gspax.rewards.environments.agents import Agent
from gspax.rewards.scores import Result, reward_calls
from gspax.rollout.agents.interaction import AgentInteraction, employ
from gspax.rollout.contract import RolloutSampler
from gspax.rollout.episodes import Interaction, interact
from gspax.rollout.in_process import InProcess
from gspax.rollout.servers.sampler import connect
from gspax.sampler.placement import make_meshes, make_sampler
from gspax.types import TrainState


@dataclass(frozen=True)
class Runtime:
    """The parts of a run that stay the same; everything is compiled once."""

    experiment: Experiment
    policy: TrainedPolicy
    steps: Steps
    sampler: RolloutSampler  # the devices of this process, or servers (`Experiment.engine`)
    rewards: Calls[Result]
    interaction: Interaction | AgentInteraction | None = None  # with an environment

    @property
    def passes(self) -> Passes:
        """Return the forward passes of a step."""
        return Passes(self.experiment)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Return the learner's mesh."""
        return self.policy.mesh

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer of the updates."""
        return self.policy.optimizer


def make_runtime(experiment: Experiment) -> Runtime:
    """Make the runtime of an experiment. UserError if the experiment does not fit the devices."""
    check_on(jax.devices(), experiment)
    mesh, sampler_mesh = make_meshes(experiment)
    passes = Passes(experiment)
    require_memory("model", resident_bytes(passes, dict(mesh.shape)))
    optimizer = make_optimizer(experiment.optimizer, experiment.trained.dtype)
    policy = TrainedPolicy(experiment.model, mesh, optimizer, experiment.lora, passes.terms)
    steps = make_steps(experiment, optimizer, mesh)
    sampler: RolloutSampler
    if experiment.engine is None:
        sampler = InProcess(make_sampler(experiment.model, sampler_mesh, mesh, experiment.sampling.weights_dtype))
    else:
        sampler = connect(
            experiment.engine,
            experiment.model,
            experiment.sampling,
            experiment.evaluation,
            keep_experts=passes.samples_experts,
            mesh=mesh,
        )
    rewards = reward_calls(experiment.reward, experiment.grading)
    interaction: Interaction | AgentInteraction | None = None
    if experiment.environment is not None:
        tokenizer, turns, grading = experiment.tokenizer, experiment.turns, experiment.grading
        if isinstance(experiment.environment, Agent):
            interaction = employ(experiment.environment, tokenizer, rewards, turns, grading, experiment.sampling)
        else:
            interaction = interact(experiment.environment, tokenizer, rewards, turns, grading)
    return Runtime(experiment, policy, steps, sampler, rewards, interaction)


def count_rollouts(runtime: Runtime, state: TrainState) -> int:
    """Count the rollouts that a state has been trained on."""
    return count_updates(state) // updates_per_step(runtime.experiment.schedule)
