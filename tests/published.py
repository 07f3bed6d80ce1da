"""Published checkpoints, written without gspax: explicit names, and files by `safetensors`."""

import json

import jax
import ml_dtypes
import numpy as np
from api import to_json, transformer
from safetensors.numpy import save_file

from gspax.config import layer_places, layers_of

BIASES = {"q_proj": "query_bias", "k_proj": "key_bias", "v_proj": "value_bias", "o_proj": "out_bias"}


def random_params(config, seed=0):
    """Parameters of a model, float32, drawn in numpy so that nothing is compiled."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), transformer.abstract_params(config))


def published(config, params, dtype=np.float32, *, fused=False):
    """name -> tensor, [out, in] as in torch."""
    found = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["norm"]["scale"]}
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = np.asarray(params["head"]).T
    D, N, K, H = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for number, (layer, sparse) in enumerate(layers(config, params)):
        attention, mlp, name = layer["attention"], layer["mlp"], f"model.layers.{number}."
        found |= {
            name + "input_layernorm.weight": layer["attention_norm"]["scale"],
            name + "post_attention_layernorm.weight": layer["mlp_norm"]["scale"],
        }
        if config.latent is not None:
            found |= {f"{name}self_attn.{key}.weight": x for key, x in latent(config, attention).items()}
        else:
            found |= {
                name + "self_attn.q_proj.weight": attention["query"].reshape(D, N * H).T,
                name + "self_attn.k_proj.weight": attention["key"].reshape(D, K * H).T,
                name + "self_attn.v_proj.weight": attention["value"].reshape(D, K * H).T,
                name + "self_attn.o_proj.weight": attention["out"].reshape(N * H, D).T,
            }
        if config.qk_norm:
            found[name + "self_attn.q_norm.weight"] = attention["query_norm"]["scale"]
            found[name + "self_attn.k_norm.weight"] = attention["key_norm"]["scale"]
        for theirs, ours in BIASES.items():
            if ours in attention:
                found[f"{name}self_attn.{theirs}.bias"] = attention[ours].reshape(-1)
        if not sparse:
            found |= {f"{name}mlp.{part}_proj.weight": mlp[part].T for part in ("gate", "up", "down")}
            continue
        found[name + "mlp.gate.weight"] = mlp["router"].T
        if "shared" in mlp:
            shared = "mlp.shared_expert" if "shared_gate" in mlp else "mlp.shared_experts"
            found |= {f"{name}{shared}.{part}_proj.weight": mlp["shared"][part].T for part in mlp["shared"]}
        if "shared_gate" in mlp:
            found[name + "mlp.shared_expert_gate.weight"] = mlp["shared_gate"].T
        if "correction_bias" in mlp:
            found[name + "mlp.gate.e_score_correction_bias"] = mlp["correction_bias"]
        if fused:
            both = [mlp["gate"].swapaxes(1, 2), mlp["up"].swapaxes(1, 2)]
            found[name + "mlp.experts.gate_up_proj"] = np.concatenate(both, axis=1)
            found[name + "mlp.experts.down_proj"] = mlp["down"].swapaxes(1, 2)
            continue
        for expert in range(config.num_experts):
            for part in ("gate", "up", "down"):
                found[f"{name}mlp.experts.{expert}.{part}_proj.weight"] = mlp[part][expert].T
    dtypes = {name: np.float32 if name.endswith("correction_bias") else dtype for name in found}
    return {name: np.ascontiguousarray(tensor, dtype=dtypes[name]) for name, tensor in found.items()}


def latent(config, attention):
    """The tensors of latent attention by their names; keys and values alternate from head to head."""
    C, low_rank = config.latent.rank, config.latent.query_rank
    found = {
        "q_b_proj" if low_rank else "q_proj": attention["query"].reshape(len(attention["query"]), -1).T,
        "kv_a_proj_with_mqa": np.concatenate([attention["latent"].T, attention["rotated_key"].T]),
        "kv_a_layernorm": attention["latent_norm"]["scale"],
        "kv_b_proj": np.concatenate([attention["key"], attention["value"]], axis=2).reshape(C, -1).T,
        "o_proj": attention["out"].reshape(-1, config.hidden_size).T,
    }
    if low_rank:
        found |= {"q_a_proj": attention["query_latent"].T, "q_a_layernorm": attention["query_norm"]["scale"]}
    return found


def layers(config, params):
    """Each layer's parameters as numpy arrays without the leading axis, and whether the layer is sparse."""
    for number, ((run, *place), index) in enumerate(layer_places(config)):
        stack = params["runs"][run][place[0]] if place else params["runs"][run]
        yield take(stack, index), layers_of(config)[number].sparse


def take(tree, index):
    return {
        name: take(each, index) if isinstance(each, dict) else np.asarray(each)[index] for name, each in tree.items()
    }


def save(folder, config, tensors, *, files=1):
    """A checkpoint folder, its tensors distributed over `files` files in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = "bfloat16" if next(iter(tensors.values())).dtype == ml_dtypes.bfloat16 else "float32"
    (folder / "config.json").write_text(json.dumps(to_json(config) | {"torch_dtype": dtype}))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = dict(list(tensors.items())[number::files])
        save_file(part, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(folder):
    """Every tensor of a folder, read by `safetensors`."""
    from safetensors.numpy import load_file

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bytes(one, other):
    """Whether two sets of tensors have the same names, dtypes, shapes and bytes."""
    return one.keys() == other.keys() and all(
        (tensor.dtype, tensor.shape, tensor.tobytes()) == (other[name].dtype, other[name].shape, other[name].tobytes())
        for name, tensor in one.items()
    )
