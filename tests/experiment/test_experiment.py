"""Loading, validating and describing an experiment file."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stub_experiment

from gspax import advantages, losses
from gspax.config import ModelConfig, Yarn
from gspax.config.functions import parse
from gspax.errors import UserError
from gspax.experiment import (
    RESUMABLE,
    check,
    describe,
    difference,
    flatten,
    load,
    override,
    validate,
    warnings,
)
from gspax.experiment.description import SOURCE
from gspax.rewards import http, math
from gspax.rewards.combination import weighted_sum

STUB = Path(stub_experiment.__file__)
EXPERIMENT = load(STUB)


def write(folder, text):
    path = folder / "mine.py"
    path.write_text(text)
    return path


def error(path):
    with pytest.raises(UserError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_valid_file_loads():
    assert EXPERIMENT.name == "stub"
    assert validate(EXPERIMENT, 1) == validate(EXPERIMENT, None) == warnings(EXPERIMENT) == []


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("x = 1\nexperiment = (\n", 2, "syntax error: '(' was never closed"),
        ("x = 1\n\nimport no_such_module_here\n", 3, "No module named 'no_such_module_here'"),
        ("from gspax import lossess\n", 1, "cannot import name 'lossess' from 'gspax'"),
        ("\nraise ValueError('two\\nlines')\n", 2, "ValueError: two lines"),
        ("\ndef f():\n    return 1 / 0\nf()\n", 3, "ZeroDivisionError: division by zero"),
        ("from gspax.config import Sampling\nSampling(promts=3)\n", 2, "unexpected keyword argument 'promts'"),
        ("exit(3)\n", 1, "should only define `experiment`"),
        ("x = '\0'\n", 1, "null"),
    ],
)
def test_an_exception_in_the_file_is_reported_with_its_line(tmp_path, text, line, message):
    path = write(tmp_path, text)
    found = error(path)
    assert found.startswith(f"{path}:{line}: ")
    assert message in found


def test_a_file_without_an_experiment_is_rejected(tmp_path):
    assert "defines no `experiment`" in error(write(tmp_path, "experment = 3\n"))
    assert "must be a gspax.config.Experiment, got dict" in error(write(tmp_path, "experiment = {}\n"))
    assert "got the class Experiment" in error(
        write(tmp_path, "from gspax.config import Experiment\nexperiment = Experiment\n")
    )


def test_a_missing_file_is_rejected(tmp_path):
    assert error(tmp_path / "none.py") == f"{tmp_path / 'none.py'}: there is no such file"
    assert "got a directory" in error(tmp_path)


def test_a_changed_file_is_not_loaded_from_a_cache(tmp_path):
    text = STUB.read_text()
    path = write(tmp_path, text)
    assert load(path).name == "stub"
    assert load(write(tmp_path, text.replace('name="stub"', 'name="stab"'))).name == "stab"
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]


def test_a_variant_may_import_the_file_next_to_it(tmp_path):
    (tmp_path / "the_base_of_a_variant.py").write_text(STUB.read_text())
    path = write(
        tmp_path,
        "from dataclasses import replace\nimport the_base_of_a_variant as base\n"
        "experiment = replace(base.experiment, name='variant')\n",
    )
    before = list(sys.path)
    assert load(path).name == "variant"
    assert sys.path == before


# Each override, and the one error that it must give on 1 device.
ERRORS = {
    "sampling.prompts=0": "sampling.prompts: wanted at least 1, got 0",
    "sampling.group=1": "sampling.group: wanted at least 2, got 1",
    "sampling.max_tokens=0": "sampling.max_tokens: wanted at least 1, got 0",
    "sampling.temperature=0": "sampling.temperature: wanted 0.001 to 1000, got 0.0",
    "sampling.temperature=nan": "sampling.temperature: wanted 0.001 to 1000, got nan",
    "sampling.temperature=inf": "sampling.temperature: wanted 0.001 to 1000, got inf",
    "sampling.top_k=-1": "sampling.top_k: wanted at least 0, got -1",
    "sampling.top_p=0": "sampling.top_p: wanted above 0 and at most 1, got 0.0",
    "sampling.top_p=1.1": "sampling.top_p: wanted above 0 and at most 1, got 1.1",
    "sampling.min_p=1": "sampling.min_p: wanted at least 0 and below 1, got 1.0",
    "sampling.mask_replay=-1": "sampling.mask_replay: wanted at least 0, got -1",
    "sampling.mask_replay=8": "sampling.mask_replay: wanted 0 without a filter (sampling.top_k, top_p, or min_p), "
    "whose tokens it replays, got 8",
    "sampling.temperature=1e-30": "sampling.temperature: wanted 0.001 to 1000, got 1e-30",
    "optimizer.learning_rate=0": "optimizer.learning_rate: wanted above 0 and at most 100, got 0.0",
    "optimizer.learning_rate=1e10": "optimizer.learning_rate: wanted above 0 and at most 100, got 1e10",
    "sampling.prompts=1e10": "sampling.prompts: wanted at most 16777216, got 10000000000",
    "model.hidden_size=1000000000000": "model.hidden_size: wanted at most 16777216, got 1000000000000",
    "model.num_hidden_layers=10000000": "model.num_hidden_layers: wanted at most 10000, got 10000000",
    "model.num_experts=65536": "model.num_experts: wanted at most 65535, got 65536",
    "warm_start.optimizer.transform.b2=1": "warm_start.optimizer.transform.b2: wanted at least 0 and below 1, got 1.0",
    "warm_start.rows=0": "warm_start.rows: wanted at least 1, got 0",
    "schedule.minibatches=0": "schedule.minibatches: wanted at least 1, got 0",
    "schedule.minibatches=3": "schedule.minibatches: wanted a divisor of the 64 rows of a rollout batch, got 3",
    "schedule.microbatch_rows=3": "schedule.microbatch_rows: wanted a divisor of a minibatch's 16 rows, got 3",
    "schedule.epochs=0": "schedule.epochs: wanted at least 1, got 0",
    "schedule.steps=-1": "schedule.steps: wanted at least 0, got -1",
    "schedule.keep_checkpoints=0": "schedule.keep_checkpoints: wanted at least 1, got 0",
    "seed=-1": "seed: wanted at least 0 and below 2^32, got -1",
    "name=a b": "name: wanted letters, digits, '.', '_' and '-', a letter or digit first, got 'a b'",
    "name=../up": "name: wanted letters, digits, '.', '_' and '-', a letter or digit first, got '../up'",
    "model.dtype=float16": "model.dtype: wanted float32 or bfloat16, got 'float16'",
    "model.num_experts_per_tok=5": "model.num_experts_per_tok: wanted 1 to model.num_experts (4), got 5",
    "model.num_experts_per_tok=0": "model.num_experts_per_tok: wanted 1 to model.num_experts (4), got 0",
    "model.moe_intermediate_size=0": "model.moe_intermediate_size: wanted at least 1 for the experts, got 0",
    "model.num_experts=0": "model.intermediate_size: wanted at least 1 for the dense layers, got 0",
    "model.mlp_only_layers=0": "model.intermediate_size: wanted at least 1 for the dense layers, got 0",
    "model.mlp_only_layers=7": "model.mlp_only_layers: wanted layers below 2, got 7",
    "model.num_key_value_heads=3": "model.num_attention_heads: wanted a multiple of model.num_key_value_heads (3), "
    "got 4",
    "model.head_dim=15": "model.head_dim: wanted an even number (RoPE rotates pairs), got 15",
    "model.max_position_embeddings=15": "sampling.max_tokens: wanted prompt and completion within "
    "model.max_position_embeddings (15), got 8 + 8 = 16 tokens",
    "evaluation.max_tokens=600": "evaluation.max_tokens: wanted prompt and completion within "
    "model.max_position_embeddings (512), got 8 + 600 = 608 tokens",
    "model.vocab_size=10": "model.vocab_size: wanted at least the tokenizer's 11, got 10",
    "tokenizer.stop_ids=11": "tokenizer.stop_ids: wanted a tuple of ids below 11, got (11,)",
    "optimizer.transform.weight_decay=-1": "optimizer.transform.weight_decay: wanted at least 0, got -1.0",
    "optimizer.schedule=gspax.config.optimizers.cosine": "optimizer.schedule: wanted a function of (peak, "
    "warmup_updates), gspax.config.optimizers.cosine does not accept these arguments: missing a required argument: "
    "'updates'",
    "mesh.data=0": "mesh.data: wanted at least 1, or -1 for the devices that are left, got 0",
    "loss.clip_low=1": "loss.clip_low: wanted a number at least 0 and below 1, got 1.0",
    "loss.clip_high=-1": "loss.clip_high: wanted a number at least 0, got -1.0",
}


@pytest.mark.parametrize("assignment", ERRORS)
def test_an_invalid_value_is_one_error(assignment):
    assert validate(override(EXPERIMENT, [assignment]), 1) == [ERRORS[assignment]]


def test_a_rollout_batch_has_no_more_tokens_than_can_be_indexed():
    sizes = ["sampling.prompts=16777216", "sampling.group=64", "sampling.max_prompt_tokens=4", "sampling.max_tokens=4"]
    assert validate(override(EXPERIMENT, sizes), 1) == [
        "sampling: wanted at most 2,147,483,647 tokens in a rollout batch, "
        "got 16777216 prompts x 64 samples x 8 tokens = 8,589,934,592"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "3"}, "seed: wanted an integer, got '3'"),
        ({"seed": True}, "seed: wanted an integer, got True"),
        ({"reward": 3}, "reward: wanted a function, got 3"),
        (
            {"reward": partial(math.reward, form="box")},
            "reward.form: wanted 'boxed' or 'hash' or 'tag' or 'answer' or 'number' or None, got 'box'",
        ),
        (
            {"reward": partial(weighted_sum, rewards={"right": partial(http.reward, url="http://a", timeout="10")})},
            "reward.rewards.right.timeout: wanted a number, got '10'",
        ),
        ({"reward": partial(weighted_sum, rewards=["math"])}, "reward.rewards: wanted a mapping, got ['math']"),
        (
            {"reward": partial(http.reward, url="http://a", response="reward")},
            "reward.response: wanted a function, got 'reward'",
        ),
        ({"warm_start": 3}, "warm_start: wanted a WarmStart or None, got 3"),
        ({"sampling": replace(EXPERIMENT.sampling, top_p="1")}, "sampling.top_p: wanted a number, got '1'"),
        ({"model": None}, "model: wanted a ModelConfig, got None"),
        (
            {"model": replace(EXPERIMENT.model, rope_scaling=Yarn(factor=0.5, original_max_position_embeddings=8))},
            "model.rope_scaling.factor: wanted at least 1, got 0.5",
        ),
        ({"data": stub_experiment.Problems}, "data: wanted an instance, got the class Problems (write Problems(...))"),
        ({"data": 3}, "data: wanted an object with train and heldout, int has no train"),
        (
            {"tokenizer": SimpleNamespace(encode=len, decode=len, vocab_size=11, stop_ids=(10,))},
            "tokenizer: wanted an object with encode and decode and encode_completion, SimpleNamespace has no "
            "encode_completion",
        ),
        (
            {"reward": lambda text: 0},
            "reward: wanted a function of (problem, completion), test_experiment.<lambda> does not accept these "
            "arguments: too many positional arguments",
        ),
        (
            {"loss": partial(stub_experiment.gspo, clip_lo=0.1)},
            "loss: wanted a function of (logp, old_logp, advantage, mask), stub_experiment.gspo has no parameter "
            "'clip_lo' (did you mean 'clip_low'?)",
        ),
    ],
)
def test_an_invalid_component_is_one_error(change, message):
    assert validate(replace(EXPERIMENT, **change), 1) == [message]


def test_all_errors_are_reported_together():
    bad = override(EXPERIMENT, ["sampling.group=1", "optimizer.transform.b1=2", "name=/"])
    assert len(validate(bad, 1)) == 3
    with pytest.raises(UserError) as caught:
        check(bad)
    assert len(str(caught.value).splitlines()) == 3


# Overrides that are wrong only together with other settings, and the start of their error on 8 devices.
COMBINATIONS = {
    "schedule.minibatches=3": "schedule.minibatches: wanted a divisor",
    "schedule.microbatch_rows=3": "schedule.microbatch_rows: wanted a divisor",
    "schedule.share_prompts=true": "schedule.share_prompts: wanted schedule.microbatch_tokens",
    "schedule.epochs=1e9": "schedule: wanted at most 2,147,483,647 updates",
    "model.max_position_embeddings=15": "sampling.max_tokens: wanted prompt and completion within",
    "model.vocab_size=8": "model.vocab_size: wanted at least the tokenizer's 11",
    "model.num_key_value_heads=3": "model.num_attention_heads: wanted a multiple",
    "mesh.data=3": "mesh: wanted axes whose product is the 8 available devices",
    "lora=gspax.config.Lora lora.attention=false lora.mlp=false": "lora: wanted attention or mlp",
    "loss.clip_low=1": "loss.clip_low: wanted a number at least 0 and below 1",
    "loss=gspax.losses.grpo calibration=gspax.config.Calibration": "calibration: wanted a loss that clips the ratio",
    "reference=gspax.config.Reference reference.loss=gspax.losses.kl.token_kl reference.reward=gspax.losses.kl.k1": (
        "reference: wanted the KL in the loss or in the reward"
    ),
    "turns.credit=turn": 'turns.credit: wanted "conversation" without environment',
    "old_logp=sampler routing_replay=old": "routing_replay: wanted old_logp=learner, got sampler",
}
# Numbers that are wrong by themselves, one of each part. No combination above depends on them.
NUMBERS = (
    "sampling.temperature=0",
    "schedule.keep_checkpoints=0",
    "evaluation.problems=0",
    "warm_start.steps=0",
    "optimizer.learning_rate=0",
    "model.initializer_range=0",
    "guard.max_ratio=-1",
    "grading.timeout=0",
    "turns.limit=0",
    "regularizers.entropy=inf",
    "seed=-1",
)


@pytest.mark.parametrize("assignments", COMBINATIONS)
def test_wrong_numbers_hide_no_combination_that_does_not_need_them(assignments):
    found = validate(override(EXPERIMENT, [*assignments.split(" "), *NUMBERS]), 8)
    wanted = [COMBINATIONS[assignments], *(number.partition("=")[0] for number in NUMBERS)]
    assert [said for said in wanted if not any(sentence.startswith(said) for sentence in found)] == []


def test_a_combination_that_needs_a_wrong_number_is_left_out():
    found = validate(override(EXPERIMENT, ["sampling.prompts=0", "schedule.minibatches=7", "model.vocab_size=8"]), 8)
    assert [sentence.partition(":")[0] for sentence in found] == ["sampling.prompts", "model.vocab_size"]


def test_a_frozen_name_that_no_trained_parameter_has_is_one_sentence():
    wrong = override(EXPERIMENT, ["optimizer.frozen=router,routr"])
    (sentence,) = validate(wrong)
    assert sentence.startswith("optimizer.frozen: wanted names among 0, attention, attention_norm, down, ")
    assert sentence.endswith(", got 'routr'; did you mean 'router'?")
    adapters = ["lora=gspax.config.Lora", "lora.mlp=false"]
    assert validate(override(EXPERIMENT, [*adapters, "optimizer.frozen=query,attention,a"])) == []
    (sentence,) = validate(override(EXPERIMENT, [*adapters, "optimizer.frozen=router"]))  # it has no adapter
    assert sentence == (
        "optimizer.frozen: wanted names among 0, a, attention, b, key, out, query, runs, value, got 'router'"
    )


def test_prompts_are_not_shared_in_a_model_with_sliding_windows():
    packed = override(EXPERIMENT, ["loss=gspax.losses.gspo", "schedule.microbatch_tokens=64"])
    sharing = override(packed, ["schedule.share_prompts=true"])
    assert validate(sharing) == []
    sliding = replace(EXPERIMENT.model, sliding_window=4, sliding_layers=(0,))
    assert validate(replace(packed, model=sliding)) == []
    assert validate(replace(sharing, model=sliding)) == [
        "schedule.share_prompts: wanted False in a model with sliding windows, got True"
    ]


TOO_FEW = (
    "schedule.microbatch_tokens: wanted at least sampling.max_prompt_tokens + max_tokens (16 tokens) for each of the 8 "
    "devices that rows are sharded over, got 100"
)


@pytest.mark.parametrize(
    ("assignments", "devices", "message"),
    [
        ([], 8, []),
        (["mesh.data=-1"], None, ["mesh: wanted at most one axis of -1, got data=-1, fsdp=-1"]),
        (
            ["mesh.data=3"],
            8,
            [
                "mesh: wanted axes whose product is the 8 available devices (at most one may be -1), got "
                "data=3, fsdp=-1",
            ],
        ),
        (["sampling.prompts=3", "sampling.group=4", "mesh.data=2"], 8, ["sampling.prompts"]),
        (["sampling.prompts=12", "mesh.data=2"], 8, []),  # rows divide, groups are split
        (["mesh.data=4", "mesh.fsdp=2", "schedule.microbatch_rows=4"], None, ["schedule.microbatch_rows"]),
        (["warm_start.rows=12"], 8, ["warm_start.rows"]),
        (["loss=gspax.losses.gspo", "schedule.microbatch_tokens=100"], 8, [TOO_FEW]),
        (["schedule.share_prompts=true"], None, ["schedule.share_prompts: wanted schedule.microbatch_tokens"]),
        (["loss=gspax.losses.gspo", "schedule.microbatch_tokens=15"], None, [TOO_FEW.split(" for each")[0]]),
        (["model.hidden_size=36"], 8, ["model.hidden_size: wanted a multiple of mesh.fsdp (8), got 36"]),
    ],
)
def test_the_mesh(assignments, devices, message):
    found = validate(override(EXPERIMENT, assignments), devices)
    assert len(found) == len(message)
    assert all(one.startswith(start) for one, start in zip(found, message, strict=True))


def test_warnings():
    (filtered,) = warnings(override(EXPERIMENT, ["sampling.top_p=0.9", "sampling.min_p=0.1"]))
    assert filtered.startswith("sampling.top_p, sampling.min_p: ") and "sampling.mask_replay=64" in filtered
    (filtered,) = warnings(override(EXPERIMENT, ["sampling.top_k=20"]))
    assert "sampling.mask_replay=20" in filtered
    assert warnings(override(EXPERIMENT, ["sampling.top_k=20", "sampling.mask_replay=20"])) == []
    (inert,) = warnings(override(EXPERIMENT, ["loss=gspax.losses.gspo", "loss.clip_low=0.2"]))
    assert inert.startswith("loss.clip_low=0.2: GSPO's ratio")
    assert warnings(override(EXPERIMENT, ["loss=gspax.losses.grpo"])) == []  # its clip range is wide on purpose


def test_a_description_is_json_and_complete():
    description = describe(EXPERIMENT)
    assert json.loads(json.dumps(description)) == description
    assert description["reward"]["function"] == "experiment_file.reward"
    loss = {key: value for key, value in description["loss"].items() if key != SOURCE}
    assert loss == {"function": "experiment_file.gspo", "clip_low": 2e-4, "clip_high": 4e-4}
    assert description["data"]["type"] == "experiment_file.Problems"
    assert description["model"]["mlp_only_layers"] == []
    assert " at 0x" not in json.dumps(description)


def test_the_description_is_the_same_in_every_process():
    code = (
        "import json, sys; from gspax.experiment import describe, load; print(json.dumps(describe(load(sys.argv[1]))))"
    )
    other = subprocess.run([sys.executable, "-c", code, str(STUB)], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == json.dumps(describe(EXPERIMENT))


def test_a_partial_with_a_default_value_is_the_same_loss():
    assert describe(losses.gspo) == describe(partial(losses.gspo, clip_low=3e-4))
    assert describe(partial(partial(max, 3), key=len)) == {
        "function": "builtins.max",
        "arguments": [3],
        "key": "builtins.len",
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.zeros(3), np.ones(3)),
        (np.zeros(3), np.zeros(3, np.float32)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (jnp.zeros(3), jnp.ones(3)),
        (np.float32(1), np.float32(2)),
        (np.int64(1), np.int64(2)),
        (Path("a"), Path("b")),
        (b"a", b"b"),
        (Fraction(1, 2), Fraction(1, 3)),
    ],
)
def test_two_values_in_a_partial_have_two_descriptions(old, new):
    def describe_json(value):
        return json.loads(json.dumps(describe(partial(max, key=value))))

    assert difference(describe_json(old), describe_json(new))
    assert difference(describe_json(old), describe_json(copy.deepcopy(old))) == []


def test_differences_and_what_a_resume_may_change():
    old = describe(EXPERIMENT)
    assert difference(old, old) == []
    changes = ["optimizer.learning_rate=3e-4", "schedule.steps=20", "evaluation.problems=8", "schedule.eval_every=1"]
    new = describe(override(EXPERIMENT, changes))
    assert sorted(difference(old, new)) == [
        "evaluation.problems: 256 -> 8",
        "optimizer.learning_rate: 1e-6 -> 3e-4",
        "schedule.eval_every: 20 -> 1",
        "schedule.steps: 10 -> 20",
    ]
    assert difference(old, new, ignore=RESUMABLE) == ["optimizer.learning_rate: 1e-6 -> 3e-4"]
    assert difference(old, describe(override(EXPERIMENT, ["sampling.max_prompt_tokens=99"])), ignore=RESUMABLE) == []
    gone = difference(old, describe(override(EXPERIMENT, ["warm_start=null"])))
    assert "warm_start: gspax.config.WarmStart -> null" in gone
    assert "warm_start.steps: 60 -> (absent)" in gone


def test_flat_keys_are_the_keys_of_overrides():
    flat = flatten(describe(EXPERIMENT))
    assert flat["loss"] == "experiment_file.gspo"
    assert flat["loss.clip_low"] == 2e-4
    assert flat["model.head_dim"] == 16


def test_a_description_holds_public_names():
    described = describe(partial(losses.grpo, clip_low=0.1))
    assert described["function"] == "gspax.losses.grpo"
    assert described["aggregate"] == "gspax.losses.by_sequence"
    assert describe(optax.adafactor) == "optax.adafactor"


def test_a_setting_that_a_recorded_run_lacks_has_its_default():
    """A field that was added after the run began, in a part of it or in the experiment, does not forbid a resume."""
    old, new = describe(EXPERIMENT), describe(EXPERIMENT)
    del old["routing_replay"], old["guard"], old["model"]["attention_sinks"], old["sampling"]["stop"]
    assert difference(old, new) == []
    assert difference(old, describe(replace(EXPERIMENT, routing_replay="sampler"))) == [
        "routing_replay: off -> sampler"
    ]
    stopped = replace(EXPERIMENT, sampling=replace(EXPERIMENT.sampling, stop=("x",)))
    assert difference(old, describe(stopped)) == ['sampling.stop: [] -> ["x"]']
    assert parse(ModelConfig, old["model"]) == EXPERIMENT.model


def test_a_keyword_of_a_function_that_a_recorded_run_lacks_has_its_default():
    new = {"loss": describe(partial(losses.grpo, clip_low=0.1)), "advantage": describe(advantages.standardize)}
    old = copy.deepcopy(new)
    del old["loss"]["aggregate"], old["loss"]["clip_high"]
    old["advantage"] = "gspax.advantages.standardize"  # as it was recorded before it had keywords
    assert isinstance(new["advantage"], dict) and difference(old, new) == []
    old["loss"]["clip_low"] = 0.2
    assert difference(old, new) == ["loss.clip_low: 0.2 -> 0.1"]
    assert difference(old | {"advantage": "gspax.losses.grpo"}, new) != []


def test_a_key_without_a_default_that_one_description_lacks_differs():
    old, new = describe(EXPERIMENT), describe(EXPERIMENT)
    del old["model"]["head_dim"]
    old["removed"] = 1
    assert difference(old, new) == ["removed: 1 -> (absent)", "model.head_dim: (absent) -> 16"]
