"""Reading and writing adapters in PEFT's layout, restated here; test_peft_torch.py exchanges them with PEFT itself."""

import json
import math
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
from api import (
    abstract_adapters,
    adapter_count,
    adapters,
    dense,
    load_adapters,
    make_mesh,
    named_leaves,
    named_shapes,
    peft,
    read_adapters,
    transformer,
    write_adapters,
    write_checkpoint,
)
from published import load, published, random_params
from safetensors.numpy import load_file, save_file

from gspax.config import Lora, Mesh, Multipliers, Router, StateSpace, adapted_weights
from gspax.errors import UserError

CONFIG = replace(tiny.MOE, num_hidden_layers=2, mlp_only_layers=(0,))  # a dense layer and one with experts
LORA = Lora(rank=3, alpha=6.0)
SETTINGS = {  # keys that PEFT 0.18 writes and gspax does not use
    **{"alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None},
    **{
        "base_model_name_or_path": "Qwen/Qwen3-0.6B",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
    },
    **{"eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True},
    **{"init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None},
    **{"loftq_config": {}, "lora_alpha": 6, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None},
    **{"megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.18.0"},
    **{"qalora_group_size": 16, "r": 3, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "k_proj"]},
    **{"target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False},
    **{"use_qalora": False, "use_rslora": False},
}


def modules(lora=LORA):
    """The adapted weights, by their published names."""
    plain = published(CONFIG, random_params(CONFIG))
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    names |= {name: f"{name}_proj" for name in ("gate", "up", "down")}
    wanted = {names[name] for adapted in adapted_weights(lora).values() for name in adapted}
    return {name: x for name, x in plain.items() if name.split(".")[-2] in wanted}


def random_adapter(lora=LORA):
    """name -> tensor, in PEFT's layout."""
    rng, found = np.random.default_rng(0), {}
    for name, weight in modules(lora).items():
        module = "base_model.model." + name.removesuffix(".weight")
        found[f"{module}.lora_A.weight"] = rng.standard_normal((lora.rank, weight.shape[1]), np.float32)
        found[f"{module}.lora_B.weight"] = rng.standard_normal((weight.shape[0], lora.rank), np.float32)
    return found


def save(folder, tensors, **settings):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


def shapes(lora=LORA):
    return named_shapes(adapters.abstract(CONFIG, lora))


@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        replace(LORA, mlp=False),
        replace(LORA, attention=False),
        replace(LORA, attention=("query", "value"), mlp=False),  # PEFT's default
        replace(LORA, attention=("key",), mlp=("gate", "down")),
    ],
    ids=["all", "attention", "mlp", "queries and values", "some of both"],
)
def test_an_adapter_adds_peft_s_update_to_each_module(lora, tmp_path):
    tensors = random_adapter(lora)
    found = peft(save(tmp_path / "adapter", tensors))
    assert found == replace(lora, checkpoint=str(tmp_path / "adapter"))
    mesh = make_mesh(Mesh(), jax.devices()[:8])
    wanted = abstract_adapters(CONFIG, found, mesh)
    factors = load_adapters(CONFIG, found, wanted)
    assert jax.tree.map(lambda x: x.sharding, factors) == jax.tree.map(lambda x: x.sharding, wanted)
    base = random_params(CONFIG)
    merged = published(CONFIG, jax.device_get(dense(adapters.attach_adapters(base, jax.device_get(factors), found))))
    for name, weight in published(CONFIG, base).items():
        module = "base_model.model." + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in tensors:
            change = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
            weight = weight + 6.0 / 3 * change
        np.testing.assert_allclose(merged[name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_written_adapter_is_the_one_that_was_read(dtype, tmp_path):
    tensors = random_adapter()
    lora = peft(save(tmp_path / "theirs", tensors))
    factors = read_adapters(tmp_path / "theirs", CONFIG, lora, shapes())
    (tmp_path / "ours").mkdir()
    write_adapters(tmp_path / "ours", CONFIG, lora, shapes(), factors.__getitem__, dtype=dtype)
    again = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor.astype(again[name].dtype))
        assert again[name].dtype == dtype
    raw = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert raw.keys() <= SETTINGS.keys()
    assert {key: raw[key] for key in ("peft_type", "r", "lora_alpha", "use_rslora", "bias")} == {
        "peft_type": "LORA",
        "r": 3,
        "lora_alpha": 6,
        "use_rslora": False,
        "bias": "none",
    }
    assert replace(peft(tmp_path / "ours"), checkpoint=lora.checkpoint) == lora


def test_rank_stabilised_scaling(tmp_path):
    assert peft(save(tmp_path / "a", random_adapter(), use_rslora=True)).alpha == pytest.approx(6 * 3**0.5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"peft_type": "LOHA"}, 'peft_type: wanted "LORA", got "LOHA"'),
        ({"use_dora": True}, "use_dora: wanted null, false or nothing in it, got true"),
        (
            {"rank_pattern": {"q_proj": 8}},
            'rank_pattern: wanted nothing in it, since all modules share one rank and alpha, got {"q_proj": 8}',
        ),
        ({"alpha_pattern": {r".*\.gate_up_proj": 12}}, "alpha_pattern: wanted nothing in it, since"),
        (
            {"rank_pattern": {"in_proj_qkv": 9}, "alpha_pattern": {"in_proj_qkv": 6}},
            'alpha_pattern: wanted only {"in_proj_q',
        ),
        ({"use_rslora": True, "rank_pattern": {r".*\.gate_up_proj": 6}}, "rank_pattern: wanted nothing in it, since"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: wanted null"),
        ({"bias": "all"}, 'bias: wanted null or "none", got "all"'),
        ({"task_type": "SEQ_CLS"}, 'task_type: wanted null or "CAUSAL_LM", got "SEQ_CLS"'),
        ({"r": 0}, "r: wanted an integer above 0, got 0"),
        ({"r": 2.5}, "r: wanted an integer above 0, got 2.5"),
        ({"lora_alpha": None}, "lora_alpha: wanted a number above 0, got null"),
        ({"something_new": 1}, "something_new: wanted null, false or nothing in it, got 1"),
        ({"lora_alpha": float("inf")}, "lora_alpha: wanted a number above 0, got Infinity"),
        *(
            (
                {"init_lora_weights": each},
                'init_lora_weights: wanted null or true or false or "gaussian" or "orthogonal"',
            )
            for each in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "eva", 1)
        ),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config: wanted null or {}, got"),
    ],
)
def test_other_kinds_of_adapters_are_rejected_by_name(settings, sentence, tmp_path):
    with pytest.raises(UserError) as error:
        peft(save(tmp_path / "adapter", random_adapter(), **settings))
    assert str(error.value).startswith(f"{tmp_path / 'adapter' / 'adapter_config.json'}: {sentence}")


