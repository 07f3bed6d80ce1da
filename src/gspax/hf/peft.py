"""Reads and writes LoRA adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

PEFT names the factors of a module `base_model.model.MODULE.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank],
and adds alpha / rank · B A to its weight [out, in]. The modules are named in `hf.names`; each expert is a module. A
module that joins several weights has a multiple of the rank: rows of A and columns of B for each weight, and zeros in B
where the columns of one meet the rows of another. As in `config.json`, no key of `adapter_config.json` is silently
ignored.

transformers 5 holds the experts of a layer as two parameters, `gate_up_proj` and `down_proj`. PEFT joins the experts'
factors when it reads them: the gates' and the ups' side by side, of twice the rank.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gspax.config import Lora, ModelConfig, mlp_weights
from gspax.data.files import SHOWN, Json, read_object, require_own_files, show
from gspax.errors import UserError
from gspax.hf import names, tensors
from gspax.hf.json_values import expect

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = {  # the weights of `Lora.attention`, `Lora.mlp`, and `Lora.delta` in each of PEFT's modules
    "attention": {
        **{"q_proj": ("query",), "k_proj": ("key",), "v_proj": ("value",), "o_proj": ("out",)},
        **{"qkv_proj": ("query", "key", "value"), "kv_b_proj": ("key", "value")},
    },
    "mlp": {
        **{"gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",)},
        **{"gate_up_proj": ("gate", "up"), "input_linear": ("gate", "up"), "output_linear": ("down",)},
    },
    "delta": {
        **{"in_proj_qkv": ("query", "key", "value"), "in_proj_z": ("gate",)},
        **{"in_proj_b": ("beta",), "in_proj_a": ("decay",), "out_proj": ("out",)},
        **{"in_proj_qkvz": ("query", "key", "value", "gate"), "in_proj_ba": ("beta", "decay")},
    },
}
JOINED = {module: weights for part in MODULES.values() for module, weights in part.items() if len(weights) > 1}
# Mixtral's experts, and the queries of latent attention.
OTHER_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "q_b_proj": "q_proj"}
FUSED = r".*\.gate_up_proj"  # all experts of a layer, in PEFT's patterns of ranks and alphas
PREFIX = "base_model.model."
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
PERMITTED: dict[str, tuple[Json, ...]] = {
    "bias": (None, "none"),
    "task_type": (None, "CAUSAL_LM"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal"),  # the others change the base
    "loftq_config": (None, {}),
}
HARMLESS = (  # keys that do not change what the tensors mean; any other key must be null, false or empty
    *("target_modules", "exclude_modules", "target_parameters"),  # the tensors name the modules
    *("base_model_name_or_path", "revision"),  # the experiment names the model
    *("peft_version", "auto_mapping", "inference_mode", "megatron_core"),  # how PEFT wrote and loads it
    "lora_dropout",  # training elsewhere; gspax has no dropout
    "qalora_group_size",  # for use_qalora only
)


def peft(folder: str | os.PathLike[str]) -> Lora:
    """Return the LoRA setting of an adapter that PEFT or `gspax export --adapter` wrote, to start a run from it.

        model=hf("Qwen/Qwen3-0.6B"), lora=peft("adapters/first")

    Args:
      folder: as for `hf`; only the configuration and the names of the tensors are read here.

    Raises:
      UserError: there are no such files, the adapter is of another kind, or it adapts modules that gspax does not.
    """
    rank, alpha = _read_config(Path(folder))
    modules = {module for name in _stored(Path(folder)) for module in name.split(".")[-3:-2]}
    if fused := modules & {"experts", "base_layer"}:
        raise UserError(
            f"{folder}: wanted factors of each expert, as PEFT writes them with transformers 4, got factors of all "
            f"experts together ({fused.pop()}), as it writes them with transformers 5"
        )
    modules = {OTHER_NAMES.get(module, module) for module in modules}
    known = [module for part in MODULES.values() for module in part]
    if unknown := sorted(modules - set(known)):
        raise UserError(f"{folder}: wanted modules of {', '.join(known)}, got {unknown[0][:SHOWN]}")
    chosen: dict[str, Any] = {}  # the fields of Lora: all of a part, none, or some of its weights
    for part, modules_of_part in MODULES.items():
        every = tuple(dict.fromkeys(ours for weights in modules_of_part.values() for ours in weights))
        adapted = {ours for module in modules & modules_of_part.keys() for ours in modules_of_part[module]}
        chosen[part] = (
            tuple(name for name in every if name in adapted) if 0 < len(adapted) < len(every) else bool(adapted)
        )
    return Lora(rank=rank, alpha=alpha, checkpoint=os.fspath(folder), **chosen)


def read_adapters(
    folder: Path, config: ModelConfig, lora: Lora, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Read the factors of an adapter, float32, by paths such as `runs/0/attention/query/a`.

    Args:
      shapes: the shape of each factor by its path (`learner.adapters.abstract`).

    Raises:
      UserError: tensors are missing, unexpected, not finite or of another shape; the message names them.
    """
    stored = _stored(folder)
    tensors.require_shapes(folder, stored, _published_shapes(config, lora, shapes))
    factors = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    for published, pieces in _pieces(config, lora, shapes).items():
        tensor = tensors.read(stored[published]).astype(np.float32)
        for piece in pieces:
            own, factor = _own(tensor, piece), factors[piece.path][piece.place]
            factor[...] = own.reshape(-1, own.shape[-1]).T.reshape(factor.shape)
            own[...] = 0
        if tensor.any():
            raise UserError(
                f"{folder}: tensor {published}: wanted zeros where the rows of one weight meet the columns of another "
                f"(gspax has {' and '.join(piece.path.split('/')[-2] for piece in pieces)} apart), got other numbers"
            )
    return factors


