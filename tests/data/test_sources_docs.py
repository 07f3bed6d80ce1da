"""The experiments of docs/data.md and docs/checkpoints.md, on made-up rows and, if available, on GSM8K."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from api import abstract, main, named_shapes, to_json, write_adapters
from test_chat import write_folder

from gspax.config import ModelConfig
from gspax.data.problem import encode_prompt
from gspax.experiment import describe, load, override, validate

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "data.md").read_text(), re.M | re.S)
ROWS = [
    {"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
    for a in range(9)
    for b in (1, 2)
]
MODEL = ModelConfig(
    vocab_size=262,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=32,
    max_position_embeddings=2048,
)


def test_the_blocks_of_the_page_run():
    names = {}
    for code in BLOCKS[1:]:
        if "..." not in code:
            exec(code, names)
    assert names["source"].weights == (3, 1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files that the experiment expects next to it: made-up rows and a small chat model without weights."""
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "Qwen3-0.6B").mkdir()
    for name, rows in (("train", ROWS[:14]), ("test", ROWS[14:])):
        (tmp_path / "gsm8k" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_folder(tmp_path / "Qwen3-0.6B")
    (tmp_path / "Qwen3-0.6B" / "config.json").write_text(json.dumps(to_json(MODEL)))
    (tmp_path / "gsm8k.py").write_text(BLOCKS[0])
    return tmp_path


def test_the_experiment_is_short():
    assert len(BLOCKS[0].splitlines()) <= 30


def test_the_experiment_on_made_up_rows(folder, capsys):
    experiment = load("gsm8k.py")
    assert validate(experiment) == []
    problem = experiment.data.train(0)
    assert problem.prompt.endswith("?\nThink step by step. Put the final answer in \\boxed{}.")
    assert experiment.tokenizer.decode(encode_prompt(experiment.tokenizer, problem)).startswith(
        "<turn>user\n" + problem.prompt
    )
    digits = problem.answer.rpartition(" ")[2]
    assert experiment.reward(problem, f"so \\boxed{{{digits}}}").value == 1.0
    assert experiment.reward(problem, "so \\boxed{77}").value == 0.0
    assert main.main(["train", "gsm8k.py", "--dry-run"]) == 0
    assert re.search(r"data\.train_rows +sha256:", capsys.readouterr().out)


def test_the_experiment_with_adapters(folder, capsys):
    """The one of docs/checkpoints.md, with new adapters and with adapters from a folder."""
    (code,) = (
        code for code in re.findall(r"^```python\n(.*?)^```$", CHECKPOINTS.read_text(), re.M | re.S) if "Lora" in code
    )
    assert 'lora=Lora(rank=16, alpha=32.0),  # or peft("adapters/first")' in code
    Path("fresh.py").write_text(code)
    experiment = load("fresh.py")
    assert validate(experiment) == [] and experiment.lora.rank == 16
    Path("adapters/first").mkdir(parents=True)
    shapes = named_shapes(abstract(experiment.model, experiment.lora))
    write_adapters(
        Path("adapters/first"), experiment.model, experiment.lora, shapes, lambda name: np.ones(shapes[name])
    )
    Path("next.py").write_text(code.replace("lora=Lora(rank=16, alpha=32.0)", 'lora=peft("adapters/first")'))
    assert load("next.py").lora == replace(experiment.lora, checkpoint="adapters/first")
    assert main.main(["train", "next.py", "--dry-run"]) == 0
    assert re.search(r"lora\.checkpoint +adapters/first", capsys.readouterr().out)


def test_invalid_rows_fail_the_dry_run(folder, capsys):
    rows = [{"question": "x" * 600, "answer": "#### 1"}, {"question": "How many?", "answer": "None.\n####"}, *ROWS]
    Path("other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["train", "gsm8k.py", "--dry-run", "data.train_rows.paths=other.jsonl", "data.heldout_rows=null"]
    assert main.main(given) == 2
    said = capsys.readouterr().err
    assert re.search(r"2 of 20 rows \(other\.jsonl, line 1: the prompt has \d+ tokens, more than 512; ", said)
    assert "line 2: wanted a final answer after ####, got none" in said
    assert main.main([*given, "data.on_bad=skip"]) == 0
    assert "gspax: warning: data: skipped 2 of 20 rows" in capsys.readouterr().err


def test_the_experiment_on_gsm8k(folder, capsys):
    """The real rows and tokenizer, and the real model's shape."""
    for name in ("gsm8k", "qwen3_tokenizer", "qwen3_configs"):
        if not (DATA / name).is_dir():
            pytest.skip(f"needs {name} beside the checkout (shared/data)")
    for source in (
        "qwen3_tokenizer/tokenizer.json",
        "qwen3_tokenizer/tokenizer_config.json",
        "qwen3_configs/Qwen3-0.6B/config.json",
    ):
        target = folder / "Qwen3-0.6B" / Path(source).name
        shutil.copyfile(DATA / source, target)
    (folder / "Qwen3-0.6B" / "generation_config.json").unlink()
    paths = [
        f"data.{key}.paths={DATA}/gsm8k/{name}.jsonl"
        for key, name in (("train_rows", "train"), ("heldout_rows", "test"))
    ]
    experiment = override(load("gsm8k.py"), paths)
    source = replace(experiment.data, checks=experiment.data.checks[1:])  # the dry run counts tokens
    assert (len(source.opened.train), len(source.opened.heldout)) == (7473, 1319)
    assert describe(source)["train_rows"] == f"sha256:{TRAIN}"
    for index in range(20):
        problem = source.train(index)
        assert experiment.reward(problem, f"\\boxed{{{problem.answer.rpartition(' ')[2]}}}").value == 1.0
    assert main.main(["train", "gsm8k.py", "--dry-run", *paths]) == 0
    assert TRAIN in capsys.readouterr().out


TRAIN = "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"
