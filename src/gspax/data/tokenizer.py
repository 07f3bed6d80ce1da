"""Converts text to token ids and back. There are no padding ids: masks are computed from lengths."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gspax.config.functions import interface_problems
from gspax.data.files import Json, read_object, reading, require_own_files, why_not_on_hub
from gspax.data.hub import HUB_NAME, locate
from gspax.data.token_bytes import read_token_bytes
from gspax.errors import UserError, brief
from gspax.storage.files import open_storage
from gspax.storage.paths import to_path

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
_READ = (*TOKENIZER_FILES, "generation_config.json")  # the files that are downloaded from the Hub


def tokenizer_problems(tokenizer: object, vocab_size: int, *, demonstrations: bool) -> Iterator[str]:
    """Yield the reasons why a tokenizer cannot be used, one sentence each.

    Args:
      tokenizer: any object.
      vocab_size: the vocabulary size of the model.
      demonstrations: whether completions are encoded too, each followed by a stop id.
    """
    methods = ["encode", "decode"] + ["encode_completion"] * demonstrations
    yield from interface_problems("tokenizer", tokenizer, methods)
    if isinstance(tokenizer, type):
        return
    size, stops = (getattr(tokenizer, name, None) for name in ("vocab_size", "stop_ids"))
    if not isinstance(size, int):
        yield f"tokenizer.vocab_size: wanted an integer, got {size!r}"
    elif vocab_size < size:
        yield f"model.vocab_size: wanted at least the tokenizer's {size}, got {vocab_size}"
    elif not isinstance(stops, tuple) or not all(stop in range(size) for stop in stops):
        yield f"tokenizer.stop_ids: wanted a tuple of ids below {size}, got {stops!r}"
    elif demonstrations and not stops:
        yield "tokenizer.stop_ids: wanted at least one, which ends a demonstration of the warm_start, got none"


@dataclass(frozen=True)
class CharTokenizer:
    """A tokenizer with one id per character, in the order of the alphabet, followed by one stop id."""

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
        """Encode a text. ValueError if a character is not in the alphabet."""
        ids = [self.alphabet.find(character) for character in text]
        if -1 in ids:
            unknown = text[ids.index(-1)]
            raise ValueError(f"character {unknown!r} of {text!r} is not in the alphabet {self.alphabet!r}")
        return ids

    def encode_completion(self, text: str) -> list[int]:
        return self.encode(text)

    def token_bytes(self, size: int, *, first: bool = False) -> list[bytes]:
        """Return the bytes that each id below `size` adds to a text."""
        texts = [*self.alphabet, ""] + ["\N{REPLACEMENT CHARACTER}"] * size
        return [text.encode() for text in texts[:size]]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode the ids before the first stop id. Ids outside the alphabet become U+FFFD."""
        size = len(self.alphabet)
        return "".join(
            self.alphabet[i] if 0 <= i < size else "\N{REPLACEMENT CHARACTER}" for i in _before(ids, (size,))
        )


class _TokenizerFile(NamedTuple):
    """The parts of tokenizer.json in use; parsing a large file takes a second."""

    added: dict[str, int]
    ids: dict[str, int]  # includes the added tokens
    decoder: object


