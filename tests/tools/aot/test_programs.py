"""Ahead-of-time compilation sees the programs of a run: arguments, resident memory, profile scopes."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_experiment
from api import (
    Passes,
    Rollout,
    abstract_inference_weights,
    make_mesh,
    make_optimizer,
    minibatches,
    programs,
    train_step,
)

from gspax import config, losses
from gspax.rewards.environments import ToolUse

SMALL = small_experiment.experiment
EXPERIMENTS = {
    "plain": SMALL,
    "with a reference": replace(SMALL, reference=config.Reference(loss=losses.kl.token_kl)),
    "with Routing Replay": replace(SMALL, routing_replay="old"),
    "with the sampler's routing": replace(SMALL, routing_replay="sampler"),
    "with router-shift weights": replace(SMALL, router_shift=config.RouterShift()),
    "with shared prompts": replace(SMALL, schedule=replace(SMALL.schedule, microbatch_tokens=64, share_prompts=True)),
    "with mask replay": replace(SMALL, sampling=replace(SMALL.sampling, top_p=0.9, mask_replay=5)),
    "with a load-balance loss": replace(SMALL, regularizers=config.Regularizers(load_balance=0.01)),
}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_the_abstract_minibatch_equals_one_of_a_rollout(experiment):
    mesh = make_mesh(experiment.mesh, jax.devices()[:4])
    sampling, model = experiment.sampling, experiment.model
    B, T = sampling.prompts * sampling.group, sampling.max_prompt_tokens + sampling.max_tokens

    def routed(rows, columns):
        return rows, model.num_hidden_layers, columns, model.num_experts_per_tok

    rollout = Rollout(
        tokens_BT=np.zeros((B, T), np.int32),
        mask_BT=np.zeros((B, T), bool),
        logp_BT=np.zeros((B, T), np.float32),
        prompt_length_B=np.ones(B, np.int32),
        length_B=np.ones(B, np.int32),
        finished_B=np.ones(B, bool),
        expert_BLTA=np.zeros(routed(B, T), np.uint8) if Passes(experiment).samples_experts else None,
        kept_BTK=np.zeros((B, T, 5), np.uint8) if sampling.mask_replay else None,
    )

    def score(params, tokens_BT, segment_BT, mask_BT, expert_BLTA, prefix_BT, kept_BTK):
        rows = tokens_BT.shape
        expert = jnp.zeros(routed(*rows), jnp.uint8) if keep_experts else None
        logp = jnp.zeros(routed(*rows)) if experiment.router_shift is not None else None
        return train_step.Scores(jnp.zeros(rows), jnp.zeros(rows), expert, logp)

    shape = config.row_shape(sampling, experiment.schedule, 4)
    sharing = sampling.group if experiment.schedule.share_prompts else 0
    batches, layouts = minibatches.split_minibatches(
        rollout, experiment.schedule.minibatches, shape, mesh, sharing=sharing
    )
    reads = Passes(experiment).reads_experts
    keep_experts = reads and experiment.routing_replay != "sampler"
    batches, _ = minibatches.score_minibatches(score, {}, batches, range(len(batches)))
    if experiment.reference:
        batches = minibatches.score_first(score, {}, batches)
    batches = minibatches.set_advantages(batches, layouts, np.zeros(B), mesh)
    assert len(batches) == experiment.schedule.minibatches
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), batches[0])
    abstract = programs.abstract_batch(experiment, mesh)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract) == shapes
    assert abstract.tokens_BT.sharding == batches[0].tokens_BT.sharding
    assert abstract.advantage.sharding == batches[0].advantage.sharding


WIDE = replace(SMALL.model, hidden_size=64, num_experts=0, intermediate_size=16)
HALF = replace(SMALL.model, param_dtype="bfloat16")


class Copying(config.Term):
    """Keeps a copy of the policy."""

    def held(self, trained_dtype):
        yield config.Held("a copy", trained_dtype)


@pytest.mark.parametrize("model", [SMALL.model, HALF], ids=["float32", "bfloat16 with a master copy"])
def test_resident_bytes(model):
    """With a reference and a copy that a term keeps: these and the other minibatches are not passed to the train step;
    only inference weights go to the sampler."""
    experiment = replace(EXPERIMENTS["with a reference"], model=model, terms=(Copying(),))
    mesh = make_mesh(experiment.mesh, jax.devices()[:4])
    optimizer = make_optimizer(experiment.optimizer, experiment.trained.dtype)
    state = programs.abstract_state(programs.TrainedPolicy(experiment.model, mesh, optimizer))
    params, whole = programs.device_bytes(state.params), programs.device_bytes(state)
    batch = programs.device_bytes(programs.abstract_batch(experiment, mesh))
    found = {program.name: program.resident for program in programs.make_programs(experiment, mesh, mesh)}
    others = (experiment.schedule.minibatches - 1) * batch
    assert found == {
        programs.TRAIN: 2 * params + others,
        programs.SCORE: params + whole + others,
        programs.COPY: params + whole,  # the reference, the copy, and all of the state but the parameters
        programs.ROLLOUT: 2 * params + whole,
    }


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_resident_bytes_with_a_disaggregated_sampler(staleness):
    """The learner's are the same, plus, while it scores, the parameters in transfer if rollouts are sampled ahead. The
    sampler's devices have no optimizer state and no reference, but parameters and each rollout sampled ahead."""
    experiment = replace(EXPERIMENTS["with a reference"], model=replace(SMALL.model, dtype="bfloat16"))
    mesh, own = (make_mesh(config.Mesh(), jax.devices()[part]) for part in (slice(4), slice(4, 6)))
    together = {program.name: program.resident for program in programs.make_programs(experiment, mesh, mesh)}
    placed = replace(experiment, placement=config.Placement(devices=2, staleness=staleness))
    found = {program.name: program.resident for program in programs.make_programs(placed, mesh, own)}
    positions = SMALL.sampling.max_prompt_tokens + SMALL.sampling.max_tokens
    rows = SMALL.sampling.prompts * SMALL.sampling.group // 2
    rollout = rows * (positions * (4 + 4 + 1) + 4 + 4 + 1)  # tokens, log-probs, mask; two lengths, whether it ended
    transfer = programs.device_bytes(abstract_inference_weights(placed.model, mesh)) if staleness else 0
    assert found == {
        programs.TRAIN: together[programs.TRAIN],
        programs.SCORE: together[programs.SCORE] + transfer,
        programs.ROLLOUT: staleness * (programs.device_bytes(abstract_inference_weights(placed.model, own)) + rollout),
    }


