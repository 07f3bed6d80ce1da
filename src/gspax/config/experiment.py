"""An experiment: what is sampled, rewarded and minimized, with which sizes, on which devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

from gspax.config import optimizers
from gspax.config.model import ModelConfig, described_fields
from gspax.config.protocols import (
    Advantage,
    Correction,
    DataSource,
    Demonstration,
    Divergence,
    Environment,
    HeldoutProblems,
    KLEstimate,
    KLLoss,
    LearningRate,
    LengthReward,
    Loss,
    Rejection,
    Reward,
    Selection,
    TeacherPrompt,
    TeacherScore,
    Tokenizer,
    Transform,
    Vote,
)
from gspax.config.ranges import (
    AXIS,
    CHOSEN_AXIS,
    NAME,
    NOT_EMPTY,
    Below1,
    Between0And1,
    Finite,
    NonNegative,
    NonNegativeInt,
    OptionalSize,
    Positive,
    PositiveInt,
    Range,
    Share,
    Size,
    at_least,
    at_most,
)

Action = Literal["warn", "stop"]
Alarm = Literal["reward", "gradient", "entropy", "length"]
OldLogp = Literal["learner", "sampler", "interpolated"]
RoutingReplay = Literal["off", "old", "sampler"]
Rate = Annotated[float, Range("above 0 and at most 100", lambda x: 0 < x <= 100)]
Temperature = Annotated[float, Range("0.001 to 1000", lambda x: 1e-3 <= x <= 1e3)]  # beyond, logits overflow or vanish
# 0: greedy
SamplingTemperature = Annotated[float, Range("0, or 0.001 to 1000", lambda x: x == 0 or 1e-3 <= x <= 1e3)]
Drafts = Annotated[int, at_least(0), at_most(31)]  # one block of `model.decoding.BLOCK` with the next token
GroupSize = Annotated[int, at_least(1), at_most(2**20)]
Noise = Literal["fresh", "problem"]
SamplerDtype = Literal["auto", "int8"]  # auto: the model's dtype


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are sampled for training."""

    prompts: Size = 64  # P, per rollout batch
    group: GroupSize = 8  # G, completions of each prompt; 1 only with a teacher
    max_prompt_tokens: Size = 64
    max_tokens: Size = 64  # of a completion, stop token included
    chunk: NonNegativeInt = 0  # tokens after which rewards of ended samples start; 0: they wait for the last sample
    slots: NonNegativeInt = 0  # samples generated at once; 0: all. A finished sample's slot takes the next one
    cache_gib: NonNegative = 0.0  # of a device's memory, for keys and values; limits the slots; 0: no limit
    prefill_prompts: NonNegativeInt = 0  # prefilled at once; 0: as many as fit where the completions' cache will be
    kv_cache_dtype: SamplerDtype = "auto"  # int8: keys and values with a scale for each token and head
    weights_dtype: SamplerDtype = "auto"  # int8: the sampler's weights with a scale for each output channel
    drafts: Drafts = 0  # tokens that a decoding pass checks beyond the next one, from earlier texts; 0: off
    # What the random numbers of a token depend on beside the run's seed, the number of the sample in its group, and the
    # position: fresh: how many problems came before; problem: its prompt alone, so that they are the same in each epoch
    noise: Noise = "fresh"
    # Problems that cannot be read or whose prompts do not fit, of those loaded, or of 1,000: they are skipped
    max_failed: Annotated[float, Range("at least 0 and at most 1", lambda x: 0 <= x <= 1)] = 0.01
    max_refills: NonNegativeInt = 0  # times that fresh prompts may replace groups of equal rewards (DAPO); 0: off
    temperature: Temperature = 1.0
    top_k: NonNegativeInt = 0  # 0: off
    top_p: Share = 1.0
    min_p: Below1 = 0.0
    # The most tokens of the set that these filters keep, over which the learner then normalizes its log-probs too;
    # the sampler drops others from the set. 0: log-probs are over the whole vocabulary, which the samples are not from
    mask_replay: NonNegativeInt = 0

    def described(self) -> dict[str, object]:
        """The fields, without fresh noise: a run from before there was another kind still resumes."""
        return described_fields(self, ("noise",))


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Multi-turn rollouts with `Experiment.environment`. `Grading` says how its steps are called."""

    limit: PositiveInt = 8  # turns of the policy; a conversation that is cut here counts as truncated
    # Whose rewards the advantage of a token is of: of the whole conversation, or of its turn and the later ones, for a
    # loss with advantages of tokens (gspo_token)
    credit: Literal["conversation", "turn"] = "conversation"
    discount: Share = 1.0  # of a later turn's reward, for each turn between, with credit="turn"


@dataclass(frozen=True, kw_only=True)
class Grading:
    """How the reward function is called, and what a completion gets for which it fails (`gspax.rewards.calls`)."""

    failed: Finite = 0.0  # reward where the function raises, is late or gives no finite number
    max_failed: Annotated[float, Range("at least 0 and at most 1", lambda x: 0 <= x <= 1)] = 0.05  # of a batch; 0: none
    timeout: Positive = 60.0  # seconds of one call
    # Calls at one time; 0: what the function declares, else 1, or 32 if it is async
    concurrency: Annotated[int, at_least(0), at_most(1024)] = 0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optax optimizer, its learning-rate schedule, and a clip of the gradient's global norm.

    Parameters in bfloat16 (`model.param_dtype`) have a float32 master copy in the optimizer state.
    """

    learning_rate: Rate = 1e-6  # peak of the schedule
    warmup_updates: NonNegativeInt = 0  # linear from 0
    schedule: LearningRate = optimizers.constant  # optimizers.constant, .linear, .cosine, or your own
    transform: Transform = optimizers.adamw  # optimizers.adamw, .muon, optax.adafactor, or your own
    max_grad_norm: NonNegative = 1.0  # 0: no clipping
    offload: bool = False  # keep the optimizer state in host memory, except during an update
    frozen: tuple[str, ...] = ()  # parameters that no update changes, by name: ("router",)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of the run, and how each rollout batch is divided."""

    steps: NonNegativeInt = 100  # rollout batches in total: raise it to continue a finished run
    minibatches: PositiveInt = 4  # optimizer updates per rollout batch and epoch; 4 in the GSPO paper
    epochs: PositiveInt = 1  # passes over the minibatches of a rollout batch
    microbatch_rows: NonNegativeInt = 0  # rows of one forward and backward pass; 0: a whole minibatch
    # Tokens of one forward and backward pass, on all devices together: responses are packed into the rows of a pass.
    microbatch_tokens: NonNegativeInt = 0  # 0: each response has a row of its own
    share_prompts: bool = False  # a packed row holds a prompt once for several of its responses
    eval_every: NonNegativeInt = 20  # steps; 0: only at the start and the end
    checkpoint_every: NonNegativeInt = 20  # steps; 0: only at the end
    keep_checkpoints: PositiveInt = 2
    max_skipped: PositiveInt = 5  # updates skipped in a row, after which the run goes back (`Guard`)


