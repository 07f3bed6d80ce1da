"""The passes of a step, for the settings that ask for one."""

from dataclasses import replace
from functools import partial

import pytest
from api import Passes
from small_experiment import experiment as small

from gspax import advantages, config, losses
from gspax.losses import kl, selection

LATER, ALL, NONE = range(1, 2), range(2), range(0)
LOAD, COVARIANCE = config.Regularizers(load_balance=0.1), config.Regularizers(kl_cov=config.CovarianceKL())


@pytest.mark.parametrize(
    ("changes", "scored", "properties"),
    [
        ({}, LATER, {"old_logp": "pass", "reads_experts": False, "first_policy": False}),
        ({"old_logp": "sampler"}, NONE, {"old_logp": "sampler"}),
        ({"loss": partial(losses.dro)}, NONE, {"old_logp": "sampler"}),
        ({"old_logp": "interpolated"}, NONE, {"old_logp": "update"}),
        ({"old_logp": "interpolated", "loss": losses.dro}, NONE, {"old_logp": "sampler"}),
        ({"reference": config.Reference(loss=kl.token_kl)}, LATER, {"first_policy": True}),
        ({"reference": config.Reference(reward=kl.k1)}, ALL, {"first_policy": True}),
        ({"routing_replay": "old"}, ALL, {"reads_experts": True, "keeps_experts": True, "samples_experts": False}),
        (
            {"routing_replay": "sampler"},
            LATER,
            {"reads_experts": True, "keeps_experts": False, "samples_experts": True},
        ),
        ({"regularizers": LOAD}, ALL, {"reads_experts": True, "keeps_experts": True}),
        ({"router_shift": config.RouterShift()}, ALL, {"keeps_experts": True, "keeps_router_logp": True}),
        ({"router_shift": config.RouterShift(), "routing_replay": "sampler"}, ALL, {"keeps_experts": False}),
        ({"selection": selection.second_moment}, ALL, {}),
        ({"regularizers": COVARIANCE}, ALL, {"keeps_experts": False}),
        ({"calibration": config.Calibration()}, ALL, {}),
        ({"loss": losses.grpo, "center_scores": True}, LATER, {"sampling_policy": True, "first_policy": False}),
        ({"advantage": advantages.otb}, ALL, {"token_advantages": True}),
    ],
)
def test_a_setting_asks_for_its_passes(changes, scored, properties):
    passes = Passes(replace(small, **changes))
    assert {name: getattr(passes, name) for name in properties} == properties
    assert passes.scored == scored
