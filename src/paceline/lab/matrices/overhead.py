"""WHAT does a parameter server cost? Step times of document 000's recipe as ratios to one process, and the carriers.

A matrix of the lab: `paceline lab run overhead`. Pure; the bars are the project's own, for two cores.
"""

from paceline.cluster.settings import Settings
from paceline.lab.scenario import Amounts, Kind, Matrix, Row, Scenario

SINGLE = "single process"
AGAIN = "single process again"
SHM = "1 ps + 1 worker, shm"
TCP = "1 ps + 1 worker, tcp"
ASYNC = "1 ps + 2 workers, async, shm"
SYNC = "1 ps + 2 workers, sync, shm"
TWO_PS = "2 ps + 2 workers, async, shm"
DDP = "PyTorch DDP (gloo), 2 processes"
MEMCPY = "memcpy twice"
SOCKET = "raw socket"
CARRIED_SHM = "40 MB there and back, shm"
CARRIED_TCP = "40 MB there and back, tcp"
ASYNC_SHM, ASYNC_TCP = Settings(run_id="", lane="shm"), Settings(run_id="", lane="tcp")
SYNC_SHM, SYNC_TCP = Settings(run_id="", mode="sync", lane="shm"), Settings(run_id="", mode="sync", lane="tcp")


def matrix(is_quick: bool = False) -> Matrix:
    """Eight scenarios that train and four that only carry, in ten rows."""
    amounts = Amounts(reps=3, steps=100) if is_quick else Amounts()
    return Matrix(name="overhead", scenarios=_scenarios(), rows=_rows(), amounts=amounts)


def _scenarios() -> tuple[Scenario, ...]:
    return (
        Scenario(name=SINGLE, kind=Kind.SINGLE),
        Scenario(name=AGAIN, kind=Kind.SINGLE),
        Scenario(name=SHM, kind=Kind.CLUSTER, num_ps=1, num_workers=1, settings=ASYNC_SHM),
        Scenario(name=TCP, kind=Kind.CLUSTER, num_ps=1, num_workers=1, settings=ASYNC_TCP),
        Scenario(name=ASYNC, kind=Kind.CLUSTER, num_ps=1, num_workers=2, settings=ASYNC_SHM),
        Scenario(name=SYNC, kind=Kind.CLUSTER, num_ps=1, num_workers=2, settings=SYNC_SHM),
        Scenario(name=TWO_PS, kind=Kind.CLUSTER, num_ps=2, num_workers=2, settings=ASYNC_SHM),
        Scenario(name=DDP, kind=Kind.PEER, num_workers=2, what="ddp_gloo"),
        Scenario(name=MEMCPY, kind=Kind.CARRIER, what="memcpy"),
        Scenario(name=SOCKET, kind=Kind.CARRIER, what="socket"),
        Scenario(name=CARRIED_SHM, kind=Kind.CARRIER, what="ps", num_ps=1, settings=SYNC_SHM),
        Scenario(name=CARRIED_TCP, kind=Kind.CARRIER, what="ps", num_ps=1, settings=SYNC_TCP),
    )


def _rows() -> tuple[Row, ...]:
    return (
        Row(title="A/A: single against single", scenario=AGAIN, beside=SINGLE, is_noise=True),
        Row(title=SHM, scenario=SHM, beside=SINGLE, bar=1.15, aim=1.03),
        Row(title=TCP, scenario=TCP, beside=SINGLE, bar=1.30, aim=1.10),
        Row(title=ASYNC, scenario=ASYNC, beside=SINGLE, bar=1.30, aim=1.10),
        Row(title=SYNC, scenario=SYNC, beside=SINGLE, bar=1.65, aim=1.15),
        Row(title=TWO_PS, scenario=TWO_PS, beside=SINGLE),
        Row(title=f"{TWO_PS}, over 1 ps", scenario=TWO_PS, beside=ASYNC, bar=1.30),
        Row(title=DDP, scenario=DDP, beside=SINGLE),
        Row(title=f"{CARRIED_SHM}, over memcpy twice", scenario=CARRIED_SHM, beside=MEMCPY, bar=2.0),
        Row(title=f"{CARRIED_TCP}, over a raw socket", scenario=CARRIED_TCP, beside=SOCKET, bar=1.3),
    )
