"""Checks the sampler and the learner of a small model: one device and many, repetition, and restart."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

from gspax import advantages, config, losses
from gspax.config import Experiment, ModelConfig, Optimizer, Sampling, Schedule
from gspax.config.optimizers import adamw
from gspax.data.tasks import sort
from gspax.learner.optimizer import make_optimizer
from gspax.learner.state import TrainedPolicy, abstract_state, device_memory, init_state
from gspax.learner.train_step import fill_old_logp
from gspax.learner.updates import Steps, make_steps
from gspax.model.sizes import forward_flops, inference_weights_bytes, parameter_count
from gspax.parallel import multihost, sharding
from gspax.run.checkpoints import Checkpoints
from gspax.run.folders import remove_folder
from gspax.sampler import sampler
from gspax.sampler.placement import Sampler, make_meshes, make_sampler
from gspax.sampler.state import SampleOptions
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path
from gspax.tools.benchmarks import time_calls
from gspax.tools.doctor import hardware
from gspax.tools.doctor.results import Place, Result, compare, rate, skipped
from gspax.types import Batch, Params, Rollout, TrainState

UPDATE_TOLERANCE = 1e-3  # in float32, relative to the largest step of each array
UPDATE_SHARE, DECODE_SHARE = 15, 10  # percent of the measured limits
MOST = 20.0  # seconds of timed calls, beyond which a slow device has fewer of them
MODEL = ModelConfig(  # experts in one of two layers, and rows that are long enough for the kernels
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=256,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    mlp_only_layers=(0,),
    rope_theta=1e4,
    initializer_range=0.1,
)
SAMPLING = Sampling(prompts=4, group=4, max_prompt_tokens=96, max_tokens=32)


class Trainer(NamedTuple):
    """The compiled functions of a model on some devices."""

    experiment: Experiment
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    steps: Steps
    sampler: Sampler

    def new_state(self) -> TrainState:
        """Make a state with random parameters, the same each time."""
        return init_state(self.experiment.model, self.optimizer, jax.random.key(0), self.mesh)

    def prompts(self) -> list[list[int]]:
        """Generate random prompts of random lengths."""
        sampling, rng = self.experiment.sampling, np.random.default_rng(0)
        lengths = rng.integers(1, sampling.max_prompt_tokens + 1, sampling.prompts)
        return [rng.integers(0, self.experiment.model.vocab_size, length).tolist() for length in lengths]

    def options(self) -> SampleOptions:
        """Return sampling options without stop tokens."""
        model, sampling = self.experiment.model, self.experiment.sampling
        return SampleOptions(model=model, sampling=sampling, stop_ids=(), mesh=self.sampler.mesh)

    def sample(self, state: TrainState) -> Rollout:
        """Sample completions of the prompts, on the learner's mesh."""
        prompts, weights = self.prompts(), self.sampler.push(state.params)
        rollout = sampler.sample(weights, prompts, range(len(prompts)), jax.random.key(1), self.options())
        return self.sampler.fetch(rollout)


