"""What is recorded of command lines and environment variables: settings, no secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

RECORDED = re.compile(r"(XLA|JAX|LIBTPU|TPU|NCCL|GSPAX)_[A-Z0-9_]+|NPROC")  # variables that computations depend on
SECRET_WORDS = re.compile(
    r"(^|[^a-z])(api_?key|key|token|secret|passw(or)?d|passphrase|credentials?|auth|authorization|bearer|cookie)($|[^a-z])",
    re.IGNORECASE,
)  # of a name: `hf-token` but not `max_tokens`
SECRET_VALUES = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/@\s]+@"  # a password in a URL
    r"|\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza|ya29\.)[\w.-]{8,}"  # keys of services
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r"|\b(?P<kind>Bearer|Basic)\s+[\w.+/=-]{8,}"
    r"|(?P<query>[?&](key|token|sig|signature|password|secret|access_token|api_key)=)[^&\s]+",
    re.IGNORECASE,
)
HIDDEN = "<hidden>"


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without the values that look like secrets, by their name or by themselves."""
    found, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides_next and not argument.startswith("-"):
            found.append(HIDDEN)
        elif equals and is_secret(name):
            found.append(f"{name}={HIDDEN}")
        else:
            found.append(redact(argument))
        hides_next = argument.startswith("-") and not equals and is_secret(argument)
    return found


def recorded_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that results depend on."""
    return {
        name: redact(value)
        for name, value in sorted(variables.items())
        if RECORDED.fullmatch(name) and not is_secret(name)
    }


def is_secret(name: str) -> bool:
    """Whether the last part of a name, such as `reward.api_key`, suggests that its value is a secret."""
    return SECRET_WORDS.search(name.rpartition(".")[2]) is not None


def redact(text: str) -> str:
    """A text without what looks like a key, a token or the password of a URL."""
    return SECRET_VALUES.sub(_hide, text)


def _hide(found: re.Match[str]) -> str:
    if found["scheme"]:
        return f"{found['scheme']}{HIDDEN}@"
    if found["kind"]:
        return f"{found['kind']} {HIDDEN}"
    return f"{found['query'] or ''}{HIDDEN}"
