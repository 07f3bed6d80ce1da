"""`gspax convert` and `gspax export` preserve every byte, and write a complete folder or none."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
import small_experiment
import tiny
from api import (
    MANIFEST,
    Checkpoints,
    RunDir,
    Skipped,
    StoredArray,
    abstract_params,
    adapters,
    convert,
    drop_frozen,
    enter_run,
    export,
    folders,
    init_state,
    low_rank,
    main,
    make_mesh,
    make_optimizer,
    make_runtime,
    new_state,
    open_array,
    open_run,
    parameters,
    peft,
    read_adapters,
    read_config,
    restore_or_start,
    save_start,
    warm_start,
)
from published import load, published, random_params, same_bytes, save

from gspax import config as experiment_config
from gspax.commands import arguments, check
from gspax.config import Llama3Rope, Lora, Optimizer
from gspax.config.functions import parse
from gspax.data import HFTokenizer
from gspax.errors import FailureError, UserError
from gspax.experiment import describe
from gspax.hf import hf
from gspax.hf.source import copy_companions

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "golden_qwen3_tiny"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
MESH = make_mesh(experiment_config.Mesh())
COMPANIONS = {"tokenizer.json": "{}", "generation_config.json": '{"eos_token_id": [7, 8]}', "merges.txt": "#"}


def checkpoint(folder, config, dtype="float32", **options):
    tensors = published(config, random_params(config), DTYPES[dtype])
    for name, text in COMPANIONS.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return save(folder, config, tensors, **options), tensors


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "between"),
    [("moe", "bfloat16"), ("tied", "float32"), ("every second layer sparse", "bfloat16")],
)
def test_import_and_export_preserve_every_byte(name, between, tmp_path):
    config = tiny.CONFIGS[name]
    source, tensors = checkpoint(tmp_path / "hf", config, between, files=2)
    convert.run(str(source), tmp_path / "orbax", between)
    export.run(tmp_path / "orbax", tmp_path / "out", dtype=between, shard_size=4000)
    assert same_bytes(load(tmp_path / "out"), tensors)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert read_config(tmp_path / "out") == read_config(source)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == between


def test_bfloat16_through_float32_preserves_every_byte(tmp_path):
    source, tensors = checkpoint(tmp_path / "hf", tiny.MOE, "bfloat16")
    convert.run(str(source), tmp_path / "orbax")
    export.run(tmp_path / "orbax", tmp_path / "out")
    assert same_bytes(load(tmp_path / "out"), tensors)


def test_float32_is_rounded_to_the_nearest_bfloat16(tmp_path):
    source, tensors = checkpoint(tmp_path / "hf", tiny.MOE)
    convert.run(str(source), tmp_path / "orbax")
    export.run(tmp_path / "orbax", tmp_path / "out")
    assert same_bytes(load(tmp_path / "out"), {name: each.astype(DTYPES["bfloat16"]) for name, each in tensors.items()})


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_dense"])
def test_a_checkpoint_of_transformers_round_trips(name, tmp_path):
    if not GOLDEN.is_dir():
        pytest.skip("../shared/data/golden_qwen3_tiny is not here")
    convert.run(str(GOLDEN / name), tmp_path / "orbax")
    export.run(tmp_path / "orbax", tmp_path / "out", dtype="float32")
    assert same_bytes(load(tmp_path / "out"), load(GOLDEN / name))
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", GOLDEN / name))
    assert [ours[key] for key in export.SPECIAL_TOKENS] == [theirs[key] for key in export.SPECIAL_TOKENS]


def test_the_tokenizers_files_are_copied(tmp_path):
    source, _ = checkpoint(tmp_path / "hf", tiny.MOE)
    (source / "pytorch_model.bin").write_text("not this one")
    convert.run(str(source), tmp_path / "orbax")
    assert names_in(tmp_path / "orbax") == sorted(["checkpoints", "config.json", "manifest.json", *COMPANIONS])
    export.run(tmp_path / "orbax", tmp_path / "out")
    assert names_in(tmp_path / "out") == sorted(["config.json", "model.safetensors", *COMPANIONS])
    for name, text in COMPANIONS.items():
        assert (tmp_path / "out" / name).read_text() == text


# Runs that start from a checkpoint


def start(model):
    return init_state(model, make_optimizer(Optimizer()), jax.random.key(3), MESH)


@pytest.mark.parametrize("between", [None, "bfloat16"])  # the tests above convert to float32 too
def test_a_run_starts_from_a_published_or_a_converted_checkpoint(between, tmp_path):
    """In float32 and sharded, as random parameters would be; the rest of the state is newly initialized."""
    source, _ = checkpoint(tmp_path / "hf", tiny.MOE, "bfloat16")
    if between:
        convert.run(str(source), source := tmp_path / "orbax", between)
    found, random = start(hf(source)), start(tiny.MOE)
    expected = jax.tree.map(lambda leaf: leaf.astype(DTYPES["bfloat16"]).astype("float32"), random_params(tiny.MOE))
    jax.tree.map(np.testing.assert_array_equal, found.params, expected)
    for name in ("step", "position", "key", "opt_state", "adapted"):
        same = jax.tree.map(lambda a, b: bool((a == b).all()), getattr(found, name), getattr(random, name))
        assert all(jax.tree.leaves(same)), name
    jax.tree.map(lambda a, b: [] if (a.sharding, a.dtype) == (b.sharding, b.dtype) else 1 / 0, found, random)


def test_hf_records_the_checkpoint_and_accepts_changes(tmp_path):
    source, _ = checkpoint(tmp_path / "hf", tiny.MOE, "bfloat16")
    assert hf(str(source), remat="full") == replace(tiny.MOE, remat="full", checkpoint=str(source))
    assert hf(str(source), dtype="bfloat16").dtype == "bfloat16", "the dtype of the file is not that of the computation"


def test_a_checkpoint_on_the_hub_is_downloaded_when_needed(tmp_path, monkeypatch):
    import huggingface_hub

    source, _ = checkpoint(tmp_path / "hf", tiny.MOE)
    calls = []

    def snapshot_download(name, *, revision, allow_patterns, local_files_only):
        calls.append((name, revision, tuple(allow_patterns), local_files_only))
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    model = hf("Qwen/Qwen3-30B-A3B@main")
    assert model == replace(tiny.MOE, checkpoint="Qwen/Qwen3-30B-A3B@main")
    assert calls == [("Qwen/Qwen3-30B-A3B", "main", ("config.json",), False)]
    jax.tree.map(np.testing.assert_array_equal, start(model).params, random_params(tiny.MOE))
    assert "*.safetensors" in calls[1][2] and not any("bin" in pattern for pattern in calls[1][2])


def test_an_unknown_name_is_rejected(tmp_path, monkeypatch):
    import huggingface_hub

    def snapshot_download(*_, **__):
        raise OSError("no\nsuch thing")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError,
        match=rf"^a/b: there is no such folder in the working directory {tmp_path}, .* the Hub failed: OSError: no s",
    ):
        hf("a/b")
    (tmp_path / "file").touch()
    for name in ("no such", "/a/b", "../a", "a/b/c", "a", ""):
        with pytest.raises(UserError, match=r"wanted the folder of a checkpoint|there is none"):
            hf(name)
    with pytest.raises(UserError, match=r"^file: wanted the folder of a checkpoint, this is a file"):
        hf("file")


def test_a_mistyped_folder_is_not_asked_from_the_hub(tmp_path, monkeypatch):
    """A name whose owner is a folder here is a path; with a revision it can only be a name on the Hub."""
    import huggingface_hub

    source, _ = checkpoint(tmp_path / "checkpoints" / "qwen3", tiny.MOE)
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path / source)
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        hf("checkpoints/qwen33")
    assert str(caught.value) == (
        "checkpoints/qwen33: wanted the folder of a checkpoint or a name on the Hub such as Qwen/Qwen3-30B-A3B; "
        "there is a folder checkpoints here without a qwen33"
    )
    assert not asked and hf("checkpoints/qwen33@main").num_experts and asked == ["checkpoints/qwen33"]


def test_a_converted_checkpoint_of_another_model_is_rejected(tmp_path):
    source, _ = checkpoint(tmp_path / "hf", tiny.MOE)
    convert.run(str(source), tmp_path / "orbax")
    wider = replace(hf(tmp_path / "orbax"), vocab_size=24)
    with pytest.raises(UserError, match=re.escape("params/embedding is float32[23, 16], wanted float32[24, 16]")):
        start(wider)
    with pytest.raises(UserError, match="it has no params/runs/0/attention/key_bias"):
        start(replace(hf(tmp_path / "orbax"), attention_bias=True))


def test_a_checkpoint_in_a_bucket_is_read_converted_and_exported(bucket, tmp_path, capsys):
    path, server = bucket
    source, tensors = checkpoint(tmp_path / "hf", tiny.MOE, files=2)
    name = str(path).split("/")[2]
    server.copy_from(source, name, "hf")
    published_url, url = f"gs://{name}/hf", f"gs://{name}/orbax"
    assert main.main(["convert", "--from", published_url, "--to", url]) == 0 and main.main(["check", url]) == 0
    assert f"{url}: " in capsys.readouterr().out
    for model in (hf(published_url), hf(url)):
        found, expected = start(model), start(hf(source))
        jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    for target in (f"gs://{name}/out", str(tmp_path / "out")):
        assert main.main(["export", "--from", url, "--to", target, "--dtype", "float32"]) == 0
    server.copy_to(name, "out", tmp_path / "copy")
    assert same_bytes(load(tmp_path / "out"), tensors) and same_bytes(load(tmp_path / "copy"), tensors)
    assert names_in(tmp_path / "copy") == names_in(tmp_path / "out")


def test_a_truncated_tensor_file_in_a_bucket_is_rejected(bucket, tmp_path):
    path, server = bucket
    source, _ = checkpoint(tmp_path / "hf", tiny.MOE)
    content = (source / "model.safetensors").read_bytes()
    server.copy_from(source, str(path).split("/")[2], "runs/a")
    for damaged in (b"", content[:5], content[:100], content[:-1], content + b"0"):
        (path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match=r"model.safetensors: (no safetensors file|truncated or corrupt)"):
            start(hf(str(path)))


# Export of a run


def a_run(workdir, experiment, *, warm_start=False, steps=(2, 4)):
    """A run directory with a checkpoint at each step, whose parameters depend on the step."""
    run = open_run(workdir, describe(experiment))
    directory = run.warm_start.checkpoints if warm_start else run.checkpoints
    optimizer = make_optimizer(experiment.optimizer)
    with Checkpoints(directory, keep=2) as checkpoints:
        for step in steps:
            params = jax.tree.map(
                lambda leaf, step=step: jax.numpy.asarray(leaf + step), random_params(experiment.model)
            )
            checkpoints.save(step, new_state(params, optimizer, jax.random.key(0)), {})
    return workdir


def tensors_of_step(config, step):
    return published(config, jax.tree.map(lambda leaf: leaf + step, random_params(config)))


def experiment_with(tmp_path):
    """A run whose tokenizer and starting checkpoint have companion files."""
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("of the tokenizer")
    source, _ = checkpoint(tmp_path / "hf", small_experiment.experiment.model)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"eos_token_id": 9}))
    return replace(small_experiment.experiment, model=hf(source), tokenizer=HFTokenizer(str(tmp_path / "tok")))


@pytest.mark.parametrize("is_local", [True, False])
def test_a_run_is_exported_with_the_newest_parameters_or_those_of_a_step(is_local, bucket, tmp_path):
    experiment = small_experiment.experiment
    run = a_run(tmp_path / "run" if is_local else bucket[0], experiment)
    export.run(run, tmp_path / "newest", dtype="float32")
    export.run(run, tmp_path / "older", dtype="float32", step=2)
    assert same_bytes(load(tmp_path / "newest"), tensors_of_step(experiment.model, 4))
    assert same_bytes(load(tmp_path / "older"), tensors_of_step(experiment.model, 2))
    assert "lm_head.weight" not in load(tmp_path / "newest")
    assert read_config(tmp_path / "newest") == experiment.model
    with pytest.raises(UserError, match=r"there is no checkpoint 3 with a manifest.json in .*checkpoints"):
        export.run(run, tmp_path / "none", step=3)
    assert not (tmp_path / "none").exists()


@dataclass(frozen=True)
class LocatedLater:
    """A tokenizer that names a checkpoint, as `Qwen3Chat` of the experiments for pods."""

    checkpoint: str


@pytest.mark.parametrize("tokenizer", [HFTokenizer, LocatedLater])
def test_the_files_of_a_runs_tokenizer_and_starting_checkpoint_are_exported(tokenizer, tmp_path):
    experiment = replace(experiment_with(tmp_path), tokenizer=tokenizer(str(tmp_path / "tok")))
    run = a_run(tmp_path / "run", experiment, steps=(1,))
    export.run(run, tmp_path / "out")
    assert names_in(tmp_path / "out") == sorted(["README.md", "config.json", "model.safetensors", *COMPANIONS])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "of the tokenizer"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 9
    assert (tmp_path / "out" / "generation_config.json").read_text() == COMPANIONS["generation_config.json"]


def test_stop_ids_of_a_run_are_added_to_a_generation_config_that_is_copied(tmp_path):
    """That of a base model does not know the token with which a chat template ends turns."""
    sampling = replace(small_experiment.experiment.sampling, stop_token_ids=(8, 9))
    run = a_run(tmp_path / "run", replace(experiment_with(tmp_path), sampling=sampling), steps=(1,))
    (tmp_path / "hf" / "generation_config.json").write_text('{"top_k": 20, "eos_token_id": 8}')
    export.run(run, tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"top_k": 20, "eos_token_id": [8, 9]}


def test_exporting_adapters_of_a_run_without_any_is_rejected(tmp_path):
    run = a_run(tmp_path / "run", small_experiment.experiment, steps=(3,))
    with pytest.raises(UserError, match=r"wanted a run with adapters \(lora\) for --adapter, got one without"):
        export.run(run, tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


def test_the_warm_start_is_exported_before_the_first_checkpoint_of_the_run(tmp_path):
    experiment = small_experiment.experiment
    run = a_run(tmp_path / "run", experiment, warm_start=True, steps=(3,))
    export.run(run, tmp_path / "out", dtype="float32")
    assert same_bytes(load(tmp_path / "out"), tensors_of_step(experiment.model, 3))


def test_export_refuses_the_warm_start_of_a_run_whose_checkpoints_are_lost(tmp_path):
    """A run had saved a checkpoint: the warm start is not its newest one."""
    experiment = small_experiment.experiment
    run = RunDir(a_run(tmp_path / "run", experiment, warm_start=True, steps=(3,)))
    a_run(run.path, experiment, steps=(2,))
    run.newest.write_text('{"newest": 2}')
    (run.checkpoints / "2" / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"newest_checkpoint\.json records that one was saved"):
        export.run(run.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lora", [Lora(rank=2, alpha=3.0), Lora(rank=3, alpha=1.0, mlp=False)])
def test_adapters_are_merged_on_export(lora, tmp_path):
    """The frozen parameters are in `start/`, the checkpoint has only the factors; both as the trainer writes them."""
    experiment = replace(small_experiment.experiment, lora=lora)
    run = open_run(tmp_path / "run", describe(experiment))
    base = random_params(experiment.model)
    rng = np.random.default_rng(1)
    factors = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape, np.float32), adapters.abstract(experiment.model, lora)
    )
    policy = adapters.attach_adapters(base, factors, lora)
    save_start(run, base, MESH)
    state = new_state(policy, make_optimizer(experiment.optimizer), jax.random.key(0))
    with Checkpoints(run.checkpoints, keep=1) as checkpoints:
        checkpoints.save(5, drop_frozen(state), {})
    export.run(run.path, tmp_path / "out", dtype="float32")
    found, expected = load(tmp_path / "out"), published(experiment.model, jax.device_get(low_rank.dense(policy)))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-5, atol=1e-5)
    plain = published(experiment.model, base)
    changed = {name.split(".")[-2] for name, tensor in found.items() if not np.array_equal(tensor, plain[name])}
    assert changed == {f"{each}_proj" for each in ("q", "k", "v", "o", *(("gate", "up", "down") if lora.mlp else ()))}
    export.run(run.path, tmp_path / "adapter", dtype="float32", adapter=True)
    alone = peft(tmp_path / "adapter")
    assert replace(alone, checkpoint="") == lora
    again = read_adapters(tmp_path / "adapter", experiment.model, lora, parameters.named_shapes(factors))
    for name, leaf in parameters.named_leaves(factors).items():
        np.testing.assert_array_equal(again[name], leaf)
    export.run(run.path, tmp_path / "half")
    assert {tensor.dtype for tensor in load(tmp_path / "half").values()} == {np.dtype(ml_dtypes.bfloat16)}
    shutil.rmtree(run.start)
    with pytest.raises(UserError, match="start: wanted the frozen parameters of the adapters, there are none"):
        export.run(run.path, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_base_plus_exported_adapter_is_the_merged_export_after_a_warm_start(tmp_path, monkeypatch):
    """By PEFT's formula in numpy: weight + alpha / rank * B A for each module, every other tensor the base's."""
    base = checkpoint(tmp_path / "base", small_experiment.experiment.model)[1]
    monkeypatch.chdir(tmp_path)
    experiment = replace(small_experiment.experiment, model=hf("base"), lora=Lora(rank=2, alpha=3.0))
    run = RunDir(tmp_path / "run")
    warm_start.run(experiment, run.path)

    def check():
        export.run(run.path, tmp_path / "merged", dtype="float32")
        export.run(run.path, tmp_path / "adapter", dtype="float32", adapter=True)
        merged, factors = load(tmp_path / "merged"), load(tmp_path / "adapter")
        described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert described["base_model_name_or_path"] == str(tmp_path / "base")
        changed = 0
        for name, weight in base.items():
            module = "base_model.model." + name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in factors:
                weight = weight + 3.0 / 2 * factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
                changed += not np.array_equal(weight, base[name])
            np.testing.assert_allclose(merged[name], weight, rtol=1e-5, atol=1e-6)
        assert changed == len(factors) / 2 > 0 and merged.keys() == base.keys()
        shutil.rmtree(tmp_path / "merged")
        shutil.rmtree(tmp_path / "adapter")

    check()  # of the warm start
    with enter_run(run.path, describe(experiment)):
        runtime = make_runtime(experiment)
        with Checkpoints(run.checkpoints, keep=1) as checkpoints:
            state = restore_or_start(runtime, run, checkpoints, Skipped())
            checkpoints.save(1, drop_frozen(state), {})
    check()  # of the run


def test_the_base_of_an_adapter_is_found_from_any_working_directory(tmp_path, monkeypatch, capsys):
    checkpoint(tmp_path / "hf", tiny.MOE)
    monkeypatch.chdir(tmp_path)
    convert.run("hf", Path("orbax"))
    for name in ("hf", "orbax", str(tmp_path / "orbax")):
        assert export._find_base(name) == (str(tmp_path / "hf"), None)
    assert export._find_base("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", None)
    assert export._find_base("Qwen/Qwen3-0.6B@abc") == ("Qwen/Qwen3-0.6B", "abc")
    assert "warning" not in capsys.readouterr().err
    assert export._find_base("../gone") == ("../gone", None)
    assert "base_model_name_or_path names no model that PEFT could load: ../gone" in capsys.readouterr().err
    assert export._find_base("") == (None, None)
    assert "the adapters have no published base (random start)" in capsys.readouterr().err


def started_from(folder, model):
    """The directory of a run whose model was that of a checkpoint, with a checkpoint of the same parameters."""
    run = open_run(folder, describe(replace(small_experiment.experiment, model=model)))
    state = new_state(random_params(model), optax.sgd(0.1), jax.random.key(0))
    with Checkpoints(run.checkpoints, keep=1) as checkpoints:
        checkpoints.save(3, state, {})
    return run.path


def test_a_run_descends_from_what_the_run_before_it_started_from(tmp_path, monkeypatch, capsys):
    """Its export has the tokenizer and the layers that predict ahead of that; PEFT can load neither run."""
    config = tiny.CONFIGS["a router of sigmoids"]
    ahead = {f"model.layers.3.{name}.weight": np.arange(4, dtype=np.float32) for name in ("enorm", "eh_proj")}
    tensors = published(config, random_params(config), DTYPES["bfloat16"]) | ahead
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    save(tmp_path / "hf", config, tensors)
    raw = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw))
    monkeypatch.chdir(tmp_path)
    convert.run("hf", Path("orbax"))
    started_from(tmp_path / "first", hf("orbax"))
    second = started_from(tmp_path / "second", hf("first"))
    export.run(second, tmp_path / "out")
    assert "2 tensors of a vision tower or of layers that predict several tokens ahead" in capsys.readouterr().err
    assert same_bytes(load(tmp_path / "out"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert export._find_base("first") == ("first", None)
    assert "first is a run, whose `gspax export` it can load" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "hf")
    export.run(second, tmp_path / "without")
    assert "are not copied: " in capsys.readouterr().err
    assert json.loads((tmp_path / "without" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert load(tmp_path / "without").keys() == tensors.keys() - ahead.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_has_the_layout_of_experts_of_the_checkpoint_it_descends_from(dtype, tmp_path):
    """And its dtypes: Qwen3.5's decay rates are float32 beside bfloat16."""
    tensors = published(tiny.MOE, random_params(tiny.MOE), DTYPES[dtype], fused=True)
    wide = "model.layers.1.self_attn.q_norm.weight"
    tensors[wide] = np.float32(1.1) * tensors[wide].astype(np.float32)
    convert.run(str(save(tmp_path / "hf", tiny.MOE, tensors)), tmp_path / "orbax")
    export.run(tmp_path / "orbax", tmp_path / "out", dtype=dtype, shard_size=8000)
    assert same_bytes(load(tmp_path / "out"), tensors)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_the_model_of_a_run_is_read_from_its_description(name):
    llama = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    for changes in ({"checkpoint": "a/b"}, {"rope_scaling": llama, "model_type": "llama"}):
        config = replace(tiny.CONFIGS[name], **changes)
        assert parse(type(config), json.loads(json.dumps(describe(config)))) == config


