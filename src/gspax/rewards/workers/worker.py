"""The script of the worker processes of `gspax.rewards.math`, `guard` and `code`.

    worker.py math | guard | code ISOLATION PYTHON

It imports nothing of gspax until it runs a user's function, so that it starts fast and takes no device; `pool` has
its protocol. A late worker is killed by its parent, and exits by its own timer if the parent is gone.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import logging
import marshal
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

Answer = Callable[..., object]  # answers a task, given its arguments


class Ran(NamedTuple):
    """How a program ended, with its output."""

    status: str  # "exited", "timeout", or why its worker was lost
    code: int  # exit status
    output: str
    errors: str  # the end of standard error

    def last_error(self) -> str:
        """Return the last line of the errors, or the exit status."""
        return (self.errors.strip().splitlines() or [f"exit status {self.code}"])[-1]


def main() -> None:
    """Answer tasks from stdin, one line of JSON each, until it is closed."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the prints of a reward or a library must not be taken for answers
    kind, *arguments = sys.argv[1:]
    start: dict[str, Callable[..., Answer]]
    start = {"math": serve_math, "guard": lambda: call_reward, "code": serve_code}
    try:
        answer = start[kind](*arguments)
    except RuntimeError as error:
        print(json.dumps({"error": str(error)}), file=channel)
        return
    print(json.dumps({"ready": True}), file=channel)
    for line in sys.stdin:
        task, seconds = json.loads(line)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a reward may use the timer itself
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        result = answer(*task)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(result), file=channel)


# Pairs of answers, compared by math-verify. Its own time limit is off: it uses a Python signal handler, which a long
# operation in C never reaches.

_COMPARISON_MEMORY = 1 << 30  # bytes of address space; powers of powers run into it


def serve_math() -> Answer:
    """Return `equal`. RuntimeError if math-verify is not installed."""
    logging.disable()
    limit_memory()
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        from gspax.errors import how_to_install

        raise RuntimeError(f"wanted math-verify ({how_to_install('rewards')}), got: {error}") from error
    return equal


def equal(expected: str, answer: str) -> bool:
    """Return whether math-verify takes `answer` for the expected one; False if it cannot compare them."""
    import math_verify

    try:
        # The cache is for expected answers, which the samples of a group share.
        parsed = _parse.__wrapped__(answer)
        wanted = _parse(expected)
        same = bool(math_verify.verify(wanted, parsed, timeout_seconds=None, allow_set_relation_comp=True))
        percent = "%" in expected or "%" in answer  # math-verify reads a percentage in two ways
        return same and (percent or not _differ(wanted, parsed))
    except Exception:
        return False


def _differ(wanted: Any, got: Any) -> bool:
    """Return whether two exact numbers differ, however small they are: math-verify rounds to 6 decimals."""
    import sympy

    pair = [each[0] for each in (wanted, got) if each]
    if len(pair) < 2 or not all(isinstance(each, sympy.Expr) and each.is_number for each in pair):
        return False
    if any(each.atoms(sympy.Float) for each in pair):
        return False
    first, second = (each.evalf(30) for each in pair)
    return bool(abs(first - second) > 1e-9 * max(abs(first), abs(second)))


@functools.lru_cache(maxsize=4096)
def _parse(answer: str) -> object:
    import math_verify

    return math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)


