"""WAS this run right? `paceline verify RUN`: what its ledgers prove, as a sentence or as the violations.

Called by cli/main. Must never change a file of the run.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.kv import Run, run_folder
from paceline.errors import EXIT_TRAINING
from paceline.telemetry.output import complain, json_text

if TYPE_CHECKING:
    from paceline.telemetry.verify import Verdict

SHOWN = 20
ON = "This run is still on: until it has ended, its ledgers cannot agree."
NO_SUMMARY = (
    "This run has no summary.json: whoever would have written it (the launcher; by hand ps:0) was killed, or trains "
    "on. What was written so far was checked."
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, with everything that was found.")]


def verify(run: Run, as_json: Json = False) -> None:
    """Check the ledgers of a run that was started with --ledger, once it has ended.

    Proves that every gradient was applied at most once (I2), in the same rounds on all shards (I1), within the bound
    (I3), and that none that was acknowledged is lost (I5). Exit code 0: so it was; 1: violations, or a ledger that is
    cut or damaged; 2: no ledger.
    """
    from paceline.launchers.local import is_on
    from paceline.telemetry.ledgers import verdict_of
    from paceline.telemetry.paths import RunPaths

    by_hand = RunPaths(run)  # which has no cluster.json
    folder = by_hand.root if by_hand.ledgers.is_dir() else run_folder(run)
    verdict = verdict_of(folder)
    if as_json:
        told = {
            "ok": verdict.is_ok,
            "records": verdict.records,
            "violations": [each._asdict() for each in verdict.violations],
            "lost": verdict.lost,
            "missing": verdict.missing,
            "damaged": verdict.damaged,
        }
        print(json_text(told))
    else:
        print("\n".join(lines(verdict)))
    if not RunPaths(folder).summary.is_file():
        print(ON if is_on(RunPaths(folder)) else NO_SUMMARY, file=sys.stderr)
    if not verdict.is_ok:
        complain(f"The ledgers of {folder} do not agree, or are not whole.")
        raise typer.Exit(EXIT_TRAINING)


def lines(verdict: "Verdict") -> list[str]:
    """The verdict, then what it is made of."""
    count = len(verdict.violations)
    said = [f"{each}; nothing is compared with it" for each in verdict.damaged]
    said.append(f"{count} violation{'' if count == 1 else 's'} in {verdict.records} records")
    said += _first(verdict.violations)
    if verdict.lost:
        said.append(f"{len(verdict.lost)} acknowledged gradients went with a restore, which is no violation:")
        said += _first(verdict.lost)
    if verdict.missing:
        said.append(f"Not compared, for want of a ledger: {', '.join(verdict.missing)}")
    return said


def _first(found: Sequence[object]) -> list[str]:
    left = len(found) - SHOWN
    return [f"  {each}" for each in found[:SHOWN]] + ([f"  … and {left} more"] if left > 0 else [])
