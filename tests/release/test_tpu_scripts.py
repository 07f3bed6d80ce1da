"""The scripts in tpu/, run with programs that record their calls. No cloud is reached: the PATH contains only these
programs and a few system tools."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TPU = ROOT / "tpu"
SOURCED = [TPU / "lib.sh", TPU / "config.example.sh"]
SCRIPTS = sorted({*TPU.rglob("*.sh")} - {*SOURCED})
TOOLS = ["bash", "basename", "cat", "chmod", "dirname", "env", "git", "id", "mkdir", "od", "rm", "sed", "tr"]
FAKES = ["apt-get", "docker", "gcloud", "kubectl", "python3", "sudo", "systemctl", "systemd-run", "uv"]
SETTINGS = {
    "GSPAX_PROJECT": "proj",
    "GSPAX_ZONE": "us-west4-a",
    "GSPAX_NAME": "pod",
    "GSPAX_BUCKET": "buck",
    "GSPAX_RUN": "sort",
    "GSPAX_ACCELERATOR": "v5litepod-16",
    "GSPAX_RUNTIME": "v2-alpha-tpuv5-lite",
    "GSPAX_IMAGE": "registry/gspax:1",
    "GSPAX_MACHINE": "ct5lp-hightpu-4t",
    "GSPAX_TPU": "tpu-v5-lite-podslice",
    "GSPAX_TOPOLOGY": "4x8",
    "GSPAX_CHIPS": "4",
    "GSPAX_RESTARTS": "5",
}
PLACE = ["--project=proj", "--zone=us-west4-a"]
EXPERIMENT = "experiments/some.py"

# Records its call as a line of JSON. FAKE_STATES: the outputs of `describe`, one per line. FAKE_FAIL: calls with this
# word fail. FAKE_HOST: the home directory of the only host, where `ssh` runs its command and to which `scp` copies.
FAKE = r"""#!{python} -IS
import json, os, shutil, subprocess, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
get = os.environ.get
if name != "sudo":
    with open(os.environ["FAKE_RECORD"], "a") as record:
        record.write(json.dumps([name, *words]) + "\n")
if get("FAKE_FAIL") and get("FAKE_FAIL") in words:
    sys.exit(7)
if name == "sudo":
    os.execvp(words[0], words)
if name == "systemctl" and words[0] == "is-active":
    print(state := get("FAKE_RUNNING") or "inactive")
    sys.exit(0 if state == "active" else 3)
if name == "gcloud" and words[:2] == ["projects", "describe"]:
    print(4242)
elif "describe" in words:
    states = open(get("FAKE_STATES")).read().split()
    open(get("FAKE_STATES"), "w").write("\n".join(states[1:]))
    if states[0] == "ABSENT":
        sys.exit("NOT_FOUND")
    print(states[0])
host = get("FAKE_HOST")
if host and "scp" in words:
    for word in words[words.index("scp") + 1 :]:
        if os.path.isfile(word):
            shutil.copyfile(word, os.path.join(host, os.path.basename(word)))
if host and "ssh" in words:
    command = next(word for word in words if word.startswith("--command=")).partition("=")[2]
    done = subprocess.run(["bash", "-c", command], cwd=host, env={{**os.environ, "HOME": host}})
    sys.exit(done.returncode)
