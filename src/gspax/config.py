"""What an experiment file says: frozen dataclasses that name real functions.

Importing this module imports no model, optimiser or accelerator code, so that an experiment can be resolved,
checked and priced in well under a second (`gspax train --dry-run`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

LOGIT_BUDGET = 2**25  # logits that the learner holds at once on one device, in numbers (128 MiB)
SCORE_BUDGET = 2**23  # attention scores likewise, where they are held at all; fewer than logits: faster on a CPU


Remat = Literal["none", "products", "full", "offload"]


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """RoPE stretched to `factor` times the context that the model was trained on (YaRN, arXiv 2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0  # dimensions that turn more often than this in the original context keep their frequency
    beta_slow: float = 1.0  # those that turn less often than this have theirs divided by `factor`; a ramp in between
    truncate: bool = True  # the ramp starts and ends at whole dimensions
    attention_factor: float | None = (
        None  # multiplies queries and keys; None: from the next two, else 0.1 ln factor + 1
    )
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture, and below the blank line how it is computed and where its parameters come from."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int = 0  # width of a dense feed-forward layer
    num_experts: int = 0  # 0: every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # width of one expert
    norm_topk_prob: bool = True  # renormalise the chosen experts' probabilities to sum to one
    decoder_sparse_step: int = 1  # layer l has experts if (l + 1) is a multiple of this ...
    mlp_only_layers: tuple[int, ...] = ()  # ... and l is not listed here
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: Yarn | None = None
    attention_bias: bool = False  # of the four projections of an attention layer
    sliding_window: int = 0  # tokens that a token of the layers listed next looks at, itself included
    sliding_layers: tuple[int, ...] = ()  # the others look at everything before them
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 40960

    dtype: str = "float32"  # of activations and matmuls; logits are float32
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters; bfloat16 ones have a float32 master copy
    # What a layer keeps for its backward pass: none: everything; products: matrix products and its input; full: its
    # input; offload: its input, in the host's memory. The rest is computed again.
    remat: Remat = "none"
    checkpoint: str = ""  # folder of a Hugging Face checkpoint that parameters start from; empty: random


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether `layer` (from 0) has experts rather than one dense feed-forward network."""
    return (
        config.num_experts > 0 and layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    )


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """How many tokens a token of each layer looks at, itself included; empty if all layers look at everything."""
    sliding = config.sliding_layers if config.sliding_window else ()
    everything = 2**30
    layers = range(config.num_hidden_layers)
    return tuple(config.sliding_window if layer in sliding else everything for layer in layers) if sliding else ()


def layer_runs(config: ModelConfig) -> tuple[tuple[bool, int], ...]:
    """Consecutive layers of one kind as (sparse, count); each run is one stack of parameters and one `lax.scan`."""
    runs: list[tuple[bool, int]] = []
    for layer in range(config.num_hidden_layers):
        sparse = is_sparse(config, layer)
        if runs and runs[-1][0] == sparse:
            runs[-1] = (sparse, runs[-1][1] + 1)
        else:
            runs.append((sparse, 1))
    return tuple(runs)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn for training."""

    prompts: int = 64  # P, per rollout batch
    group: int = 8  # G, completions of each prompt
    max_prompt_tokens: int = 64
    max_tokens: int = 64  # of a completion, the stop token included
    temperature: float = 1.0
    top_k: int = 0  # 0: off. The filters bias the ratio (log-probs are of the unfiltered distribution)
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW behind a global-norm clip, with a linear warm-up to a constant rate.

    Parameters in bfloat16 (`model.param_dtype`) have a float32 master copy in its state.
    """

    learning_rate: float = 1e-6
    warmup_updates: int = 0
    max_grad_norm: float = 1.0  # 0: no clipping
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    offload: bool = False  # its state lives in the host's memory, on the devices during an update alone


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long, and how a rollout batch is cut up."""

    steps: int = 100  # rollout batches, a target and not a delta: raise it to continue a finished run
    minibatches: int = 4  # optimiser updates per rollout batch; the paper's 4
    microbatch_rows: int = 0  # rows of one forward and backward pass; 0: the whole mini-batch
    eval_every: int = 20  # steps; 0: only at the start and the end
    checkpoint_every: int = 20  # steps; 0: only at the end
    keep_checkpoints: int = 2


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out problems, sampled at temperature 1 and decoded greedily."""

    problems: int = 256
    samples: int = 1  # drawn per problem for the sampled accuracy
    max_tokens: int = 0  # 0: as in sampling


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A short supervised stage before reinforcement learning; `demonstration(problem, rng)` is the text to imitate."""

    demonstration: Callable[..., str]
    steps: int = 60
    rows: int = 128
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """KL to the policy that reinforcement learning started from; with neither function it is only measured."""

    loss: Callable[..., Any] | None = None  # kl.token_kl, kl.sequence_kl, kl.grpo_kl: added to the policy loss
    reward: Callable[..., Any] | None = None  # kl.k1, kl.k2, kl.k3: their sum over a response is taken off its reward
    coefficient: float = 1e-3  # of either


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Train low-rank adapters instead of the parameters (arXiv 2106.09685): weight + alpha / rank · a b."""

    rank: int = 16
    alpha: float = 32.0
    attention: bool = True  # query, key, value, out
    mlp: bool = True  # gate, up, down, of every expert too


@dataclass(frozen=True, kw_only=True)
class Regularizers:
    """Coefficients of what is added to the policy loss; 0: off. `losses.regularizers` says what sources report."""

    entropy: float = 0.0  # above 0 rewards entropy
    load_balance: float = 0.0
    router_z: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A clip range that is measured on the second mini-batch of the run and then follows a drift.

    See `losses.calibration`: `propose` makes the first one, `next_range` every other.
    """

    share: float = 0.15  # of the sequences with an advantage that are to be cut; half of them is all that can be
    tolerance: float = 0.05  # how far the measured share may be off before the range moves
    gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the device mesh's axes, outermost first; at most one -1, filled in with the devices that are left.

    `sharding.RULES` says what is split over which.
    """

    slice: int = 0  # TPU slices, joined by the data centre's network; 0: as many as there are
    data: int = 1  # parameters replicated, rows split
    fsdp: int = -1  # parameters and rows split
    expert: int = 0  # experts and rows split, tokens go to their experts; 0: chosen by `sharding.expert_axis`
    context: int = 1  # positions of a row split
    tensor: int = 1  # heads, widths and vocabulary split


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A sampler on its own devices, the last ones; `Experiment.mesh` covers the others (`gspax.rollout.placement`)."""

    devices: int
    staleness: int = 0  # rollout batches that it may draw ahead; 0: each with the newest parameters
    mesh: Mesh = field(default_factory=Mesh)  # of the sampler's devices


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A whole run. `data` has `train(index)` and `heldout(index)`, each giving a `gspax.data.Problem`."""

    name: str
    model: ModelConfig
    data: Any
    tokenizer: Any
    reward: Callable[..., Any]  # (problem, completion text) -> float, or a tuple of R floats
    advantage: Callable[..., Any]  # rewards [P, G], or [P, G, R] -> advantages [P, G]
    loss: Callable[..., Any]  # (logp, old_logp, advantage, mask) -> losses.Terms
    correction: Callable[..., Any] | None = None  # (old_logp, sampler_logp, mask) -> weights: losses.correction
    rejection: Callable[..., Any] | None = None  # (logp, sampler_logp, advantage, mask) -> weights: reject_off_policy
    reference: Reference | None = None
    regularizers: Regularizers = field(default_factory=Regularizers)
    length_reward: Callable[..., Any] | None = None  # lengths [B] -> rewards [B] to add: shaping
    filter_overlong: bool = False  # responses cut at the limit count neither in the loss nor in the advantages
    calibration: Calibration | None = None
    routing_replay: bool = False  # updates route as the policy did before the rollout batch's first one
    sampling: Sampling = field(default_factory=Sampling)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora | None = None
    schedule: Schedule = field(default_factory=Schedule)
    evaluation: Evaluation = field(default_factory=Evaluation)
    warm_start: WarmStart | None = None
    mesh: Mesh = field(default_factory=Mesh)
    placement: Placement | None = None  # None: the sampler runs on the learner's devices
    seed: int = 0


def trained_dtype(experiment: Experiment) -> str:
    """The dtype of what an experiment trains: adapters are float32 whatever stands beside them."""
    return "float32" if experiment.lora is not None else experiment.model.param_dtype
