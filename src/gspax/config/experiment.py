"""The settings of an experiment: the model, the task, the objective, how samples are generated, and the devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

from gspax.config import optimizers
from gspax.config.model import ModelConfig
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
    Seed,
    Share,
    Size,
    at_least,
    at_most,
)
from gspax.config.term import Term

Action = Literal["warn", "stop"]
Alarm = Literal["reward", "gradient", "entropy", "length"]
OldLogp = Literal["learner", "sampler", "interpolated"]
RoutingReplay = Literal["off", "old", "sampler"]
Rate = Annotated[float, Range("above 0 and at most 100", lambda x: 0 < x <= 100)]
Temperature = Annotated[float, Range("0.001 to 1000", lambda x: 1e-3 <= x <= 1e3)]  # beyond, logits overflow or vanish
SamplingTemperature = Annotated[float, Range("0, or 0.001 to 1000", lambda x: x == 0 or 1e-3 <= x <= 1e3)]  # 0: greedy
Drafts = Annotated[int, at_least(0), at_most(31)]  # they and the next token fit into one `model.decoding.BLOCK`
GroupSize = Annotated[int, at_least(1), at_most(2**20)]
Noise = Literal["fresh", "problem"]
SamplerDtype = Literal["auto", "int8"]  # auto: the dtype of the model


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling of completions for training."""

    prompts: Size = 64  # P, prompts per rollout
    group: GroupSize = 8  # G, completions per prompt; 1 with a teacher, or an advantage that is `across_groups`
    max_prompt_tokens: Size = 64
    max_tokens: Size = 64  # the length limit of a completion, stop token included
    # Texts that end a sample, or a turn, beside the tokenizer's stop tokens. The token that completes one belongs to it
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # tokens that do, beside the tokenizer's
    # Compute the rewards of finished samples after every `chunk` tokens, while the others are still being generated.
    # 0: compute all rewards after the last sample
    chunk: NonNegativeInt = 0
    slots: NonNegativeInt = 0  # samples generated at once (continuous batching); 0: all
    cache_gib: NonNegative = 0.0  # GiB of each device for the KV cache, which limits the slots; 0: no limit
    prefill_prompts: NonNegativeInt = 0  # prompts prefilled at once; 0: as many as the memory of the KV cache allows
    kv_cache_dtype: SamplerDtype = "auto"  # int8: 8-bit keys and values, with a scale for each token and head
    weights_dtype: SamplerDtype = "auto"  # int8: 8-bit inference weights, with a scale for each output channel
    drafts: Drafts = 0  # drafted tokens that a decoding pass checks besides the next token; 0: off
    # The time of a pass with drafts divided by the time of one without. Passes have drafts only while the expected
    # number of tokens per pass is above this ratio. 0: all passes have drafts
    draft_cost: NonNegative = 0.0
    # What the random numbers of a token depend on, besides the seed, the sample's index in its group, and the position.
    # fresh: the number of problems before; problem: the prompt, so that they are the same in every epoch
    noise: Noise = "fresh"
    # The largest fraction of the loaded problems that may be skipped, because they cannot be read or their prompts are
    # too long. Of fewer than 1,000 problems, it is a fraction of 1,000
    max_failed: Annotated[float, Range("at least 0 and at most 1", lambda x: 0 <= x <= 1)] = 0.01
    # Dynamic sampling (DAPO): how many times per rollout groups of equal rewards may be replaced by new prompts. 0: off
    max_refills: NonNegativeInt = 0
    temperature: Temperature = 1.0
    top_k: NonNegativeInt = 0  # 0: off
    top_p: Share = 1.0
    min_p: Below1 = 0.0
    # Sampling-mask replay: the learner normalizes log-probs over the tokens that these filters kept, at most this many
    # per position (the sampler keeps no more). 0: off; log-probs are then over the whole vocabulary
    mask_replay: NonNegativeInt = 0

    def for_new_prompts(self) -> Sampling:
        """Return the settings without what is for training problems that come again: drafts and equal noise."""
        return replace(self, drafts=0, noise="fresh")


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Multi-turn rollouts with `Experiment.environment`. `Grading` applies to the calls of its steps, too."""

    limit: PositiveInt = 8  # the policy's turns; a conversation that reaches the limit counts as truncated
    # conversation: all tokens have the advantage of the whole conversation. turn: the advantage of a token is that of
    # the rewards of its turn and the later ones; this needs a loss with advantages of tokens (gspo_token)
    credit: Literal["conversation", "turn"] = "conversation"
    discount: Share = 1.0  # the discount factor per turn of later rewards, with credit="turn"


@dataclass(frozen=True, kw_only=True)
class Grading:
    """The calls of the reward function, and the handling of failures (`gspax.rewards.calls`)."""

    failed: Finite = 0.0  # the reward if the function raises, times out, or returns no finite number
    # The largest fraction of a rollout's completions whose reward may fail; more stop the run
    max_failed: Annotated[float, Range("at least 0 and at most 1", lambda x: 0 <= x <= 1)] = 0.05
    timeout: Positive = 60.0  # seconds per call
    # Concurrent calls; 0: what the function declares, otherwise 32 if it is async and 1 if not
    concurrency: Annotated[int, at_least(0), at_most(1024)] = 0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optax optimizer, its learning-rate schedule, and a clip of the gradient's global norm.

    Parameters in bfloat16 (`model.param_dtype`) have a float32 master copy in the optimizer state.
    """

    learning_rate: Rate = 1e-6  # the peak of the schedule
    warmup_updates: NonNegativeInt = 0  # linear warmup from 0
    schedule: LearningRate = optimizers.constant  # optimizers.constant, .linear, .cosine, or your own
    transform: Transform = optimizers.adamw  # optimizers.adamw, .muon, optax.adafactor, or your own
    max_grad_norm: NonNegative = 1.0  # 0: no clipping
    offload: bool = False  # keep the optimizer state in host memory between updates
    frozen: tuple[str, ...] = ()  # names of parameters that are not trained, such as ("router",)
    # How far each update moves the routers' correction biases toward equal loads of the experts, without a gradient
    # (auxiliary-loss-free balancing); 0: off, as is usual in reinforcement learning
    bias_update_speed: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of the run, and how each rollout is divided into updates."""

    steps: NonNegativeInt = 100  # rollouts in total; raise it to continue a finished run
    minibatches: PositiveInt = 4  # optimizer updates per rollout and epoch; 4 in the GSPO paper
    epochs: PositiveInt = 1  # passes over each rollout
    microbatch_rows: NonNegativeInt = 0  # rows per forward and backward pass; 0: the whole minibatch
    # Tokens per forward and backward pass on all devices together; responses are packed into its rows.
    # 0: no packing, each response has a row of its own
    microbatch_tokens: NonNegativeInt = 0
    share_prompts: bool = False  # with packing: a row holds a prompt once for several of its responses
    eval_every: NonNegativeInt = 20  # steps between evaluations; 0: only at the start and the end
    checkpoint_every: NonNegativeInt = 20  # steps between checkpoints; 0: only at the end
    keep_checkpoints: PositiveInt = 2
    record_rollouts: bool = False  # keep the tokens, log-probs and rewards of all steps, for `gspax replay-rollouts`
    timeline: bool = False  # write trace.json: when the host, devices, servers and rewards did what, for Perfetto
    max_skipped: PositiveInt = 5  # skipped updates in a row before the run returns to a checkpoint (`Guard`)


class RowShape(NamedTuple):
    """The shape of a minibatch."""

    rows: int  # enough for the longest responses; a multiple of `microbatch`
    length: int  # tokens per row
    microbatch: int  # rows per forward and backward pass
    packed: bool  # a row holds several responses


class Trained(NamedTuple):
    """What is trained: a model, or with `lora` adapters of it."""

    model: ModelConfig
    lora: Lora | None = None

    @property
    def dtype(self) -> str:
        """The dtype of the trained arrays: the parameters' dtype, or float32 for adapters."""
        return "float32" if self.lora is not None else self.model.param_dtype


