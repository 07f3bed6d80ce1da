"""`gspax serve-command`: what it prints starts a server for the experiment."""

import json
import shlex

import pytest
from api import main

FILE = "experiments/sort_gspo.py"


@pytest.mark.parametrize(
    ("server", "module", "flag"),
    [
        ("vllm", "vllm.entrypoints.openai.api_server", "--logprobs-mode processed_logprobs"),
        ("sglang", "sglang.launch_server", "--enable-deterministic-inference"),
    ],
)
def test_the_command_names_the_model_and_its_limits(server, module, flag, tmp_path, capsys):
    settings = [f"engine.server={server}", f"engine.folder={tmp_path}", "engine.addresses=(http://127.0.0.1:8011,)"]
    assert main.main(["serve-command", FILE, "engine=gspax.config.Engine", "routing_replay=sampler", *settings]) == 0
    printed = capsys.readouterr().out.strip()
    assert len(printed.splitlines()) == 1 and f" -m {module} " in printed and flag in printed
    words = shlex.split(printed)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert str(tmp_path / "model") in words and config["torch_dtype"] == words[words.index("--dtype") + 1]
    assert words[words.index("--port") + 1] == "8011" and "--enable-return-routed-experts" in words
    assert "17" in words, "the longest prompt and completion of 8 each, and a token after a probe"
