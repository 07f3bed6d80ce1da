"""The worker of `gspax.rewards.code`: runs programs in sandboxes and reports what they wrote. A script, see `_pool`.

    _code_worker.py ISOLATION PYTHON FILTER

It is not the trainer, so that no sandbox is forked from a process with devices, and it never gets an expected output.
Standard input, output and errors of a program are unlinked files, so nothing has to be pumped, and RLIMIT_FSIZE bounds
them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import marshal
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_NOBODY = 65534
_SCRATCH = 16 << 20  # bytes of /tmp in the sandbox
_NAMES = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""


def run(task: dict[str, Any], isolation: str, python: str, filter: bytes) -> dict[str, Any]:
    """{"status": "exited" or "timeout", "code": exit status, "output": text, "errors": the last of them}."""
    with contextlib.ExitStack() as stack:
        given, output, errors, file, rules = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(5))
        _fill(given, task["input"].encode(errors="replace"))
        _fill(rules, filter)
        alone = isolation != "bubblewrap"
        inner = {key: task[key] for key in ("code", "function", "arguments")}
        inner |= {"limits": _limits(task, alone), "names": _NAMES}
        inner |= {"filter": filter if alone else b"", "parent": os.getpid() if alone else 0}
        _fill(file, marshal.dumps(inner, 2))
        command = [python, "-I", "-S", "-B", "-c", _child(), str(file.fileno())]
        folder = "/" if not alone else stack.enter_context(_private_folder())
        process = subprocess.Popen(
            command if alone else [*_bubblewrap(python, rules.fileno() if filter else None), *command],
            stdin=given,
            stdout=output,
            stderr=errors,
            pass_fds=(file.fileno(), rules.fileno()),
            env={},
            cwd=folder,
            start_new_session=True,
            **_unprivileged(),
        )
        try:
            process.wait(task["timeout"])
            status = "exited"
        except subprocess.TimeoutExpired:
            status = "timeout"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return {
            "status": status,
            "code": process.returncode,
            "output": _read(output, 0, task["output"]),
            "errors": _read(errors, -500, 500),
        }


@functools.cache
def _child() -> str:
    return Path(__file__).with_name("_code_child.py").read_text(encoding="utf-8")


def _limits(task: dict[str, Any], alone: bool) -> dict[str, int]:
    limits = {
        "RLIMIT_AS": task["memory"],
        "RLIMIT_CPU": int(task["timeout"]) + 1,
        "RLIMIT_FSIZE": task["output"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    # Counted in the namespace; without one, all processes of the user on the machine would count.
    return limits if alone else limits | {"RLIMIT_NPROC": task["processes"]}


def _bubblewrap(python: str, rules: int | None) -> list[str]:
    """The command that runs what follows it: no network, no other process, a read-only system, a small /tmp."""
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--cap-drop",
        "ALL",
    ]
    command += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    prefix = str(Path(python).resolve().parents[1])
    if prefix != "/" and not f"{prefix}/".startswith("/usr/"):
        command += ["--ro-bind", prefix, prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(_SCRATCH), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return command if rules is None else [*command, "--seccomp", str(rules)]


def _unprivileged() -> dict[str, Any]:
    """Root is bound by no number of processes, in no namespace: it becomes nobody before the sandbox is made."""
    return {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


@contextlib.contextmanager
def _private_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        yield folder


def _fill(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.seek(0)


def _read(file: IO[bytes], start: int, most: int) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(start if start >= 0 else max(0, size + start))
    return file.read(most).decode(errors="replace")


def _trial(isolation: str, python: str, filter: bytes) -> str | None:
    """Why a sandbox cannot be had here, or None."""
    task: dict[str, Any] = {"code": "print(6 * 7)", "function": None, "arguments": [], "input": "", "timeout": 60.0}
    task |= {"memory": 256 << 20, "output": 1 << 20, "processes": 8}
    try:
        result = run(task, isolation, python, filter)
    except OSError as error:
        return str(error)
    return None if result["output"] == "42\n" else f"exit status {result['code']}: {result['errors'].strip()}"


def main() -> None:
    isolation, python, filter = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
    no_filter = isolation != "bubblewrap" and not filter
    problem = "it needs seccomp on x86-64" if no_filter else _trial(isolation, python, filter)
    print(
        json.dumps({"ready": True} if problem is None else {"error": f"no sandbox ({isolation}): {problem}"}),
        flush=True,
    )
    if problem is None:
        for line in sys.stdin:
            began = time.monotonic()
            result = run(json.loads(line), isolation, python, filter)
            print(json.dumps(result | {"seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
