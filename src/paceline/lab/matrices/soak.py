"""DOES training go on whatever happens? The plan of a soak, and what its numbers say.

`paceline lab run soak [--minutes 30]`, carried out by lab/measuring/soaking. Pure: no process, no file, no clock.
Quiet times lie before, between and after the times with faults, so that both are measured in the same run, side by
side.
"""

import random
from collections.abc import Sequence

import msgspec

from paceline.lab.scripts.curves import spread
from paceline.lab.tables import MAX_NOISE

NUM_WORKERS = 3
LEASE_S = 1.0
STOP_S = 3.0  # three leases: the worker is out, and must come back
CUT_S = 2.0
WARM_S = 20.0  # from the first process until what is measured begins
LONG_MINUTES = 10.0  # from here on faults are rarer and quiet times longer
BRIEF_MINUTES = 2.0  # below, quiet times are shorter: enough to see what happens, not to measure throughput or loss
BAR = 0.95  # of the fault-free throughput must be kept
MOST = {"processes": 0, "threads": 2, "descriptors": 4, "memory": 32 << 20}  # more at the end than at the start

# All others go on through these, whichever task is hit; a ps that only stands still would hold everybody, anywhere.
CYCLE = ("kill worker", "kill ps", "stop worker", "cut worker", "flip worker", "nan worker", "kill chief", "kill ps")


class Phase(msgspec.Struct, frozen=True):
    """A time of the run, in seconds after it began."""

    start_s: float
    stop_s: float
    has_faults: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What happens when."""

    minutes: float  # with faults; the quiet times come on top
    period_s: float
    phases: tuple[Phase, ...]
    faults: tuple[str, ...]  # as --chaos takes them
    references: int  # fault-free runs, for the spread of the final loss
    reference_s: float

    @property
    def total_s(self) -> float:
        return self.phases[-1].stop_s


def plan(minutes: float, seed: int = 0) -> Plan:
    """Blocks of faults between quiet times; a block ends one period after its last fault, so that what a fault costs
    lies within it."""
    is_long = minutes >= LONG_MINUTES
    quiet_s = 60.0 if is_long else 20.0 if minutes >= BRIEF_MINUTES else 10.0
    period_s, blocks = (29.0, 4) if is_long else (10.0, 2)
    count = max(blocks, round(60 * minutes / period_s))
    shares = [count // blocks + (block < count % blocks) for block in range(blocks)]
    phases, faults, at_s = [], [], WARM_S
    chance = random.Random(seed)
    kinds = _kinds(count, chance)
    for share in shares:
        phases.append(Phase(at_s, at_s + quiet_s, False))
        at_s += quiet_s
        faults += [_fault(kinds.pop(0), at_s + number * period_s, chance) for number in range(share)]
        phases.append(Phase(at_s, at_s + share * period_s, True))
        at_s += share * period_s
    phases.append(Phase(at_s, at_s + quiet_s, False))
    return Plan(
        minutes=minutes,
        period_s=period_s,
        phases=tuple(phases),
        faults=tuple(faults),
        references=1 if minutes < BRIEF_MINUTES else 5,  # nothing is judged by a brief one
        reference_s=WARM_S + min(quiet_s / 2, 20.0),
    )


def _kinds(count: int, chance: random.Random) -> list[str]:
    """The cycle again and again, each time in an order of its own."""
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += chance.sample(CYCLE, len(CYCLE))
    return kinds[:count]


def _fault(kind: str, at_s: float, chance: random.Random) -> str:
    deed, whom = kind.split()
    task = {"ps": "ps:0", "chief": "worker:0"}.get(whom, f"worker:{chance.randrange(NUM_WORKERS)}")
    lasts = {"stop": f":{STOP_S:g}s", "cut": f":{CUT_S:g}s"}.get(deed, "")
    return f"{deed}={task}@{at_s:g}s{lasts}"


class Told(msgspec.Struct, frozen=True):
    """What the chief found at the end."""

    loss: float


class Tick(msgspec.Struct, frozen=True):
    """ps:0 told its version."""

    at_s: float  # after the run began
    version: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """All processes of the run together."""

    at_s: float
    processes: int
    threads: int
    descriptors: int
    memory: int  # bytes that no other process has, of all of them


def updates(ticks: Sequence[Tick], at_s: float) -> float:
    """The version at a moment, between the two ticks around it.

    >>> updates([Tick(1.0, 100), Tick(2.0, 300)], 1.5)
    200.0
    """
    before = [tick for tick in ticks if tick.at_s <= at_s] or [ticks[0]]
    after = [tick for tick in ticks if tick.at_s > at_s]
    low = max(before, key=lambda tick: tick.at_s)
    if not after:
        return float(low.version)
    high = min(after, key=lambda tick: tick.at_s)
    share = (at_s - low.at_s) / (high.at_s - low.at_s) if at_s > low.at_s else 0.0
    return low.version + share * (high.version - low.version)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the throughput faults left."""

    share: float
    quiet: list[float]  # updates a second of each quiet time
    faulty: list[float]


