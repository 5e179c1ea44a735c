"""WHO is slowed down on purpose? What `--slow worker:1=5x,worker:2=2x` says.

Called by validate, and by worker/step/slowness, which makes it true. Pure.
"""

import re

from paceline.cluster.spec import Task
from paceline.errors import UsageError

_ONE = re.compile(r"([A-Za-z]\w*:[0-9]{1,6})=([0-9]{1,9}(?:\.[0-9]{1,9})?)x?")


def parse(text: str) -> dict[Task, float]:
    """Each slowed worker and how many times as long its steps shall take; nobody for "".

    >>> {str(task): factor for task, factor in parse("worker:1=5x, worker:2=1.5x").items()}
    {'worker:1': 5.0, 'worker:2': 1.5}
    """
    slowed: dict[Task, float] = {}
    for part in text.split(",") if text else ():
        found = _ONE.fullmatch(part.strip())
        if found is None:
            raise UsageError(f"--slow is {text!r}; write it as worker:1=5x, several separated by commas.")
        task, factor = Task.parse(found[1]), float(found[2])
        if factor < 1:
            raise UsageError(f"--slow gives {task} the factor {found[2]}; 1 or more slows, such as {task}=5x.")
        if task in slowed:
            raise UsageError(f"--slow names {task} twice; give it one factor.")
        slowed[task] = factor
    return slowed
