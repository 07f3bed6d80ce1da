"""Extends vLLM's workers: loads a version of the weights, and reports the loaded version.

vLLM imports this file by `--worker-extension-cls gspax_vllm_worker.Extension`, with its folder in PYTHONPATH
(`gspax serve-command` prints both). It runs in vLLM's environment, so it imports neither gspax nor jax. Its methods are
called over HTTP by `/collective_rpc`, which exists with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORMAT = 1  # of manifest.json
BITS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<u4"), "BF16": np.dtype("<u2")}


class Tensor(NamedTuple):
    """A tensor of a weight version."""

    name: str
    kind: str  # of `BITS`
    shape: list[int]
    bits: np.ndarray  # all in one axis


class Extension:
    """Methods that vLLM adds to each of its workers."""

    model_runner: Any  # of the worker
    vllm_config: Any
    gspax_loaded: dict[str, object] | None = None

    def gspax_load(self, folder: str, instance: str) -> dict[str, object]:
        """Load a version of the weights: {"version", "digest", "instance", "experts_repacked"}, or {"error": why not}.

        `instance` is a name of this load, which the state repeats until the process ends or the next load begins.
        """
        self.gspax_loaded = None  # until it has succeeded, the weights are of no version
        try:
            manifest = read_manifest(Path(folder))
            if problem := find_damage(Path(folder)):
                return {"error": problem}
            self.model_runner.reload_weights(weights_iterator=map(to_torch, read_tensors(Path(folder))))
            repacked = repack(self.model_runner.get_model())
        except Exception as problem:
            return {"error": f"{folder}: {type(problem).__name__}: {problem}"[:1000]}
        loaded = {"version": manifest["version"], "digest": manifest["digest"], "instance": instance}
        self.gspax_loaded = loaded
        return {**self.gspax_loaded, "experts_repacked": repacked}

    def gspax_state(self) -> dict[str, object]:
        """Return the loaded version, None before the first, and the model and settings of the worker."""
        config, model = self.vllm_config, self.vllm_config.model_config
        return {
            "loaded": self.gspax_loaded,
            "vocab_size": model.hf_text_config.vocab_size,
            "num_hidden_layers": model.hf_text_config.num_hidden_layers,
            "hidden_size": model.hf_text_config.hidden_size,
            "max_tokens": model.max_model_len,
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "routed_experts": bool(getattr(model, "enable_return_routed_experts", False)),
            "workers": config.parallel_config.world_size,
        }


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a version. ValueError if its format differs."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError(f"{folder}: wanted a manifest of format {FORMAT}, got {manifest['format']}")
    return manifest


def find_damage(folder: Path) -> str:
    """Describe the first tensor whose checksum differs from the manifest's; "" if all agree."""
    checksums = read_manifest(folder)["tensors"]
    found = {tensor.name: hashlib.sha256(tensor.bits.data).hexdigest() for tensor in read_tensors(folder)}
    for name in sorted(checksums.keys() | found.keys()):
        wanted, got = checksums.get(name, "no such tensor"), found.get(name, "none")
        if wanted != got:
            return f"{folder}: tensor {name}: wanted the checksum {wanted[:16]}, got {got[:16]}"
    return ""


def read_tensors(folder: Path) -> Iterator[Tensor]:
    """Read the tensors of a version, one at a time."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from read_file(file)


def read_file(file: Path) -> Iterator[Tensor]:
    """Read the tensors of a file, in the order of their bytes."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        kind = BITS[entry["dtype"]]
        bits = np.fromfile(file, kind, (end - begin) // kind.itemsize, offset=8 + length + begin)
        yield Tensor(name, entry["dtype"], entry["shape"], bits)


def to_torch(tensor: Tensor) -> tuple[str, Any]:
    """Convert a tensor to vLLM's (name, torch tensor)."""
    import torch  # of vLLM's environment

    kind = {"F32": torch.float32, "BF16": torch.bfloat16}[tensor.kind]
    return tensor.name, torch.from_numpy(tensor.bits).view(kind).reshape(tensor.shape)


def repack(model: Any) -> int:
    """Repack the weight copies of vLLM's kernels, as after the first load; return the number of layers with experts.

    `reload_weights` leaves two kinds of copies as they were, with no message: the experts', and on a CPU the copy of a
    head that shares its weights with the embedding, for which the checkpoint has no tensor.
    """
    repacked = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
            repacked += 1
        elif method is not None and type(module).__name__ == "ParallelLMHead":
            method.process_weights_after_loading(module)
    return repacked
