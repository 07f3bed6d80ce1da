"""Every experiment file is valid, and its warm start, sampler, scores and updates can be traced."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import equations
import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from api import (
    Passes,
    SampleOptions,
    Skipped,
    TrainedPolicy,
    abstract_params,
    abstract_state,
    batch_shards,
    fill_old_logp,
    head_params,
    make_optimizer,
    make_runtime,
    make_train_step,
    minibatches,
    read_config,
    sampler,
    warm_start,
)

from gspax.config import layers_of, row_shape
from gspax.data import Problem, hf_tokenizer
from gspax.experiment import describe, load, validate
from gspax.experiment.explanation import explain
from gspax.experiment.loading import MODULE
from gspax.learner.teacher import make_passes

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments"
# in test_dataset_experiments.py
DATASETS = {"gsm8k_gspo", "gsm8k_lora", "math_gspo", "code_gspo", "tools_gspo_token"}
REAL = {"smollm2_constraints"}  # in test_smollm2.py
WORDS = {"word_problems", "word_problems_sft", "word_problems_gspo"}  # in test_word_problems.py
TASKS = {"addition", "calculations"}  # problems that experiments import
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in DATASETS | REAL | WORDS | TASKS)


SAME = (  # the same programs as others with other sizes
    *("qwen3_30b_a3b_v5e_64", "qwen3_30b_a3b_v6e_64"),
    *("qwen3_5_35b_a3b_v6e_64", "glm_4_5_air_v6e_128", "qwen3_235b_a22b_v5p_512"),
)


def with_few_layers(model):
    """The first layers of a model, twice as many as have all its kinds: the sampler's program has each layer anew."""
    kinds, numbers = {*layers_of(model)}, ("mlp_only_layers", "delta_layers", "sliding_layers")
    for count in range(1, model.num_hidden_layers + 1):
        few = {name: tuple(number for number in getattr(model, name) if number < 2 * count) for name in numbers}
        if {*layers_of(model)[:count]} == kinds and 2 * count <= model.num_hidden_layers:
            return replace(model, num_hidden_layers=2 * count, **few)
    return model


def test_a_few_layers_are_of_all_kinds():
    models = {path.stem: load(path).model for path in FILES if "_64" in path.stem or "_512" in path.stem}
    few = {name: with_few_layers(model) for name, model in models.items()}
    assert all({*layers_of(few[name])} == {*layers_of(model)} for name, model in models.items())
    assert {name: model.num_hidden_layers for name, model in few.items() if name not in SAME} == {
        **dict.fromkeys(("qwen3_30b_a3b_v5p_64", "qwen3_30b_a3b_distill_v5p_64"), 2),
        **{"gpt_oss_20b_v5e_64": 4, "glm_4_5_air_v5p_64": 4, "qwen3_5_35b_a3b_v5p_64": 8},
    }


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in SAME else ()) for path in FILES],
)
def test_a_step_of_every_experiment_can_be_traced(path, monkeypatch):
    monkeypatch.setattr("gspax.rollout.runtime.require_memory", lambda *_, **__: None)  # nothing is allocated
    experiment = load(path)
    assert validate(experiment) == []
    if experiment.model.checkpoint:  # a large model: long rows would take much memory and test nothing more
        sampling = replace(experiment.sampling, max_prompt_tokens=16, max_tokens=16)
        experiment = replace(experiment, model=with_few_layers(experiment.model), sampling=sampling)
    runtime = make_runtime(experiment)
    state = abstract_state(runtime.policy)
    P, G = experiment.sampling.prompts, experiment.sampling.group
    problems = [experiment.data.train(index) for index in range(P)]
    if experiment.model.checkpoint:  # the tokenizer is stored with the weights, which are absent
        prompts = [[1] * experiment.sampling.max_prompt_tokens] * P
    else:
        prompts = [experiment.tokenizer.encode(problem.prompt) for problem in problems]

    options = SampleOptions(
        model=experiment.model,
        sampling=experiment.sampling,
        stop_ids=experiment.tokenizer.stop_ids,
        mesh=runtime.mesh,
    )

    def rollout(params):
        return sampler.sample(runtime.sampler.push(params, 0).params, prompts, range(P), jax.random.key(0), options)

    sampled = jax.eval_shape(rollout, state.params)
    assert sampled.length_B.shape == (P * G,)
    host = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), sampled)
    reward = experiment.reward(problems[0], problems[0].answer)
    advantage = experiment.advantage(jnp.full((P, G), reward, jnp.float32))
    shape = row_shape(experiment.sampling, experiment.schedule, batch_shards(runtime.mesh))
    batches, layouts = minibatches.split_minibatches(host, experiment.schedule.minibatches, shape, runtime.mesh)
    batches = minibatches.set_advantages(batches, layouts, np.asarray(advantage).reshape(-1), runtime.mesh)
    assert len(batches) == experiment.schedule.minibatches
    read = batches[0].tokens_BT, batches[0].segment_BT, batches[0].mask_BT
    logp, entropy, *_ = jax.eval_shape(runtime.steps.score, state.params, *read)
    assert logp.shape == entropy.shape == batches[0].tokens_BT.shape
    batch, head = batches[0], []
    if experiment.teacher is not None:
        teacher = abstract_params(experiment.teacher.model, runtime.mesh)
        (teach,) = make_passes(experiment.teacher, experiment.model, runtime.steps.settings, None)
        taught = jax.eval_shape(teach, teacher, *read)
        batch, head = (
            replace(batch, teacher_hidden_BTE=jnp.zeros(taught.shape, taught.dtype)),
            [(head_params(teacher),)],
        )
    after, metrics, _ = jax.eval_shape(runtime.steps.update, state, *fill_old_logp(batch), *head)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert {"loss", "grad_norm"} <= set(metrics) and all(leaf.shape == () for leaf in metrics.values())

    if (stage := experiment.warm_start) is not None:
        optimizer = make_optimizer(stage.optimizer)
        start = abstract_state(TrainedPolicy(experiment.model, runtime.mesh, optimizer))
        update = make_train_step(tiny.settings(experiment.model, runtime.mesh), warm_start.imitation, optimizer)
        length = experiment.sampling.max_prompt_tokens + experiment.sampling.max_tokens
        texts = {
            "data": experiment.data,
            "tokenizer": experiment.tokenizer,
            "length": length,
            "vocab_size": experiment.model.vocab_size,
            "seed": experiment.seed,
            "environment": experiment.environment,
        }
        source = warm_start.Demonstrations(stage=stage, **texts)
        batch, _ = warm_start.make_demonstrations(source, 0, mesh=runtime.mesh, skipped=Skipped())
        jax.eval_shape(update, start, batch)


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FILES])
def test_the_printed_equation_of_every_experiment_is_what_the_learner_computes(path):
    experiment = load(path)
    key = repr(describe(experiment.loss)), repr(Passes(experiment).terms), experiment.old_logp
    if key not in COMPARED:  # the objective does not depend on anything else
        equations.compare(experiment)
        COMPARED.add(key)
    assert "declares no formula" not in explain(Passes(experiment))