def test_a_disaggregated_sampler_is_lowered_for_its_mesh_and_the_pushed_parameters():
    mesh, own = make_mesh(config.Mesh(), jax.devices()[:4]), make_mesh(config.Mesh(), jax.devices()[4:6])
    placed = replace(SMALL, model=replace(SMALL.model, dtype="bfloat16"), placement=config.Placement(devices=2))
    lowered = {program.name: program.lower() for program in programs.make_programs(placed, mesh, own)}
    given = jax.tree.map(lambda leaf: leaf.dtype, lowered[programs.ROLLOUT].args_info[0][0])
    assert given == jax.tree.map(lambda leaf: leaf.dtype, abstract_inference_weights(placed.model, own))
    text = {name: each.as_text() for name, each in lowered.items()}
    assert '"fsdp"=2' in text[programs.ROLLOUT] and '"fsdp"=4' not in text[programs.ROLLOUT]
    assert '"fsdp"=4' in text[programs.TRAIN] and '"fsdp"=2' not in text[programs.TRAIN]


def test_bytes_of_a_device():
    mesh = make_mesh(config.Mesh(), jax.devices()[:4])
    row = programs.abstract_rows(mesh, (8, 6), jnp.bool_)
    everywhere = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=programs.named_sharding(mesh))
    away = jax.ShapeDtypeStruct(
        (5,), jnp.float32, sharding=programs.named_sharding(mesh).with_memory_kind("pinned_host")
    )
    assert programs.device_bytes({"a": row, "b": everywhere, "c": away}) == 2 * 6 + 3 * 4


