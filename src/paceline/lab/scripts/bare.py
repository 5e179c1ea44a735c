"""WHAT would a task be without its safety? The same task with parts of it taken out, so that the lab can weigh them.

Run by lab/measuring/starting instead of launchers/entry: `python -m paceline.lab.scripts.bare mac,checks --parent PID
…`. The product has no such switch, and must never get one; nothing but the lab may import this.
"""

import sys
from collections.abc import Callable, Sequence

from paceline.frameworks.torch import gradients as torch_gradients
from paceline.launchers import entry
from paceline.transport import channel
from paceline.wire import frames


class BareCodec(channel.Codec):
    """Frames are packed and unpacked as ever, but nobody signs or checks them."""

    def pack(
        self,
        kind: int,
        flags: int,
        worker: int,
        incarnation: int,
        outcome: int,
        tail: bytes,
        push_id: int,
        version: int,
        bulk_bytes: int,
        checksum: int = 0,
    ) -> bytearray:
        out = self._out
        channel._HEADER.pack_into(
            out,
            0,
            kind,
            outcome,
            flags,
            worker,
            incarnation,
            len(tail),
            push_id,
            version,
            bulk_bytes,
            checksum,
        )
        return out

    def unpack(self, frame: bytearray, tail: bytes = b"") -> frames.Frame:
        return frames.Frame._make((*channel._HEADER.unpack_from(frame), tail))


def without_mac() -> None:
    """No frame is signed, none is checked."""
    vars(channel)["Codec"] = BareCodec


class _NoHash:
    """Stands for the xxhash module and for its hash."""

    xxh3_64: Callable[[], "_NoHash"]

    def xxh3_64_intdigest(self, data: object) -> int:
        return 0

    def update(self, data: object) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(channel.CHECKSUM_BYTES)

    def intdigest(self) -> int:
        return 0


_NoHash.xxh3_64 = _NoHash


def without_checks() -> None:
    """Payloads are not hashed, gradients not looked at."""
    vars(channel)["xxhash"] = _NoHash()
    torch_gradients.Outgoing._looks_finite = lambda self, vectors: True  # type: ignore[method-assign]


PARTS = {"mac": without_mac, "checks": without_checks}


def take_out(parts: Sequence[str]) -> None:
    """From now on this process goes without them."""
    for part in parts:
        PARTS[part]()


if __name__ == "__main__":
    take_out(sys.argv[1].split(","))
    sys.exit(entry.main(sys.argv[2:]))
