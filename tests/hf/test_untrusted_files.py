"""Checkpoint folders made by a stranger: one sentence for each, soon, and no file outside of the folder is read."""

import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny
from api import read_config, tensors, to_json

from gspax.data import HFTokenizer, files, hf_chat
from gspax.errors import UserError
from gspax.hf.peft import peft
from gspax.hf.source import copy_companions, locate

MOE = to_json(tiny.MOE)


def nested(depth, opening="[", closing="]"):
    return opening * depth + closing * depth


DEEP = [nested(65), nested(900), nested(100_000), nested(500, '{"a":', "}").replace(":}", ":1}"), "[" * 10**6]
ODD = [None, True, -1, 0, 10**400, 1e400, -1e400, "", "x" * 10**6, [], [[]], {}, {"a": [1]}, "\ud800", [1] * 10**5]


def raises_one_sentence(call):
    """Whether `call` raised a UserError, which must be short and of one line."""
    began = time.monotonic()
    try:
        call()
    except UserError as problem:
        sentence = str(problem)
        assert len(sentence.splitlines()) == 1 and len(sentence) < 2000, sentence[:3000]
        return True
    finally:
        assert time.monotonic() - began < 10
    return False


@pytest.mark.parametrize("text", DEEP, ids=lambda text: f"{text[:3]}{len(text)}")
def test_deep_nesting_is_one_sentence(text, tmp_path):
    for name in ("config.json", "adapter_config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text(text)
    assert raises_one_sentence(lambda: read_config(tmp_path))
    assert raises_one_sentence(lambda: peft(tmp_path))
    assert raises_one_sentence(lambda: tensors.find(tmp_path))
    data = text.encode()
    (tmp_path / "a.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    assert raises_one_sentence(lambda: tensors.read_header(tmp_path / "a.safetensors"))


def test_nesting_up_to_the_limit_is_read():
    assert files.parse_json(nested(64).encode()) is not None
    with pytest.raises(ValueError, match="wanted at most 64 nested lists and objects"):
        files.parse_json(nested(65).encode())


@pytest.mark.parametrize("key", [*MOE, "rope_scaling", "layer_types", "unknown" * 1000])
def test_any_value_of_any_key_of_config_json(key, tmp_path):
    for value in ODD:
        (tmp_path / "config.json").write_text(json.dumps({**MOE, key: value}))
        raises_one_sentence(lambda: read_config(tmp_path))  # some are valid


def test_more_layers_than_any_model_has_are_refused_at_once(tmp_path):
    for count in (10**5, 10**9, 10**18):
        (tmp_path / "config.json").write_text(json.dumps({**MOE, "num_hidden_layers": count}))
        assert raises_one_sentence(lambda: read_config(tmp_path))


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize("field", [*GOOD, "entry", "name"])
def test_any_header_of_a_safetensors_file(field, tmp_path):
    for value in [*ODD, [10**18, 10**18], [10**400] * 50, [2**62] * 20000, [True], {"0": 1, "1": 2}, [0, 10**30]]:
        entry = value if field == "entry" else {**GOOD, field: value}
        name = value if field == "name" and isinstance(value, str) else "tensor"
        data = json.dumps({name: entry, "__metadata__": value}).encode()
        (tmp_path / "a.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(8))
        if not raises_one_sentence(lambda: tensors.read_header(tmp_path / "a.safetensors")):
            assert field == "name" or value == GOOD.get(field)


def test_a_file_that_is_too_long_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 100)
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    with pytest.raises(UserError, match="more than 100 bytes"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "adapter_config.json", "tokenizer_config.json"])
def test_a_pipe_is_refused_and_not_waited_for(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    calls = ["hf.hf(folder)"]
    if name == "adapter_config.json":
        calls += ["hf.peft(folder)"]
    elif name == "config.json":
        calls += ["config_json.read_config(folder)"]
    else:
        calls += ["data.hf_tokenizer(folder)", "data.HFTokenizer(folder).vocab_size"]
    code = "import sys; from gspax import data, hf; from gspax.hf import config_json; folder = sys.argv[1]; "
    for call in calls:
        done = subprocess.run([sys.executable, "-c", code + call, tmp_path], capture_output=True, text=True, timeout=30)
        assert done.returncode == 1 and re.search(r"UserError: .*(regular file|got a pipe|none in)", done.stderr), done


# Links


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "checkpoint"
    made.mkdir()
    (tmp_path / "private").write_text("{}")
    (made / "config.json").write_text(json.dumps(MOE))
    return made


@pytest.mark.parametrize("target", ["../private", "/etc/passwd", "../missing"])
def test_a_link_out_of_the_folder_is_refused(target, folder, tmp_path):
    (folder / "tokenizer.json").symlink_to(target)
    with pytest.raises(UserError, match="wanted a file, got a link that leads out of the folder"):
        locate(str(folder))
    (tmp_path / "export").mkdir()
    with pytest.raises(UserError, match="leads out of the folder"):
        copy_companions([folder], tmp_path / "export")
    assert not list((tmp_path / "export").iterdir())


def test_links_within_the_folder_and_to_the_folder_are_followed(folder, tmp_path):
    (folder / "vocab.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to("vocab.json")
    (tmp_path / "link").symlink_to(folder)
    for each in (folder, tmp_path / "link"):
        assert locate(str(each)) == each
    (tmp_path / "export").mkdir()
    copied = copy_companions([tmp_path / "link", tmp_path / "missing"], tmp_path / "export")
    assert copied == ["tokenizer.json", "vocab.json"]


def test_the_links_of_the_hub_s_cache_are_followed(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs" / "1234").write_text(json.dumps(MOE))
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    assert locate(str(snapshot)) == snapshot
    (snapshot / "tokenizer.json").symlink_to("../../../private")
    with pytest.raises(UserError, match="leads out"):
        locate(str(snapshot))


@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.json"])
def test_a_link_in_a_tokenizer_s_folder_is_refused(name, folder):
    (folder / "tokenizer.json").write_text("{}")
    (folder / name).symlink_to("../private")
    with pytest.raises(UserError, match="leads out of the folder"):
        hf_chat(folder)
    with pytest.raises(UserError, match="leads out of the folder"):
        HFTokenizer(str(folder)).encode("x")


def test_a_link_in_an_adapter_is_refused(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (tmp_path / "weights").write_bytes(np.zeros(4, np.uint8).tobytes())
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    (adapter / "adapter_model.safetensors").symlink_to("../weights")
    with pytest.raises(UserError, match="leads out of the folder"):
        peft(adapter)
