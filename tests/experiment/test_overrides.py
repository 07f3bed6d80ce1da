"""Overrides `a.b=c`: what can be set, to which values, and the errors for the rest."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import optax
import pytest
import stub_experiment
from api import presets, tasks
from averages import Averages
from tethers import Tether

from gspax import data, losses
from gspax.config import Evaluation, Lora, Reference, Task, Teacher, optimizers
from gspax.data.sources.tables import JsonLines
from gspax.errors import UserError
from gspax.experiment import describe, difference, flatten, load, override, validate
from gspax.experiment.description import SOURCE
from gspax.experiment.overrides import SYNONYMS, as_recorded, keys, without_effect
from gspax.losses import distill
from gspax.rewards import math
from gspax.rewards.environments import ToolUse, calculator

EXPERIMENT = load(Path(stub_experiment.__file__))


def changed(*assignments):
    return difference(describe(EXPERIMENT), describe(override(EXPERIMENT, assignments)))


def error(*assignments):
    with pytest.raises(UserError) as caught:
        override(EXPERIMENT, assignments)
    return str(caught.value)


def test_a_text_keeps_its_spaces():
    """A template may end in one; other values may have spaces around them."""
    template = "{prompt}\nAnswer: "
    source = replace(
        EXPERIMENT, data=data.sequence([{"prompt": "1", "answer": "1"}], heldout=[{"prompt": "2", "answer": "2"}])
    )
    changed = override(source, [f" data.schema.template ={template}", "loss= gspax.losses.grpo ", "warm_start= null"])
    assert changed.data.schema.template == template and changed.loss is losses.grpo and changed.warm_start is None
    assert as_recorded(source, describe(changed)).data.schema.template == template


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("seed=7", "seed: 0 -> 7"),
        ("schedule.steps=1e3", "schedule.steps: 10 -> 1000"),
        ("schedule.steps=1_000", "schedule.steps: 10 -> 1000"),
        (" schedule.steps = 3 ", "schedule.steps: 10 -> 3"),
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate: 1e-6 -> 3e-4"),
        ("model.rope_theta=2.5e6", "model.rope_theta: 10000.0 -> 2.5e6"),
        ("sampling.temperature=2", "sampling.temperature: 1.0 -> 2.0"),
        ("model.remat=full", "model.remat: none -> full"),
        ("model.tie_word_embeddings=false", "model.tie_word_embeddings: true -> false"),
        ("name=a=b", "name: stub -> a=b"),
        ("model.mlp_only_layers=(0,1)", "model.mlp_only_layers: [] -> [0, 1]"),
        ("model.mlp_only_layers=0, 1", "model.mlp_only_layers: [] -> [0, 1]"),
        ("model.mlp_only_layers=1", "model.mlp_only_layers: [] -> [1]"),
        ("model.mlp_only_layers=(1,)", "model.mlp_only_layers: [] -> [1]"),
        ("tokenizer.stop_ids=[3,4]", "tokenizer.stop_ids: [10] -> [3, 4]"),
        ("tokenizer.stop_ids=()", "tokenizer.stop_ids: [10] -> []"),
        ("data.max_digits=8", "data.max_digits: 6 -> 8"),
        ("data.label=null", None),
        ("data.label=x", "data.label: null -> x"),
        ("loss.clip_low=1e-3", "loss.clip_low: 2e-4 -> 0.001"),
        ("loss.clip_high=1e-3", "loss.clip_high: 4e-4 -> 0.001"),
        ("advantage.eps=1", "advantage.eps: 1e-6 -> 1.0"),
        ("optimizer.transform.weight_decay=0.1", "optimizer.transform.weight_decay: 0.0 -> 0.1"),
        ("optimizer.warmup_updates=10", "optimizer.warmup_updates: 0 -> 10"),
        ("warm_start.optimizer.transform.b1=0.8", "warm_start.optimizer.transform.b1: 0.9 -> 0.8"),
        ("warm_start.optimizer.learning_rate=1", "warm_start.optimizer.learning_rate: 0.003 -> 1.0"),
    ],
)
def test_a_value_is_parsed_by_the_type_of_its_field(assignment, line):
    assert changed(assignment) == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("text", "stop"),
    [('"\\n\\n","a, b"', ("\n\n", "a, b")), ("('a',)", ("a",)), ("a,b", ("a", "b")), ('["a"]', ("a",)), ("'", ("'",))],
)
def test_texts_of_a_tuple_may_be_quoted(text, stop):
    assert override(EXPERIMENT, [f"sampling.stop={text}"]).sampling.stop == stop


def test_parsed_values_have_the_exact_type():
    new = override(EXPERIMENT, ["schedule.steps=1e3", "sampling.temperature=2", "model.mlp_only_layers=1"])
    assert type(new.schedule.steps) is int
    assert type(new.sampling.temperature) is float
    assert new.model.mlp_only_layers == (1,)
    assert EXPERIMENT.schedule.steps == 10  # the original is unchanged


def test_setting_a_keyword_of_a_function_makes_a_partial():
    new = override(EXPERIMENT, ["loss=gspax.losses.gspo", "loss.clip_low=1e-3"])
    assert new.loss.func is losses.gspo
    assert new.loss.keywords == {"clip_low": 1e-3}


def test_a_name_in_a_mapping_is_set_and_the_others_stay():
    teacher = Teacher(models=dict.fromkeys(("math", "code"), EXPERIMENT.model))
    experiment = replace(EXPERIMENT, teacher=teacher)
    models = override(experiment, ["teacher.models.math.checkpoint=runs/math"]).teacher.models
    assert {name: model.checkpoint for name, model in models.items()} == {"math": "runs/math", "code": ""}
    assert teacher.models["math"] == EXPERIMENT.model
    with pytest.raises(UserError, match=r"did you mean 'teacher\.models\.math\.checkpoint'"):
        override(experiment, ["teacher.models.maths.checkpoint=x"])


def test_an_optimizer_and_a_schedule_are_set_by_name():
    new = override(
        EXPERIMENT,
        ["optimizer.schedule=gspax.config.optimizers.cosine", "optimizer.schedule.updates=1e3",
         "optimizer.warmup_updates=10", "optimizer.transform=gspax.config.optimizers.muon",
         "optimizer.transform.beta=0.9"],
    )  # fmt: skip
    assert new.optimizer.schedule.func is optimizers.cosine and new.optimizer.schedule.keywords == {"updates": 1000}
    assert type(new.optimizer.schedule.keywords["updates"]) is int
    assert new.optimizer.transform.func is optimizers.muon
    assert validate(new) == []
    assert validate(override(new, ["optimizer.schedule.updates=10"])) == [
        "optimizer.schedule: wanted more updates than the warm-up's 10, got updates=10"
    ]
    assert validate(override(new, ["optimizer.schedule.updates=0"]))[0] == (
        "optimizer.schedule.updates: wanted at least 1, got 0"
    )


def test_dotted_names_replace_a_function_and_later_overrides_apply_to_it():
    new = override(EXPERIMENT, ["model=gspax.model.presets.qwen3_30b_a3b", "model.num_hidden_layers=2"])
    assert new.model.num_hidden_layers == 2
    assert new.model.num_experts == presets.qwen3_30b_a3b.num_experts
    last = override(EXPERIMENT, ["model.num_hidden_layers=2", "model=gspax.model.presets.qwen3_30b_a3b"])
    assert last.model is presets.qwen3_30b_a3b
    assert override(EXPERIMENT, ["warm_start=none"]).warm_start is None
    assert override(EXPERIMENT, ["data=stub_experiment.experiment.data"]).data is stub_experiment.experiment.data


def test_the_name_of_a_class_is_one_with_its_defaults():
    new = override(EXPERIMENT, ["terms=tethers.Tether", "terms.0.slack=0.5", "model.mixer=averages.Averages"])
    assert new.terms == (Tether(slack=0.5),) and new.model.mixer == Averages()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("schedule.steps=1.5", "schedule.steps: wanted an integer, got '1.5'"),
        ("schedule.steps=1e999", "schedule.steps: wanted an integer, got '1e999'"),
        ("schedule.steps=", "schedule.steps: wanted an integer, got ''"),
        ("optimizer.transform.eps=tiny", "optimizer.transform.eps: wanted a number, got 'tiny'"),
        ("model.attention_bias=1", "model.attention_bias: wanted true or false, got '1'"),
        ("model.mlp_only_layers=1,x", "model.mlp_only_layers: wanted an integer, got '1,x'"),
        ("data.max_digits=10", "data.max_digits=10: wanted max_digits of at most 9, got 10"),
        ("schedule.steps", "'schedule.steps': an override is written key=value, as in optimizer.learning_rate=1e-5"),
        ("=3", "'=3': an override is written key=value, as in optimizer.learning_rate=1e-5"),
        ("optimizer.learning_rat=1", "unknown key 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'?"),
        ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'optimizer.learning_rate'?"),
        ("smapling.prompts=1", "unknown key 'smapling.prompts'; did you mean 'sampling.prompts'?"),
        ("loss.clip_lo=1", "unknown key 'loss.clip_lo'; did you mean 'loss.clip_low'?"),
        ("steps=1", "unknown key 'steps'; did you mean 'schedule.steps'?"),
        (
            "warm_strat.optimizer.learning_rate=1",
            "unknown key 'warm_strat.optimizer.learning_rate'; did you mean 'warm_start.optimizer.learning_rate'?",
        ),
        ("mesh.qqqqq=1", "unknown key 'mesh.qqqqq'; mesh has slice, data, fsdp, expert, context, tensor"),
        ("seed.x=1", "unknown key 'seed.x': seed is of type int and has no fields"),
        ("data.label.x=1", "unknown key 'data.label.x': data.label is None and has no fields"),
        ("reward.x=1", "unknown key 'reward.x': reward is experiment_file.reward and has no fields"),
        ("loss=gspo", "loss: wanted the dotted name of a function, as in gspax.losses.gspo, got 'gspo'"),
        (
            "loss=gspax.losses.gspp",
            "loss: wanted a name that exists (gspax.losses has no 'gspp'; did you mean 'gspo'?), "
            "got 'gspax.losses.gspp'",
        ),
        (
            "loss=gspax.losses",
            "loss: wanted the dotted name of a function (it names a module), got 'gspax.losses'",
        ),
        (
            "model=gspax.losses.gspo",
            "model: wanted the dotted name of a ModelConfig (it names gspax.losses.gspo), got 'gspax.losses.gspo'",
        ),
        (
            "terms=stub_experiment.experiment",
            "terms: wanted the dotted name of a Term (it is of type Experiment), got 'stub_experiment.experiment'",
        ),
        (
            "loss=no_such_package.gspo",
            "loss: wanted a name that can be imported (there is no module 'no_such_package'), "
            "got 'no_such_package.gspo'",
        ),
        ("warm_start=3", "warm_start: wanted the dotted name of a WarmStart or null, got '3'"),
        (
            "placement=gspax.config.Placement",
            "placement: wanted a Placement made in a file (it has fields without defaults) or null, "
            "got 'gspax.config.Placement'",
        ),
    ],
)
def test_an_invalid_override_is_one_error(assignment, message):
    assert error(assignment) == message


def test_a_module_that_fails_to_import_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "breaks_on_import.py").write_text("1 / 0\n")
    (tmp_path / "needs_a_module.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert error("loss=breaks_on_import.f") == (
        "breaks_on_import.f: importing breaks_on_import failed: ZeroDivisionError: division by zero"
    )
    assert error("loss=needs_a_module.f") == (
        "needs_a_module.f: importing needs_a_module needs the module 'no_such_package'"
    )


def test_all_errors_are_reported_together():
    assert error("seed=x", "schedule.steps=3", "sede=1", "seed=1.5").splitlines() == [
        "seed: wanted an integer, got 'x'",
        "unknown key 'sede'; did you mean 'seed'?",
        "seed: wanted an integer, got '1.5'",
    ]


def test_every_described_key_can_be_set():
    described = {key for key in flatten(describe(EXPERIMENT)) if not key.endswith(SOURCE)} - {"type"}
    assert described <= set(keys(EXPERIMENT))


WITH_TEACHER = replace(EXPERIMENT, teacher=Teacher(model=EXPERIMENT.model, divergence=distill.reverse_kl))


@pytest.mark.parametrize(
    ("in_file", "in_run"),
    [
        (EXPERIMENT, ["model.norm_place=after"]),
        (EXPERIMENT, ["model.router.scoring=sigmoid", "model.router.group_best=1"]),
        (EXPERIMENT, ["optimizer.bias_update_speed=0.01"]),
        (EXPERIMENT, ["sampling.noise=problem", "sampling.drafts=2", "sampling.draft_cost=1.5"]),
        (EXPERIMENT, ["optimizer.schedule=gspax.config.optimizers.cosine", "optimizer.schedule.updates=100"]),
        (EXPERIMENT, ["lora=gspax.config.Lora", "lora.delta=true"]),
        (WITH_TEACHER, ["teacher.divergence=gspax.losses.distill.jensen_shannon", "teacher.divergence.beta=0.3"]),
        (override(EXPERIMENT, ["model.norm_place=after"]), ["model.norm_place=before"]),
        (override(EXPERIMENT, ["model.router.scale=2"]), ["model.router=gspax.config.Router"]),
        (replace(EXPERIMENT, warm_start=None), []),
    ],
    ids=lambda each: each[0] if isinstance(each, list) and each else None,
)
def test_a_runs_settings_are_restored_whatever_a_description_leaves_out(in_file, in_run):
    of_run = override(in_file, in_run)
    assert describe(as_recorded(in_file, describe(of_run))) == describe(of_run)
    assert describe(as_recorded(of_run, describe(in_file))) == describe(in_file)


def test_a_keyword_that_the_runs_function_has_not_is_taken_away():
    optimizer = replace(EXPERIMENT.optimizer, transform=partial(optax.sgd, momentum=0.9))
    of_run = override(replace(EXPERIMENT, optimizer=optimizer), ["optimizer.transform=optax.sgd"])
    assert as_recorded(replace(EXPERIMENT, optimizer=optimizer), describe(of_run)).optimizer.transform is optax.sgd


def has_answer(problem, *, shortest=1):
    return None if len(problem.answer) >= shortest else "short"


def rows_of(split):
    return [{"prompt": f"{split} {n}", "answer": str(n)} for n in range(9)]


def with_members(folder):
    """An experiment whose checks, tools, and tasks are members of tuples."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of("test")))
    table = JsonLines((str(folder / "rows.jsonl"),))
    benchmark = tasks.Benchmark(table, data.Schema().read)
    members = tuple(Task(name=name, data=benchmark, reward=math.reward) for name in ("sums", "products"))
    return replace(
        EXPERIMENT,
        data=data.sequence(rows_of("train"), checks=(data.AnswerMatches("."), has_answer)),
        evaluation=Evaluation(tasks=members),
        environment=ToolUse((calculator(),)),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("evaluation.tasks.products.samples", 4),
        ("evaluation.tasks.products.temperature", 0.5),
        ("environment.tools.calculator.description", "Adds."),
        ("data.checks.0.pattern", "[0-9]"),
        ("data.checks.1.shortest", 0),
    ],
)
def test_a_member_of_a_tuple_has_its_name_or_its_number(key, value, tmp_path):
    before = with_members(tmp_path)
    after = override(before, [f"{key}={value}"])
    assert flatten(describe(after))[key] == value
    assert [line.partition(":")[0] for line in difference(describe(before), describe(after))] == [key]
    assert describe(as_recorded(before, describe(after))) == describe(after)
    assert validate(after) == validate(before)