def row_shape(sampling: Sampling, schedule: Schedule, shards: int) -> RowShape:
    """Return the shape of a minibatch that is sharded over `shards` devices.

    Without packing, a row is as long as the longest response. With packing, each device divides its part of
    `schedule.microbatch_tokens` into as many rows as hold the longest response, or into one row if prompts are shared.
    """
    responses = sampling.prompts * sampling.group // schedule.minibatches
    longest = sampling.max_prompt_tokens + sampling.max_tokens
    if schedule.microbatch_tokens:
        most = 1 if schedule.share_prompts else schedule.microbatch_tokens // (shards * longest)
        microbatch = shards * max(1, most)
        return RowShape(_round_up(responses, microbatch), schedule.microbatch_tokens // microbatch, microbatch, True)
    microbatch = schedule.microbatch_rows or _round_up(responses, shards)
    return RowShape(_round_up(responses, microbatch), longest, microbatch, False)


def teacher_models(teacher: Teacher) -> tuple[ModelConfig, ...]:
    """Return the models of a teacher's checkpoints; none if it is an earlier policy or a function."""
    return tuple(teacher.models.values()) or ((teacher.model,) if teacher.model is not None else ())


def held_teachers(teacher: Teacher, policy: ModelConfig) -> tuple[ModelConfig, ...]:
    """Return the models of a teacher's checkpoints with the policy's vocabulary, as devices hold them."""
    return tuple(with_vocabulary(model, policy) for model in teacher_models(teacher))


def with_vocabulary(model: ModelConfig, policy: ModelConfig) -> ModelConfig:
    """Give a model the policy's vocabulary: its further ids are padding, which no tokenizer names."""
    return replace(model, vocab_size=policy.vocab_size)


def is_earlier_policy(teacher: Teacher) -> bool:
    """Return whether the teacher is an earlier version of the policy, and no other model."""
    return teacher.score is None and not teacher_models(teacher)


def teacher_row_shape(teacher: Teacher, sampling: Sampling, schedule: Schedule, shards: int) -> RowShape | None:
    """Return the shape of the teachers' minibatch; None if one teacher reads the policy's own rows.

    Teachers with other prompts, and each of several teachers, read packed rows of their own.

    Args:
      shards: the number of parts that the rows are divided into.
    """
    if teacher.prompt is None and len(teacher.models) < 2:
        return None
    longest = teacher.max_prompt_tokens or sampling.max_prompt_tokens
    own = replace(sampling, max_prompt_tokens=longest), replace(schedule, share_prompts=False)
    shape = row_shape(*own, shards)
    microbatch, length = _round_up(shape.microbatch, shards), max(shape.length, longest + sampling.max_tokens)
    return RowShape(_round_up(shape.rows, microbatch), length, microbatch, packed=True)


def sampling_mask_size(sampling: Sampling, vocab_size: int) -> int:
    """Return the size of the sampling masks that the learner gets (`Sampling.mask_replay`); 0 without them."""
    return min(sampling.mask_replay, sampling.top_k or vocab_size, vocab_size)


def filters_in_use(sampling: Sampling) -> list[str]:
    """Return the names of the filters of `sampling` that are on."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return [name for name, value in off.items() if getattr(sampling, name) != value]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def updates_per_step(schedule: Schedule) -> int:
    """Return the number of optimizer updates per rollout."""
    return schedule.epochs * schedule.minibatches


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """The criterion by which a run counts as collapsed, the same alarm for `steps` steps, and the reaction to it."""

    action: Action = "warn"
    steps: PositiveInt = 20  # consecutive steps with the same alarm
    alarms: Annotated[tuple[Alarm, ...], NOT_EMPTY] = ("reward", "gradient")  # the alarms that count
    reward: Share = 0.5  # alarm if the running mean of reward/mean is below this fraction of its best value
    window: PositiveInt = 10  # steps of that running mean
    grad_norm: NonNegative = 0.0  # alarm if optim/grad_norm is above it; 0: off


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The reaction of a run to bad updates. Updates that are not finite are always skipped (`training.run_guard`)."""

    rollbacks: NonNegativeInt = 2  # returns to the same checkpoint, each of which goes on with other problems
    max_grad_norm: NonNegative = 0.0  # skip updates whose gradient norm, before clipping, is larger; 0: off
    max_ratio: NonNegative = 0.0  # skip updates with a larger ratio of a sequence, or of a token, as the loss; 0: off
    min_entropy: NonNegative = 0.01  # nats per token; warn below it
    max_truncated: NonNegative = 0.9  # fraction of responses cut at the length limit; warn above it
    collapse: Collapse | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """Measurements around the last update of a rollout, every few steps (`learner.diagnostics`)."""

    every: PositiveInt = 10  # steps between measurements
    rows: NonNegativeInt = 8  # rows to measure experts and gradients on, at least one per device; 0: all


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark: problems, their reward, and how their completions are sampled (`gspax.evaluation.tasks`)."""

    name: Annotated[str, NAME]
    data: HeldoutProblems
    reward: Reward
    vote: Vote | None = None  # completion -> final answer, for maj@k; None: no maj@k
    problems: NonNegativeInt = 0  # evaluate only the first ones; 0: all
    samples: Size = 1  # completions per problem
    temperature: SamplingTemperature = 1.0
    top_k: NonNegativeInt = 0
    top_p: Share = 1.0
    min_p: Below1 = 0.0
    max_prompt_tokens: OptionalSize = 0  # 0: `sampling.max_prompt_tokens`
    max_tokens: OptionalSize = 0  # 0: `evaluation.max_tokens`


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out problems, sampled at temperature 1 and decoded greedily, and tasks with settings of their own."""

    problems: PositiveInt = 256
    samples: PositiveInt = 1  # completions per problem at temperature 1, besides the greedy one
    max_tokens: OptionalSize = 0  # 0: `sampling.max_tokens`
    tasks: tuple[Task, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A short supervised stage before reinforcement learning."""

    demonstration: Demonstration  # (problem, rng) -> the completion to imitate
    steps: PositiveInt = 60  # updates
    rows: Size = 128  # demonstrations per update
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The KL to the policy that the run started from. Without `loss` and `reward` it is only measured."""

    loss: KLLoss | None = None  # kl.token_kl, kl.sequence_kl, or kl.grpo_kl: added to the policy loss
    reward: KLEstimate | None = None  # kl.k1, kl.k2, or kl.k3: summed over a response, subtracted from its reward
    coefficient: NonNegative = 1e-3  # the factor of that KL


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A model whose next-token distributions the policy learns on its own samples (`losses.distill`)."""

    model: ModelConfig | None = None  # `hf(...)` with the policy's vocabulary; None: an earlier version of the policy
    models: Mapping[str, ModelConfig] = field(default_factory=dict)  # several teachers, chosen by `Problem.teacher`
    score: TeacherScore | None = None  # log-probs of the sampled tokens from elsewhere, such as `servers.scoring.score`
    # Without any of these the teacher starts as the first policy. After every `refresh_every` steps it moves toward the
    # current policy by `refresh_share` of the way: 1 makes it equal, less makes it a moving average
    refresh_every: NonNegativeInt = 0  # 0: never
    refresh_share: Share = 1.0
    # distill.full_reverse_kl, .full_forward_kl, or .jensen_shannon, over the whole vocabulary. None: the reverse KL,
    # exact over the `kept` tokens and estimated from the sampled token for the rest
    divergence: Divergence | None = None
    kept: NonNegativeInt = 0  # the number of most probable tokens per position over which the KL is exact
    kept_by: Literal["teacher", "policy"] = "teacher"  # the model that decides which tokens are most probable
    prompt: TeacherPrompt | None = None  # (problem, completion, feedback) -> a prompt of its own for the teacher
    max_prompt_tokens: OptionalSize = 0  # the length limit of that prompt; 0: `sampling.max_prompt_tokens`
    as_advantage: bool = False  # subtract the KL's estimate from the advantages instead of adding the KL to the loss
    coefficient: NonNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters, trained instead of the parameters (arXiv 2106.09685): weight + alpha / rank · a b."""

    rank: Size = 16
    alpha: Positive = 32.0
    # The projections that have adapters: all, none, or those named
    attention: bool | tuple[Literal["query", "key", "value", "out"], ...] = True
    mlp: bool | tuple[Literal["gate", "up", "down"], ...] = True  # experts included
    delta: bool | tuple[Literal["query", "key", "value", "gate", "decay", "beta", "out"], ...] = False  # delta nets
    checkpoint: str = ""  # folder of a PEFT adapter to start from (`hf.peft`); empty: new adapters


def adapted_weights(lora: Lora) -> dict[str, tuple[str, ...]]:
    """Return the names of the weights that have adapters, by the part of a layer."""
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
    """An entropy bonus whose coefficient changes after every update, to keep the entropy near a target."""

    target: Positive = 0.2  # nats per token
    step: Positive = 0.005  # added to the coefficient if the entropy is below the target, else subtracted
    highest: Positive = 1.0  # the largest coefficient; the smallest is 0


@dataclass(frozen=True, kw_only=True)
class CovarianceKL:
    """A penalty on the tokens whose advantage and log-prob covary most (KL-Cov, `losses.regularizers`)."""

    share: Share = 2e-4  # the fraction of a minibatch's tokens that is penalized
    coefficient: NonNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class Regularizers:
    """Coefficients of the terms added to the policy loss (`losses.regularizers`); 0: off."""

    entropy: Finite = 0.0  # positive values reward entropy; the first coefficient with `adaptive_entropy`
    adaptive_entropy: AdaptiveEntropy | None = None
    kl_cov: CovarianceKL | None = None
    log_ratio_square: NonNegative = 0.0  # squared log-ratio of the policy and the sampler
    load_balance: NonNegative = 0.0
    router_z: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class RouterShift:
    """The factor of RSPO on ratios of tokens whose routing has changed, before clipping (`losses.router_shift`)."""

    floor: Share = 0.8  # the smallest factor


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A clip range that adapts to the measured ratios and replaces the loss's (`losses.calibration`)."""

    share: Between0And1 = 0.15  # wanted fraction of clipped sequences, of those with a nonzero advantage; at most half
    tolerance: Below1 = 0.05  # keep the range while the measured fraction is within this distance of `share`
    gain: NonNegative = 0.5  # step toward the range that would have clipped `share`: 0 none, 1 all the way


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The sizes of the device mesh's axes, outermost first. One may be -1: it takes the remaining devices.

    `sharding.RULES` maps the dimensions of arrays to these axes.
    """

    slice: Annotated[int, CHOSEN_AXIS] = 0  # TPU slices, connected by the data-center network; 0: all slices
    data: Annotated[int, AXIS] = 1  # shards rows, replicates parameters
    fsdp: Annotated[int, AXIS] = -1  # shards rows and parameters
    expert: Annotated[int, CHOSEN_AXIS] = 0  # shards rows and experts; 0: chosen by `sharding.choose_expert_axis`
    context: Annotated[int, AXIS] = 1  # shards the positions of a row
    tensor: Annotated[int, AXIS] = 1  # shards heads, widths, and the vocabulary


@dataclass(frozen=True, kw_only=True)
class PartialRollouts:
    """Rollouts that end once `Sampling.prompts` groups have finished; the rest go on with newer parameters.

    See `rollout.group_pool`.
    """

    carried: NonNegativeInt = 0  # additional groups in flight, and so the most that go on in the next rollout
    ahead: NonNegativeInt = 1  # chunks sampled while the learner updates; later chunks use the new parameters


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A sampler on separate devices; the learner's `Experiment.mesh` has the others (`gspax.sampler.placement`)."""

    devices: PositiveInt  # the number of devices of the sampler, the last ones of `jax.devices()`
    staleness: NonNegativeInt = 0  # rollouts sampled ahead; 0: each is sampled with the newest parameters
    partial: PartialRollouts | None = None  # `staleness` then limits how many rollouts old a group's first tokens are
    mesh: Mesh = field(default_factory=Mesh)  # the sampler's


@dataclass(frozen=True, kw_only=True)
class Engine:
    """vLLM or SGLang servers that sample for the run (`gspax.rollout.servers`).

    Each server gets the policy after every step, through files in a folder that it shares with the run.
    """

    server: Literal["vllm", "sglang"] = "vllm"  # the program that runs at all addresses
    # The folder for the weights, which the run and every server must see. A relative path begins at the directory in
    # which the command was typed, not at --workdir
    folder: Annotated[str, NOT_EMPTY] = "engine_weights"
    addresses: Annotated[tuple[str, ...], NOT_EMPTY] = ("http://127.0.0.1:8000",)
    requests: PositiveInt = 64  # concurrent requests per server
    staleness: NonNegativeInt = 0  # rollouts sampled ahead; 0: each is sampled with the newest parameters
    partial: PartialRollouts | None = None  # `staleness` then limits how many rollouts old a group's first tokens are
    timeout: Positive = 600.0  # seconds to wait for an answer, and for a lost server to return
    probes: PositiveInt = 8  # sequences whose log-probs the servers and the learner must agree on after every step
    # The largest mean difference of a probe's log-probs, in nats, that is accepted; 0: by the dtype and the first push
    tolerance: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A run, from the model to the devices."""

    name: Annotated[str, NAME]
    model: ModelConfig
    data: DataSource
    tokenizer: Tokenizer  # a warm start needs a CompletionTokenizer
    reward: Reward  # (problem, completion text) -> a float, or a tuple of R floats; may be async or Batched
    advantage: Advantage  # rewards [P, G], or [P, G, R] -> advantages [P, G]
    loss: Loss  # (logp, old_logp, advantage, mask) -> losses.Terms
    correction: Correction | None = None  # (old_logp, sampler_logp, mask) -> weights; see losses.correction
    rejection: Rejection | None = None  # (logp, sampler_logp, advantage, mask) -> weights; reject_off_policy
    selection: Selection | None = None  # (losses.selection.Minibatch) -> weights; see losses.selection
    center_scores: bool = False  # subtract each token's mean score under the policy that sampled (docs/corrections.md)
    reference: Reference | None = None
    teacher: Teacher | None = None
    terms: tuple[Term, ...] = ()  # your own, besides those of these settings (docs/howto/add_a_term.md)
    regularizers: Regularizers = field(default_factory=Regularizers)
    length_reward: LengthReward | None = None  # lengths [B] -> rewards [B], added to those of the task; losses.shaping
    filter_overlong: bool = False  # exclude responses cut at the length limit from the loss and the advantages
    calibration: Calibration | None = None
    environment: Environment | None = None  # replies to the policy: tools and multi-turn tasks
    turns: Turns = field(default_factory=Turns)
    # The denominator of the ratios. learner: old log-probs that the learner computes; sampler: the sampler's log-probs;
    # interpolated: between the sampler's and the current ones, by the age of a token (losses.proximal)
    old_logp: OldLogp = "learner"
    routing_replay: RoutingReplay = "off"  # updates choose the experts of the old policy (R2) or the sampler (R3)
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
    placement: Placement | None = None  # None: the sampler runs on the learner's devices
    sampler_mesh: Mesh | None = None  # the sampler's mesh on the learner's devices; None: chosen by `model.sizes`
    engine: Engine | None = None  # None: no server, gspax's own sampler is used
    seed: Seed = 0

    @property
    def trained(self) -> Trained:
        """What the run trains."""
        return Trained(self.model, self.lora)

    @property
    def separate_sampler(self) -> Placement | Engine | None:
        """The settings of a sampler that is not on the learner's devices."""
        return self.placement or self.engine

    @property
    def staleness(self) -> int:
        """The most rollouts that a separate sampler is ahead of the learner; 0 without one."""
        sampler = self.separate_sampler
        return 0 if sampler is None else sampler.staleness

    @property
    def partial(self) -> PartialRollouts | None:
        """The settings of partial rollouts; None: each rollout is sampled as a whole."""
        sampler = self.separate_sampler
        return None if sampler is None else sampler.partial
