"""Validation of what a worker describes: slots in a payload, options of a push.

Checked before numbers are touched. A client that sends them holds the secret, so a wrong one is a mistake and no
attack; it must still be refused, because an error in an update ends the ps.
"""

from collections.abc import Sequence

from paceline.params.layout import ITEM_BYTES, Layout
from paceline.wire.messages import Options, SlotEntry

LARGEST = 3.4e38  # of a float32: beyond it torch refuses to compute


def problem(entries: Sequence[SlotEntry], layout: Layout, payload_bytes: int) -> str:
    """Return what is wrong with the first entry that is wrong; empty when all are valid.

    >>> problem([SlotEntry(0, 0, 6, "exp_avg", "float32", False, 0, 24)], Layout(()), 24)
    'exp_avg of tensor 0, which is none of 0'
    """
    for entry in entries:
        said = f"{entry.slot[:50]} of tensor {entry.tensor}"
        if not 0 <= entry.tensor < len(layout.trained):
            return f"{said}, which is none of {len(layout.trained)}"
        if not entry.slot.isidentifier() or entry.dtype not in ITEM_BYTES:
            return f"{said} in {entry.dtype[:20]} is no optimizer's state"
        if not 0 <= entry.start <= entry.stop <= layout.trained[entry.tensor].numel:
            return f"{said} is for elements {entry.start} to {entry.stop}, which it does not have"
        count = 1 if entry.is_scalar else entry.stop - entry.start
        if entry.size_bytes != count * ITEM_BYTES[entry.dtype]:
            return f"{said} has {entry.size_bytes} bytes for {count} {entry.dtype}"
        if not 0 <= entry.offset <= payload_bytes - entry.size_bytes:
            return f"{said} lies at byte {entry.offset} of {payload_bytes}"
    return ""


def options_problem(options: Sequence[Options], before: Sequence[Options]) -> str:
    """Return what is wrong with the options of a push, compared with those before it; empty when they can be used.

    >>> options_problem([{"lr": None}], [{"lr": 0.1}])
    'group 0: lr was 0.1 and is None, which is no number'
    """
    if len(options) != len(before):
        return f"options of {len(options)} groups, and the model has {len(before)}"
    for index, (new, old) in enumerate(zip(options, before, strict=True)):
        for name, value in old.items():
            if _is_number(value) and name in new and not _is_number(new[name]):
                return f"group {index}: {name} was {value} and is {new[name]}, which is no number"
    return ""


def is_ordinary(options: Sequence[Options], before: Sequence[Options]) -> bool:
    """Tell whether only rates and the like have changed, as schedulers change them: no update can fail by that.

    >>> is_ordinary([{"lr": 0.1, "amsgrad": True}], [{"lr": 0.2, "amsgrad": True}])
    True
    >>> is_ordinary([{"lr": 0.1, "amsgrad": True}], [{"lr": 0.1, "amsgrad": False}])
    False
    """
    return all(
        new.keys() == old.keys() and all(_is_alike(new[name], value, name) for name, value in old.items())
        for new, old in zip(options, before, strict=True)
    )


def _is_alike(new: object, old: object, name: str) -> bool:
    if isinstance(new, list):
        return new == old or all(isinstance(each, int | float) and 0 <= each < 1 for each in new)
    return new == old or name == "lr" or (name in ("momentum", "weight_decay") and bool(new) == bool(old))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not abs(value) > LARGEST  # NaN is one: a user who sets it is to see it
