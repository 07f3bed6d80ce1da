"""Functions that break their contract are found without a run: one sentence with what was wanted and what came."""

import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_experiment import experiment

from gspax import advantages, losses
from gspax.config import Optimizer, Reference, Turns, WarmStart
from gspax.data import CharChat, GeneratedProblems, Problem
from gspax.experiment import override, validate
from gspax.losses import correction, kl, shaping

OPTIMIZER = experiment.optimizer


def annotated(learning_rate) -> "optax.GradientTransformation":
    """A transform that does not return what it says."""
    return 0.1


TERMS = "losses.Terms with value and weight [B], here [2], and metrics of Share, Spread or Quantile"


def scalar_loss(logp, old_logp, advantage, mask):
    return (logp - old_logp).mean()


def tokens_loss(logp, old_logp, advantage, mask):
    return losses.Terms(-logp * advantage[:, None], mask.sum(-1), {})


def plain_metrics(logp, old_logp, advantage, mask):
    value = -logp.sum(-1)
    return losses.Terms(value, jnp.ones_like(value), {"value": value.mean()})


def broken_loss(logp, old_logp, advantage, mask):
    return losses.Terms(logp @ old_logp, mask.sum(-1), {})


def numpy_loss(logp, old_logp, advantage, mask):
    return losses.Terms(np.asarray(logp).sum(-1), mask.sum(-1), {})


def numpy_advantage(rewards):
    rewards = np.asarray(rewards)
    return rewards - rewards.mean(axis=1, keepdims=True)


def branching_advantage(rewards):
    return rewards - rewards.mean() if rewards.max() > 0 else rewards


def mixed_advantage(rewards):
    return np.asarray(rewards) - np.asarray(jnp.mean(rewards))


def undefined(rewards):
    return rewards - no_such_name  # noqa: F821


BROKEN = [
    ({"loss": scalar_loss}, f"loss: wanted test_contracts.scalar_loss to return {TERMS}, got float32 []"),
    (
        {"loss": tokens_loss},
        f"loss: wanted test_contracts.tokens_loss to return {TERMS}, got Terms(value=float32 [2, 3]",
    ),
    (
        {"loss": plain_metrics},
        f"loss: wanted test_contracts.plain_metrics to return {TERMS}, got Terms(value=float32 [2]",
    ),
    ({"loss": broken_loss}, "loss: test_contracts.broken_loss raised TypeError: dot_general requires contracting"),
    ({"loss": numpy_loss}, "loss: test_contracts.numpy_loss raised TracerArrayConversionError: "),
    (
        {"advantage": lambda rewards: rewards.mean(axis=1)},
        "advantage: wanted test_contracts.<lambda> to return advantages [P, G], here [8, 4], got float32 [8]",
    ),
    (
        {"advantage": lambda rewards: numpy_advantage(rewards)[0]},
        "advantage: wanted test_contracts.<lambda> to return advantages [P, G], here [8, 4], got float32 [4]",
    ),
    ({"advantage": undefined}, "advantage: test_contracts.undefined raised NameError: name 'no_such_name' is not"),
    (
        {"correction": lambda old_logp, sampler_logp, mask: old_logp.sum()},
        "correction: wanted test_contracts.<lambda> to return weights [B, T] or [B], here [2, 3] or [2], got float32",
    ),
    ({"length_reward": len}, "length_reward: wanted builtins.len to return rewards [B], here [32], got int"),
    ({"reference": Reference(loss=kl.k1)}, f"reference.loss: wanted gspax.losses.kl.k1 to return {TERMS}, got float32"),
    (
        {"reference": Reference(reward=kl.token_kl)},
        "reference.reward: wanted gspax.losses.kl.token_kl to return an estimate for each token [B, T], here [2, 3], "
        "got Terms(value=float32 [2]",
    ),
    ({"optimizer": replace(OPTIMIZER, transform=int)}, "optimizer.transform: builtins.int raised TypeError: int() arg"),
    (
        {"optimizer": replace(OPTIMIZER, transform=lambda learning_rate: 3)},
        "optimizer.transform: wanted test_contracts.<lambda> to return an optax.GradientTransformation, got int",
    ),
    (
        {"optimizer": replace(OPTIMIZER, transform=annotated)},
        "optimizer.transform: wanted test_contracts.annotated to return an optax.GradientTransformation, got float",
    ),
    (
        {"optimizer": replace(OPTIMIZER, schedule=lambda peak, warmup_updates: peak)},
        "optimizer.schedule: wanted test_contracts.<lambda> to return a function of the updates, got float",
    ),
    (
        {"optimizer": replace(OPTIMIZER, schedule=lambda peak, warmup_updates: lambda updates: jnp.ones(3))},
        "optimizer.schedule: wanted test_contracts.<lambda> to return a function of the updates to a number, got",
    ),
]
KEPT = [
    {"advantage": numpy_advantage},
    {"advantage": branching_advantage},
    {"advantage": mixed_advantage},
    {"advantage": advantages.gdpo},
    {"length_reward": lambda length: np.asarray(length) * -0.1},
    {"length_reward": partial(shaping.soft_overlong_punishment, max_length=4, buffer=2)},
    {"correction": correction.truncate_geometric, "rejection": partial(correction.reject_off_policy, delta=0.1)},
    {"reference": Reference(loss=kl.token_kl)},
    {"reference": Reference(loss=kl.grpo_kl)},
    {"optimizer": Optimizer(transform=optax.sgd)},
    {"optimizer": Optimizer(schedule=lambda peak, warmup_updates: lambda updates: peak)},
    *({"loss": each} for each in (losses.vespo, losses.gmpo, losses.cispo, losses.dppo_kl, losses.sapo)),
]


