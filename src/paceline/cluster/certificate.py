"""WHAT does --tls show? A certificate that is made once for a run, or by `paceline keys new`, beside its secret.

Called by launchers/local and cluster/secret. Needs the extra `tls` (cryptography) to make one; to use one the
standard library is enough. Must never leave a private key where others can read it, not for a moment.
"""

import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import UsageError
from paceline.transport.tls import CERTIFICATE, PRIVATE_KEY

VALID = timedelta(days=3650)  # nobody looks at the dates: it is known by its fingerprint


def make_certificate(folder: Path) -> None:
    """Write a new certificate.pem and key.pem."""
    check_can_make()
    write_certificate(folder, *_made())


def write_certificate(folder: Path, certificate: bytes, key: bytes) -> None:
    """Put one there that was made elsewhere."""
    try:
        _write(folder / PRIVATE_KEY, key)
        _write(folder / CERTIFICATE, certificate)  # last: whoever sees it finds its key
    except OSError as error:
        raise UsageError(f"No certificate can be made in {str(folder)!r}: {error.strerror}.") from None


def remove_certificate(folder: Path) -> None:
    """A run folder that is used again without --tls, or with a new one."""
    for name in (CERTIFICATE, PRIVATE_KEY):
        (folder / name).unlink(missing_ok=True)


def check_can_make() -> None:
    """Refuse where certificates cannot be made, before anything else is."""
    if find_spec("cryptography") is None:
        raise UsageError(
            "--tls makes a certificate with the package cryptography, which is not installed: pip install "
            "'paceline[tls]', or copy a folder that `paceline keys new` has made elsewhere."
        )


def _made() -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "paceline")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + VALID)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), private


def _write(path: Path, content: bytes) -> None:
    """Whole when it is seen, and for its owner only."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        draft.unlink()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(draft, path)