"""


class Cloud:
    """A copy of the checkout, and a PATH with recording programs."""

    def __init__(self, folder, checkout):
        self.checkout, self.bin, self.record = folder / "checkout", folder / "bin", folder / "record"
        self.states = folder / "states"
        shutil.copytree(checkout, self.checkout)
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        for fake in FAKES:
            (self.bin / fake).write_text(FAKE.format(python=sys.executable))
            (self.bin / fake).chmod(0o755)
        (self.bin / "sleep").symlink_to(shutil.which("true"))
        home = folder / "home"
        home.mkdir()
        self.variables = {"PATH": str(self.bin), "HOME": str(home), "FAKE_RECORD": str(self.record)}
        self.variables |= {"FAKE_STATES": str(self.states), "GIT_CONFIG_GLOBAL": os.devnull}

    def run(self, script, *words, states=("ACTIVE",), settings=SETTINGS, **more):
        """The finished process and the calls that it made."""
        self.record.write_text("")
        self.states.write_text("\n".join(states))
        done = subprocess.run(
            [self.checkout / "tpu" / script, *words],
            env=self.variables | dict(settings) | more,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        calls = [json.loads(line) for line in self.record.read_text().splitlines()]
        return done, calls

    def calls(self, script, *words, **more):
        done, calls = self.run(script, *words, **more)
        assert done.returncode == 0, done.stderr
        return calls


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A repository with the scripts and one commit."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"needs {', '.join(missing)} on the PATH")
    folder = tmp_path_factory.mktemp("repository") / "checkout"
    shutil.copytree(TPU, folder / "tpu", ignore=shutil.ignore_patterns("config.sh"))
    (folder / "experiments").mkdir()
    (folder / EXPERIMENT).write_text("experiment = None\n")
    shutil.copy(ROOT / ".gitignore", folder)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(folder)]
    for words in (["init", "--quiet", "--template="], ["add", "."], ["commit", "--quiet", "--message=all"]):
        subprocess.run([*git, *words], check=True, env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull})
    return folder


@pytest.fixture
def cloud(tmp_path, checkout):
    return Cloud(tmp_path, checkout)


def queued(command, *words):
    return ["gcloud", "compute", "tpus", "queued-resources", command, *words, *PLACE]


def resource_commands(calls):
    """The commands on queued resources, in order, without queries of the state."""
    found = [call[4] for call in calls if call[3:4] == ["queued-resources"]]
    return [command for command in found if command != "describe"]


# The text of the scripts


@pytest.mark.parametrize("script", [*SCRIPTS, *SOURCED], ids=lambda path: str(path.relative_to(TPU)))
def test_bash_parses_every_script(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_shellcheck_finds_nothing():
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([program, *SCRIPTS, *SOURCED], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(TPU)))
def test_a_script_is_strict_short_and_executable(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ") and "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    assert len(text.splitlines()) <= 100


def test_the_example_has_every_setting():
    used = {name for path in SCRIPTS for name in re.findall(r"GSPAX_[A-Z]+", path.read_text())}
    example = set(re.findall(r"^: \"\$\{(GSPAX_[A-Z]+):=", (TPU / "config.example.sh").read_text(), re.MULTILINE))
    used -= {"GSPAX_SECRET"}  # GSPAX_SECRET_FILE, a variable of gspax itself
    assert used == example == {*SETTINGS, "GSPAX_SLICES", "GSPAX_SPOT"}


def test_the_page_names_files_that_exist():
    page = (ROOT / "docs" / "tpu.md").read_text()
    named = {word.rstrip(".") for word in re.findall(r"\btpu/[\w./]+", page)} - {"tpu/config.sh", "tpu/gspax.env"}
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]
    assert all(str(script.relative_to(ROOT)) in named for script in SCRIPTS)


# A dry run


CASES = [
    ("bucket.sh",),
    ("create.sh",),
    ("create.sh", "--spot", "--node-count", "3"),
    ("setup.sh",),
    ("run.sh", EXPERIMENT, "loss.clip_high=1e-3", 'name="it\'s $HOME"'),
    ("watch.sh",),
    ("doctor.sh",),
    ("resume.sh", "--spot", "--node-count=2", EXPERIMENT, "a.b=c"),
    ("delete.sh",),
    ("gke/create.sh", "--spot", "--node-count", "2"),
    ("gke/image.sh",),
    ("gke/run.sh", EXPERIMENT),
    ("gke/watch.sh",),
    ("gke/delete.sh",),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_dry_run_prints_the_calls_of_a_run_and_makes_none(cloud, case):
    script, *words = case
    states = ["SUSPENDED", "ACTIVE"] if script == "resume.sh" else ["ACTIVE"]
    calls = cloud.calls(script, *words, states=states)
    done, none = cloud.run(script, "--dry-run", *words)
    assert done.returncode == 0 and done.stderr == "" and none == []
    printed = [shlex.split(line)[1:] for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert calls and printed == json.loads(json.dumps(calls).replace("projects/4242", "projects/NUMBER"))


def test_a_dry_run_needs_no_programs(cloud):
    for fake in FAKES:
        (cloud.bin / fake).unlink()
    for script, *words in CASES:
        done, _ = cloud.run(script, "--dry-run", *words)
        assert done.returncode == 0 and done.stderr == "", script
    assert not (cloud.checkout / "build").exists()


def test_a_dry_run_checks_the_overrides_where_gspax_is_installed(cloud):
    words = (EXPERIMENT, "schedule.stpes=300")
    assert "The experiment is not checked" in cloud.run("run.sh", "--dry-run", *words)[0].stdout
    program = cloud.checkout / ".venv" / "bin" / "gspax"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/bash\necho "a plan"\necho "gspax: $*" >&2\nexit "${FAKE_CODE:-0}"\n')
    program.chmod(0o755)
    for script in ("run.sh", "resume.sh", "gke/run.sh"):
        done, calls = cloud.run(script, "--dry-run", *words, FAKE_CODE="2")
        assert (done.returncode, calls) == (2, []), script
        assert done.stderr == f"gspax: train {EXPERIMENT} schedule.stpes=300 --dry-run\n" and done.stdout == ""
        assert cloud.run(script, "--dry-run", *words)[0].returncode == 0


def test_every_script_has_a_dry_run_case():
    assert {case[0] for case in CASES} == {str(path.relative_to(TPU)) for path in SCRIPTS if path.parent.name != "host"}


# Queued resources


SCOPES = "--scopes=https://www.googleapis.com/auth/cloud-platform"
ASKED = ["pod", "--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", SCOPES]


@pytest.mark.parametrize(
    ("words", "settings", "more"),
    [
        ([], {}, ["--node-id=pod"]),
        (["--spot"], {}, ["--node-id=pod", "--spot"]),
        (["--node-count=1"], {"GSPAX_SPOT": "1"}, ["--node-id=pod", "--spot"]),
        (["--node-count", "4"], {}, ["--node-count=4", "--node-prefix=pod"]),
        ([], {"GSPAX_SLICES": "2"}, ["--node-count=2", "--node-prefix=pod"]),
    ],
)
def test_create_requests_slices_and_spot(cloud, words, settings, more):
    calls = cloud.calls("create.sh", *words, **settings)
    assert calls == [queued("create", *ASKED, *more), queued("describe", "pod", "--format=value(state.state)")]


def test_create_waits_until_the_resource_is_active(cloud):
    states = ["CREATING", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    done, calls = cloud.run("create.sh", states=states)
    assert done.returncode == 0 and len(calls) == 1 + len(states)
    shown = [line for line in done.stdout.splitlines() if not line.startswith("+")]
    assert shown == [f"pod: {state}" for state in dict.fromkeys(states)]


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED", "SUSPENDING", "DELETING", "ABSENT"])
def test_create_fails_if_the_resource_fails(cloud, state):
    done, _ = cloud.run("create.sh", states=["CREATING", state, "ACTIVE"])
    assert done.returncode == 1 and f"pod is {state}" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["ACTIVE"], ["ssh"]),
        (["SUSPENDED", "CREATING", "ACTIVE"], ["delete", "create", "scp", "ssh", "ssh"]),
        (["FAILED", "ACTIVE"], ["delete", "create", "scp", "ssh", "ssh"]),
        (["ABSENT", "ACTIVE"], ["create", "scp", "ssh", "ssh"]),
        (["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], ["scp", "ssh", "ssh"]),
    ],
)
def test_resume_recreates_what_is_missing_and_repeats_the_command(cloud, states, expected):
    command = [EXPERIMENT, "schedule.steps=20", "name='a b'"]
    calls = cloud.calls("resume.sh", "--spot", "--node-count", "2", *command, states=states)
    assert resource_commands(calls) == expected and sum("describe" in call for call in calls) == len(states)
    assert calls[-1] == cloud.calls("run.sh", *command)[-1]
    for call in calls:
        if "create" in call:
            assert call == queued("create", *ASKED, "--node-count=2", "--node-prefix=pod", "--spot")
        if "delete" in call:
            assert call == queued("delete", "pod", "--force", "--quiet")


def test_setup_and_run_reach_every_host_of_every_slice(cloud):
    scp, ssh = cloud.calls("setup.sh")
    everywhere = ["--node=all", "--worker=all"]
    files = [f"{cloud.checkout}/build/gspax.bundle", f"{cloud.checkout}/build/gspax.secret"]
    assert scp == queued("scp", *files, "pod:", *everywhere)
    assert ssh[:-3] == queued("ssh", "pod", *everywhere)[:-2]
    (ssh,) = cloud.calls("run.sh", EXPERIMENT)
    command = f"--command=bash gspax/tpu/host/run.sh gs://buck/sort {EXPERIMENT}"
    assert ssh == queued("ssh", "pod", *everywhere, command)


def test_doctor_checks_every_host_unless_a_run_is_active(cloud):
    (ssh,) = cloud.calls("doctor.sh")
    command = ssh[-3].removeprefix("--command=")
    assert ssh[:-3] == queued("ssh", "pod", "--node=all", "--worker=all")[:-2]
    assert ".venv/bin/gspax doctor --workdir gs://buck/doctor --secret-file ~/gspax.secret" in command
    done = subprocess.run(
        ["bash", "-c", f"systemctl() {{ echo active; }}; {command}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "gspax: a run is active here\n")


@pytest.mark.parametrize(("state", "expected"), [("ACTIVE", ["ssh", "delete"]), ("SUSPENDED", ["delete"])])
def test_delete_stops_the_run_first(cloud, state, expected):
    calls = cloud.calls("delete.sh", states=[state])
    assert resource_commands(calls) == expected
    assert state != "ACTIVE" or "systemctl stop gspax" in calls[1][-3]


def test_delete_deletes_even_if_the_run_cannot_be_stopped(cloud):
    done, calls = cloud.run("delete.sh", FAKE_FAIL="ssh")
    assert (
        done.returncode == 0 and resource_commands(calls) == ["ssh", "delete"] and "could not be stopped" in done.stderr
    )


@pytest.mark.parametrize(("state", "expected"), [("ACTIVE", ["ssh"]), ("PROVISIONING", []), ("ABSENT", [])])
def test_watch_follows_the_first_host(cloud, state, expected):
    done, calls = cloud.run("watch.sh", states=[state])
    assert done.returncode == 0 and f"pod: {state}" in done.stdout and resource_commands(calls) == expected
    assert not expected or calls[-1][5:8] == ["pod", "--node=0", "--worker=0"]


@pytest.mark.parametrize(
    ("case", "fails", "last"),
    [
        (("create.sh",), "create", "create"),
        (("setup.sh",), "scp", "scp"),
        (("resume.sh", EXPERIMENT), "create", "create"),
        (("gke/create.sh",), "node-pools", "node-pools"),
        (("gke/image.sh",), "build", "build"),
    ],
)
def test_a_command_that_fails_ends_the_script(cloud, case, fails, last):
    done, calls = cloud.run(*case, states=["SUSPENDED", "ACTIVE"], FAKE_FAIL=fails)
    assert done.returncode == 7 and last in calls[-1]


# On a host


@pytest.fixture
def host(cloud, tmp_path):
    """A host that executes what the scripts send, with recording programs in place of missing ones."""
    home = tmp_path / "host home"
    home.mkdir()
    cloud.variables["FAKE_HOST"] = str(home)
    return home


def test_setup_installs_the_last_commit_on_a_host(cloud, host):
    (cloud.checkout / EXPERIMENT).write_text("changed, not committed")
    done, calls = cloud.run("setup.sh")
    assert done.returncode == 0 and done.stderr == "gspax: uncommitted changes are not sent\n"
    assert (host / "gspax" / EXPERIMENT).read_text() == "experiment = None\n"
    sent = subprocess.run(["git", "bundle", "list-heads", host / "gspax.bundle"], check=True, capture_output=True)
    assert sent.stdout.split()[1:] == [b"HEAD"]  # and no other branch
    assert "systemd-run" not in [call[0] for call in calls]
    assert next(call for call in calls if call[:3] == ["uv", "pip", "install"])[-1] == ".[train,rewards,tpu]"
    assert ["apt-get", "install", "-qq", "--yes", "bubblewrap"] in calls


def test_a_host_without_a_package_server_is_set_up_without_the_sandbox(cloud, host):
    done, _ = cloud.run("setup.sh", FAKE_FAIL="bubblewrap")
    assert done.returncode == 0 and "bubblewrap could not be installed" in done.stderr


@pytest.mark.parametrize(
    "file", ["tpu/host/setup.sh", *(f"docker/{each}.Dockerfile" for each in ("cpu", "cuda", "tpu"))]
)
def test_every_script_and_image_installs_what_experiments_need(file):
    """Those that the repository ships: math-verify grades GSM8K and MATH, bubblewrap runs programs of the model."""
    text = (ROOT / file).read_text(encoding="utf-8")
    assert "bubblewrap" in text and ("requirements.lock" in text or "[train,rewards," in text)


def test_setup_gives_each_host_a_new_secret_that_no_command_shows(cloud, host):
    secrets = set()
    for _ in range(2):
        done, calls = cloud.run("setup.sh")
        secrets.add(secret := (host / "gspax.secret").read_text())
        assert re.fullmatch("[0-9a-f]{64}", secret) and secret not in done.stdout + done.stderr + str(calls)
        for file in (host / "gspax.secret", cloud.checkout / "build" / "gspax.secret"):
            assert file.stat().st_mode & 0o777 == 0o600
    assert len(secrets) == 2
    (start,) = [call for call in cloud.calls("run.sh", EXPERIMENT) if call[0] == "systemd-run"]
    assert f"--setenv=GSPAX_SECRET_FILE={host}/gspax.secret" in start


def test_variables_reach_a_run_by_a_file_that_no_command_shows(cloud, host):
    (cloud.checkout / "tpu" / "gspax.env").write_text("HF_TOKEN=hidden\n")
    done, calls = cloud.run("setup.sh")
    sent = host / "gspax.env"
    assert done.returncode == 0 and done.stderr == "" and "hidden" not in done.stdout + str(calls)
    assert sent.read_text() == "HF_TOKEN=hidden\n" and sent.stat().st_mode & 0o777 == 0o600
    (start,) = [call for call in cloud.calls("run.sh", EXPERIMENT) if call[0] == "systemd-run"]
    assert f"--property=EnvironmentFile=-{sent}" in start


def test_setup_twice_prints_no_warning_for_a_clean_checkout(cloud, host):
    assert cloud.run("setup.sh")[0].stderr == ""
    done, _ = cloud.run("setup.sh")
    assert done.returncode == 0 and done.stderr == ""


def test_setup_does_not_touch_a_running_host(cloud, host):
    cloud.calls("setup.sh")
    (host / "gspax" / "mark").write_text("")
    done, _ = cloud.run("setup.sh", FAKE_RUNNING="active")
    assert done.returncode == 1 and "a run is active here" in done.stderr and (host / "gspax" / "mark").exists()


def test_run_starts_a_unit_that_sigterm_stops_before_the_network_does(cloud, host):
    cloud.calls("setup.sh")
    words = [EXPERIMENT, 'name="it\'s"', "a.b=c d", "x=$HOME;ls"]
    calls = cloud.calls("run.sh", *words)
    (start,) = [call for call in calls if call[0] == "systemd-run"]
    options, command = start[1 : start.index("--")], start[start.index("--") + 1 :]
    assert command == [
        f"{host}/gspax/.venv/bin/gspax",
        "train",
        words[0],
        "--workdir",
        "gs://buck/sort",
        *words[1:],
    ]
    wanted = ["KillSignal=SIGTERM", "KillMode=mixed", "After=network-online.target"]
    wanted += ["Restart=on-failure", "RestartPreventExitStatus=2 3", "SuccessExitStatus=129 130 143"]
    assert {"--unit=gspax", *(f"--property={each}" for each in wanted)} <= {*options}


@pytest.mark.parametrize("state", ["active", "activating"])  # activating: systemd is about to start it again
def test_an_active_run_is_not_started_again(cloud, host, state):
    cloud.calls("setup.sh")
    calls = cloud.calls("run.sh", EXPERIMENT, FAKE_RUNNING=state)
    assert "systemd-run" not in [call[0] for call in calls]


# GKE


def jobset(cloud, *words, **more):
    yaml = pytest.importorskip("yaml")
    cloud.calls("gke/run.sh", *words, **more)
    return yaml.safe_load((cloud.checkout / "build" / "jobset.yaml").read_text())


def test_the_jobset_has_its_settings(cloud):
    words = ['name="it\'s"', "a.b=c d", "x=\\$HOME", "y={1: 2}"]
    made = jobset(cloud, "--node-count", "3", EXPERIMENT, *words)
    assert (made["apiVersion"], made["kind"], made["metadata"]["name"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet", "pod")
    (slices,) = made["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert slices["replicas"] == 3
    assert job["parallelism"] == job["completions"] == 8 and job["completionMode"] == "Indexed"  # 4 x 8 chips, 4 a host
    assert container["command"] == ["gspax", "train", EXPERIMENT, "--workdir", "gs://buck/sort", *words]
    assert container["resources"]["limits"] == {"google.com/tpu": 4} and container["image"] == "registry/gspax:1"
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"secret": "/secret"}
    assert volumes["secret"]["secret"] == {"secretName": "pod", "defaultMode": 0o400}
    assert container["env"] == [{"name": "GSPAX_SECRET_FILE", "value": "/secret/secret"}]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x8"


def test_the_jobset_restarts_after_a_preemption_but_not_where_that_cannot_help(cloud):
    spec = jobset(cloud, EXPERIMENT)["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2, 3]  # invalid input, diverged
    assert spec["failurePolicy"]["maxRestarts"] == 5
    (policy,) = spec["failurePolicy"]["rules"]
    assert (policy["action"], policy["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_a_jobset_starts_after_its_predecessor_is_gone(cloud):
    delete, *secret, apply = cloud.calls("gke/run.sh", EXPERIMENT)
    assert delete == ["kubectl", "delete", "jobset", "pod", "--ignore-not-found", "--cascade=foreground"]
    file = cloud.checkout / "build" / "gspax.secret"
    assert secret == [
        ["kubectl", "delete", "secret", "pod", "--ignore-not-found"],
        ["kubectl", "create", "secret", "generic", "pod", f"--from-file=secret={file}"],
    ]
    assert file.stat().st_mode & 0o777 == 0o600 and len(file.read_text()) == 64
    assert apply == ["kubectl", "apply", "-f", f"{cloud.checkout}/build/jobset.yaml"]


def test_a_cluster_has_a_pool_for_each_slice(cloud):
    calls = cloud.calls("gke/create.sh", "--spot", "--node-count", "2")
    pools = [call for call in calls if "node-pools" in call]
    assert [pool[4] for pool in pools] == ["slice-0", "slice-1"]
    for pool in pools:
        assert {"--tpu-topology=4x8", "--num-nodes=8", "--machine-type=ct5lp-hightpu-4t", "--spot"} <= {*pool}
    assert calls[-1][-1].endswith(
        "projects/4242/locations/global/workloadIdentityPools/proj.svc.id.goog/subject/ns/default/sa/gspax"
    )


# Invalid input


def wrong(cloud, *words, **more):
    """The error printed for invalid input, before any call."""
    done, calls = cloud.run(*words, **more)
    assert done.returncode == 2 and calls == [] and done.stdout == "", done
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("gspax: ")
    return sentence


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (("bucket.sh",), "BUCKET"),
        (("create.sh",), "PROJECT"),
        (("create.sh", "--dry-run"), "ZONE"),
        (("create.sh",), "RUNTIME"),
        (("run.sh", EXPERIMENT), "BUCKET"),
        (("run.sh", EXPERIMENT), "RUN"),
        (("watch.sh",), "NAME"),
        (("doctor.sh",), "BUCKET"),
        (("resume.sh", EXPERIMENT), "ACCELERATOR"),
        (("delete.sh",), "NAME"),
        (("gke/create.sh",), "MACHINE"),
        (("gke/image.sh",), "IMAGE"),
        (("gke/run.sh", EXPERIMENT), "TPU"),
        (("gke/watch.sh",), "NAME"),
        (("gke/delete.sh",), "PROJECT"),
    ],
)
def test_a_missing_setting_is_named(cloud, case, name):
    settings = {key: value for key, value in SETTINGS.items() if key != f"GSPAX_{name}"}
    assert f"GSPAX_{name} is not set" in wrong(cloud, *case, settings=settings)
    assert f"GSPAX_{name} is not set" in wrong(cloud, *case, settings=settings | {f"GSPAX_{name}": ""})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["create.sh", "--sopt"], "create.sh has no option --sopt"),
        (["create.sh", "--node-count", "two"], "wanted an integer of at least 1, got 'two'"),
        (["create.sh", "--node-count=0"], "wanted an integer of at least 1, got '0'"),
        (["create.sh", "--node-count"], "wanted an integer of at least 1, got ''"),
        (["run.sh"], "wanted an experiment file"),
        (["run.sh", "experiments/none.py"], "experiments/none.py: wanted an experiment file"),
        (["run.sh", "/etc/hostname"], "/etc/hostname: wanted an experiment file"),
        (["resume.sh", "--spot"], "wanted an experiment file"),
        (["gke/run.sh"], "wanted an experiment file"),
    ],
)
def test_an_invalid_command_line_is_one_error(cloud, words, sentence):
    assert sentence in wrong(cloud, *words)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("TOPOLOGY", "4", "wanted the chips along each dimension, as in 4x4, got '4'"),
        ("TOPOLOGY", "4xa", "wanted the chips along each dimension"),
        ("CHIPS", "0", "GSPAX_CHIPS: wanted an integer of at least 1"),
        ("CHIPS", "5", "GSPAX_CHIPS: wanted a divisor of the 32 chips of a slice, got 5"),
        ("RESTARTS", "many", "GSPAX_RESTARTS: wanted an integer of at least 1, got 'many'"),
        ("SLICES", "", "wanted an integer of at least 1, got ''"),
    ],
)
def test_an_invalid_setting_is_one_error(cloud, name, value, sentence):
    assert sentence in wrong(cloud, "gke/run.sh", EXPERIMENT, settings=SETTINGS | {f"GSPAX_{name}": value})


@pytest.mark.parametrize(("script", "program"), [("create.sh", "gcloud"), ("gke/watch.sh", "kubectl")])
def test_a_missing_program_is_named(cloud, script, program):
    (cloud.bin / program).unlink()
    assert f"{program} is not installed" in wrong(cloud, script)


def test_help_prints_the_header_of_the_script(cloud):
    done, calls = cloud.run("run.sh", "--help", settings={})
    assert done.returncode == 0 and calls == [] and done.stdout.splitlines()[0].startswith("Starts an experiment on")
    assert "tpu/run.sh [--dry-run] experiments/sort_gspo.py [a.b=c ...]" in done.stdout and "#" not in done.stdout


# Sources of settings


def test_options_override_the_environment_which_overrides_the_file(cloud):
    shutil.copy(cloud.checkout / "tpu" / "config.example.sh", cloud.checkout / "tpu" / "config.sh")
    (call, _) = cloud.calls("create.sh", settings={})
    assert call[5] == "gspax" and "--project=my-project" in call and "--node-id=gspax" in call
    (call, _) = cloud.calls("create.sh", settings={"GSPAX_NAME": "mine", "GSPAX_SLICES": "2"})
    assert call[5] == "mine" and "--project=my-project" in call and "--node-count=2" in call
    (call, _) = cloud.calls("create.sh", "--node-count=3", settings={"GSPAX_SLICES": "2"})
    assert "--node-count=3" in call


def test_another_settings_file_can_be_named(cloud, tmp_path):
    (tmp_path / "other.sh").write_text("GSPAX_PROJECT=theirs\n")
    calls = cloud.calls("watch.sh", GSPAX_TPU_CONFIG=str(tmp_path / "other.sh"))
    assert "--project=theirs" in calls[0]
    assert "there is no file none.sh" in wrong(cloud, "watch.sh", GSPAX_TPU_CONFIG="none.sh")
