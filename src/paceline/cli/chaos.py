"""WHAT would these faults be? `paceline chaos SPEC` tells in words what `run --chaos SPEC` injects.

Called by cli/main. Must never inject anything itself.
"""

from typing import Annotated

import typer

from paceline.cluster import chaos as faults
from paceline.errors import UsageError

Spec = Annotated[
    str, typer.Argument(metavar="SPEC", help="As --chaos takes it: kill=ps:0@500,flip=1e-6", show_default=False)
]
HOW = """Each fault is made at a logical time, counted, and reported in the last lines of the run and in summary.json.
TASK@N: at that worker's own step N (counted since its process started), or after that ps's update N; each fires once.
TASK@29s: so long after the run began; @every:29s: again and again. worker:? or ?: chosen by --chaos-seed.
By hand nobody wakes a stopped task: stop needs `paceline run`."""


def chaos(spec: Spec) -> None:
    """Say in words which faults `run --chaos SPEC` would inject."""
    found = faults.parse(spec)
    if not found:
        raise UsageError(f"There is no fault in {spec!r}; write one as {faults.KINDS['kill'].example}.")
    width = max(len(fault.text) for fault in found)
    for fault in found:
        typer.echo(f"{fault.text:<{width}}  {faults.explain(fault)}")
    typer.echo(f"\n{HOW}")
