"""Reads and makes the secret of a run, by which its processes recognize each other.

It is the content of a file, `--secret-file FILE` or GSPAX_SECRET_FILE, or the variable GSPAX_SECRET, and the same
on all processes. `gspax launch` and the scripts in `tpu/` make one; by hand: `openssl rand -hex 32 > FILE`.
Processes on one machine that meet at a loopback address may do without.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import MutableMapping
from pathlib import Path

from gspax.errors import UserError

VARIABLE, FILE_VARIABLE = "GSPAX_SECRET", "GSPAX_SECRET_FILE"
LEAST, MOST = 16, 4096  # bytes


def read_secret(host: str, file: str | None, variables: MutableMapping[str, str]) -> bytes:
    """Read the secret of a run whose coordinator is `host`. GSPAX_SECRET is removed from `variables`.

    Raises:
      UserError: there is none and `host` is not a loopback address, the file cannot be read, or it is too short.
    """
    text = variables.pop(VARIABLE, "")
    path = file or ("" if text else variables.get(FILE_VARIABLE, ""))
    if not path and not text:
        if is_loopback(host):
            return b""
        raise UserError(
            f"secret: wanted --secret-file FILE, {FILE_VARIABLE} or {VARIABLE}, the same on every host (make one with "
            "`openssl rand -hex 32`), got none: without it anybody who reaches the coordinator could join"
        )
    where = f"secret: {path}" if path else VARIABLE
    secret = _read(Path(path), where) if path else text.strip().encode()
    if not LEAST <= len(secret) <= MOST:
        raise UserError(f"{where}: wanted {LEAST} to {MOST} bytes, got {len(secret)}")
    return secret


def new_secret() -> str:
    """Generate a random secret of 256 bits, hexadecimal."""
    return secrets.token_hex(32)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address. A name other than localhost may belong to any host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path, where: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST + 3).strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be read: {getattr(error, 'strerror', error)}") from error
