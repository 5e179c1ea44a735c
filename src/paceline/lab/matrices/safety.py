"""WHAT does safety cost? Authentication, checks, ledger and TLS, part by part in a loop, and on and off side by side.

A matrix of the lab: `paceline lab run safety`. Pure; the bar is the project's own, for two cores. What cannot be
switched off in the product (MACs, checks) is taken out by lab/scripts/bare, which only the lab can do.
"""

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import Cell, Finished, Table, number
from paceline.lab.scenario import Amounts, Kind, Matrix, Row, Scenario

SCRIPT = "paceline.lab.scripts.safety_script"
BAR_US = 12.0  # authentication, checks and ledger together, a step at 318 kB on shm
PUSH = "push"
SHM = Settings(run_id="", lane="shm", ledger=True, save_every="none")
TCP = msgspec.structs.replace(SHM, lane="tcp")
EVERYTHING = ("mac", "checks")

SINGLE = "single process"
ON = "push, shm, all on"
AGAIN = "push, shm, all on again"
OFF = "push, shm, all off"


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one call of each part."""

    payload_bytes: int
    frame_us: float  # a MAC over frame and counter, made by one side and checked by the other
    finite_us: float  # one sum over the gradient
    hash_us: float  # xxh3 of the payload
    record_us: float  # one line of a ledger

    def of(self, lane: str) -> dict[str, float]:
        """What a step calls: a push and its answer (on shm the answer's frame only wakes a worker that sleeps); the
        gradient is looked at once; on tcp both payloads are hashed by both sides; a worker writes three records, the
        ps one, and one a round.

        >>> Parts(payload_bytes=4, frame_us=2.0, finite_us=5.0, hash_us=5.0, record_us=0.2).of("shm")
        {'authentication': 4.0, 'checks': 5.0, 'ledger': 1.0}
        """
        hashes = 0 if lane == "shm" else 4
        return {
            "authentication": 2 * self.frame_us,
            "checks": self.finite_us + hashes * self.hash_us,
            "ledger": 5 * self.record_us,
        }


def matrix(is_quick: bool = False) -> Matrix:
    """Two lines of parts, and rows that have something on beside the same with it off."""
    return Matrix(
        name="safety",
        tables=(_parts(),),
        title="Something on (step) beside it off; push: 318 kB, SGD, gradients made once, 1 ps + 1 worker, async",
        scenarios=_scenarios(),
        rows=_rows(),
        amounts=Amounts(reps=3, steps=100) if is_quick else Amounts(steps=300),
    )


def _parts() -> Table:
    cells = tuple(
        Cell(title=f"parts, {lane}", labels=(lane,), program=(SCRIPT,), num_workers=1, settings=settings, limit_s=120.0)
        for lane, settings in (("shm", SHM), ("tcp", TCP))
    )
    note = (
        "Microseconds a step at 318 kB, lower quartiles of the functions themselves in a loop. authentication: the "
        "MACs of two frames, made and checked; checks: one sum over the gradient, on tcp four hashes (xxh3); "
        f"ledger: five records. The bar is {BAR_US:g} µs on shm."
    )
    columns = ("lane", "authentication µs", "checks µs", "ledger µs", "together µs", "bar")
    return Table(
        title="What safety costs a step, part by part",
        columns=columns,
        cells=cells,
        line=parts_line,
        note=note,
        usual_s=15.0,
    )


def parts_line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The parts of one lane, and whether they are within the bar."""
    lane = cell.labels[0]
    parts = msgspec.json.decode(done.told, type=Parts).of(lane)
    together = sum(parts.values())
    verdict = ""
    if lane == "shm":
        verdict = "within the bar" if together <= BAR_US else "OVER THE BAR"
    bar = number(BAR_US, 0) if lane == "shm" else "-"
    return (*(number(us, 2) for us in parts.values()), number(together, 2), bar, verdict)


def _push(name: str, settings: Settings, without: tuple[str, ...] = ()) -> Scenario:
    return Scenario(
        name=name, kind=Kind.CLUSTER, num_ps=1, num_workers=1, settings=settings, what=PUSH, without=without
    )


def _trains(name: str, settings: Settings, without: tuple[str, ...] = ()) -> Scenario:
    return Scenario(name=name, kind=Kind.CLUSTER, num_ps=1, num_workers=1, settings=settings, without=without)


def _off(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, ledger=False)


def _scenarios() -> tuple[Scenario, ...]:
    return (
        Scenario(name=SINGLE, kind=Kind.SINGLE),
        _push(ON, SHM),
        _push(AGAIN, SHM),
        _push(OFF, _off(SHM), EVERYTHING),
        _push("push, shm, no authentication", SHM, ("mac",)),
        _push("push, shm, no checks", SHM, ("checks",)),
        _push("push, shm, no ledger", _off(SHM)),
        _push("push, tcp, all on", TCP),
        _push("push, tcp, all off", _off(TCP), EVERYTHING),
        _push("push, tcp, TLS", msgspec.structs.replace(TCP, tls=True)),
        _trains("training, shm, all on", SHM),
        _trains("training, shm, all off", _off(SHM), EVERYTHING),
    )


def _rows() -> tuple[Row, ...]:
    return (
        Row(title="A/A: push, shm, all on", scenario=AGAIN, beside=ON, is_noise=True),
        Row(title="shm: authentication", scenario=ON, beside="push, shm, no authentication"),
        Row(title="shm: checks", scenario=ON, beside="push, shm, no checks"),
        Row(title="shm: ledger", scenario=ON, beside="push, shm, no ledger"),
        Row(title="shm: all three", scenario=ON, beside=OFF),
        Row(title="tcp: all three", scenario="push, tcp, all on", beside="push, tcp, all off"),
        Row(title="tcp: TLS", scenario="push, tcp, TLS", beside="push, tcp, all on"),
        Row(title="overhead, 1 ps + 1 worker, shm, all on", scenario="training, shm, all on", beside=SINGLE),
        Row(title="overhead, 1 ps + 1 worker, shm, all off", scenario="training, shm, all off", beside=SINGLE),
    )
