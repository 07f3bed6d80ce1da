"""Folders that are written whole or not at all, and the small files that travel from one checkpoint to the next."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from gspax.errors import UserError

COMPANIONS = (  # of the weights: how to make and read their tokens, and when to stop
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends without an error and is deleted otherwise.

    It lies beside `target`, `NAME.*.tmp`; only a process that is killed leaves one behind.

    Raises:
      UserError: `target` exists and is not an empty folder, or cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: wanted a new or an empty folder, it exists and is not empty")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as problem:
        raise UserError(f"{target}: cannot be written: {problem.strerror}") from problem
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())  # as of any new folder; mkdtemp keeps it private
        os.replace(temporary, target)
    except OSError as problem:
        raise UserError(f"{target}: cannot be written: {problem.strerror}") from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_companions(sources: Iterable[Path], target: Path) -> list[str]:
    """Copy the files beside a model's weights, each from the first folder that has it; the names of those found."""
    folders = list(sources)
    found = []
    for name in COMPANIONS:
        for folder in folders:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)
                found.append(name)
                break
    return found


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
