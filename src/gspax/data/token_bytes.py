"""The bytes that each token of a Hugging Face tokenizer adds to a decoded text; stop strings are matched against them.

They follow from the decoder in `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from gspax.config import Sampling
from gspax.errors import UserError

LONGEST = 256  # total bytes of all stop strings
SPACE = "\u2581"  # stands for a space in SentencePiece tokens
Decoder = Callable[[str, bool], bytes]  # (token, whether it is the first one) -> bytes


def read_token_bytes(decoder: object, ids: Mapping[str, int], size: int, *, first: bool, where: str) -> list[bytes]:
    """Return the bytes of each id below `size`; empty for an id without a token, as in the decoder.

    Args:
      decoder: the tokenizer's decoder, as `tokenizer.json` describes it.
      ids: the token ids by token.
      size: the number of ids.
      first: return the bytes at the start of a text, where some decoders drop a space.
      where: the folder, for error messages.

    Raises:
      UserError: the bytes of a token depend on its neighbors in this decoder.
    """
    decode = _find_decoder(decoder, where)
    texts = [b""] * size
    for token, i in ids.items() if size else ():
        if i < size:
            texts[i] = decode(token, first)
    return texts


def _find_decoder(decoder: Any, where: str) -> Decoder:
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else [decoder]
    kinds = [part.get("type") if isinstance(part, dict) else part for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if kinds == ["Metaspace"]:
        return _metaspace(parts[0])
    simple = {"Replace", "ByteFallback", "Fuse", "Strip"}
    if kinds and simple.issuperset(kinds) and all(_is_simple(part) for part in parts):
        return _sentence_piece(strips="Strip" in kinds, has_bytes="ByteFallback" in kinds)
    raise UserError(
        f"sampling.stop: wanted a decoder of bytes in the tokenizer.json of {where} (ByteLevel, Metaspace, or Replace "
        f"with ByteFallback), got {' and '.join(map(str, kinds))}"
    )


def _is_simple(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        return part.get("pattern") == {"String": SPACE} and part.get("content") == " "
    return part["type"] != "Strip" or (part.get("content"), part.get("start"), part.get("stop")) == (" ", 1, 0)


def _byte_level(token: str, first: bool) -> bytes:
    """Decode each character as a byte; a token with any other character is plain text."""
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:
        return token.encode()


def _metaspace(part: dict[str, Any]) -> Decoder:
    mark, prepends = part.get("replacement", SPACE), part.get("prepend_scheme", "always") != "never"
    return lambda token, first: token.replace(mark, "" if first and prepends else " ").encode()


def _sentence_piece(*, strips: bool, has_bytes: bool) -> Decoder:
    def decode(token: str, first: bool) -> bytes:
        if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        text = token.replace(SPACE, " ")
        return (text.removeprefix(" ") if strips and first else text).encode()

    return decode


def _byte_characters() -> dict[str, int]:
    """Map the characters of a byte-level tokenizer to bytes; a visible byte is represented by itself."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + number): byte for number, byte in enumerate(hidden)}


_BYTES = _byte_characters()


def stop_problems(sampling: Sampling, tokenizer: object) -> Iterator[str]:
    """Yield the errors in the stop strings and stop tokens of an experiment, one sentence each."""
    size = getattr(tokenizer, "vocab_size", None)
    if isinstance(size, int) and not all(0 <= i < size for i in sampling.stop_token_ids):
        yield f"sampling.stop_token_ids: wanted ids below the tokenizer's {size}, got {sampling.stop_token_ids}"
    if any(not text or "\N{REPLACEMENT CHARACTER}" in text for text in sampling.stop):
        yield f"sampling.stop: wanted texts that are not empty and have no U+FFFD, got {sampling.stop}"
    elif (size := sum(len(text.encode()) for text in sampling.stop)) > LONGEST:
        yield f"sampling.stop: wanted at most {LONGEST} bytes in all, got {size}"
    elif sampling.stop and not (callable(getattr(tokenizer, "token_bytes", None)) and isinstance(tokenizer, Hashable)):
        yield (
            "sampling.stop: wanted a tokenizer that can be hashed and says what text its tokens are (token_bytes), as "
            f"those of gspax do, got {type(tokenizer).__name__}"
        )
    elif sampling.stop:
        try:
            tokenizer.token_bytes(0)  # type: ignore[attr-defined]
        except UserError as problem:  # the decoder is not supported
            yield str(problem)
