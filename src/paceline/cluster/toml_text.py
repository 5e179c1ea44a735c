"""WHERE does a key of a TOML file stand? Its line, for the sentence that refuses it.

Called by cluster/host_files and lab/user_file. Pure; must never guess at a value.
"""

import re
import tomllib

from paceline.errors import UsageError

_PART = re.compile(r"\s*(?:\"([^\"]*)\"|'([^']*)'|([^.\"'\s]+))\s*(?:\.|$)")


def table_of(text: str, where: str) -> dict[str, object]:
    """What the text says; a UsageError shows the line that is no TOML.

    >>> table_of('script = "train.py"', "mine.toml")
    {'script': 'train.py'}
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(_syntax(text, where, str(error))) from None


def _syntax(text: str, where: str, told: str) -> str:
    found = re.search(r"^(.*) \(at line (\d+), column \d+\)$", told)
    lines = text.splitlines()
    if found is None:  # at the end of the document
        return f"{where}, line {len(lines)}: this is no TOML: {told}."
    number = int(found[2])
    stands = lines[number - 1].strip() if number <= len(lines) else ""
    return f"{where}, line {number}: {stands!r} is no TOML: {found[1]}."


def line_of(text: str, *path: str) -> int:
    """Where a key stands; where the table that has it begins, if the key itself is not found.

    >>> line_of('script = "a"\\n[axes]\\nmode = ["sync"]', "axes", "mode")
    3
    >>> line_of('[hosts."a.b"]\\nslots = 2', "hosts", "a.b", "slots")
    2
    """
    table: tuple[str, ...] = ()
    best, depth = 1, -1
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+([^\]]+)\]", line)
        if header:
            table = _parts(header[1])
            here = table
        else:
            key = re.match(r"\s*([\w.\"'-]+)\s*=", line)
            if key is None:
                continue
            here = (*table, *_parts(key[1]))
        if here == path[: len(here)] and len(here) > depth:
            best, depth = number, len(here)
    return best


def _parts(text: str) -> tuple[str, ...]:
    return tuple(next(part for part in found.groups() if part is not None) for found in _PART.finditer(text.strip()))
