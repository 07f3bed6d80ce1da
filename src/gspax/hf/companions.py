"""The files beside a checkpoint's weights: tokenizer, chat template, generation settings. Needs no jax."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from gspax.data.files import require_own_files

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def copy_companions(sources: Iterable[Path], target: Path) -> list[str]:
    """Copy each companion from the first folder that has it; the names of those copied.

    Raises:
      UserError: a link in one of the folders leads out of it.
    """
    folders = [folder for folder in sources if folder.is_dir()]
    for folder in folders:
        require_own_files(folder)
    copied = []
    for name in COMPANIONS:
        source = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if source is not None:
            shutil.copyfile(source, target / name)
            copied.append(name)
    return copied
