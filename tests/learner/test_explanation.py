"""What `gspax explain` prints is what the learner computes: the text is evaluated on random batches."""

import functools
from dataclasses import replace
from functools import partial

import equations
import jax.numpy as jnp
import numpy as np
import pytest
from api import Passes
from small_experiment import experiment
from test_objective import CASES
from tethers import Tether

from gspax import advantages, losses
from gspax.config import Calibration, Reference, Regularizers, RouterShift, Teacher, Turns
from gspax.experiment import explanation, override
from gspax.losses import correction, distill, kl, selection, shaping
from gspax.losses.formulas import formula_of
from gspax.model.terms import MAKERS
from gspax.model.terms.correction import CorrectionTerm


def explain(experiment):
    return explanation.explain(Passes(experiment))


def objective_lines(experiment):
    return explanation.objective_lines(Passes(experiment))


def without_effect(experiment):
    return explanation.without_effect(Passes(experiment))


def paper_lines(experiment):
    return explanation.paper_lines(Passes(experiment))


def rates(experiment):
    return explanation.rate_lines(experiment.optimizer, experiment.schedule)


MODEL = replace(experiment.model, num_experts=equations.E)
BASE = replace(experiment, model=MODEL)
BY_TOKEN = partial(losses.grpo, aggregate=losses.by_token)
FACTORS = (correction.truncate_tokens, partial(correction.reject_geometric, low=0.99, high=1.01))


def with_loss(loss, **changes):
    return replace(BASE, loss=loss, **changes)


FAMILY = {
    name: function
    for name in losses.__all__
    if isinstance(getattr(function := getattr(losses, name), "traits", None), losses.Traits)
}
FAMILY |= {  # widths that clip some ratios and not others
    "grpo with a dual clip": partial(losses.grpo, dual_clip=1.1),
    "cispo": partial(losses.cispo, clip_low=0.1, clip_high=0.1),
    "dis": partial(losses.dis, clip_low=0.1, clip_high=0.1),
    "gmpo": partial(losses.gmpo, clip_low=0.1, clip_high=0.1),
    "dppo_tv": partial(losses.dppo_tv, threshold=0.02, ratio_limit=1.1),
    "dppo_kl": partial(losses.dppo_kl, threshold=0.002),
    "ipo": partial(losses.ipo, threshold=0.03),
}

VARIANTS = {
    **{f"loss {name}": with_loss(loss) for name, loss in FAMILY.items()},
    **{name: replace(BASE, **changes) for name, (changes, _) in CASES.items()},
    **{
        f"{each.__name__} of {name}": with_loss(partial(loss, aggregate=each))
        for each in (losses.by_sequence, losses.by_token, partial(losses.by_constant, length=5))
        for name, loss in (("gspo", losses.gspo), ("grpo", losses.grpo))
        if hasattr(each, "__name__")
    },
    "a constant length": with_loss(partial(losses.dr_grpo, aggregate=partial(losses.by_constant, length=5))),
    **{
        f"correction {name}": with_loss(losses.gspo_token, correction=each)
        for name, each in {
            "truncate_tokens": correction.truncate_tokens,
            "truncate_sequences": correction.truncate_sequences,
            "truncate_geometric": partial(correction.truncate_geometric, cap=1.01),
            "mask_tokens": partial(correction.mask_tokens, low=0.9, high=1.1),
            "mask_sequences": partial(correction.mask_sequences, low=0.5, high=1.2),
            "reject_geometric": FACTORS[1],
            "reject_tokens": partial(correction.reject_tokens, estimate=kl.k1, low=-0.1, high=0.1),
            "reject_sequences": partial(correction.reject_sequences, high=0.02),
            "the largest": partial(correction.reject_sequences, over=losses.sequences.largest, high=0.05),
            "product": partial(correction.product, factors=FACTORS),
        }.items()
    },
    **{
        f"selection {each.__name__}": with_loss(BY_TOKEN, selection=bound)
        for each, bound in (
            (selection.top_entropy, partial(selection.top_entropy, share=0.3)),
            (selection.second_moment, partial(selection.second_moment, threshold=0.02)),
            (selection.clip_cov, partial(selection.clip_cov, share=0.1, low=-0.1, high=2.0)),
        )
    },
    **{
        f"reference {each.__name__}": replace(BASE, reference=Reference(loss=each, coefficient=0.3))
        for each in (kl.token_kl, kl.sequence_kl, kl.grpo_kl)
    },
    "a reference aggregated in its own way": replace(
        BASE, reference=Reference(loss=partial(kl.token_kl, aggregate=losses.by_constant), coefficient=0.3)
    ),
    **{
        f"teacher {name}": replace(BASE, teacher=teacher)
        for name, teacher in {
            "sampled": Teacher(coefficient=0.5),
            "kept": Teacher(kept=3, coefficient=0.5),
            "reverse": Teacher(divergence=distill.full_reverse_kl),
            "forward": Teacher(divergence=distill.full_forward_kl),
            "jensen_shannon": Teacher(divergence=partial(distill.jensen_shannon, beta=0.3)),
        }.items()
    },
    "teacher as_advantage": with_loss(losses.gspo_token, teacher=Teacher(as_advantage=True, coefficient=0.2)),
    "interpolated": replace(BASE, old_logp="interpolated", loss=losses.grpo),
    "the sampler's": replace(BASE, old_logp="sampler"),
    "router shift": replace(BASE, router_shift=RouterShift(floor=0.7), loss=losses.grpo),
    **{
        f"centered {name}": with_loss(loss, center_scores=True)
        for name, loss in FAMILY.items()
        if losses.traits_of(loss).ratio == "token" and losses.traits_of(loss).correction == "token"
    },
    "a negative entropy bonus": replace(BASE, regularizers=Regularizers(entropy=-0.1)),
}


