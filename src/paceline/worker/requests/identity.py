"""Describe a worker and its cluster in one frozen value, which worker/session makes from flags and addresses.

Read by worker/requests/client, joining, evaluator, saver and rewinding. Printing it leaves the secret out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cluster.settings import PACELINE
from paceline.modes.spec import ModeSpec
from paceline.transport.faulty import Trouble


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is, and where its cluster is."""

    job: str
    worker: int
    incarnation: int
    run_id: str
    is_chief: bool
    spec: ModeSpec
    ps_addresses: Sequence[str]  # looked up each time: a ps may have moved
    worker_devices: tuple[str, ...]
    placement: str
    lane: str
    wire: str
    overlaps: bool
    secret: bytes = field(repr=False)
    lease_s: float
    wait_s: float
    log_style: str = PACELINE
    trouble: Trouble | None = None  # what --chaos does to its connections
    ledger: Path | None = None  # where to write down what is pushed, answered and read
