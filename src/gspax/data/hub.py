"""Names on the Hugging Face Hub: downloads their files and returns the local folder."""

from __future__ import annotations

import re
from pathlib import Path

from gspax.data.files import require_own_files, why_not_on_hub
from gspax.errors import UserError, describe_error
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")
SMALL = ("*.json", "*.txt", "*.jinja")  # everything except the weights
ALL = (*SMALL, "*.safetensors")


def locate(checkpoint: str, patterns: tuple[str, ...] = ALL, *, download: bool = True) -> Path:
    """Return the folder of a checkpoint; for a name on the Hub, download the files that match the patterns first.

    With `download=False` only the local cache of earlier downloads is used.

    Raises:
      UserError: there is no such folder, and no such checkpoint on the Hub or no access to it; or a link leads out of
        the folder.
    """
    folder = to_path(checkpoint)
    if not open_storage(folder).has_folders or folder.is_dir():
        require_own_files(folder)
        return folder
    if folder.exists():
        advice = ": gspax convert --from FILE.gguf --to DIR writes one" if checkpoint.endswith(".gguf") else ""
        raise UserError(f"{checkpoint}: wanted the folder of a checkpoint, this is a file{advice}")
    if why := why_not_on_hub(checkpoint, HUB_NAME):
        raise UserError(
            f"{checkpoint}: wanted the folder of a checkpoint or a name on the Hub such as Qwen/Qwen3-30B-A3B; {why}"
        )
    from huggingface_hub import snapshot_download

    repository, _, revision = checkpoint.partition("@")
    try:
        snapshot = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(patterns), local_files_only=not download
        )
    except Exception as problem:  # of many kinds: no network, no such name, no permission, no disk space
        raise UserError(
            f"{checkpoint}: there is no such folder in the working directory {Path.cwd()}, and {_why(problem)}"
        ) from problem
    return Path(snapshot)


def _why(problem: Exception) -> str:
    """Explain why a download failed, in a few words. The library's messages list addresses and every remedy."""
    kinds = {kind.__name__ for kind in type(problem).__mro__}
    if "GatedRepoError" in kinds:
        return "access must be requested on the page of this name on the Hub; then `hf auth login`, or set HF_TOKEN"
    if "RepositoryNotFoundError" in kinds:
        return "the Hub has no such name, or it is private: `hf auth login`, or HF_TOKEN"
    if "RevisionNotFoundError" in kinds:
        return "the Hub has no such revision of it"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "TransportError"}:
        return "the Hub cannot be reached, and nothing of it was downloaded earlier"
    return f"the download from the Hub failed: {describe_error(problem)}"