def kind_of(name):
    first = name.partition(" ")[0]
    return first if first in ("loss", "correction", "teacher", "centered") else "other"


@pytest.mark.parametrize("kind", ["loss", "correction", "teacher", "centered", "other"])
def test_the_printed_equation_is_what_the_learner_computes(kind):
    names = [name for name in VARIANTS if kind_of(name) == kind]
    assert len(names) > 4
    for name in names:
        try:
            equations.compare(VARIANTS[name])
        except AssertionError as difference:
            difference.add_note(f"{name}: {equations.loss_lines(VARIANTS[name])}")
            raise


def test_the_equation_of_gspo_is_what_the_learner_computes():
    """The quick one of the tests above."""
    equations.compare(VARIANTS["loss gspo"])
    lines = [line.strip() for line in equations.loss_lines(VARIANTS["loss gspo"])]
    assert lines == objective_lines(VARIANTS["loss gspo"])[1:]


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("loss gspo", "-mean(objective)", "mean(objective)"),
        ("loss gspo", "sum(x / length) / sequences", "sum(x) / sequences"),
        ("loss gspo", "1 + 0.0004", "1 + 0.0003"),
        ("loss dapo", "/ tokens", "/ sequences"),
        ("reference token_kl", "0.3 * ", "-0.3 * "),
        ("reference token_kl", "logp - ref_logp", "ref_logp - logp"),
        ("correction truncate_tokens", "old_logp - sampler_logp", "sampler_logp - old_logp"),
        ("loss cispo", "sg(clip", "(clip"),  # the value is the same, the gradient is not
    ],
)
def test_another_sign_factor_or_denominator_would_be_seen(name, right, wrong):
    lines = equations.loss_lines(VARIANTS[name])
    changed = [line.replace(right, wrong) for line in lines]
    assert changed != lines
    with pytest.raises(AssertionError):
        equations.compare(VARIANTS[name], changed)


REWARD = jnp.asarray(np.random.default_rng(3).normal(size=(3, 4)), jnp.float32)
LENGTH = jnp.asarray(np.random.default_rng(4).integers(1, 9, (3, 4)))
NORM = jnp.abs(equations.draw(5, 3, 4, 2))


@pytest.mark.parametrize(
    ("advantage", "given"),
    [
        (advantages.standardize, {}),
        (partial(advantages.standardize, ddof=0, eps=0.1), {}),
        (advantages.center, {}),
        (advantages.leave_one_out, {}),
        (advantages.reinforce_plus_plus, {}),
        (advantages.reinforce_plus_plus_baseline, {}),
        (advantages.maxrl, {}),
        (advantages.best_of_group, {}),
        (advantages.opo, {"length_PG": LENGTH}),
        (advantages.otb, {"length_PG": jnp.full((3, 4), 2), "score_norm_PGN": NORM}),
        (advantages.gdpo, {}),
        (partial(advantages.gdpo, weights=(2.0, 0.5)), {}),
    ],
)
def test_the_printed_advantage_is_what_the_function_computes(advantage, given):
    reward = jnp.abs(REWARD)
    if explanation.title_of(advantage).endswith("gdpo"):
        reward = jnp.stack([reward, REWARD[::-1]], -1)
    lines = objective_lines(replace(BASE, advantage=advantage))
    own = lines[: next(i for i, line in enumerate(lines) if line.startswith("advantage")) + 1]
    names = equations.advantage_names(reward, LENGTH)
    if "score_norm_PGN" in given:
        names |= {"score_norm": NORM, "reward": reward[..., None]}
    np.testing.assert_allclose(
        equations.evaluate(own, names)["advantage"], advantage(reward, **given), rtol=1e-4, atol=1e-5
    )


