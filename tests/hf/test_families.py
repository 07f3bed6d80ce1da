"""Each family against transformers: logits, gradients, greedy tokens, the bytes of an export, and adapters."""

from dataclasses import replace

import families
import pytest
from api import parameter_count, to_json
from published import load, same_bytes

from gspax.hf.families import FAMILIES

pytest.importorskip("torch", reason="torch is not installed: pip install torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """model_type, the model in transformers, and the configuration and parameters that gspax reads from its files."""
    folder = tmp_path_factory.mktemp(request.param)
    model = families.make_model(request.param)
    model.save_pretrained(folder)
    return request.param, model, *families.read(folder)


# Together they have every mechanism of attention, norms, and layers; the sampler knows no families.
SAMPLED = ("qwen3_moe", "gemma3_text", "gpt_oss", "minimax_m2", "olmo2", "deepseek_v2", "qwen3_next")
# What the small models of tests/sampler have not: norms on both sides of a layer with windows, and sinks with windows.
OF_THEIR_OWN = ("gemma3_text", "gpt_oss")


def of_families(names):
    """`pair` of these families; the tests of the others are slow ones."""
    marked = [pytest.param(name, marks=[] if name in names else pytest.mark.slow) for name in FAMILIES]
    return pytest.mark.parametrize("pair", marked, indirect=True)


def test_there_is_a_small_and_a_published_model_of_each_family():
    assert families.SMALL.keys() == families.PUBLISHED.keys() == FAMILIES.keys()


@pytest.mark.kept
@pytest.mark.parametrize("kind", families.KINDS)
def test_each_kind_of_layer_is_that_of_transformers(kind, tmp_path):
    """The other tests here are those of all families, which take minutes."""
    model_type, changes = families.KINDS[kind]
    model = families.make_model(model_type, **changes)
    model.save_pretrained(tmp_path / "files")
    config, params = families.read(tmp_path / "files")
    exported = load(families.write(tmp_path / "exported", config, params))
    assert same_bytes(exported, load(tmp_path / "files"))
    logits, gradients = families.differences(params, config, model, tmp_path)
    assert logits < 1e-5 and gradients < 1e-4
    ours, theirs = families.greedy_tokens(params, config, model, steps=4)
    assert ours == theirs


def test_logits_and_gradients_are_those_of_transformers(pair, tmp_path):
    model_type, model, config, params = pair
    assert to_json(config)["model_type"] == model_type
    logits, gradients = families.differences(params, config, model, tmp_path)
    assert logits < 1e-5 and gradients < 1e-4
    assert families.packed_difference(params, config) < 1e-5
    assert parameter_count(config) == sum(leaf.size for leaf in families.named_leaves(params).values())


@of_families(SAMPLED)
def test_greedy_tokens_are_those_of_transformers(pair):
    _, model, config, params = pair
    ours, theirs = families.greedy_tokens(params, config, model)
    assert ours == theirs
    assert len({token for row in ours for token in row[9:]}) > 3  # not one repeated token


def test_longrope_is_that_of_transformers_at_both_lengths(tmp_path):
    """transformers chooses by each sequence, gspax by the longest one of a run, so that a cache has one embedding."""
    factors = {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 6.0]}}
    lengths = {"original_max_position_embeddings": 16, "max_position_embeddings": 64, "partial_rotary_factor": 1.0}
    model = families.make_model("phi3", **factors, **lengths)
    model.save_pretrained(tmp_path)
    config, params = families.read(tmp_path)
    long_config = replace(config, max_position_embeddings=64)
    tokens_BT = families.random_tokens(config, 4, 24)
    for each, length in ((config, 16), (long_config, 24)):
        ours = families.our_logits(params, each, tokens_BT[:, :length])
        assert families.relative(ours, families.their_logits(model, tokens_BT[:, :length])) < 1e-5
    ours, theirs = families.greedy_tokens(params, config, model, steps=7)
    assert ours == theirs


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if FAMILIES[name].state])
def test_a_layer_with_a_state_decodes_token_by_token_what_it_runs_in_chunks(model_type, tmp_path):
    families.make_model(model_type).save_pretrained(tmp_path)
    config, params = families.read(tmp_path)
    assert families.recurrence_difference(params, config) < 1e-4


@of_families(OF_THEIR_OWN)
def test_samples_do_not_depend_on_their_slots(pair):
    _, _, config, params = pair
    assert families.slots_are_equal(params, config)


@of_families(OF_THEIR_OWN)
def test_conversations_are_those_of_a_whole_forward_pass(pair):
    _, _, config, params = pair
    assert families.conversation_difference(params, config) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama"])
def test_a_run_of_20_steps_learns_and_a_resumed_one_has_its_bits(model_type, tmp_path):
    """The other families' runs: `tests/parity_table.py`, which takes minutes."""
    families.make_model(model_type).save_pretrained(tmp_path / "files")
    first, last, same = families.train(tmp_path / "files", tmp_path)
    assert last > first + 0.3 and same


@of_families(SAMPLED)
def test_adapters_and_their_merged_export_are_the_same_model(pair, tmp_path):
    _, _, config, params = pair
    assert families.lora_difference(params, config, tmp_path) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_export_has_the_bytes_of_transformers(model_type, dtype, tmp_path):
    assert families.export_is_equal(model_type, tmp_path, dtype)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_published_configuration_has_the_parameters_that_transformers_counts(model_type, tmp_path):
    ours, theirs = families.published_counts(model_type, tmp_path)
    assert ours == theirs
