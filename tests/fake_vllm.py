"""A server on loopback that speaks the HTTP of vLLM 0.30.0, with gspax's own model inside, and with faults on request.

What it answers has the keys and types of a conversation with the real one (tests/rollout/vllm_conversation.json), and
it loads weights with the functions of our worker extension.
"""

import base64
import functools
import importlib.util
import io
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import local_server
import numpy as np
import reference
from api import read_params, single_device_mesh, transformer

from gspax.config import ModelConfig
from gspax.rollout.servers import vllm

_spec = importlib.util.spec_from_file_location("gspax_vllm_worker", vllm.WORKER / "gspax_vllm_worker.py")
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


SIMPLE = {
    "/pause": {"status": "paused"},
    "/resume": {"status": "resumed"},
    "/reset_prefix_cache": {"success": True},
    "/update_weight_version": {"success": True, "new_version": ""},
}


@dataclass
class Faults:
    """The faults of a server; a test sets them while it runs."""

    keeps_old: bool = False  # says that it has loaded a version, and samples with the one before
    flips_byte: bool = False  # in the file, before it is loaded
    exchanges_experts: bool = False  # the first two of the first layer, after each load
    stays_at: dict | None = None  # what it says that it has loaded, whatever that is
    temperatures: int = 1  # times that the temperature is applied
    ignores_filters: bool = False
    delay: float = 0.0  # seconds before each completion
    hangs: bool = False  # takes requests and answers none
    truncates: int = 0  # tokens of a prompt that are kept; 0: all
    stops_early: bool = False  # after one token
    state: dict = field(default_factory=dict)  # of the worker's state, in place of the right values
    dies_after: int = 0  # completions, after which it drops every connection; 0: never
    replaces_tokens: int = 0  # one of so many sampled tokens is another one than its log-prob is of; 0: none
    late_tokens: float = 0.0  # share of the draws after the third turn that are replaced likewise
    nulls: bool = False  # in place of log-probs
    restart_after: int = 0  # completions, after which it forgets its weights and drops its connections, once


@dataclass
class Fake:
    """One server."""

    model: ModelConfig
    max_tokens: int = 16
    hasty: int = 0  # letters of each turn, all as probable, so that one forward pass is enough; 0: of the model's law
    port: int = 0
    faults: Faults = field(default_factory=Faults)
    params: object = None
    loaded: dict | None = None
    versions: dict = field(default_factory=dict)  # the parameters of each version that it has loaded
    seen: list = field(default_factory=list)  # (path, body) of every request
    completions: int = 0
    program: str = "vllm"
    path: str = "/v1/completions"  # of completions
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        """The weights of a server that has just started are random."""
        self.params, self.loaded = transformer.init(self.model, jax.random.key(17)), None

    def answer(self, path, body):
        if path == "/collective_rpc":
            return {"results": [getattr(self, body["method"])(*body["args"])]}
        if path == "/v1/completions":
            return self.complete(body)
        return SIMPLE[path]

    # The worker extension

    def gspax_load(self, folder, instance):
        self.loaded = None
        try:
            manifest = worker.read_manifest(Path(folder))
            if self.faults.flips_byte:
                flip_byte(Path(folder) / "model.safetensors")
            if problem := worker.find_damage(Path(folder)):
                return {"error": problem}
            self.read(folder)
        except Exception as problem:
            return {"error": f"{folder}: {type(problem).__name__}: {problem}"}
        self.versions[manifest["version"]] = self.params
        self.loaded = {"version": manifest["version"], "digest": manifest["digest"], "instance": instance}
        return {**self.loaded, "experts_repacked": self.model.num_hidden_layers}

    def read(self, folder):
        """Take the weights of a folder."""
        if not self.faults.keeps_old:
            wanted = transformer.abstract_params(self.model)
            mesh = single_device_mesh()
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
            self.params = read_params(Path(folder), self.model, jax.tree.map(place, wanted))
        if self.faults.exchanges_experts:
            self.params = exchange_experts(self.params)

    def gspax_state(self):
        model = self.model
        return {
            "loaded": self.faults.stays_at or self.loaded,
            "vocab_size": model.vocab_size,
            "num_hidden_layers": model.num_hidden_layers,
            "hidden_size": model.hidden_size,
            "max_tokens": self.max_tokens,
            "dtype": model.dtype,
            "logprobs_mode": "processed_logprobs",
            "routed_experts": True,
            "workers": 1,
        } | self.faults.state

    # The model

    def complete(self, body):
        prompt = body["prompt"][: self.faults.truncates or None]
        logps, experts = forward(self.params, self.model, prompt)
        choice = {"index": 0, "text": "", "stop_reason": None, "prompt_token_ids": prompt, "prompt_logprobs": None}
        if body.get("prompt_logprobs") is not None:
            entry = lambda t: {str(prompt[t]): {"logprob": float(logps[t - 1, prompt[t]]), "rank": 1}}  # noqa: E731
            choice["prompt_logprobs"] = [None, *map(entry, range(1, len(prompt)))]
        settings = body["max_tokens"], body["temperature"], body.get("seed", 0), body.get("stop_token_ids", ())
        filters = body.get("top_k", 0), body.get("top_p", 1.0), body.get("min_p", 0.0)
        tokens, laws, reason, experts = self.sample(prompt, *settings, filters=filters)
        choice["stop_reason"] = tokens[-1] if reason == "stop" else None
        choice |= {"token_ids": tokens, "finish_reason": reason, "logprobs": None}
        if body.get("logprobs") is not None:
            entries = [top_logprobs(*pair, body["logprobs"]) for pair in zip(laws, tokens, strict=True)]
            chosen = [float(law[token]) for law, token in zip(laws, tokens, strict=True)]
            if self.faults.nulls:
                chosen = [None] * len(tokens)
            if self.faults.replaces_tokens and body["seed"] % self.faults.replaces_tokens == 0:
                tokens[0] = (tokens[0] + 1) % 8  # no stop token
                tokens = choice["token_ids"] = tokens[: len(chosen)]
            choice["logprobs"] = {"token_logprobs": chosen, "top_logprobs": entries}
        if experts is not None:
            file = io.BytesIO()
            np.save(file, experts.astype(np.uint8))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return {"id": "cmpl-1", "object": "text_completion", "model": vllm.NAME, "choices": [choice]}

    def sample(self, prompt, most, temperature, seed, stops, filters=(0, 1.0, 0.0)):
        """The tokens after a prompt, the log-probs [V] of each, why they end, and the experts of all but the last."""
        if self.hasty and stops:
            return self.hurry(prompt, seed, stops[0], temperature)
        rng, tokens, laws = np.random.default_rng(seed), [], []
        for _ in range(1 if self.faults.stops_early else most):
            logps, experts = forward(self.params, self.model, prompt + tokens)
            scaled = logps[-1] / (temperature or 1.0) ** self.faults.temperatures
            if temperature and not self.faults.ignores_filters:
                kept = reference.kept_tokens(scaled, *filters)
                scaled = np.where([token in kept for token in range(len(scaled))], scaled, -np.inf)
            scaled = scaled - np.log(np.exp(scaled).sum())
            noise = rng.gumbel(size=scaled.shape) if temperature else 0.0
            tokens.append(int(np.argmax(scaled + noise)))
            laws.append(scaled)
            if tokens[-1] in stops:
                return tokens, laws, "stop", experts
        return tokens, laws, "length", experts

    def hurry(self, prompt, seed, stop, temperature):
        """A turn of evenly drawn letters; a replaced one is sent in place of the one that the server goes on with."""
        rng = np.random.default_rng(seed)
        tokens = [*rng.integers(0, 8, self.hasty).tolist(), stop]
        logps, experts = forward(self.params, self.model, prompt + tokens)
        scaled = logps[len(prompt) - 1 : -1] / temperature
        laws = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        if prompt.count(stop) >= 3:
            wrong = rng.random(self.hasty) < self.faults.late_tokens
            sent = [
                (token + rng.integers(1, 8)) % 8 if wrong[place] else token for place, token in enumerate(tokens[:-1])
            ]
            laws[np.arange(self.hasty), sent] = laws[np.arange(self.hasty), tokens[:-1]]
            tokens = [*map(int, sent), stop]
        return tokens, laws, "stop", experts


