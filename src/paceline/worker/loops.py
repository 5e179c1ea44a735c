"""Find the loop of the user's script that trains, while it runs: from the stack and the script's own text.

Used by worker/position where neither ctx.epochs nor ctx.steps guides a loop. A pass over the loader, or a push, is
made somewhere inside that loop; a loop whose own iteration has asked for the pass is not around it.
"""

import ast
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

from paceline.checkpoint.loop import FIT, FOR, LIBRARY, OWN, PASS, UNKNOWN, WHILE, Loop

OURS = ("paceline", "torch", "keras", "tensorflow", "contextlib", "threading", "runpy")
STEP = "global_step"
PER_EPOCH = "for epoch in ctx.epochs(n):"
PER_STEP = "for _ in ctx.steps(total):"
FIT_INSTEAD = "for epoch in ctx.epochs(n): model.fit(data, epochs=epoch + 1, initial_epoch=epoch)"
LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PARSING = threading.Lock()  # ast.parse fails in CPython 3.11 when two threads are in it
Statement = ast.For | ast.AsyncFor | ast.While


def around_pass() -> Loop:
    """The loop in which a pass over the training loader begins; PASS if there is none."""
    return _found(instead=PER_EPOCH) or (Loop(kind=PASS) if _has_text() else UNKNOWN)


def around_push() -> Loop:
    """The loop in which a script steps that has no loader of ours."""
    return _found(instead=PER_STEP) or (Loop(kind=PASS) if _has_text() else UNKNOWN)


def of_fit() -> Loop:
    """Keras's own, at the script's call of fit, or the script's around that."""
    if (around := _found(instead=FIT_INSTEAD)) is not None:
        return around
    frame = next(_frames(), None)
    if frame is None:
        return Loop(kind=FIT, text="model.fit(…)", instead=FIT_INSTEAD)
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line, frame.f_globals).strip()
    return Loop(kind=FIT, file=os.path.abspath(file), line=line, text=text or "model.fit(…)", instead=FIT_INSTEAD)


def _found(instead: str) -> Loop | None:
    """The outermost loop that counts for itself; if one on the way asks ctx.global_step, that one."""
    found: list[tuple[FrameType, Statement]] = []
    for frame in _frames():
        tree = _tree(frame.f_code.co_filename, len(_lines(frame)))
        for statement in _around(frame, tree) if tree is not None else ():
            if _asks_global_step(statement, tree) or _begins_later(statement, frame):
                return Loop(kind=OWN)
            found.append((frame, statement))
    if not found:
        return None
    frame, statement = found[-1]
    instead = PER_EPOCH if len(found) > 1 and instead == PER_STEP else instead  # one for passes, one for batches
    return _library(frame) if _is_library(frame) else _loop(frame, statement, instead)


def _loop(frame: FrameType, statement: Statement, instead: str) -> Loop:
    line = statement.lineno
    text = _lines(frame)[line - 1].strip()
    if isinstance(statement, ast.While):
        instead = f"{instead}` or `while ctx.global_step < total:"
        return Loop(kind=WHILE, file=os.path.abspath(frame.f_code.co_filename), line=line, text=text, instead=instead)
    if instead == PER_EPOCH and (count := _count(statement.iter)):
        instead = f"for {ast.unparse(statement.target)} in ctx.epochs({count}):"
    return Loop(kind=FOR, file=os.path.abspath(frame.f_code.co_filename), line=line, text=text, instead=instead)


def _library(frame: FrameType) -> Loop:
    """A library's loop is named by the script's line that has called the library."""
    caller: FrameType | None = frame
    while caller is not None and (_is_library(caller) or _is_ours(caller)):
        caller = caller.f_back
    shown = caller or frame
    file, line = shown.f_code.co_filename, shown.f_lineno
    return Loop(kind=LIBRARY, file=os.path.abspath(file), line=line, text=_text(shown, line), instead=PER_EPOCH)


