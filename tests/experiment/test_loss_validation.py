"""Settings that do not fit the loss are rejected at start-up, and suspicious ones give a warning."""

from dataclasses import replace
from functools import partial

import pytest
from small_experiment import experiment

from gspax import advantages, losses
from gspax.config import (
    AdaptiveEntropy,
    Calibration,
    CovarianceKL,
    Engine,
    Placement,
    Reference,
    Regularizers,
    RouterShift,
    Teacher,
)
from gspax.experiment import override, validate, warnings
from gspax.losses import correction, distill, kl, selection


def own_loss(logp, old_logp, advantage, mask):
    value = -(logp * mask).sum(axis=-1) * advantage
    return losses.Terms(value=value, weight=mask.any(axis=-1) * 1.0, metrics={})


def own_correction(old_logp, sampler_logp, mask):
    return mask * 1.0


PACKED = replace(experiment.schedule, microbatch_tokens=64)
UNSCORED = {"old_logp": "sampler"}
KEEP = partial(correction.reject_sequences, high=0.01)
TOP = {"selection": selection.top_entropy, "loss": losses.grpo}
STALE = Placement(devices=1, staleness=1)
DENSE = replace(experiment.model, num_experts=0, intermediate_size=32)
WRONG = [
    ({"loss": own_loss, "correction": correction.truncate_tokens}, "correction: wanted a loss that takes a `corr"),
    ({"loss": own_loss, "rejection": partial(correction.reject_off_policy, delta=0.0)}, "rejection: wanted a loss"),
    ({"correction": correction.reject_off_policy}, "correction: wanted a function of (old_logp, sampler_logp, mask)"),
    ({"rejection": correction.truncate_tokens}, "rejection: wanted a function of (logp, sampler_logp, advantage"),
    (
        {"correction": partial(correction.product, factors=(correction.truncate_tokens, 2.0))},
        "correction: factors must be a function, as correction.truncate_tokens is; got float",
    ),
    (
        {"correction": partial(correction.reject_sequences, high=-1.0)},
        "correction: low and high must be at most and at least 0, of equal policies; got -inf and -1.0",
    ),
    ({"correction": correction.reject_tokens}, "correction: wanted a function of (old_logp, sampler_logp, mask), gsp"),
    ({"correction": 2.0}, "correction: wanted a function or None, got 2.0"),
    ({"length_reward": advantages.by_group}, "length_reward: wanted a function of (length)"),
    ({"loss": own_loss, "regularizers": Regularizers(entropy=0.1)}, "regularizers.entropy: wanted a loss with an `agg"),
    ({"loss": own_loss, "reference": Reference(loss=kl.token_kl)}, "reference.loss: wanted a loss with an `aggregate"),
    ({"reference": Reference(loss=kl.token_kl, reward=kl.k1)}, "reference: wanted the KL in the loss or in the rew"),
    ({"reference": Reference(coefficient=-1.0)}, "reference.coefficient: wanted at least 0, got -1"),
    (
        {"loss": losses.dapo, "reference": Reference(loss=kl.sequence_kl)},
        "reference.loss: gspax.losses.kl.sequence_kl weighs sequences",
    ),
    (
        {"regularizers": Regularizers(entropy=0.5, adaptive_entropy=AdaptiveEntropy(highest=0.1))},
        "regularizers.entropy: wanted a first coefficient from 0 to regularizers.adaptive_entropy.highest (0.1), got",
    ),
    (
        {"regularizers": Regularizers(adaptive_entropy=AdaptiveEntropy(step=-1.0))},
        "regularizers.adaptive_entropy.step: wanted",
    ),
    ({"loss": own_loss, "regularizers": Regularizers(adaptive_entropy=AdaptiveEntropy())}, "regularizers.adaptive_ent"),
    ({"regularizers": Regularizers(router_z=-1.0)}, "regularizers.router_z: wanted at least 0"),
    ({"regularizers": Regularizers(entropy=float("inf"))}, "regularizers.entropy: wanted a finite number"),
    (
        {"model": DENSE, "regularizers": Regularizers(load_balance=0.1)},
        "regularizers.load_balance: wanted a model with",
    ),
    ({"model": DENSE, "routing_replay": "old"}, "routing_replay: wanted a model with experts, got none in 2 layers"),
    (
        {"model": DENSE, "router_shift": RouterShift()},
        "router_shift: wanted a model with experts, got none in",
    ),
    ({"routing_replay": True}, "routing_replay: wanted 'off' or 'old' or 'sampler', got True"),
    ({"router_shift": RouterShift(floor=0.0)}, "router_shift.floor: wanted above 0 and at most 1, got 0"),
    (
        UNSCORED | {"correction": correction.truncate_geometric},
        "correction: wanted old_logp=learner, got sampler, so the learner computes no log-probs",
    ),
    (
        {"loss": losses.dis, "correction": correction.truncate_geometric},
        "correction: wanted a loss with old log-probs of the learner, got gspax.losses.dis, so the learner ",
    ),
    (
        {"loss": losses.ipo, "schedule": replace(experiment.schedule, epochs=2)},
        "schedule.epochs: wanted 1 with gspax.losses.ipo, which has no old policy that would bound a second pass",
    ),
    (UNSCORED | {"regularizers": Regularizers(kl_cov=CovarianceKL())}, "regularizers.kl_cov: wanted old_logp=learner"),
    (
        {"regularizers": Regularizers(kl_cov=CovarianceKL(share=0.0))},
        "regularizers.kl_cov.share: wanted above 0 and at most 1, got 0",
    ),
    (UNSCORED | TOP, "selection: wanted old_logp=learner, got sampler, so the learner computes no log-probs"),
    ({"loss": own_loss, "selection": TOP["selection"]}, "selection: wanted a loss that takes a `correction`"),
    (
        {"loss": losses.grpo, "selection": partial(selection.top_entropy, share=2.0)},
        "selection: share must be above 0 and at most 1; got 2.0",
    ),
    (
        {"loss": losses.grpo, "selection": lambda minibatch: minibatch.mask_BT.sum()},
        "selection: wanted test_loss_validation.<lambda> to return weights [B, T], here [",
    ),
    (
        {"old_logp": "interpolated"},
        "old_logp: wanted placement.staleness or engine.staleness above 0 with interpolated, which needs tokens",
    ),
    (
        {"old_logp": "interpolated", "engine": Engine()},
        "old_logp: wanted placement.staleness or engine.staleness above",
    ),
    (
        {"old_logp": "interpolated", "loss": losses.dis, "placement": STALE},
        "old_logp: wanted a loss with a ratio to the old policy, got gspax.losses.dis, which has none",
    ),
    (
        {"old_logp": "interpolated", "placement": STALE} | TOP,
        "selection: wanted old_logp=learner, got interpolated, so the learner computes no log-probs",
    ),
    (
        {"advantage": advantages.otb},
        "advantage: wanted a loss with an advantage for each token (losses.gspo_token, losses.grpo), got gspax.losses.",
    ),
    (
        UNSCORED | {"advantage": advantages.otb, "loss": losses.grpo},
        "advantage: wanted old_logp=learner, got sampler, so the learner computes no log-probs",
    ),
    (
        {"advantage": lambda reward, *, score_norm_PGN: reward, "loss": losses.gspo_token},
        "advantage: wanted test_loss_validation.<lambda> to return advantages of tokens [P, G, N], here [8, 4, 3], got",
    ),
    (UNSCORED | {"calibration": Calibration()}, "calibration: wanted old_logp=learner, got sampler"),
    (UNSCORED | {"router_shift": RouterShift()}, "router_shift: wanted old_logp=learner, got sampler"),
    (UNSCORED | {"routing_replay": "old"}, "routing_replay: wanted old_logp=learner, got sampler"),
    (UNSCORED | {"regularizers": Regularizers(load_balance=0.1)}, "regularizers.load_balance: wanted old_logp=learner"),
    ({"loss": losses.grpo, "calibration": Calibration()}, "calibration: wanted a loss that clips the ratio of a seq"),
    ({"calibration": Calibration(share=1.0)}, "calibration.share: wanted above 0 and below 1, got 1"),
    ({"calibration": Calibration(), "schedule": replace(experiment.schedule, minibatches=1)}, "calibration: wanted at"),
    ({"filter_overlong": True, "advantage": lambda rewards: rewards}, "filter_overlong: wanted an advantage of (rewar"),
    ({"loss": own_loss, "schedule": PACKED}, "schedule.microbatch_tokens: wanted a loss that takes `segment_ids`, for"),
    ({"correction": own_correction, "schedule": PACKED}, "schedule.microbatch_tokens: wanted a correction that takes"),
    (
        {"loss": losses.grpo, "selection": partial(selection.top_cov, share=0.1)},
        "selection: wanted a selection of tokens to train on, got gspax.losses.selection.top_cov, which selects",
    ),
    (
        {"placement": STALE, "reference": Reference(loss=kl.token_kl)},
        "reference.loss: wanted old_logp=sampler with placement.staleness=1, because its term is weighted by",
    ),
    *(
        (
            UNSCORED | {"placement": STALE, "reference": Reference(loss=loss)},
            "reference.loss: wanted a KL that takes `old_logp` (gspax.losses.kl.token_kl) and old_logp=sampler with",
        )
        for loss in (kl.grpo_kl, kl.sequence_kl, lambda logp, ref_logp, mask: kl.grpo_kl(logp, ref_logp, mask))
    ),
    (
        {"engine": Engine(staleness=2), "teacher": Teacher()},
        "teacher: wanted old_logp=sampler or teacher.as_advantage=True with engine.staleness=2, because its term",
    ),
    ({"filter_overlong": 1}, "filter_overlong: wanted True or False, got 1"),
    ({"loss": partial(losses.gspo, clip_low=1.0)}, "loss.clip_low: wanted a number at least 0 and below 1, got 1.0"),
    ({"loss": partial(losses.gspo, clip_high=-1.0)}, "loss.clip_high: wanted a number at least 0, got -1.0"),
]
RIGHT = [
    {"loss": losses.importance_sampling, "regularizers": Regularizers(kl_cov=CovarianceKL()), "schedule": PACKED},
    TOP | {"correction": correction.truncate_tokens, "schedule": PACKED},
    {"old_logp": "interpolated", "engine": Engine(staleness=1)},
    {"engine": Engine(staleness=1), "teacher": Teacher(divergence=distill.full_reverse_kl, refresh_every=1)},
    {"old_logp": "interpolated", "placement": STALE, "correction": correction.truncate_geometric},
    {"correction": partial(correction.product, factors=(correction.truncate_geometric, KEEP)), "schedule": PACKED},
    {"loss": partial(losses.dppo_tv, threshold=0.2), "regularizers": Regularizers(log_ratio_square=1e-3)} | UNSCORED,
    {"loss": losses.dis, "rejection": partial(correction.reject_off_policy, delta=0.0), "schedule": PACKED},
    UNSCORED | {"routing_replay": "sampler", "regularizers": Regularizers(load_balance=0.1)},
    {"calibration": Calibration(), "schedule": replace(experiment.schedule, minibatches=1, epochs=2)},
    {
        "loss": partial(losses.luspo, clip_low=0.1, clip_high=0.1),
        "correction": correction.mask_tokens,
        "reference": Reference(loss=kl.grpo_kl),
        "schedule": PACKED,
    },
    UNSCORED | {"placement": STALE, "reference": Reference(loss=kl.token_kl)},
    {"loss": losses.cispo},  # a lower width of 1 means no lower bound
    {"loss": losses.dr_grpo, "reference": Reference(loss=kl.sequence_kl)},
    {"loss": own_loss, "reference": Reference(reward=kl.k1)},
    {"advantage": advantages.otb, "loss": losses.gspo_token, "filter_overlong": True},
    {"advantage": lambda reward, *, length_PG: reward - length_PG},
    {"filter_overlong": True, "advantage": partial(advantages.standardize, eps=0.1)},
    {"model": DENSE, "regularizers": Regularizers(entropy=-0.1)},
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_a_setting_that_does_not_fit_the_loss_is_one_error(changes, said):
    found = validate(replace(experiment, **changes))
    assert [sentence[: len(said)] for sentence in found] == [said]


@pytest.mark.parametrize("changes", RIGHT)
def test_settings_that_fit_give_no_error(changes):
    assert validate(replace(experiment, **changes)) == []


@pytest.mark.parametrize("loss", [losses.gspo, losses.gspo_token, losses.luspo], ids=lambda loss: loss.__name__)
def test_a_wide_clip_range_for_sequence_ratios_warns_unless_calibrated(loss):
    wide = replace(experiment, loss=partial(loss, clip_high=0.27))
    assert len(warnings(wide)) == 1 and "loss.clip_high=0.27" in warnings(wide)[0]
    assert warnings(replace(wide, calibration=Calibration())) == []
    assert warnings(replace(experiment, loss=losses.grpo)) == []


def test_a_selection_for_a_loss_of_sequences_warns():
    (found,) = warnings(replace(experiment, **TOP | {"loss": losses.gspo}))
    assert found.startswith(
        "selection: gspax.losses.selection.top_entropy weights each token, but the gradient of gspa"
    )
    assert warnings(replace(experiment, **TOP)) == []


@pytest.mark.parametrize(("estimate", "warned"), [(kl.k1, False), (kl.k2, True), (kl.k3, True)])
def test_an_estimate_in_the_reward_that_has_another_gradient_warns(estimate, warned):
    found = warnings(replace(experiment, reference=Reference(reward=estimate)))
    assert [f"reference.reward=gspax.losses.kl.{estimate.__name__}: " in each for each in found] == [True] * warned


def test_components_of_the_loss_can_be_overridden():
    changed = override(
        experiment,
        [
            "reference=gspax.config.Reference",
            "reference.loss=gspax.losses.kl.token_kl",
            "correction=gspax.losses.correction.truncate_tokens",
            "correction.cap=3",
            "calibration=gspax.config.Calibration",
            "calibration.share=0.2",
            "regularizers.entropy=0.01",
        ],
    )
    assert validate(changed) == []
    assert changed.reference == Reference(loss=kl.token_kl) and changed.calibration == Calibration(share=0.2)
    assert changed.correction.keywords == {"cap": 3}


@pytest.mark.parametrize(
    ("options", "warned"),
    [({}, True), (UNSCORED, False), ({"loss": losses.dro}, False), ({"old_logp": "interpolated"}, True)],
)
def test_stale_samples_need_a_correction_unless_their_own_log_probs_are_the_old_ones(options, warned):
    stale = replace(experiment, placement=Placement(devices=1, staleness=1), **options)
    assert any("nothing corrects for that" in each for each in warnings(stale)) == warned
