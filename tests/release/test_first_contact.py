"""The first things that a new user tries work as they are: the steps of the CPU image, and the notebook.

No network is needed: the packages of requirements.lock are those installed here, found through a .pth file.
"""

import json
import os
import re
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from api import RunDir
from few_devices import few_devices

import gspax
from gspax.experiment import describe, load, override

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "docker" / "cpu.Dockerfile"
NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"


def copy(sources, target):
    """As COPY does with folders: their content."""
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, target)


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    """(working directory, environment, entry point, command) after the steps of the CPU image."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder / "env", symlinks=True, with_pip=True)
    environment = {
        "PATH": f"{folder / 'env' / 'bin'}:/usr/bin:/bin",
        "HOME": str(folder),
        "PIP_NO_INDEX": "1",
        "PIP_IGNORE_INSTALLED": "1",
    }
    environment |= {name: value for name, value in os.environ.items() if name.startswith("GSPAX_")}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # two steps take less time than XLA's costly passes
    work, words = folder, {}
    for line in IMAGE.read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(" ")
        if name == "WORKDIR":
            work = folder / rest.lstrip("/")
            work.mkdir()
        elif name == "COPY":
            *sources, target = rest.split()
            copy(sources, work / target)
        elif name == "ENV":
            environment |= dict(pair.split("=") for pair in rest.split())
        elif name in ("ENTRYPOINT", "CMD"):
            words[name] = json.loads(rest)
        elif name == "RUN" and "requirements.lock" in rest:
            (site,) = (folder / "env" / "lib").glob("python*/site-packages")
            # the hook of the editable install here is not read in a folder that a .pth file adds
            for bundled in site.glob("setuptools*"):  # with Python 3.11
                shutil.rmtree(bundled)
            (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        elif name == "RUN" and "useradd" not in rest and "apt-get" not in rest:
            subprocess.run(rest, shell=True, cwd=work, env=environment, check=True, timeout=300)
    return work, environment, words["ENTRYPOINT"], words["CMD"]


def start(container, *arguments):
    """The output of a container that is started with these arguments."""
    work, environment, entry, command = container
    program = [f"{environment['PATH'].partition(':')[0]}/{entry[0]}", *entry[1:]]
    done = subprocess.run(
        [*program, *(arguments or command)], cwd=work, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_steps_of_the_cpu_image_install_gspax(container):
    assert start(container, "--version") == f"gspax {gspax.__version__}\n"
    work, environment, *_ = container
    python = Path(environment["PATH"].partition(":")[0]) / "python"
    code = "import gspax; print(gspax.__file__)"
    where = subprocess.run([python, "-c", code], cwd=work, env=environment, capture_output=True, text=True, check=True)
    assert Path(where.stdout.strip()).is_relative_to(python.parents[1])


def test_the_cpu_image_shows_a_dry_run_and_trains(container):
    assert "124,544 parameters" in start(container)
    (usage,) = re.findall(r"gspax:cpu (train .*)$", IMAGE.read_text(), re.M)
    small = ["warm_start.steps=2", "schedule.steps=2", "evaluation.problems=16"]
    start(container, *usage.split(), *small)
    assert (container[0] / "runs" / "sort_gspo" / "report.html").is_file()


def cells(kind):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_trains_plots_and_reads_samples(tmp_path, monkeypatch, capsys):
    """Its cells one after the other, as a kernel runs them, with fewer steps: the README's run, which is healthy."""
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    plt.switch_backend("agg")
    namespace = {"__name__": "__main__"}
    for cell in cells("code"):
        source = "".join(cell["source"]).replace("STEPS = 150", "STEPS = 10")
        with few_devices(1):
            exec(compile(source, cell["id"], "exec"), namespace)
    readme = override(load(ROOT / "experiments" / "sort_gspo.py"), ["name=first_run", "schedule.steps=10"])
    assert describe(namespace["experiment"]) == describe(readme)
    (figure,) = shown
    drawn = {axis.get_title(loc="left"): {len(line.get_xdata()) for line in axis.lines} for axis in figure.axes}
    assert drawn == {"Reward": {10}, "Held-out reward": {2}, "Entropy": {10}, "Clipped": {10}}
    out = capsys.readouterr().out
    table = out[out.index("prompt    answer") :].splitlines()
    assert all(re.fullmatch(r"\d+= +\d+ +\S* \([01]\) +\S* \([01]\)", line) for line in table[1:11])
    assert "None of the usual causes of a flat reward shows." in out
    assert "eval/reward" in table[11] and RunDir(tmp_path / "runs" / "first_run").metrics.exists()
    plt.close(figure)


def test_the_notebook_links_to_no_unknown_address_and_holds_no_output():
    """A badge needs an address that exists; outputs would go stale."""
    assert not re.search(r"\]\([^)]*OWNER", "".join("".join(cell["source"]) for cell in cells("markdown")))
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells("code"))
