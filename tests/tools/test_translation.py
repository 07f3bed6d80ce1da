"""`gspax explain --from`: settings of other libraries become overrides, and nothing is lost in silence.

The fixtures have the settings of published examples in words of our own: verl's run_qwen3_8b_fsdp.sh (08aef7ff) and
test_gspo_3b_math.sh (709c8dfb), TRL's examples/scripts/gspo.py (07e1b4fe), tunix's examples/rl/grpo/gsm8k/run_qwen3.sh
(0126de7c) and configs/gemma2_2b.yaml (256f3642).
"""

import pytest
from api import main as program

from gspax.errors import UserError
from gspax.experiment import load, override
from gspax.tools import explain
from gspax.tools.peer_files import Settings, parse_value, read_settings
from gspax.tools.peers import LIBRARIES, Given

VERL = r"""
#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-gpu}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-}
TOKENS=${TOKENS:-20480}
LOW=${LOW:-3e-4}
PROMPT=$((1024 * 2))
case "${DEVICE}" in
    gpu)
        batch=${TRAIN_BATCH_SIZE:-512}
        mini=128
        ;;
    npu)
        batch=256
        mini=64
        ;;
esac
DATA=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    data.train_files="['/data/gsm8k/train.parquet', '/data/math/train.parquet']"
    data.val_files="['/data/gsm8k/test.parquet']"
    data.train_batch_size=${batch}
    data.max_prompt_length=${PROMPT}
    data.max_response_length=$((PROMPT * 4))  # 8192
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=${LOW}
    actor_rollout_ref.actor.clip_ratio_high=4e-4
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${TOKENS}
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=16
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.save_freq=20
    trainer.test_freq=10
    trainer.total_epochs=10
)
if [ "${DEVICE}" = npu ]; then
    EXTRA+=(
        actor_rollout_ref.actor.strategy=fsdp2
    )
fi
python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    +algorithm.a_new_key=3 \
    "$@"
"""

VERL_SETTINGS = [
    *("sampling.prompts=512", "sampling.group=16", "sampling.max_prompt_tokens=2048", "sampling.max_tokens=8192"),
    *("schedule.minibatches=4", "schedule.microbatch_tokens=163840", "loss=gspax.losses.gspo"),
    *("loss.aggregate=gspax.losses.by_sequence", "loss.clip_low=0.0003", "loss.clip_high=0.0004"),
    *("advantage=gspax.advantages.standardize", "optimizer.learning_rate=1e-06", "optimizer.transform.b2=0.999"),
    *("optimizer.transform.weight_decay=0.01", "optimizer.offload=true", "model.remat=full"),
    *("schedule.checkpoint_every=20", "schedule.eval_every=10"),
]

TRL = '''"""
accelerate launch \\
    --config_file zero3.yaml \\
    scripts/gspo.py \\
    --model_name_or_path Qwen/Qwen3-0.6B \\
    --output_dir gspo \\
    --learning_rate 1e-5 \\
    --torch_dtype bfloat16 \\
    --max_prompt_length 2048 \\
    --max_completion_length 1024 \\
    --use_peft \\
    --lora_target_modules "q_proj", "v_proj" \\
    --log_completions \\
    --per_device_train_batch_size 8 \\
    --num_generations 8 \\
    --importance_sampling_level sequence \\
    --epsilon 3e-4 \\
    --epsilon_high 4e-4 \\
    --beta 0.0 \\
    --loss_type grpo \\
    --gradient_accumulation_steps 2 \\
    --steps_per_generation 8
"""

trainer = GRPOTrainer(model=model_args.model_name_or_path, args=training_args, reward_funcs=[think, accuracy])
'''

TRL_SETTINGS = [
    *("sampling.prompts=64", "sampling.group=8", "sampling.max_prompt_tokens=2048", "sampling.max_tokens=1024"),
    *("schedule.minibatches=4", "schedule.epochs=1", "schedule.microbatch_rows=64", "loss=gspax.losses.gspo"),
    *("loss.aggregate=gspax.losses.by_sequence", "loss.clip_low=0.0003", "loss.clip_high=0.0004"),
    *("advantage=gspax.advantages.standardize", "advantage.eps=1e-4", "optimizer.learning_rate=1e-05"),
    *("optimizer.transform.b2=0.999", "model.remat=full", "lora=gspax.config.Lora", "lora.rank=16", "lora.alpha=32"),
    *("lora.attention=query,value", "lora.mlp=false"),
]

