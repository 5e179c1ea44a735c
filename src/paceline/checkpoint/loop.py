"""WHICH loop of a script made the steps of a checkpoint, and does it go on from there, or begin again?

Found by the worker (worker/loops), written into state.json, read by whoever resumes. Pure: names and sentences.
"""

from collections.abc import Iterable

import msgspec

EPOCHS, STEPS = "epochs", "steps"  # ctx.epochs, ctx.steps
OWN = "global_step"  # it asks ctx.global_step
PASS = "pass"  # no loop: one pass over the loader
FOR, WHILE, LIBRARY, FIT = "for", "while", "library", "fit"  # of the script; of a library; Keras's fit
BEGIN_AGAIN = (FOR, WHILE, LIBRARY, FIT)
LOAD = (
    "to begin a new run with the trained parameters, call paceline.load_checkpoint(path, model, optimizer) before "
    "prepare()"
)


class Loop(msgspec.Struct, frozen=True, kw_only=True):
    """One loop, where it stands, and what goes on instead of it."""

    kind: str
    file: str = ""
    line: int = 0
    text: str = ""
    instead: str = ""

    @property
    def begins_again(self) -> bool:
        """Whether its counting starts at 0 in every process, whatever was done before."""
        return self.kind in BEGIN_AGAIN

    @property
    def change(self) -> str:
        """What to write where.

        >>> Loop(kind=FOR, file="/a/t.py", line=3, text="for e in range(9):", instead="for e in ctx.epochs(9):").change
        'write `for e in ctx.epochs(9):` instead of `for e in range(9):` (t.py, line 3)'
        """
        place = f"({self.file.rpartition('/')[2]}, line {self.line})"
        if self.kind == LIBRARY:
            return f"write a loop of your own with `{self.instead}` instead of the library's, called at {place}"
        return f"write `{self.instead}` instead of `{self.text}` {place}"

    def refusal(self, begins: str, step: int) -> str:
        """Why the request that `begins` so is refused, and what to do."""
        return (
            f"{begins}: the training loop counts from 0 again, so it would not do what remains after global step "
            f"{step} but all of it once more: {self.change}; or {LOAD}."
        )

    def stands_in(self, script: str) -> bool:
        """Whether a script still has this loop, and none that goes on.

        >>> loop = Loop(kind=FOR, text="for e in range(9):")
        >>> loop.stands_in("  for e in range(9):"), loop.stands_in("for e in ctx.epochs(9):")
        (True, False)
        """
        is_changed = any(call in script for call in (".epochs(", ".steps("))
        return not is_changed and any(line.strip() == self.text for line in script.splitlines())


UNKNOWN = Loop(kind="")


def of_all(told: Iterable[dict[str, str | int]]) -> Loop:
    """Of several workers: one that begins again, if there is any."""
    loops = [of(each) for each in told]
    return next((loop for loop in loops if loop.begins_again), loops[0] if loops else UNKNOWN)


def of(told: dict[str, str | int]) -> Loop:
    """The loop that a position or state.json tells of; UNKNOWN where it tells of none that makes sense.

    >>> of({"kind": "epochs"}).begins_again, of({}) is UNKNOWN
    (False, True)
    """
    try:
        return msgspec.convert(told, Loop) if told else UNKNOWN
    except msgspec.ValidationError:
        return UNKNOWN
