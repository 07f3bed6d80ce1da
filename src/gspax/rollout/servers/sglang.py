"""One SGLang server over HTTP, written from SGLang's documentation and tested against a fake of it alone.

Completions are token ids in both directions: the server tokenizes nothing. Its log-probs are those of the distribution
that it samples from, temperature included; those of prompts are at temperature 1. Weights are loaded from a folder,
without a part of gspax in the server, which compares no checksums: only the probe sees a damaged file.

The version, the digest, and the name of a load form the label that SGLang stores with its weights.
"""

from __future__ import annotations

import base64
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspax.config import ModelConfig
from gspax.errors import shorten
from gspax.http_client import RefusedError
from gspax.rollout.servers.server import (
    Answer,
    CompletionRequest,
    Endpoint,
    ServerState,
    changed_prompt,
    check_answer,
    has_stopped,
    longest_answer,
    read_field,
    read_ids,
    read_logps,
    reading,
    select_layers,
)
from gspax.rollout.servers.weights import Written

LABEL = "gspax"  # the first word of a `weight_version`


class SGLang(Endpoint):
    """A server that was started with `command`."""

    def sample(self, ask: CompletionRequest) -> Answer:
        """POST /generate."""
        sampling = ask.sampling
        params = {
            "max_new_tokens": ask.max_tokens,
            "temperature": 0.0 if ask.greedy else sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,  # not the one of a model's generation_config.json
            "sampling_seed": ask.seed % 2**31,
            "ignore_eos": True,  # the run's stop tokens count, not those in the server's files
            "stop_token_ids": ask.server_stops(),
        }
        meta = self._generate(ask.tokens, ask.max_tokens, params, {"return_routed_experts": ask.keep_experts})
        where = f"{self.address}/generate"
        with reading(where, "output_token_logprobs and finish_reason"):
            stopped = has_stopped(read_field(read_field(meta, "finish_reason", dict), "type", str), where)
            logps, tokens = zip(*(entry[:2] for entry in read_field(meta, "output_token_logprobs", list)), strict=True)
            answer = Answer(
                tokens=read_ids(tokens, self._model.vocab_size),
                logps=read_logps(logps),
                stopped=stopped,
                expert_TLA=self._read_experts(meta, len(ask.tokens) + len(tokens) - 1) if ask.keep_experts else None,
            )
        return check_answer(ask, answer, where)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """POST /generate with the log-probs of the prompt."""
        meta = self._generate(tokens, 1, {"max_new_tokens": 1, "temperature": 1.0}, {"logprob_start_len": 0})
        with reading(self.address, "input_token_logprobs of every token"):
            listed = read_field(meta, "input_token_logprobs", list)[1:]
            logps, ids = zip(*(entry[:2] for entry in listed), strict=True)
            if list(ids) != list(tokens[1:]):
                raise ValueError("log-probs of other tokens")
            return np.array(read_logps(logps), np.float32)

    def _generate(self, tokens: Sequence[int], new: int, params: object, more: Mapping[str, object]) -> dict[str, Any]:
        """Request a completion of at most `new` tokens, and return its `meta_info`."""
        body = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, **more}
        answer = self._client.post("/generate", body, most=longest_answer(self._model, len(tokens), new))
        with reading(f"{self.address}/generate", "meta_info with prompt_tokens"):
            meta: dict[str, Any] = read_field(answer, "meta_info", dict)
            count = read_field(meta, "prompt_tokens", int)
        if count != len(tokens):
            raise changed_prompt(len(tokens), count, f"{self.address}/generate")
        return meta

    def _read_experts(self, meta: Mapping[str, Any], count: int) -> np.ndarray | None:
        """Decode the experts [count, L, A] from base64 of int32 numbers; None without experts."""
        if meta.get("routed_experts") is None:
            return None
        where = f"{self.address}/generate"
        with reading(where, f"the experts of {count} tokens as base64 of int32 numbers"):
            flat = np.frombuffer(base64.b64decode(read_field(meta, "routed_experts", str), validate=True), "<i4")
            expert_TLA = flat.reshape(count, -1, self._model.num_experts_per_tok)
        return select_layers(expert_TLA, count, self._model, where)

    def load(self, written: Written) -> None:
        """POST /update_weights_from_disk, with everything held and all caches forgotten."""
        self.pause()
        body = {
            "model_path": str(written.path),
            "load_format": "auto",  # not the one that the server was started with, which makes random weights
            "flush_cache": True,
            "weight_version": f"{LABEL} {written.version} {written.digest} {secrets.token_hex(8)}",
        }
        answer = self._client.post("/update_weights_from_disk", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            reason = answer.get("message") if isinstance(answer, dict) else answer
            raise RefusedError(
                f"{self.address}: wanted version {written.version} to be loaded, got {shorten(str(reason))}"
            )
        self.resume()

    def pause(self) -> None:
        """POST /pause_generation: requests keep their tokens and compute their keys and values again."""
        self._client.post("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """POST /continue_generation."""
        self._client.post("/continue_generation", {})

    def state(self, timeout: float) -> ServerState:
        """GET /get_model_info and /get_server_info. Neither has the sizes of the model: the probe compares these."""
        info = self._client.get("/get_model_info", timeout=timeout)
        settings = self._client.get("/get_server_info", timeout=timeout)
        if not isinstance(info, dict) or not isinstance(settings, dict) or "weight_version" not in info:
            raise RefusedError(f"{self.address}: wanted a weight_version in /get_model_info, as SGLang has it")
        label = str(info["weight_version"]).split()
        is_ours = len(label) == 4 and label[0] == LABEL and label[1].isdecimal() and len(label[1]) < 20
        _, version, digest, instance = label if is_ours else ["", "", "", ""]
        limits = {"routed_experts": int(bool(settings.get("enable_return_routed_experts")))}
        if isinstance(length := settings.get("context_length"), int):
            limits["max_tokens"] = length
        dtype = str(settings.get("dtype", ""))
        own = int(version) if is_ours else None
        return ServerState(self.address, own, digest, limits, "" if dtype == "auto" else dtype, instance)


def command(model_folder: Path, model: ModelConfig, length: int, address: str, *, experts: bool, cpu: bool) -> str:
    """Return the command that starts a server whose weights a run replaces. Arguments as in `vllm.command`."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    words = ["python3", "-m", "sglang.launch_server", "--model-path", str(model_folder), "--host", host, "--port", port]
    words += ["--dtype", model.dtype, "--context-length", str(length), "--load-format", "dummy"]
    words += ["--skip-tokenizer-init", "--sampling-defaults", "openai"]
    words += ["--enable-deterministic-inference"]  # without it the seeds of requests count for nothing
    words += ["--enable-return-routed-experts"] if experts else []
    words += ["--device", "cpu"] if cpu else []
    return shlex.join(words)
