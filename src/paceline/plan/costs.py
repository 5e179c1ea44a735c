"""WHAT does one step cost here? The numbers that plan/calibrate measures, or that the user gives, and how they scale.

Read by plan/simulate. Pure: no clock, no process, no file. Times are of one core that nobody else disturbs.
"""

import msgspec

FORMAT = 2
APPLY_FIXED_MS = 0.03  # of an update: what calling torch's optimizer takes, however small the shard
COPY_BYTES_PER_MS = 6e6  # memory to memory, where nobody measured it
MESSAGE_MS, WAKE_MS = 0.07, 0.025  # the same, of a ps' work on a message, and until a process that waited runs
RECEIVE_SHARE = 0.7  # of a ps' work on a message: taking it; the rest is answering
SPREAD = 0.05  # and of steps
LEAST_MS = 1e-4


class LaneCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What an exchange costs on one lane, beside the update itself."""

    push_ms: float  # worker: the gradient into the slot or the socket
    read_ms: float  # worker: the answer and the parameters out of it
    message_ms: float  # ps: one message, under the interpreter's lock
    bulk_ms: float = 0.0  # ps: taking and sending all bytes, beside others, in and out together
    wake_ms: float = 0.0  # nobody computes: from a thing being there until the process that waits for it runs
    rest_ms: float = 0.0  # of a whole step: what all the other parts do not explain


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the calibrating runs gave as a whole: the mean step of a worker, in ms. plan/fitting holds costs to it."""

    alone_ms: dict[str, float]  # 1 ps + 1 worker, by lane
    num_crowd: int = 0  # workers at once, with 1 ps on shared memory
    crowd_async_ms: float | None = None
    crowd_sync_ms: float | None = None  # only where rounds are asked for


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one worker with one ps, taken apart."""

    compute_ms: float  # processor time from fresh parameters to the gradient
    device_ms: float = 0.0  # in it, but not on a core: a GPU, a sleep, a disk
    compute_cores: float = 1.0  # cores that the computing keeps busy
    spread: float = 0.0  # of the computing time from step to step: the deviation of its logarithm
    shared_spread: float = 0.0  # the same where workers share a host: by the clock, with the turns that a core takes
    apply_ms: float = 0.0
    add_ms: float = 0.0  # one more gradient in a round's mean
    copy_ms: float = 0.0  # all parameters, memory to memory
    size_bytes: int = 0
    batch: float = 1.0  # samples a step
    lanes: dict[str, LaneCosts]
    contention: float = 0.0  # by how much a core is slower when all other cores of its host are busy
    cores: int = 1
    threads: int = 1
    format: int = FORMAT
    script: str = ""
    seen: Seen | None = None
    notes: list[str] = []

    @property
    def own_ms(self) -> float:
        """What a worker does by itself in a step, on shared memory if that was measured."""
        lane = self.lanes.get("shm") or self.lanes["tcp"]
        return self.compute_ms + lane.rest_ms + self.device_ms + lane.push_ms + lane.read_ms

    def apply_share_ms(self, num_ps: int, gradients: int) -> float:
        """An update of one of so many equal shards, from so many gradients.

        >>> given(step_ms=20, size_bytes=0, apply_ms=3).apply_share_ms(1, 1)
        3.0
        """
        fixed = min(self.apply_ms, APPLY_FIXED_MS)
        return fixed + (self.apply_ms - fixed + self.add_ms * (gradients - 1)) / num_ps


def given(step_ms: float, size_bytes: int, apply_ms: float, batch: float = 1.0, cores: int = 2) -> Costs:
    """Costs from three numbers; the rest is what it usually is."""
    copy_ms = size_bytes / COPY_BYTES_PER_MS
    shm = LaneCosts(push_ms=copy_ms, read_ms=copy_ms, message_ms=MESSAGE_MS, wake_ms=WAKE_MS)
    tcp = LaneCosts(
        push_ms=1.5 * copy_ms, read_ms=1.5 * copy_ms, message_ms=MESSAGE_MS, bulk_ms=3 * copy_ms, wake_ms=WAKE_MS
    )
    return Costs(
        compute_ms=step_ms,
        spread=SPREAD,
        apply_ms=apply_ms,
        add_ms=1.5 * copy_ms,
        copy_ms=copy_ms,
        size_bytes=size_bytes,
        batch=batch,
        lanes={"shm": shm, "tcp": tcp},
        cores=cores,
        notes=["the numbers were given, nothing was measured"],
    )
