"""What holds of trained weights: SmolLM2-135M-Instruct, which `make real` fetches, as real_weights.py compares it.

Bounds are a few times what was measured (experiments/benchmarks/real_weights.md). Random weights agree far better in 8
bits and in bfloat16: their activations have no outliers.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gspax.experiment.validation.chats import chat_warnings
from gspax.rewards.environments import ToolUse, calculator

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".cache" / "smollm2"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
sys.path += [str(ROOT / "experiments" / "benchmarks"), str(ROOT / "tests" / "faults")]

pytestmark = pytest.mark.slow
if not MODEL.is_dir():
    pytest.skip("there is no .cache/smollm2 (make real)", allow_module_level=True)

import real_weights  # noqa: E402


@pytest.mark.timeout(3600)  # on a busy machine
def test_a_killed_run_with_a_tool_is_the_run_that_was_not_killed(model, tmp_path):
    """Two conversations of two turns each, full parameters and moments; the kill comes in an update."""
    found = real_weights.kill_a_run(model, tmp_path / "runs")
    assert real_weights.was_killed_and_resumed(found["ends"]) and found["differences"] == [], found
    assert found["steps"] == real_weights.STEPS and min(found["turns"]) > 1 and found["largest"] < EXACT, found


@pytest.fixture(scope="module")
def model():
    return real_weights.Published("SmolLM2", MODEL, MODEL, chat=True)


@pytest.fixture(scope="module")
def policy(model):
    return model.policy


@pytest.fixture(scope="module", autouse=True)
def _few_samples():
    """8 instead of 16 samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real_weights, "SAMPLING", replace(real_weights.SAMPLING, prompts=2))
        yield


EXACT = 3e-4  # nats, of a token in float32; measured: 4e-5


@pytest.mark.parametrize("kind", real_weights.KINDS)
def test_the_sampler_computes_what_the_learner_does(kind, policy):
    """Also over sampling masks. The lower bounds show that the sampler is in this type."""
    found = real_weights.compare_with_learner(policy, kind)
    assert found["tokens"] > 100 and found["masks"] == ("masks" in kind)
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
    if "rows" in pair.partition(",")[0]:
        assert found["segments"] > 1, found
    if "drafts" in pair:
        assert found["equal"] == 8, found
    if "adapters" in pair:
        assert found["moved"] > 0.001, found
    print(pair, found["note"])


def test_export_and_back_preserve_every_byte(model):
    found = real_weights.export_and_back(model)
    assert found["config"] and found["parameters"] and found["size"] > 500e6, found
    assert found["files"] == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]


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
