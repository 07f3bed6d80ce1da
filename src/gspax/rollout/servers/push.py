"""A push: the weights to a folder, from there into every server, and a probe of each before anything is sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from gspax.config import Engine, ModelConfig, Sampling, has_experts, sampling_mask_size
from gspax.errors import FailureError
from gspax.http_client import RefusedError, UnreachableError
from gspax.learner.forward import StepSettings
from gspax.learner.train_step import make_score
from gspax.parallel import multihost
from gspax.rollout.contract import Served, Weights
from gspax.rollout.servers import probe, weights
from gspax.rollout.servers.failover import PAUSE, Servers, describe_gone
from gspax.rollout.servers.server import Ask, Server, pad_sets
from gspax.rollout.servers.weights import Writer, Written
from gspax.run import interrupt
from gspax.types import Array, Params

T = TypeVar("T")
LOOK = 10.0  # seconds that a server may take to say which weights it has


class Pushed(NamedTuple):
    """The newest push: what every server must have."""

    leaf: Array  # of the learner's parameters: they are pushed once
    written: Written
    probes: list[list[int]]
    learner: list[np.ndarray]  # the learner's log-probs of the probes
    limit: float  # of the difference
    weights: Weights


# As they travel between processes: the tokens, log-probs, and sets of an `Answer`; and a server's log-probs of the
# probes, with what it sampled after their beginnings
Sampled = tuple[list[int], list[float], list[list[int]]]
Probed = tuple[list[np.ndarray], list[Sampled]]


class Pusher:
    """Pushes weights to the servers of a run.

    Args:
      settings: of the experiment.
      model: that it trains.
      sampling: its temperature, and the lengths of probes.
      length: the most tokens of a prompt and its completion, those of evaluations included.
      keep_experts: the run needs the experts that servers choose.
      mesh: the learner's.
      servers: one for each of `settings.addresses`.
    """

    def __init__(
        self,
        settings: Engine,
        model: ModelConfig,
        sampling: Sampling,
        *,
        length: int,
        keep_experts: bool,
        mesh: jax.sharding.Mesh,
        servers: Sequence[Server],
    ) -> None:
        install = self.install if jax.process_index() == 0 else None
        self.mesh, self.servers = mesh, Servers(servers, settings.timeout, install)
        self.pool = ThreadPoolExecutor(settings.requests * len(servers), thread_name_prefix="gspax_engine")
        self.pushed: Pushed | None = None
        self._writer = Writer(Path(settings.folder), model)
        self._settings, self._model, self._sampling = settings, model, sampling
        self._length, self._keep_experts = length, keep_experts
        self._mask_size = sampling_mask_size(sampling, model.vocab_size)
        self._score = make_score(StepSettings(config=model, mesh=mesh), keep_experts=has_experts(model))
        self._scaled = self._score
        if sampling.temperature != 1:
            self._scaled = make_score(StepSettings(config=model, mesh=mesh, temperature=sampling.temperature))
        self._first: float | None = None  # the first probe's difference

    def push(self, params: Params, version: int) -> Weights:
        """Write the weights, have every server load them, probe each, and delete older versions."""
        leaf, before = jax.tree.leaves(params)[0], self.pushed
        if before is not None and before.leaf is leaf and before.weights.version == version:
            return before.weights
        folder = Path(self._settings.folder)
        multihost.all_or_raise(lambda: weights.require_folder(folder))
        written = self._writer.write(version, params)
        probes = before.probes if before is not None else self._choose_probes(params)
        learner, _ = probe.learner_scores(self._score, params, probes, self.mesh)
        limit = probe.tolerance(self._model, self._settings.tolerance, self._first)
        self.pushed = pushed = Pushed(leaf, written, probes, learner, limit, Weights(None, version, {}))
        self.servers.pushes += 1
        begun = time.monotonic()
        probed = self._install_everywhere()
        seconds = time.monotonic() - begun
        scored = float(np.max([probe.largest_difference(learner, scores) for scores, _ in probed]))
        sampled = float(np.max([self._sampled_difference(params, probes, answers) for _, answers in probed]))
        require_equal(sampled, limit, "tokens that it sampled")
        self._first = max(scored, sampled) if self._first is None else self._first
        weights.remove_others(written.path)
        metrics = {
            "engine/push_bytes": float(written.bytes),
            "engine/write_seconds": written.seconds,
            "engine/load_seconds": seconds,
            "engine/probe_abs_diff": scored,
            "engine/probe_sampled_abs_diff": sampled,
        }
        self.pushed = pushed._replace(weights=Weights(None, version, metrics))
        return self.pushed.weights

    def _choose_probes(self, params: Params) -> list[list[int]]:
        """The sequences of the probes, equal in all runs of a model; with experts, those that use the most of them."""
        length = min(probe.LONGEST, self._sampling.max_prompt_tokens + self._sampling.max_tokens)
        found = probe.candidates(4 * self._settings.probes, length, self._model.vocab_size)
        _, expert_KLTA = probe.learner_scores(self._score, params, found, self.mesh)
        chosen = probe.choose_rows(found, expert_KLTA, self._settings.probes, self._model.num_experts)
        return [found[number] for number in chosen]

    def _install_everywhere(self) -> list[Probed]:
        """Install the newest push on the servers that are there; one must be within the timeout. Collective."""
        end = time.monotonic() + self._settings.timeout
        while True:
            there = self.servers.present() if jax.process_index() == 0 else []
            futures = [self.pool.submit(self._try_install, server) for server in there]
            wait(futures, self.servers)
            if found := on_primary(lambda: self._collect(futures, end)):  # noqa: B023  (called at once)
                return found

    def _try_install(self, server: Server) -> Probed | None:
        try:
            return self.install(server)
        except UnreachableError as problem:
            self.servers.lose(server, str(problem))
            return None

    def _collect(self, futures: Sequence[Future[Probed | None]], end: float) -> list[Probed]:
        """The answers of the servers that are there; empty if none is, after a pause."""
        self.servers.raise_problem()
        found = [one for future in futures if (one := future.result()) is not None]
        if not found and time.monotonic() > end:
            raise FailureError(describe_gone(self._settings.timeout, self.servers.state().gone))
        if not found:
            time.sleep(PAUSE)
        return found

    def install(self, server: Server) -> Probed:
        """Give a server the newest weights, and compare its log-probs with the learner's.

        Raises:
          UnreachableError: newer ones were pushed meanwhile, and these perhaps deleted: it is to be tried again.
        """
        pushed = self.pushed
        assert pushed is not None
        try:
            probed = self._install(server, pushed)
        except (RefusedError, FailureError):
            if self.pushed and self.pushed.written is pushed.written:
                raise
        else:
            if self.pushed and self.pushed.written is pushed.written:
                return probed
        raise UnreachableError(f"{server.address}: newer weights were pushed while it loaded older ones")

    def _install(self, server: Server, pushed: Pushed) -> Probed:
        require_fit(server.state(LOOK), self._model, self._length, keep_experts=self._keep_experts)
        server.load(pushed.written)
        if (served := server.state(LOOK)).digest != pushed.written.digest:
            raise RefusedError(
                f"{server.address}: wanted version {pushed.written.version}, which it was told to load; it still has "
                f"{served.version}"
            )
        self.servers.confirm(server.address, served.instance)
        scores = [server.score(row) for row in pushed.probes]
        difference = probe.largest_difference(pushed.learner, scores)
        require_equal(difference, pushed.limit, "tokens that it was given", server.address)
        asks = [
            continue_probe(row, number, self._sampling, self._mask_size) for number, row in enumerate(pushed.probes)
        ]
        answers = [server.sample(ask) for ask in asks]
        return scores, [(one.tokens, one.logps, list(one.kept)) for one in answers]

    def _sampled_difference(self, params: Params, probes: Sequence[Sequence[int]], answers: Sequence[Sampled]) -> float:
        """The largest difference for the tokens that a server has sampled after the probes' beginnings. Collective."""
        whole = []
        for row, (tokens, _, _) in zip(probes, answers, strict=True):
            whole.append([*row[: max(1, len(row) - len(tokens))], *tokens])
        size, V = self._mask_size, self._model.vocab_size
        sets = [pad_sets(kept, size, V) for _, _, kept in answers] if size else []
        ours, _ = probe.learner_scores(self._scaled, params, whole, self.mesh, sets)
        theirs = [np.array(logps, np.float32) for _, logps, _ in answers]
        return probe.largest_difference([own[-len(logps) :] for own, logps in zip(ours, theirs, strict=True)], theirs)