def limit_memory() -> None:
    """Limit the address space, except on macOS, which rejects that, and disable core dumps."""
    if sys.platform != "darwin":
        resource.setrlimit(resource.RLIMIT_AS, (_COMPARISON_MEMORY, _COMPARISON_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# Reward functions. Everything that is unpickled comes from the trainer that started this process.


def call_reward(path: list[str], reward: str, problem: str, completion: str) -> tuple[str, object]:
    """Call a pickled reward function; return an outcome, and its value (`scores.pack`) or what went wrong.

    `path` is the trainer's `sys.path`.
    """
    sys.path[:] = path
    try:
        function = _load(reward)
    except Exception as error:
        return "unusable", f"{type(error).__name__}: {error}"
    try:
        value = function(_load(problem), completion)
    except Exception as error:
        from gspax.errors import UserError, describe_error

        is_setting = isinstance(error, UserError)
        return ("refused", str(error)) if is_setting else ("raised", describe_error(error))
    from gspax.rewards.scores import pack, to_result

    result = to_result(value)
    return ("done", pack(value)) if result.rewards else ("no number", result.error)


@functools.lru_cache(maxsize=64)
def _load(pickled: str) -> Any:
    return pickle.loads(base64.b64decode(pickled))


# Programs in sandboxes. The trainer does not start them, so that no sandbox is forked from a process with devices;
# no expected output comes here. Standard input, output and errors of a program are unlinked files: nothing has to be
# pumped, and RLIMIT_FSIZE limits them.

_NOBODY = 65534
_SCRATCH = 16 << 20  # bytes of /tmp in the sandbox
# Modules whose names a program may use without an import, as in LiveCodeBench's harness; later ones hide earlier ones.
_MODULES = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys"
_MODULES += " json typing"


def serve_code(isolation: str, python: str) -> Answer:
    """Return `run` in this isolation. RuntimeError if it cannot run a program here."""
    with contextlib.suppress(OSError):  # if memory runs out, the kernel ends programs before the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        limits = {"timeout": 60.0, "memory": 256, "output": 1, "processes": 8}
        ran = run("print(6 * 7)", None, "", limits, isolation=isolation, python=python)
        problem = "" if ran.output == "42\n" else f"exit status {ran.code}: {ran.errors.strip()}"
    except OSError as error:
        problem = str(error)
    if problem:
        advice = "; the machine must permit user namespaces (docs/rewards.md, Programs)"
        raise RuntimeError(
            f"isolation: wanted to run a program with {isolation!r}, got {problem}"
            f"{advice if isolation == 'bubblewrap' else ''}"
        )
    return functools.partial(run, isolation=isolation, python=python)


def run(
    code: str,
    function: str | None,
    inputs: str | list[object],
    limits: Mapping[str, float],
    *,
    isolation: str,
    python: str,
) -> Ran:
    """Run a program until it exits or its time is over.

    Args:
      code: the program.
      function: the name of the function to call, if any.
      inputs: standard input, or the arguments of the function.
      limits: the fields of `code.Limits`.
      isolation: as in `code.Sandbox`.
      python: the interpreter.
    """
    timeout, most, sandboxed = limits["timeout"], int(limits["output"]) << 20, isolation == "bubblewrap"
    task: dict[str, object] = {"code": code, "function": function, "arguments": inputs}
    task |= {"modules": _MODULES.split(), "limits": resource_limits(limits, sandboxed), "seconds": timeout + 1}
    with contextlib.ExitStack() as stack:
        stdin, output, errors, file = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        _fill(stdin, inputs.encode(errors="replace") if isinstance(inputs, str) else b"")
        _fill(file, marshal.dumps(task, 2))
        command = [python, "-I", "-S", "-B", "-c", _child(), str(file.fileno())]
        folder = "/" if sandboxed else stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        nobody = sandboxed and os.geteuid() == 0  # no namespace limits the processes of root
        process = subprocess.Popen(
            [*_bubblewrap(python), *command] if sandboxed else command,
            stdin=stdin,
            stdout=output,
            stderr=errors,
            pass_fds=(file.fileno(),),
            env={},
            cwd=folder,
            start_new_session=True,
            user=_NOBODY if nobody else None,
            group=_NOBODY if nobody else None,
            extra_groups=[] if nobody else None,
        )
        try:
            process.wait(timeout)
            status = "exited"
        except subprocess.TimeoutExpired:
            status = "timeout"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return Ran(status, process.returncode, _read(output, 0, most), _read(errors, -500, 500))


@functools.cache
def _child() -> str:
    return Path(__file__).with_name("code_child.py").read_text(encoding="utf-8")


def resource_limits(limits: Mapping[str, float], sandboxed: bool) -> dict[str, int]:
    """Return the limits of each process of a program, by their names in `resource`."""
    most = {"RLIMIT_CPU": int(limits["timeout"]) + 1, "RLIMIT_FSIZE": int(limits["output"]) << 20}
    most |= {"RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0}
    if sys.platform != "darwin":  # macOS rejects this limit
        most["RLIMIT_AS"] = int(limits["memory"]) << 20
        most["RLIMIT_STACK"] = most["RLIMIT_AS"] // 4  # recursion through C, as in functools.cache
    if sandboxed:  # counted in the namespace; without one, all processes of the user on the machine would count
        most["RLIMIT_NPROC"] = int(limits["processes"])
    return most


@functools.cache
def _bubblewrap(python: str) -> list[str]:
    """Return the command prefix of the sandbox: no network, no other process, a read-only system, a small /tmp."""
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


def _fill(file: IO[bytes], data: bytes) -> None:
    file.write(data)
    file.seek(0)


def _read(file: IO[bytes], start: int, most: int) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(start if start >= 0 else max(0, size + start))
    return file.read(most).decode(errors="replace")


if __name__ == "__main__":
    main()
