"""The contract of samplers, by one or more servers: weights through a folder, tokens over HTTP.

A request that gets no answer is sent again, to this server or to another. A server that was gone gets the newest
weights, and is probed, before it is asked for anything. So a server may be killed and started again at any time: no
sample is lost, and none is sampled with other weights than the run believes.

Process 0 alone talks to servers. Every process has all rows, and gets what process 0 was answered in one broadcast.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from gspax.config import Engine, Evaluation, ModelConfig, Sampling, has_experts, sampling_mask_size
from gspax.errors import FailureError
from gspax.http_client import RefusedError, UnreachableError
from gspax.learner.forward import StepSettings
from gspax.learner.train_step import make_score
from gspax.parallel import multihost, timeline, watchdog
from gspax.rollout.agents.interaction import AgentInteraction
from gspax.rollout.agents.rollouts import sample_agents
from gspax.rollout.contract import HeldSamples, Request, Weights
from gspax.rollout.episodes import EncodedProblem, RowsOnHost, answer, set_finished
from gspax.rollout.grading import Started
from gspax.rollout.servers import probe, rows, weights
from gspax.rollout.servers.failover import ATTEMPTS, STATE_TIMEOUT, ServedAnswer, Servers, find_restarted
from gspax.rollout.servers.rows import Row
from gspax.rollout.servers.server import Answer, CompletionRequest, Server, require_fit
from gspax.rollout.servers.sglang import SGLang
from gspax.rollout.servers.vllm import VLLM
from gspax.rollout.servers.weights import Writer, Written
from gspax.run import interrupt
from gspax.sampler.sampler import Progress
from gspax.sampler.state import Replies, SampleOptions
from gspax.types import Array, Params, Rollout

T = TypeVar("T")


class Pushed(NamedTuple):
    """The newest push: what every server must have."""

    leaf: Array  # of the learner's parameters, by which a second push of the same ones is recognized
    written: Written
    probes: list[list[int]]
    learner: list[np.ndarray]  # its log-probs of the probes
    limit: float  # the largest difference of log-probs that counts as rounding
    weights: Weights


Probed = tuple[list[np.ndarray], list[probe.ProbeAnswer]]  # log-probs of the probes, and what was sampled after them
Asks = Mapping[int, tuple[int, CompletionRequest]]  # by row: its group, and the request for its next tokens
Answers = dict[int, tuple[Any, ...]]  # by row: the number of the server, and the fields of its `Answer`


class ServerSampler:
    """Samples with the servers of a run, and pushes weights to them.

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
        self.mesh, self.servers = mesh, Servers(servers, settings.timeout, self.install)
        self.set_aside = self.servers.set_aside
        self._requests = ThreadPoolExecutor(settings.requests * len(servers), thread_name_prefix="gspax_engine")
        self._primary = ThreadPoolExecutor(1, thread_name_prefix="gspax_servers")  # work of process 0
        self._rollouts = ThreadPoolExecutor(1, thread_name_prefix="gspax_rollout")  # one rollout after the other
        self._pending: list[Future[Any]] = []
        self._pushed: Pushed | None = None
        self._writer = Writer(Path(settings.folder), model)
        self._settings, self._model, self._sampling = settings, model, sampling
        self._length, self._keep_experts = length, keep_experts
        self._mask_size = sampling_mask_size(sampling, model.vocab_size)
        step = StepSettings(config=model, mesh=mesh)
        self._score = self._score_scaled = make_score(step, keep_experts=has_experts(model))
        if sampling.temperature != 1:
            self._score_scaled = make_score(replace(step, temperature=sampling.temperature))
        self._first_difference: float | None = None  # the first probe's difference

    def sample(self, weights: Weights, request: Request) -> Future[tuple[Rollout, Started]]:
        """Sample each completion by a request of its own, with an environment each turn, in another thread."""
        if isinstance(request.interaction, AgentInteraction):
            return sample_agents(self, weights, request, request.interaction)
        return self.submit(partial(self._sample, weights, request))

    def hold(self, key: Array, options: SampleOptions) -> HeldSamples:
        """Hold rows on the host."""
        return SamplesOnServers(self, key, options)

    def fetch(self, rollout: Rollout) -> Rollout:
        """Return the rollout unchanged: servers return samples on the host."""
        return rollout

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run work in another thread, after what was submitted before; a push waits for it.

        With several processes it is done when this returns, because a thread of its own cannot exchange values.
        """
        if jax.process_count() > 1:
            begun = Future[T]()
            begun.set_result(work())
        else:
            begun = self._rollouts.submit(work)
        self._pending = [future for future in [*self._pending, begun] if not future.done()]
        return begun

    def _sample(self, weights: Weights, request: Request) -> tuple[Rollout, Started]:
        request = replace(request, options=replace(request.options, mesh=self.mesh, turns=bool(request.interaction)))
        options, count = request.options, len(request.prompt_ids) * request.options.sampling.group
        assert not isinstance(request.interaction, AgentInteraction), "see `sample`"
        sampled = self.place(request)
        if request.interaction is None:
            self.complete(sampled, weights, request)
            return rows.assemble(sampled, count, options), Started()
        on_host = RowsOnHost(request.encoded, options.sampling.group, np.zeros(count, bool))
        while not on_host.ended_B.all():
            self.complete(sampled, weights, request)
            progress = rows.describe_progress(sampled, count, options)
            if (replies := answer(request.interaction, on_host, progress, options)) is not None:
                rows.add_replies(sampled, replies)
        return set_finished(rows.assemble(sampled, count, options), on_host.started), on_host.started

    def place(self, request: Request) -> dict[int, Row]:
        """Begin the rows of new groups, for which servers are chosen anew. Collective."""
        self.servers.forget_groups()
        return rows.begin(request)

    def complete(self, sampled: Mapping[int, Row], weights: Weights, request: Request) -> None:
        """Sample the rows that are not finished up to a stop token, the limit, or the end of a chunk. Collective."""
        options, pushed = request.options, self._pushed
        assert pushed is not None and weights.version == pushed.weights.version, "wanted the newest weights"
        key = np.asarray(multihost.to_host(jax.random.key_data(request.key))).tobytes()
        asks = {
            number: (row.group, rows.to_request(row, key, options))
            for number, row in sampled.items()
            if rows.is_active(row, options.sampling)
        }
        answers = self._on_primary(lambda stop: self._ask_all(asks, pushed, request, stop))
        for number, (source, *values) in answers.items():
            rows.add(sampled[number], Answer(*values), weights.version, options, source)
        if jax.process_count() > 1:  # process 0 has told it already
            ended = {number: Answer(*values) for number, (_, *values) in answers.items() if jax.process_index() != 0}
            multihost.all_or_raise(lambda: end_rows(request, ended))

    def _ask_all(self, asks: Asks, pushed: Pushed, request: Request, stop: threading.Event) -> Answers:
        """Ask until every row has an answer of a server that has had the newest weights ever since it was asked."""
        given, failed_rounds = Answers(), 0
        find_restarted(self.servers, pushed.written)
        while len(given) < len(asks):
            missing = {number: ask for number, ask in asks.items() if number not in given}
            answered = self._send(missing, request, stop)
            instances = find_restarted(self.servers, pushed.written)
            new = {n: (one.number, *one.answer) for n, one in answered.items() if one.is_current(instances)}
            given |= new
            failed_rounds = 0 if new else failed_rounds + 1
            if failed_rounds == ATTEMPTS:
                raise FailureError(f"engine: servers were asked {ATTEMPTS} times, and restarted before each answer")
        return given

    def _send(self, asks: Asks, request: Request, stop: threading.Event) -> dict[int, ServedAnswer]:
        """Send all requests at once; the first problem ends the others."""
        sent = {self._requests.submit(self.servers.ask, *ask, stop): number for number, ask in asks.items()}
        try:
            for done in futures.as_completed(sent):
                end_rows(request, {sent[done]: done.result().answer})
            return {number: done.result() for done, number in sent.items()}
        except BaseException:
            stop.set()
            for future in sent:
                future.cancel()
            self.servers.close()
            raise

    def _on_primary(self, work: Callable[[threading.Event], T]) -> T:
        """Run `work` in a thread of process 0, and return its result on all processes. Collective, and a stop point.

        The result is of plain types and arrays. What servers raise is a FailureError; a signal ends the requests.
        """
        stop, answered = threading.Event(), 0
        begun = [self._primary.submit(work, stop)] if jax.process_index() == 0 else []
        try:
            is_waiting = True
            while is_waiting:
                waiting = futures.wait(begun, timeout=interrupt.POLL).not_done
                interrupt.stop_point()
                is_waiting, count = multihost.gather((bool(waiting), self.servers.answered))[0]
                if count != answered:
                    watchdog.progress()
                answered = count
        except BaseException:
            stop.set()
            self.servers.close()
            raise

        def read() -> T | None:
            try:
                return begun[0].result() if begun else None
            except (RefusedError, UnreachableError) as problem:
                raise FailureError(f"engine: {problem}") from None

        return multihost.gather(multihost.all_or_raise(read))[0]  # type: ignore[return-value]  # process 0 has one

    def push(self, params: Params, version: int) -> Weights:
        """Write the weights, have every server load them, probe each, and delete older versions."""
        interrupt.wait(self._pending)  # they are sampled with the weights before
        leaf, before = jax.tree.leaves(params)[0], self._pushed
        if before is not None and before.leaf is leaf and before.weights.version == version:
            return before.weights
        multihost.all_or_raise(lambda: weights.require_folder(Path(self._settings.folder)))
        written = self._writer.write(version, params)
        if before is None:
            length = min(probe.LONGEST, self._sampling.max_prompt_tokens + self._sampling.max_tokens)
            probes = probe.choose(self._score, params, self.mesh, self._model, self._settings.probes, length)
        else:
            probes = before.probes
        learner, _ = probe.learner_scores(self._score, params, probes, self.mesh)
        limit = probe.tolerance(self._model, self._settings.tolerance, self._first_difference)
        self._pushed = pushed = Pushed(leaf, written, probes, learner, limit, Weights(None, version, {}))
        self.servers.pushes += 1
        begun, probed = time.monotonic(), self._on_primary(self._install_everywhere)
        seconds = time.monotonic() - begun
        timeline.add("pushes", f"version {version}", begun - written.seconds, begun + seconds)
        scored = float(np.max([probe.largest_difference(learner, scores) for scores, _ in probed]))
        compare = partial(probe.sampled_difference, self._score_scaled, params, self.mesh, probes, size=self._mask_size)
        sampled = float(np.max([compare(answers, vocab_size=self._model.vocab_size) for _, answers in probed]))
        probe.require_equal(sampled, limit, "tokens that it sampled")
        self._first_difference = max(scored, sampled) if self._first_difference is None else self._first_difference
        weights.remove_others(written.path)
        metrics = {
            "engine/push_bytes": float(written.bytes),
            "engine/write_seconds": written.seconds,
            "engine/load_seconds": seconds,
            "engine/probe_abs_diff": scored,
            "engine/probe_sampled_abs_diff": sampled,
        }
        self._pushed = pushed._replace(weights=Weights(None, version, metrics))
        return self._pushed.weights

    def _install_everywhere(self, stop: threading.Event) -> list[Probed]:
        """Install the newest push on the servers that are there; one must be within the timeout."""
        for _ in range(ATTEMPTS):
            self.servers.wait(stop)
            tried = [self._requests.submit(self._try_install, server) for server in self.servers.usable()]
            if installed := [one for future in tried if (one := future.result()) is not None]:
                return installed
        raise FailureError(f"engine: servers were given their weights {ATTEMPTS} times, and went away each time")

    def _try_install(self, server: Server) -> Probed | None:
        try:
            return self.install(server)
        except UnreachableError as problem:
            self.servers.lose(server, str(problem))
            return None

    def install(self, server: Server) -> Probed:
        """Give a server the newest weights, and compare its log-probs with the learner's.

        Raises:
          UnreachableError: newer ones were pushed meanwhile, and these perhaps deleted: it is to be tried again.
        """
        pushed = self._pushed
        assert pushed is not None
        try:
            probed = self._install(server, pushed)
        except (RefusedError, FailureError):
            if self._pushed and self._pushed.written is pushed.written:
                raise
        else:
            if self._pushed and self._pushed.written is pushed.written:
                return probed
        raise UnreachableError(f"{server.address}: newer weights were pushed while it loaded older ones")

    def _install(self, server: Server, pushed: Pushed) -> Probed:
        require_fit(server.state(STATE_TIMEOUT), self._model, self._length, keep_experts=self._keep_experts)
        server.load(pushed.written)
        if (loaded := server.state(STATE_TIMEOUT)).digest != pushed.written.digest:
            raise RefusedError(
                f"{server.address}: wanted version {pushed.written.version}, which it was told to load; it still has "
                f"{loaded.version}"
            )
        self.servers.confirm(server.address, loaded.instance)
        scores = [server.score(row) for row in pushed.probes]
        difference = probe.largest_difference(pushed.learner, scores)
        probe.require_equal(difference, pushed.limit, "tokens that it was given", server.address)
        asks = [probe.to_request(row, n, self._sampling, self._mask_size) for n, row in enumerate(pushed.probes)]
        answers = [server.sample(ask) for ask in asks]
        return scores, [(one.tokens, one.logps, list(one.kept)) for one in answers]


class SamplesOnServers:
    """The samples of partial rollouts, as rows on the host. A chunk of a sample is a request of its own.

    Its first token needs the keys and values of those before it: the server's prefix cache has them, or, after a push,
    it computes them with the new weights.
    """

    def __init__(self, sampler: ServerSampler, key: Array, options: SampleOptions) -> None:
        self._sampler, self._options = sampler, options
        self._request = Request(encoded={}, prompt_ids=(), key=key, options=options)
        self._count = options.sampling.prompts * options.sampling.group
        self._rows = dict[int, Row]()
        self._chunks: list[Future[None]] = []  # that have begun

    def admit(
        self, encoded: Mapping[int, EncodedProblem], ids: Sequence[int], fresh_R: np.ndarray, weights: Weights
    ) -> None:
        """Begin new rows. Nothing is sampled before the next chunk."""
        self._rows |= self._sampler.place(replace(self._request, encoded=encoded, prompt_ids=ids))

    def advance(self, weights: Weights) -> None:
        """Ask for a chunk of each unfinished row, after those that were asked for before."""
        self._chunks.append(self._sampler.submit(partial(self._sampler.complete, self._rows, weights, self._request)))

    def progress(self) -> Progress:
        """Wait for the servers, and report how far all rows are."""
        interrupt.wait(self._chunks)
        for chunk in self._chunks:
            chunk.result()
        self._chunks = []
        return rows.describe_progress(self._rows, self._count, self._options)

    def reply(self, replies: Replies, weights: Weights) -> None:
        """Append replies to the rows that wait for them."""
        rows.add_replies(self._rows, replies)

    def take(self, row_B: np.ndarray) -> Rollout:
        """Return finished rows, and free their places."""
        taken = {number: self._rows[row] for number, row in enumerate(row_B.tolist())}
        for row in set(row_B.tolist()):
            del self._rows[row]
        return rows.assemble(taken, len(taken), self._options)


def end_rows(request: Request, answers: Mapping[int, Answer]) -> None:
    """Tell the run which completions have ended, so that their rewards start."""
    if answers and request.on_ended is not None:
        request.on_ended({number: np.array(answers[number].tokens, np.int32) for number in sorted(answers)})


def connect(
    settings: Engine,
    model: ModelConfig,
    sampling: Sampling,
    evaluation: Evaluation,
    *,
    keep_experts: bool,
    mesh: jax.sharding.Mesh,
) -> ServerSampler:
    """Make the sampler of an experiment with servers; nothing is asked of them yet.

    Raises:
      UserError: an address is none.
    """
    program = SGLang if settings.server == "sglang" else VLLM
    servers = [program(address, model, settings.timeout) for address in settings.addresses]
    length = context_length(sampling, evaluation)
    return ServerSampler(
        settings, model, sampling, length=length, keep_experts=keep_experts, mesh=mesh, servers=servers
    )


def context_length(sampling: Sampling, evaluation: Evaluation) -> int:
    """Return the most tokens of a prompt and its completion, in training and evaluations, and the one after a probe."""
    held_out = evaluation.max_tokens or sampling.max_tokens
    tasks = [
        (task.max_prompt_tokens or sampling.max_prompt_tokens) + (task.max_tokens or held_out)
        for task in evaluation.tasks
    ]
    return max(sampling.max_prompt_tokens + max(sampling.max_tokens, held_out), *tasks, 0) + 1
