"""WHAT does a run leave behind, or gather while it lasts? Processes, threads, descriptors, memory and files.

Called by lab/measuring/soaking, from outside: the run does not know that it is watched. Must never disturb it: a look
costs a millisecond, once a second.
"""

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.lab.matrices.soak import Sample

SHM = Path("/dev/shm")
LEFT_OVER = (".tmp", ".part", ".new")
GONE_S = 5.0


class Watch:
    """A launcher and everything it has started."""

    def __init__(self, pid: int) -> None:
        self._launcher = psutil.Process(pid)
        self._seen: dict[int, psutil.Process] = {pid: self._launcher}
        self._shared = shared_files()

    def look(self, at_s: float) -> Sample | None:
        """How things stand; None when the launcher is gone."""
        try:
            tree = [self._launcher, *self._launcher.children(recursive=True)]
        except psutil.Error:
            return None
        threads = descriptors = memory = count = 0
        for process in tree:
            self._seen.setdefault(process.pid, process)
            with suppress(psutil.Error):
                with process.oneshot():
                    threads += process.num_threads()
                    descriptors += process.num_fds() if sys.platform == "linux" else 0
                    memory += process.memory_info().rss - getattr(process.memory_info(), "shared", 0)
                count += 1
        return Sample(at_s=at_s, processes=count, threads=threads, descriptors=descriptors, memory=memory)

    def left_behind(self, run_dir: Path, gone_s: float = GONE_S) -> list[str]:
        """What is there so long after the end, and should not be."""
        _, alive = psutil.wait_procs(list(self._seen.values()), gone_s)
        told = [f"process {process.pid}" for process in alive]
        told += [f"/dev/shm/{name}" for name in sorted(shared_files() - self._shared)]
        return told + [f"file {name}" for name in left_over(run_dir)]


def shared_files() -> set[str]:
    """Names in shared memory; other programs' too, so only what comes and stays counts."""
    return {path.name for path in SHM.iterdir()} if SHM.is_dir() else set()


def left_over(run_dir: Path) -> list[str]:
    """Files of a run folder that somebody meant to rename or remove."""
    return sorted(str(path.relative_to(run_dir)) for path in _files(run_dir) if is_left_over(path.name))


def is_left_over(name: str) -> bool:
    """
    >>> is_left_over(".summary.json.123"), is_left_over("summary.json")
    (True, False)
    """
    return name.startswith(".") or name.endswith(LEFT_OVER)


def _files(run_dir: Path) -> Iterable[Path]:
    return run_dir.rglob("*")
