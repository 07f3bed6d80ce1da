"""One vLLM server over HTTP (vLLM 0.30.0; docs/howto/sample_with_vllm.md has the versions that were tried).

Completions are token ids in both directions: the server tokenizes nothing. Its log-probs are those of the distribution
that it samples from, temperature included, with `--logprobs-mode processed_logprobs`; those of prompts are at
temperature 1. Weights are loaded by our extension of its workers (`vllm_worker`).
"""

from __future__ import annotations

import itertools
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gspax.config import ModelConfig, layers_of
from gspax.errors import shorten
from gspax.http_client import BrokenError, RefusedError
from gspax.rollout.servers.server import (
    Answer,
    CompletionRequest,
    Endpoint,
    ServerState,
    changed_prompt,
    check_answer,
    has_stopped,
    keep_set,
    longest_answer,
    read_experts,
    read_field,
    read_ids,
    read_logps,
    reading,
)
from gspax.rollout.servers.weights import Written

NAME = "gspax"  # of the served model
WORKER = Path(__file__).parent / "vllm_worker"


class VLLM(Endpoint):
    """A server that was started with `command`, or one that serves a model of another `name`; None: whichever it is."""

    def __init__(self, address: str, model: ModelConfig, timeout: float, name: str | None = NAME) -> None:
        super().__init__(address, model, timeout)
        self._name = name

    def sample(self, ask: CompletionRequest) -> Answer:
        """POST /v1/completions."""
        sampling = ask.sampling
        body = {
            "model": NAME,
            "prompt": list(ask.tokens),
            "max_tokens": ask.max_tokens,
            "temperature": 0.0 if ask.greedy else sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,  # not the one of a model's generation_config.json
            "seed": ask.seed,
            "logprobs": ask.mask_size,  # of the sampled token, and of this number of the most probable ones
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # else log-probs need a tokenizer, for the tokens' texts
            "ignore_eos": True,  # the run's stop tokens count, not those in the server's files
            "stop_token_ids": ask.server_stops(),
        }
        where = f"{self.address}/v1/completions"
        most = longest_answer(self._model, len(ask.tokens), ask.max_tokens, ask.mask_size)
        choice = self._first_choice(self._client.post("/v1/completions", body, most=most), ask.tokens)
        with reading(where, "token_ids, logprobs and finish_reason"):
            logprobs, reason = read_field(choice, "logprobs", dict), read_field(choice, "finish_reason", str)
            tokens = read_ids(read_field(choice, "token_ids", list), self._model.vocab_size)
            count = len(ask.tokens) + len(tokens) - 1
            answer = Answer(
                tokens=tokens,
                logps=read_logps(read_field(logprobs, "token_logprobs", list)),
                stopped=has_stopped(reason, where),
                expert_TLA=read_experts(choice.get("routed_experts"), count, self._model, where)
                if ask.keep_experts
                else None,
            )
            if ask.mask_size:
                entries = read_field(logprobs, "top_logprobs", list)
                answer = with_sets(answer, entries, ask.mask_size, self._model.vocab_size)
        return check_answer(ask, answer, where)

    def _first_choice(self, answer: Any, tokens: Sequence[int]) -> dict[str, Any]:
        where = f"{self.address}/v1/completions"
        with reading(where, "a choice with prompt_token_ids"):
            choice: dict[str, Any] = read_field(answer, "choices", list)[0]
            prompt = read_field(choice, "prompt_token_ids", list)
            if prompt != list(tokens):
                raise changed_prompt(len(tokens), len(prompt), where)
            return choice

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """POST /v1/completions with `prompt_logprobs`."""
        body = {"model": self._name, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        most = longest_answer(self._model, len(tokens), 1)
        choice = self._first_choice(self._client.post("/v1/completions", body, most=most), tokens)
        with reading(self.address, "prompt_logprobs of every token"):
            entries = zip(tokens[1:], read_field(choice, "prompt_logprobs", list)[1:], strict=True)
            return np.array(read_logps([entry[str(token)]["logprob"] for token, entry in entries]), np.float32)

    def load(self, written: Written) -> None:
        """Load through the worker extension, while all requests are held, and clear all caches."""
        self.pause()
        for loaded in self._workers("gspax_load", str(written.path), secrets.token_hex(8)):
            if "error" in loaded:
                raise RefusedError(f"{self.address}: {shorten(str(loaded['error']))}")
            with reading(self.address, "the version that was loaded"):
                version, digest = read_field(loaded, "version", int), read_field(loaded, "digest", str)
            if digest != written.digest:
                raise RefusedError(
                    f"{self.address}: wanted version {written.version} (digest {written.digest[:16]}), it loaded "
                    f"{version} ({digest[:16]})"
                )
        with reading(self.address, "an empty prefix cache"):
            is_empty = read_field(self._client.post("/reset_prefix_cache"), "success", bool)
        if not is_empty:
            raise RefusedError(f"{self.address}: wanted an empty prefix cache, but requests of others are using it")
        self._client.post("/update_weight_version", {"new_version": str(written.version)})
        self.resume()

    def pause(self) -> None:
        """POST /pause: requests keep their tokens and compute their keys and values again when they go on."""
        self._client.post("/pause", query=[("mode", "keep"), ("clear_cache", "true")])

    def resume(self) -> None:
        """POST /resume."""
        self._client.post("/resume")

    def state(self, timeout: float) -> ServerState:
        """Ask the worker extension. RefusedError if workers differ, or the server was started with other options."""
        states = self._workers("gspax_state", timeout=timeout)
        first = states[0]
        if any(other != first for other in states[1:]):
            raise RefusedError(f"{self.address}: wanted workers that agree, got {shorten(str(states))}")
        with reading(self.address, "the state of gspax's extension of its workers"):
            if (mode := read_field(first, "logprobs_mode", str)) != "processed_logprobs":
                raise RefusedError(f"{self.address}: wanted --logprobs-mode processed_logprobs, got {shorten(mode)}")
            names = "max_tokens", "vocab_size", "num_hidden_layers", "hidden_size"
            limits = {name: read_field(first, name, int) for name in names}
            limits["routed_experts"] = int(read_field(first, "routed_experts", bool))
            version, digest, instance = None, "", ""
            if first["loaded"] is not None:
                loaded = read_field(first, "loaded", dict)
                version, digest, instance = (
                    read_field(loaded, "version", int),
                    read_field(loaded, "digest", str),
                    read_field(loaded, "instance", str),
                )
            return ServerState(self.address, version, digest, limits, read_field(first, "dtype", str), instance)

    def _workers(self, method: str, *args: str, timeout: float = 0) -> list[dict[str, Any]]:
        """Call a method of the worker extension, and return one result per worker."""
        try:
            answer = self._client.post("/collective_rpc", {"method": method, "args": list(args)}, timeout=timeout)
        except (RefusedError, BrokenError) as problem:
            if "EngineCore" in str(problem):  # it has died, and its server ends
                raise
            raise RefusedError(
                f"{problem}; wanted a server that was started as `gspax serve-command` prints it"
            ) from None
        results = answer.get("results") if isinstance(answer, dict) else answer
        if not isinstance(results, list) or not results or not all(isinstance(one, dict) for one in results):
            raise RefusedError(f"{self.address}: wanted the answers of its workers, got {shorten(str(answer))}")
        return results


def with_sets(answer: Answer, entries: Sequence[Mapping[str, float]], size: int, vocab_size: int) -> Answer:
    """Add to an answer the set that each token was chosen from, read from `top_logprobs` entries "token_id:ID"."""
    read = []
    for entry in entries:
        ids = read_ids([int(name.removeprefix("token_id:")) for name in entry], vocab_size)
        read.append(dict(zip(ids, read_logps(list(entry.values())), strict=True)))
    kept, logps, cut = zip(*map(keep_set, read, answer.tokens, itertools.repeat(size)), strict=True)
    return answer._replace(kept=kept, logps=list(logps), cut=cut)


def command(model_folder: Path, model: ModelConfig, length: int, address: str, *, experts: bool, cpu: bool) -> str:
    """Return the command that starts a server whose weights a run replaces.

    Args:
      model_folder: with config.json; no weights are read from it.
      length: the most tokens of a prompt and its completion.
      experts: whether the run needs the experts that the server chose (`routing_replay="sampler"`).
      cpu: for vLLM's CPU build.
    """
    host, _, port = address.removeprefix("http://").rpartition(":")
    words = ["python3", "-m", "vllm.entrypoints.openai.api_server"]  # `vllm serve` needs the package's name to be vllm
    words += ["--model", str(model_folder), "--served-model-name", NAME, "--host", host, "--port", port]
    words += ["--dtype", model.dtype, "--max-model-len", str(length), "--load-format", "dummy"]
    words += ["--skip-tokenizer-init", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    words += ["--max-logprobs=-1"]  # as many of the tokens that filters leave as `sampling.mask_replay` asks for
    words += ["--worker-extension-cls", "gspax_vllm_worker.Extension"]
    has_state = any(layer.mixer.cache(1).state for layer in layers_of(model))
    words += ["--mamba-ssm-cache-dtype", "float32"] if has_state else []  # some models' default is the model's dtype
    words += ["--enable-return-routed-experts"] if experts else []
    words += ["--enforce-eager"] if cpu else []
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(WORKER)} | (
        {"VLLM_CPU_KVCACHE_SPACE": "1"} if cpu else {}
    )
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(words)])
