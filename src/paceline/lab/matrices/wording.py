"""WHICH words of a printed line are others than in the document? Both lines, word by word.

Used by lab/matrices/looks. Pure. What a run measures or is given cannot be the same twice, so each such value stands
for its kind (MEASURED); every other word counts, numbers of tasks and devices too.
"""

import re
from difflib import SequenceMatcher

SAME = ""
MEASURED = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+", "TIME"),  # of TensorFlow's logger
        (r"(?:localhost|\d+\.\d+\.\d+\.\d+):\d+", "ADDRESS"),
        (r"\b[0-9a-f]{16}\b", "SESSION"),
        (r"\b(step:? ?|^After )\d+", r"\1COUNT"),
        (r"(?<=entropy = )[\d.]+(?:e\+\d+)?", "NUMBER"),  # without a decimal point, where there is nothing behind it
        (r"\d+\.\d+(?![.\d])", "NUMBER"),
    )
)


def words(line: str) -> list[str]:
    """The words that count.

    >>> words("1524487685.116428: Worker 0: traing step 8054 dome (global step:9960)")
    ['NUMBER:', 'Worker', '0:', 'traing', 'step', 'COUNT', 'dome', '(global', 'step:COUNT)']
    """
    line = line.strip()
    for pattern, kind in MEASURED:
        line = pattern.sub(kind, line)
    return line.split()


def differences(theirs: str, printed: str) -> str:
    """What is printed instead of the document's words; SAME (empty) if and only if all are there, in their order.

    >>> differences("Started server with target: grpc://localhost:2222", "Started server with target: grpc://b:1")
    '"grpc://b:1" for "grpc://ADDRESS"'
    >>> differences("Training elapsed time:366.604071 s", "Training elapsed time: 2.5 s")
    '"time: NUMBER" for "time:NUMBER"'
    >>> differences("CreateSession still waiting", "CreateSession still waiting (0 s)")
    'also "(0 s)"'
    >>> differences("Training ends @ 1524487686.584364", "Training ends @ 1.5")
    ''
    """
    there, here = words(theirs), words(printed)
    parts = []
    for kind, i, j, k, n in SequenceMatcher(None, there, here, autojunk=False).get_opcodes():
        gone, new = f'"{" ".join(there[i:j])}"', f'"{" ".join(here[k:n])}"'
        if kind != "equal":
            parts.append({"replace": f"{new} for {gone}", "delete": f"no {gone}", "insert": f"also {new}"}[kind])
    return "; ".join(parts)
