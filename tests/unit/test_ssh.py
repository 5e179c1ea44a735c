"""WHAT is sent to another host, and what is said when that fails? Command lines, and ssh's own words made sentences."""

import shlex

import pytest

from paceline.cluster.hosts import Host, parse
from paceline.errors import ClusterError, UsageError
from paceline.launchers.hosts import ssh
from paceline.version import VERSION

B = Host(name="b", target="me@b")


@pytest.fixture(autouse=True)
def plain_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ssh.SSH, raising=False)


def test_the_line_is_one_word_for_any_shell_and_options_come_before_the_host() -> None:
    words = ssh.command(B, "echo 'a b' \"$HOME\"", options=["-oCompression=yes"])
    assert words[0] == "ssh" and "-oBatchMode=yes" in words and words[-4:-1] == ["-oCompression=yes", "--", "me@b"]
    assert shlex.split(words[-1]) == ["exec", "sh", "-c", "echo 'a b' \"$HOME\""]


def test_another_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ssh.SSH, "ssh -F 'my config'")
    assert ssh.command(B, "true")[:3] == ["ssh", "-F", "my config"] and ssh.by_hand(B) == "ssh -F 'my config' me@b"
    monkeypatch.setenv(ssh.SSH, "ssh 'unfinished")
    with pytest.raises(UsageError, match=r"PACELINE_SSH is .* no command"):
        ssh.words()


def test_this_machine_takes_the_same_line_without_ssh() -> None:
    assert ssh.command(parse("localhost"), "true") == ["sh", "-c", "true"]
    assert ssh.command(parse("me@localhost"), "true")[0] == "ssh"  # as somebody else, perhaps


@pytest.mark.parametrize(
    "stderr, told",
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "b is not known: `ssh me@b` finds no such"),
        ("ssh: connect to host b port 22: Connection refused", "no ssh server listens (connection refused)"),
        ("ssh: connect to host b port 22: Connection timed out", "b did not answer within 8 s"),
        ("Connection timed out during banner exchange", "b did not answer within 8 s"),
        ("ssh: connect to host b port 22: No route to host", "There is no way to b"),
        ("ssh: connect to host b port 22: Network is unreachable", "check this machine's network"),
        ("me@b: Permission denied (publickey,password).", "(Permission denied (publickey,password)), and no password"),
        ("Received disconnect from b: Too many authentication failures", "was offered too many keys"),
        ("@ WARNING: UNPROTECTED PRIVATE KEY FILE! @\nme@b: Permission denied", "run chmod 600 on it"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "`ssh-keygen -R b`"),
        ("Host key verification failed.", "connect once by hand to accept it: `ssh me@b`"),
        ("Timeout, server b not responding.", "b does not answer any more"),
        ("something new\n\n", "ssh to b failed: something new; try `ssh me@b`"),
        ("", "ssh to b failed: it said nothing"),
    ],
)
def test_what_ssh_says_becomes_one_sentence_with_what_to_do(stderr: str, told: str) -> None:
    said = ssh.told(B, ssh.SSH_FAILED, stderr)
    assert told in said and said.endswith((".", "?")) and "\n" not in said


def test_what_python_says_there() -> None:
    missing = ssh.told(B, 1, "python3: Error while finding module (ModuleNotFoundError: No module named 'paceline')")
    assert missing.startswith("b has no paceline in python3; install it there: `ssh me@b python3 -m pip install")
    assert missing.endswith(f"paceline=={VERSION}`.")
    assert "no package msgspec, which paceline needs," in ssh.told(B, 1, "E: No module named 'msgspec'")
    older = ssh.told(
        B, 1, "Error while finding module (ModuleNotFoundError: No module named 'paceline.launchers.hosts')"
    )
    assert older.startswith(
        "b has another paceline than this one in python3, without paceline.launchers.hosts; install"
    )
    assert f"`ssh me@b python3 -m pip install --force-reinstall --no-deps paceline=={VERSION}`" in older
    assert ssh.told(B, 7, "Traceback\nOSError: no.\n") == "b: the command there ended with code 7: OSError: no."


def test_every_host_that_failed_has_its_sentence() -> None:
    good, bad = ssh.Answer(host=B, code=0), ssh.Answer(host=B, code=None, seconds=3.2)
    ssh.check([good])
    with pytest.raises(ClusterError, match="b did not answer within 3 s; look with `ssh me@b`"):
        ssh.check([good, bad, bad])
