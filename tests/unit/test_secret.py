"""WHAT do tasks started by hand share? The secret file: made once, for its owner only, whole when seen."""

import os
import stat
from pathlib import Path

import pytest

from paceline.cluster.secret import INSECURE, check_address, secret_beside_certificate, secret_by_hand
from paceline.errors import UsageError


def test_the_secret_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    first = secret_by_hand(None, environ)
    path = tmp_path / "config" / "paceline" / "secret"
    assert len(first) == 32
    assert secret_by_hand(None, environ) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]
    by_home = secret_by_hand(None, {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "relative"})
    assert (tmp_path / ".config/paceline/secret").read_text().strip() == by_home.hex()


@pytest.mark.parametrize("content", [bytes(range(32)), bytes(range(32)).hex().encode() + b"\n"])
def test_a_secret_file_holds_32_bytes_raw_or_in_hex(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    assert secret_by_hand(str(path), {}) == bytes(range(32))


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (b"ab" * 32, 0o640, "chmod 600"),
        (b"ab" * 32, 0o604, "chmod 600"),
        (b"hunter2", 0o600, "64 hex digits"),
    ],
)
def test_a_secret_file_that_will_not_do_is_refused(tmp_path: Path, content: bytes, mode: int, sentence: str) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(UsageError, match=sentence) as refused:
        secret_by_hand(str(path), {})
    assert content.decode() not in str(refused.value)


def test_a_secret_that_cannot_be_found_or_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        secret_by_hand(str(tmp_path / "none"), {})
    with pytest.raises(UsageError, match="give --secret_file"):
        secret_by_hand(None, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="No secret could be made"):
        secret_by_hand(None, {"HOME": str(tmp_path / "file")})


def test_of_two_tasks_that_make_the_secret_at_once_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HOME": str(tmp_path)}
    others: list[bytes] = []

    def link_after_another(draft: str, path: Path) -> None:
        monkeypatch.setattr(os, "link", os_link)
        others.append(secret_by_hand(None, environ))
        os_link(draft, path)

    os_link = os.link
    monkeypatch.setattr(os, "link", link_after_another)
    assert [secret_by_hand(None, environ)] == others


def test_insecure_is_asked_for_and_beside_no_secret(tmp_path: Path) -> None:
    assert secret_by_hand(None, {}, is_insecure=True) == INSECURE == bytes(32)
    with pytest.raises(UsageError, match="leave one out"):
        secret_by_hand(str(tmp_path / "secret"), {}, is_insecure=True)
    with pytest.raises(UsageError, match="--insecure"):  # what to do where there is no folder for a secret
        secret_by_hand(None, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "fe80::1", "node7.example", "localhost.example"])
def test_without_a_secret_nobody_listens_where_strangers_can_knock(host: str) -> None:
    for nothing in (b"", INSECURE):
        with pytest.raises(UsageError, match="--insecure"):
            check_address(nothing, host, is_insecure=False)
        check_address(nothing, host, is_insecure=True)
    check_address(b"s" * 32, host, is_insecure=False)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.8.8", "::1"])
def test_on_this_host_only_nothing_is_refused(host: str) -> None:
    check_address(INSECURE, host, is_insecure=False)


def test_a_run_folder_with_a_certificate_means_tls(tmp_path: Path) -> None:
    assert secret_beside_certificate(b"s" * 32, tmp_path).keys_dir is None
    (tmp_path / "certificate.pem").write_text("")
    assert secret_beside_certificate(b"s" * 32, tmp_path).keys_dir == tmp_path
