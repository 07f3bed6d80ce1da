"""The interfaces of an experiment's parts, for type checkers and for `experiment.validation`.

Nothing has to inherit from these. A function fits if it can be called with the positional arguments of `__call__`; a
`functools.partial` sets its keywords. Arrays are float32 unless stated otherwise.

Axes: B rows, T tokens, P prompts, G samples, R rewards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import jax
    import numpy as np
    import optax

    from gspax.losses import Terms
    from gspax.losses.selection import Minibatch

    Array = jax.Array


State = Any  # of an environment: an object of its own choice
Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant", "content": text}


@dataclass(frozen=True)
class Problem:
    """A prompt, and the data that the reward needs to grade a completion.

    Attributes:
      prompt: the text to respond to; in a chat the user's last message.
      answer: the text that the reward compares a completion with; not needed by one that grades the completion alone.
      context: the chat's messages before the prompt: a system message, worked examples, earlier turns.
      task: the name of the task, in a mixture of several.
      teacher: the name of its teacher, where there are several (`Teacher.models`).
      metadata: further values that a reward may need.
    """

    prompt: str
    answer: str = ""
    context: tuple[Message, ...] = field(default=(), hash=False)
    task: str = ""
    teacher: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Step(NamedTuple):
    """The result of one of the policy's messages."""

    state: State = None
    messages: Sequence[Message] = ()  # the reply, which the policy reads before its next turn; not read if `done`
    reward: float = 0.0  # of this message, besides what the experiment's reward gives the last one
    done: bool = False  # the conversation is over
    metrics: Mapping[str, float] = {}  # summed over the conversation: `rollout/NAME` is the mean over conversations


class DataSource(Protocol):
    """Problems by index. Both methods are pure functions of the source and the index, so that a run can resume."""

    def train(self, index: int, /) -> Problem:
        """Return training problem number `index`, from 0."""

    def heldout(self, index: int, /) -> Problem:
        """Return held-out problem number `index`, from 0; none of them is ever a training problem."""


class HeldoutProblems(Protocol):
    """The problems of a benchmark. A property `heldout_count` is their number, if they are finitely many.

    A source that would have to count them has a method `count_heldout(most)` instead (`data.problem.count_distinct`).
    """

    def heldout(self, index: int, /) -> Problem:
        """Return problem number `index`, from 0."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion when the policy chooses one of them."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model may have more rows than this, never fewer."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Return the ids of a problem's prompt, as the policy reads it before its completion starts."""

    def decode(self, ids: Iterable[int], /) -> str:
        """Return the text before the first stop id."""


class CompletionTokenizer(Tokenizer, Protocol):
    """A tokenizer that also encodes completions, as a warm start needs."""

    def encode_completion(self, text: str, /) -> Sequence[int]:
        """Return the ids of a text that the policy could have written, with no stop id appended."""


class ConversationTokenizer(CompletionTokenizer, Protocol):
    """A tokenizer for conversations of several turns (`data.hf_chat`, `data.CharChat`)."""

    @property
    def turn_end(self) -> int:
        """The stop id that ends an assistant's turn; with any other one the policy ends the conversation.

        A tokenizer whose turns end with different ids has a method `end_before(messages)` besides: the id before these.
        """

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]], /) -> Sequence[int]:
        """Return the ids of a conversation's first messages, up to the start of the assistant's turn.

        `tools` are JSON schemas of functions, as OpenAI's `tools`.
        """

    def encode_reply(self, messages: Sequence[Message], /) -> Sequence[int]:
        """Return the ids from after `turn_end` to the start of the assistant's next turn."""


class Environment(Protocol):
    """An environment answers the policy's messages. Both methods are pure and may be called in any thread.

    A state is picklable, and the returned state replaces it: a method must not change its argument.
    """

    def reset(self, problem: Problem, /) -> tuple[State, Sequence[Message]]:
        """Return the state before the first turn, and the messages that the conversation begins with."""

    def step(self, state: State, message: str, /) -> Step:
        """Return the state after the policy's message, the reply, and the message's own reward; may be async."""


class Reward(Protocol):
    """The reward, or R rewards, of one completion; a mapping names them. `problem` comes from the data source."""

    def __call__(self, problem: Problem, completion: str, /) -> object: ...


class BatchReward(Protocol):
    """The rewards of several completions, each of the problem of the same index (`rewards.calls.Batched`)."""

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str], /) -> Sequence[object]: ...


