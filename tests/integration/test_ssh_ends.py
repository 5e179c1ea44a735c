"""What is started on hosts ends in time, and with all that it started; this machine stands for a host."""

import time

import psutil

from paceline.cluster.hosts import parse
from paceline.launchers import ssh

HERE = parse("localhost")


def test_one_that_takes_too_long_ends_with_all_that_it_started() -> None:
    line = "sleep 60 & echo $! && wait"
    [answer] = ssh.run_on_all({HERE.name: line}, [HERE], timeout_s=1.0)
    assert answer.code is None and "did not answer within" in answer.failure
    child = int(answer.stdout)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_nobody_waits_for_a_pipe_that_somebody_else_holds() -> None:
    began_s = time.monotonic()
    [answer] = ssh.run_on_all({HERE.name: "setsid sleep 8 & sleep 60"}, [HERE], timeout_s=1.0)
    assert answer.code is None and time.monotonic() - began_s < 6


def test_a_host_that_says_more_than_anybody_reads_does_not_wait() -> None:
    process, said = ssh.start(HERE, "yes 'what it says' | head -c 2000000 >&2; echo the end >&2"), bytearray()
    assert process.stderr is not None
    ssh.listen(process.stderr, said).join(30)
    ssh.end(process, patience_s=10)
    assert process.returncode == 0 and len(said) <= ssh.SAID_BYTES and said.endswith(b"the end\n")
