"""The dry run's numbers, compared with the model's real shapes and the published sizes."""

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import stub_experiment
from api import (
    LOGIT_BUDGET,
    USABLE,
    abstract_inference_weights,
    active_parameter_count,
    adapters,
    choose_sampler_layout,
    decoding,
    device_bytes,
    inference_weights_bytes,
    logit_chunk,
    make_mesh,
    parameter_count,
    presets,
    sampler_bytes,
    sampler_sizes,
    sharding,
    trained_count,
    transformer,
)
from tiny import CONFIGS, DELTA, OTHERS, one_device

from gspax import config
from gspax.config import layers_of
from gspax.data.tasks import sort
from gspax.experiment import load, override, validate
from gspax.experiment.plan import memory_problems, overview, plan, render
from gspax.sampler.inference_weights import convert

EXPERIMENT = load(Path(stub_experiment.__file__))
PRESETS = {name: getattr(presets, name) for name in ("tiny_moe", "qwen3_0_6b", "qwen3_30b_a3b", "qwen3_235b_a22b")}


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS, *PRESETS])
def test_the_parameter_count_equals_the_models(name):
    config = {**CONFIGS, **OTHERS, **PRESETS}[name]
    assert parameter_count(config) == sum(leaf.size for leaf in jax.tree.leaves(transformer.abstract_params(config)))


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (presets.qwen3_30b_a3b, 30.53e9, 3.35e9),
        (presets.qwen3_235b_a22b, 235.09e9, 22.19e9),
        (presets.qwen3_0_6b, 0.596e9, 0.596e9),
    ],
)
def test_parameter_counts_equal_the_published_ones(config, total, active):
    assert parameter_count(config) == pytest.approx(total, rel=1e-3)
    assert active_parameter_count(config) == pytest.approx(active, rel=1.5e-3)


def test_all_parameters_of_a_dense_layer_are_active():
    config = CONFIGS["some layers dense"]
    dense = 3 * config.hidden_size * config.intermediate_size
    one = replace(config, num_hidden_layers=1, num_experts_per_tok=1)
    assert parameter_count(one) == active_parameter_count(one)
    unused = 3 * (config.num_experts - config.num_experts_per_tok) * config.hidden_size * config.moe_intermediate_size
    assert parameter_count(config) - active_parameter_count(config) == 2 * unused
    assert dense > 0


