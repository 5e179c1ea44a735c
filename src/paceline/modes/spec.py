"""WHICH mode, with which numbers? One value that flags, config.json and a switch on the wire all say.

Pure. Made by cluster/settings and by `paceline ctl mode`; `modes.make` turns it into a mode.
"""

import math

import msgspec

from paceline.errors import UsageError

NAMES = ("async", "sync", "bounded", "local")
OUTER = ("sync", "async")


class ModeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A mode by name and its numbers; those of other modes stay at their defaults.

    >>> print(ModeSpec(name="sync", replicas_to_aggregate=2, grace_ms=5))
    sync, 2 to aggregate, grace 5 ms
    """

    name: str = "async"
    replicas_to_aggregate: int | None = None  # sync, and local with outer sync
    extra_tokens: int | None = None  # further gradients of one worker in a round; None: as many as K needs
    grace_ms: float = 0.0  # how long to wait for more after the K-th
    grace_share: float = 0.0  # the same, as a share of the time a round takes
    staleness: int = 3  # bounded: how many steps a worker may be ahead
    local_steps: int = 10  # local: steps a worker makes between two exchanges
    outer: str = "sync"  # local: how deltas become updates
    staleness_scale: bool = False  # a step's lr is divided by 1 + its staleness

    def __str__(self) -> str:
        said = [self.name]
        if self.name == "bounded":
            said.append(f"staleness {self.staleness}")
        if self.name == "local":
            said.append(f"{self.local_steps} local steps, outer {self.outer}")
        if self.replicas_to_aggregate is not None:
            said.append(f"{self.replicas_to_aggregate} to aggregate")
        if self.extra_tokens:
            said.append(f"{self.extra_tokens} extra tokens")
        if self.grace_ms or self.grace_share:
            grace = f"{self.grace_ms:g} ms" if self.grace_ms else f"{100 * self.grace_share:g} % of a round"
            said.append(f"grace {grace}")
        if self.staleness_scale:
            said.append("lr scaled by staleness")
        return ", ".join(said)

    @property
    def has_rounds(self) -> bool:
        """Whether an update is made of several workers' gradients."""
        return self.name == "sync" or (self.name == "local" and self.outer == "sync")

    @property
    def waits_for_others(self) -> bool:
        """Whether an answer may have to wait for another worker's push."""
        return self.has_rounds or self.name == "bounded"

    @property
    def tokens(self) -> int:
        """How many gradients one worker may put into one round, where K is reached by some."""
        if self.extra_tokens is not None:
            return 1 + self.extra_tokens
        return self.replicas_to_aggregate or 1

    def tokens_of(self, num_workers: int) -> int:
        """The same in a cluster of so many workers: one each, unless K wants more than there are."""
        needs_more = self.replicas_to_aggregate is not None and self.replicas_to_aggregate > num_workers
        return self.tokens if self.extra_tokens is not None or needs_more else 1


def outer_momentum(given: float | None, outer: str) -> float:
    """The momentum of mode local's ps: what was given, else 0.9; none where deltas are stale, for it adds them up."""
    if given is not None:
        return given
    return 0.0 if outer == "async" else 0.9


def parse_grace(text: str) -> tuple[float, float]:
    """(milliseconds, share of a round) of --grace-ms: a number, or a percentage of the measured round time.

    >>> parse_grace("5"), parse_grace("20%")
    ((5.0, 0.0), (0.0, 0.2))
    """
    is_share = text.endswith("%")
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"--grace-ms is {text!r}; use milliseconds (5) or a share of the round's time (20%).")
    return (0.0, value / 100) if is_share else (value, 0.0)


def check(spec: ModeSpec, num_workers: int) -> None:
    """Raise UsageError unless this mode makes sense with so many workers."""
    if spec.name not in NAMES:
        raise UsageError(f"Unknown mode {spec.name!r}; use one of {', '.join(NAMES)}.")
    if spec.staleness < 0:
        raise UsageError(f"--staleness is {spec.staleness}; a worker may be 0 or more steps ahead.")
    if spec.local_steps < 1:
        raise UsageError(f"--local-steps is {spec.local_steps}; a worker makes at least 1 step before it pushes.")
    if spec.outer not in OUTER:
        raise UsageError(f"--outer is {spec.outer!r}; use sync or async.")
    _check_rounds(spec, num_workers)


def _check_rounds(spec: ModeSpec, num_workers: int) -> None:
    count, extra = spec.replicas_to_aggregate, spec.extra_tokens
    for flag, value in (
        ("replicas-to-aggregate", count),
        ("extra-tokens", extra),
        ("grace-ms", spec.grace_ms or spec.grace_share or None),
    ):
        if value is not None and not spec.has_rounds:
            given = "local with --outer async" if spec.name == "local" else spec.name
            raise UsageError(f"--{flag} only makes sense with --mode sync (or local with --outer sync), not {given}.")
    if spec.staleness_scale and spec.has_rounds:
        raise UsageError(
            f"--staleness-scale is for async, bounded and local with --outer async: in {spec.name} none is stale."
        )
    if (spec.grace_ms or spec.grace_share or extra) and count is None:
        raise UsageError("--grace-ms and --extra-tokens need --replicas-to-aggregate K: without K a round takes all.")
    if extra is not None and extra < 0:
        raise UsageError(f"--extra-tokens is {extra}; it must be 0 or more.")
    if count is not None and count < 1:
        raise UsageError(f"--replicas-to-aggregate is {count}; a round needs at least 1 gradient.")
    most = num_workers * spec.tokens_of(num_workers)
    if count is not None and count > most:
        raise UsageError(
            f"--replicas-to-aggregate is {count}, but {num_workers} workers with {spec.tokens - 1} extra tokens "
            f"give at most {most} gradients a round: raise --extra-tokens or leave it out."
        )
