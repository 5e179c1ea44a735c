"""DOES this run of the documents come to its end? Starts its processes, reads their logs, and tells both.

Started by lab/measuring/whole_runs, one process a run: `--run NAME --side paceline|TensorFlow [--quick] --told FILE`.
A run that cannot be had here, or fails, is told, too. Must never leave a process behind.

1. copy the programs, beside a settings.py with free ports,
2. start the commands, with a log each,
3. wait until all have ended, or those that serve have said what they are to say; end what goes on serving,
4. tell.
"""

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

from paceline.lab.matrices.document_runs import (
    PINNED,
    RUNS,
    Command,
    How,
    Run,
    Side,
    commands,
    pinned,
    settings_py,
    shown,
)
from paceline.lab.matrices.looks import EPOCH, Told
from paceline.lab.measuring.interrupts import interruptible, undisturbed
from paceline.lab.measuring.processes import Failed, Process
from paceline.lab.measuring.starting import in_clone
from paceline.launchers.ports import Reserved

EXAMPLES = {Side.OURS: Path("examples"), Side.THEIRS: Path("examples") / "tensorflow"}
LOOK_S = 0.1
SERVED_S = 5.0  # for a server that was told to end
AWAITED_S = 30.0  # TensorFlow looks every 10 s whether the others are there
KEPT = 200  # lines of a log, from its beginning and from its end
PORTS_004 = ("localhost:20000", "localhost:20001")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True, choices=list(RUNS))
    parser.add_argument("--side", required=True, type=Side)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--told", required=True, type=Path)
    args = parser.parse_args(argv)
    with interruptible():
        told = carried_out(RUNS[args.run], args.side, args.quick, args.told.parent / "work")
    args.told.write_bytes(msgspec.json.encode(told))


def carried_out(run: Run, side: Side, is_quick: bool, folder: Path) -> Told:
    """From the copy to what is told."""
    started = commands(run, side, is_quick)
    command = shown(started, run)
    source = in_clone(EXAMPLES[side] / run.program)
    if side is Side.THEIRS and find_spec("tensorflow") is None:
        return Told(command=command, missing="not installed")
    if source is None:
        return Told(command=command, missing=f"{EXAMPLES[side] / run.program} is not here; run from a clone")
    began_s = time.monotonic()
    failed = ""
    with Reserved() as ports:
        hosts = copy(run, side, source.parent, folder, ports)  # 1
        ports.before_start()
        try:
            follow(run, started, folder, hosts)
        except Failed as error:
            failed = str(error)
    seconds = time.monotonic() - began_s
    return Told(command=command, seconds=seconds, failed=failed, logs=logs(folder))  # 4


def copy(run: Run, side: Side, source: Path, folder: Path, ports: Reserved) -> dict[str, str]:
    """The programs alone, and where this run's tasks listen, which comes back."""
    folder.mkdir(parents=True)
    for path in source.glob("*.py"):
        shutil.copy(path, folder)
    hosts = [address.replace("127.0.0.1", "localhost") for address in ports.addresses(run.num_ps + run.num_workers)]
    (folder / "settings.py").write_text(settings_py(hosts[: run.num_ps], hosts[run.num_ps :]), encoding="utf-8")
    told = {"ps": ",".join(hosts[: run.num_ps]), "workers": ",".join(hosts[run.num_ps :])}
    if run.how is not How.GREETINGS:
        return told
    free = [address.replace("127.0.0.1", "localhost") for address in ports.addresses(2)]
    for path in folder.glob("hello_*.py"):
        text = path.read_text(encoding="utf-8")
        for theirs, ours in zip(PORTS_004, free, strict=True):
            text = text.replace(theirs, ours)
        is_pinned = run.name == PINNED and side is Side.OURS and path.name == run.program
        path.write_text(pinned(text) if is_pinned else text, encoding="utf-8")
    return told


def follow(run: Run, started: Sequence[Command], folder: Path, hosts: dict[str, str]) -> None:
    """2 and 3. Raises Failed with a sentence."""
    environ = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config")}
    deadline_s = time.monotonic() + run.limit_s
    processes: list[Process] = []
    try:
        for each in started:
            words = [word.format(**hosts) for word in words_of(each, folder)]
            processes.append(Process(each.log, words, environ, folder / "logs" / f"{each.log}.log", speaks=False))
            if each.awaited:
                say_so(processes[-1], each.awaited, AWAITED_S)
        for process, each in zip(processes, started, strict=True):
            wait(process, each, processes, deadline_s)
    finally:
        with undisturbed():
            end(processes)


def words_of(command: Command, folder: Path) -> list[str]:
    """The command with its program's whole path, for there is no other folder to start it in."""
    words = [str(folder / word) if word.endswith(".py") else word for word in command.words]
    if not command.is_launcher:
        return [sys.executable, *words]
    return [sys.executable, "-P", "-m", "paceline", words[0], "--run-dir", str(folder / "run"), *words[1:]]


def say_so(process: Process, pattern: str, within_s: float) -> None:
    """Until it has; if it never does, the row that asks for it will tell."""
    deadline_s = time.monotonic() + within_s
    while not any(re.search(pattern, line) for line in read(process.log)) and time.monotonic() < deadline_s:
        if process.is_gone(LOOK_S):
            return


def wait(process: Process, command: Command, all_: Sequence[Process], deadline_s: float) -> None:
    """Until it has done its part; a server without anything to say is waited for by nobody."""
    while not has_done(process, command):
        broken = next((each for each in all_ if each.code), None)
        if broken is not None:
            raise Failed(broken.cause())
        if time.monotonic() > deadline_s:
            raise Failed(f"{process.name} did not end in time")


def has_done(process: Process, command: Command) -> bool:
    if command.until:
        is_gone = process.is_gone(LOOK_S)  # first: what it has said until then is read
        if any(re.search(command.until, line) for line in read(process.log)):
            return True
        if is_gone and not process.code:
            raise Failed(f"{command.until!r} was never said: {process.cause()}")
        return False
    if command.serves:
        return True
    return process.is_gone(LOOK_S) and process.code == 0


def end(processes: Sequence[Process]) -> None:
    """First politely: a launcher ends its own tasks, a task leaves its cluster."""
    for process in processes:
        process.terminate()
    deadline_s = time.monotonic() + SERVED_S
    for process in processes:
        process.is_gone(deadline_s - time.monotonic())
        process.kill()


def logs(folder: Path) -> dict[str, list[str]]:
    """What every task said, without the middle of a long log but for its epochs."""
    found = {}
    for path in [*(folder / "logs").glob("*.log"), *(folder / "run" / "logs").glob("*.log")]:
        lines = read(path)
        middle = [line for line in lines[KEPT:-KEPT] if EPOCH.search(line)]
        found[path.stem] = lines if len(lines) <= 2 * KEPT else [*lines[:KEPT], *middle, *lines[-KEPT:]]
    return found


def read(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


if __name__ == "__main__":
    main()