def test_logits_take_as_much_memory_as_a_layer_or_the_budget():
    model, mesh = replace(CONFIGS["dense"], vocab_size=2**16, intermediate_size=2**15), dict.fromkeys(sharding.AXES, 1)
    layer = 4 * (2 * 16 + 3 * 2**15) + 4 * (3 * 16 + 3 * 4 * 8 + 3 * 2 * 8)  # float32: mlp, attention
    assert logit_chunk(model, mesh, 2**14) == round(2**14 / -(-(2**14) // (2**14 * layer // (3 * 4 * 2**16))))
    assert logit_chunk(model, mesh, 512) == LOGIT_BUDGET // 2**16, "a layer of so few tokens is smaller"
    assert logit_chunk(model, mesh, 100) == 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_equals_the_samplers(dtype):
    experiment = override(EXPERIMENT, [f"model.dtype={dtype}"])
    config, sampling, mesh = experiment.model, experiment.sampling, one_device()

    def make_cache(params, tokens_PS, length_P):
        _, prompts, _ = decoding.prefill(convert(params, config), config, tokens_PS, length_P, mesh=mesh)
        return decoding.new_cache(prompts, config, sampling.prompts * sampling.group, sampling.max_tokens, mesh=mesh)

    cache = jax.eval_shape(
        make_cache,
        transformer.abstract_params(config),
        jax.ShapeDtypeStruct((sampling.prompts, sampling.max_prompt_tokens), jnp.int32),
        jax.ShapeDtypeStruct((sampling.prompts,), jnp.int32),
    )
    sizes = plan(experiment, 1).sampler
    prompts = sum(leaf.size * leaf.dtype.itemsize for layer in cache for leaf in layer.prompt[0])
    completions = sum(leaf.size * leaf.dtype.itemsize for layer in cache for leaf in jax.tree.leaves(layer.completion))
    assert sizes["cache of the prompts, once per prompt"] == prompts
    assert sizes["cache of the completions"] == completions
    eight = plan(experiment, 8).sampler
    assert eight["cache of the prompts, once per prompt"] == prompts // 8


def test_tokens_and_updates_are_counted():
    found = plan(EXPERIMENT, 1)
    assert found.checkpoint == 12 * parameter_count(EXPERIMENT.model)
    text = render(found)
    assert "16 prompts x 4 responses, 4 updates, at most 512 tokens sampled, 1,024 trained on" in text
    assert "10 steps, 40 updates, at most 10,240 tokens" in text
    assert "60 supervised updates" in text


def test_a_run_starts_with_a_table_of_its_model_objective_and_work():
    experiment = override(EXPERIMENT, ["loss.clip_high=0.25", "optimizer.learning_rate=3e-4"])
    rows = dict(overview(plan(experiment, 4)))
    assert [*rows] == ["Experiment", "Model", "Task", "Objective", "Optimizer", "Mesh", "One step", "In total"]
    assert rows["Objective"].splitlines() == [
        "advantage = advantage(reward, eps=1e-06)",
        "loss = gspo(logp, old_logp, advantage, clip_low=0.0002, clip_high=0.25)",
    ]
    assert (rows["Optimizer"], rows["Mesh"]) == ("learning rate 3e-4, constant", "fsdp=4: 4 devices")
    assert rows["Task"] == "experiment_file.Problems, experiment_file.reward"
    assert rows["In total"] in render(plan(experiment, 4))
    assert dict(overview(plan(experiment, 1)))["Mesh"] == "1 device"


def test_the_table_names_the_checkpoint_and_each_of_several_rewards():
    model = replace(EXPERIMENT.model, checkpoint="Qwen/Qwen3-0.6B")
    rewards = {"right": sort.reward, "short": partial(shorter_than, limit=3)}
    rows = dict(overview(plan(replace(EXPERIMENT, model=model, reward=rewards), 1)))
    assert rows["Model"].startswith("Qwen/Qwen3-0.6B, ")
    assert rows["Task"].endswith(", gspax.data.tasks.sort.reward, test_plan.shorter_than")


def shorter_than(problem, completion, *, limit):
    return float(len(completion) < limit)


def test_fsdp_shards_the_parameters_and_data_does_not():
    one = plan(EXPERIMENT, 1)
    fsdp, data = plan(EXPERIMENT, 8), plan(override(EXPERIMENT, ["mesh.data=8"]), 8)
    ones = dict.fromkeys(sharding.AXES, 1)
    assert fsdp.mesh == ones | {"fsdp": 8}
    assert data.mesh == ones | {"data": 8}
    key = "parameters, float32"
    assert fsdp.learner[key] == one.learner[key] // 8
    assert data.learner[key] == one.learner[key]
    assert fsdp.learner["rollout"] == data.learner["rollout"] == one.learner["rollout"] // 8


def test_the_tensor_axis_shards_heads_widths_and_vocabulary():
    one = plan(EXPERIMENT, 1)
    two = plan(override(EXPERIMENT, ["mesh.tensor=2"]), 2)
    assert two.learner["parameters, float32"] == one.learner["parameters, float32"] // 2
    for part in ("cache of the completions", "logits of one position, and their exponentials"):
        assert two.sampler[part] == one.sampler[part] // 2


def test_the_expert_axis_is_explained():
    model = replace(presets.qwen3_30b_a3b, vocab_size=EXPERIMENT.model.vocab_size)
    big = replace(EXPERIMENT, model=model, sampling=replace(EXPERIMENT.sampling, prompts=64))
    alone, found = plan(replace(big, mesh=replace(big.mesh, expert=1)), 64), plan(big, 64)
    assert found.mesh["expert"] == 8 and "expert: below 18,432 tokens" in render(found)
    assert found.learner["parameters, float32"] == alone.learner["parameters, float32"]


def test_microbatches_need_a_sum_of_gradients():
    one, split = plan(EXPERIMENT, 1), plan(override(EXPERIMENT, ["schedule.microbatch_rows=4"]), 1)
    part = "sum of the microbatches' gradients"
    assert split.learner[part] == one.learner["gradients"] and part not in one.learner


def test_master_copies_are_counted_and_offloaded_states_are_not():
    one, half = plan(EXPERIMENT, 1), plan(override(EXPERIMENT, ["model.param_dtype=bfloat16"]), 1)
    assert 2 * half.learner["parameters, bfloat16"] == one.learner["parameters, float32"]
    assert 2 * half.learner["gradients"] == one.learner["gradients"]
    assert half.learner["optimizer state"] == 3 * one.learner["parameters, float32"]  # two moments and the copy
    assert half.checkpoint == one.checkpoint * 14 // 12
    away = plan(override(EXPERIMENT, ["model.param_dtype=bfloat16", "optimizer.offload=true"]), 1)
    for there, here in ((half.learner, away.learner), (half.sampler, away.sampler)):
        assert there.keys() - here.keys() == {"optimizer state"} and away.host == there["optimizer state"]
    assert one.host == half.host == 0
    assert "In host memory" in render(away) and "In host memory" not in render(half)


def test_optional_components_are_counted():
    one = plan(EXPERIMENT, 1)
    whole = [
        "reference=gspax.config.Reference",
        "routing_replay=old",
        "schedule.microbatch_rows=8",
    ]
    more = plan(override(EXPERIMENT, whole), 1)
    for part in (more.learner, more.sampler):
        assert part["reference policy, float32"] == part["parameters, float32"]
    model = EXPERIMENT.model
    sparse = sum(layers_of(model)[layer].sparse for layer in range(model.num_hidden_layers))
    experts = 64 * 16 * sparse * model.num_experts_per_tok  # a byte for each
    assert more.learner["routing of the rollout"] == experts
    assert more.learner["rollout"] == one.learner["rollout"]
    for change, size in (("sampling.top_p=0.9", 6), ("sampling.top_k=4", 4)):
        masked = override(EXPERIMENT, [change, "sampling.mask_replay=6"])
        for part in (plan(masked, 1).learner, plan(masked, 1).sampler):
            assert part["sampling masks of the rollout"] == 64 * 16 * (size + 1)  # a byte for each id, and for `cut`


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["lora.attention=false"],
        ["lora.mlp=false"],
        ["model.mlp_only_layers=(0,)"],
        ["lora.attention=query,value", "lora.mlp=(down,)", "model.mlp_only_layers=(0,)"],
    ],
)
def test_with_adapters_only_their_state_is_counted_as_trained(changes):
    changes = ["lora=gspax.config.Lora", "lora.rank=3", "reference=gspax.config.Reference", *changes]
    made = override(EXPERIMENT, changes)
    factors = sum(leaf.size for leaf in jax.tree.leaves(adapters.abstract(made.model, made.lora)))
    assert trained_count(made.trained) == factors
    found, whole = plan(made, 1), plan(replace(made, lora=None), 1)
    assert found.learner["adapters, float32"] == 4 * factors == found.learner["gradients"]
    assert found.learner["parameters, float32"] == whole.learner["parameters, float32"]
    assert found.checkpoint == 12 * factors and found.sampler["optimizer state"] == 8 * factors
    assert found.learner["reference policy, float32"] == 4 * factors


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("moe", "3 with experts"),
        ("some layers dense", "1 dense, 2 with experts"),
        ("layers that alternate", "2 x (1 dense, 1 with experts), 1 dense"),
        ("latent attention", "1 dense with latent attention, 2 with experts and latent attention"),
        ("every layer slides", "3 with experts and a window of 4"),
        ("delta nets", "2 x (3 dense with gated delta nets, 1 dense)"),
        ("windows", "2 x (2 dense with a window of 3, 1 dense), 1 dense with a window of 3"),
    ],
)
def test_the_layers_are_printed_as_groups(name, layers):
    dense = {"num_experts": 0, "mlp_only_layers": (), "shared_expert_intermediate_size": 0}
    patterns = {
        "delta nets": replace(DELTA, num_hidden_layers=8, delta_layers=(0, 1, 2, 4, 5, 6), **dense),
        "windows": replace(CONFIGS["dense"], num_hidden_layers=7, sliding_window=3, sliding_layers=(0, 1, 3, 4, 6)),
    }
    model = (CONFIGS | patterns)[name]
    experiment = replace(EXPERIMENT, model=replace(model, vocab_size=EXPERIMENT.model.vocab_size))
    assert f"Layers      {layers}\n" in render(plan(experiment, 1))


