"""gspax inside vLLM's workers: loads a version of the weights, and says which one it has.

vLLM imports this file by `--worker-extension-cls gspax_vllm_worker.Extension`, with its folder in PYTHONPATH
(`gspax serve-command` prints both). It runs in vLLM's environment, so it imports neither gspax nor jax. Its methods are
called over HTTP by `/collective_rpc`, which exists with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT = 1  # of manifest.json
PIECE = 2**24  # bytes that are read at once


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
            manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                return {"error": f"{folder}: wanted a manifest of format {FORMAT}, got {manifest['format']}"}
            if problem := find_damage(Path(folder), manifest["tensors"]):
                return {"error": problem}
            self.model_runner.reload_weights(weights_iterator=read_tensors(Path(folder)))
            repacked = repack(self.model_runner.get_model())
        except Exception as problem:
            return {"error": f"{type(problem).__name__}: {problem}"[:1000]}
        loaded = {"version": manifest["version"], "digest": manifest["digest"], "instance": instance}
        self.gspax_loaded = loaded
        return {**self.gspax_loaded, "experts_repacked": repacked}

    def gspax_state(self) -> dict[str, object]:
        """The version that is loaded, None before the first, and the model and the settings that it runs with."""
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


def find_damage(folder: Path, checksums: Mapping[str, str]) -> str:
    """A sentence about the first tensor whose bytes are not those that were written; empty if there is none."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                begin, end = entry["data_offsets"]
                opened.seek(8 + length + begin)
                checksum, left = hashlib.sha256(), end - begin
                while left and (piece := opened.read(min(PIECE, left))):
                    checksum.update(piece)
                    left -= len(piece)
                found[name] = "a file that is too short" if left else checksum.hexdigest()
    for name in sorted(checksums.keys() | found.keys()):
        wanted, got = checksums.get(name, "no such tensor"), found.get(name, "none")
        if wanted != got:
            return f"{folder}: tensor {name}: wanted the checksum {wanted[:16]}, got {got[:24]}"
    return ""


def read_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of a version, one at a time: (name, torch tensor)."""
    from safetensors import safe_open  # of vLLM's environment

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (a method that gives names, not a dict)
                yield name, opened.get_tensor(name)


def repack(model: Any) -> int:
    """Repack what vLLM's kernels have copies of, as after the first load; how many layers have experts.

    `reload_weights` leaves two kinds of copies as they were, with no message: those of experts, and on a CPU that of a
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