def test_write_checkpoint_accepts_parameters_in_memory(tmp_path):
    """Their arrays may have any sharding."""
    params = random_params(tiny.MOE)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(tiny.MOE, MESH))
    flat = parameters.named_leaves(jax.device_put(params, shardings))
    parameters.write_checkpoint(tmp_path, tiny.MOE, flat.__getitem__, dtype="float32")
    assert same_bytes(load(tmp_path), published(tiny.MOE, params))


# Rejected input; nothing incomplete is left


def test_a_target_that_is_not_empty_is_unchanged(tmp_path):
    source, _ = checkpoint(tmp_path / "hf", tiny.MOE)
    target = tmp_path / "target"
    target.mkdir()
    convert.run(str(source), target)  # an empty one is accepted
    before = names_in(target)
    for command in (convert.run, export.run):
        with pytest.raises(UserError, match="target: wanted a new or an empty folder, it exists and is not empty"):
            command(str(source) if command is convert.run else target, target)
    assert names_in(target) == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: wanted a new or an empty folder"):
        convert.run(str(source), tmp_path / "file")
    assert names_in(tmp_path) == ["file", "hf", "target"]


def test_a_failed_conversion_or_export_leaves_nothing(tmp_path, monkeypatch):
    source, _ = checkpoint(tmp_path / "hf", tiny.MOE)
    convert.run(str(source), tmp_path / "orbax")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model.safetensors: truncated or corrupt"):
        convert.run(str(source), tmp_path / "new")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parameters.tensors, "write", full)
    with pytest.raises(FailureError, match="new: cannot be written: No space left on device"):
        export.run(tmp_path / "orbax", tmp_path / "new")
    monkeypatch.setattr(parameters.tensors, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export.run(tmp_path / "orbax", tmp_path / "new")
    assert names_in(tmp_path) == ["hf", "orbax"]


def test_a_process_killed_while_writing_leaves_no_target(tmp_path):
    code = "import os, sys; from pathlib import Path; from gspax.run import folders\n"
    code += "with folders.atomic_folder(Path(sys.argv[1])) as temporary: (temporary / 'half').touch(); os._exit(9)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "new")], timeout=60, check=False)
    assert done.returncode == 9
    assert not (tmp_path / "new").exists()
    with folders.atomic_folder(tmp_path / "new") as temporary:
        (temporary / "whole").touch()
    assert names_in(tmp_path / "new") == ["whole"]
    (tmp_path / "other").mkdir()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode, "readable as any new folder"


def test_the_working_directory_and_the_target_of_a_link_are_written(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    monkeypatch.chdir(tmp_path / "here")
    for place in (".", "../link"):
        with folders.atomic_folder(Path(place)) as temporary:
            (temporary / "whole").touch()
    assert names_in(tmp_path / "here") == names_in(tmp_path / "target") == ["whole"]
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    with pytest.raises(UserError, match="it is a mount point"), folders.atomic_folder(tmp_path / "disk"):
        pass


def test_a_tokenizer_is_copied_from_a_bucket_and_named_if_it_is_gone(bucket, tmp_path, capsys):
    folder, _ = bucket
    (folder / "tokenizer.json").write_text("{}")
    companions = export._find_companions({"path": str(folder)}, "")
    assert copy_companions(companions, tmp_path) == ["tokenizer.json"] and names_in(tmp_path) == ["tokenizer.json"]
    assert capsys.readouterr().err == ""
    assert copy_companions(export._find_companions({"path": "gone"}, ""), tmp_path) == []
    assert "the tokenizer is not exported: there is no folder gone" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_damage_beside_the_parameters_of_a_converted_checkpoint_is_found(name, tmp_path, capsys):
    source, _ = checkpoint(tmp_path / "hf", tiny.MOE)
    convert.run(str(source), target := tmp_path / "orbax")
    model = hf(target)
    assert check.run(target) == 0
    assert "config.json and tokenizer: intact\ncheckpoints/0: intact\n" in capsys.readouterr().out
    (target / name).write_text((target / name).read_text() + " ")
    assert check.run(target) == 1
    assert re.search(
        rf"^config.json and tokenizer: {name} has \d+ bytes instead of \d+$", capsys.readouterr().out, re.M
    )
    for use in (lambda: start(model), lambda: export.run(target, tmp_path / "new")):
        with pytest.raises(UserError, match=rf"orbax: damaged: {name} has .*; convert the checkpoint again, or delete"):
            use()
    (target / "manifest.json").unlink()
    assert check.run(target) == 1
    assert "config.json and tokenizer: no manifest.json, not verified" in capsys.readouterr().out
    for use in (lambda: start(model), lambda: export.run(target, tmp_path / "new")):
        use()
        said = f"gspax: warning: {target}: config.json and the tokenizer are not verified: there is no manifest.json\n"
        assert capsys.readouterr().err == said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from threads that Orbax leaves behind
@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_corrupt_orbax_checkpoint_is_rejected(content, tmp_path):
    source, _ = checkpoint(tmp_path / "hf", tiny.MOE)
    convert.run(str(source), tmp_path / "orbax")
    for file in (tmp_path / "orbax" / "checkpoints" / "0").rglob("d/*"):
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"checkpoint 0 .*(is damaged|cannot be read)"):
        export.run(tmp_path / "orbax", tmp_path / "new")
    with pytest.raises(UserError, match=r"checkpoint 0 .*(is damaged|cannot be read)"):
        start(hf(tmp_path / "orbax"))
    assert not (tmp_path / "new").exists()
    gc.collect()  # its warnings appear here, not in another test


def test_a_missing_checkpoint_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"wanted a run directory \(experiment.json\) or a converted checkpoint"):
        export.run(tmp_path, tmp_path / "new")
    open_run(tmp_path / "run", describe(small_experiment.experiment))
    with pytest.raises(UserError, match="run: wanted a checkpoint of the run or of its warm start, there is none"):
        export.run(tmp_path / "run", tmp_path / "new")
    (tmp_path / "run" / "experiment.json").write_text('{"model": {"vocab_size": 3}}')
    with pytest.raises(UserError, match=r"experiment\.json: model: wanted what this version of gspax records, got"):
        export.run(tmp_path / "run", tmp_path / "new")


