"""The wheel and the source distribution can be built and installed, and contain the whole package.

No network is needed: the build uses this environment's setuptools, and the new environment finds the dependencies
installed here through a .pth file, but no other gspax than its own.
"""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import gspax

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gspax"
KINDS = ("*.py", "*.css", "*.html", "*.js", "py.typed")
PACKAGE = sorted(f"gspax/{path.relative_to(SOURCE).as_posix()}" for kind in KINDS for path in SOURCE.rglob(kind))


def run(*command, cwd):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the files that a build reads, because the build writes next to them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    for name in PACKAGE:
        target = folder / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / "src" / name).read_bytes())
    return folder


def build(kind, checkout, target):
    hook = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    return target / run(sys.executable, "-c", hook, cwd=checkout).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory):
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


def test_the_wheel_contains_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        metadata = archive.read(f"gspax-{gspax.__version__}.dist-info/METADATA").decode()
    assert sorted(names) == sorted(PACKAGE)
    assert "Requires-Dist: jax" in metadata and "License-File: LICENSE" in metadata


def test_the_source_distribution_contains_the_package(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in PACKAGE} <= names
    assert {"pyproject.toml", "setup.cfg", "README.md", "LICENSE"} <= names


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_into_an_empty_environment(kind, request, tmp_path):
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--ignore-installed"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", site]
    run(*pip, request.getfixturevalue(kind), cwd=tmp_path)
    # What is installed here without the editable gspax: a .pth file in a folder added by a .pth file is not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = "import gspax.losses, gspax.config; from pathlib import Path; print(Path(gspax.__file__).parent)"
    assert Path(run(python, "-I", "-c", where, cwd=tmp_path).strip()) == site / "gspax"
    assert (site / "gspax" / "py.typed").exists()
    assert run(python, "-I", "-m", "gspax", "--version", cwd=tmp_path).split() == ["gspax", gspax.__version__]
    entry = "from importlib.metadata import entry_points as e; print(*[p.value for p in e(name='gspax')])"
    assert run(python, "-I", "-c", entry, cwd=tmp_path).split()[0] == "gspax.commands.main:program"


def test_all_versions_are_equal():
    lines = [*(ROOT / "setup.cfg").read_text().splitlines(), *(ROOT / "CITATION.cff").read_text().splitlines()]
    found = [line.replace("=", ":").split(":")[1].strip() for line in lines if line.startswith("version")]
    assert found == [gspax.__version__] * 2
    released = re.findall(r"^## (\d\S*) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0][0] == gspax.__version__
    assert f"date-released: {released[0][1]}\n" in (ROOT / "CITATION.cff").read_text()
