"""WHO tells the ps what they cannot see? Whoever started the tasks: this worker will not come back, or all end soon.

Called after a worker's process has ended badly, and after Ctrl+C. Best effort: a ps that is not there yet is tried
again for a while.
"""

import time
from pathlib import Path
from signal import SIGUSR1

from paceline.cluster.moved import Whereabouts
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import ClusterError
from paceline.transport.channel import connect
from paceline.transport.security import Role
from paceline.wire.messages import Done, Lost, SaveSoon

RELEASE = SIGUSR1  # to a ps: no worker will be started again
TRY_S = 10.0
PAUSE_S = 0.2
SAVE_SOON_S = 2.0


def tell_lost(
    cluster: ClusterSpec, secret: bytes, task: Task, incarnation: int, lane: str = "auto", try_s: float = TRY_S,
    run_dir: Path | str | None = None,
) -> bool:  # fmt: skip
    """Tell every ps, each tried for so long and at least once; True when all were told."""
    lost = Lost(cluster.worker_index(task), incarnation)
    told = [_tell(ps, secret, lost, lane, try_s) for ps in Whereabouts(cluster, run_dir)]  # all, also after a failure
    return all(told)


def save_soon(cluster: ClusterSpec, secret: bytes, run_dir: Path | str | None = None) -> bool:
    """Ask ps:0 to have one of the next updates saved; False: it has none to save, or is not there."""
    try:
        channel = connect(Whereabouts(cluster, run_dir)[0], "auto", secret, role=Role.LAUNCHER)
    except ClusterError:
        return False
    try:
        return isinstance(channel.ask(SaveSoon(), limit_s=SAVE_SOON_S)[0], Done)
    except ClusterError:
        return False
    finally:
        channel.close()


def _tell(address: str, secret: bytes, lost: Lost, lane: str, try_s: float) -> bool:
    deadline = time.monotonic() + try_s
    while True:
        try:
            channel = connect(address, lane, secret, role=Role.LAUNCHER)
        except ClusterError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE_S)  # it may not listen yet; nobody can wake us
            continue
        try:
            channel.ask(lost)
            return True
        except ClusterError:
            return False  # it ended meanwhile
        finally:
            channel.close()
