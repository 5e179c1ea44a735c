"""WHAT do tasks started by hand share? A secret of 32 bytes in a file that only its owner can read.

Called by discovery. Must never put the secret into a message, nor use a file that others can read.
"""

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from paceline.cluster.certificate import check_can_make, make_certificate
from paceline.errors import UsageError
from paceline.transport.security import INSECURE, Secret
from paceline.transport.tls import CERTIFICATE, check_keys, fingerprint, read_certificate

__all__ = [
    "INSECURE",
    "Secret",
    "check_address",
    "is_loopback",
    "new_keys",
    "own_path",
    "secret_beside_certificate",
    "secret_by_hand",
    "secret_from_hex",
]

SECRET_BYTES = 32


def secret_by_hand(
    secret_file: str | None, environ: Mapping[str, str], is_tls: bool = False, is_insecure: bool = False
) -> Secret:
    """Return the secret of `secret_file`, else the user's own, which is made on first use; with TLS its certificate
    must lie beside it."""
    if is_insecure:
        if secret_file is not None:
            raise UsageError("--insecure means that there is no secret, and --secret_file names one; leave one out.")
        return Secret(INSECURE)
    path = Path(secret_file) if secret_file is not None else own_path(environ)
    if secret_file is None and not os.path.exists(path):
        _make(path)
    secret = _read(path)
    if is_tls:
        check_keys(path.parent)  # never made here: tasks that start at once, on any host, must all have the same
    return Secret(secret, path.parent.absolute() if is_tls else None)


def secret_beside_certificate(value: bytes, folder: Path) -> Secret:
    """The secret of a run folder: a certificate that lies there is meant to be used."""
    return Secret(value, folder if (folder / CERTIFICATE).exists() else None)


def new_keys(folder: Path) -> str:
    """Make a folder with a secret and a certificate, whose fingerprint comes back; UsageError when it has a secret."""
    path = folder / "secret"
    if os.path.lexists(path):
        raise UsageError(f"{str(path)!r} is there already; choose another folder, or remove it.")
    check_can_make()
    _make(path)
    make_certificate(folder)
    return fingerprint(read_certificate(folder))


def check_address(secret: bytes, address_host: str, is_insecure: bool) -> None:
    """Refuse to listen where strangers can knock, with a secret that everybody knows, unless that was asked for.

    >>> check_address(INSECURE, "127.0.0.1", is_insecure=False)
    """
    if secret and secret != INSECURE:
        return
    if not is_insecure and not is_loopback(address_host):
        raise UsageError(
            f"{address_host} can be reached from other hosts and this task has no secret; give --secret_file=PATH, or "
            "--insecure to let everybody take part."
        )


def is_loopback(host: str) -> bool:
    """Whether only this host reaches an address.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.rstrip(".").lower() in ("localhost", "ip6-localhost")


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


def own_path(environ: Mapping[str, str]) -> Path:
    """Return where the user's own secret lies, or will."""
    config = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(config):  # the XDG rules: a relative path is ignored
        return Path(config) / "paceline" / "secret"
    if not os.path.isabs(environ.get("HOME", "")):
        raise UsageError(
            "Neither HOME nor XDG_CONFIG_HOME says where the secret lies; give --secret_file=PATH, or --insecure "
            "to let everybody who reaches the ports take part."
        )
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
