"""What is started on hosts ends in time, and with all that it started; this machine stands for a host."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from paceline.cluster.hosts import parse
from paceline.launchers.entry import Program
from paceline.launchers.hosts import ssh, syncing

HERE = parse("localhost")


def test_one_that_takes_too_long_ends_with_all_that_it_started() -> None:
    line = "sleep 60 & echo $! && wait"
    [answer] = ssh.run_on_all({HERE.name: line}, [HERE], timeout_s=1.0)
    assert answer.code is None and "did not answer within" in answer.failure
    child = int(answer.stdout)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_nobody_waits_for_a_pipe_that_somebody_else_holds() -> None:
    began_s = time.monotonic()
    [answer] = ssh.run_on_all({HERE.name: "setsid sleep 30 & sleep 60"}, [HERE], timeout_s=1.0)
    assert answer.code is None and time.monotonic() - began_s < 25


def test_a_folder_of_this_machine_lies_below_the_home_folder_as_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    host = msgspec.structs.replace(HERE, folder="project")
    line = ssh.python_line(host, "-c", "import os; print(os.getcwd())")
    [answer] = ssh.run_on_all({host.name: line}, [host])
    assert answer.stdout.decode().strip() == str(tmp_path / "project")


def test_a_copy_by_tar_does_not_wait_for_who_reads_its_complaints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tar there says more than a pipe holds while it reads."""
    source, there, tools = tmp_path / "source", tmp_path / "there", tmp_path / "bin"
    for folder in (source, there, tools):
        folder.mkdir()
    (source / "large").write_bytes(b"x" * 3_000_000)
    (tools / "tar").write_text(
        "#!/bin/sh\nyes 'cannot change mode' | head -c 1000000 >&2\ncat >/dev/null\necho full >&2\nexit 2\n"
    )
    (tools / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    said = syncing.copy(source, syncing.Way(HERE, syncing.TAR, str(there)), [])
    assert said.startswith("The code could not be copied to localhost: ") and said.endswith("full.")


def test_what_is_being_copied_ends_with_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[subprocess.Popen[bytes]] = []
    way = syncing.Way(HERE, syncing.TAR, str(tmp_path))

    def interrupted(call: Callable[[syncing.Way], str], ways: list[syncing.Way]) -> list[str]:
        copies.append(ssh.start(HERE, "sleep 60"))
        monkeypatch.setattr(syncing, "copy", lambda source, way, started: started.append(copies[0]))
        call(ways[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(syncing, "look", lambda *_: [way])
    monkeypatch.setattr(ssh, "at_once", interrupted)
    with pytest.raises(KeyboardInterrupt):
        syncing.sync(syncing.Code(tmp_path, ".", Program(script="x")), [HERE])
    assert copies[0].returncode == -9


def test_a_host_that_says_more_than_anybody_reads_does_not_wait() -> None:
    process, said = ssh.start(HERE, "yes 'what it says' | head -c 2000000 >&2; echo the end >&2"), bytearray()
    assert process.stderr is not None
    ssh.listen(process.stderr, said).join(30)
    ssh.end(process, patience_s=10)
    assert process.returncode == 0 and len(said) <= ssh.SAID_BYTES and said.endswith(b"the end\n")