def kept(phases: Sequence[Phase], ticks: Sequence[Tick]) -> Kept:
    """Updates in the times with faults, over those that the quiet times around each promise.

    >>> three = [Phase(0, 10, False), Phase(10, 20, True), Phase(20, 30, False)]
    >>> kept(three, [Tick(0, 0), Tick(10, 1000), Tick(20, 1950), Tick(30, 2950)]).share
    0.95
    """
    rates = [
        (updates(ticks, phase.stop_s) - updates(ticks, phase.start_s)) / (phase.stop_s - phase.start_s)
        for phase in phases
    ]
    made = promised = 0.0
    for at, phase in enumerate(phases):
        if phase.has_faults:
            made += rates[at] * (phase.stop_s - phase.start_s)
            promised += (rates[at - 1] + rates[at + 1]) / 2 * (phase.stop_s - phase.start_s)
    return Kept(
        share=made / promised if promised else 0.0,
        quiet=[rate for rate, phase in zip(rates, phases, strict=True) if not phase.has_faults],
        faulty=[rate for rate, phase in zip(rates, phases, strict=True) if phase.has_faults],
    )


def is_within(loss: float, references: Sequence[float]) -> bool:
    """Whether a loss lies where fault-free runs end, give or take their spread.

    >>> is_within(1.02, [1.0, 1.01]), is_within(1.03, [1.0, 1.01])
    (True, False)
    """
    around = spread(references) or 0.0
    return min(references) - around <= loss <= max(references) + around


def grown(samples: Sequence[Sample], first: Phase, last: Phase) -> dict[str, int]:
    """What the run holds more of in the last quiet time than in the first, beyond what is allowed; by name."""
    found = {}
    for name, most in MOST.items():
        before, after = (
            sorted(getattr(s, name) for s in samples if phase.start_s <= s.at_s <= phase.stop_s)
            for phase in (first, last)
        )
        if before and after:
            more = after[len(after) // 2] - before[len(before) // 2]
            if more > most:
                found[name] = more
    return found


class Soaked(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is told of a soak."""

    plan: Plan
    kept: Kept
    loss: float
    references: list[float]
    fired: dict[str, int]  # by kind and job
    missed: list[str]  # faults that never came
    restarts: int
    lost: list[str]
    verified: str  # the checker's last word
    is_verified: bool
    leaked: list[str]


HOLDS, FAILED = "holds", "failed"
COLUMNS = ("what", "measured", "bar", "verdict")


def lines(done: Soaked) -> list[tuple[str, ...]]:
    """The table."""
    quiet, share = done.kept.quiet, done.kept.share
    mean = sum(quiet) / len(quiet)
    spread_of = (spread(quiet) or 0.0) / mean if mean else 0.0
    fired = ", ".join(f"{kind} {count}x" for kind, count in sorted(done.fired.items()))
    references = f"{min(done.references):.5f} to {max(done.references):.5f}"

    def judged(verdict: str) -> str:
        return "too short to say" if done.plan.minutes < BRIEF_MINUTES else verdict

    return [
        ("faults", f"{sum(done.fired.values())}: {fired}", f"{len(done.plan.faults)}", _ok(not done.missed)),
        ("throughput kept", f"{100 * share:.1f} %", f">= {100 * BAR:g} %", judged(_kept(share, spread_of))),
        ("fault-free updates/s", f"{mean:.0f} (spread {100 * spread_of:.1f} %)", "-", "-"),
        ("final loss", f"{done.loss:.5f}", references, judged(_ok(is_within(done.loss, done.references)))),
        ("ledger", done.verified, "0 violations", _ok(done.is_verified)),
        ("restarts", str(done.restarts), "-", "-"),
        ("lost", ", ".join(done.lost) or "nobody", "nobody", _ok(not done.lost)),
        ("leaked", "; ".join(done.leaked) or "nothing", "nothing", _ok(not done.leaked)),
    ]


def _ok(is_ok: bool) -> str:
    return HOLDS if is_ok else FAILED


def _kept(share: float, noise: float) -> str:
    if noise > MAX_NOISE:
        return f"too noisy to say (quiet times differ by {100 * noise:.0f} %)"
    return _ok(share >= BAR)


def is_ok(done: Soaked) -> bool:
    """Whether nothing failed; what was too noisy to say has not."""
    return all(line[-1] != FAILED for line in lines(done))
