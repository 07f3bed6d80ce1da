"""A term that is added by one file and one line, and what the rest asks of all terms."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tethers
import tiny
from api import Batch, Passes, StepSettings, new_state, parameter_count, resident_bytes, train_step, transformer
from small_experiment import experiment, objective_of
from test_objective import BATCH, CONSTANTS, LOGP, MASK, OUTPUTS
from test_packing import ALONE, assert_close
from tethers import Tether

from gspax import advantages, config, losses
from gspax.errors import UserError
from gspax.experiment import describe, override, validate
from gspax.model.terms import MAKERS

SIZES = dict.fromkeys(("slice", "data", "fsdp", "expert", "context", "tensor"), 1)


class Holding(Tether):
    """Keeps a copy of the policy."""

    def held(self, trained_dtype):
        yield config.Held("a copy", trained_dtype)


TETHERED = replace(experiment, terms=(Tether(coefficient=0.5),))


def test_a_term_of_ones_own_is_validated():
    assert validate(TETHERED, 1) == []
    assert validate(replace(TETHERED, terms=(Tether(slack=-1.0),)), 1) == [
        "terms: wanted a slack of at least 0, got -1"
    ]


class Raising(Tether):
    """Asks for a setting that it has not."""

    def problems(self, passes):
        yield f"terms: {self.slck}"


def three(reward_PG):
    """No advantages."""
    return 3


def test_a_wrong_setting_of_a_term_hides_no_other_sentence():
    """Neither one of its own type, nor one that the term finds, nor one of gspax's terms."""
    for terms, first in (
        (
            (Tether(slack="x"), Tether(slack=-1.0)),
            ["terms.0.slack: wanted a number", "terms: wanted a slack of at least"],
        ),
        ((Tether(slack=-1.0),), ["terms: wanted a slack of at least 0, got -1"]),
        ((Raising(),), ["terms: Raising.problems raised AttributeError: 'Raising' object has no attribute 'slck'"]),
    ):
        found = validate(replace(experiment, terms=terms, advantage=three), 1)
        wanted = [*first, "advantage: wanted test_own_terms.three to return"]
        assert len(found) == len(wanted) and all(map(str.startswith, found, wanted)), found
    found = validate(replace(experiment, correction=5, advantage=three), 1)
    assert [sentence.partition(":")[0] for sentence in found] == ["correction", "advantage"]

    def own_loss(logp, old_logp, advantage, mask):
        return losses.gspo(logp, old_logp, advantage, mask)

    assert any("wanted a loss with an `aggregate`" in line for line in validate(replace(TETHERED, loss=own_loss), 1))


def test_a_column_that_no_minibatch_has_is_refused():
    needy = type("Needy", (Tether,), {"needs": frozenset({"age_BT"})})
    told = validate(replace(TETHERED, terms=(needy(),)), 1)
    assert told == ["terms: Needy.needs: wanted columns of gspax.types.Batch, got age_BT"]


def test_only_one_term_reads_the_logits_of_a_pass():
    measuring = type("Measuring", (Tether,), {"measure": lambda *_: None})
    assert validate(replace(TETHERED, terms=(measuring(),)), 1) == []
    told = validate(replace(TETHERED, terms=(measuring(), measuring())), 1)
    assert told == ["terms: wanted at most one with a `measure`, got Measuring and Measuring"]


def test_a_term_of_ones_own_gets_its_pass_and_its_memory():
    assert Passes(TETHERED).first_policy and not Passes(experiment).first_policy
    assert Passes(TETHERED).scored == range(1, 2), "it does not wait for the old policy"
    assert resident_bytes(Passes(TETHERED), SIZES)["reference policy, float32"] == 4 * parameter_count(experiment.model)
    held = replace(TETHERED, terms=(Holding(),))
    assert resident_bytes(Passes(held), SIZES)["a copy, float32"] == 4 * parameter_count(experiment.model)


def test_an_override_reaches_a_term():
    changed = override(TETHERED, ["terms.0.slack=0.25"])
    assert changed.terms == (Tether(coefficient=0.5, slack=0.25),)
    assert describe(changed)["terms"][0]["slack"] == 0.25


def test_a_term_of_ones_own_is_added_to_the_loss():
    def of(variant):
        return losses.reduce(objective_of(variant)(OUTPUTS, BATCH, CONSTANTS))

    (plain, _), (value, metrics) = of(experiment), of(TETHERED)
    square_BT = np.where(MASK, LOGP - BATCH.ref_logp_BT, 0) ** 2
    rows = MASK.any(axis=1)
    mean_B = square_BT.sum(1)[rows] / MASK.sum(1)[rows]
    np.testing.assert_allclose(value - plain, 0.5 * mean_B.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["tether"], square_BT.sum() / MASK.sum(), rtol=1e-5)


def log_z(logits_CV, same_CV, token_C, kept_CS):
    """The log-normalizer of each token, by the one and the other argument."""
    return jax.nn.logsumexp((logits_CV + same_CV) / 2, axis=-1)


MODEL = tiny.first_layers(tiny.CONFIGS["dense"], 1)


class ZLoss(config.Term):
    """The squared log-normalizer of the policy's own logits."""

    comparison = config.Comparison(log_z)

    def penalties(self, outputs, batch, constants, aggregate):
        yield 1.0, losses.Terms(*aggregate(outputs.compared**2, batch.mask_BT), {})


