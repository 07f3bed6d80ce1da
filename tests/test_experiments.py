"""Every experiment file can still run: it is valid, and its warm start, sampler, scores and updates can be traced."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspax import loop, minibatches, sampler, sft
from gspax.experiment import load, validate
from gspax.objective import of_loss
from gspax.optimizer import make_optimizer
from gspax.state import abstract_state
from gspax.train_step import make_train_step
from gspax.types import Rollout

FILES = sorted((Path(__file__).parents[1] / "experiments").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_step_of_every_experiment_can_be_traced(path):
    experiment = load(path)
    assert validate(experiment) == []
    learner = loop.make_learner(experiment)
    state = abstract_state(experiment.model, learner.optimizer, learner.mesh)
    P, G = experiment.sampling.prompts, experiment.sampling.group
    problems = [experiment.data.train(index) for index in range(P)]
    prompts = [experiment.tokenizer.encode(problem.prompt) for problem in problems]

    def rollout(params):
        return sampler.sample(
            params,
            experiment.model,
            prompts,
            range(P),
            jax.random.key(0),
            sampling=experiment.sampling,
            stop_ids=experiment.tokenizer.stop_ids,
            mesh=learner.mesh,
        )

    drawn = jax.eval_shape(rollout, state.params)
    assert drawn.length_B.shape == (P * G,)
    host = Rollout(**{name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in vars(drawn).items()})
    reward = experiment.reward(problems[0], problems[0].answer)
    advantage = experiment.advantage(jnp.full((P, G), reward, jnp.float32))
    batches = minibatches.cut(experiment, host, learner.mesh)
    batches = minibatches.with_advantages(batches, np.asarray(advantage).reshape(-1), learner.mesh)
    assert len(batches) == experiment.schedule.minibatches
    logp, entropy, _ = jax.eval_shape(learner.score, state.params, batches[0])
    assert logp.shape == entropy.shape == batches[0].tokens_BT.shape
    after, metrics = jax.eval_shape(learner.train_step, state, batches[0])
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert {"loss", "grad_norm"} <= set(metrics) and all(leaf.shape == () for leaf in metrics.values())

    if (stage := experiment.warm_start) is not None:
        optimizer = make_optimizer(stage.optimizer)
        start = abstract_state(experiment.model, optimizer, learner.mesh)
        update = make_train_step(experiment.model, of_loss(sft.nll), optimizer, mesh=learner.mesh)
        jax.eval_shape(update, start, sft.demonstrations(experiment, stage, 0, learner.mesh))


def test_the_two_sorting_experiments_differ_in_two_lines():
    gspo, grpo = (
        (Path(__file__).parents[1] / "experiments" / f"sort_{name}.py").read_text().splitlines()
        for name in ("gspo", "grpo")
    )
    changed = [(a.split("=")[0].strip(), b.split("=")[0].strip()) for a, b in zip(gspo, grpo, strict=True) if a != b]
    assert changed == [("name", "name"), ("loss", "loss")]
