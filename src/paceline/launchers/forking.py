"""WHAT runs inside the nursery? `python -m paceline.launchers.forking FD PARENT …` imports, and forks when asked.

Started by launchers/nursery; a forked process goes on in launchers/entry. Must never compute anything (a fork after
OpenMP ran hangs), never import a user's script, and never outlive the launcher.

A birth: 1. the launcher sends a request; 2. what the task needs is imported; 3. two forks, the process between them
ends, so that the launcher is the task's parent; 4. the launcher learns the pid; 5. only then the task may go on.
"""

import gc
import importlib
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from paceline import hangup
from paceline.launchers import entry, seeding
from paceline.launchers.kernel import die_with, show_as

LOG, NULL = 0, 1  # the first descriptors of a request; the named ones follow
MAX_DESCRIPTORS = 16
GO = b"g"
COMPILER = "torch._dynamo"


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """What a task needs to begin."""

    argv: list[str]  # of launchers/entry
    environ: dict[str, str]
    cwd: str
    title: str
    imports: list[str]  # before the fork, once for all tasks
    named: list[str] = []  # a variable for each further descriptor: its number in the task


def main(argv: Sequence[str]) -> int:
    """Serve until the launcher is gone, and return only in a forked process: the exit code of its task."""
    side = socket.socket(fileno=int(argv[0]))
    die_with(int(argv[1]))
    hangup.ignore()
    gc.disable()  # imports make hardly any garbage, and looking for it took 0.2 s; a task has its collector on
    while True:
        message, descriptors, _, _ = socket.recv_fds(side, 64, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)
        birth = read(descriptors.pop(0))
        import_all(birth.imports)
        if fork_twice(side):
            begin(birth, descriptors)
            return entry.main(birth.argv)
        for descriptor in descriptors:
            os.close(descriptor)


def read(descriptor: int) -> Birth:
    """1. A request is a file, because an environment may be larger than a message."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return msgspec.convert(json.loads(file.read()), Birth)


def import_all(names: Sequence[str]) -> None:
    """2. What is not installed, or fails, is the task's own to find out."""
    new = [name for name in names if name not in sys.modules]
    for name in new:
        with suppress(Exception):
            importlib.import_module(name)
    if "torch" in sys.modules and not is_postponed():
        with suppress(Exception):
            importlib.import_module(COMPILER)  # once here, not at the first optimizer of every task
    if new:
        gc.freeze()  # the collector of a task need not touch, and so copy, what all share


def is_postponed() -> bool:
    """Whether tasks do without torch's compiler until they compile something; an import of torch, so asked after it."""
    from paceline.frameworks.torch import compiler as torch_compiler

    return COMPILER not in sys.modules and torch_compiler.postpone()


def fork_twice(side: socket.socket) -> bool:
    """3. to 5. True in the new process, which has no parent but the launcher."""
    told, tell = os.pipe()
    wait, go = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            side.close()
            for descriptor in (told, tell, go):
                os.close(descriptor)
            if os.read(wait, 1) != GO:
                os._exit(1)
            os.close(wait)
            return True
        os.setpgid(child, child)  # Ctrl+C in a terminal reaches only the launcher
        os.write(tell, str(child).encode())
        os._exit(0)
    os.close(tell)
    os.close(wait)
    pid = os.read(told, 32)
    os.waitpid(between, 0)  # once this returns, the kernel has given the child to the launcher
    side.send(pid)
    with suppress(BrokenPipeError):
        os.write(go, GO)
    os.close(told)
    os.close(go)
    return False


def begin(birth: Birth, descriptors: Sequence[int]) -> None:
    """Make the process what a new one would be: its files, folder, environment, and random numbers of its own."""
    gc.enable()
    os.dup2(descriptors[NULL], 0)
    os.dup2(descriptors[LOG], 1)
    os.dup2(descriptors[LOG], 2)
    os.close(descriptors[LOG])
    os.close(descriptors[NULL])
    entry.loaded_with[entry.THREADS] = os.environ.get(entry.THREADS, "")
    os.environ.clear()
    os.environ.update(birth.environ)
    for name, descriptor in zip(birth.named, descriptors[2:], strict=True):
        os.environ[name] = str(descriptor)
    os.chdir(birth.cwd)
    show_as(birth.title)
    multiprocessing.current_process().authkey = os.urandom(32)
    seeding.unlike_parent()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
