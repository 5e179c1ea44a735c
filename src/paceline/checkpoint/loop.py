"""Describe the loop of a script that made the steps of a checkpoint: can it go on from there, or does it begin again?

Found by the worker (worker/positions/loops), written into state.json, read before a run is resumed. Pure: names and
sentences.
"""

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
    """A training loop: its kind, its place in the script, and the loop to write `instead`, which can be resumed."""

    kind: str
    file: str = ""
    line: int = 0
    text: str = ""
    instead: str = ""

    @property
    def begins_again(self) -> bool:
        """Tell whether it counts from 0 in every process, whatever a checkpoint holds."""
        return self.kind in BEGIN_AGAIN

    @property
    def change(self) -> str:
        """Say which line of the script to change, and to what.

        >>> Loop(kind=FOR, file="/a/t.py", line=3, text="for e in range(9):", instead="for e in ctx.epochs(9):").change
        'write `for e in ctx.epochs(9):` instead of `for e in range(9):` (t.py, line 3)'
        """
        place = f"({self.file.rpartition('/')[2]}, line {self.line})"
        if self.kind == LIBRARY:
            return f"write a loop of your own with `{self.instead}` instead of the library's, called at {place}"
        return f"write `{self.instead}` instead of `{self.text}` {place}"

    def refusal(self, begins: str, step: int) -> str:
        """Say why a resume is refused, and what to do; `begins` names what was asked for."""
        return (
            f"{begins}: the training loop counts from 0 again, so it would not do what remains after global step "
            f"{step} but all of it once more: {self.change}; or {LOAD}."
        )

    def stands_in(self, script: str) -> bool:
        """Tell whether the text of a script still has this loop, and neither ctx.epochs nor ctx.steps.

        >>> loop = Loop(kind=FOR, text="for e in range(9):")
        >>> loop.stands_in("  for e in range(9):"), loop.stands_in("for e in ctx.epochs(9):")
        (True, False)
        """
        is_changed = any(call in script for call in (".epochs(", ".steps("))
        return not is_changed and any(line.strip() == self.text for line in script.splitlines())


UNKNOWN = Loop(kind="")


def loop_of(fields: dict[str, str | int]) -> Loop:
    """Decode the loop in a position or in state.json; UNKNOWN if there is none, or it cannot be decoded.

    >>> loop_of({"kind": "epochs"}).begins_again, loop_of({}) is UNKNOWN
    (False, True)
    """
    try:
        return msgspec.convert(fields, Loop) if fields else UNKNOWN
    except msgspec.ValidationError:
        return UNKNOWN