class Vote(Protocol):
    """The final answer of a completion, by which its sample votes in maj@k; None if there is none."""

    def __call__(self, completion: str, /) -> str | None: ...


class Advantage(Protocol):
    """Rewards [P, G], or [P, G, R], to advantages [P, G]. With `filter_overlong` a mask, bool [P, G], comes second.

    A function with a keyword `length_PG` gets the response tokens of each sample, int32 [P, G] (`advantages.opo`), and
    one with a keyword `score_norm_PGN` gets `losses.score_norm` of each of them, float32 [P, G, N]; it returns
    advantages of tokens, [P, G, N] (`advantages.otb`).
    """

    def __call__(self, rewards: Array, /) -> Array: ...


class Loss(Protocol):
    """A policy loss: log-probs [B, T] of the policy and of the policy that started the updates, advantage [B], response
    mask, bool [B, T]."""

    def __call__(self, logp: Array, old_logp: Array, advantage: Array, mask: Array, /) -> Terms: ...


class Correction(Protocol):
    """Weights [B, T] or [B] for a sampler that is not the learner (`losses.correction`)."""

    def __call__(self, old_logp: Array, sampler_logp: Array, mask: Array, /) -> Array: ...


class Rejection(Protocol):
    """Weights, 0 or 1, that depend on the current policy (`losses.correction.reject_off_policy`)."""

    def __call__(self, logp: Array, sampler_logp: Array, advantage: Array, mask: Array, /) -> Array: ...


class Selection(Protocol):
    """Weights [B, T], 0 or 1, from a whole minibatch before its updates (`losses.selection`)."""

    def __call__(self, minibatch: Minibatch, /) -> Array: ...


class KLLoss(Protocol):
    """A KL to the reference policy, to be added to the policy loss (`losses.kl.token_kl`)."""

    def __call__(self, logp: Array, ref_logp: Array, mask: Array, /) -> Terms: ...


class TeacherPrompt(Protocol):
    """The prompt that a teacher reads before a completion, with what the policy was not told.

    `feedback` is the reason that the reward gave for its value (`rewards.scores.Score`); often empty.
    """

    def __call__(self, problem: Problem, completion: str, feedback: str, /) -> str: ...


class TeacherScore(Protocol):
    """A teacher's log-probs of given tokens: float32 [n - 1] for a sequence of n token ids, the first excluded.

    It is called once for each rollout, with sequences of at least two tokens.
    """

    def __call__(self, sequences: Sequence[Sequence[int]], /) -> Sequence[np.ndarray]: ...


class Divergence(Protocol):
    """The divergence of next-token distributions from a teacher's, log-probs [..., V] -> [...] (`losses.distill`)."""

    def __call__(self, logp: Array, teacher_logp: Array, /) -> Array: ...


class KLEstimate(Protocol):
    """A KL estimate of every token, [B, T], to be subtracted from the reward (`losses.kl.k1`)."""

    def __call__(self, logp: Array, ref_logp: Array, mask: Array, /) -> Array: ...


class LengthReward(Protocol):
    """Rewards [B] for response lengths, int32 [B], to be added to the task's (`shaping`)."""

    def __call__(self, length: Array, /) -> Array: ...


class Demonstration(Protocol):
    """The completion to imitate for one problem; with an environment it may be several messages."""

    def __call__(self, problem: Problem, rng: np.random.Generator, /) -> str | Sequence[str]: ...


class LearningRate(Protocol):
    """A maker of learning-rate schedules, `optax.Schedule`s from the number of updates to the rate."""

    def __call__(self, peak: float, warmup_updates: int, /) -> optax.Schedule: ...


class Transform(Protocol):
    """An optimizer of optax, given its learning-rate schedule: `optax.adamw`, `optax.adafactor`, `optimizers.muon`."""

    def __call__(self, learning_rate: optax.ScalarOrSchedule, /) -> optax.GradientTransformation: ...


def is_function_protocol(hint: object) -> bool:
    """Return whether an annotation is one of the functions above."""
    return getattr(hint, "_is_protocol", False) and "__call__" in vars(hint)


def argument_names(protocol: type) -> tuple[str, ...]:
    """Return the positional arguments that a function must take: `("problem", "completion")` for `Reward`."""
    code = vars(protocol)["__call__"].__code__
    return code.co_varnames[1 : code.co_argcount]
