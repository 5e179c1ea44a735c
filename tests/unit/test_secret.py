"""WHAT do tasks started by hand share? The secret file: made once, for its owner only, whole when seen."""

import os
import stat
from pathlib import Path

import pytest

from paceline.cluster.secret import secret_by_hand
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
