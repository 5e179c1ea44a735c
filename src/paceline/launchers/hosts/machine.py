"""WHAT is this machine? Versions, cores, memory, cards, shared memory, descriptors: looked up, nothing is started.

Called by hosts/probe on every host of a cluster, and by `paceline doctor` here. Must never import torch (its
version is read from its metadata), nor start CUDA, nor fail because a system does not say something.
"""

import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import paceline
from paceline.cluster.cores import usable_cores
from paceline.launchers.kernel import is_clock_set
from paceline.launchers.memory import MB, limited, total_mb
from paceline.version import VERSION

SHM = "/dev/shm"
EXTRAS = {  # extra -> the package it brings
    "tls": "cryptography",
    "grpc": "grpcio",
    "lab": "matplotlib",
    "tb": "tensorboardX",
    "tensorflow": "tensorflow",
    "ray": "ray",
}


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One card, as its driver knows it."""

    name: str
    memory_mb: float | None = None  # None: it shares the machine's
    free_mb: float | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a run may count on; None: this system does not say."""

    name: str
    system: str
    python: str
    executable: str
    paceline: str
    sources: str  # a digest of paceline's own files: two with the same version may differ
    torch: str  # "": not installed
    extras: dict[str, str] = {}
    cores: int = 1
    memory_mb: float = 0.0
    free_memory_mb: float = 0.0
    shm_mb: float | None = None
    descriptors: int | None = None  # as far as a process may raise them
    is_clock_set: bool | None = None  # by ntp, or by the host of a virtual machine
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()


def look() -> Machine:
    """This machine, now."""
    import psutil

    driver, gpus = cards()
    return Machine(
        name=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        executable=sys.executable,
        paceline=VERSION,
        sources=digest(Path(paceline.__file__).parent),
        torch=version_of("torch"),
        extras={extra: found for extra, package in EXTRAS.items() if (found := _extra(package))},
        cores=usable_cores(),
        memory_mb=total_mb(),
        free_memory_mb=limited(psutil.virtual_memory().available),
        shm_mb=shm_mb(),
        descriptors=descriptors(),
        is_clock_set=is_clock_set(),
        driver=driver,
        gpus=gpus,
    )


def version_of(package: str) -> str:
    """The installed version, without importing it; "" where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _extra(package: str) -> str:
    return version_of(package) or (version_of("tensorflow-cpu") if package == "tensorflow" else "")


def digest(folder: Path) -> str:
    """All Python files of a folder, as one short text."""
    import xxhash

    found = xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def shm_mb() -> float | None:
    """The size of the shared memory that data loaders pass batches through; None where the system has none."""
    try:
        return shutil.disk_usage(SHM).total / MB
    except OSError:
        return None


def descriptors() -> int | None:
    """How many descriptors a process may have at most; None: no limit, or none that is known."""
    try:
        import resource
    except ImportError:
        return None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def cards() -> tuple[str, tuple[Gpu, ...]]:
    """The driver's version and its cards; nothing without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return str(pynvml.nvmlSystemGetDriverVersion()), tuple(_card(handle) for handle in handles)
    except pynvml.NVMLError:
        return "", ()
    finally:
        pynvml.nvmlShutdown()


def _card(handle: Any) -> Gpu:
    import pynvml

    name = str(pynvml.nvmlDeviceGetName(handle))
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return Gpu(name=name)
    return Gpu(name=name, memory_mb=memory.total / MB, free_mb=memory.free / MB)
