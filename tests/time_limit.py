"""Run a command of `make` within a time limit: `python tests/time_limit.py SECONDS COMMAND...`.

When the time is over, every test that runs is named, its stacks are printed, and everything that the command has
started is killed; the exit code is 124, as timeout(1) has it (which macOS lacks). What the command leaves behind is
killed, too. Where a pytest process did not end by itself (tests/watchdog.py), the run has failed, though all its tests
have passed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from watchdog import DONE, RECORDS

TIMED_OUT = 124
STOPPING_S = 30.0  # what pytest may take to end after Ctrl+C
KILLED_S = 10.0


def main(words: list[str]) -> int:
    """Run the command; its exit code, or 124."""
    limit_s, command = float(words[0]), words[1:]
    with tempfile.TemporaryDirectory() as folder:
        # Of Ctrl+C in a terminal the command hears, too: this process only sees to it that it ends.
        stops = {signal.SIGINT: 0, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
        process: subprocess.Popen[bytes] | None = None
        deadline = time.monotonic() + limit_s

        def stop(number: int, _: object) -> None:
            nonlocal deadline
            deadline = min(deadline, time.monotonic() + STOPPING_S)
            if process is not None and stops[signal.Signals(number)]:
                process.send_signal(stops[signal.Signals(number)])

        for number in stops:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
                signal.signal(number, stop)
        process = subprocess.Popen(command, env={**os.environ, RECORDS: folder})
        code = _end_of(process, lambda: deadline)
        if code is None:
            print(f"\n{' '.join(command)}\nis not done within {limit_s:g} s. It runs:", file=sys.stderr)
            _tell_stacks(Path(folder))
            code = TIMED_OUT
        _kill_all(process, folder)
        return _judged(code, Path(folder))


def _end_of(process: "subprocess.Popen[bytes]", deadline: Callable[[], float]) -> int | None:
    """The exit code of a process that ends before the deadline, which a signal may bring nearer."""
    while (left_s := deadline() - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(min(left_s, 1.0))
    return process.poll()


def _tell_stacks(folder: Path) -> None:
    for record in _records(folder):
        age_s = time.time() - record.stat().st_mtime
        print(f"  {record.read_text()}, for {age_s:.0f} s (process {record.name})", file=sys.stderr, flush=True)
        with suppress(ProcessLookupError):
            os.kill(int(record.name), signal.SIGUSR2)
            time.sleep(0.5)  # until its stacks are printed, before those of the next


def _kill_all(process: "subprocess.Popen[bytes]", folder: str) -> None:
    """Kill what the command has started and left: its children, and whatever has our folder in its environment."""
    left = set(psutil.Process().children(recursive=True))
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.pid != os.getpid() and each.environ().get(RECORDS) == folder:
                left.add(each)
    for each in left:
        with suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE:
                print(f"Killed, it was left: {each.pid} {' '.join(each.cmdline())[:200]}", file=sys.stderr)
                each.kill()
    psutil.wait_procs(left, timeout=KILLED_S)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def _judged(code: int, folder: Path) -> int:
    """The exit code: not 0 where a pytest process was killed or ended from within, before its last test had ended."""
    for record in _records(folder):
        stage = record.read_text()
        print(f"A pytest process did not end by itself; it stopped at: {stage}", file=sys.stderr)
        # One of xdist's that has told all its results has not failed: an extension may crash the interpreter's end.
        if not stage.startswith(DONE):
            code = code or 1
    return code


def _records(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