# Damage


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "noise": lambda path: path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size)),
    "number": lambda path: path.write_bytes(b"5"),
    "folder": replace_by_folder,
    "pipe": replace_by_pipe,
}


def test_a_damaged_run_is_exported_rightly_or_refused_in_a_sentence(tmp_path, capsys):
    """Every damage of every file: what is exported equals the whole run's, and what is refused leaves no folder."""
    whole = a_run(tmp_path / "whole", small_experiment.experiment, steps=(1,))
    target, failures, refused = tmp_path / "out", [], 0
    assert main.main(["export", "--from", str(whole), "--to", str(target)]) == 0
    wanted = load(target)
    capsys.readouterr()
    for file in [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]:
        for name, damage in DAMAGES.items():
            shutil.rmtree(target, ignore_errors=True)
            run = Path(shutil.copytree(whole, tmp_path / "run"))
            damage(run / file)
            code = main.main(["export", "--from", str(run), "--to", str(target)])
            said = capsys.readouterr().err
            fine = code == 0 and same_bytes(load(target), wanted)
            fine = fine or (code in (1, 2) and said.startswith("gspax: ") and not target.exists())
            if not fine or "Traceback" in said:
                failures.append((str(file), name, code, said[-500:]))
            refused += code != 0
            shutil.rmtree(run)
    assert refused and not failures, "\n".join(map(str, failures))


