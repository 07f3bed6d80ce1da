"""A run whose worker dies ends, and has run every test but that one."""

import re
import subprocess
import sys
from pathlib import Path

DIES = "import os\n\ndef test_before(): pass\ndef test_dies(): os._exit(7)\ndef test_after(): pass\n"
ONE = "import time\n\ndef test_one(): time.sleep(0.2)\n"


def test_a_run_ends_after_a_worker_has_died(tmp_path):
    """Its files of one test are those that xdist would wait for: a worker runs its last test when another one comes."""
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(DIES if number == 3 else ONE)
    options = [
        "-n2",
        "--dist=loadfile",
        "--no-loadscope-reorder",
        "-p",
        "file_schedule",
        "-p",
        "no:cacheprovider",
        "-rA",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    passed = sorted(re.findall(r"^PASSED (\S+)", done.stdout, re.M))
    names = [f"test_{number}.py::test_one" for number in (0, 1, 2, 4, 5)]
    assert passed == sorted([*names, "test_3.py::test_after", "test_3.py::test_before"]), done.stdout
    assert done.returncode == 1 and "1 failed, 7 passed" in done.stdout