COMPARED = set()


def test_the_two_sorting_experiments_differ_in_two_lines():
    gspo, grpo = ((FOLDER / f"sort_{name}.py").read_text().splitlines() for name in ("gspo", "grpo"))
    changed = [(a.split("=")[0].strip(), b.split("=")[0].strip()) for a, b in zip(gspo, grpo, strict=True) if a != b]
    assert changed == [("name", "name"), ("loss", "loss")]


@pytest.mark.parametrize(
    ("stem", "model_type"),
    [
        ("qwen3_5_35b_a3b_v5p_64", "qwen3_5_moe_text"),
        ("glm_4_5_air_v5p_64", "glm4_moe"),
        ("gpt_oss_20b_v5e_64", "gpt_oss"),
    ],
)
def test_a_model_for_pods_has_its_published_configuration(stem, model_type, tmp_path):
    name, published = families.PUBLISHED[model_type]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | published))
    chosen = {"checkpoint": name, "dtype": "bfloat16", "remat": "full"}
    assert load(FOLDER / f"{stem}.py").model == replace(read_config(tmp_path), **chosen)


@pytest.fixture(scope="module")
def products():
    load(FOLDER / "qwen3_30b_a3b_v5p_64.py")
    return sys.modules[MODULE]


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("so it is \\boxed{391}", 1.0),
        ("\\boxed{390}, no, \\boxed{ 391 }", 1.0),
        ("<think>\n\\boxed{391}\n</think>\n\nI do not know.", 0.0),
        ("<think>\n\\boxed{1}\n</think>\n\n\\boxed{3,91}", 1.0),
        ("391", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_of_a_product_reads_the_last_box(completion, right, products):
    assert products.reward(Problem(prompt="17 * 23", answer="391"), completion) == right


def test_products_are_correct_and_reproducible(products):
    source = products.Products(seed=3, max_digits=4)
    problems = [source.train(index) for index in range(20)]
    for problem in problems:
        a, b = map(int, re.findall(r"\d+", problem.prompt))
        assert str(a * b) == problem.answer and min(a, b) >= 100 and max(a, b) < 10_000
    assert problems == [source.train(index) for index in range(20)]
    assert source.train(0) != source.heldout(0)


def test_the_assumed_tokenizer_equals_the_published_one(products):
    folder = ROOT.parent / "shared" / "data" / "qwen3_tokenizer"
    if not folder.is_dir():
        pytest.skip("there is no ../shared/data/qwen3_tokenizer")
    published, written = hf_tokenizer(folder), products.Qwen3Chat("Qwen/Qwen3-30B-A3B")
    assert written.vocab_size == published.vocab_size
    assert set(published.stop_ids) <= set(written.stop_ids)
