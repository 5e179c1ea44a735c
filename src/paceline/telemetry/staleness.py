"""HOW old are the gradients? What a histogram of staleness says, how it is written small, and when it is a worry.

Called by `summary` and by whoever records how a ps stands. Pure. A histogram counts pushes by their staleness.
Must never be asked by training: it looks at what has been counted already.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from paceline.modes.spec import ModeSpec

TOLD_APART = 16  # a tick names so many values of staleness a worker
WORRY_ABOVE = 8.0  # mean staleness, with an optimizer that remembers gradients
WORRY_PUSHES = 100  # before so many a mean says little
WITH_MOMENTUM = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "keras.Adam", "keras.AdamW")


def spread(counts: Mapping[int, int]) -> dict[str, float | None]:
    """Mean, percentiles (nearest rank) and maximum of a histogram; None when nothing was pushed.

    >>> spread({0: 3, 1: 1})
    {'mean': 0.25, 'p50': 0, 'p95': 1, 'max': 1}
    """
    ordered = sorted((value, count) for value, count in counts.items() if count > 0)
    total = sum(count for _, count in ordered)
    if total == 0:
        return {"mean": None, "p50": None, "p95": None, "max": None}
    return {
        "mean": sum(value * count for value, count in ordered) / total,
        "p50": _at(ordered, 0.50 * total),
        "p95": _at(ordered, 0.95 * total),
        "max": ordered[-1][0],
    }


def together(histograms: Iterable[Mapping[int, int]]) -> Counter[int]:
    """One histogram of all pushes.

    >>> together([{0: 3}, {0: 1, 2: 5}])
    Counter({2: 5, 0: 4})
    """
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return total


def small(counts: Mapping[int, int]) -> dict[str, int]:
    """A histogram for a record that is written every second: what is rarely so stale is counted together.

    >>> small({0: 7, 15: 2, 16: 1, 40: 1})
    {'0': 7, '15': 2, '16+': 2}
    """
    told = {str(value): count for value, count in sorted(counts.items()) if value < TOLD_APART}
    rest = sum(count for value, count in counts.items() if value >= TOLD_APART)
    return {**told, f"{TOLD_APART}+": rest} if rest else told


def worry(
    mode: ModeSpec, optimizer: str, options: Sequence[Mapping[str, object]], counts: Mapping[int, int]
) -> str | None:
    """A sentence when a mode that bounds nothing feeds old gradients to an optimizer that remembers them.

    >>> worry(ModeSpec(name="async"), "Adam", [{"lr": 0.001}], {9: 100})[:45]
    'async with Adam at a mean staleness of 9.0: i'
    """
    remembers = _memory(optimizer, options)
    pushes = sum(counts.values())
    if mode.name != "async" or remembers is None or pushes < WORRY_PUSHES:
        return None
    mean = sum(value * count for value, count in counts.items()) / pushes
    if mean <= WORRY_ABOVE:
        return None
    scale = "" if mode.staleness_scale else ", --staleness-scale"
    return (
        f"async with {remembers} at a mean staleness of {mean:.1f}: its momentum is made of old gradients; "
        f"try --mode bounded{scale} or a smaller lr"
    )


def _memory(optimizer: str, options: Sequence[Mapping[str, object]]) -> str | None:
    """The optimizer in words if it remembers gradients of earlier steps."""
    if optimizer in WITH_MOMENTUM:
        return optimizer
    momenta = [value for group in options if isinstance(value := group.get("momentum"), int | float)]
    return f"{optimizer} (momentum {max(momenta):g})" if momenta and max(momenta) > 0 else None


def _at(ordered: list[tuple[int, int]], at_least: float) -> int:
    """The smallest value that so many pushes do not exceed."""
    seen = 0
    for value, count in ordered:
        seen += count
        if seen >= at_least:
            return value
    return ordered[-1][0]