def test_overridden_keys_are_marked():
    text = render(plan(EXPERIMENT, 1, overridden=["seed", "optimizer.transform.b1", "lora"]))
    marked = [line.split()[1] for line in text.splitlines() if line.startswith("* ")]
    assert "seed" in marked
    assert "optimizer.transform.b1" in marked
    assert not any(key.startswith("sampling") for key in marked)
    assert "\n* " not in render(plan(EXPERIMENT, 1))


def printed_settings(experiment, overridden=(), **options):
    text = render(plan(experiment, 2, overridden=overridden), **options).partition("\n\n")[0]
    return {(words := line[2:].partition(" "))[0]: words[2].strip() for line in text.splitlines()[1:]}


def test_settings_at_their_defaults_are_printed_on_request():
    moved = override(EXPERIMENT, ["optimizer.transform.b1=0.8", "loss.clip_low=1e-4", "guard=gspax.config.Guard"])
    moved = replace(moved, placement=config.Placement(devices=1), reference=config.Reference())
    found = printed_settings(moved, ["evaluation.samples"])
    for key, value in (("optimizer.transform.b1", "0.8"), ("loss.clip_low", "1e-4"), ("placement.devices", "1")):
        assert found[key] == value
    assert found["reward"] == "experiment_file.reward" and "reward.source-hash" not in found
    assert found["reference"] == "gspax.config.Reference", "a setting although its own fields have their defaults"
    assert found["evaluation.samples"] == "1", "given on the command line"
    assert not {"optimizer.transform.b2", "guard", "guard.rollbacks", "sampling", "mesh", "seed"} & {*found}
    everything = printed_settings(EXPERIMENT, all_settings=True)
    assert {"optimizer.transform.b2", "guard.rollbacks", "seed", "reward.source-hash"} <= {*everything}
    title = render(plan(EXPERIMENT, 2)).splitlines()[0]
    assert title == f"Settings that differ from the defaults (--all-settings lists all {len(everything)})"