def write_adapters(
    folder: Path,
    config: ModelConfig,
    lora: Lora,
    shapes: Mapping[str, tuple[int, ...]],
    factor: Callable[[str], np.ndarray],
    *,
    base: tuple[str | None, str | None] = (None, None),
    dtype: str = "float32",
) -> None:
    """Write both files into `folder`, which exists.

    Args:
      shapes: the shape of each factor by its path (`learner.adapters.abstract`).
      factor: returns a factor by its path, such as `runs/0/attention/query/a`; called once for each.
      base: the model that PEFT loads first, a folder or a name on the Hub, and its revision.
      dtype: the dtype of the tensors, `bfloat16` or `float32`.

    Raises:
      UserError: PEFT cannot adapt these modules.
    """
    pieces, published_shapes = _pieces(config, lora, shapes), _published_shapes(config, lora, shapes)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base[0],
        "revision": base[1],
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": False,
        **_targets(config, lora, pieces),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    kind = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    stored = tensors.create(folder / WEIGHTS, published_shapes, kind)
    factors = {path: np.asarray(factor(path)) for path in shapes}
    for published, held in pieces.items():
        tensor = np.zeros(published_shapes[published], kind)
        for piece in held:
            own, array = _own(tensor, piece), factors[piece.path][piece.place]
            own[...] = array.reshape(own.shape[-1], -1).T.reshape(own.shape)
        tensors.write(stored[published], tensor)


def _targets(config: ModelConfig, lora: Lora, pieces: Mapping[str, Sequence[_Piece]]) -> dict[str, object]:
    """Return the keys of `adapter_config.json` by which PEFT finds the modules of these tensors.

    These are the last part of the modules' names. For a model with experts, PEFT 0.21 with transformers 5 replaces such
    a name by the experts' parameter and loses the modules of the same name in dense layers; for Qwen2-MoE it does not
    replace the name and adapts the shared expert. For these two cases the parameters themselves are named.
    """
    modules = list(dict.fromkeys(name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in pieces))
    times = {name.split(".")[-3]: len(held) for name, held in pieces.items() if len(held) > 1}  # multiples of the rank
    leaves = list(dict.fromkeys(module.split(".")[-1] for module in modules))
    of_experts = {module.split(".")[-1] for module in modules if ".experts." in module}
    if of_experts and "gate" not in mlp_weights(config.activation):
        raise UserError(
            f"lora.mlp: wanted false in an adapter of experts without gates, which gspax writes only merged into the "
            f"model, got {lora.mlp}"
        )
    if len(of_experts) not in (0, 3) and not of_experts <= {"down_proj", "w2"}:
        raise UserError(
            f"lora.mlp: wanted all of gate, up, and down, or down alone, in an adapter of experts: PEFT reads no "
            f"other, got {lora.mlp}"
        )
    dense = sorted({f"mlp.{module.split('.')[-1]}" for module in modules if module.split(".")[-2] == "mlp"})
    targets: dict[str, object] = {"target_modules": leaves}
    if of_experts and (dense or config.shared_expert_intermediate_size):
        fused = ("gate_up_proj", "down_proj") if len(of_experts) == 3 else ("down_proj",)
        targets = {
            "target_modules": [leaf for leaf in leaves if leaf not in MODULES["mlp"]],
            "target_parameters": [f"mlp.experts.{name}" for name in fused] + [f"{module}.weight" for module in dense],
        }
        times |= {FUSED: 2} if "gate_up_proj" in fused else {}
    patterns = {"rank_pattern": lora.rank, "alpha_pattern": lora.alpha} if times else {}
    return targets | {key: {module: n * one for module, n in times.items()} for key, one in patterns.items()}


class _Piece(NamedTuple):
    """A factor in a tensor of PEFT, alone or next to those of the other weights of a module."""

    path: str
    place: tuple[int, ...]  # in the factor's leading axes
    ranks: slice  # rows of A, columns of B
    part: tensors.Part  # rows of B


