"""Logits of random tiny models, as computed by transformers 5.23 (../shared/data/golden_qwen3_tiny)."""

from pathlib import Path

import jax
import numpy as np
import pytest
from api import abstract_params, read_config, read_params, single_device_mesh, transformer

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "golden_qwen3_tiny"


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_dense"])
def test_logits_equal_transformers(name):
    if not GOLDEN.is_dir():
        pytest.skip("../shared/data/golden_qwen3_tiny is not available")
    config = read_config(GOLDEN / name)
    params = read_params(GOLDEN / name, config, abstract_params(config, single_device_mesh()))
    golden = np.load(GOLDEN / name / "golden.npz")
    mask = golden["attention_mask"].astype(np.int32)
    tokens = golden["input_ids"].astype(np.int32)
    hidden, _ = jax.jit(transformer.apply, static_argnames=("config", "mesh"))(
        params, config, tokens, mask, mesh=single_device_mesh()
    )
    gap = np.abs(np.asarray(transformer.logits(params, hidden)) - golden["logits"])
    assert gap[mask == 1].max() < 1e-4
