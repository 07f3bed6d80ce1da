"""Text to token ids and back. There is no padding id anywhere: masks come from lengths."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The four members that the rest of gspax uses."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion when the policy chooses one of them."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model may have more rows than this, never fewer."""

    def encode(self, text: str) -> list[int]:
        """The ids of the text, with no stop id appended."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first stop id."""


@dataclass(frozen=True)
class CharTokenizer:
    """One id per character of the alphabet, in its order, then one stop id."""

    alphabet: str

    def __post_init__(self) -> None:
        repeated = sorted({character for character in self.alphabet if self.alphabet.count(character) > 1})
        if not self.alphabet or repeated:
            raise ValueError(
                f"an alphabet must be one or more different characters; got {self.alphabet!r} (repeated: {repeated})"
            )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (len(self.alphabet),)

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet) + 1

    def encode(self, text: str) -> list[int]:
        ids = [self.alphabet.find(character) for character in text]
        if -1 in ids:
            unknown = text[ids.index(-1)]
            raise ValueError(f"character {unknown!r} of {text!r} is not in the alphabet {self.alphabet!r}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first stop id. An id that only the model has is shown as U+FFFD."""
        size = len(self.alphabet)
        return "".join(
            self.alphabet[i] if 0 <= i < size else "\N{REPLACEMENT CHARACTER}" for i in _before(ids, (size,))
        )


@dataclass(frozen=True)
class HFTokenizer:
    """A Hugging Face tokenizer in a local folder, read when it is first used; nothing is downloaded.

    The stop ids are the tokenizer's end-of-sequence id and those of `generation_config.json`, if that file is there.
    Special tokens in a text are encoded as such, none is added, and none but the stop ids is removed.
    """

    path: str

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        ids = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        generation = Path(self.path) / "generation_config.json"
        if generation.is_file():
            more = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") or []
            ids += more if isinstance(more, list) else [more]
        if not ids:
            raise ValueError(f"the tokenizer in {self.path} names no end-of-sequence token, so nothing could stop")
        return tuple(dict.fromkeys(int(i) for i in ids))

    @functools.cached_property
    def vocab_size(self) -> int:
        return 1 + max(self._tokenizer.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        return str(
            self._tokenizer.decode(
                _before(ids, self.stop_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    @functools.cached_property
    def _tokenizer(self) -> Any:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it says on import that PyTorch is missing
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, local_files_only=True)


def hf_tokenizer(path: str | os.PathLike[str]) -> HFTokenizer:
    """The tokenizer of a local folder that holds a `tokenizer.json`; a folder without one is an error now."""
    if not (Path(path) / "tokenizer.json").is_file():
        raise FileNotFoundError(f"wanted a folder that holds a tokenizer.json; there is none in {os.fspath(path)!r}")
    return HFTokenizer(os.fspath(path))


def _before(ids: Iterable[int], stop_ids: Sequence[int]) -> list[int]:
    """The ids before the first stop id, as Python integers."""
    kept = []
    for i in ids:
        if int(i) in stop_ids:
            break
        kept.append(int(i))
    return kept
