"""The contract of samplers, by one or more servers: weights through a folder, tokens over HTTP.

A request that gets no answer is sent again, to this server or to another. A server that was gone gets the newest
weights, and is probed, before it is asked for anything. So a server may be killed and started again at any time: no
sample is lost, and none is sampled with other weights than the run believes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from gspax.config import Engine, Evaluation, ModelConfig, Sampling
from gspax.errors import FailureError
from gspax.http_client import RefusedError, UnreachableError
from gspax.parallel import multihost
from gspax.rollout.contract import Held, Request, Served, Weights
from gspax.rollout.episodes import Ready, RowsOnHost, answer, set_finished
from gspax.rollout.grading import Started
from gspax.rollout.servers import rows
from gspax.rollout.servers.failover import ATTEMPTS, Given, Servers, State
from gspax.rollout.servers.push import LOOK, Pushed, Pusher, on_primary, wait
from gspax.rollout.servers.rows import Row
from gspax.rollout.servers.server import Ask, Server
from gspax.rollout.servers.sglang import SGLang
from gspax.rollout.servers.vllm import VLLM
from gspax.run import interrupt
from gspax.sampler.continuous_batching import Replies, SampleOptions
from gspax.sampler.sampler import Progress
from gspax.types import Array, Params, Rollout

T = TypeVar("T")


class Remote:
    """Servers that sample for a run."""

    def __init__(self, pusher: Pusher) -> None:
        self._pusher = pusher
        self._line = ThreadPoolExecutor(1, thread_name_prefix="gspax_rollout")  # one rollout after the other
        self._asked: list[Future[Any]] = []

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The learner's mesh."""
        return self._pusher.mesh

    def push(self, params: Params, version: int) -> Weights:
        """Write the weights, have every server load them, probe each, and delete older versions."""
        interrupt.wait(self._asked)  # they are sampled with the weights before
        return self._pusher.push(params, version)

    def fetch(self, rollout: Rollout) -> Rollout:
        """It is there."""
        return rollout

    def sample(self, weights: Weights, request: Request) -> Future[tuple[Rollout, Started]]:
        """Sample each completion by a request of its own, with an environment each turn, in another thread."""
        return self.begin(partial(self._sample, weights, request))

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Work in another thread, which a push waits for.

        With several processes it is done when this returns, because a thread of its own cannot exchange values.
        """
        if jax.process_count() > 1:
            begun = Future[T]()
            begun.set_result(work())
        else:
            begun = self._line.submit(work)
        self._asked = [asked for asked in [*self._asked, begun] if not asked.done()]
        return begun

    def _sample(self, weights: Weights, request: Request) -> tuple[Rollout, Started]:
        request = replace(request, options=replace(request.options, mesh=self.mesh, turns=bool(request.interaction)))
        options, count = request.options, len(request.ready) * request.options.sampling.group
        own = self.place(request)
        if request.interaction is None:
            self.complete(own, weights, request)
            return rows.assemble(own, count, options), Started()
        on_host = RowsOnHost(list(request.ready), np.zeros(count, bool))
        while not on_host.ended_B.all():
            self.complete(own, weights, request)
            progress = rows.describe_progress(own, count, options)
            rows.add_replies(own, answer(request.interaction, on_host, progress, options))
        return set_finished(rows.assemble(own, count, options), on_host.started), on_host.started

    def hold(self, key: Array, options: SampleOptions) -> Held:
        """Rows on the host."""
        return OnServers(self, key, options)

    def place(self, request: Request) -> dict[int, Row]:
        """This process's rows of new groups, for which servers are chosen anew. Collective."""
        self._pusher.servers.forget_groups()
        return multihost.all_or_raise(lambda: rows.begin(request))

    def complete(self, own: Mapping[int, Row], weights: Weights, request: Request) -> None:
        """Sample the rows that are not finished up to a stop token, the limit, or the end of a chunk. Collective."""
        options, servers, pushed = request.options, self._pusher.servers, self._pusher.pushed
        assert pushed is not None and weights.version == pushed.weights.version, "wanted the newest weights"
        key = np.asarray(multihost.to_host(jax.random.key_data(request.key))).tobytes()
        agree(self._pusher)
        multihost.all_or_raise(lambda: bool(find_restarted(servers, pushed)))
        asks = {
            number: (row.group, rows.to_ask(row, key, options))
            for number, row in own.items()
            if rows.is_active(row, options.sampling)
        }
        given, without = dict[int, Given](), 0
        while True:
            answered = self._ask_all({number: ask for number, ask in asks.items() if number not in given}, request)
            instances = multihost.all_or_raise(lambda: find_restarted(servers, pushed))
            # Answers of servers that have been started again since they were asked do not count
            new = {number: one for number, one in answered.items() if instances.get(one.address) == one.instance}
            given |= new
            without = 0 if new or len(given) == len(asks) else without + 1
            missing, rounds = zip(*multihost.gather((len(asks) - len(given), without)), strict=True)
            if not any(missing):
                break
            if max(rounds) == ATTEMPTS:
                raise FailureError(
                    f"engine: process {rounds.index(ATTEMPTS)} has asked {ATTEMPTS} times, and no server had an answer "
                    "for it that counts: can it reach them?"
                )
            agree(self._pusher)
        for number, one in given.items():
            rows.add(own[number], one.answer, pushed.weights.version, options)

    def _ask_all(self, asks: Mapping[int, tuple[int, Ask]], request: Request) -> dict[int, Given]:
        """Send all requests at once, by row with its group; some may have no answer (`Servers.ask`). Collective."""
        pool, servers, stop = self._pusher.pool, self._pusher.servers, threading.Event()
        futures = {pool.submit(servers.ask, *ask, stop): number for number, ask in asks.items()}
        given, problems = dict[int, Given](), list[Exception]()

        def end() -> None:
            stop.set()
            for future in futures:
                future.cancel()
            servers.close()

        def add(done: set[Future[Given | None]]) -> None:
            try:
                new = {futures[future]: one for future in done if (one := future.result()) is not None}
                given.update(new)
                if new and request.ended is not None:
                    request.ended({number: np.array(new[number].answer.tokens, np.int32) for number in sorted(new)})
            except Exception as problem:  # raised below, on all processes
                problems.append(problem)
                end()

        try:
            interrupt.wait(futures, add)
        except BaseException:
            end()
            raise
        multihost.all_or_raise(lambda: raise_first(problems))
        return given

    def score(self, weights: Weights, given: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Each row by the first server that is there."""
        server = self._pusher.servers.present()[:1]
        futures = [
            self._pusher.pool.submit(one.score, row) for one in server for row in given if jax.process_index() == 0
        ]
        wait(futures, self._pusher.servers)
        return on_primary(lambda: [future.result() for future in futures])

    def pause(self) -> None:
        """Hold the requests of all servers."""
        on_primary(lambda: call_each(self._pusher.servers, lambda server: server.pause()))

    def resume(self) -> None:
        """Go on with them."""
        on_primary(lambda: call_each(self._pusher.servers, lambda server: server.resume()))

    def state(self) -> list[Served]:
        """The servers that are there."""
        return [server.state(LOOK) for server in self._pusher.servers.present()]


class OnServers:
    """The samples of partial rollouts, as rows on the host. A chunk of a sample is a request of its own.

    Its first token needs the keys and values of those before it: the server's prefix cache has them, or, after a push,
    it computes them with the new weights.
    """

    def __init__(self, remote: Remote, key: Array, options: SampleOptions) -> None:
        self._remote, self._options = remote, options
        self._request = Request(ready=(), prompt_ids=(), key=key, options=options)
        self._count = options.sampling.prompts * options.sampling.group
        self._own = dict[int, Row]()
        self._chunks: list[Future[None]] = []  # that have begun

    def admit(self, ready: Sequence[Ready | None], ids: Sequence[int], fresh_R: np.ndarray, weights: Weights) -> None:
        """Nothing is sampled before the next chunk."""
        self._own |= self._remote.place(replace(self._request, ready=ready, prompt_ids=ids))

    def advance(self, weights: Weights) -> None:
        """Ask for a chunk of each unfinished row, after those that were asked for before."""
        self._chunks.append(self._remote.begin(partial(self._remote.complete, self._own, weights, self._request)))

    def progress(self) -> Progress:
        """Wait for the servers."""
        interrupt.wait(self._chunks)
        for chunk in self._chunks:
            chunk.result()
        self._chunks = []
        return rows.describe_progress(self._own, self._count, self._options)

    def reply(self, replies: Replies, weights: Weights) -> None:
        """Append them to the rows."""
        rows.add_replies(self._own, replies)

    def take(self, row_B: np.ndarray) -> Rollout:
        """Give each process the rows of its devices."""
        taken = [self._own.pop(row, None) for row in row_B.tolist()]
        everywhere = multihost.gather_rows([vars(row) if row else None for row in taken])
        own = {number: Row(**values) for number, values in enumerate(everywhere)}
        return rows.assemble(own, len(own), self._options)


def connect(
    settings: Engine,
    model: ModelConfig,
    sampling: Sampling,
    evaluation: Evaluation,
    *,
    keep_experts: bool,
    mesh: jax.sharding.Mesh,
) -> Remote:
    """The servers of an experiment, none of which is asked for anything yet.

    Raises:
      UserError: an address is none.
    """
    program = SGLang if settings.server == "sglang" else VLLM
    servers = [program(address, model, settings.timeout) for address in settings.addresses]
    length = context_length(sampling, evaluation)
    return Remote(
        Pusher(settings, model, sampling, length=length, keep_experts=keep_experts, mesh=mesh, servers=servers)
    )


def context_length(sampling: Sampling, evaluation: Evaluation) -> int:
    """The most tokens of a prompt and its completion, in training and in evaluations, and the one after a probe."""
    held_out = evaluation.max_tokens or sampling.max_tokens
    tasks = [
        (task.max_prompt_tokens or sampling.max_prompt_tokens) + (task.max_tokens or held_out)
        for task in evaluation.tasks
    ]
    return max(sampling.max_prompt_tokens + max(sampling.max_tokens, held_out), *tasks, 0) + 1


def agree(pusher: Pusher) -> None:
    """Tell process 0 which servers are gone, wait until it has one, and learn which it has. Collective."""
    if jax.process_count() == 1:
        return
    servers, stop, waits = pusher.servers, threading.Event(), list[Future[list[str]]]()
    states = multihost.gather(tuple(servers.state()))
    if is_primary := jax.process_index() == 0:
        for state in states[1:]:
            servers.lose_too(State(*state))
        waits.append(pusher.pool.submit(servers.wait, stop))
    try:
        interrupt.wait(waits)
    finally:
        stop.set()

    def read_state() -> tuple[dict[str, str], ...]:
        waits[0].result()  # raises if no server is there
        return tuple(servers.state())

    state = on_primary(read_state)
    if not is_primary:
        servers.take_over(State(*state))


def find_restarted(servers: Servers, pushed: Pushed) -> dict[str, str]:
    """The instances of the servers that have the newest weights; one that has none was started again.

    Raises:
      FailureError: another run has pushed to a server. Process 0 knows, because it gives them their weights; to another
        process such a server is gone.
    """
    known, instances = servers.state().instance, dict[str, str]()
    for server in servers.present():
        try:
            served = server.state(LOOK)
        except UnreachableError as problem:
            servers.lose(server, str(problem))
            continue
        except RefusedError as problem:
            raise FailureError(f"engine: {problem}") from None
        if served.version is None:
            servers.lose(server, f"{server.address} was started again")
        elif served.digest != pushed.written.digest or served.instance != known.get(server.address):
            reason = (
                f"{server.address}: wanted version {pushed.weights.version} of this run, it has other weights, "
                f"version {served.version}: does another run push to it?"
            )
            if jax.process_index() == 0:
                raise FailureError(f"engine: {reason}")
            servers.lose(server, reason)
        else:
            instances[server.address] = served.instance
    return instances


def call_each(servers: Servers, call: Callable[[Server], None]) -> None:
    """Call it with every server that is there."""
    for server in servers.present():
        call(server)


def raise_first(problems: Sequence[Exception]) -> None:
    """Raise the first problem, if there is one."""
    if problems:
        raise problems[0]
