"""Bearer tokens: making one, and the file that holds it for whoever shows it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

BITS: Final = 256


def make() -> str:
    """A new token: letters, digits, `-` and `_`."""
    return secrets.token_urlsafe(BITS // 8)


def write(path: Path, token: str) -> None:
    """Writes a token to a new file for this user alone. Raises `OSError`, also where there is something already."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "w", encoding="ascii") as opened:
        opened.write(f"{token}\n")