def make_mesh(devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """Make a mesh with all axes that the devices of a slice allow: 2 each for experts, tensors, and time."""
    left = len(devices) // len(sharding.group_by_slice(devices))
    sizes = dict.fromkeys(("fsdp", "expert", "tensor", "context"), 1)
    for axis in sizes:
        if left % 2 == 0:
            sizes[axis], left = 2, left // 2
    return sharding.make_mesh(config.Mesh(**sizes | {"fsdp": sizes["fsdp"] * left}), devices)


def make_trainer(
    devices: Sequence[jax.Device], dtype: str, model: ModelConfig = MODEL, sampling: Sampling = SAMPLING
) -> Trainer:
    """Compile the model for these devices, with rows and a width that the mesh divides."""
    axes = dict(make_mesh(devices).shape)
    shards, rows = axes["fsdp"] * axes["expert"], sharding.batch_shards(axes)
    wide = replace(model, dtype=dtype, hidden_size=-(-model.hidden_size // shards) * shards)
    experiment = Experiment(
        name="doctor",
        model=wide,
        data=sort.Problems(),
        tokenizer=sort.tokenizer,
        reward=sort.reward,
        advantage=advantages.standardize,
        loss=losses.gspo,
        sampling=replace(sampling, prompts=-(-sampling.prompts // rows) * rows),
        optimizer=Optimizer(learning_rate=1e-3, transform=partial(adamw, eps=1e-2)),  # a small eps amplifies rounding
        schedule=Schedule(minibatches=1),
        mesh=config.Mesh(**axes),
    )
    mesh, sampler_mesh = make_meshes(experiment, devices)
    optimizer = make_optimizer(experiment.optimizer, wide.param_dtype)
    steps = make_steps(experiment, optimizer, mesh)
    return Trainer(experiment, mesh, optimizer, steps, make_sampler(wide, sampler_mesh, mesh))


def make_batch(trainer: Trainer) -> Batch:
    """Make a minibatch of random tokens without old log-probs, which the update computes."""
    sampling, rng = trainer.experiment.sampling, np.random.default_rng(2)
    B, S, T = sampling.prompts * sampling.group, sampling.max_prompt_tokens, sampling.max_tokens
    length_B1 = rng.integers(S + 1, S + T + 1, (B, 1))
    position_1T = np.arange(S + T)[None]
    arrays = (
        rng.integers(0, trainer.experiment.model.vocab_size, (B, S + T)).astype(np.int32),
        (position_1T < length_B1).astype(np.int32),
        (position_1T >= S) & (position_1T < length_B1),
        rng.normal(size=B).astype(np.float32),
    )
    tokens_BT, segment_BT, mask_BT, advantage_B = multihost.to_devices(
        arrays, sharding.named_sharding(trainer.mesh, "batch")
    )
    return Batch(tokens_BT=tokens_BT, segment_BT=segment_BT, mask_BT=mask_BT, advantage=advantage_B)


def update(trainer: Trainer) -> Params:
    """Return the parameters after one update from the first ones, on the host."""
    batch, on_policy = fill_old_logp(make_batch(trainer))
    return multihost.to_host(trainer.steps.update(trainer.new_state(), batch, on_policy)[0].params)


def same_seed(trainer: Trainer) -> Iterator[Result]:
    """Check that samples and updates of the same seed have equal bits twice."""
    dtype, state = trainer.experiment.model.dtype, trainer.new_state()
    first, second = (multihost.to_host(trainer.sample(state)) for _ in range(2))
    names = "tokens_BT", "logp_BT"
    got, want = ({name: getattr(rollout, name) for name in names} for rollout in (first, second))
    yield compare(f"same seed twice, samples, {dtype}", got, want, 0.0)
    yield compare(f"same seed twice, updates, {dtype}", update(trainer), update(trainer), 0.0)


def mesh_and_one_device(trainer: Trainer) -> Iterator[Result]:
    """Compare the changes of the parameters by an update on the whole mesh and by the same update on one device."""
    name = "update on the mesh and on one device"
    if trainer.mesh.size == 1:
        yield skipped(name, "one device")
        return
    experiment = trainer.experiment
    alone = make_trainer(jax.local_devices()[:1], experiment.model.dtype, experiment.model, experiment.sampling)
    before = multihost.to_host(alone.new_state().params)
    got, want = (jax.tree.map(np.subtract, update(each), before) for each in (trainer, alone))
    axes = ", ".join(f"{axis}={size}" for axis, size in trainer.mesh.shape.items() if size > 1)
    yield compare(f"{name}, {axes}", got, want, UPDATE_TOLERANCE)


def checkpoint(trainer: Trainer, place: Place) -> Iterator[Result]:
    """Check that a checkpoint written, verified, and read back has equal bits."""
    if jax.process_count() > 1 and not place.shared:
        yield skipped("checkpoint", "on several hosts it needs --workdir, a folder that all of them share")
        return
    made = make_folder(place.folder) if jax.process_index() == 0 else ""
    folder = to_path(multihost.gather(made)[0])
    try:
        state, mesh = trainer.new_state(), trainer.mesh
        with Checkpoints(folder, keep=1, mesh=mesh) as checkpoints:
            checkpoints.save(1, state, {})
            checkpoints.wait()
        with Checkpoints(folder, mesh=mesh) as checkpoints:
            policy = TrainedPolicy(trainer.experiment.model, mesh, trainer.optimizer)
            restored, _ = checkpoints.restore(abstract_state(policy), 1)
        got, want = multihost.to_host([(each.params, each.opt_state) for each in (restored, state)])
        yield compare("checkpoint", got, want, 0.0)
    finally:
        if made:
            remove_folder(folder)


def make_folder(directory: Path) -> str:
    """Make a new folder in `directory`."""
    if not open_storage(directory).has_folders:
        return str(directory / f"gspax-doctor-{secrets.token_hex(8)}")
    return tempfile.mkdtemp(prefix="gspax-doctor-", dir=directory)


def speed_model(device: jax.Device) -> tuple[ModelConfig, Sampling]:
    """Return a dense model with a state of at most an eighth of the device, and its sampling settings."""
    if device.platform == "cpu":
        model = replace(MODEL, num_experts=0, hidden_size=512, intermediate_size=1536, vocab_size=4096)
        return model, replace(SAMPLING, group=2, max_tokens=96, chunk=16)
    memory = device_memory(device) or 2**34
    width = int((memory / 8 / 16 / 96) ** 0.5) // 512 * 512  # 8 layers of 12 width², 16 bytes for each parameter
    width = min(max(width, 512), 4096)
    model = replace(
        MODEL,
        num_experts=0,
        mlp_only_layers=(),
        num_hidden_layers=8,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 128 * 128,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 512,
        vocab_size=32768,
    )
    return model, Sampling(prompts=8, group=4, max_prompt_tokens=512, max_tokens=512, chunk=64)


def speed(device: jax.Device) -> Iterator[Result]:
    """Measure an update and a decoding step on one device, as shares of its measured limits."""
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    model, sampling = speed_model(device)
    trainer, limits = make_trainer([device], dtype, model, sampling), hardware.limits(dtype)
    state, (batch, on_policy) = trainer.new_state(), fill_old_logp(make_batch(trainer))
    weights, options, key = trainer.sampler.push(state.params), trainer.options(), jax.random.key(1)
    prompts = sampler.place_prompts(trainer.prompts(), range(sampling.prompts), options, widest=True)
    decoding, _ = sampler.start(weights, prompts, key, options=options)
    rows, length = sampling.prompts * sampling.group, sampling.max_prompt_tokens + sampling.max_tokens

    def update() -> object:
        nonlocal state
        state, *rest = trainer.steps.update(state, batch, on_policy)
        return state, rest

    def decode() -> object:
        nonlocal decoding
        decoding, progress = sampler.advance_chunk(weights, decoding, key, np.int32(0), options=options)
        return progress

    seconds = min(time_calls(decode, 3, MOST))[0] / sampling.chunk
    read = inference_weights_bytes(model, sampling, dict(trainer.mesh.shape)) / limits.copy_bytes
    computed = forward_flops(model, 2 * sampling.max_prompt_tokens) * rows / limits.matmul_flops
    what, needed = ("% of the copy's rate", read) if read > computed else ("% of the product's rate", computed)
    size = f"{parameter_count(model) / 1e6:,.0f} million parameters, {dtype}"
    yield rate(f"decoding step, {size}", 100 * needed / seconds, DECODE_SHARE, what, f"{1e3 * seconds:.3g} ms")
    seconds = min(time_calls(update, 3, MOST))[0]
    needed = 3 * forward_flops(model, length) * rows * length / limits.matmul_flops
    yield rate(f"update, {size}", 100 * needed / seconds, UPDATE_SHARE, "% of the product's rate", f"{seconds:.3g} s")