def test_operations_are_counted_by_hand():
    """Two per weight and token, and attention to half a row: 4 per token, dimension of all heads, and position."""
    dense = replace(CONFIGS["dense"], vocab_size=EXPERIMENT.model.vocab_size)
    found = plan(override(replace(EXPERIMENT, model=dense), ["schedule.epochs=2", "schedule.steps=3"]), 1)
    sampling, heads = EXPERIMENT.sampling, dense.num_attention_heads * dense.head_dim * dense.num_hidden_layers

    def forward(length):
        weights = dense.num_hidden_layers * (
            2 * dense.hidden_size * dense.head_dim * (dense.num_attention_heads + dense.num_key_value_heads)
            + 3 * dense.hidden_size * dense.intermediate_size
        )
        return 2 * (weights + dense.vocab_size * dense.hidden_size) + 4 * heads * length / 2

    prompt, longest = sampling.max_prompt_tokens, sampling.max_prompt_tokens + sampling.max_tokens
    rows = sampling.prompts * sampling.group
    step = forward(prompt) * sampling.prompts * prompt + forward(longest) * rows * (
        sampling.max_tokens + (3 * 2 + 1) * longest
    )
    found = re.search(r"at most (\S+) MFLOP a step, (\S+) MFLOP in total", render(found)).groups()
    of_a_step, in_total = (1e6 * float(number) for number in found)
    assert of_a_step == pytest.approx(step, rel=0.03), "the norms' weights count too"
    assert in_total == pytest.approx(3 * of_a_step, rel=5e-3)


