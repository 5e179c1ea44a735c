"""DOES a ps ever execute data? An audit hook in every process that a test starts; only a serving ps is judged.

Python imports this by its name when its folder is on PYTHONPATH (Processes.environ puts it there). It writes a line to
the file that PACELINE_TEST_AUDIT names for everything that runs code which did not come from an import; the fixture
`processes` fails when there is one. Must never raise: a fault that the hook makes would hide the one it looks for.
"""

import os
import sys

FILE = os.environ.get("PACELINE_TEST_AUDIT", "")
WATCHED = ("pickle.find_class", "marshal.loads", "exec", "compile", "code.__new__", "os.system", "subprocess.Popen")
IMPORTING = ("<frozen importlib._bootstrap", "<frozen zipimport")
AST, TRACEBACK = (os.path.join(os.path.dirname(os.__file__), name) for name in ("ast.py", "traceback.py"))
STARTING = ("<frozen runpy>", "<frozen site>")  # by them, not somewhere below them


def is_ps() -> bool:
    """Asked when something happens: a task that was forked gets its environment later."""
    return '"job":"ps"' in os.environ.get("PACELINE_TASK", "").replace(" ", "")


def is_import() -> bool:
    """Modules are code too, and run while they are imported, with all that they define then."""
    frame = sys._getframe().f_back.f_back
    if frame is None or frame.f_code.co_filename in STARTING:
        return True  # the interpreter itself, on its way to the program
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTING):
            return True
        frame = frame.f_back
    return False


def is_traceback() -> bool:
    """Python parses a line of its own source to know where to put the carets; what is parsed is not run."""
    frame = sys._getframe().f_back.f_back
    above = frame.f_back if frame is not None else None
    return above is not None and (frame.f_code.co_filename, above.f_code.co_filename) == (AST, TRACEBACK)


def caller() -> str:
    frame = sys._getframe().f_back.f_back
    if frame is None:
        return "the interpreter"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def hook(event: str, args: tuple[object, ...]) -> None:
    if event not in WATCHED or not is_ps() or (event != "pickle.find_class" and is_import()):
        return
    if event == "compile" and is_traceback():
        return
    line = f"pid {os.getpid()}: {event} by {caller()}\n"
    descriptor = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


if FILE:
    sys.addaudithook(hook)
