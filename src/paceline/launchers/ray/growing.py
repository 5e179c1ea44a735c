"""MAY the cluster grow, and how far? What is known of Ray's autoscaler, where it has one.

ray/on_ray asks it as a task of the first machine. Must never say that nothing can come where something may: what is
refused does not wait.

1. What a vendor's autoscaler has told Ray itself; Ray's own ones tell nothing there. 2. The autoscaler that `ray start`
runs on the first machine: its file says which machines may come, and one without a file only watches. 3. Without one
there (KubeRay has its own beside Ray), somebody else's that reports to Ray: which machines may come is not known.
"""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import psutil

from paceline.launchers.ray.bundles import resources

ITS_FILE, ITS_RAY = "--autoscaling-config=", "--gcs-address="
MONITOR = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
REPORT_S = 8.0  # its first report comes some seconds after Ray
OLD_S = 300.0  # what has not reported for so long is gone
LOOK_S = 0.5


class Kind(msgspec.Struct, frozen=True):
    """Machines of one kind that an autoscaler may add."""

    resources: dict[str, float]
    at_most: int | None  # None: any number


class Growth(msgspec.Struct, frozen=True):
    """There is an autoscaler."""

    kinds: list[Kind] | None = None  # None: it does not say what it may add

    def machines(self, enough: int) -> list[dict[str, float]]:
        """All that may come; of each kind `enough` at most.

        >>> Growth([Kind({"CPU": 1.0}, 2), Kind({"CPU": 8.0}, None)]).machines(3)
        [{'CPU': 1.0}, {'CPU': 1.0}, {'CPU': 8.0}, {'CPU': 8.0}, {'CPU': 8.0}]
        """
        numbers = [(kind, enough if kind.at_most is None else min(kind.at_most, enough)) for kind in self.kinds or []]
        return [dict(kind.resources) for kind, number in numbers for _ in range(number)]

    def told(self) -> str:
        """In words.

        >>> Growth([Kind({"CPU": 1.0}, 2), Kind({"CPU": 8.0}, None)]).told()
        ', to which its autoscaler adds at most 2 x (1 CPU), any number of (8 CPU)'
        """
        if self.kinds is None:
            return "; its autoscaler may add machines"
        numbers = ["any number of" if kind.at_most is None else f"{kind.at_most} x" for kind in self.kinds]
        each = [f"{number} ({resources(kind.resources)})" for number, kind in zip(numbers, self.kinds, strict=True)]
        return f", to which its autoscaler adds at most {', '.join(each) or 'nothing'}"


class MachineType(msgspec.Struct, frozen=True):
    """A kind of machine, as the autoscaler's file has it."""

    resources: dict[str, float] | None = None
    max_workers: int | None = None


class Config(msgspec.Struct, frozen=True):
    """What we read of the autoscaler's file."""

    available_node_types: dict[str, MachineType]
    head_node_type: str = ""
    max_workers: int | None = None


def growth() -> bytes:
    """What is known, as JSON: a Growth, or null where no machine will come by itself."""
    return msgspec.json.encode(_vendors() or _of_this_machine())


def _vendors() -> Growth | None:
    """1. What is told to Ray's control store."""
    from ray._private.state import state

    try:
        told = state.get_cluster_config()
        groups = [Kind(dict(each.resources), _bound(each.max_count)) for each in told.node_group_configs]
    except Exception:  # not Ray's public interface; and mostly there is none
        return None
    return Growth(groups) if groups else None


def _bound(count: int) -> int | None:
    return None if count < 0 else count


def _of_this_machine() -> Growth | None:
    import ray

    address = ray.get_runtime_context().gcs_address
    words = monitor(_commands(), address)
    if words is None:
        return Growth() if _reports(address) else None  # 3.
    files = [word.removeprefix(ITS_FILE) for word in words if word.startswith(ITS_FILE)]
    return written(Path(files[0])) if files else None  # 2.


def _commands() -> Iterable[list[str]]:
    for process in psutil.process_iter():
        try:
            yield process.cmdline()
        except psutil.Error:
            continue


def monitor(commands: Iterable[Sequence[str]], address: str) -> Sequence[str] | None:
    """The command of this Ray's own autoscaler, or None where it runs none.

    >>> monitor([["python", "/ray/autoscaler/v2/monitor.py", "--gcs-address=h:1"]], "h:1")[-1]
    '--gcs-address=h:1'
    """
    for words in commands:
        if f"{ITS_RAY}{address}" in words and any(word.endswith(MONITOR) for word in words):
            return words
    return None


def written(path: Path) -> Growth:
    """What the autoscaler's file says; a Growth without kinds where it cannot be read, or does not say all."""
    try:
        told = msgspec.yaml.decode(path.expanduser().read_bytes(), type=Config)
    except (OSError, ImportError, msgspec.MsgspecError):
        return Growth()
    kinds = []
    for name, each in told.available_node_types.items():
        if name == told.head_node_type and not each.max_workers:
            continue  # the first machine is there already
        if not each.resources:
            return Growth()
        bounds = [bound for bound in (each.max_workers, told.max_workers) if bound is not None]
        kinds.append(Kind(each.resources, min(bounds) if bounds else None))
    return Growth(kinds)


def _reports(address: str) -> bool:
    """3. Whether somebody else's autoscaler reports to this Ray; the first report may be on its way."""
    deadline = time.monotonic() + REPORT_S
    while not (_older_reports(time.time()) or _newer_reports(address)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _older_reports(now: float) -> bool:
    """Ray's autoscaler as it was, which `ray status` reads as well."""
    from ray.experimental.internal_kv import _internal_kv_get

    try:
        told = json.loads(_internal_kv_get("__autoscaling_status") or b"{}")
        return now - float(told.get("time", 0.0)) < OLD_S
    except Exception:  # not Ray's public interface
        return False


def _newer_reports(address: str) -> bool:
    """Ray's newer autoscaler, which numbers its reports."""
    import ray

    try:
        from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

        told = ray._raylet.GcsClient(address).get_cluster_status(timeout_s=int(REPORT_S))
        reply = GetClusterStatusReply.FromString(told)
        return bool(reply.autoscaling_state.autoscaler_state_version > 0)
    except Exception:  # not Ray's public interface
        return False