def require_fit(served: Served, model: ModelConfig, length: int, *, keep_experts: bool) -> None:
    """FailureError unless a server has the run's model and room for its prompts and completions."""
    limits = served.limits
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if limits.get(name, value := getattr(model, name)) != value:
            raise FailureError(f"engine: {served.address}: wanted the run's model, {name} {value}, got {limits[name]}")
    if limits.get("max_tokens", length) < length:
        raise FailureError(
            f"engine: {served.address}: wanted a context of {length} tokens for the longest prompt and completion, got "
            f"{limits['max_tokens']}"
        )
    if served.dtype and served.dtype != model.dtype:
        raise FailureError(f"engine: {served.address}: wanted {model.dtype} (model.dtype), got {served.dtype}")
    if keep_experts and not limits.get("routed_experts", 1):
        raise FailureError(
            f'engine: {served.address}: wanted a server that returns experts, for routing_replay="sampler"'
        )


def require_equal(difference: float, limit: float, what: str, address: str = "a server") -> None:
    """FailureError if log-probs differ by more than rounding; NaN does."""
    if not difference <= limit:
        raise FailureError(
            f"engine: {address} does not compute what the learner trained: log-probs of {what} differ by "
            f"{difference:.2g} on average, wanted at most {limit:.2g} (engine.tolerance); nothing was sampled with "
            "these weights"
        )


def continue_probe(row: Sequence[int], number: int, sampling: Sampling, mask_size: int) -> Ask:
    """The request for a few tokens after the beginning of a probe, which no stop token ends."""
    most = min(probe.CONTINUED, sampling.max_tokens)
    return Ask(row[: max(1, len(row) - most)], most, number, sampling, False, (), False, mask_size)


def on_primary(work: Callable[[], T]) -> T:
    """`work()` of process 0, on all of them, what servers raise as a FailureError. Collective."""

    def run() -> T | None:
        try:
            return work() if jax.process_index() == 0 else None
        except (RefusedError, UnreachableError) as problem:
            raise FailureError(f"engine: {problem}") from None

    return multihost.gather(multihost.all_or_raise(run))[0]  # type: ignore[return-value]  # process 0 has one


def wait(futures: Sequence[Future[T]], servers: Servers) -> None:
    """`interrupt.wait`; if it is interrupted, the requests end."""
    try:
        interrupt.wait(futures)
    except BaseException:
        servers.close()
        raise