def test_what_is_added_to_rewards_is_printed():
    variant = replace(
        BASE,
        length_reward=partial(shaping.soft_overlong_punishment, max_length=8, buffer=4),
        reference=Reference(reward=kl.k1, coefficient=0.1),
        turns=Turns(credit="turn", discount=0.5),
    )
    lines = objective_lines(variant)
    assert [line.split(" = ")[1] for line in lines[:3]] == [
        "reward + (clip(8 - length, 0, 4) - 4) / 4",
        "reward - 0.1 * sum_t(k1(old_logp - ref_logp))",
        "to_go(reward, 0.5)",
    ]
    names = equations.advantage_names(REWARD, LENGTH)
    np.testing.assert_allclose(
        equations.evaluate(lines[:1], names)["reward"],
        REWARD + shaping.soft_overlong_punishment(LENGTH.ravel(), max_length=8, buffer=4).reshape(3, 4),
        rtol=1e-6,
    )


def own_loss(logp, old_logp, advantage, mask):
    """Compute something of one's own."""
    return losses.gspo(logp, old_logp, advantage, mask)


@functools.wraps(losses.gspo)
def twice(*args, **keywords):
    terms = losses.gspo(*args, **keywords)
    return terms._replace(value=2 * terms.value)


class Doubled(CorrectionTerm):
    """A correction, doubled."""

    def weight(self, logp_BT, batch):
        return 2 * super().weight(logp_BT, batch)


class Silent(Tether):
    """A tether that overrides what its formula speaks of."""

    def penalties(self, *rows):
        yield from super().penalties(*rows)


def test_what_declares_no_formula_is_named_and_said_to():
    text = explain(replace(BASE, terms=(Silent(),)))
    assert "loss      = -mean(objective) + Silent\n" in text
    assert "a term that declares no formula: A tether that overrides what its formula speaks of." in text
    assert "loss = own_loss(logp, old_logp, advantage)" in explain(with_loss(own_loss))
    assert "own_loss     declares no formula: Compute something of one's own." in explain(with_loss(own_loss))
    own = replace(BASE, correction=lambda old_logp, sampler_logp, mask: jnp.ones_like(old_logp))
    assert "declares no formula" in explain(own)


def test_a_formula_says_nothing_of_what_is_derived_from_its_owner():
    assert formula_of(twice) is None and formula_of(losses.gspo) is not None
    text = explain(replace(BASE, terms=(Doubled(function=correction.truncate_tokens),)))
    assert "weight    = Doubled(logp)" in text and "min(exp(old_logp - sampler_logp)" not in text


def test_a_term_of_ones_own_with_a_formula_is_part_of_the_equation():
    stated = replace(BASE, terms=(Tether(coefficient=0.5, slack=0.1),))
    assert "declares no formula" not in explain(stated)
    equations.compare(stated)


def test_each_function_and_each_term_of_gspax_declares_a_formula():
    plain = {"across_groups", "by_group", "constant_groups", "non_negative"}  # no advantages
    functions = [*FAMILY.values(), *(getattr(advantages, name) for name in {*advantages.__all__} - plain)]
    assert len(FAMILY) >= 16
    assert [function for function in functions if formula_of(function) is None] == []
    assert len(MAKERS) > 10


def test_settings_without_effect_are_named():
    assert without_effect(BASE) == []
    calibrated = replace(BASE, loss=partial(losses.gspo, clip_low=3e-4), calibration=Calibration(share=0.2))
    assert without_effect(calibrated) == ["loss.clip_low=3e-4: the equation above does not contain it"]
    measured = replace(BASE, reference=Reference(coefficient=0.5))
    assert without_effect(measured) == ["reference.coefficient=0.5: the equation above does not contain it"]
    single = override(BASE, ["schedule.minibatches=1"])
    assert without_effect(single) == ["the clip range: a rollout has one update, in which all ratios are 1"]


def test_the_differences_from_the_paper_are_named():
    recipe = override(BASE, ["schedule.minibatches=4"])
    assert paper_lines(recipe) == []
    other = override(recipe, ["loss.clip_high=1e-3", "schedule.epochs=2", "old_logp=sampler"])
    assert paper_lines(other) == [
        "loss.clip_high: 4e-4 in the paper, here 0.001",
        "old_logp: learner in the paper, here sampler",
        "schedule.epochs: 1 in the paper, here 2",
    ]
    lines = paper_lines(replace(recipe, reference=Reference(loss=losses.kl.grpo_kl)))
    assert "reference.loss: (absent) in the paper, here gspax.losses.kl.grpo_kl" in lines
    assert not any("aggregate" in line for line in lines), "it is the policy loss's"


def test_the_rate_of_each_update_is_the_runs():
    lines = rates(override(BASE, ["optimizer.warmup_updates=2", "optimizer.learning_rate=1e-3"]))
    assert lines[0] == "gspax.config.optimizers.constant, with gspax.config.optimizers.adamw"
    assert lines[1:4] == ["update 1 (rollout 1): 0", "update 2 (rollout 1): 0.0005", "update 3 (rollout 2): 0.001"]
    assert rates(BASE)[1:] == ["0.001 in every update"]