TUNIX = """
reference_model_config:
  model_id: "google/gemma-2/flax/gemma2-2b-it"
  rng_seed: 42
dataset_name: "gsm8k"
batch_size: 1
num_batches: 3738
num_train_epochs: 1
rl_training_config:
  actor_optimizer_config:
    opt_type: "adamw"
    peak_value: 3e-6
    schedule_type: "warmup_cosine_decay_schedule"
    init_value: 0.0
    end_value: 0.0
    b1: 0.9
    b2: 0.99
    weight_decay: 0.1
    max_grad_norm: 0.1
    warmup_steps: 374
    decay_steps: 3738
  eval_every_n_steps: 10
  profiler_options: {}
  max_steps: 3738
rollout_config:
  total_generation_steps: 768
  max_prompt_length: 256
  temperature: 0.9
  top_p: 1.0
  top_k: 50
rollout_engine: "vanilla"
grpo_config:
  num_generations: 2
  num_iterations: 1
  beta: 0.08
  epsilon: 0.2
reward_functions:
  - "tunix/cli/reward_fn/gsm8k.py"
"""

TUNIX_SETTINGS = [
    *("sampling.prompts=1", "sampling.group=2", "sampling.max_prompt_tokens=256", "sampling.max_tokens=768"),
    *("sampling.temperature=0.9", "sampling.top_k=50", "schedule.minibatches=1", "loss=gspax.losses.grpo"),
    *("loss.aggregate=gspax.losses.by_sequence", "loss.clip_low=0.2", "loss.clip_high=0.2"),
    *("advantage=gspax.advantages.standardize", "advantage.eps=1e-4", "reference=gspax.config.Reference"),
    *("reference.loss=gspax.losses.kl.grpo_kl", "reference.coefficient=0.08", "schedule.steps=3738"),
    *("optimizer.learning_rate=3e-06", "optimizer.schedule=gspax.config.optimizers.cosine"),
    *("optimizer.schedule.updates=3738", "optimizer.warmup_updates=374"),
    *("optimizer.transform=gspax.config.optimizers.adamw", "optimizer.transform.b1=0.9", "optimizer.transform.b2=0.99"),
    *("optimizer.transform.weight_decay=0.1", "optimizer.max_grad_norm=0.1", "schedule.eval_every=10"),
]

CASES = {
    "verl": ("run.sh", VERL, None, VERL_SETTINGS),
    "trl": ("gspo.py", TRL, 8, TRL_SETTINGS),
    "tunix": ("gemma.yaml", TUNIX, None, TUNIX_SETTINGS),
}
LOST = {
    "verl": {"algorithm.a_new_key", "actor_rollout_ref.actor.strategy", "trainer.total_epochs", "data.truncation"},
    "trl": {"output_dir", "log_completions", "config_file", "reward_funcs"},
    "tunix": {"num_train_epochs", "reward_functions", "rollout_engine", "reference_model_config.rng_seed"},
}


def translated(library, tmp_path):
    name, text, devices, _ = CASES[library]
    (tmp_path / name).write_text(text)
    given = Given(read_settings(tmp_path / name), LIBRARIES[library].why)
    lines = list(LIBRARIES[library].lines(given, devices))
    return lines, LIBRARIES[library].parts(given), dict(given.left())


@pytest.mark.parametrize("library", CASES)
def test_the_settings_of_a_published_example_are_translated(library, tmp_path):
    lines, parts, left = translated(library, tmp_path)
    assert [line.override for line in lines] == CASES[library][3]
    assert left.keys() >= LOST[library] and all(left.values())
    assert parts.model.split("/")[0] in ("Qwen", "google")


@pytest.mark.parametrize("library", CASES)
def test_each_key_is_carried_over_or_listed(library, tmp_path):
    lines, _, left = translated(library, tmp_path)
    given = read_settings(tmp_path / CASES[library][0])
    used = Given(given, {})
    list(LIBRARIES[library].lines(used, CASES[library][2])), LIBRARIES[library].parts(used)
    assert {*given.values} - used.taken == left.keys() - {*given.conditional}
    assert lines


