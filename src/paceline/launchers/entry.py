"""WHAT runs inside a task's process? `python -m paceline.launchers.entry [--parent PID] [--module] [SCRIPT …]`.

Started by launchers/local; `paceline serve` calls become() in its own process.
Must never outlive the launcher that started it, and must never import torch before the task does.
"""

import faulthandler
import importlib.machinery
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from paceline import hangup
from paceline.cluster.discovery import Assignment, discover, encode_for_child
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TRAINING, ConnectionLost, PacelineError, UsageError
from paceline.exits import TOLD_BY_MESSAGE, true_error
from paceline.launchers.kernel import die_with
from paceline.launchers.seeding import seed_task
from paceline.telemetry import losses
from paceline.telemetry.lines import error_line
from paceline.telemetry.output import keep_printing

SIGNAL_S = 0.5
THREADS = "OMP_NUM_THREADS"
TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")  # what TensorFlow looks at instead


loaded_with: dict[str, str] = {}  # in a forked task: what torch, which was imported before the script, was told


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker runs: a script, or a module as in `python -m`, with its own arguments."""

    script: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    is_plain: bool = False  # it does not use paceline, and runs in a process of its own


def check_program(program: Program) -> None:
    """Refuse a script or module that is not there, before anything starts."""
    if program.is_module:
        top = program.script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"No module named {top!r} here or among the installed ones.")
    elif Path(program.script).is_dir():
        raise UsageError(f"{program.script} is a folder; give the script inside it.")
    elif not Path(program.script).is_file():
        raise UsageError(f"There is no script {program.script}.")


def become(assignment: Assignment, program: Program | None) -> int:
    """Be this task in this process until it is over; its exit code comes back."""
    os.environ.update(encode_for_child(assignment))  # where paceline.init() in the script looks first
    losses.begin(os.environ.pop(losses.VARIABLE, ""))  # a program that the script starts has no such descriptor
    keep_printing(is_task=True)
    if program is None:
        code = guarded(lambda: serve(assignment))
    else:
        seed_task(assignment)
        code = guarded(lambda: execute(program))
        closing = guarded(lambda: close(code))
        code = code or closing
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit code is known; a late Ctrl+C must not change it
        hangup.ignore()
    return code


def serve(assignment: Assignment) -> None:
    from paceline.launchers.task import serve_ps

    serve_ps(assignment)


def close(code: int) -> None:
    from paceline.launchers import task

    if code == EXIT_INTERRUPTED:
        task.give_up()
    else:
        task.finish(code == EXIT_OK)


def execute(program: Program) -> None:
    """Run the script as `python SCRIPT` would: its name, its arguments, its folder first on the path."""
    sys.argv = [program.script, *program.args]
    try:
        if program.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program.script).resolve().parent))
            runpy.run_path(program.script, run_name="__main__")
    except Exception as error:
        true = true_error(error)
        if true is error:
            raise
        raise true from None


def guarded(body: Callable[[], None]) -> int:
    """Run body; whatever it raises is printed once and becomes an exit code."""
    try:
        body()
    except SystemExit as error:
        return exit_code(error)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except TOLD_BY_MESSAGE as error:
        if isinstance(error, ConnectionLost) and is_interrupted_too():
            print("Interrupted.", file=sys.stderr)
            return EXIT_INTERRUPTED
        print(error_line(error), file=sys.stderr)
        return error.exit_code
    except BaseException as error:
        traceback.print_exception(type(error), error, script_part(error.__traceback__))
        return error.exit_code if isinstance(error, PacelineError) else EXIT_TRAINING
    return EXIT_OK


def is_interrupted_too() -> bool:
    """Ctrl+C reaches all tasks at once, and a ps may be gone before our own signal is seen: look for it a moment."""
    try:
        time.sleep(SIGNAL_S)
    except KeyboardInterrupt:
        return True
    return False


def exit_code(error: SystemExit) -> int:
    """What the interpreter would make of sys.exit(...)."""
    if error.code is None:
        return EXIT_OK
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return EXIT_TRAINING


def script_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that only started the script."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def main(argv: Sequence[str]) -> int:
    """The task that the launcher's environment describes."""
    rest = list(argv)
    if rest[:1] == ["--parent"]:
        die_with(int(rest[1]))
        del rest[:2]
    is_module = rest[:1] == ["--module"]
    if is_module:
        del rest[0]
    faulthandler.enable()
    hangup.ignore()  # the launcher's affair
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored, and that is inherited
    assignment = discover(argv=[])
    if assignment is None:
        raise UsageError("This is the launcher's own entry; start tasks with `paceline run` or `paceline serve`.")
    program = Program(script=rest[0], args=tuple(rest[1:]), is_module=is_module) if rest else None
    return become(assignment, program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
