"""Find the loop of the user's script that trains, while it runs, from the stack and the text of the script.

Used by worker/positions/position where neither ctx.epochs nor ctx.steps guides a loop. The script begins a pass over
the loader, or pushes, in the body of that loop. `for batch in loader` is not that loop: its head begins the pass.
"""

import ast
import linecache
import os
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

from paceline.checkpoint.loop import FIT, FOR, LIBRARY, OWN, PASS, UNKNOWN, WHILE, Loop
from paceline.worker.script import OURS, is_library, is_of

PASSED_OVER = (*OURS, "contextlib", "threading", "runpy")
STEP = "global_step"
PER_EPOCH = "for epoch in ctx.epochs(n):"
PER_STEP = "for _ in ctx.steps(total):"
FIT_CALL = "model.fit(…)"  # where the line cannot be read
FIT_INSTEAD = "for epoch in ctx.epochs(n): model.fit(data, epochs=epoch + 1, initial_epoch=epoch)"
_PARSING = threading.Lock()  # ast.parse fails in CPython 3.11 when two threads are in it
Statement = ast.For | ast.AsyncFor | ast.While


def around_this(instead: str) -> Loop:
    """Return the training loop around this call, which `instead` could replace; PASS if there is none, UNKNOWN if the
    script cannot be read."""
    return _found(instead) or (Loop(kind=PASS) if _has_text() else UNKNOWN)


def around_fit() -> Loop:
    """Return the script's loop around its call of Keras's fit, else the loop of fit itself."""
    if (around := _found(FIT_INSTEAD)) is not None:
        return around
    frame = next(_frames(), None)
    if frame is None:
        return Loop(kind=FIT, text=FIT_CALL, instead=FIT_INSTEAD)
    return _loop(FIT, frame, frame.f_lineno, FIT_INSTEAD)


def _found(instead: str) -> Loop | None:
    """Return the outermost loop around the call; OWN if one of them counts from where the script says."""
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
    if is_library(frame):
        shown = _caller_of_library(frame)
        return _loop(LIBRARY, shown, shown.f_lineno, PER_EPOCH)
    if isinstance(statement, ast.While):
        return _loop(WHILE, frame, statement.lineno, f"{instead}` or `while ctx.global_step < total:")
    if instead == PER_EPOCH and (count := _count(statement.iter)):
        instead = f"for {ast.unparse(statement.target)} in ctx.epochs({count}):"
    return _loop(FOR, frame, statement.lineno, instead)


def _loop(kind: str, frame: FrameType, line: int, instead: str) -> Loop:
    lines = _lines(frame)
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    file = os.path.abspath(frame.f_code.co_filename)
    return Loop(kind=kind, file=file, line=line, text=text or (FIT_CALL if kind == FIT else ""), instead=instead)


def _caller_of_library(frame: FrameType) -> FrameType:
    """Return the frame of the script that has called this library; the library's own if there is none."""
    caller: FrameType | None = frame
    while caller is not None and (is_library(caller) or is_of(PASSED_OVER, caller)):
        caller = caller.f_back
    return caller or frame


def _count(iterated: ast.expr) -> str:
    """Return what a plain `range` counts to, as text; empty for all else.

    >>> _count(ast.parse("range(args.epochs)", mode="eval").body)
    'args.epochs'
    """
    match iterated:
        case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]):
            match arguments:
                case [one] | [ast.Constant(value=1), ast.BinOp(left=one, op=ast.Add(), right=ast.Constant(value=1))]:
                    return ast.unparse(one)
                case [ast.Constant(value=0) | ast.Name() | ast.Attribute(), one]:
                    return ast.unparse(one)
    return ""


def _around(frame: FrameType, tree: ast.Module) -> list[Statement]:
    """Return the loops of this frame's function whose body is being executed, the innermost first."""
    place, found = _place(frame), []
    for node in ast.walk(tree):
        if isinstance(node, Statement) and node.lineno >= frame.f_code.co_firstlineno:
            first, last = node.body[0], node.body[-1]
            end = last.end_lineno or last.lineno, last.end_col_offset or 0
            if (first.lineno, first.col_offset) <= place <= end:
                found.append(node)
    return sorted(found, key=lambda node: (node.lineno, node.col_offset), reverse=True)


def _place(frame: FrameType) -> tuple[int, int]:
    """Return line and column of what this frame executes."""
    for number, (line, _, column, _) in enumerate(frame.f_code.co_positions()):
        if number == frame.f_lasti // 2 and line is not None and column is not None:
            return line, column
    return frame.f_lineno, 1 << 20


def _asks_global_step(statement: Statement, tree: ast.Module | None) -> bool:
    """Tell whether a loop's head reads the global step, also in a function that it calls, or its body compares it."""
    header = statement.test if isinstance(statement, ast.While) else statement.iter
    called = {n.func.id for n in ast.walk(header) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    functions = [n for n in ast.walk(tree or header) if isinstance(n, ast.FunctionDef) and n.name in called]
    compared = [n for n in ast.walk(statement) if isinstance(n, ast.Compare)]
    return any(_names_step(each) for each in [header, *functions, *compared])


def _begins_later(statement: Statement, frame: FrameType) -> bool:
    """Tell whether a loop counts from where the script says, as `range(start, n)` does where start is a name for more
    than 1. A name for 1 says nothing: the first epoch may be called 1."""
    match getattr(statement, "iter", None):
        case ast.Name() as name:
            given = _value(name, frame)
            return isinstance(given, range) and given.start > 1
        case ast.Call(func=ast.Name(id="range"), args=[ast.Name() | ast.Attribute() as start, _, *_]):
            given = _value(start, frame)
            return isinstance(given, int) and given > 1
    return False


def _value(expression: ast.expr, frame: FrameType) -> object:
    """Return what a name, an attribute or a number stands for; None for all else."""
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
    """Yield the frames of the script and of libraries that it has called, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("paceline.launchers"):
            return
        if not is_of(PASSED_OVER, frame):
            yield frame
        if name == "__main__" and frame.f_code.co_name == "<module>":
            return
        frame = frame.f_back


def _has_text() -> bool:
    """Tell whether the text of the script can be read; what cannot be read may have any loop."""
    return any(not is_library(frame) and _lines(frame) for frame in _frames())


def _lines(frame: FrameType) -> list[str]:
    return linecache.getlines(frame.f_code.co_filename, frame.f_globals)


@lru_cache(maxsize=64)
def _tree(file: str, _lines: int) -> ast.Module | None:
    try:
        with _PARSING:
            return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None
