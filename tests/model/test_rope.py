"""Frequencies and attention factor of YaRN at published sizes, against the numpy reference and transformers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import reference_model
from api import qwen3_0_6b

from gspax.config import LongRope, Yarn, layers_of
from gspax.model.layers import attention_factor, rotary_frequencies

QWEN3 = qwen3_0_6b  # theta 1e6, 64 pairs
YARNS = {
    "as Qwen3 documents it": Yarn(factor=4.0, original_max_position_embeddings=32768),
    "without steps": Yarn(factor=4.0, original_max_position_embeddings=32768, truncate=False),
    "other bounds": Yarn(factor=8.0, original_max_position_embeddings=4096, beta_fast=8.0, beta_slow=2.0),
    "its own factor": Yarn(factor=4.0, original_max_position_embeddings=32768, attention_factor=0.8),
    "mscale": Yarn(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.5),
    "one mscale is none": Yarn(factor=4.0, original_max_position_embeddings=4096, mscale=2.0),
    "an empty ramp": Yarn(factor=4.0, original_max_position_embeddings=4),
    "a reversed ramp": Yarn(factor=4.0, original_max_position_embeddings=2),
    "the whole ramp": Yarn(factor=2.0, original_max_position_embeddings=2**31 - 1),
}


def rope(config):
    """The embedding of all layers."""
    return layers_of(config)[0].mixer.rope


@pytest.mark.parametrize("theta", [1e4, 1e6, 5e6])
def test_frequencies_without_yarn(theta):
    frequency, factor = rotary_frequencies(rope(replace(QWEN3, rope_theta=theta)))
    np.testing.assert_allclose(frequency, [theta ** (-i / 64) for i in range(64)], rtol=1e-6)
    assert frequency.dtype == np.float32 and factor == 1


@pytest.mark.parametrize("name", [name for name in YARNS if "ramp" not in name])
def test_yarn_equals_the_reference(name):
    config = replace(QWEN3, rope_scaling=YARNS[name])
    frequency, factor = rotary_frequencies(rope(config))
    share = np.array([reference_model.yarn_share(i, 64, config) for i in range(64)])
    plain, _ = rotary_frequencies(rope(QWEN3))
    assert 0 < share.mean() < 1
    np.testing.assert_allclose(frequency, plain * (share + (1 - share) / config.rope_scaling.factor), rtol=1e-6)
    assert factor == pytest.approx(reference_model.yarn_factor(config.rope_scaling))


@pytest.mark.parametrize("name", YARNS)
def test_yarn_equals_transformers(name):
    pytest.importorskip("torch", reason="torch is not installed")
    from api import to_json
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = replace(QWEN3, rope_scaling=YARNS[name])
    theirs, their_factor = ROPE_INIT_FUNCTIONS["yarn"](Qwen3Config(**to_json(config)))
    frequency, factor = rotary_frequencies(rope(config))
    np.testing.assert_allclose(frequency, theirs.numpy(), rtol=1e-6)
    assert factor == pytest.approx(their_factor, rel=1e-9)


def test_attention_factors_by_hand():
    assert attention_factor(YARNS["as Qwen3 documents it"]) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(YARNS["its own factor"]) == 0.8
    ratio = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert attention_factor(YARNS["mscale"]) == pytest.approx(ratio)


def test_frequencies_by_hand():
    """Theta 1e6 and 128 dimensions: pairs 23.6 and 39.6 make 32 turns and one within 32768, a ramp from 23 to 40."""
    frequency, _ = rotary_frequencies(rope(replace(QWEN3, rope_scaling=YARNS["as Qwen3 documents it"])))
    plain, _ = rotary_frequencies(rope(QWEN3))
    np.testing.assert_array_equal(frequency[:24], plain[:24])
    np.testing.assert_allclose(frequency[40:], plain[40:] / 4, rtol=1e-6)
    assert frequency[30] / plain[30] == pytest.approx(1 - 7 / 17 * 3 / 4, rel=1e-6)


@pytest.mark.parametrize("changes", [{}, {"factor": 3.0}, {"attention_factor": 1.25}, {"max_position_embeddings": 64}])
@pytest.mark.parametrize("longest", [64, 65])
def test_longrope_equals_transformers(longest, changes):
    """With sequences of at most 64 tokens, and with longer ones."""
    pytest.importorskip("torch", reason="torch is not installed")
    from api import to_json
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    short, long = ([each + n / 8 for n in range(64)] for each in (1.0, 3.0))
    sizes = {"original_max_position_embeddings": 64, "max_position_embeddings": 256} | changes
    scaling = LongRope(short_factor=tuple(short), long_factor=tuple(long), **sizes)
    config = replace(QWEN3, qk_norm=False, num_attention_heads=8, rope_scaling=scaling, max_position_embeddings=64)
    theirs = Phi3Config(**to_json(config) | {"pad_token_id": None})
    expected, their_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=longest)
    frequency, factor = rotary_frequencies(rope(config), longest)
    np.testing.assert_allclose(frequency, expected.numpy(), rtol=1e-6)
    assert factor == pytest.approx(their_factor, rel=1e-9)
