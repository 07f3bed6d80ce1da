"""The model card and generation settings of an exported run, and its upload to a fake Hub on loopback."""

import base64
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import small_experiment
from api import Checkpoints, export, main, open_run
from local_server import serve
from published import random_params

from gspax.experiment import describe
from gspax.report import card

EXPERIMENT = small_experiment.experiment
INTERVAL = {"mean": 0.75, "low": 0.5, "high": 0.875}
SUMMARY = {"problems": 8, "samples": 2, "reward": INTERVAL, "truncated": 0.25, "failed": 0.0}


def write_results(run):
    """Metrics, an evaluation of more problems, and a task, at steps 0 and 2, and at one that is not exported."""
    rows = [
        {"step": 0, "eval/reward": 0.125, "eval/greedy_reward": 0.25, "eval/truncated": 0.0},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "eval/reward": 0.5, "eval/greedy_reward": 0.625, "eval/truncated": 0.0},
        {"step": 9, "eval/reward": 0.99, "eval/greedy_reward": 0.99, "eval/truncated": 0.0},
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bounds = {"eval/reward_low": 0.4375, "eval/reward_high": 0.5625, "evaluation": {"problems": 512}}
    run.evaluations.write_text(json.dumps(rows[2] | {"eval/reward": 0.502} | bounds) + "\n")
    run.tasks_at(2).mkdir(parents=True)
    summary = SUMMARY | {"tokens": {"mean": 12.5, "max": 20, "total": 200}, "pass": {"2": INTERVAL}}
    (run.tasks_at(2) / "sums.json").write_text(json.dumps({"summary": summary}))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = open_run(tmp_path_factory.mktemp("publish") / "run", describe(EXPERIMENT))
    with Checkpoints(run.checkpoints, keep=2) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, {"params": random_params(EXPERIMENT.model, step)}, {})
    write_results(run)
    return run


def test_a_card_has_base_settings_results_and_versions(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    export.run(Path(run.path.name), tmp_path / "out", step=2)
    text = (tmp_path / "out" / "README.md").read_text()
    for line in (
        "Parameters after step 2 of reinforcement learning with the loss `gspo`, trained with gspax from "
        "random parameters.",
        "The problems are those of `gspax.data.tasks.sort.Problems`, the reward is `small_experiment.share_right`.",
        "| 0 | 0.125 | 0.250 | 0.0 % |",
        "| 2 | 0.502 [0.438, 0.562] | 0.625 | 0.0 % |",
        "| sums | 8 x 2 | 0.750 [0.500, 0.875] | 0.750 [0.500, 0.875], k = 2 |  | 25.0 % | 12.5 |",
        "| `loss.clip_low` | `3e-4` |",
        "| `data.max_digits` | `3` |",
        f"| commit of gspax | {json.loads(run.environment.read_text())[-1]['commit']} |",
    ):
        assert line in text.splitlines(), line
    assert "base_model" not in text and "0.99" not in text
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [*EXPERIMENT.tokenizer.stop_ids] and generation["temperature"] == 1.0


def test_a_card_names_a_base_on_the_hub_and_hides_folders_and_secrets(run):
    described = json.loads(run.experiment.read_text())
    described["model"]["checkpoint"] = "Qwen/Qwen3-0.6B@abc"
    described["data"] |= {"path": "/data/of/anna/train.jsonl", "api_key": "hf_verysecretvalue", "note": "a|`b`\n<c>"}
    text = card.render(run, described, 4, of_warm_start=False, adapter=True)
    assert text.startswith('---\nlibrary_name: "peft"\n') and 'base_model: "Qwen/Qwen3-0.6B"\n' in text
    assert "Adapters after step 4" in text and "from `Qwen/Qwen3-0.6B@abc`." in text and "no base" not in text
    assert "`train.jsonl`" in text and "anna" not in text and "verysecret" not in text and "`a\\|'b' <c>`" in text
    first = card.render(run, described, 2, of_warm_start=True, adapter=False)
    assert "after step 2 of the supervised warm start" in first and "## Results" not in first


@pytest.mark.parametrize("adapter", [False, True])
def test_a_card_of_adapters_of_random_parameters_says_that_they_have_no_base(run, adapter):
    text = card.render(run, json.loads(run.experiment.read_text()), 4, of_warm_start=False, adapter=adapter)
    assert ("They have no base:" in text) == adapter


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as an upload needs; `server.repositories` has the files of each."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        token = self.headers.get("Authorization")
        if token != "Bearer hf_right" and (token or "whoami" in self.path):  # the Hub shows models to everybody
            return self.answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/whoami-v2":
            return self.answer(200, {"name": "me", "type": "user"})
        name = self.path.removeprefix("/api/models/")
        if name not in self.server.repositories:
            return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        return self.answer(200, {"id": name, "modelId": name, "siblings": [], "tags": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            if name.startswith("others/"):
                return self.answer(403, {"error": "You don't have the rights to create a model there"})
            self.server.repositories[name] = {}
            return self.answer(200, {"url": f"{self.server.url}/{name}"})
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        name = "/".join(self.path.split("/")[3:5])
        if "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
            return self.answer(200, {"files": modes})
        for line in body.decode().splitlines():
            if (entry := json.loads(line))["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.server.repositories[name][entry["value"]["path"]] = content
        url = f"{self.server.url}/{name}/commit/{'a' * 40}"
        return self.answer(200, {"success": True, "commitOid": "a" * 40, "commitUrl": url, "hookOutput": ""})

    def answer(self, code, content, headers=()):
        body = json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    with serve(Hub, repositories={"me/taken": {}}) as server:
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "no/such/file")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        yield server


def push(run, target, name):
    return main.main(["export", "--from", str(run.path), "--to", str(target), "--push", name])


def test_an_export_is_uploaded_to_a_new_repository(hub, run, tmp_path, capsys):
    assert push(run, tmp_path / "out", "me/sort") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{hub.url}/me/sort/commit/{'a' * 40}"
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {*files} == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert hub.repositories["me/sort"] == files


@pytest.mark.parametrize(
    ("name", "token", "code", "sentence"),
    [
        ("sort", "hf_right", 2, "gspax: --push: wanted OWNER/NAME, got 'sort'"),
        ("me/taken", "hf_right", 2, "gspax: --push me/taken: wanted the name of a new repository, this one exists"),
        (
            "me/sort",
            "",
            2,
            "gspax: --push me/sort: wanted a token that may write there: `hf auth login`",
        ),
        ("me/sort", "hf_wrong", 2, "gspax: --push me/sort: wanted a token that may write there: "),
    ],
)
def test_what_the_hub_would_refuse_is_one_sentence_before_the_export(
    name, token, code, sentence, hub, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_TOKEN", token)
    assert push(run, tmp_path / "out", name) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(sentence) and not (tmp_path / "out").exists()


def test_an_owner_that_refuses_the_token_leaves_the_export(hub, run, tmp_path, capsys):
    assert push(run, tmp_path / "out", "others/sort") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"others/sort ({tmp_path / 'out'} is complete): wanted a token that may write there" in line
    assert (tmp_path / "out" / "README.md").exists()


@pytest.mark.parametrize("offline", [True, False])
def test_no_network_is_one_sentence_and_the_same_command_may_succeed_later(
    offline, hub, run, tmp_path, monkeypatch, capsys
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert push(run, tmp_path / "out", "me/sort") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gspax: --push me/sort: the Hub cannot be reached: ")