@pytest.mark.parametrize("written", ["evaluation.tasks[1].samples", "evaluation.tasks.1.samples"])
def test_a_number_of_a_member_with_a_name_is_answered_with_the_name(written, tmp_path):
    with pytest.raises(UserError) as caught:
        override(with_members(tmp_path), [f"{written}=2"])
    assert str(caught.value) == f"unknown key {written!r}; did you mean 'evaluation.tasks.products.samples'?"


def test_a_missing_file_is_named_with_the_field_that_can_be_set(tmp_path):
    experiment = with_members(tmp_path)
    missing = replace(experiment, data=data.jsonl(tmp_path / "a.jsonl", heldout=tmp_path / "b.jsonl"))
    keys = ("evaluation.tasks.sums.data.table.paths", "data.train_rows.paths", "data.heldout_rows.paths")
    missing = override(missing, [f"{keys[0]}={tmp_path / 'c.jsonl'}"])
    found = sorted(line for line in validate(missing) if "cannot be read" in line)
    assert [line.split(": ")[0] for line in found] == sorted(keys)
    mixed = replace(experiment, data=data.mixture((experiment.data, 1), (missing.data, 1)))
    found = [line.split(": ")[0] for line in validate(mixed) if "cannot be read" in line]
    assert found == ["data.sources.1.train_rows.paths", "data.sources.1.heldout_rows.paths"]
    here = override(mixed, [f"{key}={tmp_path / 'rows.jsonl'}" for key in found])
    assert not [line for line in validate(here) if "cannot be read" in line]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("sampling.prompts=8_0", "an integer, with _ between groups of three digits only, got '8_0'"),
        ("optimizer.learning_rate=1_0e-5", "a number, with _ between groups of three digits only"),
        ("loss=grpo", "as in gspax.losses.grpo"),
        ("advantage=grpo", "as in gspax.advantages.standardize"),
        ("advantage=gdpo", "as in gspax.advantages.gdpo"),
        ("lora.rank=8", "lora is None and has no fields; set lora=gspax.config.Lora before it"),
        ("optimizer.adam_beta2=0.9", "did you mean 'optimizer.transform.b2'?"),
        ("loss.epsilon=0.2", "did you mean 'loss.clip_low'?"),
        ("sampling.n=4", "did you mean 'sampling.group'?"),
        ("beta=0.1", "did you mean 'reference.coefficient'? (reference is None)"),
        ("lr=1e-5", "did you mean 'optimizer.learning_rate'?"),
        ("num_generations=8", "did you mean 'sampling.group'?"),
        ("max_completion_length=8", "did you mean 'sampling.max_tokens'?"),
    ],
)
def test_words_of_other_libraries_get_a_hint_that_helps(assignment, message):
    with pytest.raises(UserError) as found:
        override(stub_experiment.experiment, [assignment])
    assert message in str(found.value)


def test_every_synonym_stands_for_a_field():
    experiment = replace(stub_experiment.experiment, lora=Lora(), reference=Reference(), loss=losses.gspo)
    known = set(keys(experiment))
    assert {field for names in SYNONYMS.values() for field in names} <= known
    assert known.isdisjoint(SYNONYMS)


def test_thousands_may_be_grouped():
    changed = override(stub_experiment.experiment, ["schedule.steps=1_000", "optimizer.learning_rate=1_000.5"])
    assert changed.schedule.steps == 1000 and changed.optimizer.learning_rate == 1000.5


def test_an_assignment_that_a_later_one_undoes_is_told():
    given = ["seed=1", "loss.clip_low=0.1", "loss=gspax.losses.grpo", "loss.clip_low=0.2", "seed=2"]
    assert [*without_effect(given)] == [
        "seed=1: without effect, because seed=2 follows",
        "loss.clip_low=0.1: without effect, because loss=gspax.losses.grpo follows",
    ]