def test_a_disaggregated_sampler_holds_pushed_parameters_and_no_moments():
    half = replace(EXPERIMENT, model=replace(EXPERIMENT.model, dtype="bfloat16"))
    apart = replace(half, placement=config.Placement(devices=2, staleness=2))
    found, alone = plan(apart, 6), plan(half, 4)
    assert found.mesh == alone.mesh and math.prod(found.sampler_mesh.values()) == 2
    assert found.learner == alone.learner
    pushed = found.sampler["inference weights, bfloat16, pushed 3 times"]
    assert pushed == 3 * inference_weights_bytes(half.model, half.sampling, found.sampler_mesh)
    assert "optimizer state" in alone.sampler and "optimizer state" not in found.sampler
    two = plan(half, 2)
    assert found.sampler["cache of the completions"] == two.sampler["cache of the completions"] > 0
    text = render(found)
    assert "fsdp=4: 4 devices of the learner (" in text and "expert=2: 2 devices of its own" in text


def test_8_bits_take_less_memory():
    half = replace(EXPERIMENT, model=replace(EXPERIMENT.model, dtype="bfloat16"))
    eight = replace(half, sampling=replace(half.sampling, kv_cache_dtype="int8", weights_dtype="int8"))
    before, found = plan(half).sampler, plan(eight).sampler
    H = half.model.head_dim
    for part in ("cache of the completions", "cache of the prompts, once per prompt"):
        assert found[part] * 2 * H == before[part] * (H + 4)
    table = 0 if half.model.tie_word_embeddings else half.model.vocab_size * half.model.hidden_size
    assert found["inference weights, int8"] == (before["inference weights, bfloat16"] - 2 * table) // 2 + 2 * table
    gib = (before["cache of the prompts, once per prompt"] + before["cache of the completions"] / 2) / 2**30
    limited = [replace(each, sampling=replace(each.sampling, cache_gib=gib)) for each in (half, eight)]
    rows = half.sampling.prompts * half.sampling.group
    assert plan(limited[0]).sizes.slots == rows // 2 and plan(limited[1]).sizes.slots > 0.7 * rows


def test_a_copy_in_8_bits_is_as_large_as_planned():
    model = replace(EXPERIMENT.model, hidden_size=512, moe_intermediate_size=512, tie_word_embeddings=False)
    mesh = make_mesh(config.Mesh(), jax.devices()[:1])
    copy = abstract_inference_weights(model, mesh, "int8")
    planned = inference_weights_bytes(model, replace(EXPERIMENT.sampling, weights_dtype="int8"), dict(mesh.shape))
    assert device_bytes(copy) == pytest.approx(planned, rel=0.03), "scales and float32 norms and routers"


def test_the_prompts_that_are_prefilled_at_once():
    sampling = replace(EXPERIMENT.sampling, prompts=12, prefill_prompts=5)
    assert "Prefill     5 of 12 prompts of a device at a time" in render(plan(replace(EXPERIMENT, sampling=sampling)))
    every = replace(sampling, prefill_prompts=0)
    assert "Prefill" not in render(plan(replace(EXPERIMENT, sampling=every)))
    ones = dict.fromkeys(sharding.AXES, 1)
    long = replace(every, max_prompt_tokens=2**16)
    few, many = (sampler_sizes(EXPERIMENT.model, replace(long, max_tokens=n), ones).prefill_chunk for n in (1, 2**16))
    assert few < many <= 12, "what the completions' cache will take is free"


def test_the_layout_of_the_sampler_is_explained():
    found = plan(EXPERIMENT, 4)
    assert found.sampler_mesh["expert"] == 4
    assert "experts: 1 of 4 on each device\n" in render(found)
    assert "attention and head: whole on each device\n" in render(found)
    given = plan(replace(EXPERIMENT, sampler_mesh=config.Mesh(data=2, tensor=2, fsdp=1)), 4)
    assert (given.sampler_mesh["data"], given.sampler_mesh["tensor"]) == (2, 2)
    assert "experts: 4 of 4 on each device, each in 2 parts\n" in render(given)
    gathering = plan(replace(EXPERIMENT, sampler_mesh=config.Mesh(fsdp=4, expert=1)), 4)
    assert "attention and head: whole on each device, in 4 parts that every token gathers\n" in render(gathering)


