"""WHERE do the numbers lie? Page-aligned flat memory, private or shared between processes.

The ps makes shared ones, lanes hand them over, frameworks lay tensor views on `memory`. Imports no framework.
"""

import ctypes
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from paceline import forks

SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK, F_SEAL_GROW: nobody can pull the memory from under the other side
F_ADD_SEALS = 1033
MAP_FIXED = 0x10


def has_shared_memory() -> bool:
    """Whether this system has sealed anonymous memory that can be handed to another process, and a processor that shows
    stores to others in the order in which they were made, as the sequence number and the bell need."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")


def check_fits(size_bytes: int) -> None:
    """Refuse what this host does not have: to allocate it would end some process, perhaps another one than ours.

    >>> check_fits(1 << 20)
    """
    free = _free_bytes()
    if size_bytes > free:
        raise MemoryError(f"{size_bytes / 1e9:.1f} GB are needed at once, this host has {free / 1e9:.1f} GB left")


def _free_bytes() -> int:
    import psutil

    free = psutil.virtual_memory().available + psutil.swap_memory().free
    try:  # in a container the group's limit counts
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_bytes()) for name in ("max", "current"))
    except (OSError, ValueError):  # no such group, or no limit
        return free
    return min(free, max(0, limit - used))


class Arena:
    """`size_bytes` of zeroed memory. `memory` is writable unless it was opened read-only.

    >>> arena = Arena.private(128)
    >>> arena.memory[:2] = b"ok"
    >>> bytes(arena.memory[:3])
    b'ok\\x00'
    """

    def __init__(self, memory: memoryview, fd: int | None) -> None:
        self.size_bytes = memory.nbytes
        self.fd = fd
        self.memory = memory

    @classmethod
    def private(cls, size_bytes: int) -> "Arena":
        """Map memory of this process alone; a forked child gets a copy."""
        return cls(memoryview(mmap.mmap(-1, max(1, size_bytes), access=mmap.ACCESS_COPY))[:size_bytes], None)

    @classmethod
    def shared(cls, size_bytes: int) -> "Arena":
        """Memory that can be handed over; all of it is allocated now, so that no later write fails."""
        if not has_shared_memory():
            return cls.private(size_bytes)
        import fcntl

        check_fits(size_bytes)
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, max(1, size_bytes))
        fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
        return cls(_mapped(fd, size_bytes, is_writable=True), fd)

    @classmethod
    def opened(cls, fd: int, size_bytes: int, is_writable: bool) -> "Arena":
        """The other side's memory, from the descriptor that came over the lane."""
        return cls(_mapped(fd, size_bytes, is_writable), fd)

    def close(self) -> None:
        """Give the descriptor back; the mapping goes when the last view of it does."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def mover() -> Callable[[int, int, int], None]:
    """Copies so many bytes to an address from another, as the system's library does it: above some kilobytes it takes
    no line of memory from another core's cache before it writes there, which is most of what plain stores cost to
    memory that somebody else reads."""
    move: Callable[[int, int, int], None] = _libc().memmove
    return move


def _mapped(fd: int, size_bytes: int, is_writable: bool) -> memoryview:
    """What lies behind a descriptor, until the last view of it is gone. Python's own mmap would keep a second
    descriptor open for as long, one a mapping."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    length = max(1, size_bytes)
    libc = _libc()
    address = libc.mmap(None, length, access, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"{length} bytes of shared memory could not be mapped: {os.strerror(number)}")
    block = (ctypes.c_ubyte * length).from_address(address)
    mapping = _Mapping(address, length)
    forks.hold(mapping)
    weakref.finalize(block, mapping.close).atexit = False
    memory = memoryview(block).cast("B")[:size_bytes]
    return memory if is_writable else memory.toreadonly()


class _Mapping:
    """One mapping of shared memory."""

    def __init__(self, address: int, length: int) -> None:
        self._address, self._length = address, length

    def close(self) -> None:
        forks.release(self)
        _libc().munmap(self._address, self._length)

    def close_in_child(self) -> None:
        """Put zeros of the child's own in its place: views stay valid, and nothing can be written to the others."""
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        _libc().mmap(self._address, self._length, access, kind, -1, 0)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.memmove.argtypes, libc.memmove.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    return libc
