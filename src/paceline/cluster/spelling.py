"""Spell names in sentences: articles, long lists cut short, the nearest valid spelling of a mistyped name.

Called wherever a message names something; must never decide anything.
"""

import difflib
from collections.abc import Iterable, Sequence


def with_article(noun: str) -> str:
    """
    >>> with_article("int"), with_article("list")
    ('an int', 'a list')
    """
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Name the first of these, and say how many more there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def hint(name: str, valid: Iterable[str]) -> str:
    """Say what would be right.

    >>> hint("worke", ["ps", "worker"])
    "did you mean 'worker'? (valid: ps, worker)"
    >>> hint("x", ["ps", "worker"])
    'valid: ps, worker'
    """
    names = list(valid)
    known = f"valid: {', '.join(names)}"
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {near[0]!r}? ({known})" if near else known