class RowShape(NamedTuple):
    """The rows that a minibatch is computed in."""

    rows: int  # room for the worst case, a multiple of `microbatch`
    length: int  # tokens of a row
    microbatch: int  # rows of one forward and backward pass
    packed: bool  # several responses in a row


def row_shape(sampling: Sampling, schedule: Schedule, shards: int) -> RowShape:
    """The rows of a minibatch that is sharded over this number of devices.

    Packed, each device has as many rows as its share of `schedule.microbatch_tokens` is times the longest response, and
    these divide that share; if prompts are shared, its share is one row. Not packed, a row has the length of the
    longest response.
    """
    responses = sampling.prompts * sampling.group // schedule.minibatches
    longest = sampling.max_prompt_tokens + sampling.max_tokens
    if schedule.microbatch_tokens:
        most = 1 if schedule.share_prompts else schedule.microbatch_tokens // (shards * longest)
        microbatch = shards * max(1, most)
        return RowShape(_round_up(responses, microbatch), schedule.microbatch_tokens // microbatch, microbatch, True)
    microbatch = schedule.microbatch_rows or _round_up(responses, shards)
    return RowShape(_round_up(responses, microbatch), longest, microbatch, False)


def teacher_models(teacher: Teacher | None) -> tuple[ModelConfig, ...]:
    """The models of a teacher's checkpoints; none if it is an earlier policy or a function."""
    if teacher is None:
        return ()
    return tuple(teacher.models.values()) or ((teacher.model,) if teacher.model is not None else ())


def earlier_policy(teacher: Teacher | None) -> Teacher | None:
    """The teacher if it is the policy as it was before; None if it is another model, or if there is none."""
    return teacher if teacher is not None and teacher.score is None and not teacher_models(teacher) else None


def teacher_row_shape(teacher: Teacher, sampling: Sampling, schedule: Schedule, shards: int) -> RowShape | None:
    """The rows in which teachers read a minibatch's responses; None if one teacher reads all rows of the policy.

    A teacher with prompts of its own, or with only some of the responses, has packed rows of its own.
    """
    if teacher.prompt is None and len(teacher.models) < 2:
        return None
    longest = teacher.max_prompt_tokens or sampling.max_prompt_tokens
    own = replace(sampling, max_prompt_tokens=longest), replace(schedule, share_prompts=False)
    shape = row_shape(*own, shards)
    return shape._replace(length=max(shape.length, longest + sampling.max_tokens), packed=True)


def sampling_mask_size(sampling: Sampling, vocab_size: int) -> int:
    """The most tokens of a set that is kept for the learner (`Sampling.mask_replay`); 0: none is."""
    return min(sampling.mask_replay, sampling.top_k or vocab_size, vocab_size)


def filters_in_use(sampling: Sampling) -> list[str]:
    """The names of the filters of `sampling` that are on."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return [name for name, value in off.items() if getattr(sampling, name) != value]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def updates_per_step(schedule: Schedule) -> int:
    """Optimizer updates of one rollout batch."""
    return schedule.epochs * schedule.minibatches


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """When a run has collapsed, and what it does then (`training.guard`): an alarm has lasted for some steps."""

    action: Action = "warn"
    steps: PositiveInt = 20  # with the same alarm, one after the other
    alarms: Annotated[tuple[Alarm, ...], NOT_EMPTY] = ("reward", "gradient")  # those that count
    reward: Share = 0.5  # of the best running mean of reward/mean; below it is an alarm
    window: PositiveInt = 10  # steps of that running mean
    grad_norm: NonNegative = 0.0  # optim/grad_norm above it is an alarm; 0: off


@dataclass(frozen=True, kw_only=True)
class Guard:
    """How a run reacts to updates that go wrong, besides skipping those that are not finite (`training.guard`)."""

    rollbacks: NonNegativeInt = 2  # returns to one checkpoint, each with other problems
    max_grad_norm: NonNegative = 0.0  # an update with a larger gradient norm, before clipping, is skipped; 0: off
    # Likewise with a larger policy ratio in its minibatch: of a sequence or of a token, as the loss has it; 0: off
    max_ratio: NonNegative = 0.0
    min_entropy: NonNegative = 0.01  # nats per token; below it a warning
    max_truncated: NonNegative = 0.9  # share of responses cut at the length limit; above it a warning
    collapse: Collapse | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """Diagnostics around the last update of a rollout batch, every few steps (`learner.diagnostics`)."""

    every: PositiveInt = 10  # steps
    rows: NonNegativeInt = 8  # of the minibatch, for experts and gradients, at least one on each device; 0: all


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark: problems, their reward, and how their completions are sampled (`gspax.evaluation.tasks`)."""

    name: Annotated[str, NAME]
    data: HeldoutProblems
    reward: Reward
    vote: Vote | None = None  # completion -> final answer, for maj@k; None: no maj@k
    problems: NonNegativeInt = 0  # the first ones; 0: all
    samples: Size = 1  # of each problem
    temperature: SamplingTemperature = 1.0
    top_k: NonNegativeInt = 0
    top_p: Share = 1.0
    min_p: Below1 = 0.0
    max_prompt_tokens: OptionalSize = 0  # 0: as in sampling
    max_tokens: OptionalSize = 0  # 0: as in evaluation


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out problems, sampled at temperature 1 and decoded greedily; and tasks, each with settings of its own."""

    problems: PositiveInt = 256
    samples: PositiveInt = 1  # per problem, besides the greedy one
    max_tokens: OptionalSize = 0  # 0: as in sampling
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A short supervised stage before reinforcement learning."""

    demonstration: Demonstration  # (problem, rng) -> the completion to imitate
    steps: PositiveInt = 60  # updates
    rows: Size = 128  # per update
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """KL to the policy that reinforcement learning started from; with neither function it is only measured."""

    loss: KLLoss | None = None  # kl.token_kl, kl.sequence_kl, kl.grpo_kl: added to the policy loss
    reward: KLEstimate | None = None  # kl.k1, kl.k2, kl.k3: its sum over a response is subtracted from the reward
    coefficient: NonNegative = 1e-3  # of either


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A model whose next-token distributions the policy learns on its own samples (`losses.distill`)."""

    # `hf(...)`, with the policy's vocabulary. None: the policy as it was at the start, and after every `refresh_every`
    # steps moved toward the policy as it is then by `refresh_share` of the way
    model: ModelConfig | None = None
    models: Mapping[str, ModelConfig] = field(default_factory=dict)  # instead of it several, by `Problem.teacher`
    # Instead of a model: a function that gives the log-probs of the sampled tokens, such as `engines.served.score`
    score: TeacherScore | None = None
    refresh_every: NonNegativeInt = 0  # 0: never
    refresh_share: Share = 1.0  # 1: equal to the policy; less: a moving average
    # Of whole distributions: distill.full_reverse_kl, .full_forward_kl, .jensen_shannon. None: the reverse KL, computed
    # for the `kept` tokens of a position and estimated from the sampled token for the others
    divergence: Divergence | None = None
    kept: NonNegativeInt = 0  # the most probable tokens; 0: none
    kept_by: Literal["teacher", "policy"] = "teacher"  # the model whose most probable tokens these are
    prompt: TeacherPrompt | None = None  # (problem, completion, feedback) -> what the teacher reads as the prompt
    max_prompt_tokens: OptionalSize = 0  # of that prompt; 0: as in sampling
    offload: bool = False  # keep its parameters in host memory, except while it reads
    as_advantage: bool = False  # subtract the sampled token's estimate from its advantage; else it is added to the loss
    coefficient: NonNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Train low-rank adapters instead of the parameters (arXiv 2106.09685): weight + alpha / rank · a b."""

    rank: Size = 16
    alpha: Positive = 32.0
    attention: bool | tuple[Literal["query", "key", "value", "out"], ...] = True  # all four, or some of them
    mlp: bool | tuple[Literal["gate", "up", "down"], ...] = True  # likewise; those of experts included
    # of gated delta nets, all seven or some
    delta: bool | tuple[Literal["query", "key", "value", "gate", "decay", "beta", "out"], ...] = False
    checkpoint: str = ""  # folder of a PEFT adapter to start from (`hf.peft`); empty: a no-op

    def described(self) -> dict[str, object]:
        """The fields that an experiment's description has: `delta` only where it is not its default."""
        return described_fields(self, ("delta",))


def adapted_weights(lora: Lora) -> dict[str, tuple[str, ...]]:
    """The names of a layer's weights that have adapters, by the part of the layer that they are in."""
    parts = {
        "attention": (lora.attention, ("query", "key", "value", "out")),
        "mixer": (lora.delta, ("query", "key", "value", "gate", "decay", "beta", "out")),
        "mlp": (lora.mlp, ("gate", "up", "down")),
    }
    return {
        part: names if chosen is True else tuple(name for name in names if chosen and name in chosen)
        for part, (chosen, names) in parts.items()
    }


@dataclass(frozen=True, kw_only=True)
class AdaptiveEntropy:
    """An entropy bonus whose coefficient moves by a step after each update, toward a target (`losses.regularizers`)."""

    target: Positive = 0.2  # nats per token; below it the coefficient rises, above it falls
    step: Positive = 0.005
    highest: Positive = 1.0  # coefficient; the lowest is 0


@dataclass(frozen=True, kw_only=True)
class CovarianceKL:
    """A penalty on the tokens whose advantage and log-prob covary most (KL-Cov, `losses.regularizers`)."""

    share: Share = 2e-4  # of a minibatch's tokens
    coefficient: NonNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class Regularizers:
    """Coefficients of the terms added to the policy loss (`losses.regularizers`); 0: off."""

    entropy: Finite = 0.0  # above 0 rewards entropy; with `adaptive_entropy` the coefficient that it starts from
    adaptive_entropy: AdaptiveEntropy | None = None
    kl_cov: CovarianceKL | None = None
    log_ratio_square: NonNegative = 0.0  # of the policy to the one that sampled the tokens
    load_balance: NonNegative = 0.0
    router_z: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class RouterShift:
    """Ratios of tokens whose routing has moved are scaled down, before clipping (`losses.router_shift`)."""

    floor: Share = 0.8  # of the factor


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A clip range that follows the ratios that updates measure, instead of the loss's own (`losses.calibration`)."""

    share: Between0And1 = 0.15  # of sequences with an advantage to clip; at most half of them can be
    tolerance: Below1 = 0.05  # how far the measured share may be off before the range moves
    gain: NonNegative = 0.5  # of the way to a measured range nearby; 1: all of it


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the device mesh's axes, outermost first; at most one is -1 and takes the devices that are left.

    `sharding.RULES` maps the dimensions of arrays to these axes.
    """

    slice: Annotated[int, CHOSEN_AXIS] = 0  # TPU slices, connected by the data-center network; 0: as many as there are
    data: Annotated[int, AXIS] = 1  # parameters replicated, rows sharded
    fsdp: Annotated[int, AXIS] = -1  # parameters and rows sharded
    expert: Annotated[int, CHOSEN_AXIS] = 0  # experts and rows sharded; 0: chosen by `sharding.choose_expert_axis`
    context: Annotated[int, AXIS] = 1  # positions of a row sharded
    tensor: Annotated[int, AXIS] = 1  # heads, widths and vocabulary sharded


@dataclass(frozen=True, kw_only=True)
class PartialRollouts:
    """Rollout batches end when enough groups have; the others go on with newer parameters (`rollout.pool`)."""

    carried: NonNegativeInt = 0  # groups sampled besides those of a batch, the most that are carried over to the next
    ahead: NonNegativeInt = 1  # chunks sampled while the learner updates; the next ones have its new parameters


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A sampler on its own devices, the last ones; `Experiment.mesh` covers the others (`gspax.sampler.placement`)."""

    devices: PositiveInt
    staleness: NonNegativeInt = 0  # rollout batches sampled ahead; 0: each is sampled with the newest parameters
    partial: PartialRollouts | None = None  # `staleness` then bounds the age of a group's first tokens
    mesh: Mesh = field(default_factory=Mesh)  # of the sampler's devices


@dataclass(frozen=True, kw_only=True)
class Engine:
    """vLLM or SGLang servers that sample instead of this process's devices (`gspax.rollout.engines`).

    Each gets the whole policy after every step, through files in a folder that it shares with the run.
    """

    server: Literal["vllm", "sglang"] = "vllm"  # the program that runs at all addresses
    # Of the weights, on a file system that the run and every server see; relative to the working directory of the run
    folder: Annotated[str, NOT_EMPTY] = "engine_weights"
    addresses: Annotated[tuple[str, ...], NOT_EMPTY] = ("http://127.0.0.1:8000",)
    requests: PositiveInt = 64  # at one time, to each server
    staleness: NonNegativeInt = 0  # rollout batches sampled while the learner updates, with older parameters; 0: none
    partial: PartialRollouts | None = None  # `staleness` then bounds the age of a group's first tokens
    timeout: Positive = 600.0  # seconds for one answer, and for a server that is gone to come back
    probes: PositiveInt = 8  # sequences that servers and learner score after every step, to compare their log-probs
    # The largest difference of these log-probs, a sequence's mean, that is no error; 0: by the model's dtype
    tolerance: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A whole run."""

    name: Annotated[str, NAME]
    model: ModelConfig
    data: DataSource
    tokenizer: Tokenizer  # a CompletionTokenizer if there is a warm start
    reward: Reward  # (problem, completion text) -> a float, or a tuple of R floats; async, or Batched
    advantage: Advantage  # rewards [P, G], or [P, G, R] -> advantages [P, G]
    loss: Loss  # (logp, old_logp, advantage, mask) -> losses.Terms
    correction: Correction | None = None  # (old_logp, sampler_logp, mask) -> weights: losses.correction
    rejection: Rejection | None = None  # (logp, sampler_logp, advantage, mask) -> weights: reject_off_policy
    selection: Selection | None = None  # (losses.selection.Minibatch) -> weights: losses.selection
    reference: Reference | None = None
    teacher: Teacher | None = None
    regularizers: Regularizers = field(default_factory=Regularizers)
    length_reward: LengthReward | None = None  # lengths [B] -> rewards [B] to add: shaping
    filter_overlong: bool = False  # drop responses cut at the length limit from the loss and the advantages
    calibration: Calibration | None = None
    environment: Environment | None = None  # answers the policy's messages: tools, tasks of several turns
    turns: Turns = field(default_factory=Turns)
    # The ratios' denominators: computed by the learner; the sampler's own log-probs, which some losses demand; or
    # interpolated by age between these and the current ones (losses.proximal)
    old_logp: OldLogp = "learner"
    routing_replay: RoutingReplay = "off"  # updates route tokens as the old policy (R2) or as the sampler did (R3)
    router_shift: RouterShift | None = None
    grading: Grading = field(default_factory=Grading)
    sampling: Sampling = field(default_factory=Sampling)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora | None = None
    schedule: Schedule = field(default_factory=Schedule)
    guard: Guard = field(default_factory=Guard)
    diagnostics: Diagnostics | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    warm_start: WarmStart | None = None
    mesh: Mesh = field(default_factory=Mesh)
    placement: Placement | None = None  # None: the sampler runs on the learner's devices ...
    sampler_mesh: Mesh | None = None  # ... with these axes; None: chosen by `model.sizes`
    engine: Engine | None = None  # None: this process samples
    seed: Annotated[int, Range("at least 0 and below 2^32", lambda x: 0 <= x < 2**32)] = 0


def trained_dtype(model: ModelConfig, lora: Lora | None) -> str:
    """The dtype of the trained arrays: adapters are float32, whatever the parameters are."""
    return "float32" if lora is not None else model.param_dtype
