"""What holds of trained weights: SmolLM2-135M-Instruct, which `make real` fetches, as real_weights.py compares it.

Bounds are a few times what was measured (experiments/benchmarks/real_weights.md). Random weights agree far better in 8
bits and in bfloat16: their activations have no outliers.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from gspax.commands import convert, export
from gspax.experiment.validation.chats import chat_warnings
from gspax.hf import hf
from gspax.learner.state import abstract_params, load_model
from gspax.rewards.environments import ToolUse, calculator

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
sys.path += [str(ROOT / "experiments" / "benchmarks"), str(ROOT / "tests" / "faults")]

pytestmark = pytest.mark.slow
if not MODEL.is_dir():
    pytest.skip("there is no .cache/smollm2 (make real)", allow_module_level=True)

import real_weights  # noqa: E402
import runs  # noqa: E402
from moments import Kill  # noqa: E402


@pytest.mark.timeout(3600)  # on a busy machine
def test_a_killed_run_with_a_tool_is_the_run_that_was_not_killed(tmp_path):
    """Two conversations of two turns each, full parameters and moments; the kill comes in the second update."""
    file, whole, hurt = str(Path(__file__).with_name("conversation.py")), tmp_path / "whole", tmp_path / "hurt"
    run = runs.start(whole, file=file, steps=2, with_report=False)
    assert run.wait(900) == 0, run.text()
    killed = runs.start(hurt, file=file, steps=2, with_report=False, kill=Kill("update", 1, 0.5))
    assert killed.wait(900) == -9 and killed.resumed() == 0, killed.text()
    resumed = runs.start(hurt, file=file, steps=2, with_report=False)
    assert resumed.wait(900) == 0 and resumed.resumed() == 1, resumed.text()
    assert runs.differences(hurt, whole, steps=2) == []
    steps = [row for row in runs.metrics(whole) if "policy/loss" in row]
    assert len(steps) == 2 and all(row["rollout/turns"] > 1 for row in steps), steps
    assert all(row["mismatch/abs_diff_largest_max"] < 5e-4 for row in steps), steps
    shutil.rmtree(tmp_path)  # some GB


@pytest.fixture(scope="module")
def policy():
    return real_weights.load_policy()


@pytest.fixture(scope="module", autouse=True)
def _few_samples():
    """8 instead of 32 samples, of at most 24 instead of 48 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real_weights, "SAMPLING", replace(real_weights.SAMPLING, prompts=2, max_tokens=24))
        yield


EXACT = 3e-4  # nats, of a token in float32; measured: 4e-5


@pytest.mark.parametrize("kind", real_weights.KINDS)
def test_the_sampler_computes_what_the_learner_does(kind, policy):
    """Also over sampling masks. The lower bounds show that the sampler is in this type."""
    found = real_weights.compare_with_learner(policy, kind)
    assert found["tokens"] > 100
    if kind.startswith("float32"):
        assert found["largest"] < EXACT, found
    else:
        low, high = {"8-bit weights": (0.02, 0.2), "8-bit cache": (0.01, 0.1), "bfloat16": (0.01, 0.1)}[kind]
        assert low < found["mean"] < high and found["ratio"] < 0.2, found


@pytest.mark.parametrize("pair", real_weights.PAIRS)
def test_two_ways_give_the_same_log_probs(pair, policy):
    """Rows, prompts, adapters after an update that leaves their base as it was, and drafts."""
    found = real_weights.PAIRS[pair](policy)
    assert found["tokens"] > 100 and found["largest"] < EXACT, found
    if "drafts" in pair:
        assert found["equal"] == 8, found
    if "adapters" in pair:
        assert found["moved"] > 0.001, found
    print(pair, found["note"])


def test_export_and_back_preserve_every_byte(policy, tmp_path):
    export.run(MODEL, tmp_path / "out", dtype="float32")
    convert.run(str(tmp_path / "out"), tmp_path / "back")
    config = hf(tmp_path / "back")
    assert replace(config, checkpoint=policy.config.checkpoint) == policy.config
    again = load_model(config, abstract_params(config, policy.mesh))
    assert jax.tree.all(jax.tree.map(np.array_equal, again, policy.params))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (MODEL / name).read_bytes()
    shutil.rmtree(tmp_path)


def test_texts_of_gsm8k_round_trip(policy):
    if not GSM8K.is_file():
        pytest.skip("needs gsm8k beside the checkout (shared/data)")
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()[::10]]
    texts, tokenizer = [row[field] for row in rows for field in ("question", "answer")], policy.tokenizer
    assert len(texts) > 200
    for text in texts:
        assert tokenizer.decode(tokenizer.encode_completion(text)) == text


def test_the_template_writes_replies_of_tools_but_no_tools(policy):
    tokenizer = policy.tokenizer
    (warning,) = chat_warnings(tokenizer, ToolUse((calculator(),)))
    assert "writes no tools, so the policy does not see those of the environment" in warning
    ids = tokenizer.encode_reply([{"role": "tool", "content": "4 words"}])
    assert tokenizer.added_tokens["<|im_end|>"] == tokenizer.turn_end
    text = "\n<|im_start|>tool\n4 words<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.encode_completion(text)
