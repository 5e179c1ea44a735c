"""Save the plain values of a scheduler and of an optimizer's groups in a checkpoint, and set them again.

Used by frameworks/torch/position. By shape, not by class: whatever has a state_dict of plain values is a scheduler.
Nothing is run that comes back; a value takes the type of the one that is there.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

PARAMETERS = "params"


def saved_groups(optimizer: Any) -> list[dict[str, object]]:
    """Return every option of every group that is a plain value, also what schedulers keep there for themselves."""
    return [
        {name: told for name, value in group.items() if name != PARAMETERS and _is_plain(told := plain(value))}
        for group in optimizer.param_groups
    ]


def load_groups(optimizer: Any, groups: Sequence[Mapping[str, object]]) -> bool:
    """Set the options of the groups; return False if there are other groups now."""
    if len(groups) != len(optimizer.param_groups):
        return False
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for name, value in saved.items():
            if name == PARAMETERS:
                continue
            if hasattr(group.get(name), "fill_"):  # a tensor that the script may hold
                group[name].fill_(value)
            else:
                group[name] = alike(group.get(name), value)
    return True


def saved_scheduler(scheduler: Any) -> dict[str, object] | None:
    """Return a scheduler's state_dict if that holds plain values only."""
    state = plain(scheduler.state_dict())
    return state if isinstance(state, dict) and _is_plain(state) else None


def load_scheduler(scheduler: Any, saved: Mapping[str, object]) -> None:
    """Set a scheduler's state."""
    now = scheduler.state_dict()
    scheduler.load_state_dict({name: alike(now.get(name), value) for name, value in saved.items()})


def plain(value: Any) -> Any:
    """Convert torch's and numpy's numbers to Python's, inside of everything."""
    if isinstance(value, dict):  # a Counter, too
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    return value


def alike(now: object, value: object) -> object:
    """Return a value that came back as JSON has it with the type of the one there now.

    >>> alike((0.9, 0.99), [0.8, 0.9]), alike(Counter([3]), {3: 1})
    ((0.8, 0.9), Counter({3: 1}))
    """
    if isinstance(now, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(now, Counter) and isinstance(value, Mapping):
        return Counter({key: int(str(count)) for key, count in value.items()})
    if isinstance(now, dict) and isinstance(value, dict):
        return {key: alike(now.get(key), each) for key, each in value.items()}
    if isinstance(now, list) and isinstance(value, list) and len(now) == len(value):
        return [alike(a, b) for a, b in zip(now, value, strict=True)]
    return value


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