@pytest.mark.parametrize(("changes", "said"), BROKEN, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_a_function_that_breaks_its_contract_is_one_error(changes, said):
    (found,) = validate(replace(experiment, **changes))
    assert found[: len(said)] == said
    assert "\n" not in found


def test_the_error_of_a_users_function_names_its_line():
    (found,) = validate(replace(experiment, advantage=undefined))
    line = undefined.__code__.co_firstlineno + 1
    assert found.endswith(f"tests/experiment/test_contracts.py:{line})")


@pytest.mark.parametrize("changes", KEPT)
def test_functions_that_keep_their_contract_give_no_error(changes):
    assert validate(replace(experiment, **changes)) == []


def test_functions_are_called_with_packed_rows_where_the_run_does():
    packed = replace(experiment, schedule=replace(experiment.schedule, microbatch_tokens=64))
    assert validate(packed) == []

    def one_per_row(logp, old_logp, advantage, mask, *, segment_ids=None):
        value = -advantage * logp.sum(-1)
        return losses.Terms(value, mask.sum(-1), {})

    assert validate(replace(experiment, loss=one_per_row)) == []
    assert validate(replace(packed, loss=one_per_row))[0].startswith("loss: test_contracts.")


@dataclass(frozen=True)
class Same(GeneratedProblems):
    """Problems that all have one prompt, as those of a game whose answer is hidden."""

    prompt: str = "1"

    def generate(self, rng):
        return Problem(self.prompt, str(rng.integers(9)))


def test_a_source_without_heldout_problems_is_an_error_that_says_what_to_do():
    (found,) = validate(replace(experiment, data=Same()))
    assert found.startswith("data: wanted held-out problems, got none of the first 16 that can be used: ")
    assert "the hash of a prompt decides" in found and "a number that differs" in found


def test_one_problem_that_can_be_used_is_enough():
    @dataclass(frozen=True)
    class Spoiled:
        def train(self, index):
            return experiment.data.train(index) if index == 3 else None

        heldout = experiment.data.heldout

    assert validate(replace(experiment, data=Spoiled())) == []


@dataclass(frozen=True)
class Talk:
    messages: object = ({"role": "user", "content": "1"},)

    def reset(self, problem):
        return None, self.messages[:1]

    def step(self, state, message):
        raise NotImplementedError


CHAT = {"tokenizer": CharChat("0123456789<>{}", user="<{}>"), "warm_start": None}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            Talk(messages=({"role": "user"},)),
            "environment: wanted messages with role and content from reset, got [{'ro",
        ),
        (
            Talk(messages=None),
            f"subscriptable (tests/experiment/test_contracts.py:{Talk.reset.__code__.co_firstlineno + 1})",
        ),
    ],
)
def test_an_environment_whose_reset_breaks_its_contract_is_found(environment, said):
    model = replace(experiment.model, vocab_size=64)
    chat = replace(experiment, **CHAT, model=model, environment=environment, turns=Turns(limit=2))
    found = validate(replace(chat, sampling=replace(chat.sampling, max_prompt_tokens=16)))
    assert found and all(said in each for each in found)


@pytest.mark.parametrize(
    "changes",
    [
        "length_reward=builtins.len",
        "optimizer.transform=builtins.int",
        "reference=gspax.config.Reference reference.loss=gspax.losses.kl.k1",
        "reference=gspax.config.Reference reference.reward=gspax.losses.kl.token_kl",
    ],
)
def test_the_dry_run_gives_one_sentence_and_exits_2(changes, capsys):
    from api import main

    file = Path(__file__).parents[1] / "small_experiment.py"
    assert main.main(["train", str(file), "--dry-run", *changes.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "wanted" in line or "raised TypeError" in line


def test_a_host_function_starts_no_device():
    code = (
        "import test_contracts as t; from dataclasses import replace; from gspax.experiment import validate\n"
        "for each in (t.numpy_advantage, t.branching_advantage, t.mixed_advantage):\n"
        "    assert validate(replace(t.experiment, advantage=each)) == []\n"
        "import jax._src.xla_bridge as bridge; assert not bridge.backends_are_initialized()"
    )
    folder = Path(__file__).parent
    path = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_user_reward_is_not_called():
    def reward(problem, completion):
        raise AssertionError("called")

    def demonstration(problem, rng):
        raise AssertionError("called")

    assert validate(replace(experiment, reward=reward, warm_start=WarmStart(demonstration=demonstration))) == []


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        ("lora=gspax.config.Lora lora.attention=false lora.mlp=false", "lora: wanted attention or mlp, got neither"),
        ("guard.collapse=gspax.config.Collapse guard.collapse.alarms=()", "guard.collapse.alarms: wanted at least one"),
        (
            "guard.collapse=gspax.config.Collapse guard.collapse.alarms=gradient,",
            "guard.collapse.grad_norm: wanted",
        ),
        ("model.sliding_window=4 model.sliding_layers=77,", "model.sliding_layers: wanted layers from 0 to"),
        ("schedule.epochs=1e9", "schedule: wanted at most 2,147,483,647 updates, got 4 steps x 1000000000 epochs x 2"),
    ],
)
def test_a_setting_that_does_nothing_or_nonsense_is_one_error(assignments, said):
    (found,) = validate(override(experiment, assignments.split()))
    assert found.startswith(said)
