"""Let 512 agents talk with one policy at once: requests that were answered, and slots that were filled.

    python experiments/benchmarks/bench_agents.py

A toy model samples one rollout of 64 problems, eight agents each. A pass is given 10 ms more, about what one of a
large model takes on an accelerator, in which the processor is free for agents and endpoint. An agent is a coroutine
with OpenAI's client, as its users write it: two to four requests, and up to 50 ms of a tool's work between them. The
faults hit all agents of some problems, so that those of the others can be compared with an undisturbed rollout, token
by token. *Filled* is the share of the passes' slots that got a token: of all passes, and of those before which a
conversation waited for a slot. The table is written into agents.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import openai

from gspax import advantages, losses
from gspax.commands.environment import prepare, skip_absent_tpu
from gspax.config import Experiment, Grading, ModelConfig, Optimizer, Sampling, Schedule, Turns
from gspax.config.protocols import Problem
from gspax.data import CharChat
from gspax.data.tasks import sort
from gspax.learner.state import init_state
from gspax.rewards.environments import Agent
from gspax.rewards.environments.agents import Endpoint
from gspax.rollout.contract import Weights
from gspax.rollout.in_process import SamplesOnDevices
from gspax.rollout.runtime import make_runtime
from gspax.sampler.state import State
from gspax.training.in_flight import InFlight, grade, next_rollout
from gspax.types import Rollout

PAGE = Path(__file__).with_name("agents.md")
BEGIN, END = "<!-- agents: written by bench_agents.py -->", "<!-- end of agents -->"
CHAT = CharChat("0123456789=" + "".join(map(chr, range(0x100, 0x1F4))), user="{}=")  # few answers end early
PROBLEMS, GROUP, MOST, TIMEOUT = 64, 8, 64, 120.0
PASS = 0.01  # seconds
TOOL, PATIENCE = 0.05, 1.0  # seconds of a tool at most; until a client cancels its request
FAULTS = ("vanish", "cancel", "raise")


@dataclass
class Load:
    """What the agents of a rollout did, and what its passes filled."""

    faults: bool
    counts: Counter[str] = field(default_factory=Counter)
    filled: np.ndarray = field(default_factory=lambda: np.zeros((2, 2)))  # all passes, crowded ones; tokens, slots
    _client: list[openai.DefaultAsyncHttpxClient] = field(default_factory=list)

    def fault(self, prompt: str) -> str:
        """Return what the agents of a problem do wrong; empty for nothing."""
        number = zlib.crc32(prompt.encode()) % 8
        return FAULTS[number] if self.faults and number < len(FAULTS) else ""

    def shares(self) -> tuple[float, str]:
        """Return the shares of the slots that were filled: of all passes, and of crowded ones if there were any."""
        (tokens, slots), (some, crowded) = self.filled
        return tokens / slots, f"{some / crowded:.0%}" if crowded else ""

    async def solve(self, problem: Problem, endpoint: Endpoint) -> float:
        """Ask a few times; the reward is the number of answers."""
        chance, fault = zlib.crc32(problem.prompt.encode()), self.fault(problem.prompt)
        if not self._client:  # one for all agents: each would read the certificates again
            self._client.append(openai.DefaultAsyncHttpxClient(timeout=TIMEOUT))
        client = openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=self._client[0], max_retries=1000
        )
        messages: list[Any] = [{"role": "user", "content": problem.prompt[:-1]}]
        for turn in range(2 + chance // 8 % 3):
            ask = partial(client.chat.completions.create, model=endpoint.model, messages=messages, max_tokens=MOST)
            self.counts["asked"] += 1
            if fault == "vanish":
                with contextlib.suppress(openai.APITimeoutError):
                    await client.with_options(max_retries=0, timeout=PATIENCE).chat.completions.create(
                        model=endpoint.model, messages=messages, max_tokens=MOST
                    )
                return 0.0
            answer = await (ask(timeout=PATIENCE) if fault == "cancel" else ask())
            self.counts["answered"] += 1
            if fault == "raise":
                raise RuntimeError("an agent that fails")
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
            messages += [{"role": "user", "content": str(turn)}]
            await asyncio.sleep(TOOL * (chance // 32 % 100) / 100)
        return float(turn + 1)

    def advance(self, original: Callable[..., None], held: SamplesOnDevices, weights: Weights) -> None:
        """Sample the next tokens, and count the slots that got some."""
        crowded, before = _crowded(held), _progress(held)
        original(held, weights)
        tokens, passes = _progress(held) - before
        time.sleep(PASS * passes)
        new = np.array([tokens, passes * len(_state(held).rows.active_W)])
        self.filled[0] += new
        self.filled[1] += new * crowded


def _state(held: SamplesOnDevices) -> State:
    assert held.state is not None
    return held.state


def _crowded(held: SamplesOnDevices) -> bool:
    """Return whether a conversation waits for a slot."""
    rows = _state(held).rows
    return bool((rows.queued_Q > rows.taken_Q).any())


def _progress(held: SamplesOnDevices) -> np.ndarray:
    """Count the tokens of all samples, and the passes."""
    state = _state(held)
    return np.array([int(state.rows.length_B.sum()), int(state.step)])


def experiment(load: Load, slots: int, chunk: int) -> Experiment:
    """The agents with a toy model."""
    return Experiment(
        name="agents",
        model=ModelConfig(
            vocab_size=CHAT.vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=0,
            intermediate_size=64,
            rope_theta=1e4,
            tie_word_embeddings=True,
            initializer_range=0.15,
        ),
        data=sort.Problems(),
        tokenizer=CHAT,
        environment=Agent(run=load.solve, timeout=TIMEOUT),
        turns=Turns(limit=4),
        reward=sort.reward,
        advantage=advantages.standardize,
        loss=losses.gspo,
        sampling=Sampling(
            prompts=PROBLEMS, group=GROUP, max_prompt_tokens=16, max_tokens=4 * (MOST + 3), slots=slots, chunk=chunk
        ),
        optimizer=Optimizer(learning_rate=1e-3),
        schedule=Schedule(steps=1, minibatches=1),
        grading=Grading(max_failed=1.0),
    )


def counting(load: Load) -> Callable[[SamplesOnDevices, Weights], None]:
    """Make an `advance` that counts."""
    original = SamplesOnDevices.advance

    def advance(held: SamplesOnDevices, weights: Weights) -> None:
        load.advance(original, held, weights)

    return advance


@dataclass(frozen=True)
class Measured:
    """A rollout, the agents of which failed, and what it took."""

    rollout: Rollout
    failed: np.ndarray  # bool [B]
    faulty: np.ndarray  # bool [B]
    load: Load
    seconds: float
    cpu_seconds: float


def measure(slots: int, chunk: int, *, faults: bool) -> Measured:
    """Sample a rollout; its seconds include loading or compiling the programs."""
    load = Load(faults)
    runtime = make_runtime(experiment(load, slots, chunk))
    state = init_state(runtime.experiment.model, runtime.optimizer, jax.random.key(0), runtime.mesh)
    assert runtime.interaction is not None
    with runtime.interaction.steps, runtime.rewards, mock.patch.object(SamplesOnDevices, "advance", counting(load)):
        began = time.perf_counter(), time.process_time()
        batch = next_rollout(runtime, state, InFlight())
        rollout = jax.device_get(batch.rollout)
        took = time.perf_counter() - began[0], time.process_time() - began[1]
        graded = grade(runtime, batch).completions
    return Measured(
        rollout,
        np.array([bool(each.error) for each in graded]),
        np.array([load.fault(each.texts.prompt) != "" for each in graded if each.texts is not None]),
        load,
        *took,
    )


def tabulate(found: Mapping[tuple[str, int, int], Measured]) -> Iterator[str]:
    """The lines of the table, and what the faults have changed."""
    yield "| agents | slots, chunk | asked | answered | failed | seconds | CPU-seconds | filled | while others wait |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for (name, slots, chunk), each in found.items():
        counts, (share, crowded) = each.load.counts, each.load.shares()
        numbers = f"{counts['asked']:,} | {counts['answered']:,} | {int(each.failed.sum())}"
        times = f"{each.seconds:.1f} | {each.cpu_seconds:.1f}"
        yield f"| {name} | {slots}, {chunk} | {numbers} | {times} | {share:.0%} | {crowded} |"
    plain, *others = found.values()
    faulty = np.any([each.faulty for each in found.values()], axis=0)
    same = [(each.rollout.tokens_BT[~faulty] == plain.rollout.tokens_BT[~faulty]).all(axis=1) for each in others]
    yield ""
    equal = int(np.all(same, axis=0).sum())
    yield f"Of the {int((~faulty).sum())} agents without faults {equal} have the same tokens in all rows of the table."


def write(found: Mapping[tuple[str, int, int], Measured]) -> None:
    """Write the table into the page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    where = f"Commit {commit}, {os.cpu_count()} cores with a load of {os.getloadavg()[0]:.1f}."
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table = "\n".join([BEGIN, "", where, "", *tabulate(found), "", END])
    PAGE.write_text(head + table + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    skip_absent_tpu()
    prepare()
    found = {}
    for faults, slots, chunk in ((False, 64, 8), (True, 64, 8), (False, 64, 0)):
        name = "some vanish, cancel, or fail" if faults else "undisturbed"
        found[name, slots, chunk] = measure(slots, chunk, faults=faults)
        if len(found) > 1:
            write(found)


if __name__ == "__main__":
    main()
