"""The gated delta net against transformers' layers: rows, gradients, prompts, steps, blocks, and their tensors."""

import importlib
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import names, presets, tensors
from flax import nnx

from gspax.config import GatedDelta
from gspax.hf import rows
from gspax.model.delta_net import GatedDeltaNet

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip("transformers")

SIZES, EMBED = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=12), 16
FAMILIES = {  # by model_type: the rows of its layers, and its class in transformers
    "qwen3_5_moe_text": (rows.QWEN3_5_LAYER, "qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"),
    "qwen3_5_text": (rows.QWEN3_5_LAYER, "qwen3_5.modeling_qwen3_5", "Qwen3_5GatedDeltaNet"),
    "qwen3_next": (rows.QWEN3_NEXT_LAYER, "qwen3_next.modeling_qwen3_next", "Qwen3NextGatedDeltaNet"),
}
EPS = 1e-6


@cache
def theirs(family):
    """A random layer of transformers."""
    config = transformers.AutoConfig.for_model(
        family,
        **{"hidden_size": EMBED, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"linear_num_key_heads": SIZES.key_heads, "linear_num_value_heads": SIZES.value_heads},
        **{"linear_key_head_dim": SIZES.key_dim, "linear_value_head_dim": SIZES.value_dim, "rms_norm_eps": EPS},
    )
    _, module, name = FAMILIES[family]
    torch.manual_seed(0)
    layer = getattr(importlib.import_module(f"transformers.models.{module}"), name)(config, 0).eval()
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if key != "A_log":
                parameter.copy_(0.5 * torch.randn_like(parameter) + (key == "norm.weight"))
    return layer


def random(*shape):
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))


def split():
    return nnx.split(
        GatedDeltaNet(SIZES, replace(presets.tiny_moe, hidden_size=EMBED, rms_norm_eps=EPS), rngs=nnx.Rngs(0))
    )


def shapes(family):
    """The shape of each parameter by its row of the table."""
    leaves = nnx.to_pure_dict(split()[1])
    mixer = [row for row in FAMILIES[family][0] if row.ours.startswith("mixer/")]
    assert {row.ours for row in mixer} == {f"mixer/{name}" for name in leaves}
    return {row: leaves[row.ours.removeprefix("mixer/")].shape for row in mixer}


def published(family):
    return {f"linear_attn.{key}": value.detach().numpy() for key, value in theirs(family).named_parameters()}


def write(folder, family):
    """The layer's tensors in a file, as they are published."""
    tensors_of = published(family)
    stored = tensors.create(folder / "layer.safetensors", {k: v.shape for k, v in tensors_of.items()}, np.dtype("f4"))
    for name, tensor in tensors_of.items():
        tensors.write(stored[name], tensor)
    return stored


def read(folder, family):
    """The parameters of the layer of transformers, through the table of names."""
    stored, wanted = write(folder, family), shapes(family)
    return {
        row.ours.removeprefix("mixer/"): jnp.asarray(
            names.to_ours(row, tensors.read_part(stored[row.published], part), wanted[row])
        )
        for row, part in names._parts(wanted).items()
    }


def run(params, *args):
    graph, state = split()
    state = nnx.clone(state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state).run(args[0], tiny.one_device(), *args[1:])


jitted = jax.jit(run)


def close(ours, theirs, tolerance=1e-5):
    wanted = theirs.detach().numpy() if hasattr(theirs, "detach") else np.asarray(theirs)
    np.testing.assert_allclose(ours, wanted, atol=tolerance * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_of_rows_are_those_of_transformers(family, tmp_path):
    params, x = read(tmp_path, family), random(2, 90, EMBED).requires_grad_()
    y = theirs(family)(x)
    probe = torch.flip(x, (1,)).detach()
    (y * probe).sum().backward()
    segment_BT = jnp.ones((2, 90), jnp.int32)

    def value(x):
        return (jitted(params, x, segment_BT)[0] * probe.numpy()).sum()

    # the norm amplifies the rounding of a token whose output is nearly 0
    close(jitted(params, x.detach().numpy(), segment_BT)[0], y, 5e-5)
    close(jax.grad(value)(jnp.asarray(x.detach().numpy())), x.grad, 1e-4)
    assert np.abs(y.detach().numpy()).max() > 0.1


def test_prompts_steps_and_blocks_are_the_row_of_transformers(tmp_path):
    """Padded prompts, then steps of all rows, one of which waits, then blocks of different lengths, then steps."""
    params, x = read(tmp_path, "qwen3_5_text"), random(3, 60, EMBED)
    whole, inputs = theirs("qwen3_5_text")(x).detach().numpy(), x.numpy()
    done = np.array([20, 1, 7])

    def take(counts, size):
        """The next tokens of each row, padded, and their segments."""
        at = np.minimum(done[:, None] + np.arange(size)[None], 59)
        return inputs[np.arange(3)[:, None], at], jnp.asarray(np.arange(size)[None] < counts[:, None], jnp.int32)

    def compare(y, counts, before):
        for row in range(3):
            new = slice(before[row], before[row] + counts[row])
            np.testing.assert_allclose(y[row, : counts[row]], whole[row, new], atol=5e-6 * np.abs(whole).max(), rtol=0)

    first = np.where(np.arange(24)[None, :, None] < done[:, None, None], inputs[:, :24], 9.0)
    y, state = jitted(params, first, jnp.asarray(np.arange(24)[None] < done[:, None], jnp.int32))
    compare(y, done, np.zeros(3, int))
    for counts in (*[np.array([1, 1, 1])] * 3, np.array([1, 0, 1]), np.array([9, 0, 2]), *[np.array([1, 1, 1])] * 3):
        x_BTD, segment_BT = take(counts, int(counts.max()))
        y, after = jitted(params, x_BTD, segment_BT, state)
        compare(y, counts, done)
        for old, new in zip(state, after, strict=True):
            for row in np.flatnonzero(counts == 0):
                assert np.asarray(old[row]).tobytes() == np.asarray(new[row]).tobytes()
        done, state = done + counts, after


def test_a_row_from_an_empty_state_is_a_row_without_one(tmp_path):
    params, x = read(tmp_path, "qwen3_next"), jax.random.normal(jax.random.key(0), (2, 9, EMBED))
    segment_BT = jnp.ones((2, 9), jnp.int32)
    without, state = jitted(params, x, segment_BT)
    empty = jax.tree.map(jnp.zeros_like, state)
    np.testing.assert_array_equal(jitted(params, x, segment_BT, empty)[0], without)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_tensors_are_written_as_they_were_read(family, tmp_path):
    params, wanted = read(tmp_path, family), shapes(family)
    expected = published(family)
    parts = names._parts(wanted)
    layout = {row.published: names.published_shape(row, wanted[row], part) for row, part in parts.items()}
    assert layout == {name: tensor.shape for name, tensor in expected.items()}
    stored = tensors.create(tmp_path / "again.safetensors", layout, np.dtype("f4"))
    for row, part in parts.items():
        array = np.asarray(params[row.ours.removeprefix("mixer/")])
        tensors.write(stored[row.published], names.to_published(row, array), part)
    for name, tensor in expected.items():
        assert tensors.read(stored[name]).tobytes() == tensor.tobytes(), name