@dataclass(frozen=True)
class HFTokenizer:
    """A Hugging Face tokenizer in a folder, also of a bucket, or of a name on the Hub, loaded on first use.

    The stop ids are the tokenizer's end-of-sequence id, then those of `generation_config.json`, if it exists. Special
    tokens in a text are encoded as special tokens. A prompt begins with the tokens that transformers puts before a
    text, such as `<bos>`; only stop ids are removed. `stop_ids` and `vocab_size` are read from the JSON files, so that
    a dry run does not import transformers.

    Every member raises UserError if a file of the folder is missing, cannot be parsed, or is a link out of it.
    """

    path: str

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        token = _named_tokens(self.folder).get("eos_token")
        if token is not None and not (isinstance(token, str) and token in self.ids):
            raise UserError(f"the tokenizer in {self.path} has no token {token!r}, which it names as its eos_token")
        ids = [] if token is None else [self.ids[token]]
        more = read_settings(self.folder, "generation_config.json").get("eos_token_id")
        for i in more if isinstance(more, list) else [] if more is None else [more]:
            if not isinstance(i, int):
                raise UserError(f"generation_config.json in {self.path}: wanted ids in eos_token_id, got {more!r}")
            ids.append(i)
        if not ids:
            raise UserError(f"the tokenizer in {self.path} names no end-of-sequence token, so nothing could stop")
        return tuple(dict.fromkeys(ids))

    @functools.cached_property
    def vocab_size(self) -> int:
        return 1 + max(self.ids.values())

    def encode(self, text: str) -> list[int]:
        """Encode a prompt, with the tokens that transformers puts before a text, unless it already begins with them."""
        first, ids = self._first_ids, self.encode_completion(text)
        return ids if ids[: len(first)] == first else [*first, *ids]

    def encode_completion(self, text: str) -> list[int]:
        """Encode a text without tokens before or after it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    @functools.cached_property
    def _first_ids(self) -> list[int]:
        """The ids that transformers puts before a text; those that it puts after one would end a prompt."""
        alone, whole = self.encode_completion("x"), list(self._tokenizer.encode("x"))
        starts = (place for place in range(len(whole)) if whole[place : place + len(alone)] == alone)
        return whole[: next(starts, 0)]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode the ids before the first stop id, special tokens included."""
        return str(
            self._tokenizer.decode(
                _before(ids, self.stop_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, size: int, *, first: bool = False) -> list[bytes]:
        """Return the bytes that each id below `size` adds to a text or, if `first`, begins a text with."""
        return read_token_bytes(self._file.decoder, self.ids, size, first=first, where=self.path)

    @functools.cached_property
    def folder(self) -> Path:
        """Return the folder of the tokenizer's files; for a name on the Hub the folder of the download."""
        return locate_tokenizer(self.path)

    @property
    def added_tokens(self) -> dict[str, int]:
        """The ids of the added tokens, special or not, by token."""
        return self._file.added

    @property
    def ids(self) -> dict[str, int]:
        """The ids of all tokens, added tokens included, by token."""
        return self._file.ids

    @functools.cached_property
    def _file(self) -> _TokenizerFile:
        table: Any = read_object(self.folder / "tokenizer.json")
        with _parsing(self.path):
            added = {token["content"]: int(token["id"]) for token in table.get("added_tokens", ())}
            more: Any = read_settings(self.folder, "tokenizer_config.json").get("added_tokens_decoder", {})
            added |= {token["content"]: int(i) for i, token in more.items()}
            vocab = table["model"]["vocab"]  # for Unigram models a list of (token, score) in the order of the ids
            pairs = vocab.items() if isinstance(vocab, dict) else ((token, i) for i, (token, _) in enumerate(vocab))
            ids = {token: int(i) for token, i in pairs} | added
            if not ids:
                raise ValueError("no tokens")
            if wrong := [token for token in ids if not isinstance(token, str)]:
                raise ValueError(f"wanted texts as tokens, got {wrong[0]!r}")
            return _TokenizerFile(added, ids, table.get("decoder"))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        with reading(self.path), _local(self.folder) as folder:
            _ = self.ids  # a clearer error if a file is missing or broken
            try:
                return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            except Exception as error:  # of any type, some from Rust
                raise UserError(f"the tokenizer in {self.path} cannot be read: {brief(error)}") from error


def hf_tokenizer(path: str | os.PathLike[str]) -> HFTokenizer:
    """Load the tokenizer in a folder, also of a bucket, or of a name on the Hub, such as "Qwen/Qwen3-0.6B-Base".

    For a name, only the tokenizer's files are downloaded. UserError without `tokenizer.json`, or if a link leads out.
    """
    locate_tokenizer(os.fspath(path))
    return HFTokenizer(os.fspath(path))


def locate_tokenizer(path: str) -> Path:
    """Return the folder of a tokenizer; for a name on the Hub, download its files first.

    UserError if the folder has no `tokenizer.json`, or a link leads out of it.
    """
    folder = to_path(path)
    if open_storage(folder).has_folders and not folder.is_dir() and not why_not_on_hub(path, HUB_NAME):
        folder = locate(path, _READ)
    with reading(folder):
        if not (folder / "tokenizer.json").is_file():
            raise UserError(f"wanted a folder that holds a tokenizer.json; there is none in {path!r}")
    require_own_files(folder)
    return folder


def special_tokens(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Read the special tokens by name, such as `bos_token`, from the files of a tokenizer's folder."""
    return {name: token for name, token in _named_tokens(folder).items() if isinstance(token, str)}


def _named_tokens(folder: str | os.PathLike[str]) -> dict[str, Json]:
    settings = read_settings(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # as in transformers, where null then leaves a token to the other file
        settings = {name: value for name, value in settings.items() if value is not None}
    named = read_settings(folder, "special_tokens_map.json") | settings
    named = {name: token for name, token in named.items() if name.endswith("_token")}
    return {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}


@contextlib.contextmanager
def _parsing(path: str) -> Iterator[None]:
    """Turn the exception for a file in another form into a UserError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"tokenizer.json in {path} is not in the form of a tokenizer: {error!r}") from error


@contextlib.contextmanager
def _local(folder: Path) -> Iterator[Path]:
    """Provide a local folder for transformers, which cannot read buckets; UserError if a link leads out of it."""
    require_own_files(folder)
    with open_storage(folder).copied(folder, TOKENIZER_FILES) as copy:
        yield copy


def has_other_ids(tokenizer: object, folder: Path) -> bool:
    """Return whether a folder contains a Hugging Face tokenizer whose token ids differ from those of `tokenizer`."""
    if not isinstance(tokenizer, HFTokenizer) or not (folder / "tokenizer.json").is_file():
        return False
    return HFTokenizer(os.fspath(folder)).ids != tokenizer.ids


def check_ids(ids: Sequence[int], vocab_size: int, text: str) -> None:
    """Raise a UserError unless all token ids are below `vocab_size`: a model would read the embedding's last row."""
    for i in ids:
        if not (hasattr(i, "__index__") and 0 <= i < vocab_size):
            raise UserError(
                f"tokenizer: wanted ids from 0 to {vocab_size - 1} (model.vocab_size), got {i!r} for {text[:200]!r}"
            )


def read_settings(folder: str | os.PathLike[str], name: str) -> dict[str, Json]:
    """Read the JSON object in a file of a tokenizer folder; empty if missing. UserError if it cannot be read."""
    path = to_path(folder) / name
    return read_object(path) if path.exists() else {}


def _before(ids: Iterable[int], stop_ids: Sequence[int]) -> list[int]:
    """Return the ids before the first stop id, as Python integers."""
    return list(itertools.takewhile(lambda i: i not in stop_ids, map(int, ids)))