@pytest.mark.parametrize("library", CASES)
def test_the_command_explains_writes_and_does_not_overwrite(library, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, text, devices, settings = CASES[library]
    (tmp_path / name).write_text(text)
    command = ["explain", "--from", library, name, *(["--devices", str(devices)] if devices else [])]
    assert program.main(command) == 0
    shown = capsys.readouterr().out
    assert "loss      = -mean(objective)" in shown and "Not carried over" in shown
    assert all(f"  {key}: " in shown for key in LOST[library])
    written = (tmp_path / f"from_{library}.py").read_text()
    assert all(f'"{setting}",  # ' in written for setting in settings)
    assert program.main(command) == 2
    assert f"from_{library}.py: wanted a new file, this one exists" in capsys.readouterr().err
    assert (tmp_path / f"from_{library}.py").read_text() == written


@pytest.mark.parametrize("library", CASES)
def test_the_written_file_is_an_experiment_with_these_settings(library, tmp_path, monkeypatch):
    lines, parts, left = translated(library, tmp_path)
    text = explain.write_file(library, "x", lines, parts, list(left.items()))
    stand_in = explain._stand_in()
    monkeypatch.setattr("gspax.hf.hf", lambda *_, **__: stand_in.model)
    monkeypatch.setattr("gspax.data.hf_chat", lambda *_: stand_in.tokenizer)
    for source in ("huggingface", "parquet"):
        monkeypatch.setattr(f"gspax.data.{source}", lambda *_, **__: stand_in.data)
    (tmp_path / "written.py").write_text(text)
    found = load(tmp_path / "written.py")
    expected = override(stand_in, CASES[library][3])
    assert (found.sampling, found.schedule, found.optimizer.learning_rate) == (
        expected.sampling,
        expected.schedule,
        expected.optimizer.learning_rate,
    )
    assert found.loss.keywords == expected.loss.keywords


def test_scripts_are_read_without_being_run(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(
        "name='a b'\nA=3\nexport B=$((A * 2 + 1))\nC=$(touch ran)\n"
        'python -m x a.b="$name" \\\n  c.d=${B} --flag --key=4 --long-name 5 e.f=${UNKNOWN} g.h=$C # note\n'
        "if true; then\n  python -m x c.d=9 i.j=1\nfi\n"
    )
    found = read_settings(file)
    assert found.values == {
        **{"a.b": "a b", "c.d": 7, "flag": True, "key": 4, "long_name": 5, "e.f": "${UNKNOWN}"},
        "g.h": found.values["g.h"],
    }
    assert found.conditional == ["i.j"] and not (tmp_path / "ran").exists()


def test_values_are_numbers_truth_values_lists_or_texts():
    texts = ("1e-6", "True", "false", "null", "['a', 'b']", "seq-mean-token-mean", "-1")
    assert [*map(parse_value, texts)] == [1e-6, True, False, None, ["a", "b"], "seq-mean-token-mean", -1]


@pytest.mark.parametrize(
    ("library", "values", "sentence"),
    [
        ("verl", {"data.train_batch_size": "${batch}"}, "data.train_batch_size: wanted a number, got '${batch}'"),
        ("verl", {"algorithm.adv_estimator": "gae"}, "algorithm.adv_estimator: wanted grpo, .*, got 'gae'"),
        ("verl", {"data.train_batch_size": 10, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}, "got 10 and 4"),
        ("trl", {"loss_type": "new"}, "loss_type: wanted grpo, .*, got 'new'"),
        ("trl", {"use_peft": True, "lora_target_modules": "x_proj"}, "lora_target_modules: wanted .*, got 'x_proj'"),
        ("tunix", {"grpo_config.loss_algo": "new"}, "loss_algo: wanted grpo, gspo-token, got 'new'"),
    ],
)
def test_what_cannot_be_translated_is_one_sentence(library, values, sentence):
    given = Given(Settings(dict(values), []), {})
    with pytest.raises(UserError, match=sentence.replace("${", r"\$\{").replace("}'", r"\}'")):
        list(LIBRARIES[library].lines(given, 1))


def test_defaults_that_change_the_objective_are_those_of_the_library():
    def of(library, values):
        return [line.override for line in LIBRARIES[library].lines(Given(Settings(values, []), {}), 8)]

    assert {"loss=gspax.losses.grpo", "loss.aggregate=gspax.losses.by_token", "loss.clip_high=0.2"} <= {*of("trl", {})}
    plain = of("verl", {"algorithm.adv_estimator": "grpo"})
    assert {"loss.aggregate=gspax.losses.by_token", "loss.dual_clip=3.0", "loss.clip_low=0.2"} <= {*plain}


def test_a_file_that_says_nothing_or_is_missing_is_one_sentence(tmp_path):
    (tmp_path / "empty.sh").write_text("echo hello\n")
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    for name, sentence in (("empty.sh", "found none"), ("bad.yaml", "wanted YAML"), ("none.sh", "to read")):
        with pytest.raises(UserError, match=sentence):
            read_settings(tmp_path / name)
