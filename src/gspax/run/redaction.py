"""Hides secrets in command lines and environment variables before a run records them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

RECORDED = re.compile(r"(XLA|JAX|LIBTPU|TPU|NCCL|GSPAX)_[A-Z0-9_]+|NPROC")  # variables that computations depend on
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a name in any case: `hf`, `Token` of `hfToken2`
SECRET_WORDS = re.compile(
    r"\w*(token|secrets?|passw(or)?ds?|passphrase|credentials?|cookie|authorization)|(api|access|secret|private)keys?"
    r"|creds?|o?auth|bearer",
    re.IGNORECASE,
)  # a word of a name: `hf-token`, `accesstoken`, but neither `max_tokens` nor `author`
LAST_WORDS = re.compile(  # the last one: `TPU_PASS`, but not `pass_rate`; `api_keys`, but not `num_key_value_heads`
    r"keys?|pass|pwd?|pat|sig(nature)?", re.IGNORECASE
)
TOKEN_ID = re.compile(r"(?<![a-z])token_ids?$", re.IGNORECASE)  # a number: `stop_token_ids`
KEY_ID = re.compile(r"(api|access|secret|private)_?key", re.IGNORECASE)  # anywhere: `AWS_ACCESS_KEY_ID`
NAMES = re.compile(r"""(?<![\w.-])([\w.-]++)(["']?\s*=\s*|["']\s*:\s*|:\s+)""")  # options, queries, JSON, headers
VALUE = re.compile(r"""("[^"]*"|'[^']*'|\([^)]*\)|\[[^]]*\]|[^\s&"',;}]*)""")
HEADER = re.compile(r"(\w+-)*(authorization|cookie)", re.IGNORECASE)  # its value is the rest: `Authorization: Token X`
REST = re.compile(r"""[^"'\n]*""")
OPTION = re.compile(r"""(?<!\S)(--?[a-z][\w-]*+)(\s++)(?!-)("[^"]*"|'[^']*'|\S++)""", re.IGNORECASE)
SECRET_VALUES = re.compile(
    r"(?P<scheme>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+://)[^/@\s]+@"  # a password in a URL
    r"|\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza|ya29\.|nvapi-|gsk_|r8_|tgp_v1_)"
    r"[\w.-]{8,}"  # keys of services
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r"|\bhooks\.slack\.com/[\w/]+"
    r"|(?<![\w.+-])[\w.+-]++:[^\s:/@\"',]+@(?P<host>[a-z0-9])"  # user:password@host
    r"|\b(?P<kind>Bearer|Basic)\s+[\w.+/=-]{8,}",
    re.IGNORECASE,
)
HIDDEN = "<hidden>"


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line with likely secrets hidden, recognized by name or by value."""
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif equals and len(name.split()) == 1 and is_secret(name.strip()):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redact(argument))
        hides_next = _takes_secret(argument)
    return shown


def recorded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that results depend on."""
    return {
        name: " ".join(redact_arguments(redact(value).split()))  # a value may hold options, as LIBTPU_INIT_ARGS does
        for name, value in sorted(variables.items())
        if RECORDED.fullmatch(name) and not is_secret(name)
    }


def is_secret(name: str) -> bool:
    """Return whether the last part of a name, such as `reward.api_key`, suggests that its value is a secret."""
    last = name.rpartition(".")[2]
    words = WORDS.findall(TOKEN_ID.sub("", last))
    is_last = bool(words and LAST_WORDS.fullmatch(words[-1]))
    return is_last or any(map(SECRET_WORDS.fullmatch, words)) or KEY_ID.search(last.replace("-", "_")) is not None


def redact(text: str) -> str:
    """Hide in a text likely keys, tokens and passwords of URLs, and the values of names that suggest a secret."""
    text, parts, end = OPTION.sub(_hide_next, SECRET_VALUES.sub(_hide, text)), [], 0
    for match in NAMES.finditer(text):
        if match.start() >= end and is_secret(match[1]):
            parts += [text[end : match.end()], HIDDEN]
            value = REST if ":" in match[2] and HEADER.fullmatch(match[1]) and match[2][0] not in "\"'" else VALUE
            end = value.match(text, match.end()).end()  # type: ignore[union-attr]  # it matches nothing, too
    return "".join([*parts, text[end:]])


def _takes_secret(option: str) -> bool:
    """Return whether the next word is a secret: after `--token`, and after the `-p` of many programs."""
    return option == "-p" or (option.startswith("-") and "=" not in option and is_secret(option))


def _hide_next(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}{HIDDEN}" if _takes_secret(match[1]) else match[0]


def _hide(match: re.Match[str]) -> str:
    if match["scheme"]:
        return f"{match['scheme']}{HIDDEN}@"
    if match["host"]:
        return f"{HIDDEN}@{match['host']}"
    return f"{match['kind']} {HIDDEN}" if match["kind"] else HIDDEN
