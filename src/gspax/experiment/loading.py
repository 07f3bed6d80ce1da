"""Loads an experiment file: Python that defines `experiment = Experiment(...)`.

While it runs it can import the files next to it, so a variant is a `dataclasses.replace` of another file's experiment.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

from gspax.config import Experiment
from gspax.errors import UserError

MODULE = "experiment_file"  # the module name of every file, so that a description does not depend on its path


def load(path: str | os.PathLike[str]) -> Experiment:
    """Run an experiment file and return the `experiment` that it defines.

    Raises:
      UserError: the file cannot be read or run, or `experiment` is missing or of another type; names file and line.
    """
    file = Path(path)
    module = ModuleType(MODULE)
    module.__file__ = str(file)
    code = _compile(file)
    sys.modules[MODULE] = module  # dataclasses in the file look up their annotations here
    try:
        with _importable(Path(os.path.realpath(file)).parent):
            exec(code, module.__dict__)
    except (Exception, SystemExit) as problem:
        raise UserError(f"{file}:{_line(problem, file)}: {_sentence(problem)}") from problem
    experiment = vars(module).get("experiment")
    if experiment is None:
        raise UserError(f"{file}: wanted a line `experiment = Experiment(...)`, the file defines no `experiment`")
    if not isinstance(experiment, Experiment):
        raise UserError(f"{file}: `experiment` must be a gspax.config.Experiment, got {_kind(experiment)}")
    return experiment


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make the files of `folder` importable; it comes last, so that none of them hides an installed module."""
    before = list(sys.path)
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def _compile(file: Path) -> CodeType:
    """Compile the file, never from a cache: a file that was just edited must not run in its old form."""
    if file.is_dir():
        raise UserError(f"{file}: wanted an experiment file, got a directory")
    if file.exists() and not file.is_file():
        raise UserError(f"{file}: wanted an experiment file, got a pipe, a socket or a device")
    try:
        return compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except FileNotFoundError:
        raise UserError(f"{file}: there is no such file") from None
    except OSError as problem:
        raise UserError(f"{file}: cannot be read: {problem.strerror}") from problem
    except SyntaxError as problem:
        raise UserError(f"{file}:{problem.lineno or 1}: syntax error: {problem.msg}") from problem
    except ValueError as problem:  # a null byte
        raise UserError(f"{file}:1: not Python source: {problem}") from problem


def _line(problem: BaseException, file: Path) -> int:
    """Return the line of the file that was running, or 1."""
    lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(file)]
    return next((line for line in reversed(lines) if line), 1)


def _sentence(problem: BaseException) -> str:
    if isinstance(problem, SystemExit):
        return "the file exits the program; it should only define `experiment`"
    text = " ".join(str(problem).split())
    if isinstance(problem, UserError | ImportError) and text:
        return text
    if isinstance(problem, SyntaxError):  # in a file that this one imports
        return f"syntax error in {problem.filename}, line {problem.lineno}: {problem.msg}"
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
