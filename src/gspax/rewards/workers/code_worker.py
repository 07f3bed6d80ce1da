"""The script of the workers of `gspax.rewards.code`: it runs programs in sandboxes and reports their output.

    code_worker.py ISOLATION PYTHON

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
from pathlib import Path
from typing import IO, Any

_NOBODY = 65534
_SCRATCH = 16 << 20  # bytes of /tmp in the sandbox
_IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""


def run(task: dict[str, Any], isolation: str, python: str) -> dict[str, Any]:
    """{"status": "exited" or "timeout", "code": exit status, "output": text, "errors": the last of them}."""
    with contextlib.ExitStack() as stack:
        given, output, errors, file = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        _fill(given, task["input"].encode(errors="replace"))
        sandboxed = isolation == "bubblewrap"
        inner = {key: task[key] for key in ("code", "function", "arguments")}
        inner |= {"limits": _limits(task, sandboxed), "imports": _IMPORTS, "seconds": task["timeout"] + 1}
        _fill(file, marshal.dumps(inner, 2))
        command = [python, "-I", "-S", "-B", "-c", _child(), str(file.fileno())]
        folder = "/" if sandboxed else stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        process = subprocess.Popen(
            [*_bubblewrap(python), *command] if sandboxed else command,
            stdin=given,
            stdout=output,
            stderr=errors,
            pass_fds=(file.fileno(),),
            env={},
            cwd=folder,
            start_new_session=True,
            **(_unprivileged() if sandboxed else {}),
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
    return Path(__file__).with_name("code_child.py").read_text(encoding="utf-8")


def _limits(task: dict[str, Any], sandboxed: bool) -> dict[str, int]:
    limits = {
        "RLIMIT_AS": task["memory"],
        "RLIMIT_CPU": int(task["timeout"]) + 1,
        "RLIMIT_FSIZE": task["output"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    if sys.platform == "darwin":
        del limits["RLIMIT_AS"]  # macOS refuses it
    # Counted in the namespace; without one, all processes of the user on the machine would count.
    return limits | {"RLIMIT_NPROC": task["processes"]} if sandboxed else limits


@functools.cache
def _bubblewrap(python: str) -> list[str]:
    """The command that runs what follows it: no network, no other process, a read-only system, a small /tmp."""
    program = shutil.which("bwrap") or "bwrap"
    command = [program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv"]
    if "--disable-userns" in subprocess.run([program, "--help"], capture_output=True, text=True).stdout:  # since 0.8
        command.append("--disable-userns")
    command += ["--cap-drop", "ALL", "--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    prefix = str(Path(python).resolve().parents[1])
    if prefix != "/" and not f"{prefix}/".startswith("/usr/"):
        command += ["--ro-bind", prefix, prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    return [*command, "--size", str(_SCRATCH), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]


def _unprivileged() -> dict[str, Any]:
    """Root is bound by no number of processes, in no namespace: it becomes nobody before the sandbox is made."""
    return {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _fill(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.seek(0)


def _read(file: IO[bytes], start: int, most: int) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(start if start >= 0 else max(0, size + start))
    return file.read(most).decode(errors="replace")


def _trial(isolation: str, python: str) -> str | None:
    """Why no program can be run here, or None."""
    task: dict[str, Any] = {"code": "print(6 * 7)", "function": None, "arguments": [], "input": "", "timeout": 60.0}
    task |= {"memory": 256 << 20, "output": 1 << 20, "processes": 8}
    try:
        result = run(task, isolation, python)
    except OSError as error:
        return str(error)
    return None if result["output"] == "42\n" else f"exit status {result['code']}: {result['errors'].strip()}"


def main() -> None:
    isolation, python = sys.argv[1:]
    with contextlib.suppress(OSError):  # if memory runs out, the kernel ends programs before the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    problem = _trial(isolation, python)
    if problem is not None:
        sentence = f"isolation: wanted to run a program with {isolation!r}, got {problem}"
        if isolation == "bubblewrap":
            sentence += "; the machine must permit user namespaces (docs/rewards.md, Programs)"
        print(json.dumps({"error": sentence}), flush=True)
    else:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            began = time.monotonic()
            result = run(json.loads(line), isolation, python)
            print(json.dumps(result | {"seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
