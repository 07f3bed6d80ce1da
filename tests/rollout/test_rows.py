"""Rows are sharded over the devices: prompts need not divide evenly."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
from api import make_inference_weights, make_mesh, place_prompts, sample, split_groups
from small_experiment import experiment

from gspax import config
from gspax.config import Mesh, Sampling
from gspax.errors import UserError
from gspax.experiment import validate
from gspax.experiment.plan import plan

CONFIG = replace(tiny.MOE, num_hidden_layers=1)
PROMPTS = [[1, 2], [3], [4, 5, 6], [7], [8, 9], [10]]


def generate(prompts, devices, **settings):
    mesh, sampling = make_mesh(Mesh(), jax.devices()[:devices]), Sampling(max_prompt_tokens=4, max_tokens=6, **settings)
    params = make_inference_weights(tiny.params(CONFIG), CONFIG, mesh)
    ids, key = range(3, 3 + len(prompts)), jax.random.key(0)
    return jax.device_get(sample(params, prompts, ids, key, tiny.options(CONFIG, sampling, (0, 1, 2), mesh)))


@pytest.mark.parametrize(
    ("prompts", "group", "devices", "slots"),
    [(6, 4, 4, 0), pytest.param(6, 4, 4, 8, marks=pytest.mark.slow), pytest.param(2, 8, 8, 0, marks=pytest.mark.slow)],
)
def test_groups_are_divided_where_prompts_are_no_multiple_of_the_devices(prompts, group, devices, slots):
    got = generate(PROMPTS[:prompts], devices, group=group, slots=slots)
    want = generate(PROMPTS[:prompts], 1, group=group)
    for name in ("tokens_BT", "mask_BT", "prompt_length_B", "length_B", "finished_B"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=1e-5)
    assert len(np.unique(want.tokens_BT)) > 10, "the tokens should vary"


@pytest.mark.parametrize(
    ("prompts", "group", "devices", "wanted"),
    [
        (8, 4, 4, (8, 4)),
        (6, 4, 4, (12, 2)),
        (128, 8, 256, (256, 4)),
        (1, 8, 8, (8, 1)),
        (6, 4, 5, None),
        (3, 2, 4, None),
    ],
)
def test_how_groups_are_divided(prompts, group, devices, wanted):
    """A prompt counts once for each device that samples it."""
    sampling, sizes = Sampling(prompts=prompts, group=group), dict.fromkeys(config.Mesh.__annotations__, 1)
    if wanted is None:
        with pytest.raises(UserError, match=f"multiples of {devices} devices, got {prompts} prompts x {group} samples"):
            split_groups(sampling, sizes | {"data": devices})
        return
    divided = split_groups(sampling, sizes | {"data": devices})
    assert (divided.prompts, divided.group) == wanted


def test_the_parts_of_a_group_have_ids_of_their_own():
    prompts, sampling = [[1], [2, 3]], Sampling(prompts=4, group=3, max_prompt_tokens=4)
    tokens_PS, length_P, id_P = place_prompts(prompts, [5, 7], tiny.options(CONFIG, sampling))[:3]
    assert id_P.tolist() == [30, 33, 42, 45] and length_P.tolist() == [1, 1, 2, 2]
    assert tokens_PS[:, :2].tolist() == [[1, 0], [1, 0], [2, 3], [2, 3]]


def test_an_experiment_may_have_fewer_prompts_than_devices():
    few = replace(experiment, sampling=replace(experiment.sampling, prompts=4), warm_start=None)
    few = replace(few, schedule=replace(few.schedule, minibatches=1))
    assert validate(few, 8) == []
    (said,) = validate(replace(few, sampling=replace(few.sampling, prompts=3)), 8)
    assert said == (
        "sampling.prompts: wanted rows in multiples of the 8 devices that rows are sharded over, "
        "got 3 prompts x 4 samples = 12"
    )
    cache = "cache of the prompts, once per prompt"
    alone, spread = (plan(few, devices).sampler[cache] for devices in (1, 8))
    assert spread == alone // 4, "one prompt on each device, each on two"