@pytest.mark.parametrize("init", [None, True, False, "gaussian", "orthogonal"])
def test_what_leaves_the_base_as_it_is_may_have_started_an_adapter(init, tmp_path):
    assert peft(save(tmp_path / "adapter", random_adapter(), init_lora_weights=init)).rank == 3


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        ("model.layers.0.mlp.gate", r"wanted modules of q_proj, .*, in_proj_ba, got gate$"),
        ("model.layers.1.mlp.experts", r"wanted factors of each expert, .* together \(experts\), as it writes them"),
        ("model.layers.1.mlp.experts.base_layer", r"wanted factors of each expert, .*, as it writes them with trans"),
    ],
)
def test_modules_that_no_gspax_model_has_are_refused_when_the_experiment_is_read(module, sentence, tmp_path):
    other = {f"base_model.model.{module}.lora_A.weight": np.ones((3, 16), np.float32)}
    with pytest.raises(UserError, match=sentence):
        peft(save(tmp_path / "adapter", random_adapter() | other))


MIXTRAL = replace(tiny.MOE, qk_norm=False)
SHARED = replace(tiny.CONFIGS["a shared expert"], mlp_only_layers=(0,))
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DENSE = ["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("config", "lora", "modules", "parameters"),
    [
        (tiny.CONFIGS["dense"], LORA, EVERY, None),
        (tiny.CONFIGS["dense"], replace(LORA, attention=("value", "query"), mlp=False), ["q_proj", "v_proj"], None),
        (tiny.MOE, LORA, EVERY, None),
        (MIXTRAL, LORA, [*EVERY[:4], "w1", "w3", "w2"], None),
        (MIXTRAL, replace(LORA, attention=False, mlp=("down",)), ["w2"], None),
        (CONFIG, LORA, EVERY[:4], FUSED + DENSE),
        (CONFIG, replace(LORA, attention=False, mlp=("down",)), [], [FUSED[1], DENSE[0]]),
        (CONFIG, replace(LORA, mlp=False), EVERY[:4], None),
        (tiny.CONFIGS["a shared expert"], LORA, EVERY[:4], FUSED),
        (SHARED, LORA, EVERY[:4], FUSED + DENSE),
    ],
)
def test_peft_is_told_the_modules_or_the_parameters_that_it_has(config, lora, modules, parameters, tmp_path):
    """PEFT itself: test_peft_torch.py."""
    shapes = named_shapes(adapters.abstract(config, lora))
    write_adapters(tmp_path, config, lora, shapes, lambda path: np.zeros(shapes[path], np.float32))
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (raw["target_modules"], raw.get("target_parameters")) == (modules, parameters)
    joined = {r".*\.gate_up_proj": 6}, {r".*\.gate_up_proj": 12.0}
    of_gates = parameters is not None and FUSED[0] in parameters
    assert (raw.get("rank_pattern"), raw.get("alpha_pattern")) == (joined if of_gates else (None, None))
    again = peft(tmp_path)
    assert adapted_weights(again) == adapted_weights(lora) and (again.rank, again.alpha) == (lora.rank, lora.alpha)


