"""The record of command lines and variables holds no secret."""

import json
import os
import time
from dataclasses import fields, is_dataclass

import pytest
from api import RunDir, open_run

from gspax import config
from gspax.run.redaction import is_secret, recorded_variables, redact, redact_arguments

HARMLESS = [
    "sampling.max_tokens=512",
    "schedule.microbatch_tokens=4096",
    "tokenizer.path=models/qwen",
    "reward.keywords=a",
    "--workdir",
    "runs/monkey",
    "loss=gspax.losses.gspo_token",
    "reward.url=http://10.0.0.1:8000/v1",
    "data.author=me",
    "data.pass_rate=0.5",
    "environment.bypass=1",
    "reward.url=http://10.0.0.1:8000/v1?page=2&author=me",
    "model.hotkeys=a:b",
    "data.path=folder/key:folder/token",
    "model.num_key_value_heads=2",
    "reward.path=pattern",
    "reward=my_rewards:unit",
    "--workdir runs/a --file=b",
    "model=hf(Qwen/Qwen3-0.6B@main)",
]


def test_settings_are_recorded_as_they_are():
    assert redact_arguments(HARMLESS) == HARMLESS


def test_no_setting_of_an_experiment_is_hidden():
    settings = {
        field.name
        for declared in vars(config).values()
        if isinstance(declared, type) and is_dataclass(declared)
        for field in fields(declared)
    }
    assert {"num_key_value_heads", "microbatch_tokens"} < settings and len(settings) > 150
    assert [name for name in sorted(settings) if is_secret(name)] == []


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("reward.api_key=abc", "reward.api_key=<hidden>"),
        ("reward.token=abc", "reward.token=<hidden>"),
        ("reward.HF_TOKEN=abc", "reward.HF_TOKEN=<hidden>"),
        ("--auth-token=abc", "--auth-token=<hidden>"),
        ("reward.password=a=b", "reward.password=<hidden>"),
        ("reward.url=https://me:pass@host/v1", "reward.url=https://<hidden>@host/v1"),
        ("reward.url=https://host/v1?a=1&key=abc&b=2", "reward.url=https://host/v1?a=1&key=<hidden>&b=2"),
        ("reward.header=Bearer abcdefgh1234", "reward.header=Bearer <hidden>"),
        ("name=hf_abcdefghijkl", "name=<hidden>"),
        ("name=sk-proj-abcdefghijkl", "name=<hidden>"),
        ("name=eyJhbGciOiJI.eyJzdWIiOiIx.abc", "name=<hidden>"),
        ("name=nvapi-abcdefghijkl", "name=<hidden>"),
        ("name=gsk_abcdefghijkl", "name=<hidden>"),
        ("name=r8_abcdefghijkl", "name=<hidden>"),
        ("name=tgp_v1_abcdefghijkl", "name=<hidden>"),
        ("name=https://hooks.slack.com/services/T0/B0/abc", "name=https://<hidden>"),
        ("reward.hfToken=abc", "reward.hfToken=<hidden>"),
        ("reward.HFToken2=abc", "reward.HFToken2=<hidden>"),
        ("reward.accesstoken=abc", "reward.accesstoken=<hidden>"),
        ("reward.apikey=abc", "reward.apikey=<hidden>"),
        ("reward.pw=abc", "reward.pw=<hidden>"),
        ("reward.db_pwd=abc", "reward.db_pwd=<hidden>"),
        ("--pass=abc", "--pass=<hidden>"),
        ("reward.url=https://host/v1?apikey=abc&b=2", "reward.url=https://host/v1?apikey=<hidden>&b=2"),
        ("reward.url=https://host/v1?b=2&auth=abc", "reward.url=https://host/v1?b=2&auth=<hidden>"),
        ("reward.url=https://host/v1?sig=abc", "reward.url=https://host/v1?sig=<hidden>"),
        ("reward.options=--auth=abc --x=1", "reward.options=--auth=<hidden> --x=1"),
        ("reward.header=Authorization: Token abc", "reward.header=Authorization: <hidden>"),
        ("Authorization: Token abc", "Authorization: <hidden>"),
        ("-H 'Cookie: a=b; c=d' -x", "-H 'Cookie: <hidden>' -x"),
        ("reward.keys=('a', 'b')", "reward.keys=<hidden>"),
        ("options=--keys=('a', 'b') --x=1", "options=--keys=<hidden> --x=1"),
        ("reward.api_keys=a", "reward.api_keys=<hidden>"),
        ("reward.access-key-id=a", "reward.access-key-id=<hidden>"),
        ("reward.passwords=a", "reward.passwords=<hidden>"),
        ("reward.github_pat=a", "reward.github_pat=<hidden>"),
        ("reward.address=me:abc@host:80", "reward.address=<hidden>@host:80"),
        ("me:abc@host", "<hidden>@host"),
        ("reward.run=tool --token abc --n 2 -p abc", "reward.run=tool --token <hidden> --n 2 -p <hidden>"),
        ("""reward.options={"api_key": "a b", "n": 1}""", """reward.options={"api_key": <hidden>, "n": 1}"""),
    ],
)
def test_what_looks_like_a_secret_is_not(argument, recorded):
    assert redact_arguments(["train", argument]) == ["train", recorded]


