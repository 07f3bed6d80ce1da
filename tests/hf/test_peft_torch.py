"""Adapters are exchanged with PEFT itself in both directions: the same logits as the weights merged by gspax.

The same without PEFT: test_peft.py.
"""

import warnings
from dataclasses import replace

import families
import jax
import numpy as np
import pytest
import tiny
from api import (
    adapters,
    dense,
    named_leaves,
    named_shapes,
    peft,
    read_adapters,
    read_config,
    write_adapters,
    write_checkpoint,
)
from published import random_params

from gspax.config import Lora
from gspax.errors import UserError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip("transformers")
theirs = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")

LORA = Lora(rank=3, alpha=6.0)
SMALL = replace(tiny.MOE, num_hidden_layers=2)
MIXTRAL = replace(SMALL, qk_norm=False, intermediate_size=0)
QWEN2 = replace(tiny.CONFIGS["a shared expert"], num_hidden_layers=2)
MODELS = {
    "dense": replace(SMALL, num_experts=0),
    "qwen3_moe": SMALL,
    "a dense layer and one of experts": replace(SMALL, mlp_only_layers=(0,)),
    "every second layer of experts": replace(SMALL, num_hidden_layers=4, decoder_sparse_step=2),
    "qwen2_moe": QWEN2,
    "qwen2_moe, a layer dense": replace(QWEN2, mlp_only_layers=(1,)),
    "mixtral": MIXTRAL,
}
OTHERS = ("glm4_moe", "dots1", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "olmoe")
QV = {"target_modules": ["q_proj", "v_proj"]}


def scaled(tree, factor=0.3):
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def config_of(name, folder):
    """The configuration of one of MODELS, or of the small model of a family."""
    if name in MODELS:
        return MODELS[name]
    made = transformers.AutoConfig.for_model(name, **families.SMALL[name])
    folder.mkdir()
    made.save_pretrained(folder)
    return read_config(folder)


def logits(model):
    tokens_BT = np.random.default_rng(0).integers(0, tiny.MOE.vocab_size, (2, 9))
    with torch.no_grad():
        return model(torch.tensor(tokens_BT)).logits.numpy()


def write_base(folder, config, params):
    """The folder of a checkpoint with these parameters."""
    folder.mkdir()
    write_checkpoint(folder, config, named_leaves(params).__getitem__, dtype="float32")
    return folder


def model_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def merged_logits(folder, config, base, factors, lora):
    """transformers' logits of the weights that gspax merges."""
    return logits(model_of(write_base(folder, config, dense(adapters.attach_adapters(base, factors, lora)))))


def adapted(folder, config, lora, tmp_path):
    """PEFT's logits with the adapter of a folder, and those of gspax; and how far the adapter moves them."""
    base = scaled(random_params(config))
    shapes = named_shapes(adapters.abstract(config, lora))
    flat = read_adapters(folder, config, lora, shapes)
    factors = jax.tree.unflatten(jax.tree.structure(adapters.abstract(config, lora)), list(flat.values()))
    plain = model_of(write_base(tmp_path / "base", config, base))
    before = logits(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # keys that are missing, or that no module takes
        with_adapter = logits(theirs.PeftModel.from_pretrained(plain, folder))
    merged = merged_logits(tmp_path / "merged", config, base, factors, lora)
    return with_adapter, merged, np.abs(with_adapter - before).max()


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *((name, LORA) for name in (*MODELS, *OTHERS)),
        ("a dense layer and one of experts", replace(LORA, attention=("query", "value"), mlp=("down",))),
        ("mixtral", replace(LORA, attention=False)),
        ("qwen2_moe", replace(LORA, attention=False)),
        ("dense", replace(LORA, attention=("query", "value"), mlp=False)),
        ("deepseek_v3", LORA),
        *((name, replace(LORA, delta=True)) for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")),
        ("phi3", LORA),
        ("deepseek_v2", replace(LORA, attention=("query", "out"), mlp=False)),
    ],
)
def test_peft_gives_the_logits_of_merged_weights_with_an_adapter_of_gspax(name, lora, tmp_path):
    config, rng = config_of(name, tmp_path / "config"), np.random.default_rng(1)
    shapes = named_shapes(adapters.abstract(config, lora))
    factors = {path: 0.3 * rng.standard_normal(shape, np.float32) for path, shape in shapes.items()}
    (folder := tmp_path / "adapter").mkdir()
    write_adapters(folder, config, lora, shapes, factors.__getitem__)
    assert replace(peft(folder), checkpoint="") == lora
    with_adapter, merged, change = adapted(folder, config, lora, tmp_path)
    np.testing.assert_allclose(with_adapter, merged, atol=1e-4)
    assert change > 0.1


@pytest.mark.parametrize(
    ("name", "settings", "lora"),
    [
        ("dense", {}, replace(LORA, attention=("query", "value"), mlp=False)),  # PEFT's default modules
        ("dense", {"target_modules": "all-linear", "use_rslora": True}, replace(LORA, alpha=6 * 3**0.5)),
        ("dense", {"target_modules": ["q_proj", "down_proj"]}, replace(LORA, attention=("query",), mlp=("down",))),
        ("qwen3_moe", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}, replace(LORA, mlp=False)),
        (
            "qwen2_moe",
            {"init_lora_weights": "gaussian", **QV},
            replace(LORA, attention=("query", "value"), mlp=False),
        ),
        ("mixtral", {"lora_dropout": 0.1, **QV}, replace(LORA, attention=("query", "value"), mlp=False)),
    ],
)
def test_gspax_merges_an_adapter_of_peft_to_the_logits_of_peft(name, settings, lora, tmp_path):
    config = MODELS[name]
    write_peft(tmp_path / "adapter", config, settings)
    found = peft(tmp_path / "adapter")
    assert replace(found, checkpoint="", alpha=round(found.alpha, 6)) == replace(lora, alpha=round(lora.alpha, 6))
    with_adapter, merged, change = adapted(tmp_path / "adapter", config, found, tmp_path)
    np.testing.assert_allclose(with_adapter, merged, atol=1e-4)
    assert change > 0.1


def write_peft(folder, config, settings):
    """An adapter with random factors, of a base with random weights, written by PEFT."""
    torch.manual_seed(0)
    base = model_of(write_base(folder.parent / "first", config, scaled(random_params(config))))
    model = theirs.get_peft_model(base, theirs.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)


@pytest.mark.parametrize("init", ["pissa", "olora", "pissa_niter_4"])
def test_an_adapter_that_changed_its_base_is_refused(init, tmp_path):
    write_peft(tmp_path / "adapter", MODELS["dense"], {"init_lora_weights": init})
    with pytest.raises(UserError, match=f'init_lora_weights: wanted null or .*, got "{init}"$'):
        peft(tmp_path / "adapter")


def test_an_adapter_of_fused_experts_is_refused(tmp_path):
    write_peft(tmp_path / "adapter", SMALL, {"target_modules": "all-linear"})
    with pytest.raises(UserError, match="wanted factors of each expert"):
        peft(tmp_path / "adapter")
