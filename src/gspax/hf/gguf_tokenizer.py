"""Converts the tokenizer in the metadata of a GGUF file to the files of a Hugging Face tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspax.data.files import show

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
SPACE = "\u2581"  # SentencePiece's sign for a space


def _split(digits: str) -> dict[str, Any]:
    """Return the pre-tokenizer of Qwen2 and of Llama 3, which differ in how they group digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTES | {"use_regex": False}]}


GPT2 = BYTES | {"use_regex": True}
PRE_TOKENIZERS = {  # by `tokenizer.ggml.pre`
    "gpt-2": GPT2,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]},
    "qwen2": _split(r"\p{N}"),
    "llama-bpe": _split(r"\p{N}{1,3}"),
}


def write(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, and generation_config.json.

    Args:
      metadata: the file's metadata; the keys that begin with `tokenizer.` are read.
      folder: the folder to write to.

    Raises:
      ValueError: the kind of tokenizer is not implemented, or a key is missing; one sentence names it.
    """
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind = own.get("model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model: wanted gpt2 or llama, got {show(kind)}")
    for key in ("tokens", "token_type", "eos_token_id", "merges" if kind == "gpt2" else "scores"):
        if key not in own:
            raise ValueError(f"tokenizer.ggml.{key}: wanted this key, there is none")
    names: list[str] = own["tokens"]
    types: list[int] = own["token_type"]
    if len(types) != len(names):
        raise ValueError(f"tokenizer.ggml.token_type: wanted one for each of {len(names)} tokens, got {len(types)}")
    special = {key: own[f"{full}_token_id"] for key, full in SPECIAL.items() if f"{full}_token_id" in own}
    if wrong := {key: i for key, i in special.items() if not 0 <= i < len(names)}:
        raise ValueError(f"tokenizer.ggml: wanted ids below {len(names)}, got {wrong}")
    describe = _byte_pairs if kind == "gpt2" else _sentence_pieces
    content = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, **describe(own)}
    content["added_tokens"] = [
        {"id": i, "content": name, "special": types[i] == CONTROL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, name in enumerate(names)
        if types[i] in (CONTROL, USER_DEFINED)
    ]
    if own.get("add_bos_token") and "bos" in special:
        content["post_processor"] = _begin_with(names[special["bos"]], special["bos"])
    _dump(folder / "tokenizer.json", content)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{key}_token": names[i] for key, i in special.items() if key != "eot"}
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    _dump(folder / "tokenizer_config.json", settings)
    stops = list(dict.fromkeys(special[key] for key in ("eos", "eot") if key in special))
    _dump(folder / "generation_config.json", {"eos_token_id": stops})


SPECIAL = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding", "unk": "unknown"}


def _byte_pairs(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of tokenizer.json of a byte-pair tokenizer, as in GPT-2."""
    pre = own.get("pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"tokenizer.ggml.pre: wanted one of {known}, got {show(pre)}")
    model = {"type": "BPE", "vocab": _vocabulary(own), "merges": own["merges"], "ignore_merges": pre == "llama-bpe"}
    normalizer = {"type": "NFC"} if pre == "qwen2" else None
    return {"normalizer": normalizer, "pre_tokenizer": PRE_TOKENIZERS[pre], "decoder": GPT2, "model": model}


def _sentence_pieces(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of tokenizer.json of a SentencePiece tokenizer, whose merges are ordered by score."""
    vocabulary = _vocabulary(own)
    pairs = merges(own["tokens"], own["token_type"], own["scores"])
    begins = own.get("add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if begins:
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = own["tokens"][own["unknown_token_id"]] if "unknown_token_id" in own else None
    model = {"type": "BPE", "vocab": vocabulary, "merges": pairs, "unk_token": unknown}
    model |= {"fuse_unk": True, "byte_fallback": True}
    decoder = {"type": "Sequence", "decoders": decoders}
    return {"normalizer": normalizer if begins else replace, "pre_tokenizer": None, "decoder": decoder, "model": model}


def merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece tokenizer in order: the piece with the highest score comes first.

    Args:
      tokens: the tokens by id.
      types: the types of the tokens; only normal and user-defined ones, such as runs of spaces, are merged.
      scores: the scores of the tokens.
    """
    ids = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    found = [
        (-scores[i], ids[token[:cut]], ids[token[cut:]])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


def _vocabulary(own: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the tokens, without unused ones that only pad the embedding."""
    return {token: i for i, token in enumerate(own["tokens"]) if own["token_type"][i] != UNUSED}


def _begin_with(token: str, i: int) -> dict[str, Any]:
    """Return the post-processor that puts a token before every text."""
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    single, pair = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, single],
        "pair": [first, single, {"SpecialToken": {"id": token, "type_id": 1}}, pair],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }


def _dump(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