def test_the_word_after_an_option_that_names_a_secret_is_not_recorded():
    words = ["--token", "abc", "--secret-file", "f", "x"]
    assert redact_arguments(words) == ["--token", "<hidden>", "--secret-file", "<hidden>", "x"]
    assert redact_arguments(["-p", "abc", "x"]) == ["-p", "<hidden>", "x"]
    assert redact_arguments(["--token", "--workdir", "w"]) == ["--token", "--workdir", "w"]


@pytest.mark.parametrize(
    "text",
    ["a", "a.", "a-", "a=", "key=", "eyJ", "A", "://", "a:// ", "a:b", "a:b@", "-", "-p ", "--a ", "Cookie: ", "key=("],
)
def test_a_long_argument_takes_no_time(text):
    began = time.monotonic()
    redact_arguments([text * (100_000 // len(text)), "--token", "b"])
    assert time.monotonic() - began < 2


def test_only_variables_of_the_list_are_recorded():
    variables = {
        "XLA_FLAGS": "--xla_a=1",
        "JAX_PLATFORMS": "cpu",
        "NPROC": "64",
        "TPU_NAME": "https://me:pass@host",
        "GSPAX_SECRET": "s",
        "GSPAX_COMPILATION_CACHE": "0",
        "JAX_API_KEY": "s",
        "JAX_CREDS": "s",
        "JAX_PAT": "s",
        "TPU_PASS": "s",
        "TPU_PWD": "s",
        "LIBTPU_INIT_ARGS": "--auth=abc --xla_b=2 --token abc --quoted_secret='a b'",
        "HOME": "some folder",
        "MY_XLA_FLAGS": "s",
        "HF_TOKEN": "s",
        "PATH": "s",
    }
    assert recorded_variables(variables) == {
        "GSPAX_COMPILATION_CACHE": "0",
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": "--auth=<hidden> --xla_b=2 --token <hidden> --quoted_secret=<hidden>",
        "NPROC": "64",
        "TPU_NAME": "https://<hidden>@host",
        "XLA_FLAGS": "--xla_a=1",
    }
    assert redact("nothing to hide") == "nothing to hide"


def test_a_run_records_no_secret_and_only_its_user_may_read_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gspax", "train", "reward.api_key=abcdef"])
    monkeypatch.setenv("GSPAX_SECRET", "uvwxyz")
    run = RunDir(tmp_path / "run")
    previous = os.umask(0)
    try:
        open_run(run.path, {"type": "Experiment"})
        open_run(run.path, {"type": "Experiment"})
    finally:
        os.umask(previous)
    text = run.environment.read_text()
    assert len(json.loads(text)) == 2 and "<hidden>" in text and "abcdef" not in text and "uvwxyz" not in text
    assert run.environment.stat().st_mode & 0o777 == 0o600