@pytest.mark.parametrize("mlp", [("gate",), ("gate", "up"), ("up", "down")])
def test_some_of_the_factors_of_experts_are_not_written_because_peft_drops_them(mlp, tmp_path):
    lora = replace(LORA, mlp=mlp)
    shapes = named_shapes(adapters.abstract(tiny.MOE, lora))
    with pytest.raises(UserError, match=r"lora.mlp: wanted all of gate, up, and down, or down alone, .*, got \('"):
        write_adapters(tmp_path, tiny.MOE, lora, shapes, lambda path: np.zeros(shapes[path], np.float32))
    assert not list(tmp_path.iterdir())


NEMOTRON = replace(
    replace(tiny.CONFIGS["dense"], qk_norm=False, mixer=StateSpace(groups=1, heads=2, state_dim=4, head_dim=4)),
    **{"num_hidden_layers": 2, "nope_layers": (0, 1), "no_mlp_layers": (0,), "no_mixer_layers": (1,)},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    **{"shared_expert_gate": False, "activation": "relu2", "model_type": "nemotron_h"},
    router=Router(scoring="sigmoid", correction_bias=True),
)


def test_an_adapter_of_experts_without_gates_is_refused_and_one_of_attention_is_written(tmp_path):
    def write(lora):
        shapes = named_shapes(adapters.abstract(NEMOTRON, lora))
        write_adapters(tmp_path, NEMOTRON, lora, shapes, lambda path: np.zeros(shapes[path], np.float32))

    with pytest.raises(
        UserError, match=r"^lora.mlp: wanted false in an adapter of experts without gates, .*, got True$"
    ):
        write(LORA)
    write(replace(LORA, mlp=False))
    assert "base_model.model.backbone.layers.0.mixer.q_proj.lora_A.weight" in load_file(
        tmp_path / "adapter_model.safetensors"
    )


PHI = replace(tiny.CONFIGS["dense"], qk_norm=False, model_type="phi3")
LATENT = replace(tiny.CONFIGS["latent attention"], model_type="deepseek_v3")
NETS = replace(LORA, delta=True, mlp=False)
GRANITE = replace(
    tiny.CONFIGS["dense"],
    qk_norm=False,
    mixer=StateSpace(groups=2, heads=4, state_dim=6, head_dim=8),
    mixer_layers=(0,),
    multipliers=Multipliers(attention=0.2),
)
JOINED = {  # by model: the adapter, and the multiples of the rank
    "phi3": (PHI, LORA, {"qkv_proj": 3, "gate_up_proj": 2}),
    "granite": (GRANITE, LORA, {"input_linear": 2}),
    "latents": (LATENT, replace(LORA, mlp=False), {"kv_b_proj": 2}),
    "qwen3_next": (replace(tiny.DELTA, model_type="qwen3_next"), NETS, {"in_proj_qkvz": 4, "in_proj_ba": 2}),
    "qwen3_5": (replace(tiny.DELTA, mlp_only_layers=(), model_type="qwen3_5_moe_text"), NETS, {"in_proj_qkv": 3}),
}