# The command line


def test_the_command_line_converts_and_exports(tmp_path, capsys):
    source, tensors = checkpoint(tmp_path / "hf", tiny.MOE)
    orbax, out = str(tmp_path / "orbax"), str(tmp_path / "out")
    assert main.main(["convert", "--from", str(source), "--to", orbax]) == 0
    assert main.main(["export", "--from", orbax, "--to", out, "--dtype", "float32", "--shard-size", "10KB"]) == 0
    assert same_bytes(load(tmp_path / "out"), tensors)
    assert max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) < 13_000  # and a header
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [orbax, out]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["convert", "--to", "x"], "the following arguments are required: --from"),
        (["convert", "--from", "{}/none", "--to", "x"], "none: wanted the folder of a checkpoint or a name on the Hub"),
        (["convert", "--from", "{}", "--to", "x"], "wanted a checkpoint folder with config.json, there is none"),
        (["convert", "--from", "{}", "--to", "x", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["export", "--from", "{}/none", "--to", "x"], "none: wanted the directory of a run, there is none"),
        (["export", "--from", "{}", "--to", "x", "--shard-size", "5 gigs"], "wanted a size such as 5GB or 500MB, got"),
        (["export", "--from", "{}", "--to", "x", "--shard-size", "0"], "wanted a size such as 5GB or 500MB, got '0'"),
        (["export", "--from", "{}", "--to", "x"], "wanted a run directory (experiment.json) or a converted checkpoint"),
    ],
)
def test_invalid_input_prints_one_error_and_exits_2(arguments, said, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    assert main.main([argument.format(folder) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.startswith("gspax: ") and out == ""
    assert names_in(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5_000_000_000), ("500MB", 500_000_000), ("3KB", 3000), ("1000", 1000)]
)
def test_sizes_are_printed_with_a_unit(text, size):
    assert arguments.size(text) == size


def test_an_export_reads_a_few_layers_of_one_parameter_at_a_time(tmp_path, monkeypatch):
    """As many as the checkpoint stores together: one of them."""
    config = small_experiment.experiment.model
    experts = config.num_experts * config.hidden_size * config.moe_intermediate_size
    run = a_run(tmp_path / "run", small_experiment.experiment, steps=(1,))
    read, sizes = StoredArray._read, []

    def spy(self, part):
        sizes.append((self.name.split()[0], read(self, part).size))
        return read(self, part)

    monkeypatch.setattr(StoredArray, "_read", spy)
    export.run(run, tmp_path / "out", dtype="float32", shard_size=4000)
    assert config.num_hidden_layers == 2 and max(size for _, size in sizes) == experts
    assert sizes.count(("params/runs/0/mlp/gate", experts)) == 2, "each layer once"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 10
    assert same_bytes(load(tmp_path / "out"), tensors_of_step(config, 1))


def test_an_array_that_is_not_there_or_of_another_shape_is_one_sentence(tmp_path):
    run = a_run(tmp_path / "run", small_experiment.experiment, steps=(1,))
    folder = RunDir(run).checkpoints
    with pytest.raises(UserError, match=r"params/none of checkpoint 1 in .* cannot be read"):
        open_array(folder, 1, "params/none", (2,))
    with pytest.raises(UserError, match=r"params/norm/scale .*: wanted the shape \[3\], got \[32\]"):
        open_array(folder, 1, "params/norm/scale", (3,))
