"""The lock file, the Dockerfiles by the rules that hadolint has for them, and what a message says to install."""

import configparser
import importlib.metadata
import json
import re
import shlex
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gspax import errors

ROOT = Path(__file__).parents[1]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PLATFORMS = [
    {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1", "sys_platform": system}
    for minor in (11, 12, 13, 14)
    for system in ("linux", "darwin")
]


def read_requirements(name):
    """The requirements of a file with their hashes: each line of it, continued after a backslash."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [
        (Requirement(line.partition(" --hash")[0]), re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line))
        for line in lines
    ]


def versions(name, platform):
    """The version of each package that a file pins on a platform."""
    pins = {}
    for requirement, _ in read_requirements(name):
        if requirement.marker is None or requirement.marker.evaluate(platform):
            (pin,) = requirement.specifier
            assert pin.operator == "==" and canonicalize_name(requirement.name) not in pins
            pins[canonicalize_name(requirement.name)] = pin.version
    return pins


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: "-".join(platform.values()))
def test_the_lock_file_has_the_versions_of_the_requirements(platform):
    wanted, locked = versions("requirements.txt", platform), versions("requirements.lock", platform)
    assert len(wanted) >= 20
    assert {name: locked.get(name) for name in wanted} == wanted


def test_the_lock_file_has_what_the_requirements_need():
    """The packages that those installed here require, and so on."""
    needed = [name for name in versions("requirements.txt", {})]
    for name in needed:
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            other = canonicalize_name(requirement.name)
            if other not in needed and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                needed.append(other)
    assert len(needed) > 40
    assert not {*needed} - versions("requirements.lock", {}).keys()


def test_every_locked_package_has_a_hash_and_none_names_an_index():
    assert all(hashes for _, hashes in read_requirements("requirements.lock"))
    assert "//" not in (ROOT / "requirements.lock").read_text(encoding="utf-8")


def instructions(image):
    """(name, arguments) of each instruction, without comments, continued after a backslash."""
    text = re.sub(r"^#.*\n", "", image.read_text(encoding="utf-8"), flags=re.M).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_an_image_follows_the_rules(image):
    """The rules of hadolint that apply: DL3000, 3002, 3006, 3007, 3013, 3020, 3025, 3042."""
    found = instructions(image)
    named = {name: [rest for word, rest in found if word == name] for name, _ in found}
    assert {*named} <= {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "ENTRYPOINT", "CMD"} and found[0][0] == "FROM"
    assert all(re.fullmatch(r"[\w/]+:\d[\w.-]*", base) for base in named["FROM"]), "a base image with its version"
    assert all(path.startswith("/") for path in named["WORKDIR"])
    for command in named["RUN"]:
        if "pip install" in command:
            assert "--no-cache-dir" in command
            assert any(option in command for option in ("--require-hashes", "--constraint", "--no-deps")), "pinned"
    assert "root" not in named.get("USER", []) and ("USER" in named or image.stem == "tpu"), "a TPU needs root"
    assert named["ENTRYPOINT"] == ['["gspax"]'], "the list form: no shell between SIGTERM and gspax"
    assert all(command.startswith('["') for command in named.get("CMD", []))


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_the_files_of_an_image_exist_and_are_sent(image):
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    sources = [path for word, rest in instructions(image) if word == "COPY" for path in rest.split()[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    assert all(any(fnmatch(source, line[1:]) for line in ignored if line.startswith("!")) for source in sources)


def test_there_is_an_image_for_each_platform():
    assert [image.stem for image in IMAGES] == ["cpu", "cuda", "tpu"]
    extras = {image.stem: re.findall(r"'\.\[([\w,]+)\]'", image.read_text()) for image in IMAGES}
    assert extras == {"cpu": [], "cuda": ["train,rewards,gpu"], "tpu": ["train,rewards,tpu"]}


# What a message says to install


def install(monkeypatch, origin, prefix="/elsewhere"):
    """`how_to_install` in an environment whose gspax was installed from there."""
    installed = SimpleNamespace(read_text={"direct_url.json": origin and json.dumps(origin)}.get)
    beside = SimpleNamespace(read_text=lambda name: None)  # src/gspax.egg-info
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter([beside, installed]))
    monkeypatch.setattr(sys, "prefix", str(prefix))
    return errors.how_to_install("rewards")


@pytest.mark.parametrize("folder", ["clone", "my clone"])
def test_a_message_says_how_to_install_an_extra_in_this_environment(monkeypatch, tmp_path, folder):
    clone = tmp_path / folder
    clone.mkdir()
    origin = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    unknown = "pip install '.[rewards]' in a clone of gspax, see docs/install.md"
    assert install(monkeypatch, origin) == unknown  # the clone is gone
    (clone / "setup.cfg").touch()
    words = shlex.split(install(monkeypatch, origin))
    assert words == ["pip", "install", "--constraint", f"{clone}/requirements.txt", "--editable", f"{clone}[rewards]"]
    assert install(monkeypatch, origin, clone / ".venv") == f"make extras NAMES=rewards in {clone}"
    copied = install(monkeypatch, {"url": clone.as_uri(), "dir_info": {}}, clone / ".venv")
    assert shlex.split(copied) == ["pip", "install", f"{clone}[rewards]"]
    for other in ("https://example.org/gspax.whl", "git+https://example.org/gspax"):
        assert install(monkeypatch, {"url": other}) == unknown
    assert install(monkeypatch, None) == unknown


def test_no_message_has_an_install_command_of_its_own():
    found = [file.name for file in (ROOT / "src").rglob("*.py") if "pip install" in file.read_text(encoding="utf-8")]
    assert found == ["errors.py"]


@pytest.mark.parametrize(("package", "next_version"), [("orbax-checkpoint", "1.0"), ("transformers", "6.0")])
def test_no_extra_takes_an_announced_version_that_replaces_what_is_used(package, next_version):
    """Orbax says so of 1.0; transformers 5 did it to what 4 had."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = "\n".join(setup["options.extras_require"].values())
    found = [Requirement(line) for line in extras.splitlines() if line.startswith(package)]
    assert found and not any(each.specifier.contains(next_version) for each in found)