@pytest.mark.parametrize("name", JOINED)
def test_weights_of_one_module_have_its_rank_together(name, tmp_path):
    """PEFT's product of the factors is that of each weight, in the rows that the weight has in the module."""
    config, lora, times = JOINED[name]
    shapes, rng = named_shapes(adapters.abstract(config, lora)), np.random.default_rng(0)
    assert sum(map(math.prod, shapes.values())) == adapter_count(config, lora)
    factors = {path: rng.standard_normal(shape, np.float32) for path, shape in shapes.items()}
    write_adapters(tmp_path, config, lora, shapes, factors.__getitem__)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert raw["rank_pattern"] == {module: n * lora.rank for module, n in times.items()}
    assert raw["alpha_pattern"] == {module: n * lora.alpha for module, n in times.items()}
    assert replace(peft(tmp_path), checkpoint="") == lora
    again = read_adapters(tmp_path, config, lora, shapes)
    assert all(again[path].tobytes() == factor.tobytes() for path, factor in factors.items())
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), transformer.abstract_params(config))
    tree = jax.tree.unflatten(jax.tree.structure(adapters.abstract(config, lora)), list(factors.values()))
    merged = named_leaves(dense(adapters.attach_adapters(zeros, tree, lora)))
    (base := tmp_path / "merged").mkdir()
    write_checkpoint(base, config, merged.__getitem__, dtype="float32")
    tensors, weights = load(tmp_path), load(base)
    for module in {key.split(".lora_")[0] for key in tensors}:
        a, b = (tensors[f"{module}.lora_{letter}.weight"] for letter in "AB")
        weight = weights[module.removeprefix("base_model.model.") + ".weight"]
        np.testing.assert_allclose(lora.alpha / lora.rank * b @ a, weight, rtol=1e-4, atol=1e-4)
        assert len(a) == lora.rank * times.get(module.split(".")[-1], 1)
    some = next(key for key in tensors if key.split(".")[-3] in times and "lora_B" in key)
    tensors[some][0] = 1.0
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"{some}: wanted zeros where the rows of one weight meet the columns of"):
        read_adapters(tmp_path, config, lora, shapes)


def test_some_of_the_weights_of_a_module_are_not_written(tmp_path):
    lora = replace(LORA, attention=("query",))
    shapes = named_shapes(adapters.abstract(PHI, lora))
    with pytest.raises(UserError, match=r"^lora: wanted all of query, key, value or none, which are PEFT's qkv_proj$"):
        write_adapters(tmp_path, PHI, lora, shapes, lambda path: np.zeros(shapes[path], np.float32))
    assert not list(tmp_path.iterdir())


def test_tensors_that_do_not_fit_are_rejected_by_name(tmp_path):
    tensors = random_adapter()
    first = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"

    def refuses(tensors, sentence):
        folder = save(tmp_path / "adapter", tensors)
        with pytest.raises(UserError, match=sentence):
            read_adapters(folder, CONFIG, LORA, shapes())

    refuses({name: x for name, x in tensors.items() if name != first}, f"tensor {first} is missing")
    refuses(tensors | {first: tensors[first].T.copy()}, rf"{first}: wanted the shape \[16, 3\], got \[3, 16\]")
    refuses(
        tensors | {first: tensors[first] * np.float32(np.nan)}, f"{first}: wanted finite numbers, got NaN or infinity"
    )
    router = "base_model.model.model.layers.1.mlp.gate.lora_A.weight"
    refuses(tensors | {router: np.ones((3, 16), np.float32)}, f"{router} is not part of the model")


def test_a_folder_without_an_adapter_is_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"nowhere: wanted the folder of an adapter .* working directory is "):
        peft("nowhere")
    save(tmp_path / "a", random_adapter())
    shutil.move(tmp_path / "a" / "adapter_model.safetensors", tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model\.bin is a pickle, which gspax does not read"):
        peft("a")