def _count(iterated: ast.expr) -> str:
    """What a plain `range` counts to.

    >>> _count(ast.parse("range(args.epochs)", mode="eval").body)
    'args.epochs'
    """
    match iterated:
        case ast.Call(func=ast.Name(id="range"), args=[one], keywords=[]):
            return ast.unparse(one)
        case ast.Call(
            func=ast.Name(id="range"),
            args=[ast.Constant(value=1), ast.BinOp(left=one, op=ast.Add(), right=ast.Constant(value=1))],
            keywords=[],
        ):
            return ast.unparse(one)
        case ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=0) | ast.Name() | ast.Attribute(), one]):
            return ast.unparse(one)
    return ""


def _around(frame: FrameType, tree: ast.Module) -> Iterator[Statement]:
    """The loops of this frame's function whose body is being executed, the innermost first."""
    place = _place(frame)
    first = frame.f_code.co_firstlineno
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, Statement) and node.lineno >= first and _start(node) <= place <= _end(node)
    ]
    return iter(sorted(found, key=lambda node: (node.lineno, node.col_offset), reverse=True))


def _start(node: Statement) -> tuple[int, int]:
    return node.body[0].lineno, node.body[0].col_offset


def _end(node: Statement) -> tuple[int, int]:
    last = node.body[-1]
    return last.end_lineno or last.lineno, last.end_col_offset or 0


def _place(frame: FrameType) -> tuple[int, int]:
    """Line and column of what this frame executes."""
    for number, (line, _, column, _) in enumerate(frame.f_code.co_positions()):
        if number == frame.f_lasti // 2 and line is not None and column is not None:
            return line, column
    return frame.f_lineno, 1 << 20


def _asks_global_step(statement: Statement, tree: ast.Module | None) -> bool:
    """Whether its header asks for the global step, also in a function of the script, or its body compares it."""
    header = statement.test if isinstance(statement, ast.While) else statement.iter
    if _names_step(header):
        return True
    called = {
        node.func.id for node in ast.walk(header) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    functions = [node for node in ast.walk(tree or header) if isinstance(node, ast.FunctionDef) and node.name in called]
    compared = [node for node in ast.walk(statement) if isinstance(node, ast.Compare)]
    return any(_names_step(node) for node in [*functions, *compared])


def _begins_later(statement: Statement, frame: FrameType) -> bool:
    """Whether it counts from where the script says, in this process: `range(start, n)`, where start is a name that
    stands for more than 1; the first epoch may be called 1."""
    match getattr(statement, "iter", None):
        case ast.Name() as name:
            given = _value(name, frame)
            return isinstance(given, range) and given.start > 1
        case ast.Call(func=ast.Name(id="range"), args=[ast.Name() | ast.Attribute() as start, _, *_]):
            given = _value(start, frame)
            return isinstance(given, int) and given > 1
    return False


def _value(expression: ast.expr, frame: FrameType) -> object:
    """What a name, an attribute or a number stands for; None for all else."""
    match expression:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=owner, attr=name):
            return getattr(_value(owner, frame), name, None)
    return None


def _names_step(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == STEP for each in ast.walk(node))


def _frames() -> Iterator[FrameType]:
    """Those of the script and of libraries that it has called, the innermost first; not those that started it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("paceline.launchers"):
            return
        if not _is_ours(frame):
            yield frame
        if name == "__main__" and frame.f_code.co_name == "<module>":
            return
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in OURS


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(LIBRARIES)


def _has_text() -> bool:
    """Whether the script can be read; what cannot be read may have any loop."""
    return any(not _is_library(frame) and _lines(frame) for frame in _frames())


def _lines(frame: FrameType) -> list[str]:
    return linecache.getlines(frame.f_code.co_filename, frame.f_globals)


def _text(frame: FrameType, line: int) -> str:
    lines = _lines(frame)
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


@lru_cache(maxsize=64)
def _tree(file: str, _lines: int) -> ast.Module | None:
    try:
        with _PARSING:
            return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
