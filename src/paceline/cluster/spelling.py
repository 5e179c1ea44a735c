"""WHAT did they mean? The nearest valid spelling of a mistyped name, as the end of an error sentence.

Called wherever a name is refused; must never decide anything.
"""

import difflib
from collections.abc import Iterable


def with_article(noun: str) -> str:
    """
    >>> with_article("int"), with_article("list")
    ('an int', 'a list')
    """
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


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
