"""The programs of a run are lowered for GPUs and TPUs on a machine that has neither; what cannot be is named here.

Lowering chooses the kernels of the platform and writes the program in StableHLO; XLA compiles it on the device only.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_experiment
from api import programs, sharding
from jax import export
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from gspax import config
from gspax.rewards.environments import ToolUse

SMALL = replace(
    small_experiment.experiment,
    model=replace(small_experiment.experiment.model, num_hidden_layers=1, num_key_value_heads=2, head_dim=64),
    sampling=replace(small_experiment.experiment.sampling, group=8),
)
PACKED = replace(SMALL.schedule, microbatch_tokens=64, share_prompts=True)
SINKS = {"attention_sinks": True, "expert_bias": True, "sliding_window": 4, "sliding_layers": (0,)}
INT8 = replace(SMALL.sampling, weights_dtype="int8", kv_cache_dtype="int8")
CONVERSATIONS = replace(SMALL, environment=ToolUse(tools=()), turns=config.Turns(limit=2))
LATENT = {
    **{"qk_norm": False, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
    "latent": config.Latent(rank=16, query_rank=16, nope_dim=16, value_dim=16),
}
DELTA = {"delta": config.GatedDelta(key_heads=4, value_heads=4, key_dim=8, value_dim=8), "delta_layers": (0,)}
VARIANTS = {  # each feature once, several in a variant: lowering a program takes seconds
    "dense": replace(SMALL, model=replace(SMALL.model, num_experts=0, intermediate_size=32)),
    "packed, LoRA": replace(SMALL, schedule=PACKED, lora=config.Lora(rank=2)),
    "int8, sinks, biased experts": replace(SMALL, sampling=INT8, model=replace(SMALL.model, **SINKS)),
    "conversations, latent attention": replace(CONVERSATIONS, model=replace(SMALL.model, **LATENT)),
    "conversations, delta nets": replace(  # a layer of each kind
        CONVERSATIONS, model=replace(SMALL.model, num_hidden_layers=2, **DELTA)
    ),
}
FORWARD, BACKWARD = {"splash_mha_fwd"}, {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}
KERNELS = {  # on TPU; of the programs that are not here: none
    programs.TRAIN: BACKWARD,
    programs.SCORE: FORWARD,
    programs.ROLLOUT: FORWARD | {"decode_attention"},
    programs.PROMPTS: FORWARD,
    programs.TURNS: {"decode_attention"},
    programs.REPLIES: {"decode_attention"},
}
CALLS = "ragged_all_to_all", "__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"
UNSTABLE = [  # such a file may not outlive this jax
    export.DisabledSafetyCheck.custom_call(name) for name in (*CALLS, "LayoutConstraint")
]


@pytest.fixture
def platform(monkeypatch, request):
    """The platform of all meshes; jax's name of it."""
    monkeypatch.setattr(sharding, "platform", lambda mesh: request.param)
    return {"gpu": "cuda"}.get(request.param, request.param)


def make_mesh(target):
    """Rows, experts, and heads are sharded. No other test has devices in this order: jax keeps what it traced."""
    devices = np.roll(jax.devices()[:8], {"cuda": 3, "tpu": 5}[target]).reshape(1, 1, 2, 2, 1, 2)
    return jax.sharding.Mesh(devices, sharding.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 6)


def lower(experiment, target, dtype):
    """The exported programs of an experiment by name."""
    mesh, model = make_mesh(target), replace(experiment.model, dtype=dtype)

    def exported(lower):
        function = lower.func.__self__  # of which `Program.lower` binds the method
        return export.export(function, platforms=(target,), disabled_checks=UNSTABLE)(*lower.args, **lower.keywords)

    made = programs.make_programs(replace(experiment, model=model), mesh, mesh)
    return {program.name: exported(program.lower) for program in made}


def calls(exported):
    """The calls of a program that XLA does not compile itself."""
    return {name for name in CALLS if f"custom_call @{name}(" in exported.mlir_module()}


def kernels(exported):
    """The Pallas kernels of a program."""
    return {name.partition("_seg")[0] for name in re.findall(r'kernel_name = "(\w+)"', exported.mlir_module())}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("platform", ["tpu"], indirect=True)
def test_every_program_is_lowered_for_tpu_with_its_kernels(platform, variant):
    lowered = lower(VARIANTS[variant], platform, "bfloat16")
    assert len(lowered) == (6 if VARIANTS[variant].environment else 4)
    for name, program in lowered.items():
        assert (program.platforms, program.nr_devices) == (("tpu",), 8)
        assert kernels(program) == KERNELS.get(name, set()), name
        assert calls(program) == ({"ragged_all_to_all"} if name in KERNELS and variant != "dense" else set()), name
    copied = {leaf.dtype for leaf in lowered[programs.COPY].out_avals}
    assert (jnp.dtype("int8") in copied) == variant.startswith("int8")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("platform", ["gpu"], indirect=True)
def test_every_program_is_lowered_for_cuda(platform, variant):
    """In float32, for which cuDNN has no attention: plain XLA."""
    for name, program in lower(VARIANTS[variant], platform, "float32").items():
        assert (program.platforms, program.nr_devices) == (("cuda",), 8)
        assert not calls(program) and not kernels(program), name


@pytest.mark.parametrize("platform", ["gpu"], indirect=True)
def test_attention_in_bfloat16_is_not_lowered_for_cuda_without_a_gpu(platform):
    """jax asks cuDNN for its version while it traces: nobody can look at this program on a CPU machine."""
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        lower(VARIANTS["dense"], platform, "bfloat16")


@pytest.mark.parametrize("variant", ["dense", "packed, LoRA"])
@pytest.mark.parametrize("platform", ["gpu"], indirect=True)
def test_attention_in_bfloat16_is_lowered_for_cuda_once_cudnn_is_there(platform, variant, monkeypatch):
    """With the answers of a Hopper GPU and cuDNN 9.11 in place of those that jax asks for."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)
    _, forward, backward = CALLS
    wanted = {programs.TRAIN: {forward, backward}, programs.COPY: set()}
    for name, program in lower(VARIANTS[variant], platform, "bfloat16").items():
        assert calls(program) == wanted.get(name, {forward}), name