def top_logprobs(law, token, count):
    """The log-probs of the most probable tokens and of the sampled one; -inf is sent as -9999."""
    best = {*np.argsort(-law)[:count].tolist(), token}
    return {f"token_id:{other}": max(float(law[other]), -9999.0) for other in best}


def flip_byte(file):
    """Change one bit of a tensor: of the exponent of the last number."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def exchange_experts(params):
    """The parameters with the first two experts of each layer exchanged; the router stays."""

    def swap(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf[:, jnp.array([1, 0, *range(2, leaf.shape[1])])] if "mlp" in name and leaf.ndim == 4 else leaf

    return jax.tree_util.tree_map_with_path(swap, params)


def forward(params, model, tokens):
    """The log-probs [T, V] after each token, and the experts [T, L, A] of each; None of a dense model."""
    padded = np.zeros((1, -(-len(tokens) // 16) * 16), np.int32)
    padded[0, : len(tokens)] = tokens
    logits, expert = _forward(params, padded, np.int32(len(tokens)), model=model)
    logits = np.asarray(logits, np.float64)[: len(tokens)]
    logps = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logps -= logits.max(-1, keepdims=True)
    return logps, np.asarray(expert)[: len(tokens)] if model.num_experts else None


@functools.partial(jax.jit, static_argnames="model")
def _forward(params, tokens_1T, length, *, model):
    segment_1T = (jnp.arange(tokens_1T.shape[1])[None] < length).astype(jnp.int32)
    hidden, routing = transformer.apply(params, model, tokens_1T, segment_1T, mesh=single_device_mesh())
    return transformer.logits(params, hidden)[0], routing.expert[:, 0].swapaxes(0, 1)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        fake, path = self.server.fake, urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        with fake.lock:
            fake.seen.append((path, body))
        faults = fake.faults
        if faults.dies_after and fake.completions >= faults.dies_after:
            self.close_connection = True
            return
        while faults.hangs:
            time.sleep(0.01)
        if path == fake.path:
            time.sleep(faults.delay)
            fake.completions += 1
            if faults.restart_after and fake.completions > faults.restart_after:
                faults.restart_after = 0
                fake.start()
                self.close_connection = True
                return  # without an answer
        try:
            status, answer = 200, fake.answer(path, body)
        except Exception as problem:
            status, answer = 500, {"error": {"message": f"{type(problem).__name__}: {problem}"}}
        text = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST

    def log_message(self, *arguments):
        pass


@contextmanager
def serve(model, kind=Fake, **settings):
    """A fake in a thread of this process."""
    fake = kind(model, **settings)
    fake.start()
    with local_server.serve(_Handler, fake.port, fake=fake) as server:
        fake.port = server.server_port
        try:
            yield fake
        finally:
            fake.faults.hangs = False
