"""Versions in a folder: what vLLM's workers read is what was written."""

import json
from dataclasses import replace

import fake_vllm
import jax
import numpy as np
import pytest
import tiny
from api import Writer, parameters, tensors, weights
from published import random_params
from small_experiment import experiment

from gspax.config import Multipliers, StateSpace, layers_of

worker = fake_vllm.worker
BFLOAT16 = replace(experiment.model, dtype="bfloat16")
# Tensors of several parameters in turn (kv_b_proj), and float32 tensors in a model of bfloat16 (the router's bias)
JOINED = replace(tiny.CONFIGS["latent attention"], dtype="bfloat16")


def train(params, seed, share=0.02):
    """The parameters, on the host, with this share of them changed."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.where(rng.random(leaf.shape) < share, leaf * 1.1 + 0.01, leaf), params)


def read(path):
    """The tensors that our worker extension reads, by name, after it has compared their checksums."""
    assert worker.find_damage(path) == ""
    return {each.name: each.bits for each in worker.read_tensors(path)}


def assert_equal(path, params, model, folder):
    """A version is, bit for bit, what an export of the parameters is."""
    folder.mkdir()
    leaves = parameters.named_leaves(jax.device_get(params))
    parameters.write_checkpoint(folder, model, leaves.__getitem__, dtype=model.dtype)
    wanted, got = tensors.find(folder), read(path)
    assert got.keys() == wanted.keys()
    for name, stored in wanted.items():
        np.testing.assert_array_equal(got[name], tensors.read(stored).reshape(-1).view(got[name].dtype), name)


@pytest.mark.parametrize("model", [BFLOAT16, JOINED], ids=["experts", "joined tensors"])
def test_a_version_is_an_export_of_the_parameters(model, tmp_path):
    """Also one that is written again, as by a run that has returned to an earlier step."""
    writer, params = Writer(tmp_path / "versions", model), random_params(model)
    first = writer.write(0, params)
    assert first.bytes == sum(bits.nbytes for bits in read(first.path).values())
    changed = train(params, 1)
    written = [writer.write(version, changed) for version in (1, 0)]
    assert [one.path.name for one in written] == ["weights_v000001", "weights_v000000"]
    assert written[0].digest == written[1].digest != first.digest, "the digest is of the weights alone"
    for one in written:
        assert_equal(one.path, changed, model, tmp_path / f"export {one.version}")
    weights.remove_others(written[0].path)
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["weights_v000001"]


# What vLLM's loaders do with the names of a checkpoint (`Qwen3NextModel.load_weights` and `Qwen3_5Model.load_weights`,
# `QwenGatedDeltaNetAttention`): the parameter that a tensor is a part of, and which part.
STACKED = {
    ".q_proj.": (".qkv_proj.", "q"),
    ".k_proj.": (".qkv_proj.", "k"),
    ".v_proj.": (".qkv_proj.", "v"),
    ".gate_proj.": (".gate_up_proj.", "gate"),
    ".up_proj.": (".gate_up_proj.", "up"),
    ".in_proj_qkv.": (".in_proj_qkvz.", "qkv"),
    ".in_proj_z.": (".in_proj_qkvz.", "z"),
    ".in_proj_b.": (".in_proj_ba.", "b"),
    ".in_proj_a.": (".in_proj_ba.", "a"),
}


def of_vllm(config, *, by_key_head):
    """(parameter, part) -> shape in vLLM's module on one device; `by_key_head`: Qwen3-Next's joined projections."""
    D, V, N, K, H = config.hidden_size, config.vocab_size, config.num_attention_heads, config.num_key_value_heads, 8
    delta, F = config.delta, config.intermediate_size
    keys, heads = delta.key_heads * delta.key_dim, delta.value_heads
    values = heads * delta.value_dim
    found = {("model.embed_tokens.weight", ""): (V, D), ("model.norm.weight", ""): (D,), ("lm_head.weight", ""): (V, D)}
    for number, layer in enumerate(layers_of(config)):
        at = f"model.layers.{number}."
        own = {("input_layernorm.weight", ""): (D,), ("post_attention_layernorm.weight", ""): (D,)}
        if layer.mixer == delta:
            joined = {"in_proj_qkvz": {"qkv": 2 * keys + values, "z": values}, "in_proj_ba": {"b": heads, "a": heads}}
            for name, parts in joined.items():
                rows = {"": sum(parts.values())} if by_key_head else parts
                own |= {(f"linear_attn.{name}.weight", part): (count, D) for part, count in rows.items()}
            own |= {
                ("linear_attn.conv1d.weight", ""): (2 * keys + values, 1, delta.taps),
                ("linear_attn.A_log", ""): (heads,),
                ("linear_attn.dt_bias", ""): (heads,),
                ("linear_attn.norm.weight", ""): (delta.value_dim,),
                ("linear_attn.out_proj.weight", ""): (D, values),
            }
        else:
            rows = {"q": 2 * N * H, "k": K * H, "v": K * H}  # each query beside its gate
            own |= {("self_attn.qkv_proj.weight", part): (count, D) for part, count in rows.items()}
            own |= {("self_attn.o_proj.weight", ""): (D, N * H)}
            own |= {(f"self_attn.{name}.weight", ""): (H,) for name in ("q_norm", "k_norm")}
        networks = {"mlp.": F}
        if layer.sparse:
            own |= {("mlp.gate.weight", ""): (config.num_experts, D), ("mlp.shared_expert_gate.weight", ""): (1, D)}
            networks = {f"mlp.experts.{n}.": config.moe_intermediate_size for n in range(config.num_experts)}
            networks["mlp.shared_expert."] = config.shared_expert_intermediate_size
        for name, width in networks.items():
            own |= {(f"{name}gate_up_proj.weight", part): (width, D) for part in ("gate", "up")}
            own |= {(f"{name}down_proj.weight", ""): (D, width)}
        found |= {(at + name, part): shape for (name, part), shape in own.items()}
    return found


DENSE_DELTA = replace(
    tiny.DELTA, num_experts=0, mlp_only_layers=(), shared_expert_intermediate_size=0, model_type="qwen3_5"
)


@pytest.mark.parametrize(
    ("model", "by_key_head", "architecture"),
    [(tiny.DELTA, True, "Qwen3NextForCausalLM"), (DENSE_DELTA, False, "Qwen3_5ForCausalLM")],
    ids=["qwen3_next", "qwen3_5, of a checkpoint with a vision tower"],
)
def test_a_version_of_delta_nets_fills_the_parameters_of_vllm(model, by_key_head, architecture, tmp_path):
    path = Writer(tmp_path, model).write(0, random_params(model)).path
    assert json.loads((path / "config.json").read_text())["architectures"] == [architecture]
    loaded = {}
    for tensor in worker.read_tensors(path):
        name, part = tensor.name, ""
        for theirs, (fused, its_part) in STACKED.items():
            if theirs in name:
                name, part = name.replace(theirs, fused), its_part
        loaded[name, part] = tuple(tensor.shape)
    assert loaded == of_vllm(model, by_key_head=by_key_head)


def test_a_version_of_state_spaces_fills_the_parameters_of_vllm(tmp_path):
    """Those of `MambaMixer2`, whose loaders split the joined tensors: gate, input, B, C, and step; input, B, and C."""
    model = replace(
        tiny.CONFIGS["dense"],
        qk_norm=False,
        multipliers=Multipliers(attention=0.2),
        mixer=StateSpace(groups=2, heads=4, state_dim=6, head_dim=8),
        mixer_layers=(0, 2),
    )
    path, D, width, convolved = (
        Writer(tmp_path, model).write(0, random_params(model)).path,
        16,
        4 * 8,
        4 * 8 + 2 * 2 * 6,
    )
    content = json.loads((path / "config.json").read_text())
    assert content["architectures"] == ["GraniteMoeHybridForCausalLM"]
    assert content["layer_types"] == ["mamba", "attention", "mamba"]
    shapes = {"in_proj.weight": (width + convolved + 4, D), "conv1d.weight": (convolved, 1, 4)}
    shapes |= {"conv1d.bias": (convolved,), "A_log": (4,), "D": (4,), "dt_bias": (4,)}
    shapes |= {"norm.weight": (width,), "out_proj.weight": (D, width)}
    loaded = {each.name: tuple(each.shape) for each in worker.read_tensors(path) if ".mamba." in each.name}
    assert loaded == {f"model.layers.{n}.mamba.{name}": shape for n in (0, 2) for name, shape in shapes.items()}


def test_a_damaged_version_is_refused(tmp_path):
    written = Writer(tmp_path, BFLOAT16).write(0, random_params(BFLOAT16))
    file = written.path / "model.safetensors"
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for at in range(begin, len(whole), len(whole) // 20):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert "wanted the checksum" in worker.find_damage(written.path)
    file.write_bytes(whole)
    assert worker.find_damage(written.path) == ""


def test_a_write_that_is_interrupted_leaves_no_version(tmp_path, monkeypatch):
    writer, params = Writer(tmp_path, BFLOAT16), random_params(BFLOAT16)
    writer.write(0, params)

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tensors, "write", killed)
        writer.write(1, train(params, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["weights_v000000"]
    changed = train(params, 2)
    assert_equal(writer.write(1, changed).path, changed, BFLOAT16, tmp_path / "export")