def test_where_memory_is_short_the_sampler_takes_a_smaller_layout():
    mesh = plan(EXPERIMENT, 4).mesh
    whole = sum(sampler_bytes(EXPERIMENT, mesh, choose_sampler_layout(EXPERIMENT, mesh)).values())
    assert choose_sampler_layout(EXPERIMENT, mesh, 2 * whole) == choose_sampler_layout(EXPERIMENT, mesh)
    less = choose_sampler_layout(EXPERIMENT, mesh, int(whole / USABLE) - 1)
    assert (less["expert"], less["tensor"]) == (2, 2)
    assert choose_sampler_layout(EXPERIMENT, mesh, 1000) == mesh


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"sampler_mesh": config.Mesh(fsdp=1, tensor=3)},
            "sampler_mesh: wanted axes whose product is the 4 available devices",
        ),
        (
            {"sampler_mesh": config.Mesh(fsdp=1, data=4), "sampling": config.Sampling(prompts=3, group=2)},
            "4 devices of sampler_mesh for rows, got 3 prompts x 2 samples = 6",
        ),
        (
            {"sampler_mesh": config.Mesh(), "placement": config.Placement(devices=2)},
            "sampler_mesh: wanted null beside placement, whose placement.mesh is the sampler's, got a Mesh",
        ),
    ],
)
def test_a_sampler_mesh_must_fit_the_learners_devices(changes, said):
    found = validate(replace(EXPERIMENT, **changes), 6 if "placement" in changes else 4)
    assert any(said in each for each in found), found


def test_the_cache_budget_limits_the_slots():
    assert plan(EXPERIMENT, 1).sizes.slots == 64 and "Slots" not in render(plan(EXPERIMENT, 1))
    whole = plan(EXPERIMENT, 2).sampler
    prompts, completions = (whole[f"cache of the {part}"] for part in ("prompts, once per prompt", "completions"))
    half = replace(EXPERIMENT.sampling, cache_gib=(prompts + completions / 2) / 2**30)
    found = plan(replace(EXPERIMENT, sampling=half), 2)
    assert found.sizes.slots == 32 and found.sampler["cache of the completions"] == completions // 2
    assert "Slots       32 rows sampled at once" in render(found)
    assert validate(replace(EXPERIMENT, sampling=replace(half, slots=32)), 2) == []
    wanted = {
        replace(half, slots=34): "sampling.slots: wanted at most 32, ",
        replace(half, cache_gib=prompts / 2**30): "sampling.cache_gib: wanted at least ",
        replace(EXPERIMENT.sampling, slots=5): "sampling.slots: wanted a multiple of the 2 devices",
    }
    for sampling, message in wanted.items():
        assert message in validate(replace(EXPERIMENT, sampling=sampling), 2)[0]


def test_a_sampler_that_does_not_fit_is_told_which_cache_would():
    """Qwen3-30B-A3B with 65,536 rows of 4,096 tokens on 32 devices of 80 GiB."""
    sizes = ["sampling.prompts=4096", "sampling.group=16", "sampling.max_tokens=4096", "model.param_dtype=bfloat16"]
    big = override(replace(EXPERIMENT, model=presets.qwen3_30b_a3b), [*sizes, "model.dtype=bfloat16"])
    (said,) = memory_problems(plan(big, 32), 80)
    assert said.startswith("sampler: wanted arrays of at most 80 GiB on each device, got ")
    found = re.search(r"(sampling\.cache_gib=[\d.]+) samples [\d,]+ rows at once, and then it fits", said)
    assert memory_problems(plan(override(big, [found[1]]), 32), 80) == []
    learner, sampler = memory_problems(plan(big, 32), 1)
    assert learner.startswith("learner: ") and "try more devices" in learner and sampler.endswith("or mesh.tensor")
    assert memory_problems(plan(EXPERIMENT, 1), 80) == []
