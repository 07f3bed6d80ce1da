"""Checkpoints with a vision tower around a text model: read, trained, and exported with the tower as it was."""

import json
from dataclasses import replace

import families
import pytest
from api import convert, export, read_config, to_json
from published import load

from gspax.errors import UserError
from gspax.hf.source import hf

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip("transformers")

VISION = {
    **{"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4},
    "num_position_embeddings": 16,
}
GEMMA_VISION = {
    **{"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 4, "patch_size": 4, "position_embedding_size": 16},
}
TOWERS = {  # by model_type: the vision tower's settings, the prefix of its tensors, and whether there are MTP tensors
    "qwen3_5": (VISION, "model.visual.", True),
    "qwen3_5_moe": (VISION, "model.visual.", True),
    "gemma4": (GEMMA_VISION, "model.vision_tower.", False),
}


@pytest.fixture(scope="module", params=TOWERS)
def whole(request, tmp_path_factory):
    """A model of transformers with a tower, and its folder, with fused experts as published, perhaps MTP tensors."""
    from safetensors.torch import load_file, save_file

    folder, name = tmp_path_factory.mktemp(request.param), request.param
    vision, _, ahead = TOWERS[name]
    config = transformers.AutoConfig.for_model(
        name,
        text_config=families.SMALL[f"{name}_text"] | {"pad_token_id": 0},
        vision_config=vision,
        tie_word_embeddings=not ahead,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder, save_original_format=False)
    file = folder / "model.safetensors"
    more = {"mtp.fc.weight": torch.randn(4, 8).bfloat16()} if ahead else {}
    save_file(load_file(file) | more, file, {"format": "pt"})
    return model, folder


def test_logits_are_those_of_the_whole_model(whole):
    model, folder = whole
    config, params = families.read(folder)
    assert config.model_type == json.loads((folder / "config.json").read_text())["model_type"]
    tokens_BT = families.random_tokens(config, 2, 9)
    assert (
        families.relative(families.our_logits(params, config, tokens_BT), families.their_logits(model, tokens_BT))
        < 1e-5
    )


def test_an_export_has_the_tower_and_every_other_byte(whole, tmp_path, capsys):
    _, folder = whole
    convert.run(str(folder), tmp_path / "converted")
    export.run(tmp_path / "converted", tmp_path / "exported", dtype="float32")
    ours, theirs = load(tmp_path / "exported"), load(folder)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in ours) == folder.name.startswith("qwen3_5_moe")
    _, tower, ahead = next(each for name, each in reversed(TOWERS.items()) if folder.name.startswith(name))
    assert ("mtp.fc.weight" in ours) == ahead and any(name.startswith(tower) for name in ours)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].tobytes() == tensor.tobytes(), name
    assert "they were not trained" in capsys.readouterr().err
    assert read_config(tmp_path / "exported") == read_config(folder)
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "exported")
    assert not [name for name, each in again.named_parameters() if each.isnan().any()]


def test_keys_around_a_text_model_are_known(whole, tmp_path):
    _, folder = whole
    raw = json.loads((folder / "config.json").read_text())
    for change, said in (
        ({"audio_config": {}}, "audio_config: wanted "),
        ({"text_config": raw["text_config"] | {"model_type": "qwen3"}}, "text_config.model_type: wanted"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(UserError, match=said):
            read_config(tmp_path)
    assert to_json(replace(hf(folder), checkpoint=""))["text_config"]["model_type"].endswith("_text")
