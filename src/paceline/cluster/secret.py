"""WHAT do tasks started by hand share? A secret of 32 bytes in a file that only its owner can read.

Called by discovery. Must never put the secret into a message, nor use a file that others can read.
"""

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import UsageError

SECRET_BYTES = 32


def secret_by_hand(secret_file: str | None, environ: Mapping[str, str]) -> bytes:
    """Return the secret of `secret_file`, else the user's own, which is made on first use."""
    if secret_file is not None:
        return _read(Path(secret_file))
    path = _own_path(environ)
    if not os.path.exists(path):
        _make(path)
    return _read(path)


def secret_from_hex(text: str) -> bytes | None:
    """Return the 32 bytes written as 64 hex digits; None where it is anything else.

    >>> secret_from_hex("ab" * 32) == bytes([0xAB]) * 32
    True
    """
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        return None
    return secret if len(secret) == SECRET_BYTES else None


def _own_path(environ: Mapping[str, str]) -> Path:
    config = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(config):  # the XDG rules: a relative path is ignored
        return Path(config) / "paceline" / "secret"
    if not os.path.isabs(environ.get("HOME", "")):
        raise UsageError("Neither HOME nor XDG_CONFIG_HOME says where the secret lies; give --secret_file=PATH.")
    return Path(environ["HOME"]) / ".config" / "paceline" / "secret"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(1024)
    except (OSError, ValueError) as error:
        raise UsageError(f"The secret file {str(path)!r} cannot be read: {_reason(error)}.") from None
    if mode & 0o077:
        raise UsageError(f"The secret file {str(path)!r} is open to others (mode {mode:04o}); run chmod 600 on it.")
    secret = content if len(content) == SECRET_BYTES else secret_from_hex(content.decode("ascii", "replace"))
    if secret is None:
        raise UsageError(f"The secret file {str(path)!r} must hold 64 hex digits; `openssl rand -hex 32` makes them.")
    return secret


def _make(path: Path) -> None:
    """Several tasks may come here at once: the file appears whole, and the first one stays."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".secret-") as draft:  # mode 0600
            draft.write(secrets.token_hex(SECRET_BYTES) + "\n")
            draft.flush()
            os.link(draft.name, path)
    except FileExistsError:
        return
    except OSError as error:
        raise UsageError(
            f"No secret could be made at {str(path)!r} ({_reason(error)}); give --secret_file=PATH."
        ) from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