def test_a_term_of_the_policys_own_logits_needs_no_other_model(monkeypatch):
    """In chunks of 7 tokens; the gradient of the loss is 0 because all advantages are."""
    monkeypatch.setattr("gspax.learner.forward.logit_chunk", lambda config, mesh, tokens: 7)
    variant = replace(experiment, terms=(ZLoss(),))
    assert validate(variant, 1) == []
    shape = {"temperature": 0.5, "microbatch_rows": 2, "packed": False}
    settings = StepSettings(config=MODEL, mesh=ALONE, comparison=Passes(variant).comparison, **shape)
    tokens, mask = np.arange(18).reshape(2, 9) % MODEL.vocab_size, np.arange(9) > np.array([[3], [5]])
    one, nought = jnp.ones((2, 9), jnp.int32), jnp.zeros((2, 9))
    batch = Batch(
        tokens_BT=jnp.asarray(tokens),
        segment_BT=one,
        mask_BT=jnp.asarray(mask),
        old_logp_BT=nought,
        advantage=nought[:, 0],
        sampler_logp_BT=nought,
    )

    def whole(params):
        hidden, _ = transformer.apply(params, MODEL, batch.tokens_BT, one, mesh=ALONE)
        z = jax.nn.logsumexp(transformer.logits(params, hidden) / 0.5, axis=-1)
        return (jnp.where(mask, jnp.roll(z, 1, axis=1) ** 2, 0).sum(1) / mask.sum(1)).mean()

    state = new_state(tiny.params(MODEL), optax.sgd(1.0), jax.random.key(1))
    grads, terms, _ = jax.jit(train_step.make_gradient(settings, objective_of(variant)))(state, batch, True)
    value, wanted = jax.jit(jax.value_and_grad(whole))(state.params)
    np.testing.assert_allclose(losses.reduce(terms)[0], value, rtol=1e-5)
    assert_close(grads, wanted)


def test_the_page_shows_the_file():
    page = Path(__file__).parents[2] / "docs" / "howto" / "add_a_term.md"
    assert Path(tethers.__file__).read_text(encoding="utf-8") in page.read_text(encoding="utf-8")


def test_the_page_names_each_member():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "add_a_term.md").read_text(encoding="utf-8")
    members = [name for name in vars(config.Term) if not name.startswith("_")]
    assert len(members) > 10 and [name for name in members if f"`{name}`" not in page] == []


EVERY = replace(
    experiment,
    advantage=advantages.otb,
    correction=lambda old_logp, sampler_logp, mask: old_logp,
    rejection=lambda logp, sampler_logp, advantage, mask: logp,
    selection=lambda minibatch: minibatch.mask_BT,
    center_scores=True,
    reference=config.Reference(),
    teacher=config.Teacher(),
    regularizers=config.Regularizers(
        entropy=0.1, kl_cov=config.CovarianceKL(), log_ratio_square=0.1, load_balance=0.1, router_z=0.1
    ),
)


def test_each_setting_has_a_term_and_each_term_names_columns_that_exist():
    assert Passes(experiment).terms == ()
    found = Passes(EVERY).terms
    assert len(found) == len(MAKERS)
    columns = {field.name for field in dataclasses.fields(Batch)}
    for term in found:
        assert columns >= term.needs | term.selections.keys(), term


def test_two_terms_of_one_class_are_refused_for_their_metric():
    """At the dry run: an update would raise in its compilation."""
    told = validate(replace(TETHERED, terms=(Tether(), Tether(slack=0.1))), 1)
    assert told == [
        "terms: wanted a name for the metric of Tether that nothing else has, got 'tether', which another Tether has; "
        "make the name a setting of Tether"
    ]


class OfTheLoss(Tether):
    """Takes the name of a metric of the loss."""

    def penalties(self, outputs, batch, constants, aggregate):
        for coefficient, terms in super().penalties(outputs, batch, constants, aggregate):
            yield coefficient, terms._replace(metrics={"ratio": terms.metrics["tether"]})


class RaisingLater(Tether):
    """Raises where an update would be compiled."""

    def mix(self, batch):
        raise KeyError("teacher")


class Unweighted(Tether):
    """Yields what is no penalty."""

    def penalties(self, outputs, batch, constants, aggregate):
        yield outputs.logp_BT.mean(), None


def test_a_dry_run_calls_what_an_update_calls_of_a_term():
    def of(term):
        return validate(replace(TETHERED, terms=(term,)), 1)

    (raised,) = of(RaisingLater())
    assert raised.startswith("terms: RaisingLater raised KeyError: 'teacher'") and "test_own_terms.py" in raised
    assert of(Unweighted()) == [
        "terms: wanted Unweighted.penalties to yield Python numbers as coefficients, got DynamicJaxprTracer"
    ]
    assert of(OfTheLoss())[0].endswith("got 'ratio', which the loss has; make the name a setting of OfTheLoss")
    (raised,) = of(type("Flat", (ZLoss,), {"comparison": config.Comparison(lambda logits_CV, *_: logits_CV.sum())})())
    assert raised.startswith("terms: Flat raised TypeError: cannot reshape array of shape ()")
    packed = replace(TETHERED, schedule=replace(TETHERED.schedule, microbatch_tokens=64))
    assert validate(packed, 1) == []


def test_an_override_that_removes_the_terms_is_an_empty_tuple():
    assert override(TETHERED, ["terms=()"]).terms == ()
    with pytest.raises(
        UserError, match=r"^terms: wanted values with commas between them, or \(\) for none, got 'null'"
    ):
        override(TETHERED, ["terms=null"])