def _own(tensor: np.ndarray, piece: _Piece) -> np.ndarray:
    """Return a view of the factor's numbers in a tensor: of A [rank, in], of B [..., rank]."""
    if piece.path.endswith("/a"):
        return tensor[piece.ranks]
    part = piece.part
    rows = tensor.reshape(part.outer, part.total, -1, tensor.shape[-1])[:, part.start : part.start + part.length]
    return rows[..., piece.ranks]


def _pieces(config: ModelConfig, lora: Lora, paths: Iterable[str]) -> dict[str, list[_Piece]]:
    """Return the factors in each tensor of PEFT by its name."""
    from gspax.hf.parameters import parameter_shapes  # imports jax, which reading a configuration needs not

    factors, pieces = set(paths), dict[str, list[_Piece]]()
    for name, chunks in names.list_chunks(config, parameter_shapes(config)).items():
        for letter, suffix in (("a", "lora_A"), ("b", "lora_B")):
            for chunk in chunks if f"{name}/{letter}" in factors else ():
                module = chunk.published.removesuffix(".weight")
                if "E" in chunk.row.axes:
                    raise UserError(f"lora: wanted weights that PEFT has as modules of their own, got {module}")
                held = pieces.setdefault(f"{PREFIX}{module}.{suffix}.weight", [])
                ranks = slice(len(held) * lora.rank, (len(held) + 1) * lora.rank)
                held.append(_Piece(f"{name}/{letter}", chunk.index, ranks, chunk.part))
    for name, held in pieces.items():
        together = JOINED.get(leaf := name.split(".")[-3], held)
        if len(held) != len(together):
            raise UserError(f"lora: wanted all of {', '.join(map(str, together))} or none, which are PEFT's {leaf}")
    return pieces


def _published_shapes(
    config: ModelConfig, lora: Lora, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of PEFT's matrices by name. gspax stores the transpose: a is [in..., rank]."""
    published_shapes: dict[str, tuple[int, ...]] = {}
    for published, (first, *more) in _pieces(config, lora, shapes).items():
        size, rank = math.prod(shapes[first.path][len(first.place) :]) // lora.rank, lora.rank * (1 + len(more))
        if first.path.endswith("/a"):
            published_shapes[published] = rank, size
        else:
            published_shapes[published] = size // first.part.length * first.part.total, rank
    return published_shapes


def _stored(folder: Path) -> dict[str, tensors.Stored]:
    if not (folder / WEIGHTS).is_file():
        pickle = (folder / "adapter_model.bin").is_file()
        why = "adapter_model.bin is a pickle, which gspax does not read" if pickle else "there is none"
        raise UserError(f"{folder}: wanted {WEIGHTS}, {why}")
    return tensors.read_header(folder / WEIGHTS)


def _read_config(folder: Path) -> tuple[int, float]:
    """Return an adapter's rank and alpha; with `use_rslora` alpha is multiplied by the square root of the rank."""
    path = folder / CONFIG
    if not path.exists():
        where = "" if folder.is_absolute() else f" (the working directory is {Path.cwd()})"
        raise UserError(f"{folder}: wanted the folder of an adapter with {CONFIG}, there is none{where}")
    raw = read_object(path)
    require_own_files(folder)
    try:
        expect("peft_type", raw.get("peft_type"), ["LORA"])
        for key, value in raw.items():
            if key in PERMITTED:
                expect(key, value, PERMITTED[key])
            elif key not in READ and key not in HARMLESS and value:
                raise ValueError(f"{key}: wanted null, false or nothing in it, got {show(value)}")
        rank, alpha = raw.get("r"), raw.get("lora_alpha")
        if type(rank) is not int or rank <= 0:
            raise ValueError(f"r: wanted an integer above 0, got {show(rank)}")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            raise ValueError(f"lora_alpha: wanted a number above 0, got {show(alpha)}")
        times = {FUSED: 2} | {module: len(weights) for module, weights in JOINED.items()}
        pattern = raw.get("rank_pattern")  # the pattern of alphas keeps alpha / rank the same
        joined = pattern if isinstance(pattern, dict) and not raw.get("use_rslora") else {}
        for key, one in (("rank_pattern", rank), ("alpha_pattern", alpha)):
            if (found := raw.get(key) or {}) != (wanted := {module: times.get(module, 1) * one for module in joined}):
                only = f"only {json.dumps(wanted)}" if wanted and times.keys() >= wanted.keys() else "nothing in it"
                raise ValueError(f"{key}: wanted {only}, since all modules share one rank and alpha, got {show(found)}")
    except ValueError as problem:
        raise UserError(f"{path}: {problem}") from None
    return rank, alpha * math.sqrt(rank) if raw.get("use_rslora") else float(alpha)
