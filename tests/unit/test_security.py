"""WHAT do the proofs and keys of a handshake depend on? Without sockets; tests/contract has the conversation."""

import inspect
from itertools import combinations

from paceline.transport import security
from paceline.transport.security import MAGIC, NONCE_BYTES, PROOF_BYTES, Role, _key, _proof

A, B, SECRET = b"a" * NONCE_BYTES, b"b" * NONCE_BYTES, b"s" * 32


def test_a_proof_depends_on_secret_role_and_both_nonces() -> None:
    proofs = [
        _proof(SECRET, b"server", A, B),
        *(_proof(SECRET, role.encode(), A, B) for role in Role),
        _proof(SECRET, b"server", B, A),
        _proof(SECRET, b"server", A, A),
        _proof(b"t" * 32, b"server", A, B),
    ]
    assert all(len(p) == PROOF_BYTES for p in proofs)
    assert all(x != y for x, y in combinations(proofs, 2))


def test_a_key_depends_on_secret_direction_and_both_nonces() -> None:
    keys = [
        _key(SECRET, b"up", A, B),
        _key(SECRET, b"down", A, B),
        _key(SECRET, b"up", B, A),
        _key(b"t" * 32, b"up", A, B),
    ]
    assert all(len(k) == 32 for k in keys)
    assert all(x != y for x, y in combinations(keys, 2))


def test_I8_a_server_reads_107_bytes_before_it_knows_who_it_is() -> None:
    assert len(MAGIC) + NONCE_BYTES + PROOF_BYTES <= 107


def test_proofs_are_compared_in_constant_time() -> None:
    source = inspect.getsource(security)
    assert source.count("hmac.compare_digest") == 2
    assert "== _proof" not in source