def test_every_program_can_be_lowered_for_present_devices():
    """Needs no libtpu: fails when a run's functions change and `tools.aot.programs` does not."""
    mesh = make_mesh(SMALL.mesh, jax.devices()[:4])
    sampling = SMALL.sampling
    rows, length = sampling.prompts * sampling.group, sampling.max_prompt_tokens + sampling.max_tokens
    shapes = {
        program.name: jax.tree.leaves(program.lower().out_info) for program in programs.make_programs(SMALL, mesh, mesh)
    }
    assert list(shapes) == [programs.TRAIN, programs.SCORE, programs.COPY, programs.ROLLOUT]
    assert shapes[programs.SCORE][0].shape == (rows // SMALL.schedule.minibatches, length)
    shape_of = programs.abstract_rollout(SMALL.model, SMALL.sampling, mesh)
    wanted = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shape_of)]
    assert [(leaf.shape, leaf.dtype) for leaf in shapes[programs.ROLLOUT]] == wanted


@pytest.mark.parametrize(
    "form",
    [
        {"models": {"one": SMALL.model, "wide": WIDE}},
        pytest.param({"model": WIDE}, marks=pytest.mark.slow),
        pytest.param({"refresh_every": 1, "prompt": lambda *_: "", "max_prompt_tokens": 9}, marks=pytest.mark.slow),
    ],
    ids=["several", "one", "the policy"],
)
def test_an_update_with_teachers_is_lowered_with_their_heads(form):
    mesh, teacher = make_mesh(SMALL.mesh, jax.devices()[:4]), config.Teacher(**form, kept=2)
    found = programs.make_programs(replace(SMALL, teacher=teacher), mesh, mesh)
    passes = [program for program in found if program.name.startswith(programs.TEACHER)]
    models = config.teacher_models(teacher) or (SMALL.model,)
    assert [program.model for program in passes] == list(models)
    assert [program.name for program in passes] == (
        ["teacher"] if len(models) == 1 else [f"teacher {number + 1}" for number in range(len(models))]
    )
    widths = [jax.tree.leaves(program.lower().out_info)[0].shape[2] for program in passes]
    assert widths == [model.hidden_size for model in models]
    (update,) = (program for program in found if program.name == programs.TRAIN)
    assert update.lower().out_info[0].step.shape == ()


def test_conversations_are_sampled_by_three_programs_of_the_same_state():
    """With half as many slots: the state that the first program returns is the one that the others take."""
    mesh = make_mesh(SMALL.mesh, jax.devices()[:4])
    sampling = replace(SMALL.sampling, slots=SMALL.sampling.prompts * SMALL.sampling.group // 2)
    sampling = replace(sampling, max_tokens=7)
    experiment = replace(SMALL, environment=ToolUse(tools=()), turns=config.Turns(limit=2), sampling=sampling)
    found = {program.name: program for program in programs.make_programs(experiment, mesh, mesh)}
    assert list(found) == [programs.TRAIN, programs.SCORE, programs.COPY, *DRAWING]
    assert len({found[name].resident for name in DRAWING}) == 1
    assert [found[name].runs for name in DRAWING] == [1, 2 * (7 - 1 - 4), 2]  # a reply of 4 tokens
    start, turns, replies = (found[name].lower() for name in DRAWING)
    state, _ = start.out_info
    assert state.rows.tokens_BC.shape == (2 * sampling.slots, sampling.max_tokens)
    assert state.rows.active_W.shape == (sampling.slots,)
    given = turns.args_info[0][1]
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), given) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )
    compiled = start.compile()
    wanted, same = turns.compile().input_shardings[0][1], replies.args_info[0][1]
    assert jax.tree.structure(same) == jax.tree.structure(given)
    for leaf, there, here in zip(*map(jax.tree.leaves, (given, compiled.output_shardings[0], wanted)), strict=True):
        assert there.is_equivalent_to(here, len(leaf.shape))


DRAWING = programs.PROMPTS, programs.TURNS, programs.REPLIES


def test_a_profile_shows_the_parts_of_the_model():
    """`named_scope` names reach the metadata of the compiled operations."""
    mesh = make_mesh(SMALL.mesh, jax.devices()[:4])
    own = {programs.TRAIN: ("loss", "update"), programs.SCORE: ("score",)}
    own[programs.ROLLOUT] = ("prefill", "decode", "sample")
    for program in programs.make_programs(SMALL, mesh, mesh):
        if program.name == programs.COPY:
            continue
        scopes = re.findall(r'loc\("([^"]*)"', program.lower().as_text(debug_info=True))
        for part in ("attention", "router", "experts", "head", *own[program.name]):
            assert any(re.search(rf"(^|[/(]){part}[/)]", scope) for scope in scopes), (program.name, part)
